"""Sinks and outliers if tokens see later ones: masked tokens with full attention, and a prefix LM with cut spans."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.config import replace
from orthojax.experiments import claims as c
from orthojax.experiments.base import BREAKING_MODEL, METHODS
from orthojax.experiments.claims import Claim, Metric
from orthojax.experiments.measures import FOUR_BITS, Measure, Metrics, Say
from orthojax.experiments.study import Study
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import kurtosis
from orthojax.report.pictures import ByStep, Maps
from orthojax.report.tables import Columns, Paired
from orthojax.train import Inputs
from orthojax.train.step import split_tokens

_ROWS_WITH_ID = 0.05  # ids with fewer occurrences per row are ignored


def observe_keys(taps: Taps, tokens: jax.Array, by_id: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    r"""Sums over a batch what keys have in one layer, by position [T] and by token id [V].

    With weights A, mean over heads, key k gets the `mass` :math:`\sum_q A_{qk}`; its `share` is :math:`\sum_q 1 / n_q`
    over the queries q that see it, each of which sees :math:`n_q` keys. `count`, and `kurtosis` and `norm` of the
    residual stream. `tokens` are int [B, T], `by_id` zeros [V].
    """
    visible = jnp.broadcast_to(taps.visible[:, 0], (len(tokens), *taps.visible.shape[2:])).astype(jnp.float32)
    mass = jnp.sum(jnp.mean(taps.attention_weights, axis=1), axis=1)
    hidden = taps.residual.astype(jnp.float32)
    of_token = {
        "mass": mass,
        "share": jnp.sum(visible / jnp.maximum(jnp.sum(visible, axis=-1, keepdims=True), 1.0), axis=1),
        "count": jnp.ones_like(mass),
        "kurtosis": kurtosis(hidden),
        "norm": jnp.linalg.norm(hidden, axis=-1),
    }
    return {name: (values.sum(0), by_id.at[tokens].add(values)) for name, values in of_token.items()}


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Measures which position and which token id get most attention relative to their share, over all layers.

    `last_id_over_share` is of the mask or the end of the prefix; `kurtosis_of_id` is the largest mean kurtosis of an
    id, and `norm_of_id_over_mean` the largest mean norm of an id over that of all tokens.
    """
    model, size = loaded.config.model, loaded.config.eval.batch_size
    tokens = split_tokens(inputs.evaluation, model)[0]
    parts = (tokens[i : i + size] for i in range(0, len(tokens), size))
    batches = ((part, part, jnp.zeros(model.vocab_size)) for part in parts)
    join = functools.partial(jax.tree.map, jnp.add)
    seen = jax.device_get(analysis.measure(loaded, batches, observe_keys, join=join))
    total: Any = jax.tree.map(lambda layers: layers.sum(0), seen)
    frequent = total["count"][1] >= _ROWS_WITH_ID * len(tokens) * model.num_layers

    def of_ids(above: str, below: str) -> np.ndarray:
        return np.divide(total[above][1], total[below][1], out=np.zeros(model.vocab_size), where=frequent)

    position, over = total["mass"][0] / total["share"][0], of_ids("mass", "share")
    kurtoses, norms = of_ids("kurtosis", "count"), of_ids("norm", "count")
    mean_norm = total["norm"][0].sum() / total["count"][0].sum()
    largest = {"position_over_share": ("position_of_largest", position), "id_over_share": ("id_of_largest", over),
               "kurtosis_of_id": ("id_of_kurtosis", kurtoses),
               "norm_of_id_over_mean": ("id_of_norm", norms / mean_norm)}  # fmt: skip
    metrics = {"first_over_share": float(position[0]), "last_id_over_share": float(over[-1])}
    for name, (place, values) in largest.items():
        metrics |= {name: float(values.max()), place: float(values.argmax())}
    return metrics


KEYS = Measure("keys_over_share", _measure)

