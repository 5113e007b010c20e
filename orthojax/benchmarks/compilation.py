"""Compile time of the whole training step with OrthoAdam against that with AdamW."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.benchmarks.program import Program, compile_program
from orthojax.benchmarks.suite import (
    TINY_MODEL,
    Column,
    Row,
    Suite,
    bytes_text,
    seconds_text,
    spread_metrics,
    spread_text,
)
from orthojax.config import Config, DataConfig, ModelConfig, OptimConfig
from orthojax.model import gpt2
from orthojax.train import Spread, init_state, interleaved_seconds, make_train_step, median_ratio, spread

_BATCH_SIZE, _SEQUENCE_LENGTH = 8, 256  # nothing runs: compile time hardly depends on them
_OPTIMIZERS = {
    "adamw": OptimConfig(optimizer="adam", weight_decay=0.1),
    "orthoadam": OptimConfig(optimizer="orthoadam", weight_decay=0.1),
}


def compile_train_step(model: ModelConfig, optim: OptimConfig) -> Program:
    """Compiles the training step of a model from shapes alone."""
    sequence_length = min(_SEQUENCE_LENGTH, model.max_length)
    config = Config(model=model, optim=optim, data=DataConfig(sequence_length=sequence_length))
    state = jax.eval_shape(lambda: init_state(config))
    tokens = jax.ShapeDtypeStruct((_BATCH_SIZE, sequence_length + 1), jnp.int32)
    return compile_program(make_train_step(config), state, tokens)


def measure_model(case: str, model: ModelConfig, repeats: int) -> Row:
    """Compiles the steps with AdamW and with OrthoAdam in turn.

    Args:
      case: A name for the model.
      model: What is trained.
      repeats: Compilations of each.
    """
    found: dict[str, list[Program]] = {name: [] for name in _OPTIMIZERS}

    def compiler(name: str) -> Callable[[], None]:
        # Without the executable, which would stay in memory.
        return lambda: found[name].append(compile_train_step(model, _OPTIMIZERS[name])._replace(run=None))

    # For the order: the seconds that count leave out what comes before lowering.
    interleaved_seconds({name: compiler(name) for name in _OPTIMIZERS}, repeats, warmup=0)
    ours, adamw = found["orthoadam"], found["adamw"]
    metrics: dict[str, Any] = {
        **spread_metrics("compile_seconds_ratio", _ratio(ours, adamw, lambda p: p.lower_seconds + p.compile_seconds)),
        **spread_metrics("compile_cpu_seconds_ratio", _ratio(ours, adamw, lambda p: p.cpu_seconds)),
    }
    for prefix, programs in (("", ours), ("adamw_", adamw)):
        for name in ("lower_seconds", "compile_seconds", "cpu_seconds"):
            metrics[prefix + name] = spread([getattr(program, name) for program in programs]).median
        metrics |= {prefix + name: count for name, count in programs[0].memory.items()}
    return Row(case, "orthoadam", metrics | {"repetitions": repeats})


def _ratio(ours: list[Program], theirs: list[Program], seconds: Callable[[Program], float]) -> Spread:
    return median_ratio([seconds(program) for program in ours], [seconds(program) for program in theirs])


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    if tiny:
        yield measure_model("gpt2 tiny unrolled", TINY_MODEL, repeats)
        return
    for optim in _OPTIMIZERS.values():  # what a process pays once, whatever it compiles
        compile_train_step(TINY_MODEL, optim)
    yield measure_model("gpt2 350m unrolled", gpt2("350m", scan_layers=False), repeats)


SUITE = Suite(
    name="compile",
    title="Lowering and compiling the training step with OrthoAdam, against AdamW: median ratio (quartiles)",
    measure=_measure,
    columns=(
        Column("compile time ratio", spread_text("compile_seconds_ratio")),
        Column("CPU time ratio", spread_text("compile_cpu_seconds_ratio")),
        Column("lowering", lambda m: seconds_text(m["lower_seconds"])),
        Column("of adamw", lambda m: seconds_text(m["adamw_lower_seconds"])),
        Column("compiling", lambda m: seconds_text(m["compile_seconds"])),
        Column("of adamw", lambda m: seconds_text(m["adamw_compile_seconds"])),
        Column("temporary", lambda m: bytes_text(m["temp_bytes"])),
        Column("of adamw", lambda m: bytes_text(m["adamw_temp_bytes"])),
    ),
    repeats=3,
)
