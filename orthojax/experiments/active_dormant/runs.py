"""The runs on Bigram-Backcopy that entries vary, and runs with the value or the key of <s> held.

The norm of :math:`W_O v_{<s>}` is held by a factor target / norm of the value; gradients pass through the norm, so that
only the direction is trained.
"""

import dataclasses
import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax import analysis
from orthojax.config import Config, changed_fields, replace
from orthojax.data import open_task
from orthojax.data.bigram_backcopy import EVALUATION, BigramBackcopy, default_text
from orthojax.experiments.active_dormant.measures import key_mass
from orthojax.experiments.base import BACKCOPY_MODEL
from orthojax.experiments.study import Row
from orthojax.model import Interventions, Taps, Transformer, bigram_backcopy
from orthojax.ops import cross_entropy_nats
from orthojax.train import init_state, learning_rate_schedule, make_optimizer
from orthojax.train.step import jit_train_step, split_tokens

SCALES = ("tiny", "small")  # a quarter of the published width and length, and the published size, for one GPU
SEEDS = (1, 2, 3, 4, 5)  # not those of the pilots
_LOG_STEPS = (0, 10, 20, 30, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1120, 1500, 2000, 2500)

# PyTorch's SGD, the paper's, adds the decay 1e-4 to the gradient, so momentum makes it 1 / (1 - 0.9) times as strong.
SGD = {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.weight_decay": 1e-3}
ORTHOADAM = {"optim.optimizer": "orthoadam", "optim.rotation.kind": "haar"}


@functools.cache
def backcopy(scale: str = "tiny") -> Config:
    """Returns the one-layer run with softmax and Adam at a scale.

    Scale tiny's rate was chosen on pilots with three layers and seeds 0, 100 and 101: at 1e-3 the peak takes more than
    5,000 steps; at 2e-3 and more without warm-up one seed has its sink in the first layer, with no peak below.
    """
    published = scale == "small"
    steps, width = (10_000, 256) if published else (3000, 64)
    more_steps = (1000, 3500, 5000, 7000) if published else ()
    size = len(set(default_text())) + 2  # depends on the version of Python
    model = bigram_backcopy(1, d_model=width, d_mlp=4 * width, max_length=width, vocab_size=size)
    changes: dict[str, Any] = {
        "optim.learning_rate": 3e-4 if published else 3e-3,
        "optim.b2": 0.99,
        "optim.weight_decay": 1e-4,
        "optim.warmup_steps": 0 if published else 300,
        "optim.clip_norm": None,
        "data.sequence_length": width,
        "train.steps": steps,
        "train.batch_size": 512 if published else 16,
        "train.eval_every_steps": 0,
        "train.probe_every_steps": 0,
        "train.probe_steps": (*_LOG_STEPS, *more_steps, steps),
        "train.probe": "orthojax.experiments.active_dormant.mechanism_probe:mechanism_probe",
        "train.probe_sequences": 64,
        "train.checkpoint_every_steps": 500,
        "eval.sequences": 512,
    }
    return replace(dataclasses.replace(BACKCOPY_MODEL, model=model), changes)


def short(**changes: Any) -> Config:
    """Returns the run for questions about causes, which 1,000 steps of a larger batch answer; `changes` by path."""
    fields: dict[str, Any] = {
        "model.vocab_size": backcopy().model.vocab_size - 1,  # no delimiter
        "optim.warmup_steps": 0,
        "train.steps": 1000,
        "train.batch_size": 32,
        "train.eval_every_steps": 100,
        "train.probe_every_steps": 100,
        "train.probe_steps": (),
        "train.probe": "",
        "train.probe_sequences": 8,
        "eval.sequences": 256,
    }
    return replace(backcopy(), fields | changes)


def letters() -> BigramBackcopy:
    """Returns the task on the text's letters and spaces, few enough that rare ones take part within the times shown."""
    kept = (c if c in string.ascii_lowercase else " " for c in default_text().lower())
    return BigramBackcopy.from_text(" ".join("".join(kept).split()))


SHOWN = (0, 20, 40, 60, 80, 100, 125, 150, 175, 200, 250, 300, 400, 500, 600, 700, 800, 900, 1000)
EARLY = 300  # a mean over the steps up to here says how early a curve rises
_CURVES = ("sink_attention_rest", "null_mass_rest", "value_ratio")

Intervene = Callable[[Any, jax.Array], Interventions]  # (parameters, inputs [B, T]) -> the interventions of a pass


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run with interventions."""

    config: Config = dataclasses.field(default_factory=short)
    # The norm at which the value of <s> is held: `others`, the mean norm of the other values of the batch at this step,
    # taken as a constant; `initial`, its own before the first step; `drained`, a tenth of that; "" does not hold it.
    value: str = ""
    hidden: bool = False  # whether queries of non-triggers after <s> may not attend to <s>
    both_views: bool = False  # whether the trained model is measured with <s> hidden as well, as `hidden: NAME`


def interventions(
    setting: Setting, model: Transformer, task: BigramBackcopy, initial_norm: jax.Array | None = None
) -> Intervene:
    """Returns the interventions of a setting; those that hold the value at its start need the initial norm."""

    def intervene(params: Any, tokens: jax.Array) -> Interventions:
        given, T = Interventions(), tokens.shape[1]
        if setting.hidden:
            rows = ~task.is_trigger(tokens) & (jnp.arange(T) > 0)[None]
            bias = jnp.where(rows[..., None] & (jnp.arange(T) == 0)[None, None], -1e30, 0.0)
            given = given._replace(attention_bias=bias)
        if setting.value:
            norms = value_norms(model, params, tokens)
            own, others = norms[0, 0], jax.lax.stop_gradient(jnp.mean(norms[:, 1:]))
            assert initial_norm is not None
            target = {"others": others, "initial": initial_norm, "drained": 0.1 * initial_norm}[setting.value]
            given = given._replace(first_value_scale=(target / own).reshape(1, 1))
        return given

    return intervene


def value_norms(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """Computes ||W_O v|| of the one layer and head without interventions, [B, T]."""
    _, norms = model.apply({"params": params}, tokens, observe=lambda taps: taps.value_norms, head=False)
    return jnp.asarray(norms)[0, :, 0]


def look(
    model: Transformer, task: BigramBackcopy, tokens: jax.Array, params: Any, intervene: Intervene
) -> dict[str, jax.Array]:
    """Measures risks, sink, drain, the null and `key_mass` as the run sees them.

    `value_effect_nats` is the mean KL divergence at non-triggers from the predictions to those without the value of
    <s>, with all weights unchanged: a vector that the rest of the model ignores has no effect, whatever its norm.
    """
    given, is_trigger = intervene(params, tokens), task.is_trigger(tokens)

    def apply(given: Interventions) -> tuple[jax.Array, Taps]:
        logits, taps = model.apply({"params": params}, tokens, interventions=given, observe=lambda taps: taps)
        return jax.nn.log_softmax(logits), jax.tree.map(lambda x: x[0], taps)

    log_probs, taps = apply(given)
    without, _ = apply(given._replace(first_value_scale=jnp.zeros((1, 1))))
    oracle = jnp.pad(task.oracle(tokens), ((0, 0), (0, 0), (0, log_probs.shape[-1] - task.vocab_size)))
    counted = (~is_trigger).at[:, 0].set(False)
    first, rest = analysis.value_norm_first(taps.value_norms), analysis.value_norm_rest(taps.value_norms)
    return {
        "backcopy_risk_nats": analysis.backcopy_risk_nats(log_probs, oracle, is_trigger),
        "bigram_excess_risk_nats": analysis.bigram_excess_risk_nats(log_probs, oracle, is_trigger),
        "sink_attention_rest": analysis.sink_attention_rest(taps.attention_weights, is_trigger),
        "sink_logit_gap": analysis.sink_logit_gap(taps.attention_logits, is_trigger),
        "value_norm_first": first,
        "value_norm_rest": rest,
        "value_ratio": first / rest,
        "value_effect_nats": jnp.mean(jnp.sum(jnp.exp(log_probs) * (log_probs - without), axis=-1), where=counted),
        "null_mass_rest": jnp.mean(1.0 - jnp.sum(taps.attention_weights[:, 0], axis=-1), where=counted),
        **key_mass(taps.attention_weights, taps.value_norms, tokens, task),
    }


def _train_step(config: Config, model: Transformer, intervene: Intervene, steps: int) -> Callable[..., Any]:
    """Returns the step of a run of the config with interventions in every forward pass; gradients pass through them."""
    schedule = learning_rate_schedule(config.seeded_optim, steps)

    def loss_sum(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs, targets, _ = split_tokens(tokens, config.model)
        logits, _ = model.apply({"params": params}, inputs, interventions=intervene(params, inputs))
        return jnp.sum(cross_entropy_nats(logits, targets)), jnp.asarray(targets.size)

    optimizer = optax.with_extra_args_support(make_optimizer(config.seeded_optim, schedule=schedule))
    return jit_train_step(loss_sum, optimizer, schedule)


def row(name: str, setting: Setting, seed: int, shown: Sequence[int] = SHOWN) -> Row:
    """Trains a setting in float32 up to the last of the steps `shown`; returns the numbers at its end, and curves.

    All are from `look`; parameters, optimizer and batches are as for the same config elsewhere. `early_sink` is the
    mean attention to <s> over the first 300 steps, `null_at_start` the null mass at the start.
    """
    config, found = replace(setting.config, {"train.seed": seed, "data.seed": seed}), {}
    with jax.enable_x64(False):
        (task, _), model, state = open_task(config.data), Transformer(config.model), init_state(config)
        length = config.data.sequence_length
        tokens = task.batch(0, config.eval.sequences, length, 0, EVALUATION)[:, :-1]
        trained = interventions(setting, model, task, value_norms(model, state.params, tokens[:1])[0, 0])
        views = {"": trained}
        if setting.both_views:
            views["hidden: "] = interventions(Setting(config, hidden=True), model, task)
        measure = jax.jit(functools.partial(look, model, task, tokens), static_argnums=1)
        step = _train_step(config, model, trained, shown[-1])
        for done in range(shown[-1] + 1):
            if done in shown:
                seen = {view: measure(state.params, given) for view, given in views.items()}
                found[done] = {f"{view}{key}": float(value) for view, of in seen.items() for key, value in of.items()}
            if done < shown[-1]:
                state, _ = step(state, jnp.asarray(task.batch(done, config.train.batch_size, length, config.data.seed)))
    early = [step for step in shown if step <= EARLY]
    sink = [found[step]["sink_attention_rest"] for step in early]
    metrics = found[shown[-1]] | {f"{key}/step_{step}": found[step][key] for key in _CURVES for step in shown}
    metrics["early_sink"] = float(np.trapezoid(sink, early) / early[-1])
    metrics["null_at_start"] = found[shown[0]]["null_mass_rest"]
    return Row(name, metrics, changed_fields(Config(), config) | {"value": setting.value, "hidden": setting.hidden})
