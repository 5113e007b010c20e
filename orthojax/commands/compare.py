"""Compares training runs: orthojax compare runs/a runs/b.

Shows where their configs differ, how they ended (with the numbers of `orthojax evaluate` if all were evaluated, else as
last logged) and their curves over training. Runs are named by their folders, or by NAME=RUN. Writes report.html,
report.md and figures/ under --workdir, and prints the tables. Runs may still be training.
"""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from orthojax.commands import cli
from orthojax.config import Config, flatten, from_dict
from orthojax.errors import UserError, printable
from orthojax.files import read_json, read_with_digest, require_file

FLAGS = flags.FLAGS
POSITIONAL, SEVERAL = "the folders of runs, RUN or NAME=RUN", True


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", "runs/compare", "Folder of the report.")


class _Run(NamedTuple):
    config: Config
    logged: dict[int, dict[str, float]]  # step -> its line in metrics.jsonl
    metrics: dict[str, float]  # as last logged
    evaluated: dict[str, float]  # from evaluation.json; {} if there is none


def _read(path: Path) -> _Run:
    from orthojax.experiments.stored import COUNT, NUMBER, check, check_metrics
    from orthojax.train import read_metrics

    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).exists():
            raise UserError(f"{path} is not a run: it has no {name}", allowed="workdirs of orthojax train")
        require_file(path / name, f"{name} of a run")
    config = from_dict(Config, read_json(path / "config.json", "config"), f"the config {path / 'config.json'}")
    lines, logged = read_metrics(path / "metrics.jsonl"), {}
    if not lines and (path / "metrics.jsonl").stat().st_size:
        raise UserError(f"{path / 'metrics.jsonl'} has no valid line", allowed="a JSON object with a step in each line")
    for line in lines:
        check(line["step"], COUNT, f"{path / 'metrics.jsonl'}, step")
    for line in sorted(lines, key=lambda line: line["step"]):  # a run that diverged has values that are not finite
        logged.setdefault(line["step"], {}).update((k, float(x)) for k, x in line.items() if NUMBER.holds(x))
    metrics = {name: value for line in logged.values() for name, value in line.items()}
    metrics.pop("loss_nats", None)  # of a training batch, so not comparable with the held-out loss
    evaluated = {}
    if (path / "evaluation.json").is_file():
        found = read_with_digest(path / "evaluation.json", "evaluation").get("metrics")
        evaluated = check_metrics(found, f"{path / 'evaluation.json'}, metrics")
    return _Run(config, logged, metrics, evaluated)


def main(arguments: list[str]) -> None:
    from orthojax.cards.page import curve_pictures, metrics_table
    from orthojax.report.page import Report, Table, print_report, write_report

    paths = cli.named_paths(arguments, flag="")
    if len(paths) < 2:
        raise UserError(f"only one run given: {arguments[0]}", allowed="two or more: orthojax compare RUN RUN")
    runs = {name: _read(Path(path)) for name, path in paths.items()}
    configs: list[Any] = [run.config for run in runs.values()]
    sentences = []
    if len({(of.data.kind, of.data.paths, of.eval) for of in configs}) > 1:
        sentences.append("Their data or evaluations differ: compare losses only if the held-out text is the same.")
    fields = [flatten(of) for of in configs]
    values = [[path, *(str(of[path]) for of in fields)] for path in fields[0]]
    different = [row for row in values if len(set(row[1:])) > 1]
    sentences += [] if different else ["Their configs are the same."]
    left = [name for name, run in runs.items() if not run.evaluated]
    if 0 < len(left) < len(runs):  # on other rows than a probe's, so not comparable
        command = f"orthojax evaluate --checkpoint={paths[left[0]]}"
        sentences.append(f"Not evaluated: {', '.join(left)} ({command}); metrics of all are as last logged.")
    ends = {name: run.metrics if left else run.metrics | run.evaluated for name, run in runs.items()}
    tables = [metrics_table("How they ended", ends, configs[0])]
    tables += [Table("Fields of the config that differ", ["", *runs], different)] if different else []
    report = Report(
        title=", ".join(runs),
        sentences=sentences,
        tables=tables,
        pictures=curve_pictures({name: run.logged for name, run in runs.items()}, "step"),
        notes=[shlex.join(["orthojax", "compare", *arguments])],
    )
    write_report(report, Path(FLAGS.workdir))
    print_report(report)
    print(*sentences, printable(f"written: {Path(FLAGS.workdir) / 'report.html'}"), sep="\n")
