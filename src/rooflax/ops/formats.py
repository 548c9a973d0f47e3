"""Names of the weight formats. A format states both widths: w4a8 is 4 bits times 8."""

from __future__ import annotations

from rooflax.errors import RequestError

FORMATS = ("w8a8", "w4a8")
ALIASES = {"int8": "w8a8", "int4": "w4a8"}


def resolve_format(name: str) -> str:
    """A format's own name.

    Raises:
        RequestError: there is no such format.
    """
    found = ALIASES.get(name, name)
    if found not in FORMATS:
        raise RequestError(
            f"quantize is {name!r}; it must be one of {', '.join((*ALIASES, *FORMATS))}."
        )
    return found
