"""Weights that hold NaN, infinity or what their format cannot, which `--check` rejects."""

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.nn.weights import Slot
from rooflax.ops.weights import class_of
from rooflax.ops.weights.formats import E8M0_VALUES


def check_scales(slot: Slot, scales: np.ndarray) -> None:
    check_finite(slot, E8M0_VALUES[scales] if scales.dtype == np.uint8 else scales)


def check_finite(slot: Slot, array: np.ndarray, format: str | None = None) -> None:
    """Rejects NaN and infinity, and what is too large for the format it will be quantised to."""
    code, most = "", np.inf
    if format is not None:
        code, most = class_of(format).code, class_of(format).most
    flat = array.reshape(-1)
    step = 1 << 20
    for start in range(0, flat.size, step):
        chunk = flat[start : start + step].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise CheckpointError(
                f"The checkpoint's weight {slot.hf_names[0]} holds NaN or infinity; "
                f"the file is damaged or was saved from a run that diverged."
            )
        if most < np.inf and (largest := np.abs(chunk).max()) > most:
            raise CheckpointError(
                f"The checkpoint's weight {slot.hf_names[0]} holds {largest:g}, and {code} at "
                f"most {most:g}; choose another format for `quantize`."
            )
