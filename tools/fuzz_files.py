"""Changes files that rooflax reads, and reads them: each reader may read a file or reject it in
one sentence, within limits of time and memory. Faults go to tests/data/fuzz, with which each run
begins.

    python tools/fuzz_files.py [--seconds 600] [--only KIND] [--seed N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests/data/fuzz"
MOST_S = 20.0
"""Of one file."""
MOST_BYTES = 1 << 29
"""Of memory that a reader takes beyond what its process had."""
SPACE_BYTES = 1 << 34
"""Of a process's addresses: JAX reserves more than it uses."""
HOSTILE = (
    -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**30, -(10**30), 1e308, 1e-308, 0.5, True, None,
    "", "x" * 3000, [], [0] * 500, {}, {"a": {}}, "../x", "\u0000", "(a+)+b", [[[[[]]]]], 1e400,
)  # fmt: skip
KIND_FILES = {
    "safetensors": "model.safetensors",
    "gguf": "model.gguf",
    "config": "config.json",
    "generation": "generation_config.json",
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "template": "template.jinja",
    "adapter": "adapter_config.json",
    "training": "state.json",
    "corpus": "a.bin.json",
    "kernels": "table.json",
}
"""By kind, the name of the file that its reader opens."""


def seeds() -> dict[str, list[bytes]]:
    """Sound files of each kind."""
    data, model = ROOT / "tests/data", ROOT / "src/rooflax/assets/rooflax-chat-5m"
    texts = {
        kind: [(model / name).read_bytes()]
        for kind, name in KIND_FILES.items()
        if (model / name).is_file() and kind != "safetensors"
    }
    published = json.loads((data / "published_configs/configs.json").read_text())
    texts["config"] += [json.dumps(row["config"]).encode() for row in published]
    adapters = [json.loads(p.read_text()) for p in sorted((data / "adapters").glob("*.json"))]
    state = {"step": 5, "config": {"steps": 9}, "loss": 1.5, "log_position": 70, "crc32": {}}
    corpus = {"dtype": "uint16", "num_tokens": 3, "num_trained": 3, "num_documents": 1,
              "num_bytes": 5, "is_whole": False}  # fmt: skip
    return texts | {
        "safetensors": [_small_safetensors()],
        "gguf": [p.read_bytes() for p in sorted((data / "gguf").glob("*.gguf"))],
        "template": [p.read_bytes() for p in sorted((data / "chat_templates").glob("*"))],
        "adapter": [json.dumps(a["config"]).encode() for a in adapters if "config" in a],
        "training": [json.dumps(state).encode()],
        "corpus": [json.dumps(corpus).encode()],
        "kernels": [b'{"machine": {}, "formats": {}}'],
    }


def _small_safetensors() -> bytes:
    sizes = {"a": ("F32", (2, 3), 24), "b": ("BF16", (5,), 10), "c": ("F8_E4M3", (3,), 3)}
    header, at = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, (dtype, shape, nbytes) in sizes.items():
        offsets = [at, at + nbytes]
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": offsets}, at + nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(at))


def changed(rng: random.Random, content: bytes, is_json: bool) -> bytes:
    """A file with a few changes."""
    if is_json and rng.random() < 0.7:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            for _ in range(rng.randint(1, 3)):
                _change_value(rng, document)
            return json.dumps(document).encode("utf-8", "replace")
    data = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        # Headers matter most.
        at = rng.randrange(min(len(data), rng.choice((64, 2048, len(data)))))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                size = rng.choice((4, 8))
                value = rng.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
                data[at : at + size] = (value % 256**size).to_bytes(size, "little")
            case 3:
                end = len(data) if rng.random() < 0.3 else at + rng.randint(1, 40)
                del data[at:end]
            case 4:
                begin = rng.randrange(len(data))
                data[at:at] = data[begin : begin + rng.randint(1, 200)]
            case 5:
                data[at:at] = rng.choice((b"[" * 5000, b"{%", b"}}", b'"', b"\xff", b"9" * 400))
    return bytes(data)


