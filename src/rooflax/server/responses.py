"""POST /v1/responses, without a store: every request brings the whole conversation."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rooflax.fields.declaration import RESPONSES as RESPONSES_API
from rooflax.loading.messages import call_arguments
from rooflax.server.answers import Json, event
from rooflax.server.call import ApiCall
from rooflax.server.errors import ApiError
from rooflax.server.fields import convert, present
from rooflax.server.open_call import Event
from rooflax.server.rendering import ROLES, render, tells_effort, text_of
from rooflax.server.sampling import renamed
from rooflax.server.service import Service
from rooflax.server.tables import FUNCTION, INPUT_TOKENS, RESPONSES
from rooflax.server.tools import check_parameters
from rooflax.server.turn import ChatTurn, Spelled

LOGPROBS = "message.output_text.logprobs"
_SKIPPED = ("web_search_call", "compaction", "file_search_call", "computer_call")


async def responses(service: Service, request: Request, body: Any) -> Response:
    """POST /v1/responses: create a response; nothing is stored."""
    call = ApiCall.of(service, request, RESPONSES, body, "resp", reports=True)
    call.id = call.id.replace("resp-", "resp_", 1)
    answer = _ResponseAnswer(call)
    if call.fields.get("stream"):
        return call.events(answer.stream(), answer.failed)
    return await call.whole(answer.whole())


async def input_tokens(service: Service, request: Request, body: Any) -> Response:
    """The route that counts what a prompt would have."""
    call = ApiCall.of(service, request, INPUT_TOKENS, body, "resp", reports=True)
    prompt = await render(service, chat_fields(call))
    document = {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}
    return Json(document, headers=call.headers)


def chat_fields(call: ApiCall) -> dict[str, Any]:
    """The same request as a chat's.

    Raises:
        ApiError: an item of the input, or a tool, cannot be.
    """
    fields = call.fields
    chat_values = renamed(fields, RESPONSES_API)
    if "parallel_tool_calls" in fields:
        chat_values["parallel_tool_calls"] = fields["parallel_tool_calls"]
    chat_values["messages"], chat_values["places"] = _conversation(fields, call.ignored)
    chat_values["answered_by"] = "call_id"
    chat_values["tools"] = function_tools(fields.get("tools", ()), call.ignored)
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        if not choice.get("tools"):
            raise ApiError(
                "tool_choice.tools is missing; it names the tools that may be called.",
                param="tool_choice.tools",
            )
        allowed = convert(choice["tools"], list[dict[str, Any]], "tool_choice.tools")
        names = [each.get("name") for each in allowed]
        chat_values["tools"] = [t for t in chat_values["tools"] if t["function"]["name"] in names]
        choice = choice.get("mode", "auto")
    if choice is not None:
        chat_values["tool_choice"] = choice
    if fields.get("top_logprobs") and LOGPROBS not in fields.get("include", ()):
        raise ApiError(
            f"top_logprobs is given without {LOGPROBS}; put that into include.",
            param="top_logprobs",
        )
    if LOGPROBS in fields.get("include", ()):
        chat_values |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    form = fields.get("text", {}).get("format")
    if form is not None:
        chat_values["response_format"] = _form(form)
    effort = fields.get("reasoning", {}).get("effort")
    if effort is not None and tells_effort(call.service, effort):
        chat_values["reasoning_effort"] = effort
    elif effort is not None:
        call.ignored.append("reasoning.effort")
    return chat_values


def _form(form: Mapping[str, Any]) -> dict[str, Any]:
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    if "schema" not in form:
        raise ApiError("text.format.schema is missing.", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def function_tools(listed: Any, ignored: list[str], where: str = "tools") -> list[dict[str, Any]]:
    """Tools as chats have them; those that are no functions are reported.

    Args:
        where: the list in the body.

    Raises:
        ApiError: a function cannot be.
    """
    tools = []
    for number, tool in enumerate(map(present, listed)):
        kind, place = tool.get("type", "function"), f"{where}[{number}]"
        if kind == "namespace":
            prefix = str(tool.get("name", ""))
            nested = convert(tool.get("tools", []), list[dict[str, Any]], f"{place}.tools")
            inner = [{**each, "name": f"{prefix}__{each.get('name')}"} for each in nested]
            tools += function_tools(inner, ignored, f"{place}.tools")
        elif kind == "function":
            plain = {name: value for name, value in tool.items() if name != "type"}
            function = FUNCTION.parse(plain, place, ignored=ignored)
            check_parameters(function.get("parameters", {}), f"{place}.parameters")
            tools.append({"type": "function", "function": function})
        else:
            ignored.append(f"{place}.type={str(kind)[:40]}")
    return tools


def _conversation(
    fields: Mapping[str, Any], ignored: list[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of a chat, and their places in the request."""
    items = fields.get("input", [])
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": fields["instructions"]})
        places.append("instructions")
    reasoning = ""
    for number, item in enumerate(map(present, items)):
        where = f"input[{number}]"
        kind = item.get("type", "message")
        if kind == "message":
            role, text = item.get("role"), text_of(_content(item, where), f"{where}.content")
            if role == "assistant":
                turn = _assistant(messages, reasoning)
                turn["content"] = turn.get("content", "") + text
                reasoning = ""
            elif role in ROLES and role != "tool":
                messages.append({"role": role, "content": text})
            else:
                raise ApiError(f"{where}.role is {role!r:.40}.", param=f"{where}.role")
        elif kind in ("function_call", "custom_tool_call"):
            arguments: Any = {"input": item.get("input", "")}
            if kind == "function_call":
                arguments = call_arguments(item.get("arguments"), f"{where}.arguments")
            call = {
                "id": convert(item.get("call_id"), str, f"{where}.call_id"),
                "type": "function",
                "function": {
                    "name": convert(item.get("name"), str, f"{where}.name"),
                    "arguments": arguments,
                },
            }
            _assistant(messages, reasoning).setdefault("tool_calls", []).append(call)
            reasoning = ""
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = text_of(_content(item, where, "output"), f"{where}.output")
            identity = convert(item.get("call_id"), str, f"{where}.call_id")
            messages.append({"role": "tool", "content": text, "tool_call_id": identity})
        elif kind == "reasoning":
            name = "content" if item.get("content") else "summary"
            parts = convert(item.get(name) or [], list[dict[str, Any]], f"{where}.{name}")
            reasoning += "".join(str(part.get("text") or "") for part in parts)
        elif kind in _SKIPPED:
            ignored.append(f"{where}.type={kind}")
        else:
            raise ApiError(
                f"{where}.type is {kind!r:.40}; it must be a message, a call, its output or "
                f"reasoning.",
                code="unsupported_value",
                param=f"{where}.type",
            )
        places += [where] * (len(messages) - len(places))
    if not messages:
        raise ApiError("input is empty; send at least one message.", param="input")
    return messages, places


