"""What callers pass: conversations, sampling parameters by name, and sentences for wrong ones."""

import asyncio

import pytest

import rooflax
from rooflax import LLM, AsyncLLM, RequestError, SamplingParams
from rooflax.cli.main import parser_of, with_flags
from rooflax.cli.parser import FIELDS

pytestmark = pytest.mark.oldest_jax

CHAT = [{"role": "user", "content": "abc"}]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tail }}"


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


def test_fields_by_name_are_those_of_sampling_params(llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (wanted,) = llm.generate([[5, 6, 7]], params)
    (found,) = llm.generate([[5, 6, 7]], temperature=0.0, max_tokens=6, ignore_eos=True)
    assert found.tokens == wanted.tokens and len(found.tokens) == 6
    longer, other = llm.generate([[5, 6, 7], [8, 9]], [params, params], max_tokens=9)
    assert len(longer.tokens) == len(other.tokens) == 9
    assert longer.tokens[:6] == wanted.tokens


def test_chat_is_generate_on_the_ids_of_the_template(llm):
    how = {"chat_template": TEMPLATE, "chat_template_kwargs": {"tail": "!"}}
    ids = llm.encode_chat(CHAT, **how)
    assert llm.decode(ids) == "[user]abc!"
    (wanted,) = llm.generate([ids], temperature=0.0, max_tokens=5)
    (found,) = llm.chat(CHAT, temperature=0.0, max_tokens=5, **how)
    assert found.prompt_tokens == tuple(ids) and found.tokens == wanted.tokens
    one, two = llm.chat([CHAT, [*CHAT, *CHAT]], temperature=0.0, max_tokens=5, **how)
    assert one.tokens == wanted.tokens and len(two.prompt_tokens) > len(one.prompt_tokens)


def test_deltas_have_log_probabilities_and_what_stopped_them(llm):
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    deltas = list(llm.stream([[5, 6, 7]], **given))
    assert all(len(d.logprobs) == len(d.tokens) for d in deltas)
    whole = deltas[-1].completion
    assert tuple(entry for d in deltas for entry in d.logprobs) == whole.logprobs
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)
    third = whole.tokens[2]
    (cut,) = llm.generate([[5, 6, 7]], stop_token_ids=(third,), **given)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", third)
    text = whole.text[1:3]
    (cut,) = llm.generate([[5, 6, 7]], stop=("never said", text), **given)
    assert (cut.finish_reason, cut.stop_reason) == ("stop", text)


@pytest.mark.parametrize(
    ("call", "said", "param"),
    [
        (lambda m: m.generate("x", {"max_tokens": 3}), "params is {'max_tokens': 3}; it", "params"),
        (
            lambda m: m.generate("x", sampling_params=SamplingParams()),
            r"did you mean params\?",
            "sampling_params",
        ),
        (lambda m: m.generate("x", temprature=1), r"temprature' \(did you mean temp", "temprature"),
        (
            lambda m: m.generate("x", repeat_penalty=1),
            r"did you mean repetition_p",
            "repeat_penalty",
        ),
        (lambda m: m.generate("x", temperature="hot"), "temperature is 'hot'", "temperature"),
        (lambda m: m.generate(5), "The prompt is 5; it must be text", "prompt"),
        (lambda m: m.generate({"a": 1}), "The prompt is {'a': 1}; it must", "prompt"),
        (lambda m: m.generate([[1, "b"]]), "A prompt is", "prompt"),
        (lambda m: m.generate([[10**9]]), "the token id 1000000000", "prompt"),
        (lambda m: m.chat("hello"), "messages is 'hello'; it must be a list of dicts", "messages"),
        (lambda m: m.chat(["hello"]), "messages is", "messages"),
        (lambda m: m.encode_chat(1), "messages is 1; it must be a list of dicts", "messages"),
        (lambda m: m.encode_chat("hello"), "messages is 'hello'; it must be a list", "messages"),
        (
            lambda m: m.encode_chat({"role": "user"}),
            "messages is .*; it must be a list",
            "messages",
        ),
        (lambda m: m.decode(["a"]), "ids is", None),
        (lambda m: LLM(options="fast"), "options is 'fast'", "options"),
        (lambda m: LLM(max_num_seqs=0), "max_num_seqs is 0", "max_num_seqs"),
        (lambda m: LLM(quantize="int9"), "quantize is 'int9'; it must", "quantize"),
        (lambda m: LLM(quantize="Q4_K_M"), "'Q4_K_M' .a type of GGUF files is for", "quantize"),
        (lambda m: LLM(mesh="nonsense"), "mesh is 'nonsense'", "mesh"),
        (lambda m: SamplingParams(logit_bias={1: 1e9}), "logit_bias value is", "logit_bias"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(llm, call, said, param):
    with pytest.raises(RequestError, match=said) as caught:
        call(llm)
    assert caught.value.param == param


def test_the_server_takes_fields_by_name_too():
    async def both():
        async with AsyncLLM("preset:qwen2.5-tiny", max_model_len=64) as llm:
            (found,) = await llm.generate([5, 6], temperature=0.0, max_tokens=4)
            with pytest.raises(RequestError, match="no sampling parameter 'heat'"):
                await llm.generate([5, 6], heat=3)
            return found

    assert len(asyncio.run(both()).tokens) == 4


def test_the_command_line_shows_flags_where_fields_are_named():
    flags = {"max_tokens": "--max-tokens", "n": "--samples", "seed": "--seed", "check": "--check"}
    assert with_flags("max_tokens is 0", None, flags) == "--max-tokens is 0"
    assert with_flags("max_tokens_per_step", None, flags) == "max_tokens_per_step"
    paths = "a/max_tokens/b, max_tokens.json, a/max_tokens: as max_tokens."
    said = "a/max_tokens/b, max_tokens.json, a/max_tokens: as --max-tokens."
    assert with_flags(paths, None, flags) == said
    assert with_flags("n is 0; an n of 1", "n", flags) == "--samples is 0; an n of 1"
    assert with_flags("the seed; see `check`", None, flags) == "the seed; see --check"
    assert parser_of("generate").flag_names["n"] == "--samples"
    assert set(FIELDS.values()) >= {"jit", "use_cache"}


def test_a_models_facts_are_known_without_its_weights():
    info = rooflax.model_info("preset:qwen2.5-tiny")
    assert isinstance(info, rooflax.ModelInfo)
    assert (info.family, info.config.num_layers) == ("qwen2", 4)
    assert isinstance(info.tokenizer(), rooflax.Tokenizer)
