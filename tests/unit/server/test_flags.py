"""Every flag of `rooflax serve` changes what is served, or is rejected."""

from __future__ import annotations

import argparse
import os

import pytest

from rooflax.cli.main import main
from rooflax.fields.declaration import variable_of
from rooflax.loading import plan
from tests.engine.cli.test_cli_flags import (
    BUDGET,
    CHECK,
    DEVICE,
    DRAFTS,
    FINDING,
    LAYERS,
    LENGTH,
    PRECISION,
    PROCESSES,
    QUANTIZE,
    TINY,
    flags_of,
)

FLAGS = FINDING | CHECK | LENGTH | PRECISION | QUANTIZE | BUDGET | LAYERS | DRAFTS | DEVICE | {
    "--mesh": ["tensor=2"], "--quiet": [], "--verbose": [], "--help": None,
    "--host": ["::1"], "--port": ["1"], "--api-key": ["k"], "--api-key-file": ["KEYS"],
    "--insecure-no-auth": [], "--cors-origins": ["https://x"], "--served-model-name": ["x"],
    "--chat-template": ["TEMPLATE"], "--generation-config": ["none"],
    "--unknown-fields": ["report"],
    "--reasoning-field": ["both"], "--max-num-seqs": ["3"], "--max-num-queued-seqs": ["3"],
    "--max-num-batched-tokens": ["64"], "--request-timeout": ["5"], "--drain-timeout": ["5"],
    "--watchdog": ["5"], "--stay": [], "--tokenizer-info": [],
    "--max-inflight-per-key": ["3"], "--max-body-bytes": ["1000"],
    "--lora": ["x=DIR"], "--lora-modules": ["x=DIR", '{"name": "y", "path": "DIR"}'],
    "--enable-lora": [], "--max-loras": ["2"], "--max-lora-rank": ["4"],
    "--allow-lora-loading": (["KEYS"], "--allow-lora-loading names KEYS, which is no folder"),
    "--train": None,  # another server: tests/engine/server/test_training.py
} | PROCESSES  # fmt: skip


@pytest.fixture
def observe(monkeypatch, tmp_path, capfd):
    """Runs a command with a socket and an engine that only note what was asked of them."""
    (tmp_path / "KEYS").write_text("one")
    (tmp_path / "KEYS").chmod(0o600)
    (tmp_path / "TEMPLATE").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    for name in ("PJRT_NPROC", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "2" if name == "PJRT_NPROC" else "cpu")
    asked = []

    class Socket:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __init__(self, settings):
            self.host = settings.host

        def getsockname(self):
            return self.host, 1

    class Engine:
        def __init__(self, plan, **given):
            given.pop("progress"), given.pop("report")
            self.llm = argparse.Namespace(tokenizer=argparse.Namespace(chat_templates={}))
            self.llm.info = argparse.Namespace(pooling=())  # so that nothing is measured
            asked.append((plan.info.name, str(plan), str(given), self.llm))

    class Runner:
        def __init__(self, settings, load, says):
            asked.append((settings, settings.api_keys))
            says("a line")
            self.load = load

        def run(self, listener):
            self.load(lambda _: None)
            return 0

    monkeypatch.setattr("rooflax.server.listening.listen", Socket)
    monkeypatch.setattr("rooflax.server.run.ServerRunner", Runner)
    monkeypatch.setattr("rooflax.async_llm.AsyncLLM", Engine)
    find = plan.model_info
    monkeypatch.setattr(
        plan,
        "model_info",
        lambda model, **how: asked.append(("find", model, how)) or find(model, **how),
    )
    monkeypatch.setattr("gc.freeze", lambda: None)  # these tests go on in the same process
    monkeypatch.setattr("gc.collect", lambda: None)  # half a second, for each flag
    monkeypatch.setattr("rooflax.cli.session.say_settings", lambda llm: asked.append("said"))

    def run(*argv):
        asked.clear()
        code = main(["serve", *argv])
        told = capfd.readouterr()
        return code, told.err, repr(asked), os.environ.get("PJRT_NPROC")

    return run


def test_the_table_names_every_flag():
    assert set(flags_of("serve")) == set(FLAGS)


