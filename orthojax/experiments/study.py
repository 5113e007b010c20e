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
from orthojax.experiments.costs import measure_costs
from orthojax.experiments.example import save_example
from orthojax.experiments.learning_rates import TRIAL_STEPS, best_learning_rate, try_learning_rates
from orthojax.fields import changed_fields, replace
from orthojax.model import flops_per_token
from orthojax.progress import Progress, tokenizing_progress
from orthojax.train import (
    DivergedError,
    Inputs,
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
      learning_rates: Where given, the one that does best in short trials replaces the config's.
    """

    name: str
    label: str
    config: Config
    learning_rates: tuple[float, ...] = ()

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
      cost_reference: Where given, the time of a training step of each variant is measured relative to this one.
    """

    name: str
    title: str
    scales: dict[str, Callable[[], tuple[Variant, ...]]]
    report: Callable[["Study"], Any]
    cost_reference: str | None = None

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

    def by_seed(self, variant: str, metric: str) -> dict[int, float]:
        """One metric of one variant, of every seed that finished."""
        rows = [row for row in self.results["rows"] if row["variant"] == variant]
        return {row["seed"]: row["metrics"][metric] for row in rows if metric in row["metrics"]}

    def values(self, variant: str, metric: str) -> list[float]:
        """The values of `by_seed`."""
        return list(self.by_seed(variant, metric).values())

    def pairs(self, variant: str, reference: str, metric: str) -> dict[int, tuple[float, float]]:
        """One metric of two variants, of every seed that both finished."""
        a, b = self.by_seed(variant, metric), self.by_seed(reference, metric)
        return {seed: (a[seed], b[seed]) for seed in a if seed in b}

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
    costs = {}
    with Progress(sum(_cost(variant.config) + _trial_cost(variant) for variant, _ in runs)) as progress:
        for variant, seed in runs:
            rows.append(_finish_run(variant, seed, run_dir(workdir, variant.name, seed), cache_dir, progress))
        if experiment.cost_reference:
            configs = {variant.name: variant.config for variant in variants}
            measured = measure_costs(configs, experiment.cost_reference, workdir / "costs.json", progress.say)
            costs = {"costs": measured}
    results = {
        "experiment": experiment.name,
        "scale": scale,
        "provenance": _provenance(seeds, rows),
        "rows": [{name: value for name, value in row.items() if name != "data"} for row in rows],
    } | costs
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


def _step_cost(config: Config) -> float:
    return (_cost(config) - _evaluation_cost(config)) / config.train.steps


def _trial_cost(variant: Variant) -> float:
    return len(variant.learning_rates) * TRIAL_STEPS * _step_cost(variant.config)


def _finish_run(variant: Variant, seed: int, folder: Path, cache_dir: Path, progress: Progress) -> dict[str, Any]:
    """The row of one run, training and evaluating only what is missing."""
    config, label = variant.with_seed(seed), f"{variant.label}, seed {seed}"
    if not variant.learning_rates:
        check_workdir(folder, config)
    inputs = open_inputs(config, cache_dir, progress=tokenizing_progress())
    row: dict[str, Any] = {"variant": variant.name, "seed": seed}
    if variant.learning_rates:
        row["learning_rates"] = _try_learning_rates(variant, config, folder / "learning_rates", inputs, progress)
        config = replace(config, {"optim.learning_rate": best_learning_rate(row["learning_rates"])})
        check_workdir(folder, config)
    row["overrides"] = changed_fields(Config(), config)
    done = folder / "row.json"
    if done.exists():
        require_same_data(find_checkpoint(folder), inputs.provenance)
        progress.skip(_cost(config))
        return row | json.loads(done.read_text(encoding="utf-8"))
    progress.say(f"{label}: {describe_data(inputs.provenance)}")
    finished = _train_and_evaluate(config, label, inputs, folder, progress) | {"data": inputs.provenance}
    if "failed" not in finished:
        write_text(done, json.dumps(finished, indent=2) + "\n")
    return row | finished


def _try_learning_rates(
    variant: Variant, config: Config, folder: Path, inputs: Inputs, progress: Progress
) -> dict[str, float | None]:
    cost, advanced = _step_cost(config), 0.0

    def on_step(rate: str, step: int, loss: float) -> None:
        nonlocal advanced
        advanced += cost
        progress.advance(cost, f"{variant.label}: trying learning rate {rate}: step {step}/{TRIAL_STEPS} {loss:.3f}")

    losses = try_learning_rates(config, variant.learning_rates, folder, inputs, on_step)
    progress.skip(max(_trial_cost(variant) - advanced, 0.0))  # what an earlier call did, or divergence spared
    return losses


def _train_and_evaluate(config: Config, label: str, inputs: Inputs, folder: Path, progress: Progress) -> dict[str, Any]:
    step_cost, stage_cost = _step_cost(config), _evaluation_cost(config) / evaluation_stages(config)

    def on_step(step: int, loss: float) -> None:
        progress.advance(step_cost, f"{label}: step {step}/{config.train.steps} loss {loss:.3f}")

    started = time.monotonic()
    try:
        train(config, inputs, folder, on_start=lambda step: progress.skip(step * step_cost), on_step=on_step)
    except DivergedError as error:
        progress.say(f"{label}: {error}")
        return {"metrics": {}, "failed": str(error)}
    params = read_params(find_checkpoint(folder))
    metrics = evaluate(
        config, params, inputs, on_progress=lambda part: progress.advance(stage_cost, f"{label}: evaluated {part}")
    )
    save_example(config, params, inputs, folder / "example.npz")
    progress.say(f"{label}: done in {time.monotonic() - started:.0f} s, loss {metrics['loss_nats']:.4f} nats")
    return {"metrics": metrics, "seconds": round(time.monotonic() - started, 1)}


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
