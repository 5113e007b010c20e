"""OrthoAdam one layer after the other: the temporaries of a stacked parameter are those of one of its layers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orthojax.optim import layout
from orthojax.optim.basis import turn_constants
from orthojax.optim.plan import Kind, LeafPlan, Rotation, plan_leaf
from orthojax.optim.turn import turn_shard, turn_whole


def update_layer_by_layer(
    make_adam: Callable[..., optax.GradientTransformation],
    hyperparams: dict[str, Any],
    rotation: Rotation,
    updates: Any,
    basis: Any,
    state: optax.ScaleByAdamState,
) -> tuple[Any, optax.ScaleByAdamState]:
    """Rotates, scales by Adam and rotates back, with a loop over the layers of every stacked parameter.

    The loop overwrites gradient, mu and nu in place, one layer at a time, on a mesh those of each device. A parameter
    whose stacked axes are not its first ones takes the plain way.

    Args:
      make_adam: Makes an `optax.scale_by_adam` of `hyperparams`.
      hyperparams: b1, b2, eps, eps_root; numbers or arrays.
      rotation: Which basis.
      updates: Gradients; None and masked nodes are passed over.
      basis: From `init_basis`.
      state: Adam's state.

    Returns:
      (rescaled updates, new state): the same as of the plain way.
    """
    arrays = {name: value for name, value in hyperparams.items() if isinstance(value, jax.Array)}
    numbers = {name: value for name, value in hyperparams.items() if name not in arrays}
    step, given = functools.partial(_adam_step, functools.partial(make_adam, **numbers)), (arrays, state.count)
    counted: Any = make_adam(**hyperparams).update((), optax.ScaleByAdamState(state.count, (), ()))[1]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu), strict=True)
    done = []
    for (keys, gradient), (mu, nu) in zip(leaves, moments, strict=True):
        plan = plan_leaf(rotation, keys, gradient)
        if plan.turns and plan.stacked and plan.stacked == tuple(range(len(plan.stacked))):
            done.append(_loop(step, given, rotation, plan, (gradient, mu, nu), basis))
        else:
            turned = turn_whole(rotation, plan, gradient, basis)
            scaled, mu, nu = step(given, turned, mu, nu)
            done.append((turn_whole(rotation, plan, scaled, basis, transpose=True, like=gradient), mu, nu))
    new, mu, nu = (treedef.unflatten([triple[i] for triple in done]) for i in range(3))
    return new, optax.ScaleByAdamState(counted.count, mu, nu)


def _adam_step(make_adam: Any, given: tuple, gradient: Any, mu: Any, nu: Any) -> tuple:
    arrays, count = given
    scaled, new = make_adam(**arrays).update(gradient, optax.ScaleByAdamState(count, mu, nu))
    state: Any = new
    return scaled, state.mu, state.nu


def _loop(step: Any, given: tuple, rotation: Rotation, plan: LeafPlan, stacks: tuple, basis: Any) -> tuple:
    """As the plain way for one parameter whose first axes are stacked; stacks are gradient, mu and nu."""
    wanted = None if rotation.layout is None else rotation.layout(plan.path)
    arrays = tuple(jnp.asarray(x) for x in stacks)
    sharding = layout.split_sharding(plan.path, arrays[0], wanted)
    arrays = arrays if wanted is None else tuple(layout.place(x, wanted) for x in arrays)
    # What is traced goes in as an argument: a shard_map does not take it from around.
    constants = (*(turn_constants(rotation, plan, basis, transpose) for transpose in (False, True)), given)
    local = functools.partial(_loop_shard, step, rotation.kind, plan)
    if sharding is None:
        new, mu, nu = local(arrays, constants, [()] * arrays[0].ndim)
    else:
        new, mu, nu = layout.over_shards(local, arrays, constants, sharding)
    after = None if wanted is None else layout.known_sharding(stacks[0])
    return new if after is None else layout.place(new, after), mu, nu


def _loop_shard(step: Any, kind: Kind, plan: LeafPlan, stacks: tuple, constants: Any, names: layout.Names) -> tuple:
    """The loop over the layers that one device has, or over all of them."""
    k, shape, dtypes = len(plan.stacked), stacks[0].shape, [x.dtype for x in stacks]
    alone = plan._replace(
        stacked=(), stacked_shape=(), turns=tuple(t._replace(axes=tuple(a - k for a in t.axes)) for t in plan.turns)
    )
    *turns, given = constants
    mine = jax.tree.map(lambda c: jnp.asarray(layout.local_slice(c, plan.stacked, shape, names)), turns)
    mine = jax.tree.map(lambda c: c.reshape(-1, *c.shape[k:]), mine)

    def one_layer(layer: Any, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple:
        there, back = jax.tree.map(lambda c: c[layer], mine)
        turned = turn_shard(gradient, alone, kind, there, names[k:])
        scaled, mu, nu = step(given, turned, mu, nu)
        return turn_shard(scaled, alone, kind, back, names[k:], transpose=True), mu, nu

    stacks = tuple(x.reshape(-1, *shape[k:]) for x in stacks)
    out = [x.dtype for x in jax.eval_shape(one_layer, 0, *(x[0] for x in stacks))]
    # What is new overwrites what was there, in the wider of the two dtypes.
    stacks = tuple(x.astype(jnp.promote_types(x.dtype, dtype)) for x, dtype in zip(stacks, out, strict=True))
    layers = stacks[0].shape[0]

    def read(stacks: tuple, layer: Any) -> tuple:
        return tuple(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacks)

    def body(layer: jax.Array, carry: tuple) -> tuple:
        stacks, this = carry
        new = one_layer(layer, *(x.astype(dtype) for x, dtype in zip(this, dtypes, strict=True)))
        stacks = tuple(
            jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), layer, 0)
            for x, y in zip(stacks, new, strict=True)
        )
        # The next layer is read here, from what was just written: XLA would else fuse its reads into several uses,
        # some of them after the writing, and copy whole stacks to make that right.
        return stacks, read(stacks, jnp.minimum(layer + 1, layers - 1))

    stacks, _ = jax.lax.fori_loop(0, layers, body, (stacks, read(stacks, 0)))
    return tuple(x.reshape(shape).astype(dtype) for x, dtype in zip(stacks, out, strict=True))
