"""The commands of `rooflax chat`: lines that begin with a slash."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rooflax.cli import terminal
from rooflax.conversation import Conversation, Turn
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import OTHER_NAMES, RequestError, did_you_mean
from rooflax.fields.sampling import SAMPLING
from rooflax.files import only_writer, read_regular, replacing
from rooflax.inputs import FIELDS

HELP = (
    ("/help", "this list"),
    ("/system [TEXT]", "show the system message, or set it"),
    ("/params [NAME=VALUE ...]", "show the sampling parameters, or set some"),
    ("/regen", "answer the last question again, with another seed"),
    ("/clear", "forget the conversation"),
    ("/save FILE [--force]", "write the conversation as JSON"),
    ("/load FILE", "continue a conversation from a file"),
    ("/bye", "end the conversation, as Ctrl-D, /exit and /quit do"),
    ('Alt-Enter, """', "break a line; begin and end a text of several lines"),
    ("Ctrl-C", "stop an answer, or leave what was typed"),
)


@dataclass
class Chat:
    """A conversation with the settings that commands change."""

    conversation: Conversation
    params: SamplingParams

    def command(self, line: str) -> str | None:
        """Does what a line with a slash says.

        Returns:
            A question that is to be asked now, or None.

        Raises:
            RequestError: it is no command, or it cannot be done.
        """
        name, *rest = line.split(maxsplit=1)
        if name in ELSEWHERE:
            raise RequestError(f"{name} is no command: {ELSEWHERE[name]}.")
        if name not in _COMMANDS:
            meant = did_you_mean(name, _COMMANDS)
            raise RequestError(f"{name} is no command{meant}; /help lists them.")
        return _COMMANDS[name](self, "".join(rest).strip())

    def _help(self, rest: str) -> None:
        for line in terminal.table(HELP):
            terminal.say(line)

    def _system(self, text: str) -> None:
        if text and not self.conversation.has_template:
            raise RequestError("A system message needs a chat template, and the model has none.")
        if text:
            self.conversation.system = text
        terminal.say(f"system: {self.conversation.system or 'none'}")

    def _params(self, rest: str) -> None:
        changes: dict[str, Any] = {}
        for part in rest.split():
            name, equals, value = part.partition("=")
            name = usual(name)
            if not equals or name not in FIELDS:
                raise RequestError(
                    f"{part!r} is no sampling parameter{did_you_mean(name, FIELDS)}; write "
                    f"NAME=VALUE, as in temperature=0.7."
                )
            if SAMPLING[name].per_prompt:
                raise RequestError(f"{name} is not for a chat, whose turns have one answer each.")
            changes[name] = _value(value)
        self.params = replace(self.params, **changes)
        plain = SamplingParams()
        for name in FIELDS:
            value = getattr(self.params, name)
            if value != getattr(plain, name) or name in changes:
                terminal.say(f"{name}={json.dumps(value)}")

    def _regen(self, rest: str) -> str:
        if not self.conversation.turns:
            raise RequestError("There is no question to answer again.")
        self.params = replace(self.params, seed=(self.params.seed or 0) + 1)
        return self.conversation.turns.pop().question

    def _clear(self, rest: str) -> None:
        self.conversation.turns.clear()
        terminal.say("The conversation is empty.")

    def _save(self, rest: str) -> None:
        path = rest.removesuffix("--force").strip()
        if not path:
            raise RequestError("/save needs the name of a file.")
        if os.path.exists(path) and path == rest:
            raise RequestError(f"{path} exists; /save {path} --force replaces it.")
        document = {
            "model": self.conversation.llm.info.name,
            "messages": self.conversation.messages(),
        }
        try:
            with only_writer(path), replacing(path, "utf-8") as file:
                file.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None
        terminal.say(f"The conversation is in {path}.")

    def _load(self, path: str) -> None:
        if not path:
            raise RequestError("/load needs the name of a file.")
        system, turns = read_conversation(path)
        if system is not None and not self.conversation.has_template:
            raise RequestError(f"{path} has a system message, and the model has no chat template.")
        self.conversation.system, self.conversation.turns = system, turns
        terminal.say(f"{len(turns)} turn{'' if len(turns) == 1 else 's'} loaded.")


_COMMANDS: dict[str, Callable[[Chat, str], str | None]] = {
    "/help": Chat._help,
    "/system": Chat._system,
    "/params": Chat._params,
    "/regen": Chat._regen,
    "/clear": Chat._clear,
    "/save": Chat._save,
    "/load": Chat._load,
    "/?": Chat._help,
    "/reset": Chat._clear,
    "/new": Chat._clear,
    "/retry": Chat._regen,
}
ELSEWHERE = {
    "/set": "/params NAME=VALUE sets sampling parameters, /system TEXT the system message",
    "/show": "/params and /system show what is set, rooflax inspect MODEL the model",
    "/model": "a conversation keeps its model; /save it, and /load it in rooflax chat MODEL",
}
"""Commands of Ollama and others, and what does the same here."""


def usual(name: str) -> str:
    """A sampling parameter by the name it has here: "top-p" and "temp" are known too."""
    name = name.removeprefix("--").replace("-", "_")
    return name if name in FIELDS else OTHER_NAMES.get(name, name)


def complete(line: str) -> tuple[str, list[str]]:
    """The part of a line that is completed, and what it may become: a command, a file, a name."""
    name, space, rest = line.partition(" ")
    if not space:
        names = [name + space for name, space, _ in (each.partition(" ") for each, _ in HELP)]
        return line, [each for each in names if line and each.startswith(line)]
    if name in ("/save", "/load"):
        paths = sorted(glob.glob(f"{glob.escape(rest)}*"))
        return rest, [f"{path}{os.sep}" if os.path.isdir(path) else path for path in paths]
    part = rest.rpartition(" ")[2]
    fields = FIELDS if name == "/params" else []
    return part, [f"{each}=" for each in fields if each.startswith(part)]


def read_conversation(path: str) -> tuple[str | None, list[Turn]]:
    """A system message and turns from a file that /save wrote.

    Raises:
        RequestError: it cannot be read, or is something else.
    """
    try:
        messages = json.loads(read_regular(path))["messages"]
        system, turns = None, []
        for message in messages:
            role, text = message["role"], message["content"]
            if not isinstance(text, str) or role not in ("system", "user", "assistant"):
                raise ValueError(role)
            if role == "system":
                system = text
            elif role == "user":
                turns.append(Turn(text))
            else:
                turns[-1].answer = text
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise RequestError(f"{path} is no conversation that /save wrote.") from None
    return system, turns


def _value(text: str) -> Any:
    """A value as JSON; what is none is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
