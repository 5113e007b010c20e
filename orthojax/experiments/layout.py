"""Tables as the page lays them out: ranges and the paper's numbers below, equal decimals, few rows turned, many folded.

The texts of a `Table` are what the console and report.md show. The page makes more of those that are a `Cell`.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from orthojax.formatting import number, percent, signed

_FEW_ROWS, _MANY_COLUMNS = 3, 6  # so few rows with so many columns are turned
_MANY_ROWS, _UNFOLDED = 24, 12  # of more rows only so many are shown at once
_DIGITS = 5  # of the largest number that gets the decimals of the smallest
Show = Callable[[float], str]
# How numbers are shown -> the same with so many decimals.
_FORMS: dict[Show, str] = {number: "{{:,.{}f}}", signed: "{{:+,.{}f}}", percent: "{{:+,.{}%}}"}
_BELOW = re.compile(r"(.+?) \((.+ to .+?)(?:, \d+ seeds)?\)")  # 2 (1 to 3)


class Table(NamedTuple):
    """A table of texts; the first column names the row.

    Attributes:
      caption: Above it.
      columns: Their names; one called "paper" belongs to the column before it.
      rows: Their texts.
      main: How many rows the page shows at once, where not all; the others are folded.
      note: A sentence below it on the page.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    main: int | None = None
    note: str = ""


class Cell(str):
    """A text with what the page makes of it.

    Attributes:
      values: Of all seeds, where it shows their mean.
      show: One of them as text.
      series: Which cells of the table get equal decimals.
      matters: Whether it is bold.
    """

    values: Sequence[float] = ()
    show: "Show" = number
    series: str = ""
    matters: bool = False

    @classmethod
    def of(cls, text: str, **attributes: Any) -> "Cell":
        """A text with some of the attributes."""
        cell = cls(text)
        vars(cell).update(attributes)
        return cell


@dataclasses.dataclass(frozen=True)
class Shown:
    """A cell on the page: a text, smaller lines below it, and whether it is bold."""

    text: str
    below: tuple[str, ...] = ()
    bold: bool = False


class Layout(NamedTuple):
    """A table on the page; rows are (name, cells), those that are folded apart."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Shown]]]
    folded: Sequence[tuple[str, Sequence[Shown]]]
    note: str


def layout(table: Table) -> Layout:
    """How the page shows a table."""
    shows = _equal_decimals(table)
    columns = [column for column in table.columns if column != "paper"]
    rows: list[tuple[str, list[Shown]]] = []
    for name, *cells in table.rows:
        shown: list[Shown] = []
        for column, cell in zip(table.columns[1:], cells, strict=True):
            of = _shown(cell, shows)
            if column != "paper":
                shown.append(of)
            elif cell != "-":
                shown[-1] = dataclasses.replace(shown[-1], below=(*shown[-1].below, f"paper {of.text}"))
        rows.append((name, shown))
    main = table.main
    if len(rows) <= _FEW_ROWS and len(columns) - 1 >= _MANY_COLUMNS:
        turned = [(column, [cells[i] for _, cells in rows]) for i, column in enumerate(columns[1:])]
        columns, rows = [columns[0], *(name for name, _ in rows)], turned
        main = None
    if main is None:
        main = _UNFOLDED if len(rows) > _MANY_ROWS else len(rows)
    return Layout(table.caption, columns, rows[:main], rows[main:], table.note)


def _shown(cell: str, shows: dict[str, Show]) -> Shown:
    bold = isinstance(cell, Cell) and cell.matters
    if isinstance(cell, Cell) and cell.values:
        show = shows.get(cell.series, cell.show)
        mean, low, high = map(show, (statistics.fmean(cell.values), min(cell.values), max(cell.values)))
        return Shown(mean, (f"{low} to {high}",) if low != high else (), bold)
    split = _BELOW.fullmatch(cell)
    return Shown(split[1], (split[2],), bold) if split else Shown(str(cell), (), bold)


def _equal_decimals(table: Table) -> dict[str, Show]:
    """Series -> how its numbers are shown, where one number of decimals suits all of ours."""
    series: dict[str, list[Cell]] = {}
    for column, *cells in zip(table.columns, *table.rows, strict=True):
        for cell in cells if column != "paper" else ():
            if isinstance(cell, Cell) and cell.values:
                series.setdefault(cell.series, []).append(cell)
    found: dict[str, Show] = {}
    for name, of in series.items():
        show = of[0].show
        if name and show in _FORMS:
            means = [abs(statistics.fmean(cell.values)) * (100 if show is percent else 1) for cell in of]
            decimals = decimals_for(means)
            if decimals is not None:
                found[name] = _FORMS[show].format(min(decimals, 2) if show is percent else decimals).format
    return found


def decimals_for(values: Sequence[float]) -> int | None:
    """Decimals with which the smallest number has three digits and the largest at most five; None where none suits.

    Numbers of which no five digits of the largest would show two of the smallest have no decimals in common.

    >>> decimals_for([21.7, 2.98]), decimals_for([118507.0, 1.71])
    (2, None)
    """
    sizes = [math.floor(math.log10(value)) for value in values if value > 0 and math.isfinite(value)]
    if not sizes or not all(map(math.isfinite, values)):
        return None
    decimals = max(0, min(2 - min(sizes), _DIGITS - 1 - max(max(sizes), 0)))
    return decimals if decimals + min(sizes) >= 1 and decimals <= 6 else None
