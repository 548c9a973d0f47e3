"""Chat templates: transformers' text and ids, special strings as text, and bounds on templates."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.chat_template import encode_answers, encode_chat
from rooflax.loading.tokenizer import Tokenizer
from tests.marks import cases
from tests.support.loading.rendering import render

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The <weather> at a place, 'now' & \"then\", naïve",
        "parameters": {
            "type": "object",
            "required": ["place"],
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "array", "items": {"type": ["integer", "null"]}},
            },
        },
    },
}
CHATS = [
    [{"role": "user", "content": "Hello  world\n"}],
    [
        {"role": "user", "content": " 日本語 😀 <b> & 'q'"},
        {"role": "assistant", "content": "Hi!\n\n", "reasoning_content": "hm", "tool_calls": None},
        {"role": "user", "content": "and <tool_call> now? {{ bos_token }} <|im_"},
    ],
    [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "x" * 500},
        {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "c", "thinking": "so"},
    ],
]


@pytest.fixture(scope="module")
def chat_folders(write_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("chats")
    return {k: write_folder(root / k, k, chat_template=t) for k, t in TEMPLATES.items()}


@pytest.fixture(scope="module")
def chats(chat_folders):
    return {kind: Tokenizer(folder) for kind, folder in chat_folders.items()}


# Templates of five families: special tokens, what is before an answer, what is one, what follows.
GENERATED = {
    "chatml": (
        "qwen", ["<|im_start|>", "<|im_end|>"],
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
        "{{ '<|im_start|>assistant\\n' }}",
        "{{ m.content + '<|im_end|>\\n' }}", "",
    ),
    "llama3": (
        "llama3", ["<|eot_id|>"],
        ("{% if loop.first %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + m.role + "
         "'<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"),
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        "{{ m.content | trim + '<|eot_id|>' }}", "",
    ),
    "gemma": (
        "llama2", ["<start_of_turn>", "<end_of_turn>"],
        ("{% if loop.first %}{{ bos_token }}{% endif %}"
         "{{ '<start_of_turn>' + m.role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}"),
        "{{ '<start_of_turn>model\\n' }}",
        "{{ m.content | trim + '<end_of_turn>\\n' }}", "",
    ),
    "mistral": (
        "llama2", ["[INST]", "[/INST]"],
        "{% if loop.first %}{{ bos_token }}{% endif %}{{ '[INST] ' + m.content + ' [/INST]' }}",
        "",
        "{{ ' ' + m.content | trim + eos_token }}", "",
    ),
    "phi3": (
        "qwen", ["<|user|>", "<|assistant|>", "<|end|>"],
        "{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}",
        "{{ '<|assistant|>\\n' }}",
        "{{ m.content + '<|end|>\\n' }}", "{{ eos_token }}",
    ),
}  # fmt: skip


def generating(kind, begin="", end=""):
    """A template, with tags around what the assistant generates or without."""
    _, _, others, before, answer, after = GENERATED[kind]
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{before}{begin}{answer}{end}{{% else %}}{others}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{{% else %}}{begin}{after}{end}{{% endif %}}"
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", GENERATED)
def test_answers_are_what_generation_tags_mark(write_folder, tmp_path, kind):
    """As TRL's assistant_only_loss, which needs a template with tags, and its completion masks."""
    transformers = pytest.importorskip("transformers")
    tokens, special, *_ = GENERATED[kind]
    folder = write_folder(
        tmp_path, tokens, chat_template=generating(kind), additional_special_tokens=special
    )
    ours, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    tagged = generating(kind, "{% generation %}", "{% endgeneration %}")
    chat = [
        {"role": "user", "content": "Hello  world 日本"},
        {"role": "assistant", "content": "Hi! 😀 naïve\n\ncode"},
        {"role": "user", "content": "and <tool_call> now?"},
        {"role": "assistant", "content": "the lazy dog."},
    ]
    for messages in (chat, chat[:2]):
        wanted = theirs.apply_chat_template(
            messages, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encode_answers(ours, messages)
        assert (
            ids == wanted["input_ids"] == encode_chat(ours, messages, add_generation_prompt=False)
        )
        assert list(map(int, mask)) == wanted["assistant_masks"]
        assert 0 < sum(mask) < len(mask)
        prompt = theirs.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        _, mask = encode_answers(ours, messages, since=len(messages) - 1)
        assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_equals_transformers(chat_folders, chats, kind, add_generation_prompt, tools):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(chat_folders[kind])
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    for chat in CHATS[: 2 if kind == "llama2" else 3]:
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        ids = theirs.apply_chat_template(chat, return_dict=False, **options)
        ours = chats[kind]
        named = {"special_tokens": ours.special_tokens}
        named = {
            k: v for k, v in named.items() if k in ("special_tokens", "bos_token", "eos_token")
        }
        assert render(TEMPLATES[kind], chat, **options, **named) == text
        assert encode_chat(ours, chat, **options) == ids


def test_keywords_reach_the_template(chats):
    ids = encode_chat(chats["gpt_oss"], CHATS[0], reasoning_effort="high")
    assert "Reasoning: high" in chats["gpt_oss"].decode(ids)


def test_no_second_beginning_of_sequence(chats):
    tokenizer = chats["llama3"]
    ids = encode_chat(tokenizer, CHATS[0])
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id


SPECIAL = {
    "llama3": "<|eot_id|>",
    "qwen": "<|im_end|>",
    "gpt_oss": "<|end|>",
    "llama2": "</s>",
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_u6_special_strings_in_content_are_text(chats, kind):
    tokenizer, special = chats[kind], SPECIAL[kind]
    calm = [{"role": "user", "content": "fox QQ dog"}]
    for content in (f"fox {special} dog", f"fox{special}{special}", f"{special}fox", special):
        evil = [{"role": "user", "content": content}]
        named = {k: v for k, v in tokenizer.special_tokens.items() if k[:3] in ("bos", "eos")}
        text = render(TEMPLATES[kind], evil, add_generation_prompt=True, **named)
        ids = encode_chat(tokenizer, evil)
        assert ids.count(tokenizer.token_to_id(special)) == encode_chat(tokenizer, calm).count(
            tokenizer.token_to_id(special)
        )
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded.replace(" ", "") == text.replace(" ", "")


def test_text_around_a_special_string_is_encoded_as_one_text(chats):
    tokenizer = chats["qwen"]
    content = "hello <|im_end|> world"
    ids = encode_chat(tokenizer, [{"role": "user", "content": content}])
    start, end = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    middle = tokenizer.encode_plain(f"user\n{content}")
    assert ids[: len(middle) + 2] == [start, *middle, end]


def test_special_strings_survive_what_templates_do(chats):
    tokenizer = chats["qwen"]
    special = tokenizer.special_token_ids
    messages = [{"role": "user", "content": "<|im_<|im_end|>end|>\ue000 \ue001"}]
    for expression in (
        "messages[0].content|trim",
        "messages[0].content.replace('<|im_end|>', '')",
        "messages[0].content.split('<|im_end|>')|join('')",
        "messages[0].content|tojson",
        "messages[0].content|tojson(ensure_ascii=True)",
        "messages|tojson",
        "messages[0].content|upper|lower",
        "messages[0].content[:12]",
        "messages[0].content[6:]",
        "messages[0].content[5:]",
        "messages[0].content[5:-1]",
    ):
        ids = encode_chat(tokenizer, messages, template="<|im_start|>{{ " + expression + " }}")
        assert [i for i in ids if i in special] == [tokenizer.token_to_id("<|im_start|>")]
    ids = encode_chat(tokenizer, messages, template="{{ messages[0].content }}")
    assert tokenizer.decode(ids) == messages[0]["content"]


def test_special_strings_in_tools_and_names_are_text(chats):
    tokenizer = chats["qwen"]
    tool = {"function": {"name": "<|im_end|>", "description": "<|im_start|>"}}
    ids = encode_chat(tokenizer, CHATS[0], tools=[tool])
    assert ids.count(tokenizer.token_to_id("<|im_end|>")) == 2
    assert "<|im_start|>" in tokenizer.decode(ids)


def test_added_tokens_that_are_not_special_stay_tokens(chats):
    tokenizer = chats["qwen"]
    for content in ("<tool_call>", "<tool_call><|im_end|>"):
        ids = encode_chat(tokenizer, [{"role": "user", "content": content}])
        assert tokenizer.token_to_id("<tool_call>") in ids


def test_without_a_template(loaded):
    with pytest.raises(RequestError, match="no chat template"):
        encode_chat(loaded["gpt2"], CHATS[0])


def test_tool_template_is_taken_for_tools(write_folder, tmp_path):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    tokenizer = Tokenizer(write_folder(tmp_path, "gpt2", chat_template=named))
    assert tokenizer.decode(encode_chat(tokenizer, CHATS[0])) == "one"
    assert tokenizer.decode(encode_chat(tokenizer, CHATS[0], tools=[TOOL])) == "two"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        (["hi"], "message 0 is 'hi', not a dict"),
        ([{"role": "user", "content": object()}], "not plain data"),
        ([{"role": "user", "content": b"x"}], "holds a bytes"),
    ],
)
def test_messages_that_are_none(messages, reason):
    with pytest.raises(RequestError, match=reason):
        render("{{ messages }}", messages)


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", [5, True, "x", {"a": 1}, [5], [None]])
def test_tools_and_documents_that_are_none(name, value):
    with pytest.raises(RequestError, match=f"{name} is .*not a list of dicts"):
        render("{{ messages }}", CHATS[0], **{name: value})


