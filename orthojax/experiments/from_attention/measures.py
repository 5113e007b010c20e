"""Measures of Figures 2, 6 and 41 to 44: attention to the first keys, kurtosis in other bases, stability of training.

Legend: B batch, N query heads, T query positions, S key positions, L layers, D channels.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from orthojax import analysis
from orthojax.experiments.from_attention.channels import output_bases
from orthojax.experiments.measures import Arrays, Measure, Metrics, Say, by_layer
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import at_least_float32, kurtosis
from orthojax.train import Inputs, read_metrics

KEYS = 10  # as in the paper; the relaxed mask of Figure 2 lets them see each other
SPIKE_NATS = 1.0


# Figure 2: attention to each of the first keys, if a relaxed mask privileges none of them. Queries before `first_query`
# do not count: with k keys that see each other, the queries from k on see the same keys as under a causal mask.


def attention_mass_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Returns the weight on each of the first keys: m[b, n, j], the mean of w[b, n, t, j] over t >= first_query.

    Weights of one layer, [B, N, T, S], become [B, N, keys], at least float32.
    """
    return jnp.mean(at_least_float32(jnp.asarray(weights))[:, :, first_query:, :keys], axis=2)


def attention_fraction_by_key(weights: ArrayLike, keys: int, first_query: int) -> jax.Array:
    """Returns the share of queries that attend most to each of the first keys: [B, N, k] float32.

    A key counts only if its weight is above 0 and strictly the largest of all S keys, as in
    `analysis.first_attention_fraction`. Arguments are as for `attention_mass_by_key`.
    """
    weights = jnp.asarray(weights)[:, :, first_query:]
    largest = jnp.max(weights, axis=-1, keepdims=True)
    strict = jnp.sum(weights == largest, axis=-1, keepdims=True) == 1
    wins = (weights[..., :keys] == largest) & strict & (largest > 0)
    return jnp.mean(wins, axis=2, dtype=jnp.float32)


def uniformity_p_value(counts: Sequence[int]) -> float:
    """Tests whether winners were drawn uniformly: the exact multinomial test by Pearson's statistic.

    With n draws and the counts c of k equally probable categories, the p-value is P(X >= x) with X = sum_j c_j^2, which
    orders outcomes as chi-square does; it is exact, since n is the number of seeds. Without draws it is 1.

    >>> uniformity_p_value([0, 5, 0, 0])  # five of five, of four: 4 / 4^5
    0.00390625
    """
    draws, observed, as_extreme = sum(counts), sum(count * count for count in counts), 0
    for outcome in itertools.combinations_with_replacement(range(len(counts)), draws):
        drawn = Counter(outcome).values()
        if sum(count * count for count in drawn) >= observed:
            as_extreme += math.factorial(draws) // math.prod(map(math.factorial, drawn))  # sequences that lead there
    return as_extreme / len(counts) ** draws


def _observe_first_keys(taps: Taps, targets: jax.Array) -> dict[str, jax.Array]:
    """Sums mass and fraction [N, k] and the map [T, k'] of one layer over sequences; `by_sequence` is mass [B, k]."""
    weights = taps.attention_weights
    mass = attention_mass_by_key(weights, KEYS, KEYS)
    return {
        "mass": mass.sum(0),
        "fraction": attention_fraction_by_key(weights, KEYS, KEYS).sum(0),
        "map": weights[..., :24].mean(1).sum(0),
        "by_sequence": mass.mean(1),
    }


def _loss_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Sums nats over the positions whose targets the relaxed mask does not show, for either model."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses[:, KEYS - 1 :])


def _join(a: Any, b: Any) -> Any:
    """Adds two batches' sums, and joins values by sequence."""
    if not isinstance(a, dict):
        return a + b
    return {key: np.concatenate([a[key], b[key]], axis=1) if key == "by_sequence" else a[key] + b[key] for key in a}


def _measure_first_keys(loaded: LoadedModel, inputs: Inputs, say: Say) -> tuple[Metrics, Arrays]:
    """Measures the mean weight of queries >= k on the first keys, in batches of 32, to bound memory."""
    rows = inputs.evaluation[:1024]
    batches = [(rows[i : i + 32, :-1], rows[i : i + 32, 1:]) for i in range(0, len(rows), 32)]
    observed, loss = jax.device_get(
        analysis.measure(loaded, batches, _observe_first_keys, output=_loss_sum, join=_join)
    )
    by_head, fraction, shown = (observed[key] / len(rows) for key in ("mass", "fraction", "map"))  # [layers, ...]
    by_sequence, mass = observed["by_sequence"].mean(0), by_head.mean((0, 1))
    loss_nats = float(loss) / (len(rows) * (rows.shape[1] - KEYS))
    winner = int(np.argmax(mass))
    metrics = {
        "perplexity_after_first_keys": float(np.exp(loss_nats)),
        "winner": float(winner),
        "winner_mass": float(mass[winner]),
        "winner_fraction": float(fraction.mean((0, 1))[winner]),
        "others_mass": float(np.delete(mass, winner).mean()),
        "winner_of_heads": float(np.mean(by_head.argmax(-1) == winner)),
        "winner_of_sequences": float(np.mean(by_sequence.argmax(-1) == winner)),
        # At any position: high if each sequence has its own winner.
        "largest_mass_of_sequence": float(by_sequence.max(-1).mean()),
    }
    return metrics, {"mass": mass, "map": shown.mean(0)}


FIRST_KEYS = Measure("first_keys", _measure_first_keys)


# Figure 6: if OrthoAdam only moved outliers into its own basis, activations would show them there.


