"""What a suite of measurements is, and how contenders are compared in one process."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.formatting import byte_count
from orthojax.machine import available_memory_bytes
from orthojax.model import gpt2
from orthojax.timing import Spread, interleaved_seconds, median_ratio, spread

TINY_MODEL = gpt2(
    "tiny", d_model=16, d_mlp=24, num_heads=2, num_layers=1, vocab_size=32, max_length=16, scan_layers=False
)


class Row(NamedTuple):
    """One measurement, or why it was not made."""

    case: str  # what it was made on, such as the shape of a kernel
    variant: str  # what was compared with the reference
    metrics: dict[str, Any]  # by name, with the unit in the name; empty where left out
    left_out: str = ""  # the reason, or ""


class Column(NamedTuple):
    """A column of the printed table.

    Attributes:
      heading: Of the column.
      metric: Name of what it shows, or names with "+" for their sum; "-" stands where a row has none.
      kind: "spread" for what `spread_metrics` wrote, "seconds", "bytes", or a format such as "{:.3g}".
    """

    heading: str
    metric: str
    kind: str = "spread"

    def text(self, metrics: dict[str, Any]) -> str:
        """As in "1.04 (1.02-1.07)", "12.3 us", "1.49 GB"."""
        if any(name not in metrics for name in self.metric.split("+")):
            return "-"
        values = [metrics[name] for name in self.metric.split("+")]
        if None in values:
            return "unknown"
        value = sum(values)
        if self.kind == "spread":
            lower, upper = metrics[f"{self.metric}_lower_quartile"], metrics[f"{self.metric}_upper_quartile"]
            return f"{value:.3g} ({lower:.3g}-{upper:.3g})"
        if self.kind == "seconds":
            unit, symbol = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if value >= 0.9995 * u), (1e-6, "us"))
            return f"{value / unit:.3g} {symbol}"
        return byte_count(value) if self.kind == "bytes" else self.kind.format(value)


class Suite(NamedTuple):
    """Measurements that belong together."""

    name: str  # as in --suite
    title: str  # what is measured, in a sentence
    measure: Callable[[int, bool], Iterator[Row]]  # (repeats, tiny) -> rows; `tiny` means seconds in all
    columns: tuple[Column, ...]
    repeats: int  # timed repetitions by default


def spread_metrics(name: str, values: Spread) -> dict[str, float]:
    """Median and quartiles as three metrics.

    >>> spread_metrics("ratio", Spread(1.5, 1.0, 2.0))
    {'ratio': 1.5, 'ratio_lower_quartile': 1.0, 'ratio_upper_quartile': 2.0}
    """
    return {name: values.median, f"{name}_lower_quartile": values.lower, f"{name}_upper_quartile": values.upper}


# Programs.


class Program(NamedTuple):
    """A compiled function, and what it took to compile.

    `memory` has bytes as the compiler counts them: `argument_bytes` and `output_bytes`, which share `donated_bytes`,
    and `temp_bytes` besides both; None where the backend does not report it.
    """

    run: Any  # a jax.stages.Compiled; called like the function
    lower_seconds: float  # tracing and lowering
    compile_seconds: float  # XLA's own time
    cpu_seconds: float  # processor time of both, over all threads: other load on the machine hardly changes it
    memory: dict[str, int | None]

    @property
    def sizes(self) -> dict[str, Any]:
        """`memory`, and the seconds of lowering and compiling together, as metrics."""
        return self.memory | {"compile_seconds": self.lower_seconds + self.compile_seconds}

    @property
    def peak_bytes(self) -> int | None:
        """All that one call needs: arguments, results and temporaries, donated buffers counted once."""
        argument, output, temp, donated = (self.memory[f"{n}_bytes"] for n in ("argument", "output", "temp", "donated"))
        return None if argument is None else argument + (output or 0) + (temp or 0) - (donated or 0)


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

    >>> tree_bytes({"mu": jax.ShapeDtypeStruct((768, 768), jnp.float32)})
    2359296
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def random_like(shapes: Any, scale: float) -> Any:
    """Normal numbers of a standard deviation, float32, the same in every run."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(generator.standard_normal(x.shape, np.float32) * np.float32(scale)), shapes
    )


def free_bytes() -> float:
    """Memory that the default device has left; infinite where it is not known."""
    if stats := jax.devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else math.inf
    return (available_memory_bytes() if jax.default_backend() == "cpu" else None) or math.inf


def require_memory(needed: float, free: float) -> None:
    """Raises LeftOut where `needed` bytes are not free."""
    if needed > free:
        raise LeftOut(f"it needs {byte_count(needed)} of memory, {byte_count(free)} are free")


# Comparisons.


class LeftOut(RuntimeError):
    """Why something is not measured."""


# How an implementation refuses (NotImplementedError is a RuntimeError, and so are XLA's), or jax.nn an argument.
_FAILURES = (RuntimeError, ValueError)
OUT_OF_TIME = "time budget"
_CONTROL = "the reference again"


