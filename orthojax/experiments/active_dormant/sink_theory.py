r"""Sinks and drains reinforce each other: the theory of Active-Dormant Attention Heads (arXiv 2410.13835) in numbers.

The bigram half of the simplified model, with its MLP at the true law and the context of a query at its mean: a query of
the non-trigger v has weight :math:`e^{\alpha_v}` on <s>, weight W and the sum of values :math:`\xi` on all others, so

.. math::
  z_v = \frac{e^{\alpha_v} \beta + \xi}{e^{\alpha_v} + W}, \qquad q_v = \mathrm{softmax}(z_v + \log p_v), \qquad
  L = \sum_v \pi_v \mathrm{KL}(p_v \| q_v)

The head can only do harm. Gradient flow on L is followed in float64, next to closed forms whose constants are derived
here. With several contexts L is the mean over them; the theory has one. Legend: C contexts, K non-trigger tokens, V
tokens that can follow.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from orthojax.data.bigram_backcopy import BigramBackcopy
from orthojax.experiments.active_dormant.runs import letters
from orthojax.experiments.claims import Claim, Metric, all_of, shares
from orthojax.experiments.study import Row, Study
from orthojax.report.tables import Columns


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The constants of L, which gradient flow does not change."""

    weights: np.ndarray  # pi, float64 [K], with sum 1
    rows: np.ndarray  # p, float64 [K, V]
    others: float  # W
    contexts: np.ndarray  # xi of each context, float64 [C, V]

    @classmethod
    def of_task(cls, task: BigramBackcopy, values: np.ndarray, counts: np.ndarray) -> "Chain":
        """Returns the chain of the non-trigger tokens of a task.

        `values` [V] are xi_v of every character; `counts` [C, V] says how often a query sees each, with equal sums W.
        """
        size = task.vocab_size - 1  # nothing is followed by <s>
        tokens = np.setdiff1d(np.arange(size), task.triggers)
        weights = task.marginal[tokens]
        return cls(weights / weights.sum(), task.transition[tokens, :size], float(counts[0].sum()), counts * values)

    def predictions(self, alpha: np.ndarray, beta: np.ndarray) -> np.ndarray:
        """Returns q, float64 [C, K, V], of alpha [K] and beta [V]."""
        sink = np.exp(alpha)
        z = (sink[:, None] * beta + self.contexts[:, None]) / (sink + self.others)[:, None]
        z -= np.einsum("kv,ckv->ck", self.rows, z)[..., None]  # against overflow; the mean has no effect
        tilted = self.rows * np.exp(z)
        return tilted / np.sum(tilted, axis=-1, keepdims=True)

    def gradients(self, alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        r"""Computes the gradients of L with respect to alpha [K] and beta [V].

        .. math::
          \partial_{\alpha_v} L &= \pi_v \frac{e^{\alpha_v}}{(e^{\alpha_v} + W)^2} \langle q_v - p_v, W \beta - \xi
          \rangle \\
          \partial_\beta L &= \sum_v \pi_v \frac{e^{\alpha_v}}{e^{\alpha_v} + W} (q_v - p_v)
        """
        sink, error = np.exp(alpha), self.predictions(alpha, beta) - self.rows
        share = sink / (sink + self.others)
        along = np.mean(np.einsum("ckv,cv->ck", error, self.others * beta - self.contexts), axis=0)
        return self.weights * share / (sink + self.others) * along, (self.weights * share) @ np.mean(error, axis=0)

    def curvatures(self) -> np.ndarray:
        """Computes the variance of xi under each p_v, [K]: twice the KL per unit of 1 / (exp(alpha) + W) squared."""
        return np.mean(self.contexts**2 @ self.rows.T - (self.contexts @ self.rows.T) ** 2, axis=0)


def flow(
    chain: Chain, alpha: np.ndarray, beta: np.ndarray, times: Sequence[float] | np.ndarray, *, hold: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Integrates gradient flow on L, in ln(1 + t) by an implicit method of variable order.

    Starts from alpha [K] and beta [V], holds the one that `hold` names fixed, and returns (alpha [times, K], beta
    [times, V]) at increasing t > 0.
    """
    count = len(alpha)

    def derivative(log_time: float, state: np.ndarray) -> np.ndarray:
        by_alpha, by_beta = chain.gradients(state[:count], state[count:])
        moved = [np.zeros(count) if hold == "alpha" else by_alpha, 0.0 * by_beta if hold == "beta" else by_beta]
        return -np.exp(log_time) * np.concatenate(moved)

    at = np.log1p(np.asarray(times, float))
    start = np.concatenate([alpha, beta])
    from scipy.integrate import solve_ivp  # here, because it takes most of a second to import

    path = solve_ivp(derivative, (0.0, at[-1]), start, "LSODA", at, rtol=1e-9, atol=1e-14)
    return path.y[:count].T, path.y[count:].T


def half_log(times: np.ndarray, start: float, rate: float, others: float) -> np.ndarray:
    r"""Returns a logit on <s> at given times, with beta held at 0 (or at any multiple of 1), [times].

    With KL to second order in z, :math:`\dot\alpha = c\, e^\alpha / (e^\alpha + W)^3`, where :math:`c = \pi_v
    \mathrm{Var}_{p_v}(\xi)`, and with :math:`E = e^\alpha`

    .. math::
      c\, t = \Bigl[ \frac{E^2}{2} + 3 W E + 3 W^2 \ln E - \frac{W^3}{E} \Bigr]_{E_0}^{E}
    where `start` is alpha at t = 0, `rate` is c and `others` W.
    """

    def travelled(alpha: np.ndarray) -> np.ndarray:
        sink = np.exp(alpha)
        return sink**2 / 2 + 3 * others * sink + 3 * others**2 * alpha - others**3 / sink

    top = half_log_asymptote(max(times), rate) + 1.0
    grid = np.linspace(start, max(top, start + 1.0), 20_001)
    return np.interp(times, (travelled(grid) - travelled(grid[0])) / rate, grid)


def half_log_asymptote(time: float | np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    r"""Returns the limit :math:`\alpha_v(t) \to \frac12 \ln t + \frac12 \ln(2 \pi_v \mathrm{Var}_{p_v}(\xi))`.

    All logits grow alike, so their differences become constant while they grow.
    """
    return np.array(0.5 * np.log(2 * np.asarray(rate) * time))


def bos_fixed_point(alpha: float, value_sum: np.ndarray, start: np.ndarray) -> np.ndarray:
    r"""Returns the limit of the value of <s>, [V] like `value_sum` xi and `start`, while all logits on it are alpha.

    .. math::
      \beta^* = \bar\beta_0 \mathbf 1 + e^{-\alpha} (\bar\xi \mathbf 1 - \xi)

    The mean is conserved, since each q_v - p_v sums to 0; the rest cancels the other values, so that q = p. A constant
    shifts all logits alike: 'drained' is what is left, :math:`-e^{-\alpha}` of the centred xi.
    """
    return start.mean() + np.exp(-alpha) * (value_sum.mean() - value_sum)


def bos_rates(chain: Chain, alpha: float) -> np.ndarray:
    r"""Returns the rates at which beta approaches its limit, [V], increasing; the first is 0, for the direction 1.

    Near its fixed point beta moves by :math:`e^{-w^2 H t}` with :math:`w = e^\alpha / (e^\alpha + W)` and

    .. math::
      H = \sum_v \pi_v (\mathrm{diag}(p_v) - p_v p_v^T)
    """
    share = np.exp(alpha) / (np.exp(alpha) + chain.others)
    covariance = np.diag(chain.weights @ chain.rows) - (chain.rows.T * chain.weights) @ chain.rows
    return np.linalg.eigh(share**2 * covariance)[0]


def distance_to_stationary(alpha: np.ndarray, beta: np.ndarray, chain: Chain) -> tuple[float, float]:
    r"""Measures the distance from the set :math:`\{\alpha_v = \alpha, \beta = c \mathbf 1 - e^{-\alpha} \xi\}`.

    There q = p for every v, so nothing moves. Returns the standard deviation of alpha under pi, and :math:`\| P
    (e^{\bar\alpha} \beta + \xi) \| / \| P \xi \|` with P the centring and the mean under pi: both are 0 on the set.
    """
    mean = chain.weights @ alpha
    spread = float(np.sqrt(chain.weights @ (alpha - mean) ** 2))
    value_sum = chain.contexts.mean(0)
    left = np.exp(mean) * beta + value_sum
    centred = value_sum - value_sum.mean()
    return spread, float(np.linalg.norm(left - left.mean()) / np.linalg.norm(centred))


_POSITION, _CONTEXTS = 32, 8
_LATE, _LAST, _LAST_JOINT = 12, 16, 10  # powers of ten of times
_DECAYS = (5, 10, 15, 20, 25)  # times, in units of 1 / the slowest rate


def chains(seed: int) -> tuple[Chain, Chain]:
    """Returns the chain with the mean context, as in the theory, and one with contexts of real sequences."""
    task = letters()
    size = task.vocab_size - 1
    values = np.random.default_rng([seed, 0]).standard_normal(size)
    seen = np.asarray(task.batch(0, _CONTEXTS, _POSITION, seed))[:, 1:]
    counts = np.stack([np.bincount(row, minlength=size) for row in seen]).astype(float)
    mean = _POSITION * task.marginal[None, :size]
    return Chain.of_task(task, values, mean), Chain.of_task(task, values, counts)


def _slopes(times: np.ndarray, alpha: np.ndarray, decades: int) -> np.ndarray:
    """Returns the slopes of alpha [times, K] in ln t over the last decades, [K]."""
    late = slice(-4 * decades - 1, None)
    return np.polyfit(np.log(times[late]), alpha[late], 1)[0]


def _times(last: int) -> np.ndarray:
    """Returns four times per decade up to 10^last."""
    return np.geomspace(1, 10.0**last, 4 * last + 1)


def _held_value(chain: Chain, rng: np.random.Generator) -> Row:
    start, times = rng.standard_normal(len(chain.weights)), _times(_LAST)
    alpha, _ = flow(chain, start, np.zeros(chain.rows.shape[1]), times, hold="beta")
    rates = chain.weights * chain.curvatures()
    forms = [half_log(times, a, rate, chain.others) for a, rate in zip(start, rates, strict=True)]
    closed, slopes = np.stack(forms, axis=1), _slopes(times, alpha, 2)
    metrics = {
        "slope_min": float(slopes.min()),
        "slope_max": float(slopes.max()),
        "closed_form_error": float(np.abs(alpha - closed)[4 * _LATE :].max()),
        "asymptote_error": float(np.abs(alpha[-1] - half_log_asymptote(times[-1], rates)).max()),
        "spread_early": float(alpha[4 * _LATE].std()),
        "spread": float(alpha[-1].std()),
    }
    metrics |= {f"alpha/log_{log}": float(chain.weights @ alpha[4 * log]) for log in (_LATE, _LAST)}
    return Row("value_held", metrics)


def _held_logits(chain: Chain, alpha: float, rng: np.random.Generator) -> Row:
    start = rng.standard_normal(chain.rows.shape[1])
    rate = bos_rates(chain, alpha)[1]
    times = np.array(_DECAYS) / rate
    _, beta = flow(chain, np.full(len(chain.weights), alpha), start, times, hold="alpha")
    fixed = bos_fixed_point(alpha, chain.contexts[0], start)
    distance = np.linalg.norm(beta - fixed, axis=1)
    measured = -np.log(distance[2] / distance[1]) / (times[2] - times[1])
    metrics = {
        "rate_ratio": float(measured / rate),
        "fixed_point_error": float(distance[-1] / np.linalg.norm(start - fixed)),
        "mean_drift": float(np.abs(beta.mean(1) - start.mean()).max()),
    }
    return Row(f"logits_held_{alpha:g}", metrics)


def _joint(chain: Chain, name: str, rng: np.random.Generator) -> Row:
    start = rng.standard_normal(len(chain.weights)), rng.standard_normal(chain.rows.shape[1])
    times = _times(_LAST_JOINT)
    alpha, beta = flow(chain, *start, times)
    spread, drained = distance_to_stationary(alpha[-1], beta[-1], chain)
    weight = np.exp(alpha[-1]) / (np.exp(alpha[-1]) + chain.others) @ chain.weights
    constants, value_sum = (rng.standard_normal(), rng.standard_normal()), chain.contexts.mean(0)
    point = np.full(len(alpha[0]), constants[0]), constants[1] - np.exp(-constants[0]) * value_sum
    metrics = {
        "gradient_on_set": float(max(np.abs(g).max() for g in chain.gradients(*point))),
        "slope": float(_slopes(times, alpha, 1) @ chain.weights),
        "spread": spread,
        "not_drained": drained,
        "bos_weight": float(weight),
        "alpha": float(chain.weights @ alpha[-1]),
    }
    return Row(name, metrics)


def _flows(seed: int) -> Iterator[Row]:
    one, several = chains(seed)
    rng = np.random.default_rng([seed, 1])
    yield _held_value(one, rng)
    for alpha in (0.0, 2.0, 4.0):
        yield _held_logits(one, alpha, rng)
    yield _joint(one, "joint", rng)
    yield _joint(several, "joint_contexts", rng)


_SLOPE_MIN, _SLOPE_MAX, _SPREAD, _SPREAD_EARLY, _CLOSED, _ASYMPTOTE = (Metric(name) for name in (
    "slope_min", "slope_max", "spread", "spread_early", "closed_form_error", "asymptote_error"))  # fmt: skip
_RATE, _FIXED, _DRIFT = Metric("rate_ratio"), Metric("fixed_point_error"), Metric("mean_drift")
_ON_SET, _NOT_DRAINED, (_WEIGHT,) = Metric("gradient_on_set"), Metric("not_drained"), shares("bos_weight")
_LATE_ALPHA, _LAST_ALPHA = Metric("alpha/log_12"), Metric("alpha/log_16")

SINK_THEORY = Study(
    name="sink_theory",
    title="Theory of sinks: half-log growth of their logits, the value of <s>, the stationary set",
    rows=_flows,
    note="The bigram half of the simplified model, whose MLP knows the bigram law, so that its head can only do harm. "
    f"Gradient flow in float64 from random logits and values, beside closed forms, of a query at position {_POSITION} "
    "that sees the mean context, or contexts of real sequences. Of seeds 0 to 4, up to t = 1e12 and 1e8, four claims "
    "failed on rare tokens, which are slow; times are longer since, criteria the same, and seeds others.",
    tables=[
        Columns("(a) The value held", "slope_min slope_max closed_form_error spread", rows="value_held"),
        Columns("(b) The logits held", "rate_ratio fixed_point_error mean_drift", rows="logits_held_*"),
        Columns("(c) Both move", ["alpha spread not_drained", _WEIGHT, "slope"], rows="joint joint_contexts"),
    ],
    claims=[
        Claim("(a) With the value of <s> held, every logit on <s> grows as ln t / 2.",
              all_of((of["value_held"] > 0.48) & (of["value_held"] < 0.52) for of in (_SLOPE_MIN, _SLOPE_MAX))
              .in_every_seed()),
        Claim("It follows the closed form, and ends at ln(2 pi_v Var_v t) / 2: from t = 1e12 on, and at 1e16.",
              ((_CLOSED["value_held"] < 0.01) & (_ASYMPTOTE["value_held"] < 0.02)).in_every_seed()),
        Claim("The logits of different tokens concentrate: their differences stop while they grow.",
              (abs(_SPREAD["value_held"] / _SPREAD_EARLY["value_held"] - 1) < 0.1)
              & (_LAST_ALPHA["value_held"] > _LATE_ALPHA["value_held"] + 4)),
        Claim("(b) With the logits held, the value of <s> converges exponentially, at the predicted rate.",
              ((_RATE["logits_held_*"] > 0.99) & (_RATE["logits_held_*"] < 1.01)).in_every_seed()),
        Claim("It goes to mean(beta_0) 1 + exp(-alpha) (mean(xi) 1 - xi), and its mean is conserved.",
              ((_FIXED["logits_held_*"] < 1e-6) & (_DRIFT["logits_held_*"] < 1e-6)).in_every_seed()),
        Claim("(c) If all logits are alpha and beta = c - exp(-alpha) xi, nothing moves (at a random point).",
              (_ON_SET["joint"] < 1e-12).in_every_seed()),
        Claim("Gradient flow ends there: the logits become equal, and the value cancels the others'.",
              ((_SPREAD["joint"] < 1e-3) & (_NOT_DRAINED["joint"] < 1e-3)).in_every_seed()),
        Claim("Mutual reinforcement makes these equal logits large.", _WEIGHT["joint"] > 0.5),
        Claim("With contexts that differ no value of <s> cancels all of them: the logits go on growing as ln t / 2, "
              "while the value cancels their mean.",
              (Metric("slope")["joint_contexts"] > 0.45) & (Metric("slope")["joint_contexts"] < 0.6)
              & (_WEIGHT["joint_contexts"] > 0.9)),
    ],
)  # fmt: skip
