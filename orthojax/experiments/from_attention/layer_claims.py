"""What appendix I of From Attention to Activation says of the progression over layers, with a criterion for each.

Trends are judged on means over seeds, model by model, and hold as the paper has them, 'general trends', where they hold
in most of the models in which there is something to see.
"""

from collections.abc import Callable, Mapping

import numpy as np

from orthojax.experiments.from_attention.criteria import chance_of_first, gaussian_kurtosis_limit
from orthojax.experiments.from_attention.models import MODELS, variant_name
from orthojax.experiments.from_attention.spiked_vector import mean_norm_ratio_of_direction
from orthojax.experiments.reporting.formats import number
from orthojax.experiments.reporting.page import Claim, verdict
from orthojax.experiments.study.study import Study

Layers = dict[str, np.ndarray]  # label of a model -> [layers], mean over seeds


def _layers(study: Study, method: str, metric: str) -> Layers:
    found = {label: study.by_layer(variant_name(model, method), metric) for model, label in MODELS.items()}
    return {label: values.mean(0) for label, values in found.items() if values.size}


def _width(study: Study, label: str) -> int:
    model = next(model for model, words in MODELS.items() if words == label)
    return next(v for v in study.variants if v.name == variant_name(model, "vanilla")).config.model.d_model


def _show(layers: Mapping[str, np.ndarray]) -> str:
    shown = (f"{label} {', '.join(number(float(value)) for value in _few(values))}" for label, values in layers.items())
    return "; ".join(shown) or "none"


def _few(values: np.ndarray) -> np.ndarray:
    """At most six layers, evenly taken, the first and the last among them."""
    return values[np.unique(np.linspace(0, len(values) - 1, 6).round().astype(int))]


def _most(text: str, criterion: str, judged: Layers, holds: Callable[[str, np.ndarray], bool], seen: str) -> Claim:
    """A claim on the majority of some models; visible where there is one."""
    good = [label for label, values in judged.items() if holds(label, values)]
    return Claim(
        verdict(2 * len(good) > len(judged), visible=bool(judged)),
        f"{text} It does in {len(good)} of {len(judged)} ({', '.join(good) or 'none'}); layers from first to last: "
        f"{_show(judged)} (criterion: {criterion}, in most models; judged are models where {seen}).",
    )


def _rank_correlation(values: np.ndarray) -> float:
    """Spearman's, of a layer's index and its value; 0 for a single layer."""
    if len(values) < 2:
        return 0.0
    ranks = values.argsort().argsort()
    return float(np.corrcoef(np.arange(len(values)), ranks)[0, 1])


def dominance_claims(study: Study) -> list[Claim]:
    """Appendix I.1: low at first, a peak in the middle, less at the end; and none with softmax-1."""
    metric = "first_attention_fraction"
    chance = chance_of_first(study.variants[0].config.data.sequence_length)
    seen = f"a layer is above {2 * chance:.2g}, twice what chance gives"
    claims = []
    for method, words in (("vanilla", "softmax and Adam"), ("orthoadam", "softmax and OrthoAdam")):
        judged = {k: v for k, v in _layers(study, method, metric).items() if v.max() > 2 * chance}
        rises = _most(
            f"With {words}, dominance begins low and rises to a peak in the middle layers.",
            "the largest is of a layer that is neither first nor last, and the first layer has less than half of it",
            judged, lambda _, v: 0 < v.argmax() < len(v) - 1 and bool(v[0] < v.max() / 2), seen,
        )  # fmt: skip
        falls = _most(
            f"With {words}, dominance falls in the final layers.",
            "the last layer has less than the largest", judged, lambda _, v: v[-1] < v.max(), seen,
        )  # fmt: skip
        claims += [rises, falls]
    for method, of in (("softmax1", "vanilla"), ("cured", "orthoadam")):
        largest = {k: float(v.max()) for k, v in _layers(study, of, metric).items() if v.max() > 2 * chance}
        claims.append(
            _most(
                f"softmax-1 removes dominance in every layer ({'Adam' if of == 'vanilla' else 'OrthoAdam'}).",
                "no layer has more than half of softmax's largest",
                {k: v for k, v in _layers(study, method, metric).items() if k in largest},
                lambda label, v, largest=largest: v.max() <= largest[label] / 2,
                f"{seen} with softmax",
            )
        )
    return claims


