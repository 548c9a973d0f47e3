"""The exceptions rooflax raises on purpose.

    RooflaxError
    ├── UnsupportedModelError   the checkpoint describes something we do not compute
    ├── CheckpointError         a file is missing, malformed or does not fit its config
    ├── RequestError            a request is at fault (the caller's mistake, HTTP 4xx)
    │   └── QueueFull           there are too many of them (HTTP 429)
    └── EngineError             we are at fault (HTTP 5xx)

Every message is one sentence that says what was given, what is wanted and what to do.
"""


class RooflaxError(Exception):
    """Base of every error that rooflax raises on purpose."""


class UnsupportedModelError(RooflaxError):
    """The checkpoint asks for an architecture or option that is not implemented."""


class CheckpointError(RooflaxError):
    """A checkpoint file is missing, malformed, or does not fit its config."""


class RequestError(RooflaxError):
    """What the caller asked for cannot be done: a value, a length, a prompt."""


class QueueFull(RequestError):
    """More requests wait than may; the same one may be welcome later."""


class EngineError(RooflaxError):
    """The engine failed while doing something it had accepted."""


def first_line(error: BaseException) -> str:
    """What another library's error says, in a line; XLA puts its own words before a kernel's, once
    for every program around it."""
    line = (str(error).splitlines() or [""])[0]
    return line.rpartition("Error dispatching computation: ")[2].strip() or type(error).__name__
