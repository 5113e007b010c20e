"""The step of OrthoAdam against that of `optax.adamw`: time, state, temporary memory, compilation."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.benchmarks.optimizer_cases import Case, cases
from orthojax.benchmarks.program import Program, compile_program, free_bytes, tree_bytes
from orthojax.benchmarks.suite import Column, Row, Suite, bytes_text, seconds_text, spread_metrics, spread_text
from orthojax.config import RotationConfig
from orthojax.fields import replace
from orthojax.optim import orthoadam
from orthojax.train import interleaved_seconds, make_rotation, median_ratio, spread

# Of both optimizers; the values do not matter for the time, but that weight decay is there does.
_LEARNING_RATE, _WEIGHT_DECAY = 1e-3, 0.1
_SHORTEST_REPETITION_SECONDS = 0.02  # one call of a small kernel is too short for the clock and for the scheduler
_LONGEST_ROW_SECONDS, _FEWEST_REPETITIONS = 60.0, 3  # dense rotations of a whole model on a CPU are slow


def _random(shapes: Any, scale: float) -> Any:
    generator = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(generator.standard_normal(leaf.shape, np.float32) * np.float32(scale))

    return jax.tree.map(draw, shapes)


def _state_like(shapes: Any) -> Any:
    """A state of the right shapes: zeros, and Gaussian matrices of unit scale where a haar basis is kept.

    A true haar matrix of 3,072 rows takes seconds to draw, and a product with it exactly as long as with this one.
    """

    def fill(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if any(str(getattr(key, "key", "")).startswith("basis_") for key in keys):
            return _random(leaf, leaf.shape[-1] ** -0.5)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def optimizer_step(optimizer: optax.GradientTransformation) -> Any:
    """The jitted (params, state, grads) -> (params, state), which takes over the memory of params and state."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


class _Inputs:
    """Parameters and gradients of a case, made when first used."""

    def __init__(self, shapes: Any):
        self.shapes = shapes

    @functools.cached_property
    def params(self) -> list[Any]:
        """A box of one tree, because every step takes over the tree and leaves another."""
        return [_random(self.shapes, 0.02)]

    @functools.cached_property
    def grads(self) -> Any:
        return _random(self.shapes, 1e-3)


class _Contender:
    """One optimizer, compiled for a case, with its state."""

    def __init__(self, optimizer: optax.GradientTransformation, shapes: Any):
        self.state_shapes = jax.eval_shape(optimizer.init, shapes)
        self.program: Program = compile_program(optimizer_step(optimizer), shapes, self.state_shapes, shapes)
        self.state: Any = None

    def caller(self, inputs: _Inputs, calls: int) -> Callable[[], Any]:
        """A function that takes `calls` steps."""
        self.state = _state_like(self.state_shapes) if self.state is None else self.state
        params, grads = inputs.params, inputs.grads

        def call() -> Any:
            for _ in range(calls):
                params[0], self.state = self.program.run(params[0], self.state, grads)
            return params[0]

        return call

    def metrics(self, prefix: str) -> dict[str, Any]:
        found = {"state_bytes": tree_bytes(self.state_shapes), **self.program.memory}
        found |= {"lower_seconds": self.program.lower_seconds, "compile_seconds": self.program.compile_seconds}
        return {f"{prefix}{name}": value for name, value in found.items()}


def _adamw() -> optax.GradientTransformation:
    return optax.adamw(_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)


def _orthoadam(name: str) -> optax.GradientTransformation:
    kind, axes, *by_layer = name.split()
    rotation = make_rotation(replace(RotationConfig(), {"kind": kind, "axes": axes}))
    return orthoadam(_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, rotation=rotation, layer_by_layer=bool(by_layer))


def _missing_memory(inputs: _Inputs, reference: _Contender, contender: _Contender) -> str:
    """Why a comparison does not fit, or ""."""
    needed = tree_bytes(contender.state_shapes)
    needed += max(each.program.memory["temp_bytes"] or 0 for each in (reference, contender))
    if reference.state is None:  # neither are parameters and gradients there
        needed += 2 * tree_bytes(inputs.shapes) + tree_bytes(reference.state_shapes)
    free = free_bytes()
    if free is None or needed <= free:
        return ""
    return f"it needs {bytes_text(needed)} of memory, {bytes_text(free)} are free"


