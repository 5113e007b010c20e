"""The step of OrthoAdam against that of `optax.adamw`: time, state, temporary memory, compilation."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orthojax.benchmarks.suite import (
    TINY_MODEL,
    Case,
    Column,
    Comparison,
    Contender,
    LeftOut,
    Row,
    Suite,
    TimeBudget,
    compile_program,
    free_bytes,
    random_like,
    require_memory,
    tree_bytes,
)
from orthojax.config import RotationConfig, replace
from orthojax.model import gpt2, parameter_shapes
from orthojax.optim import orthoadam
from orthojax.train import make_rotation

# Names are "KIND AXES", as in `RotationConfig`.
KERNEL_ROTATIONS = tuple(
    f"{kind} {axes}" for kind in ("hadamard", "dct", "haar") for axes in ("output", "input", "both")
)
_MODEL_ROTATIONS = (
    *(f"hadamard {axes}" for axes in ("output", "input", "both", "residual")),
    *(f"{kind} {axes}" for kind in ("dct", "haar") for axes in ("output", "residual")),
)


def cases(tiny: bool) -> Iterator[Case]:
    """Two kernels [in, out] of GPT-2 130M, and the whole of it unrolled and with stacked layers [layers, in, out]."""
    model = TINY_MODEL if tiny else gpt2("130m")
    on_kernels = ("hadamard output", "haar both") if tiny else KERNEL_ROTATIONS
    on_models = ("hadamard residual", "haar output") if tiny else _MODEL_ROTATIONS
    for columns in (model.d_model, model.d_mlp):
        shapes = {"kernel": jax.ShapeDtypeStruct((model.d_model, columns), jnp.float32)}
        yield from _cases(f"{model.d_model}x{columns}", shapes, on_kernels)
    left_out = [] if tiny else [name for name in KERNEL_ROTATIONS if name not in on_models]
    for name in ("unrolled", "stacked"):
        scanned = dataclasses.replace(model, scan_layers=name == "stacked")
        shapes = parameter_shapes(scanned)
        yield from _cases(f"gpt2 {'tiny' if tiny else '130m'} {name}", shapes, on_models, left_out)


def make_optimizer(name: str) -> optax.GradientTransformation:
    """AdamW as "adamw", or OrthoAdam with a rotation by its name, with the same hyperparameters."""
    learning_rate, weight_decay = 1e-3, 0.1
    if name == "adamw":
        return optax.adamw(learning_rate, weight_decay=weight_decay)
    kind, axes = name.split()
    rotation = make_rotation(replace(RotationConfig(seed=0), {"kind": kind, "axes": axes}))
    return orthoadam(learning_rate, weight_decay=weight_decay, rotation=rotation)


def optimizer_step(optimizer: optax.GradientTransformation) -> Any:
    """The jitted (params, state, grads) -> (params, state); params and state are donated."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def state_like(shapes: Any) -> Any:
    """A state of the right shapes: zeros, and Gaussian matrices of unit scale where a haar basis is kept.

    A true haar matrix of 3,072 rows takes seconds to draw, and a product with it exactly as long as with this one.
    """

    def fill(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if any(str(getattr(key, "key", "")).startswith("basis_") for key in keys):
            return random_like(leaf, leaf.shape[-1] ** -0.5)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def _cases(name: str, shapes: Any, rotations: Sequence[str], left_out: Sequence[str] = ()) -> Iterator[Case]:
    """Each rotation against `optax.adamw`; parameters, gradients and states are made when first used.

    A call is one step, parameters applied. Gradients are the same at every step.
    """
    params: list[Any] = []  # of one tree, because every step consumes the tree and leaves another
    grads = functools.cache(lambda: random_like(shapes, 1e-3))

    def contender(name: str) -> Contender:
        optimizer = make_optimizer(name)
        state_shapes = jax.eval_shape(optimizer.init, shapes)
        program = compile_program(optimizer_step(optimizer), shapes, state_shapes, shapes)
        state: Any = None

        def call(steps: int) -> Any:
            nonlocal state
            if state is None:
                state = state_like(state_shapes)
            params[:] = params or [random_like(shapes, 0.02)]
            for _ in range(steps):
                params[0], state = program.run(params[0], state, grads())
            return params[0]

        times = {"lower_seconds": program.lower_seconds, "compile_seconds": program.compile_seconds}
        return Contender(call, {"state_bytes": tree_bytes(state_shapes), **program.memory, **times})

    adamw = functools.cache(lambda: contender("adamw"))

    def rotated(name: str) -> Contender:
        if name in left_out:
            raise LeftOut("to keep the run short; the kernels show it")
        found = contender(name)
        needed = found.sizes["state_bytes"] + max(each.sizes["temp_bytes"] or 0 for each in (adamw(), found))
        if not params:  # neither are gradients there, nor the state of adamw
            needed += 2 * tree_bytes(shapes) + adamw().sizes["state_bytes"]
        require_memory(needed, free_bytes())
        return found

    for each in (*rotations, *left_out):  # one at a time: what a contender holds is freed before the next is made
        yield Case(name, {"adamw": adamw, each: functools.partial(rotated, each)})


def _measure(repeats: int, tiny: bool) -> Iterator[Row]:
    # Dense rotations of a whole model on a CPU are slow: a minute for each.
    comparison = Comparison(("state_bytes",), longest=60.0, per_step=True)
    for case in cases(tiny):
        yield from comparison.rows(case, repeats, TimeBudget(math.inf))


OPTIMIZER = Suite(
    name="optimizer",
    title="One step of OrthoAdam, parameters applied, against optax.adamw: median ratio (quartiles)",
    measure=_measure,
    columns=(
        Column("step time ratio", "step_seconds_ratio"),
        Column("adamw to itself", "control_ratio"),
        Column("step", "step_seconds", "seconds"),
        Column("adamw", "adamw_step_seconds", "seconds"),
        Column("state ratio", "state_bytes_ratio", "{:.4g}"),
        Column("temporary", "temp_bytes", "bytes"),
        Column("of adamw", "adamw_temp_bytes", "bytes"),
        Column("compilation", "lower_seconds+compile_seconds", "seconds"),
        Column("of adamw", "adamw_lower_seconds+adamw_compile_seconds", "seconds"),
    ),
    repeats=10,
)
