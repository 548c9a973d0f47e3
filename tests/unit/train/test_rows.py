"""Rows as tokens: what of them is trained, and the sentences that reject them."""

import json
from types import SimpleNamespace

import pytest

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.generic_tools import as_served
from rooflax.loading.tokenizer import Tokenizer
from rooflax.train.config import DataConfig
from rooflax.train.corpus import ChatRow, Document, Preference, PromptCompletion
from rooflax.train.rows import RowEncoder

CHATML = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "world"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "<|im_end|> hello"},
)
LAST, EVERY = DataConfig(mask_prompt=True), DataConfig(assistant_only_loss=True)


@pytest.fixture(scope="module")
def chatml(write_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml")
    return Tokenizer(write_folder(folder, "qwen", chat_template=CHATML))


@pytest.fixture(scope="module")
def base(write_folder, tmp_path_factory):
    """Without a template, with a BOS."""
    return Tokenizer(write_folder(tmp_path_factory.mktemp("base"), "llama3"))


def chat(*messages, **more):
    return ChatRow("a.jsonl:3", "line 3 of a.jsonl", messages, **more)


def encode(tokenizer, rows, config=LAST, seq_len=500):
    encoder = RowEncoder(tokenizer, tokenizer.eos_id, config, seq_len)
    return list(encoder.rows(rows)), encoder


def text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def trained(tokenizer, row, config):
    ((ids, mask, num_bytes),), _ = encode(tokenizer, [row], config)
    found = [i for i, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert num_bytes == len(tokenizer.decode(found).encode())
    return text(tokenizer, found)


def test_answers_of_the_assistant(chatml):
    last = "<|im_end|> hello<|im_end|>\n"
    assert trained(chatml, chat(*MESSAGES), LAST) == last
    assert trained(chatml, chat(*MESSAGES), EVERY) == "world<|im_end|>\n" + last
    assert trained(chatml, chat(*MESSAGES, num_prompt=2), LAST) == "world<|im_end|>\n" + last
    ((ids, mask, _),), _ = encode(chatml, [chat(*MESSAGES)], DataConfig())
    assert mask is None and text(chatml, ids).count("<|im_start|>") == 5
    # What a message spells like a special token is text, as it is in serving.
    assert ids.count(chatml.token_to_id("<|im_end|>")) == 5


def test_texts_of_prompt_and_completion(chatml, base):
    row = PromptCompletion("a.jsonl:1", "line 1 of a.jsonl", "2 + 2 =", " 4")
    for config in (LAST, EVERY):
        assert trained(chatml, row, config) == " 4<|im_end|>\n"
        assert trained(base, row, config) == " 4<|eot_id|>"
    ((ids, _, _),), _ = encode(base, [row])
    assert ids == [*base.encode("2 + 2 = 4"), base.eos_id]
    assert ids[0] == base.bos_id


def test_an_end_that_the_tokenizer_adds_is_trained(base, tmp_path):
    for name, text in base.files().items():
        (tmp_path / name).write_bytes(text)
    stated = json.loads((tmp_path / "tokenizer.json").read_text())
    end = {"id": "<|eot_id|>", "ids": [base.eos_id], "tokens": ["<|eot_id|>"]}
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|eot_id|>": end},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stated))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("x")[-1] == base.eos_id
    row = PromptCompletion("a.jsonl:1", "line 1 of a.jsonl", "2 + 2 =", " 4")
    assert trained(tokenizer, row, LAST) == " 4<|eot_id|>"


def test_tools_that_a_template_does_not_show(chatml):
    """They stand in the system message, as they do when the model is served."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    row = chat(
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
        tools=(tool,),
    )
    wanted = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
    assert trained(chatml, row, EVERY) == wanted + "two<|im_end|>\n"
    assert trained(chatml, row, LAST) == "two<|im_end|>\n"
    ((ids, _, _),), _ = encode(chatml, [row])
    assert "# Tools" in text(chatml, ids) and "<tool_response>\n2" in text(chatml, ids)


def test_results_that_are_joined_move_no_completion(chatml):
    """Three results are one message where they are text; the prompt's answer stays untrained."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    row = chat(
        *MESSAGES[1:4],
        {"role": "assistant", "content": "", "tool_calls": [call] * 3},
        *[{"role": "tool", "content": str(number)} for number in range(3)],
        MESSAGES[2],
        num_prompt=3,
    )
    calls = "\n".join(['<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'] * 3)
    assert trained(chatml, row, LAST) == f"{calls}<|im_end|>\nworld<|im_end|>\n"


ONE = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ALTERNATES = (
    "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ONE + END
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}" + ONE + END
)
HIDES = "{% for m in messages if m.role != 'system' %}" + ONE + END
TEXT_ALONE = (
    "{% for m in messages %}{% if m.tool_calls %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% else %}" + ONE + "{% endif %}" + END
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLS = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "shown"),
    [
        (ALTERNATES, [MESSAGES[1], MESSAGES[3]], None, "hello\n\nagain"),
        (SYSTEM_FIRST, [MESSAGES[1], MESSAGES[0]], None, "system\nBe brief."),
        (HIDES, [MESSAGES[1]], (TOOL,), "user\n# Tools"),
        (
            TEXT_ALONE,
            [MESSAGES[1], {"role": "assistant"} | CALLS, {"role": "tool", "content": "2"}],
            None,
            'f{"x": 1}',
        ),
    ],
)
def test_rows_are_rendered_as_they_are_served(
    write_folder, tmp_path, template, messages, tools, shown
):
    """Whatever of them a template rejects or leaves out."""
    tokenizer = Tokenizer(write_folder(tmp_path, "qwen", chat_template=template))
    *_, prompt = as_served(tokenizer, messages, tools=tools)
    row = chat(*messages, MESSAGES[2], tools=tools)
    for config in (LAST, DataConfig()):
        ((ids, _, _),), _ = encode(tokenizer, [row], config)
        assert ids[: len(prompt)] == prompt and shown in text(tokenizer, ids)
    assert trained(tokenizer, row, LAST) == "world<|im_end|>\n"


