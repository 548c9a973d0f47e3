"""Longer tests beside those of tests/engine/test_sharding.py."""

from pathlib import Path

import numpy as np
import pytest

from rooflax import LLM, SamplingParams, save
from rooflax.errors import RequestError
from rooflax.nn.shards import AXES, Shards, parse_mesh
from tests import goldens
from tests.engine import test_sharding as beside
from tests.engine.test_sharding import SPLITS, STATEFUL, check_bytes, check_gathers, same
from tests.sharding import CONFIGS, write_checkpoint

ask = beside.ask
worker = beside.worker


ROOT = Path(__file__).parents[2]


FAMILIES = list(CONFIGS)


EXPERTS = (
    "gpt_oss", "qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "qwen3_next", "gemma4_text",
    "deepseek_v2", "deepseek_v3", "qwen3_5_moe_text",
)  # fmt: skip


PAIRS = [
    "tensor=2,data=2", "tensor=2,sequence=2", "tensor=4,stage=2", "data=2,sequence=2",
    "data=2,stage=2", "sequence=2,stage=2", "expert=2,tensor=2", "expert=2,data=2",
    "expert=2,sequence=2", "expert=2,stage=2",
]  # fmt: skip


UNLIKE = ("gemma4_shared", "deepseek_v2", "glm4_moe")
"""Whose layers do not repeat, so that no stages have the same."""


ALL = [
    (f, m)
    for m in (*SPLITS, *PAIRS)
    for f in FAMILIES
    if ("expert" not in m or f in EXPERTS)
    and (f not in STATEFUL or not ("data" in m or "sequence" in m))
    and (f not in UNLIKE or "stage" not in m)
]


@pytest.mark.parametrize(("model", "mesh"), ALL)
def test_every_family_and_pair_gives_the_single_devices_tokens(ask, model, mesh):
    one, many = same(ask, model, mesh)
    check_bytes(model, mesh, one, many)
    check_gathers(many)


@pytest.mark.parametrize("mesh", ["tensor=2,data=2", "stage=2,data=2", "sequence=2,data=2"])
@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"jit": False}, {"layers": "scan"}, {"decode_steps": 3}]
)
def test_options_change_nothing_on_a_mesh(ask, mesh, options):
    same(ask, "llama", mesh, options=options)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_one_scale_per_output_and_part_errs_no_more(ask, format):
    """The parts of a split input have scales of their own, over fewer numbers."""
    exact = np.array(ask("llama")["logits"])
    one, many = (ask("llama", mesh, settings={"quantize": format}) for mesh in (None, "tensor=2"))
    errors = [np.sqrt(np.mean((np.array(x["logits"]) - exact) ** 2)) for x in (one, many)]
    assert 0 < errors[1] < 1.2 * errors[0]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Checkpoints that hold quantised weights, by kind: MXFP4, packed by ourselves, GGUF."""
    folder = tmp_path_factory.mktemp("quantised")
    variant = "gpt_oss_mxfp4"
    mxfp4 = goldens.write_checkpoint(folder / variant, variant, goldens.committed(variant))
    source = write_checkpoint(folder, "gpt_oss")
    llm = LLM(source, quantize="w4a16+head=w8a16")
    save(llm.model, folder / "packed", dtype="float32", files_from=source)
    files = {path.name: path for path in (ROOT / "tests" / "data" / "gguf").glob("*.gguf")}
    return {"mxfp4": mxfp4, "packed": folder / "packed"} | files


@pytest.mark.parametrize(
    ("kind", "mesh", "parts"),
    [
        ("mxfp4", "expert=5", 5),
        ("packed", "tensor=2,expert=2", 4),
        ("qwen2.q4_0.gguf", "stage=2", 2),
        ("mxfp4", "stage=2,data=2", 2),
        ("gpt_oss_mxfp4.bf16.gguf", "expert=3", 3),
    ],
)
def test_what_a_checkpoint_holds_quantised_stays_so(ask, quantised, kind, mesh, parts):
    one, many = same(ask, quantised[kind], mesh)
    values = {key: pair for key, pair in many["weights"].items() if "mlp.gate_up'].values" in key}
    assert values and many["bytes"][0] < one["bytes"][0]
    assert all(np.prod(whole) == parts * np.prod(own) for whole, own in values.values())


@pytest.mark.parametrize(("mesh", "kv_dtype"), [("stage=2", "int8"), ("data=2", "fp8")])
def test_beams_drafts_and_a_cache_of_bytes_on_a_mesh(tmp_path, mesh, kv_dtype):
    """What copies blocks, checks several tokens at once, and keeps scales beside its pools."""
    folder = write_checkpoint(tmp_path, "llama")
    how = {"kv_dtype": kv_dtype, "speculate": "ngram"}
    one, many = LLM(folder, **how), LLM(folder, mesh=mesh, **how)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], list(range(40))]
    for given in (
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(num_beams=3, max_tokens=6, ignore_eos=True),
    ):
        wanted, found = ([c.tokens for c in x.generate(prompts, given)] for x in (one, many))
        assert found == wanted


def test_the_text_of_a_mesh():
    assert parse_mesh("tensor=4,data=2") == Shards(data=2, tensor=4)
    assert parse_mesh("stage=1") == Shards() and Shards().num_devices == 1
    assert str(Shards(data=2, tensor=4)) == "data=2,tensor=4"
    assert set(AXES) == set(Shards().sizes)
    for text, said in (
        ("pipeline=2", "of data, expert, sequence, stage, tensor"),
        ("tensor", "it must be AXIS=N"),
        ("tensor=-1", "it must be AXIS=N"),
        ("tensor=0", "at least 1"),
        ("data=2,data=2", "names data twice"),
    ):
        with pytest.raises(RequestError, match=said):
            parse_mesh(text)
