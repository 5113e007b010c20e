"""Figures 27 to 40: hidden states and attention maps of models, mean over layers and three single layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax import analysis
from orthojax.experiments.claims import DOMINANCE, MASS, OUTLIERS, Claim, Revision, chance
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention.channels import top_count
from orthojax.experiments.from_attention.figure1 import CURED, VANILLA, two_variants
from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.measures import MAPS, Measure, Measured, by_layer
from orthojax.experiments.page import Picture
from orthojax.experiments.pictures import LayerCurves, draw_attention, draw_hidden
from orthojax.experiments.results import Result, metric
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import number
from orthojax.model import LoadedModel, Taps
from orthojax.train import Inputs

SEQUENCES = 100
CHANNELS = 16  # shown
_SAME = 0.8  # an overlap of at least this is 'the same channels'
_BEYOND = 0.1  # and this much more than the residual stream gives alone, which every layer reads and adds to
_OVERLAPS = {"between_sequences": "input", "between_positions": "position", "between_layers": "layer"}
_SETS = {"largest_channel": "the largest", "largest_channels": "a 32nd of all"}


def ranks(magnitude: ArrayLike) -> jax.Array:
    """Ranks of the channels, 0 for the largest; the lower index comes first where two are equal.

    Args:
      magnitude: [..., D].

    Returns:
      int32 [..., D].
    """
    return jnp.argsort(jnp.argsort(-jnp.asarray(magnitude), axis=-1, stable=True), axis=-1)


def mean_overlap(members: ArrayLike, axis: int) -> jax.Array:
    r"""Mean of :math:`|A_i \cap A_j| / k` over all pairs of different sets, each of k channels.

    With :math:`c_d` the number of the n sets that hold channel d it is :math:`(\sum_d c_d^2 - n k) / (n (n - 1) k)`.
    Independent random sets of k among D channels overlap by k / D in the mean.

    Args:
      members: Which channels are in each set, bool [..., D], all with the same number.
      axis: Along which the sets are; at least two.

    Returns:
      float32 of the shape of `members` without that axis and the last.
    """
    members = jnp.asarray(members)
    n = members.shape[axis]
    k = jnp.sum(members, axis=-1).max()
    counts = jnp.sum(members, axis=axis, dtype=jnp.float32)  # their squares may be too large for int32
    return (jnp.sum(counts * counts, axis=-1) / (n * k) - 1) / (n - 1)


def _counts(d_model: int) -> dict[str, int]:
    """Prefix of the metrics -> k."""
    return {"largest_channels": top_count(d_model), "largest_channel": 1}


def _observe_sets(taps: Taps) -> dict[str, tuple[jax.Array, jax.Array]]:
    """By prefix: the set of each sequence, bool [B, D], and the overlap of its positions [B]."""
    magnitude = jnp.abs(taps.residual.astype(jnp.float32))
    of_sequence, of_positions = ranks(jnp.mean(magnitude, axis=1)), ranks(magnitude)
    counts = _counts(magnitude.shape[-1])
    return {name: (of_sequence < k, mean_overlap(of_positions < k, axis=1)) for name, k in counts.items()}


def channel_overlap(loaded: LoadedModel, tokens: np.ndarray) -> dict[str, float]:
    """Overlap of the largest channels of hidden states between inputs, positions and layers.

    The set of a sequence and layer are the k channels of largest mean |x| over positions, that of a position those of
    largest |x|. Overlaps are `mean_overlap`s. Two k, since nobody knows how many outlier channels a model has: where
    there are fewer than k, ordinary channels fill the sets; where there are several, k = 1 sees them take turns.

    Args:
      loaded: The model.
      tokens: int [B, T + 1], B and T at least 2.

    Returns:
      Metrics `largest_channels_*` for k = `top_count(D)` and `largest_channel_*` for k = 1: `between_sequences`, mean
      over layers; `between_positions` of a sequence, mean over sequences and layers; both also by layer;
      `between_layers` of a sequence, mean over sequences, where there are several; `by_chance`, k / D.
    """
    # In batches of the evaluation's size, since a paper's model has 100 sequences of 1,024 positions to remember.
    size, D = loaded.config.eval.batch_size, loaded.config.model.d_model
    batches = (tokens[i : i + size, :-1] for i in range(0, len(tokens), size))
    observed: Any = jax.device_get(analysis.measure(loaded, batches, _observe_sets, join=analysis.concatenate))
    metrics = {}
    for name, (members, positions) in observed.items():
        metrics |= by_layer(f"{name}_between_sequences", np.asarray(mean_overlap(members, axis=1), np.float64))
        metrics |= by_layer(f"{name}_between_positions", positions.astype(np.float64).mean(axis=1))
        if len(members) > 1:
            metrics[f"{name}_between_layers"] = float(np.mean(mean_overlap(members, axis=0)))
        metrics[f"{name}_by_chance"] = _counts(D)[name] / D
    return metrics


def _measure(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    metrics = channel_overlap(loaded, inputs.evaluation[:SEQUENCES])
    on_progress("channel overlap")
    return Measured(metrics, {})


def largest_channels(hidden: np.ndarray, count: int) -> np.ndarray:
    """The channels of the largest values at any position of the first panel, in increasing order.

    Args:
      hidden: |hidden state| of `MAPS`, [4, T, D].
      count: How many at most.
    """
    return np.sort(np.argsort(-hidden[0].max(axis=0), kind="stable")[:count])


def _hidden_picture(result: Result) -> Picture:
    hidden = result.arrays("maps")["hidden"]
    channels = largest_channels(hidden, CHANNELS)
    caption = (
        f"{result.label}: |hidden state| of one held-out sequence in the {len(channels)} channels that have the "
        f"largest values, of {hidden.shape[-1]}."
    )
    panels = dict(zip(MAPS, hidden[:, :, channels], strict=True))
    return Picture(f"hidden_{result.name}", caption, draw_hidden(panels, channels.tolist()), "png")


def _attention_picture(result: Result) -> Picture:
    panels = dict(zip(MAPS, result.arrays("maps")["attention"], strict=True))
    caption = f"{result.label}: attention on one held-out sequence, mean over heads."
    return Picture(f"attention_{result.name}", caption, draw_attention(panels), "png")


def _overlap_claim(overlap: str, what: str) -> Claim:
    """'The same feature channels always exhibit outlier activations' (section 2.2), of softmax and Adam."""
    shown = [metric(f"{sets}_{overlap}", f"overlap of {words}") for sets, words in _SETS.items()]
    keys = [f"{sets}_{overlap}" for sets in _SETS]
    return Claim(f"The same channels are the outliers for every {what} (2.2).", (VANILLA, CURED),
                 (*shown, "kurtosis_rest"),
                 lambda v, c: any(v[key] >= max(_SAME, c[key] + _BEYOND) for key in keys),
                 f"for one of the two sizes at least {_SAME:g} with "
                 f"softmax and Adam, and at least {_BEYOND:g} more than softmax-1 with OrthoAdam has at the same size: "
                 "that model has no outliers to share, so its overlap is what the residual stream alone gives; "
                 f"testable where the kurtosis of the former's other tokens is above {OUTLIERS:g} and the latter's "
                 f"overlap below {_SAME:g} for one size or both",
                 lambda v, c: v.kurtosis_rest > OUTLIERS and any(c[key] < _SAME for key in keys),
                 revised=Revision("it was enough to share what a model without outliers shares as well",
                                  {"holds": lambda v, c: max(v[key] for key in keys) >= _SAME,
                                   "criterion": f"at least {_SAME:g} with softmax and Adam for one of the two sizes; "
                                   f"testable where the kurtosis of its other tokens is above {OUTLIERS:g} and the "
                                   f"overlaps of softmax-1 with OrthoAdam are below {_SAME:g}",
                                   "testable": lambda v, c: v.kurtosis_rest > OUTLIERS
                                   and max(c[key] for key in keys) < _SAME}))  # fmt: skip


_GIVEN = (
    "The paper shows pretrained models here; --model=NAME=CHECKPOINT adds any. Without one the report is of GPT2 130M, "
    "or of what stands for it at this scale."
)


def _masses(*of: Result) -> str:
    layers = [", ".join(number(float(value)) for value in result.by_layer(MASS)) for result in of]
    return f"mass by layer {' → '.join(f'[{values}]' for values in layers)}"


def _largest_mass(result: Result) -> float:
    return float(result.by_layer(MASS).max())


def _dominated(vanilla: Result, *_: Result) -> bool:
    return _largest_mass(vanilla) > DOMINANCE * chance(vanilla)


_OVERLAP_METRICS = [
    metric(f"{sets}_{key}", f"{words}, {key.replace('_', ' ')}")
    for sets, words in _SETS.items()
    for key in (*_OVERLAPS, "by_chance")
]
_SEEN = f"testable where that is above {DOMINANCE:g} times what uniform attention gives"
_ATTENTION_CLAIMS = (
    Claim("With softmax and Adam dominance is established after the first or second layer and persists (K).",
          (VANILLA,), (),
          lambda v: (v.by_layer(MASS)[2:] >= _largest_mass(v) / 2).all(),
          f"from the third layer on each has at least half of the largest mass on the first token; {_SEEN}", _dominated,
          detail=_masses),
    Claim("With softmax-1 and OrthoAdam no layer has it.", (VANILLA, CURED), (),
          lambda v, c: _largest_mass(c) <= _largest_mass(v) / 2,
          f"at most half of the largest mass with softmax and Adam; {_SEEN}", _dominated, detail=_masses),
)  # fmt: skip

HIDDEN_STATES = Experiment(
    name="figure27",
    title="Figures 27 to 33: hidden states in the largest channels, and whether these are the same everywhere",
    variants=two_variants,
    scales=SCALES,
    also=tuple(f"figure{n}" for n in range(28, 34)),
    about=lambda results: [
        _GIVEN,
        "The largest channels of a sequence and a layer are those with the largest mean |hidden state| over positions, "
        "those of a position have the largest |hidden state|. Overlap is the share that two such sets have in common, "
        f"mean over all pairs: of up to {SEQUENCES} held-out sequences in the same layer, of the positions of a "
        "sequence, and of the layers of a sequence. Sets have two sizes: the largest channel alone, which several "
        "outliers may be in turns, and a 32nd of all channels, most of which are ordinary where outliers are fewer.",
    ],
    tables=(
        MetricTable(
            "Overlap of the largest channels",
            [*_OVERLAP_METRICS, "kurtosis_rest"],
            transposed=True,
        ),
    ),
    claims=[_overlap_claim(overlap, what) for overlap, what in _OVERLAPS.items()],
    pictures=(lambda results: list(map(_hidden_picture, results.finished)),),
    measures=(Measure("largest_channels", _measure),),
    takes_models=True,
)
ATTENTION_MAPS = Experiment(
    name="figure34",
    title="Figures 34 to 40: attention maps, mean over layers and three single layers",
    variants=two_variants,
    scales=SCALES,
    also=tuple(f"figure{n}" for n in range(35, 41)),
    about=lambda results: [_GIVEN],
    tables=(MetricTable("Attention on the first token", ("first_attention_fraction", MASS)),),
    claims=_ATTENTION_CLAIMS,
    pictures=(
        lambda results: list(map(_attention_picture, results.finished)),
        LayerCurves(
            "mass_by_layer", "Attention mass on the first token.", "attention mass", {MASS: ""}, normalized=True
        ),
    ),
    takes_models=True,
)
