"""Appendix G of From Attention to Activation: the kurtosis of a vector with one outlier channel grows with its size."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.claims import GAUSSIAN, Claim
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.from_attention.spiked_vector import (
    mixture_kurtosis,
    simplified_kurtosis,
    spike_kurtosis,
    spiked_vectors,
)
from orthojax.experiments.page import Picture
from orthojax.experiments.results import Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.ops.statistics import kurtosis

_kurtosis = jax.jit(kurtosis)  # compiled for each shape once, not operation by operation

SAMPLES = 256
SIZES = (4, 16, 64, 256, 512, 1024, 2048, 4096)
# Table 8 (D, alpha) and Table 2 (measured kurtosis of the first token) for the models trained with softmax and Adam.
MODELS = {
    "GPT-2 60M": (512, 1856.0, 313.8),
    "GPT-2 130M": (768, 7018.0, 514.9),
    "GPT-2 350M": (1024, 40196.0, 820.3),
    "GPT-2 1.4B": (2048, 56798.0, 1656.5),
    "Llama-2 130M": (768, 4623.0, 435.0),
}
FIXED_ALPHA, FIXED_SIZES = 10.0, (64, 1024, 16_384, 262_144)


def _name(size: int, alpha: float) -> str:
    return f"D{size}_alpha{alpha:g}"


# Name of a row -> (D, alpha), in three tables.
_AT_SIZE = {_name(d, d): (d, float(d)) for d in SIZES}
_OF_MODELS = {_name(d, alpha): (d, alpha) for d, alpha, _ in MODELS.values()}
_FIXED = {_name(d, FIXED_ALPHA): (d, FIXED_ALPHA) for d in FIXED_SIZES}
_SETTINGS = {**_AT_SIZE, **_OF_MODELS, **_FIXED}
_MODEL_OF = {_name(d, alpha): model for model, (d, alpha, _) in MODELS.items()}


def compute(seed: int) -> list[Case]:
    """Mean kurtosis of sampled vectors, beside the closed forms, for each D and alpha."""
    cases = []
    for name, (size, alpha) in _SETTINGS.items():
        samples = SAMPLES if size <= 4096 else 16
        metrics = {
            "kurtosis": float(np.mean(_kurtosis(spiked_vectors(alpha, size, samples, seed)[0]))),
            "kurtosis_closed_form": spike_kurtosis(alpha, size),
            "kurtosis_as_printed": spike_kurtosis(alpha, size, as_printed=True),
        }
        cases.append(Case(name, {"size": size, "alpha": alpha, "samples": samples}, metrics))
    return cases


def _label(result: Result) -> str:
    size, alpha = _SETTINGS[result.name]
    model = f"{_MODEL_OF[result.name]}, " if result.name in _MODEL_OF else ""
    return f"{model}D = {size:,}, alpha = {alpha:,g}"


def _digits(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


# (G.4) at alpha = D; what was measured of models; the limit at fixed alpha.
_PAPER = {
    **{name: {"kurtosis_closed_form": simplified_kurtosis(d)} for name, (d, _) in _AT_SIZE.items()},
    **{_name(d, alpha): {"kurtosis": measured} for d, alpha, measured in MODELS.values()},
    **{name: {"kurtosis": GAUSSIAN} for name in _FIXED},
}
_COLUMNS = (
    metric("kurtosis", "samples", _digits),
    metric("kurtosis_closed_form", "(G.3) corrected", _digits),
    metric("kurtosis_as_printed", "(G.3) as printed", _digits),
)


def _exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of the best fit of values = c sizes**p."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


_LARGE = {name: d for name, (d, _) in _AT_SIZE.items() if d >= 256}


def _error(*of: Result) -> float:
    """The largest relative difference of samples from the closed form."""
    return max(abs(result.kurtosis / result.kurtosis_closed_form - 1) for result in of)


def _grown(*of: Result) -> float:
    return _exponent(list(_LARGE.values()), [result.kurtosis for result in of])


_IDENTITY = max(abs(simplified_kurtosis(d) / spike_kurtosis(d, d) - 1) for d in SIZES)
_ONE_HOT = float(mixture_kurtosis(4.0, np.eye(4)[0]))
_PRINTED = spike_kurtosis(4, 4, as_printed=True)
_SLIP = spike_kurtosis(1024, 1024, as_printed=True) - spike_kurtosis(1024, 1024)
_GPT2 = [row for name, row in MODELS.items() if name.startswith("GPT-2")]
_TRAINED = _exponent([d for d, _, _ in _GPT2], [measured for *_, measured in _GPT2])
_SHARES = [measured / spike_kurtosis(alpha, d) for d, alpha, measured in MODELS.values()]
_FROM_LARGEST = max(abs(spike_kurtosis(alpha, d) / (d - 2) - 1) for d, alpha, _ in MODELS.values())

CLAIMS = (
    Claim("At alpha = D kurtosis is D - 4 + 12/D - 6/D^2 and grows as D.", tuple(_LARGE), (),
          lambda *of: _error(*of) < 0.01 and abs(_grown(*of) - 1) < 0.02,
          "samples within 1%, exponent within 0.02 of 1",
          detail=lambda *of: f"samples differ from the closed form by {_error(*of):.1e} at most for D of 256 to 4,096, "
          f"and grow as D^{_grown(*of):.3f}; (G.4) equals (G.3), corrected, to {_IDENTITY:.0e}"),
    Claim("(G.3) as the paper prints it is the line above it.", (), (),
          lambda: math.isclose(_PRINTED, _ONE_HOT), "equal",
          detail=lambda: f"at D = alpha = 4 the line above gives {_ONE_HOT:.3f}, the printed (G.3) {_PRINTED:.3f}: its "
          "term -6 alpha^2/D^3 must be -6 alpha^2/D^2, as its own substitution of alpha = D has it; at D = 1,024 "
          f"the slip changes {_SLIP:.1e} of {spike_kurtosis(1024, 1024):,.0f}, so nothing that follows from it"),
    Claim("At fixed alpha kurtosis goes to 3 as D grows. It is near 3 only for D far above alpha^4, about alpha^4/D + "
          "3.", tuple(_FIXED), (),
          lambda *of: abs(of[-1].kurtosis - GAUSSIAN) < 0.1, "within 0.1 of 3 at the largest D",
          detail=lambda *of: f"at alpha = {FIXED_ALPHA:g}: " + ", ".join(f"{_digits(result.kurtosis)} at D = {d:,}"
          for d, result in zip(FIXED_SIZES, of, strict=True))),
    Claim("Trained models follow the growth.", (), (),
          lambda: 0.8 < _TRAINED < 1.3, "exponent 0.8 to 1.3",
          detail=lambda: f"the kurtosis that the paper measured in its four GPT-2 grows as D^{_TRAINED:.2f} and is "
          f"{min(_SHARES):.0%} to {max(_SHARES):.0%} of what one outlier channel of its alpha gives, which is "
          f"within {_FROM_LARGEST:.2%} of the largest that D values can have: a "
          "sketch of the layers with outliers, not of the mean over layers"),
)  # fmt: skip


def _picture(results: Results) -> list[Picture]:
    sizes = [d for d in SIZES if d >= 64]
    widths = [d for d, _, _ in _GPT2]
    curves = {
        "alpha = D, samples": (sizes, np.array([results[_name(d, d)].values("kurtosis") for d in sizes]).T),
        "alpha = D, closed form": (sizes, np.array([spike_kurtosis(d, d) for d in sizes])),
        "GPT-2, measured by the paper": (widths, np.array([measured for *_, measured in _GPT2])),
        "GPT-2's alpha, closed form": (widths, np.array([spike_kurtosis(alpha, d) for d, alpha, _ in _GPT2])),
    }
    figure = drawing.lines(curves, x_label="D", y_label="kurtosis", references={"Gaussian": GAUSSIAN}, pairs=True)
    caption = "Kurtosis of a vector with one outlier channel, and of trained models."
    return [Picture("kurtosis_by_size", caption, figure)]


def _about(results: Results) -> list[str]:
    return [
        "A hidden state is drawn as x = alpha e_i + z: one outlier channel of size alpha, standard normal noise z in "
        "all D channels. Its kurtosis has a closed form, equation (G.3), which is checked against samples and set "
        "beside what the paper measured in trained models.",
        f"{SAMPLES} vectors for each row and seed (16 for D over 4,096). Samples use the kurtosis of Eq. 2, with the "
        "mean of the vector itself; the closed form is the paper's, a ratio of means about a known mean. They part "
        "where D is small: at D = 4 the closed form is above the largest kurtosis that four values can have, 2.33; "
        "that of D values is D - 2 + 1/(D - 1).",
    ]


EXPERIMENT = Experiment(
    name="appendix_g",
    title="Appendix G: the kurtosis of a vector with one outlier channel grows with the number of channels",
    compute=compute,
    about=_about,
    paper=_PAPER,
    tables=[
        MetricTable(caption, _COLUMNS, keep=lambda result, names=names: result.name in names, label=_label)
        for caption, names in (
            ("Kurtosis of x = alpha e_i + z at alpha = D, beside the paper's (G.4)", _AT_SIZE),
            ("With the paper's D and alpha (Table 8), beside what it measured (Table 2, first token)", _OF_MODELS),
            (f"At fixed alpha = {FIXED_ALPHA:g}, beside the paper's limit", _FIXED),
        )
    ],
    claims=CLAIMS,
    pictures=(_picture,),
)
