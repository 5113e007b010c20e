"""Compares training runs on one page: orthojax compare runs/a runs/b.

Shows where their configs differ, their curves over training and how they ended: with what evaluate measured, where it
was run, else as last logged. Names are those of the folders, or NAME=RUN. Writes report.html, report.md and figures/
under the workdir, and prints the tables. Runs may still be training.
"""

import datetime
import shlex
from pathlib import Path

from absl import flags

from orthojax.errors import UserError, printable

FLAGS = flags.FLAGS
EXTRAS = "train,reports"
POSITIONAL, SEVERAL = "the folders of runs, RUN or NAME=RUN", True


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", "runs/compare", "Where the page goes.")


def main(arguments: list[str]) -> None:
    from orthojax.experiments.analyzing.naming import named_models
    from orthojax.experiments.comparing_runs import comparing_page, read_run
    from orthojax.experiments.page import print_report, write_report

    paths = named_models(arguments, flag="")
    if len(paths) < 2:
        raise UserError(f"only one run given: {arguments[0]}", allowed="two or more: orthojax compare RUN RUN")
    runs = {name: read_run(Path(path)) for name, path in paths.items()}
    command = shlex.join(["orthojax", "compare", *arguments])
    report = comparing_page(runs, [command, f"{datetime.date.today()}"])
    workdir = Path(FLAGS.workdir)
    write_report(report, workdir)
    print_report(report)
    print(*(printable(line) for line in report.summary), sep="\n")
    print(printable(f"written: {workdir / 'report.html'}"))
