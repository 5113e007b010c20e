r"""Linear growth of the residual norm of <s>: two toys of Active-Dormant Attention Heads, with closed forms.

LayerNorm shows attention only the direction of a residual stream r. Let it serve a logit y through its cosine with a
fixed direction u: :math:`r = m u + z` with a fixed unit vector z, :math:`\langle u, z \rangle = c`, and the loss

.. math::
  L = e^{-y f(m)}, \qquad f(m) = \frac{m + c}{\sqrt{m^2 + 2 m c + 1}}, \qquad
  f'(m) = \frac{1 - c^2}{(m^2 + 2 m c + 1)^{3/2}}

(the layer-norm toy). Gradient flow lets y grow as ln t, so that the gradient by m is about :math:`\ln t / (m^3 t)`: the
residual-norm toy. Both are those of the paper's section on residual-state peaks (arXiv 2410.13835), which says that
LayerNorm makes gradients decay fast and that Adam makes constant updates of them; the closed forms are derived here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Gradient flow, which SGD follows.


def residual_norm_flow(times: Sequence[float] | np.ndarray, start: float, rate: float = 1.0) -> np.ndarray:
    r"""Solves the residual-norm toy :math:`\dot m = \eta \ln t / (m^3 t)`, :math:`t \ge 1`, under gradient flow.

    .. math::
      m(t) = (m_0^4 + 2 \eta \ln^2 t)^{1/4}

    Args:
      times: t, in steps for SGD.
      start: m at t = 1.
      rate: eta.
    """
    return (start**4 + 2 * rate * np.log(times) ** 2) ** 0.25


def cosine(m: Any, c: float) -> Any:
    """Computes f(m) of the layer-norm toy."""
    return (m + c) / (m**2 + 2 * m * c + 1) ** 0.5


def layer_norm_gradient(m: Any, y: Any, c: float) -> tuple[Any, Any]:
    """Computes the derivatives of exp(-y f(m)) by m and by y."""
    loss, squared_norm = jnp.exp(-y * cosine(m, c)), m**2 + 2 * m * c + 1
    return -y * (1 - c**2) / squared_norm**1.5 * loss, -cosine(m, c) * loss


def layer_norm_flow(times: Sequence[float], start: tuple[float, float], c: float) -> np.ndarray:
    """Integrates gradient flow of the layer-norm toy from (m, y), in ln(1 + t): [times, 2]."""

    def derivative(log_time: float, state: np.ndarray) -> np.ndarray:
        m, y = state
        loss, squared_norm = np.exp(-y * cosine(m, c)), m**2 + 2 * m * c + 1
        return np.exp(log_time) * loss * np.array([y * (1 - c**2) / squared_norm**1.5, cosine(m, c)])

    at = np.log1p(np.asarray(times, float))
    from scipy.integrate import solve_ivp  # here, because it takes most of a second to import

    return solve_ivp(derivative, (0.0, at[-1]), start, "LSODA", at, rtol=1e-10, atol=1e-12).y.T


def norm_along_flow(y: float | np.ndarray, start: tuple[float, float], c: float) -> np.ndarray:
    r"""Returns the exact norm of r at which gradient flow from (m, y) has brought the logit to y.

    :math:`dy/dm = f / (y f')` is separable, so that along the flow

    .. math::
      \|r\|^4 = \|r_0\|^4 + 2 (1 - c^2) (y^2 - y_0^2)

    With y about ln t the norm grows as the root of ln t.
    """
    m, y0 = start
    return ((m**2 + 2 * m * c + 1) ** 2 + 2 * (1 - c**2) * (np.asarray(y) ** 2 - y0**2)) ** 0.25


# Adam.


def adam_gain(decay: float, b1: float, b2: float) -> float:
    r"""Computes the size of Adam's update, in units of its rate, for the gradient :math:`g_0 e^{-\gamma t}`.

    .. math::
      r(\gamma) = \frac{1 - \beta_1}{1 - \beta_1 e^\gamma} \sqrt{\frac{1 - \beta_2 e^{2 \gamma}}{1 - \beta_2}}

    after the start: constant, however small the gradient, hence linear growth. From :math:`\gamma = -\frac12 \ln
    \beta_2` on it is 0: then the second moment remembers larger gradients for longer than they last. A gradient that
    decays as :math:`t^{-p}` has :math:`\gamma = p / t`, so r tends to 1.

    Args:
      decay: gamma, per step.
      b1: Decay of the first moment.
      b2: Decay of the second moment.

    >>> adam_gain(0.0, 0.9, 0.99), round(adam_gain(1e-3, 0.9, 0.99), 3), adam_gain(6e-3, 0.9, 0.99)
    (1.0, 0.904, 0.0)
    """
    left = (1 - b2 * np.exp(2 * decay)) / (1 - b2)
    return float((1 - b1) / (1 - b1 * np.exp(decay)) * np.sqrt(left)) if left > 0 else 0.0


def adam_logit_slope(rate: float, b1: float, b2: float) -> float:
    r"""Computes by how much Adam raises y in the layer-norm toy per step, once f is near 1.

    A logit that grows by :math:`\eta r` makes its own gradient decay at :math:`\gamma = \eta r`, so that r solves
    :math:`r = r(\eta r)`. The slope is :math:`\eta r`, below :math:`-\frac12 \ln \beta_2` for every rate.
    """
    from scipy.optimize import brentq  # here, as above

    return rate * brentq(lambda gain: gain - adam_gain(rate * gain, b1, b2), 0.0, 1.5)  # pyright: ignore


def adam_norm_growth(
    speed: float, steps: int, rate: float, start: float, *, b1: float, b2: float, eps: float, decay: float = 0.0
) -> np.ndarray:
    r"""Computes the norm that Adam gives the residual-norm toy in d dimensions by theory, after 1 ... steps, [steps].

    :math:`r_0`, orthogonal to the updates, decays; along them

    .. math::
      \dot k = \eta s \frac{\hat g}{\hat g / r(\gamma) + \epsilon} - \eta \lambda k, \qquad
      \hat g = \frac{\ln t}{m^3 t \sqrt d}, \quad \gamma = -\frac{d \ln \hat g}{dt}, \quad
      m^2 = (m_0 e^{-\eta \lambda t})^2 + k^2

    where :math:`s = \sqrt d` is the length of an update. So m grows by :math:`\eta \sqrt d` a step until decay balances
    it (:math:`m = \sqrt d / \lambda`) or the gradient is below eps; from there Adam is SGD of the rate :math:`\eta /
    \epsilon`, and `residual_norm_flow` holds.

    Args:
      speed: s, for a direction whose entries have equal sizes.
      steps: How many.
      rate: eta.
      start: m_0.
      b1: Of Adam.
      b2: Of Adam.
      eps: Of Adam.
      decay: lambda, decoupled.
    """
    along, norm, before, norms = 0.0, start, 0.0, []
    for t in range(1, steps + 1):
        gradient = np.log(t) / (norm**3 * t * speed)
        gain = adam_gain(np.log(before / gradient), b1, b2) if before > 0 else 1.0
        before = gradient
        update = gradient / (gradient / gain + eps) if gain > 0 and gradient > 0 else 0.0
        along += rate * (speed * update - decay * along)
        norm = float(np.hypot(start * np.exp(-rate * decay * t), along))
        norms.append(norm)
    return np.array(norms)


def train(
    optimizer: optax.GradientTransformation,
    start: Any,
    gradient: Callable[[Any, jax.Array], Any],
    steps: int,
) -> Any:
    """Applies an optimizer to gradients.

    Args:
      optimizer: Any.
      start: Parameters, a pytree.
      gradient: (parameters, t from 1) -> gradients.
      steps: How many.

    Returns:
      The parameters after each step, every leaf with a leading axis [steps].
    """

    def step(carry: Any, t: jax.Array) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradient(params, t), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), jnp.arange(1, steps + 1))[1])()


def residual_norm_gradient(direction: np.ndarray) -> Callable[..., jax.Array]:
    r"""Returns the gradient of the residual-norm toy in d dimensions, :math:`-\frac{\ln t}{\|x\|^3 t} u`, for `train`.

    Args:
      direction: u, [d]; the parameters are x, [d].
    """

    def gradient(x: jax.Array, t: jax.Array) -> jax.Array:
        return -jnp.log(t) / (jnp.linalg.norm(x, axis=-1, keepdims=True) ** 3 * t) * direction

    return gradient
