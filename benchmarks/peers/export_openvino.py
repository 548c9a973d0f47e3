"""A checkpoint as OpenVINO's own format, with 8- or 4-bit weights.

    python export_openvino.py CHECKPOINT FOLDER int8|int4

Runs where optimum-intel, nncf and openvino are installed. int4 has symmetric groups of 64, the
embedding and the head included: the fastest of the usual settings.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

SETTINGS = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group_size": 64, "sym": True, "ratio": 1.0, "all_layers": True},
}


def main() -> None:
    checkpoint, folder, kind = sys.argv[1:]
    model = OVModelForCausalLM.from_pretrained(
        checkpoint,
        export=True,
        quantization_config=OVWeightQuantizationConfig(**SETTINGS[kind]),
        compile=False,
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
