"""Measures of trained models on Bigram-Backcopy: interventions, sequences without triggers, keys, outliers."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis, quant
from orthojax.analysis.catalogue import label
from orthojax.data import BigramBackcopy
from orthojax.experiments.measures import Measure, Measured, Say, by_layer
from orthojax.experiments.report import Table
from orthojax.experiments.results import Quantity, Results
from orthojax.experiments.tables import cell
from orthojax.model import Interventions, LoadedModel, Taps, Transformer, attention_pattern
from orthojax.ops.cross_entropy import perplexity
from orthojax.train import Inputs
from orthojax.train.evaluation import observing, validation_loss_nats

_KEPT = (
    *("backcopy_excess_risk_nats", "bigram_excess_risk_nats", "sink_attention_rest", "sink_logit_gap", "value_drain"),
    *("value_norm_first", "value_norm_rest", "residual_norm_first", "residual_norm_rest", "residual_peak",
      "residual_peak_ratio"),
)  # fmt: skip
_SCALES = ("attention_scale", "mlp_scale", "first_value_scale", "first_attention_scale", "first_mlp_scale")


def _scales(num_layers: int) -> dict[str, Interventions]:
    """Returns interventions by name, all with the same fields, so that one compiled program serves them all."""
    ones = np.ones(num_layers, np.float32)
    layers = [1 - np.eye(num_layers, dtype=np.float32)[layer] for layer in range(num_layers)]
    given: dict[str, dict[str, np.ndarray]] = {
        "none": {},
        "no_attention": {"attention_scale": 0 * ones},
        "no_mlp": {"mlp_scale": 0 * ones},
        "no_value_of_bos": {"first_value_scale": 0 * ones},
    }
    if num_layers > 1:
        given["no_layer_0"] = {"attention_scale": layers[0], "mlp_scale": layers[0]}
        given["no_layer_0_at_bos"] = {"first_attention_scale": layers[0], "first_mlp_scale": layers[0]}
        for layer, others in enumerate(layers):
            given |= {f"no_attention_{layer}": {"attention_scale": others}, f"no_mlp_{layer}": {"mlp_scale": others}}
    complete = {name: dict.fromkeys(_SCALES, ones) | scales for name, scales in given.items()}
    for scales in complete.values():
        scales["first_value_scale"] = scales["first_value_scale"][:, None]  # for all heads
    return {name: Interventions(**scales) for name, scales in complete.items()}  # pyright: ignore[reportArgumentType]


def _forced(is_trigger: jax.Array) -> dict[str, Interventions]:
    """Returns forced attention of one layer: the ideal head, all queries on <s>, and each on itself."""
    first, previous, itself = (
        attention_pattern(kind, is_trigger.shape[1]) for kind in ("first", "previous", "identity")
    )
    given = {
        "clean_attention": jnp.where(is_trigger[..., None], previous, first),
        "all_on_bos": first,
        "all_on_themselves": itself,
    }
    # Of one shape, so that one compiled program serves them all.
    every = {name: jnp.broadcast_to(x, (*is_trigger.shape, len(first))) for name, x in given.items()}
    return {name: Interventions(forced_weights=x, forced_share=jnp.ones((1, 1))) for name, x in every.items()}


def _intervene(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Computes `NAME: METRIC` of every intervention: risks, and by layer sink, gap, drain and peak."""
    assert inputs.task is not None
    task, (observe, risks_of), L = inputs.task, observing(inputs.task), loaded.config.model.num_layers
    tokens, found = jnp.asarray(inputs.evaluation[:128, :-1]), {}
    every = _scales(L) | (_forced(task.is_trigger(tokens)) if L == 1 else {})
    for name, given in every.items():
        observed = analysis.measure(loaded, [(tokens, tokens)], observe, given, output=risks_of)
        metrics = analysis.finalize(observed[0]) | analysis.finalize(observed[1])
        for key, value in metrics.items():
            if key.split("/")[0] in _KEPT and np.isfinite(value):
                found[f"{name}: {key}"] = value
    say("interventions")
    return Measured(found)


INTERVENTIONS = Measure("interventions", _intervene)


def intervention_table(variant: str, metrics: Sequence[str]) -> Callable[[Results], Table]:
    """Returns a table of a variant with a row for each intervention and a column for each metric."""

    def build(results: Results) -> Table:
        of = results[variant]
        names = dict.fromkeys(key.partition(": ")[0] for key in next(iter(of.seeds.values()), ()) if ": " in key)
        rows = [[name, *(cell(of, Quantity(f"{name}: {key}")) for key in metrics)] for name in names]
        return Table(f"Interventions, {variant}", ["", *map(label, metrics)], rows)

    return build


