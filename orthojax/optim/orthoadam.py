"""OrthoAdam: Adam whose moments live in a rotated basis."""

import functools
from typing import Any

import jax
import optax

from orthojax.optim.layerwise import update_layer_by_layer
from orthojax.optim.plan import DEFAULT_ROTATION, Rotation
from orthojax.optim.rotated_basis import RotatedState, in_rotated_basis


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
      layer_by_layer: Go through a stacked parameter with a loop over its layers (over each of its slices, where
        several axes are stacked); same state, same result, on a mesh too. See Memory and cost.

    Returns:
      A transformation with a `RotatedState` whose `inner` is Adam's state: arrays `mu` and `nu` of the parameters'
      shapes.

    Memory and cost:
      State: Adam's, to the byte, for `hadamard` and `dct`, whose signs are constants of the program; `haar` adds n**2
      values for every rotated axis of length n and every layer. Arithmetic: two products along each rotated axis for
      every step; for each element of the parameter that is 4 n FLOP for `haar`, and for `hadamard` too on accelerators
      up to n = 1,024, where memory is the limit; elsewhere 4 (a + b + ...), where n = a b ... (see
      `ops.orthogonal.fixed_transform`). A model costs about 6 FLOP for each parameter and token, so with a large batch
      neither shows. Temporaries: about two arrays of the size of a parameter (its rotated gradient and update), for one
      parameter at a time as far as the compiler orders it so; for a stacked parameter that is all layers, unless
      `layer_by_layer`. Take `hadamard` unless you compare with the paper, whose bases are `haar`.

      The seed of the rotation is static, a constant of the program: runs that are vmapped over seeds of the model share
      their bases.

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
        scaled, inner = update_layer_by_layer(make_adam, hyperparams, rotation, updates, state.basis, state.inner)
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

    For every parameter (and every layer of a stacked one) with its own fixed orthogonal matrix :math:`Q`,

    .. math::
      g'_t &= Q \nabla_\theta L(\theta_{t-1}) \\
      \mu_t &= \beta_1 \mu_{t-1} + (1 - \beta_1) g'_t \\
      \nu_t &= \beta_2 \nu_{t-1} + (1 - \beta_2) {g'_t}^2 \\
      s'_t &= \frac{\mu_t / (1 - \beta_1^t)}{\sqrt{\nu_t / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon} \\
      \theta_t &= \theta_{t-1} - \eta_t (Q^T s'_t + \lambda \theta_{t-1})

    The decay acts in the basis of the parameters, where it is the same. Hyperparameters of AdamW carry over. The state
    has the bytes of Adam's (with the default rotation), and a step costs two fast transforms of every rotated
    parameter more than AdamW's, whatever the batch; `scale_by_orthoadam` tells both in full.

    Args:
      learning_rate: A number or a schedule; what is good for Adam is a good start.
      b1: Decay of the first moment; larger averages over more steps.
      b2: Decay of the second moment; larger averages over more steps.
      eps: Added to the root of the second moment; where gradients are far below it the step shrinks, and with it the
        difference between bases.
      eps_root: Added inside the root; above 0 it makes the update differentiable at 0.
      mu_dtype: Dtype of the first moment; None means that of the parameter. bfloat16 saves a quarter of the state.
      weight_decay: Strength of the decay, multiplied by the learning rate; unless it is the constant 0 the update needs
        `params`. (The default of `optax.adamw` is 1e-4.)
      mask: Where to decay: a tree of bools, or a function from the parameters to one; None decays all.
      rotation: Which basis; `describe(rotation, params)` shows it. Kernels are taken for [in, out] and embeddings are
        found by name; name the axes of other layouts yourself (`Rotation.axes`).
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
      2.7
      2.0

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
