"""What the benchmarks share: interleaved timing, ratios within a repetition, and a table of them."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from orthojax.machine import environment


def parser(about: str) -> argparse.ArgumentParser:
    """Returns a parser of --repeats and --tiny; `about` is the help."""
    options = argparse.ArgumentParser(description=about)
    options.add_argument("--repeats", type=int, default=10, help="timed repetitions of each function")
    options.add_argument("--tiny", action="store_true", help="small shapes: shows that it runs, not how fast")
    return options


def table_parser(about: str) -> argparse.ArgumentParser:
    """Returns a parser of --repeats, --tiny and --json; `about` is the help."""
    options = parser(about)
    options.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return options


def parsed_arguments(about: str) -> argparse.Namespace:
    """Parses --repeats, --tiny and --json; `about` is the help."""
    return table_parser(about).parse_args()


def compare(
    functions: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Times functions against the first of them, interleaved: A B C A, A C B A, ...

    What else the machine does falls on all of them alike, so the ratio of two times of one repetition is steadier than
    either. The order alternates, because a function finds the caches as the one before it left them. The first function
    is timed twice in each repetition: its own ratio is the control.

    Args:
      functions: What is timed, by name; a call is over when the arrays that it returns are ready.
      repeats: Timed calls of each function; one more, in which it compiles, comes first.
      clock: Seconds from any origin; `time.process_time` counts processor seconds.

    Returns:
      For each name its median `ratio` with quartiles `ratio_low` and `ratio_high`, and the median `seconds`.
    """
    first, *others = functions
    ratios: dict[str, list[float]] = {name: [] for name in functions}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(-1, repeats):
        taken = []
        order = others if repetition % 2 else others[::-1]
        for name in (first, *order, first):
            started = clock()
            jax.block_until_ready(functions[name]())
            taken.append(clock() - started)
        if repetition >= 0:
            reference, again = taken[0], taken[-1]
            for name, value in zip((first, *order), (again, *taken[1:-1]), strict=True):
                seconds[name].append(value)
                ratios[name].append(value / reference)
    return {name: _quartiles(ratios[name]) | {"seconds": statistics.median(seconds[name])} for name in functions}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def show(title: str, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Prints rows of the same keys as a Markdown table, or with the title and the environment as one JSON object."""
    about = environment()
    if as_json:
        print(json.dumps({"title": title, **about, "rows": rows}), flush=True)
        return
    cells = [list(rows[0]), ["---"] * len(rows[0])]
    cells += [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    print(f"{title}\n{about['device']}, jax {about['versions']['jax']}, {about['date']}\n")
    print(*(f"| {' | '.join(row)} |" for row in cells), sep="\n", end="\n\n", flush=True)
