"""What appendix I of From Attention to Activation says of the progression over layers, with a criterion for each.

Trends are judged on means over seeds, model by model, and hold as the paper has them, 'general trends', where they hold
in most of the models in which there is something to see.
"""

from collections.abc import Callable, Mapping

import numpy as np

from orthojax.analysis import rank_correlation
from orthojax.experiments.from_attention.models import MODELS, variant_name
from orthojax.experiments.from_attention.spiked_vector import mean_norm_ratio_of_direction
from orthojax.experiments.reporting.criteria import DOMINANCE, chance_of_first, gaussian_kurtosis_limit
from orthojax.experiments.reporting.page import Claim, verdict
from orthojax.experiments.study.study import Study
from orthojax.formatting import number

# What is less is no growth: outliers that are there after the first layer stay in the residual stream, and rounding or
# noise then decides which layer has the most.
_GROWTH = 1.25
_GROWS = f"rank correlation of layer and value above 0, and the largest at least {_GROWTH:g} times the first"

Layers = dict[str, np.ndarray]  # label of a model -> [layers], mean over seeds


def _layers(study: Study, method: str, metric: str) -> Layers:
    found = {label: study.by_layer(variant_name(model, method), metric) for model, label in MODELS.items()}
    return {label: values.mean(0) for label, values in found.items() if values.size}


def _width(study: Study, label: str) -> int:
    model = next(model for model, words in MODELS.items() if words == label)
    return next(v for v in study.variants if v.name == variant_name(model, "vanilla")).config.model.d_model


def _cases(layers: Mapping[str, np.ndarray]) -> list[str]:
    return [f"{label} {', '.join(number(float(value)) for value in _few(values))}" for label, values in layers.items()]


def _few(values: np.ndarray) -> np.ndarray:
    """At most six layers, evenly taken, the first and the last among them."""
    return values[np.unique(np.linspace(0, len(values) - 1, 6).round().astype(int))]


def _most(
    text: str,
    criterion: str,
    among: Layers,
    judged: Callable[[str, np.ndarray], bool],
    seen: str,
    holds: Callable[[str, np.ndarray], bool],
) -> Claim:
    """A claim on most models in which there is something to see.

    Args:
      text: The claim.
      criterion: What `holds` asks of the layers of a model.
      among: The models.
      judged: Whether there is something to see in a model.
      seen: The same in words.
      holds: The criterion.
    """
    models = {label: values for label, values in among.items() if judged(label, values)}
    good = [label for label, values in models.items() if holds(label, values)]
    told = f"So in {len(good)} of {len(models)} models ({', '.join(good) or 'none'})"
    return Claim(
        verdict(2 * len(good) > len(models), visible=bool(models)),
        f"{text} Layers from first to last:",
        _cases(models or among),
        f"{told if models else 'There is nothing to see in any model'} (criterion: {criterion}, in most of the models "
        f"where {seen}).",
    )


def _grows(values: np.ndarray) -> bool:
    return rank_correlation(np.arange(len(values)), values) > 0 and bool(values.max() >= _GROWTH * values[0])


def dominance_claims(study: Study) -> list[Claim]:
    """Appendix I.1: low at first, a peak in the middle, less at the end; and none with softmax-1."""
    metric = "first_attention_fraction"
    least = DOMINANCE * chance_of_first(study.variants[0].config.data.sequence_length)
    seen = f"a layer is above {least:.2g}, {DOMINANCE:g} times what chance gives"

    def dominant(_: str, values: np.ndarray) -> bool:
        return bool(values.max() > least)

    claims = []
    for method, words in (("vanilla", "softmax and Adam"), ("orthoadam", "softmax and OrthoAdam")):
        layers = _layers(study, method, metric)
        rises = _most(
            f"With {words}, dominance begins low and rises to a peak in the middle layers.",
            "the largest is of a layer that is neither first nor last, and the first layer has less than half of it",
            layers, dominant, seen, lambda _, v: bool(0 < v.argmax() < len(v) - 1 and v[0] < v.max() / 2),
        )  # fmt: skip
        falls = _most(
            f"With {words}, dominance falls in the final layers.",
            "the last layer has less than the largest",
            layers, dominant, seen, lambda _, v: bool(v[-1] < v.max()),
        )  # fmt: skip
        claims += [rises, falls]
    for method, of, words in (("softmax1", "vanilla", "Adam"), ("cured", "orthoadam", "OrthoAdam")):
        softmax = _layers(study, of, metric)
        claims.append(
            _most(
                f"With {words}, softmax-1 removes dominance in every layer.",
                "no layer has more than half of softmax's largest",
                _layers(study, method, metric),
                lambda label, _, softmax=softmax: dominant(label, softmax[label]), f"{seen}, with softmax",
                lambda label, v, softmax=softmax: bool(v.max() <= softmax[label].max() / 2),
            )
        )  # fmt: skip
    return claims


