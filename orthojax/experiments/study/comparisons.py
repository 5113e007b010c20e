"""Paired comparisons: two variants over the same seeds, which share initial parameters and order of the data."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

# Seed -> (value of a variant, value of the reference), as `Study.pairs` gives.
Pairs = Mapping[int, tuple[float, float]]

_CONFIDENCE = 0.95


class Comparison(NamedTuple):
    """A variant against a reference.

    Attributes:
      by_seed: Seed -> difference or ratio.
      mean: Their arithmetic mean, of ratios the geometric.
      interval: 95% confidence interval of the mean, from Student's t with a degree of freedom less than seeds; None
        with one seed, which says nothing of the spread.
    """

    by_seed: dict[int, float]
    mean: float
    interval: tuple[float, float] | None


def difference(pairs: Pairs) -> Comparison:
    """Variant minus reference, seed by seed.

    The interval is mean +- t s / sqrt(n), with n seeds, s their standard deviation (n - 1 in its denominator) and t the
    97.5% quantile of Student's t with n - 1 degrees of freedom: that of a paired t-test.

    Raises:
      ValueError: Without pairs.

    >>> difference({0: (3.0, 1.0), 1: (4.0, 1.0)}).mean
    2.5
    """
    by_seed = {seed: float(a - b) for seed, (a, b) in pairs.items()}
    return Comparison(by_seed, *_mean_and_interval(by_seed))


def ratio(pairs: Pairs) -> Comparison:
    """Variant over reference, seed by seed: `difference` of logarithms, taken back.

    Raises:
      ValueError: Without pairs, or for a value that is not above 0.

    >>> round(ratio({0: (2.0, 1.0), 1: (8.0, 1.0)}).mean, 9)
    4.0
    """
    if any(not value > 0 for pair in pairs.values() for value in pair):
        raise ValueError("ratios are of values above 0")
    logs = {seed: math.log(a) - math.log(b) for seed, (a, b) in pairs.items()}
    mean, interval = _mean_and_interval(logs)
    by_seed = {seed: math.exp(value) for seed, value in logs.items()}
    return Comparison(by_seed, math.exp(mean), interval and (math.exp(interval[0]), math.exp(interval[1])))


def _mean_and_interval(by_seed: Mapping[int, float]) -> tuple[float, tuple[float, float] | None]:
    values = np.array(list(by_seed.values()))
    if not len(values):
        raise ValueError("no seed has both values")
    mean = float(values.mean())
    if len(values) == 1:
        return mean, None
    quantile = stdtrit(len(values) - 1, (1 + _CONFIDENCE) / 2)
    half = float(quantile * values.std(ddof=1) / math.sqrt(len(values)))
    return mean, (mean - half, mean + half)


def difference_text(pairs: Pairs, show: Callable[[float], str] = "{:+.3g}".format) -> str:
    """`difference` in words: its mean, and with several seeds the interval.

    Args:
      pairs: See there.
      show: A number with its sign.

    >>> difference_text({0: (3.0, 1.0)})
    '+2'
    """
    return _text(difference(pairs), show) if pairs else "failed"


def change_text(pairs: Pairs) -> str:
    """`ratio` in words, as a change in percent.

    >>> change_text({0: (98.0, 100.0), 1: (99.0, 100.0), 2: (99.4, 100.0)})
    '-1.2% (95% CI -3.0 to +0.6, 3 seeds)'
    """
    return _text(ratio(pairs), lambda value: f"{100 * (value - 1):+.1f}", "%") if pairs else "failed"


def _text(comparison: Comparison, show: Callable[[float], str], unit: str = "") -> str:
    mean = show(comparison.mean) + unit
    if comparison.interval is None:
        return mean
    lower, upper = map(show, comparison.interval)
    return f"{mean} (95% CI {lower} to {upper}, {len(comparison.by_seed)} seeds)"
