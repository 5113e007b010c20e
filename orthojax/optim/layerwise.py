"""OrthoAdam one layer after the other: the temporaries of a stacked parameter are those of one of its layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orthojax.optim.plan import LeafPlan, Rotation, plan_leaf
from orthojax.optim.turn import turn_one_layer, turn_whole


def update_layer_by_layer(
    adam: optax.GradientTransformation, rotation: Rotation, updates: Any, basis: Any, state: optax.ScaleByAdamState
) -> tuple[Any, optax.ScaleByAdamState]:
    """Rotates, scales by Adam and rotates back, with a loop over the layers of every stacked parameter.

    The loop overwrites gradient, mu and nu in place, one layer at a time. A parameter takes the plain way where its
    stacked axes are not its first ones, or where the rotation has a layout for it.

    Args:
      adam: An `optax.scale_by_adam`.
      rotation: Which basis.
      updates: Gradients; None and masked nodes are passed over.
      basis: From `init_basis`.
      state: Adam's state.

    Returns:
      (rescaled updates, new state): the same as of the plain way.
    """
    counted: Any = adam.update((), optax.ScaleByAdamState(state.count, (), ()))[1]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu), strict=True)
    done = []
    for (keys, gradient), (mu, nu) in zip(leaves, moments, strict=True):
        plan = plan_leaf(rotation, keys, gradient)
        step = functools.partial(_adam_step, adam, state.count)
        loops = plan.turns and plan.stacked and plan.stacked == tuple(range(len(plan.stacked)))
        if loops and (rotation.layout is None or rotation.layout(plan.path) is None):
            done.append(_loop(step, rotation, plan, gradient, mu, nu, basis))
        else:
            turned = turn_whole(rotation, plan, gradient, basis)
            scaled, mu, nu = step(turned, mu, nu)
            done.append((turn_whole(rotation, plan, scaled, basis, transpose=True, like=gradient), mu, nu))
    new, mu, nu = (treedef.unflatten([triple[i] for triple in done]) for i in range(3))
    return new, optax.ScaleByAdamState(counted.count, mu, nu)


def _adam_step(adam: optax.GradientTransformation, count: Any, gradient: Any, mu: Any, nu: Any) -> tuple:
    scaled, new = adam.update(gradient, optax.ScaleByAdamState(count, mu, nu))
    state: Any = new
    return scaled, state.mu, state.nu


def _loop(step: Any, rotation: Rotation, plan: LeafPlan, gradient: jax.Array, mu: Any, nu: Any, basis: Any) -> tuple:
    """As the plain way for one parameter whose first axes are stacked."""
    inner = gradient.shape[len(plan.stacked) :]
    stacks = tuple(jnp.asarray(x).reshape(-1, *inner) for x in (gradient, mu, nu))

    def one_layer(layer: Any, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple:
        turned = turn_one_layer(rotation, plan, gradient, basis, layer)
        scaled, mu, nu = step(turned, mu, nu)
        return turn_one_layer(rotation, plan, scaled, basis, layer, transpose=True), mu, nu

    out = jax.eval_shape(one_layer, 0, *(x[0] for x in stacks))[0].dtype
    # The updates overwrite the gradients, in the wider of the two dtypes.
    stacks = (stacks[0].astype(jnp.promote_types(out, gradient.dtype)), *stacks[1:])
    layers = stacks[0].shape[0]

    def read(stacks: tuple, layer: Any) -> tuple:
        return tuple(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in stacks)

    def body(layer: jax.Array, carry: tuple) -> tuple:
        stacks, (turning, mu, nu) = carry
        new = one_layer(layer, turning.astype(gradient.dtype), mu, nu)
        stacks = tuple(jax.lax.dynamic_update_index_in_dim(x, y, layer, 0) for x, y in zip(stacks, new, strict=True))
        # The next layer is read here, from what was just written: XLA would else fuse its reads into several uses,
        # some of them after the writing, and copy whole stacks to make that right.
        return stacks, read(stacks, jnp.minimum(layer + 1, layers - 1))

    new, _ = jax.lax.fori_loop(0, layers, body, (stacks, read(stacks, 0)))
    return tuple(x.reshape(gradient.shape) for x in (new[0].astype(out), *new[1:]))
