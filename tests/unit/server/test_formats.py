"""The data of formats: what a template renders is read back, and what a grammar lets through is
valid, whether its marks are special tokens or text, and whatever chooses the tokens."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from rooflax import SamplingParams, structured
from rooflax.loading.tokenizer import Tokenizer
from rooflax.server.call_formats import format_of, formats, with_calls
from rooflax.server.errors import ApiError
from rooflax.server.grammars import behind_reasoning
from rooflax.server.tools import tool_choice
from rooflax.structured import Grammars
from tests.support.loading.fixtures import byte_level
from tests.support.loading.rendering import render
from tests.unit.server.test_reader import cut, read, spelled_ids

FORMATS = {each.name: each for each in formats()}
MARKS = {
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
            "<think>", "</think>"],
    "llama3_json": ["<|python_tag|>"],
    "pythonic": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "mistral_ids": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"],
    "mistral_list": ["[TOOL_CALLS]", "[THINK]", "[/THINK]"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                 "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<think>", "</think>"],
    "gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "harmony": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
}  # fmt: skip
MARKS["deepseek_r1"] = MARKS["deepseek"]
WITH_CALLS = sorted(name for name, each in FORMATS.items() if each.calls is not None)
BOTH = [(name, is_special) for name in WITH_CALLS for is_special in (True, False)]
BOTH.remove(("harmony", False))  # models of it have these tokens


@pytest.fixture(autouse=True)
def _compile_here_alone(monkeypatch):
    """Not in a process of its own beforehand: these grammars are ours, and many."""
    monkeypatch.setattr(structured, "_try_apart", lambda kind, texts: [""] * len(texts))


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """A tokenizer with a format's marks as special tokens, or without them."""
    root, known = tmp_path_factory.mktemp("formats"), {}

    def find(name, is_special):
        key = (name if is_special else "", is_special)
        if key not in known:
            folder = root / f"{len(known)}"
            folder.mkdir()
            marks = MARKS[name] if is_special else []
            byte_level(["<|eos|>", *marks]).save(str(folder / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            known[key] = Tokenizer(folder)
        return known[key]

    return find


def special_of(tokenizer):
    return {tokenizer.id_to_token(i): i for i in tokenizer.special_token_ids}


def test_every_format_with_calls_has_its_marks_and_template():
    assert set(WITH_CALLS) == set(MARKS) == set(TEMPLATES)


TEMPLATES = {
    path.stem: path.read_text("utf-8")
    for path in (Path(__file__).parents[2] / "data" / "tool_templates").iterdir()
}
"""Of assistant messages, as templates of these families write them."""
ARGUMENTS = [
    {},
    {"city": "Oslo", "days": 2},
    {
        "city": 'a "b" {c} [d] é 日本, x: y',
        "days": [1, 2],
        "deep": {"on": True, "off": None, "n": -1.5},
    },
    {"city": "5", "deep": {"list": [[], {}, {"a": [""]}]}},
]
SCHEMAS = {"look": {"properties": {
    "city": {"type": "string"}, "days": {"type": ["array", "integer"]}, "deep": {"type": "object"},
}}}  # fmt: skip
ONE = ("llama3_json", "harmony")
"""Have one call an answer, and no text beside it."""


@pytest.mark.parametrize(("name", "is_special"), BOTH)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_what_a_template_renders_is_read_back(tokenizer_of, name, is_special, arguments):
    format, tokenizer = FORMATS[name], tokenizer_of(name, is_special)
    template = TEMPLATES[name]
    found = format_of(template)
    assert found is not None and found.name == name
    can_think = "reasoning_content" in template
    function = {"name": "look", "arguments": arguments}
    for content in ("", "Let me look."):
        for thought in ("", "First\n\nthis.") if can_think else ("",):
            for count in (0, 1, 3):
                alone = name in ONE or format.calls.is_whole_message
                if (count and content and alone) or (count > 1 and name in ONE):
                    continue
                message = {"role": "assistant", "content": content, "reasoning_content": thought}
                message["tool_calls"] = [{"function": function}] * count
                text = render(template, [message])
                wanted = (content, thought, [("look", arguments)] * count)
                for seed in (None, *range(5)):
                    ids = cut(tokenizer, text, None if seed is None else random.Random(seed))
                    prompt = cut(
                        tokenizer, "<|start|>assistant" if name == "harmony" else "x", None
                    )
                    got = read(tokenizer, format, ids, prompt=prompt, schemas=SCHEMAS)
                    assert summary(*got[:2]) == wanted, (text, got[:2])
                    assert got[2].num_failed == 0


def summary(content, events):
    thought = "".join(each.text for each in events if each.kind == "reasoning")
    names = [each.text for each in events if each.kind == "call"]
    texts = [json.loads(each.text) for each in events if each.kind == "arguments"]
    return content, thought, list(zip(names, texts, strict=True))


STRICT = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b c"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 20},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9},
                           "y": {"type": ["boolean", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "at"],
    "additionalProperties": False,
}  # fmt: skip


def tool(name, schema=STRICT, **more):
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


@functools.cache
def grammars_of(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.token_to_id("<|eos|>")])


def constrained(tokenizer, grammar):
    eos = tokenizer.token_to_id("<|eos|>")
    params = SamplingParams(grammar=grammar)
    return eos, grammars_of(tokenizer).constraint(params, frozenset([eos]))


def allowed_by(constraint, size):
    bits = np.unpackbits(np.asarray(constraint.mask).view(np.uint8), bitorder="little")
    return bits[:size]


def say_anything(tokenizer, grammar, rng, longest=600):
    """Tokens that a grammar lets through, drawn evenly; whether it came to its end."""
    eos, constraint = constrained(tokenizer, grammar)
    ids = []
    while not constraint.is_complete and len(ids) < longest:
        allowed = allowed_by(constraint, tokenizer.vocab_size).nonzero()[0].tolist()
        token = rng.choice(allowed)
        if token == eos or (eos in allowed and rng.random() < 0.5):
            return ids, True
        ids.append(token)
        constraint.accept(token)
        assert constraint.error is None, constraint.error
    return ids, constraint.is_complete


@pytest.mark.parametrize(("name", "is_special"), BOTH)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "b"}, "one"])
def test_forced_calls_are_valid_whatever_is_drawn(tokenizer_of, name, is_special, choice):
    format, tokenizer = FORMATS[name], tokenizer_of(name, is_special)
    given = {"tools": [tool("a"), tool("b")], "tool_choice": choice}
    if choice == "one":
        given |= {"tool_choice": "required", "parallel_tool_calls": False}
    grammar = tool_choice(given, format).grammar(special_of(tokenizer), "not")
    num_whole = 0
    for seed in range(3):
        ids, is_whole = say_anything(tokenizer, grammar, random.Random(seed))
        if not is_whole:
            continue
        num_whole += 1
        prompt = cut(tokenizer, "<|start|>assistant" if name == "harmony" else "x", None)
        schemas = {"a": STRICT, "b": STRICT}
        content, events, reading = read(tokenizer, format, ids, prompt=prompt, schemas=schemas)
        _, _, calls = summary("", events)
        assert calls and (content.strip() == "" or name == "harmony"), (content, events)
        assert {called for called, _ in calls} <= (
            {"b"} if isinstance(choice, dict) else {"a", "b"}
        )
        assert choice == "required" or len(calls) == 1
        assert reading.num_calls == len(calls)
        for _, arguments in calls:
            jsonschema.validate(arguments, STRICT)
    assert num_whole >= 1