def test_answers_of_prompt_and_completion_are_not_joined(write_folder, tmp_path):
    """Those of one of them may be, where a template takes no two in a row."""
    tokenizer = Tokenizer(write_folder(tmp_path, "qwen", chat_template=ALTERNATES))
    row = chat(*MESSAGES[1:3], MESSAGES[2], num_prompt=2)
    with pytest.raises(RequestError, match=r"^line 3 of a\.jsonl: .* no two answers in a row"):
        encode(tokenizer, [row])
    both = "world\n\nworld<|im_end|>\n"
    assert trained(tokenizer, row, EVERY) == both
    assert trained(tokenizer, chat(*row.messages, num_prompt=1), LAST) == both
    later = chat(*row.messages, MESSAGES[3], MESSAGES[2], MESSAGES[2], num_prompt=4)
    assert trained(tokenizer, later, LAST) == both
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    later = chat(*MESSAGES[1:3], call, MESSAGES[3], MESSAGES[2], num_prompt=4)
    assert trained(tokenizer, later, LAST) == "world<|im_end|>\n"
    passes = ALTERNATES.replace("in messages", "in messages if m.role != 'system'")
    tokenizer = Tokenizer(write_folder(tmp_path / "other", "qwen", chat_template=passes))
    between = chat(*MESSAGES[1:3], MESSAGES[0], MESSAGES[2], *MESSAGES[1:3], num_prompt=5)
    assert trained(tokenizer, between, LAST) == "world<|im_end|>\n"


def test_rows_that_are_rejected(chatml):
    user, answer = MESSAGES[1:3]
    where = r"^line 3 of a\.jsonl"
    for row, config, said in (
        (
            chat({"role": "judge", "content": "x"}, answer),
            LAST,
            r": messages\[0\]\.role is 'judge'; it must be",
        ),
        (chat(user), EVERY, " has nothing to train on: no answer of the assistant is among its"),
        (chat({**answer, "tool_calls": 5}), EVERY, r": messages\[0\]\.tool_calls is 5; it must be"),
        (
            chat(user, {"role": "tool", "content": "x", "tool_call_id": {}}, answer),
            EVERY,
            r": messages\[1\]\.tool_call_id is \{\}; it must be a text",
        ),
        (chat(user, answer, user), LAST, " has nothing to train on: .* is the last message"),
        (chat(answer, user), EVERY, ": the first message is the assistant's"),
        (chat(user, {"role": "assistant", "content": "\ud83d"}), EVERY, ": .*lone surrogate"),
    ):
        with pytest.raises(RequestError, match=where + said) as caught:
            encode(chatml, [chat(user, answer), row], config)
        assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=r"^b\.txt: plain text has no prompt to mask\.$"):
        encode(chatml, [chat(user, answer), Document("b.txt", "x")])
    with pytest.raises(RequestError, match=r"^b\.txt is plain text, which has no prompt to mask"):
        encode(chatml, [Document("b.txt", "x")])


