"""Builds the wheel of a processor, and tries it as one who has no compiler would.

    python tools/wheel.py build [--arch aarch64] [--out dist]
    python tools/wheel.py check dist/rooflax-*.whl

The kernels are compiled by GCC as ever. What the library takes of glibc is bound to the oldest one
that jaxlib runs on, by the stubs that the package ziglang makes of it; libstdc++ is linked inside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable
from pathlib import Path

from elftools.elf.elffile import ELFFile

GLIBC = "2.27"
PORT = 18431
HERE = Path(__file__).resolve().parents[1]
NEEDED = {
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
"""What every system with that glibc has."""
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}


def stubs(arch: str) -> Path:
    """A folder of shared libraries that have an old glibc's symbols and no code.

    zig makes them in its cache when it links anything.
    """
    cache = HERE / "build" / f"zig-{arch}"
    cache.mkdir(parents=True, exist_ok=True)
    source = cache / "empty.c"
    source.write_text("int rooflax_nothing;\n")
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    target = ("-target", f"{arch}-linux-gnu.{GLIBC}", "-shared", "-fPIC", "-lm", "-lpthread")
    _python("ziglang", "cc", *target, str(source), "-o", str(cache / "empty.so"), **caches)
    (found,) = {path.parent for path in cache.glob("o/*/libc.so.6")}
    return found


def _python(module: str, *arguments: str, **environment: str) -> None:
    command = (sys.executable, "-m", module, *arguments)
    subprocess.run(command, check=True, env={**os.environ, **environment})


def build(arch: str, out: Path) -> Path:
    """The wheel of one processor, once its library is found to need no more than its tag says."""
    defines = {
        "ROOFLAX_GLIBC_STUBS": stubs(arch),
        "CMAKE_CXX_COMPILER": COMPILERS[arch],
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
    }
    settings = [f"--config-setting=cmake.define.{name}={value}" for name, value in defines.items()]
    settings.append(f"--config-setting=build-dir=build/wheel-{arch}")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    for old in out.glob(f"*_{arch}.whl"):
        old.unlink()
    where = ("--outdir", str(out), str(HERE))
    _python("build", "--no-isolation", "--wheel", *settings, *where, _PYTHON_HOST_PLATFORM=tag)
    _check_needs(HERE / "build" / f"wheel-{arch}" / "librooflax_native.so")
    (made,) = out.glob(f"*{tag}.whl")
    return made


def _check_needs(library: Path) -> None:
    with library.open("rb") as file:
        found = ELFFile(file)
        dynamic = found.get_section_by_name(".dynamic")
        libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        versions = found.get_section_by_name(".gnu.version_r").iter_versions()
        names = {one.name for _, needed in versions for one in needed}
    glibc = [name.removeprefix("GLIBC_") for name in names if name.startswith("GLIBC_")]
    newest = max(tuple(map(int, version.split("."))) for version in glibc)
    if newest > tuple(map(int, GLIBC.split("."))) or not libraries <= NEEDED:
        raise SystemExit(f"{library} needs {sorted(names)} of {sorted(libraries)}.")


def check(wheel: Path) -> dict[str, object]:
    """What a new environment without a compiler does with a wheel, and how long that takes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        found: dict[str, object] = {"wheel": wheel.name, "wheel_mb": round(_mb(wheel), 1)}
        kept = ("PIP_", "HTTP", "OPENBLAS")
        bare = {key: value for key, value in os.environ.items() if key.upper().startswith(kept)}
        bare |= {"PATH": str(folder / "env" / "bin"), "HOME": name}

        def say(*command: str, given: str = "") -> str:
            return subprocess.run(
                command, env=bare, cwd=name, input=given, check=True, capture_output=True, text=True
            ).stdout

        python = str(folder / "env" / "bin" / "python")
        rooflax = str(folder / "env" / "bin" / "rooflax")
        began = time.monotonic()
        say(python, "-m", "pip", "install", "-q", f"{wheel.resolve()}[serve,chat]")
        found["install_s"] = round(time.monotonic() - began, 1)
        package = next((folder / "env" / "lib").glob("python*/site-packages"))
        found["rooflax_mb"] = round(_mb(package / "rooflax"), 1)
        found["environment_mb"] = round(_mb(package))
        for what in ("rooflax", "jax"):
            found[f"import_{what}_s"] = _seconds(lambda w=what: say(python, "-c", f"import {w}"))
        doctor = json.loads(say(rooflax, "doctor", "--json"))
        found["kernels"] = doctor["kernels"]["linear"]["native"]
        prompt = ("generate", "-p", "def add(a, b):", "-n", "16", "--temperature", "0", "--quiet")
        for when in ("first", "second"):
            began = time.monotonic()
            found["text"] = say(rooflax, *prompt)
            found[f"generate_{when}_s"] = round(time.monotonic() - began, 1)
        began = time.monotonic()
        found["chat"] = say(rooflax, "chat", "--quiet", given="What does len do?\n")
        found["chat_s"] = round(time.monotonic() - began, 1)
        found |= _served([rooflax, "serve", "--port", str(PORT), "--quiet"], bare, name)
    return found


def _served(command: list[str], env: dict[str, str], cwd: str) -> dict[str, object]:
    url = f"http://127.0.0.1:{PORT}"
    began = time.monotonic()
    server = subprocess.Popen(command, env=env, cwd=cwd)
    try:
        while not _answers(f"{url}/ready"):
            if server.poll() is not None or time.monotonic() - began > 300:
                raise SystemExit("The server did not become ready.")
            time.sleep(0.1)
        ready = time.monotonic() - began
        body = {"messages": [{"role": "user", "content": "What does len do?"}], "max_tokens": 16}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body | {"temperature": 0}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        ended = server.wait()
    return {"serve_ready_s": round(ready, 1), "served": text, "serve_exit": ended}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _seconds(call: Callable[[], object]) -> float:
    call()
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 2)


def _mb(path: Path) -> float:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(one.stat().st_size for one in files if one.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    builder = verbs.add_parser("build")
    builder.add_argument("--arch", choices=COMPILERS, default="x86_64")
    builder.add_argument("--out", type=Path, default=HERE / "dist")
    verbs.add_parser("check").add_argument("wheel", type=Path)
    args = parser.parse_args()
    found = build(args.arch, args.out) if args.verb == "build" else check(args.wheel)
    sys.stdout.write(f"{json.dumps(found, indent=2, default=str)}\n")


if __name__ == "__main__":
    main()