@pytest.mark.parametrize(("name", "is_special"), BOTH)
def test_strict_leaves_text_free_and_calls_valid(tokenizer_of, name, is_special):
    format, tokenizer = FORMATS[name], tokenizer_of(name, is_special)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    choice = tool_choice({"tools": [tool("look", schema, strict=True)]}, format)
    grammar = choice.grammar(special_of(tokenizer), "not")
    template = TEMPLATES[name]

    def fits(arguments, content="", called="look"):
        message = {"role": "assistant", "content": content}
        if arguments is not None:
            message["tool_calls"] = [{"function": {"name": called, "arguments": arguments}}]
        text = render(template, [message])
        text = text.removesuffix("<|call|>").replace("<think></think>", "").lstrip("\n")
        return lets_through(tokenizer, grammar, text.replace("[TOOL_CALLS] [", "[TOOL_CALLS]["))

    assert fits({"n": 3}) and fits(None, "Hello, world.")
    assert not fits({"n": "x"}) and not fits({"m": 3}) and not fits({"n": 3}, called="see")
    if name not in ONE and not format.calls.is_whole_message:
        assert fits({"n": 3}, "Well.")
        assert not fits({"n": "x"}, "Well.")


@pytest.mark.parametrize("is_special", [True, False])
def test_forced_calls_have_an_id_where_the_template_writes_one(tokenizer_of, is_special):
    tokenizer = tokenizer_of("mistral_ids", is_special)
    given = {"tools": [tool("a")], "tool_choice": "required"}
    grammar = tool_choice(given, FORMATS["mistral_ids"]).grammar(special_of(tokenizer), "not")
    ids, _ = say_anything(tokenizer, grammar, random.Random(0))
    _, events, _ = read(tokenizer, FORMATS["mistral_ids"], ids)
    assert len(events[0].id) == 9 and events[0].id.isalnum()


