"""The models of tables and figures: five sizes x {softmax, softmax-1} x {Adam, OrthoAdam}, and the ablation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from orthojax.analysis import chance_of_first
from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig, replace
from orthojax.experiments.base_configs import LANGUAGE_MODEL, OUTPUT_AXIS
from orthojax.experiments.experiment import Variant
from orthojax.experiments.from_attention.paper_configs import (
    ABLATION_STEPS,
    METHODS,
    NORMS,
    OPTIMIZERS,
    POSITIONS,
    SGD_FACTOR,
    gpt2_run,
    llama2_run,
)
from orthojax.experiments.from_attention.paper_tables import TABLE_5
from orthojax.experiments.results import Results
from orthojax.model.presets import gpt2, llama2

# Name -> label, which is that of `paper_tables`.
MODELS = {
    "gpt2_60m": "GPT2 60M",
    "gpt2_130m": "GPT2 130M",
    "gpt2_350m": "GPT2 350M",
    "gpt2_1_4b": "GPT2 1.4B",
    "llama2_130m": "Llama2 130M",
}
# Name of one of `paper_configs.METHODS` -> label.
METHOD_LABELS = {
    "vanilla": "softmax + Adam",
    "softmax1": "softmax-1 + Adam",
    "orthoadam": "softmax + OrthoAdam",
    "cured": "softmax-1 + OrthoAdam",
}
SCALES = ("tiny", "deep", "small", "paper")

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


def _shape(model: str, layers: int, d_model: int, heads: int, vocab_size: int, length: int) -> ModelConfig:
    is_llama = model.startswith("llama2")
    shape = {
        "num_layers": layers,
        "d_model": d_model,
        "num_heads": heads,
        # SwiGLU has the parameters of an MLP of four times the width with eight thirds of it, in multiples of 8.
        "d_mlp": 8 * round(d_model / 3) if is_llama else 4 * d_model,
        "vocab_size": vocab_size,
        "max_length": length,
        "norm": "rmsnorm_single",
        "use_bias": False,
    }
    return (llama2 if is_llama else gpt2)("tiny", **shape)


def _tiny_run(model: str, length: int = 64) -> Config:
    """Softmax and Adam on two CPU cores: about 1M parameters and 500 steps of 16 sequences."""
    shape = _shape(model, 4, _TINY_WIDTHS[model], 4, 2048, length)
    return Config(
        model=ModelConfig(**{**vars(shape), "scan_layers": False}),  # compiles slower, runs faster
        optim=OptimConfig(optimizer="adam", learning_rate=5e-3, warmup_steps=100, rotation=OUTPUT_AXIS),
        # Position 0 is the same token in every row, as the dominance of the first token shows it sooner.
        data=DataConfig(kind="embedded", tokenizer="bpe:2048", sequence_length=length, bos=True),
        train=TrainConfig(
            steps=500, batch_size=16, eval_every_steps=125, probe_every_steps=0, checkpoint_every_steps=125
        ),
        eval=EvalConfig(sequences=256, batch_size=64),
    )


def _deep_run(model: str, length: int = 128) -> Config:
    """Softmax and Adam on two CPU cores in the setting of `LANGUAGE_MODEL`, where every layer matters."""
    shape = _shape(model, LANGUAGE_MODEL.model.num_layers, _TINY_WIDTHS[model], 4, 2048, length)
    changes = {"data.sequence_length": length, "optim.rotation.axes": "residual", "train.probe_every_steps": 0}
    config = replace(LANGUAGE_MODEL, changes)
    return dataclasses.replace(
        config, model=dataclasses.replace(shape, position=config.model.position, scan_layers=config.model.scan_layers)
    )


def _small_run(model: str, length: int = 128) -> Config:
    """Softmax and Adam on one GPU: 5M to 60M parameters and 2,000 steps of 64 sequences."""
    shape = _shape(model, *_SMALL_SIZES[model], 8192, length)
    return Config(
        model=ModelConfig(**{**vars(shape), "dtype": "bfloat16"}),
        optim=OptimConfig(optimizer="adam", learning_rate=2e-3, warmup_steps=200),
        data=DataConfig(kind="embedded", tokenizer="bpe:8192", sequence_length=length, bos=True),
        train=TrainConfig(steps=2000, batch_size=64, eval_every_steps=250, checkpoint_every_steps=500),
        eval=EvalConfig(sequences=1024, batch_size=128),
    )


def _paper_run(model: str, length: int = 256) -> Config:
    """Softmax and Adam on C4, as the paper has it."""
    config = llama2_run() if model == "llama2_130m" else gpt2_run(model.removeprefix("gpt2_").replace("_", "."))
    return replace(config, {"data.sequence_length": length})


# Scale -> (one of `MODELS`, tokens of a sequence) -> its run with softmax and Adam.
RUNS: Mapping[str, Callable[..., Config]] = {
    "tiny": _tiny_run,
    "deep": _deep_run,
    "small": _small_run,
    "paper": _paper_run,
}
# Scale -> how many times the steps of the other optimizers SGD has.
SGD_STEPS = {"tiny": 2, "deep": 2, "small": 2, "paper": SGD_FACTOR}
# Scale -> sequence lengths that stand for 256, 512 and 1,024. At deep Table 2's 128 is in the middle: three seeds with
# 512 would take two CPU cores six hours.
LENGTHS = {"tiny": (64, 128, 256), "deep": (64, 128, 256), "small": (128, 256, 512), "paper": (256, 512, 1024)}


def base_run(scale: str) -> Config:
    """GPT-2 130M, or what stands for it, with one norm scale in every norm, no biases, softmax and Adam: Table 5."""
    config = RUNS[scale]("gpt2_130m")
    return replace(config, {"train.steps": ABLATION_STEPS}) if scale == "paper" else config


def stand_in(model: str, scale: str) -> str:
    """What a model of `MODELS` is called at a scale: below that of the paper a stand-in is called one.

    >>> stand_in("gpt2_1_4b", "tiny"), stand_in("gpt2_1_4b", "paper")
    ('stand-in for GPT2 1.4B, 192 wide', 'GPT2 1.4B')
    """
    label = MODELS[model]
    return label if scale == "paper" else f"stand-in for {label}, {RUNS[scale](model).model.d_model} wide"


def variant_name(model: str, method: str) -> str:
    """The name of a variant of `grid`."""
    return f"{model}_{method}"


def grid(
    scale: str, models: Sequence[str] = tuple(MODELS), methods: Sequence[str] = tuple(METHOD_LABELS)
) -> tuple[Variant, ...]:
    """Every method with every model.

    Args:
      scale: One of `SCALES`.
      models: Of `MODELS`.
      methods: Of `METHOD_LABELS`.
    """
    return tuple(
        Variant(
            variant_name(model, method),
            f"{stand_in(model, scale)}, {METHOD_LABELS[method]}",
            replace(RUNS[scale](model), METHODS[method]),
        )
        for model in models
        for method in methods
    )


# Name of a variant of `grid` -> (model, method).
GRID = {variant_name(model, method): (model, method) for model in MODELS for method in METHOD_LABELS}


def by_model(results: Results) -> dict[str, dict[str, str]]:
    """`Experiment.groups` of grids: label of every model that was run -> method -> variant name."""
    found: dict[str, dict[str, str]] = {}
    for name, (model, method) in GRID.items():
        if name in results:
            found.setdefault(stand_in(model, results.scale), {})[method] = name
    return found


def paper_of_grid(table: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """`Experiment.paper` of grids, from a table of the paper by (label of a model, method)."""
    return {name: table[MODELS[m], method] for name, (m, method) in GRID.items() if (MODELS[m], method) in table}


def about(results: Results) -> str:
    """What was trained on what, for the head of a report."""
    train, length = results.first.config.train, results.first.config.data.sequence_length
    sentences = [f"Scale {results.scale}: {train.batch_size} sequences of {length} tokens a step."]
    if results.scale != "paper":
        sentences.append(
            "Models stand in for the paper's by order of width; they are far smaller and trained far shorter."
        )
    if results.scale == "deep":
        sentences.append(
            "Six layers, text with repeated passages and, where a row does not say otherwise, rotary positions: the "
            "setting that the experiment tiny_setting chose on vanilla models. OrthoAdam rotates the d_model axis of "
            "every kernel."
        )
    sentences.append(
        "Every number is a mean over seeds, with the range; the paper's, of one run each on C4, is shown alongside."
    )
    return " ".join(sentences)


def about_chance(results: Results) -> str:
    """What the first token gets where all logits are equal, for the head of a report."""
    length = results.first.sequence_length
    return (
        f"With equal logits the first key has {chance_of_first(length):.3f} of all attention at {length} tokens "
        f"({chance_of_first(length, softmax1=True):.3f} with softmax-1), and by chance it is the most attended one of "
        f"as many (query, head) pairs. In the paper, at 256 tokens, that is {chance_of_first(256):.3f}: its 2% is what "
        "chance gives. First-token dominance is what exceeds it."
    )


Row = tuple[bool, str, str, str, bool]  # a key of TABLE_5

# Of the ablation: scale -> peak learning rates where they are not Adam's. The paper has 0.2 for SGD, and does not say
# for RMSProp.
_ABLATION_RATES = {
    "tiny": {"RMSProp": 1.5e-3, "SGD w/mom": 0.2, "SGD w/o mom": 2.0},
    "deep": {"RMSProp": 1e-3, "SGD w/mom": 0.2, "SGD w/o mom": 2.0},
    "small": {"RMSProp": 1e-3, "SGD w/mom": 0.2, "SGD w/o mom": 2.0},
    "paper": {"SGD w/mom": 0.2, "SGD w/o mom": 0.2},
}


def row_name(row: Row) -> str:
    """The name of the variant of a row."""
    biases, position, norm, optimizer, softmax1 = row
    name, momentum = OPTIMIZERS[optimizer]
    parts = [name + ("_momentum" if momentum else ""), NORMS[norm], POSITIONS[position]]
    return "_".join([*parts, *(["biases"] if biases else []), "softmax1" if softmax1 else "softmax"])


def row_label(row: Row) -> str:
    """The same for people, in the words of the paper."""
    biases, position, norm, optimizer, softmax1 = row
    parts = [optimizer, norm, position.lower() if position != "None" else "no positions"]
    return ", ".join([*parts, *(["biases"] if biases else []), "softmax-1" if softmax1 else "softmax"])


def ablation(scale: str) -> tuple[Variant, ...]:
    """A variant for every row of Table 5."""
    base, variants = base_run(scale), []
    for row in TABLE_5:
        biases, position, norm, optimizer, softmax1 = row
        name, momentum = OPTIMIZERS[optimizer]
        changes = {
            "model.use_bias": biases,
            "model.position": POSITIONS[position],
            "model.norm": NORMS[norm],
            "model.normalizer": "softmax1" if softmax1 else "softmax",
            "optim.optimizer": name,
            "optim.momentum": momentum,
            "optim.learning_rate": _ABLATION_RATES[scale].get(optimizer, base.optim.learning_rate),
            "train.steps": base.train.steps * (SGD_STEPS[scale] if name == "sgd" else 1),
        }
        variants.append(Variant(row_name(row), row_label(row), replace(base, changes)))
    return tuple(variants)


BY_NAME: dict[str, Row] = {row_name(row): row for row in TABLE_5}  # name of a variant -> its row
