"""Tables of a report as data: which variants, which quantities, the paper's numbers beside ours, paired changes."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from orthojax.experiments.experiment import Paper
from orthojax.experiments.layout import Cell, Table
from orthojax.experiments.results import NotMeasured, Numbers, Quantity, Result, Results, as_quantity, metric, pairs
from orthojax.formatting import mean_and_range, percent

MATTERS = 0.1  # a change of one seed that is bold


@dataclasses.dataclass(frozen=True)
class MetricTable:
    """Means with the range over seeds; the paper's numbers beside ours where it prints any.

    Attributes:
      caption: Of the table.
      quantities: One column each.
      keep: Which variants have a row.
      transposed: A row for each quantity and a column for each variant; of two variants that were trained the
        change from the first to the second is shown, too.
      label: Of a row.
      main: How many quantities of a transposed table the page shows at once, where not all; the others are folded.
      change_from: Name of a variant; the change of the first quantity from it is shown, too.
    """

    caption: str
    quantities: Sequence[str | Quantity]
    keep: Callable[[Result], bool] = lambda result: True
    transposed: bool = False
    label: Callable[[Result], str] = lambda result: result.label
    main: int | None = None
    change_from: str = ""

    def __call__(self, results: Results) -> Table:
        """The table of some results."""
        kept, quantities = [r for r in results if self.keep(r)], list(map(as_quantity, self.quantities))
        trained = [result for result in kept if not result.given]
        compares = bool(self.change_from) or (self.transposed and len(trained) == 2)
        note = BOLD if compares else ""
        if self.transposed:
            columns = [["", *(quantity.label for quantity in quantities)]]
            for result in kept:
                columns.append([self.label(result), *(_cell(result, quantity) for quantity in quantities)])
                paper = [result.paper_cell(quantity) for quantity in quantities]
                if any(cell != "-" for cell in paper):
                    columns.append(["paper", *paper])
                if compares and result is trained[1]:
                    changes = (_change_cell(result, trained[0], quantity) for quantity in quantities)
                    columns.append(["change", *changes])
            head, *body = map(list, zip(*columns, strict=True))
            return Table(self.caption, head, body, self.main, note)
        columns = [["", *map(self.label, kept)]]
        for i, quantity in enumerate(quantities):
            columns.append([quantity.label, *(_cell(r, quantity) for r in kept)])
            paper = [r.paper_cell(quantity) for r in kept]
            if any(cell != "-" for cell in paper):
                columns.append(["paper", *paper])
            if self.change_from and i == 0:
                reference = results[self.change_from]
                cells = ["" if r is reference else _change_cell(r, reference, quantity) for r in kept]
                columns.append([f"change from {self.label(reference)}", *cells])
        head, *body = map(list, zip(*columns, strict=True))
        return Table(self.caption, head, body, None, note)


BOLD = (
    "Bold: a change whose 95% interval over seeds, paired by seed, leaves out 0; with a single seed one of "
    f"{MATTERS:.0%} or more."
)


def _cell(result: Result, quantity: Quantity) -> Cell:
    return Cell.of(result.cell(quantity), values=result.values(quantity), show=quantity.show, series=quantity.label)


def _change_cell(result: Result, reference: Result, quantity: Quantity) -> str:
    """The change in percent; of what is itself a change in percent, the difference in points."""
    if not (shared := _shared(result, reference, quantity)):
        return "-"
    if quantity.show is percent:
        return difference_text(shared, lambda value: f"{100 * value:+.2f}", " points")
    return change_text(shared) if all(value > 0 for pair in shared.values() for value in pair) else "-"


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
        return Table(self.caption, ["", *(q.label for q in [*changes, *differences])], body, None, BOLD)


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

        def cell(quantity: Quantity, printed: Mapping[str, float]) -> Cell:
            value = quantity.value(Numbers(printed))
            return Cell.of(quantity.show(value), values=[value], show=quantity.show, series=quantity.label)

        rows = [[name, *(cell(quantity, of) for quantity in quantities)] for name, of in self.models.items()]
        return Table(self.caption, ["", *(q.label for q in quantities)], rows)


# Paired comparisons: variants of one seed share initial parameters and the order of the data.

Pairs = Mapping[int, tuple[float, float]]  # seed -> (value of a variant, value of the reference)


def _shared(result: Result, reference: Result, quantity: Quantity) -> Pairs:
    try:
        return pairs(result, reference, quantity)
    except NotMeasured:
        return {}


def difference_text(pairs: Pairs, show: Callable[[float], str] = "{:+.3g}".format, unit: str = "") -> Cell:
    """Variant minus reference, paired by seed: the mean, and with several seeds its 95% confidence interval.

    Args:
      pairs: By seed.
      show: A number with its sign.
      unit: After the mean.

    >>> difference_text({0: (3.0, 1.0)})
    '+2'
    """
    return _interval_text([a - b for a, b in pairs.values()], show, unit)


def change_text(pairs: Pairs) -> Cell:
    """Variant over reference as a change in percent: the geometric mean, and its interval from logarithms.

    >>> change_text({0: (98.0, 100.0), 1: (99.0, 100.0), 2: (99.4, 100.0)})
    '-1.2% (95% CI -3.0 to +0.6, 3 seeds)'
    """
    if any(not value > 0 for pair in pairs.values() for value in pair):
        return Cell("not above 0")
    logs = [math.log(a) - math.log(b) for a, b in pairs.values()]
    return _interval_text(logs, lambda value: f"{100 * math.expm1(value):+,.1f}", "%")


def _interval_text(values: Sequence[float], show: Callable[[float], str], unit: str = "") -> Cell:
    """The mean, and with several values the 95% confidence interval of a one-sample t-test; see `BOLD`."""
    if not values:
        return Cell("failed")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Cell.of(show(mean) + unit, matters=unit == "%" and abs(math.expm1(mean)) >= MATTERS)
    from scipy import stats  # here, because it takes a second to import

    low, high = (mean, mean) if np.ptp(values) == 0 else stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    text = f"{show(mean)}{unit} (95% CI {show(low)} to {show(high)}, {len(values)} seeds)"
    return Cell.of(text, matters=bool(low > 0 or high < 0))