@pytest.mark.parametrize("is_special", [True, False])
def test_strict_tools_of_qwen3_coder_have_no_second_way_to_be_called(tokenizer_of, is_special):
    tokenizer = tokenizer_of("qwen3_coder", is_special)
    given = {"tools": [tool("look", FORM, strict=True)]}
    grammar = tool_choice(given, FORMATS["qwen3_coder"]).grammar(special_of(tokenizer), "not")
    for n, fits in ((1, True), ("x", False)):
        call = f"<function=look>\n<parameter=n>\n{n}\n</parameter>\n</function>"
        assert lets_through(tokenizer, grammar, f"So.\n<tool_call>\n{call}\n</tool_call>") == fits
        assert not lets_through(tokenizer, grammar, f"So.\n{call}")
        assert not lets_through(tokenizer, grammar, f"{call}\n<tool_call>\n{call}\n</tool_call>")


FORM = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(("name", "is_special"), BOTH)
@pytest.mark.parametrize("beside", ["form", "one call", "both"])
def test_arguments_are_free_beside_a_form_or_where_one_call_is_allowed(
    tokenizer_of, name, is_special, beside
):
    format, tokenizer = FORMATS[name], tokenizer_of(name, is_special)
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^a"}}}
    given = {"tools": [tool("look", schema)], "parallel_tool_calls": beside == "form"}
    form = None if beside == "one call" else {"json_schema": FORM}
    special = special_of(tokenizer)
    grammar = tool_choice(given, format).grammar(special, "not", form)

    def fits(content, *calls):
        called = [{"function": {"name": "look", "arguments": each}} for each in calls]
        message = {"role": "assistant", "content": content, "tool_calls": called}
        text = render(TEMPLATES[name], [message])
        text = text.removesuffix("<|call|>").replace("<think></think>", "").lstrip("\n")
        text = text.replace("</tool_call><", "</tool_call>\n<")
        return lets_through(tokenizer, grammar, text.replace("[TOOL_CALLS] [", "[TOOL_CALLS]["))

    for arguments in ARGUMENTS:
        assert fits("", arguments), arguments
    if name not in ONE:
        assert fits("", {}, {}) == (beside == "form")
    assert fits('{"n":1}') and fits("Hello, world.") == (form is None)
    assert fits('{"m":1}') == (form is None)
    for seed in range(2):
        ids, is_whole = say_anything(tokenizer, grammar, random.Random(seed))
        prompt = cut(tokenizer, "<|start|>assistant" if name == "harmony" else "x", None)
        content, events, reading = read(tokenizer, format, ids, prompt=prompt, schemas=SCHEMAS)
        if is_whole and form and name != "harmony":  # which may say more than that
            assert reading.num_failed == 0 and (events or jsonschema.validate(
                json.loads(content), FORM) is None)  # fmt: skip
        if beside != "form":
            assert reading.num_calls <= 1


