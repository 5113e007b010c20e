"""OrthoAdam: Adam whose moments live in a rotated basis."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from orthojax.ops.varying import varying_alike
from orthojax.optim import layout
from orthojax.optim.basis import basis_constants
from orthojax.optim.rotation import DEFAULT_ROTATION, Plan, Rotation, plan_leaf
from orthojax.optim.transform import RotatedState, in_rotated_basis, require_part, rotate_leaf, rotate_shard


def scale_by_orthoadam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    rotation: Rotation = DEFAULT_ROTATION,
    layer_by_layer: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by Adam in a rotated basis: OrthoAdam without its learning rate.

    For every parameter (and every layer of a stacked one) with its own orthogonal matrix :math:`Q`,

    .. math::
      g'_t &= Q g_t \\
      \mu_t &= \beta_1 \mu_{t-1} + (1 - \beta_1) g'_t \\
      \nu_t &= \beta_2 \nu_{t-1} + (1 - \beta_2) {g'_t}^2 \\
      s'_t &= \frac{\mu_t / (1 - \beta_1^t)}{\sqrt{\nu_t / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon} \\
      s_t &= Q^T s'_t

    Elementwise second moments give a preferred basis to what the network writes to its residual stream; in a basis
    that is different for every parameter, no channel of the stream is preferred, and no outlier channels grow.

    Args:
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root.
      eps_root: Added inside the root.
      mu_dtype: Dtype of the first moment; None means that of the parameter.
      rotation: Which basis.
      layer_by_layer: Loop over the layers of a stacked parameter (over each of its slices, where several axes are
        stacked); same state, same result, on a mesh too. Unrolled layers are not bound by it. See Memory and cost.

    Returns:
      A transformation with a `RotatedState` whose `inner` is Adam's state, arrays `mu` and `nu` of the parameters'
      shapes.

    Memory and cost:
      State: Adam's, to the byte, for `hadamard` and `dct`, whose signs are constants of the program; `haar` adds n**2
      values for every rotated axis of length n and every layer. Arithmetic, per step and element of a parameter: 4 n
      FLOP for `haar`, and for `hadamard` on accelerators up to n = 1,024; elsewhere 4 (a + b + ...), where n = a b ...
      (see `ops.orthogonal.fixed_transform`). A model costs about 6 FLOP per parameter and token, so with a large batch
      neither shows. Temporaries: the rotated gradient and update of a parameter, with all its layers unless
      `layer_by_layer`, times how many parameters XLA updates at a time: by default many on a CPU (of 24 equal kernels
      0.54 of their size together, and 0.06 with XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false).
      Prefer `hadamard` unless you compare with the paper, whose bases are `haar`.

      The rotation's seed is a constant of the program: runs that are vmapped over seeds of the model share bases.

    References:
      From Attention to Activation: Unravelling the Enigmas of Large Language Models, Algorithm 1,
      `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_, 2024

    .. warning::
      A gradient that is exactly 0 in the rotated basis becomes rounding noise, which Adam amplifies to a step of full
      size; gradients of real data are not of this kind, an all-ones test gradient under `hadamard` is.
    """
    hyperparams: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    for name, value in hyperparams.items():
        if isinstance(value, Rotation):
            raise TypeError(f"{name}={value!r}; allowed: a number; a Rotation is given as rotation=...")
    make_adam = functools.partial(optax.scale_by_adam, mu_dtype=mu_dtype)
    plain = in_rotated_basis(make_adam(**hyperparams), rotation)
    if not layer_by_layer:
        return plain

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        require_part(updates, state.inner.mu, "updates and moments differ")
        scaled, inner = _update_layer_by_layer(make_adam, hyperparams, rotation, updates, state)
        return scaled, RotatedState(state.basis, inner)

    return optax.GradientTransformationExtraArgs(plain.init, update_fn)