def _content(item: Mapping[str, Any], where: str, name: str = "content") -> Any:
    return convert(item.get(name, ""), str | list[dict[str, Any]], f"{where}.{name}")


def _assistant(messages: list[dict[str, Any]], reasoning: str) -> dict[str, Any]:
    """The assistant's turn at the end, begun if there is none: text and calls are one turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    if reasoning:
        messages[-1]["reasoning_content"] = reasoning
    return messages[-1]


class _ResponseAnswer:
    """The items of one answer; their events are all that a stream sends."""

    def __init__(self, call: ApiCall):
        self.call = call
        fields = chat_fields(call)
        self.tools = fields["tools"]
        self.turn = ChatTurn(call, fields, "max_output_tokens")
        self.output: list[dict[str, Any]] = []
        self.number = 0
        self.is_open = False
        self.tokens: list[Spelled] = []
        """Tokens that stand in no item yet."""
        self.texts: list[tuple[int, int]] = []
        """The characters of the whole answer that the open item has."""

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **fields}, kind)

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response as far as it has come."""
        call, fields = self.call, self.call.fields
        usage = call.usage
        stated = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens, "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }  # fmt: skip
        return {
            "id": call.id, "object": "response", "created_at": call.created, "status": status,
            "error": None, "incomplete_details": None, "model": call.model,
            "instructions": fields.get("instructions"), "output": self.output,
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [{"type": "function", "strict": False, **t["function"]} for t in self.tools],
            "temperature": fields.get("temperature"), "top_p": fields.get("top_p"),
            "max_output_tokens": fields.get("max_output_tokens"), "truncation": "disabled",
            "text": {"format": fields.get("text", {}).get("format", {"type": "text"})},
            "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
            "metadata": fields.get("metadata", {}), "store": False, "background": False,
            "previous_response_id": None,
            "usage": None if status == "in_progress" else stated, **more,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """The answer as one document."""
        finished = None
        async with aclosing(self._pieces()) as pieces:
            async for _, done in pieces:
                finished = done or finished
        assert finished is not None
        return finished

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        has_begun = False
        async with aclosing(self._pieces()) as pieces:
            async for events, finished in pieces:
                if not has_begun:
                    has_begun = True
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(
                            kind, response=self.response("in_progress") | {"output": []}
                        )
                for each in events:
                    yield self._event(**each)
                if finished is not None:
                    yield self._event(f"response.{finished['status']}", response=finished)

    def failed(self, error: ApiError) -> bytes:
        """An error within the stream."""
        code = {"queue_full": "rate_limit_exceeded"}.get(error.code, error.code)
        document = {"code": code, "message": str(error)}
        return self._event("response.failed", response=self.response("failed", error=document))

    async def _pieces(
        self,
    ) -> AsyncGenerator[tuple[list[dict[str, Any]], dict[str, Any] | None], None]:
        """Events without their numbers, and the finished response at the end."""
        async with aclosing(self.turn.pieces()) as pieces:
            async for piece in pieces:
                self.tokens += piece.tokens
                events = [each for part in _joined(piece.events) for each in self._take(part)]
                finished = None
                if piece.finish_reason is not None:
                    is_cut = piece.finish_reason == "length"
                    events += self._close("incomplete" if is_cut else "completed")
                    why = {"reason": "max_output_tokens"} if is_cut else None
                    is_whole = all(item["status"] == "completed" for item in self.output)
                    status = "completed" if is_whole and not is_cut else "incomplete"
                    finished = self.response(status, incomplete_details=why)
                yield events, finished

    def _take(self, piece: Event) -> Iterator[dict[str, Any]]:
        kind, text = piece.kind, piece.text
        if kind == "call":
            yield from self._close("completed")
            yield from self._open(
                {"type": "function_call", "id": _id("fc"), "call_id": self.turn.call_id(piece),
                 "name": text, "arguments": "", "status": "in_progress"}
            )  # fmt: skip
        elif kind == "call_end":
            yield from self._close("incomplete" if text else "completed")
        elif kind == "arguments":
            item = self.output[-1]
            item["arguments"] += text
            yield self._of("response.function_call_arguments.delta", delta=text)
        else:
            wanted = "reasoning" if kind == "reasoning" else "message"
            if not (self.is_open and self.output[-1]["type"] == wanted):
                yield from self._close("completed")
                yield from self._open(_new_item(wanted))
                part = dict(self.output[-1]["content"][0])
                yield self._of("response.content_part.added", content_index=0, part=part)
            part = self.output[-1]["content"][0]
            part["text"] += text
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more: dict[str, Any] = {}
            if kind == "content":
                begun = piece.at
                if self.texts and self.texts[-1][1] == begun:
                    begun, _ = self.texts.pop()
                self.texts.append((begun, piece.at + len(text)))
                more["logprobs"] = self._logprobs()
                part["logprobs"] += more["logprobs"]
            yield self._of(f"response.{name}.delta", content_index=0, delta=text, **more)

    def _logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens in the open item's text."""
        entries, end = [], self.texts[-1][1]
        while self.tokens and self.tokens[0].begin < end:
            token = self.tokens.pop(0)
            parts = [part for each in self.texts if (part := token.within(*each)) is not None]
            if parts:
                whole = token.within(parts[0].begin, parts[-1].end)
                assert whole is not None
                entries.append(whole.entry)
        return entries

    def _of(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last item."""
        item = self.output[-1]
        index = len(self.output) - 1
        return {"kind": kind, "item_id": item["id"], "output_index": index, **fields}

    def _open(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.is_open = True
        self.output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        index = len(self.output) - 1
        yield {"kind": "response.output_item.added", "output_index": index, "item": shown}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self.is_open:
            return
        self.is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._of(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            if self.texts:
                part["logprobs"] += self._logprobs()
                self.texts = []
            name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more = {"logprobs": part["logprobs"]} if name == "output_text" else {}
            yield self._of(f"response.{name}.done", content_index=0, text=part["text"], **more)
            yield self._of("response.content_part.done", content_index=0, part=dict(part))
        index = len(self.output) - 1
        yield {"kind": "response.output_item.done", "output_index": index, "item": dict(item)}


def _joined(events: Sequence[Event]) -> list[Event]:
    """The events, adjacent content as one: a token may spell the end of one part and the beginning
    of the next."""
    joined: list[Event] = []
    for each in events:
        last = joined[-1] if joined else None
        if last and each.kind == last.kind == "content" and each.at == last.at + len(last.text):
            joined[-1] = last._replace(text=last.text + each.text)
        else:
            joined.append(each)
    return joined


def _new_item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        part = {"type": "reasoning_text", "text": ""}
        return {
            "type": "reasoning", "id": _id("rs"), "summary": [], "content": [part],
            "status": "in_progress",
        }  # fmt: skip
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "type": "message", "id": _id("msg"), "role": "assistant", "content": [part],
        "status": "in_progress",
    }  # fmt: skip


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
