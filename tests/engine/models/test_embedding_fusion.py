"""GPT-2 reads and adds token and position embeddings in one fusion of the compiled program."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

from rooflax import ExecutionOptions, load, new_cache
from rooflax.nn.batch import Batch
from rooflax.ops import native
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

FLAGS = os.environ.get("XLA_FLAGS", "")
TABLES = {"embed": "model_weights__embed__", "position": "model_weights__position__"}

# Tests compile more quickly; where jax does not know this option there is nothing to undo.
AS_USERS_HAVE_IT = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in FLAGS else None


def readers(rows, seq, kernels):
    """Per instruction that reads an embedding table: which ones, and the operations in it."""
    model, options = load("preset:gpt2-tiny"), ExecutionOptions(kernels=kernels)
    cache = new_cache(model, rows, max_tokens=512)
    tokens, zeros = jnp.zeros(rows * seq, jnp.int32), jnp.zeros(rows, jnp.int32)
    starts, tables = jnp.arange(rows) * seq, jnp.zeros((rows, 32), jnp.int32)
    where = (starts, jnp.full(rows, seq), zeros, (tables,), (zeros,))
    batch = Batch.ragged(tokens, *where, longest=seq)
    run = jax.jit(lambda model, cache, batch: model.forward(batch, cache, options=options)[0])
    text = run.lower(model, cache, batch).compile(compiler_options=AS_USERS_HAVE_IT).as_text()
    found = []
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        operands = line.partition(" = ")[2].partition(", metadata")[0]
        read = [name for name, table in TABLES.items() if f"%{table}" in operands]
        if read:
            called = re.search(r"calls=(%[\w.\-]+)", operands)
            body = text[text.index(f"\n{called[1]} (") :].partition("\n}")[0] if called else line
            found.append((read, re.findall(r"(?<= )[a-z][a-z\-]*(?=\()", body)))
    return found


@pytest.mark.parametrize(
    ("rows", "seq"),
    cases([(1, 1), (1, 32), (1, 512), (4, 16)], default=[(1, 1), (4, 16)], every_jax=[(1, 1)]),
)
def test_two_gathers_and_a_sum_are_one_fusion(rows, seq):
    (read, operations), *others = readers(rows, seq, "xla")
    assert not others and set(read) == set(TABLES)
    lookups = [name for name in operations if name in ("gather", "dynamic-slice")]
    assert len(lookups) == 2 and "add" in operations


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@pytest.mark.parametrize(("rows", "seq"), cases([(1, 1), (4, 16)], every_jax=[(1, 1)]))
def test_behind_the_native_lookup_the_position_and_the_sum_are_one_fusion(rows, seq):
    token, position = readers(rows, seq, "native")
    assert token == (["embed"], ["custom-call"])
    assert position[0] == ["position"] and "add" in position[1]
    assert len([name for name in position[1] if name in ("gather", "dynamic-slice")]) == 1