def _change_value(rng: random.Random, document: Any) -> None:
    """Replaces, removes or adds one value, at some depth."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(document[key], dict | list) and document[key] and rng.random() < 0.6:
            document = document[key]
            continue
        if rng.random() < 0.15:
            del document[key]
        elif isinstance(document, dict) and rng.random() < 0.1:
            document[rng.choice(("auto_map", "x" * 50, ""))] = deepcopy(rng.choice(HOSTILE))
        else:
            document[key] = deepcopy(rng.choice(HOSTILE))
        return


# In the process of a reader


def readers(folder: Path) -> dict[str, Callable[[Path], Any]]:
    """What opens a file of each kind; the folder has what lies beside it."""
    from rooflax.loading.adapter_config import read_adapter_config
    from rooflax.loading.chat_template import encode_chat
    from rooflax.loading.checkpoint import Checkpoint
    from rooflax.loading.generation_config import read_generation_defaults
    from rooflax.loading.gguf import GGUFFile
    from rooflax.loading.model_info import model_info
    from rooflax.loading.tokenizer import Tokenizer
    from rooflax.ops.variants import read_table
    from rooflax.train.checkpoint import read_about
    from rooflax.train.data import open_corpus

    def checkpoint(path: Path) -> None:
        opened = Checkpoint(path.parent)
        for name in opened.names():
            opened.read(name)

    def gguf(path: Path) -> None:
        model_info(path)
        opened = GGUFFile(path)
        for name in opened.names():
            opened.read(name)
        Tokenizer(path).encode("A text, \u00fc\u4f60.")

    def tokenizer(path: Path) -> None:
        opened = Tokenizer(path.parent)
        opened.decode(opened.encode("A text, \u00fc\u4f60 <|im_end|>."))

    sound = Tokenizer(folder)

    def template(path: Path) -> None:
        sound.chat_templates = {"default": path.read_bytes().decode("utf-8", "replace")}
        encode_chat(sound, [{"role": "user", "content": "Hi"}])

    return {
        "safetensors": checkpoint,
        "gguf": gguf,
        "config": lambda path: model_info(path.parent),
        "generation": lambda path: read_generation_defaults(path.parent),
        "tokenizer": tokenizer,
        "tokenizer_config": tokenizer,
        "template": template,
        "adapter": lambda path: read_adapter_config(path.parent, "llama"),
        "training": lambda path: read_about(path.parent),
        "corpus": lambda path: open_corpus(path.with_suffix("")),
        "kernels": read_table,
    }


def read_all(kind: str) -> None:
    """Reads the files that stdin names, a line each; answers a line of JSON: the fault, or null."""
    from rooflax.errors import RooflaxError

    folder = ROOT / "src/rooflax/assets/rooflax-chat-5m"
    read = readers(folder)[kind]
    resource.setrlimit(resource.RLIMIT_AS, (SPACE_BYTES, SPACE_BYTES))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in sys.stdin:
        fault = None
        try:
            read(Path(line.strip()))
        except RooflaxError as error:
            text = str(error)
            if "\n" in text.strip() or len(text) > 2000:
                fault = f"a rejection of {len(text)} characters: {text[:200]!r}"
        except BaseException as error:
            fault = f"{type(error).__name__}: {str(error)[:200]}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
        most += grown
        if fault is None and grown * 1024 > MOST_BYTES:
            fault = f"it took {grown >> 10} MiB"
        print(json.dumps(fault), flush=True)


# In the process that changes files


class Reader:
    """A process that reads files of one kind, and is replaced when it ends."""

    def __init__(self, kind: str):
        self.kind = kind
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--reads", self.kind]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env
        )

    def fault(self, path: Path, most_s: float = MOST_S) -> str | None:
        """What is wrong with how the file was read."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{path}\n")
        stdin.flush()
        line = _line(stdout, most_s)
        if line:
            return json.loads(line)
        self._process.kill()
        code = self._process.wait()
        self.close()
        self._process = self._started()
        return f"it took more than {most_s:g} s" if line is None else f"the process ended: {code}"

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


def _line(stdout: IO[str], most_s: float) -> str | None:
    ready, _, _ = select.select([stdout], [], [], most_s)
    return stdout.readline() if ready else None


def main() -> int:
    """Returns 1 where there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", choices=KIND_FILES)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--reads", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.reads:
        read_all(args.reads)
        return 0
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    rng, sound = random.Random(seed), seeds()
    kinds = [args.only] if args.only else list(KIND_FILES)
    faults = 0
    for kind in kinds:
        begun = time.monotonic()
        until = begun + args.seconds / len(kinds)
        kept = sorted(FAULTS.glob(f"{kind}-*"))
        pool = [path.read_bytes() for path in kept] + sound[kind]
        reader, count = Reader(kind), 0
        with tempfile.TemporaryDirectory() as folder:
            path = _beside(kind, Path(folder))
            while count < len(kept) or time.monotonic() < until:
                is_kept = count < len(kept)
                content = (
                    kept[count].read_bytes()
                    if is_kept
                    else changed(rng, rng.choice(pool), KIND_FILES[kind].endswith(".json"))
                )
                path.unlink(missing_ok=True)  # else what is mapped of the last one would change
                path.write_bytes(content)
                count += 1
                fault = reader.fault(path, MOST_S + 60 * (count == 1))  # and its imports
                if fault is not None:
                    faults += 1
                    digest = hashlib.sha256(content).hexdigest()[:12]
                    FAULTS.mkdir(exist_ok=True)
                    (FAULTS / f"{kind}-{digest}").write_bytes(content)
                    print(f"{kind}-{digest}: {fault}", flush=True)
        reader.close()
        print(f"{kind}: {count} files in {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{faults} faults")
    return 1 if faults else 0


def _beside(kind: str, folder: Path) -> Path:
    """The path of the file, with sound ones of the same model beside it."""
    model = ROOT / "src/rooflax/assets/rooflax-chat-5m"
    if kind in ("config", "tokenizer", "tokenizer_config", "generation"):
        shutil.copytree(model, folder, dirs_exist_ok=True, copy_function=os.symlink)
    if kind == "corpus":
        (folder / "a.bin").write_bytes(bytes(6))
        (folder / "a.bin.flags").write_bytes(bytes(3))
    return folder / KIND_FILES[kind]


if __name__ == "__main__":
    sys.exit(main())
