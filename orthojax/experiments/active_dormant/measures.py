"""Metrics and measures of runs on Bigram-Backcopy: recorded steps, interventions, keys, outliers, sinks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from orthojax import analysis, quant
from orthojax.data import BigramBackcopy
from orthojax.experiments.active_dormant.mechanism_probe import probe_file
from orthojax.experiments.claims import Metric
from orthojax.experiments.measures import Measure, Metrics, Say, by_layer
from orthojax.model import Interventions, LoadedModel, Taps
from orthojax.ops.cross_entropy import perplexity
from orthojax.report.results import Numbers
from orthojax.train import Inputs, read_metrics, rounded_perplexities
from orthojax.train.evaluation import observing, validation_loss_nats
from orthojax.train.step import split_tokens

COPY, BIGRAM = RISKS = Metric("backcopy_excess_risk_nats"), Metric("bigram_excess_risk_nats")
SINK_MASS = Metric("sink_attention_rest")  # the largest over layers


def _ratios(of: Numbers, name: str) -> list[float]:
    """Returns the ratio of a norm at <s> to the norm at other tokens, for every layer that has it."""
    ratios = of.layers(f"{name}_first") / of.layers(f"{name}_rest")
    return [float(ratio) for ratio in ratios if np.isfinite(ratio)] or [np.nan]


# The layer with the most pronounced phenomenon counts.
TOP_PEAK = Metric("residual norm, <s> over others, largest of the layers", lambda of: max(_ratios(of, "residual_norm")))
TOP_DRAIN = Metric("value norm, <s> over others, smallest of the layers", lambda of: min(_ratios(of, "value_norm")))

_BY_LAYER = ("sink_attention_rest", "sink_logit_gap", "value_norm_first", "residual_norm_first")


def half_step(steps: ArrayLike, values: ArrayLike) -> float:
    """Returns the first step at which a curve has completed half of its last large change.

    Measured from the value farthest from the final one.

    >>> half_step([0, 10, 20, 30], [4.0, 3.0, 1.0, 0.0])
    20.0
    >>> half_step([0, 10, 20, 30, 40], [2.0, 6.0, 5.0, 2.0, 1.0])
    30.0
    """
    left = np.abs(np.asarray(values, float) - np.asarray(values, float)[-1])
    farthest = int(np.argmax(left))
    return float(np.asarray(steps)[farthest + np.argmax(left[farthest:] <= 0.5 * left[farthest])])


def line(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Returns (correlation, slope) of the line through points."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    return float(np.corrcoef(x, y)[0, 1]), float(np.polyfit(x, y, 1)[0])


def _history(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Computes start, maximum, growth and `half_step` of every curve, and lines over ln t and t at late steps."""
    lines = [line for line in read_metrics(loaded.source.parents[1] / "metrics.jsonl") if "sink_attention" in line]
    layers = range(loaded.config.model.num_layers)
    found: dict[str, float] = {}
    for name in (COPY.name, BIGRAM.name, *(f"{name}/layer_{layer}" for name in _BY_LAYER for layer in layers)):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if len(points) < 2:
            continue
        steps, values = (np.array(column, float) for column in zip(*points, strict=True))
        found[f"{name}/start"], found[f"{name}/half_step"] = float(values[0]), half_step(steps, values)
        found[f"{name}/largest"] = float(values.max())
        if values[0]:
            found[f"{name}/growth"] = float(values[-1] / values[0])
        for kind, x, late in (("log", np.log(np.maximum(steps, 1)), steps >= 200), ("linear", steps, steps >= 500)):
            if late.sum() > 2 and np.ptp(values[late]) > 0:
                found[f"{name}/{kind}_r"], found[f"{name}/{kind}_slope"] = line(x[late], values[late])
    return found


HISTORY = Measure("history", _history)


