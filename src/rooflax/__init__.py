"""rooflax: language models in JAX, straight from their checkpoints.

Names are resolved when first used, so `import rooflax` imports no jax, and nothing else either.
"""

# No annotations from __future__, which is a module too, and typing is not imported: see __main__.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rooflax.async_llm import AsyncLLM
    from rooflax.completion import Completion, Delta
    from rooflax.engine.sampling_params import SamplingParams
    from rooflax.errors import (
        CheckpointError,
        EngineError,
        QueueFull,
        RequestError,
        RooflaxError,
        UnsupportedModelError,
    )
    from rooflax.llm import LLM
    from rooflax.loading.load import from_state_dict, load
    from rooflax.loading.model_info import ModelInfo, model_info
    from rooflax.loading.plan import Plan, make_plan
    from rooflax.loading.save import save
    from rooflax.loading.tokenizer import Tokenizer
    from rooflax.models.model import Model
    from rooflax.models.steps import decode_step, new_cache, prefill
    from rooflax.nn.execution import ExecutionOptions, Precision

__version__ = "0.2.0"

_HOME = {
    "LLM": "rooflax.llm",
    "AsyncLLM": "rooflax.async_llm",
    "Completion": "rooflax.completion",
    "Delta": "rooflax.completion",
    "SamplingParams": "rooflax.engine.sampling_params",
    "ExecutionOptions": "rooflax.nn.execution",
    "Precision": "rooflax.nn.execution",
    "Model": "rooflax.models.model",
    "ModelInfo": "rooflax.loading.model_info",
    "model_info": "rooflax.loading.model_info",
    "Plan": "rooflax.loading.plan",
    "make_plan": "rooflax.loading.plan",
    "Tokenizer": "rooflax.loading.tokenizer",
    "load": "rooflax.loading.load",
    "from_state_dict": "rooflax.loading.load",
    "save": "rooflax.loading.save",
    "new_cache": "rooflax.models.steps",
    "prefill": "rooflax.models.steps",
    "decode_step": "rooflax.models.steps",
    "RooflaxError": "rooflax.errors",
    "UnsupportedModelError": "rooflax.errors",
    "CheckpointError": "rooflax.errors",
    "RequestError": "rooflax.errors",
    "QueueFull": "rooflax.errors",
    "EngineError": "rooflax.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Completion",
    "Delta",
    "EngineError",
    "ExecutionOptions",
    "Model",
    "ModelInfo",
    "Plan",
    "Precision",
    "QueueFull",
    "RequestError",
    "RooflaxError",
    "SamplingParams",
    "Tokenizer",
    "UnsupportedModelError",
    "decode_step",
    "from_state_dict",
    "load",
    "make_plan",
    "model_info",
    "new_cache",
    "prefill",
    "save",
]


def __getattr__(name: str) -> "Any":
    if name not in _HOME:
        raise AttributeError(f"module 'rooflax' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
