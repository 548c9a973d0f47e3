"""Tools for models whose chat template shows none in a format that is known: stated in a system
message, and called as Hermes' and Qwen's models do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.chat_template import names
from rooflax.loading.messages import SYSTEMS, Fitted, fitted, repaired
from rooflax.loading.tokenizer import Tokenizer

_STATED = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def shows_tools(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None, template: str | None = None
) -> bool:
    """Whether a chat template writes tools, or without any the calls of earlier answers.

    Args:
        template: in place of the tokenizer's own.
    """
    text = template if template is not None else tokenizer.chat_template
    if not tools:
        return "tool_calls" in (text or "")
    has_own = template is None and "tool_use" in tokenizer.chat_templates
    return has_own or "tools" in names(text).variables


def as_served(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    **form: Any,
) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, list[int]]:
    """A conversation as its template takes it, the tools that this shows, and the token ids:
    one rendering for all that runs and trains a model.

    Args:
        messages: as clients store them.
        tools: JSON schemas; where the template shows none, they are text among the messages.
        template: in place of the tokenizer's own.
        form: further variables, as for `encode_chat`.

    Raises:
        RequestError, CheckpointError: as `repaired` and `encode_chat`.
    """
    plain = repaired(messages, template if template is not None else tokenizer.chat_template)
    if shows_tools(tokenizer, tools, template) or not all(isinstance(m, Mapping) for m in plain):
        shown, ids = fitted(tokenizer, plain, tools=tools, template=template, **form)
        return shown, tools, ids
    shown, ids = _as_text(tokenizer, plain, tools, template=template, **form)
    return shown, None, ids


def _system(plain: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first system message, blank where there is none, and the others."""
    if plain[0].get("role") in SYSTEMS and isinstance(plain[0].get("content"), str):
        return plain[0], plain[1:]
    return {"role": "system", "content": ""}, plain


def _stating(first: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**first, "content": "\n\n".join(filter(None, (first["content"], _stated(tools))))}


def _stated(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools)
    return _STATED.format(tools=lines)


def encode_as_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of repaired messages in which tools, calls and results are text.

    The tools stand in the first system message; where the template rejects that or leaves it out,
    in the first message of the user.

    Args:
        tools: as chat templates take them.
        variables: further ones of the template.

    Raises:
        RequestError, CheckpointError: as `rooflax.loading.messages.encode`.
    """
    return _as_text(tokenizer, messages, tools, **variables)[1]


def _as_text(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **variables: Any,
) -> Fitted:
    """The messages and ids of `encode_as_text`."""
    plain = _plain(messages)
    if not tools or not plain:
        return fitted(tokenizer, plain, **variables)
    first, rest = _system(plain)

    def beginning(first: dict[str, Any]) -> Fitted:
        return fitted(tokenizer, [first, *rest], **variables)

    shown: Fitted | None = None
    with suppress(RequestError):
        shown = beginning(_stating(first, tools))
    with suppress(RequestError, CheckpointError):  # of a template that wants no blanks
        blank = "\n\n".join(filter(None, (first["content"], " ")))
        if shown is not None and shown[1] == beginning({**first, "content": blank})[1]:
            shown = None
    users = (n for n, each in enumerate(plain) if each.get("role") == "user")
    at = next((n for n in users if isinstance(plain[n].get("content"), str)), None)
    if shown is not None or at is None:
        return beginning(_stating(first, tools)) if shown is None else shown
    user = {**plain[at], "content": f"{_stated(tools)}\n\n{plain[at]['content']}"}
    return fitted(tokenizer, [*plain[:at], user, *plain[at + 1 :]], **variables)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with calls as text of the assistant and results as text of the user."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        each = dict(message)
        calls = [_call(call) for call in each.pop("tool_calls", ())]
        each.pop("tool_call_id", None)
        content = each.get("content") or ""
        if not isinstance(content, str):  # parts, as the template of another model takes them
            content = json.dumps(content, ensure_ascii=False)
        if each.get("role") == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].pop("results", False):
                result = f"{plain.pop()['content']}\n{result}"
            each = {"role": "user", "content": result, "results": True}
        elif calls:
            each["content"] = "\n".join(filter(None, (content, *calls)))
        plain.append(each)
    for each in plain:
        each.pop("results", None)
    return plain


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if isinstance(function, Mapping):
        function = {key: function[key] for key in ("name", "arguments") if key in function}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
