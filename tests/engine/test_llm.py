"""Text in, text out: batches, samples, stops, log-probabilities, cancellation, rejections."""

import dataclasses
import gc
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams, decode_step, load, new_cache, prefill
from rooflax.errors import RequestError, UnsupportedModelError
from rooflax.fields.sampling import CHAT_SAMPLING
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

PROMPTS = [[3, 1, 4, 1, 5], list(range(40, 57)), [250], list(range(100, 130))]


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_num_seqs=4)


def params(**given):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | given)


SAMPLED = {"temperature": 1.5, "top_k": 50, "top_p": 0.95}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"seed": 5, **SAMPLED},
        {"seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0.8},
    ],
    ids=["greedy", "sampled", "penalties"],
)
def test_c15_a_batch_gives_what_each_prompt_gives_alone(llm, given):
    together = llm.generate(PROMPTS, params(**given))
    alone = [llm.generate([prompt], params(**given))[0] for prompt in PROMPTS]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert [c.text for c in together] == [c.text for c in alone]
    assert [list(c.prompt_tokens) for c in together] == PROMPTS
    reordered = llm.generate(PROMPTS[::-1], params(**given))[::-1]
    assert [c.tokens for c in reordered] == [c.tokens for c in together]


def test_each_prompt_may_have_its_own_params(llm):
    each = [params(), params(seed=3, **SAMPLED), params(max_tokens=4), params(logprobs=2)]
    together = llm.generate(PROMPTS, each)
    for prompt, given, completion in zip(PROMPTS, each, together, strict=True):
        assert completion.tokens == llm.generate([prompt], given)[0].tokens
    assert [c.logprobs is not None for c in together] == [False, False, False, True]
    with pytest.raises(RequestError, match="2 SamplingParams for 4 prompts"):
        llm.generate(PROMPTS, each[:2])


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(llm):
    first, again = (llm.generate([PROMPTS[0]], params(seed=1, **SAMPLED))[0] for _ in range(2))
    other = llm.generate([PROMPTS[0]], params(seed=2, **SAMPLED))[0]
    assert first.tokens == again.tokens != other.tokens


def test_decoding_in_any_number_of_steps_stops_at_max_tokens(llm):
    whole = llm.generate([PROMPTS[0]], params())[0].tokens
    for count in (1, 2, 7, 8, 9):
        completion = llm.generate([PROMPTS[0]], params(max_tokens=count))[0]
        assert completion.tokens == whole[:count]
        assert completion.finish_reason == "length"


def test_the_end_of_the_context_is_length(llm):
    prompt = [int(t) for t in np.random.RandomState(0).randint(0, 262, 120)]
    for asked in (None, 11):
        completion = llm.generate([prompt], params(max_tokens=asked))[0]
        assert len(completion.tokens) == 131 - 120 and completion.finish_reason == "length"
    completion = llm.generate([prompt + prompt[:10]], params(max_tokens=1))[0]
    assert len(completion.tokens) == 1


def test_a_stop_id_ends_the_text_and_is_not_part_of_it(llm):
    whole = llm.generate([PROMPTS[0]], params())[0]
    stop = whole.tokens[6]
    first = whole.tokens.index(stop)
    completion = llm.generate([PROMPTS[0]], params(stop_token_ids=[stop]))[0]
    assert completion.tokens == whole.tokens[: first + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == llm.tokenizer.decode(whole.tokens[:first])


def test_end_of_sequence_ids_of_the_checkpoint(folder, tmp_path, llm):
    whole = llm.generate([PROMPTS[0]], params())[0]
    end = whole.tokens[5]
    first = whole.tokens.index(end)
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end, 262], "temperature": 0.7, "top_k": 1})
    )
    other = LLM(tmp_path / "m")
    assert other.stop_ids == {end, 262}
    assert (llm.processor.chat_values(), other.processor.chat_values()) == (CHAT_SAMPLING, {})
    stopped = other.generate([PROMPTS[0]], params(ignore_eos=False))[0]
    assert stopped.tokens == whole.tokens[: first + 1] and stopped.finish_reason == "stop"
    assert other.generate([PROMPTS[0]], params())[0].tokens == whole.tokens
    # The file's top_k = 1 is the default, so an unset request is as good as greedy.
    by_default = other.generate([PROMPTS[0]], SamplingParams(max_tokens=5))[0]
    assert by_default.tokens == whole.tokens[:5]
    other.processor.forget_sampling_defaults()
    assert other.stop_ids == {end, 262} and other.processor.chat_values() == {}
    drawn = [other.generate([PROMPTS[0]], SamplingParams(max_tokens=9, seed=s))[0] for s in (1, 2)]
    wanted = [
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=9, seed=s, temperature=1))[0]
        for s in (1, 2)
    ]
    assert drawn[0].tokens != drawn[1].tokens
    assert all(
        one.tokens == full.tokens[: len(one.tokens)]
        for one, full in zip(drawn, wanted, strict=True)
    )


