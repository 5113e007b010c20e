"""A table of the papers' metrics for arrays of any model, with the level of chance beside each number."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax.analysis import activations, attention
from orthojax.analysis.catalogue import HIDDEN_STATES, Conditions, chance, label, show
from orthojax.formatting import align


class Row(NamedTuple):
    """One metric."""

    name: str  # in the catalogue
    value: float  # mean over layers
    by_layer: np.ndarray  # [L]
    chance: float  # its value if nothing stands out; nan without such a level


class Summary(NamedTuple):
    """The rows of a table; `print` shows it, `metrics` are its numbers."""

    rows: list[Row]

    @property
    def metrics(self) -> dict[str, float]:
        """Name -> value."""
        return {row.name: row.value for row in self.rows}

    def __str__(self) -> str:
        cells = [["", "mean over layers", "by chance", "largest of a layer", ""]]
        for row in self.rows:
            chance = "" if math.isnan(row.chance) else show(row.name, row.chance)
            values = (show(row.name, float(value)) for value in (row.value, row.by_layer.max()))
            cells.append([row.name, next(values), chance, *values, label(row.name)])
        return "\n".join(align(cells))


_HIDDEN = tuple(name for name in HIDDEN_STATES if name.endswith(("_first", "_rest")))


def summarize(
    hidden: ArrayLike | Sequence[ArrayLike] | None = None,
    weights: ArrayLike | Sequence[ArrayLike] | None = None,
    attention_mask: ArrayLike | None = None,
) -> Summary:
    """Tabulates outliers of hidden states and attention to the first token, for any arrays.

    The functions of the same names in `orthojax.analysis` define its rows. A single layer may be passed by itself.

    Args:
      hidden: Hidden states after each block, [L, B, T, D] or L arrays [B, T, D].
      weights: Attention weights, [L, B, N, T, S] or L arrays [B, N, T, S].
      attention_mask: For padded rows, left or right: [B, T], 1 or True for tokens and 0 for padding. The first token
        is then the first one that is no padding, and numbers are means over rows of means over a row's tokens.

    Raises:
      ValueError: For other shapes, numbers that are not finite, logits in place of weights, hidden states and weights
        of different batches, a mask with gaps, or if neither is given.

    >>> x = np.random.default_rng(0).normal(size=(2, 4, 16, 512))  # two layers, four sequences
    >>> x[:, :, 0, 7] = 50.0  # an outlier channel of the first token
    >>> summary = summarize(x)  # print(summary) is a table
    >>> {name: round(summary.metrics[name]) for name in ("kurtosis_first", "kurtosis_rest")}
    {'kurtosis_first': 351, 'kurtosis_rest': 3}
    """
    if hidden is None and weights is None:
        raise ValueError("summarize() without arrays; allowed: hidden states, attention weights or both")
    states, probabilities = _layers(hidden, "hidden states", "[B, T, D]"), _layers(weights, "weights", "[B, N, T, S]")
    if states and probabilities:
        (B, T), (b, t) = states[0].shape[:2], (probabilities[0].shape[0], probabilities[0].shape[2])
        if (B, T) != (b, t):
            raise ValueError(
                f"hidden states of {B} rows of {T} positions, weights of {b} rows of {t}; allowed: [L, B, T, D] and "
                "[L, B, N, T, S] of one batch"
            )
        if probabilities[0].shape[3] != T:
            keys = probabilities[0].shape[3]
            raise ValueError(f"weights over {keys} keys, hidden states of {T} positions; allowed: [L, B, N, T, T]")
    rows = [(slice(None), slice(None))]  # of each part: which rows, and which of their positions
    if attention_mask is not None:
        first = (states or probabilities)[0]
        rows = _tokens_of(np.asarray(attention_mask), (first.shape[0], first.shape[1 if states else 2]))
    return Summary([
        *_of_hidden([[layer[row, own] for row, own in rows] for layer in states]),
        *_of_weights([[layer[row, :, own, own] for row, own in rows] for layer in probabilities]),
    ])  # fmt: skip


def _tokens_of(mask: np.ndarray, shape: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Returns each row and its positions that are no padding."""
    if mask.shape != shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"attention_mask {mask.dtype} {list(mask.shape)}; allowed: 0 and 1, {list(shape)}")
    steps = np.diff(mask.astype(int), axis=1, prepend=0, append=0)
    if ((steps == 1).sum(1) != 1).any():
        raise ValueError("attention_mask has rows with gaps or without tokens; allowed: padding on the left or right")
    ends = zip(np.argmax(steps == 1, 1), np.argmax(steps == -1, 1), strict=True)
    return [(slice(row, row + 1), slice(start, stop)) for row, (start, stop) in enumerate(ends)]