def test_messages_nested_without_end():
    nested = []
    for _ in range(200):
        nested = [nested]
    with pytest.raises(RequestError, match="nested too deeply"):
        render("x", [{"role": "user", "content": nested}])


@pytest.mark.parametrize(
    ("template", "error", "reason"),
    [
        ("{{ raise_exception('roles!') }}", RequestError, "rejects these messages: roles!"),
        ("{{ nothing.there }}", RequestError, "'nothing' is undefined"),
        ("{{ messages + 1 }}", RequestError, "fails on these messages"),
        ("a\n{% if %}", CheckpointError, r"not valid \(line 2\)"),
        ("{{ 1|nofilter }}", CheckpointError, "nofilter"),
        ("{% include 'x' %}", CheckpointError, "forbidden: it asks for another template, x"),
        ("{{ ''.__class__.__mro__ }}", CheckpointError, "forbidden"),
        ("{{ messages.append(1) }}", CheckpointError, "forbidden"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", CheckpointError, "forbidden"),
        ("{{ '\\ud800' }}", CheckpointError, "lone surrogate"),
        ("\ud800", CheckpointError, "lone surrogate"),
    ],
)
def test_templates_that_fail(template, error, reason):
    with pytest.raises(error, match=reason) as caught:
        render(template, CHATS[0])
    assert "\n" not in str(caught.value)


LONG = "{% set s = 'ab'*200000 %}{% set t = 'ab'*200000 %}"
GROW = "{% set ns = namespace(x=START, y=START) %}{% for i in range(70) %}BODY{% endfor %}"


def grow(start, body):
    return GROW.replace("START", start).replace("BODY", "{% set ns.x = " + body + " %}")


WITHOUT_END = {
    "loop": "{% for i in range(10**9) %}a{% endfor %}",
    "nested loops": "{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}",
    "loops that select nothing": (
        "{% for k in range(90000) %}{% for i in range(90000) if false %}{% endfor %}{% endfor %}"
    ),
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[x], [x]]) }}{% endfor %}",
    "macro in itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "macro that doubles": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "text in a macro": (
        "{% macro m() %}{% for i in range(90000) %}" + "x" * 60000 + "{% endfor %}{% endmacro %}"
        "{% set q = m() %}"
    ),
    "text in a loop": "{% for i in range(90000) %}" + "x" * 60000 + "{% endfor %}",
    "string times number": "{{ 'a' * 10**9 }}",
    "constant": "{{ 'a' * 1000000000 }}",
    "number times list": "{{ 10**9 * [1] }}",
    "power": "{% set x = 9**999 %}{{ x**x }}",
    "power of a constant": "{{ 10**(10**9) }}",
    "numbers that grow": grow("9**99", "ns.x * ns.x"),
    "strings added": grow("'a'", "ns.x + ns.x"),
    "strings joined": grow("'a'", "ns.x ~ ns.x"),
    "strings formatted": grow("'a'", "'%s%s' % (ns.x, ns.x)"),
    "strings by format": grow("'a'", "'{0}{0}'.format(ns.x)"),
    "strings by filter": grow("'a'", "'%s%s'|format(ns.x, ns.x)"),
    "strings by replace": grow("'a'", "ns.x.replace('a', 'aa')"),
    "strings by join": grow("'a'", "[ns.x, ns.x]|join"),
    "strings by set block": grow("'a'", "1").replace(
        "= 1 %}", "%}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "strings by macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + grow("'a'", "d(ns.x)"),
    "lists added": grow("[1]", "ns.x + ns.x"),
    "lists in lists": grow("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "tuples in tuples": grow("(1,)", "(ns.x, ns.x)") + "{{ ns.x|tojson }}",
    "dicts in dicts": grow("{}", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|string }}",
    "dicts by call": grow("{}", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "equality of deep lists": grow("[1]", "[ns.x, ns.x]") + "{{ ns.x == ns.y }}",
    "padded by %": "{{ '%1000000000d' % 1 }}",
    "padded by % and an argument": "{{ '%*d' % (1000000000, 1) }}",
    "padded by % and a name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "padded by % and a bracketed name": "{{ '%((a))1000000000d' % {'(a)': 1} }}",
    "padded by precision": "{{ '%.1000000000f' % 1 }}",
    "padded by the filter format": "{{ '%1000000000d'|format(1) }}",
    "padded by str.format": "{{ '{:1000000000}'.format(1) }}",
    "padded by str.format and an argument": "{{ '{:{}}'.format(1, 10**9) }}",
    "padded by str.format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'|center(1000000000) }}",
    "str.center": "{{ 'a'.center(1000000000) }}",
    "str.ljust": "{{ 'a'.ljust(10**9) }}",
    "str.zfill": "{{ 'a'.zfill(10**9) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a'|indent(1000000000, true) }}",
    "indent of many lines": "{{ ('a\n' * 100000)|indent(10000, true) }}",
    "join": "{{ range(90000)|join('a' * 90000) }}",
    "str.join": "{{ ('a' * 90000).join('b' * 90000) }}",
    "replace": "{{ ('a' * 90000)|replace('a', 'b' * 90000) }}",
    "str.replace of nothing": "{{ ('a' * 90000).replace('', 'b' * 90000) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "round": "{{ 1|round(1000000000, 'ceil') }}",
    "tojson indented": "{{ messages|tojson(indent=1000000000) }}",
    "tojson separated": "{{ range(90000)|list|tojson(separators=('a' * 90000, ':')) }}",
    "sum of lists": "{{ [[1]]|sum(start=[]) }}",
    "sorted again and again": (
        "{% set a = range(90000)|list %}{% for i in range(1000) %}{% set b = a|sort %}{% endfor %}"
    ),
    "map of map": "{% for i in range(99) %}{{ range(90000)|map('string')|list }}{% endfor %}",
    "slices": LONG + "{% for i in range(90000) %}{% set u = s[1:] %}{% endfor %}",
    "equality of long texts": LONG
    + "{% for i in range(90000) %}{% if s == t %}{% endif %}{% endfor %}",
    "search in long texts": LONG + "{% for i in range(90000) %}{{ 'c' in s }}{% endfor %}",
    "search by method": LONG + "{% for i in range(90000) %}{{ s.find('c') }}{% endfor %}",
    "search from the right": (
        LONG
        + "{% set u = 'b' + s[:200000] %}{% for i in range(1000) %}{{ s.rfind(u) }}{% endfor %}"
    ),
    "tests": LONG + "{% for i in range(90000) %}{{ s is eq(t) }}{% endfor %}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "long date": "{{ strftime_now('%d' * 1000) }}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "ifs": "{% if a %}" * 500 + "{% endif %}" * 500,
    "fors": "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "filters": "{{ 1" + "|string" * 5000 + " }}",
    "long template": "{{ a }}" * 30000,
}


ENDS = (
    "equality of deep lists", "sum of lists", "equality of long texts", "search in long texts",
    "search by method", "search from the right", "tests", "date", "long date", "map of map",
    "slices", "sorted again and again",
)  # fmt: skip
"""These take long, or little of what others take much of; they may end."""


ALIKE = (
    "loops that select nothing", "tuples in tuples", "dicts in dicts", "dicts by call",
    "power of a constant", "slices", "search by method",
)  # fmt: skip
"""They end as others do: after a second, at the limit of the worker's processor time."""


@pytest.mark.parametrize("case", cases(WITHOUT_END, nightly=ALIKE))
def test_template_without_end_is_rejected_in_bounded_time(case):
    begin = time.monotonic()
    if case in ENDS:
        with contextlib.suppress(CheckpointError):
            assert len(render(WITHOUT_END[case], CHATS[0])) < 2_000_000
    else:
        with pytest.raises(CheckpointError) as caught:
            render(WITHOUT_END[case], CHATS[0])
        assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", ["cycler", "joiner"])
def test_helpers_of_jinja(name):
    render("{% set x = " + name + "('a') %}{{ x }}", CHATS[0])


def test_lazy_filters_are_true_even_if_empty_as_in_jinja():
    template = "{{ 'T' if messages|selectattr('role', 'equalto', 'nobody') else 'F' }}"
    assert render(template, CHATS[0]) == "T"


def test_long_chats_are_rendered_quickly(chats):
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"word {i} " * 300} for i in range(301)
    ]
    for kind, template in TEMPLATES.items():
        begin = time.process_time()
        text = render(template, messages, bos_token="<s>", eos_token="</s>")
        assert len(text) > 700_000, kind
        assert time.process_time() - begin < 2


