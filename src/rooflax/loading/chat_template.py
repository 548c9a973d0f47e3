"""A chat as token ids, by the template that came with the checkpoint.

`encode_chat` gives the ids that transformers' `apply_chat_template(tokenize=True)` gives, except
that a special token's string inside a message is text. Templates run in processes of their own
(`template_pool`), within limits of time and memory.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading import template_pool
from rooflax.loading.tokenizer import PlainTokenizer, Tokenizer, lone_surrogate

MAX_TEMPLATE_CHARACTERS = 131_072
MAX_INPUT_CHARACTERS = 4 * 2**20
MAX_DEPTH = 56
MAX_INT_BITS = 8_192
# Room for templates that write a few things more than they are given.
BASE_CHARACTERS = 1_000_000
PER_INPUT_CHARACTER = 8

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class TemplateNames:
    """Names and texts that a template reads.

    Attributes:
        variables: that it does not set itself; jinja2's own functions are none of them.
        texts: its constants, such as names of roles.
    """

    variables: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()


def names(template: str | None) -> TemplateNames:
    """Names of a template; none of an invalid one or of None."""
    if template is None or len(template) > MAX_TEMPLATE_CHARACTERS:
        return TemplateNames()
    try:
        return _names(template)
    except template_pool.WorkerEnded:  # perhaps a pause of this machine: not for ever
        return TemplateNames()


@lru_cache(maxsize=4)
def _names(template: str) -> TemplateNames:
    if lone_surrogate(template) is not None:
        return TemplateNames()
    answer = template_pool.ask({"template": template}, 12 * MAX_TEMPLATE_CHARACTERS)
    return (
        TemplateNames(*map(frozenset, json.loads(answer["text"])))
        if "text" in answer
        else TemplateNames()
    )


def _variables(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> dict[str, Any]:
    return _plain_items(special_tokens) | {
        "messages": _plain_messages(messages),
        "tools": _plain_dicts(tools, "tools"),
        "documents": _plain_dicts(documents, "documents"),
        "add_generation_prompt": add_generation_prompt,
    }


def _plain_dicts(values: Any, name: str) -> Any:
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(x, Mapping) for x in values):
        raise RequestError(f"{name} is {values!r:.80}, not a list of dicts", param=name)
    return _plain(list(values), name)


def _plain_items(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value, name) for name, value in values.items()}


def _render(template: str, variables: Mapping[str, Any], marks: _Marks | None) -> str:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the chat template is rejected: it is longer than {MAX_TEMPLATE_CHARACTERS} characters"
        )
    if lone_surrogate(template) is not None:
        raise CheckpointError("the chat template is rejected: it holds a lone surrogate")
    size = _size(variables)
    if size > MAX_INPUT_CHARACTERS:
        raise RequestError(
            f"the messages and variables of the chat template have {size} characters; they may "
            f"have {MAX_INPUT_CHARACTERS}"
        )
    most = BASE_CHARACTERS + PER_INPUT_CHARACTER * size
    request = {
        "template": template,
        "variables": variables,
        "max_characters": most,
        "marks": {} if marks is None else marks.special,
        "roles": {} if marks is None else marks.roles,
    }
    try:
        # A control character takes six bytes of JSON.
        answer = template_pool.ask(request, 6 * most + 10_000)
    except template_pool.WorkerEnded as error:
        raise CheckpointError(f"the chat template is rejected: {error}") from None
    if "text" in answer:
        return answer["text"]
    kind, reason = answer["error"], answer["reason"]
    if marks is not None:
        reason = "".join(text for text, _ in marks.split(reason))
    error, message = _ERRORS[kind]
    raise error(f"the chat template {message} {reason}")


_ERRORS: Mapping[str, tuple[type[CheckpointError] | type[RequestError], str]] = {
    "rejection": (RequestError, "rejects these messages:"),
    "failure": (RequestError, "fails on these messages:"),
    "limit": (CheckpointError, "is rejected:"),
    "invalid": (CheckpointError, "is not valid"),
    "forbidden": (CheckpointError, "does what is forbidden:"),
}


def _size(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + sum(_size(k) + _size(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(_size, value))
    return 1 + len(value) if isinstance(value, str) else 1


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("a chat needs at least one message")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {i} is {message!r:.60}, not a dict with role and content")
        fields = {k: v for k, v in message.items() if v is not None or k == "content"}
        plain.append(_with_reasoning(_plain(fields, f"message {i}")))
    return plain


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    # Reasoning goes by three names; transformers offers it to templates under the two they read.
    for field in _REASONING_FIELDS:
        if field in message and message[field] is not None:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested too deeply")
    if value is None or type(value) in (float, bool):
        return value
    if isinstance(value, str):
        at = lone_surrogate(value)
        if at is not None:
            raise RequestError(
                f"{where} holds a lone surrogate, U+{ord(value[at]):04X} at character {at} of a "
                "text, which is no Unicode text"
            )
        return str.__str__(value)
    if type(value) is int:
        if value.bit_length() > MAX_INT_BITS:
            raise RequestError(f"{where} holds a number of more than {MAX_INT_BITS} bits")
        return value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{where} holds a dict whose keys are not all strings")
        return {_plain(k, where): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestError(f"{where} holds a {type(value).__name__}, which is not plain data")


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> list[int]:
    """Token ids of a chat: only the template can write special tokens, messages cannot.

    Equals transformers' `apply_chat_template(tokenize=True)` as long as no message (or tool)
    contains the string of a special token. Such a string becomes the tokens that
    `tokenizer.encode_plain` gives for it where it stands. No BOS is added to the template's own.

    Args:
        tokenizer: of the checkpoint.
        messages: dicts with `role` and `content`; values are plain data (as from JSON), a value
            None counts as absent but for `content`.
        template: instead of the tokenizer's own.
        add_generation_prompt: end with what begins the assistant's answer.
        tools: JSON schemas; a template named `tool_use` is taken for them if there is one.
        **kwargs: further variables of the template.

    Raises:
        RequestError: the model has no chat template, there are no messages, they are not plain
            data, or the template rejects them or fails on them.
        CheckpointError: the template is not valid, does something forbidden, or would run or grow
            without end.

    Source: transformers, utils/chat_template_utils.py, `render_jinja_template`.
    """
    text, marks = _rendered(
        tokenizer, messages, template, add_generation_prompt, tools=tools, **kwargs
    )
    if marks is None:
        return tokenizer.encode(text, add_special_tokens=False)
    return _encode(tokenizer, marks, marks.split(text))[0]


def encode_answers(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    since: int = 0,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation, and which of them the assistant writes.

    An answer is found by rendering prefixes of the conversation: it begins where the messages
    before it end with a generation prompt, and ends where they end with it. A token is the
    assistant's if it holds a character of an answer, as in transformers' assistant masks.

    Args:
        since: the first message whose answer counts.
        tools: as for `encode_chat`, whose ids these are.

    Raises:
        RequestError: as `encode_chat`; or the template writes a prefix of the conversation
            otherwise than the conversation, so that nothing says where an answer begins.
    """

    def rendered(count: int, add_generation_prompt: bool) -> str:
        return _rendered(tokenizer, messages[:count], None, add_generation_prompt, tools=tools)[0]

    text, marks = _rendered(tokenizer, messages, None, False, tools=tools)
    eos = tokenizer.special_tokens.get("eos_token", "")
    cuts = [0]
    for number in range(since, len(messages)):
        if messages[number].get("role") != "assistant":
            continue
        if number == 0:
            raise RequestError(
                "the first message is the assistant's, so that no prompt says where it begins"
            )
        begin = rendered(number, True)
        end = text if number + 1 == len(messages) else rendered(number + 1, False)
        if not text.startswith(end):  # Phi-3's closes a whole conversation with one more token
            end = end.removesuffix(eos if marks is None else marks.put(eos))
        nests = text.startswith(begin) and text.startswith(end)
        if not nests or not cuts[-1] <= len(begin) <= len(end):
            raise RequestError(
                f"the chat template writes the messages before the assistant's message {number} "
                f"otherwise once it follows, so that its tokens cannot be told from the prompt; "
                f"train on whole conversations, or on ones that end with this message"
            )
        cuts += [len(begin), len(end)]
    parts = [text[a:b] for a, b in pairwise([*cuts, len(text)])]
    if marks is None:
        encoder, spelled = tokenizer, parts
    else:
        split = [marks.split(part) for part in parts]
        _, encoder, spell = _encode(tokenizer, marks, [piece for part in split for piece in part])
        spelled = ["".join(map(spell, part)) for part in split]
    ids, offsets = encoder.encode_offsets("".join(spelled))
    is_answer = np.repeat([n % 2 == 1 for n in range(len(parts))], list(map(len, spelled)))
    before = np.concatenate([[0], np.cumsum(is_answer)])
    return ids, [bool(before[end] > before[begin]) for begin, end in offsets]


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    add_generation_prompt: bool,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    **kwargs: Any,
) -> tuple[str, _Marks | None]:
    """The text of a chat with marks for special tokens; without special tokens there are none."""
    template = template if template is not None else _choose_template(tokenizer, tools)
    strings = tokenizer.special_token_strings - {""}
    marks = _marks(strings) if strings else None
    documents = kwargs.pop("documents", None)
    special = kwargs.pop("special_tokens", tokenizer.special_tokens)
    if marks is not None:
        special = {name: marks.put(text) for name, text in special.items()}
    variables = _variables(messages, tools, documents, add_generation_prompt, special)
    return _render(template, variables | _plain_items(kwargs), marks), marks


