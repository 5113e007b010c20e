"""The devices of a run as a named mesh, and how rows of tokens reach them."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orthojax.config import Config
from orthojax.errors import UserError

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # how the first axis of a batch is split


def make_mesh(config: Config) -> Mesh | None:
    """The mesh of a run, of Auto axes; None for one device, which needs none.

    Raises:
      UserError: For fewer devices than `config.mesh` wants, a batch that does not divide over it, or several processes
        of which it would leave devices out.
    """
    count = jax.device_count()
    sizes = config.mesh_sizes(count)
    size = math.prod(sizes)
    if jax.process_count() > 1 and size < count:
        raise UserError(
            f"mesh data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]} uses {size} of the {count} devices of "
            f"{jax.process_count()} processes",
            allowed="all of them, where there are several processes",
            hint="--config.mesh.data=-1",
        )
    if size == 1:
        return None
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:size])


def about_mesh(config: Config) -> list[str]:
    """Lines for the user, where the mesh wastes devices: some are left out, or those of `tensor` do the same work.

    Raises:
      UserError: As `make_mesh`.
    """
    count, mesh, model, lines = jax.device_count(), make_mesh(config), config.model, []
    used, tensor = (1, 1) if mesh is None else (mesh.size, mesh.shape["tensor"])
    if used < count:
        lines.append(f"uses {used} of {count} devices; --config.mesh.data=-1 takes all")
    sizes = {"key-value heads": model.kv_heads, "MLP width": model.d_mlp, "vocabulary": model.vocab_size}
    if whole := [f"{name} {size:,}" for name, size in sizes.items() if size % tensor]:
        lines.append(f"mesh.tensor={tensor} does not divide, and leaves whole: {', '.join(whole)}")
    return lines


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh over which the arrays of a tree lie; None for one device, or arrays of the host."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh = leaf.sharding.mesh
            return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None
    return None


def in_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Around jitted calls: what is traced meanwhile sees the mesh, as the attention kernels want it."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def traced_in_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Inside a jitted function, where `in_mesh` is not allowed: the rest of it sees the mesh."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(tree: Any, spec: PartitionSpec) -> Any:
    """Splits arrays as `spec` says, over the mesh that is traced in; without one, nothing."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec), tree)


def place_rows(mesh: Mesh | None, count: int, read: Callable[[int, int], np.ndarray]) -> jax.Array:
    """Puts a batch on the devices; a process reads the rows of its own devices only.

    There is no communication, so that another thread may call it: what processes do together must be in one order.

    Args:
      mesh: From `make_mesh`; None for the default device.
      count: B, rows of the whole batch.
      read: (start, stop) -> rows [stop - start, ...] of the batch, the same in every process.

    Returns:
      [B, ...], split over `data` and `fsdp` where these divide B, else whole on every device.
    """
    if mesh is None:
        return jax.device_put(read(0, count))
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    sharding = NamedSharding(mesh, ROWS if count % shares == 0 else PartitionSpec())
    indices: Any = sharding.addressable_devices_indices_map((count,)).values()
    spans = [index[0].indices(count) for index in indices]
    # One reading: on usual meshes the rows of a process lie together.
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    rows = read(first, last)

    def shard(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(count)
        return rows[start - first : stop - first]

    return _put((count, *rows.shape[1:]), sharding, shard)


def place_tree(tree: Any, like: Any) -> Any:
    """Puts arrays where those of `like` are; every process has the whole of `tree`, and nothing is communicated."""

    def place(array: Any, where: jax.Array) -> jax.Array:
        if where.is_fully_addressable:
            return jax.device_put(array, where.sharding)
        whole = np.asarray(array)
        return _put(whole.shape, where.sharding, lambda index: whole[index])

    return jax.tree.map(place, tree, like)


def _put(shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Any], np.ndarray]) -> jax.Array:
    """Transfers what `read` gives for each device's index; asked for, though JAX's transfer guard does not see that."""
    with jax.transfer_guard_host_to_device("allow"):
        return jax.make_array_from_callback(shape, sharding, read)
