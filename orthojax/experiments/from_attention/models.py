"""The models of tables and figures: five sizes x {softmax, softmax-1} x {Adam, OrthoAdam}, and the ablation.

It also has what the notes and claims of several tables and figures share, and what the paper prints.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.experiments.base import LANGUAGE_MODEL, METHODS, OUTPUT_AXIS, config
from orthojax.experiments.claims import Claim, Expr
from orthojax.model.presets import gpt2, llama2

MODELS = ("gpt2_60m", "gpt2_130m", "gpt2_350m", "gpt2_1_4b", "llama2_130m")
SCALES = ("tiny", "deep", "small", "paper")
V, S, O, C = (f"*_{method}" for method in METHODS)  # the variants by method, for claims about every model
ABOUT = (
    "Below scale paper, models stand in for the paper's by order of width; they are far smaller and trained far "
    "shorter, at scale deep on text with repeated passages. The paper's numbers are of one run each on C4."
)
ABOUT_CHANCE = (
    "If all logits are equal, the first token gets 2.4% of the attention at the paper's 256 tokens, so that its 2% is "
    "chance; first-token dominance is what exceeds that."
)

# Stand-ins for the paper's models: the same order of widths, and all else that the paper states, at a thousandth of
# the parameters. Width and text are what grows outliers within 500 steps; see results/README.md.
_TINY_WIDTHS = {"gpt2_60m": 96, "gpt2_130m": 128, "gpt2_350m": 160, "gpt2_1_4b": 192, "llama2_130m": 128}
# (layers, width, heads): one GPU within half an hour for all of them.
_SMALL_SIZES = {
    "gpt2_60m": (6, 256, 4),
    "gpt2_130m": (6, 384, 6),
    "gpt2_350m": (8, 512, 8),
    "gpt2_1_4b": (8, 768, 12),
    "llama2_130m": (6, 384, 6),
}


def _shape(model: str, layers: int, d_model: int, heads: int, vocab_size: int, length: int, **more: Any) -> ModelConfig:
    is_llama = model.startswith("llama2")
    # SwiGLU has the parameters of an MLP of four times the width with eight thirds of it, in multiples of 8.
    d_mlp = 8 * round(d_model / 3) if is_llama else 4 * d_model
    return (llama2 if is_llama else gpt2)(
        "tiny", num_layers=layers, d_model=d_model, num_heads=heads, d_mlp=d_mlp, vocab_size=vocab_size,
        max_length=length, norm="rmsnorm_single", use_bias=False, **more,
    )  # fmt: skip


def _tiny_run(model: str, length: int = 64) -> Config:
    """Returns a run with softmax and Adam on two CPU cores: about 1M parameters and 500 steps of 16 sequences."""
    return Config(
        # Without a scan it compiles slower and runs faster.
        model=_shape(model, 4, _TINY_WIDTHS[model], 4, 2048, length, scan_layers=False),
        optim=OptimConfig(optimizer="adam", learning_rate=5e-3, warmup_steps=100, rotation=OUTPUT_AXIS),
        # Position 0 is the same token in every row, since the dominance of the first token then shows sooner.
        data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=length, bos=True),
        train=TrainConfig(
            steps=500, batch_size=16, eval_every_steps=125, probe_every_steps=0, checkpoint_every_steps=125
        ),
        eval=EvalConfig(sequences=256, batch_size=64),
    )


def _deep_run(model: str, length: int = 128) -> Config:
    """Returns a run with softmax and Adam on two CPU cores as `LANGUAGE_MODEL`, in which every layer matters."""
    changes = {"data.sequence_length": length, "optim.rotation.axes": "d_model", "train.probe_every_steps": 0}
    shape = _shape(model, 6, _TINY_WIDTHS[model], 4, 2048, length, position="rotary", scan_layers=False)
    return dataclasses.replace(replace(LANGUAGE_MODEL, changes), model=shape)


def _small_run(model: str, length: int = 128) -> Config:
    """Returns a run with softmax and Adam on one GPU: 5M to 60M parameters and 2,000 steps of 64 sequences."""
    return Config(
        model=_shape(model, *_SMALL_SIZES[model], 8192, length, dtype="bfloat16"),
        optim=OptimConfig(optimizer="adam", learning_rate=2e-3, warmup_steps=200),
        data=DataConfig(kind="embedded", tokenizer="bpe:8192", sequence_length=length, bos=True),
        train=TrainConfig(steps=2000, batch_size=64, eval_every_steps=250, checkpoint_every_steps=500),
        eval=EvalConfig(sequences=1024, batch_size=128),
    )


def _paper_run(model: str, length: int = 256) -> Config:
    return replace(config(f"paper/{model}"), {"data.sequence_length": length})


# Scale -> (one of `MODELS`, tokens of a sequence) -> its run with softmax and Adam.
RUNS = {"tiny": _tiny_run, "deep": _deep_run, "small": _small_run, "paper": _paper_run}
# Scale -> the steps of SGD as a multiple of the other optimizers' steps.
SGD_STEPS = {"tiny": 2, "deep": 2, "small": 2, "paper": 8}
# Scale -> sequence lengths that stand for 256, 512 and 1,024. At deep Table 2's 128 is in the middle: three seeds with
# 512 would take two CPU cores six hours.
LENGTHS = {"tiny": (64, 128, 256), "deep": (64, 128, 256), "small": (128, 256, 512), "paper": (256, 512, 1024)}


def base_run(scale: str) -> Config:
    """Returns the ablation's GPT-2 130M, or its stand-in: one scale in every norm, no biases, softmax and Adam."""
    return config("paper/ablation_130m") if scale == "paper" else RUNS[scale]("gpt2_130m")


