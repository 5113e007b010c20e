"""One table for what the paper finds in both worlds: Bigram-Backcopy, a language model of ours, and given models.

Active-Dormant Attention Heads (arXiv 2410.13835) says that the sinks, drains and peaks of its task are those of
language models. Here every model is measured by the same definitions: the first position against all others, whatever
its token.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.analysis.sink_logits import sink_logit_gap_sum
from orthojax.experiments.active_dormant.models import config
from orthojax.experiments.base_configs import SHALLOW_MODEL
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Experiment, Variant, each
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.model import LoadedModel
from orthojax.train import Inputs

ROWS, LAST_TOKENS = 8, 128


def _observe(taps: analysis.Taps) -> dict[str, jax.Array]:
    """Of one block, means over a batch: by head [N] where heads have it."""

    def norm(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)

    gap, queries = sink_logit_gap_sum(taps.attention_logits, jnp.zeros(taps.residual.shape[:2], bool))
    return {
        # Without query 0, which sees no other key: at two lengths its share of the queries differs.
        "first_weight": analysis.first_attention_mass_by_head(taps.attention_weights[:, :, 1:]),
        "gap": gap / queries,
        "values": jnp.stack([f(taps.value_norms) for f in (analysis.value_norm_first, analysis.value_norm_rest)]),
        "residuals": jnp.stack([f(taps.residual) for f in (analysis.residual_norm_first, analysis.residual_norm_rest)]),
        # At the first position: what reaches the block, what attention makes of it, and the MLP.
        "first_norms": jnp.stack(
            [jnp.mean(norm(x)[:, 0]) for x in (taps.residual_before, taps.post_attention, taps.residual)]
        ),
    }


def _last_logits(taps: analysis.Taps) -> jax.Array:
    return taps.attention_logits[:, :, -1].astype(jnp.float32)  # [B, N, S]


def _align(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    tokens = np.asarray(inputs.evaluation[:ROWS, :-1])
    batches = [jnp.asarray(row[None]) for row in tokens]
    by_row: Any = [analysis.measure(loaded, [batch], _observe) for batch in batches]
    seen = {name: np.mean([np.asarray(of[name]) for of in by_row], axis=0) for name in by_row[0]}
    found = summarize(seen)
    # The published probe: one text, with many last tokens.
    rng = np.random.default_rng(0)
    last = rng.choice(np.unique(inputs.evaluation[:, 1:]), LAST_TOKENS)
    texts = np.repeat(tokens[:1], LAST_TOKENS, axis=0)
    texts[:, -1] = last
    logits: Any = [
        np.asarray(analysis.measure(loaded, [jnp.asarray(texts[i : i + 32])], _last_logits))
        for i in range(0, LAST_TOKENS, 32)
    ]
    spread = np.concatenate(logits, axis=1).std(axis=1)  # [L, N, S]
    layer = int(found["sink_layer"])
    found["spread_first"] = float(spread[layer, :, 0].mean())
    found["spread_rest"] = float(spread[layer, :, 1:-1].mean())
    on_progress("aligned")
    return Measured(found, {})


def summarize(seen: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of what `_observe` saw in every layer, [L, ...].

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


ALIGNED = Measure("aligned", _align)


def _variants(scale: str) -> tuple[Variant, ...]:
    return (
        Variant("one_layer", "Bigram-Backcopy, one layer", config(1)),
        Variant("three_layers", "Bigram-Backcopy, three layers", config(3)),
        Variant("language_model", "language model on Python's library", SHALLOW_MODEL),
    )


def _of_the_task(results: Results) -> str:
    """The task's own measures of the same models, which leave triggers out."""
    measured = [
        f"{of.mean_cell(metric('sink_attention'))} and a gap of {of.mean_cell(metric('sink_logit_gap'))} "
        f"({of.label.partition(', ')[2]})"
        for name in ("one_layer", "three_layers")
        if (of := results[name]).seeds
    ]
    return f"the weight on <s> is {'; '.join(measured)}." if measured else "see there."


_PEAKED = lambda of: of.peak > 2  # noqa: E731
CLAIMS = (
    Claim("The first position is a sink.", each(), ("first_weight",), lambda of: of.first_weight > 0.3,
          "mean weight above 0.3 in some layer, where equal logits give much less"),
    Claim("Its values are drained.", each(), ("drain",), lambda of: of.drain < 0.5,
          "norm below half of the others' in some layer"),
    Claim("It has a residual-state peak.", each(), ("peak",), _PEAKED, "norm above twice the others' after some layer"),
    Claim("An MLP makes the peak.", each(), ("made_by", "made_by_mlp"), lambda of: of.made_by_mlp > 0.5,
          "more than half of what the block with the largest rise adds; testable where there is a peak", _PEAKED),
    Claim("Logits on it are concentrated.", each(), ("spread_first", "spread_rest"),
          lambda of: of.spread_first < 0.5 * of.spread_rest,
          f"standard deviation over {LAST_TOKENS} random last tokens below half of that of other keys, in the layer of "
          "the sink"),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="aligned",
    title="Sink, drain, peak and concentration by one definition: Bigram-Backcopy, a language model, given models",
    variants=_variants,
    about=lambda results: [
        f"Means over {ROWS} held-out rows and all heads. `--model=smollm2=smollm2` adds a published model. The first "
        "position is <s> where rows begin with it, as on Bigram-Backcopy, and an ordinary token of the published "
        "model. All queries count, triggers too, where heads should attend elsewhere: of the other queries alone, on "
        "which the other experiments of the task report, " + _of_the_task(results),
    ],
    measures=(ALIGNED,),
    tables=(
        MetricTable("The same quantities of every model",
                    [metric("first_weight", "weight on the first position"), metric("drain", "value norm / others'"),
                     metric("peak", "residual norm / others'"), metric("made_by", "block that makes it"),
                     metric("made_by_mlp", "share of its MLP"), metric("gap", "logit gap"),
                     metric("spread_first", "spread of logits on it"), metric("spread_rest", "on other keys")]),
    ),
    claims=CLAIMS,
    takes_models=True,
)  # fmt: skip
