"""What a suite of measurements is, and how one is run into benchmark.json."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orthojax.model import gpt2
from orthojax.train import Spread, environment, make_folder, write_text

TINY_MODEL = gpt2(
    "tiny", d_model=16, d_mlp=24, num_heads=2, num_layers=1, vocab_size=32, max_length=16, scan_layers=False
)


class Row(NamedTuple):
    """One measurement, or why it was not made.

    Attributes:
      case: What it was made on, such as the shape of a kernel.
      variant: What was compared with the suite's reference.
      metrics: By name, with the unit in the name; empty where left out.
      left_out: The reason, or "".
    """

    case: str
    variant: str
    metrics: dict[str, Any]
    left_out: str = ""


class TimeBudget:
    """The time that a suite may take: what it has not begun by then is left out.

    Args:
      seconds: From now on.
      clock: Seconds from any origin.
    """

    LEFT_OUT = "time budget"

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._end = clock, clock() + seconds

    def seconds_left(self) -> float:
        """What remains, at least 0."""
        return max(0.0, self._end - self._clock())

    def repetitions(self, wanted: int, seconds: float, longest: float) -> int:
        """As many as are wanted, or as fit into what is left and into `longest`; but three, where so many are wanted.

        Args:
          wanted: Repetitions.
          seconds: Of one repetition.
          longest: The seconds that all of them may take.
        """
        affordable = int(min(self.seconds_left(), longest) / max(seconds, 1e-9))
        return min(wanted, max(3, affordable))


# How an implementation refuses (NotImplementedError is a RuntimeError, and so are XLA's), or jax.nn an argument.
FAILURES = (RuntimeError, ValueError)


def reason(error: Exception) -> str:
    """The first line of an error, for a row that is left out.

    >>> reason(NotImplementedError("heads wider than 128"))
    'NotImplementedError: heads wider than 128'
    """
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


class Column(NamedTuple):
    """A column of the printed table: its heading, and what it shows of a row's metrics."""

    heading: str
    text: Callable[[dict[str, Any]], str]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Measurements that belong together.

    Attributes:
      name: As in --suite.
      title: What is measured, in a sentence.
      measure: (repeats, tiny) -> rows, each given as soon as it is there; `tiny` means seconds in all.
      columns: Of its table.
      repeats: How many repetitions are timed where the user does not say.
    """

    name: str
    title: str
    measure: Callable[[int, bool], Iterator[Row]]
    columns: tuple[Column, ...]
    repeats: int


def spread_metrics(name: str, values: Spread) -> dict[str, float]:
    """Median and quartiles as three metrics.

    >>> spread_metrics("ratio", Spread(1.5, 1.0, 2.0))
    {'ratio': 1.5, 'ratio_lower_quartile': 1.0, 'ratio_upper_quartile': 2.0}
    """
    return {name: values.median, f"{name}_lower_quartile": values.lower, f"{name}_upper_quartile": values.upper}


def spread_text(name: str) -> Callable[[dict[str, Any]], str]:
    """Shows what `spread_metrics` wrote, as in "1.04 (1.02-1.07)"."""

    def text(metrics: dict[str, Any]) -> str:
        lower, upper = metrics[f"{name}_lower_quartile"], metrics[f"{name}_upper_quartile"]
        return f"{metrics[name]:.3g} ({lower:.3g}-{upper:.3g})"

    return text


def measured(name: str, text: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """Shows a text, or "-" where the metric `name` was not measured or does not exist for the row."""
    return lambda metrics: "-" if metrics.get(name) is None else text(metrics)


def seconds_text(seconds: float) -> str:
    """Seconds for people.

    >>> seconds_text(0.0000123), seconds_text(0.25), seconds_text(0.9999)
    ('12.3 us', '250 ms', '1 s')
    """
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * u), (1e-6, "us"))
    return f"{seconds / unit:.3g} {name}"


def bytes_text(count: float | None) -> str:
    """Bytes for people, in decimal units.

    >>> bytes_text(512), bytes_text(1_493_285_932), bytes_text(None)
    ('512 B', '1.49 GB', 'unknown')
    """
    if count is None:
        return "unknown"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"


def _line(suite: Suite, row: Row) -> str:
    shown = row.left_out and f"left out: {row.left_out}"
    shown = shown or ", ".join(f"{column.heading} {column.text(row.metrics)}" for column in suite.columns)
    return f"{suite.name}, {row.case}, {row.variant}: {shown}"


def table(suite: Suite, rows: Sequence[Row]) -> str:
    """The measured rows of a suite for a console, columns aligned."""
    measured = [row for row in rows if not row.left_out]
    lines = [["case", "variant", *(column.heading for column in suite.columns)]]
    lines += [[row.case, row.variant, *(column.text(row.metrics) for column in suite.columns)] for row in measured]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "-" * max(map(len, texts))
    return "\n".join([suite.title, rule, texts[0], rule, *texts[1:]])


def run_suites(
    suites: Sequence[Suite], workdir: Path, *, repeats: int | None = None, tiny: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measures, prints every row as it comes and the tables last, and writes benchmark.json.

    The file is written anew after each row, so that a run that is stopped keeps what it has; `finished` is true once
    all is measured. An earlier benchmark.json of the folder is replaced by the first row.

    Args:
      suites: What to measure.
      workdir: Where benchmark.json goes.
      repeats: Timed repetitions; each suite's own number where None.
      tiny: Small shapes: shows that all runs, not how fast.
      command: How it was started, for the record.

    Returns:
      What benchmark.json holds: {"provenance", "finished", "rows": [{"suite", "case", "variant", "metrics"}]}; a row
      that was left out has the reason in "left_out" instead of metrics.

    Raises:
      UserError: Where the workdir cannot be made.
    """
    make_folder(workdir, "workdir")
    started = time.monotonic()
    provenance = environment() | {
        "command": command,
        "repeats": {suite.name: repeats or suite.repeats for suite in suites},
        "tiny": tiny,
        # Runnable processes over 1, 5 and 15 minutes: what else the machine did.
        "load_average_at_start": [round(load, 2) for load in os.getloadavg()],
    }
    results: dict[str, Any] = {"provenance": provenance, "finished": False, "rows": []}

    def write() -> None:
        provenance["wall_seconds"] = round(time.monotonic() - started, 1)
        write_text(workdir / "benchmark.json", json.dumps(results, indent=2) + "\n")

    tables = []
    for suite in suites:
        rows = []
        for row in suite.measure(repeats or suite.repeats, tiny):
            rows.append(row)
            told = {"left_out": row.left_out} if row.left_out else {"metrics": row.metrics}
            results["rows"].append({"suite": suite.name, "case": row.case, "variant": row.variant} | told)
            write()
            print(_line(suite, row), flush=True)
        tables.append(table(suite, rows))
    results["finished"] = True
    write()
    print(*("\n" + text for text in tables), sep="\n")
    return results