def variants(scale: str, models: Iterable[str] = MODELS, methods: Iterable[str] = tuple(METHODS)) -> dict[str, Config]:
    """Returns `MODEL_METHOD` -> config of every method of `base.METHODS` with every model.

    >>> list(variants("tiny", ["gpt2_60m"], ["vanilla", "cured"]))
    ['gpt2_60m_vanilla', 'gpt2_60m_cured']
    """
    return {f"{model}_{method}": replace(RUNS[scale](model), METHODS[method]) for model in models for method in methods}


def retested(
    says: str, holds: Expr, given: Expr | None, why: str, first_given: Expr | None = None, **more: Any
) -> Claim:
    """Returns a claim for which the data led to a revision of when it is testable, but not of its criterion."""
    return Claim(says, holds, given, revised=(why, Claim("", holds, first_given, **more)), **more)


# The fourteen rows of Table 5, as changes of `base_run` with learned positions.
_LAYERNORM, _RMSNORM, _BIASES = {"model.norm": "layernorm"}, {"model.norm": "rmsnorm"}, {"model.use_bias": True}
_SOFTMAX1, _ORTHOADAM = METHODS["softmax1"], METHODS["orthoadam"]
_SGD = {"optim.optimizer": "sgd"} | _SOFTMAX1
ABLATION: dict[str, dict[str, Any]] = {
    "adam_layernorm_learned_biases_softmax": _LAYERNORM | _BIASES,
    "adam_layernorm_learned_softmax": _LAYERNORM,
    "adam_layernorm_none_softmax": _LAYERNORM | {"model.position": "none"},
    "adam_layernorm_rotary_softmax": _LAYERNORM | {"model.position": "rotary"},
    "adam_layernorm_learned_softmax1": _LAYERNORM | _SOFTMAX1,
    "adam_rmsnorm_learned_softmax1": _RMSNORM | _SOFTMAX1,
    "adam_rmsnorm_single_learned_softmax1": _SOFTMAX1,
    "rmsprop_rmsnorm_single_learned_softmax1": {"optim.optimizer": "rmsprop"} | _SOFTMAX1,
    "sgd_momentum_rmsnorm_single_learned_softmax1": _SGD | {"optim.momentum": 0.9},
    "sgd_rmsnorm_single_learned_softmax1": _SGD,
    "orthoadam_rmsnorm_single_learned_softmax1": METHODS["cured"],
    "orthoadam_rmsnorm_single_learned_softmax": _ORTHOADAM,
    "orthoadam_rmsnorm_learned_softmax1": _RMSNORM | METHODS["cured"],
    "orthoadam_layernorm_learned_softmax1": _LAYERNORM | METHODS["cured"],
}
# Scale -> peak learning rates that differ from Adam's, of RMSProp, SGD with momentum and SGD. The paper has 0.2 for
# SGD, and none for RMSProp.
_RATES = {"tiny": (1.5e-3, 0.2, 2.0), "deep": (1e-3, 0.2, 2.0), "small": (1e-3, 0.2, 2.0), "paper": (1e-3, 0.2, 0.2)}


def ablation(scale: str) -> dict[str, Config]:
    """Returns the run of every row of Table 5; SGD has `SGD_STEPS` times the steps of the others."""
    base = replace(base_run(scale), {"model.position": "learned"})
    rates: dict[str, float] = dict(zip(("rmsprop", "sgd_momentum", "sgd"), _RATES[scale], strict=True))
    runs = {}
    for name, changes in ABLATION.items():
        optimizer = name.partition("_rmsnorm")[0].partition("_layernorm")[0]
        steps = base.train.steps * (SGD_STEPS[scale] if optimizer.startswith("sgd") else 1)
        rate = rates.get(optimizer, base.optim.learning_rate)
        runs[name] = replace(base, {**changes, "optim.learning_rate": rate, "train.steps": steps})
    return runs


def _printed(content: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {name: dict(zip(content["metrics"], row, strict=True)) for name, row in content["rows"].items()}


# The numbers that the paper prints, variant -> our name of the metric -> number; paper_tables.json has their notes.
_TABLES = json.loads((Path(__file__).parent / "paper_tables.json").read_text(encoding="utf-8"))
TABLE_1, TABLE_2, TABLE_3, TABLE_4, TABLE_5 = (_printed(_TABLES[f"TABLE_{number}"]) for number in range(1, 6))
TABLE_6, TABLE_7, TABLE_8, TABLE_9 = (_printed(_TABLES[f"TABLE_{number}"]) for number in range(6, 10))
TABLE_9_PUBLIC = _printed(_TABLES["TABLE_9_PUBLIC"])
