"""The runs that studies start from, and the changes that many of them make."""

import functools
import runpy
from pathlib import Path

from orthojax.config import Config, DataConfig, EvalConfig, OptimConfig, RotationConfig, TrainConfig, replace
from orthojax.model.presets import gpt2

_PACKAGE = Path(__file__).parents[1]
_HOMES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in a wheel, in a clone

# The paper's two changes, alone and together.
METHODS: dict[str, dict[str, str]] = {
    "vanilla": {},
    "softmax1": {"model.normalizer": "softmax1"},
    "orthoadam": {"optim.optimizer": "orthoadam"},
    "cured": {"model.normalizer": "softmax1", "optim.optimizer": "orthoadam"},
}
# OrthoAdam rotated the output axes in most committed results, which are older than the current default.
OUTPUT_AXIS = RotationConfig(axes="output")


@functools.cache
def config(name: str) -> Config:
    """Returns the run of configs/NAME.py."""
    path = next(home / f"{name}.py" for home in _HOMES if (home / f"{name}.py").is_file())
    return runpy.run_path(str(path))["get_config"]()


def cured(config: Config) -> Config:
    """Returns the same run with softmax-1 and OrthoAdam."""
    return replace(config, METHODS["cured"])


# The cheapest setting, chosen on vanilla models, in which every layer matters, the residual norm grows with depth,
# several layers have outliers and the first token dominates attention: scale `deep`.
LANGUAGE_MODEL = Config(
    # One scale in every norm and no biases, for both variants. Rotary positions, because with learned ones no copying
    # heads form within minutes, and so no depth.
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
    # Every passage occurs at least twice, as quotations, logs and boilerplate do.
    data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=128, bos=True, repeated_share=1.0),
    train=TrainConfig(
        steps=2000, batch_size=8, probe_every_steps=100, eval_every_steps=500, checkpoint_every_steps=500
    ),
    eval=EvalConfig(sequences=256, batch_size=64),
)

# The main job: ordinary text with weight decay, so that outliers and dominance both appear within 2,500 steps.
MAIN_MODEL = config("tiny_vanilla")
# Repeated passages, no decay, wider MLPs, more tokens: copying begins, and with it dominance.
REPEATED_MODEL = replace(
    MAIN_MODEL,
    {
        "model.d_mlp": 512,
        "optim.final_learning_rate_fraction": 0.1,
        "optim.weight_decay": 0.0,
        "data.repeated_share": 1.0,
        "train.steps": 2000,
        "train.batch_size": 16,
        "train.checkpoint_every_steps": 100,
    },
)
# Repeated passages with rotary positions and swiglu: without a row of the position table to hold it, the peak of the
# first token is written by an MLP, and stands out tenfold. Of the models that two cores train, int8 damages this most.
BREAKING_MODEL = replace(
    MAIN_MODEL,
    {
        "model.mlp": "swiglu",
        "model.position": "rotary",
        "data.repeated_share": 1.0,
        "train.batch_size": 16,
        "train.steps": 8000,
        "train.checkpoint_every_steps": 1000,
    },
)
# GPT-2 60M as in the paper, except for text, vocabulary and batch: some minutes on one GPU.
PACKAGES_MODEL = config("python_packages")
# The one-layer model of Active-Dormant Attention Heads, four times narrower.
BACKCOPY_MODEL = config("bigram_backcopy")
