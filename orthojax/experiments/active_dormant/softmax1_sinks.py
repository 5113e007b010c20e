r"""Why softmax-1 keeps the sink of Bigram-Backcopy: one layer, with the null given a head start, a bias, or no rival.

Softmax-n adds a key of logit ln n and value 0, the null: :math:`A_j = e^{s_j} / (n + \sum_k e^{s_k})`. A head that has
nothing to do could attend to it, as it attends to <s>. Both start with little: with T keys of equal logits <s> has
1 / (T + n) and the null n / (T + n). But the logit of <s> grows by itself, along its own key, while that of the null is
fixed: its weight grows where all other logits fall, for which the model has no direction at the start, unless keys have
a bias.

The criteria of `CLAIMS` were written when it was known that softmax-1 keeps the sink, from one seed of `backcopy_cure`,
and before any of these runs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.config import FIRST_DEFAULTS, Config, changed_fields, replace
from orthojax.data import BigramBackcopy
from orthojax.data.bigram_backcopy import EVALUATION
from orthojax.experiments.active_dormant import sink_reinforcement
from orthojax.experiments.active_dormant.intervened_training import Intervene, train
from orthojax.experiments.active_dormant.models import short
from orthojax.experiments.active_dormant.sink_reinforcement import SHOWN
from orthojax.experiments.chance import chance_lines
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.pictures import ComputedCurves
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.model import Interventions, Transformer
from orthojax.train import require_task


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
      label: In tables and legends.
      config: The run.
      masked: Whether queries of non-triggers after <s> may not attend to <s>, in training as well.
    """

    label: str
    config: Config
    masked: bool = False


def _n(n: float) -> Config:
    return short(model__normalizer="softmax_n", model__normalizer_n=n)


_SOFTMAX1: dict[str, Any] = {"model__normalizer": "softmax1"}
CELLS = {
    "softmax": Cell("softmax", short()),
    "softmax1": Cell("softmax-1", short(**_SOFTMAX1)),
    "n8": Cell("softmax-n, n = 8", _n(8.0)),
    "n64": Cell("softmax-n, n = 64", _n(64.0)),
    "n512": Cell("softmax-n, n = 512", _n(512.0)),
    "learned": Cell("n learned, from 1", short(model__normalizer="learned_sink")),
    "biases": Cell("softmax-1, linear layers with biases", short(**_SOFTMAX1, model__use_bias=True)),
    "hidden": Cell("softmax-1, <s> hidden", short(**_SOFTMAX1), masked=True),
    "no_bos": Cell("softmax-1, no <s>", short(**_SOFTMAX1, data__bos_tokens=0)),
}
_HIDE = sink_reinforcement.Cell("", masked=True)


def look(
    model: Transformer, task: BigramBackcopy, tokens: jax.Array, params: Any, intervene: Intervene
) -> dict[str, jax.Array]:
    """`sink_reinforcement.look`, and the null at non-triggers, as the model is and where they do not see <s>.

    `others_logit`: the mean over non-trigger queries of the logarithm of the sum of exp(logit) over all keys but the
    first; the null has as much weight as they where it is ln n. `hidden: NAME` are those of the same model where
    non-triggers do not see the first key.
    """

    def null(given: Interventions) -> dict[str, jax.Array]:
        taps: Any = model.apply({"params": params}, tokens, interventions=given, observe=lambda taps: taps)[1]
        counted = (~task.is_trigger(tokens)).at[:, 0].set(False)
        weights, logits = taps.attention_weights[0, :, 0], taps.attention_logits[0, :, 0].astype(jnp.float32)
        visible = jnp.tril(jnp.ones(logits.shape[-2:], bool)).at[:, 0].set(False)
        others = jax.nn.logsumexp(jnp.where(visible, logits, -jnp.inf), axis=-1)
        return {
            "null_mass_rest": jnp.mean(1.0 - jnp.sum(weights, axis=-1), where=counted),
            "others_logit": jnp.mean(others, where=counted),
        }

    def shown(intervene: Intervene) -> dict[str, jax.Array]:
        return sink_reinforcement.look(model, task, tokens, params, intervene) | null(intervene(params, tokens))

    hidden = {f"hidden: {name}": value for name, value in shown(_interventions(_HIDE, model, task)).items()}
    return shown(intervene) | hidden


