"""Configuration and headers of models that lie on a server: against a hub on this machine."""

import json
import tempfile
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rooflax.cli.main import main
from rooflax.errors import CheckpointError
from rooflax.loading import hub, remote
from rooflax.loading.checkpoint import INDEX_FILE, WEIGHTS_FILE
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.loading.safetensors import SafetensorsFile, TensorToWrite, write_safetensors
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from tests import gguf_cases
from tests.unit.loading.test_gguf_parts import write_parts

huggingface_hub = pytest.importorskip("huggingface_hub")
REPO = "some/model"
GPT2 = json.dumps(PRESETS["gpt2-tiny"]).encode()


class Hub:
    """A hub with one repository, and what it sent.

    Attributes:
        files: by name.
        answers: by name, called with the handler in place of sending the file.
    """

    def __init__(self):
        self.files, self.answers = {}, {}
        self.sent, self.asked, self.tokens, self.ranges = 0, [], [], True

    def handle(self, request):
        path = request.path.partition("?")[0]
        name = path.partition("/resolve/main/")[2] or path.rpartition("/")[2]
        if path.startswith(f"/api/models/{REPO}"):
            about = {"id": REPO, "siblings": [{"rfilename": name} for name in self.files]}
            return self.answer(request, 200, json.dumps(about).encode())
        self.asked.append(name)
        self.tokens.append(request.headers.get("Authorization"))
        if name in self.answers:
            return self.answers[name](request)
        if name not in self.files:
            return self.answer(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        data, asked = self.files[name], request.headers.get("Range")
        if not self.ranges or asked is None:
            return self.answer(request, 200, data)
        begin, end = map(int, asked.removeprefix("bytes=").split("-"))
        end = min(end + 1, len(data))
        stated = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
        return self.answer(request, 206, data[begin:end], stated)

    def answer(self, request, status, data, headers=None):
        request.send_response(status)
        fields = {"Content-Length": str(len(data))} | (headers or {})
        for name, value in fields.items():
            request.send_header(name, value)
        request.end_headers()
        for begin in range(0, len(data), 1 << 16):
            piece = data[begin : begin + (1 << 16)]
            request.wfile.write(piece)
            self.sent += len(piece)


@pytest.fixture
def served(tmp_path, monkeypatch):
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            try:
                found.handle(self)
            except OSError:
                self.close_connection = True  # the client had enough

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        values = {"ENDPOINT": found.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
        values |= {"HF_HUB_OFFLINE": False}
        values["HUGGINGFACE_CO_URL_TEMPLATE"] = (
            found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        for name, value in values.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield found
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in several shards."""
    path = tmp_path_factory.mktemp("saved") / "m"
    name, config = read_config(PRESETS["qwen2.5-tiny"])
    save_model(path, name, config, random_weights(name, config))
    whole = SafetensorsFile(path / WEIGHTS_FILE)
    names, weight_map = whole.names(), {}
    for number in range(3):
        shard = f"model-{number + 1:05d}-of-00003.safetensors"
        some = names[number::3]
        weight_map |= dict.fromkeys(some, shard)
        write_safetensors(
            path / shard,
            [
                TensorToWrite(n, whole.info(n).dtype, whole.info(n).shape, partial(whole.read, n))
                for n in some
            ],
        )
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    (path / WEIGHTS_FILE).unlink()
    return path


def weight_bytes(found):
    """What differs if a header were read wrong: formats and bytes of a plan."""
    plan = make_plan(found)
    return plan.storage, plan.memory, sorted(found.weights().names())


def test_a_repository_is_known_from_its_headers(served, folder):
    served.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert sum(name.endswith(".safetensors") for name in served.files) > 2
    with hub.headers(REPO) as copy:
        assert weight_bytes(model_info(copy)) == weight_bytes(model_info(folder))
    assert not copy.exists()
    weights = sum(len(d) for n, d in served.files.items() if n.endswith(".safetensors"))
    assert served.sent < weights


@pytest.mark.parametrize("ranges", [True, False])
def test_a_gguf_file_is_known_from_its_header(served, ranges, monkeypatch):
    """Read by growing pieces, and its factors of RoPE, which lie among the weights."""
    path = gguf_cases.gguf("llama3", "q4_0")
    monkeypatch.setattr(remote, "FIRST_BYTES", 1000)
    served.files, served.ranges = {"m-Q4_0.gguf": path.read_bytes()}, ranges
    for named in (f"{REPO}:Q4_0", f"{served.url}/anywhere/m-Q4_0.gguf?download=true"):
        with hub.headers(named) as copy:
            there, here = model_info(copy), model_info(path)
            assert weight_bytes(there) == weight_bytes(here)
            assert there.config == here.config and there.config.ropes[0].scaling is not None


def test_inspect_reads_no_weights(served, folder, capsys):
    served.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert main(["inspect", REPO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["folder"]) == (REPO, None)
    here = model_info(folder).weights()
    assert sum(f["bytes"] for f in found["weights"]["formats"]) == sum(
        here.info(name).nbytes for name in here.names()
    )
    assert not any("tokenizer" in name for name in served.asked)


def test_all_parts_of_a_gguf_file_are_read(served, tmp_path):
    parts = write_parts(tmp_path)
    served.files = {f"BF16/{path.name}": path.read_bytes() for path in parts}
    with hub.headers(f"{REPO}:BF16") as copy:
        assert weight_bytes(model_info(copy)) == weight_bytes(model_info(parts[0]))


def test_a_server_that_ignores_ranges_is_left_once_the_header_is_there(served):
    """32 MiB are offered; what is sent beyond the header is what lies in buffers."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 25], "data_offsets": [0, 1 << 25]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(1 << 25)
    served.files = {"model.safetensors": data, "config.json": GPT2}
    served.ranges = False
    with hub.headers(REPO) as copy:
        assert model_info(copy).weights().info("w").nbytes == 1 << 25
    assert served.sent < 1 << 24


def rejected(model, reason, **how):
    """That a model's headers are rejected by one sentence without a URL's query."""
    with pytest.raises(CheckpointError, match=reason) as caught, hub.headers(model, **how):
        pass
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert tempfile.gettempdir() not in str(caught.value)


def status(code):
    return lambda request: (request.send_response(code), request.send_header("Content-Length", "0"),
                            request.end_headers())  # fmt: skip


def redirect(url):
    def answer(request):
        request.send_response(302)
        request.send_header("Location", url)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def sends(headers, data=b"x" * 64, code=206):
    def answer(request):
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)
        request.close_connection = True

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(401), "may not be read .status 401.: log in"),
        (status(403), "may not be read .status 403."),
        (status(404), "is not there .status 404.: check the name"),
        (status(503), "is answered with status 503"),
        (redirect("/m.gguf"), "redirects more than 5 times"),
        (redirect("file:///etc/passwd"), "is no URL of a file"),
        (sends({}, code=200), "does not say how long it is"),
        (sends({"Content-Range": "bytes 7-70/100"}), "another range than asked for"),
        (sends({"Content-Range": "bytes 0-63/9999999999"}), "states 9999999999 bytes and sends 64"),
        (sends({"Content-Range": f"bytes 0-63/{1 << 59}"}), "states 576460752303423488 bytes"),
        (sends({"Content-Length": "64", "Content-Range": "bytes 0-63/64"}), "not a valid GGUF"),
        (lambda request: request.wfile.write(b"SSH-2.0\r\n" * 9), "is not HTTP"),
    ],
)
def test_what_a_server_answers_wrongly_is_one_sentence(served, answer, reason):
    served.answers = {"m.gguf": answer}
    rejected(f"{served.url}/m.gguf?signature=secret", reason)


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1, 25_000_001, 1 << 20])
def test_a_lying_length_of_a_header_reads_little(served, length):
    data = length.to_bytes(8, "little") + b"{" + bytes(1 << 22)
    served.files = {"model.safetensors": data, "config.json": GPT2}
    reason = f"^{REPO}/model.safetensors is not a valid safetensors"
    with pytest.raises(CheckpointError, match=reason), hub.headers(REPO) as copy:
        model_info(copy).weights().names()
    assert served.sent < 3 << 20


