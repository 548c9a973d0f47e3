"""Weights that hold NaN or infinity, which `--check` refuses."""

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.nn.weights import Slot
from rooflax.ops.quantization import E8M0_VALUES


def check_scales(slot: Slot, scales: np.ndarray) -> None:
    check_finite(slot, E8M0_VALUES[scales] if scales.dtype == np.uint8 else scales)


def check_finite(slot: Slot, array: np.ndarray) -> None:
    flat = array.reshape(-1)
    step = 1 << 20
    for start in range(0, flat.size, step):
        chunk = flat[start : start + step].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise CheckpointError(
                f"The checkpoint's weight {slot.hf_names[0]} holds NaN or infinity; "
                f"the file is damaged or was saved from a run that diverged."
            )