@pytest.mark.parametrize("name", ["hermes", "gemma4", "mistral"])
def test_reasoning_may_stand_before_a_form_or_a_call(tokenizer_of, name):
    format, tokenizer = FORMATS[name], tokenizer_of(name, True)
    choice = tool_choice({"tools": [tool("look", FORM, strict=True)]}, format)
    grammar = choice.grammar(special_of(tokenizer), "may", {"json_schema": FORM})
    thought = f"{format.reasoning.open}Hm, 3{format.reasoning.close}"
    for n, fits in ((1, True), ('"x"', False)):
        call = {"function": {"name": "look", "arguments": {"n": json.loads(str(n))}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        for text in (render(TEMPLATES[name], [message]), f'{{"n":{n}}}'):
            for before in ("", thought):
                assert lets_through(tokenizer, grammar, before + text) == fits, before + text


def lets_through(tokenizer, grammar, text):
    """Whether all of a text may be said, and may end there."""
    eos, constraint = constrained(tokenizer, grammar)
    special, ordinary = spelled_ids(tokenizer)
    ids = ordinary | special
    rest, longest = text.encode(), max(map(len, ids))
    while rest and not constraint.is_complete:
        allowed = allowed_by(constraint, tokenizer.vocab_size)
        pieces = [rest[:size] for size in range(min(longest, len(rest)), 0, -1)]
        fit = [piece for piece in pieces if piece in ids and allowed[ids[piece]]]
        if not fit:
            return False
        constraint.accept(ids[fit[0]])
        rest = rest[len(fit[0]) :]
    ends = constraint.is_complete or allowed_by(constraint, tokenizer.vocab_size)[eos]
    return not rest and bool(ends)


def test_a_schema_of_harmony_is_the_final_channels(tokenizer_of):
    tokenizer, format = tokenizer_of("harmony", True), FORMATS["harmony"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for form, good, bad in (
        ({"json_schema": schema}, '{"n":1}', '{"m":1}'),
        ({"regex": "a/b+"}, "a/bb", "a"),
    ):
        special = special_of(tokenizer)
        grammar = behind_reasoning(form, format, special, thinks="not")["grammar"]
        thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
        final = "<|channel|>final<|message|>"
        assert lets_through(tokenizer, grammar, f"{thought}{final}{good}")
        assert lets_through(tokenizer, grammar, f"{final}{good}")
        assert not lets_through(tokenizer, grammar, f"{final}{bad}")
        assert not lets_through(tokenizer, grammar, good)
        assert not lets_through(tokenizer, grammar, f"{thought}{thought[:20]}")


@pytest.mark.parametrize("name", ["gemma", "gemma4", "qwen3_coder", "glm"])
def test_what_a_notation_cannot_force_is_named(name):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for more in ({}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match="'f'.*pattern") as caught:
            tool_choice({"tools": [strict], **more}, FORMATS[name]).grammar({}, "not")
        assert (caught.value.status, caught.value.code) == (400, "invalid_schema")


@pytest.mark.parametrize("name", ["gemma", "gemma4", "qwen3_coder", "glm", "pythonic"])
def test_what_a_notation_cannot_force_is_any_object_where_nothing_is_strict(tokenizer_of, name):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    choice = tool_choice({"tools": [tool("f", schema)], "tool_choice": "required"}, FORMATS[name])
    tokenizer = tokenizer_of(name, False)
    for arguments in ({"a": "no"}, {}, {"other": "text"}):
        call = {"function": {"name": "f", "arguments": arguments}}
        text = render(TEMPLATES[name], [{"role": "assistant", "content": "", "tool_calls": [call]}])
        text = text.replace("<think></think>", "").lstrip("\n")
        assert lets_through(tokenizer, choice.grammar(special_of(tokenizer), "not"), text)


@pytest.mark.parametrize("name", ["gemma", "pythonic"])
def test_schemas_that_refer_to_themselves(tokenizer_of, name):
    tree = {
        "type": "object",
        "properties": {
            "v": {"const": 1}, "next": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]},
        },
        "required": ["v"],
    }  # fmt: skip
    schema = {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "required": ["t"],
              "$defs": {"t": tree}}  # fmt: skip
    given = {"tools": [tool("f", schema)], "tool_choice": "required", "parallel_tool_calls": False}
    tokenizer = tokenizer_of(name, False)
    grammar = tool_choice(given, FORMATS[name]).grammar({}, "not")
    ids, is_whole = say_anything(tokenizer, grammar, random.Random(0))
    assert is_whole
    _, events, _ = read(tokenizer, FORMATS[name], ids)
    jsonschema.validate(summary("", events)[2][0][1], schema)


@pytest.mark.parametrize("name", ["mistral", "deepseek", "gemma4", "glm"])
@pytest.mark.parametrize("is_special", [True, False])
def test_reasoning_may_come_first_where_the_template_has_it(tokenizer_of, name, is_special):
    tokenizer, format = tokenizer_of(name, is_special), FORMATS[name]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    choice = tool_choice({"tools": [tool("look", schema)], "tool_choice": "required"}, format)
    call = {"function": {"name": "look", "arguments": {"n": 3}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    plain = render(TEMPLATES[name], [message]).replace("<think></think>", "").lstrip("\n")
    thought = f"{format.reasoning.open}Hm, 3{format.reasoning.close}"
    special = special_of(tokenizer)
    for thinks, text, fits in (
        ("may", plain, True), ("may", thought + plain, True), ("not", plain, True),
        ("not", thought + plain, False), ("opened", "Hm" + format.reasoning.close + plain, True),
        ("opened", plain, False),
    ):  # fmt: skip
        found = lets_through(tokenizer, choice.grammar(special, thinks), text)
        assert found == fits, (thinks, text)
    form = behind_reasoning({"json_schema": schema}, format, special, thinks="may")["grammar"]
    assert lets_through(tokenizer, form, thought + '{"n":1}')
    assert lets_through(tokenizer, form, '{"n":1}')
    assert not lets_through(tokenizer, form, thought)


def test_a_forced_answer_in_the_generic_format_is_one_call(tokenizer_of):
    tokenizer = tokenizer_of("hermes", is_special=False)
    given = {"tools": [tool("f", {})], "tool_choice": "required", "parallel_tool_calls": True}
    grammar = tool_choice(given, with_calls(None)).grammar({}, "not")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert lets_through(tokenizer, grammar, call)
    assert not lets_through(tokenizer, grammar, f"{call}\n{call}")
