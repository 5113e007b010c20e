"""Figure 2: the first ten tokens see each other. Which of them takes over the attention, and does it differ by seed?

Rows do not begin with a BOS here, at any scale: it would be the same token at position 0 of every sequence, privileged
by what it is, where the question is what the mask privileges. The paper's GPT-2 has none either.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.analysis import Taps, attention_fraction_by_key, attention_mass_by_key
from orthojax.config import Config
from orthojax.experiments.from_attention.figure2_report import KEYS, PLAIN, RELAXED, SHOWN_KEYS, report
from orthojax.experiments.from_attention.models import base_run
from orthojax.experiments.study.measures import Measure, Measured
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant
from orthojax.fields import replace
from orthojax.model import Transformer
from orthojax.ops import chunked_cross_entropy_sum_nats, positions_at_once
from orthojax.train import Inputs, read_params

_SEQUENCES = 1024  # of the evaluation set, at most


def variants(scale: str) -> tuple[Variant, ...]:
    """Softmax and Adam with the relaxed mask, and the same with a plain one."""
    base = replace(base_run(scale), {"data.bos": False})
    return (
        Variant(RELAXED, f"first {KEYS} tokens see each other", replace(base, {"model.relaxed_causal_tokens": KEYS})),
        Variant(PLAIN, "causal mask", base),
    )


def _observe(taps: Taps) -> tuple[jax.Array, ...]:
    """[B, N, k] mass and fraction on each of the first keys, and the mean map [T, k'] of one layer."""
    weights = taps.attention_weights
    mass, fraction = (look(weights, KEYS, KEYS) for look in (attention_mass_by_key, attention_fraction_by_key))
    return mass, fraction, jnp.mean(weights[..., :SHOWN_KEYS], axis=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _look(model: Transformer, params: Any, tokens: jax.Array, chunk: int | None) -> tuple[jax.Array, ...]:
    """Sums over sequences of mass and fraction [L, N, k], mass by sequence [B, k], sum of the map, summed loss."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    B, T = inputs.shape
    observed: Any = model.apply({"params": params}, inputs, observe=_observe, head=False)
    hidden, (mass, fraction, shown) = observed
    head: Any = model.head_kernel(params)
    # The targets that a relaxed mask hides, of both models.
    counted = (jnp.arange(T) >= KEYS - 1)[None]
    positions = positions_at_once(B, T, model.config.vocab_size, chunk)
    loss = chunked_cross_entropy_sum_nats(
        hidden, head[0], targets, counted, positions=positions, vocab_axis=head[1]
    )  # fmt: skip
    return mass.sum(1), fraction.sum(1), mass.mean((0, 2)), shown.mean(0) * B, loss


def _measure(config: Config, checkpoint: Path, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    model, params = Transformer(config.model), read_params(checkpoint)
    rows, size = inputs.evaluation[:_SEQUENCES], config.eval.batch_size
    looks = [
        jax.device_get(_look(model, params, rows[i : i + size], config.train.loss_chunk_positions))
        for i in range(0, len(rows), size)
    ]
    on_progress("first keys")
    mass, fraction, by_sequence, shown, loss = zip(*looks, strict=True)
    by_head, fraction_by_head, shown = (np.sum(part, axis=0) / len(rows) for part in (mass, fraction, shown))
    return first_keys(by_head, fraction_by_head, np.concatenate(by_sequence), shown, _mean(loss, rows))


def _mean(loss_sums: Any, rows: np.ndarray) -> float:
    """The mean loss of positions k - 1 and later, whose sums over all sequences are given."""
    return float(np.sum(np.asarray(loss_sums, np.float64))) / (len(rows) * (rows.shape[1] - 1 - (KEYS - 1)))


def first_keys(
    by_head: np.ndarray, fraction_by_head: np.ndarray, by_sequence: np.ndarray, shown: np.ndarray, loss_nats: float
) -> Measured:
    """What is said of the first keys, from their mean weight for queries >= k.

    Args:
      by_head: Mean weight on each of the k keys, [layers, heads, k].
      fraction_by_head: Share of queries that attend most to each, [layers, heads, k].
      by_sequence: Mean weight over layers and heads, [sequences, k].
      shown: Mean attention map, [T, keys].
      loss_nats: Mean loss at positions >= k - 1.
    """
    mass = by_head.mean((0, 1))
    winner = int(np.argmax(mass))
    metrics = {
        "perplexity_after_first_keys": float(np.exp(loss_nats)),
        "winner": float(winner),
        "winner_mass": float(mass[winner]),
        "winner_fraction": float(fraction_by_head.mean((0, 1))[winner]),
        "others_mass": float(np.delete(mass, winner).mean()),
        "winner_of_heads": float(np.mean(by_head.argmax(-1) == winner)),
        "winner_of_sequences": float(np.mean(by_sequence.argmax(-1) == winner)),
        # In whatever position: high where each sequence has a winner of its own.
        "largest_mass_of_sequence": float(by_sequence.max(-1).mean()),
    }
    arrays = {"mass": mass, "mass_by_head": by_head, "fraction_by_head": fraction_by_head, "map": shown}
    return Measured(metrics, arrays | {"mass_by_sequence": by_sequence})


EXPERIMENT = Experiment(
    name="figure2",
    title="the first ten tokens see each other: which of them dominates attention",
    scales={scale: functools.partial(variants, scale) for scale in ("tiny", "small", "paper")},
    report=report,
    seeds=(0, 1, 2, 3, 4),
    measures=(Measure("first_keys", _measure),),
)