def test_a_lying_length_in_gguf_reads_little(served):
    """A key of 2^40 bytes, and a list that no vocabulary has."""
    start = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    for rest in ((1 << 40).to_bytes(8, "little"),
                 (1).to_bytes(8, "little") + b"k" + (8).to_bytes(4, "little")
                 + (150 << 20).to_bytes(8, "little")):  # fmt: skip
        stated = {"Content-Range": f"bytes 0-{remote.FIRST_BYTES - 1}/{1 << 30}"}
        data = (start + rest).ljust(remote.FIRST_BYTES, b"\0")
        served.answers = {"m.gguf": sends(stated, data)}
        rejected(f"{served.url}/m.gguf", "claims 1099511627776 bytes|has a header of more")


def test_redirects_into_a_private_network_are_not_followed(served, monkeypatch):
    """A host that is public by its address; what it redirects to is this machine."""
    real, first = remote._addresses, []

    async def addresses(server):
        found = await real(server)
        first.append(server.host)
        return found

    monkeypatch.setattr(remote, "_addresses", addresses)
    monkeypatch.setattr(remote, "_is_global", lambda address: len(first) == 1)
    served.answers = {"m.gguf": redirect(f"{served.url}/other.gguf")}
    rejected(f"{served.url}/m.gguf", "redirects to an address of a private network")
    assert len(served.tokens) == 1  # the second was not asked


@pytest.mark.parametrize(
    ("address", "is_global"),
    [("127.0.0.1", False), ("10.1.2.3", False), ("169.254.169.254", False), ("::1", False),
     ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("100.64.0.1", False),
     ("8.8.8.8", True), ("2606:4700::1111", True)],
)  # fmt: skip
def test_private_addresses_are_known(address, is_global):
    assert remote._is_global(address) is is_global


def test_the_token_stays_with_the_first_server(served, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    served.files = {"m-Q4_0.gguf": gguf_cases.gguf("llama3", "q4_0").read_bytes()}
    elsewhere = served.url.replace("127.0.0.1", "localhost") + "/cdn.gguf"
    served.files["cdn.gguf"] = served.files["m-Q4_0.gguf"]
    served.answers = {"m-Q4_0.gguf": redirect(elsewhere)}
    with hub.headers(f"{REPO}:m-Q4_0.gguf"):
        pass
    assert served.tokens[:2] == ["Bearer hf_secret", None]


def test_the_time_is_limited(served, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT_S", 0.5)
    served.answers = {"m.gguf": lambda request: time.sleep(2)}
    began = time.monotonic()
    rejected(f"{served.url}/m.gguf", r"was not read in 0\.5 s")
    assert time.monotonic() - began < 1.9


def test_a_repository_of_gguf_files_wants_one_named(served):
    served.files = {"m-Q4_0.gguf": b"x", "m-Q8_0.gguf": b"x", "README.md": b"x"}
    rejected(REPO, "holds GGUF files: m-Q4_0.gguf, m-Q8_0.gguf; name")


@pytest.mark.parametrize("url", ["https://h/m.bin", "http:///m.gguf", "http://h:x/m.gguf",
                                 "http://h/a%2F..%2Fm.gguf"])  # fmt: skip
def test_other_urls_are_rejected(url):
    rejected(url, "is no URL of a")
    rejected(url, "is a URL, which", offline=True)
