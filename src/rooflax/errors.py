"""The exceptions rooflax raises on purpose.

    RooflaxError
    ├── UnsupportedModelError   the checkpoint describes something we do not compute
    ├── CheckpointError         a file is missing, malformed or does not fit its config
    ├── RequestError            a request is at fault (the caller's mistake, HTTP 4xx)
    │   └── QueueFull           there are too many of them (HTTP 429)
    └── EngineError             we are at fault (HTTP 5xx)
        └── RewardError         a reward of training, which is the caller's own function

Every message is one sentence that says what was given, what is wanted and what to do. It names
fields as Python does (`max_model_len`); those that are words of their own stand between backticks.
The command line shows the flags of these names.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_MEANT = 80
"""Characters of a name that may be a mistyped one; the search takes time."""

OTHER_NAMES = {
    "temp": "temperature",
    "repeat_penalty": "repetition_penalty",
    "penalty_repeat": "repetition_penalty",
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_ctx": "max_model_len",
    "sampling_params": "params",
    "rm": "--remove",
    "--adapter-path": "--lora",
    "--lora-path": "--lora",
    "--max-kv-size": "--max-model-len",
    "--tensor-parallel-size": "--mesh",
    "--device": "--platform",
    "--api-base": "--url",
    "--num-ctx": "--max-model-len",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--system-prompt": "--system",
}
"""Names that llama.cpp, Ollama, transformers, vLLM and mlx-lm have for our fields and flags."""


class RooflaxError(Exception):
    """Base of every error that rooflax raises on purpose.

    Attributes:
        param: the field at fault, or None; HTTP's `param`.
    """

    def __init__(self, message: str = "", *, param: str | None = None):
        super().__init__(message)
        self.param = param


class UnsupportedModelError(RooflaxError):
    """The checkpoint asks for an architecture or option that is not implemented."""


class CheckpointError(RooflaxError):
    """A checkpoint file is missing, malformed, or does not fit its config."""


class RequestError(RooflaxError):
    """Invalid request: a value, a length or a prompt that cannot be used."""


class QueueFull(RequestError):
    """More requests wait than may; the same one may be welcome later."""


class EngineError(RooflaxError):
    """The engine failed while doing something it had accepted."""


class RewardError(EngineError):
    """A reward failed, or gave what is none."""


def first_line(error: BaseException) -> str:
    """First line of another library's error, without XLA's prefixes, which it repeats for every
    program around a kernel."""
    line = (str(error).splitlines() or [""])[0]
    return line.rpartition("Error dispatching computation: ")[2].strip() or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean X?)" where one is close, and nothing where none is."""
    if len(name) > MAX_MEANT:
        return ""
    known, other = list(known), OTHER_NAMES.get(name)
    if other in known:
        return f" (did you mean {other}?)"
    import difflib  # most commands end without it

    is_flag = name.startswith("-")
    for alike in (True, False):  # a flag for a flag first, by its word: dashes make all alike
        named = {one.lstrip("-"): one for one in known if (one[:1] == "-") == (is_flag == alike)}
        if close := difflib.get_close_matches(name.lstrip("-"), named, n=1, cutoff=0.7):
            return f" (did you mean {named[close[0]]}?)"
    return ""
