"""Rollouts: answers that the model at hand gives to prompts, with rewards, as training batches.

The engine that serves is the sampler. It gets the trained weights as arrays, in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.completion import Completion
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import CheckpointError, EngineError, RequestError
from rooflax.llm import LLM
from rooflax.models.adapters import adapted
from rooflax.models.model import Model
from rooflax.rl.grpo import SAMPLER_KERNELS, GrpoBatch, advantages, grpo_loss
from rooflax.rl.rewards import Reward
from rooflax.rl.samples import encode_question
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import TrainConfig
from rooflax.train.corpus import Prompt
from rooflax.train.step import make_token_losses

HELD_OUT = -1
"""Step in the seeds of held-out answers, which are the same each time."""


class Rollouts:
    """The batches of a run of GRPO.

    Args:
        llm: the sampler, whose `model` training starts from.
        training, held_out, test: prompts.

    Raises:
        RequestError: a prompt leaves no room for an answer, with file and line.
        CheckpointError: the template or the tokenizer fails on one, with file and line.
    """

    def __init__(
        self,
        llm: LLM,
        training: Sequence[Prompt],
        held_out: Sequence[Prompt],
        test: Sequence[Prompt],
        reward: Reward,
        config: TrainConfig,
    ):
        self.llm, self.reward, self.config = llm, reward, config
        self.prompts = {"training": training, "held-out": held_out, "test": test}
        self._ids = {row.where: self._encode(row) for row in (*training, *held_out, *test)}
        self._order = lru_cache(maxsize=2)(self._make_order)

    @property
    def has_held_out(self) -> bool:
        return bool(self.prompts["held-out"])

    def start(self, model: Model, fixed: Any, lora: LoraTraining | None) -> None:
        """Before the first step.

        Args:
            model: as it was, the reference.
            fixed: as of the loss.
        """
        self._model, self._fixed, self._lora = model, fixed, lora
        config = replace(self.config, remat=None)
        losses = make_token_losses(model, config, lora, SAMPLER_KERNELS)

        def logprobs(weights: Any, fixed: Any, batch: GrpoBatch) -> Any:
            parts = jax.tree.map(
                lambda a: a.reshape(config.micro_batches or 1, -1, *a.shape[1:]), batch
            )
            values = jax.lax.map(lambda part: -losses(weights, fixed, part), parts)
            return values.reshape(batch.mask.shape)

        self._logprobs = jax.jit(logprobs)
        self._reference = None
        if config.beta:
            self._reference = model.weights if lora is None else lora.start()

    loss = staticmethod(grpo_loss)

    def batch(self, step: int, weights: Any) -> tuple[GrpoBatch, dict[str, float]]:
        """The answers of a step, a function of (seed, step, weights), and means of them by name.

        Raises:
            RewardError: the reward failed.
            EngineError: the engine did.
        """
        size = self.config.num_generations
        count = self.config.batch_size // size
        rows = [self._row(number) for number in range(step * count, (step + 1) * count)]
        answers = self._sample(step, rows, size, weights)
        each = [row for row in rows for _ in range(size)]
        rewards = np.reshape(self.reward(each, [one.text for one in answers]), (count, size))
        gains = advantages(rewards).reshape(-1).astype(np.float32)
        batch = self._pack(answers)._replace(advantages=gains)
        if self._reference is not None:
            reference = self._logprobs(self._reference, self._fixed, batch)
            batch = batch._replace(reference=np.asarray(reference))
        return batch, {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(axis=1, ddof=1).mean()),
            "completion_length": float(np.mean([len(one.tokens) for one in answers])),
            "sampling_difference": self._difference(weights, batch),
        }

    def evaluate(
        self, part: str, num_batches: int | None, weights: Any
    ) -> tuple[float | None, dict[str, float]]:
        """The mean reward of one answer to each prompt of a part, as a loss its negative; None
        without prompts."""
        rows, size = list(self.prompts[part]), self.config.batch_size
        if num_batches is not None:
            wanted = min(num_batches * size, len(rows))
            rows = [rows[index * len(rows) // wanted] for index in range(wanted)]
        if not rows:
            return None, {}
        rewards: list[float] = []
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            # As many as in training: the engine stays the same.
            answers = self._sample(HELD_OUT, [*batch, *batch[:1] * (size - len(batch))], 1, weights)
            rewards += self.reward(batch, [one.text for one in answers[: len(batch)]])
        mean = float(np.mean(rewards))
        return -mean, {"reward": mean}

    def sampled(self, weights: Any) -> Model:
        """The model with these weights, for the engine."""
        if self._lora is None:
            return replace(self._model, weights=weights)
        return adapted(self._model, self._lora.adapters(weights))

    def _sample(
        self, step: int, rows: Sequence[Prompt], count: int, weights: Any
    ) -> list[Completion]:
        """`count` answers to each prompt."""
        self.llm.use(self.sampled(weights))
        params = [
            SamplingParams(
                n=count, logprobs=0, max_tokens=self.config.max_completion_length,
                seed=self._seed(step, number),
            ).with_defaults({})  # a checkpoint's would draw from another distribution
            for number in range(len(rows))
        ]  # fmt: skip
        answers = self.llm.generate([self._ids[row.where] for row in rows], params)
        for one in answers:
            if one.error is not None:
                raise EngineError(one.error)
        return answers

    def _seed(self, step: int, number: int) -> int:
        state = np.random.SeedSequence((self.config.seed, step - HELD_OUT, number))
        return int(state.generate_state(1)[0])

    def _pack(self, answers: Sequence[Completion]) -> GrpoBatch:
        shape = (len(answers), self.config.seq_len)
        ids, mask = np.zeros((shape[0], shape[1] + 1), np.int32), np.zeros(shape, np.float32)
        sampled = np.zeros(shape, np.float32)
        for row, one in enumerate(answers):
            start, end = len(one.prompt_tokens), len(one.prompt_tokens) + len(one.tokens)
            ids[row, :end] = (*one.prompt_tokens, *one.tokens)
            mask[row, start - 1 : end - 1] = 1.0
            sampled[row, start - 1 : end - 1] = [each.logprob for each in one.logprobs or ()]
        index = np.arange(shape[1], dtype=np.int32)
        return GrpoBatch(
            tokens=np.ascontiguousarray(ids[:, :-1]),
            targets=np.ascontiguousarray(ids[:, 1:]),
            mask=mask,
            positions=np.tile(index, (shape[0], 1)),
            segment_ids=None,
            sampled=sampled,
            reference=np.zeros(shape, np.float32),
            advantages=np.zeros(shape[0], np.float32),
        )

    def _difference(self, weights: Any, batch: GrpoBatch) -> float:
        """The largest between the sampler's log-probabilities and the trainer's."""
        trained = np.asarray(self._logprobs(weights, self._fixed, batch))
        return float(np.max(batch.mask * np.abs(trained - batch.sampled)))

    def _row(self, number: int) -> Prompt:
        epoch, index = divmod(number, len(self.prompts["training"]))
        return self.prompts["training"][int(self._order(epoch)[index])]

    def _make_order(self, epoch: int) -> np.ndarray:
        random = np.random.default_rng((self.config.seed, epoch))
        return random.permutation(len(self.prompts["training"]))

    def _encode(self, row: Prompt) -> list[int]:
        try:
            if isinstance(row.prompt, str):
                ids = encode_question(self.llm, row.prompt)
            else:
                ids = self.llm.encode_chat(row.prompt, tools=row.tools)
        except (RequestError, CheckpointError) as error:
            raise type(error)(f"{row.where}: {str(error).rstrip('.')}.") from None
        longest = min(self.config.seq_len + 1, self.llm.max_model_len)
        room = longest - self.config.max_completion_length
        if not 0 < len(ids) <= room:
            raise RequestError(
                f"{row.where} has a prompt of {len(ids)} tokens, and rows of --seq-len "
                f"{self.config.seq_len} have room for 1 to {room} before a completion of "
                f"{self.config.max_completion_length}."
            )
        return ids

    def shapes(self) -> GrpoBatch:
        """Shapes of a batch."""
        rows = (self.config.batch_size, self.config.seq_len)
        whole, real = (jax.ShapeDtypeStruct(rows, kind) for kind in (jnp.int32, jnp.float32))
        one = jax.ShapeDtypeStruct(rows[:1], jnp.float32)
        return GrpoBatch(whole, whole, real, whole, None, real, real, one)

    def cache_bytes(self) -> int:
        """Bytes of the sampler's KV cache."""
        plan = self.llm.plan
        return plan.estimate(self.config.batch_size, plan.max_model_len).kv_cache
