"""Tools for models whose chat template shows none in a format that is known: stated in a system
message, and called as Hermes' and Qwen's models do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.messages import encode
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
_SYSTEMS = ("system", "developer")


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
    plain = _plain(messages)
    if not tools or not plain:
        return encode(tokenizer, plain, **variables)
    stated = _STATED.format(tools="\n".join(json.dumps(each, ensure_ascii=False) for each in tools))
    has_system = plain[0].get("role") in _SYSTEMS and isinstance(plain[0].get("content"), str)
    first = plain[0] if has_system else {"role": "system", "content": ""}
    rest = plain[1:] if has_system else plain

    def in_system(text: str) -> list[int]:
        content = "\n\n".join(filter(None, (first["content"], text)))
        return encode(tokenizer, [{**first, "content": content}, *rest], **variables)

    shown: list[int] | None = None
    with suppress(RequestError):
        shown = in_system(stated)
    with suppress(RequestError, CheckpointError):  # of a template that wants no blanks
        if shown is not None and shown == in_system(" "):
            shown = None
    users = (n for n, each in enumerate(plain) if each.get("role") == "user")
    at = next((n for n in users if isinstance(plain[n].get("content"), str)), None)
    if shown is not None or at is None:
        return in_system(stated) if shown is None else shown
    user = {**plain[at], "content": f"{stated}\n\n{plain[at]['content']}"}
    return encode(tokenizer, [*plain[:at], user, *plain[at + 1 :]], **variables)


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with calls as text of the assistant and results as text of the user."""
    found: list[dict[str, Any]] = []
    for message in messages:
        each = dict(message)
        calls = [_call(call) for call in each.pop("tool_calls", ())]
        each.pop("tool_call_id", None)
        content = each.get("content") or ""
        if not isinstance(content, str):  # parts, as the template of another model takes them
            content = json.dumps(content, ensure_ascii=False)
        if each.get("role") == "tool":
            result = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].pop("results", False):
                result = f"{found.pop()['content']}\n{result}"
            each = {"role": "user", "content": result, "results": True}
        elif calls:
            each["content"] = "\n".join(filter(None, (content, *calls)))
        found.append(each)
    for each in found:
        each.pop("results", None)
    return found


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if isinstance(function, Mapping):
        function = {key: function[key] for key in ("name", "arguments") if key in function}
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
