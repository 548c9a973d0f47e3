"""Structured output: the text has the form that was asked for, whatever else goes on."""

import asyncio
import json
import re
import sys
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from rooflax import (
    LLM,
    AsyncLLM,
    ExecutionOptions,
    RequestError,
    SamplingParams,
    structured,
)
from rooflax.engine.features.grammar import constrain
from rooflax.fields.sampling import MAX_FORM_BYTES
from rooflax.loading.tokenizer import Tokenizer
from rooflax.structured import Grammars
from tests import goldens
from tests.gguf_cases import gguf

pytestmark = pytest.mark.oldest_jax

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": -9, "maximum": 99},
        "kinds": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
REGEX = r"(def|class) [a-zé]{2,9}\(([a-z]{1,3}, ){0,2}\):"
GRAMMAR = 'start: sum ";"\nsum: NUM (("+" | "-") NUM)~1..3\nNUM: /[1-9][0-9]{0,2}/'
FORMS = {"json_schema": SCHEMA, "regex": REGEX, "grammar": GRAMMAR}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40, 57)), [250]]


def fits(kind, text):
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    pattern = REGEX if kind == "regex" else r"[1-9]\d{0,2}([+-][1-9]\d{0,2}){1,3};"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=4, options=ExecutionOptions(layers="unrolled", decode_steps=2))


@pytest.fixture(scope="module")
def embedded():
    return LLM()


def params(kind, **given):
    return SamplingParams(**{"max_tokens": 110, kind: FORMS[kind]} | given)


def bits(constraint, count):
    return np.unpackbits(constraint.mask.view(np.uint8), bitorder="little")[:count].astype(bool)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", FORMS)