def _growth(study: Study, metric: str, words: str, limit: Callable[[int], float], limit_words: str) -> list[Claim]:
    """Appendices I.2 and I.3: growing without OrthoAdam; with it, lower at first; with softmax-1 too, always low."""
    vanilla = _layers(study, "vanilla", metric)
    limits = {label: limit(_width(study, label)) for label in vanilla}
    seen = f"a layer is above {limit_words}"

    def above(layers: Layers) -> Layers:
        return {label: values for label, values in layers.items() if values.max() > limits[label]}

    claims = [
        _most(
            f"With {method_words}, the {words} grows with depth.", "rank correlation of layer and value above 0",
            above(_layers(study, method, metric)), lambda _, v: _rank_correlation(v) > 0, seen,
        )
        for method, method_words in (("vanilla", "softmax and Adam"), ("softmax1", "softmax-1 and Adam"))
    ]  # fmt: skip
    claims.append(
        _most(
            f"With OrthoAdam alone the {words} grows as well, from a lower start.",
            "rank correlation above 0, and the first layer below that of softmax and Adam",
            above(_layers(study, "orthoadam", metric)),
            lambda label, v: _rank_correlation(v) > 0 and v[0] < vanilla[label][0], seen,
        )
    )  # fmt: skip
    cured = {label: v for label, v in _layers(study, "cured", metric).items() if label in above(vanilla)}
    good = [label for label, v in cured.items() if v[:-1].max(initial=0) <= limits[label]]
    told = ", ".join(f"{label} {limits[label]:.3g}" for label in cured) or "none"
    claims.append(
        Claim(
            verdict(len(good) == len(cured), visible=bool(cured)),
            f"With both the {words} stays that of a Gaussian vector in every layer; the paper sees small rises in "
            f"the last layers of two of five models. So in {len(good)} of {len(cured)}; layers from first to last: "
            f"{_show(cured)} (criterion: all layers but the last at most {limit_words}: {told}; judged are models "
            f"where a layer of softmax and Adam is above it).",
        )
    )
    return claims


def kurtosis_claims(study: Study) -> list[Claim]:
    """Appendix I.2."""
    words = "3 + 3 sqrt(24 / D), three standard deviations above a Gaussian's 3"
    return _growth(study, "kurtosis_first", "kurtosis of the first token", gaussian_kurtosis_limit, words)


def norm_ratio_claims(study: Study) -> list[Claim]:
    """Appendix I.3, where 'the same commentary applies'."""
    words = "1.5 times the mean of a Gaussian vector"
    limit = lambda d_model: 1.5 * mean_norm_ratio_of_direction(d_model)  # noqa: E731
    return _growth(study, "norm_ratio_first", "norm ratio of the first token", limit, words)


def max_abs_claims(study: Study) -> list[Claim]:
    """Appendices I.4 and J: outliers are established in early layers and persist; both methods together shrink them."""
    vanilla, cured = (_layers(study, method, "max_abs_first") for method in ("vanilla", "cured"))
    kurtosis = _layers(study, "vanilla", "kurtosis_first")
    judged = {k: v for k, v in vanilla.items() if kurtosis[k].max() > gaussian_kurtosis_limit(_width(study, k))}
    seen = "a layer of softmax and Adam has a kurtosis above 3 + 3 sqrt(24 / D), so outliers"
    return [
        _most(
            "Outliers of the first token are established in early layers and persist.",
            "from layer L / 4 of L on, rounded down, the last aside, no layer has less than half of the largest",
            judged, lambda _, v: v[len(v) // 4 : -1].min(initial=np.inf) >= v.max() / 2, seen,
        ),
        _most(
            "Softmax-1 with OrthoAdam has smaller activations of the first token in every layer.",
            f"below softmax and Adam in every layer, whose layers are: {_show(judged)}",
            {k: cured[k] for k in judged}, lambda label, v: bool((v < vanilla[label]).all()), seen,
        ),
    ]  # fmt: skip
