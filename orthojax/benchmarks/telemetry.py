"""The overhead of a training step: logging metrics, probing the model, and drawing the batches of Bigram-Backcopy."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.benchmarks.suite import Column, Row, Suite, spread_metrics
from orthojax.benchmarks.training import PLAIN, cases
from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig, replace
from orthojax.model import bigram_backcopy
from orthojax.timing import interleaved_seconds, median_ratio, spread
from orthojax.train import Inputs, init_state, make_train_step, open_inputs, require_task
from orthojax.train.metrics import MetricWriter, StepLogger
from orthojax.train.probe import Probe

_STEPS_AT_ONCE = 100


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    yield _cadence(repeats, tiny)
    for num_layers in (1,) if tiny else (1, 3):
        for details in (False, True):
            yield _listed_steps(num_layers, details, repeats, tiny)
    yield _generation(repeats, tiny)


def _cadence(repeats: int, tiny: bool) -> Row:
    """A language model at the default cadences: each part alone, so that none hides behind the device's work."""
    case = cases(jax.default_backend(), tiny)[0]
    config, tokens = case.config(PLAIN), case.tokens(case.batch_size)
    rows, step, norm = np.asarray(tokens), make_train_step(config), jax.jit(optax.tree.norm)
    probe = Probe(config, Inputs(lambda _: rows, rows, None, {}, None), None)
    state, metrics = step(init_state(config), tokens)
    params, numbers = jax.tree.map(jnp.copy, state.params), jax.device_get(metrics)
    steps = itertools.count(1)

    def train() -> Any:
        nonlocal state
        state, reported = step(state, tokens)
        return reported

    with tempfile.TemporaryDirectory() as folder, MetricWriter(Path(folder) / "metrics.jsonl", 0) as writer:
        logger = StepLogger(config, 0, writer.write)

        def record() -> None:  # metrics that are on the host already: waiting for the device costs it nothing
            for _ in range(_STEPS_AT_ONCE):
                logger.put(next(steps), numbers)

        functions: dict[str, Callable[[], Any]] = {
            "step": train,
            "probe": lambda: probe(config.train.probe_every_steps, params),
            "norms": lambda: (norm(params), norm(params)),  # of the parameters and of the update, at every step
            "record": record,
        }
        seconds = interleaved_seconds(functions, repeats)
    every = {"probe": config.train.probe_every_steps, "norms": 1, "record": _STEPS_AT_ONCE}
    each = {name: [one / steps for one in seconds[name]] for name, steps in every.items()}
    whole = [sum(parts) for parts in zip(*each.values(), strict=True)]
    metrics = {
        **spread_metrics("telemetry_ratio", median_ratio(whole, seconds["step"])),
        **spread_metrics("step_seconds", spread(seconds["step"])),
        **{f"{name}_seconds_per_step": spread(values).median for name, values in each.items()},
        "probe_every_steps": config.train.probe_every_steps,
        "log_every_steps": config.train.log_every_steps,
        "repetitions": repeats,
    }
    return Row(f"{case.name} {case.batch_size}x{case.sequence_length}", "telemetry", metrics)


# What the Bigram-Backcopy experiments record: 18 of 3,000 steps.
_STEPS, _PROBES = 3000, 18


def _task_config(num_layers: int, details: bool, tiny: bool) -> Config:
    width, length = (8, 16) if tiny else (64, 64)
    return Config(
        model=bigram_backcopy(num_layers, d_model=width, d_mlp=4 * width, max_length=length, vocab_size=105),
        optim=OptimConfig(optimizer="adam", learning_rate=3e-3, b2=0.99, weight_decay=1e-4),
        data=DataConfig(kind="bigram_backcopy", sequence_length=length),
        train=TrainConfig(steps=_STEPS, batch_size=16, probe_steps=(1,), probe_details=details, probe_sequences=64),
        eval=EvalConfig(sequences=64),
    )


def _listed_steps(num_layers: int, details: bool, repeats: int, tiny: bool) -> Row:
    """Probes on Bigram-Backcopy, spread over a whole run; the compilation of the first one is reported separately."""
    config = _task_config(num_layers, details, tiny)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        inputs = open_inputs(config, home / "cache")
        rows, step = jnp.asarray(inputs.batch(0)), make_train_step(config)
        probe = Probe(config, inputs, None, home / "probes")
        state = init_state(config)
        params = jax.tree.map(jnp.copy, state.params)

        def train() -> Any:
            nonlocal state
            state, reported = step(state, rows)
            return reported

        def look() -> Any:
            return probe(1, params)

        started = time.perf_counter()
        jax.block_until_ready(look())
        first = time.perf_counter() - started
        seconds = interleaved_seconds({"step": train, "probe": look}, repeats)
    once, each = spread(seconds["probe"]).median, [one * _PROBES / _STEPS for one in seconds["probe"]]
    metrics = {
        **spread_metrics("telemetry_ratio", median_ratio(each, seconds["step"])),
        **spread_metrics("step_seconds", spread(seconds["step"])),
        "probe_seconds_per_step": spread(each).median,
        "first_probe_seconds": first - once,
        "probes": _PROBES,
        "steps": _STEPS,
        "repetitions": repeats,
    }
    case = f"bigram_backcopy {num_layers} layer{'s' * (num_layers > 1)} 16x{rows.shape[1] - 1}"
    return Row(case, "probe_details" if details else "probe_steps", metrics)


def _generation(repeats: int, tiny: bool) -> Row:
    """Drawing a batch inside a compiled program, as the training step does, relative to the rest of that step."""
    config = replace(_task_config(1, False, tiny), {"train.batch_size": 4 if tiny else 64})
    B, T = config.train.batch_size, config.data.sequence_length
    (task, _), step, steps = require_task(config), make_train_step(config), itertools.count()
    state, rows = init_state(config), jnp.asarray(task.batch(0, B, T, 0))

    @jax.jit
    def draw(first: int) -> jax.Array:  # the sums, so that drawing is all
        return jax.lax.map(lambda number: jnp.sum(task.batch(first + number, B, T, 0)), jnp.arange(_STEPS_AT_ONCE))

    def train() -> Any:
        nonlocal state
        state, reported = step(state, rows)
        return reported

    seconds = interleaved_seconds({"step": train, "draw": lambda: draw(next(steps))}, repeats)
    each = [many / _STEPS_AT_ONCE for many in seconds["draw"]]
    metrics = {
        **spread_metrics("telemetry_ratio", median_ratio(each, seconds["step"])),
        **spread_metrics("step_seconds", spread(seconds["step"])),
        "draw_seconds_per_step": spread(each).median,
        "repetitions": repeats,
    }
    return Row(f"bigram_backcopy 1 layer {B}x{T}", "generation", metrics)


TELEMETRY = Suite(
    name="telemetry",
    title="Telemetry over a training step with softmax and AdamW (quartiles): at its default cadence, probes of 18 of "
    "3,000 steps, and the drawing of Bigram-Backcopy's sequences",
    measure=_measure,
    columns=(
        Column("telemetry / step", "telemetry_ratio"),
        Column("step", "step_seconds", "seconds"),
        Column("probe, a step", "probe_seconds_per_step", "seconds"),
        Column("norms", "norms_seconds_per_step", "seconds"),
        Column("lines, a step", "record_seconds_per_step", "seconds"),
        Column("drawing, a step", "draw_seconds_per_step", "seconds"),
        Column("first probe, once", "first_probe_seconds", "seconds"),
    ),
    repeats=15,
)
