"""Samples of a run: what the model at hand answers to stated prompts, by the engine that serves."""

from __future__ import annotations

from collections.abc import Sequence

from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, RequestError
from rooflax.llm import LLM
from rooflax.models.model import Model

MAX_TOKENS = 64


class Samples:
    """Greedy answers to prompts.

    Args:
        llm: of the model that is trained.

    Raises:
        RequestError: a prompt leaves no room for an answer.
    """

    def __init__(self, llm: LLM, prompts: Sequence[str]):
        self._llm, self._prompts = llm, prompts
        self._ids = [encode_question(llm, prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, self._ids, strict=True):
            if not 0 < len(ids) < llm.max_model_len:
                raise RequestError(
                    f"the sample {prompt!r:.40} has {len(ids)} tokens; a context of "
                    f"{llm.max_model_len} has room for 1 to {llm.max_model_len - 1} of them."
                )

    def __call__(self, model: Model) -> list[tuple[str, str]]:
        """Each prompt with the answer of a model that has other weights alone.

        Raises:
            EngineError: the engine failed.
        """
        self._llm.use(model)
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=min(MAX_TOKENS, self._llm.max_model_len - len(ids))
            )
            for ids in self._ids
        ]
        answers = self._llm.generate(self._ids, params)
        for one in answers:
            if one.error is not None:
                raise EngineError(one.error)
        return [(prompt, one.text) for prompt, one in zip(self._prompts, answers, strict=True)]


def encode_question(llm: LLM, prompt: str) -> list[int]:
    """A text's ids as a user's message, by the chat template; as it is where there is none."""
    if llm.tokenizer.chat_template is None:
        return llm.encode(prompt)
    return llm.encode_chat([{"role": "user", "content": prompt}])
