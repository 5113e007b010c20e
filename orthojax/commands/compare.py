"""Compares training runs: orthojax compare runs/a runs/b.

Shows where their configs differ, how they ended (with the numbers of `orthojax evaluate`, if it was run, else as last
logged) and their curves over training. Names are those of the folders, or NAME=RUN. Writes report.html, report.md and
figures/ under --workdir, and prints the tables. Runs may still be training.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from orthojax.commands.analyze import named_paths
from orthojax.config import Config, flatten, from_json
from orthojax.errors import UserError, printable
from orthojax.files import parse_json, require_file

FLAGS = flags.FLAGS
EXTRAS = "train,reports"
POSITIONAL, SEVERAL = "the folders of runs, RUN or NAME=RUN", True
_CURVES = ("validation_loss_nats", "loss_nats", "kurtosis_first", "first_attention_fraction", "grad_norm")


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("workdir", "runs/compare", "Where the report goes.")


class _Run(NamedTuple):
    config: Config
    lines: list[dict[str, Any]]  # of metrics.jsonl, by step
    metrics: dict[str, float]  # of evaluation.json, else as last logged


def _read(path: Path) -> _Run:
    from orthojax.train import read_metrics

    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).exists():
            raise UserError(f"{path} is not a run: it has no {name}", allowed="workdirs of orthojax train")
        require_file(path / name, f"{name} of a run")
    config = from_json(Config, (path / "config.json").read_text(encoding="utf-8"))
    lines = sorted(read_metrics(path / "metrics.jsonl"), key=lambda line: line["step"])
    metrics = {name: float(x) for line in lines for name, x in line.items() if isinstance(x, int | float)}
    metrics.pop("loss_nats", None)  # of a training batch, which the held-out loss must not stand beside
    if (path / "evaluation.json").is_file():
        found = parse_json((path / "evaluation.json").read_bytes(), f"{path}/evaluation.json")
        if not isinstance(found, dict) or not isinstance(found.get("metrics"), dict):
            raise UserError(f"{path}/evaluation.json has no metrics", allowed="what orthojax evaluate writes")
        metrics |= found["metrics"]
    return _Run(config, lines, metrics)


def _tables(runs: Mapping[str, _Run]) -> list[Any]:
    from orthojax import analysis
    from orthojax.experiments.report import Table

    ends = []
    for name, entry in analysis.CATALOGUE.items():
        if any(name in run.metrics for run in runs.values()):
            cells = [analysis.show(name, run.metrics[name]) if name in run.metrics else "-" for run in runs.values()]
            ends.append([entry.label, *cells])
    fields = [flatten(run.config) for run in runs.values()]
    different = [
        [path, *(str(of[path]) for of in fields)] for path in fields[0] if len({str(of[path]) for of in fields}) > 1
    ]
    return [
        Table("How they ended", ["", *runs], ends),
        Table("Fields of the config that differ", ["", *runs], different),
    ]


def _pictures(runs: Mapping[str, _Run]) -> list[Any]:
    import numpy as np

    from orthojax import analysis
    from orthojax.experiments import figures
    from orthojax.experiments.report import Picture

    pictures = []
    for metric in _CURVES:
        curves = {}
        for name, run in runs.items():
            points = {line["step"]: line[metric] for line in run.lines if metric in line}
            if len(points) > 1:
                curves[name] = list(points), np.array([list(points.values())])
        if curves:
            label = analysis.label(metric)
            figure = figures.lines({"": curves}, x_label="step", y_label=label)
            pictures.append(Picture(metric, f"{label}, by step.", figure))
    return pictures


def main(arguments: list[str]) -> None:
    from orthojax.experiments.report import Report, print_report, write_report

    paths = named_paths(arguments, flag="")
    if len(paths) < 2:
        raise UserError(f"only one run given: {arguments[0]}", allowed="two or more: orthojax compare RUN RUN")
    runs = {name: _read(Path(path)) for name, path in paths.items()}
    sentences = []
    if len({(run.config.data.kind, run.config.data.paths, run.config.eval) for run in runs.values()}) > 1:
        sentences.append("Their data or evaluations differ: compare losses only if the held-out text is the same.")
    report = Report(
        title=", ".join(runs),
        sentences=sentences,
        tables=_tables(runs),
        pictures=_pictures(runs),
        notes=[shlex.join(["orthojax", "compare", *arguments])],
    )
    write_report(report, Path(FLAGS.workdir))
    print_report(report)
    print(*sentences, printable(f"written: {Path(FLAGS.workdir) / 'report.html'}"), sep="\n")