_MASKS = {
    "masked": {"model.attention_mask": "full", "data.objective": "masked"},
    "prefix": {"model.attention_mask": "prefix", "data.objective": "span_corruption"},
}
# Room for the mask, or for the sentinels and the end of the prefix.
_BASE = replace(BREAKING_MODEL, {"model.vocab_size": 2080, "train.steps": 3000, "train.checkpoint_every_steps": 500})
_TIMES = 5  # a key with this many times its share is called a sink
_OVER = Metric("largest attention to a key over its share",
              lambda of: max(of["position_over_share"], of["id_over_share"]))  # fmt: skip
_OF_ID = Metric("kurtosis_of_id")
_LOST = (c.COARSE, "w4a4")
_V, _C = "vanilla_*", "cured_*"

BIDIRECTIONAL = Study(
    name="bidirectional",
    title="Beyond causal decoders: sinks and outliers of masked tokens with full attention, and of a prefix LM",
    runs=lambda scale: {f"{method}_{mask}": replace(_BASE, {**changes, **METHODS[method]})
                        for mask, changes in _MASKS.items() for method in ("vanilla", "cured")},
    seeds=(1, 2, 3),
    measures=(KEYS, FOUR_BITS),
    note="Text with repeated passages, rotary positions, swiglu, rows of 64 positions that begin with <s>. `masked`: "
    "15% of the tokens are predicted, BERT's 80/10/10; every query sees every key. `prefix`: 15% of the tokens "
    "are cut out in spans and predicted after the rest, which sees itself whole (T5's prefix LM). Perplexity is "
    "over what is predicted, on an evaluation set that is corrupted once. A key's share is what it would get if "
    "each query that sees it attended equally to all that it sees; the key is the position or the token id with "
    "most. The last id, 2079, is the mask or the end of the prefix, 2078 and below are sentinels. Prefixes have one "
    "length, so their end is at position 51 of every row. Criteria were committed before any run.",
    columns=["perplexity kurtosis_first kurtosis_rest kurtosis_of_id first_attention_fraction first_attention_mass",
             _OVER, "first_over_share last_id_over_share", c.PEAK,
             "norm_of_id_over_mean", *(c.lost(name) for name in _LOST)],
    tables=[
        Columns("Where it is", ["position_over_share position_of_largest id_over_share id_of_largest kurtosis_of_id "
                "id_of_kurtosis norm_of_id_over_mean id_of_norm"]),
        *(Paired(f"Change from softmax + Adam, {mask}, paired by seed", f"vanilla_{mask}", f"cured_{mask}",
                 "perplexity kurtosis_first kurtosis_rest kurtosis_of_id", "first_attention_mass") for mask in _MASKS),
    ],
    claims=[
        Claim("A bidirectional model grows outliers, at the first token or at others.", c.outliers(_V)),
        Claim("It grows them at some token, whatever its id.", _OF_ID[_V] > c.OUTLIERS),
        Claim(f"It has a sink: some key gets {_TIMES} times its share or more.", _OVER[_V] >= _TIMES),
        Claim("The sink is the first token.", Metric("first_over_share")[_V] >= 0.9 * _OVER[_V], _OVER[_V] >= _TIMES),
        Claim("The sink is the mask, or the end of the prefix.",
              Metric("last_id_over_share")[_V] >= 0.9 * _OVER[_V], _OVER[_V] >= _TIMES),
        c.cured_outliers("The cure removes the outliers.", _C, _V),
        Claim("The cure leaves no outliers at a token of any id.", _OF_ID[_C] < c.NO_OUTLIERS, _OF_ID[_V] > c.OUTLIERS),
        Claim("The cure takes half of the excess off that key, and no other takes its place.",
              c.fraction_left(_OVER[_V], _OVER[_C], 1.0) <= 0.5, _OVER[_V] >= 2.0),
        c.no_perplexity_lost("The cure costs no perplexity.", _C, _V),
        *(c.loses_less(name, f"The cured model loses less at {name}.", _C, _V) for name in _LOST),
    ],
    headlines=[("kurtosis_first", f"vanilla_{mask}", f"cured_{mask}") for mask in _MASKS],
    pictures=[ByStep("first_attention_fraction", name="dominance"),
              ByStep("kurtosis_first kurtosis_rest", y_scale="log", name="kurtosis"), Maps()],
)  # fmt: skip