def _growth(study: Study, metric: str, words: str, limit: Callable[[int], float], limit_words: str) -> list[Claim]:
    """Appendices I.2 and I.3: growing without OrthoAdam; with it, lower at first; with softmax-1 too, always low."""
    vanilla, softmax1, orthoadam, cured = (
        _layers(study, method, metric) for method in ("vanilla", "softmax1", "orthoadam", "cured")
    )
    limits = {label: limit(_width(study, label)) for label in vanilla}
    seen = f"a layer is above {limit_words}"

    def above(label: str, values: np.ndarray) -> bool:
        return bool(values.max() > limits[label])

    claims = [
        _most(
            f"With {method}, the {words} grows with depth{_factors(layers)}.",
            _GROWS,
            layers, above, seen, lambda _, v: _grows(v),
        )
        for method, layers in (("softmax and Adam", vanilla), ("softmax-1 and Adam", softmax1))
    ]  # fmt: skip
    alone = _most(
        f"With OrthoAdam alone the {words} grows as well, from a lower start{_factors(orthoadam)}.",
        f"{_GROWS}, and the first layer below that of softmax and Adam",
        orthoadam, above, seen, lambda label, v: bool(_grows(v) and v[0] < vanilla[label][0]),
    )  # fmt: skip
    judged = {label: values for label, values in cured.items() if above(label, vanilla[label])}
    good = [label for label, values in judged.items() if values[:-1].max(initial=0) <= limits[label]]
    told = ", ".join(f"{label} {limits[label]:.3g}" for label in judged) or "none"
    both = Claim(
        verdict(len(good) == len(judged), visible=bool(judged)),
        f"With both the {words} stays that of a Gaussian vector in every layer; the paper sees small rises in the "
        f"last layers of two of five models. Layers from first to last:",
        _cases(judged or cured),
        f"So in {len(good)} of {len(judged)} models (criterion: all layers but the last at most {limit_words}: "
        f"{told}; in all of the models where a layer of softmax and Adam is above it).",
    )
    return [*claims, alone, both]


def _factors(layers: Layers) -> str:
    """By what: a trend says nothing of its size."""
    shown = ", ".join(f"{label} {values.max() / values[0]:.3g}" for label, values in layers.items())
    return f" (largest over first layer: {shown})"


def kurtosis_claims(study: Study) -> list[Claim]:
    """Appendix I.2."""
    words = "3 + 3 sqrt(24 / D), three standard deviations above a Gaussian's 3"
    return _growth(study, "kurtosis_first", "kurtosis of the first token", gaussian_kurtosis_limit, words)


def _norm_ratio_limit(d_model: int) -> float:
    return 1.5 * mean_norm_ratio_of_direction(d_model)


def norm_ratio_claims(study: Study) -> list[Claim]:
    """Appendix I.3, where 'the same commentary applies'."""
    words = "1.5 times the mean of a Gaussian vector"
    return _growth(study, "norm_ratio_first", "norm ratio of the first token", _norm_ratio_limit, words)


def max_abs_claims(study: Study) -> list[Claim]:
    """Appendices I.4 and J: outliers are established in early layers and persist; both methods together shrink them."""
    vanilla, cured = (_layers(study, method, "max_abs_first") for method in ("vanilla", "cured"))
    kurtosis = _layers(study, "vanilla", "kurtosis_first")
    seen = "a layer of softmax and Adam has a kurtosis above 3 + 3 sqrt(24 / D), so outliers"

    def outliers(label: str, _: np.ndarray) -> bool:
        return bool(kurtosis[label].max() > gaussian_kurtosis_limit(_width(study, label)))

    return [
        _most(
            "With softmax and Adam, outliers of the first token are established in early layers and persist.",
            "from layer L / 4 of L on, rounded down, the last aside, no layer has less than half of the largest",
            vanilla, outliers, seen, lambda _, v: bool(v[len(v) // 4 : -1].min(initial=np.inf) >= v.max() / 2),
        ),
        _most(
            "Softmax-1 with OrthoAdam has smaller activations of the first token in every layer.",
            "below softmax and Adam in every layer",
            cured, outliers, seen, lambda label, v: bool((v < vanilla[label]).all()),
        ),
    ]  # fmt: skip