def _seconds_of(call: Callable[[], Any]) -> float:
    return interleaved_seconds({"": call}, 1, warmup=1)[""][0]


def measure_case(case: Case, repeats: int) -> Iterator[Row]:
    """The rows of one case: every rotation against `optax.adamw`, and `optax.adamw` against itself.

    A repetition runs adamw, adamw again and the rotation, in turn. A call is one step, parameters applied; several
    calls make a repetition where one is short. Gradients are the same at every step.

    Args:
      case: What is measured.
      repeats: Repetitions; fewer, but at least three, where a row would take over a minute.
    """
    inputs, reference = _Inputs(case.shapes), _Contender(_adamw(), case.shapes)
    for name in case.rotations:
        yield _measure_rotation(case.name, name, inputs, reference, repeats)
    for name, why in case.left_out.items():
        yield Row(case.name, name, {}, why)


def _measure_rotation(case: str, name: str, inputs: _Inputs, reference: _Contender, repeats: int) -> Row:
    contender = _Contender(_orthoadam(name), inputs.shapes)
    if missing := _missing_memory(inputs, reference, contender):
        return Row(case, name, {}, missing)
    once = [_seconds_of(each.caller(inputs, 1)) for each in (reference, contender)]
    calls = max(1, math.ceil(_SHORTEST_REPETITION_SECONDS / once[0]))
    affordable = int(_LONGEST_ROW_SECONDS / (calls * (2 * once[0] + once[1])))
    repetitions = min(repeats, max(affordable, _FEWEST_REPETITIONS))
    adamw = reference.caller(inputs, calls)
    functions = {"adamw": adamw, "adamw again": adamw, "orthoadam": contender.caller(inputs, calls)}
    seconds = {
        which: [repetition / calls for repetition in found]
        for which, found in interleaved_seconds(functions, repetitions, warmup=0).items()
    }
    return Row(case, name, _metrics(reference, contender, seconds, calls))


def _metrics(
    reference: _Contender, contender: _Contender, seconds: dict[str, list[float]], calls: int
) -> dict[str, Any]:
    sizes = reference.metrics("adamw_") | contender.metrics("")
    return {
        **spread_metrics("step_seconds_ratio", median_ratio(seconds["orthoadam"], seconds["adamw"])),
        **spread_metrics("control_ratio", median_ratio(seconds["adamw again"], seconds["adamw"])),
        **spread_metrics("step_seconds", spread(seconds["orthoadam"])),
        **spread_metrics("adamw_step_seconds", spread(seconds["adamw"])),
        "repetitions": len(seconds["adamw"]),
        "steps_per_repetition": calls,
        "state_bytes_ratio": sizes["state_bytes"] / sizes["adamw_state_bytes"],
        **sizes,
    }


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    for case in cases(tiny):
        yield from measure_case(case, repeats)


SUITE = Suite(
    name="optimizer",
    title="One step of OrthoAdam, parameters applied, against optax.adamw: median ratio (quartiles)",
    measure=_measure,
    columns=(
        Column("step time ratio", spread_text("step_seconds_ratio")),
        Column("adamw to itself", spread_text("control_ratio")),
        Column("step", lambda m: seconds_text(m["step_seconds"])),
        Column("adamw", lambda m: seconds_text(m["adamw_step_seconds"])),
        Column("state ratio", lambda m: f"{m['state_bytes_ratio']:.4g}"),
        Column("temporary", lambda m: bytes_text(m["temp_bytes"])),
        Column("of adamw", lambda m: bytes_text(m["adamw_temp_bytes"])),
        Column("compilation", lambda m: seconds_text(m["lower_seconds"] + m["compile_seconds"])),
        Column("of adamw", lambda m: seconds_text(m["adamw_lower_seconds"] + m["adamw_compile_seconds"])),
    ),
    repeats=10,
)
