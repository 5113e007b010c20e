"""What a suite of measurements is, how contenders are compared, and how suites are run into benchmark.json."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orthojax.files import make_folder, write_text
from orthojax.formatting import align, byte_count
from orthojax.machine import available_memory_bytes, environment
from orthojax.model import gpt2
from orthojax.timing import Spread, interleaved_seconds, median_ratio, spread

TINY_MODEL = gpt2(
    "tiny", d_model=16, d_mlp=24, num_heads=2, num_layers=1, vocab_size=32, max_length=16, scan_layers=False
)
REFERENCE, CONTROL = "reference", "control"  # the control is the reference once more
SHORTEST_SECONDS = 0.02  # of a repetition: one call of a small program is too short for the clock and the scheduler


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


class Column(NamedTuple):
    """A column of the printed table: its heading, and how it shows the metrics of a row."""

    heading: str
    text: Callable[[dict[str, Any]], str]


class Suite(NamedTuple):
    """Measurements that belong together.

    Attributes:
      name: As in --suite.
      title: What is measured, in a sentence.
      measure: (repeats, tiny) -> rows, each yielded as soon as it is measured; `tiny` means seconds in all.
      columns: Of its table.
      repeats: Timed repetitions by default.
    """

    name: str
    title: str
    measure: Callable[[int, bool], Iterator[Row]]
    columns: tuple[Column, ...]
    repeats: int


# Columns.


def shows(heading: str, name: str, text: Callable[[Any], str]) -> Column:
    """A metric as a text; "-" where the row has none."""
    return Column(heading, lambda metrics: "-" if metrics.get(name) is None else text(metrics[name]))


def shows_spread(heading: str, name: str) -> Column:
    """What `spread_metrics` wrote, as in "1.04 (1.02-1.07)"."""

    def text(metrics: dict[str, Any]) -> str:
        if name not in metrics:
            return "-"
        lower, upper = metrics[f"{name}_lower_quartile"], metrics[f"{name}_upper_quartile"]
        return f"{metrics[name]:.3g} ({lower:.3g}-{upper:.3g})"

    return Column(heading, text)


def shows_seconds(heading: str, name: str) -> Column:
    """Seconds, as in "12.3 us", "250 ms" and "1 s"."""

    def text(seconds: float) -> str:
        unit, symbol = next(((u, s) for u, s in ((1.0, "s"), (1e-3, "ms")) if seconds >= 0.9995 * u), (1e-6, "us"))
        return f"{seconds / unit:.3g} {symbol}"

    return shows(heading, name, text)


def shows_bytes(heading: str, name: str) -> Column:
    """A byte count; "unknown" where the backend does not report it."""
    return Column(heading, lambda metrics: byte_count(metrics[name]))


def spread_metrics(name: str, values: Spread) -> dict[str, float]:
    """Median and quartiles as three metrics.

    >>> spread_metrics("ratio", Spread(1.5, 1.0, 2.0))
    {'ratio': 1.5, 'ratio_lower_quartile': 1.0, 'ratio_upper_quartile': 2.0}
    """
    return {name: values.median, f"{name}_lower_quartile": values.lower, f"{name}_upper_quartile": values.upper}


# Programs.


class Program(NamedTuple):
    """A compiled function.

    Attributes:
      run: The executable, a jax.stages.Compiled; called like the function.
      lower_seconds: Tracing and lowering.
      compile_seconds: XLA's own time.
      cpu_seconds: Processor time of both, over all threads: other load on the machine hardly changes it.
      memory: Bytes as the compiler counts them: `argument_bytes` and `output_bytes`, which share `donated_bytes`, and
        `temp_bytes` besides both. None where the backend does not report it.
    """

    run: Any
    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float
    memory: dict[str, int | None]

    @property
    def peak_bytes(self) -> int | None:
        """All that one call needs: arguments, results and temporaries, donated buffers counted once."""
        sizes = [self.memory[f"{name}_bytes"] for name in ("argument", "output", "temp", "donated")]
        if any(size is None for size in sizes):
            return None
        *needed, donated = (size or 0 for size in sizes)
        return sum(needed) - donated


def compile_program(function: Any, *arguments: Any) -> Program:
    """Traces, lowers and compiles as a new process would: JAX's caches are cleared first.

    A persistent compilation cache is not: turn it off to time compilation.

    Args:
      function: From jax.jit.
      *arguments: Arrays or jax.ShapeDtypeStruct; only shapes and dtypes matter.
    """
    jax.clear_caches()
    started, cpu_started = time.perf_counter(), time.process_time()
    lowered = function.lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    ended, cpu_ended = time.perf_counter(), time.process_time()
    analysis = compiled.memory_analysis()
    names = {"argument": "argument", "output": "output", "donated": "alias", "temp": "temp"}
    memory = {f"{ours}_bytes": getattr(analysis, f"{xla}_size_in_bytes", None) for ours, xla in names.items()}
    return Program(compiled, middle - started, ended - middle, cpu_ended - cpu_started, memory)


def tree_bytes(shapes: Any) -> int:
    """Bytes of a tree of arrays or shapes.

    >>> tree_bytes({"mu": jax.ShapeDtypeStruct((768, 768), jax.numpy.float32)})
    2359296
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def require_memory(needed: float) -> None:
    """Raises LeftOut where the default device is known to have less free memory than `needed` bytes."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    else:
        free = available_memory_bytes() if jax.default_backend() == "cpu" else None
    if free is not None and needed > free:
        raise LeftOut(f"it needs {byte_count(needed)} of memory, {byte_count(free)} are free")


# Comparisons.


class LeftOut(RuntimeError):
    """Why something is not measured."""


# How an implementation refuses (NotImplementedError is a RuntimeError, and so are XLA's), or jax.nn an argument.
FAILURES = (RuntimeError, ValueError)
OUT_OF_TIME = "time budget"


def reason(error: Exception) -> str:
    """The first line of an error, for a row that is left out.

    >>> reason(NotImplementedError("heads wider than 128"))
    'NotImplementedError: heads wider than 128'
    """
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, LeftOut) else f"{type(error).__name__}: {first}"[:300]


class TimeBudget:
    """The time that a suite may take: what it has not begun by then is left out.

    Args:
      seconds: From now on.
      clock: Seconds from any origin.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._end = clock, clock() + seconds

    def seconds_left(self) -> float:
        """What remains, at least 0."""
        return max(0.0, self._end - self._clock())

    def attempt(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, or as a str why there is none."""
        if not self.seconds_left():
            return OUT_OF_TIME
        try:
            return make()
        except FAILURES as error:
            return reason(error)

    def repetitions(self, wanted: int, seconds: float, longest: float) -> int:
        """As many as wanted, or as fit into what is left and into `longest`; but at least three of those wanted.

        Args:
          wanted: Repetitions.
          seconds: Of one repetition.
          longest: The seconds that all of them may take.
        """
        affordable = int(min(self.seconds_left(), longest) / max(seconds, 1e-9))
        return min(wanted, max(3, affordable))


class Times(NamedTuple):
    """Seconds of one call in each repetition, by contender; of the reference, and of it again as the control, too."""

    seconds: dict[str, list[float]]
    calls: int

    def ratios(self, name: str, unit: str = "seconds") -> dict[str, Any]:
        """The metrics that every comparison has; ratios are to the reference of the same repetition."""
        ours, reference, control = (self.seconds[each] for each in (name, REFERENCE, CONTROL))
        return {
            **spread_metrics(f"{unit}_ratio", median_ratio(ours, reference)),
            **spread_metrics("control_ratio", median_ratio(control, reference)),
            **spread_metrics(unit, spread(ours)),
            "repetitions": len(ours),
        }


def time_calls(
    callers: Mapping[str, Callable[[int], Any]],
    repeats: int,
    budget: TimeBudget,
    longest: float,
    *,
    shortest: float = SHORTEST_SECONDS,
    fewest_calls: int = 1,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Times callers in turn, the reference twice.

    Args:
      callers: A function that makes n calls, by name; `REFERENCE` must be among them. Returns what to wait for.
      repeats: Repetitions; fewer, but at least three, where they would take more than `longest` or the budget.
      budget: Of the suite.
      longest: Seconds.
      shortest: Seconds of a repetition: several calls make one where a call is shorter.
      fewest_calls: In a repetition.
      warmup: Calls before the one that decides how many make a repetition.
      clock: Of the repetitions.
    """

    def functions(calls: int) -> dict[str, Callable[[], Any]]:
        return {name: lambda caller=caller: caller(calls) for name, caller in callers.items()}

    once = {name: times[0] for name, times in interleaved_seconds(functions(1), 1, warmup=warmup).items()}
    calls = max(fewest_calls, math.ceil(shortest / min(once.values())))
    repetitions = budget.repetitions(repeats, calls * (sum(once.values()) + once[REFERENCE]), longest)
    timed = functions(calls)
    timed = {REFERENCE: timed[REFERENCE], CONTROL: timed[REFERENCE]} | timed
    seconds = interleaved_seconds(timed, repetitions, warmup=0, clock=clock)
    return Times({name: [whole / calls for whole in found] for name, found in seconds.items()}, calls)


def compare(
    case: str,
    reference: tuple[str, Callable[[], Any]],
    contenders: Mapping[str, Callable[[], Any]],
    measure: Callable[[Any, dict[str, Any]], dict[str, dict[str, Any]]],
    budget: TimeBudget,
    *,
    together: bool,
) -> Iterator[Row]:
    """The rows of one case; what fails, or has not begun when the budget is spent, is left out with the reason.

    Args:
      case: Its name.
      reference: Its name, and what makes it.
      contenders: What makes each, by name.
      measure: (reference, {name: contender}) -> metrics by name.
      budget: Of the suite.
      together: Measure all contenders at once, or each alone with the reference.
    """
    name, make = reference
    made = budget.attempt(make)
    if isinstance(made, str):
        why = made if made == OUT_OF_TIME else f"{name}: {made}"
        yield from (Row(case, contender, {}, why) for contender in contenders)
        return
    for group in [list(contenders)] if together else [[contender] for contender in contenders]:
        ready = {}
        for contender in group:
            found = budget.attempt(contenders[contender])
            if isinstance(found, str):
                yield Row(case, contender, {}, found)
            else:
                ready[contender] = found
        if not ready:
            continue
        try:
            metrics = measure(made, ready)
        except FAILURES as error:
            yield from (Row(case, contender, {}, reason(error)) for contender in ready)
        else:
            yield from (Row(case, contender, metrics[contender]) for contender in ready)


# Running.


def _line(suite: Suite, row: Row) -> str:
    shown = row.left_out and f"left out: {row.left_out}"
    shown = shown or ", ".join(f"{column.heading} {column.text(row.metrics)}" for column in suite.columns)
    return f"{suite.name}, {row.case}, {row.variant}: {shown}"


def _table(suite: Suite, rows: Sequence[Row]) -> str:
    """The measured rows of a suite for a console."""
    lines = [["case", "variant", *(column.heading for column in suite.columns)]]
    for row in rows:
        if not row.left_out:
            lines.append([row.case, row.variant, *(column.text(row.metrics) for column in suite.columns)])
    texts = align(lines)
    rule = "-" * max(map(len, texts))
    return "\n".join([suite.title, rule, texts[0], rule, *texts[1:]])


def run_suites(
    suites: Sequence[Suite], workdir: Path, *, repeats: int | None = None, tiny: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measures, prints every row as it comes and the tables last, and writes benchmark.json.

    The file is rewritten after each row, so that a run that is stopped keeps what it has; `finished` is true once
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
      UserError: Where the workdir cannot be created.
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
            outcome = {"left_out": row.left_out} if row.left_out else {"metrics": row.metrics}
            results["rows"].append({"suite": suite.name, "case": row.case, "variant": row.variant} | outcome)
            write()
            print(_line(suite, row), flush=True)
        tables.append(_table(suite, rows))
    results["finished"] = True
    write()
    print(*("\n" + text for text in tables), sep="\n")
    return results
