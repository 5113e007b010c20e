"""Figures 7 to 26: first-token dominance, kurtosis, norm ratio and largest activation layer by layer; appendix I.

The paper speaks of 'general trends': its claims hold where they do in most of the models.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from orthojax.config import Config
from orthojax.experiments import claims as terms
from orthojax.experiments.claims import DOMINANCE, FRACTION, GAUSSIAN, C, Claim, O, Revision, V, gaussian_kurtosis_limit
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention.channels import rank_correlation
from orthojax.experiments.from_attention.models import GRID, METHOD_LABELS, SCALES, by_model, grid, stand_in
from orthojax.experiments.from_attention.spiked_vector import mean_norm_ratio_of_direction
from orthojax.experiments.pictures import LayerCurves
from orthojax.experiments.results import Numbers, Quantity, Result, Results, pairs
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import number

# Less is no growth: outliers of the first layer stay in the residual stream, and noise decides which layer has most.
_GROWTH = 1.25
_RANK = "rank correlation of layer and value above 0"
_GROWS = f"{_RANK}, and the largest at least {_GROWTH:g} times the first"
_WORDS = {"vanilla": "softmax and Adam", "softmax1": "softmax-1 and Adam", "orthoadam": "softmax and OrthoAdam"}
_PLACES = (0.0, 1 / 3, 2 / 3, 1.0)
# Of the figures with the first number, which one shows a model; existing models have the last.
_OFFSETS = {"gpt2_60m": 0, "gpt2_130m": 1, "gpt2_350m": 2, "gpt2_1_4b": 2, "llama2_130m": 3}
_GIVEN = 4


def _text(metric: str, *of: Result) -> str:
    """For `Claim.detail`: at most six layers of each variant, evenly spaced, with the first and the last."""
    layers = [result.by_layer(metric) for result in of]
    few = [values[np.unique(np.linspace(0, len(values) - 1, 6).round().astype(int))] for values in layers]
    return " → ".join(f"[{', '.join(number(float(value)) for value in values)}]" for values in few)


def _growth_text(metric: str, *of: Result) -> str:
    """For `Claim.detail`: the layers, and by how much the value grows over them; a trend has no size."""
    values = of[0].by_layer(metric)
    return f"{_text(metric, *of)}, largest over first layer {number(values.max() / values[0])}"


def _rises_in_rank(values: np.ndarray) -> bool:
    return rank_correlation(np.arange(len(values)), values) > 0


def _largest_ratio(metric: str, before: Result, after: Result) -> float:
    """Of any layer of any seed that both have."""
    layers = [pairs(after, before, f"{metric}/layer_{layer}").values() for layer in range(int(before.num_layers))]
    return max(a / b for of_seeds in layers for a, b in of_seeds)


def _grows(values: np.ndarray) -> bool:
    return _rises_in_rank(values) and bool(values.max() >= _GROWTH * values[0])


def _any_growth(criterion: str, holds: Callable[..., bool]) -> Revision:
    """For the criteria that looked at the order of the layers alone."""
    return Revision("a largest layer 1% above the first met it", {"criterion": criterion, "holds": holds})


def _dominated(result: Result, *_: Result) -> bool:
    """Whether the first token dominates in some layer."""
    return result.by_layer(FRACTION).max() > DOMINANCE * terms.chance(result)


def _rises(result: Result) -> bool:
    values = result.by_layer(FRACTION)
    return bool(0 < values.argmax() < len(values) - 1 and values[0] < values.max() / 2)


def dominance_claims() -> list[Claim]:
    """Appendix I.1: low at first, a peak in the middle, less at the end; and none with softmax-1."""

    def falls(result: Result) -> bool:
        return result.by_layer(FRACTION)[-1] < result.by_layer(FRACTION).max()

    seen = f"testable where a layer has more than {DOMINANCE:g} times what equal logits give"
    claim = partial(Claim, detail=partial(_text, FRACTION), testable=_dominated, most=True)
    peak = "the largest is of a layer that is neither first nor last, and the first layer has less than half of it"
    trends = (
        ("begins low and rises to a peak in the middle layers", _rises, peak),
        ("falls in the final layers", falls, "the last layer has less than the largest"),
    )
    return [
        *(
            claim(f"With {_WORDS[method]}, dominance {says}.", (method,), (), holds, f"{criterion}; {seen}")
            for method in ("vanilla", "orthoadam")
            for says, holds, criterion in trends
        ),
        *(
            claim(f"With {optimizer}, softmax-1 removes dominance in every layer.", of, (),
                  lambda a, b: b.by_layer(FRACTION).max() <= a.by_layer(FRACTION).max() / 2,
                  f"no layer has more than half of softmax's largest; {seen}, with softmax")
            for optimizer, of in (("Adam", ("vanilla", "softmax1")), ("OrthoAdam", ("orthoadam", "cured")))
        ),
    ]  # fmt: skip


def growth_claims(metric: str, words: str, limit: Callable[[int], float], limit_words: str) -> list[Claim]:
    """Appendices I.2 and I.3: it grows with Adam, with OrthoAdam from a lower start, and with both methods not at all.

    Args:
      metric: What grows.
      words: The same in words.
      limit: d_model -> the largest value of a vector without outliers.
      limit_words: The same in words.
    """
    seen = f"testable where a layer is above {limit_words}"

    def above(result: Result, *_: Result) -> bool:
        return result.by_layer(metric).max() > limit(int(result.d_model))

    def starts_lower(orthoadam: Result, vanilla: Result) -> bool:
        values = orthoadam.by_layer(metric)
        return _grows(values) and values[0] < vanilla.by_layer(metric)[0]

    def rises_from_lower(orthoadam: Result, vanilla: Result) -> bool:
        values = orthoadam.by_layer(metric)
        return _rises_in_rank(values) and values[0] < vanilla.by_layer(metric)[0]

    claim = partial(Claim, detail=partial(_growth_text, metric), testable=above, most=True)
    return [
        *(
            claim(f"With {_WORDS[method]}, the {words} grows with depth.", (method,), (),
                  lambda result: _grows(result.by_layer(metric)), f"{_GROWS}; {seen}",
                  revised=_any_growth(f"{_RANK}; {seen}", lambda result: _rises_in_rank(result.by_layer(metric))))
            for method in ("vanilla", "softmax1")
        ),
        claim(f"With OrthoAdam alone the {words} grows as well, from a lower start than with Adam.", (O, V), (),
              starts_lower, f"{_GROWS}, and the first layer below that of softmax and Adam; {seen} with the latter",
              testable=lambda orthoadam, vanilla: above(vanilla),
              revised=Revision("a largest layer 1% above the first met it, and it was judged only in models in which "
                               "OrthoAdam leaves something",
                               {"criterion": f"{_RANK}, and the first layer below that of softmax and Adam; {seen}",
                                "holds": rises_from_lower, "testable": above})),
        Claim(f"With both the {words} stays that of a Gaussian vector in every layer but the last; the paper sees "
              "small rises in the last layers of two of five models.", (V, C), (),
              lambda v, c: c.by_layer(metric)[:-1].max(initial=0) <= limit(int(v.d_model)),
              f"all layers but the last at most {limit_words}, in every model; {seen} with softmax and Adam", above,
              detail=lambda v, c: f"{_text(metric, v, c)}, limit {number(limit(int(v.d_model)))}"),
    ]  # fmt: skip


def max_abs_claims() -> list[Claim]:
    """Appendices I.4 and J: outliers are established in early layers and persist; both methods together shrink them."""
    metric = "max_abs_first"

    def outliers(vanilla: Result, *_: Result) -> bool:
        return vanilla.by_layer("kurtosis_first").max() > gaussian_kurtosis_limit(vanilla.d_model)

    def persist(vanilla: Result) -> bool:
        values = vanilla.by_layer(metric)
        return values[len(values) // 4 : -1].min(initial=np.inf) >= values.max() / 2

    seen = "testable where a layer of softmax and Adam has a kurtosis above 3 + 3 sqrt(24 / D), so outliers"
    claim = partial(Claim, detail=partial(_text, metric), testable=outliers, most=True)
    return [
        claim("With softmax and Adam, outliers of the first token are established in early layers and persist.", (V,),
              (), persist, "from layer L / 4 of L on, rounded down, the last aside, no layer has less than half of the "
              f"largest; {seen}"),
        claim("Softmax-1 with OrthoAdam has smaller activations of the first token in every layer.", (V, C), (),
              lambda v, c: _largest_ratio(metric, v, c) < 1,
              f"below softmax and Adam in every layer, seed and model; {seen}", most=False,
              detail=lambda v, c: f"{_text(metric, v, c)}, largest ratio of any seed "
              f"{number(_largest_ratio(metric, v, c))}",
              revised=Revision("means over seeds hid that GPT2 60M has outliers in one seed of three",
                               {"holds": lambda v, c: (c.by_layer(metric) < v.by_layer(metric)).all(),
                                "most": True, "criterion": f"below softmax and Adam in every layer; {seen}"})),
    ]  # fmt: skip


def _table(metric: str, label: str) -> MetricTable:
    def at(place: float) -> Quantity:
        def value(of: Numbers) -> float:
            values = of.by_layer(metric)
            return float(values[round(place * (len(values) - 1))])

        return Quantity(f"x = {place:.2g}", value)

    return MetricTable(
        f"{label[0].upper()}{label[1:]}, after the layers nearest to x",
        [
            *map(at, _PLACES),
            Quantity("largest", lambda of: float(max(of.by_layer(metric)))),
            Quantity("in layer", lambda of: float(np.argmax(of.by_layer(metric))) + 1),
        ],
        label=lambda result: f"{result.label}, {result.config.model.num_layers} layers",
    )


def _curves(
    figure: int, metric: str, label: str, y_scale: str, reference: Callable[[Config], tuple[float, str]] | None
) -> list[LayerCurves]:
    def curves(offset: int, name: str, model: Callable[[str], str], keep: Callable[[Result], bool]) -> LayerCurves:
        return LayerCurves(
            name=f"figure{figure + offset}_{name}",
            caption=lambda results: f"{model(results.scale)}: {label}, layer by layer.",
            y_label=label,
            metrics={metric: ""},
            y_scale=y_scale,  # pyright: ignore[reportArgumentType]
            reference=reference,
            keep=keep,
            label=lambda result: METHOD_LABELS[GRID[result.name][1]] if result.name in GRID else result.label,
            normalized=True,
        )

    models = [
        curves(offset, model, partial(stand_in, model), lambda r, model=model: GRID.get(r.name, ("",))[0] == model)
        for model, offset in _OFFSETS.items()
    ]
    return [*models, curves(_GIVEN, "given_models", lambda scale: "Given models", lambda r: r.given)]


def _experiment(
    figure: int,
    metric: str,
    label: str,
    y_scale: str,
    claims: Sequence[Claim],
    reference: Callable[[Config], tuple[float, str]] | None = None,
) -> Experiment:
    """Five figures of one metric, from `figure` on: four of our models, two sizes in the third, and given models."""

    def about(results: Results) -> list[str]:
        missing = "" if any(result.given for result in results) else "; none was"
        return [
            f"Five models by four methods, the runs of Table 2; figure {figure + _GIVEN} is of models given with "
            f"--model{missing}. Layer m of L, counted from 0, is at x = m / (L - 1). Curves are means over seeds, "
            "bands go from the smallest to the largest seed."
        ]

    return Experiment(
        name=f"figure{figure}",
        title=f"Figures {figure} to {figure + _GIVEN}: {label}, layer by layer",
        variants=grid,
        scales=SCALES,
        also=tuple(f"figure{n}" for n in range(figure + 1, figure + _GIVEN + 1)),
        about=about,
        groups=by_model,
        tables=(_table(metric, label),),
        claims=claims,
        pictures=_curves(figure, metric, label, y_scale, reference),
        takes_models=True,
    )


EXPERIMENTS = (
    _experiment(
        7, FRACTION, "first-token dominance, fraction", "linear", dominance_claims(),
    ),
    _experiment(
        12, "kurtosis_first", "kurtosis, first token", "log",
        growth_claims(
            "kurtosis_first", "kurtosis of the first token", gaussian_kurtosis_limit,
            f"{GAUSSIAN:g} + 3 sqrt(24 / D), three standard deviations above a Gaussian's {GAUSSIAN:g}",
        ),
        lambda config: (GAUSSIAN, "Gaussian"),
    ),
    _experiment(
        17, "norm_ratio_first", "max|x| / l2 norm, first token", "linear",
        growth_claims(
            "norm_ratio_first", "norm ratio of the first token", lambda d: 1.5 * mean_norm_ratio_of_direction(d),
            "1.5 times the mean of a Gaussian vector",
        ),
        lambda config: (mean_norm_ratio_of_direction(config.model.d_model), "Gaussian"),
    ),
    _experiment(22, "max_abs_first", "max |activation|, first token", "log", max_abs_claims()),
)  # fmt: skip
