"""Every answer to what a kernel asks about the sizes of its blocks."""

import jax

from rooflax.ops import block_sizes


def each_answer(run):
    """(kernel, sizes, result) of `run`, which traces anew, for each of its kernels' candidates.

    Each makes a program of its own: an answer that a kernel passes over is a failure.
    """
    with block_sizes.trying({}), block_sizes.recording() as asked:
        programs = [program(run)]
    for question in asked.values():
        for sizes in question.others:
            with block_sizes.trying({question.key: sizes}):
                programs.append(program(run))
                assert programs[-1] not in programs[:-1], (question, sizes)
                yield question.kernel, sizes, run()


def program(run):
    """Its jaxpr; JAX would give the one it has to a function that it knows."""
    return str(jax.make_jaxpr(lambda: run())())