def test_clients_get_an_address_that_they_can_reach(observe, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "machine")
    told = observe(TINY, "--host", "0.0.0.0", "--api-key", "one")[1]
    assert "listening on http://0.0.0.0:1;" in told
    assert "clients is http://machine:1/v1\n" in told
    assert "clients is http://127.0.0.1:1/v1\n" in observe(TINY)[1]


def test_every_flag_has_its_effect_or_is_rejected(observe):
    base = observe(TINY)
    assert base[0] == 0, base
    assert base == observe(TINY)
    for flag, wanted in FLAGS.items():
        if wanted is None:
            continue
        values, rejection = wanted if isinstance(wanted, tuple) else (wanted, None)
        found = observe(*values) if flag == "MODEL" else observe(TINY, flag, *values)
        if rejection is not None:
            assert found[0] == 2 and rejection in found[1], (flag, found)
        else:
            assert found[0] == 0, (flag, found)
            assert found[1:] != base[1:], flag


@pytest.mark.parametrize(
    "flag", ["--chat-template", "--lora", "--max-loras", "--mesh", "--watchdog"]
)
def test_flags_of_answers_have_no_meaning_beside_training(observe, flag):
    code, err, *_ = observe(TINY, "--train", "runs", flag, *FLAGS[flag])
    assert code == 2 and f"{flag} has no meaning with --train" in err


def test_adapters_that_requests_load_need_slots(observe):
    code, err, *_ = observe(TINY, "--allow-lora-loading", ".")
    assert code == 2 and "--allow-lora-loading needs slots for adapters; give --max-loras." in err
    assert observe(TINY, "--allow-lora-loading", ".", "--max-loras", "2")[0] == 0


def test_adapters_as_vllm_names_them(observe):
    one = '{"path": "DIR", "name": "x"}'
    given = observe(TINY, "--lora", "z=DIR", "--lora-modules", one, "y=DIR", "--lora", "w=DIR")
    assert given[0] == 0 and "['z=DIR', 'x=DIR', 'y=DIR', 'w=DIR']" in given[2]
    assert "'max_loras': None" in given[2]
    assert "'max_loras': 1" in observe(TINY, "--enable-lora")[2]
    assert "'max_loras': 3" in observe(TINY, "--enable-lora", "--max-loras", "3")[2]
    assert "'max_loras': None" in observe(TINY, "--enable-lora", "--lora", "x=DIR")[2]


def test_adapters_in_variables(observe, monkeypatch):
    monkeypatch.setenv("ROOFLAX_LORA", "z=DIR, w=DIR")
    monkeypatch.setenv("ROOFLAX_LORA_MODULES", '{"name": "x", "path": "DIR"}')
    assert "['z=DIR', 'w=DIR', 'x=DIR']" in observe(TINY)[2]


def test_a_model_behind_the_adapters_is_none_of_them(observe):
    code, err, asked, _ = observe("--lora-modules", "x=DIR", "owner/model")
    assert code == 2 and asked == "[]"
    assert "'owner/model', which is no NAME=DIR; MODEL stands before --lora-modules" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "{, which is no JSON"),
        ("{" * 9999, ", which is no JSON"),
        ('{"name": "x"}', "; name and path must be strings, name without ="),
        ('{"name": "x=y", "path": "z"}', "; name and path must be strings, name without ="),
        ('{"name": 1, "path": "z"}', "; name and path must be strings, name without ="),
        ('{"name": "x", "path": "y", "base_model_name": "z"}', "'base_model_name'; it takes name"),
    ],
)
def test_adapters_that_json_does_not_name(observe, text, said):
    code, err, asked, _ = observe(TINY, "--lora-modules", text)
    assert code == 2 and "--lora-modules has " in err and said in err and asked == "[]"


@pytest.mark.parametrize("flag", ["--max-num-seqs", "--max-num-batched-tokens", "--max-model-len"])
@pytest.mark.parametrize("is_variable", [False, True])
def test_an_engine_that_cannot_be_is_rejected_before_the_server_listens(
    observe, monkeypatch, flag, is_variable
):
    monkeypatch.setattr("rooflax.server.listening.listen", lambda _: pytest.fail("it listens"))
    if is_variable:
        monkeypatch.setenv(variable_of([flag]), "0")
    code, err, *_ = observe(TINY, *([] if is_variable else [flag, "0"]))
    assert (code, err) == (2, f"rooflax: {flag} is 0; it must be a whole number from 1 up.\n")
