"""Weights that hold NaN, infinity or what their format cannot, which `--check` rejects."""

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.nn.weights import Param
from rooflax.ops.weights import class_of


def check_scales(param: Param, format: str, scales: np.ndarray) -> None:
    """Rejects scales that make of their codes NaN or infinity."""
    if not class_of(format).are_finite(scales).all():
        raise _not_finite(param)


def check_finite(param: Param, array: np.ndarray, format: str | None = None) -> None:
    """Rejects NaN and infinity, and what is too large for the format it will be quantised to."""
    code, most = "", np.inf
    if format is not None:
        code, most = class_of(format).code, class_of(format).most
    flat = array.reshape(-1)
    step = 1 << 20
    for start in range(0, flat.size, step):
        chunk = flat[start : start + step].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise _not_finite(param)
        if most < np.inf and (largest := np.abs(chunk).max()) > most:
            raise CheckpointError(
                f"The checkpoint's weight {param.hf_names[0]} holds {largest:g}, and {code} at "
                f"most {most:g}; choose another format for `quantize`."
            )


def _not_finite(param: Param) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's weight {param.hf_names[0]} holds NaN or infinity; "
        f"the file is damaged or was saved from a run that diverged."
    )
