"""Figures 7 to 26: first-token dominance, kurtosis, norm ratio and largest activation layer by layer; appendix I.

The paper speaks of 'general trends': its claims hold if they do in most of the models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orthojax.analysis import rank_correlation
from orthojax.experiments.claims import CHANCE, ByLayer, Claim, Expr, Metric, function, kurtosis_limit, peak
from orthojax.experiments.from_attention.models import MODELS, SCALES, grid
from orthojax.experiments.from_attention.spiked_vector import mean_norm_ratio_of_direction
from orthojax.experiments.pictures import ByLayer as LayerCurves
from orthojax.experiments.study import Study
from orthojax.experiments.tables import Columns

_V, _S, _O, _C = "*_vanilla", "*_softmax1", "*_orthoadam", "*_cured"
_FRACTIONS = ByLayer("first_attention_fraction")
_DOMINATED = {of: peak(_FRACTIONS[of]) > 2 * CHANCE[of] for of in (_V, _O)}


def _first(layers: Expr) -> Expr:
    return function("first layer", lambda of: of[0], layers)


def _last(layers: Expr) -> Expr:
    return function("last layer", lambda of: of[-1], layers)


def _from_a_quarter(layers: Expr) -> Expr:
    """Returns the smallest value from layer L / 4 of L on, rounded down, the last aside."""
    return function("smallest from L / 4 on", lambda of: of[len(of) // 4 : -1].min(initial=np.inf), layers)


def _inside(layers: Expr) -> Expr:
    return function("the largest is neither first nor last", lambda of: 0 < of.argmax() < len(of) - 1, layers)


def _rises(layers: Expr) -> Expr:
    correlation = lambda of: rank_correlation(np.arange(len(of)), of)  # noqa: E731
    return function("rank correlation with depth", correlation, layers) > 0


def _grows(layers: Expr) -> Expr:
    """Returns whether values rise with depth, by a quarter at least.

    Less is no growth: outliers of the first layer stay in the residual stream, and noise decides which layer has most.
    """
    return _rises(layers) & (peak(layers) >= 1.25 * _first(layers))


def _dominance() -> list[Claim]:
    """Returns appendix I.1: low at first, a peak in the middle, less at the end; and none with softmax-1."""
    claims = []
    for of, words in ((_V, "softmax and Adam"), (_O, "softmax and OrthoAdam")):
        layers = _FRACTIONS[of]
        claims += [
            Claim(f"With {words}, dominance begins low and rises to a peak in the middle layers.",
                  _inside(layers) & (_first(layers) < peak(layers) / 2), _DOMINATED[of], most=True),
            Claim(f"With {words}, dominance falls in the final layers.", _last(layers) < peak(layers), _DOMINATED[of],
                  most=True),
        ]  # fmt: skip
    for words, before, after in (("Adam", _V, _S), ("OrthoAdam", _O, _C)):
        left = peak(_FRACTIONS[after]) <= peak(_FRACTIONS[before]) / 2
        says = f"With {words}, softmax-1 removes dominance in every layer."
        claims.append(Claim(says, left, _DOMINATED[before], most=True))
    return claims


def _growth(metric: str, words: str, limit: Metric) -> list[Claim]:
    """Returns appendices I.2 and I.3: growth with Adam, with OrthoAdam from a lower start, with both none at all."""
    of = ByLayer(metric)
    above = {name: peak(of[name]) > limit[name] for name in (_V, _S, _O)}
    lower = _first(of[_O]) < _first(of[_V])
    why = "a largest layer 1% above the first met it"
    all_but_last = function("largest of all layers but the last", lambda layers: layers[:-1].max(initial=0), of[_C])
    return [
        *(Claim(f"With {method}, the {words} grows with depth.", _grows(of[name]), above[name], most=True,
                revised=(why, Claim("", _rises(of[name]), above[name], most=True)))
          for name, method in ((_V, "softmax and Adam"), (_S, "softmax-1 and Adam"))),
        Claim(f"With OrthoAdam alone the {words} grows as well, from a lower start than with Adam.",
              _grows(of[_O]) & lower, above[_V], most=True,
              revised=(f"{why}, and it was judged only in models in which OrthoAdam leaves something",
                       Claim("", _rises(of[_O]) & lower, above[_O], most=True))),
        Claim(f"With both the {words} stays that of a Gaussian vector in every layer but the last; the paper sees "
              "small rises in the last layers of two of five models.", all_but_last <= limit[_V], above[_V]),
    ]  # fmt: skip


_LIMIT = Metric("3 + 3 sqrt(24 / D)", kurtosis_limit)
_GAUSSIAN_RATIO = Metric(
    "1.5 times a Gaussian vector's mean ratio",
    lambda of: 1.5 * mean_norm_ratio_of_direction(int(of["model.d_model"])),
)


def _max_abs() -> list[Claim]:
    """Returns appendices I.4 and J: outliers are established early and persist; both methods together shrink them."""
    of = ByLayer("max_abs_first")
    outliers = peak(ByLayer("kurtosis_first")[_V]) > _LIMIT[_V]
    smaller = function("smaller in every layer", lambda after, before: bool((after < before).all()), of[_C], of[_V])
    return [
        Claim("With softmax and Adam, outliers of the first token are established in early layers and persist.",
              _from_a_quarter(of[_V]) >= peak(of[_V]) / 2, outliers, most=True),
        Claim("Softmax-1 with OrthoAdam has smaller activations of the first token in every layer.",
              smaller.in_every_seed(), outliers,
              revised=("means over seeds hid that GPT2 60M has outliers in one seed of three",
                       Claim("", smaller, outliers, most=True))),
    ]  # fmt: skip


def _place(metric: str, words: str, of: Callable[[np.ndarray], Any]) -> Metric:
    return Metric(words, lambda numbers: float(of(numbers.layers(metric))))


def _study(figure: int, metric: str, words: str, claims: Sequence[Claim], log: bool, gaussian: bool = False) -> Study:
    """Returns five figures of one metric: of four of our models, two sizes in the third, and of given models."""
    at = [_place(metric, f"x = {x:.2g}", lambda of, x=x: of[round(x * (len(of) - 1))]) for x in (0, 1 / 3, 2 / 3, 1)]
    at += [_place(metric, "largest", np.max), _place(metric, "in layer", lambda of: np.argmax(of) + 1)]
    lines = {"Gaussian": 3.0} if gaussian else {}
    return Study(
        name=f"figure{figure}",
        title=f"Figures {figure} to {figure + 4}: {words}, layer by layer",
        runs=grid,
        scales=SCALES,
        also=tuple(f"figure{n}" for n in range(figure + 1, figure + 5)),
        models=lambda given: given,
        note=f"The runs of Table 2; figure {figure + 4} is of models given with --model. Layer m of L, counted from 0, "
        "is at x = m / (L - 1).",
        tables=[Columns(f"{words[:1].upper()}{words[1:]}, after the layers nearest to x", at)],
        claims=claims,
        pictures=[LayerCurves(metric, f"{model}_*", "log" if log else "linear", lines, True, f"figure{figure}_{model}")
                  for model in MODELS],
    )  # fmt: skip


FIGURE7 = _study(7, "first_attention_fraction", "first-token dominance, fraction", _dominance(), log=False)
_KURTOSIS = _growth("kurtosis_first", "kurtosis of the first token", _LIMIT)
FIGURE12 = _study(12, "kurtosis_first", "kurtosis, first token", _KURTOSIS, log=True, gaussian=True)
_RATIOS = _growth("norm_ratio_first", "norm ratio of the first token", _GAUSSIAN_RATIO)
FIGURE17 = _study(17, "norm_ratio_first", "max|x| / l2 norm, first token", _RATIOS, log=False)
FIGURE22 = _study(22, "max_abs_first", "max |activation|, first token", _max_abs(), log=True)
