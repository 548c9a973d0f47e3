"""OUT/table.md: every case's last line, and what two depths say of a layer and of all."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
DEFINITIONS = """\
MBU is the bytes a step must read over the memory's rate, MFU its operations over the rate of
matmuls, both over the time it took; rates are read around each trial. Bytes: weights as they are
kept, of experts the expected ones, keys and values that are seen. Decoding is timed from the first
token to the last, prefill until the first token."""


def markdown(lines: list[Figures]) -> str:
    """A table of every case's last line."""
    last = {line["name"]: line for line in lines}
    first = next((f["environment"] for f in last.values() if "environment" in f), None)
    about = "nothing ran"
    if first:
        about = f"{first['device']}, JAX {first['jax']}, Python {first['python']}, {first['date']}"
    table = [
        "# GPU figures", "", about, "", DEFINITIONS, "",
        "| case | decode tok/s | MBU | MFU | prefill tok/s | MBU | MFU | GB/s | wanted | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for line in last.values():
        cells = [line.get("failed") or "", *[""] * 6]
        if result := line.get("result"):
            cells = []
            for kind in ("decode", "prefill"):
                speed = result.get(f"{kind}_tok_per_s")
                cells.append(f"{speed['median']:.1f}" if speed else "")
                shares = (result.get(f"{kind}_{share}") for share in ("mbu", "mfu"))
                cells += ["" if share is None else f"{share:.0%}" for share in shares]
            rate = result.get("read_gb_per_s")
            cells.append("" if rate is None else f"{rate:.0f}")
        name = line["name"] + (" (XLA: the kernel failed)" if "fell_back" in line else "")
        table.append(f"| {name} | {' | '.join(cells)} | {line['target']} | {line['seconds']} |")
    return "\n".join([*table, *slopes(last)]) + "\n"


DEPTHS = " layers"
DEPTHS_MEAN = """\
A layer takes a step's seconds at the larger depth less those at the smaller, over the layers
between; the rest is what no layers would take. MBU and MFU of all layers likewise."""


def slopes(last: dict[str, Figures]) -> list[str]:
    """Per case at two depths: milliseconds of a layer, of the rest, and of all layers."""
    pairs: dict[str, list[Figures]] = {}
    for name, line in last.items():
        if name.endswith(DEPTHS) and line.get("layers"):
            pairs.setdefault(name.rpartition(", ")[0], []).append(line)
    table = [
        "", "## From two depths", "", DEPTHS_MEAN, "",
        "| case | of | a layer, ms | the rest, ms | layers | all, ms | tok/s | MBU | MFU |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, both in pairs.items():
        if len(both) == 2:
            table += [f"| {name} | {' | '.join(cells)} |" for cells in slope(name, both)]
    return table


def slope(name: str, both: list[Figures]) -> list[list[str]]:
    """Cells for decoding or a prefill, whichever the case is for; or why there is no slope."""
    few, many = sorted(both, key=lambda line: line["layers"])
    for line in both:
        if "failed" in line or "fell_back" in line:
            why = "failed" if "failed" in line else "ran with XLA"
            return [[f"no slope: {line['layers']} layers {why}", *[""] * 7]]
    kind, seconds = ("prefill", "ttft_s") if name.startswith("prefill") else ("decode", "tpot_s")
    results = [line["result"] for line in (few, many)]
    apart, layers = many["layers"] - few["layers"], many["result"]["all_layers"]

    def at(values: list[float]) -> tuple[float, float, float]:
        """(of a layer, of none, of all)."""
        each = (values[1] - values[0]) / apart
        rest = values[0] - each * few["layers"]
        return each, rest, rest + each * layers

    each, rest, whole = at([result[seconds]["median"] for result in results])
    cells = [kind, f"{each * 1e3:.3f}", f"{rest * 1e3:.3f}", str(layers), f"{whole * 1e3:.2f}"]
    tokens = many["result"]["prompt_tokens"] if kind == "prefill" else many["result"]["batch"]
    cells.append(f"{tokens / whole:.1f}")
    for share in ("mbu", "mfu"):  # its time at the ceilings grows by the layer, too
        ideal = at([r[f"{kind}_{share}"] * r[seconds]["median"] for r in results])[2]
        cells.append(f"{ideal / whole:.0%}")
    return [cells]
