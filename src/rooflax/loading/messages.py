"""Conversations as clients store them, as chat templates take them: one repair below every API."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.chat_template import encode_chat, names
from rooflax.loading.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages that every template may be given."""
Fitted = tuple[Sequence[Mapping[str, Any]], list[int]]
"""Messages as a template takes them, and their token ids."""
SYSTEMS = ("system", "developer")
"""Roles of those who set the model's task."""
_CONTENT_IS_NONE = re.compile(r"content['\"\]]*\s+is\s+none")
"""Pattern in templates that tell calls by it, as DeepSeek-R1's; others write None, or fail."""


def call_arguments(raw: Any, where: str) -> dict[str, Any]:
    """The arguments of an earlier call, as the object that templates read.

    None and blank text are no arguments; JSON within JSON is read too, as some models write it.

    Raises:
        RequestError: they are not the JSON of an object; `where` is the error's `param`.
    """
    parsed = raw
    try:
        for _ in range(2):
            if isinstance(parsed, str):
                parsed = json.loads(parsed) if parsed.strip() else None
    except (ValueError, RecursionError):
        parsed = ""
    if parsed is None:
        return {}
    if isinstance(parsed, Mapping):
        return dict(parsed)
    raise RequestError(
        f"{where} is {raw!r:.60}, which is not the JSON of an object; correct it, or leave the "
        f"call and its result out.",
        param=where,
    )


