r"""The mathematics of Figure 3 and of appendices E, G and H: vectors, optimizers and layers in another basis.

The spiked vector :math:`x = \alpha e_i + z` with :math:`z \sim N(0, I_D)` has one outlier channel. Rotated by an
orthogonal Q that does not depend on z it is :math:`y = \alpha q + z'` with the unit vector :math:`q = Q e_i` and
another :math:`z' \sim N(0, I_D)`, so that everything follows from alpha and q. Arrays are float64.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import optim
from orthojax.config import ModelConfig, OptimConfig, RotationConfig
from orthojax.model import Norm
from orthojax.ops import orthogonal
from orthojax.train import learning_rate_schedule, make_optimizer

RotationName = Literal["none", "aligned", "hadamard", "haar"]
ROTATIONS: tuple[RotationName, ...] = ("none", "aligned", "hadamard", "haar")
INPUTS, OUTPUTS, TARGETS, BATCH, STEPS = 16, 12, 8, 32, 100  # of the kernel that is trained in two bases
SIZE, ROWS = 64, 32  # of the layers' inputs
Layer = Callable[[dict[str, Any], np.ndarray], Any]


def mixture_kurtosis(alpha: float, directions: np.ndarray) -> np.ndarray:
    r"""Returns the kurtosis of a random channel of :math:`\alpha q + z`.

    With the centred moments over channels :math:`c_k = \frac1D \sum_j (q_j - \bar q)^k`,

    .. math::
      \kappa = \frac{\alpha^4 c_4 + 6 \alpha^2 c_2 + 3}{(\alpha^2 c_2 + 1)^2}

    where moments are over the channel and over z, as in the paper's appendix G, and :math:`\bar q` is known. For
    :math:`q = e_i` it is equation (G.3), for :math:`q_j = 1/\sqrt D` it is 3, for a q whose entries are half
    :math:`1/\sqrt D`, half :math:`-1/\sqrt D` it is :math:`(a^2 + 6a + 3) / (a + 1)^2` with :math:`a = \alpha^2 / D`.

    Alpha is in standard deviations of z, q float64 [..., D], the result [...].

    >>> float(mixture_kurtosis(8.0, np.eye(8)[0]))  # D - 4 + 12/D - 6/D**2 at alpha = D
    5.40625
    """
    centred = directions - directions.mean(-1, keepdims=True)
    c2, c4 = np.mean(centred**2, -1), np.mean(centred**4, -1)
    return (alpha**4 * c4 + 6 * alpha**2 * c2 + 3) / (alpha**2 * c2 + 1) ** 2


def spike_kurtosis(alpha: float, size: int, *, as_printed: bool = False) -> float:
    r"""Returns equation (G.3), the kurtosis of :math:`\alpha e_i + z`, expanded.

    .. math::
      \kappa = \frac{3 + \frac{\alpha^4}{D} + \frac{6 \alpha^2}{D} - \frac{4 \alpha^4}{D^2} - \frac{6 \alpha^2}{D^2}
      + \frac{6 \alpha^4}{D^3} - \frac{3 \alpha^4}{D^4}}{\left(1 + \frac{\alpha^2}{D} (1 - \frac1D) \right)^2}

    `as_printed` uses the paper's :math:`6 \alpha^2 / D^3` in place of :math:`6 \alpha^2 / D^2`; a slip, since
    neither the line above it nor its own substitution below has it.

    >>> spike_kurtosis(4.0, 4), spike_kurtosis(4.0, 4, as_printed=True)
    (2.625, 2.90625)
    """
    a2, a4, d = alpha**2, alpha**4, float(size)
    slip = 3 if as_printed else 2
    above = 3 + a4 / d + 6 * a2 / d - 4 * a4 / d**2 - 6 * a2 / d**slip + 6 * a4 / d**3 - 3 * a4 / d**4
    return above / (1 + a2 / d * (1 - 1 / d)) ** 2


def simplified_kurtosis(size: int) -> float:
    """Returns equation (G.4): `spike_kurtosis` at alpha = D, D - 4 + 12 / D - 6 / D**2."""
    return size - 4 + 12 / size - 6 / size**2


def direction_kurtosis(size: int) -> float:
    """Returns the mean kurtosis of D Gaussian values, 3 (D - 1) / (D + 1), hence of any vector in a Haar random basis.

    Kurtosis does not depend on length, and a Haar rotated vector has the direction of a Gaussian one, whatever it was.
    """
    return 3 * (size - 1) / (size + 1)


def mean_max_abs(shifts: np.ndarray, power: int = 1) -> float:
    r"""Returns the mean of :math:`(\max_j |\mu_j + z_j|)^p` for independent standard normal z, by integration.

    .. math::
      \int_0^\infty p t^{p-1} \Bigl(1 - \prod_j (\Phi(t - \mu_j) - \Phi(-t - \mu_j)) \Bigr) dt

    The shifts are mu [D], the power is p.

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
    r"""Returns the mean of :math:`\|y\|_\infty^2 / \|y\|_2^2` for y = Q x.

    `haar`: exact, :math:`E[\max_j g_j^2] / D` for Gaussian g, since direction and length of g are independent. Others:
    :math:`E[\|y\|_\infty^2] / (\alpha^2 + D)`, the paper's ratio of means, with the exact mean of the maximum.
    """
    if rotation == "haar":
        return mean_max_abs(np.zeros(size), 2) / size
    # `aligned` and `hadamard` have the same shifts, plus or minus alpha / sqrt(D).
    shifts = alpha * np.eye(1, size)[0] if rotation == "none" else np.full(size, alpha / math.sqrt(size))
    return mean_max_abs(shifts, 2) / (alpha**2 + size)