def mechanism(probes: Sequence[dict[str, np.ndarray]], *, since: int = 200) -> dict[str, float]:
    """Computes what the paper says about the gradient of <s>'s residual stream, by layer, from probes in their order.

    Of the steps from `since` on: `gradient_final_cosine`, the mean cosine with the last probe's gradient;
    `gradient_decay`, the slope of the log of its norm against the log of the residual norm, -1 for 1 / norm;
    `gradient_weak_share` and `gradient_key_cosine`, means of those of `first_token_mechanism`.
    """
    late = [arrays for arrays in probes if arrays["step"] >= since]
    by_probe = {name: np.stack([of[name] for of in late]).astype(float) for name in late[0] if name[:6] == "first_"}
    gradients = by_probe["first_gradient"]  # [probes, L, D]
    sizes, norms = np.linalg.norm(gradients, axis=-1), np.linalg.norm(by_probe["first_residual"], axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # after the last block there is no gradient
        cosines = np.einsum("PLD,LD->PL", gradients, gradients[-1]) / (sizes * sizes[-1])
    found: dict[str, float] = {}
    for layer in range(gradients.shape[1]):
        values = {
            "gradient_final_cosine": cosines[:-1, layer].mean(),
            "gradient_weak_share": by_probe["first_gradient_weak_share"][:, layer].mean(),
            "gradient_key_cosine": by_probe["first_gradient_key_cosine"][:, layer].mean(),
        }
        if np.all(sizes[:, layer] > 0):
            values["gradient_decay"] = np.polyfit(np.log(norms[:, layer]), np.log(sizes[:, layer]), 1)[0]
        found |= {f"{name}/layer_{layer}": float(value) for name, value in values.items() if np.isfinite(value)}
    return found


def _mechanism(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    folder = loaded.source.parents[1] / "probes"
    return mechanism([dict(np.load(probe_file(folder, step))) for step in sorted(loaded.config.train.probe_steps)])


MECHANISM = Measure("mechanism", _mechanism)  # for runs with `mechanism_probe`


_KEPT = (COPY.name, BIGRAM.name, "sink_logit_gap", "value_norm_first", "residual_norm_first", "residual_peak")


def _scales(num_layers: int) -> dict[str, Interventions]:
    """Returns interventions by name, all with the same fields, so that one compiled program serves them all."""
    ones = np.ones(num_layers, np.float32)
    later = np.minimum(np.arange(num_layers, dtype=np.float32), 1)  # 0 for the first layer
    given = {"none": (ones, ones), "no_attention": (0 * ones, ones), "no_mlp": (ones, 0 * ones)}
    if num_layers > 1:
        given["no_layer_0"] = later, later
    return {
        name: Interventions(attention_scale=jnp.asarray(attention), mlp_scale=jnp.asarray(mlp))
        for name, (attention, mlp) in given.items()
    }


def _intervene(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Computes `NAME: METRIC` for every intervention: risks, and by layer gap, value and peak."""
    assert inputs.task is not None
    (observe, risks_of), tokens, found = observing(inputs.task), jnp.asarray(inputs.evaluation[:128, :-1]), {}
    for name, given in _scales(loaded.config.model.num_layers).items():
        observed = analysis.measure(loaded, [(tokens, tokens)], observe, given, output=risks_of)
        metrics = analysis.finalize(observed[0]) | analysis.finalize(observed[1])
        for key, value in metrics.items():
            if key.split("/")[0] in _KEPT and np.isfinite(value):
                found[f"{name}: {key}"] = value
    return found


INTERVENTIONS = Measure("interventions", _intervene)


def _without_triggers(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    """Measures weights on <s> in sequences without triggers, and which tokens the head treats as triggers.

    As published: those after which, behind <s> and non-triggers, the last query's weight on <s> is below 0.89.
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
    return found


WITHOUT_TRIGGERS = Measure("without_triggers", _without_triggers)


def key_mass(
    weights: jax.Array, value_norms: jax.Array, tokens: jax.Array, task: BigramBackcopy
) -> dict[str, jax.Array]:
    """Computes where one layer attends, mean over heads and late queries (the second half of a sequence), scalars.

    From weights [B, N, T, T], value norms ||W_o v|| [B, N, T] and int [B, T] tokens. For non-trigger queries:
    `first_key`; `trigger_keys`, the mass on triggers; `largest_token`, the mass on the token with the largest excess
    over `largest_token_equal`, what equal weights would give it; `token_value_ratio`, the value norm of that token's
    keys over that of all keys; with a delimiter, `delimiter_key`. For trigger queries: `active_first_key` and
    `active_trigger_keys`. With a delimiter, for queries whose token is a trigger elsewhere: `delimiter_key_triggers`.
    """
    T, V, is_trigger, delimiter = tokens.shape[1], task.vocab_size, task.is_trigger(tokens), task.delimiter_id
    trigger = jnp.isin(jnp.arange(V), jnp.asarray(task.triggers))  # by id
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
    masses = {}
    if delimiter is not None:
        at_triggers = mean(by_token[..., delimiter, None], trigger[tokens])[0]
        masses = {"delimiter_key": token[delimiter], "delimiter_key_triggers": at_triggers}
    return masses | {
        "first_key": mean(mean_weights[..., :1], ~is_trigger)[0],
        "largest_token": token[most],
        "largest_token_equal": equal[most],
        "token_value_ratio": jnp.mean(norms, where=tokens == most) / jnp.mean(norms),
        "trigger_keys": jnp.sum(token, where=trigger),
        "active_first_key": mean(mean_weights[..., :1], is_trigger)[0],
        "active_trigger_keys": jnp.sum(mean(by_token, is_trigger), where=trigger),
    }


def _measure_keys(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    assert inputs.task is not None
    task, tokens = inputs.task, inputs.evaluation[:, :-1]

    def observe(taps: Taps, tokens: jax.Array) -> dict[str, jax.Array]:
        return key_mass(taps.attention_weights, taps.value_norms, tokens, task)

    seen = analysis.measure(loaded, [(tokens, tokens)], observe)
    return {key: x for name, layers in seen.items() for key, x in by_layer(name, np.asarray(layers)).items()}


KEY_MASS = Measure("keys", _measure_keys)


def _outliers(loaded: LoadedModel, inputs: Inputs, say: Say) -> Metrics:
    tokens = split_tokens(inputs.evaluation, loaded.config.model)[0]
    batches = [jnp.asarray(tokens[i : i + 64]) for i in range(0, len(tokens), 64)]
    found = analysis.finalize(analysis.measure(loaded, batches, analysis.observe_language_model))
    for key in ("sequences", *(key for key in found if key.startswith(("value_norm", "residual_norm")))):
        del found[key]  # already in the evaluation
    found["perplexity"] = perplexity(validation_loss_nats(loaded.config, loaded.params, inputs, model=loaded.model))
    found |= rounded_perplexities(loaded, inputs, quant.SETTINGS)
    return found


OUTLIER_MEASURES = Measure("outliers", _outliers)
