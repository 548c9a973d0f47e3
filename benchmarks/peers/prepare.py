"""Where the engines are installed, and the files that they read: made when first asked for, kept.

Everything derives from one checkpoint per model, which checkpoint.py writes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plan import FAMILIES, FILE, FORMATS, OURS

HERE = Path(__file__).parent
MODULES = {
    "llama.cpp": "llama_cpp",
    "OpenVINO": "openvino",
    "CTranslate2": "ctranslate2",
    "transformers": "transformers",
    "onnxruntime-genai": "onnxruntime_genai",
}
DRIVERS = {
    OURS: "rooflax_driver.py",
    "llama.cpp": "llama_cpp_driver.py",
    "OpenVINO": "openvino_driver.py",
    "CTranslate2": "ctranslate2_driver.py",
    "transformers": "transformers_driver.py",
    "onnxruntime-genai": "onnxruntime_genai_driver.py",
}
PRE_TOKENIZER = "gpt-2"
NOT_BUILT = ("gpt2",)
"""Models that onnxruntime-genai's builder does not know."""


class Unavailable(Exception):
    """A file cannot be made here; why, in a sentence."""


@dataclass(frozen=True)
class Installation:
    """What install.sh made, or what stands in for it.

    Attributes:
        python: runs the peers.
        export_python: has optimum-intel, for OpenVINO's files.
        llama_cpp: llama.cpp's source tree, for its converter.
        files: folder for checkpoints and conversions.
    """

    python: Path
    export_python: Path
    llama_cpp: Path
    files: Path

    def has(self, engine: str) -> bool:
        """Whether an engine can be imported in the peers' Python."""
        if engine == OURS:
            return True
        if not self.python.exists():
            return False
        code = (
            "import importlib.util, sys; "
            f"sys.exit(importlib.util.find_spec({MODULES[engine]!r}) is None)"
        )
        return subprocess.run([self.python, "-c", code], check=False).returncode == 0

    def command(self, engine: str, model: str, width: str, threads: int) -> list[str]:
        """Starts a driver; makes its files first.

        Raises:
            Unavailable: they cannot be made.
        """
        python = sys.executable if engine == OURS else str(self.python)
        form = FORMATS[engine][width]
        path = MAKERS[engine](self, model, form)
        driver = str(HERE / "drivers" / DRIVERS[engine])
        return [python, driver, str(path), form, "--threads", str(threads)]


def checkpoint(at: Installation, model: str, form: str = "") -> Path:
    """The one that all of them convert, or the published file that is read as it is."""
    if form == FILE:
        return published(model)
    script = HERE / "checkpoint.py"
    return made(at.files / model, lambda part: [[sys.executable, script, model, part]])


def published(model: str) -> Path:
    """A file of plan.PUBLISHED, as `make real` fetches it.

    Raises:
        Unavailable: it is not there.
    """
    sys.path.append(str(HERE.parents[1]))
    from tests.real import fetch

    path = {"smollm2-135m": fetch.SMOLLM2, "gemma-3-270m-file": fetch.GEMMA}[model].path
    if not path.exists():
        raise Unavailable(f"{path} is not there; `python -m tests.real.fetch` fetches it")
    return path


def gguf(at: Installation, model: str, form: str) -> Path:
    if form == FILE:
        return published(model)
    source, script = checkpoint(at, model), HERE / "gguf_files.py"
    if model in FAMILIES:
        command = [sys.executable, "-m", "rooflax", "quantize", source, "--gguf", form.upper()]
        file = at.files / f"{model}.{form}.gguf"
        return made(file, lambda part: [[*command, "--force", "-o", part]], suffix=".part.gguf")
    target = at.files / f"{model}-gguf"
    if not (target.exists() or (at.llama_cpp / "convert_hf_to_gguf.py").exists()):
        raise Unavailable(f"no convert_hf_to_gguf.py in {at.llama_cpp}")
    kinds = [kind for kind in FORMATS["llama.cpp"].values() if kind != FILE]
    how = ["--pre", PRE_TOKENIZER, "--pure"]
    made(
        target,
        lambda part: [[at.python, script, at.llama_cpp, source, part / "weights", *kinds, *how]],
    )
    return target / f"weights.{form}.gguf"


def openvino(at: Installation, model: str, form: str) -> Path:
    source, script = checkpoint(at, model), HERE / "export_openvino.py"
    target = at.files / f"{model}-openvino-{form}"
    if not (target.exists() or at.export_python.exists()):
        raise Unavailable("no Python with optimum-intel, which writes OpenVINO's files")
    return made(target, lambda part: [[at.export_python, script, source, part, form]])


def ctranslate2(at: Installation, model: str, form: str) -> Path:
    source = checkpoint(at, model)
    converter = at.python.parent / "ct2-transformers-converter"
    return made(
        at.files / f"{model}-ctranslate2",
        lambda part: [[converter, "--model", source, "--output_dir", part]],
    )


def onnxruntime_genai(at: Installation, model: str, form: str) -> Path:
    if model in NOT_BUILT:
        raise Unavailable(f"onnxruntime-genai's model builder does not know {model}")
    source, builder = checkpoint(at, model), [at.python, "-m", "onnxruntime_genai.models.builder"]
    last_logits = ["--extra_options", "prune_lm_head=true"]
    how = ["-e", "cpu", "-c", at.files / "onnxruntime-cache", *last_logits]
    return made(
        at.files / f"{model}-onnxruntime-{form}",
        lambda part: [[*builder, "-i", source, "-o", part, "-p", form, *how]],
    )


MAKERS: dict[str, Callable[[Installation, str, str], Path]] = {
    OURS: checkpoint,
    "llama.cpp": gguf,
    "OpenVINO": openvino,
    "CTranslate2": ctranslate2,
    "transformers": checkpoint,
    "onnxruntime-genai": onnxruntime_genai,
}


def made(
    target: Path, commands: Callable[[Path], list[Sequence[object]]], *, suffix: str = ".part"
) -> Path:
    """A folder or file that is whole or not there; the commands write it under another name."""
    if target.exists():
        return target
    part = target.with_name(f"{target.name}{suffix}")
    shutil.rmtree(part, ignore_errors=True)
    for command in commands(part):
        run(command, target.parent)
    part.rename(target)
    return target


def run(command: Sequence[object], files: Path) -> None:
    """Runs a converter.

    Raises:
        Unavailable: it failed; what it said is in the log.
    """
    files.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    sys.stderr.write(f"making files: {' '.join(Path(word).name for word in words[:6])}\n")
    log = files / "convert.log"
    with log.open("ab") as sink:
        done = subprocess.run(words, stdout=sink, stderr=sink, check=False)
    if done.returncode:
        what = " ".join(Path(word).name for word in words[:3])
        raise Unavailable(f"{what} failed; see {log.name}")
