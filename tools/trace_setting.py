"""The way of a setting from `LLM.__init__` to its uses: who is handed its value, in order, and how
often the way comes back to a module that it has left.

python tools/trace_setting.py max_model_len
python tools/trace_setting.py quantize --most 2

A tiny model is opened. A call counts where the value itself is an argument; what gets it within a
larger value, such as a Plan, does not name the setting. Dataclasses that keep it and the predicates
of `rooflax.fields` are no stays.
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from types import FrameType
from typing import Any

from rooflax import LLM

VALUES: dict[str, Any] = {
    "quantize": "w8a8-g32+head=w8a16", "dtype": "-float32"[1:], "kv_dtype": "-bfloat16"[1:],
    "max_model_len": int("517"), "max_num_seqs": int("301"),
}  # fmt: skip
"""Objects that are nowhere else, so that identity tells them; a format by its name, which is made
again where it is resolved."""
LEFT_OUT = ("rooflax.fields.",)


def calls(setting: str, model: str = "preset:gpt2-tiny") -> list[tuple[str, str]]:
    """Module and function of every call that is handed the value, in order."""
    value, found = VALUES[setting], []

    def is_value(one: object) -> bool:
        return one is value or (setting == "quantize" and type(one) is str and one == value)

    def watch(frame: FrameType, event: str, argument: object) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        is_ours = module.startswith("rooflax.") and not module.startswith(LEFT_OUT)
        if event != "call" or not is_ours or code.co_filename == "<string>":
            return
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args and **kwargs
        for name in code.co_varnames[:count]:
            one = frame.f_locals.get(name)
            inner = one.values() if isinstance(one, dict) else one if isinstance(one, tuple) else ()
            if is_value(one) or any(map(is_value, inner)):
                found.append((module, code.co_name))
                return

    LLM(model)  # imports and compiles what is no setting's way
    sys.setprofile(watch)
    try:
        LLM(model, **{setting: value})
    finally:
        sys.setprofile(None)
    return found


def stays(found: list[tuple[str, str]]) -> list[str]:
    """The modules in order, those in a row once."""
    modules = [module for module, _ in found]
    return [m for i, m in enumerate(modules) if i == 0 or modules[i - 1] != m]


def returns(found: list[tuple[str, str]]) -> int:
    """How often the way comes back to a module that it has left."""
    return len(stays(found)) - len(set(stays(found)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("setting", choices=VALUES)
    parser.add_argument("--most", type=int, help="fail with more returns than this")
    args = parser.parse_args()
    found = calls(args.setting)
    for (module, function), _ in groupby(found):
        sys.stdout.write(f"{module:28} {function}\n")
    number = returns(found)
    sys.stdout.write(f"{args.setting}: {len(stays(found))} stays, {number} returns\n")
    return args.most is not None and number > args.most


if __name__ == "__main__":
    sys.exit(main())
