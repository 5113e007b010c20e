"""Kernels of integers against kernels of float32: time of what is computed with them, and their memory.

Inputs are quantised within the measured time and multiplied as integers; where a setting leaves them float
(int4_zeropoint), kernels are dequantised within it. Calls are timed with their dispatch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import quant
from orthojax.benchmarks.program import Program, compile_program, tree_bytes
from orthojax.benchmarks.suite import (
    FAILURES,
    TINY_MODEL,
    Column,
    Row,
    Suite,
    TimeBudget,
    bytes_text,
    reason,
    seconds_text,
    spread_metrics,
    spread_text,
)
from orthojax.config import Config, DataConfig, ModelConfig
from orthojax.model import LinearFunction, Transformer, gpt2, linear
from orthojax.train import interleaved_seconds, median_ratio, parameter_shapes, spread

_SETTINGS = ("int8_moderate", "int8_fine_per_token", "w8a8_group64", "w4a8", "w4a8_group64", "w4a4", "int4_zeropoint")
_TINY_SETTINGS = ("int8_moderate", "w4a8", "int4_zeropoint")
_SHORTEST_REPETITION_SECONDS = 0.02
_LONGEST_ROW_SECONDS, _BUDGET_SECONDS = 20.0, 300.0


@dataclasses.dataclass(frozen=True)
class Case:
    """What is computed with float and with integer kernels.

    Attributes:
      name: For people.
      params: A tree of jax.ShapeDtypeStruct, float32.
      inputs: Its other argument.
      apply: (linear, params, inputs) -> outputs.
      settings: Names of `quant.setting_named`.
    """

    name: str
    params: Any
    inputs: jax.Array
    apply: Callable[[LinearFunction, Any, jax.Array], jax.Array]
    settings: tuple[str, ...]


def cases(tiny: bool) -> list[Case]:
    """The widest kernel [in, out] of GPT-2 130M on one token and on many, and a forward pass of the model.

    The head of the model is its token table, which stays float32: a third of its parameters and of its products.
    """
    model, settings, many = (TINY_MODEL, _TINY_SETTINGS, 4) if tiny else (gpt2("130m"), _SETTINGS, 512)
    kernel = {"kernel": jax.ShapeDtypeStruct((model.d_model, model.d_mlp), jnp.float32)}
    generator = np.random.default_rng(1)

    def layer(tokens: int) -> Case:
        x = jnp.asarray(generator.standard_normal((tokens, model.d_model), np.float32))
        name = f"{tokens} token{'s' if tokens > 1 else ''} x {model.d_model}x{model.d_mlp}"
        return Case(name, kernel, x, lambda linear, params, x: linear(x, params["kernel"], None, "mlp/input"), settings)

    return [layer(1), layer(many), _model_case(model, min(256, model.max_length), settings)]


def _model_case(model: ModelConfig, length: int, settings: tuple[str, ...]) -> Case:
    tokens = jnp.asarray(np.random.default_rng(2).integers(model.vocab_size, size=(1, length)), jnp.int32)
    model = dataclasses.replace(model, scan_layers=False)
    shapes = parameter_shapes(Config(model=model, data=DataConfig(sequence_length=length)))

    def apply(linear: LinearFunction, params: Any, tokens: jax.Array) -> jax.Array:
        return Transformer(model, linear=linear).apply({"params": params}, tokens)[0]  # pyright: ignore

    return Case(f"gpt2, {model.num_layers} layers of {model.d_model}, 1x{length}", shapes, tokens, apply, settings)


class _Contender:
    """A case with one kind of kernels, compiled."""

    def __init__(self, case: Case, function: LinearFunction, params: Any):
        self._params, self._inputs = params, case.inputs
        apply = jax.jit(lambda params, inputs: case.apply(function, params, inputs))
        self.program: Program = compile_program(apply, params, case.inputs)
        self.params_bytes = tree_bytes(params)

    def caller(self, calls: int) -> Callable[[], Any]:
        """A function that computes the case `calls` times."""
        return lambda: [self.program.run(self._params, self._inputs) for _ in range(calls)]


def measure_case(case: Case, repeats: int, budget: TimeBudget) -> Iterator[Row]:
    """The rows of one case: every setting against float32, and float32 against itself.

    Args:
      case: What is measured.
      repeats: Repetitions; fewer, but at least three, where a row would take long.
      budget: What is not begun in time is left out.
    """
    generator = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(generator.standard_normal(leaf.shape, np.float32) * np.float32(0.02))

    if not budget.seconds_left():
        yield from (Row(case.name, name, {}, budget.LEFT_OUT) for name in case.settings)
        return
    try:
        params = jax.tree.map(draw, case.params)
        reference = _Contender(case, linear, params)
    except FAILURES as error:
        yield from (Row(case.name, name, {}, f"float32: {reason(error)}") for name in case.settings)
        return
    for name in case.settings:
        if not budget.seconds_left():
            yield Row(case.name, name, {}, budget.LEFT_OUT)
            continue
        setting = quant.setting_named(name)
        try:
            integers = quant.integer_params(params, setting)
            contender = _Contender(case, quant.integer_linear(setting), integers)
            yield Row(case.name, name, _metrics(reference, contender, repeats, budget))
        except FAILURES as error:
            yield Row(case.name, name, {}, reason(error))


def _metrics(reference: _Contender, contender: _Contender, repeats: int, budget: TimeBudget) -> dict[str, Any]:
    once = [interleaved_seconds({"": each.caller(1)}, 1)[""][0] for each in (reference, contender)]
    calls = max(1, math.ceil(_SHORTEST_REPETITION_SECONDS / min(once)))
    repetitions = budget.repetitions(repeats, calls * (2 * once[0] + once[1]), _LONGEST_ROW_SECONDS)
    callers = {
        "float32": reference.caller(calls),
        "float32 again": reference.caller(calls),
        "integers": contender.caller(calls),
    }
    seconds = {
        name: [repetition / calls for repetition in found]
        for name, found in interleaved_seconds(callers, repetitions, warmup=0).items()
    }
    temp_bytes = contender.program.memory["temp_bytes"]
    return {
        **spread_metrics("seconds_ratio", median_ratio(seconds["integers"], seconds["float32"])),
        **spread_metrics("control_ratio", median_ratio(seconds["float32 again"], seconds["float32"])),
        **spread_metrics("seconds", spread(seconds["integers"])),
        **spread_metrics("float32_seconds", spread(seconds["float32"])),
        "repetitions": repetitions,
        "calls_per_repetition": calls,
        "params_bytes": contender.params_bytes,
        "float32_params_bytes": reference.params_bytes,
        "params_bytes_ratio": contender.params_bytes / reference.params_bytes,
        "temp_bytes": temp_bytes,
        "float32_temp_bytes": reference.program.memory["temp_bytes"],
        "compile_seconds": contender.program.lower_seconds + contender.program.compile_seconds,
    }


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    budget = TimeBudget(_BUDGET_SECONDS)
    for case in cases(tiny):
        yield from measure_case(case, repeats, budget)


SUITE = Suite(
    name="quantization",
    title="Kernels of integers against float32: median ratio (quartiles); the head of a model stays float32",
    measure=_measure,
    columns=(
        Column("time ratio", spread_text("seconds_ratio")),
        Column("float32 to itself", spread_text("control_ratio")),
        Column("call", lambda m: seconds_text(m["seconds"])),
        Column("float32", lambda m: seconds_text(m["float32_seconds"])),
        Column("parameters", lambda m: bytes_text(m["params_bytes"])),
        Column("of float32", lambda m: bytes_text(m["float32_params_bytes"])),
        Column("temporary", lambda m: bytes_text(m["temp_bytes"])),
        Column("of float32", lambda m: bytes_text(m["float32_temp_bytes"])),
    ),
    repeats=10,
)
