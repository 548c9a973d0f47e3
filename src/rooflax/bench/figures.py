"""Figures from trials: summary, doubt, and comparison. Pure Python and NumPy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rooflax.errors import RequestError

NOISY = 0.10
"""A standard deviation above this share of the mean is named."""

PERCENTILES = (50, 90, 99)
DRIFT = 0.10
SLOW_FIRST = 0.15
BOOTSTRAP_DRAWS = 4000
CONFIDENCE = 0.99
MIN_PAIRS = 5
T_OVER_NORMAL = {
    4: 1.787, 5: 1.565, 6: 1.439, 7: 1.359, 8: 1.303, 9: 1.262, 10: 1.231, 14: 1.156, 19: 1.111,
    29: 1.070,
}  # fmt: skip
"""Degrees of freedom to the ratio of Student's t to the normal quantile, both at 99%."""


@dataclass(frozen=True)
class Summary:
    """Trials of one quantity, the S of `bench --json`."""

    mean: float
    std: float
    min: float
    max: float
    median: float
    trials: tuple[float, ...]

    @staticmethod
    def of(trials: Sequence[float]) -> Summary:
        """Summary of at least one trial; the deviation is the sample's (n - 1)."""
        values = tuple(float(t) for t in trials)
        return Summary(
            mean=statistics.fmean(values),
            std=statistics.stdev(values) if len(values) > 1 else 0.0,
            min=min(values),
            max=max(values),
            median=statistics.median(values),
            trials=values,
        )

    @property
    def relative_std(self) -> float:
        return self.std / self.mean if self.mean else 0.0

    def as_json(self) -> dict[str, Any]:
        """The fields; trials as a list."""
        return asdict(self) | {"trials": list(self.trials)}


def doubts(speed: Summary) -> list[str]:
    """Reasons to doubt a speed's trials, each one sentence with advice."""
    reasons = []
    values = speed.trials
    if speed.relative_std > NOISY:
        reasons.append(
            f"trials deviate by {speed.relative_std:.0%} of their mean: something else runs on "
            f"this machine, or its clock changes; stop other work, or raise --trials"
        )
    if len(values) < 4:
        return reasons
    rest = statistics.fmean(values[1:])
    if values[0] < rest * (1 - SLOW_FIRST):
        reasons.append(
            f"the first trial is {1 - values[0] / rest:.0%} slower than the others: pages were "
            f"still being read, or a clock was still rising"
        )
    half = len(values) // 2
    change = statistics.fmean(values[-half:]) / statistics.fmean(values[:half]) - 1
    if abs(change) > DRIFT:
        reasons.append(
            f"speed drifts by {change:+.0%} from the first to the second half: heat, clocks, or "
            f"another process; compare interleaved (--versus)"
        )
    return reasons


@dataclass(frozen=True)
class Ratio:
    """b / a, with a bootstrap confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Verdict of a confidence interval; empty if it contains 1."""
        if self.low > 1.0:
            return "faster"
        if self.high < 1.0:
            return "slower"
        return "no difference shown"

    def as_json(self) -> dict[str, Any]:
        """The fields, the verdict and the interval's confidence."""
        return asdict(self) | {"verdict": self.verdict, "confidence": CONFIDENCE}


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Geometric mean of b / a over pairs taken one right after the other.

    The interval is the percentile bootstrap over pairs, in logarithms, widened by Student's factor
    for the few pairs there are.

    Raises:
        RequestError: fewer than MIN_PAIRS pairs.
    """
    _check_trials(a, b)
    logs = np.log(np.asarray(b, np.float64) / np.asarray(a, np.float64))
    return _interval(float(logs.mean()), _resampled_means(logs), len(logs))


def unpaired_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The same for trials that were not taken in pairs: each side is resampled by itself.

    Raises:
        RequestError: fewer than MIN_PAIRS trials on a side.
    """
    _check_trials(a, b)
    left, right = (np.log(np.asarray(side, np.float64)) for side in (a, b))
    draws = _resampled_means(right, seed=1) - _resampled_means(left)
    return _interval(float(right.mean() - left.mean()), draws, min(len(a), len(b)))


def _check_trials(a: Sequence[float], b: Sequence[float]) -> None:
    if min(len(a), len(b)) < MIN_PAIRS:
        raise RequestError(
            f"a comparison needs at least {MIN_PAIRS} trials on each side; here are {len(a)} and "
            f"{len(b)}"
        )


def _resampled_means(logs: np.ndarray, seed: int = 0) -> np.ndarray:
    picks = np.random.default_rng(seed).integers(0, len(logs), (BOOTSTRAP_DRAWS, len(logs)))
    return logs[picks].mean(axis=1)


def _interval(centre: float, draws: np.ndarray, trials: int) -> Ratio:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    widen = np.sqrt(trials / (trials - 1)) * _t_over_normal(trials - 1)
    return Ratio(
        float(np.exp(centre)),
        float(np.exp(centre + (low - centre) * widen)),
        float(np.exp(centre + (high - centre) * widen)),
    )


def _t_over_normal(degrees: int) -> float:
    return T_OVER_NORMAL[max(d for d in T_OVER_NORMAL if d <= degrees)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and the mean."""
    values_at = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return values_at | {"mean": float(np.mean(values))}


def latency_lines(row: dict[str, Any], *names: str) -> list[str]:
    """Percentiles in milliseconds and the goodput of a load, for people.

    Args:
        names: keys of `row` that hold `percentiles` of seconds.
    """
    lines = [f"{'ms':<10}" + "".join(f"{f'p{p}':>9}" for p in PERCENTILES) + f"{'mean':>9}"]
    for name in names:
        values = [row[name][key] for key in (*(f"p{p}" for p in PERCENTILES), "mean")]
        lines.append(f"{name[:-2]:<10}" + "".join(f"{1000 * v:9.1f}" for v in values))
    lines.append(
        f"goodput {row['goodput_per_s']:.2f}/s: {row['good_requests']} of {row['requests']} "
        f"with TTFT up to {row['target_ttft_s']:g} s and {row['target_tpot_s']:g} s a token"
    )
    return lines
