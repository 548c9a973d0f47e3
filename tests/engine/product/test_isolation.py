"""Nothing is imported from the current folder, a model's or an output's, by any process of ours.

Modules of Python's and of others lie in these folders as traps, which write down that they ran.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooflax import processes
from rooflax.cli.main import VERBS
from rooflax.loading.model_info import embedded_folder, model_info
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from tests import encoder_cases, goldens
from tests.engine.test_embedding import add_modules
from tests.pooling_cases import NORMALIZE, pooling
from tests.support.loading.adapters import write_adapter
from tests.support.product.snippets import ROOT

pytestmark = pytest.mark.oldest_jax

INSTALLED = [str(Path(sys.executable).parent / "rooflax")]
BY_MODULE = [sys.executable, "-m", "rooflax"]
MODULES = (
    "argparse", "email", "html", "http", "json", "logging", "pathlib", "shlex", "sitecustomize",
    "subprocess", "typing", "usercustomize", "xml", "gguf", "llguidance", "matplotlib", "optax",
    "msgspec", "re2", "tokenizers", "tqdm", "uvicorn",
)  # fmt: skip
PACKAGES = (
    "huggingface_hub", "jax", "jaxlib", "jax_plugins", "jinja2", "numpy", "prompt_toolkit",
    "starlette", "transformers",
)  # fmt: skip
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def set_traps(folder: Path, sprung: Path) -> None:
    """Modules in `folder` that write a line into the file `sprung`."""
    folder.mkdir(exist_ok=True)
    code = f"import sys\nopen({str(sprung)!r}, 'a').write(f'{{__file__}} {{sys.argv}}\\n')\n"
    for name in MODULES:
        (folder / f"{name}.py").write_text(code)
    for name in PACKAGES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
        (folder / name / "trap.py").write_text(code)
    (folder / "matplotlibrc").write_text("text.usetex: True\n")  # runs latex


def assert_none_sprung(sprung: Path) -> None:
    lines = sprung.read_text() if sprung.exists() else ""
    sprung.unlink(missing_ok=True)
    assert not lines


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders with traps: the current one, models' of each kind, and an output's."""
    root = tmp_path_factory.mktemp("traps")
    found = SimpleNamespace(
        sprung=root / "sprung", here=root / "here", out=root / "out",
        model=root / "model", embedding=root / "embedding", reranker=root / "reranker",
        adapter=root / "adapter",
        number=itertools.count(),
    )  # fmt: skip
    name, config = read_config(PRESETS["qwen2.5-tiny"] | {"num_hidden_layers": 1})
    save_model(found.model, name, config, random_weights(name, config, seed=3), dtype="float32")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / file, found.model / file)
    (found.model / "chat_template.jinja").write_text(TEMPLATE)
    goldens.write_checkpoint(found.embedding, "qwen3", goldens.committed("qwen3"))
    add_modules(found.embedding, pooling("lasttoken"), NORMALIZE)
    encoder_cases.write(found.reranker, "bert", scores=True)
    write_adapter(found.adapter, model_info(str(found.model)), ["model.layers.0.self_attn.q_proj"])
    for folder in (
        found.here,
        found.model,
        found.embedding,
        found.reranker,
        found.adapter,
        found.out,
    ):
        set_traps(folder, found.sprung)
    (found.here / "config.json").write_text(json.dumps(CONFIG))
    texts = "".join(json.dumps({"text": f"line {i} of this text " * 5}) + "\n" for i in range(20))
    (found.here / "texts.jsonl").write_text(texts)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (found.here / "requests.jsonl").write_text(json.dumps(request))
    return found


SMALL = ["-c", "64"]
SERVED = ["--serve-flags", "-c 64 --max-num-seqs 1"]
TRAIN = ["--steps", "2", "--batch", "2", "--seq-len", "16", "--warmup-steps", "1"]
COMMANDS = {
    "generate": ["MODEL", "-p", "x", "-n", "2", *SMALL],
    "chat": ["MODEL", "-n", "2", *SMALL],
    "bench": ["MODEL", "--prompt-tokens", "4", "--output-tokens", "3", "--trials", "1", "--html",
              "OUT.html"],
    "bench serve": ["MODEL", "--requests", "1", "--prompt-tokens", "4", "--output-tokens", "2",
                    *SERVED],
    "batch": ["MODEL", "-i", "requests.jsonl", "-o", "OUT", *SERVED],
    "train": ["--config", "config.json", "--data", "texts.jsonl", "--vocab-size", "320",
              "--out", "OUT", *TRAIN],
    "inspect": ["MODEL"],
    "verify": ["MODEL", "-n", "2"],
    "perplexity": ["MODEL", *SMALL],
    "eval": ["MODEL", "--data", "texts.jsonl", *SMALL],
    "embed": ["EMBEDDING", "-p", "x", "--output", "OUT"],
    "rerank": ["RERANKER", "--query", "x", "-d", "y"],
    "quantize": ["MODEL", "-q", "int8", "-o", "OUT"],
    "fuse": ["MODEL", "--lora", "ADAPTER", "-o", "OUT"],
    "models": [],
    "doctor": [],
    "tokenize": ["MODEL", "-p", "x"],
    "detokenize": ["MODEL", "--tokens", "5,6"],
    "completion": ["bash"],
}  # fmt: skip