def opened_with(folder, target, **generation):
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(generation))
    return LLM(target)


def test_what_generation_config_suppresses_biases_and_stops(folder, tmp_path, llm):
    first = llm.generate([PROMPTS[0]], params(max_tokens=1))[0].tokens[0]
    banned = [first]
    for _ in range(2):
        one = llm.generate([PROMPTS[0]], params(max_tokens=1, banned_token_ids=banned))[0]
        banned.append(one.tokens[0])
    first, second, third = banned
    other = opened_with(
        folder, tmp_path / "m",
        suppress_tokens=[first, 10**6], bad_words_ids=[[second]], sequence_bias=[[[250], 50.0]],
        min_new_tokens=3, do_sample=False,
    )  # fmt: skip
    ask = {"max_tokens": 6, "temperature": 0.0}
    wanted = llm.generate(
        PROMPTS, params(banned_token_ids=[first, second], logit_bias={250: 50.0}, max_tokens=6)
    )
    got = other.generate(PROMPTS, SamplingParams(**ask, ignore_eos=True))
    assert [c.tokens for c in got] == [c.tokens for c in wanted]
    # A request adds to what the file says, and its own bias of an id wins.
    more = other.generate(
        [PROMPTS[0]],
        SamplingParams(max_tokens=1, banned_token_ids=[250], logit_bias={third: 90.0}),
    )
    assert more[0].tokens == (third,)
    again = other.generate([PROMPTS[0]], SamplingParams(max_tokens=1, logit_bias={250: -100.0}))
    assert again[0].tokens == (third,)
    # min_new_tokens: an end may not come before, though the request lets fewer come.
    ended = other.generate([PROMPTS[0]], SamplingParams(max_tokens=5, stop_token_ids=[250]))[0]
    assert len(ended.tokens) > 3 and 250 not in ended.tokens[:3]
    assert len(other.generate([PROMPTS[0]], SamplingParams(max_tokens=2))[0].tokens) == 2
    free = LLM(tmp_path / "m", generation_config="none")
    one = free.generate([PROMPTS[0]], params(max_tokens=1))[0]
    assert one.tokens == (first,)


def test_lengths_and_stops_of_generation_config(folder, tmp_path, llm):
    prompt, size = PROMPTS[0], len(PROMPTS[0])
    whole = llm.generate([prompt], params(max_tokens=12))[0]
    stop = llm.tokenizer.decode(whole.tokens[4:6])
    other = opened_with(
        folder, tmp_path / "a", max_length=size + 9, min_length=size + 4, stop_strings=[stop],
        do_sample=False,
    )  # fmt: skip
    assert stop and stop not in other.generate([prompt])[0].text
    long = LLM(tmp_path / "a", generation_config="none")
    assert stop in long.generate([prompt], params(max_tokens=12))[0].text
    limited = opened_with(folder, tmp_path / "b", max_length=size + 9, min_length=size + 4)
    end = whole.tokens[0]
    texts = limited.generate(
        [prompt], [SamplingParams(temperature=0.0, stop_token_ids=[end], seed=1)]
    )
    assert end not in texts[0].tokens[:4] and 4 < len(texts[0].tokens) <= 9
    assert len(limited.generate([prompt], params(max_tokens=None))[0].tokens) == 9
    assert len(limited.generate([prompt], params(max_tokens=12))[0].tokens) == 12
    with pytest.raises(RequestError, match=r"44 tokens .* max_length of 14; give max_tokens"):
        limited.generate([list(range(44))], params(max_tokens=None))


