"""What tests compute with a model, compiled whole: operation by operation takes far longer."""

import jax

from rooflax.nn.batch import Batch


@jax.jit
def full_logits(model, tokens):
    """[rows, tokens, vocab] of tokens [rows, tokens], without a cache."""
    hidden, _ = model.forward(Batch.dense(tokens), None)
    return model.logits(hidden)


@jax.jit
def numbers(weight):
    """float32 of a quantized weight."""
    return weight.numbers()
