"""Which optimizers grow outlier activations, as they are and in a rotated basis."""

from orthojax.experiments.base_configs import LANGUAGE_MODEL, with_normalizer
from orthojax.experiments.ours.optimizer_report import report
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant
from orthojax.fields import replace

BASE = replace(with_normalizer(LANGUAGE_MODEL, "softmax1"), {"train.steps": 500})

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


def _tiny() -> tuple[Variant, ...]:
    variants = []
    for name, (label, changes, middle) in OPTIMIZERS.items():
        rates = (middle / 3, middle, middle * 3)
        config = replace(
            BASE, {"optim.optimizer": name} | {f"optim.{field}": value for field, value in changes.items()}
        )
        variants.append(Variant(name, label, config, rates))
        rotated = replace(config, {"optim.rotated": True})
        variants.append(Variant(f"{name}_rotated", f"{label}, rotated", rotated, rates))
    return tuple(variants)


EXPERIMENT = Experiment(
    name="optimizer_outliers",
    title="which optimizers grow outlier activations, as they are and in a rotated basis",
    scales={"tiny": _tiny},
    report=report,
)