def test_what_generation_config_asks_for_and_is_not_computed(folder, tmp_path):
    other = opened_with(folder, tmp_path / "m", no_repeat_ngram_size=3)
    with pytest.raises(UnsupportedModelError, match="'no_repeat_ngram_size' = 3, which rooflax"):
        other.generate([PROMPTS[0]], params(max_tokens=1))
    other = LLM(tmp_path / "m", generation_config="none")
    assert len(other.generate([PROMPTS[0]], params(max_tokens=1))[0].tokens) == 1
    with pytest.raises(RequestError, match="generation_config is 'some'"):
        LLM(tmp_path / "m", generation_config="some")


@pytest.fixture(scope="module")
def ascii_only(llm):
    """A bias that keeps to letters and to the vocabulary's merged tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    ids = {llm.tokenizer.token_to_id(t) for t in ("the", "th", "in", "er", "on", "Ġa")}
    return dict.fromkeys(ids | set(llm.encode(letters)), 90.0)


def test_stop_strings_split_over_tokens_are_never_emitted(llm, ascii_only):
    """Substrings of what the model says, as stop strings; pieces as they stream."""
    said = {"max_tokens": 40, "logit_bias": ascii_only, "seed": 3, "temperature": 3.0}
    whole = llm.generate([PROMPTS[1]], params(**said))[0]
    text = whole.text
    assert len(text) > len(whole.tokens) == 40 and text.isascii()
    for start in (0, 1, 7, 16, 25, 36):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            pieces, final = [], None
            for delta in llm.stream([PROMPTS[1]], params(**said, stop=[stop, "never this"])):
                pieces.append(delta.text)
                final = delta.completion or final
            assert "".join(pieces) == final.text == text[: text.index(stop)]
            assert final.finish_reason == "stop"
            assert final.tokens == whole.tokens[: len(final.tokens)]
            assert stop in llm.tokenizer.decode(final.tokens)
            assert stop not in llm.tokenizer.decode(final.tokens[:-1])


@pytest.mark.parametrize("steps", cases([1, 2, 4, 16], default=[1, 4]))
def test_a_stop_string_below_min_tokens_ends_nothing_in_any_number_of_steps(folder, steps):
    """What a token below min_tokens completed stays text; the next one of the kind counts."""
    llm = LLM(folder, options=ExecutionOptions(decode_steps=steps))
    whole = llm.generate([PROMPTS[1]], params(max_tokens=24))[0]
    texts = [llm.tokenizer.decode(whole.tokens[: n + 1]) for n in range(24)]
    stop = texts[3][len(texts[1]) :] or texts[4]
    given = params(max_tokens=24, min_tokens=5, stop=[stop])
    later = texts[-1].find(stop, len(texts[4]) - len(stop) + 1)
    wanted = texts[-1] if later < 0 else texts[-1][:later]
    pieces = [delta.text for delta in llm.stream([PROMPTS[1]], given)]
    (found,) = llm.generate([PROMPTS[1]], given)
    assert "".join(pieces) == found.text == wanted
    assert len(found.tokens) >= 5


def test_of_several_stop_strings_the_first_in_the_text_counts(llm, ascii_only):
    said = {"max_tokens": 40, "logit_bias": ascii_only, "seed": 3, "temperature": 3.0}
    text = llm.generate([PROMPTS[1]], params(**said))[0].text
    stops = [text[20:24], text[9:12], text[30:31]]
    got = llm.generate([PROMPTS[1]], params(**said, stop=stops))[0]
    assert got.text == text[: min(text.index(stop) for stop in stops)]


def test_what_only_looks_like_a_stop_string_is_emitted_in_the_end(llm):
    whole = llm.generate([PROMPTS[1]], params())[0]
    last = whole.text[-1]
    got = llm.generate([PROMPTS[1]], params(stop=[last + "\0never"]))[0]
    assert got.text == whole.text and got.finish_reason == "length"


def test_streamed_pieces_add_up_and_never_hold_half_a_character(llm):
    """The byte-level vocabulary makes many invalid and many multi-byte characters."""
    prompts = ["naïve café 日本語 😀", "the 👩‍👩‍👧"]
    biased = dict.fromkeys(llm.tokenizer.encode("é日本😀"), 3.0)
    given = params(max_tokens=40, seed=4, temperature=2.0, logit_bias=biased)
    pieces = {0: [], 1: []}
    final = {}
    for delta in llm.stream(prompts, given):
        pieces[delta.prompt].append(delta.text)
        if delta.completion:
            final[delta.prompt] = delta.completion
    for index in (0, 1):
        assert "".join(pieces[index]) == final[index].text
        assert final[index].text == llm.tokenizer.decode(final[index].tokens)
        assert list(final[index].prompt_tokens) == llm.encode(prompts[index])


def test_streamed_tokens_add_up(llm):
    tokens, finals = {i: [] for i in range(4)}, {}
    for delta in llm.stream(PROMPTS, params()):
        tokens[delta.prompt].extend(delta.tokens)
        if delta.completion:
            finals[delta.prompt] = delta.completion
    assert {i: tuple(t) for i, t in tokens.items()} == {i: c.tokens for i, c in finals.items()}


def test_logprobs_equal_score(llm):
    completion = llm.generate([PROMPTS[1]], params(logprobs=5, max_tokens=9))[0]
    assert len(completion.logprobs) == len(completion.tokens) == 9
    scores = llm.score([[*PROMPTS[1], *completion.tokens]])[0]
    assert scores.shape == (len(PROMPTS[1]) + 8,) and scores.dtype == np.float32
    generated = scores[len(PROMPTS[1]) - 1 :]
    for token, entry, score in zip(completion.tokens, completion.logprobs, generated, strict=True):
        assert entry.logprob == pytest.approx(float(score), abs=1e-4)
        assert len(entry.top) == 5
        assert entry.top[0] == (token, pytest.approx(entry.logprob, abs=1e-5))  # greedy
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and values[0] <= 0


def test_logprobs_of_none_of_the_best(llm):
    completion = llm.generate([PROMPTS[0]], params(logprobs=0, max_tokens=3, seed=2, **SAMPLED))[0]
    assert [entry.top for entry in completion.logprobs] == [()] * 3
    assert all(entry.logprob < 0 for entry in completion.logprobs)


def test_logprobs_end_where_a_stop_string_cut(llm):
    whole = llm.generate([PROMPTS[1]], params())[0]
    stop = next(c for c in whole.text[3:] if c != "�" and whole.text.index(c) > 1)
    completion = llm.generate([PROMPTS[1]], params(stop=[stop], logprobs=1))[0]
    assert len(completion.logprobs) == len(completion.tokens) < 20


def test_scores_of_continuations_are_the_end_of_those_of_the_whole(llm):
    prompts, ends = PROMPTS[:2], [[7, 8, 9], [5]]
    whole = llm.score([[*p, *e] for p, e in zip(prompts, ends, strict=True)])
    for all_, end, part in zip(whole, ends, llm.score(prompts, ends), strict=True):
        np.testing.assert_array_equal(part, all_[-len(end) :])
    assert llm.score([[1, 2]], [[]])[0].shape == (0,)
    with pytest.raises(RequestError, match="1 continuations for 2 prompts"):
        llm.score(prompts, [[1]])
    with pytest.raises(RequestError, match="no tokens"):
        llm.score([[]], [[1]])


def test_prompt_logprobs_equal_score(llm):
    """Chunks, the prefix cache and neighbours make no difference."""
    prompt = PROMPTS[3]
    wanted = llm.score([prompt])[0]
    found = llm.generate([prompt, PROMPTS[0]], [params(prompt_logprobs=3), params()])
    assert found[1].prompt_logprobs is None
    for entries in (
        found[0].prompt_logprobs,
        llm.generate([prompt], params(prompt_logprobs=0))[0].prompt_logprobs,
    ):
        assert len(entries) == len(wanted) == len(prompt) - 1
        np.testing.assert_allclose([e.logprob for e in entries], wanted, atol=1e-4)
    assert all(len(e.top) == 3 for e in found[0].prompt_logprobs)
    assert llm.generate([[4]], params(prompt_logprobs=1))[0].prompt_logprobs == ()
    assert found[0].tokens == llm.generate([prompt], params())[0].tokens


@pytest.mark.every_jax
def test_a_second_prompt_with_the_same_beginning_takes_it_from_the_cache(folder):
    llm = LLM(folder)
    prompt = list(range(70, 120))
    first, second = (llm.generate([[*prompt, n]], params())[0] for n in (1, 2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    cold = LLM(folder, prefix_caching=False)
    again = [cold.generate([[*prompt, n]], params())[0] for n in (1, 2, 2)]
    assert [c.tokens for c in again] == [first.tokens, second.tokens, second.tokens]
    assert [c.num_cached_tokens for c in again] == [0, 0, 0]


EFFECTS = {
    "max_tokens": 7, "min_tokens": 15, "temperature": 1.5, "top_k": 1, "top_p": 1e-6, "min_p": 1.0,
    "seed": 4, "stop": None, "stop_token_ids": None, "repetition_penalty": 1.9,
    "presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {9: 100.0},
    "allowed_token_ids": [5, 6], "banned_token_ids": None, "logprobs": 2, "prompt_logprobs": 2,
    "n": 2, "ignore_eos": None, "num_beams": 3, "length_penalty": 3.0, "early_stopping": True,
    "json_schema": {"type": "boolean"}, "regex": "a+b", "grammar": 'start: "a"',
}  # fmt: skip


def test_every_sampling_field_has_its_effect(llm):
    assert set(EFFECTS) == {f.name for f in dataclasses.fields(SamplingParams)}
    drawn = {"temperature": 2.0, "seed": 1}
    base = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}

    def run(**given):
        found = llm.generate([PROMPTS[1]], SamplingParams(**given))
        return [(c.text, c.tokens, c.finish_reason, c.logprobs, c.prompt_logprobs) for c in found]

    tokens = llm.generate([PROMPTS[1]], SamplingParams(**base))[0].tokens
    middle = tokens[9]
    for name, value in EFFECTS.items():
        setting = {
            "stop": llm.generate([PROMPTS[1]], SamplingParams(**base))[0].text[3],
            "stop_token_ids": [middle],
            "banned_token_ids": [middle],
        }.get(name, value)
        before = base | (drawn if name in ("top_k", "top_p", "min_p", "seed") else {})
        if name in ("length_penalty", "early_stopping"):
            before |= {"num_beams": 3, "n": 3, "stop_token_ids": list(tokens[:6])}
        if name == "early_stopping":
            before |= {"length_penalty": 3.0}
        if name == "min_tokens":
            before |= {"stop_token_ids": [middle]}
        if name == "ignore_eos":  # see test_ignore_eos below
            continue
        assert run(**before) != run(**before | {name: setting}), name


def test_min_tokens_puts_off_every_way_to_stop(llm):
    tokens = llm.generate([PROMPTS[1]], params())[0].tokens
    early = llm.generate([PROMPTS[1]], params(stop_token_ids=[tokens[4]]))[0]
    assert len(early.tokens) <= 5
    late = llm.generate([PROMPTS[1]], params(stop_token_ids=[tokens[4]], min_tokens=9))[0]
    assert len(late.tokens) >= 9 and tokens[4] not in late.tokens[:9]
    with pytest.raises(RequestError, match="min_tokens.*max_tokens"):
        params(min_tokens=21)
    with pytest.raises(RequestError, match="min_tokens needs at most 32"):
        llm.generate([PROMPTS[0]], params(min_tokens=2, stop_token_ids=range(33)))


@pytest.mark.every_jax
@pytest.mark.parametrize("kernels", [pytest.param("xla", marks=pytest.mark.nightly), None])
def test_c7_what_is_not_finite_ends_alone_and_is_never_shared(folder, kernels):
    """Token 200's embedding is NaN: whoever reads it fails, nobody else sees it, then or later."""
    llm = LLM(folder, max_num_seqs=3, options=ExecutionOptions(kernels=kernels))
    prompts = [list(range(100, 140)), [*range(100, 120), 200, *range(20)], PROMPTS[1]]
    wanted = [llm.generate([p], params())[0].tokens for p in (prompts[0], prompts[2])]
    embed = llm.model.weights["embed"].at[200].set(np.nan)
    llm.model = dataclasses.replace(llm.model, weights=llm.model.weights | {"embed": embed})
    llm._engine = None
    for _ in range(3):
        found = llm.generate(prompts, params())
        assert [c.finish_reason for c in found] == ["length", "error", "length"]
        assert "NaN" in found[1].error and found[1].tokens == ()
        assert [found[0].tokens, found[2].tokens] == wanted
        assert found[1].num_cached_tokens <= 16
    scheduler = llm._engine.scheduler
    assert not any(scheduler.blocks.num_used)
    assert all(np.isfinite(pool).all() for pool in llm._engine.runner.cache.k)
    assert all(np.isfinite(pool).all() for pool in llm._engine.runner.cache.v)


