"""A chat as text and as token ids, by the template that came with the checkpoint.

`render` gives the text that transformers' `apply_chat_template(tokenize=False)` gives;
`encode_chat` the ids of `tokenize=True`, except that a special token's string inside a message is
text. How a template is kept in bounds is `template_sandbox`'s matter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.template_sandbox import MAX_DEPTH, TemplateLimitError, render_bounded
from rooflax.loading.tokenizer import Tokenizer

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """The text of a chat, as the template writes it.

    Args:
        template: a jinja2 chat template.
        messages: dicts with `role` and `content`; values are plain data (as from JSON), a value
            None counts as absent.
        add_generation_prompt: end with what begins the assistant's answer.
        bos_token: the template's variable of this name; undefined if not given here or next.
        eos_token: likewise.
        special_tokens: all of them by name, such as `{"bos_token": "<s>", "pad_token": "<pad>"}`.
        tools: JSON schemas of functions.
        documents: dicts with `title` and `text`.
        **kwargs: further variables of the template.

    Raises:
        RequestError: there are no messages, they are not plain data, or the template refuses them
            or fails on them.
        CheckpointError: the template is not valid, does something forbidden, or would run or grow
            without end.

    Source: transformers, utils/chat_template_utils.py, `render_jinja_template`.
    """
    given = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {
        **(special_tokens or {}),
        **{name: text for name, text in given.items() if text is not None},
        **{name: _plain(value, name) for name, value in kwargs.items()},
        "messages": _plain_messages(messages),
        "tools": None if tools is None else _plain(list(tools), "tools"),
        "documents": None if documents is None else _plain(list(documents), "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    return _render(template, variables)


class _Refusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


def _raise_exception(message: Any) -> None:
    raise _Refusal(str(message)[:500])


def _strftime_now(pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > 200:
        raise TemplateLimitError("it formats the date by a pattern that is too long")
    # `%1000000d` is a width in the C library's dialect.
    if re.search(r"%[^%a-zA-Z]*\d{3}", pattern):
        raise TemplateLimitError("it pads the date to a width that is too large")
    return datetime.now().strftime(pattern)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


def _render(template: str, variables: Mapping[str, Any]) -> str:
    try:
        return render_bounded(template, variables, _FUNCTIONS)
    except _Refusal as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from None
    except TemplateLimitError as error:
        raise CheckpointError(f"the chat template is refused: {error}") from None
    except (RecursionError, MemoryError):
        raise CheckpointError("the chat template is refused: it nests without end") from None
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template is not valid (line {error.lineno}): {error.message}"
        ) from None
    except SecurityError as error:
        raise CheckpointError(f"the chat template does what is forbidden: {error}") from None
    except SyntaxError:  # of the Python code that jinja2 makes, for example too many nested blocks
        raise CheckpointError("the chat template is not valid: it nests too deeply") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RequestError(f"the chat template fails on these messages: {reason}") from error


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise RequestError("a chat needs at least one message")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {i} is {message!r:.60}, not a dict with role and content")
        given = {k: v for k, v in message.items() if v is not None}
        plain.append(_with_reasoning(_plain(given, f"message {i}")))
    return plain


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    # Reasoning goes by three names; transformers offers it to templates under the two they read.
    for field in _REASONING_FIELDS:
        if field in message and message[field] is not None:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH - 8:
        raise RequestError(f"{where} is nested too deeply")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
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
        messages: as in `render`.
        template: instead of the tokenizer's own.
        add_generation_prompt: end with what begins the assistant's answer.
        tools: JSON schemas; a template named `tool_use` is taken for them if there is one.
        **kwargs: further variables of the template.

    Raises:
        RequestError: as `render`, or the model has no chat template.
        CheckpointError: as `render`.
    """
    template = template if template is not None else _choose_template(tokenizer, tools)
    marks = _Marks.for_inputs(tokenizer, template, messages, tools, kwargs)
    if marks is not None:
        messages, tools, kwargs = (marks.put(value) for value in (messages, tools, kwargs))
    text = render(
        template,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        **{"special_tokens": tokenizer.special_tokens, **kwargs},
    )
    if marks is None:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.plain.encode(marks.resolve(text, tokenizer.plain.mark))


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


class _Marks:
    """Two characters around each special string of the input, by which it is known afterwards.

    They are private-use characters that occur nowhere in this input, so nothing of it is lost or
    mistaken. What becomes special are the strings without a mark at either end, which only the
    template can have written: one mark is enough, in case the template cut the text at the other.
    """

    def __init__(self, strings: Sequence[str], begin: str, end: str):
        self._begin, self._end = begin, end
        longest_first = sorted(strings, key=len, reverse=True)
        special = "|".join(map(re.escape, longest_first))
        self._special = re.compile(special)
        self._marked_or_special = re.compile(f"{begin}(?:{special})|(?:{special}){end}|({special})")

    @classmethod
    def for_inputs(cls, tokenizer: Tokenizer, template: str, *inputs: Any) -> _Marks | None:
        """The marks that these inputs need, None if they hold no special string."""
        strings = [text for text in tokenizer.special_token_strings if text]
        given = "\0".join(_strings_in(inputs))
        if not any(text in given for text in strings):
            return None
        taken = set(given) | set(template)
        free = (chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in taken)
        try:
            return cls(strings, next(free), next(free))
        except StopIteration:
            raise RequestError("the messages use every private character of Unicode") from None

    def put(self, value: Any) -> Any:
        """The same data with marks around special strings; keys and roles stay as they are."""
        if isinstance(value, str):
            return self._special.sub(lambda m: f"{self._begin}{m[0]}{self._end}", value)
        if isinstance(value, Mapping):
            return {k: v if k == "role" else self.put(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(item) for item in value]
        return value

    def resolve(self, text: str, spelling: Mapping[str, str]) -> str:
        """The rendered text without marks, special tokens of the template spelled as given."""
        for mark in (self._begin, self._end):
            # A template may write JSON in ASCII.
            text = text.replace(json.dumps(mark)[1:-1], mark)
        text = self._marked_or_special.sub(lambda m: spelling[m[1]] if m[1] else m[0], text)
        return text.replace(self._begin, "").replace(self._end, "")


def _strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings_in(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _strings_in(item)]
    return []
