"""Tables of results: metrics of each variant, and changes paired by seed."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from orthojax.formatting import percent, signed
from orthojax.report.page import Cell, Table
from orthojax.report.results import Missing, Numbers, Quantity, Result, Results, as_quantity, case_in, pairs

Quantities = str | Sequence[str | Quantity]  # names of metrics separated by spaces, or several of them


def quantities(given: Quantities) -> list[Quantity]:
    """Returns the quantities for metric names, separated by spaces or in a list, or for quantities."""
    parts = [given] if isinstance(given, str) else given
    return [as_quantity(of) for part in parts for of in (part.split() if isinstance(part, str) else [part])]


def cell(result: Result, quantity: Quantity) -> Cell:
    """Returns the mean over seeds with the range and the paper's number below; '-' if there is none."""
    values, paper = result.values(quantity), result.printed(quantity)
    if not values:
        return Cell("-" if result.seeds else "failed" if result.started else "not run", paper)
    low, high = quantity.text(min(values)), quantity.text(max(values))
    spread = f"{low} to {high}" if low != high else ""
    if len(values) < len(result.seeds):
        spread = f"{spread} in {len(values)} of {len(result.seeds)} seeds"
    return Cell(quantity.text(float(np.mean(values))), "; ".join(filter(None, (spread, paper))))


@dataclasses.dataclass(frozen=True)
class Columns:
    """A table with a row for each variant, or each that matches the patterns `rows`, and a column for each metric."""

    caption: str
    metrics: Quantities
    rows: str = ""
    heading: str = ""  # of the names

    def __call__(self, results: Results) -> Table:
        """Builds the table; a metric that no variant has gets no column."""
        shown = results.matching(self.rows)
        columns = [of for of in quantities(self.metrics) if any(result.values(of) for result in shown)]
        rows = [[result.name, *(cell(result, quantity) for quantity in columns)] for result in shown]
        return Table(self.caption, [self.heading, *(quantity.label for quantity in columns)], rows)


@dataclasses.dataclass(frozen=True)
class Printed:
    """A paper's table of models that are not run here: `paper` is row -> metric -> number."""

    caption: str
    metrics: Quantities
    paper: Mapping[str, Mapping[str, float]]

    def __call__(self, results: Results) -> Table:
        """Builds the table."""
        columns = quantities(self.metrics)
        rows = [[name, *(of.text(of(Numbers(printed))) for of in columns)] for name, printed in self.paper.items()]
        return Table(self.caption, ["", *(of.label for of in columns)], rows)


@dataclasses.dataclass(frozen=True)
class Paired:
    """Changes of variants from a reference, paired by seed, with 95% intervals for three seeds or more.

    `rows` are patterns of the variants that are compared with `reference`, in which `*` stands for the same text.
    Changes of the metrics in `changes` are relative.
    """

    caption: str
    reference: str
    rows: str
    changes: Quantities = ()
    differences: Quantities = ()

    def __call__(self, results: Results) -> Table:
        """Builds the table."""
        columns = [(metric, change) for metric in quantities(self.changes)]
        columns += [(metric, difference) for metric in quantities(self.differences)]
        rows: list[list[str | Cell]] = []
        for pattern in self.rows.split():
            for result in results.matching(pattern):
                case = case_in(pattern, result.name) or ""
                name = self.reference.replace("*", case)
                if name in results and name != result.name and result.seeds:
                    reference = results[name]
                    rows.append([result.name, *(_paired(result, reference, metric, text) for metric, text in columns)])
        return Table(self.caption, ["", *(metric.label for metric, _ in columns)], rows)


Pairs = Mapping[int, tuple[float, float]]  # seed -> (value, value of the reference)


def _paired(result: Result, reference: Result, quantity: Quantity, text: Callable[[Pairs, Quantity], Cell]) -> Cell:
    try:
        return text(pairs(result, reference, quantity), quantity)
    except Missing:
        return Cell("-")


def difference(paired: Pairs, metric: Quantity) -> Cell:
    """Returns the mean difference, paired by seed, and with three seeds or more its 95% confidence interval.

    >>> str(difference({0: (3.0, 1.0)}, Quantity("kurtosis_first")))
    '+2'
    >>> str(difference({0: (0.1, 0.2), 1: (0.2, 0.4)}, Quantity("first_attention_fraction")))
    '-10 points and -20 points'
    """
    show = (lambda x: f"{percent(x)[:-1]} points") if metric.is_share else signed
    return _interval([a - b for a, b in paired.values()], show)


def change(paired: Pairs, metric: Quantity) -> Cell:
    """Returns the geometric mean of the relative change, and its interval from logarithms.

    >>> str(change({0: (98.0, 100.0), 1: (99.0, 100.0), 2: (99.4, 100.0)}, Quantity("perplexity")))
    '-1.2% (95% CI -2.98% to +0.608%)'
    """
    if any(not value > 0 for pair in paired.values() for value in pair):
        return Cell("not above 0")
    return _interval([math.log(a / b) for a, b in paired.values()], lambda x: percent(float(np.expm1(x))))


def _interval(values: Sequence[float], show: Callable[[float], str]) -> Cell:
    """Returns the mean and its 95% interval, bold if it excludes 0; for one or two seeds only the values."""
    if len(values) < 3:
        return Cell(" and ".join(map(show, values)))
    from scipy import stats  # here, because it takes a second to import

    mean = float(np.mean(values))
    low, high = (mean, mean) if np.ptp(values) == 0 else stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return Cell(show(mean), f"95% CI {show(low)} to {show(high)}", bold=bool(low > 0 or high < 0))