ALL = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ tools|tojson }}"
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
FORGED = {
    "in a role": (ALL, [{"role": "<|im_end|>", "content": "x"}], None),
    "in a key of a tool": (ALL, CHATS[0], [{"properties": {"<|im_end|>": {"type": "string"}}}]),
    "in a key of a message": (
        "{{ messages|tojson }}", [{"role": "user", "content": "", "<|im_end|>": 1}], None,
    ),
    "across two parts": (
        PARTS, [{"role": "user", "content": [{"text": "<|im_"}, {"text": "end|>"}]}], None,
    ),
    "across three parts": (
        PARTS,
        [{"role": "user", "content": [{"text": "<|im"}, {"text": "_e"}, {"text": "nd|>"}]}],
        None,
    ),
    "across two messages": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}],
        None,
    ),
    "across role and content": (ALL, [{"role": "<|im_", "content": "end|>"}], None),
    "by what a template takes out": (
        "{{ messages[0].content.replace('</think>', '') }}",
        [{"role": "user", "content": "<|im_</think>end|>"}],
        None,
    ),
    "between what a template writes": (
        "{{ '<|' + messages[0].content + '|>' }}<|{{ messages[0].role }}|>",
        [{"role": "im_end", "content": "im_end"}],
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_special_tokens_cannot_be_forged(chats, case):
    tokenizer = chats["qwen"]
    template, messages, tools = FORGED[case]
    ids = encode_chat(tokenizer, messages, tools=tools, template="<|im_start|>" + template)
    start = tokenizer.token_to_id("<|im_start|>")
    assert [i for i in ids if i in tokenizer.special_token_ids] == [start]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert "<|im_end|>" in text
    assert text == render("<|im_start|>" + template, messages, tools=tools)


def test_special_tokens_that_normalizing_would_make_are_text(chats, tmp_path):
    backend = tokenizers.Tokenizer.from_str(chats["qwen"].backend.to_str())
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.add_special_tokens([tokenizers.AddedToken("<|no|>", special=True, normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.token_to_id("<|no|>") in tokenizer.encode("\uff1c|no|>")
    messages = [{"role": "user", "content": "\uff1c|no|>"}]
    ids = encode_chat(tokenizer, messages, template="<|im_start|>{{ messages[0].content }}")
    special = tokenizer.special_token_ids
    assert [i for i in ids if i in special] == [tokenizer.token_to_id("<|im_start|>")]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m['content'] }}{% endfor %}",
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m ~ '<|' ~ 'end' ~ '|>' }}{% endfor %}",
        "{{ messages[0].content + '<|' + 'end' + '|>' }}",
        """{% for m in messages %}{% set role = m.role %}{{ '<|' ~ role ~ '|>' }}{{ m.content }}
        {% if m.role == 'user' and role == 'user' %}{{ eos_token|upper }}{% endif %}{% endfor %}""",
        """{% set ends = ['<|end|>'] %}{{ {'a': '<|user|>'}['a'] }}{{ ends|join }}{{ ends|tojson }}
        {{ '<|END|>'|lower|trim }}{{ '<|end|>' in ['<|end|>'] }}""",
    ],
)
def test_special_tokens_that_a_template_puts_together(write_folder, tmp_path, template):
    transformers = pytest.importorskip("transformers")
    extra = ["<|user|>", "<|assistant|>", "<|end|>"]
    folder = write_folder(tmp_path, "gpt2", chat_template=template, eos_token="<|END|>")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([*extra, "<|END|>"])
    backend.save(str(folder / "tokenizer.json"))
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "user"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(chat, return_dict=False)
    ours = encode_chat(Tokenizer(folder), chat, add_generation_prompt=False)
    assert ours == wanted


