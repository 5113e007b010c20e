r"""The spiked vector of From Attention to Activation (arXiv 2410.17174, appendices G and H): closed forms and samples.

:math:`x = \alpha e_i + z` with :math:`z \sim N(0, I_D)` has one outlier channel. Rotated by an orthogonal Q that
does not depend on z it is :math:`y = \alpha q + z'` with the unit vector :math:`q = Q e_i` and another
:math:`z' \sim N(0, I_D)`, so that everything follows from alpha and q. Everything here is float64 NumPy, but for the
Hadamard rotation, which is the optimizer's.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import optim
from orthojax.ops import orthogonal

RotationName = Literal["none", "aligned", "hadamard", "haar"]
ROTATIONS: tuple[RotationName, ...] = ("none", "aligned", "hadamard", "haar")


def mixture_kurtosis(alpha: float, directions: np.ndarray) -> np.ndarray:
    r"""Kurtosis of a random channel of :math:`\alpha q + z`.

    With the centred moments over channels :math:`c_k = \frac1D \sum_j (q_j - \bar q)^k`,

    .. math::
      \kappa = \frac{\alpha^4 c_4 + 6 \alpha^2 c_2 + 3}{(\alpha^2 c_2 + 1)^2}

    where moments are over the channel and over z, as in the paper's appendix G, and :math:`\bar q` is known. For
    :math:`q = e_i` it is equation (G.3), for :math:`q_j = 1/\sqrt D` it is 3, for a q whose entries are half
    :math:`1/\sqrt D`, half :math:`-1/\sqrt D` it is :math:`(a^2 + 6a + 3) / (a + 1)^2` with :math:`a = \alpha^2 / D`.

    Args:
      alpha: Size of the spike, in standard deviations of z.
      directions: q, float64 [..., D].

    Returns:
      float64 [...].

    >>> float(mixture_kurtosis(8.0, np.eye(8)[0]))  # D - 4 + 12/D - 6/D**2 at alpha = D
    5.40625
    """
    centred = directions - directions.mean(-1, keepdims=True)
    c2, c4 = np.mean(centred**2, -1), np.mean(centred**4, -1)
    return (alpha**4 * c4 + 6 * alpha**2 * c2 + 3) / (alpha**2 * c2 + 1) ** 2


def spike_kurtosis(alpha: float, size: int, *, as_printed: bool = False) -> float:
    r"""Equation (G.3): kurtosis of :math:`\alpha e_i + z`, expanded.

    .. math::
      \kappa = \frac{3 + \frac{\alpha^4}{D} + \frac{6 \alpha^2}{D} - \frac{4 \alpha^4}{D^2} - \frac{6 \alpha^2}{D^2}
      + \frac{6 \alpha^4}{D^3} - \frac{3 \alpha^4}{D^4}}{\left(1 + \frac{\alpha^2}{D} (1 - \frac1D) \right)^2}

    Args:
      alpha: Size of the spike.
      size: D.
      as_printed: With the paper's :math:`6 \alpha^2 / D^3` in place of :math:`6 \alpha^2 / D^2`; a slip, since
        neither the line above it nor its own substitution below has it.

    >>> spike_kurtosis(4.0, 4), spike_kurtosis(4.0, 4, as_printed=True)
    (2.625, 2.90625)
    """
    a2, a4, d = alpha**2, alpha**4, float(size)
    slip = 3 if as_printed else 2
    above = 3 + a4 / d + 6 * a2 / d - 4 * a4 / d**2 - 6 * a2 / d**slip + 6 * a4 / d**3 - 3 * a4 / d**4
    return above / (1 + a2 / d * (1 - 1 / d)) ** 2


def simplified_kurtosis(size: int) -> float:
    """Equation (G.4): `spike_kurtosis` at alpha = D, D - 4 + 12 / D - 6 / D**2."""
    return size - 4 + 12 / size - 6 / size**2


def direction_kurtosis(size: int) -> float:
    """Mean kurtosis of D Gaussian values, 3 (D - 1) / (D + 1), hence of any vector in a Haar random basis.

    Kurtosis knows no length, and the direction of a Haar rotated vector is that of a Gaussian one, whatever it was.
    """
    return 3 * (size - 1) / (size + 1)


def mean_max_abs(shifts: np.ndarray, power: int = 1) -> float:
    r"""Mean of :math:`(\max_j |\mu_j + z_j|)^p` for independent standard normal z, by integration.

    .. math::
      \int_0^\infty p t^{p-1} \Bigl(1 - \prod_j (\Phi(t - \mu_j) - \Phi(-t - \mu_j)) \Bigr) dt

    Args:
      shifts: mu, [D].
      power: p.

    >>> round(mean_max_abs(np.zeros(1)), 6), round(math.sqrt(2 / math.pi), 6)
    (0.797885, 0.797885)
    """
    sizes, counts = np.unique(np.abs(shifts), return_counts=True)  # the sign of a shift does not matter
    start = max(0.0, sizes[-1] - 12.0)  # below, the largest shift alone makes the integrand p t**(p - 1)
    t = np.linspace(start, sizes[-1] + 12.0, 2001)
    erf = np.vectorize(math.erf)
    log_all_below = np.zeros_like(t)
    with np.errstate(divide="ignore"):
        for mu, count in zip(sizes, counts, strict=True):
            log_all_below += count * np.log(0.5 * (erf((t - mu) / math.sqrt(2)) + erf((t + mu) / math.sqrt(2))))
    simpson = np.array([1.0, *[4.0, 2.0] * 999, 4.0, 1.0]) * (t[1] - t[0]) / 3
    above = simpson @ (power * t ** (power - 1) * -np.expm1(log_all_below))
    return float(start**power + above)


@functools.cache
def mean_squared_norm_ratio(alpha: float, size: int, rotation: RotationName) -> float:
    r"""Mean of :math:`\|y\|_\infty^2 / \|y\|_2^2` for y = Q x.

    `haar`: exact, :math:`E[\max_j g_j^2] / D` for Gaussian g, since direction and length of g are independent. Others:
    :math:`E[\|y\|_\infty^2] / (\alpha^2 + D)`, the ratio of means that the paper takes for the mean of ratios, with
    the exact mean of the maximum.

    Args:
      alpha: Size of the spike.
      size: D.
      rotation: Which Q. `aligned` and `hadamard` have the same shifts, plus or minus alpha / sqrt(D).
    """
    if rotation == "haar":
        return mean_max_abs(np.zeros(size), 2) / size
    shifts = alpha * np.eye(1, size)[0] if rotation == "none" else np.full(size, alpha / math.sqrt(size))
    return mean_max_abs(shifts, 2) / (alpha**2 + size)


def mean_norm_ratio_of_direction(size: int) -> float:
    r"""Exact mean of :math:`\|u\|_\infty` for a uniformly random unit vector u, which is a spike in a Haar basis.

    :math:`E[\max_j |g_j|] / E[\|g\|_2]` with :math:`E[\|g\|_2] = \sqrt 2\, \Gamma(\frac{D+1}{2}) / \Gamma(\frac D2)`.

    >>> round(mean_norm_ratio_of_direction(2), 6), round(2 * math.sqrt(2) / math.pi, 6)
    (0.900316, 0.900316)
    """
    length = math.sqrt(2) * math.exp(math.lgamma((size + 1) / 2) - math.lgamma(size / 2))
    return mean_max_abs(np.zeros(size)) / length


def spiked_vectors(alpha: float, size: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of x, each with its own outlier channel.

    Returns:
      (x float64 [count, D], channels [count]).
    """
    rng = np.random.default_rng([seed, size])
    x, channels = rng.standard_normal((count, size)), rng.integers(0, size, count)
    x[np.arange(count), channels] += alpha
    return x, channels