def clean(engine):
    scheduler = engine.scheduler
    return (
        not scheduler.has_unfinished
        and len(scheduler._free_slots) == engine.config.max_num_seqs
        and not any(scheduler.blocks.num_used)
    )


def test_a_stream_closed_early_leaves_the_engine_clean(llm):
    wanted = [c.tokens for c in llm.generate(PROMPTS, params())]
    for pieces in (1, 3):
        stream = llm.stream(PROMPTS, params())
        for _ in range(pieces):
            next(stream)
        assert not clean(llm._engine)
        stream.close()
        assert clean(llm._engine)
    assert [c.tokens for c in llm.generate(PROMPTS, params())] == wanted


def test_a_stream_that_is_never_read_costs_nothing(llm):
    llm.generate([PROMPTS[0]], params())
    llm.stream(PROMPTS, params()).close()
    assert clean(llm._engine)


def test_a_cancelled_sequence_says_so(llm):
    stream = llm.stream([PROMPTS[0]], params())
    next(stream)
    (sequence,) = llm._engine.scheduler.running
    stream.close()
    assert sequence.finish_reason == "abort"


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([[]], "no tokens"),
        ("", "no tokens"),
        ([[1, 263]], "263.*0 to 262"),
        ([[-1]], "-1.*0 to 262"),
        ([[1] * 131], "131 tokens.*131"),
        ([[1] * 500], "500 tokens.*131"),
        ([[1, 2], [1] * 140], "140 tokens.*131"),
    ],
)
def test_prompts_that_cannot_run_are_rejected(llm, prompt, reason):
    with pytest.raises(RequestError, match=reason):
        llm.generate(prompt, params())


