"""bench.schema.json accepts what bench writes, and nothing that lacks a key or has one more."""

import copy
import json
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path

import pytest

from rooflax.bench.document import document, with_cost
from rooflax.bench.environment import environment
from rooflax.bench.workload import Workload
from rooflax.nn.execution import KERNELS, ExecutionOptions
from tests.support.bench.samples import row

Draft202012Validator = pytest.importorskip("jsonschema").Draft202012Validator

DATA = Path(__file__).parents[2] / "data" / "bench"
OPTIONAL = {"ablation", "deterministic_over_plain", "mesh", "passed_over"}
WORK = Workload(None, prompt_tokens=4, output_tokens=6, trials=5)


@pytest.fixture(scope="module")
def schema():
    text = resources.files("rooflax.bench").joinpath("bench.schema.json").read_text("utf-8")
    return json.loads(text)


@pytest.fixture(scope="module")
def is_valid(schema):
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema).is_valid


@pytest.fixture(scope="module")
def samples():
    return [
        json.loads((DATA / name).read_text(encoding="utf-8"))
        for name in ("rows.json", "ablation.json")
    ]


@pytest.fixture
def sample(samples):
    """A document that may be spoilt: one row of an ablation."""
    found = copy.deepcopy(samples[1])
    return found | {"results": found["results"][:1], "ablation": found["ablation"][:1]}


def objects(value, path=()):
    """Every object of a document, with the keys and indices that lead to it."""
    if isinstance(value, dict):
        yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        if isinstance(child, (dict, list)):
            yield from objects(child, (*path, key))


def test_samples_are_valid(is_valid, samples):
    assert all(map(is_valid, samples))


def test_what_bench_puts_together_is_valid(is_valid):
    plain, fixed = (
        {"result": row(replace(WORK, deterministic=on)), "environment": environment()}
        for on in (False, True)
    )
    for rows in ([plain], [with_cost(fixed, plain)], [plain, plain]):
        assert is_valid(json.loads(json.dumps(document(rows))))
    few = [{**r, "result": row(replace(WORK, trials=2))} for r in (fixed, plain)]
    assert is_valid(json.loads(json.dumps(document([with_cost(*few)]))))


def test_every_key_is_required_but_two(is_valid, sample):
    count = 0
    for path, found in objects(sample):
        for key in [k for k in found if k not in OPTIONAL]:
            value = found.pop(key)
            assert not is_valid(sample), (*path, key)
            found[key] = value
            count += 1
    assert count > 100
    assert is_valid(sample)
    del sample["ablation"]
    assert is_valid(sample)


def test_no_key_is_added(is_valid, sample):
    for path, found in objects(sample):
        found["more"] = 1
        assert not is_valid(sample), path
        del found["more"]


def test_every_value_has_its_type(is_valid, sample):
    for path, found in objects(sample):
        for key, value in list(found.items()):
            found[key] = {"other": 1}
            assert not is_valid(sample), (*path, key)
            found[key] = value
    assert is_valid(sample)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compilations_while_timed", 1),  # a void trial
        ("compilations_while_timed", None),
        ("decode_roofline", -0.1),
        ("prefill_roofline", -0.1),
        ("decode_bound", "read"),
        ("batch", 0),
        ("batch", 1.5),
        ("output_tokens", 1),
        ("void_trials", -1),
        ("ceilings", []),
        ("tokens", []),
        ("weights_bytes", None),
        ("deterministic_over_plain", {"ratio": 1.0, "low": 0.9}),
        ("deterministic_over_plain", {}),
    ],
)
def test_values_that_no_row_has(is_valid, sample, field, value):
    sample["results"][0][field] = value
    assert not is_valid(sample)


def test_no_result_and_no_trial_are_rejected(is_valid, sample):
    assert not is_valid(sample | {"results": []})
    sample["results"][0]["ttft_s"]["trials"] = []
    assert not is_valid(sample)


def test_options_are_those_of_the_engine(schema):
    options = schema["$defs"]["options"]["properties"]
    assert set(options) == {field.name for field in fields(ExecutionOptions)}
    assert set(options["kernels"]["enum"]) == {*KERNELS, None}
