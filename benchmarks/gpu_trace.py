"""The timeline of a decode step on a device: kernels, their time, and the time between them.

python benchmarks/gpu_trace.py llama-3.1-8b w4a16 8 OUT
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
sys.path.append(str(ROOT / "benchmarks" / "stand_in"))


def main() -> None:
    from benchmarks.gpu import cuda_root

    if (root := cuda_root(dict(os.environ))) is not None:
        os.environ["CUDA_ROOT"] = str(root)
        os.environ["PATH"] = os.pathsep.join([str(root / "bin"), os.environ.get("PATH", "")])
    import jax

    from benchmarks.gpu_models import weights_on_device
    from rooflax.llm import LLM
    from rooflax.models.presets import PRESETS

    model, format, layers, out = sys.argv[1:5]
    with weights_on_device():
        name = f"{model}, {layers} layers"
        PRESETS[name] = {**PRESETS[model], "num_hidden_layers": int(layers)}
        quantize = {} if format == "bf16" else {"quantize": format}
        llm = LLM(f"preset:{name}", **quantize)
    prompt = list(range(100, 228))

    def run(tokens: int) -> float:
        begin = time.perf_counter()
        llm.generate([prompt], temperature=0, max_tokens=tokens, ignore_eos=True)
        return time.perf_counter() - begin

    run(130), run(2)
    best = min(run(130) - run(2) for _ in range(4)) / 128
    with jax.profiler.trace(out):
        run(34)
    (path,) = Path(out).rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    told = [e for e in events if e.get("name") in ("process_name", "thread_name")]
    names = {(e["pid"], e.get("tid") if e["name"] == "thread_name" else None): e for e in told}

    def is_kernel(e: dict) -> bool:
        device, stream = (names.get((e["pid"], at)) for at in (None, e.get("tid")))
        said = [n["args"]["name"].lower() for n in (device, stream) if n is not None]
        return e.get("ph") == "X" and len(said) == 2 and "device" in said[0] and "stream" in said[1]

    of_device = sorted(filter(is_kernel, events), key=lambda e: e["ts"])
    print(f"{model} {format} {layers} layers: {1e6 * best:.1f} us a token")
    last = of_device[-int(len(of_device) * 0.6) :]  # decoding
    found, gaps = defaultdict(list), defaultdict(list)
    for before, e in pairwise(last):
        key = e["name"][:60]
        found[key].append(e["dur"])
        gaps[key].append(e["ts"] - before["ts"] - before["dur"])
    span = last[-1]["ts"] - last[0]["ts"]
    print(f"span {span:.0f} us, busy {sum(sum(v) for v in found.values()):.0f} us")
    for key in sorted(found, key=lambda k: -sum(found[k]))[:16]:
        each, gap = found[key], gaps[key]
        print(f"  {key:60} n {len(each):5} median {median(each):7.2f} gap {median(gap):7.2f}")
    for before, e in pairwise(last[len(last) // 2 :][:24]):
        gap = e["ts"] - before["ts"] - before["dur"]
        print(f"    {e['name'][:40]:40} {e['dur']:7.2f} gap {gap:6.2f}")


if __name__ == "__main__":
    main()
