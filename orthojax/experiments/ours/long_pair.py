"""The largest vanilla and cured pair that two CPU cores train in 90 minutes or overnight: growth with the tokens.

On ordinary text, both models at once, a core each; stopped and resumed as often as it takes.
"""

import math
from collections.abc import Callable

import numpy as np

from orthojax import quant
from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, TrainConfig
from orthojax.experiments import drawing
from orthojax.experiments.base_configs import cured
from orthojax.experiments.claims import (
    FRACTION,
    KURTOSIS,
    MASS,
    C,
    Claim,
    V,
    dominance_removed,
    no_outliers_left,
    no_perplexity_lost,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Picture
from orthojax.experiments.pictures import KURTOSIS_BY_LAYER, ModelMaps, StepCurves, TrainingCurves
from orthojax.experiments.results import LABELS, Results, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import percent
from orthojax.model import LoadedModel, Transformer, parameter_count
from orthojax.model.presets import gpt2
from orthojax.train import Inputs, load
from orthojax.train.checkpoint import steps_in
from orthojax.train.evaluation import validation_loss_nats

# Scale -> training steps: an hour and a half for the pair on two cores, and six hours. A tenth apart, checkpoints are kept.
STEPS = {"tiny": 4_000, "overnight": 20_000}
# Evaluated at each of these.
SETTINGS = {name: quant.setting_named(name) for name in ("int8_coarse", "int4_zeropoint", "w4a4")}


def _config(steps: int) -> Config:
    model = gpt2(
        "tiny", num_layers=8, d_model=256, num_heads=4, d_mlp=1024, vocab_size=8192, max_length=256,
        norm="rmsnorm_single", use_bias=False, scan_layers=False,
    )  # fmt: skip
    return Config(
        model=model,
        optim=OptimConfig(optimizer="adam", learning_rate=2e-3, warmup_steps=500),
        data=DataConfig(kind="embedded", tokenizer="bpe:8192", sequence_length=256),
        train=TrainConfig(
            steps=steps,
            batch_size=8,
            eval_every_steps=1000,
            probe_every_steps=500,
            checkpoint_every_steps=200,
            keep_every_steps=steps // 10,
        ),
        eval=EvalConfig(sequences=128, batch_size=16),
    )


def _variants(scale: str) -> tuple[Variant, ...]:
    base = _config(STEPS[scale])
    return Variant(V, "softmax, Adam", base), Variant(C, "softmax-1, OrthoAdam", cured(base))


def _by_step(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """The loss of every kept checkpoint as it is and rounded: arrays `steps` [n] and `nats_<setting>` [n]."""
    folder, config = loaded.source.parent, loaded.config
    steps = [step for step in steps_in(folder) if step % config.train.keep_every_steps == 0]
    found: dict[str, list[float]] = {f"nats_{name}": [] for name in ("float32", *SETTINGS)}
    for step in steps:
        params = load(folder / str(step)).params
        linears = {name: quant.quantized_linear(setting) for name, setting in SETTINGS.items()}
        models = {"float32": None, **{name: Transformer(config.model, linear=of) for name, of in linears.items()}}
        for name, model in models.items():
            found[f"nats_{name}"].append(validation_loss_nats(config, params, inputs, model=model))
        on_progress(f"step {step}")
    arrays = {name: np.array(of) for name, of in found.items()}
    last = {f"perplexity_{name}": math.exp(min(found[f"nats_{name}"][-1], 700.0)) for name in SETTINGS}
    return Measured(last, {"steps": np.array(steps), **arrays})


def _kept(config: Config) -> int:
    return config.train.steps // config.train.keep_every_steps


DAMAGE = Measure("damage_by_step", _by_step, _kept)
_LOST = tuple(penalty(f"perplexity_{name}", LABELS.get(f"perplexity_{name}", name)) for name in SETTINGS)

CLAIMS = (
    dominance_removed("The first token dominates, and both methods together remove that."),
    no_outliers_left("They leave no outliers."),
    no_perplexity_lost("They cost no perplexity."),
    Claim("They lose less to rounding.", (V, C), _LOST,
          lambda v, c: all(c.mean(lost) < v.mean(lost) for lost in _LOST),
          "in each of the settings; testable where vanilla loses 1% or more in one",
          lambda v, c: max(map(v.mean, _LOST)) >= 0.01),
)  # fmt: skip


def _damage(results: Results) -> list[Picture]:
    curves = {}
    for of in results.finished:
        arrays = [of.arrays(DAMAGE.name, seed) for seed in of.seeds]
        for name in SETTINGS:
            lost = 100 * np.expm1([found[f"nats_{name}"] - found["nats_float32"] for found in arrays])
            curves[f"{of.label}, {name}"] = (list(arrays[0]["steps"]), lost)
    figure = drawing.lines(curves, x_label="step", y_label="change of perplexity, %", y_scale="log")
    return [Picture("damage", "What rounding does to perplexity, by checkpoint.", figure)]


def _about(results: Results) -> list[str]:
    config = results.first.config
    tokens = config.train.batch_size * config.data.sequence_length
    return [
        f"{config.model.num_layers} layers of width {config.model.d_model}, {parameter_count(config.model):,} "
        f"parameters, {config.train.steps:,} steps of {tokens:,} tokens, {config.train.steps * tokens:,} in all: some "
        "passes over Python's standard library, without <s>. Linear layers are rounded, the head is not; most lost is "
        f"{percent(max(of.mean(lost) for of in results.finished for lost in _LOST))} of perplexity."
    ]


EXPERIMENT = Experiment(
    name="long_pair",
    title="The largest vanilla and cured pair of two cores, 90 minutes or overnight: growth with tokens",
    variants=_variants,
    scales=tuple(STEPS),
    seeds=(1,),
    about=_about,
    measures=(DAMAGE,),
    tables=(
        MetricTable("Models", ("perplexity", *KURTOSIS, "max_abs_first", "max_abs_rest", FRACTION, MASS, "sink_rate"),
                    transposed=True),
        MetricTable("Perplexity lost to rounding", _LOST),
    ),
    claims=CLAIMS,
    pictures=(
        TrainingCurves(),
        StepCurves("dominance", "Queries that attend most to the first token, of a few held-out rows, over training.",
                   "fraction of queries", {FRACTION: ""}),
        StepCurves("kurtosis", "Kurtosis of hidden states over training, mean over layers.", "kurtosis",
                   {"kurtosis_first": "first token", "kurtosis_rest": "others"}, y_scale="log"),
        _damage,
        KURTOSIS_BY_LAYER,
        ModelMaps(),
    ),
)  # fmt: skip