@pytest.mark.every_jax
@pytest.mark.parametrize("prompt", [[[1.5]], [["a"]], [[True]], [[None]], [3.5], None, [None]])
def test_prompts_that_are_neither_text_nor_ids_are_rejected(llm, prompt):
    with pytest.raises(RequestError, match=r"prompt|token id"):
        llm.generate(prompt, params())


def test_no_prompts_give_no_completions(llm):
    assert llm.generate([], params()) == []


@pytest.mark.every_jax
def test_a_bias_for_an_id_that_is_not_there_is_rejected(llm):
    with pytest.raises(RequestError, match="263.*0 to.*262"):
        llm.generate([[1]], params(logit_bias={263: 1.0}))


@pytest.mark.parametrize(("quantize", "kv_dtype"), [(None, "float32"), ("w8a16", "float16")])
def test_the_cache_is_float16_where_products_round(quantize, kv_dtype):
    llm = LLM("preset:gpt2-tiny", quantize=quantize)
    assert llm.plan.kv_dtype == kv_dtype
    assert LLM("preset:gpt2-tiny", quantize=quantize, kv_dtype="int8").plan.kv_dtype == "int8"
    engine = llm.new_engine(num_slots=1, max_tokens=32)
    assert {pool.dtype.name for pool in jax.tree.leaves(engine.runner.cache)} == {kv_dtype}


