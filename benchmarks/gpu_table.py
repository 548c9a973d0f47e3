"""OUT/table.md: every case's last line, and what two depths say of a layer and of all."""

from __future__ import annotations

from typing import Any

from tools.gpu_speed import predicted_by

FASTER = 0.97
"""Of the rule's time: below it another answer is taken."""
Figures = dict[str, Any]
COLUMNS = (
    *["decode tok/s", "MBU", "MFU", "prefill tok/s", "MBU", "MFU"],
    *["us", "GB/s", "predicted, us", "wanted", "seconds"],
)
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
        f"| case | {' | '.join(COLUMNS)} |",
        "| --- " * (1 + len(COLUMNS)) + "|",
    ]  # fmt: skip
    predicted = predicted_by(ceilings(last))
    for line in last.values():
        cells = [line.get("failed") or "", *[""] * 7]
        if result := line.get("result"):
            cells = []
            for kind in ("decode", "prefill"):
                speed = result.get(f"{kind}_tok_per_s")
                cells.append(f"{speed['median']:.1f}" if speed else "")
                shares = (result.get(f"{kind}_{share}") for share in ("mbu", "mfu"))
                cells += ["" if share is None else f"{share:.0%}" for share in shares]
            took, rate = result.get("seconds"), result.get("read_gb_per_s")
            cells.append("" if took is None else f"{1e6 * took:.1f}")
            cells.append("" if rate is None else f"{rate:.0f}")
        expected = predicted.get(line["name"])
        cells.append("" if expected is None else f"{expected:.1f}")
        name = line["name"] + (" (XLA: the kernel failed)" if "fell_back" in line else "")
        table.append(f"| {name} | {' | '.join(cells)} | {line['target']} | {line['seconds']} |")
    return "\n".join([*table, *slopes(last), *answers(last)]) + "\n"


def ceilings(last: dict[str, Figures]) -> Figures | None:
    """The card's own, where they were read: by these the law of speed predicts."""
    return last.get("ceilings", {}).get("result")


def beside_law(lines: list[Figures]) -> list[tuple[str, float]]:
    """Cases and their times as a share of what the law of speed says, the slowest first."""
    last = {line["name"]: line for line in lines}
    predicted = predicted_by(ceilings(last))
    shares = [
        (name, 1e6 * line["result"]["seconds"] / predicted[name])
        for name, line in last.items()
        if name in predicted and "seconds" in line.get("result", {})
    ]
    return sorted(shares, key=lambda each: -each[1])


def answers(last: dict[str, Figures]) -> list[str]:
    """Lines for `ops.block_sizes.MEASURED`, of the fastest answers where they beat the rule's."""
    best: dict[str, Figures] = {}
    for line in last.values():
        rule = last.get(line.get("rule", ""), {}).get("result")
        if rule is None or "result" not in line or "seconds" not in rule:
            continue
        found = line["result"]
        key = f'("{found["kernel"]}", {tuple(found["shape"])!r})'
        share = found["seconds"] / rule["seconds"]
        if share < min(FASTER, best.get(key, {"share": 1.0})["share"]):
            best[key] = {"share": share, "sizes": tuple(found["sizes"])}
    lines = [
        f"    {key}: {found['sizes']!r},  # {found['share']:.2f}" for key, found in best.items()
    ]
    none = "No other answer was faster."
    return [
        "",
        "## For ops/block_sizes.py",
        "",
        *(["```python", *lines, "```"] if lines else [none]),
    ]


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
