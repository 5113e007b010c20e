"""OrthoAdam, which is Adam with moments in a rotated basis, and its learning-rate schedule."""

import contextlib
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.ops.packing import packing_of
from orthojax.ops.statistics import real_array
from orthojax.optim.few_bits import scale_by_adam_of_few_bits
from orthojax.optim.rotation import DEFAULT_ROTATION, Rotation, describable, describe
from orthojax.optim.transform import in_rotated_basis


def scale_by_orthoadam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    rotation: Rotation = DEFAULT_ROTATION,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by Adam in a rotated basis: OrthoAdam without its learning rate.

    For every parameter (and every layer of a stacked one) with its own orthogonal matrix :math:`Q`,

    .. math::
      g'_t &= Q g_t \\
      \mu_t &= \beta_1 \mu_{t-1} + (1 - \beta_1) g'_t \\
      \nu_t &= \beta_2 \nu_{t-1} + (1 - \beta_2) {g'_t}^2 \\
      s'_t &= \frac{\mu_t / (1 - \beta_1^t)}{\sqrt{\nu_t / (1 - \beta_2^t) + \bar\varepsilon} + \varepsilon} \\
      s_t &= Q^T s'_t

    Elementwise second moments give a preferred basis to what the network writes to its residual stream; with a
    different basis for every parameter, no channel of the stream is preferred, and no outlier channels grow.

    Args:
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      eps_root: Added inside the root.
      mu_dtype: Dtype of the first moment; None means the parameter's. "int8" and "int4" keep codes and a float32 scale
        for each 256 or 64 values along the last axis: with both moments 0.25 and 0.14 of the bytes of float32. Arrays
        of fewer than 4,096 elements, or without such blocks, stay float.
      nu_dtype: Dtype of the second moment, in which the step is computed; None means the parameter's. Use float32 for
        bfloat16 parameters: b2 = 0.999 hardly moves a second moment of 8 bits. "int8" and "int4" keep its root, and
        compute in float32.
      rotation: The basis.

    Returns:
      A transformation with a `RotatedState` whose `inner` is Adam's state.

    Memory and cost:
      State: Adam's plus 8 bytes for `hadamard` and `dct`, whose signs are in the program; `haar` adds n**2 values for
      every rotated axis of length n and every layer. Arithmetic, per step and element of a parameter: 4 n FLOP for
      `haar`, and for `hadamard` on accelerators up to n = 1,024; elsewhere 4 (a + b + ...), where n = a b ... (see
      `ops.orthogonal.fixed_transform`). A model costs about 6 FLOP per parameter and token, so with a large batch
      neither shows. Temporaries: the rotated gradient and update of all parameters that XLA updates at a time: by
      default many on a CPU, few with XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false. Prefer
      `hadamard` unless you compare with the paper, whose bases are `haar`.

      The rotation's seed is a constant of the program: runs that are vmapped over the model's seeds share bases.

    References:
      From Attention to Activation: Unravelling the Enigmas of Large Language Models, Algorithm 1,
      `arXiv 2410.17174 <https://arxiv.org/abs/2410.17174>`_, 2024

    .. warning::
      A gradient that is exactly 0 in the rotated basis becomes rounding noise, which Adam amplifies to a step of full
      size; gradients on real data are not like this, but an all-ones test gradient under `hadamard` is.
    """
    adam = scale_by_adam(b1, b2, eps, eps_root=eps_root, mu_dtype=mu_dtype, nu_dtype=nu_dtype)
    made = in_rotated_basis(adam, rotation)
    return describable(made, lambda params: describe(rotation, params))


def scale_by_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Makes `optax.scale_by_adam` with a dtype for each moment, also "int8" and "int4"; see `scale_by_orthoadam`."""
    hyperparams: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    check_hyperparams(hyperparams)
    check_dtypes({"mu_dtype": mu_dtype, "nu_dtype": nu_dtype}, packed=True)
    if any(packing_of(dtype) for dtype in (mu_dtype, nu_dtype)):
        return scale_by_adam_of_few_bits(**hyperparams, mu_dtype=mu_dtype, nu_dtype=nu_dtype)
    return _with_nu_dtype(optax.scale_by_adam(**hyperparams, mu_dtype=mu_dtype), nu_dtype)


def check_hyperparams(given: Mapping[str, Any]) -> None:
    """Refuses what are no numbers, or negative or infinite ones; decays must be below 1."""
    for name, value in given.items():
        _require_number(name, value)
        limit = 1.0 if name in ("b1", "b2", "momentum") else math.inf
        if isinstance(value, int | float) and not 0.0 <= value < limit:  # inject_hyperparams passes arrays
            raise ValueError(f"{name}={value!r}; allowed: 0 <= {name} < {limit:g}")


def check_dtypes(given: Mapping[str, Any], packed: bool = False) -> None:
    """Refuses dtypes of moments that are neither floating nor, if `packed`, int8 or int4."""
    for name, dtype in given.items():
        is_known = dtype is None or (packed and packing_of(dtype) is not None)
        with contextlib.suppress(TypeError, ValueError):
            is_known = is_known or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
        if not is_known:
            raise ValueError(f"{name}={dtype!r}; allowed: None{', int8, int4' if packed else ''} or a floating dtype")


def _require_number(name: str, value: Any) -> None:
    # inject_hyperparams passes arrays and tracers, whose values are not looked at.
    is_finite = not isinstance(value, int | float) or abs(value) <= sys.float_info.max
    if not is_finite or np.ndim(real_array(value, name)):
        raise ValueError(f"{name}={value!r}; allowed: a finite number")


def _with_nu_dtype(adam: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """Computes in the dtype of the second moment, None for Adam's own; the first moment stays in its dtype."""
    if dtype is None:
        return adam

    def init_fn(params):
        state: Any = adam.init(params)
        return state._replace(nu=optax.tree.zeros_like(params, dtype=dtype))

    def update_fn(updates, state, params=None):
        wide = state._replace(mu=optax.tree.cast(state.mu, dtype))
        new: Any
        scaled, new = adam.update(optax.tree.cast(updates, dtype), wide, params)
        return optax.tree.cast_like(scaled, updates), new._replace(mu=optax.tree.cast_like(new.mu, state.mu))

    return optax.GradientTransformation(init_fn, update_fn)


def orthoadam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    eps_root: jax.typing.ArrayLike = 0.0,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    rotation: Rotation = DEFAULT_ROTATION,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes OrthoAdam: Adam in a rotated basis, with decoupled weight decay; replaces `optax.adamw`.

    With :math:`s_t` from `scale_by_orthoadam`, which also documents memory, cost and the source,

    .. math::
      \theta_t = \theta_{t-1} - \eta_t (s_t + \lambda \theta_{t-1})

    Hyperparameters of AdamW carry over.

    Args:
      learning_rate: A number or a schedule; a good value for Adam is a good start.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment; if gradients are far below it, the step shrinks, and so does the
        difference between bases.
      eps_root: Added inside the root; above 0 it makes the update differentiable at 0.
      mu_dtype: Dtype of the first moment; None means the parameter's. bfloat16 saves a quarter of the state, "int8" and
        "int4" more: see `scale_by_orthoadam`.
      nu_dtype: Dtype of the second moment; float32 is recommended for bfloat16 parameters.
      weight_decay: Strength of the decay, multiplied by the learning rate; unless it is the constant 0 the update needs
        `params`. (The default of `optax.adamw` is 1e-4.)
      mask: Parameters that decay: a tree of bools, or a function from the parameters to one; None decays all.
      rotation: The basis; `describe(rotation, params)` shows it. d_model is found from names and shapes, and an
        ambiguous tree is refused: `Rotation(axes=d_model)` names it. Kernels are assumed to be [in, out]
        (`Rotation.kernel_layout`).

    Raises:
      UserError: In `init`, if d_model is in doubt; in the update, for a state of another rotation.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss(params):
      ...     return jnp.sum((params["kernel"] - jnp.sin(jnp.arange(8.0)).reshape(2, 4)) ** 2)
      >>> optimizer = orthoadam(learning_rate=0.1, rotation=Rotation(axes=4, embeddings=""))
      >>> params = {"kernel": jnp.zeros((2, 4))}
      >>> state = optimizer.init(params)
      >>> for step in range(3):
      ...     print(f"{loss(params):.1f}")
      ...     updates, state = optimizer.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      3.6
      2.8
      2.2
    """
    scaling = scale_by_orthoadam(
        b1, b2, eps, eps_root=eps_root, mu_dtype=mu_dtype, nu_dtype=nu_dtype, rotation=rotation
    )
    made = decayed_and_scaled(scaling, learning_rate, weight_decay, mask)
    return describable(made, lambda params: describe(rotation, params))


def decayed_and_scaled(
    scaling: optax.GradientTransformation, learning_rate: Any, weight_decay: Any, mask: Any
) -> optax.GradientTransformationExtraArgs:
    """Chains a scaling with decoupled weight decay and the learning rate, and refuses what is neither."""
    for name, value in {"learning_rate": learning_rate, "weight_decay": weight_decay}.items():
        if not callable(value):
            _require_number(name, value)
    if not (mask is None or callable(mask) or all(isinstance(leaf, bool | np.bool_) for leaf in jax.tree.leaves(mask))):
        raise ValueError(f"mask={mask!r}; allowed: None, a tree of True and False, or a function params -> such a tree")
    # Decided by type first: inject_hyperparams passes a tracer, which must not be compared.
    undecayed = isinstance(weight_decay, int | float) and weight_decay == 0.0
    return optax.chain(
        scaling,
        optax.identity() if undecayed else optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def warmup_cosine(peak: float, warmup_steps: int, steps: int, final_fraction: float = 0.0) -> optax.Schedule:
    """Makes a linear warm-up from 0 to `peak`, then half a cosine down to `final_fraction * peak`, then constant.

    For w = `warmup_steps` <= t <= T = `steps`, with f = `final_fraction` from 0 to 1:
    peak * (f + (1 - f) (1 + cos(pi (t - w) / (T - w))) / 2).

    Returns:
      A function from the number of updates done to the learning rate of the next one.

    >>> schedule = warmup_cosine(1e-3, warmup_steps=10, steps=110, final_fraction=0.1)
    >>> print(*(f"{float(schedule(t)):.2e}" for t in (0, 5, 10, 60, 110, 200)))
    0.00e+00 5.00e-04 1.00e-03 5.50e-04 1.00e-04 1.00e-04
    """
    if steps < 1 or not 0 <= warmup_steps <= steps:
        raise ValueError(f"got {warmup_steps=}, {steps=}; allowed: 0 <= warmup_steps <= steps and steps >= 1")
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"got {final_fraction=}; allowed: 0 to 1")
    decay = optax.cosine_decay_schedule(peak, max(steps - warmup_steps, 1), alpha=final_fraction)
    if warmup_steps == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup_steps), decay], [warmup_steps])