def reason(error: Exception) -> str:
    """The first line of an error, for a row that is left out."""
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, LeftOut) else f"{type(error).__name__}: {first}"[:300]


class TimeBudget:
    """The seconds that a suite may take from now on: what it has not begun by then is left out."""

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
        except _FAILURES as error:
            return reason(error)

    def repetitions(self, wanted: int, seconds: float, longest: float) -> int:
        """As many as wanted, or as fit into what is left and into `longest` seconds; but three of those wanted."""
        affordable = int(min(self.seconds_left(), longest) / max(seconds, 1e-9))
        return min(wanted, max(3, affordable))


class Contender(NamedTuple):
    """What is timed."""

    call: Callable[[int], Any]  # makes n calls, and returns what to wait for
    sizes: dict[str, Any]  # metrics that need no run
    finish: Callable[[float], dict[str, Any]] = lambda seconds: {}  # median seconds of a call -> further metrics


class Case(NamedTuple):
    """What is compared in one process."""

    name: str
    contenders: Mapping[str, Callable[[], Contender]]  # by name; the first is the reference: if it fails, all do


class Comparison(NamedTuple):
    """How the cases of a suite are measured: interleaved, the reference twice, which is the control."""

    ratios: tuple[str, ...]  # sizes that are also shown as ratios to those of the reference
    longest: float  # seconds of all repetitions; fewer are made, but at least three, where they would take longer
    own_row: bool = False  # the reference has a row; otherwise its metrics stand in every row, prefixed with its name
    per_step: bool = False  # a call is a step, and its metrics say so
    fewest_calls: int = 1  # in a repetition
    shortest: float = 0.02  # seconds of a repetition: one small call is too short for the clock and the scheduler
    clock: Callable[[], float] = time.perf_counter  # of the repetitions
    reserved: float = 0.0  # seconds of the budget in which contenders are made and not timed

    def rows(self, case: Case, repeats: int, budget: TimeBudget) -> Iterator[Row]:
        """The rows of a case; what fails, or has not begun when the budget is spent, is left out with the reason."""
        first, *others = case.contenders
        shown = list(case.contenders) if self.own_row else others
        reference = budget.attempt(case.contenders[first])
        if isinstance(reference, str):
            why = reference if reference == OUT_OF_TIME else f"{first}: {reference}"
            yield from (Row(case.name, name, {}, why) for name in shown)
            return
        made = {first: reference} | {name: budget.attempt(case.contenders[name]) for name in others}
        ready = {name: found for name, found in made.items() if not isinstance(found, str)}
        seconds, calls, not_timed = {}, 0, OUT_OF_TIME
        if budget.seconds_left() > self.reserved and (len(ready) > 1 or self.own_row):
            try:
                seconds, calls = self._seconds(ready, first, repeats, budget)
            except _FAILURES as error:
                not_timed = reason(error)
        unit = "step_seconds" if self.per_step else "seconds"
        for name in shown:
            if isinstance(contender := made[name], str):
                yield Row(case.name, name, {}, contender)
                continue
            metrics = dict(contender.sizes)
            for size in self.ratios:
                ours, theirs = contender.sizes[size], reference.sizes[size]
                metrics[f"{size}_ratio"] = ours / theirs if ours is not None and theirs else None
            if seconds:
                # Ratios are to the reference in the same repetition; that of the reference itself is the control.
                ratio = median_ratio(seconds[_CONTROL if name == first else name], seconds[first])
                metrics |= spread_metrics(f"{unit}_ratio", ratio)
                metrics |= spread_metrics("control_ratio", median_ratio(seconds[_CONTROL], seconds[first]))
                metrics |= spread_metrics(unit, spread(seconds[name])) | {"repetitions": len(seconds[name])}
                metrics |= {f"{'steps' if self.per_step else 'calls'}_per_repetition": calls}
                metrics |= contender.finish(metrics[unit])
            else:
                metrics["not_timed"] = not_timed
            if not self.own_row:
                times = spread_metrics(unit, spread(seconds[first])) if seconds else {}
                metrics |= {f"{first}_{name}": value for name, value in (reference.sizes | times).items()}
            yield Row(case.name, name, metrics)

    def _seconds(
        self, ready: dict[str, Contender], first: str, repeats: int, budget: TimeBudget
    ) -> tuple[dict[str, list[float]], int]:
        """Seconds of one call in each repetition, and how many calls a repetition has."""

        def functions(calls: int) -> dict[str, Callable[[], Any]]:
            return {name: lambda call=each.call: call(calls) for name, each in ready.items()}

        few = self.fewest_calls
        once = {name: times[0] / few for name, times in interleaved_seconds(functions(few), 1).items()}
        calls = max(few, math.ceil(self.shortest / min(once.values())))
        repetitions = budget.repetitions(repeats, calls * (sum(once.values()) + once[first]), self.longest)
        timed = functions(calls)
        timed = {first: timed[first], _CONTROL: timed[first]} | timed
        seconds = interleaved_seconds(timed, repetitions, warmup=0, clock=self.clock)
        return {name: [whole / calls for whole in found] for name, found in seconds.items()}, calls