def test_random_weights_keep_the_form(llm, kind, temperature):
    given = params(kind, temperature=temperature, seed=5, n=3)
    found = llm.generate(PROMPTS, given)
    assert len(found) == 9
    for completion in found:
        assert completion.finish_reason == "stop", completion
        assert fits(kind, completion.text), completion.text
    assert len({c.text for c in found}) > (3 if temperature else 1)
    for start in range(0, 9, 3):
        alone = llm.generate(PROMPTS[start // 3], given)
        assert [c.tokens for c in alone] == [c.tokens for c in found[start : start + 3]]


@pytest.mark.parametrize("kind", FORMS)
def test_a_trained_model_keeps_the_form(embedded, kind):
    prompt = "def area(width, height):\n"
    for temperature in (0.0, 1.5):
        given = params(kind, temperature=temperature, n=2, seed=3)
        for completion in embedded.generate(prompt, given):
            assert completion.finish_reason == "stop" and fits(kind, completion.text)


@pytest.mark.parametrize("kind", FORMS)
def test_every_chosen_token_was_allowed_when_it_was_chosen(llm, kind):
    given = params(kind, temperature=1.5, seed=11).with_defaults({})
    (completion,) = llm.generate(PROMPTS[0], given)
    constraint = llm.processor.grammars.constraint(given, llm.stop_ids)
    for token in completion.tokens:
        assert not constraint.is_complete and bits(constraint, goldens.VOCAB)[token]
        constraint.accept(token)
    assert constraint.error is None and constraint.is_complete
    assert not bits(constraint, goldens.VOCAB)[list(set(range(goldens.VOCAB)) - llm.stop_ids)].any()


def test_the_mask_holds_the_tokens_after_which_the_pattern_can_still_match(llm):
    """Against every token tried by hand: `ab` once or twice, then an end."""
    whole = {"ab", "abab"}
    ends = frozenset({7})
    grammars = Grammars(llm.tokenizer, goldens.VOCAB, ends)
    spelled = {token: llm.tokenizer.decode([token]) for token in range(goldens.VOCAB)}
    pending = [("", grammars.constraint(SamplingParams(regex="(ab){1,2}"), ends))]
    seen = set()
    while pending:
        text, constraint = pending.pop()
        seen.add(text)
        wanted = {
            token
            for token, piece in spelled.items()
            if piece and token not in ends and any(w.startswith(text + piece) for w in whole)
        }
        wanted |= ends if text in whole else frozenset()
        assert set(np.flatnonzero(bits(constraint, goldens.VOCAB))) == wanted, text
        assert constraint.is_complete == (text == "abab")
        for token in wanted - ends:
            after = grammars.constraint(SamplingParams(regex="(ab){1,2}"), ends)
            for character in text:
                after.accept(llm.encode(character)[0])
            after.accept(token)
            pending.append((text + spelled[token], after))
    assert seen >= {"", "a", "ab", "aba", "abab"}


@pytest.mark.parametrize("kind", FORMS)
def test_a_stream_adds_up_to_what_generate_gives(llm, kind):
    given = params(kind, temperature=1.5, seed=2)
    (whole,) = llm.generate(PROMPTS[1], given)
    deltas = list(llm.stream(PROMPTS[1], given))
    assert "".join(d.text for d in deltas) == whole.text == deltas[-1].completion.text
    assert tuple(t for d in deltas for t in d.tokens) == whole.tokens
    assert 2 < len(deltas) <= len(whole.tokens)  # forced tokens come with the one before them


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}


def one_by_one(llm, prompt, given):
    """Who asks for log-probabilities has every token sampled."""
    return llm.generate(prompt, replace(given, logprobs=0))[0]


def num_steps(llm, prompt, given):
    before = llm._engine.metrics.num_steps
    found = llm.generate(prompt, given)
    return llm._engine.metrics.num_steps - before, [completion.tokens for completion in found]


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["", "penalties"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", FORMS)
def test_forced_tokens_are_the_ones_that_would_be_sampled(llm, kind, temperature, penalties):
    given = params(kind, temperature=temperature, seed=7, **penalties)
    wanted = [one_by_one(llm, prompt, given).tokens for prompt in PROMPTS]
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        steps, found = num_steps(llm, prompt, given)
        assert found == [tokens]
        if kind != "grammar":  # which forces nothing
            assert steps < 0.85 * len(tokens)
    assert [c.tokens for c in llm.generate(PROMPTS, given)] == wanted


def test_forced_tokens_count_however_steps_cut_them(llm, folder):
    """Of a run of forced tokens one may be left for a step of decode rows alone."""

    async def ask(given):
        async with AsyncLLM(folder, max_num_seqs=4, max_tokens_per_step=4) as server:
            return [(await server.generate(PROMPTS[0], one))[0].tokens for one in given]

    given = [
        SamplingParams(
            regex=f"{run}[{run[-1]}xy]{{20}}", temperature=0.0, max_tokens=40, frequency_penalty=2.0
        )
        for run in ("qzjk", "qzjkv", "qzjkvw", "qzjkvwg")
    ]
    wanted = [llm.generate(PROMPTS[0], one)[0].tokens for one in given]
    assert asyncio.run(ask(given)) == wanted


def test_forced_tokens_keep_every_limit(llm):
    """`class ` is forced after its first letter."""
    form = {"regex": "(class|def) [ab]{3}(ring|ling)", "temperature": 0.0, "max_tokens": 40}
    whole = one_by_one(llm, PROMPTS[0], SamplingParams(**form))
    text = [llm.tokenizer.decode([token]) for token in whole.tokens]
    limits = [{"max_tokens": count} for count in range(1, len(text) + 2)]
    limits += [{"stop_token_ids": [token]} for token in whole.tokens]
    limits += [{"stop_token_ids": [t], "min_tokens": 4} for t in whole.tokens]
    limits += [{"stop": "".join(text[at : at + 2])} for at in range(len(text) - 1)]
    limits += [{"stop": text[1], "min_tokens": 5}, {"min_tokens": len(text) + 1}]
    limits += [{"banned_token_ids": [token]} for token in whole.tokens]
    limits += [{"allowed_token_ids": whole.tokens[:3]}, {"logit_bias": {whole.tokens[2]: -99.0}}]
    for limit in limits:
        given = SamplingParams(**form | limit)
        (found,) = llm.generate(PROMPTS[0], given)
        wanted = one_by_one(llm, PROMPTS[0], given)
        same = ("tokens", "text", "finish_reason", "error")
        assert all(getattr(found, n) == getattr(wanted, n) for n in same), (limit, found, wanted)


def test_forms_beside_other_requests_change_nothing_for_them(llm):
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    each = [free, params("regex", temperature=0.0), free]
    together = llm.generate(PROMPTS, each)
    for prompt, given, completion in zip(PROMPTS, each, together, strict=True):
        assert completion.tokens == llm.generate(prompt, given)[0].tokens
    assert fits("regex", together[1].text)


def test_penalties_biases_and_log_probabilities_go_with_a_form(llm):
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.7}
    bias = dict.fromkeys(llm.encode("z"), 30.0)
    given = {"temperature": 1.2, "seed": 4, "logprobs": 3}
    found = [
        llm.generate(PROMPTS[0], params("regex", **given, **more))[0]
        for more in ({}, penalties, {"logit_bias": bias}, {"banned_token_ids": llm.encode("d")})
    ]
    assert all(fits("regex", completion.text) for completion in found)
    assert "z" in found[2].text and found[3].text.startswith("class")
    for completion in found:
        scores = llm.score([[*PROMPTS[0], *completion.tokens]])[0][len(PROMPTS[0]) - 1 :]
        logged = [entry.logprob for entry in completion.logprobs]
        np.testing.assert_allclose(logged, scores, atol=1e-4)  # raw: before the form


def test_max_tokens_and_stop_strings_cut_a_text_that_could_have_fitted(llm):
    whole = llm.generate(PROMPTS[0], params("json_schema", temperature=0.0))[0]
    cut = llm.generate(PROMPTS[0], params("json_schema", temperature=0.0, max_tokens=5))[0]
    assert (cut.finish_reason, cut.tokens) == ("length", whole.tokens[:5])
    exact = params("json_schema", temperature=0.0, max_tokens=len(whole.tokens))
    assert llm.generate(PROMPTS[0], exact)[0].finish_reason == "stop"
    ended = llm.generate(PROMPTS[0], params("json_schema", temperature=0.0, stop='":'))[0]
    assert ended.text == whole.text[: whole.text.index('":')] and ended.finish_reason == "stop"


def test_a_text_may_end_where_the_form_may_and_nowhere_else(llm):
    end = llm.encode("Q")[0]
    eager = {"stop_token_ids": [end], "logit_bias": {end: 100.0}, "temperature": 0.0}
    (found,) = llm.generate(PROMPTS[0], SamplingParams(regex="(ab)+", max_tokens=40, **eager))
    assert (found.text, found.finish_reason, found.tokens[-1]) == ("ab", "stop", end)
    later = SamplingParams(regex="(ab)+", max_tokens=40, min_tokens=6, **eager)
    (found,) = llm.generate(PROMPTS[0], later)
    assert re.fullmatch("(ab)+", found.text) and len(found.tokens) >= 7
    assert found.finish_reason == "stop"
    endless = SamplingParams(regex="(ab)+", max_tokens=9, temperature=0.0, ignore_eos=True)
    (found,) = llm.generate(PROMPTS[0], endless)
    assert found.finish_reason == "length" and len(found.tokens) == 9


def test_end_of_sequence_ids_are_no_part_of_a_text(folder, tmp_path):
    """The id that ends every text spells a letter here, and the pattern wants that letter."""
    import shutil

    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    end = LLM(folder).encode("b")[0]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    llm = LLM(tmp_path / "m")
    assert end in llm.stop_ids
    given = {"temperature": 0.0, "max_tokens": 20}
    with pytest.raises(RequestError, match="regex has no valid output.*no token fits"):
        llm.generate(PROMPTS[0], SamplingParams(regex="b", **given))
    bias = {end: 100.0}
    (found,) = llm.generate(PROMPTS[0], SamplingParams(regex="[abc]{2,}", logit_bias=bias, **given))
    assert re.fullmatch("[ac]{2}", found.text) and found.tokens[-1] == end
    (found,) = llm.generate(PROMPTS[0], SamplingParams(regex="[abc]{2,}", ignore_eos=True, **given))
    assert re.fullmatch("[ac]{20}", found.text) and found.finish_reason == "length"


def test_a_form_that_ends_before_min_tokens_is_an_error_of_its_own(llm):
    given = SamplingParams(regex="ab", min_tokens=9, max_tokens=20, temperature=0.0)
    (found,) = llm.generate(PROMPTS[0], given)
    assert found.finish_reason == "error"
    assert "complete after 2 tokens and min_tokens is 9" in found.error


def test_nothing_left_to_choose_is_not_taken_for_nan(llm):
    free = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    blocked = params("regex", allowed_token_ids=llm.encode("d"), temperature=0.0)
    found = llm.generate(PROMPTS[:2], [blocked, free])
    assert found[0].finish_reason == "error" and "No token was left" in found[0].error
    assert len(found[0].tokens) == 1
    assert found[1].tokens == llm.generate(PROMPTS[1], free)[0].tokens
    everything = SamplingParams(allowed_token_ids=[4], banned_token_ids=[4], max_tokens=3)
    assert "No token was left" in llm.generate(PROMPTS[0], everything)[0].error


class Fails:
    """A guide that allows everything, and gives up after three tokens."""

    def __init__(self):
        self.mask = np.full((goldens.VOCAB + 31) // 32, -1, np.int32)
        self.is_complete, self.error, self.seen = False, None, []

    def accept(self, token):
        self.seen.append(token)
        if len(self.seen) == 3:
            self.error = "It cannot go on."


def test_a_guide_that_fails_at_work_ends_its_own_request(llm):
    free = SamplingParams(temperature=0.0, max_tokens=12).with_defaults({})
    alone = llm.generate(PROMPTS[1], free)[0].tokens
    samples = [
        llm.processor.samples(index, prompt, free)[0] for index, prompt in enumerate(PROMPTS[:2])
    ]
    constraint = Fails()
    constrain(samples[0].sequence, constraint)
    deltas = list(llm._run(samples))
    done = {d.prompt: d.completion for d in deltas if d.completion}
    assert (done[0].finish_reason, done[0].error) == ("error", "It cannot go on.")
    assert list(done[0].tokens) == constraint.seen and len(constraint.seen) == 3
    assert done[1].tokens == alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ExecutionOptions(use_cache=False), marks=pytest.mark.nightly),
        pytest.param(ExecutionOptions(jit=False), marks=pytest.mark.nightly),
        ExecutionOptions(layers="scan", decode_steps=8),
        pytest.param(
            ExecutionOptions(kernels="reference", decode_steps=1), marks=pytest.mark.nightly
        ),
    ],
    ids=["no cache", "no jit", "scan", "reference"],
)
def test_no_setting_changes_the_text(folder, llm, options):
    other = LLM(folder, options=options)
    given = params("grammar", temperature=1.5, seed=8)
    assert other.generate(PROMPTS[0], given)[0].tokens == llm.generate(PROMPTS[0], given)[0].tokens


