"""The devices of a run as a named mesh, and the shardings of parameters, moments and batches over it."""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orthojax.config import Config, ModelConfig, OptimConfig
from orthojax.errors import UserError
from orthojax.model import LinearFunction, plain_product
from orthojax.optim import Rotation, by_layers, leaf_path, zero1
from orthojax.train.optimizer import make_rotation

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # how the first axis of a batch is split


def make_mesh(config: Config) -> Mesh | None:
    """Makes the mesh of a run, with Auto axes; returns None for one device, which needs none.

    Raises:
      UserError: For too few devices, a batch that does not divide over them, or devices of other processes left out.
    """
    count = jax.device_count()
    data, fsdp, tensor = sizes = config.mesh_sizes(count)
    size = math.prod(sizes)
    if (processes := jax.process_count()) > 1 and size < count:
        problem = f"mesh {data=}, {fsdp=}, {tensor=} uses {size} of the {count} devices of {processes} processes"
        raise UserError(problem, allowed="all of them, if there are several processes", hint="--config.mesh.data=-1")
    if size == 1:
        return None
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:size])


def in_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Shows the mesh to what is traced in jitted calls inside, as the attention kernels must see it."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def traced_in_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Shows the mesh as `in_mesh` does, inside a jitted function, which may not call `in_mesh`."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(tree: Any, spec: PartitionSpec) -> Any:
    """Constrains arrays to a spec over the mesh that is traced in; without one, and in a `shard_map`, does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def place(mesh: Mesh | None, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """Puts the rows of several arrays [B, ...] on the devices as `place_rows` does."""
    return tuple(place_rows(mesh, len(rows), lambda start, stop, rows=rows: rows[start:stop]) for rows in arrays)


def place_rows(mesh: Mesh | None, count: int, read: Callable[[int, int], np.ndarray]) -> jax.Array:
    """Puts a batch of B = `count` rows on the devices; a process reads only the rows of its own devices.

    Nothing is communicated, so a background thread may call it. `read` is (start, stop) -> rows [stop - start, ...].
    Returns [B, ...], split over `data` and `fsdp` if these divide B, else whole on every device.
    """
    if mesh is None:
        return jax.device_put(read(0, count))
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    sharding = NamedSharding(mesh, ROWS if count % shares == 0 else PartitionSpec())
    indices: Any = sharding.addressable_devices_indices_map((count,)).values()
    spans = [index[0].indices(count) for index in indices]
    # One read: on usual meshes the rows of a process are contiguous.
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    rows = read(first, last)

    def shard(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(count)
        return rows[start - first : stop - first]

    return _put((count, *rows.shape[1:]), sharding, shard)


def place_whole(mesh: Mesh | None, array: np.ndarray) -> jax.Array:
    """Puts an array that every process has on all devices; nothing is communicated."""
    if mesh is None:
        return jax.device_put(array)
    return _put(array.shape, NamedSharding(mesh, PartitionSpec()), lambda index: array[index])


def _put(shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Any], np.ndarray]) -> jax.Array:
    """Transfers what `read` returns for each device's index: explicitly, although JAX's transfer guard cannot know."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, read)


class Rule(NamedTuple):
    """The dimensions of a parameter that are split, counted from the end, so that scanned layers are like others."""

    pattern: str  # of the end of its path
    tensor: int | None = None  # over `tensor`
    units: int | None = None  # what `tensor` must divide, if that is not the dimension itself
    fsdp: tuple[int, ...] = ()  # over `fsdp`: the first dimension that it divides


