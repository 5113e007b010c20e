r"""Which drives which: the sink on <s>, or the drain of its value? One layer on Bigram-Backcopy with one of them held.

Active-Dormant Attention Heads says that they reinforce each other: weights move to a key whose value is small, and the
value of an attended key shrinks. Here the norm of the value of <s> is free or held at a level, and key 0 is visible to
queries of non-triggers or hidden from them, in every step of training. What is held is the norm of
:math:`W_O v_{<s>}`: the value is multiplied by target / norm, and gradients pass through the norm, so that only the
direction is trained. The criteria of `CLAIMS` were written after a look at one pilot of the plain model alone, of seed
100.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.analysis import activations, backcopy, sink_logits
from orthojax.config import FIRST_DEFAULTS, Config, changed_fields, replace
from orthojax.data import BigramBackcopy
from orthojax.data.bigram_backcopy import EVALUATION
from orthojax.experiments.active_dormant.intervened_training import Intervene, train
from orthojax.experiments.active_dormant.key_mass import key_mass
from orthojax.experiments.active_dormant.models import RATE, short
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.pictures import ComputedCurves
from orthojax.experiments.results import Quantity, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.model import Interventions, Taps, Transformer
from orthojax.train import require_task

CONFIG = short()
SHOWN = (0, 20, 40, 60, 80, 100, 125, 150, 175, 200, 250, 300, 400, 500, 600, 700, 800, 900, 1000)
EARLY = 300  # a mean over the steps to here says how soon a curve rises
HIDDEN = -1e30  # added to a logit
DRAINED = 0.1


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
      label: In tables and legends.
      value: The norm at which the value of <s> is held: `others`, the mean norm of the other values of the batch at
        this step, taken as a constant; `initial`, its own before the first step; `drained`, a tenth of that; "" leaves
        it.
      masked: Whether queries of non-triggers after <s> may not attend to <s>.
    """

    label: str
    value: str = ""
    masked: bool = False


CELLS = {
    "free_visible": Cell("free, visible"),
    "free_masked": Cell("free, masked", masked=True),
    "others_visible": Cell("held at the others', visible", "others"),
    "others_masked": Cell("held at the others', masked", "others", masked=True),
    "initial_visible": Cell("held at its initial norm, visible", "initial"),
    "drained_visible": Cell("held drained, visible", "drained"),
}


def interventions(
    cell: Cell, model: Transformer, task: BigramBackcopy, initial_norm: jax.Array | None = None
) -> Intervene:
    """(parameters, inputs) -> the interventions of a setting; those that hold the value need the initial norm."""

    def intervene(params: Any, tokens: jax.Array) -> Interventions:
        given, T = Interventions(), tokens.shape[1]
        if cell.masked:
            rows = ~task.is_trigger(tokens) & (jnp.arange(T) > 0)[None]
            bias = jnp.where(rows[..., None] & (jnp.arange(T) == 0)[None, None], HIDDEN, 0.0)
            given = given._replace(attention_bias=bias)
        if cell.value:
            norms = value_norms(model, params, tokens)
            own = norms[0, 0]
            others = jax.lax.stop_gradient(jnp.mean(norms[:, 1:]))
            assert initial_norm is not None
            target = {"others": others, "initial": initial_norm, "drained": DRAINED * initial_norm}[cell.value]
            given = given._replace(first_value_scale=(target / own).reshape(1, 1))
        return given

    return intervene


