"""Times a step of OrthoAdam against optax.adamw, and Muon beside it: python benchmarks/optimizer.py.

One step of each on the parameters of GPT-2, new parameters included, with the size of its state.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from comparing import compare, parsed_arguments, show, tree_bytes

from orthojax import ModelConfig, Rotation, gpt2, orthoadam
from orthojax.commands.cli import keep_freed_memory
from orthojax.model import parameter_shapes

TINY = {"d_model": 16, "d_mlp": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 64, "max_length": 16}


def optimizers(d_model: int) -> dict[str, optax.GradientTransformation]:
    """Returns what is compared, with the same hyperparameters; the first is the reference."""
    settings: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.1}
    return {
        "optax.adamw": optax.adamw(**settings),
        "orthoadam, hadamard": orthoadam(**settings, rotation=Rotation("hadamard", axes=d_model)),
        "orthoadam, int8": orthoadam(**settings, **moments("int8"), rotation=Rotation(axes=d_model)),
        "orthoadam, int4": orthoadam(**settings, **moments("int4"), rotation=Rotation(axes=d_model)),
        "orthoadam, haar": orthoadam(**settings, rotation=Rotation("haar", axes=d_model)),
        "optax.contrib.muon": optax.contrib.muon(**settings),
    }


def moments(dtype: str) -> dict[str, Any]:
    """Returns the argument of both moments' dtypes."""
    return {"mu_dtype": dtype, "nu_dtype": dtype}


def stepper(optimizer: optax.GradientTransformation, params: Any, gradients: Any) -> tuple[Callable[[], Any], Any]:
    """Returns a function that takes one step at each call, and the state before the first; buffers are donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)
    state = jax.jit(optimizer.init)(params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def call() -> Any:
        nonlocal params, state
        params, state = step(params, state, gradients)
        return params

    return call, shapes


def models(tiny: bool) -> dict[str, ModelConfig]:
    """Returns the models whose parameters are updated, by name."""
    if tiny:
        return {"tiny": gpt2("tiny", **TINY)}
    if jax.default_backend() == "cpu":  # Muon and Haar matrices are slow there: two layers show the ratio
        return {"main job": gpt2("tiny", scan_layers=False), "130m": gpt2("130m", num_layers=2, vocab_size=8192)}
    return {"130m": gpt2("130m")}


def main() -> None:
    arguments, rows, key = parsed_arguments(__doc__ or ""), [], jax.random.key(0)
    keep_freed_memory()
    for of, model in models(arguments.tiny).items():
        shapes = parameter_shapes(model)
        params, gradients = (
            jax.tree.map(lambda leaf, scale=scale: scale * jax.random.normal(key, leaf.shape, leaf.dtype), shapes)
            for scale in (0.02, 1e-3)
        )
        steps, states = {}, {}
        for name, optimizer in optimizers(model.d_model).items():
            steps[name], states[name] = stepper(optimizer, params, gradients)
        reference = tree_bytes(states["optax.adamw"])
        about = {"model": of, "million_parameters": sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6}
        for name, measured in compare(steps, arguments.repeats).items():
            state = tree_bytes(states[name]) / reference
            rows.append(about | {"optimizer": name, **measured, "state_bytes_ratio": state})
    show("One optimizer step against optax.adamw: median ratio, quartiles", rows, arguments.json)


if __name__ == "__main__":
    main()