@pytest.mark.parametrize("vocab_size", [263, 256, 97, 300])
def test_a_models_vocabulary_may_be_larger_or_smaller_than_the_tokenizers(llm, vocab_size):
    """Padding of an embedding is never allowed, nor are ids that the model does not have."""
    wanted = bits(llm.processor.grammars.constraint(SamplingParams(regex=".+"), frozenset()), 263)
    grammars = Grammars(llm.tokenizer, vocab_size, ())
    constraint = grammars.constraint(
        SamplingParams(regex=".+"), frozenset({vocab_size, vocab_size - 1})
    )
    assert constraint.mask.shape == ((vocab_size + 31) // 32,)
    mask = bits(constraint, constraint.mask.size * 32)
    expected = np.zeros(mask.size, bool)
    expected[: min(263, vocab_size)] = wanted[:vocab_size]
    np.testing.assert_array_equal(mask, expected)
    assert mask.sum() > 50


@pytest.mark.parametrize("text", ["{", " {", '"é日": [', "  x", "a\u0301"])
def test_forced_text_is_cut_into_tokens_that_spell_it(llm, text):
    for tokenizer in (llm.tokenizer, Tokenizer(gguf("llama2", "f32"))):
        vocabulary = structured._Vocabulary(tokenizer, tokenizer.vocab_size)
        for ids in (vocabulary(text), vocabulary._cut(text.encode())):
            assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()


CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"'
SLOW = "start: A\nA: " + " & ".join(f"/(.*[a-z]){{{i}}}.*{i}.*/" for i in range(1, 30))


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"regex": "(ab"}, "regex cannot be used: unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text fits it"),
        ({"regex": "()"}, "no text but the empty one"),
        ({"json_schema": {"type": "objct"}}, "json_schema cannot be used: Invalid type: objct"),
        ({"json_schema": {"not": {}}}, r"cannot be used: not cannot be forced"),
        ({"json_schema": {"enum": []}}, "Unsatisfiable"),
        ({"grammar": "start: foo"}, 'grammar cannot be used: .*unknown name: "foo"'),
        ({"grammar": "start: start"}, "no text fits it"),
        ({"grammar": CHAIN}, "too large or nested too deeply"),
        ({"json_schema": '{"items":' * 300 + "{}" + "}" * 300}, "recursion limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compiled_is_rejected_in_a_sentence(llm, form, why):
    with pytest.raises(RequestError, match=why) as caught:
        llm.generate(PROMPTS[0], SamplingParams(**form))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_compiling_has_its_time(llm, monkeypatch):
    monkeypatch.setattr(structured, "COMPILE_S", 1.0)
    with pytest.raises(RequestError, match="grammar takes more than 1 s to compile"):
        llm.generate(PROMPTS[0], SamplingParams(grammar=SLOW))


def test_forms_have_a_size_and_there_is_one_of_them():
    for kind, text in (("regex", "a"), ("grammar", "a"), ("json_schema", '{"a": "%s"}')):
        big = text * (MAX_FORM_BYTES + 1) if "%s" not in text else text % ("a" * MAX_FORM_BYTES)
        with pytest.raises(RequestError, match=f"{kind} has .* bytes and may have 65536"):
            SamplingParams(**{kind: big})
    with pytest.raises(RequestError, match="regex and grammar are given"):
        SamplingParams(regex="a", grammar="start: A")


def test_a_schema_is_kept_as_it_came_and_params_can_be_compared():
    schema = {"properties": {"b": {}, "a": {}}, "type": "object"}
    given = SamplingParams(json_schema=schema)
    assert given.json_schema == json.dumps(schema)
    assert given == SamplingParams(json_schema=json.dumps(schema, indent=2))
    schema["type"] = "array"
    assert "object" in given.json_schema
    assert given.with_defaults({}).structured_output == ("json_schema", given.json_schema)
    assert SamplingParams(temperature=0.0).with_defaults({}).is_greedy
    assert not SamplingParams(temperature=0.0, regex="a").with_defaults({}).is_greedy


def test_g4_compiled_forms_are_kept_and_the_oldest_is_dropped(llm, monkeypatch):
    tried = []
    monkeypatch.setattr(structured, "_try_apart", lambda kind, texts: tried.extend(texts) or [""])
    monkeypatch.setattr(structured, "KEPT", 2)
    grammars = Grammars(llm.tokenizer, goldens.VOCAB, ())
    for pattern in ("aa", "bb", "aa", "cc", "aa", "bb"):
        grammars.constraint(SamplingParams(regex=pattern), frozenset())
    assert tried == ["aa", "bb", "cc", "bb"]


def test_without_the_extra_a_form_says_what_to_install(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "rooflax.grammar_probe", raising=False)
    monkeypatch.delattr("rooflax.grammar_probe", raising=False)
    with pytest.raises(RequestError, match=r"regex needs .*pip install llguidance"):
        llm.generate(PROMPTS[0], SamplingParams(regex="never seen before"))
