"""What the telemetry of a training run costs, part by part, against the time of a step."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from orthojax.benchmarks.suite import Column, Row, Suite, seconds_text, spread_metrics, spread_text
from orthojax.benchmarks.train_step_cases import REFERENCE, Case, cases
from orthojax.train import Inputs, init_state, interleaved_seconds, make_train_step, median_ratio, spread
from orthojax.train.evaluation import Probe
from orthojax.train.metrics import MetricWriter
from orthojax.train.step_logger import StepLogger

_STEPS = 100  # at once


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    case = cases(jax.default_backend(), tiny)[0]
    with tempfile.TemporaryDirectory() as folder:
        yield _row(case, Path(folder), repeats)


def _row(case: Case, folder: Path, repeats: int) -> Row:
    """The default cadences of `TrainConfig`, each part alone, so that none hides behind the device's work."""
    config = case.config(REFERENCE)
    tokens, step = case.tokens(case.batch_size), make_train_step(config)
    rows = np.asarray(tokens)
    probe = Probe(config, Inputs(lambda _: rows, rows, None, {}, None), None)
    state, metrics = step(init_state(config), tokens)
    params = jax.tree.map(lambda leaf: leaf.copy(), state.params)
    norm, numbers = jax.jit(optax.tree.norm), jax.device_get(metrics)

    def train() -> Any:
        nonlocal state
        state, told = step(state, tokens)
        return told

    def look() -> Any:
        return probe(config.train.probe_every_steps, params)

    with MetricWriter(folder / "metrics.jsonl", 0) as writer:
        record = _recording(StepLogger(config, writer, lambda *_: None), numbers)
        functions: dict[str, Callable[[], Any]] = {
            "step": train,
            "probe": look,
            "norms": lambda: (norm(params), norm(params)),  # of the parameters and of the update, at every step
            "record": record,
        }
        seconds = interleaved_seconds(functions, repeats)
    each = {
        "probe": [one / config.train.probe_every_steps for one in seconds["probe"]],
        "norms": seconds["norms"],
        "record": [one / _STEPS for one in seconds["record"]],
    }
    whole = [sum(parts) for parts in zip(*each.values(), strict=True)]
    parts = {f"{name}_seconds_per_step": spread(values).median for name, values in each.items()}
    return Row(
        f"{case.name} {case.batch_size}x{case.sequence_length}",
        "telemetry",
        {
            **spread_metrics("telemetry_ratio", median_ratio(whole, seconds["step"])),
            **spread_metrics("step_seconds", spread(seconds["step"])),
            **parts,
            "probe_every_steps": config.train.probe_every_steps,
            "log_every_steps": config.train.log_every_steps,
            "repetitions": repeats,
        },
    )


def _recording(logger: StepLogger, numbers: Any) -> Callable[[], None]:
    """Handles the metrics of so many steps, which are on the host already: waiting for the device costs it nothing."""
    done = 0
    logger.start(0)

    def record() -> None:
        nonlocal done
        for step in range(done + 1, done + _STEPS + 1):
            logger.put(step, numbers)
        done += _STEPS

    return record


SUITE = Suite(
    name="telemetry",
    title="Telemetry at its default cadence: its time over that of a training step with softmax and AdamW (quartiles)",
    measure=_measure,
    columns=(
        Column("telemetry / step", spread_text("telemetry_ratio")),
        Column("step", lambda m: seconds_text(m["step_seconds"])),
        Column("probe, a step", lambda m: seconds_text(m["probe_seconds_per_step"])),
        Column("norms", lambda m: seconds_text(m["norms_seconds_per_step"])),
        Column("lines, a step", lambda m: seconds_text(m["record_seconds_per_step"])),
    ),
    repeats=15,
)
