"""GGUF files of a repository on the hub, named by quantization: against a hub on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import hub
from rooflax.loading.gguf import open_gguf
from rooflax.loading.model_info import model_info
from tests import gguf_cases
from tests.unit.loading.test_gguf_parts import WHOLE, write_parts

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some/model-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    parts = [path.read_bytes() for path in write_parts(folder)]
    whole, q4 = WHOLE.read_bytes(), gguf_cases.gguf("llama3", "q4_0").read_bytes()
    found = {"README.md": b"x", "config.json": b"{}", "run.py": b"x", "mmproj-Q8_0.gguf": b"x"}
    found |= {f"BF16/m-BF16-{i + 1:05d}-of-00003.gguf": part for i, part in enumerate(parts)}
    found |= dict.fromkeys(("../m-Q3_K.gguf", "/m-Q3_K.gguf", "a/..\\m-Q3_K.gguf"), q4)
    found |= {"m-Q8_0.gguf": whole, "m.Q4_0.gguf": q4, "m-Q4_K_M.gguf": q4, "m-Q4_K.gguf": q4}
    return found | {"m-Q5_K.gguf": q4, "m-UD-Q5_K.gguf": q4, "m-Q6_K[1].gguf": q4}


@pytest.fixture
def server(files, tmp_path, monkeypatch):
    """A hub with one repository; the paths that it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/").replace("%5B", "[")
            name = name.replace("%5D", "]")
            if path.startswith(f"/api/models/{REPO}/tree/"):
                tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"}
                        for name, data in files.items()]  # fmt: skip
                self.answer(json.dumps(tree).encode())
            elif path.startswith(f"/api/models/{REPO}"):
                siblings = [{"rfilename": name} for name in files]
                about = {"id": REPO, "sha": COMMIT, "siblings": siblings}
                self.answer(json.dumps(about).encode())
            elif name in files:
                self.answer(files[name])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def answer(self, data):
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        url, root = f"http://127.0.0.1:{running.server_port}", str(tmp_path / "hub")
        for name, value in (("ENDPOINT", url), ("HF_HUB_CACHE", root), ("HF_HUB_OFFLINE", False)):
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield asked
        running.shutdown()
        thread.join()


def loaded(asked):
    return {path.rpartition("/")[2] for path in asked if f"/resolve/{COMMIT}/" in path}


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        ("Q8_0", ["m-Q8_0.gguf"]),
        ("q4_0", ["m.Q4_0.gguf"]),
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("Q4_K", ["m-Q4_K.gguf"]),
        ("UD-Q5_K", ["m-UD-Q5_K.gguf"]),
        ("m-Q5_K.gguf", ["m-Q5_K.gguf"]),
        ("BF16", [f"m-BF16-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]),
    ],
)
def test_one_file_or_all_parts_of_one_are_downloaded(server, quantization, wanted):
    path = hub.resolve(f"{REPO}:{quantization}")
    assert path.name == wanted[0] and loaded(server) == set(wanted)
    assert open_gguf(path).names() == open_gguf(WHOLE).names()
    server.clear()
    assert hub.resolve(f"{REPO}:{quantization}", offline=True) == path and not server
    found = model_info(f"{REPO}:{quantization}", offline=True)
    assert (found.name, found.folder) == (f"{REPO}:{quantization}", path)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ("Q2_K", r"has no GGUF file of Q2_K; it has BF16/m-BF16-00001-of-00003.gguf, m-Q4_K.gguf"),
        ("Q3_K", "has no GGUF file of Q3_K; it has"),  # there are some, outside the folder
        ("Q4", "has no GGUF file of Q4; it has"),
        ("mmproj-Q8_0.gguf", "has no GGUF file of mmproj-Q8_0.gguf; it has"),
        ("Q5_K", "has 2 models of Q5_K; it has m-Q5_K.gguf, m-UD-Q5_K.gguf, of which one can be"),
        ("m", "has 8 models of m; it has"),
        ("x" * 5000, "has no GGUF file of xxx"),
    ],
)
def test_no_file_or_several_are_a_sentence_with_the_names(server, quantization, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        hub.resolve(f"{REPO}:{quantization}")
    assert not loaded(server) and len(str(caught.value)) < 600


def test_the_repository_alone_says_what_it_holds(server):
    said = rf"{REPO} holds GGUF files: .* as in {REPO}:BF16/m-BF16-00001-of-00003.gguf"
    with pytest.raises(CheckpointError, match=said):
        hub.resolve(REPO)


def test_offline_only_what_is_there(server):
    with pytest.raises(CheckpointError, match="not reached: go online once"):
        hub.resolve(f"{REPO}:Q8_0", offline=True)
    hub.resolve(f"{REPO}:Q8_0")
    with pytest.raises(CheckpointError, match="no GGUF file of Q4_0; it has m-Q8_0.gguf"):
        hub.resolve(f"{REPO}:Q4_0", offline=True)
    with pytest.raises(CheckpointError, match="no hub model other/model"):
        hub.resolve("other/model:Q4_0")


@pytest.mark.parametrize("name", ["a/b:", "a/b:c d", "a:b", "a/b:c:d", "a/b/c:Q4_0"])
def test_other_names_with_a_colon_are_no_hub_ids(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder or file"):
        hub.resolve(name)
    Path(tmp_path / name).mkdir(parents=True)
    assert hub.resolve(name) == Path(name)