def orthoadam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    rotation: Rotation = DEFAULT_ROTATION,
    layer_by_layer: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""OrthoAdam: Adam in a rotated basis, with decoupled weight decay; takes the place of `optax.adamw`.

    With :math:`s_t` of `scale_by_orthoadam`, where every parameter (and every layer of a stacked one) has its own fixed
    orthogonal matrix,

    .. math::
      \theta_t = \theta_{t-1} - \eta_t (s_t + \lambda \theta_{t-1})

    Hyperparameters of AdamW carry over. With the default rotation the state has the size of Adam's, and a step costs
    two fast transforms of every rotated parameter more than AdamW's, whatever the batch; see `scale_by_orthoadam`.

    Args:
      learning_rate: A number or a schedule; what is good for Adam is a good start.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment; where gradients are far below it the step shrinks, and with it the
        difference between bases.
      eps_root: Added inside the root; above 0 it makes the update differentiable at 0.
      mu_dtype: Dtype of the first moment; None means that of the parameter. bfloat16 saves a quarter of the state.
      weight_decay: Strength of the decay, multiplied by the learning rate; unless it is the constant 0 the update needs
        `params`. (The default of `optax.adamw` is 1e-4.)
      mask: Where to decay: a tree of bools, or a function from the parameters to one; None decays all.
      rotation: Which basis; `describe(rotation, params)` shows it. Kernels are taken for [in, out] and embeddings are
        found by name (`Rotation.kernel_layout`, `Rotation.embeddings`). For long runs `Rotation(axes=d_model)`.
      layer_by_layer: Loop over the layers of stacked parameters, for less temporary memory; see `scale_by_orthoadam`.

    Returns:
      The optimizer.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss(params):
      ...     return jnp.sum((params["kernel"] - jnp.sin(jnp.arange(8.0)).reshape(2, 4)) ** 2)
      >>> optimizer = orthoadam(learning_rate=0.1)
      >>> params = {"kernel": jnp.zeros((2, 4))}
      >>> state = optimizer.init(params)
      >>> for step in range(3):
      ...     print(f"{loss(params):.1f}")
      ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      3.6
      2.8
      2.2

    References:
      From Attention to Activation: Unravelling the Enigmas of Large Language Models, Algorithm 1,
      `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_, 2024
    """
    # Decided by type first: inject_hyperparams passes a tracer, which must not be compared.
    undecayed = isinstance(weight_decay, int | float) and weight_decay == 0.0
    return optax.chain(
        scale_by_orthoadam(
            b1, b2, eps, eps_root=eps_root, mu_dtype=mu_dtype, rotation=rotation, layer_by_layer=layer_by_layer
        ),
        optax.identity() if undecayed else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


# Layer by layer: the temporaries of a stacked parameter are those of one of its layers.


def _update_layer_by_layer(
    make_adam: Any, hyperparams: dict[str, Any], rotation: Rotation, updates: Any, state: RotatedState
) -> tuple[Any, optax.ScaleByAdamState]:
    """As the plain update, with a loop over the layers of every stacked parameter.

    The loop overwrites gradient, mu and nu in place, one layer at a time, on a mesh those of each device. A parameter
    whose stacked axes are not its first ones is updated the plain way.
    """
    adam: Any = state.inner
    arrays = {name: value for name, value in hyperparams.items() if isinstance(value, jax.Array)}
    numbers = {name: value for name, value in hyperparams.items() if name not in arrays}
    step, given = functools.partial(_adam_step, functools.partial(make_adam, **numbers)), (arrays, adam.count)
    counted: Any = make_adam(**hyperparams).update((), optax.ScaleByAdamState(adam.count, (), ()))[1]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    moments = zip(treedef.flatten_up_to(adam.mu), treedef.flatten_up_to(adam.nu), strict=True)
    done = []
    for (keys, gradient), (mu, nu) in zip(leaves, moments, strict=True):
        plan = plan_leaf(rotation, keys, gradient)
        if plan.groups and plan.stacked and plan.stacked == tuple(range(len(plan.stacked))):
            done.append(_loop(step, given, rotation, plan, (gradient, mu, nu), state.basis))
        else:
            rotated = rotate_leaf(rotation, plan, gradient, state.basis)
            scaled, mu, nu = step(given, rotated, mu, nu)
            scaled = rotate_leaf(rotation, plan, scaled, state.basis, transpose=True, like=gradient)
            done.append((scaled, mu, nu))
    new, mu, nu = (treedef.unflatten([triple[i] for triple in done]) for i in range(3))
    return new, optax.ScaleByAdamState(counted.count, mu, nu)


def _adam_step(make_adam: Any, given: tuple, gradient: Any, mu: Any, nu: Any) -> tuple:
    arrays, count = given
    scaled, new = make_adam(**arrays).update(gradient, optax.ScaleByAdamState(count, mu, nu))
    state: Any = new
    return scaled, state.mu, state.nu


def _loop(step: Any, given: tuple, rotation: Rotation, plan: Plan, stacks: tuple, basis: Any) -> tuple:
    """As the plain way for one parameter whose first axes are stacked; stacks are gradient, mu and nu."""
    wanted = None if rotation.layout is None else rotation.layout(plan.path)
    arrays = tuple(jnp.asarray(x) for x in stacks)
    sharding = layout.split_sharding(plan.path, arrays[0], wanted)
    arrays = tuple(layout.place(x, wanted) for x in arrays)
    # Traced values are arguments: a shard_map cannot close over them.
    constants = (*(basis_constants(rotation, plan, basis, transpose) for transpose in (False, True)), given)
    local = functools.partial(_loop_shard, step, rotation.kind, plan)
    if sharding is None:
        new, mu, nu = local(arrays, constants, [()] * arrays[0].ndim)
    else:
        new, mu, nu = layout.over_shards(local, arrays, constants, sharding)
    return new if wanted is None else layout.place(new, layout.known_sharding(stacks[0])), mu, nu


def _loop_shard(step: Any, kind: str, plan: Plan, stacks: tuple, constants: Any, names: layout.Names) -> tuple:
    """The loop over the layers that one device has, or over all of them."""
    k, shape, dtypes = len(plan.stacked), stacks[0].shape, [x.dtype for x in stacks]
    alone = plan._replace(
        stacked=(), stacked_shape=(), groups=tuple(g._replace(axes=tuple(a - k for a in g.axes)) for g in plan.groups)
    )
    *bases, given = constants
    mine = jax.tree.map(lambda c: jnp.asarray(layout.local_slice(c, plan.stacked, shape, names)), bases)
    mine = jax.tree.map(lambda c: c.reshape(-1, *c.shape[k:]), mine)

    def one_layer(layer: Any, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple:
        there, back = jax.tree.map(lambda c: c[layer], mine)
        rotated = rotate_shard(gradient, alone, kind, there, names[k:])
        scaled, mu, nu = step(given, rotated, mu, nu)
        return rotate_shard(scaled, alone, kind, back, names[k:], transpose=True), mu, nu

    stacks = varying_alike(tuple(x.reshape(-1, *shape[k:]) for x in stacks))  # in a shard_map of the caller
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
        # some of them after the write, and copy whole stacks to make that right.
        return stacks, read(stacks, jnp.minimum(layer + 1, layers - 1))

    stacks, _ = jax.lax.fori_loop(0, layers, body, (stacks, read(stacks, 0)))
    return tuple(x.reshape(shape).astype(dtype) for x, dtype in zip(stacks, out, strict=True))