def rules(model: ModelConfig) -> tuple[Rule, ...]:
    """Returns the rules of the transformer's parameters; the first match counts.

    `tensor` splits heads, MLP width and vocabulary; a head is never split, nor separated from its group. `fsdp` splits
    the axis that is not rotated by default, since every kernel is rotated along d_model, so that rotated moments need
    no communication: `out` of kernels that read the residual stream, `in` of those that write to it, n of tables [n,
    d_model] and of the head [d_model, n]; the other axis if that one does not divide. A dimension that does not divide
    stays whole, and so do vectors, except the biases of split outputs.
    """
    heads = model.kv_heads
    return (
        Rule(r"attention/(query|key|value|gate)/kernel", tensor=-1, units=heads, fsdp=(-1, -2)),
        Rule(r"attention/(query|key|value|gate)/bias", tensor=-1, units=heads),
        Rule(r"attention/(latent|query_latent|rotary_key)/kernel", fsdp=(-1, -2)),
        Rule(r"attention/output/kernel", tensor=-2, units=heads, fsdp=(-2, -1)),
        Rule(r"mlp/((experts|shared)/)?(input|gate)/kernel", tensor=-1, fsdp=(-1, -2)),
        Rule(r"mlp/((experts|shared)/)?(input|gate)/bias", tensor=-1),
        Rule(r"mlp/((experts|shared)/)?output/kernel", tensor=-2, fsdp=(-2, -1)),
        Rule(r"head_input/kernel", fsdp=(-1, -2)),
        Rule(r"embedding_output/kernel", fsdp=(-2, -1)),
        Rule(r"token_embedding/embedding", tensor=-2, fsdp=(-2, -1)),
        Rule(r"position_embedding/embedding", fsdp=(-2, -1)),
        Rule(r"head/kernel", tensor=-1, fsdp=(-1, -2)),
        Rule(r".*"),
    )


def _spec(rule: Rule, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    names: list[tuple[str, ...]] = [()] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    if tensor > 1 and rule.tensor is not None:
        units = shape[rule.tensor] if rule.units is None else rule.units
        if units % tensor == 0 and shape[rule.tensor] % tensor == 0:
            names[rule.tensor] = ("tensor",)
    if fsdp > 1:
        width = {dim: fsdp * math.prod(mesh.shape[name] for name in names[dim]) for dim in rule.fsdp}
        chosen = next((dim for dim in rule.fsdp if shape[dim] % width[dim] == 0), None)
        if chosen is not None:
            names[chosen] += ("fsdp",)
    while names and not names[-1]:  # as jit itself writes it
        names.pop()
    return PartitionSpec(*(over[0] if len(over) == 1 else over or None for over in names))


def parameter_shardings(model: ModelConfig, shapes: Any, mesh: Mesh) -> Any:
    """Returns a tree like the parameters of NamedSharding, by `rules`, given their shapes, stacked or unrolled."""
    table = rules(model)

    def of(keys: tuple[Any, ...], leaf: Any) -> NamedSharding:
        rule = next(rule for rule in table if re.search(rf"(^|/)({rule.pattern})$", leaf_path(keys)))
        return NamedSharding(mesh, _spec(rule, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(of, shapes)


def moment_shardings(optim: OptimConfig, shapes: Any, shardings: Any) -> Any:
    """Returns shardings of the optimizer's moments: those of the parameters, also split over `data` (ZeRO stage 1).

    With the matrices of `haar`, which are as large as kernels, moments and matrices are split by layers.
    """
    rotation = make_rotation(optim.rotation) if optim.has_rotation else Rotation("identity")
    if jax.tree.leaves(shardings)[0].mesh.shape["data"] > 1:
        shardings = zero1(rotation, shapes, shardings)
    return by_layers(rotation, shapes, shardings) if rotation.kind == "haar" else shardings


def on_rows(function: LinearFunction) -> LinearFunction:
    """Returns a linear function with argument and result split by rows: kernels travel and activations stay.

    Without this, the compiler may gather activations, which are larger, instead of an `fsdp` part of a kernel.
    """

    @plain_product
    def linear_on_rows(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        rows = PartitionSpec(*ROWS, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
        return constrain(function(constrain(x, rows), kernel, bias, path), rows)

    return linear_on_rows
