"""What softmax-1 and OrthoAdam cost: ratios to what they replace, interleaved within one process."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthojax.benchmarks.data import DATA
from orthojax.benchmarks.kernels import ATTENTION, QUANTIZATION
from orthojax.benchmarks.optimizer import OPTIMIZER
from orthojax.benchmarks.suite import Suite
from orthojax.benchmarks.telemetry import TELEMETRY
from orthojax.benchmarks.training import COMPILE, TRAIN_STEP
from orthojax.files import make_folder, write_text
from orthojax.formatting import align
from orthojax.machine import environment

SUITES: dict[str, Suite] = {
    suite.name: suite for suite in (OPTIMIZER, COMPILE, ATTENTION, TRAIN_STEP, TELEMETRY, QUANTIZATION, DATA)
}


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
        lines = [["case", "variant", *(column.heading for column in suite.columns)]]
        for row in suite.measure(repeats or suite.repeats, tiny):
            outcome = {"left_out": row.left_out} if row.left_out else {"metrics": row.metrics}
            results["rows"].append({"suite": suite.name, "case": row.case, "variant": row.variant} | outcome)
            write()
            cells = [column.text(row.metrics) for column in suite.columns]
            shown = [f"{column.heading} {cell}" for column, cell in zip(suite.columns, cells, strict=True)]
            shown = f"left out: {row.left_out}" if row.left_out else ", ".join(shown)
            print(f"{suite.name}, {row.case}, {row.variant}: {shown}", flush=True)
            lines += [] if row.left_out else [[row.case, row.variant, *cells]]
        heading, *texts = align(lines)
        rule = "-" * max(map(len, (heading, *texts)))
        tables.append("\n".join(["", suite.title, rule, heading, rule, *texts]))
    results["finished"] = True
    write()
    print(*tables, sep="\n")
    return results