def repaired(
    messages: Sequence[Mapping[str, Any]],
    template: str | None,
    places: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    None is absence at every level, arguments of calls are objects, results of tools stand behind
    their calls and in their order, and a developer is the system where the template knows none.

    Args:
        template: that the messages are for.
        places: of the messages as errors name them; without it `messages[0]` and so on.

    Raises:
        RequestError: they are no list, or arguments of a call do not parse.
    """
    is_text = isinstance(messages, str | bytes)
    if messages is not None and (is_text or not isinstance(messages, Sequence)):
        raise RequestError(
            f"messages is {messages!r:.80}; it must be a list of dicts with role and content.",
            param="messages",
        )
    texts = names(template).texts
    asks_for_none = _CONTENT_IS_NONE.search(template or "") is not None
    plain_messages: list[Any] = []
    for number, message in enumerate(with_tool_calls(messages or ())):
        if not isinstance(message, Mapping):
            plain_messages.append(message)  # the template's matter
            continue
        plain = _present(message)
        _check_role(plain.get("role"), texts, f"messages[{number}].role")
        if plain.get("role") == "developer" and "developer" not in texts:
            plain["role"] = "system"
        calls, where = plain.pop("tool_calls", None), f"messages[{number}]"
        if calls is not None and not isinstance(calls, list | tuple):
            raise RequestError(f"{where}.tool_calls is {calls!r:.80}; it must be a list.")
        _check_id(plain.get("tool_call_id"), f"{where}.tool_call_id")
        if calls:
            where = f"{places[number] if places else where}.tool_calls"
            plain["tool_calls"] = [_call(each, f"{where}[{n}]") for n, each in enumerate(calls)]
        if isinstance(plain.get("content"), list | tuple):
            plain["content"] = _text_of_parts(plain["content"], f"messages[{number}].content")
        if plain.get("role") in ("assistant", "tool"):
            plain.setdefault("content", "")
        if calls and not plain["content"] and asks_for_none:
            plain["content"] = None
        plain_messages.append(plain)
    return _with_results_in_order(plain_messages)


def with_tool_calls(messages: Sequence[Any]) -> list[Any]:
    """The same with calls as OpenAI's API had them first as calls of tools.

    An assistant's `function_call` becomes its one tool call, and a message of the role "function"
    the result of the last call of that name.

    Raises:
        RequestError: a message has both kinds of calls.
    """
    modern: list[Any] = []
    identities: dict[str, str] = {}
    for number, message in enumerate(messages):
        rest = dict(message) if isinstance(message, Mapping) else {}
        called = rest.pop("function_call", None)
        if isinstance(called, Mapping) and _role(message) == "assistant":
            if rest.get("tool_calls"):
                raise RequestError(
                    f"messages[{number}] has function_call and tool_calls; leave one of them out.",
                    param=f"messages[{number}].function_call",
                )
            identity = identities[str(called.get("name"))] = f"function_call_{number}"
            call = {"id": identity, "type": "function", "function": dict(called)}
            modern.append(rest | {"tool_calls": [call]})
        elif _role(message) == "function":
            result = rest | {"role": "tool"}
            if identity := identities.get(str(rest.get("name"))):
                result["tool_call_id"] = identity
            modern.append(result)
        else:
            modern.append(message)
    return modern


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_role(role: Any, texts: Collection[str], where: str) -> None:
    """Rejects a role that nobody knows, which many a template writes into the prompt as it is.

    Args:
        texts: of the template.

    Raises:
        RequestError: with the place.
    """
    if isinstance(role, str) and role not in ROLES and role not in texts:
        raise RequestError(
            f"{where} is {role!r:.80}; it must be one of {', '.join(ROLES)}, or one that the chat "
            f"template names.",
            param="messages",
        )


def _text_of_parts(parts: Sequence[Any], where: str) -> str:
    """A content's parts as one text.

    Raises:
        RequestError: one is no text.
    """
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{number}] is {str(kind or part)!r:.40}; the model reads text only.",
                param="messages",
            )
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    _check_id(call.get("id"), f"{where}.id")
    if not isinstance(call.get("function"), Mapping):
        return call
    function = _present(call["function"])
    function["arguments"] = call_arguments(function.get("arguments"), f"{where}.function.arguments")
    return _present(call) | {"function": function}


def _check_id(identity: Any, where: str) -> None:
    if identity is not None and not isinstance(identity, str | int):
        raise RequestError(f"{where} is {identity!r:.80}; it must be a text.")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _with_results_in_order(messages: list[Any]) -> list[Any]:
    """The same with the results of each answer's calls right behind it, in the calls' order."""
    ordered: list[Any] = []
    behind: list[Any] = []
    order: dict[Any, int] = {}
    for message in (*messages, None):
        if message is not None and _role(message) != "assistant":
            behind.append(message)
            continue
        if order:
            results = [each for each in behind if _role(each) == "tool"]
            results.sort(key=lambda each: order.get(each.get("tool_call_id"), len(order)))
            behind = results + [each for each in behind if _role(each) != "tool"]
        ordered += behind
        behind, order = [], {}
        if message is not None:
            ordered.append(message)
            for number, call in enumerate(message.get("tool_calls", ())):
                order.setdefault(call.get("id") if isinstance(call, Mapping) else None, number)
    return ordered


def encode(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **form: Any) -> list[int]:
    """Token ids of repaired messages as they are `fitted`."""
    return fitted(tokenizer, messages, **form)[1]


def fitted(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **form: Any) -> Fitted:
    """Repaired messages as the template takes them, and their token ids.

    Where the template rejects them, or leaves a system message out, the system's messages
    become one at the beginning, and neighbours of one role become one; arguments of calls become
    JSON, for templates that want text.

    Args:
        form: as for `encode_chat`.

    Raises:
        RequestError, CheckpointError: as `encode_chat`.
    """
    strict = _strict(messages)
    try:
        ids = encode_chat(tokenizer, messages, **form)
    except RequestError:
        for others in (strict, _with_text(messages), _with_text(strict)):
            if others != messages:
                with suppress(RequestError):
                    return others, encode_chat(tokenizer, others, **form)
        raise
    systems = [number for number, each in enumerate(messages) if _role(each) in SYSTEMS]
    for hidden in ({*systems} - {0}, {*systems[:-1]}):
        blank = [{**m, "content": ""} if n in hidden else m for n, m in enumerate(messages)]
        with suppress(RequestError, CheckpointError):  # of a template that wants no blanks
            if hidden and encode_chat(tokenizer, blank, **form) == ids:
                return strict, encode_chat(tokenizer, strict, **form)
    return messages, ids


def _with_text(messages: Sequence[Any]) -> list[Any]:
    """The same with arguments of calls as JSON."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**each, "tool_calls": list(map(written, each["tool_calls"]))}
        if isinstance(each, Mapping) and "tool_calls" in each
        else each
        for each in messages
    ]


def _strict(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """As the strictest templates want them: one system message first, then roles that alternate."""
    systems = [each for each in messages if _role(each) in SYSTEMS]
    alternating: list[dict[str, Any]] = []
    for each in (*systems, *(each for each in messages if _role(each) not in SYSTEMS)):
        if not isinstance(each, Mapping):
            return messages
        last = alternating[-1] if alternating else {}
        is_text = isinstance(last.get("content"), str) and isinstance(each.get("content"), str)
        is_system = _role(last) in SYSTEMS and _role(each) in SYSTEMS
        is_same = _role(last) == _role(each) != "tool" and "tool_calls" not in {**last, **each}
        if is_text and (is_system or is_same):
            last["content"] = "\n\n".join(filter(None, (last["content"], each["content"])))
        else:
            alternating.append(dict(each))
    return alternating
