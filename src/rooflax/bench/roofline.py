"""The ideal time of a decode step, for a server that states its speed as a share of it."""

from __future__ import annotations

import math
from functools import lru_cache

import jax

from rooflax.bench.ceilings import ceiling_reader
from rooflax.bench.counting import StepCost, decode_cost
from rooflax.bench.measure import multiplied_as
from rooflax.llm import LLM
from rooflax.nn.mesh import shards_of

READINGS = 3
CONTEXT_STEP = 64
"""Tokens; contexts are rounded up to multiples, so that few different steps are counted."""


class Roofline:
    """Roofline of this machine for one model, measured once.

    Attributes:
        decode_s: (rows, mean context) -> seconds that a decode step must take at least, to read its
            weights, keys and values, or to multiply them, whichever is longer.
    """

    def __init__(self, llm: LLM):
        info, plan = llm.info, llm.plan
        shards = shards_of(llm.mesh) if llm.mesh is not None else None
        if shards is None or jax.default_backend() == "cpu":  # whose devices are simulated
            devices = 1
        else:
            devices = shards.tensor * shards.expert  # which read parts of the same weights at once

        def cost(rows: int, context: int) -> StepCost:
            return decode_cost(
                info.config, batch=rows, context=context, storage=plan.storage,
                kv_dtype=plan.kv_dtype,
            )  # fmt: skip

        read = ceiling_reader(cost(1, CONTEXT_STEP).total_bytes, multiplied_as(plan.storage))
        readings = [read() for _ in range(READINGS)]
        bytes_per_s = devices * 1e9 * max(one.read_gb_per_s for one in readings)
        flops_per_s = devices * max(one.flops_per_s for one in readings)

        @lru_cache(maxsize=4096)
        def ideal(rows: int, blocks: int) -> float:
            one = cost(rows, blocks * CONTEXT_STEP)
            return max(one.total_bytes / bytes_per_s, one.operations / flops_per_s)

        self.decode_s = lambda rows, context: ideal(rows, math.ceil(context / CONTEXT_STEP))
