"""Sinks and outliers if tokens see later ones: masked tokens with full attention, and a prefix LM with cut spans."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.config import Config, replace
from orthojax.experiments.base import BREAKING_MODEL, METHODS
from orthojax.experiments.claims import (
    COARSE,
    NO_OUTLIERS,
    OUTLIERS,
    PEAK,
    Claim,
    Metric,
    cured_outliers,
    fraction_left,
    loses_less,
    lost,
    no_perplexity_lost,
    outliers,
)
from orthojax.experiments.measures import FOUR_BITS, Measure, Measured, Say
from orthojax.experiments.pictures import ByStep, Maps
from orthojax.experiments.study import Study
from orthojax.experiments.tables import Columns, Paired
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import kurtosis
from orthojax.train import Inputs
from orthojax.train.step import split_tokens

_ROWS_WITH_ID = 0.05  # ids with fewer occurrences per row are ignored


def observe_keys(taps: Taps, tokens: jax.Array, by_id: jax.Array) -> dict[str, jax.Array]:
    r"""Sums over sequences the attention that keys get in one layer, and their share.

    With weights A, mean over heads, key k gets :math:`\sum_q A_{qk}`; its share is :math:`\sum_q 1 / n_q` over the
    queries q that see it, each of which sees :math:`n_q` keys.

    Args:
      taps: Taps of the block.
      tokens: int [B, T].
      by_id: Zeros [V].

    Returns:
      `mass` and `share` by position [T]; by id [V] `id_mass`, `id_share`, `id_count`, `id_kurtosis` and `id_norm`.
    """
    visible = jnp.broadcast_to(taps.visible[:, 0], (len(tokens), *taps.visible.shape[2:])).astype(jnp.float32)
    share = jnp.sum(visible / jnp.maximum(jnp.sum(visible, axis=-1, keepdims=True), 1.0), axis=1)
    mass = jnp.sum(jnp.mean(taps.attention_weights, axis=1), axis=1)
    hidden = taps.residual.astype(jnp.float32)
    of_token = {"mass": mass, "share": share, "count": jnp.ones_like(mass), "kurtosis": kurtosis(hidden)}
    of_token["norm"] = jnp.linalg.norm(hidden, axis=-1)
    found = {f"id_{name}": by_id.at[tokens].add(values) for name, values in of_token.items()}
    return found | {"mass": mass.sum(0), "share": share.sum(0)}


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _measure(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Measures which key gets most attention relative to its share, and which token id has outliers, means over layers.

    Returns:
      `first_over_share`; `position_over_share` of the position with the largest, which is `position_of_largest`;
      `id_over_share` and `id_of_largest` for token ids; `last_id_over_share` of the mask or the end of the prefix.
      `kurtosis_of_id`, the largest mean kurtosis of an id, and `norm_of_id_over_mean`, the largest mean norm of an id
      over that of all tokens, with `id_of_kurtosis` and `id_of_norm`.
    """
    c, size = loaded.config.model, loaded.config.eval.batch_size
    tokens = np.asarray(split_tokens(inputs.evaluation, c)[0])
    parts = (jnp.asarray(tokens[i : i + size]) for i in range(0, len(tokens), size))
    batches = ((part, part, jnp.zeros(c.vocab_size)) for part in parts)
    of = jax.device_get(analysis.measure(loaded, batches, observe_keys, join=_add))
    over = {name: (of[f"{name}mass"].sum(0), of[f"{name}share"].sum(0)) for name in ("", "id_")}
    count = of["id_count"][0]
    frequent = count >= _ROWS_WITH_ID * len(tokens)
    position = over[""][0] / over[""][1]
    by_id = {"over_share": np.divide(*over["id_"], out=np.zeros(c.vocab_size), where=frequent)}
    for name in ("kurtosis", "norm"):
        by_id[name] = np.divide(of[f"id_{name}"].mean(0), count, out=np.zeros(c.vocab_size), where=frequent)
    top = {name: int(values.argmax()) for name, values in by_id.items()}
    mean_norm = of["id_norm"].mean(0).sum() / count.sum()
    say("keys")
    metrics = {
        "first_over_share": position[0],
        "position_over_share": position.max(),
        "position_of_largest": position.argmax(),
        "id_over_share": by_id["over_share"].max(),
        "id_of_largest": top["over_share"],
        "last_id_over_share": by_id["over_share"][-1],
        "kurtosis_of_id": by_id["kurtosis"].max(),
        "id_of_kurtosis": top["kurtosis"],
        "norm_of_id_over_mean": by_id["norm"].max() / mean_norm,
        "id_of_norm": top["norm"],
    }
    return Measured({name: float(value) for name, value in metrics.items()}, {"over_share": position})