_look = jax.jit(look, static_argnums=(0, 1, 4))  # once for all seeds, as are:
_interventions: Any = functools.lru_cache(sink_reinforcement.interventions)


def compute(name: str, seed: int, config: Config | None = None, shown: tuple[int, ...] = SHOWN) -> list[Case]:
    """One setting."""
    cell = CELLS[name]
    config = replace(config or cell.config, {"train.seed": seed, "data.seed": seed})
    with jax.enable_x64(False):
        (task, _), model = require_task(config), Transformer(config.model)
        tokens = task.batch(0, config.eval.sequences, config.data.sequence_length, 0, EVALUATION)[:, :-1]
        intervene = _interventions(sink_reinforcement.Cell("", masked=cell.masked), model, task)
        found = train(config, lambda _: intervene, functools.partial(_look, model, task, tokens), shown)
    return [Case(name, {"label": cell.label}, _metrics(found))]


def _metrics(found: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    steps = list(found)
    by_step = {f"{name}/step_{step}": found[step][name] for name in CURVES for step in steps}
    return dict(found[steps[-1]]) | by_step | {"null_at_start": found[steps[0]]["null_mass_rest"]}


CURVES = {
    "sink_attention_rest": "attention to <s> at non-triggers",
    "null_mass_rest": "null mass at non-triggers",
    "sink_logit_gap": "logit gap of <s>",
    "others_logit": "log-sum-exp of the other logits",
    "value_ratio": "value norm of <s> / others'",
}
_CHANCE = {words: value for cell in CELLS.values() for words, value in chance_lines("sink_attention_rest",
                                                                                    cell.config).items()}  # fmt: skip
_SINK, _NULL, _OTHERS, _RATIO = (
    metric(name, CURVES[name]) for name in ("sink_attention_rest", "null_mass_rest", "others_logit", "value_ratio")
)
_START, _TRIGGERS = metric("null_at_start", "null mass at the start"), metric("trigger_keys", "on triggers, late")
_RISKS = (metric("backcopy_risk_nats", "backcopy risk (nats)"),
          metric("bigram_excess_risk_nats", "bigram excess risk (nats)"))  # fmt: skip
_HIDDEN = tuple(
    metric(f"hidden: {name}", f"{label}, <s> hidden after training")
    for name, label in {"null_mass_rest": "null mass", "trigger_keys": "on triggers",
                        "bigram_excess_risk_nats": "bigram excess risk"}.items()
)  # fmt: skip
_DOSES = ("softmax1", "n8", "n64", "n512")


CLAIMS = (
    Claim("Softmax-1 keeps the sink and the drain.", ("softmax1",), (_SINK, _RATIO),
          lambda of: within(of, _SINK, 0.5, 2) and within(of, _RATIO, -1, 0.5),
          "attention above 0.5 and a value norm below half of the others', in every seed",
          revised=Revision("known from one seed of `backcopy_cure`")),
    Claim("The null of softmax-1 is not used: it has no more at the end than at the start.", ("softmax1",),
          (_NULL, _START), lambda of: of.mean(_NULL) <= 1.2 * of.mean(_START),
          "null mass at most a fifth above that of the start"),
    Claim("The null is not kept in reserve: with <s> hidden after training non-triggers attend to other keys.",
          ("softmax1",), _HIDDEN[:2], lambda of: within(of, _HIDDEN[0], -1, 0.5),
          "null mass below 0.5 there, in every seed"),
    Claim("Hiding <s> then costs softmax-1 on the bigram.", ("softmax1",), (_RISKS[1], _HIDDEN[2]),
          lambda of: of.mean(_HIDDEN[2]) >= of.mean(_RISKS[1]) + 0.05, "bigram excess risk at least 0.05 nats higher"),
    Claim("It is a race that a head start turns: the larger n, the weaker the sink.", _DOSES, (_SINK, _START),
          lambda *of: all(a.mean(_SINK) > b.mean(_SINK) for a, b in itertools.pairwise(of)),
          "attention to <s> falls from each n to the next"),
    Claim("With n = 512 there is no sink.", ("n512",), (_SINK, _NULL),
          lambda of: within(of, _SINK, -1, 0.2) and within(of, _NULL, 0.5, 2),
          "attention to <s> below 0.2 and null mass above 0.5, in every seed"),
    Claim("With n = 512 there is no value drain.", ("n512",), (_RATIO,), lambda of: within(of, _RATIO, 0.5, 100),
          "a value norm of <s> above half of the others', in every seed"),
    Claim("Every n learns the task.", {CELLS[name].label: (name,) for name in _DOSES}, _RISKS,
          lambda of: within(of, _RISKS[0], -1, 0.05) and within(of, _RISKS[1], -1, 0.1),
          "backcopy risk below 0.05 and bigram excess below 0.1 nats, in every seed"),
    Claim("Biases, which give the null a direction of its own, are too slow to change that.", ("biases",),
          (_SINK, _NULL), lambda of: within(of, _SINK, 0.5, 2), "attention to <s> above 0.5 in every seed"),
    Claim("A learned n is too slow as well.", ("learned",), (_SINK, _NULL), lambda of: within(of, _SINK, 0.5, 2),
          "attention to <s> above 0.5 in every seed"),
    Claim("Hidden in training, <s> is replaced by triggers, not by the null.", ("hidden",), (_TRIGGERS, _NULL),
          lambda of: within(of, _TRIGGERS, 0.5, 2) and within(of, _NULL, -1, 0.3),
          "more than 0.5 on triggers and a null mass below 0.3, in every seed"),
    Claim("Without <s> triggers are the sink, not the null.", ("no_bos",), (_TRIGGERS, _NULL),
          lambda of: within(of, _TRIGGERS, 0.5, 2) and within(of, _NULL, -1, 0.3),
          "more than 0.5 on triggers and a null mass below 0.3, in every seed"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config = CELLS["softmax1"].config
    return [
        "Softmax-n gives every query one more key, the null, of logit ln n and value 0. One layer of width 64 is "
        "trained with n from 0 (softmax) to 512, with n learned, with biases, without <s>, and with <s> hidden from "
        "non-triggers by a bias of their attention logits.",
        f"{SHOWN[-1]:,} steps of {config.train.batch_size} x {config.data.sequence_length} tokens, Adam with rate "
        f"{config.optim.learning_rate:g}, b2 0.99, decay 1e-4, in float32; measured on {config.eval.sequences} "
        "held-out sequences. Without <s> its metrics are those of the first token.",
    ]


EXPERIMENT = Experiment(
    name="softmax1_sinks",
    title="Active-dormant: why softmax-1 keeps the sink of Bigram-Backcopy",
    compute={name: functools.partial(compute, name) for name in CELLS},
    settings=[SHOWN, [[changed_fields(FIRST_DEFAULTS, cell.config), cell.masked] for cell in CELLS.values()]],
    seconds_per_seed=400.0,
    seeds=(1, 2, 3, 4, 5),
    about=_about,
    tables=(
        MetricTable(f"After {SHOWN[-1]:,} steps", (_SINK, _START, _NULL, _OTHERS, _RATIO, *_RISKS, _TRIGGERS)),
        MetricTable("The same models with <s> hidden from non-triggers", _HIDDEN),
    ),
    claims=CLAIMS,
    pictures=(ComputedCurves(CURVES, SHOWN, {"sink_attention_rest": _CHANCE}),),
)  # fmt: skip
