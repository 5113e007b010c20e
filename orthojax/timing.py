"""Wall-clock comparison of functions in one process, on machines that are noisy."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Spread(NamedTuple):
    """Median and quartiles of repeated measurements."""

    median: float
    lower: float  # first quartile
    upper: float  # third quartile


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles, interpolated linearly between the measured values.

    Raises:
      ValueError: For no value.

    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    Spread(median=3.0, lower=2.0, upper=4.0)
    """
    if not len(values):
        raise ValueError("no measured values; allowed: at least one")
    lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
    return Spread(float(median), float(lower), float(upper))


def interleaved_seconds(
    functions: Mapping[str, Callable[[], Any]],
    repeats: int,
    warmup: int = 1,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times functions interleaved: A B C, C B A, A B C, ...

    What else the machine does then falls on all of them alike, and the ratio of two times of one repetition is steadier
    than either. The order alternates, because a function finds the caches as the one before it left them.

    Args:
      functions: What is timed, by name; each call returns arrays, or anything else, and is over when they are ready.
      repeats: Timed calls of each function.
      warmup: Calls of each function before the first timed one, in which it compiles.
      clock: Seconds from any origin.

    Returns:
      Seconds of wall-clock time of each repetition, in order, by name.

    Raises:
      ValueError: For less than one repetition, or a negative warm-up.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats={repeats}, warmup={warmup}; allowed: at least 1 and at least 0")
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(-warmup, repeats):
        for name in names if repetition % 2 == 0 else reversed(names):
            started = clock()
            jax.block_until_ready(functions[name]())
            elapsed = clock() - started
            if repetition >= 0:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(a: Sequence[float], b: Sequence[float]) -> Spread:
    """Median and quartiles of a[i] / b[i]: the times of one repetition belong together.

    Args:
      a: Seconds of each repetition.
      b: Seconds of the reference in the same repetitions.

    Raises:
      ValueError: For different lengths, or none.

    >>> median_ratio([2.0, 9.0, 30.0], [1.0, 3.0, 10.0])
    Spread(median=3.0, lower=2.5, upper=3.0)
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} and {len(b)} repetitions; allowed: the same repetitions of both")
    return spread([first / second for first, second in zip(a, b, strict=True)])
