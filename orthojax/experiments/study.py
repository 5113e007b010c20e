"""Running an experiment: every variant with every seed, resumable, into one results.json."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orthojax.config import Config
from orthojax.errors import UserError, nearest
from orthojax.experiments.example import save_example
from orthojax.fields import changed_fields, replace
from orthojax.model import flops_per_token
from orthojax.progress import Progress, tokenizing_progress
from orthojax.train import (
    DivergedError,
    check_workdir,
    environment,
    evaluate,
    evaluation_stages,
    find_checkpoint,
    make_folder,
    open_inputs,
    read_params,
    require_same_data,
    train,
    write_text,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One trained model of an experiment.

    Attributes:
      name: Of the row and the run folder.
      label: For people, in tables and legends.
      config: Its run; a seed replaces `train.seed` and `data.seed`.
    """

    name: str
    label: str
    config: Config

    def with_seed(self, seed: int) -> Config:
        """The config of one seed."""
        return replace(self.config, {"train.seed": seed, "data.seed": seed})


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure: which models are trained, and how the result is told.

    Attributes:
      name: As in --experiment.
      title: Of the report.
      scales: Scale name -> its variants.
      report: Makes the report from the finished study.
    """

    name: str
    title: str
    scales: dict[str, Callable[[], tuple[Variant, ...]]]
    report: Callable[["Study"], Any]

    def variants(self, scale: str) -> tuple[Variant, ...]:
        """The variants of one scale.

        Raises:
          UserError: Where the experiment does not have it.
        """
        if scale not in self.scales:
            raise UserError(
                f"experiment {self.name!r} has no scale {scale!r}",
                allowed=" | ".join(self.scales),
                hint=nearest(scale, self.scales),
            )
        return self.scales[scale]()


@dataclasses.dataclass(frozen=True)
class Study:
    """A finished experiment.

    Attributes:
      experiment: What was run.
      scale: At which scale.
      variants: Of that scale.
      seeds: With which seeds.
      workdir: Where.
      results: What results.json holds.
    """

    experiment: Experiment
    scale: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    workdir: Path
    results: dict[str, Any]

    def run_dir(self, variant: str, seed: int) -> Path:
        """The folder of one run."""
        return run_dir(self.workdir, variant, seed)

    def values(self, variant: str, metric: str) -> list[float]:
        """One metric of one variant, a value for each seed that finished."""
        rows = [row for row in self.results["rows"] if row["variant"] == variant]
        return [row["metrics"][metric] for row in rows if metric in row["metrics"]]

    def mean(self, variant: str, metric: str) -> float:
        """The mean of `values`; nan where no seed finished."""
        values = self.values(variant, metric)
        return float(np.mean(values)) if values else float("nan")

    def by_layer(self, variant: str, metric: str) -> np.ndarray:
        """One metric by layer, [seeds, layers]."""
        layers = []
        while values := self.values(variant, f"{metric}/layer_{len(layers)}"):
            layers.append(values)
        return np.array(layers).T

    def failures(self) -> list[str]:
        """One sentence for each run that did not finish."""
        rows = [row for row in self.results["rows"] if "failed" in row]
        return [f"{row['variant']}, seed {row['seed']}: {row['failed']}" for row in rows]


def run_dir(workdir: Path, variant: str, seed: int) -> Path:
    """The folder of one run of a study."""
    return workdir / "runs" / f"{variant}-seed{seed}"


def run_study(experiment: Experiment, scale: str, seeds: Sequence[int], workdir: Path, cache_dir: Path) -> Study:
    """Trains and evaluates what is not done yet and writes results.json.

    Args:
      experiment: What to run.
      scale: One of its scales.
      seeds: Seeds of parameters and data order; the same for every variant.
      workdir: The folder of the study; runs go to workdir/runs/VARIANT-seedN.
      cache_dir: Folder of tokenised corpora.

    Raises:
      UserError: For an unknown scale, or what `train` refuses.
    """
    variants = experiment.variants(scale)
    make_folder(workdir, "workdir")
    runs = [(variant, seed) for seed in seeds for variant in variants]
    rows = []
    with Progress(sum(_cost(variant.config) for variant, _ in runs)) as progress:
        for variant, seed in runs:
            rows.append(_finish_run(variant, seed, run_dir(workdir, variant.name, seed), cache_dir, progress))
    results = {
        "experiment": experiment.name,
        "scale": scale,
        "provenance": _provenance(seeds, rows),
        "rows": [{name: value for name, value in row.items() if name != "data"} for row in rows],
    }
    write_text(workdir / "results.json", json.dumps(results, indent=2) + "\n")
    return Study(experiment, scale, variants, tuple(seeds), workdir, results)


def _cost(config: Config) -> float:
    """Expected work of one run, in training FLOPs; only ratios matter."""
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length
    return flops * config.train.steps * config.train.batch_size + _evaluation_cost(config)


def _evaluation_cost(config: Config) -> float:
    # Forward only, so a third; that much again for compiling each stage at the small scales where it matters.
    flops = flops_per_token(config.model, config.data.sequence_length) * config.data.sequence_length / 3
    return 2 * flops * config.eval.sequences * evaluation_stages(config)


def _finish_run(variant: Variant, seed: int, folder: Path, cache_dir: Path, progress: Progress) -> dict[str, Any]:
    """The row of one run, training and evaluating only what is missing."""
    config, label = variant.with_seed(seed), f"{variant.label}, seed {seed}"
    row = {"variant": variant.name, "seed": seed, "overrides": changed_fields(Config(), config)}
    check_workdir(folder, config)
    inputs = open_inputs(config, cache_dir, progress=tokenizing_progress())
    done = folder / "row.json"
    if done.exists():
        require_same_data(find_checkpoint(folder), inputs.provenance)
        progress.skip(_cost(config))
        return row | json.loads(done.read_text(encoding="utf-8"))
    progress.say(f"{label}: {describe_data(inputs.provenance)}")
    evaluation_cost = _evaluation_cost(config)
    step_cost = (_cost(config) - evaluation_cost) / config.train.steps

    def on_step(step: int, loss: float) -> None:
        progress.advance(step_cost, f"{label}: step {step}/{config.train.steps} loss {loss:.3f}")

    started = time.monotonic()
    try:
        train(config, inputs, folder, on_start=lambda step: progress.skip(step * step_cost), on_step=on_step)
    except DivergedError as error:
        progress.say(f"{label}: {error}")
        return row | {"metrics": {}, "failed": str(error), "data": inputs.provenance}
    params = read_params(find_checkpoint(folder))
    stage_cost = evaluation_cost / evaluation_stages(config)
    metrics = evaluate(
        config, params, inputs, on_progress=lambda part: progress.advance(stage_cost, f"{label}: evaluated {part}")
    )
    save_example(config, params, inputs, folder / "example.npz")
    progress.say(f"{label}: done in {time.monotonic() - started:.0f} s, loss {metrics['loss_nats']:.4f} nats")
    finished = {"metrics": metrics, "seconds": round(time.monotonic() - started, 1), "data": inputs.provenance}
    write_text(done, json.dumps(finished, indent=2) + "\n")
    return row | finished


def describe_data(provenance: dict[str, Any]) -> str:
    """Where the tokens of a run come from, in one line."""
    if "file_count" not in provenance:
        return provenance["source"]
    return (
        f"{provenance['source']}: {provenance['file_count']} files, sha256 {provenance['source_sha256'][:12]}, "
        f"{provenance['train']['n_tokens']:,} training tokens, {provenance['tokenizer']}"
    )


def _provenance(seeds: Sequence[int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    sources = {row["data"]["source"]: row["data"] for row in rows}
    return environment() | {
        "seeds": list(seeds),
        "data": list(sources.values()),
        # A run that was stopped counts the call that finished it only.
        "wall_seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
    }
