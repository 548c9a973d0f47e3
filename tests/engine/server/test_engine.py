"""Sampling, faults and tenants through the routes to a real engine: rows P, C, A and G of the
catalogue of faults that a scripted one cannot show."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rooflax import LLM, AsyncLLM, SamplingParams
from rooflax.completion import Sample
from rooflax.engine import packing
from rooflax.models.presets import CHAT_NAME
from tests import goldens
from tests.support.server.live import serving

pytestmark = pytest.mark.oldest_jax

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "def add(a, b):\n    "
QUESTION = [{"role": "user", "content": "Who are you?"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 12},
    CHAT: {"messages": QUESTION, "max_tokens": 12},
    RESPONSES: {"input": "Who are you?", "max_output_tokens": 12},
}
every_api = pytest.mark.parametrize("path", BODIES)
both_apis = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def served():
    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4), api_keys=("one", "two")) as server:
        server.http.headers["x-api-key"] = "one"
        yield server
        server.settle()
        assert not any(server.service.engine.metrics()["blocks_used"])


@pytest.fixture(scope="module")
def drafting():
    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4, speculate="ngram")) as server:
        yield server


def ask(server, path, **fields):
    found = server.post(path, BODIES[path] | fields)
    assert found.status_code == 200, found.text
    return found.json()


def text_of(found):
    """Of the first choice."""
    if "output" in found:
        return "".join(part["text"] for item in found["output"] for part in item["content"])
    choice = found["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(server, path, **fields):
    """The texts of a stream by their index; none of its events is an error."""
    texts: dict[int, str] = {}
    lines = server.post(path, BODIES[path] | {"stream": True} | fields).text.split("\n\n")
    assert lines[-2] == "data: [DONE]", lines
    for line in lines[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return [texts[index] for index in sorted(texts)]


def logprobs_of(choice):
    found = choice["logprobs"]
    return found.get("token_logprobs") or [each["logprob"] for each in found["content"]]


def at_once(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@every_api
def test_p1_a_tiny_temperature_is_greedy(served, path):
    wanted = text_of(ask(served, path, temperature=0))
    for temperature in (1e-320, 1e-45, 1e-12):
        assert text_of(ask(served, path, temperature=temperature)) == wanted
    if path != RESPONSES:
        choice = ask(served, path, temperature=1e-320, logprobs=True if path == CHAT else 0)
        assert all(map(math.isfinite, logprobs_of(choice["choices"][0])))


@every_api
def test_p2_a_tiny_top_p_leaves_the_likeliest(served, path):
    wanted = text_of(ask(served, path, temperature=0))
    assert text_of(ask(served, path, temperature=2, top_p=1e-12)) == wanted


@both_apis
def test_p3_p4_the_likeliest_alone_is_greedy(served, path):
    wanted = text_of(ask(served, path, temperature=0))
    for one in ({"top_k": 1}, {"min_p": 1.0}):
        assert text_of(ask(served, path, temperature=2, **one)) == wanted


@both_apis
def test_p3_top_k_beyond_the_vocabulary_is_off(served, path):
    wanted = text_of(ask(served, path, temperature=2, seed=3, top_k=0))
    for top_k in (-1, 4096, 4097, 2**31 - 1):
        assert text_of(ask(served, path, temperature=2, seed=3, top_k=top_k)) == wanted


@both_apis
def test_p5_penalties_at_their_bounds(served, path):
    for name, bounds in (
        ("presence_penalty", (-2, 2)), ("frequency_penalty", (-2, 2)),
        ("repetition_penalty", (1e-6, 1e6)),
    ):  # fmt: skip
        for value in bounds:
            given = {name: value, "logprobs": True if path == CHAT else 0, "temperature": 1}
            choice = ask(served, path, **given)["choices"][0]
            assert all(map(math.isfinite, logprobs_of(choice)))


@both_apis
def test_p6_biases_against_every_token_leave_one(served, path):
    """A bias is for 1,024 ids, so the others are not allowed."""
    ids = [65, 66, 67]
    given = {"allowed_token_ids": ids, "logit_bias": {str(i): -100 for i in ids}}
    for temperature in (0, 2):
        found = ask(
            served, path, temperature=temperature, logprobs=True if path == CHAT else 0,
            return_token_ids=True, ignore_eos=True, **given,
        )["choices"][0]  # fmt: skip
        assert len(found["token_ids"]) == 12 and set(found["token_ids"]) <= set(ids)
        assert all(map(math.isfinite, logprobs_of(found)))


@both_apis
def test_p7_streams_of_several_samples_say_what_the_whole_says(served, path):
    given = {"n": 3, "seed": 5, "temperature": 1.5}
    whole = [text_of({"choices": [each]}) for each in ask(served, path, **given)["choices"]]
    assert streamed(served, path, **given) == whole
    assert len(set(whole)) > 1 or path == CHAT  # where the model is sure of itself


@both_apis
def test_p12_a_seed_gives_its_text_in_any_company(served, path):
    given = {"seed": 2**40 + 7, "temperature": 1.5}
    wanted = text_of(ask(served, path, **given))
    for seed in range(3):
        others = [{"seed": seed + k, "temperature": 1, "prompt": PROMPT * k} for k in (1, 2, 3)]
        calls = [lambda one=one: ask(served, COMPLETIONS, **one) for one in others]
        found, *_ = at_once(lambda: ask(served, path, **given), *calls)
        assert text_of(found) == wanted
    assert streamed(served, path, **given) == [wanted]
    others = {text_of(ask(served, path, **given | {"seed": seed})) for seed in range(8, 16)}
    assert others != {wanted}  # though the model is rather sure of itself


def test_p14_without_an_end_the_context_is_filled(served):
    for path, most in ((COMPLETIONS, None), (CHAT, None), (CHAT, 512)):
        size = ask(served, path, max_tokens=1)["usage"]["prompt_tokens"]
        found = ask(
            served, path, ignore_eos=True, max_tokens=512 - size if path == COMPLETIONS else None
        )
        assert found["usage"]["total_tokens"] == 512
        assert found["choices"][0]["finish_reason"] == "length"
        if most is not None:
            body = BODIES[path] | {"max_tokens": 513 - size}
            assert served.post(path, body).status_code == 400


FACTORS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True}, "n": {"n": 2}, "penalties": {"frequency_penalty": 0.5},
    "structured": {"structured_outputs": {"regex": "[a-z ]{1,20}"}},
}  # fmt: skip
FACTORS_OF = {
    COMPLETIONS: FACTORS | {"logprobs": {"logprobs": 2}, "echo": {"echo": True}},
    CHAT: FACTORS | {
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "tools": {"tools": [{"type": "function", "function": {"name": "look"}}]},
    },
}  # fmt: skip
PAIRWISE = [[(run & mask).bit_count() % 2 for mask in range(1, 9)] for run in range(16)]
"""Of eight factors, each on or off: any two of them have all four combinations."""


@both_apis
def test_p15_any_two_features_go_together(served, drafting, path):
    names = FACTORS_OF[path]
    for run, (has_drafts, has_hit, *switches) in enumerate(PAIRWISE):
        fields: dict[str, Any] = {"max_tokens": 6, "cache_salt": "warm" if has_hit else f"{run}"}
        for switch, given in zip(switches, names.values(), strict=True):
            fields |= given if switch else {}
        for _ in range(1 + has_hit):
            found = (drafting if has_drafts else served).post(path, LONG[path] | fields)
            assert found.status_code == 200, (fields, found.text)
            assert '"error"' not in found.text
        scores_prompt = {"echo", "logprobs"} <= set(fields)
        if has_hit and "stream" not in fields and not scores_prompt:
            assert found.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


LONG = {
    COMPLETIONS: {"prompt": PROMPT * 8},
    CHAT: {"messages": [{"role": "user", "content": "What does len do? " * 12}]},
}


def test_a8_a_tenants_cached_prompt_is_no_others(served):
    cached = []
    for key in ("one", "two", "one", "two"):
        found = served.post(
            CHAT, LONG[CHAT] | {"max_tokens": 1, "cache_salt": "a8"}, headers={"x-api-key": key}
        )
        cached.append(found.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0] and min(cached[2:]) > 16


def test_g5_a_schema_that_does_not_fit_is_cut(served):
    schema = {
        "type": "object", "properties": {"a": {"type": "string", "minLength": 5000}},
        "required": ["a"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for most, tokens in ((10, 10), (None, None)):  # None is to the end of the context
        found = ask(served, CHAT, response_format=form, max_tokens=most)
        choice, usage = found["choices"][0], found["usage"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"].startswith('{"a"')
        with pytest.raises(json.JSONDecodeError):
            json.loads(choice["message"]["content"])
        assert usage["completion_tokens"] == (tokens or 512 - usage["prompt_tokens"])
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    found = ask(served, RESPONSES, text=form, max_output_tokens=10)
    assert (found["status"], found["incomplete_details"]["reason"]) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip


def beyond_limits(end):
    """A grammar that compiles; what is kept of it after it has failed has no valid output."""
    names = [f"T{number}" for number in range(60)]
    terminals = [rf"{name}: /(.*[a-f]).{{{name[1:]}}}{end}/" for name in names]
    return {"grammar": "\n".join([f"start: ({'|'.join(names)})+", *terminals])}


@both_apis
@pytest.mark.parametrize("stream", [False, True])
def test_g5_a_limit_that_a_form_exceeds_at_work_is_its_own_fault(served, caplog, path, stream):
    form = beyond_limits(f"x{len(path)}{int(stream)}")
    wanted = BODIES[path] | {"structured_outputs": form, "stream": stream}
    with ThreadPoolExecutor(1) as other:
        neighbour = other.submit(ask, served, COMPLETIONS, ignore_eos=True, max_tokens=60)
        found = served.post(path, wanted | {"max_tokens": 60})
        assert neighbour.result()["usage"]["completion_tokens"] == 60
    if found.status_code == 200:
        assert stream and "invalid_schema" in found.text.split("data: ", 1)[1], found.text
    else:
        error = found.json()["error"]
        assert (found.status_code, error["code"]) == (400, "invalid_schema"), error
        assert error["param"] == "structured_outputs"
    assert "a request failed" not in caplog.text


NEIGHBOURS = [{"prompt": PROMPT * k, "max_tokens": 20} for k in (1, 2, 3)]
BAD_IDS = [(7 * k) % 900 + 100 for k in range(20)]


def fails_in(seam, monkeypatch, served, after):
    """From now on, requests with BAD_IDS fail after so many tokens."""
    runner = served.service.engine._thread.engine.runner

    def is_bad(sequence):
        return sequence.prompt_tokens == BAD_IDS and sequence.num_output_tokens >= after

    def failing(target, find):
        def call(*given, **how):
            if any(map(is_bad, find(*given))):
                raise RuntimeError("injected")
            return target(*given, **how)

        return call

    place, name, find = {
        "step": (runner, "run", lambda call, *_: call.sequences),
        "sampler": (packing, "write_params", lambda row, sequence: [sequence]),
        "detokenizer": (Sample, "take", lambda sample, *_: [sample.sequence]),
    }[seam]
    monkeypatch.setattr(place, name, failing(getattr(place, name), find))


@pytest.mark.parametrize(
    ("seam", "after"), [("step", 0), ("step", 1), ("sampler", 0), ("detokenizer", 0)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_c4_a_fault_ends_one_request(served, monkeypatch, seam, after, stream):
    bad = {"prompt": BAD_IDS, "max_tokens": 30, "ignore_eos": True}
    wanted = [text_of(ask(served, COMPLETIONS, **each)) for each in (bad, *NEIGHBOURS)]
    calls = [lambda each=each: ask(served, COMPLETIONS, **each) for each in NEIGHBOURS]
    with monkeypatch.context() as patch:
        fails_in(seam, patch, served, after)
        found, *others = at_once(lambda: served.post(COMPLETIONS, bad | {"stream": stream}), *calls)
    assert [text_of(each) for each in others] == wanted[1:]
    assert "injected" not in found.text
    if stream and found.status_code == 200:  # a piece had been written already
        *_, last, done, rest = found.text.split("\n\n")
        assert after and (done, rest) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        error = found.json()["error"]
        assert found.status_code == 500
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert text_of(ask(served, COMPLETIONS, **bad)) == wanted[0]
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_c7_a_row_that_is_not_finite_ends_alone(tmp_path, value):
    """Token 200's embedding is not finite; what others are told is what a clean model says."""
    model, golden = "qwen2_window", goldens.committed("qwen2_window")

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][200] = value

    clean = LLM(goldens.write_checkpoint(tmp_path / "clean", model, golden))
    spoilt = goldens.write_checkpoint(tmp_path / "spoilt", model, golden, change=spoil)
    prompts = [list(range(100, 140)), [*range(100, 120), 200, *range(20)], list(range(40, 57))]
    params = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True, logprobs=0)
    wanted = [clean.generate([prompt], params)[0] for prompt in (prompts[0], prompts[2])]
    body = {"max_tokens": 15, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(lambda _: AsyncLLM(spoilt, max_num_seqs=4)) as server:
        for stream in (False, True, False):
            first, bad, second = at_once(
                *(
                    lambda given=body | how | {"prompt": prompt}: server.post(COMPLETIONS, given)
                    for prompt, how in zip(prompts, ({}, {"stream": stream}, {}), strict=True)
                )
            )
            assert (bad.status_code, bad.json()["error"]["code"]) == (500, "numerical_error")
            assert "NaN" in bad.json()["error"]["message"]
            for found, one in zip((first, second), wanted, strict=True):
                assert found.json()["choices"][0]["token_ids"] == list(one.tokens)
        hit = server.post(COMPLETIONS, body | {"prompt": prompts[0], "logprobs": 0}).json()
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        given = [one.logprob for one in wanted[0].logprobs]
        assert logprobs_of(hit["choices"][0]) == pytest.approx(given, abs=1e-6)
        assert server.http.get("/health").status_code == 200


@both_apis
def test_c15_a_text_does_not_depend_on_how_it_is_asked_for(served, path):
    """Alone, beside others in either order, streamed, and from the prefix cache or not."""
    logprobs = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    given = {**LONG[path], "max_tokens": 20, **logprobs}
    alone = ask(served, path, **given, cache_salt="cold")
    others = [lambda each=each: ask(served, COMPLETIONS, **each) for each in NEIGHBOURS]
    asks = {
        "again": lambda: ask(served, path, **given, cache_salt="cold"),
        "cold": lambda: ask(served, path, **given, cache_salt="colder"),
    }
    for name, call in asks.items():
        found = [at_once(call, *others)[0], at_once(*others, call)[-1], call()]
        for one in found:
            assert text_of(one) == text_of(alone), name
            assert logprobs_of(one["choices"][0]) == pytest.approx(
                logprobs_of(alone["choices"][0]), abs=1e-5
            )
    assert streamed(served, path, **given) == [text_of(alone)]


def test_p13_ids_that_the_model_lacks_are_rejected_and_neighbours_go_on(folder):
    """The model knows 263 tokens; there are more rows, for kernels whose tiles are larger."""
    body = {"prompt": list(range(40, 57)), "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    with serving(lambda _: AsyncLLM(folder, max_num_seqs=4)) as server:
        wanted = text_of(server.post(COMPLETIONS, body).json())
        told: list[str] = []

        def neighbour():
            told.append(text_of(server.post(COMPLETIONS, body).json()))

        threads = [threading.Thread(target=neighbour) for _ in range(3)]
        for thread in threads:
            thread.start()
        for token in (263, 264, 271, 319, 383, 2**31 - 1):
            for name, value in (
                ("allowed_token_ids", [65, token]), ("stop_token_ids", [token]),
                ("logit_bias", {str(token): -100}), ("prompt", [65, token]),
            ):  # fmt: skip
                found = server.post(COMPLETIONS, body | {name: value})
                assert (found.status_code, found.json()["error"]["param"]) == (400, name)
        for thread in threads:
            thread.join()
        assert told == [wanted] * 3