def words(places, verb):
    out = str(places.out / f"{next(places.number)}")
    named = {"MODEL": str(places.model), "EMBEDDING": str(places.embedding), "OUT": out}
    named |= {"RERANKER": str(places.reranker), "ADAPTER": str(places.adapter)}
    named["OUT.html"] = f"{out}.html"
    return [*verb.split(), *(named.get(word, word) for word in COMMANDS[verb])]


@pytest.fixture(params=[BY_MODULE, INSTALLED], ids=["by_module", "installed"])
def command(request):
    return request.param


ALONE = {(INSTALLED[0], "inspect"), (INSTALLED[0], "chat")}
"""Run in processes of their own by default; the nightly tier has all, and below one runs all."""


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        pytest.param(
            command, verb, id=f"{how}-{verb}",
            marks=[pytest.mark.nightly] * ((command[0], verb) not in ALONE),
        )
        for how, command in (("by_module", BY_MODULE), ("installed", INSTALLED))
        for verb in COMMANDS
    ],
)  # fmt: skip
def test_no_verb_springs_a_trap(places, command, verb):
    if verb == "verify":
        pytest.importorskip("torch")
    ran = subprocess.run(
        [*command, *words(places, verb)],
        cwd=places.here, input="a line\n", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert_none_sprung(places.sprung)
    assert ran.returncode == 0, ran.stderr


IN_TURN = """
import runpy
import sys

paths = []
for words in {commands}:
    sys.argv, sys.stdin = ["rooflax", *words], open("line.txt")
    try:
        runpy.run_module("rooflax", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    paths.append(list(sys.path))
assert all(path == paths[0] for path in paths), paths
"""
"""A module beside the traps: `python -m` begins with their folder in sys.path, as for rooflax."""


def test_no_verb_springs_a_trap_in_one_process(places):
    """Nor does any leave a folder in sys.path for what the next one imports."""
    left_out = ("verify", "bench serve")  # batch has a server of its own too
    commands = [words(places, verb) for verb in COMMANDS if verb not in left_out]
    (places.here / "line.txt").write_text("a line\n")
    (places.here / "in_turn.py").write_text(IN_TURN.format(commands=commands))
    ran = subprocess.run(
        [sys.executable, "-m", "in_turn"],
        cwd=places.here, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert_none_sprung(places.sprung)
    assert ran.returncode == 0, ran.stderr


EACH_COMMAND = pytest.mark.parametrize(
    "command",
    [
        pytest.param(BY_MODULE, id="by_module"),
        pytest.param(INSTALLED, id="installed", marks=pytest.mark.nightly),
    ],
)


@EACH_COMMAND
def test_no_server_springs_a_trap(places, command):
    server = [*command, "serve", str(places.model), "--port", "0", "-c", "64"]
    with subprocess.Popen(server, cwd=places.here, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = listening(process)
            wait_until_ready(process)
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4,
                    "response_format": {"type": "json_object"}}  # fmt: skip
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(),
                {"content-type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert_none_sprung(places.sprung)


def listening(process):
    assert process.stderr is not None
    found = re.search(r"listening on (http://\S+);", process.stderr.readline())
    assert found
    return found[1]


def wait_until_ready(process):
    assert process.stderr is not None
    assert any("is ready" in line for line in process.stderr)


def test_every_verb_is_tried():
    assert {*COMMANDS, "serve"} == set(VERBS)


# Without sitecustomize, which Python imports before anything of rooflax runs.
@pytest.mark.parametrize("entries", ["{0}", "./"])
def test_an_entry_of_pythonpath_without_a_name_is_dropped(tmp_path, entries, command):
    """An empty entry, as `export PYTHONPATH=$PYTHONPATH:/more` leaves, is the current folder."""
    sprung = tmp_path / "sprung"
    here = tmp_path / "here"
    set_traps(here, sprung)
    (here / "sitecustomize.py").unlink()
    (here / "usercustomize.py").unlink()
    entries = entries.format("")
    env = os.environ | {"PYTHONPATH": f"{entries}{os.pathsep}{tmp_path}"}
    ran = subprocess.run([*command, "tokenize", "-p", "x"], cwd=here, env=env, check=False)
    assert ran.returncode == 0
    assert_none_sprung(sprung)


@pytest.mark.parametrize("entries", ["", f"./{os.pathsep}."])
def test_children_search_no_folder_without_a_name(tmp_path, monkeypatch, entries):
    sprung = tmp_path / "sprung"
    set_traps(tmp_path / "here", sprung)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", f"{entries}{os.pathsep}{tmp_path}")
    ran = processes.run("rooflax", ["tokenize", "-p", "x"], stdin="")
    assert ran.returncode == 0, ran.stderr
    assert_none_sprung(sprung)


def test_what_pythonpath_names_in_full_stays(tmp_path, monkeypatch):
    """Also where it is the current folder, and for children."""
    (tmp_path / "named.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert processes.run("named", stdin="").returncode == 0
    monkeypatch.setenv("PYTHONPATH", os.curdir)
    assert processes.run("named", stdin="").returncode != 0


def test_children_find_a_rooflax_that_only_sys_path_names(tmp_path, monkeypatch):
    """Such as that of a script beside a folder `rooflax`."""
    monkeypatch.setattr(processes, "__file__", str(tmp_path / "rooflax/processes.py"))
    assert "PYTHONPATH" not in processes._isolated({})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert processes._isolated({})["PYTHONPATH"] == str(tmp_path)
    assert processes._isolated({"PYTHONPATH": "/more"})["PYTHONPATH"] == f"/more:{tmp_path}"


@pytest.mark.parametrize("name", ["__init__", "__main__"])
def test_nothing_is_imported_before_the_current_folder_is_left(name):
    """But for what Python's own start has imported; `from __future__` is an import too."""
    tree = ast.parse((ROOT / f"src/rooflax/{name}.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node) for node in imports} <= {"import os", "import sys"}


STARTERS = {"subprocess", "multiprocessing", "pty", "runpy"}
CALLS = re.compile(
    r"sys\.executable|os\.(exec|spawn|posix_spawn|fork|popen|system)|ProcessPool"
    r"|(\w+\.)*(create_)?subprocess_(exec|shell)"
)


def test_children_are_started_in_one_place():
    """So that none can forget to be isolated."""
    home = ROOT / "src/rooflax"
    for path in {*home.rglob("*.py")} - {home / "processes.py", home / "child.py"}:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute | ast.Name):
                assert not CALLS.match(ast.unparse(node)), f"{path}:{node.lineno}: use processes"
                continue
            else:
                continue
            assert not imported & STARTERS, f"{path}:{node.lineno}: use rooflax.processes"


PARENT = """
import sys, time
from rooflax import processes
child = processes.start("http.server", ["0", "--bind", "127.0.0.1"])
print(child.pid, flush=True)
time.sleep(600)
"""


def is_gone(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int, seconds: float = 30) -> None:
    tick = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if is_gone(pid):
            return
        tick.wait(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child outlived its parent")


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent(number):
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.send_signal(number)
    wait_until_gone(child)


@linux
def test_the_server_of_a_killed_batch_ends(places, tmp_path):
    """In the midst of its work; its stderr is a pipe that nobody reads any more."""
    line = json.loads((places.here / "requests.jsonl").read_text())
    lines = [json.dumps(line | {"custom_id": str(number)}) for number in range(10_000)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    files = ["-i", str(tmp_path / "requests.jsonl"), "-o", str(out)]
    command = [*INSTALLED, "batch", str(places.model), *files, *SERVED]
    with subprocess.Popen(command, cwd=places.here) as batch:
        tick = threading.Event()
        while batch.poll() is None and not (out.exists() and out.stat().st_size):
            tick.wait(0.02)
        server = child_of(batch.pid)
        batch.kill()
    assert server is not None
    wait_until_gone(server)
    assert_none_sprung(places.sprung)


def child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@linux
def test_a_broken_stderr_harms_nothing(places):
    server = [*INSTALLED, "serve", str(places.model), "--port", "0", "-c", "64"]
    with subprocess.Popen(server, cwd=places.here, stderr=subprocess.PIPE, text=True) as process:
        url = listening(process)
        assert process.stderr is not None
        process.stderr.close()
        tick = threading.Event()
        for _ in range(1200):  # its line that it is ready goes nowhere
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=10):
                    break
            except OSError:
                tick.wait(0.05)
        process.terminate()  # and so does the one that it stops
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert_none_sprung(places.sprung)
