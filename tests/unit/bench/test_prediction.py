"""Speeds that are predicted: the fit, whose models it comes from, and what is said without one."""

import json

import pytest

from rooflax.bench import prediction
from rooflax.bench.ceilings import Ceiling
from rooflax.cli.main import main
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.ops import native

KINDS = ("decode 1", "decode 8", "prompts 8")


def point(model, read_s, layers, kind="decode 1", format="float32", own=0.0, parameters=1):
    """A step at an efficiency of 80% with 10 microseconds a layer, and `own` more of its time."""
    seconds = (read_s / 0.8 + 1e-5 * layers) * (1 + own)
    return {"model": model, "format": format, "kind": kind, "layers": layers, "s": seconds,
            "parameters": parameters, "read_s": read_s, "multiply_s": read_s / 9}  # fmt: skip


POINTS = [("a", 1e-3, 12), ("b", 4e-3, 24), ("c", 2e-2, 16), ("d", 2e-3, 30)]


def test_efficiency_and_fixed_time_are_found():
    found = prediction.fit([point(*each) for each in POINTS])
    assert found.efficiency == pytest.approx(0.8) and found.layer_s == pytest.approx(1e-5)
    assert found.models == 4 and found.error < 1e-9
    assert found.seconds(0.4, 100) == pytest.approx(0.501)


def test_the_error_is_that_of_a_model_that_was_left_out():
    odd = point(*POINTS[3], own=0.5)
    points = [*(point(*each) for each in POINTS[:3]), odd]
    expected = prediction.fit(points[:3]).seconds(odd["read_s"], odd["layers"])
    assert prediction.fit(points).error >= odd["s"] / expected - 1 > 0.49


def test_a_fixed_time_is_never_negative():
    points = [point("a", 1e-3, 30), point("b", 2e-3, 10), point("c", 4e-3, 1)]
    for each in points:
        each["s"] = each["read_s"] * (2 - each["layers"] / 60)
    found = prediction.fit(points)
    assert found.layer_s == 0 and 0.5 < found.efficiency < 1


def test_too_few_models_fit_nothing():
    assert prediction.fit([point(*each) for each in POINTS[:2]]) is None
    assert prediction.fit([point("a", 1e-3, 12), point("a", 2e-3, 12), point("b", 1, 1)]) is None


@pytest.fixture
def known(monkeypatch):
    """A table of four models in float32, and ceilings of 10 GB/s and 1 TFLOP/s."""
    table = [point(*each, kind=kind) for each in POINTS for kind in KINDS]
    monkeypatch.setattr(prediction, "table", lambda: {native.instruction_set(): table})
    reading = Ceiling(10.0, 1e12, "native", 1)
    monkeypatch.setattr(prediction, "ceiling_reader", lambda *_: lambda: reading)
    return table


def test_a_prediction_is_the_step_at_the_ceilings_of_now(known):
    plan = make_plan(model_info("preset:gpt2-tiny"))
    found = prediction.predict(plan)
    step = prediction.decode_cost(plan.info.config, batch=1, context=prediction.CONTEXT,
                                  storage=plan.storage, kv_dtype=plan.kv_dtype)  # fmt: skip
    seconds = step.total_bytes / 10e9 / 0.8 + 1e-5 * plan.info.config.num_layers
    assert found["decode 1"]["tok_per_s"] == pytest.approx(1 / seconds)
    assert found["decode 1"]["models"] == 4


def test_a_model_is_not_predicted_from_itself(known):
    config = model_info("preset:gpt2-tiny").config
    itself = {"parameters": prediction.parameters(config), "layers": config.num_layers}
    known += [point("gpt2-tiny", 1e-9, 4, own=99) | itself]
    assert prediction.fitted("decode 1", "float32", config).models == 4
    other = model_info("preset:qwen2.5-tiny").config
    assert prediction.fitted("decode 1", "float32", other).models == 5


def test_without_measurements_it_says_what_is_possible_at_most(known, capsys):
    assert main(["inspect", "preset:gpt2-tiny", "-q", "w4a16", "--json"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert set(speed) == set(KINDS) and speed["decode 1"]["error"] is None
    assert main(["inspect", "preset:gpt2-tiny", "-q", "w4a16"]) == 0
    assert "at most: its format was not measured" in capsys.readouterr().out
    assert main(["inspect", "preset:gpt2-tiny"]) == 0
    assert "+- 0%, by 4 other models" in capsys.readouterr().out


def test_the_summary_is_of_what_was_measured_alone(known):
    assert "tok/s at 1 row, " in prediction.summary(make_plan("preset:gpt2-tiny"))
    assert prediction.summary(make_plan("preset:gpt2-tiny", quantize="w4a16")) is None


def test_streamed_weights_and_meshes_are_not_predicted(known, capsys):
    streamed = ["--dtype", "float32", "--weights-budget", "12MB"]
    for flags in (streamed, ["preset:gpt2-tiny", "--mesh", "tensor=2"]):
        assert main(["inspect", *flags, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["speed"] is None


def test_the_packages_table_has_what_a_fit_reads():
    for name, points in json.loads(prediction.TABLE.read_text()).items():
        assert name in native.INSTRUCTION_SETS
        for each in points:
            assert each["kind"] in KINDS
            assert min(each[k] for k in ("s", "read_s", "multiply_s", "layers", "parameters")) > 0