KEYS = Measure("keys_over_share", _measure)

_MASKS = {
    "masked": {"model.attention_mask": "full", "data.objective": "masked"},
    "prefix": {"model.attention_mask": "prefix", "data.objective": "span_corruption"},
}
# Room for the mask, or for the sentinels and the end of the prefix.
_BASE = replace(BREAKING_MODEL, {"model.vocab_size": 2080, "train.steps": 3000, "train.checkpoint_every_steps": 500})


def _runs(scale: str) -> dict[str, Config]:
    return {
        f"{method}_{mask}": replace(_BASE, {**changes, **METHODS[method]})
        for mask, changes in _MASKS.items()
        for method in ("vanilla", "cured")
    }


_TIMES = 5  # a key with this many times its share is called a sink
SINK = Metric(
    "largest attention to a key over its share", lambda of: max(of["position_over_share"], of["id_over_share"])
)
_OF_ID = Metric("kurtosis_of_id")
_LOST = (COARSE, "w4a4")
_V, _C = "vanilla_*", "cured_*"

BIDIRECTIONAL = Study(
    name="bidirectional",
    title="Beyond causal decoders: sinks and outliers of masked tokens with full attention, and of a prefix LM",
    runs=_runs,
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
             SINK, "first_over_share last_id_over_share", PEAK,
             "norm_of_id_over_mean", *(lost(name) for name in _LOST)],
    tables=[
        Columns("Where it is", ["position_over_share position_of_largest id_over_share id_of_largest kurtosis_of_id "
                "id_of_kurtosis norm_of_id_over_mean id_of_norm"]),
        *(Paired(f"Change from softmax + Adam, {mask}, paired by seed", f"vanilla_{mask}", f"cured_{mask}",
                 "perplexity kurtosis_first kurtosis_rest kurtosis_of_id", "first_attention_mass") for mask in _MASKS),
    ],
    claims=[
        Claim("A bidirectional model grows outliers, at the first token or at others.", outliers(_V)),
        Claim("It grows them at some token, whatever its id.", _OF_ID[_V] > OUTLIERS),
        Claim(f"It has a sink: some key gets {_TIMES} times its share or more.", SINK[_V] >= _TIMES),
        Claim("The sink is the first token.", Metric("first_over_share")[_V] >= 0.9 * SINK[_V], SINK[_V] >= _TIMES),
        Claim("The sink is the mask, or the end of the prefix.",
              Metric("last_id_over_share")[_V] >= 0.9 * SINK[_V], SINK[_V] >= _TIMES),
        cured_outliers("The cure removes the outliers.", _C, _V),
        Claim("The cure leaves no outliers at a token of any id.", _OF_ID[_C] < NO_OUTLIERS, _OF_ID[_V] > OUTLIERS),
        Claim("The cure takes half of the excess off that key, and no other takes its place.",
              fraction_left(SINK[_V], SINK[_C], 1.0) <= 0.5, SINK[_V] >= 2.0),
        no_perplexity_lost("The cure costs no perplexity.", _C, _V),
        *(loses_less(name, f"The cured model loses less at {name}.", _C, _V) for name in _LOST),
    ],
    headlines=[("kurtosis_first", f"vanilla_{mask}", f"cured_{mask}") for mask in _MASKS],
    pictures=[ByStep("first_attention_fraction", name="dominance"),
              ByStep("kurtosis_first kurtosis_rest", y_scale="log", name="kurtosis"), Maps()],
)  # fmt: skip