def test_faults_of_the_checkpoint_name_the_row_too(base, write_folder, tmp_path):
    broken = Tokenizer(write_folder(tmp_path, "qwen", chat_template="{{ messages[0].content["))
    with pytest.raises(CheckpointError, match=r"^line 3 of a\.jsonl: the chat template is not val"):
        encode(broken, [chat(*MESSAGES)])

    class GivesUp:
        """As a regular expression that takes too long on some texts."""

        def encode(self, text):
            if "\t" in text:
                raise Exception("it gave up")
            return base.backend.encode(text)

        def encode_batch(self, texts):
            return list(map(self.encode, texts))

    texts = [Document("a.txt", "good"), Document("b.txt", "\t"), Document("c.txt", "good")]
    encoder = RowEncoder(SimpleNamespace(backend=GivesUp()), base.eos_id, DataConfig(), 500)
    rows = encoder.rows(texts)
    assert next(rows).ids == [*base.encode("good"), base.eos_id]
    said = r"^b\.txt: the tokenizer cannot encode this text: it gave up\.$"
    with pytest.raises(CheckpointError, match=said):
        next(rows)


def test_a_template_whose_prefixes_do_not_nest(write_folder, tmp_path):
    """It leaves the thinking out of all answers but the last, as Qwen3's."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = Tokenizer(write_folder(tmp_path, "qwen", chat_template=template))
    assert trained(tokenizer, chat(*MESSAGES), LAST).startswith("<think>\n\n</think>\n\n")
    assert len(encode(tokenizer, [chat(*MESSAGES)], DataConfig())[0]) == 1
    with pytest.raises(RequestError, match=r"^line 3 of .* message 2 otherwise once it follows"):
        encode(tokenizer, [chat(*MESSAGES)], EVERY)


def test_rows_longer_than_the_context(chatml):
    user, answer = MESSAGES[1:3]
    long = {"role": "user", "content": "hello " * 100}
    rows = [chat(user, answer), chat(user, {**long, "role": "assistant"}), chat(long, answer)]
    with pytest.raises(RequestError, match=r"^line 3 of a\.jsonl has \d+ tokens, but .* hold 101"):
        encode(chatml, rows, seq_len=100)
    found, cuts = encode(chatml, rows, DataConfig(mask_prompt=True, truncation="cut"), 100)
    assert [len(ids) for ids, _, _ in found] == [len(encode(chatml, rows[:1])[0][0].ids), 101]
    assert (cuts.shortened, cuts.dropped) == (2, 1)  # of the last nothing is left to train


def pair(chosen, rejected):
    both = (chat(MESSAGES[1], {"role": "assistant", "content": c}) for c in (chosen, rejected))
    return Preference("a.jsonl:3", "line 3 of a.jsonl", *both)


def test_pairs_are_two_documents_whose_answers_are_trained(chatml, base):
    def encoded(tokenizer, rows, config=None, seq_len=500):
        encoder = RowEncoder(tokenizer, tokenizer.eos_id, config or DataConfig(), seq_len)
        return list(encoder.pairs(rows)), encoder

    found, _ = encoded(chatml, [pair("world", "hello")])
    kept = [[i for i, t in zip(ids, mask, strict=True) if t] for ids, mask, _ in found]
    assert [text(chatml, ids) for ids in kept] == ["world<|im_end|>\n", "hello<|im_end|>\n"]
    row = PromptCompletion("a.jsonl:1", "line 1 of a.jsonl", "2 + 2 =", " 4")
    found, _ = encoded(base, [Preference("a", "line 1 of a.jsonl", row, row)])
    assert [ids for ids, _, _ in found] == [[*base.encode("2 + 2 = 4"), base.eos_id]] * 2
    rows = [pair("world", "hello " * 100), pair("world", "again")]
    with pytest.raises(RequestError, match=r"^line 3 of a\.jsonl has \d+ tokens, but"):
        encoded(chatml, rows, seq_len=100)
    cut = DataConfig(truncation="cut")
    found, cuts = encoded(chatml, rows, cut, 100)
    assert len(found) == 4 and (cuts.shortened, cuts.dropped) == (1, 0)
    length = len(chatml.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"))
    found, cuts = encoded(chatml, rows, cut, length - 1)
    assert found == [] and cuts.dropped == 4
    with pytest.raises(RequestError, match=r"^line 3 of a\.jsonl has no chosen and rejected answ"):
        encoded(chatml, [pair("a", "b"), chat(*MESSAGES)])
    with pytest.raises(RequestError, match=r"^line 3 of a\.jsonl: it has a chosen and a rejected"):
        encode(chatml, [pair("a", "b")])
