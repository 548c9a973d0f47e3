"""A conversation as HTTP clients state it, as what the chat template takes, and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflax.loading.chat_template import names as template_names
from rooflax.loading.messages import ROLES, repaired, with_tool_calls
from rooflax.server.call_formats import CallFormat
from rooflax.server.errors import ApiError
from rooflax.server.fields import one_of
from rooflax.server.grammars import Thinks
from rooflax.server.service import Service
from rooflax.server.tools import ToolChoice, fit_call_ids, tool_choice

EFFORTS = ("low", "medium", "high")
ALL_EFFORTS = ("none", "minimal", *EFFORTS, "xhigh", "max")
_RESERVED = frozenset(
    ["add_generation_prompt", "chat_template", "documents", "messages", "special_tokens",
     "template", "tokenize", "tokenizer", "tools"]
)  # fmt: skip


@dataclass(frozen=True)
class ChatPrompt:
    """Rendered prompt.

    Attributes:
        format: of reasoning and calls.
        may_think: the template knows the marks of reasoning.
    """

    ids: list[int]
    format: CallFormat
    choice: ToolChoice
    may_think: bool = False

    def thinks(self, decode: Any) -> Thinks:
        """Whether the answer has reasoning, by what the prompt's end has opened and closed."""
        reasoning = self.format.reasoning
        if not reasoning:
            return "not"
        tail = decode(self.ids[-32:], skip_special_tokens=False)
        opened, closed = tail.rfind(reasoning.open), tail.rfind(reasoning.close)
        if opened > closed:
            return "opened"
        return "may" if self.may_think and not tail.rstrip().endswith(reasoning.close) else "not"


