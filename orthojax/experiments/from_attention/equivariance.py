"""Layers and rotations of the channels: does f(R x) = R f(x) hold, as they are and with rotated parameters?"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ModelConfig
from orthojax.model import Norm
from orthojax.ops import orthogonal

SIZE, ROWS = 64, 32

Layer = Callable[[dict[str, Any], np.ndarray], Any]


def _norm(name: str) -> Layer:
    module = Norm(ModelConfig(norm=name, use_bias=False))  # pyright: ignore[reportArgumentType]
    return lambda params, x: module.apply({"params": params}, jnp.asarray(x)[None])[0]  # pyright: ignore


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


def _rotated(value: Any, r: np.ndarray) -> Any:
    """Returns a parameter in the rotated basis: R W R^T, R v, a scalar as it is."""
    return {0: lambda: value, 1: lambda: r @ value, 2: lambda: r @ value @ r.T}[np.ndim(value)]()


def layer_deviations(seed: int) -> dict[str, tuple[float, float]]:
    r"""Measures how far layers are from commuting with a random rotation R of all channels.

    :math:`\|f'(R x) - R f(x)\| / \|f(x)\|`, where f' is f (the paper's criterion), or f with its parameters
    rotated along (R W R^T, R v), which says whether the layer is of the same kind in every basis. RMSNorm and LayerNorm
    are those of the model.

    Args:
      seed: Of parameters, x and R.

    Returns:
      Name -> (parameters fixed, parameters rotated).
    """
    rng, r = np.random.default_rng([seed, 3]), orthogonal.haar((seed, 4), SIZE)
    x = rng.standard_normal((ROWS, SIZE))
    found = {}
    for name, (layer, params) in _layers(rng).items():
        plain = np.asarray(layer(params, x))
        rotated = {key: _rotated(value, r) for key, value in params.items()}
        gaps = [np.asarray(layer(p, x @ r.T)) - plain @ r.T for p in (params, rotated)]
        fixed, along = (float(np.linalg.norm(gap) / np.linalg.norm(plain)) for gap in gaps)
        found[name] = (fixed, along)
    return found