def rotate(x: np.ndarray, channels: np.ndarray, rotation: RotationName, seed: int) -> np.ndarray:
    """Q x for every row.

    `aligned` is the Q of the paper, for every row its own: the reflection that takes e_i to (1, ..., 1) / sqrt(D),
    which exists for every D. `haar` and `hadamard` are one matrix for all rows, made as the optimizer makes them.

    Args:
      x: float64 [n, D].
      channels: i of each row, for `aligned`.
      rotation: Which Q.
      seed: Of the matrix.

    Returns:
      float64 [n, D]; `hadamard` is float32 where JAX's float64 is off.
    """
    if rotation == "none":
        return x
    if rotation == "aligned":
        normal = np.eye(x.shape[1])[channels] - 1 / math.sqrt(x.shape[1])
        return x - 2 * normal * np.sum(normal * x, -1, keepdims=True) / np.sum(normal**2, -1, keepdims=True)
    if rotation == "haar":
        # Not the key of the samples: the matrix is made of Gaussian draws too, and must not depend on the noise.
        return x @ orthogonal.haar((seed, x.shape[1], 1), x.shape[1]).T
    transformation = optim.rotate(optim.Rotation(rotation, lambda path, leaf: optim.RotatedAxes((-1,)), seed))
    rows = {"rows": jnp.asarray(x)}
    (rotated,) = jax.tree.leaves(transformation.update(rows, transformation.init(rows))[0])
    return np.asarray(rotated)