def mean_norm_ratio_of_direction(size: int) -> float:
    r"""Returns the exact mean of :math:`\|u\|_\infty` for a random unit vector u, which is a spike in a Haar basis.

    :math:`E[\max_j |g_j|] / E[\|g\|_2]` with :math:`E[\|g\|_2] = \sqrt 2\, \Gamma(\frac{D+1}{2}) / \Gamma(\frac D2)`.

    >>> round(mean_norm_ratio_of_direction(2), 6), round(2 * math.sqrt(2) / math.pi, 6)
    (0.900316, 0.900316)
    """
    length = math.sqrt(2) * math.exp(math.lgamma((size + 1) / 2) - math.lgamma(size / 2))
    return mean_max_abs(np.zeros(size)) / length


def spiked_vectors(alpha: float, size: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns samples of x, float64 [count, D], each with its own outlier channel, [count]."""
    rng = np.random.default_rng([seed, size])
    x, channels = rng.standard_normal((count, size)), rng.integers(0, size, count)
    x[np.arange(count), channels] += alpha
    return x, channels


def rotate(x: np.ndarray, channels: np.ndarray, rotation: RotationName, seed: int) -> np.ndarray:
    """Returns Q x for every row, float64 [n, D].

    `aligned` is the paper's Q, for row n the reflection of e_i, i = channels[n], to (1, ..., 1) / sqrt(D); `haar` and
    `hadamard` are one matrix for all rows, made as the optimizer makes them.
    """
    if rotation == "none":
        return x
    if rotation == "aligned":
        normal = np.eye(x.shape[1])[channels] - 1 / math.sqrt(x.shape[1])
        return x - 2 * normal * np.sum(normal * x, -1, keepdims=True) / np.sum(normal**2, -1, keepdims=True)
    if rotation == "haar":
        # Not the key of the samples: the matrix is also made from Gaussian draws, and must not depend on the noise.
        return x @ orthogonal.haar((seed, x.shape[1], 1), x.shape[1]).T
    transformation = optim.rotate(optim.Rotation(rotation, lambda path, leaf: optim.RotatedAxes((-1,)), seed))
    rows = {"rows": jnp.asarray(x)}
    (rotated,) = jax.tree.leaves(transformation.update(rows, transformation.init(rows))[0])
    return np.asarray(rotated)


# Training a kernel in two bases (Appendix E): which optimizers depend on the basis.


class Trial(NamedTuple):
    """An optimizer that trains a kernel in two bases."""

    name: str
    config: OptimConfig
    basis_follows: bool = False  # OrthoAdam's own Q is changed with the basis, to Q' = Q R^T


def trials() -> tuple[Trial, ...]:
    """Returns SGD with momentum and without, RMSProp, Adam, Lion, Muon, and OrthoAdam with either Q."""
    plain = OptimConfig(warmup_steps=0, final_learning_rate_fraction=1.0, clip_norm=None)

    def config(optimizer: str, learning_rate: float, **changes: Any) -> OptimConfig:
        return dataclasses.replace(plain, optimizer=optimizer, learning_rate=learning_rate, **changes)

    ortho = config("orthoadam", 5e-3, rotation=RotationConfig(kind="haar", axes="output", seed=0))
    return (
        Trial("sgd_plain", config("sgd", 0.3)),
        Trial("sgd", config("sgd", 0.3, momentum=0.9)),
        Trial("rmsprop", config("rmsprop", 1.5e-3)),
        Trial("adam", config("adam", 5e-3)),
        Trial("lion", config("lion", 5e-4, b2=0.99)),
        Trial("muon", config("muon", 1e-2, momentum=0.95)),
        Trial("orthoadam_follows", ortho, basis_follows=True),
        Trial("orthoadam", ortho),
    )


@functools.cache
def _program(trial: Trial):
    """Compiles for each optimizer once: (frames, start, readout, inputs, targets) -> kernels [frames, steps, ...]."""
    optimizer = make_optimizer(trial.config, schedule=learning_rate_schedule(trial.config, STEPS))

    def in_frame(frame: jax.Array, start: jax.Array, readout: jax.Array, inputs: jax.Array, targets: jax.Array):
        def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
            kernel = params["kernel"] @ frame  # rows of the rotated kernel are R w, so this is the kernel itself
            return jnp.mean(jnp.square(jnp.tanh(x @ kernel) @ readout - y))

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, *batch), state, params)
            params = jax.tree.map(jnp.add, params, updates)
            return (params, state), params["kernel"] @ frame

        params = {"kernel": start @ frame.T}
        state = optimizer.init(params)
        if trial.basis_follows:
            state = jax.tree_util.tree_map_with_path(
                lambda path, leaf: leaf @ frame.T if "basis_0" in jax.tree_util.keystr(path) else leaf, state
            )
        return jax.lax.scan(step, (params, state), (inputs, targets))[1]

    return jax.jit(jax.vmap(in_frame, in_axes=(0, None, None, None, None)))


def frames(seed: int) -> np.ndarray:
    """Returns the identity, a Haar matrix and a signed permutation, float64 [3, OUTPUTS, OUTPUTS]."""
    rng = np.random.default_rng([seed, 1])
    signs = rng.choice([-1.0, 1.0], OUTPUTS)
    return np.stack([np.eye(OUTPUTS), orthogonal.haar((seed, 2), OUTPUTS), np.diag(signs)[rng.permutation(OUTPUTS)]])


def task(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns start [in, out], readout [out, targets], inputs [steps, batch, in] and targets [steps, batch, targets].

    The loss is the mean square of tanh(inputs W) readout - targets.
    """
    rng = np.random.default_rng([seed, 0])
    inputs = rng.standard_normal((STEPS, BATCH, INPUTS))
    readout = rng.standard_normal((OUTPUTS, TARGETS)) * np.geomspace(0.1, 1.0, OUTPUTS)[:, None]
    teacher = 0.5 * rng.standard_normal((INPUTS, OUTPUTS))
    targets = np.tanh(inputs @ teacher) @ readout + 0.1 * rng.standard_normal((STEPS, BATCH, TARGETS))
    start = 0.1 * rng.standard_normal((INPUTS, OUTPUTS))
    return start, readout, inputs, targets


def deviations(trial: Trial, seed: int) -> np.ndarray:
    r"""Measures how far training in another basis deviates, for a Haar R and a signed permutation: [2, STEPS].

    The kernel W [in, out] is trained on L(W), and W' = W R^T, which starts as W_0 R^T, on L'(W') = L(W' R), with equal
    batches. The deviation is :math:`\|W'_t R - W_t\| / \|W_t - W_0\|` in the Frobenius norm.
    """
    start, readout, inputs, targets = task(seed)
    plain, *others = np.asarray(_program(trial)(frames(seed), start, readout, inputs, targets))
    travelled = np.linalg.norm(plain - start, axis=(1, 2))
    return np.stack([np.linalg.norm(other - plain, axis=(1, 2)) / travelled for other in others])


# Layers and rotations of the channels (Appendix E): does f(R x) = R f(x) hold?


def _norm(name: Any) -> Layer:
    module: Any = Norm(ModelConfig(norm=name, use_bias=False))
    return lambda params, x: module.apply({"params": params}, jnp.asarray(x)[None])[0]


def _layers(rng: np.random.Generator) -> dict[str, tuple[Layer, dict[str, Any]]]:
    """Returns name -> (function, parameters): kernels [D, D], vectors [D], scalars."""
    kernel, bias = rng.standard_normal((SIZE, SIZE)) / np.sqrt(SIZE), rng.standard_normal(SIZE)
    scales = rng.uniform(0.5, 1.5, SIZE)
    return {
        "linear": (lambda p, x: x @ p["kernel"].T, {"kernel": kernel}),
        "affine": (lambda p, x: x @ p["kernel"].T + p["bias"][None], {"kernel": kernel, "bias": bias}),
        "bias": (lambda p, x: x + p["bias"][None], {"bias": bias}),
        "rmsnorm_single": (_norm("rmsnorm_single"), {"scale": np.float64(1.3)}),
        "rmsnorm": (_norm("rmsnorm"), {"scale": scales}),
        "rmsnorm_equal": (_norm("rmsnorm"), {"scale": np.full(SIZE, 1.3)}),
        "layernorm": (_norm("layernorm"), {"scale": scales}),
        "layernorm_equal": (_norm("layernorm"), {"scale": np.full(SIZE, 1.3)}),
        "gelu": (lambda p, x: jax.nn.gelu(x), {}),
    }


def _in_basis(value: Any, r: np.ndarray) -> Any:
    """Returns a parameter in the rotated basis: R W R^T, R v, a scalar as it is."""
    if np.ndim(value) == 0:
        return value
    return r @ value if np.ndim(value) == 1 else r @ value @ r.T


def layer_deviations(seed: int) -> dict[str, tuple[float, float]]:
    r"""Measures how far layers are from commuting with a random rotation R of all channels.

    :math:`\|f'(R x) - R f(x)\| / \|f(x)\|`, where f' is f (the paper's criterion), or f with its parameters
    rotated along (R W R^T, R v), which says whether the layer is of the same kind in every basis; both, by name.
    """
    rng, r = np.random.default_rng([seed, 3]), orthogonal.haar((seed, 4), SIZE)
    x = rng.standard_normal((ROWS, SIZE))
    found = {}
    for name, (layer, params) in _layers(rng).items():
        plain = np.asarray(layer(params, x))
        rotated = {key: _in_basis(value, r) for key, value in params.items()}
        gaps = [np.asarray(layer(p, x @ r.T)) - plain @ r.T for p in (params, rotated)]
        fixed, along = (float(np.linalg.norm(gap) / np.linalg.norm(plain)) for gap in gaps)
        found[name] = (fixed, along)
    return found
