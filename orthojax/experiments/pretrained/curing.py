"""Can fine-tuning cure a real model? SmolLM2 from the same weights, as it was trained and with the cure.

The cure begins as the same function: softmax-1 is a learned sink logit that starts far below all others and rises to 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.experiments.base_configs import OUTPUT_AXIS
from orthojax.experiments.claims import (
    EQUAL_PERPLEXITY,
    GAUSSIAN,
    PPL,
    Claim,
    dominated,
    excess_of_first_left,
    has_outliers,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import LayerCurves, StepCurves
from orthojax.experiments.pretrained.smollm2 import ABOUT, NAME
from orthojax.experiments.results import Numbers, Quantity, Results, metric, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.quant import SETTINGS

MODEL = ModelConfig(
    vocab_size=49_152,
    max_length=8192,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    d_mlp=1536,
    position="rotary",
    rope_theta=100_000.0,
    norm="rmsnorm",
    normalizer="softmax",
    mlp="swiglu",
)
STEPS, ANNEALED = 270, 135  # steps; the second: until the sink logits are 0
_COARSE = "perplexity_int8_coarse"
_DAMAGE = Quantity("loss gained at int8 coarse (nats)", lambda of: math.log(of[_COARSE] / of.perplexity))


def _config(**changes: Any) -> Config:
    """Fine-tuning of one hour on one CPU core: 13.5 s a step, so both variants take two cores that long."""
    config = Config(
        model=MODEL,
        optim=OptimConfig(optimizer="adam", learning_rate=1e-4, warmup_steps=50, rotation=OUTPUT_AXIS),
        data=DataConfig(kind="embedded", tokenizer=NAME, sequence_length=256),
        train=TrainConfig(
            steps=STEPS,
            batch_size=4,
            init_from=NAME,
            eval_every_steps=90,
            probe_every_steps=45,
            checkpoint_every_steps=30,
        ),
        eval=EvalConfig(sequences=32, batch_size=8),
    )
    return replace(config, {name.replace("__", "."): value for name, value in changes.items()})


def _variants(scale: str) -> tuple[Variant, ...]:
    cure = {
        "model__normalizer": "learned_sink",
        "model__sink_init": -15.0,  # a weight of e-15 at most beside logits of 0
        "optim__sink_anneal_steps": ANNEALED,
        "optim__optimizer": "orthoadam",
        "train__allow_normalizer_change": True,
    }
    return (
        Variant("softmax", "softmax, Adam", _config()),
        Variant("cured", "softmax to softmax-1, OrthoAdam", _config(**cure)),
    )


def _at_most_half(quantity: Quantity, below: float = 0.0) -> Callable[[Numbers, Numbers], bool]:
    """Whether half of what exceeds `below` is left, or less."""

    def holds(softmax: Numbers, cured: Numbers) -> bool:
        return quantity.value(cured) - below <= 0.5 * (quantity.value(softmax) - below)

    return holds


_BOTH = ("softmax", "cured")
_MAX_FIRST = metric("max_abs_first")
_FIRST, _REST = metric("kurtosis_first"), metric("kurtosis_rest")
CLAIMS = (
    Claim("Dominance of the first token falls.", _BOTH, ("first_attention_fraction",),
          lambda softmax, cured: excess_of_first_left(softmax, cured) <= 0.5,
          "at most half of what exceeds chance with softmax and Adam; testable where that is dominated", dominated),
    Claim("The peak of the first token falls.", _BOTH, (_MAX_FIRST,), _at_most_half(_MAX_FIRST),
          "its largest activation is at most half of that with softmax and Adam"),
    Claim("Outliers of the first token fall.", _BOTH, (_FIRST,), _at_most_half(_FIRST, GAUSSIAN),
          "at most half of the kurtosis above a Gaussian's; testable where there are outliers", has_outliers),
    Claim("Outliers of other tokens fall.", _BOTH, (_REST,), _at_most_half(_REST, GAUSSIAN),
          "at most half of the kurtosis above a Gaussian's; testable where there are outliers", has_outliers),
    Claim("Damage by quantisation falls.", _BOTH, (_DAMAGE,), _at_most_half(_DAMAGE),
          "coarse int8 costs at most half the loss"),
    Claim("At no cost.", _BOTH, (PPL,),
          lambda softmax, cured: cured.perplexity <= (1 + EQUAL_PERPLEXITY) * softmax.perplexity,
          f"perplexity at most {EQUAL_PERPLEXITY:.0%} above that of softmax and Adam"),
)  # fmt: skip


def _about(results: Results) -> Sequence[str]:
    train = results["softmax"].config.train
    return [
        f"{ABOUT.partition('. Texts')[0]}. {train.steps} steps of {train.batch_size} x 256 tokens of Python's sources "
        f"from moments of zero; the sink logits of the cure are at 0, which is softmax-1, after {ANNEALED} steps. "
        f"`--model=base={NAME}` adds the model as it is.",
    ]


EXPERIMENT = Experiment(
    name="smollm2_cured",
    title="SmolLM2 fine-tuned from the same weights: with softmax and Adam, and to softmax-1 with OrthoAdam",
    variants=_variants,
    seeds=(1,),
    about=_about,
    tables=(
        MetricTable("Attention, outliers and norms, means over layers",
                    (PPL, "first_attention_fraction", "first_attention_mass", _FIRST, _REST, _MAX_FIRST,
                     "max_abs_rest", "value_norm_first", "value_norm_rest", "residual_norm_first",
                     "residual_norm_rest"), transposed=True),
        MetricTable("Perplexity with quantised linear layers, and the change",
                    [of(f"perplexity_{name}") for name in SETTINGS for of in (metric, penalty)],
                    transposed=True),
    ),
    claims=CLAIMS,
    pictures=(
        StepCurves("dominance", "Queries that attend most to the first token.", "fraction",
                   {"first_attention_fraction": ""}, x_scale="linear"),
        StepCurves("peak", "Largest activation of the first token, mean over layers.", "max |x|",
                   {"max_abs_first": ""}, x_scale="linear"),
        LayerCurves("dominance_by_layer", "The same by layer, at the end.", "fraction",
                    {"first_attention_fraction": ""}),
        LayerCurves("max_abs_by_layer", "Largest activation, mean over sequences.", "max |x|",
                    {"max_abs_first": "first token", "max_abs_rest": "others"}, "log"),
    ),
    takes_models=True,
)  # fmt: skip