def value_norms(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """||W_O v|| of the one layer and head without interventions, [B, T]."""
    _, norms = model.apply({"params": params}, tokens, observe=lambda taps: taps.value_norms, head=False)
    return jnp.asarray(norms)[0, :, 0]


def look(model: Transformer, task: BigramBackcopy, tokens: jax.Array, params: Any, intervene: Intervene) -> dict:
    """Risks, sink and drain as the run sees them, and what the value of <s> does at non-triggers.

    `value_effect_nats` is the mean KL divergence there from the predictions to those without that value, all weights
    the same: a vector that the rest of the model ignores has none, whatever its norm. `key_mass` has the rest.
    """
    given, is_trigger = intervene(params, tokens), task.is_trigger(tokens)

    def apply(given: Interventions) -> tuple[jax.Array, Taps]:
        logits, taps = model.apply({"params": params}, tokens, interventions=given, observe=lambda taps: taps)
        return jax.nn.log_softmax(logits), jax.tree.map(lambda x: x[0], taps)

    log_probs, taps = apply(given)
    without, _ = apply(given._replace(first_value_scale=jnp.zeros((1, 1))))
    oracle = jnp.pad(task.oracle(tokens), ((0, 0), (0, 0), (0, log_probs.shape[-1] - task.vocab_size)))
    counted = (~is_trigger).at[:, 0].set(False)
    first, rest = activations.value_norm_first(taps.value_norms), activations.value_norm_rest(taps.value_norms)
    trigger = jnp.asarray(np.isin(np.arange(task.vocab_size), task.triggers))
    return {
        "backcopy_risk_nats": backcopy.backcopy_risk_nats(log_probs, oracle, is_trigger),
        "bigram_excess_risk_nats": backcopy.bigram_excess_risk_nats(log_probs, oracle, is_trigger),
        "sink_attention_rest": backcopy.sink_attention_rest(taps.attention_weights, is_trigger),
        "sink_logit_gap": sink_logits.sink_logit_gap(taps.attention_logits, is_trigger),
        "value_norm_first": first,
        "value_norm_rest": rest,
        "value_ratio": first / rest,
        "value_effect_nats": jnp.mean(jnp.sum(jnp.exp(log_probs) * (log_probs - without), axis=-1), where=counted),
        **key_mass(taps.attention_weights, taps.value_norms, tokens, trigger, is_trigger),
    }


def compute(name: str, seed: int, config: Config = CONFIG, shown: tuple[int, ...] = SHOWN) -> list[Case]:
    """One setting."""
    config = replace(config, {"train.seed": seed, "data.seed": seed})
    with jax.enable_x64(False):
        (task, _), model = require_task(config), Transformer(config.model)
        tokens = task.batch(0, config.eval.sequences, config.data.sequence_length, 0, EVALUATION)[:, :-1]

        def make(params: Any) -> Intervene:
            return interventions(CELLS[name], model, task, value_norms(model, params, tokens[:1])[0, 0])

        measure = functools.partial(jax.jit(look, static_argnums=(0, 1, 4)), model, task, tokens)
        found = train(config, make, measure, shown)
    return [Case(name, {"label": CELLS[name].label}, _metrics(found))]


def _metrics(found: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The numbers at the end, and by step those that are drawn."""
    steps = list(found)
    metrics = dict(found[steps[-1]])
    for name in CURVES:
        metrics |= {f"{name}/step_{step}": found[step][name] for step in steps}
    early = [step for step in steps if step <= EARLY]
    sink = [found[step]["sink_attention_rest"] for step in early]
    metrics["early_sink"] = float(np.trapezoid(sink, early) / early[-1])
    return metrics


CURVES = {
    "sink_attention_rest": "attention to <s> at non-triggers",
    "sink_logit_gap": "logit gap of <s>",
    "value_norm_first": "value norm of <s>",
    "value_ratio": "value norm of <s> / others'",
    "backcopy_risk_nats": "backcopy risk (nats)",
    "bigram_excess_risk_nats": "bigram excess risk (nats)",
}
_SINK = metric("sink_attention_rest", CURVES["sink_attention_rest"])
_GAP = metric("sink_logit_gap", CURVES["sink_logit_gap"])
_RATIO = metric("value_ratio", CURVES["value_ratio"])
_EARLY = metric("early_sink", f"attention to <s>, mean over the first {EARLY} steps")
_EFFECT = metric("value_effect_nats", "effect of the value (nats)")
_ABOVE = Quantity("mass on one token above equal weights", lambda of: of.largest_token - of.largest_token_equal)
_TRIGGERS = metric("trigger_keys", "on triggers")
_TOKEN = metric("token_value_ratio", "its value norm / that of all")


CLAIMS = (
    Claim("Free and visible: the sink forms, and the value of <s> is drained.", ("free_visible",), (_SINK, _RATIO),
          lambda of: within(of, _SINK, 0.7, 2) and within(of, _RATIO, -1, 0.5),
          "attention above 0.7 and a value norm below half of the others', in every seed"),
    Claim("Both halves of the task are learned in every setting.", {c.label: (n,) for n, c in CELLS.items()},
          ("backcopy_risk_nats", "bigram_excess_risk_nats"),
          lambda of: within(of, "backcopy_risk_nats", -1, 0.05) and within(of, "bigram_excess_risk_nats", -1, 0.1),
          "backcopy risk below 0.05 and bigram excess below 0.1 nats, in every seed"),
    Claim("The paper's break condition: a value that cannot shrink makes no sink.", ("others_visible", "free_visible"),
          (_SINK,), lambda held, free: held.sink_attention_rest <= 0.5 * free.sink_attention_rest,
          "attention at most half of that with a free value"),
    Claim("A value that cannot shrink makes no growing logits.", ("others_visible", "free_visible"), (_GAP,),
          lambda held, free: held.sink_logit_gap <= 0.5 * free.sink_logit_gap, "a logit gap at most half of that"),
    Claim("The other reading: it makes one all the same, since what counts is not the norm but what the value does, "
          "and a vector that all non-triggers read alike can be made to do nothing.",
          ("others_visible", "free_visible"), (_SINK, _EFFECT, _RATIO),
          lambda held, free: within(held, _SINK, 0.5, 2) and within(held, _EFFECT, -1, 0.1),
          "attention above 0.5 with an effect of the value below 0.1 nats, in every seed"),
    Claim("Without attention there is no drain: where non-triggers do not see <s>, its value is not drained.",
          ("free_masked", "free_visible"), (_RATIO,),
          lambda masked, visible: within(masked, _RATIO, 0.5, 100) and masked.value_ratio >= 2 * visible.value_ratio,
          "a value norm above half of the others', in every seed, and twice that where <s> is visible"),
    Claim("A value that is drained from the start makes the sink form earlier.", ("drained_visible", "free_visible"),
          (_EARLY,), lambda drained, free: drained.early_sink >= 1.1 * free.early_sink,
          f"attention over the first {EARLY} steps at least a tenth higher"),
    Claim("With a value that keeps its initial norm the sink forms all the same.",
          ("initial_visible", "free_visible"), (_SINK, "value_norm_first"),
          lambda held, free: within(held, _SINK, 0.7, 2), "attention above 0.7 in every seed"),
    Claim("Where <s> is hidden another token becomes the sink.", ("free_masked",), (_ABOVE,),
          lambda of: within(of, _ABOVE, 0.3, 2),
          "non-triggers put 0.3 more on the keys of one token than equal weights would, in every seed"),
    Claim("The value of that token is drained.", ("free_masked",), (_TOKEN,), lambda of: within(of, _TOKEN, -1, 0.5),
          "a value norm below half of the mean, in every seed; testable where that token has 0.3 more",
          lambda of: within(of, _ABOVE, 0.3, 2)),
    Claim("Where <s> is hidden the triggers become the sink, together.", ("free_masked", "others_masked"),
          (_TRIGGERS,), lambda *both: all(within(of, _TRIGGERS, 0.7, 2) for of in both),
          "non-triggers put more than 0.7 on the keys of the three triggers, in every seed, whether the value of <s> "
          "is held or not", revised=Revision("the weight on triggers had been recorded, but not predicted")),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        "Does attention go to <s> because its value is small, or is its value small because attention goes there? One "
        "layer of width 64 is trained with the norm of that value free or held, and with <s> visible to non-triggers "
        "or hidden from them by a bias of their attention logits. Triggers always see it.",
        "Held at the others': the mean value norm of all other tokens at that step, as a constant; at its initial "
        f"norm; or drained, at {DRAINED:g} of that. The scale is target / norm with the gradient through the norm, so "
        "only the direction of the value is trained.",
        f"{SHOWN[-1]:,} steps of {CONFIG.train.batch_size} x {CONFIG.data.sequence_length} tokens, Adam with rate "
        f"{RATE:g}, b2 0.99, decay 1e-4, in float32; measured on 256 held-out sequences. The logit gap is from before "
        "the bias.",
    ]


EXPERIMENT = Experiment(
    name="sink_reinforcement",
    title="Active-dormant: does the sink make the drain, or the drain the sink? Value held, or key hidden",
    compute={name: functools.partial(compute, name) for name in CELLS},
    settings=[changed_fields(FIRST_DEFAULTS, CONFIG), SHOWN, [dataclasses.asdict(cell) for cell in CELLS.values()]],
    seconds_per_seed=240.0,
    seeds=(0, 1, 2, 3, 4),
    about=_about,
    tables=(
        MetricTable(f"After {SHOWN[-1]:,} steps", (
            _SINK, _EARLY, _GAP, metric("value_norm_first", CURVES["value_norm_first"]), _RATIO, _EFFECT,
            metric("backcopy_risk_nats", CURVES["backcopy_risk_nats"]),
            metric("bigram_excess_risk_nats", CURVES["bigram_excess_risk_nats"]))),
        MetricTable("Where late non-triggers attend", (
            metric("first_key", "first key"), metric("largest_position", "largest position of the first half"),
            _ABOVE, _TOKEN, _TRIGGERS,
            metric("trigger_keys_equal", "the same with equal weights"))),
    ),
    claims=CLAIMS,
    pictures=(ComputedCurves(CURVES, SHOWN, {"sink_attention_rest": chance_lines("sink_attention_rest", CONFIG)}),),
)  # fmt: skip
