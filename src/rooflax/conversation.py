"""A conversation's turns, and the token ids of its prompt.

With a chat template the turns are messages; without one they are one growing text. When they
outgrow the context the oldest are forgotten. No terminal here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rooflax.errors import RequestError, RooflaxError

if TYPE_CHECKING:
    from rooflax.llm import LLM


@dataclass
class Turn:
    """One turn of a conversation: the user's message and the answer so far."""

    question: str
    answer: str = ""


@dataclass
class Conversation:
    """The turns that the model is shown.

    Attributes:
        system: what the system message says; needs a chat template.
        turns: oldest first; the last one is being answered.
    """

    llm: LLM
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        return self.llm.tokenizer.chat_template is not None

    def ask(self, question: str, room: int) -> tuple[list[int], int]:
        """Adds a question.

        Args:
            room: tokens to keep free for the answer.

        Returns:
            The prompt's ids, and how many of the oldest turns were forgotten to make room.

        Raises:
            RequestError: the question alone is too long (both numbers given).
            RooflaxError: the chat template fails. In either case the question is not added.
        """
        self.turns.append(Turn(question))
        most = self.llm.max_model_len - room
        forgotten = 0
        try:
            ids = self._ids(self.turns)
            while len(ids) > most and forgotten < len(self.turns) - 1:
                forgotten += 1
                ids = self._ids(self.turns[forgotten:])
            if len(ids) > most:
                raise RequestError(
                    f"this turn has {len(ids)} tokens and the context of "
                    f"{self.llm.max_model_len} has room for {most} beside an answer of {room}; "
                    f"say less, or lower max_tokens."
                )
        except RooflaxError:
            self.withdraw()
            raise
        del self.turns[:forgotten]
        return ids, forgotten

    def answer(self, text: str) -> None:
        """Keeps the answer to the last question."""
        self.turns[-1].answer = text

    def withdraw(self) -> None:
        """Takes the last question back: it failed."""
        self.turns.pop()

    def _ids(self, turns: list[Turn]) -> list[int]:
        if not self.has_template:
            return self.llm.encode("\n".join(turn.question + turn.answer for turn in turns))
        return self.llm.encode_chat(self._messages(turns)[:-1])

    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, the last answer too."""
        return self._messages(self.turns)

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages
