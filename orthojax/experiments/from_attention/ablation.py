"""The fourteen rows of Table 5, and the relaxed causal mask of Figure 2, which is a change of its second row."""

from orthojax.config import Config
from orthojax.experiments.from_attention.models import RUNS
from orthojax.experiments.from_attention.paper_configs import ABLATION_STEPS, NORMS, OPTIMIZERS, POSITIONS, SGD_FACTOR
from orthojax.experiments.from_attention.paper_tables import TABLE_5
from orthojax.experiments.study.variant import Variant
from orthojax.fields import replace

Row = tuple[bool, str, str, str, bool]  # a key of TABLE_5

# Scale -> peak learning rates that are not Adam's, and how many times the steps SGD has. The paper has 0.2 for SGD and
# 8 times the steps, and does not say for RMSProp.
_RATES = {
    "tiny": {"RMSProp": 1.5e-3, "SGD w/mom": 0.2, "SGD w/o mom": 2.0},
    "small": {"RMSProp": 1e-3, "SGD w/mom": 0.2, "SGD w/o mom": 2.0},
    "paper": {"SGD w/mom": 0.2, "SGD w/o mom": 0.2},
}
SGD_STEPS = {"tiny": 2, "small": 2, "paper": SGD_FACTOR}


def row_name(row: Row) -> str:
    """The name of the variant of a row."""
    biases, position, norm, optimizer, softmax1 = row
    name, momentum = OPTIMIZERS[optimizer]
    parts = [name + ("_momentum" if momentum else ""), NORMS[norm], POSITIONS[position]]
    return "_".join([*parts, *(["biases"] if biases else []), "softmax1" if softmax1 else "softmax"])


BY_NAME = {row_name(row): row for row in TABLE_5}  # name of a variant -> its row


def row_label(row: Row) -> str:
    """The same for people, in the words of the paper."""
    biases, position, norm, optimizer, softmax1 = row
    parts = [optimizer, norm, position.lower() if position != "None" else "no positions"]
    return ", ".join([*parts, *(["biases"] if biases else []), "softmax-1" if softmax1 else "softmax"])


def base_run(scale: str) -> Config:
    """GPT-2 130M, or what stands for it, with one gain in every norm, no biases, softmax and Adam."""
    config = RUNS[scale]("gpt2_130m")
    return replace(config, {"train.steps": ABLATION_STEPS}) if scale == "paper" else config


def row_config(scale: str, row: Row) -> Config:
    """The run of a row."""
    biases, position, norm, optimizer, softmax1 = row
    base, (name, momentum) = base_run(scale), OPTIMIZERS[optimizer]
    changes: dict[str, object] = {
        "model.use_bias": biases,
        "model.position": POSITIONS[position],
        "model.norm": NORMS[norm],
        "model.normalizer": "softmax1" if softmax1 else "softmax",
        "optim.optimizer": name,
        "optim.momentum": momentum,
        "optim.learning_rate": _RATES[scale].get(optimizer, base.optim.learning_rate),
    }
    if name == "sgd":
        changes["train.steps"] = SGD_STEPS[scale] * base.train.steps
    return replace(base, changes)


def rows(scale: str) -> tuple[Variant, ...]:
    """A variant for every row of Table 5."""
    return tuple(Variant(row_name(row), row_label(row), row_config(scale, row)) for row in TABLE_5)
