"""Which optimizers grow outlier activations, as they are and in a rotated basis."""

from orthojax.config import OptimConfig, replace
from orthojax.experiments import optimizers
from orthojax.experiments.base_configs import OPTIMIZERS, SHALLOW_MODEL, with_normalizer
from orthojax.experiments.claims import NO_OUTLIERS, OUTLIERS, WORST_KURTOSIS, Claim, Revision
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.page import Table
from orthojax.experiments.pictures import perplexity_and_kurtosis
from orthojax.experiments.results import Results, penalty
from orthojax.experiments.tables import MetricTable
from orthojax.model import parameter_count

BASE = replace(with_normalizer(SHALLOW_MODEL, "softmax1"), {"train.steps": 500})


def _variants(scale: str) -> tuple[Variant, ...]:
    variants = []
    for name, (label, changes, middle) in OPTIMIZERS.items():
        rates = (middle / 3, middle, middle * 3)
        config = replace(
            BASE,
            {"optim.optimizer": optimizers.named(name)} | {f"optim.{field}": value for field, value in changes.items()},
        )
        variants.append(Variant(name, label, config, rates))
        rotated = replace(config, {"optim.rotated": True})
        variants.append(Variant(f"{name}_rotated", f"{label}, rotated", rotated, rates))
    return tuple(variants)


CLAIMS = (
    Claim("Adam makes outliers, SGD does not.", ("adam", "sgd"), (WORST_KURTOSIS,),
          lambda adam, sgd: WORST_KURTOSIS(adam) > OUTLIERS >= WORST_KURTOSIS(sgd),
          f"Adam above {OUTLIERS:g}, SGD not"),
    Claim("A rotated basis cures whichever optimizer makes them.",
          {label: (name, f"{name}_rotated") for name, (label, *_) in OPTIMIZERS.items()}, (WORST_KURTOSIS,),
          lambda plain, rotated: WORST_KURTOSIS(rotated) < NO_OUTLIERS,
          f"rotated below {NO_OUTLIERS} for all; testable where one of the two has more than {OUTLIERS:g}",
          lambda *of: max(map(WORST_KURTOSIS, of)) > OUTLIERS,
          revised=Revision("an optimizer that makes outliers in the rotated basis alone was not judged",
                           {"criterion": f"rotated below {NO_OUTLIERS} for all; testable where the optimizer as it is "
                            f"has more than {OUTLIERS:g}", "testable": lambda plain, rotated:
                            WORST_KURTOSIS(plain) > OUTLIERS})),
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
