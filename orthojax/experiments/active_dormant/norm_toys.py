r"""Linear growth of the residual norm of <s>: two toys of Active-Dormant Attention Heads, with closed forms.

LayerNorm shows attention only the direction of a residual stream r. Let r serve a logit y through its cosine with a
fixed direction u: :math:`r = m u + z` with a fixed unit vector z, :math:`\langle u, z \rangle = c`, and the loss

.. math::
  L = e^{-y f(m)}, \qquad f(m) = \frac{m + c}{\sqrt{m^2 + 2 m c + 1}}, \qquad
  f'(m) = \frac{1 - c^2}{(m^2 + 2 m c + 1)^{3/2}}

(the layer-norm toy). Gradient flow lets y grow as ln t, so the gradient in m is about :math:`\ln t / (m^3 t)`: the
residual-norm toy. Both are from the paper's section on residual-state peaks (arXiv 2410.13835), which says that
LayerNorm makes gradients decay fast and that Adam turns them into constant updates; the closed forms are derived here.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.experiments.claims import Claim, Metric, all_of
from orthojax.experiments.study import Row, Study
from orthojax.report.pictures import ByStep, Points
from orthojax.report.tables import Columns

_B1, _B2 = 0.9, 0.99


def residual_norm_flow(times: np.ndarray, start: float, rate: float) -> np.ndarray:
    r"""Solves the residual-norm toy :math:`\dot m = \eta \ln t / (m^3 t)`, :math:`t \ge 1`, under gradient flow.

    .. math::
      m(t) = (m_0^4 + 2 \eta \ln^2 t)^{1/4}

    where `times` are t, in steps for SGD, and `start` is m at t = 1.
    """
    return (start**4 + 2 * rate * np.log(times) ** 2) ** 0.25


def cosine(m: Any, c: float) -> Any:
    """Computes f(m) of the layer-norm toy."""
    return (m + c) / (m**2 + 2 * m * c + 1) ** 0.5


def layer_norm_gradient(m: Any, y: Any, c: float) -> tuple[Any, Any]:
    """Computes the derivatives of exp(-y f(m)) with respect to m and y."""
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


def adam_gain(decay: float, b2: float = _B2) -> float:
    r"""Computes the size of Adam's update, in units of its rate, for the gradient :math:`g_0 e^{-\gamma t}`.

    .. math::
      r(\gamma) = \frac{1 - \beta_1}{1 - \beta_1 e^\gamma} \sqrt{\frac{1 - \beta_2 e^{2 \gamma}}{1 - \beta_2}}

    after the start: constant, however small the gradient, hence linear growth. From :math:`\gamma = -\frac12 \ln
    \beta_2` on it is 0: then the second moment remembers larger gradients for longer than they last. A gradient that
    decays as :math:`t^{-p}` has :math:`\gamma = p / t`, so r tends to 1. The argument `decay` is gamma, per step.

    >>> adam_gain(0.0), round(adam_gain(1e-3), 3), adam_gain(6e-3)
    (1.0, 0.904, 0.0)
    """
    left = (1 - b2 * np.exp(2 * decay)) / (1 - b2)
    return float((1 - _B1) / (1 - _B1 * np.exp(decay)) * np.sqrt(left)) if left > 0 else 0.0


def adam_logit_slope(rate: float, b2: float) -> float:
    r"""Computes how much Adam raises y per step in the layer-norm toy, once f is near 1.

    A logit that grows by :math:`\eta r` makes its own gradient decay at :math:`\gamma = \eta r`, so that r solves
    :math:`r = r(\eta r)`. The slope is :math:`\eta r`, below :math:`-\frac12 \ln \beta_2` for every rate.
    """
    from scipy.optimize import brentq  # here, as above

    return rate * brentq(lambda gain: gain - adam_gain(rate * gain, b2), 0.0, 1.5)  # pyright: ignore


def adam_norm_growth(
    speed: float, steps: int, rate: float, start: float, *, eps: float, decay: float = 0.0
) -> np.ndarray:
    r"""Computes the theoretical norm in the residual-norm toy in d dimensions under Adam, after 1 ... steps, [steps].

    :math:`r_0`, orthogonal to the updates, decays; along them

    .. math::
      \dot k = \eta s \frac{\hat g}{\hat g / r(\gamma) + \epsilon} - \eta \lambda k, \qquad
      \hat g = \frac{\ln t}{m^3 t \sqrt d}, \quad \gamma = -\frac{d \ln \hat g}{dt}, \quad
      m^2 = (m_0 e^{-\eta \lambda t})^2 + k^2

    where :math:`s = \sqrt d` is the length of an update. So m grows by :math:`\eta \sqrt d` a step until decay balances
    it (:math:`m = \sqrt d / \lambda`) or the gradient is below eps; from there Adam is SGD at the rate :math:`\eta /
    \epsilon`, and `residual_norm_flow` holds. `speed` is s, for a direction whose entries have equal sizes, `rate` eta,
    `start` m_0 and `decay` lambda, decoupled.
    """
    along, norm, before, norms = 0.0, start, 0.0, []
    for t in range(1, steps + 1):
        gradient = np.log(t) / (norm**3 * t * speed)
        gain = adam_gain(np.log(before / gradient)) if before > 0 else 1.0
        before = gradient
        update = gradient / (gradient / gain + eps) if gain > 0 and gradient > 0 else 0.0
        along += rate * (speed * update - decay * along)
        norm = float(np.hypot(start * np.exp(-rate * decay * t), along))
        norms.append(norm)
    return np.array(norms)


def train(
    optimizer: optax.GradientTransformation, start: Any, gradient: Callable[[Any, jax.Array], Any], steps: int
) -> Any:
    """Returns the parameters, a pytree, after each step of an optimizer, every leaf with a leading axis [steps].

    `gradient` is called with the parameters and t from 1.
    """

    def step(carry: Any, t: jax.Array) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradient(params, t), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), jnp.arange(1, steps + 1))[1])()


def residual_norm_gradient(direction: np.ndarray) -> Callable[..., jax.Array]:
    r"""Returns the gradient of the residual-norm toy, :math:`-\ln t / (\|x\|^3 t)\, u`; u and x are [d]."""
    return lambda x, t: -jnp.log(t) / (jnp.linalg.norm(x, axis=-1, keepdims=True) ** 3 * t) * direction


_RATE_OF_PAPER, _NORM, _LONG = 0.3, 10.0, 40_000
_NORMS_OF_PAPER = {1000: 27.9, 2500: 33.6, 5000: 41.7, 7500: 51.2, 10_000: 64.0}
_STEPS_SHOWN = (1, *_NORMS_OF_PAPER, 20_000, 30_000, 40_000)
_COSINE, _START = 0.5, (1.0, 1.0)
_LAYER_NORM_STEPS, _STEPS = 30_000, 10_000
# The residual-norm toy in d dimensions: rate, width, eps, decay.
_SETTINGS = {f"rate{a:g}_d{d}_eps{e:g}_decay{w:g}": (a, d, e, w) for a, d, e, w in (
    *itertools.product((3e-4, 1e-3, 3e-3), (64, 256), (1e-30,), (0.0,)),
    *itertools.product((1e-3,), (64, 256), (1e-30, 1e-8), (0.0, 0.1)),
)}  # fmt: skip


@functools.cache  # nothing here is drawn
def _published() -> list[Row]:
    gradient, rows = residual_norm_gradient(np.ones(1)), []
    for name, optimizer in {"adam": optax.adam(_RATE_OF_PAPER), "sgd": optax.sgd(_RATE_OF_PAPER)}.items():
        norms = np.asarray(train(optimizer, jnp.full((1, 1), _NORM), gradient, _LONG))[:, 0, 0]
        flow = residual_norm_flow(np.arange(1, _LONG + 1), _NORM, _RATE_OF_PAPER)
        moved = np.diff(norms)
        metrics = {f"norm/step_{step}": float(norms[step - 1]) for step in _STEPS_SHOWN}
        metrics |= {
            "flow_error": float(np.max(np.abs(norms / flow - 1))),
            "linear_r": float(np.corrcoef(np.arange(1000, 10_000), norms[1000:10_000])[0, 1]),
            "update_5k": float(moved[5000] / _RATE_OF_PAPER),
            "update_10k": float(moved[9999] / _RATE_OF_PAPER),
            "late_over_early": float((norms[19_999] - norms[9999]) / (norms[9999] - norms[0])),
        }
        rows.append(Row(f"published_{name}", metrics))
    return rows


@functools.cache
def _layer_norm() -> list[Row]:
    path = layer_norm_flow([10.0**log for log in range(11)], _START, _COSINE)
    norms = np.sqrt(path[:, 0] ** 2 + 2 * _COSINE * path[:, 0] + 1)
    exact = norm_along_flow(path[:, 1], _START, _COSINE)
    metrics = {"invariant_error": float(np.max(np.abs(norms / exact - 1)))}
    metrics["logit_slope"] = float((path[-1, 1] - path[-3, 1]) / (2 * np.log(10)))
    rows = [Row("layer_norm_flow", metrics)]
    for b2, rate in itertools.product((0.99, 0.999), (9e-5, 3e-4, 9e-4)):
        m, y = train(
            optax.adam(rate, _B1, b2, 1e-60),
            (jnp.array(_START[0]), jnp.array(_START[1])),
            lambda my, t: layer_norm_gradient(my[0], my[1], _COSINE),
            _LAYER_NORM_STEPS,
        )
        half = _LAYER_NORM_STEPS // 2
        norm_slope, logit_slope = (float((of[-1] - of[half]) / (_LAYER_NORM_STEPS - 1 - half)) for of in (m, y))
        metrics = {
            "norm_slope": norm_slope,
            "logit_slope": logit_slope,
            "predicted_logit_slope": adam_logit_slope(rate, b2),
            "linear_r": float(np.corrcoef(np.arange(half, _LAYER_NORM_STEPS), np.asarray(m)[half:])[0, 1]),
        }
        rows.append(Row(f"layer_norm_{rate:g}_{b2:g}", metrics))
    return rows


def _toys(seed: int) -> Iterator[Row]:
    """Yields both toys; the seed sets start and direction in d dimensions."""
    yield from (*_published(), *_layer_norm())
    for name, (rate, width, eps, decay) in _SETTINGS.items():
        rng = np.random.default_rng([seed, width])
        direction = rng.choice([-1.0, 1.0], width) / np.sqrt(width)
        start = rng.standard_normal(width)
        start -= direction * (direction @ start)
        start *= _NORM / np.linalg.norm(start)
        gradient = residual_norm_gradient(direction)
        adam = optax.adamw(rate, _B1, _B2, eps, weight_decay=decay)
        norms = np.linalg.norm(np.asarray(train(adam, jnp.asarray(start), gradient, _STEPS)), axis=1)
        predicted = adam_norm_growth(width**0.5, _STEPS, rate, _NORM, eps=eps, decay=decay)
        half = _STEPS // 2
        slope, by_theory = (float((of[-1] - of[half]) / (_STEPS - 1 - half)) for of in (norms, predicted))
        metrics = {"norm": float(norms[-1]), "predicted_norm": float(predicted[-1]), "slope": slope}
        yield Row(name, metrics | {"predicted_slope": by_theory, "slope_in_rates": slope / (rate * width**0.5)})


_SLOPE, _PREDICTED, _IN_RATES = Metric("slope"), Metric("predicted_slope"), Metric("slope_in_rates")
_LOGIT_SLOPE, _PREDICTED_LOGIT = Metric("logit_slope"), Metric("predicted_logit_slope")
_LINEAR, _LONGER = Metric("linear_r"), Metric("late_over_early")
_LAYER_NORM = [f"layer_norm_{rate:g}_{b2:g}" for b2 in (0.99, 0.999) for rate in (9e-5, 3e-4, 9e-4)]
_FREE = [name for name, (_, _, eps, decay) in _SETTINGS.items() if eps < 1e-20 and not decay]
_EPS, _NO_EPS = "rate0.001_d64_eps1e-08_decay0", "rate0.001_d64_eps1e-30_decay0"
# Nothing is drawn in the scalar toys, so there are no fresh seeds.
_PROTOTYPE = "a prototype of the same computation, which has no seed, had been run before"

NORM_TOYS = Study(
    name="norm_toys",
    title="Theory of the residual norm: the residual-norm and the layer-norm toy under SGD and Adam",
    rows=_toys,
    note="If a gradient decays by gamma a step, Adam's updates have a constant size r(gamma), provided that gamma is "
    "below -ln(b2) / 2; otherwise they decay as well. Below eps Adam is SGD of the rate eta / eps.",
    paper={
        "published_adam": {f"norm/step_{step}": norm for step, norm in _NORMS_OF_PAPER.items()},
        "published_sgd": {"norm/step_1000": 10.007, "norm/step_10000": 10.013},
    },
    tables=[
        Columns("The published residual-norm toy: m by step", [f"norm/step_{step}" for step in _STEPS_SHOWN],
                rows="published_*"),
        Columns("The layer-norm toy: slopes per step (flow: of the logit in ln t)",
                [_LOGIT_SLOPE, _PREDICTED_LOGIT, "norm_slope", _LINEAR], rows="layer_norm_*"),
        Columns("The residual-norm toy in d dimensions under Adam, over the second half",
                ["norm predicted_norm", _SLOPE, _PREDICTED, _IN_RATES], rows="rate*"),
    ],
    claims=[
        Claim("The published residual-norm toy gives its published norms under Adam.",
              all_of(abs(Metric(f"norm/step_{step}")["published_adam"] / norm - 1) < 0.01
                     for step, norm in _NORMS_OF_PAPER.items()), added=_PROTOTYPE),
        Claim("Under SGD its norm follows (m0^4 + 2 eta ln^2 t)^(1/4), which is no growth.",
              (Metric("flow_error")["published_sgd"] < 1e-3)
              & (Metric("norm/step_10000")["published_sgd"] < 1.01 * _NORM), added=_PROTOTYPE),
        Claim("Adam's growth of the published toy is linear, up to 10,000 steps and over the next 10,000.",
              (_LINEAR["published_adam"] > 0.98) & (_LONGER["published_adam"] > 0.5) & (_LONGER["published_adam"] < 2),
              added=_PROTOTYPE),
        Claim("It is since Adam turns decaying gradients into constant updates, of about its rate.",
              (Metric("update_5k")["published_adam"] > 0.5) & (Metric("update_10k")["published_adam"] > 0.5),
              added=_PROTOTYPE),
        Claim("In the layer-norm toy gradient flow moves on |r|^4 - 2 (1 - c^2) y^2 = const.",
              Metric("invariant_error")["layer_norm_flow"] < 1e-6, added=_PROTOTYPE),
        Claim("There the logit grows as ln t.",
              (_LOGIT_SLOPE["layer_norm_flow"] > 0.8) & (_LOGIT_SLOPE["layer_norm_flow"] < 1.2), added=_PROTOTYPE),
        Claim("Under Adam its logit grows linearly, by the eta r that solves r = r(eta r).",
              abs(_LOGIT_SLOPE["*"] / _PREDICTED_LOGIT["*"] - 1) < 0.02, cases=_LAYER_NORM, added=_PROTOTYPE),
        Claim("m grows linearly with the logit.",
              (_LINEAR["*"] > 0.99) & (Metric("norm_slope")["*"] > 0.5 * _PREDICTED_LOGIT["*"]), cases=_LAYER_NORM,
              added=_PROTOTYPE),
        Claim("In d dimensions the norm grows by eta sqrt(d) a step.",
              (_IN_RATES["*"] > 0.8) & (_IN_RATES["*"] < 1.05), cases=_FREE),
        Claim("The slope follows theory, with its rate, width, eps and decay.",
              abs(_SLOPE["*"] - _PREDICTED["*"]) < 0.1 * abs(_PREDICTED["*"]) + 1e-5, cases=list(_SETTINGS)),
        Claim("Gradients below eps end the growth.", _SLOPE[_EPS] < 0.5 * _SLOPE[_NO_EPS]),
    ],
    pictures=[
        ByStep("norm", "published_*", y_scale="log", name="published_toy"),
        Points("adam_slopes", "Slope of the norm under Adam in d dimensions: theory and measured.", _PREDICTED, _SLOPE,
               {"variants": "rate*"}),
    ],
)  # fmt: skip