def test_a_float16_cache_is_near_a_float32_one():
    model, tokens = load("preset:gpt2-tiny"), jnp.arange(40, dtype=jnp.int32)[None] * 7
    rows = {}
    for dtype in ("float32", "float16", "bfloat16"):
        cache = new_cache(model, max_tokens=64, dtype=dtype)
        _, cache = jax.jit(prefill)(model, cache, tokens)
        step = jnp.array([3], jnp.int32), jnp.array([40], jnp.int32)
        rows[dtype] = np.asarray(jax.jit(decode_step)(model, cache, *step)[0])
    near, far = (np.abs(rows[d] - rows["float32"]).max() for d in ("float16", "bfloat16"))
    assert 0 < 4 * near < far < 0.05


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quantize": "int3"}, "int8, int6, int4"),
        ({"dtype": "float16"}, "dtype"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": 1.5}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 132}, "132.*131"),
        ({"max_model_len": True}, "max_model_len"),
        ({"max_model_len": 64.0}, "max_model_len"),
    ],
)
def test_arguments_out_of_range_are_rejected(folder, given, reason):
    with pytest.raises(RequestError, match=reason):
        LLM(folder, **given)


def test_max_model_len_is_honoured(folder):
    short = LLM(folder, max_model_len=24)
    with pytest.raises(RequestError, match=r"max_tokens is 100 and the context of 24 has room for"):
        short.generate([PROMPTS[1]], params(max_tokens=100))
    completion = short.generate([PROMPTS[1]], params(max_tokens=None))[0]
    assert len(completion.tokens) == 24 - len(PROMPTS[1])
    assert completion.finish_reason == "length"
    with pytest.raises(RequestError, match=r"30 tokens.*24"):
        short.generate([PROMPTS[3]], params())


