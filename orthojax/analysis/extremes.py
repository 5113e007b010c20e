"""Where the largest activations and the sinks of a model are: by layer, token and channel, and by head and key.

Legend: L layers, B rows, N heads, T positions (queries and keys), D d_model.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.analysis.attention import SINK, mean_weights_by_key
from orthojax.model import Taps
from orthojax.ops.statistics import at_least_float32

_LISTED = 5
_MASSIVE, _OVER_MEDIAN = 100.0, 1000.0  # Massive Activations in Large Language Models, arXiv 2402.17762


class Extremes(NamedTuple):
    """The extremes of one layer, or of all with [L, ...] in front; `analysis.concatenate` joins those of batches."""

    magnitude: jax.Array  # [B, T], the largest |x| of a hidden state
    channel: jax.Array  # [B, T] int32, its channel
    median: jax.Array  # [B], of |x| over positions and channels
    key_mass: jax.Array  # [B, T], the largest mean weight of a head on a key, over the queries that see it
    head: jax.Array  # [B, T] int32, the head it belongs to


def observe_extremes(taps: Taps) -> Extremes:
    """Reduces one layer of a causal model to its largest activations and most attended keys.

    A key's mean weight, over the queries that see it, is alpha_k of `gu_sink_rate`.
    """
    x = jnp.abs(at_least_float32(taps.residual))
    alpha = mean_weights_by_key(taps.attention_weights, taps.visible)
    return Extremes(
        magnitude=jnp.max(x, axis=-1),
        channel=jnp.argmax(x, axis=-1).astype(jnp.int32),
        median=jnp.median(x, axis=(1, 2)),
        key_mass=jnp.max(alpha, axis=1),
        head=jnp.argmax(alpha, axis=1).astype(jnp.int32),
    )


class Activation(NamedTuple):
    """The largest activation in one channel, at the first token or at the others."""

    value: float  # the largest |x|
    over_median: float  # divided by the median |x| of its layer and row
    layer: int  # of that value
    channel: int
    token: int  # its id
    position: int  # of that value
    rows: int  # in which this channel is the largest of the first token, or of another one
    massive: bool  # above 100, and 1,000 times the median: arXiv 2402.17762


class SecondarySink(NamedTuple):
    """A token other than the first that gets over 0.3 of a head's attention, from the queries that see it."""

    mass: float  # the largest mean weight
    layer: int  # of that head
    head: int
    token: int  # its id
    position: int  # of that key
    rows: int  # in which the token is a sink of some head
    layers: int  # that have a head with it as sink, in some row


def largest_activations(extremes: Extremes, tokens: np.ndarray) -> list[Activation]:
    """Lists the five largest activations of different channels, separately for the first token.

    Extremes are of all layers, [L, B, T], tokens what the model read, int [B, T].
    """
    magnitude, channel, median = (np.asarray(x) for x in (extremes.magnitude, extremes.channel, extremes.median))
    layer = np.argmax(magnitude, axis=0)
    b, t = np.indices(layer.shape)
    value, where = magnitude[layer, b, t], channel[layer, b, t]
    ratio = value.astype(float) / np.maximum(median[layer, b], np.finfo(np.float32).tiny)
    groups: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for row, position in zip(b.ravel().tolist(), t.ravel().tolist(), strict=True):
        groups[position == 0, int(where[row, position])].append((row, position))
    found = []
    for (_, of_channel), places in groups.items():
        row, position = max(places, key=lambda place: value[place])
        largest, over = float(value[row, position]), float(ratio[row, position])
        rows, massive = len({row for row, _ in places}), largest > _MASSIVE and over >= _OVER_MEDIAN
        token = int(tokens[row, position])
        at = int(layer[row, position])
        found.append(Activation(largest, over, at, of_channel, token, position, rows, massive))
    return sorted(found, key=lambda activation: -activation.value)[:_LISTED]


def secondary_sinks(extremes: Extremes, tokens: np.ndarray) -> list[SecondarySink]:
    """Lists up to five tokens other than the first that draw attention as a sink does, those in most rows first.

    Arguments are as for `largest_activations`. Keys in the last quarter of a row do not count: few queries see them,
    and the last only itself.
    """
    mass, head = np.asarray(extremes.key_mass), np.asarray(extremes.head)
    seen = mass[:, :, : 3 * mass.shape[2] // 4]
    groups: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for layer, row, key in np.argwhere(seen > SINK).tolist():
        if key:
            groups[int(tokens[row, key])].append((layer, row, key))
    found = []
    for token, places in groups.items():
        layer, row, key = place = max(places, key=lambda of: mass[of])
        rows, layers = (len({of[axis] for of in places}) for axis in (1, 0))
        found.append(SecondarySink(float(mass[place]), layer, int(head[place]), token, key, rows, layers))
    return sorted(found, key=lambda sink: (-sink.rows, -sink.mass))[:_LISTED]