def _encode(
    tokenizer: Tokenizer, marks: _Marks, pieces: Sequence[tuple[str, bool]]
) -> tuple[list[int], Tokenizer | PlainTokenizer, Callable[[tuple[str, bool]], str]]:
    """The ids, what encodes them, and how a piece is spelled for it."""
    spans, length = [], 0
    for piece, special in pieces:
        if special:
            spans.append((length, length + len(piece)))
        length += len(piece)
    text = "".join(piece for piece, _ in pieces)
    if marks.spans(text) == spans:
        ids = tokenizer.encode(text, add_special_tokens=False)
        wanted = [tokenizer.token_to_id(piece) for piece, special in pieces if special]
        # A tokenizer may rewrite a text into a special token's string.
        if [i for i in ids if i in tokenizer.special_token_ids] == wanted:
            return ids, tokenizer, itemgetter(0)
    plain = tokenizer.plain

    def spell(piece: tuple[str, bool]) -> str:
        return plain.mark[piece[0]] if piece[1] else piece[0]

    return plain.encode("".join(map(spell, pieces))), plain, spell


def _choose_template(tokenizer: Tokenizer, tools: Any) -> str:
    templates = tokenizer.chat_templates
    template = templates.get("tool_use") if tools is not None else None
    template = template if template is not None else templates.get("default")
    if template is None:
        known = f", only templates named {', '.join(templates)}" if templates else ""
        raise RequestError(
            f"the model has no chat template{known}: give a plain prompt, or use an instruct model"
        )
    return template


