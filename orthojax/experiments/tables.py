"""Tables of a report as data: which variants, which quantities, the paper's numbers beside ours, paired changes."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from orthojax.experiments.experiment import Paper
from orthojax.experiments.page import Table
from orthojax.experiments.results import NotMeasured, Numbers, Quantity, Result, Results, as_quantity, metric, pairs
from orthojax.formatting import mean_and_range


@dataclasses.dataclass(frozen=True)
class MetricTable:
    """Means with the range over seeds; the paper's numbers beside ours where it prints any.

    Attributes:
      caption: Of the table.
      quantities: One column each.
      keep: Which variants have a row.
      transposed: A row for each quantity and a column for each variant.
      label: Of a row.
    """

    caption: str
    quantities: Sequence[str | Quantity]
    keep: Callable[[Result], bool] = lambda result: True
    transposed: bool = False
    label: Callable[[Result], str] = lambda result: result.label

    def __call__(self, results: Results) -> Table:
        """The table of some results."""
        kept, quantities = [r for r in results if self.keep(r)], list(map(as_quantity, self.quantities))
        if self.transposed:
            columns = [["", *(quantity.label for quantity in quantities)]]
            for result in kept:
                columns.append([self.label(result), *map(result.cell, quantities)])
                paper = [result.paper_cell(quantity) for quantity in quantities]
                if any(cell != "-" for cell in paper):
                    columns.append(["paper", *paper])
            head, *body = map(list, zip(*columns, strict=True))
            return Table(self.caption, head, body)
        columns = [["", *map(self.label, kept)]]
        for quantity in quantities:
            columns.append([quantity.label, *(r.cell(quantity) for r in kept)])
            paper = [r.paper_cell(quantity) for r in kept]
            if any(cell != "-" for cell in paper):
                columns.append(["paper", *paper])
        head, *body = map(list, zip(*columns, strict=True))
        return Table(self.caption, head, body)


@dataclasses.dataclass(frozen=True)
class PairedTable:
    """Changes from a reference variant of the same group and seeds, with 95% confidence intervals.

    Attributes:
      caption: Of the table.
      reference: Its role in `Experiment.groups`.
      changes: Quantities whose ratio is shown, as a change in percent.
      differences: Quantities whose difference is shown.
    """

    caption: str
    reference: str
    changes: Sequence[str | Quantity] = ()
    differences: Sequence[str | Quantity] = ()

    def __call__(self, results: Results) -> Table:
        """The table of some results."""
        changes, differences = list(map(as_quantity, self.changes)), list(map(as_quantity, self.differences))
        body = []
        for roles in results.groups().values():
            base = results[roles[self.reference]]
            for role, name in roles.items():
                if role == self.reference or name not in results:
                    continue
                cells = [change_text(_shared(results[name], base, q)) for q in changes]
                cells += [difference_text(_shared(results[name], base, q)) for q in differences]
                body.append([results[name].label, *cells])
        return Table(self.caption, ["", *(q.label for q in [*changes, *differences])], body)


@dataclasses.dataclass(frozen=True)
class LayerTable:
    """Metrics layer by layer, means with the range over seeds: a row for each finished variant and metric it has.

    Attributes:
      caption: Of the table.
      metrics: Metric -> words that are added to the variant's label.
    """

    caption: str
    metrics: Mapping[str, str]

    def __call__(self, results: Results) -> Table:
        """The table of some results."""
        rows = []
        for result in results.finished:
            for name, words in self.metrics.items():
                with contextlib.suppress(NotMeasured):
                    layers = [mean_and_range(values.tolist()) for values in result.layers(name).T]
                    rows.append([f"{result.label}: {words}", result.cell(metric(name)), *layers])
        width = max(map(len, rows), default=2)
        columns = ["", "all layers", *(f"layer {layer}" for layer in range(1, width - 1))]
        return Table(self.caption, columns, [row + [""] * (width - len(row)) for row in rows])


@dataclasses.dataclass(frozen=True)
class PrintedTable:
    """What the paper prints for models that are not ours.

    Attributes:
      caption: Of the table.
      quantities: One column each.
      models: Name of a model -> metric -> number.
    """

    caption: str
    quantities: Sequence[str | Quantity]
    models: Paper

    def __call__(self, results: Results) -> Table:
        """The table, whatever the results are."""
        quantities = list(map(as_quantity, self.quantities))
        rows = [[name, *(q.show(q.value(Numbers(of))) for q in quantities)] for name, of in self.models.items()]
        return Table(self.caption, ["", *(q.label for q in quantities)], rows)


# Paired comparisons: variants of one seed share initial parameters and the order of the data.

Pairs = Mapping[int, tuple[float, float]]  # seed -> (value of a variant, value of the reference)


def _shared(result: Result, reference: Result, quantity: Quantity) -> Pairs:
    try:
        return pairs(result, reference, quantity)
    except NotMeasured:
        return {}


def difference_text(pairs: Pairs, show: Callable[[float], str] = "{:+.3g}".format) -> str:
    """Variant minus reference, paired by seed: the mean, and with several seeds its 95% confidence interval.

    Args:
      pairs: By seed.
      show: A number with its sign.

    >>> difference_text({0: (3.0, 1.0)})
    '+2'
    """
    return _interval_text([a - b for a, b in pairs.values()], show)


def change_text(pairs: Pairs) -> str:
    """Variant over reference as a change in percent: the geometric mean, and its interval from logarithms.

    >>> change_text({0: (98.0, 100.0), 1: (99.0, 100.0), 2: (99.4, 100.0)})
    '-1.2% (95% CI -3.0 to +0.6, 3 seeds)'
    """
    if any(not value > 0 for pair in pairs.values() for value in pair):
        return "not above 0"
    logs = [math.log(a) - math.log(b) for a, b in pairs.values()]
    return _interval_text(logs, lambda value: f"{100 * math.expm1(value):+.1f}", "%")


def _interval_text(values: Sequence[float], show: Callable[[float], str], unit: str = "") -> str:
    """The mean, and with several values the 95% confidence interval of a one-sample t-test."""
    if not values:
        return "failed"
    mean = float(np.mean(values))
    if len(values) == 1:
        return show(mean) + unit
    from scipy import stats  # here, because it takes a second to import

    low, high = (mean, mean) if np.ptp(values) == 0 else stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return f"{show(mean)}{unit} (95% CI {show(low)} to {show(high)}, {len(values)} seeds)"
