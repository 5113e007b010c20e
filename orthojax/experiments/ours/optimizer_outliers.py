"""Which optimizers grow outlier activations, as they are and in a rotated basis."""

from orthojax.config import OptimConfig, replace
from orthojax.experiments.base_configs import SHALLOW_MODEL, with_normalizer
from orthojax.experiments.claims import NO_OUTLIERS, OUTLIERS, WORST_KURTOSIS, Claim, has_outliers, worst_kurtosis
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Table
from orthojax.experiments.pictures import perplexity_and_kurtosis
from orthojax.experiments.results import Result, Results, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.model import parameter_count

BASE = replace(with_normalizer(SHALLOW_MODEL, "softmax1"), {"train.steps": 500})

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
_PLAIN = tuple(OPTIMIZERS)


def _variants(scale: str) -> tuple[Variant, ...]:
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


def _adaptive_only(*plain: Result) -> bool:
    kurtosis = {result.name: worst_kurtosis(result) for result in plain}
    return kurtosis["adam"] > OUTLIERS >= kurtosis["sgd"]


CLAIMS = (
    Claim("Adaptive optimizers make outliers, SGD does not.", _PLAIN, (WORST_KURTOSIS,), _adaptive_only,
          f"Adam above {OUTLIERS:g}, SGD not"),
    Claim("A rotated basis cures whichever optimizer makes them.",
          {label: (name, f"{name}_rotated") for name, (label, *_) in OPTIMIZERS.items()}, (WORST_KURTOSIS,),
          lambda plain, rotated: worst_kurtosis(rotated) < NO_OUTLIERS,
          f"rotated below {NO_OUTLIERS} for all; testable where the optimizer as it is has more than {OUTLIERS:g}",
          has_outliers),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config = results.first.config
    return [
        f"One language model with softmax-1 attention ({parameter_count(config.model):,} parameters, RMSNormSingle, no "
        f"biases), {config.train.steps} steps of {config.train.batch_size} x {config.data.sequence_length} tokens, "
        f"trained by {len(OPTIMIZERS)} optimizers as they are and in a rotated basis (hadamard, axes "
        f"{config.optim.rotation.axes}). The learning rate is the best of three in short runs."
    ]


def _learning_rates(results: Results) -> Table:
    """Held-out loss of the short trials, and the choice; one at the edge may not be the best there is."""
    rows = []
    for row in results.raw["rows"]:
        losses = row.get("learning_rates", {})
        chosen = row["overrides"].get("optim.learning_rate", OptimConfig().learning_rate)
        cells = [f"{rate}: {'diverged' if loss is None else format(loss, '.3f')}" for rate, loss in losses.items()]
        edge = " (edge)" if f"{chosen:g}" in list(losses)[:: max(len(losses) - 1, 1)] else ""
        label = results[row["variant"]].label
        rows.append([label, str(row["seed"]), *(cells or ["failed"] * 3), f"{chosen:g}{edge}"])
    return Table("Loss (nats) by learning rate after short runs", ["", "seed", "low", "middle", "high", "chosen"], rows)


EXPERIMENT = Experiment(
    name="optimizer_outliers",
    title="which optimizers grow outlier activations, as they are and in a rotated basis",
    variants=_variants,
    about=_about,
    tables=(
        MetricTable(
            "Perplexity and outliers",
            ("perplexity", "kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest", "norm_ratio_rest"),
        ),
        MetricTable(
            "Change of perplexity by quantisation",
            (penalty("perplexity_int8_coarse"), penalty("perplexity_int4_zeropoint")),
        ),
        _learning_rates,
    ),
    claims=CLAIMS,
    pictures=(
        perplexity_and_kurtosis(
            group=lambda result: "in a rotated basis" if result.name.endswith("_rotated") else "as it is",
            label=lambda result: result.label.removesuffix(", rotated"),
        ),
    ),
)