# Some templates write the token of a role as `'<|' + message.role + '|>'`.
_ROLES = (
    "assistant", "developer", "environment", "function", "ipython", "model", "observation",
    "system", "tool", "user",
)  # fmt: skip
_NONCE = "".join(secrets.choice("123456789") for _ in range(24))


class _Marks:
    """Placeholders for special tokens while a chat is rendered, which only the template can write.

    The worker puts a mark in the place of each special token's string that the template itself
    holds, and so nothing that comes out of messages, tools or their keys is special, however it
    was joined or cut. Marks are random digits; upper case and JSON leave them alone.

    Args:
        strings: the special tokens'.
    """

    def __init__(self, strings: Iterable[str]):
        ordered = sorted(strings, key=lambda text: (-len(text), text))
        numbered = enumerate([*ordered, *_ROLES])
        self._text = {f"{_NONCE}{i:06d}": text for i, text in numbered}
        marks = list(self._text)
        self.special = dict(zip(ordered, marks, strict=False))
        made = [role for role in _ROLES if any(role in s and role != s for s in ordered)]
        self.roles = {role: marks[len(ordered) + _ROLES.index(role)] for role in made}
        self._composed = {
            text.replace(role, self.roles[role], 1): text for text in ordered for role in made
            if role in text and role != text
        }  # fmt: skip
        self._special = re.compile("|".join(map(re.escape, ordered)))
        composed = [re.escape(text) for text in sorted(self._composed, key=len, reverse=True)]
        self._mark = re.compile("|".join([*composed, rf"{_NONCE}\d{{6}}"]))

    def put(self, text: str) -> str:
        """A text of the checkpoint's with its special tokens as marks."""
        return self._special.sub(lambda match: self.special[match[0]], text)

    def split(self, text: str) -> list[tuple[str, bool]]:
        """A rendered text in pieces, each with whether it is a special token."""
        pieces, at = [], 0
        for match in self._mark.finditer(text):
            meant = self._composed.get(match[0]) or self._text.get(match[0], "")
            pieces += [(text[at : match.start()], False), (meant, meant in self.special)]
            at = match.end()
        return [*pieces, (text[at:], False)]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Positions of special tokens' strings in a text."""
        return [match.span() for match in self._special.finditer(text)]


@lru_cache(maxsize=4)
def _marks(strings: frozenset[str]) -> _Marks:
    return _Marks(strings)
