"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rooflax.fields.declaration import MESSAGES as MESSAGES_API
from rooflax.loading.messages import call_arguments
from rooflax.server.answers import Json, event
from rooflax.server.call import ApiCall
from rooflax.server.errors import ApiError, anthropic_body
from rooflax.server.fields import convert, one_of, present
from rooflax.server.open_call import Event
from rooflax.server.rendering import render, tells_effort
from rooflax.server.sampling import renamed
from rooflax.server.service import Service
from rooflax.server.tables import COUNT_TOKENS, FUNCTION, MESSAGES, SYSTEM, JsonObject
from rooflax.server.tools import check_parameters
from rooflax.server.turn import ChatTurn

BILLING = "x-anthropic-billing-header"
"""Begins a text that differs with every request, and so would share no cached prompt."""
_THINKING = ("enabled", "adaptive", "disabled", "between_tools")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/messages: Anthropic's API."""
    call = ApiCall.of(service, request, MESSAGES, body, "msg", reports=True)
    call.id = call.id.replace("msg-", "msg_", 1)
    answer = _MessageAnswer(call)
    if call.fields.get("stream"):
        return call.events(answer.stream(), answer.failed)
    return await call.whole(answer.whole())


async def count_tokens(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/messages/count_tokens: how many tokens a prompt would have."""
    call = ApiCall.of(service, request, COUNT_TOKENS, body, "msg", reports=True)
    prompt = await render(service, chat_fields(call))
    return Json({"input_tokens": len(prompt.ids)}, headers=call.headers)


def chat_fields(call: ApiCall) -> dict[str, Any]:
    """The same request as a chat's.

    Raises:
        ApiError: a message, block or tool cannot be.
    """
    fields, ignored = call.fields, call.ignored
    chat_values = renamed(fields, MESSAGES_API)
    system = _system(fields.get("system", ""), ignored)
    chat = [{"role": "system", "content": system}] if system else []
    places = ["system"] * len(chat)
    for number, message in enumerate(map(present, fields["messages"])):
        where = f"messages[{number}]"
        chat += _message(message, where, ignored)
        places += [where] * (len(chat) - len(places))
    chat_values["messages"], chat_values["places"] = chat, places
    chat_values["answered_by"] = "tool_use_id"
    last = chat[-1] if chat else {}
    if last.get("role") == "assistant" and last.get("content") and "tool_calls" not in last:
        if len(chat) == 1:
            raise ApiError("messages has an answer alone; begin with the user.", param="messages")
        chat_values |= {"continue_final_message": True, "add_generation_prompt": False}
    chat_values["tools"] = _tools(fields.get("tools", ()), ignored)
    if "tool_choice" in fields:
        chat_values |= _choice(fields["tool_choice"])
    if "format" in fields.get("output_config", {}):
        schema = fields["output_config"]["format"]["schema"]
        chat_values["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    chat_values |= _effort(call)
    if not chat:
        raise ApiError("messages has no content; give at least one text.", param="messages")
    return chat_values


def _effort(call: ApiCall) -> dict[str, Any]:
    """Reasoning effort; settings that the template does not read are reported."""
    thinking, ignored = present(call.fields.get("thinking", {})), call.ignored
    effort = call.fields.get("output_config", {}).get("effort")
    kind, changes = thinking.get("type"), {}
    if "thinking" in call.fields:
        one_of("thinking.type", kind, _THINKING)
    if effort is not None:
        if kind != "disabled" and tells_effort(call.service, effort):
            changes = {"reasoning_effort": effort}
        else:
            ignored.append("output_config.effort")
    if kind is not None:
        wanted = "none" if kind == "disabled" else changes.get("reasoning_effort", "high")
        if kind == "between_tools" or not tells_effort(call.service, wanted):
            ignored.append("thinking")
            return changes
        changes = {"reasoning_effort": wanted}
        ignored += [f"thinking.{name}" for name in thinking if name != "type"]
    return changes


def _system(content: str | list[dict[str, Any]], ignored: list[str]) -> str:
    texts = [_text(block, "system") for block in _blocks(content, "system")]
    kept = [text for text in texts if not text.startswith(BILLING)]
    if len(kept) < len(texts):
        ignored.append("system.billing_header")
    return "\n\n".join(text for text in kept if text)


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """Content as blocks, without nulls.

    Raises:
        ApiError: it is neither text nor a list of objects.
    """
    blocks = convert(content, SYSTEM, where)
    return [{"text": blocks}] if isinstance(blocks, str) else list(map(present, blocks))


def _text(block: Mapping[str, Any], where: str) -> str:
    """
    Raises:
        ApiError: the block is no text.
    """
    text = block.get("text")
    if block.get("type", "text") != "text" or not isinstance(text, str):
        raise ApiError(
            f"{where} has a block of type {block.get('type')!r:.40}; the model reads text only.",
            code="unsupported_value",
            param=where,
        )
    return text


def _message(
    message: Mapping[str, Any], where: str, ignored: list[str]
) -> Iterator[dict[str, Any]]:
    """The chat messages that one of Anthropic's stands for: results of tools are their own."""
    role, blocks = message.get("role"), _blocks(message.get("content", ""), f"{where}.content")
    ignored += [f"{where}.{name}" for name in message if name not in ("role", "content")]
    if role == "assistant":
        yield _assistant(blocks, where)
        return
    if role in ("ctx", "msg"):  # as some clients call it
        role = "user"
    if role not in ("user", "system"):
        raise ApiError(f"{where}.role is {role!r:.40}; it must be user or assistant.", param=where)
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            yield {"role": role, "content": "".join(texts)}
            texts = []
        inner = _blocks(block.get("content", ""), f"{where}.content")
        text = "".join(_text(each, where) for each in inner)
        prefix = "Error: " if block.get("is_error") else ""
        identity = convert(block.get("tool_use_id"), str, f"{where}.tool_use_id")
        yield {"role": "tool", "content": prefix + text, "tool_call_id": identity}
    if texts:
        yield {"role": role, "content": "".join(texts)}


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {
                "name": convert(block.get("name"), str, f"{where}.name"),
                "arguments": call_arguments(block.get("input"), f"{where}.content[{number}].input"),
            }
            identity = convert(block.get("id"), str, f"{where}.id")
            calls.append({"id": identity, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message


def _tools(listed: Any, ignored: list[str]) -> list[dict[str, Any]]:
    tools = []
    for number, tool in enumerate(map(present, listed)):
        if tool.get("type", "custom") != "custom":
            ignored.append(f"tools[{number}].type={str(tool['type'])[:40]}")
            continue
        plain = {name: value for name, value in tool.items() if name not in _OF_TOOL}
        schema = tool.get("input_schema", {"type": "object"})
        plain["parameters"] = convert(schema, JsonObject, f"tools[{number}].input_schema")
        function = FUNCTION.parse(plain, f"tools[{number}]", ignored=ignored)
        check_parameters(schema, f"tools[{number}].input_schema")
        tools.append({"type": "function", "function": function})
    return tools


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind, changes = choice.get("type"), dict[str, Any]()
    if kind == "tool":
        changes["tool_choice"] = {"type": "function", "name": choice.get("name")}
    elif kind in ("auto", "any", "none"):
        changes["tool_choice"] = {"any": "required"}.get(kind, kind)
    else:
        raise ApiError(
            f"tool_choice.type is {kind!r:.40}; it must be auto, any, tool or none.",
            param="tool_choice",
        )
    if choice.get("disable_parallel_tool_use"):
        changes["parallel_tool_calls"] = False
    return changes


_OF_TOOL = ("type", "input_schema", "cache_control")


class _MessageAnswer:
    """The blocks of one answer; their events are all that a stream sends."""

    def __init__(self, call: ApiCall):
        self.call = call
        self.turn = ChatTurn(call, chat_fields(call))
        self.blocks: list[dict[str, Any]] = []
        self.called, self.arguments = Event("call", ""), ""
        self.is_open = False

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def failed(self, error: ApiError) -> bytes:
        """An error within the stream."""
        return event(anthropic_body(error, self.call.request.scope["request_id"]), "error")

    def _message(self, **more: Any) -> dict[str, Any]:
        usage = self.call.usage
        return {
            "id": self.call.id, "type": "message", "role": "assistant", "model": self.call.model,
            "content": self.blocks, "stop_reason": None, "stop_sequence": None,
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.cached_tokens,
                "cache_read_input_tokens": usage.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage.completion_tokens,
            }, **more,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """The answer as one document."""
        ended: dict[str, Any] = {}
        async with aclosing(self._pieces()) as pieces:
            async for _, end in pieces:
                ended |= end
        return self._message(**ended)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        has_begun = False
        async with aclosing(self._pieces()) as pieces:
            async for events, ended in pieces:
                if not has_begun:
                    has_begun = True
                    yield self._event("message_start", message=self._message(content=[]))
                    yield self._event("ping")
                for each in events:
                    yield self._event(**each)
                if ended:
                    usage = self._message()["usage"]
                    yield self._event("message_delta", delta=ended, usage=usage)
                    yield self._event("message_stop")

    async def _pieces(
        self,
    ) -> AsyncGenerator[tuple[list[dict[str, Any]], dict[str, Any]], None]:
        """Events, and why it ended at the end."""
        async with aclosing(self.turn.pieces()) as pieces:
            async for piece in pieces:
                events = [each for part in piece.events for each in self._take(part)]
                ended: dict[str, Any] = {}
                if piece.finish_reason is not None:
                    events += self._close()
                    completion = piece.delta.completion
                    stop = completion.stop_reason if completion is not None else None
                    at_string = piece.finish_reason == "stop" and isinstance(stop, str)
                    reason = "stop_sequence" if at_string else _REASONS[piece.finish_reason]
                    ended = {"stop_reason": reason, "stop_sequence": stop if at_string else None}
                yield events, ended

    def _take(self, piece: Event) -> Iterator[dict[str, Any]]:
        kind, text = piece.kind, piece.text
        if kind == "call":
            self.called, self.arguments = piece, ""
        elif kind == "arguments":
            self.arguments += text
        elif kind == "call_end" and not text:
            # A block is whole once it is sent: its input cannot be taken back.
            identity = self.turn.call_id(self.called, "toolu_")
            block = {"type": "tool_use", "id": identity, "name": self.called.text, "input": {}}
            yield from self._open(block)
            block["input"] = json.loads(self.arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": self.arguments})
            yield from self._close()
        else:
            name = "thinking" if kind == "reasoning" else "text"
            if not (self.is_open and self.blocks[-1]["type"] == name):
                more = {"signature": ""} if name == "thinking" else {}
                yield from self._open({"type": name, name: "", **more})
            self.blocks[-1][name] += text
            yield self._delta({"type": f"{name}_delta", name: text})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.is_open = True
        self.blocks.append(block)
        index = len(self.blocks) - 1
        yield {"kind": "content_block_start", "index": index, "content_block": dict(block)}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self.is_open:
            return
        self.is_open = False
        yield {"kind": "content_block_stop", "index": len(self.blocks) - 1}
