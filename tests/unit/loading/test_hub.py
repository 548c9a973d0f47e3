"""Finding a model: local folders, and a hub cache made by hand, without any network."""

import errno
import re
import socket
import sys

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import hub

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def reject(*args, **kwargs):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", reject)
    monkeypatch.setattr(socket, "getaddrinfo", reject)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one model, as a download leaves it: links into blobs."""
    root = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(root))
    repo = root / "models--some--model"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name, content in (("config.json", "{}"), ("model.safetensors", "x" * 100)):
        (repo / "blobs" / name).write_text(content)
        (repo / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{name}")
    return root


@pytest.fixture
def download(monkeypatch):
    """Stands in for snapshot_download: notes its arguments, then does what it was told."""
    calls = []

    def fake(repo_id, **kwargs):
        calls.append({"repo_id": repo_id, **kwargs})
        if fake.error is not None:
            raise fake.error
        return "/cached"

    fake.error, fake.calls = None, calls
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_local_folder_is_itself(tmp_path, download):
    assert hub.resolve(str(tmp_path)) == tmp_path
    for name in ("m.gguf", "config.json"):
        (tmp_path / name).touch()
    assert hub.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"config.json is a file; give .*, or a \.gguf file"):
        hub.resolve(str(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match=r"a revision .* is for hub ids"):
        hub.resolve(str(tmp_path), revision="main")
    assert not download.calls


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B"),
        ("hf.co/unsloth/x-GGUF:Q4_K_M", "unsloth/x-GGUF:Q4_K_M"),
    ],
)
def test_an_address_of_the_hub_is_answered_with_its_id(model, named, download):
    with pytest.raises(CheckpointError, match=f"is named as owner/name, here {named}\\.$"):
        hub.resolve(model)
    if model.startswith("https://"):
        with pytest.raises(CheckpointError, match=f"here {named}"), hub.headers(model):
            pass
    assert not download.calls


@pytest.mark.parametrize(
    "model", ["gpt2", "./a/b", "/a/b", "a/b/c", "../b", "a b/c", "a/", "a" * 5000]
)
def test_neither_folder_nor_id(model, download, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"no such folder or file: {re.escape(model)}"):
        hub.resolve(model)
    with pytest.raises(CheckpointError, match="no model was named"):
        hub.resolve("")
    assert not download.calls


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with installed packages, none of which may run."""
    folder = tmp_path / "site"
    ran = tmp_path / "ran"

    def install(name, *files, module=None, recorded=True):
        package = folder / (module or name.replace("-", "_"))
        package.mkdir(parents=True)
        names = ["__init__.py", *files]
        for file in names:
            (package / file).parent.mkdir(exist_ok=True)
            (package / file).write_text(f"open({str(ran)!r}, 'w')")
        if recorded:
            info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "RECORD").write_text("".join(f"{package.name}/{file},,\n" for file in names))
        return package

    monkeypatch.syspath_prepend(str(folder))
    yield install
    assert not ran.exists()


@pytest.mark.parametrize("name", ["a_model", "a-model", "A.Model"])
@pytest.mark.parametrize("recorded", [True, False])
def test_an_installed_package_that_ships_one_gguf_file(site, download, name, recorded):
    package = site("a-model", "data/m.gguf", "notes.txt", recorded=recorded)
    if name == "A.Model" and not recorded:
        return  # only pip's records tell that this is its name
    assert hub.resolve(f"package:{name}") == package / "data" / "m.gguf"
    assert "a_model" not in sys.modules
    assert not download.calls


def test_a_package_whose_module_has_another_name(site):
    package = site("the-model", "m.gguf", module="other")
    for name in ("the-model", "the_model", "other"):
        assert hub.resolve(f"package:{name}") == package / "m.gguf"


def test_packages_that_are_no_model(site, download, tmp_path, monkeypatch):
    site("several", "b.gguf", "a.gguf")
    site("none", "weights.bin")
    site("removed", "m.gguf").joinpath("m.gguf").unlink()
    for name, reason in {
        "several": r"ships 2 GGUF files \(a.gguf, b.gguf\); give the path of one of those in \S+$",
        "none": r"package none ships no GGUF file; .*\.$",
        "removed": r"package removed ships no GGUF file",
        "absent": r"no package absent is installed .*; check the name, or install it with pip\.$",
        "": r"'' is not the name",
        "../site/several": r"is not the name of a Python package\.$",
        "a/b": r"is not the name",
        "a" * 5000: r"^.{,100} is not the name",
    }.items():
        with pytest.raises(CheckpointError, match=reason):
            hub.resolve(f"package:{name}")
    package = site("one", "m.gguf")
    with pytest.raises(CheckpointError, match=r"a revision .* is for hub ids"):
        hub.resolve("package:one", revision="main")
    monkeypatch.chdir(package.parent)
    for here in ("", ".", str(package.parent)):
        monkeypatch.setattr(sys, "path", [here])
        with pytest.raises(CheckpointError, match="no package one is installed"):
            hub.resolve("package:one")
    assert not download.calls


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xff\xfe,,\n", "list of files of the package lies cannot be read"),
        (b"%s.gguf,,\n" % (b"a" * 5000), "list of files .* cannot be read|ships no GGUF file"),
        (b"a\0b.gguf,,\n", "ships no GGUF file|cannot be read"),
        (b'"a\nb.gguf', "ships no GGUF file|cannot be read"),
        (b"../outside.gguf,,\n", "ships no GGUF file"),
        (b"lies/../../outside.gguf,,\n", "ships no GGUF file"),
        (b"OUTSIDE,,\n", "ships no GGUF file"),
    ],
)
def test_a_packages_list_of_files_that_lies(site, tmp_path, record, reason):
    package = site("lies")
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"GGUF")
    record = record.replace(b"OUTSIDE", str(outside).encode())
    (package.parent / "lies-1.0.dist-info/RECORD").write_bytes(record)
    with pytest.raises(CheckpointError, match=reason) as caught:
        hub.resolve("package:lies")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_existing_folder_wins_over_a_hub_id(tmp_path, monkeypatch, download):
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(hub.resolve("some/model")) == "some/model"
    assert not download.calls


