"""Several training runs on one page: where their configs differ, their curves, and how they ended."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from orthojax.config import Config, flatten, from_json
from orthojax.errors import UserError
from orthojax.experiments import drawing
from orthojax.experiments.labels import LABELS
from orthojax.experiments.overview import compared_with
from orthojax.experiments.page import Picture, Report, Table
from orthojax.files import parse_json, require_file
from orthojax.formatting import number
from orthojax.model import parameter_count
from orthojax.train import read_metrics
from orthojax.train.checkpoint import steps_in


class Run(NamedTuple):
    """What a training run left.

    Attributes:
      config: Its config.
      lines: Of metrics.jsonl, in the order of their steps.
      evaluation: The metrics of evaluation.json, {} where it was not evaluated.
      evaluated: The step of the checkpoint that was evaluated, None where that is not known.
      newest: The step of the newest checkpoint, 0 where there is none.
    """

    config: Config
    lines: list[dict[str, Any]]
    evaluation: dict[str, float]
    evaluated: int | None = None
    newest: int = 0

    def curve(self, metric: str) -> tuple[list[int], np.ndarray]:
        """A metric at the steps that have it: (steps [n], values [1, n])."""
        points = {line["step"]: line[metric] for line in self.lines if isinstance(line.get(metric), int | float)}
        return list(points), np.array([list(points.values())])

    def ended(self) -> dict[str, Any]:
        """The metrics of the evaluation; those that it lacks as they were last logged."""
        logged = {name: value for line in self.lines for name, value in line.items() if isinstance(value, int | float)}
        training = {"training_loss_nats": logged.pop("loss_nats")} if "loss_nats" in logged else {}
        return logged | training | self.evaluation


# Metric -> (name and caption of its figure, scale of its axis).
_CURVES: dict[str, tuple[str, str, Literal["linear", "log"]]] = {
    "validation_loss_nats": ("held_out_loss", "Held-out loss (nats per token).", "linear"),
    "loss_nats": ("training_loss", "Training loss (nats per token).", "linear"),
    "kurtosis_first": ("kurtosis_first", "Kurtosis of the first token, mean over layers.", "log"),
    "kurtosis_rest": ("kurtosis_rest", "Kurtosis of the other tokens, mean over layers.", "log"),
    "first_attention_fraction": (
        "first_attention",
        "How often the first token is the most attended, mean over heads and layers.",
        "linear",
    ),
    "grad_norm": ("gradient_norm", "Norm of the gradient.", "log"),
    "learning_rate": ("learning_rate", "Learning rate.", "linear"),
}
_ENDS = (
    *("perplexity", "loss_nats", "bits_per_byte", "validation_loss_nats", "training_loss_nats"),
    *("backcopy_excess_risk_nats", "bigram_excess_risk_nats"),
    *("kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest"),
    *("first_attention_fraction", "first_attention_mass", "sink_attention", "perplexity_int8_moderate"),
    *("perplexity_int8_coarse", "perplexity_int4_zeropoint", "tokens_per_second"),
)
_OWN_LABELS = {
    "validation_loss_nats": "held-out loss while training (nats)",
    "training_loss_nats": "training loss of the last logged step (nats)",
    "tokens_per_second": "tokens per second, as last logged",
}


def read_run(path: Path) -> Run:
    """Reads the folder of a run.

    Raises:
      UserError: Where it is not one.
    """
    for name in ("config.json", "metrics.jsonl"):
        if not (path / name).exists():
            raise UserError(f"{path} is not a run: it has no {name}", allowed="workdirs of orthojax train")
        require_file(path / name, f"{name} of a run")
    config = from_json(Config, (path / "config.json").read_text(encoding="utf-8"))
    lines = sorted(read_metrics(path / "metrics.jsonl"), key=lambda line: line["step"])
    if not lines:
        raise UserError(f"{path} has logged no step yet", allowed="runs with lines in metrics.jsonl")
    evaluation = path / "evaluation.json"
    if not evaluation.is_file():
        return Run(config, lines, {})
    found = parse_json(evaluation.read_bytes(), str(evaluation))
    if not isinstance(found, dict) or not isinstance(found.get("metrics"), dict):
        raise UserError(f"{evaluation} has no metrics", allowed="what orthojax evaluate writes")
    step = Path(str(found.get("checkpoint", ""))).name
    newest = max(steps_in(path / "checkpoints"), default=0)
    return Run(config, lines, found["metrics"], int(step) if step.isdecimal() else None, newest)


def comparing_page(runs: Mapping[str, Run], notes: Sequence[str]) -> Report:
    """The page of two runs or more, by name."""
    pictures = []
    for metric, (name, caption, scale) in _CURVES.items():
        curves = {run: of.curve(metric) for run, of in runs.items()}
        curves = {run: curve for run, curve in curves.items() if curve[0]}
        if any(len(steps) > 1 for steps, _ in curves.values()):
            figure = drawing.lines(curves, x_label="step", y_label=caption.split(",")[0].rstrip("."), y_scale=scale)
            pictures.append(Picture(name, caption, figure))
    return Report(
        title=f"{len(runs)} runs compared",
        summary=[_sizes(runs), *_warnings(runs)],
        claims=[],
        tables=[_ends(runs), _differences(runs)],
        pictures=pictures,
        notes=notes,
        links=[],
    )


def _sizes(runs: Mapping[str, Run]) -> str:
    sizes = []
    for name, run in runs.items():
        steps = f"{run.lines[-1]['step']:,} of {run.config.train.steps:,} steps"
        sizes.append(f"{name}: {parameter_count(run.config.model):,} parameters, {steps}")
    return "; ".join(sizes) + "."


def _warnings(runs: Mapping[str, Run]) -> list[str]:
    """What makes numbers of these runs hard to compare."""
    first, *others = runs.values()
    found = []
    if any(_held_out(run) != _held_out(first) for run in others):
        found.append("Their data or evaluations differ: losses compare only where the held-out text is the same.")
    for name, run in runs.items():
        if run.evaluated is not None and run.evaluated < run.newest:
            found.append(
                f"{name} was evaluated at step {run.evaluated}, and its newest checkpoint is of step {run.newest}: "
                "orthojax evaluate --checkpoint=RUN measures that."
            )
    if missing := ", ".join(name for name, run in runs.items() if not run.evaluation):
        found.append(
            f"Not evaluated: {missing}. What was logged while training is of fewer sequences; orthojax evaluate "
            "--checkpoint=RUN measures the rest."
        )
    return found


def _held_out(run: Run) -> tuple[Any, Any]:
    """What decides the held-out text; the seed orders the batches of training only."""
    return dataclasses.replace(run.config.data, seed=0), run.config.eval


def _ends(runs: Mapping[str, Run]) -> Table:
    ends = {name: run.ended() for name, run in runs.items()}
    rows = []
    for metric in _ENDS:
        if not any(metric in end for end in ends.values()):
            continue
        known = {name: compared_with(end, runs[name].config) for name, end in ends.items() if metric in end}
        by_run = {name: of.get(metric, "") for name, of in known.items() if not metric.startswith("perplexity_")}
        same = len(set(by_run.values())) <= 1
        chance = next(iter(by_run.values()), "") if same else "; ".join(f"{run}: {by_run[run]}" for run in by_run)
        label = _OWN_LABELS.get(metric) or LABELS.get(metric, metric)
        rows.append([label, *(number(end[metric]) if metric in end else "-" for end in ends.values()), chance])
    return Table("How they ended", ["", *runs, "compare with"], rows)


def _differences(runs: Mapping[str, Run]) -> Table:
    fields = {name: flatten(run.config) for name, run in runs.items()}
    first = next(iter(fields.values()))
    differing = [path for path in first if any(of[path] != first[path] for of in fields.values())]
    rows = [[path, *(_shown(of[path]) for of in fields.values())] for path in differing]
    return Table("Fields of the config that differ", ["", *runs], rows or [["none", *["" for _ in runs]]])


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
