"""Which implementations each operation has here."""

from __future__ import annotations

from rooflax.errors import RequestError
from rooflax.ops.attention import api as attention
from rooflax.ops.dispatch import available
from rooflax.ops.linear import api as linear
from rooflax.ops.moe import api as moe

OPERATIONS = {
    "linear": linear.IMPLEMENTATIONS,
    "attention": attention.PAGED_IMPLEMENTATIONS,
    "moe": moe.IMPLEMENTATIONS,
}
"""Per operation its implementations by name, the best of this platform last."""


def check_kernels(name: str | None) -> None:
    """Refuses a name that some operation does not have.

    Raises:
        RequestError: naming the operation and what it has.
    """
    for operation, implementations in OPERATIONS.items():
        here = available(implementations)
        if name is not None and name not in here:
            raise RequestError(
                f"kernels is {name!r}, but {operation} has only {', '.join(here)} here."
            )


def chosen(name: str | None) -> dict[str, str]:
    """Per operation the implementation that runs when `name` is asked for."""
    return {
        operation: name or list(available(implementations))[-1]
        for operation, implementations in OPERATIONS.items()
    }