def in_singular_basis(x: ArrayLike) -> np.ndarray:
    """Returns X V for every sequence, with V [D, D] the right singular vectors of its X [T, D]; on the host.

    V gathers the energy of a sequence in as few channels as an orthonormal basis can: the paper's measure of how large
    a change of basis could make the kurtosis. X V = U S, float64, the largest singular value first, with arbitrary
    signs; channels beyond min(T, D) are 0, but they count.
    """
    # In NumPy, since several batched decompositions in one program can wait for each other forever on a CPU.
    x = np.asarray(x, np.float64)
    T, D = x.shape[-2:]
    # From the eigenvectors of the smaller Gram matrix, which is several times faster than the decomposition itself.
    if T >= D:
        _, right = np.linalg.eigh(x.swapaxes(-1, -2) @ x)
        return (x @ right)[..., ::-1]
    squares, left = np.linalg.eigh(x @ x.swapaxes(-1, -2))
    rotated = (left * np.sqrt(np.maximum(squares, 0.0))[..., None, :])[..., ::-1]
    return np.concatenate([rotated, np.zeros((*rotated.shape[:-1], D - T))], axis=-1)


def _observe_added(taps: Taps) -> dict[str, jax.Array]:
    attention, mlp = at_least_float32(taps.attention_output), at_least_float32(taps.mlp_output)
    return {"added": attention + mlp, "mlp": mlp}


@jax.jit
def _mean_kurtosis(x: jax.Array, bases: jax.Array | None) -> jax.Array:
    """Returns the kurtosis over channels of X Q, mean over positions: [L, B, T, D], [L, D, E] -> [L, B]."""
    rotated = x if bases is None else jnp.einsum("LBTD,LDE->LBTE", x, bases, precision="highest")
    return jnp.mean(kurtosis(rotated), axis=-1)


def kurtosis_in_bases(x: jax.Array, bases: np.ndarray | None) -> dict[str, np.ndarray]:
    """Returns the kurtosis over channels of X, X Q, X Q^T and X V, mean over positions.

    X is [L, B, T, D] float32, Q [L, D, D], None leaves out X Q and X Q^T; `x`, `xq`, `xqt` and `xv` are [L, B].
    """
    found = {"x": _mean_kurtosis(x, None)}
    if bases is not None:
        found |= {"xq": _mean_kurtosis(x, bases), "xqt": _mean_kurtosis(x, bases.swapaxes(1, 2))}
    found["xv"] = _mean_kurtosis(in_singular_basis(x).astype(np.float32), None)
    return jax.device_get(found)


def _measure_bases(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Measures X as `added`, what a block adds to the hidden states (appendix F), and as `mlp`, the part of the MLP."""
    bases = output_bases(loaded.config, "mlp_output") if loaded.config.optim.is_rotated else None
    rows, found = inputs.evaluation[:64], []
    for i in range(0, len(rows), 8):  # since the activations of all layers are held
        activations: Any = analysis.measure(loaded, [rows[i : i + 8, :-1]], _observe_added)
        found.append({what: kurtosis_in_bases(x, bases) for what, x in activations.items()})
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1).astype(np.float64).mean(1), *found)
    metrics = {}
    for what, of_bases in joined.items():
        for basis, layers in of_bases.items():
            metrics |= by_layer(f"{what}_kurtosis_{basis}", layers)
    return metrics


BASES = Measure("bases", _measure_bases)


@functools.cache
def gaussian_kurtosis(tokens: int, d_model: int) -> float:
    """Returns the kurtosis over channels of X V, if X [tokens, d_model] are independent Gaussian values."""
    xv = in_singular_basis(np.random.default_rng(0).normal(size=(8, tokens, d_model)))  # it varies little
    centred = xv - xv.mean(-1, keepdims=True)
    return float(((centred**4).mean(-1) / (centred**2).mean(-1) ** 2).mean())


# Figures 41 to 44: jumps of the training loss and rises of the held-out loss.


def running_mean(losses: np.ndarray, window: int) -> np.ndarray:
    """Returns the mean of the last `window` values up to each, fewer at the start: [n] -> [n].

    >>> running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2)
    array([1., 2., 4., 6.])
    """
    total = np.cumsum(losses)
    before = np.concatenate([np.zeros(window), total])[: len(total)]
    return (total - before) / np.minimum(np.arange(len(total)) + 1, window)


def stability(log: Sequence[Mapping[str, float]], warmup_steps: int) -> dict[str, float]:
    """Measures the stability of a run from the lines of its metrics.jsonl.

    `loss_jump_nats` is the largest excess of a loss after warm-up over the running mean of earlier losses, if there is
    one; `loss_spikes` the number of excesses above `SPIKE_NATS`; `validation_rise_nats` the largest rise of the
    held-out loss from one evaluation to the next, if there are two.
    """
    steps = np.array([line["step"] for line in log if "loss_nats" in line])
    losses = np.array([line["loss_nats"] for line in log if "loss_nats" in line])
    held_out = [line["validation_loss_nats"] for line in log if "validation_loss_nats" in line]
    window = max(3, len(losses) // 20)
    above = (losses[1:] - running_mean(losses, window)[:-1])[steps[1:] > warmup_steps]
    found = {"loss_spikes": float(np.sum(above > SPIKE_NATS))}
    if len(above):
        found["loss_jump_nats"] = float(above.max())
    if len(held_out) > 1:
        found["validation_rise_nats"] = float(np.diff(held_out).max())
    return found


def _measure_stability(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    log = read_metrics(loaded.source.parents[1] / "metrics.jsonl")
    return stability(log, loaded.config.optim.warmup_steps)


STABILITY = Measure("stability", _measure_stability)