async def render(service: Service, fields: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of a conversation.

    Args:
        fields: the honoured fields of a request, those of tables.RENDERING and of tools; `places`
            says where the messages stand in another API's body, `answered_by` the name there of a
            result's call.

    Raises:
        RooflaxError: the messages, tools or variables cannot be, or the template rejects them.
    """
    llm = service.ready().llm
    template = llm.tokenizer.chat_template
    names = await service.in_thread(template_names, template)
    places = fields.get("places") or [f"messages[{n}]" for n in range(len(fields["messages"]))]
    listed = with_tool_calls(fields["messages"])
    checked = _checked(listed, places, fields.get("answered_by", "tool_call_id"))
    messages = repaired(checked, template, places)
    service.check_size(sum(len(message.get("content") or "") for message in messages))
    format = service.format
    if format.calls is not None:
        fit_call_ids(messages, format.calls.id_length)
    choice = tool_choice(fields, format)
    variables = _variables(fields, names.variables)
    answer = _begun_answer(fields, messages)
    if answer and format.channels is not None:
        raise ApiError(
            "This model's answers have channels, and cannot be begun for it.",
            code="unsupported_value",
            param="continue_final_message",
        )
    ids = await service.encode_chat(messages, choice.tools, variables)
    if answer:
        ids += await service.in_thread(llm.tokenizer.encode_plain, answer)
    reasoning = format.reasoning
    is_known = reasoning is not None and reasoning.open.strip() in (template or "")
    may_think = is_known and not answer
    return ChatPrompt(ids, format, choice, may_think)


def _variables(fields: Mapping[str, Any], read: frozenset[str]) -> dict[str, Any]:
    """Further variables of the template; each must be one that it reads."""
    variables = dict(fields.get("chat_template_kwargs", {}))
    for name in variables:
        if name in _RESERVED or name.endswith("_token") or name not in read:
            raise ApiError(
                f"chat_template_kwargs has {name[:40]!r}, which the model's template does not "
                f"read; drop it.",
                param=f"chat_template_kwargs.{name[:40]}",
            )
    if "documents" in fields:
        if "documents" not in read:
            raise ApiError(
                "The model's template reads no documents.",
                code="unsupported_value",
                param="documents",
            )
        variables["documents"] = fields["documents"]
    effort = fields.get("reasoning_effort")
    if effort is not None:
        variables |= _effort(effort, read)
    return variables


def _effort(effort: str, read: frozenset[str]) -> dict[str, Any]:
    if "reasoning_effort" in read:
        one_of("reasoning_effort", effort, EFFORTS)
        return {"reasoning_effort": effort}
    if "enable_thinking" in read:
        return {"enable_thinking": effort != "none"}
    raise ApiError(
        "The model's template tells no efforts of reasoning apart; leave it out.",
        code="unsupported_value",
        param="reasoning_effort",
    )


def _read_by(service: Service) -> frozenset[str]:
    return template_names(service.ready().llm.tokenizer.chat_template).variables


def tells_effort(service: Service, effort: str) -> bool:
    """Whether the model's template can be told this effort of reasoning."""
    read = _read_by(service)
    if "reasoning_effort" in read:
        return effort in EFFORTS
    return "enable_thinking" in read and effort in ALL_EFFORTS


def efforts(service: Service) -> tuple[str, ...]:
    """Reasoning efforts that the model's template distinguishes."""
    read = _read_by(service)
    if "reasoning_effort" in read:
        return EFFORTS
    return ("none", "high") if "enable_thinking" in read else ()


def _begun_answer(fields: Mapping[str, Any], messages: list[dict[str, Any]]) -> str | None:
    """The text of the last message, taken from the list, if it shall be gone on with."""
    goes_on = fields.get("continue_final_message", False)
    if fields.get("add_generation_prompt", not goes_on) == goes_on:
        raise ApiError(
            "add_generation_prompt must be false with continue_final_message, and true without.",
            param="add_generation_prompt",
        )
    if not goes_on:
        return None
    last = messages.pop()
    if last["role"] != "assistant" or not last.get("content") or not messages:
        raise ApiError(
            "continue_final_message is for a last message of the assistant with content, after "
            "another message.",
            param="continue_final_message",
        )
    return last["content"]


def _checked(
    listed: Sequence[Mapping[str, Any]], places: Sequence[str], answered_by: str
) -> list[dict[str, Any]]:
    """Messages with their content as text.

    Raises:
        ApiError: with the place.
    """
    if not listed:
        raise ApiError("messages is empty; give at least one.", param="messages")
    messages, call_ids = [], set[str]()
    for message, where in zip(listed, places, strict=True):
        role = message["role"]
        one_of(f"{where}.role", role, ROLES)
        _check_fields(message, role, where)
        plain = dict(message)
        if "content" in message:
            plain["content"] = text_of(message["content"], f"{where}.content")
        elif role not in ("assistant", "tool"):
            raise ApiError(f"{where}.content is missing.", param=f"{where}.content")
        call_ids |= {call["id"] for call in message.get("tool_calls", ())}
        answered = message.get("tool_call_id")
        if answered is not None and answered not in call_ids:
            place = f"{where}.{answered_by}"
            raise ApiError(
                f"{place} is {answered[:64]!r}, and no earlier call has this id.", param=place
            )
        messages.append(plain)
    return messages


_OF_ROLE = {
    "tool_calls": "assistant", "reasoning_content": "assistant", "reasoning": "assistant",
    "thinking": "assistant", "tool_call_id": "tool",
}  # fmt: skip


def _check_fields(message: Mapping[str, Any], role: str, where: str) -> None:
    for name, owner in _OF_ROLE.items():
        if name in message and role != owner:
            raise ApiError(
                f"{where}.{name} is for messages of the role {owner}.", param=f"{where}.{name}"
            )


def text_of(content: str | Sequence[Mapping[str, Any]], where: str) -> str:
    """The text of a message's content.

    Raises:
        ApiError: a part is no text; images, sound and files are not read, nor fetched.
    """
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        kind, place = part.get("type"), f"{where}[{number}]"
        name = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal", "input_text", "output_text"):
            raise ApiError(
                f"{place}.type is {kind!r:.40}; the model reads text only.",
                code="unsupported_value",
                param=f"{place}.type",
            )
        text = part.get(name)
        if not isinstance(text, str):
            raise ApiError(f"{place}.{name} must be text.", param=f"{place}.{name}")
        texts.append(text)
    return "".join(texts)
