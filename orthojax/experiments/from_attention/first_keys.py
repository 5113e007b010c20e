"""Attention on each of the first ten keys, for the mask of Figure 2 with which the first ten tokens see each other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax import analysis
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.model import LoadedModel
from orthojax.train import Inputs

KEYS = 10  # the paper's
SHOWN_KEYS = 24
_SEQUENCES = 1024  # of the evaluation set, at most
_AT_ONCE = 32  # sequences, of which the logits are held


def _observe(taps: analysis.Taps, targets: jax.Array) -> dict[str, jax.Array]:
    """Sums mass and fraction [N, k] and the map [T, k'] of one layer over sequences; `by_sequence` is mass [B, k]."""
    weights = taps.attention_weights
    mass = analysis.attention_mass_by_key(weights, KEYS, KEYS)
    return {
        "mass": mass.sum(0),
        "fraction": analysis.attention_fraction_by_key(weights, KEYS, KEYS).sum(0),
        "map": weights[..., :SHOWN_KEYS].mean(1).sum(0),
        "by_sequence": mass.mean(1),
    }


def _loss_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Sums nats over the positions whose targets the relaxed mask does not show, of either model."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses[:, KEYS - 1 :])


def _join(a: Any, b: Any) -> Any:
    """Adds two batches' sums, and joins what is by sequence."""
    if not isinstance(a, dict):
        return a + b
    return {key: np.concatenate([a[key], b[key]], axis=1) if key == "by_sequence" else a[key] + b[key] for key in a}


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Measures the mean weight on the first keys of queries >= k."""
    rows = inputs.evaluation[:_SEQUENCES]
    batches = [(rows[i : i + _AT_ONCE, :-1], rows[i : i + _AT_ONCE, 1:]) for i in range(0, len(rows), _AT_ONCE)]
    observed, loss = jax.device_get(analysis.measure(loaded, batches, _observe, output=_loss_sum, join=_join))
    say("first keys")
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
        # In whatever position: high if each sequence has a winner of its own.
        "largest_mass_of_sequence": float(by_sequence.max(-1).mean()),
    }
    return Measured(metrics, {"mass": mass, "map": shown.mean(0)})


FIRST_KEYS = Measure("first_keys", _measure)
