"""How `optimizer_outliers` is told."""

from orthojax.config import OptimConfig
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.criteria import NO_OUTLIERS, OUTLIERS
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.reporting.summaries import metric_table
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range as spread
from orthojax.model import parameter_count

_METRICS = {
    "perplexity": "perplexity",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, others",
    "max_abs_first": "max |x|, first token",
    "max_abs_rest": "max |x|, others",
    "norm_ratio_rest": "max / l2 norm, others",
}
_SETTINGS = ("perplexity_int8_coarse", "perplexity_int4_zeropoint")


def _pairs(study: Study) -> list[tuple[Variant, Variant]]:
    return list(zip(study.variants[::2], study.variants[1::2], strict=True))


def _kurtosis(study: Study, variant: Variant) -> float:
    """The larger of the two, first token and others."""
    return max(study.mean(variant.name, "kurtosis_first"), study.mean(variant.name, "kurtosis_rest"))


def _learning_rates(study: Study) -> Table:
    """Held-out loss of the short trials, and what was chosen; a choice at the edge may not be the best there is."""
    rows = []
    for row in study.results["rows"]:
        losses = row["learning_rates"]
        chosen = row["overrides"].get("optim.learning_rate", OptimConfig().learning_rate)
        rates = list(losses)
        at_edge = f"{chosen:g}" in (rates[0], rates[-1])
        label = next(v.label for v in study.variants if v.name == row["variant"])
        cells = [f"{rate}: {'diverged' if loss is None else format(loss, '.3f')}" for rate, loss in losses.items()]
        rows.append([label, str(row["seed"]), *cells, f"{chosen:g}{' (edge)' if at_edge else ''}"])
    return Table("Loss (nats) by learning rate after short runs", ["", "seed", "low", "middle", "high", "chosen"], rows)


def _quantization(study: Study) -> Table:
    rows = [
        [
            v.label,
            *(spread(summaries.penalties(study, v.name, key), lambda value: f"{value:+.2%}") for key in _SETTINGS),
        ]
        for v in study.variants
    ]
    return Table(
        "Change of perplexity by quantisation", ["", *(summaries.QUANTIZATION[key] for key in _SETTINGS)], rows
    )


def _claims(study: Study) -> list[Claim]:
    pairs = _pairs(study)
    with_outliers = [plain for plain, _ in pairs if _kurtosis(study, plain) > OUTLIERS]
    without = [plain for plain, _ in pairs if plain not in with_outliers]
    cured = [r for plain, r in pairs if plain in with_outliers and _kurtosis(study, r) < NO_OUTLIERS]
    adam, sgd = (next(p for p, _ in pairs if p.name == name) for name in ("adam", "sgd"))

    def names(variants: list[Variant]) -> str:
        return ", ".join(f"{v.label} {_kurtosis(study, v):.1f}" for v in variants) or "none"

    return [
        Claim(
            verdict(adam in with_outliers and sgd in without),
            f"Adaptive optimizers make outliers, SGD does not. Kurtosis (the larger of first token and others) above "
            f"{OUTLIERS:g}: {names(with_outliers)}; not above: {names(without)} (criterion: Adam above, SGD not).",
        ),
        Claim(
            verdict(len(cured) == len(with_outliers), visible=bool(with_outliers)),
            f"A rotated basis cures whichever optimizer makes them. Of {len(with_outliers)} with outliers "
            f"{len(cured)} are below {NO_OUTLIERS:g} when rotated: "
            f"{names([r for p, r in pairs if p in with_outliers])} (criterion: all of them).",
        ),
    ]


def _pictures(study: Study) -> list[Picture]:
    groups = zip(("as it is", "in a rotated basis"), zip(*_pairs(study), strict=True), strict=True)
    points = {label: [(v, _kurtosis(study, v)) for v in group] for label, group in groups}
    return [summaries.perplexity_and_kurtosis(study, points)]


def report(study: Study) -> Report:
    """Tables, claims and the picture of perplexity against kurtosis."""
    config = study.variants[0].config
    finished = not study.failures()
    return summaries.study_report(
        study,
        "Which optimizers grow outlier activations",
        [
            f"One language model with softmax-1 attention ({parameter_count(config.model):,} parameters, "
            f"RMSNormSingle, no biases), {config.train.steps} steps of {config.train.batch_size} x "
            f"{config.data.sequence_length} tokens, trained by {len(study.variants) // 2} optimizers as they are and "
            f"in a rotated basis (hadamard, axes {config.optim.rotation.axes}). The learning rate is the best of three "
            f"by a short run of each.",
        ],
        claims=_claims(study) if finished else [],
        tables=[
            metric_table(study, "Perplexity and outliers", study.variants, _METRICS, rows="variants"),
            _quantization(study),
            _learning_rates(study),
        ],
        pictures=_pictures(study) if finished else [],
    )
