"""Numbers, byte counts and aligned tables as text, formatted alike in reports, consoles and listings."""

import statistics
from collections.abc import Callable, Sequence

_SEPARATED = 1e7  # larger numbers get an exponent: nobody counts the digits


def number(value: float) -> str:
    """Formats three significant digits; whole numbers with thousands separators from 100 up to ten million.

    >>> number(7.283), number(14731.6), number(4.463e15), number(-0.0)  # the third as of a run that diverged
    ('7.28', '14,732', '4.46e+15', '0')
    """
    return f"{value:,.0f}" if 100 <= abs(value) < _SEPARATED else f"{value + 0.0:.3g}"


def signed(value: float) -> str:
    """Formats a number like `number`, with its sign; 0 has none."""
    return f"+{number(value)}" if value > 0 else number(value)


def share(value: float) -> str:
    """Formats a fraction in percent, to three digits; values below half a thousandth of a percent are 0.

    >>> share(0.17684), share(0.0227524), share(2e-6), share(1.0)
    ('17.7%', '2.28%', '0%', '100%')
    """
    return f"{number(_percentage(value))}%"


def percent(value: float) -> str:
    """Formats a relative change in percent, like `share`, with its sign.

    >>> percent(0.05), percent(12.3), percent(2e12), percent(-4e-6)
    ('+5%', '+1,230%', '+2e+14%', '0%')
    """
    return f"{signed(_percentage(value))}%"


def _percentage(value: float) -> float:
    return 100 * value if abs(value) >= 5e-6 else 0.0


def duration(seconds: float) -> str:
    """Formats a time in seconds, or in minutes from one minute on.

    >>> duration(0.5664), duration(7680)
    ('0.566 seconds', '128 minutes')
    """
    return f"{number(seconds)} seconds" if seconds < 60 else f"{number(seconds / 60)} minutes"


def mean_and_range(values: Sequence[float], show: Callable[[float], str] = number) -> str:
    """Formats the mean over seeds, with the range if they differ; 'failed' if there are none.

    >>> mean_and_range([1.0, 2.0, 3.0])
    '2 (1 to 3)'
    """
    if not values:
        return "failed"
    mean, low, high = (show(value) for value in (statistics.fmean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def byte_count(count: float | None) -> str:
    """Formats bytes with a decimal unit; 'unknown' for None.

    >>> byte_count(1_500_000), byte_count(None)
    ('1.5 MB', 'unknown')
    """
    if count is None:
        return "unknown"
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def align(rows: Sequence[Sequence[str]], *, numeric: bool = False) -> list[str]:
    """Returns the lines of a console table; with `numeric`, all columns but the first are right-aligned.

    >>> align([["name", "n"], ["a", "10"]], numeric=True)
    ['name   n', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numeric and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