def _layers(given: Any, words: str, layer: str) -> list[jax.Array]:
    """Returns one array with the axes `layer` for each layer; [] for None."""
    if given is None:
        return []
    ndim, allowed = layer.count(",") + 1, f"allowed: [L, {layer[1:]}, or a list of L arrays {layer}"
    if not isinstance(given, list | tuple):
        if not hasattr(given, "shape"):
            raise ValueError(f"{words} are a {type(given).__name__}; {allowed}")
        given = [given] if len(given.shape) == ndim else given
        if len(np.shape(given)) != ndim + 1 and not isinstance(given, list):
            raise ValueError(f"{words} {list(given.shape)}; {allowed}")
    for i, of in enumerate(given):
        if not hasattr(of, "shape") or len(of.shape) != ndim:
            what = list(of.shape) if hasattr(of, "shape") else f"a {type(of).__name__}"
            raise ValueError(f"{words} of layer {i}: {what}; {allowed}")
        if not jnp.isfinite(jnp.asarray(of)).all():
            raise ValueError(f"{words} of layer {i} have numbers that are not finite; allowed: finite ones")
    return [jnp.asarray(of) for of in given]


_Parts = Sequence[Sequence[jax.Array]]  # of each layer, the whole batch or, if it is padded, each row


def _of_hidden(layers: _Parts) -> list[Row]:
    if not layers:
        return []
    found = {name: _by_layer(getattr(activations, name), layers) for name in _HIDDEN}
    shapes = [np.shape(part) for part in layers[0]]
    levels = {}
    for name in _HIDDEN:
        of_parts = [chance(name, Conditions(length=T, d_model=D, vocab_size=0)) for _, T, D in shapes]
        known = [level for level in of_parts if level is not None]
        levels |= {name: float(np.mean(known))} if len(known) == len(of_parts) else {}
    levels["residual_norm_first"] = float(found["residual_norm_rest"].mean())
    return _rows(found, levels)


def _of_weights(layers: _Parts) -> list[Row]:
    if not layers:
        return []
    metrics = (attention.first_attention_fraction, attention.first_attention_mass)
    found = {metric.__name__: _by_layer(metric, layers) for metric in metrics}
    masses = [np.mean([attention.first_attention_mass_by_head(part) for part in parts], axis=0) for parts in layers]
    found["sink_rate"] = np.array([float(attention.sink_rate(mass)) for mass in masses])
    levels = [_chance(part) for part in layers[0]]
    return _rows(found, {name: float(np.mean([level[name] for level in levels])) for name in levels[0]})


def _by_layer(metric: Callable[[Any], Any], layers: _Parts) -> np.ndarray:
    return np.array([np.mean([float(metric(part)) for part in parts]) for parts in layers])


def _rows(found: Mapping[str, np.ndarray], levels: Mapping[str, float]) -> list[Row]:
    return [Row(name, float(values.mean()), values, levels.get(name, math.nan)) for name, values in found.items()]


def _chance(layer: ArrayLike) -> dict[str, float]:
    """Returns the levels of chance that fit the weights: for causal weights, those of `chance_of_first`.

    Late queries that do not see the first key are taken as a window, and rows that sum to less than 1 as softmax-1; if
    they sum to more, the mass has no level of chance.
    """
    weights = np.asarray(layer, np.float32)
    T, S = weights.shape[-2:]
    sums = weights.sum(-1)
    softmax = bool(np.allclose(sums, 1.0, atol=1e-2))
    if T == S and not np.triu(weights, 1).any():
        seen = np.flatnonzero(weights[..., 0].any(axis=(0, 1)))
        window = int(seen[-1]) + 1 if len(seen) else T
        if np.tril(weights, -window).any():  # late queries see earlier keys than a window would show
            window = T
        fraction = attention.chance_of_first(T, window=window)
        mass = attention.chance_of_first(T, softmax1=not softmax, window=window)
    else:
        fraction, mass = 1 / S, 1 / (S + (not softmax))
    known = softmax or (sums <= 1.01).all()
    return {"first_attention_fraction": fraction, "first_attention_mass": mass if known else math.nan}
