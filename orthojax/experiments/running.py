"""Runs a study: trains and measures what is still missing, and writes results.json."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import jax

from orthojax import train
from orthojax.config import Config, changed_fields, replace
from orthojax.errors import Interrupted, NonFiniteError, UserError, nearest
from orthojax.experiments.costs import REPEATS, step_costs
from orthojax.experiments.measures import ALWAYS, ROUNDING, require_same_ids
from orthojax.experiments.stored import COMPUTED, NOT_NEGATIVE, check
from orthojax.experiments.study import Given, Study, StudyResults, results_of
from orthojax.files import finite, identity, kept, make_folder, read_with_digest, write_text, write_with_digest
from orthojax.machine import available_memory_bytes, environment

_SECONDS_BETWEEN_LINES = 10.0
_BYTES_OF_A_RUN = 2e9  # of host memory, for as many concurrent runs as there are cores


class Run(NamedTuple):
    """A variant with a seed, and the folder where it is trained and measured."""

    variant: str
    seed: int
    config: Config
    folder: Path
    given: Given | None = None

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


def run_name(config: Config, given: Given | None = None) -> str:
    """Returns the folder name of a run, which its config decides, so that studies share runs.

    For an existing model the path of its checkpoint also enters.
    """
    key = [changed_fields(Config(), config), str(given.checkpoint.absolute()) if given else ""]
    digest = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    model = config.model
    shape = f"{model.normalizer}-{config.optim.optimizer}-{model.num_layers}x{model.d_model}"
    return f"{shape}-{digest}-seed{config.train.seed}"


def run_study(
    study: Study,
    scale: str,
    seeds: Sequence[int],  # of parameters, data order and everything random; the same for every variant
    workdir: Path,  # of the results
    *,
    runs_dir: Path = Path("runs/models"),  # trained runs, shared by studies
    cache_dir: Path = Path("runs/data"),  # tokenised corpora
    given: Mapping[str, Given] | None = None,  # existing models to measure as well, by name
    jobs: int | None = 1,  # concurrent runs, each in its own process; None for as many as the machine has room for
    command: Sequence[str] = (),  # starts such a process; the run is added
    only: str | None = None,  # trains and measures only this variant, and writes no results.json
) -> StudyResults:
    """Trains, measures or computes what is not done yet and writes results.json; a second call resumes.

    Raises:
      UserError: For an unknown scale or variant, models if the study takes none, or what `train` refuses.
      Interrupted: On SIGINT or SIGTERM, after the state of every run was saved.
    """
    configs = study.runs_at(scale)
    if given and study.models is None:
        raise UserError(f"experiment {study.name!r} measures no existing models", allowed="no --model")
    models = study.models(given or {}) if study.models else {}
    if clash := models.keys() & configs.keys():
        raise UserError(f"--model {min(clash)!r} has the name of a variant", allowed="another name")
    if not configs and not models and not study.rows:
        raise UserError(f"experiment {study.name!r} needs a model", allowed="--model=NAME=CHECKPOINT[,...]")
    if only is not None and (only not in (trained := [*configs, *models]) or not study.trains):
        allowed = " | ".join(trained) if study.trains else "none of a study that trains nothing"
        raise UserError(f"experiment {study.name!r} has no run {only!r}", allowed=allowed, hint=nearest(only, trained))
    make_folder(workdir, "workdir", files=("results.json", "report.md", "report.html"))
    started = time.monotonic()
    if study.rows:
        rows = [row for seed in seeds for row in _computed(study, seed, workdir)]
        content = {"provenance": _provenance(seeds, [], time.monotonic() - started), "rows": rows}
    elif not study.trains:
        assert study.cost_reference is not None
        costs = step_costs(configs, study.cost_reference, workdir / "costs.json", repeats=5 * REPEATS)
        rows = [{"variant": name, "seed": 0, "overrides": changed_fields(Config(), configs[name]), "metrics": of}
                for name, of in costs.items()]  # fmt: skip
        content = {"provenance": _provenance((0,), [], time.monotonic() - started), "rows": rows}
    else:
        runs = _runs(configs, models, seeds, runs_dir, workdir)
        if only is not None:
            rows = [_finish(run, study, cache_dir) for run in runs if run.variant == only]
            raw = {"experiment": study.name, "scale": scale, "provenance": {"seeds": list(seeds)}, "rows": rows}
            return results_of(study, raw, workdir)
        content = _trained(study, configs, runs, seeds, workdir, cache_dir, jobs, command)
    raw = {"experiment": study.name, "scale": scale, **content}
    write_with_digest(workdir / "results.json", raw)
    return results_of(study, raw, workdir)


def _runs(
    configs: Mapping[str, Config], models: Mapping[str, Given], seeds: Sequence[int], runs_dir: Path, workdir: Path
) -> list[Run]:
    runs = []
    for seed, (name, config) in itertools.product(seeds, configs.items()):
        seeded = replace(config, {"train.seed": seed, "data.seed": seed})
        runs.append(Run(name, seed, seeded, runs_dir / run_name(seeded)))
    for name, of in models.items():
        seed = of.config.train.seed
        runs.append(Run(name, seed, of.config, workdir / "models" / run_name(of.config, of), of))
    return runs


def _computed(study: Study, seed: int, workdir: Path) -> list[dict[str, Any]]:
    assert study.rows is not None
    path = workdir / "computed" / f"seed{seed}.json"
    if not path.exists():
        print(f"{study.name}: seed {seed}", file=sys.stderr, flush=True)
        path.parent.mkdir(exist_ok=True)
        with jax.enable_x64(True):
            rows = [row._asdict() | {"overrides": dict(row.overrides), "metrics": finite(row.metrics)}
                    for row in study.rows(seed)]  # fmt: skip
        write_with_digest(path, {"rows": rows})
    computed = read_with_digest(path, "computed rows")
    check(computed, COMPUTED, str(path))
    return [{"variant": row["variant"], "seed": seed, **row} for row in computed["rows"]]


def _trained(
    study: Study,
    configs: Mapping[str, Config],
    runs: Sequence[Run],
    seeds: Sequence[int],
    workdir: Path,
    cache_dir: Path,
    jobs: int | None,
    command: Sequence[str],
) -> dict[str, Any]:
    say = _Ticker("text")
    data_of = lambda config: (replace(config, {"data.seed": 0}).data, config.train.batch_size, config.eval)  # noqa: E731
    for config in {data_of(run.config): run.config for run in runs}.values():
        if config.data.kind != "bigram_backcopy":  # whose evaluation rows are drawn on a device, by each process
            # Tokenises once, before several processes need it.
            train.open_inputs(
                config, cache_dir, progress=lambda what, done, total, *_: say(f"{what} {done / total:.0%}")
            )
    at_once = min(len(runs), jobs or default_jobs())
    if any((run.config.mesh.data, run.config.mesh.fsdp, run.config.mesh.tensor) != (1, 1, 1) for run in runs):
        at_once = 1  # such a run takes all devices
    shown = "training loss in nats a token; kurtosis of the first token's hidden states, which of a Gaussian is 3"
    print(f"{len(runs)} runs, {at_once} at once. Shown: {shown}", file=sys.stderr, flush=True)
    lost = _in_processes(runs, command, at_once) if at_once > 1 and command else {}
    rows = []
    for run in runs:
        failed = lost.get((run.variant, run.seed))
        row = _row(run) | {"failed": failed} if failed else _finish(run, study, cache_dir)
        rows.append(row | {"run": os.path.relpath(run.folder, workdir)})
    if study.cost_reference:
        costs = step_costs(configs, study.cost_reference, workdir / "costs.json")
        for row in rows:
            row["metrics"] |= costs.get(row["variant"], {})
    sources = {json.dumps(row["data"], sort_keys=True): row.pop("data") for row in rows if "data" in row}
    seconds = sum(row.pop("seconds", 0.0) for row in rows)
    return {"provenance": _provenance(seeds, list(sources.values()), seconds), "rows": rows}


def _provenance(seeds: Sequence[int], data: list[Any], seconds: float) -> dict[str, Any]:
    return environment() | {"seeds": list(seeds), "data": data, "wall_seconds": round(seconds, 1)}


def _row(run: Run) -> dict[str, Any]:
    row = {"variant": run.variant, "seed": run.seed, "overrides": changed_fields(Config(), run.config), "metrics": {}}
    return row | ({"given": True} if run.given else {})


def _finish(run: Run, study: Study, cache_dir: Path) -> dict[str, Any]:
    """Trains and measures what a run still lacks, and returns its row; with `failed` if it diverged."""
    make_folder(run.folder, "folder of a run")
    inputs = train.open_inputs(run.config, cache_dir)
    row = _row(run) | {"data": inputs.provenance}
    say = _Ticker(str(run))
    try:
        if run.given:
            checkpoint = run.given.checkpoint
            _require_same_given(run, checkpoint, inputs)
        else:
            checkpoint = _train(run, inputs, say)
        if (trained := run.folder / "trained.json").exists():
            note = read_with_digest(trained, "note on a training")
            check(note, {"seconds": NOT_NEGATIVE}, str(trained))
            row["seconds"] = note["seconds"]

        def loaded() -> Any:
            model = train.load(checkpoint)._replace(config=run.config)
            if run.given and run.given.other_data:
                require_same_ids(model, inputs, run.variant)
            return model

        for measure in (*ALWAYS, *([ROUNDING] if study.rounding else []), *study.measures):
            row["metrics"] |= measure.of(run.folder, loaded, inputs, lambda part: say(f"measured {part}"))
    except (NonFiniteError, jax.errors.JaxRuntimeError) as error:
        row["failed"] = (str(error) or type(error).__name__).splitlines()[0]
        say(row["failed"], now=True)
    return row


def _require_same_given(run: Run, checkpoint: Path, inputs: train.Inputs) -> None:
    """Notes which files and data an existing model is measured with; UserError if what is stored is of others."""
    texts = {"files": repr(identity(checkpoint)), "data": json.dumps(inputs.provenance, sort_keys=True)}
    now = {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
    before = kept(run.folder / "measured_of.json", "note on a model", lambda: now)
    if changed := [name for name in now if before.get(name) != now[name]]:
        problem = f"{run.folder} has numbers of {checkpoint} with other {' and '.join(changed)}"
        raise UserError(problem, allowed="the same, or a new --workdir; without the folder it is measured again")


class _Ticker:
    def __init__(self, name: str):
        self._name, self._started, self._last = name, time.monotonic(), -_SECONDS_BETWEEN_LINES

    def __call__(self, message: str, now: bool = False) -> None:
        passed = time.monotonic() - self._started
        if now or passed - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = passed
            print(f"{self._name}: {message} ({passed:.0f} s)", file=sys.stderr, flush=True)


def _train(run: Run, inputs: train.Inputs, say: _Ticker) -> Path:
    """Trains a run to its end, unless an earlier call did, and returns its last checkpoint."""
    diverged, steps = run.folder / "diverged.txt", run.config.train.steps
    train.check_workdir(run.folder, run.config)
    if diverged.exists():  # a deterministic run diverges again
        raise train.DivergedError(f"{diverged.read_text().strip()}\ndelete {diverged} to train it again")
    if not (run.folder / "trained.json").exists():
        started, kurtosis = time.monotonic(), ""  # at the last probe
        try:

            def on_line(line: dict[str, Any]) -> None:
                nonlocal kurtosis
                if "kurtosis_first" in line:
                    kurtosis = f", kurtosis {line['kurtosis_first']:.1f}"

            on_step = lambda step, loss: say(f"step {step:,} of {steps:,}, loss {loss:.2f}{kurtosis}")  # noqa: E731
            train.train(run.config, inputs, run.folder, on_step=on_step, on_line=on_line)
        except train.DivergedError as error:
            write_text(diverged, f"{error}\n")
            raise
        seconds = round(time.monotonic() - started, 1)
        write_with_digest(run.folder / "trained.json", environment() | {"seconds": seconds})
    checkpoint = train.find_checkpoint(run.folder)
    train.require_same_data(checkpoint, inputs.provenance)  # also of a run that an earlier call finished
    return checkpoint


def _in_processes(runs: Sequence[Run], command: Sequence[str], at_once: int) -> dict[tuple[str, int], str]:
    """Finishes runs in their own processes, `at_once` at a time; returns those that failed, with the reason."""
    waiting, working, lost = list(runs), {}, {}
    places = _places(at_once)
    with _forwarded_signals(working) as stopped:
        while (waiting and not stopped) or working:
            while waiting and not stopped and len(working) < at_once:
                run, place = waiting.pop(0), next(p for p in range(at_once) if p not in working)
                words = [*command, f"--seeds={run.seed}", f"--only={run.variant}", "--jobs=1"]
                variables, cores = places[place]
                process = subprocess.Popen(words, env=os.environ | variables, start_new_session=True)
                working[place] = run, process
                if cores:
                    with contextlib.suppress(ProcessLookupError):  # it has already ended
                        os.sched_setaffinity(process.pid, cores)
            for place, (run, process) in list(working.items()):
                if process.poll() is not None:
                    del working[place]
                    done = len(runs) - len(waiting) - len(working)
                    print(f"{done} of {len(runs)} runs done", file=sys.stderr, flush=True)
                    if process.returncode and not stopped:
                        lost[run.variant, run.seed] = f"its process ended with code {process.returncode}"
            time.sleep(0.1)
    if stopped:
        raise Interrupted(stopped[0])
    return lost


def _places(count: int) -> list[tuple[dict[str, str], set[int]]]:
    if gpus := _gpus():
        together = -(-count // len(gpus))
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / together:.3f}"} if together > 1 else {}
        return [({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} | memory, set()) for i in range(count)]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [({}, set(cores[i::count])) for i in range(count)]


@contextlib.contextmanager
def _forwarded_signals(working: Mapping[int, tuple[Run, subprocess.Popen]]) -> Iterator[list[int]]:
    """Passes SIGINT and SIGTERM on to the processes, which save their state; yields those that arrived."""
    arrived: list[int] = []

    def forward(number: int, _: Any) -> None:
        arrived.append(number)
        for _, process in working.values():
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gpus() -> list[str]:
    """Returns the NVIDIA GPUs that JAX would use, without asking JAX, which would take their memory."""
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda"
    if "cuda" not in platforms and "gpu" not in platforms:
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu not in ("", "-1")]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def default_jobs() -> int:
    """Returns one run for each GPU, or for each CPU core as far as memory allows."""
    if gpus := _gpus():
        return len(gpus)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    free = available_memory_bytes()
    return max(1, min(cores, int(free // _BYTES_OF_A_RUN) if free else cores))