def test_bfloat16_stays_near(folder, llm):
    narrow = LLM(folder, dtype="bfloat16")
    assert narrow.model.weights["embed"].dtype == "bfloat16"
    wanted = llm.score([PROMPTS[3]])[0]
    got = narrow.score([PROMPTS[3]])[0]
    assert np.abs(got - wanted).mean() < 0.3


def test_timings_have_the_keys_of_the_command_line(llm):
    timings = llm.generate([PROMPTS[0]], params())[0].timings
    assert set(timings) == {
        "load_s", "compile_s", "compilations", "ttft_s", "prefill_tok_per_s", "decode_tok_per_s",
    }  # fmt: skip
    assert timings["ttft_s"] > 0 and timings["decode_tok_per_s"] > 0


def test_a_preset_is_the_same_on_every_run_and_prints_ids_without_a_token():
    first, again = LLM("preset:gpt2-tiny"), LLM("preset:gpt2-tiny")
    np.testing.assert_array_equal(first.model.weights["embed"], again.model.weights["embed"])
    assert first.stop_ids == frozenset()
    with pytest.raises(RequestError, match="preset 'nothing'"):
        LLM("preset:nothing")


@pytest.mark.every_jax
def test_a_mesh_that_is_none_is_rejected():
    with pytest.raises(RequestError, match=r"mesh is 4; it must be a Mesh, or text like tensor=4"):
        LLM(mesh=4)


def test_an_llm_that_is_deleted_leaves_no_weights(folder):
    """Whether or not the garbage collector comes by."""
    llm = LLM(folder, max_num_seqs=4, speculate="ngram")
    llm.generate(PROMPTS[:1], [params(max_tokens=3)])
    llm.generate(PROMPTS[:1], [params(max_tokens=3, num_beams=2, n=2)])
    kept = [weakref.ref(leaf) for leaf in jax.tree.leaves(llm.model.weights)]
    gc.collect()
    gc.disable()
    try:
        del llm
        assert kept and not any(leaf() is not None for leaf in kept)
    finally:
        gc.enable()
