"""Kurtosis of what each layer adds to the hidden states, in four orthonormal bases (Figure 6).

If OrthoAdam only moved outliers into its own basis, activations would show them there. X [T, D] is taken in two ways:
`added`, what a whole block adds to the hidden states (attention output plus MLP output, x_m - x_{m-1}), which is how
appendix F words it; and `mlp`, the MLP's part alone, which is what the kernel writes whose basis Q is.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.experiments.from_attention.channels import in_singular_basis
from orthojax.experiments.from_attention.output_weights import output_bases
from orthojax.experiments.measures import Measure, Measured, Say, by_layer
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import at_least_float32, kurtosis
from orthojax.train import Inputs

_SEQUENCES = 64  # of the evaluation set, at most
_AT_ONCE = 8  # sequences, since the activations of all layers of so many are held
_SAMPLES = 8  # matrices of Gaussian values, whose kurtosis hardly varies


def _observe(taps: Taps) -> dict[str, jax.Array]:
    attention, mlp = at_least_float32(taps.attention_output), at_least_float32(taps.mlp_output)
    return {"added": attention + mlp, "mlp": mlp}


@jax.jit
def _mean_kurtosis(x: jax.Array, bases: jax.Array | None) -> jax.Array:
    """Returns the kurtosis over channels of X Q, mean over positions: [L, B, T, D], [L, D, E] -> [L, B]."""
    rotated = x if bases is None else jnp.einsum("LBTD,LDE->LBTE", x, bases, precision="highest")
    return jnp.mean(kurtosis(rotated), axis=-1)


def kurtosis_in_bases(x: jax.Array, bases: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns the kurtosis over channels of X, X Q, X Q^T and X V, mean over positions.

    Args:
      x: Activations of every layer, [L, B, T, D] float32.
      bases: Q of every layer, [L, D, D]; None leaves out X Q and X Q^T.

    Returns:
      `x`, `xq`, `xqt` and `xv` -> [L, B]. V are the right singular vectors of each sequence's X.
    """
    found = {"x": _mean_kurtosis(x, None)}
    if bases is not None:
        found |= {"xq": _mean_kurtosis(x, bases), "xqt": _mean_kurtosis(x, bases.swapaxes(1, 2))}
    found["xv"] = _mean_kurtosis(in_singular_basis(x).astype(np.float32), None)
    return jax.device_get(found)


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    bases = output_bases(loaded.config, "mlp_output") if loaded.config.optim.is_rotated else None
    rows, found = inputs.evaluation[:_SEQUENCES], []
    for i in range(0, len(rows), _AT_ONCE):
        activations: Any = analysis.measure(loaded, [rows[i : i + _AT_ONCE, :-1]], _observe)
        found.append({what: kurtosis_in_bases(x, bases) for what, x in activations.items()})
    say("bases")
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1).astype(np.float64).mean(1), *found)
    metrics = {}
    for what, of_bases in joined.items():
        for basis, layers in of_bases.items():
            metrics |= by_layer(f"{what}_kurtosis_{basis}", layers)
    return Measured(metrics)


BASES = Measure("bases", _measure)


@functools.cache
def gaussian_kurtosis(tokens: int, d_model: int) -> tuple[float, float]:
    """Returns the kurtosis over channels of independent Gaussian values X [tokens, d_model], and of their X V."""
    x = np.random.default_rng(0).normal(size=(_SAMPLES, tokens, d_model))

    def mean_kurtosis(values: np.ndarray) -> float:
        centred = values - values.mean(-1, keepdims=True)
        return float(((centred**4).mean(-1) / (centred**2).mean(-1) ** 2).mean())

    return mean_kurtosis(x), mean_kurtosis(in_singular_basis(x))
