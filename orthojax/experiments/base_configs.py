"""The runs that experiments and configs/*.py start from. Values only: reading a config must not import jax."""

import dataclasses

from orthojax.config import (
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    NormalizerName,
    OptimConfig,
    RotationConfig,
    TrainConfig,
    replace,
)
from orthojax.model.presets import gpt2

# Of most committed results, which are older than the default, `residual`; see CONTRIBUTING.md.
OUTPUT_AXIS = RotationConfig(axes="output")

# The setting that the experiment tiny_setting chose on vanilla models: the cheapest where every layer matters, the
# residual norm grows with depth, several layers have outliers and the first token dominates attention.
LANGUAGE_MODEL = Config(
    # The paper's changes to GPT-2, for both variants: one scale in every norm, no biases. Rotary positions, because
    # with learned ones no copying heads form within minutes, and so no depth.
    model=gpt2(
        "tiny",
        norm="rmsnorm_single",
        use_bias=False,
        num_layers=6,
        max_length=128,
        position="rotary",
        scan_layers=False,  # compiles slower, runs faster
    ),
    optim=OptimConfig(optimizer="adam", learning_rate=3e-3, warmup_steps=100, rotation=OUTPUT_AXIS),
    # Every passage comes at least twice, as quotations, logs and boilerplate do.
    data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=128, bos=True, repeated_share=1.0),
    train=TrainConfig(
        steps=2000, batch_size=8, probe_every_steps=100, eval_every_steps=500, checkpoint_every_steps=500
    ),
    eval=EvalConfig(sequences=256, batch_size=64),
)

# Ordinary text and learned positions: outliers within 800 steps, but no dominance, and the state of every layer is
# nearly the output of the first MLP.
SHALLOW_MODEL = Config(
    model=gpt2("tiny", norm="rmsnorm_single", use_bias=False, max_length=64, scan_layers=False),
    optim=OptimConfig(optimizer="adam", learning_rate=5e-3, warmup_steps=100, rotation=OUTPUT_AXIS),
    data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=64, bos=True),
    train=TrainConfig(steps=800, batch_size=16, checkpoint_every_steps=50),
    eval=EvalConfig(sequences=512, batch_size=64),
)

# The same on text whose passages are repeated, at a lower rate and longer: copying begins, and with it dominance.
# Not chosen by tiny_setting: a trial of vanilla and cured models had it.
REPEATED_MODEL = replace(
    SHALLOW_MODEL,
    {
        "optim.learning_rate": 3e-3,
        "optim.rotation.axes": "residual",  # the default
        "data.repeated_share": 1.0,
        "train.steps": 2000,
        "train.probe_every_steps": 100,
        "train.eval_every_steps": 500,
        "train.checkpoint_every_steps": 100,
        "eval.sequences": 256,
    },
)

# GPT-2 60M as the paper has it but for its text, vocabulary and batch: 98M tokens of Python, some minutes of one GPU.
# Rows begin with <s>, as those of current models do.
PACKAGES_MODEL = Config(
    model=gpt2("60m", norm="rmsnorm_single", use_bias=False, vocab_size=16_384, max_length=256, dtype="bfloat16"),
    optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=1000, final_learning_rate_fraction=0.0),
    data=DataConfig(
        kind="tokens",
        paths=("data/python_packages/train.bin", "data/python_packages/validation.bin"),
        tokenizer="bpe:16384",
        sequence_length=256,
        bos=True,
    ),
    train=TrainConfig(
        steps=6000,
        batch_size=64,
        log_every_steps=50,
        probe_every_steps=300,
        probe_sequences=32,
        eval_every_steps=300,
        checkpoint_every_steps=300,
    ),
    eval=EvalConfig(sequences=1024, batch_size=64),
)

BACKCOPY_MODEL = Config(
    # The one-layer model of Active-Dormant Attention Heads, four times narrower: one head, ReLU, LayerNorm with a bias
    # (here linear layers have biases, too), embeddings of standard deviation 1, kernels of 1 / sqrt(3 d_model).
    model=ModelConfig(
        vocab_size=128,
        max_length=64,
        d_model=64,
        num_layers=1,
        num_heads=1,
        d_mlp=256,
        norm="layernorm",
        use_bias=True,
        normalizer="softmax",
        mlp="relu",
        tie_embeddings=False,
        embedding_init_std=1.0,
        init_std=0.072,
        scan_layers=False,
    ),
    optim=OptimConfig(
        optimizer="adam",
        learning_rate=3e-3,
        warmup_steps=20,
        final_learning_rate_fraction=1.0,
        rotation=OUTPUT_AXIS,
    ),
    data=DataConfig(kind="bigram_backcopy", sequence_length=64),
    train=TrainConfig(steps=400, batch_size=64, checkpoint_every_steps=100, eval_every_steps=50),
    eval=EvalConfig(sequences=256, batch_size=64),
)

# Optimizer -> (label, what differs from the base, the middle of three learning rates a factor of about 3 apart).
OPTIMIZERS = {
    "sgd": ("SGD with momentum", {"momentum": 0.9}, 0.3),
    "adagrad": ("Adagrad", {}, 1e-2),
    "rmsprop": ("RMSProp", {}, 1.5e-3),
    "adam": ("Adam", {}, 5e-3),
    "amsgrad": ("AMSGrad", {}, 5e-3),
    "adamax": ("AdaMax", {}, 5e-3),
    "adabelief": ("AdaBelief", {}, 5e-3),
    "adafactor": ("Adafactor", {}, 5e-3),
    "lion": ("Lion", {"b2": 0.99}, 5e-4),
    "signum": ("Signum", {"momentum": 0.9}, 5e-4),
    "lamb": ("LAMB", {}, 1e-2),
    "novograd": ("NovoGrad", {"b2": 0.98}, 0.1),
    "ademamix": ("AdEMAMix", {}, 2e-3),
    "muon": ("Muon", {"momentum": 0.95}, 1e-2),
}


def cured(config: Config) -> Config:
    """The same run with softmax-1 and OrthoAdam."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, normalizer="softmax1"),
        optim=dataclasses.replace(config.optim, optimizer="orthoadam"),
    )


def with_normalizer(config: Config, normalizer: NormalizerName) -> Config:
    """The same run with another attention normalizer."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, normalizer=normalizer))