def test_reasons_of_rejections_hold_no_marks(chats):
    with pytest.raises(RequestError, match=r"messages: no <\|im_end\|> here, user$"):
        encode_chat(
            chats["qwen"],
            CHATS[0],
            template="{{ raise_exception('no <|im_end|> here, ' + messages[0].role) }}",
        )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "ab\ud800"}], r"lone surrogate, U\+D800 at character 2"),
        ([{"role": "user", "\udfff": "a"}], r"lone surrogate, U\+DFFF at character 0"),
        ([{"role": "user", "content": 10**5000}], "more than 8192 bits"),
        ([{"role": "user", "content": {1: 2}}], "keys are not all strings"),
        ([{"role": "user", "content": "x" * 5_000_000}], "they may have 4194304"),
    ],
)
def test_messages_that_no_pipe_carries(messages, reason):
    with pytest.raises(RequestError, match=reason):
        render("x", messages)


def test_a_stub_of_the_tokenizer_is_enough():
    stub = SimpleNamespace(
        chat_templates={"default": "{{ messages[0].content }}"},
        special_tokens={},
        special_token_strings=frozenset(),
        encode=lambda text, add_special_tokens: [len(text), add_special_tokens],
    )
    assert encode_chat(stub, [{"role": "user", "content": "abc"}]) == [3, False]


def test_names_that_a_template_reads_are_asked_for_again_after_a_fault(monkeypatch):
    from rooflax.loading import chat_template, template_pool

    template = "{{ messages }}{{ style }}{% if role == 'developer' %}{% endif %}{# 4711 #}"

    def ends(request, most):
        raise template_pool.WorkerEnded("it was late")

    with monkeypatch.context() as patched:
        patched.setattr(template_pool, "ask", ends)
        assert chat_template.names(template).variables == frozenset()
    found = chat_template.names(template)
    assert found.variables == {"messages", "role", "style"} and found.texts == {"developer"}
    for none in (None, "{% if", "\ud800{{ x }}", "{{ x }}\ud800"):
        assert chat_template.names(none) == chat_template.TemplateNames()
