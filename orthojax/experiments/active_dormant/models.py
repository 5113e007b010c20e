"""The transformers of the Bigram-Backcopy experiments, and what is measured of them: over training, and otherwise."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from orthojax import analysis, quant
from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig, replace
from orthojax.data.bigram_backcopy import default_text
from orthojax.experiments.base_configs import OUTPUT_AXIS
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.results import Numbers, Quantity
from orthojax.model import Interventions, LoadedModel, Transformer, attention_pattern
from orthojax.model.presets import bigram_backcopy
from orthojax.ops.cross_entropy import perplexity
from orthojax.train import Inputs, read_metrics
from orthojax.train.evaluation import observing, validation_loss_nats
from orthojax.train.probe import probe_file

# A quarter of the published width and length. The rate was chosen on pilots of one model alone, three layers with
# softmax and Adam, seeds 0, 100, 101: at 1e-3 the peak takes more than 5,000 steps, at 2e-3 and more without a warm-up
# one of these seeds has its sink in the first layer, where nothing below it can grow a peak.
RATE = 3e-3
STEPS = 3000
SEEDS = (1, 2, 3, 4, 5)  # not those of the pilots
_LOG_STEPS = (0, 10, 20, 30, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1120, 1500, 2000, 2500)
PUBLISHED_STEPS = 10_000
_MORE_STEPS = (1000, 3500, 5000, 7000)


@functools.cache
def _characters() -> int:
    """How many different ones the text has, which depends on the version of Python; besides them are <s> or two."""
    return len(set(default_text()))


def config(num_layers: int = 1, *, published: bool = False, **changes: Any) -> Config:
    """One run on the task.

    Args:
      num_layers: Blocks.
      published: The published size (width 256, 256 tokens, 512 sequences a step), for one GPU, instead of a quarter.
      **changes: Fields by their paths with `__` for the dot, as `model__normalizer`.
    """
    length, width = (256, 256) if published else (64, 64)
    steps = PUBLISHED_STEPS if published else STEPS
    base = Config(
        model=bigram_backcopy(
            num_layers, d_model=width, d_mlp=4 * width, max_length=length, vocab_size=_characters() + 2
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=3e-4 if published else RATE,
            b2=0.99,
            weight_decay=1e-4,
            warmup_steps=0 if published else 300,
            final_learning_rate_fraction=1.0,
            clip_norm=None,
            rotation=OUTPUT_AXIS,
        ),
        data=DataConfig(kind="bigram_backcopy", sequence_length=length),
        train=TrainConfig(
            steps=steps,
            batch_size=512 if published else 16,
            eval_every_steps=0,
            probe_every_steps=0,
            probe_steps=(*_LOG_STEPS, *(_MORE_STEPS if published else ()), steps),
            probe_details=True,
            probe_sequences=64,
            checkpoint_every_steps=500,
        ),
        eval=EvalConfig(sequences=512, batch_size=64),
    )
    return replace(base, {name.replace("__", "."): value for name, value in changes.items()})


def short(num_layers: int = 1, **changes: Any) -> Config:
    """`config` for questions about causes, which 1,000 steps of a larger batch answer; no warm-up, no details."""
    fields = {
        "model__vocab_size": _characters() + 1,
        "optim__warmup_steps": 0,
        "train__steps": 1000,
        "train__batch_size": 32,
        "train__eval_every_steps": 100,
        "train__probe_every_steps": 100,
        "train__probe_steps": (),
        "train__probe_details": False,
        "train__probe_sequences": 8,
        "eval__sequences": 256,
    }
    return config(num_layers, **(fields | changes))


# PyTorch's SGD, the paper's, adds the decay of 1e-4 to the gradient, so that momentum makes it 1 / (1 - 0.9) as strong.
SGD = {"optim__optimizer": "sgd", "optim__momentum": 0.9, "optim__weight_decay": 1e-3}
ORTHOADAM = {"optim__optimizer": "orthoadam", "optim__rotation__kind": "haar"}

# What the report shows over steps; by layer where it has layers.
RISKS = ("backcopy_excess_risk_nats", "bigram_excess_risk_nats")
CURVES = ("sink_attention_rest", "sink_logit_gap", "value_norm_first", "value_norm_rest", "value_drain",
          "residual_norm_first", "residual_norm_rest", "residual_peak_ratio")  # fmt: skip


def half_step(steps: ArrayLike, values: ArrayLike) -> float:
    """The first of the steps at which a curve has made half of its last large change.

    That change is the one to the end from where the curve was farthest from it: the start, or the top of a rise.

    >>> half_step([0, 10, 20, 30], [4.0, 3.0, 1.0, 0.0])
    20.0
    >>> half_step([0, 10, 20, 30, 40], [2.0, 6.0, 5.0, 2.0, 1.0])
    30.0
    """
    left = np.abs(np.asarray(values, float) - np.asarray(values, float)[-1])
    farthest = int(np.argmax(left))
    return float(np.asarray(steps)[farthest + np.argmax(left[farthest:] <= 0.5 * left[farthest])])


def _history(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """Of every curve its start, its step at half of the change, its largest value and that step, and linear fits."""
    lines = [line for line in read_metrics(loaded.source.parents[1] / "metrics.jsonl") if "sink_attention" in line]
    layers = range(loaded.config.model.num_layers)
    names = [*RISKS, *(f"{name}/layer_{layer}" for name in CURVES for layer in layers)]
    found: dict[str, float] = {}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        if len(points) < 2:
            continue
        steps, values = (np.array(column, float) for column in zip(*points, strict=True))
        found[f"{name}/start"], found[f"{name}/half_step"] = float(values[0]), half_step(steps, values)
        found[f"{name}/largest"], found[f"{name}/largest_step"] = float(values.max()), float(steps[values.argmax()])
        if values[0]:
            found[f"{name}/growth"] = float(values[-1] / values[0])
        for kind, x, late in (("log", np.log(np.maximum(steps, 1)), steps >= 200), ("linear", steps, steps >= 500)):
            if late.sum() > 2 and np.ptp(values[late]) > 0:
                found[f"{name}/{kind}_r"] = float(np.corrcoef(x[late], values[late])[0, 1])
                found[f"{name}/{kind}_slope"] = float(np.polyfit(x[late], values[late], 1)[0])
    on_progress("history")
    return Measured(found, {})


HISTORY = Measure("history", _history)


def mechanism(probes: Sequence[dict[str, np.ndarray]], *, since: int = 200) -> dict[str, float]:
    """What the paper says of the gradient of <s>'s residual stream, by layer.

    The gradient is that of the loss at other positions. `gradient_final_cosine`: its mean cosine with that of the last
    probe. `gradient_decay`: the slope of its logarithm against that of the residual norm; -1 is 1 / norm.
    `gradient_weak_share`, `gradient_key_cosine`: means of `first_token_mechanism`'s. `gradient_own_share`: the mean
    share of the prediction at <s> itself in the squared norms of both gradients. `growth_from/PART`: what the changes
    of a part of the model added to the norm from the first probe to the last, over its growth; left out where a run was
    resumed, which forgets the parameters of the last probe.

    Args:
      probes: The arrays of every probe, in the order of their steps, the first of the start.
      since: The first step that counts, but for the shares.
    """
    late = [arrays for arrays in probes if arrays["step"] >= since]
    gradients, residuals = (np.stack([of[name] for of in late]).astype(float) for name in
                            ("first_gradient", "first_residual"))  # fmt: skip
    sizes, norms = np.linalg.norm(gradients, axis=-1), np.linalg.norm(residuals, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):  # after the last block there is no gradient
        cosines = np.einsum("PLD,LD->PL", gradients, gradients[-1]) / (sizes * sizes[-1])
    found: dict[str, float] = {}
    for layer in range(gradients.shape[1]):
        values = {
            "gradient_final_cosine": cosines[:-1, layer].mean(),
            "gradient_decay": _slope(np.log(norms[:, layer]), sizes[:, layer]),
            "gradient_own_share": np.mean([_own_share(of)[layer] for of in late]),
            "gradient_weak_share": np.mean([of["first_gradient_weak_share"][layer] for of in late]),
            "gradient_key_cosine": np.mean([of["first_gradient_key_cosine"][layer] for of in late]),
        }
        found |= {f"{name}/layer_{layer}": float(value) for name, value in values.items() if np.isfinite(value)}
    if any(now["since"] != last["step"] for last, now in itertools.pairwise(probes)):
        return found
    parts: dict[str, np.ndarray] = {}
    for name in probes[-1]:
        if name.startswith("growth/"):
            part = "/".join(name.split("/")[1:3]).removesuffix("_embedding/embedding")
            parts[part] = parts.get(part, 0.0) + np.sum([of[name] for of in probes], axis=0, dtype=float)
    whole = np.sum([of["growth"] for of in probes], axis=0, dtype=float)
    for part, grown in parts.items():
        shares = enumerate(grown / whole)
        found |= {f"growth_from/{part}/layer_{layer}": float(share) for layer, share in shares if share}
    return found


def _slope(x: np.ndarray, sizes: np.ndarray) -> float:
    return float(np.polyfit(x, np.log(sizes), 1)[0]) if np.all(sizes > 0) else np.nan


def _own_share(of: Mapping[str, np.ndarray]) -> np.ndarray:
    own, others = (np.asarray(of[f"first_{name}gradient_norm"], float) ** 2 for name in ("own_", ""))
    return own / (own + others)


def _mechanism(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    folder, train = loaded.source.parents[1] / "probes", loaded.config.train
    probes = []
    for step in sorted(train.probe_steps):
        with np.load(probe_file(folder, step)) as arrays:
            probes.append({name: arrays[name] for name in arrays})
    on_progress("mechanism")
    return Measured(mechanism(probes), {})


MECHANISM = Measure("mechanism", _mechanism)


_SCALES = ("attention_scale", "mlp_scale", "first_value_scale", "first_attention_scale", "first_mlp_scale")


def _scales(num_layers: int) -> dict[str, Interventions]:
    """Interventions by name, all with the same fields, so that one compiled program serves them all."""
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
    """Attention of one layer forced: the ideal head, all queries on <s>, and each on itself."""
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


def _intervene(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """`NAME: METRIC` of every intervention: risks, and by layer sink, gap, drain and peak."""
    assert inputs.task is not None
    task, (observe, risks_of), L = inputs.task, observing(inputs.task), loaded.config.model.num_layers
    tokens, found = jnp.asarray(inputs.evaluation[:128, :-1]), {}
    every = _scales(L) | (_forced(task.is_trigger(tokens)) if L == 1 else {})
    for name, given in every.items():
        observed = analysis.measure(loaded, [(tokens, tokens)], observe, given, output=risks_of)
        metrics = analysis.finalize(observed[0]) | analysis.finalize(observed[1])
        for key, value in metrics.items():
            if key.split("/")[0] in (*RISKS, *CURVES, "residual_peak") and np.isfinite(value):
                found[f"{name}: {key}"] = value
    on_progress("interventions")
    return Measured(found, {})


INTERVENTIONS = Measure("interventions", _intervene)


def _static(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """Sequences without triggers, where all queries should be dormant, and which tokens the head takes for triggers.

    The published probe: after <s> and non-triggers comes a token c; c is called a trigger where the last query's weight
    on <s> is below 0.89. The arrays are of one held-out sequence and one without triggers: `attention` [2, L, T, T],
    `value_norms` and `residual_norms` [2, L, T], means over heads.
    """
    assert inputs.task is not None
    task, T = inputs.task, loaded.config.data.sequence_length
    characters, plain = np.flatnonzero(np.asarray(task.marginal) > 0), task.plain
    rng = np.random.default_rng(0)
    start = list(task.bos_ids)
    dormant = np.array([[*start, *rng.choice(plain, T - len(start))] for _ in range(32)])
    probes = np.array([[*start, *rng.choice(plain, T - len(start) - 1), c] for c in characters])

    def observe(taps: analysis.Taps) -> jax.Array:
        return jnp.mean(taps.attention_weights[..., 0], axis=1)  # [B, T], mean over heads

    on_first, last = (np.asarray(analysis.measure(loaded, [jnp.asarray(x)], observe)) for x in (dormant, probes))
    is_trigger = np.asarray(task.is_trigger(jnp.asarray(probes[:, -1:])))[:, 0]
    found: dict[str, float] = {}
    for layer in range(len(on_first)):
        called = last[layer, :, -1] < 0.89
        found[f"dormant_sink/layer_{layer}"] = float(on_first[layer, :, len(start) :].mean())
        found[f"dormant_sink_smallest/layer_{layer}"] = float(on_first[layer, :, len(start) :].min())
        found[f"triggers_found/layer_{layer}"] = float(called[is_trigger].mean())
        found[f"others_called_triggers/layer_{layer}"] = float(called[~is_trigger].mean())

    def panels(taps: analysis.Taps) -> dict[str, jax.Array]:
        norms = jnp.linalg.norm(taps.residual.astype(jnp.float32), axis=-1)
        by_head = {"attention": taps.attention_weights, "value_norms": taps.value_norms}
        return {name: jnp.mean(x, axis=1) for name, x in by_head.items()} | {"residual_norms": norms}

    seen = analysis.measure(loaded, [jnp.stack([inputs.evaluation[0, :-1], dormant[0]])], panels)
    on_progress("static")
    return Measured(found, {name: np.moveaxis(np.asarray(x, np.float32), 1, 0) for name, x in seen.items()})


STATIC = Measure("static", _static)


def _outliers(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """The measures of From Attention to Activation, and perplexity at every quantisation setting."""
    tokens = inputs.evaluation[:, :-1]
    batches = [jnp.asarray(tokens[i : i + 64]) for i in range(0, len(tokens), 64)]
    found = analysis.finalize(analysis.measure(loaded, batches, analysis.observe_language_model))
    for key in ("sequences", *(key for key in found if key.startswith(("value_norm", "residual_norm")))):
        del found[key]  # which the evaluation has
    losses = {"perplexity": loaded.model}
    for name, setting in quant.SETTINGS.items():
        losses[f"perplexity_{name}"] = Transformer(loaded.config.model, linear=quant.quantized_linear(setting))
    for name, model in losses.items():
        found[name] = perplexity(validation_loss_nats(loaded.config, loaded.params, inputs, model=model))
    on_progress("outliers")
    return Measured(found, {})


OUTLIERS = Measure("outliers", _outliers)


def _over_layers(of: Numbers, first: str, rest: str) -> list[float]:
    """The ratio of two metrics in every layer that has it."""
    ratios = of.by_layer(first) / of.by_layer(rest)
    return list(ratios[np.isfinite(ratios)]) or [np.nan]


# Of the layers, the one in which the phenomenon is most pronounced; `sink_attention_rest` is the largest already.
PEAK = Quantity("residual norm of <s> / others', largest of the layers",
                lambda of: max(_over_layers(of, "residual_norm_first", "residual_norm_rest")))  # fmt: skip
DRAIN = Quantity("value norm of <s> / others', smallest of the layers",
                 lambda of: min(_over_layers(of, "value_norm_first", "value_norm_rest")))  # fmt: skip


def layer_curves(num_layers: int, names: Mapping[str, str]) -> dict[str, str]:
    """For `training_view`: the risks, and metrics by layer, each with its words; one layer needs no number."""
    curves = {"backcopy excess risk": RISKS[0], "bigram excess risk": RISKS[1]}
    for metric, words in names.items():
        for layer in range(num_layers):
            where = f", layer {layer + 1}" if num_layers > 1 else ""
            curves[words + where] = f"{metric}/layer_{layer}"
    return curves
