"""Running an experiment: what is not done yet, resumable, into one results.json."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from orthojax.config import Config, replace
from orthojax.errors import UserError
from orthojax.experiments.costs import measure_costs
from orthojax.experiments.experiment import Case, Experiment, Run, Variant, run_name
from orthojax.experiments.places import Place
from orthojax.experiments.results import Results
from orthojax.experiments.runs import Row, Task, failed_row, finish
from orthojax.experiments.workers import run_all
from orthojax.files import finite, make_folder, parse_json, read_again, write_text
from orthojax.machine import environment
from orthojax.progress import Progress, tokenizing_progress
from orthojax.train import find_model, open_inputs, require_task

_LONGEST_NAME = 80  # of a model in a table


def given_model(name: str, path: Path) -> Variant:
    """An existing model as a variant that is measured and not trained.

    Args:
      name: Of its row.
      path: A run's workdir, its checkpoints folder or one step's folder; or a model that others trained, which is
        measured on the embedded text with its own tokenizer.

    Raises:
      UserError: For a name that cannot stand in tables and file names; where there is no checkpoint.
    """
    if not name.isprintable() or {"/", "$"} & set(name) or len(name) > _LONGEST_NAME:  # between $ matplotlib sets TeX
        allowed = f"a name of at most {_LONGEST_NAME} characters, without '/', '$' and control characters"
        raise UserError(f"--model={name!r}=...", allowed=allowed)
    checkpoint, config = find_model(path)
    return Variant(name, name, config, checkpoint=checkpoint)


def nothing() -> None:
    """Sets up nothing; a lambda could not travel to a worker."""


def run_experiment(
    experiment: Experiment,
    scale: str,
    seeds: Sequence[int],
    workdir: Path,
    *,
    runs_dir: Path = Path("runs/models"),
    cache_dir: Path = Path("runs/data"),
    models: Sequence[Variant] = (),
    where: Sequence[Place] = (Place(),),
    setup: Callable[[], object] = nothing,
) -> Results:
    """Trains, measures or computes what is not done yet and writes results.json.

    Args:
      experiment: What to run.
      scale: One of its scales.
      seeds: Of parameters, data order and everything random; the same for every variant.
      workdir: Folder of the results.
      runs_dir: Folder of trained runs, shared with other experiments; see `run_name`.
      cache_dir: Folder of tokenised corpora.
      models: Existing models to measure beside those that are trained; see `given_model`.
      where: Of the workers, from `places`.
      setup: Called once in every worker.

    Raises:
      UserError: For an unknown scale, models where the experiment takes none, or what `train` refuses.
      Interrupted: On SIGINT or SIGTERM, after the state of every run was saved.
    """
    trained = experiment.variants_at(scale)
    models = experiment.as_measured(models)
    variants = (*trained, *models)
    if models and not experiment.takes_models:
        raise UserError(f"experiment {experiment.name!r} measures no existing models", allowed="no --model")
    if clash := {v.name for v in models} & {v.name for v in trained}:
        raise UserError(f"--model {min(clash)!r} has the name of a variant", allowed="another name")
    if not variants and not experiment.compute:
        raise UserError(f"experiment {experiment.name!r} needs a model", allowed="--model=NAME=CHECKPOINT[,...]")
    make_folder(workdir, "workdir", files=("results.json", "costs.json", "report.md", "report.html", "training.html"))
    if experiment.compute:
        content = _computed(experiment, seeds, workdir)
    else:
        runs = [Run(v, seed, runs_dir / run_name(v, seed)) for seed in seeds for v in trained if experiment.trains]
        runs += [Run(v, v.config.train.seed, workdir / "models" / run_name(v, v.config.train.seed)) for v in models]
        content = _trained(experiment, trained, runs, seeds, workdir, cache_dir, where, setup)
    raw = {"experiment": experiment.name, "scale": scale, **content}
    write_text(workdir / "results.json", json.dumps(raw, indent=2, allow_nan=False) + "\n")
    return Results(experiment, scale, seeds, workdir, raw, variants)


def _computed(experiment: Experiment, seeds: Sequence[int], workdir: Path) -> dict[str, Any]:
    """Every seed of a computation; what an earlier call kept is read."""
    compute, settings = experiment.compute, experiment.settings
    assert compute is not None
    parts = compute if isinstance(compute, Mapping) else {"": compute}
    rows, seconds = [], 0.0
    with Progress(len(seeds) * len(parts)) as progress:
        for seed, (part, cases_of) in itertools.product(seeds, parts.items()):
            key = json.dumps([experiment.name, part, settings], sort_keys=True)
            name = "-".join(filter(None, (part, hashlib.sha256(key.encode()).hexdigest()[:8], f"seed{seed}")))
            path = workdir / "computed" / f"{name}.json"
            done = None if settings is None else read_again(path, "computed rows", _parse_computed, progress.say)
            if done is None:
                started = time.monotonic()
                with jax.enable_x64(True):
                    cases = [case._asdict() for case in cases_of(seed)]
                done = {"rows": cases, "seconds": time.monotonic() - started}
                if settings is not None:
                    path.parent.mkdir(exist_ok=True)
                    write_text(path, json.dumps(done, indent=2) + "\n")
            for row in done["rows"]:
                rows.append({"variant": row["variant"], "seed": seed} | row | {"metrics": finite(row["metrics"])})
            seconds += done["seconds"]
            progress.advance(1, f"{experiment.name}: {part and f'{part}, '}seed {seed}")
    of = {"seeds": list(seeds), "data": [], "wall_seconds": round(seconds, 1)}
    return {"provenance": environment() | of, "rows": rows}


def _parse_computed(content: bytes) -> dict[str, Any]:
    done = parse_json(content, "its content")
    rows = done.get("rows") if isinstance(done, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and set(row) == set(Case._fields) for row in rows):
        raise ValueError("it does not hold rows")
    if type(done.get("seconds")) not in (int, float):
        raise ValueError("it does not say how long that took")
    return done


def _trained(
    experiment: Experiment,
    trained: Sequence[Variant],
    runs: Sequence[Run],
    seeds: Sequence[int],
    workdir: Path,
    cache_dir: Path,
    where: Sequence[Place],
    setup: Callable[[], object],
) -> dict[str, Any]:
    tasks = [Task(run, experiment.measures, cache_dir) for run in runs]
    for config in {_data_of(run.measured_config): run.measured_config for run in runs}.values():
        if config.data.kind == "bigram_backcopy":
            require_task(config)  # its evaluation set would be drawn on a device, and those are for the workers
        else:
            open_inputs(config, cache_dir, progress=tokenizing_progress())  # tokenises once, before the workers start
    meshes = [(run.config.mesh.data, run.config.mesh.fsdp, run.config.mesh.tensor) for run in runs]
    if any(mesh != (1, 1, 1) for mesh in meshes):  # such a run wants all devices, and so one process
        where = [Place()]
    content: dict[str, Any] = {}
    with Progress(sum(task.cost for task in tasks)) as progress:

        def lost(task: Task, reason: str) -> Row:
            progress.say(f"{task.run.label}: {reason}")
            return failed_row(task.run, reason)

        rows = run_all(finish, tasks, where, progress, setup=setup, lost=lost) if tasks else []
        if experiment.cost_reference:
            configs = {variant.name: variant.config for variant in trained}
            measured = measure_costs(configs, experiment.cost_reference, workdir / "costs.json", progress.say)
            content = {"costs": measured}
    sources = {json.dumps(row["data"], sort_keys=True): row.pop("data") for row in rows if "data" in row}
    provenance = environment() | {
        "seeds": list(seeds),
        "data": list(sources.values()),
        # Summed over runs, of which several may run at once, in whichever call and experiment.
        "training_seconds": round(sum(row.get("seconds", 0.0) for row in rows), 1),
    }
    for row, run in zip(rows, runs, strict=True):
        row["run"] = os.path.relpath(run.folder, workdir)
    return {"provenance": provenance, "rows": rows, **content}


def _data_of(config: Config) -> object:
    return replace(config, {"data.seed": 0}).data, config.train.batch_size, config.eval
