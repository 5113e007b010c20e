"""Sink, drain and peak by one definition: Bigram-Backcopy, a language model of ours, and given models.

Active-Dormant Attention Heads (arXiv 2410.13835) says that the sinks, drains and peaks of its task are those of
language models. Here every model is measured by the same definitions: the first position against all others, whatever
its token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.analysis.sink_logits import sink_logit_gap_sum
from orthojax.config import replace
from orthojax.experiments.active_dormant.runs import backcopy
from orthojax.experiments.base import SHALLOW_MODEL
from orthojax.experiments.claims import Claim, Metric
from orthojax.experiments.measures import Measure, Measured, Say
from orthojax.experiments.study import Study
from orthojax.model import LoadedModel
from orthojax.train import Inputs

ROWS, _LAST_TOKENS = 8, 128


def _observe(taps: analysis.Taps) -> dict[str, jax.Array]:
    """Computes means of one block over a batch; by head [N] if heads have them."""

    def norm(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)

    gap, queries = sink_logit_gap_sum(taps.attention_logits, jnp.zeros(taps.residual.shape[:2], bool))
    return {
        # Without query 0, which sees no other key: at two lengths its share of the queries differs.
        "first_weight": analysis.first_attention_mass_by_head(taps.attention_weights[:, :, 1:]),
        "gap": gap / queries,
        "values": jnp.stack([f(taps.value_norms) for f in (analysis.value_norm_first, analysis.value_norm_rest)]),
        "residuals": jnp.stack([f(taps.residual) for f in (analysis.residual_norm_first, analysis.residual_norm_rest)]),
        # At the first position: the input of the block, the stream after its attention, and after its MLP.
        "first_norms": jnp.stack(
            [jnp.mean(norm(x)[:, 0]) for x in (taps.residual_before, taps.post_attention, taps.residual)]
        ),
    }


def _last_logits(taps: analysis.Taps) -> jax.Array:
    return taps.attention_logits[:, :, -1].astype(jnp.float32)  # [B, N, S]


def _align(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    tokens = np.asarray(inputs.evaluation[:ROWS, :-1])
    by_row: Any = [analysis.measure(loaded, [jnp.asarray(row[None])], _observe) for row in tokens]
    found = summarize({name: np.mean([np.asarray(of[name]) for of in by_row], axis=0) for name in by_row[0]})
    # The published probe: one text, with many last tokens.
    texts = np.repeat(tokens[:1], _LAST_TOKENS, axis=0)
    texts[:, -1] = np.random.default_rng(0).choice(np.unique(inputs.evaluation[:, 1:]), _LAST_TOKENS)
    logits: Any = [
        np.asarray(analysis.measure(loaded, [jnp.asarray(texts[i : i + 32])], _last_logits))
        for i in range(0, _LAST_TOKENS, 32)
    ]
    spread = np.concatenate(logits, axis=1).std(axis=1)  # [L, N, S]
    layer = int(found["sink_layer"])
    found["spread_first"] = float(spread[layer, :, 0].mean())
    found["spread_rest"] = float(spread[layer, :, 1:-1].mean())
    say("aligned")
    return Measured(found)


def summarize(seen: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics of the observations of every layer, [L, ...].

    `sink_layer` is the layer with most weight on the first position, in the mean over heads; `gap` is of it. `drain`
    and `peak` are those of the most pronounced layer. `made_by` is the block that raises the norm of the first
    position most, and `made_by_mlp` the share of its MLP in what that block adds.
    """
    weight, norms = seen["first_weight"].mean(axis=-1), seen["first_norms"]
    layer, rise = int(np.argmax(weight)), norms[:, 2] - norms[:, 0]
    made = int(np.argmax(rise))
    with np.errstate(invalid="ignore", divide="ignore"):
        values = seen["values"][:, 0] / seen["values"][:, 1]  # a layer without attention has no values
    return {
        "sink_layer": float(layer),
        "first_weight": float(weight[layer]),
        "gap": float(seen["gap"][layer].mean()),
        "drain": float(np.nanmin(values)),
        "peak": float((seen["residuals"][:, 0] / seen["residuals"][:, 1]).max()),
        "made_by": float(made + 1),
        "made_by_mlp": float((norms[made, 2] - norms[made, 1]) / rise[made]),
    }


ALIGNED_MEASURE = Measure("aligned", _align)
_WEIGHT, _DRAIN, _PEAK = Metric("first_weight"), Metric("drain"), Metric("peak")
_SPREAD, _SPREAD_REST = Metric("spread_first"), Metric("spread_rest")
_MADE_BY_MLP = Metric("made_by_mlp")

ALIGNED = Study(
    name="aligned",
    title="Sink, drain, peak and concentration by one definition: Bigram-Backcopy, a language model, given models",
    runs=lambda scale: {
        "one_layer": backcopy(),
        "three_layers": replace(backcopy(), {"model.num_layers": 3}),
        "language_model": SHALLOW_MODEL,
    },
    models=lambda given: given,
    measures=(ALIGNED_MEASURE,),
    note=f"Means over {ROWS} held-out rows and all heads; `--model=smollm2=smollm2` adds a published model. The first "
    "position is <s> if rows begin with it, as on Bigram-Backcopy, and otherwise an ordinary token. All queries count, "
    "also those of triggers, which should attend elsewhere; sink_attention and sink_logit_gap leave these out. Spreads "
    f"are of logits over {_LAST_TOKENS} random last tokens, in the layer of the sink.",
    columns=[_WEIGHT, _DRAIN, _PEAK, "made_by", _MADE_BY_MLP, "gap", _SPREAD, _SPREAD_REST,
             "sink_attention sink_logit_gap"],
    claims=[
        Claim("The first position is a sink.", _WEIGHT["*"] > 0.3),
        Claim("Its values are drained.", _DRAIN["*"] < 0.5),
        Claim("It has a residual-state peak.", _PEAK["*"] > 2),
        Claim("An MLP makes the peak.", _MADE_BY_MLP["*"] > 0.5, _PEAK["*"] > 2),
        Claim("Logits on it are concentrated.", _SPREAD["*"] < 0.5 * _SPREAD_REST["*"]),
    ],
)  # fmt: skip