def test_offline_finds_the_cached_snapshot(cache):
    folder = hub.resolve("some/model", offline=True)
    assert folder.name == COMMIT
    assert (folder / "config.json").read_text() == "{}"
    assert hub.resolve("some/model", offline=True, revision=COMMIT) == folder


@pytest.mark.parametrize("revision", [None, "v2"])
def test_offline_and_not_cached(cache, revision):
    with pytest.raises(CheckpointError, match=r"is not .* in the local cache") as caught:
        hub.resolve(
            "other/model" if revision is None else "some/model", offline=True, revision=revision
        )
    assert "\n" not in str(caught.value)


def test_environment_offline_is_honoured(cache, download, monkeypatch):
    hub.resolve("some/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.resolve("some/model")
    assert [call["local_files_only"] for call in download.calls] == [False, True]


def test_only_root_level_files_of_the_wanted_kinds(download):
    from huggingface_hub.utils import filter_repo_objects

    hub.resolve("openai/gpt-oss-20b", revision="abc")
    call = download.calls[0]
    assert call["revision"] == "abc"
    wanted = ["config.json", "model-00000-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += ["tokenizer.json", "tokenizer.model", "merges.txt", "vocab.txt"]
    wanted += ["chat_template.jinja", "generation_config.json", "vocab.json", "modules.json"]
    wanted += ["1_Pooling/config.json", "2_Dense/model.safetensors"]
    others = ["original/model.safetensors", "metal/model.bin", "original/config.json", "README.md"]
    others += ["pytorch_model.bin", "modeling.py", "a/b/c.json", "model.gguf", "x/merges.txt"]
    others += ["1B/config.json", "1_Pooling/a/config.json", "2_Dense/pytorch_model.bin"]
    patterns = {key: call[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GatedRepoError", "is gated: accept its terms"),
        ("RepositoryNotFoundError", "no hub model some/model"),
        ("RevisionNotFoundError", "has no revision v9"),
        ("HfHubHTTPError", "downloading some/model at revision v9 failed: no way"),
    ],
)
def test_failures_of_the_hub_are_one_sentence(download, name, reason):
    from huggingface_hub import errors

    kind = getattr(errors, name)
    download.error = kind.__new__(kind, "no\nway")
    download.error.args = ("no\nway",)
    with pytest.raises(CheckpointError, match=reason) as caught:
        hub.resolve("some/model", revision="v9")
    assert "\n" not in str(caught.value)


def test_other_failures(download):
    from huggingface_hub.errors import HFValidationError

    download.error = HFValidationError("bad")
    with pytest.raises(CheckpointError, match="nor a valid hub id"):
        hub.resolve("some/model..x")
    download.error = RuntimeError("broken")
    with pytest.raises(CheckpointError, match="downloading some/model failed: broken"):
        hub.resolve("some/model")
    download.error = ConnectionError("Name or service not known")
    with pytest.raises(CheckpointError, match="the hub is not reached: go online once"):
        hub.resolve("some/model")
    download.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        hub.resolve("some/model")


def test_list_and_remove(cache):
    (model,) = hub.cached_models()
    assert (model.repo_id, model.size_on_disk, len(model.revisions)) == ("some/model", 102, 1)
    with pytest.raises(CheckpointError, match="not among the downloaded"):
        hub.remove("other/model")
    assert hub.remove("some/model") == 102
    assert hub.cached_models() == []
    assert not (cache / "models--some--model").exists()


def test_no_cache_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert hub.cached_models() == []


def test_progress_bars_only_on_a_terminal(monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    enable_progress_bars()  # transformers, once imported, may have turned them off
    seen = []

    def noting(repo_id, **kwargs):
        seen.append(not are_progress_bars_disabled())
        return "/cached"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noting)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda t=terminal: t)
        hub.resolve("some/model")
    assert seen == [False, True]
    assert not are_progress_bars_disabled()
