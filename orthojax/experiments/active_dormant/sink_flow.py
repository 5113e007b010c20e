r"""The theory of why sinks and drains reinforce each other, of Active-Dormant Attention Heads: formulas and flows.

The bigram half of the simplified model, with its MLP at the true law and the context of a query at its mean: a query of
the non-trigger v has weight :math:`e^{\alpha_v}` on <s>, weight W and the sum of values :math:`\xi` on all others, so

.. math::
  z_v = \frac{e^{\alpha_v} \beta + \xi}{e^{\alpha_v} + W}, \qquad q_v = \mathrm{softmax}(z_v + \log p_v), \qquad
  L = \sum_v \pi_v \mathrm{KL}(p_v \| q_v)

(the paper's analysis of the training dynamics of its simplified model, arXiv 2410.13835; the constants are derived
here). The head can only do harm; gradient flow on L is followed here in float64, beside closed forms. With several
contexts L is the mean over them; the theory has one. Legend: C contexts, K non-trigger tokens, V tokens that can
follow.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from orthojax.data.bigram_backcopy import BigramBackcopy

TOLERANCE = 1e-9  # relative, of the integration


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """The constants of L, which gradient flow does not change.

    Attributes:
      weights: pi, float64 [K], of sum 1.
      rows: p, float64 [K, V].
      others: W.
      contexts: xi of each context, float64 [C, V].
    """

    weights: np.ndarray
    rows: np.ndarray
    others: float
    contexts: np.ndarray

    @classmethod
    def of_task(cls, task: BigramBackcopy, values: np.ndarray, counts: np.ndarray) -> "Chain":
        """Returns the chain of the non-trigger tokens of a task.

        Args:
          task: Its marginal and transition are used.
          values: xi_v of every character, [V].
          counts: How often a query sees each character, [C, V], of equal sums W.
        """
        size = task.vocab_size - 1  # nothing is followed by <s>
        tokens = np.setdiff1d(np.arange(size), task.triggers)
        weights = task.marginal[tokens]
        return cls(weights / weights.sum(), task.transition[tokens, :size], float(counts[0].sum()), counts * values)

    def predictions(self, alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (KL(p_v, q_v) [C, K], q [C, K, V])."""
        sink = np.exp(alpha)
        z = (sink[:, None] * beta + self.contexts[:, None]) / (sink + self.others)[:, None]
        z -= np.einsum("kv,ckv->ck", self.rows, z)[..., None]  # of mean 0, so that the KL is ln E_p[exp(z)]
        tilted = self.rows * np.exp(z)
        total = np.sum(tilted, axis=-1)
        return np.log(total), tilted / total[..., None]

    def loss(self, alpha: np.ndarray, beta: np.ndarray) -> float:
        """Computes L in nats, of alpha [K] and beta [V]."""
        return float(np.mean(self.predictions(alpha, beta)[0] @ self.weights))

    def gradients(self, alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        r"""Computes the gradients of L by alpha [K] and by beta [V].

        .. math::
          \partial_{\alpha_v} L &= \pi_v \frac{e^{\alpha_v}}{(e^{\alpha_v} + W)^2} \langle q_v - p_v, W \beta - \xi
          \rangle \\
          \partial_\beta L &= \sum_v \pi_v \frac{e^{\alpha_v}}{e^{\alpha_v} + W} (q_v - p_v)
        """
        sink, error = np.exp(alpha), self.predictions(alpha, beta)[1] - self.rows
        share = sink / (sink + self.others)
        along = np.mean(np.einsum("ckv,cv->ck", error, self.others * beta - self.contexts), axis=0)
        return self.weights * share / (sink + self.others) * along, (self.weights * share) @ np.mean(error, axis=0)

    def curvatures(self) -> np.ndarray:
        """Computes the variance of xi under each p_v, [K]: twice the KL of a unit of 1 / (exp(alpha) + W), squared."""
        return np.mean(self.contexts**2 @ self.rows.T - (self.contexts @ self.rows.T) ** 2, axis=0)


def flow(
    chain: Chain, alpha: np.ndarray, beta: np.ndarray, times: Sequence[float] | np.ndarray, *, hold: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Integrates gradient flow on L, in ln(1 + t) by an implicit method of variable order.

    Args:
      chain: Of L.
      alpha: Start, [K].
      beta: Start, [V].
      times: t > 0, increasing.
      hold: "alpha" or "beta" to keep one of them as it is.

    Returns:
      (alpha [times, K], beta [times, V]).
    """
    count = len(alpha)

    def derivative(log_time: float, state: np.ndarray) -> np.ndarray:
        by_alpha, by_beta = chain.gradients(state[:count], state[count:])
        moved = [np.zeros(count) if hold == "alpha" else by_alpha, 0.0 * by_beta if hold == "beta" else by_beta]
        return -np.exp(log_time) * np.concatenate(moved)

    at = np.log1p(np.asarray(times, float))
    start = np.concatenate([alpha, beta])
    from scipy.integrate import solve_ivp  # here, because it takes most of a second to import

    path = solve_ivp(derivative, (0.0, at[-1]), start, "LSODA", at, rtol=TOLERANCE, atol=1e-14)
    return path.y[:count].T, path.y[count:].T


# (a) The logits on <s>, beta held at 0.


def _travelled(alpha: np.ndarray, others: float) -> np.ndarray:
    sink = np.exp(alpha)
    return sink**2 / 2 + 3 * others * sink + 3 * others**2 * alpha - others**3 / sink


def half_log_time(alpha: np.ndarray, start: float, rate: float, others: float) -> np.ndarray:
    r"""Returns the time at which a logit on <s> reaches alpha, with beta held at 0 (or at any multiple of 1).

    With KL to second order in z, :math:`\dot\alpha = c\, e^\alpha / (e^\alpha + W)^3`, where :math:`c = \pi_v
    \mathrm{Var}_{p_v}(\xi)`, and with :math:`E = e^\alpha`

    .. math::
      c\, t = \Bigl[ \frac{E^2}{2} + 3 W E + 3 W^2 \ln E - \frac{W^3}{E} \Bigr]_{E_0}^{E}

    Args:
      alpha: Any shape.
      start: alpha at t = 0.
      rate: c.
      others: W.
    """
    return (_travelled(alpha, others) - _travelled(np.asarray(start), others)) / rate


def half_log(times: Sequence[float] | np.ndarray, start: float, rate: float, others: float) -> np.ndarray:
    """Returns alpha at given times, the inverse of `half_log_time`, [times]."""
    top = half_log_asymptote(max(times), rate) + 1.0
    grid = np.linspace(start, max(top, start + 1.0), 20_001)
    return np.asarray(np.interp(times, half_log_time(grid, start, rate, others), grid))


def half_log_asymptote(time: float | np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    r"""Returns the limit :math:`\alpha_v(t) \to \frac12 \ln t + \frac12 \ln(2 \pi_v \mathrm{Var}_{p_v}(\xi))`.

    Every logit grows alike, so that their differences stop while they grow.
    """
    return np.array(0.5 * np.log(2 * np.asarray(rate) * time))


# (b) The value of <s>, alpha held equal.


def bos_fixed_point(alpha: float, value_sum: np.ndarray, start: np.ndarray) -> np.ndarray:
    r"""Returns the limit of the value of <s> while all logits on it are alpha.

    .. math::
      \beta^* = \bar\beta_0 \mathbf 1 + e^{-\alpha} (\bar\xi \mathbf 1 - \xi)

    The mean is conserved, since each q_v - p_v sums to 0; the rest cancels the other values, so that q = p. A constant
    shifts all logits alike: 'drained' is what is left, :math:`-e^{-\alpha}` of the centred xi.

    Args:
      alpha: The logit.
      value_sum: xi, [V].
      start: beta at t = 0, [V].
    """
    return start.mean() + np.exp(-alpha) * (value_sum.mean() - value_sum)


def bos_rates(chain: Chain, alpha: float) -> np.ndarray:
    r"""Returns the rates of that, [V], increasing; the first one is 0, of the direction 1.

    Near its fixed point beta moves by :math:`e^{-w^2 H t}` with :math:`w = e^\alpha / (e^\alpha + W)` and

    .. math::
      H = \sum_v \pi_v (\mathrm{diag}(p_v) - p_v p_v^T)
    """
    share = np.exp(alpha) / (np.exp(alpha) + chain.others)
    covariance = np.diag(chain.weights @ chain.rows) - (chain.rows.T * chain.weights) @ chain.rows
    return np.linalg.eigh(share**2 * covariance)[0]


# (c) The stationary set.


def stationary_point(alpha: float, constant: float, value_sum: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns a point, q = p for every v, of :math:`\{\alpha_v = \alpha, \beta = c \mathbf 1 - e^{-\alpha} \xi\}`.

    Returns:
      (alpha [count], beta [V]).
    """
    return np.full(count, alpha), constant - np.exp(-alpha) * value_sum


def distance_to_stationary(alpha: np.ndarray, beta: np.ndarray, chain: Chain) -> tuple[float, float]:
    r"""Measures the distance of a point from the stationary set, in two numbers that are 0 on it.

    Returns:
      (the standard deviation of alpha under pi; :math:`\| P (e^{\bar\alpha} \beta + \xi) \| / \| P \xi \|` with P the
      centring and the mean under pi).
    """
    mean = chain.weights @ alpha
    spread = float(np.sqrt(chain.weights @ (alpha - mean) ** 2))
    value_sum = chain.contexts.mean(0)
    left = np.exp(mean) * beta + value_sum
    centred = value_sum - value_sum.mean()
    return spread, float(np.linalg.norm(left - left.mean()) / np.linalg.norm(centred))
