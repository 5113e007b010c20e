"""What a run will take, told before it begins: nothing is allocated and no data is read."""

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config
from orthojax.ops import positions_at_once
from orthojax.train.mesh import ROWS, in_mesh, make_mesh
from orthojax.train.plan import estimate
from orthojax.train.step import TrainState, make_train_step, state_shapes
from orthojax.train.utilization import device_kinds, peak_flops_per_second

_MFU = (0.3, 0.4, 0.5)
_OTHERS = (
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H200",
    "TPU v5p",
)  # whose hours are told where this device's peak is unknown


def bytes_on_one_device(tree: Any) -> int:
    """Bytes of the arrays of a tree, or of their shapes, that lie on each device; the largest part where parts differ.

    >>> bytes_on_one_device([jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((), "int32")])
    132
    """

    def of(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def dry_run(config: Config) -> Iterator[str]:
    """Lines that tell what a run will take; the last ones come when its step is compiled, which may take a minute.

    Args:
      config: The run, on the mesh that it asks for.

    Raises:
      UserError: Where the devices are too few for the mesh, or a batch does not divide over it.
    """
    mesh, plan, state = make_mesh(config), estimate(config), state_shapes(config)
    count, kind = 1 if mesh is None else mesh.size, jax.devices()[0].device_kind
    sizes = "" if mesh is None else f", mesh {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}"
    yield f"devices: {count} x {kind}{sizes}"
    yield f"parameters: {plan.parameters:,}"
    yield f"tokens: {plan.tokens:,} in {config.train.steps:,} steps of {plan.tokens_per_step:,}"
    yield f"FLOPs: {plan.flops:.3g}, {plan.flops_per_token:,} a token"
    yield from _hours(config, kind, count)
    yield from _shardings(state)
    tokens = jax.ShapeDtypeStruct(
        (config.train.batch_size, config.data.sequence_length + 1),
        jnp.int32,
        sharding=None if mesh is None else NamedSharding(mesh, ROWS),
    )
    started = time.monotonic()
    compiled = make_train_step(config).lower(state, tokens).compile()  # pyright: ignore[reportFunctionMemberAccess]
    seconds = time.monotonic() - started
    yield "memory of each device:"
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    parts = {
        "parameters": bytes_on_one_device(state.params),
        "optimizer state": bytes_on_one_device(state.opt_state),
        "tokens of a batch": bytes_on_one_device(tokens),
        "gradients, activations, logits": temporary,
    }
    for name, size in parts.items():
        yield f"  {name}: {_size(size)}"
    yield f"    of these gradients, at most: {_size(bytes_on_one_device(state.params))}"
    yield f"    of these logits, each time that they exist: {_size(_logits_bytes(config, mesh))}"
    if temporary is not None:
        yield f"  together: {_size(sum(size or 0 for size in parts.values()))}"
    if jax.default_backend() == "cpu":
        yield "  (as a CPU's program; fused attention of GPUs and TPUs does not keep the matrix of weights)"
    yield f"compiled for {jax.default_backend()} in {seconds:.0f} s; nothing was trained"


def _logits_bytes(config: Config, mesh: Mesh | None) -> int:
    """Of the float32 logits of as many positions as the loss takes at once, on one device."""
    rows, vocabulary = config.train.batch_size // config.train.accumulation_steps, config.model.vocab_size
    with in_mesh(mesh):
        positions = positions_at_once(rows, config.data.sequence_length, vocabulary, config.train.loss_chunk_positions)
    sizes = {} if mesh is None else dict(mesh.shape)
    split = sizes.get("data", 1) * sizes.get("fsdp", 1)
    tensor = sizes.get("tensor", 1)
    return -(-rows // split) * positions * (vocabulary // tensor if vocabulary % tensor == 0 else vocabulary) * 4


def _hours(config: Config, kind: str, count: int) -> Iterator[str]:
    plan = estimate(config)
    kinds = (kind,) if peak_flops_per_second(kind) else tuple(name for name in _OTHERS if name in device_kinds())
    yield f"hours on {count} device{'s' if count > 1 else ''} at an MFU of {', '.join(f'{mfu:.0%}' for mfu in _MFU)}:"
    for name in kinds:
        yield f"  {name}: {', '.join(f'{plan.hours(name, count, mfu=mfu):.3g}' for mfu in _MFU)}"


def _shardings(state: TrainState) -> Iterator[str]:
    yield "parameters by path: shape, how they and their moments are split, bytes on each device"
    where = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        moments = {
            _spec(other)
            for keys, other in where.items()
            if keys[-len(path) :] == tuple(path) and other.shape == leaf.shape
        }
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        told = " | ".join([_spec(leaf), *sorted(moments)]) if leaf.sharding is not None else "whole"
        yield f"  {name} {leaf.shape}: {told}, {_size(bytes_on_one_device(leaf))}"


def _spec(leaf: Any) -> str:
    return "whole" if leaf.sharding is None or not any(leaf.sharding.spec) else str(tuple(leaf.sharding.spec))


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return (
        f"{count / 1e9:.3g} GB"
        if count >= 1e9
        else f"{count / 1e6:.3g} MB"
        if count >= 1e6
        else f"{count / 1e3:.3g} kB"
    )
