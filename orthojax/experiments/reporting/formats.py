"""Numbers as text."""

from collections.abc import Callable, Sequence

import numpy as np


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def signed(value: float) -> str:
    """Three digits and the sign."""
    return f"{value:+.3g}" if abs(value) < 100 else f"{value:+,.0f}"


def percent(value: float) -> str:
    """A change of a fraction, with its sign."""
    return f"{value:+.2%}" if abs(value) < 1 else f"{value:+,.0%}"


def spread(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """Mean, and with several seeds the range."""
    if not values:
        return "failed"
    mean = show(float(np.mean(values)))
    return mean if len(values) == 1 else f"{mean} ({show(min(values))} to {show(max(values))})"