def _without_triggers(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Measures weights on <s> of sequences without triggers, and which tokens the head takes for triggers.

    The published probe: after <s> and non-triggers comes a token c; c is called a trigger if the last query's weight on
    <s> is below 0.89.
    """
    assert inputs.task is not None
    task, T = inputs.task, loaded.config.data.sequence_length
    characters, plain = np.flatnonzero(np.asarray(task.marginal) > 0), task.plain
    rng, start = np.random.default_rng(0), list(task.bos_ids)
    dormant = np.array([[*start, *rng.choice(plain, T - len(start))] for _ in range(32)])
    probes = np.array([[*start, *rng.choice(plain, T - len(start) - 1), c] for c in characters])

    def observe(taps: Taps) -> jax.Array:
        return jnp.mean(taps.attention_weights[..., 0], axis=1)  # [B, T], mean over heads

    on_first, last = (np.asarray(analysis.measure(loaded, [jnp.asarray(x)], observe)) for x in (dormant, probes))
    is_trigger = np.asarray(task.is_trigger(jnp.asarray(probes[:, -1:])))[:, 0]
    found: dict[str, float] = {}
    for layer in range(len(on_first)):
        called = last[layer, :, -1] < 0.89
        found[f"dormant_sink/layer_{layer}"] = float(on_first[layer, :, len(start) :].mean())
        found[f"triggers_found/layer_{layer}"] = float(called[is_trigger].mean())
        found[f"others_called_triggers/layer_{layer}"] = float(called[~is_trigger].mean())
    say("sequences without triggers")
    return Measured(found)


WITHOUT_TRIGGERS = Measure("without_triggers", _without_triggers)


def key_mass(
    weights: jax.Array,
    value_norms: jax.Array,
    tokens: jax.Array,
    trigger: jax.Array,
    is_trigger: jax.Array,
    delimiter: int | None = None,
) -> dict[str, jax.Array]:
    """Computes where one layer attends, mean over heads and late queries, those of the second half of a sequence.

    Args:
      weights: [B, N, T, T].
      value_norms: ||W_o v||, [B, N, T].
      tokens: int [B, T].
      trigger: Whether an id is a trigger, bool [V].
      is_trigger: Whether the token at a position is one, bool [B, T]; after a delimiter none is.
      delimiter: Its id, if there is one.

    Returns:
      Scalars of non-trigger queries: `first_key`; `trigger_keys`, the mass on triggers; `largest_token`, the mass on
      the token that has most above its `largest_token_equal`, which equal weights would give it by its occurrences;
      `token_value_ratio`, the value norm of that token's keys over that of all; with a delimiter `delimiter_key`. Of
      trigger queries `active_first_key` and `active_trigger_keys`, and with a delimiter `delimiter_key_triggers` of
      queries whose token is a trigger elsewhere.
    """
    T, V = tokens.shape[1], len(trigger)
    late = jnp.arange(T) >= T // 2
    mean_weights = jnp.mean(weights, axis=1)
    one_hot = jax.nn.one_hot(tokens, V, dtype=weights.dtype)

    def mean(values: jax.Array, queries: jax.Array) -> jax.Array:
        where = queries & late[None]
        return jnp.einsum("btx,bt->x", values, where.astype(values.dtype)) / jnp.sum(where)

    by_token = jnp.einsum("bts,bsv->btv", mean_weights, one_hot)
    token = mean(by_token, ~is_trigger)
    seen = jnp.cumsum(one_hot, axis=1) / (1 + jnp.arange(T, dtype=weights.dtype))[None, :, None]
    equal = mean(seen, ~is_trigger)
    most = jnp.argmax(token - equal)
    norms = jnp.mean(value_norms, axis=1)
    of_delimiter = {}
    if delimiter is not None:
        at_triggers = mean(by_token[..., delimiter, None], trigger[tokens])[0]
        of_delimiter = {"delimiter_key": token[delimiter], "delimiter_key_triggers": at_triggers}
    return of_delimiter | {
        "first_key": mean(mean_weights[..., :1], ~is_trigger)[0],
        "largest_token": token[most],
        "largest_token_equal": equal[most],
        "token_value_ratio": jnp.mean(norms, where=tokens == most) / jnp.mean(norms),
        "trigger_keys": jnp.sum(token, where=trigger),
        "active_first_key": mean(mean_weights[..., :1], is_trigger)[0],
        "active_trigger_keys": jnp.sum(mean(by_token, is_trigger), where=trigger),
    }


def trigger_ids(task: BigramBackcopy) -> np.ndarray:
    """Returns whether an id is a trigger, bool [V]."""
    return np.isin(np.arange(task.vocab_size), task.triggers)


@functools.lru_cache(maxsize=8)
def _observing(task: BigramBackcopy) -> Callable[..., dict[str, jax.Array]]:
    def observe(taps: Taps, tokens: jax.Array) -> dict[str, jax.Array]:
        of, is_trigger = jnp.asarray(trigger_ids(task)), task.is_trigger(tokens)
        return key_mass(taps.attention_weights, taps.value_norms, tokens, of, is_trigger, task.delimiter_id)

    return observe


def _measure_keys(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    assert inputs.task is not None
    tokens = inputs.evaluation[:, :-1]
    seen = analysis.measure(loaded, [(tokens, tokens)], _observing(inputs.task))
    say("keys")
    metrics: dict[str, float] = {}
    for name, layers in seen.items():
        metrics |= by_layer(name, np.asarray(layers))
    return Measured(metrics)


KEY_MASS = Measure("keys", _measure_keys)


def _outliers(loaded: LoadedModel, inputs: Inputs, say: Say) -> Measured:
    """Computes the measures of From Attention to Activation, and perplexity at every quantisation setting."""
    tokens = inputs.evaluation[:, :-1]
    batches = [jnp.asarray(tokens[i : i + 64]) for i in range(0, len(tokens), 64)]
    found = analysis.finalize(analysis.measure(loaded, batches, analysis.observe_language_model))
    for key in ("sequences", *(key for key in found if key.startswith(("value_norm", "residual_norm")))):
        del found[key]  # which the evaluation has
    models = {"perplexity": loaded.model}
    for name, setting in quant.SETTINGS.items():
        models[f"perplexity_{name}"] = Transformer(loaded.config.model, linear=quant.quantized_linear(setting))
    for name, model in models.items():
        found[name] = perplexity(validation_loss_nats(loaded.config, loaded.params, inputs, model=model))
    say("outliers")
    return Measured(found)


OUTLIERS = Measure("outliers", _outliers)
