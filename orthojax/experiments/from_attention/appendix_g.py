"""Appendix G of From Attention to Activation: the kurtosis of a vector with one outlier channel grows with its size."""

import math
from collections.abc import Sequence

import jax
import numpy as np

from orthojax.experiments.from_attention.spiked_vector import (
    mixture_kurtosis,
    simplified_kurtosis,
    spike_kurtosis,
    spiked_vectors,
)
from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.criteria import GAUSSIAN
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.calculation import Calculated, Calculation, Case
from orthojax.formatting import number
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


def _settings() -> list[tuple[int, float]]:
    at_size = [(size, float(size)) for size in SIZES]
    return [*at_size, *((d, alpha) for d, alpha, _ in MODELS.values()), *((d, FIXED_ALPHA) for d in FIXED_SIZES)]


def compute(seed: int) -> list[Case]:
    """Mean kurtosis of sampled vectors, beside the closed forms, for each D and alpha."""
    cases = []
    for size, alpha in _settings():
        samples = SAMPLES if size <= 4096 else 16
        x, _ = spiked_vectors(alpha, size, samples, seed)
        metrics = {
            "kurtosis": float(np.mean(_kurtosis(x))),
            "kurtosis_closed_form": spike_kurtosis(alpha, size),
            "kurtosis_as_printed": spike_kurtosis(alpha, size, as_printed=True),
        }
        cases.append(Case(_name(size, alpha), {"size": size, "alpha": alpha, "samples": samples}, metrics))
    return cases


def _digits(value: float) -> str:
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"


def _cells(result: Calculated, size: int, alpha: float) -> list[str]:
    name = _name(size, alpha)
    metrics = ("kurtosis", "kurtosis_closed_form")
    return [result.show(name, metrics[0], _digits), _digits(result.mean(name, metrics[1]))]


def _tables(result: Calculated) -> list[Table]:
    by_size = [
        [f"{d}", *_cells(result, d, d), _digits(simplified_kurtosis(d)), _digits(spike_kurtosis(d, d, as_printed=True))]
        for d in SIZES
    ]
    models = [
        [name, f"{d}", number(alpha), *_cells(result, d, alpha), f"{measured:,}", f"{d - 2 + 1 / (d - 1):,.1f}"]
        for name, (d, alpha, measured) in MODELS.items()
    ]
    fixed = [[f"{d:,}", *_cells(result, d, FIXED_ALPHA), "3"] for d in FIXED_SIZES]
    sampled = "samples"
    return [
        Table(
            "Kurtosis of x = alpha e_i + z at alpha = D",
            ["D", sampled, "(G.3) corrected", "(G.4)", "(G.3) as printed"],
            by_size,
        ),
        Table(
            "With the paper's D and alpha (Table 8), beside what it measured (Table 2, first token, softmax and Adam)",
            ["model", "D", "alpha", sampled, "(G.3) corrected", "paper, measured", "largest possible"],
            models,
        ),
        Table(
            f"At fixed alpha = {FIXED_ALPHA:g}",
            ["D", sampled, "(G.3) corrected", "paper's limit"],
            fixed,
        ),
    ]


def _relative_error(result: Calculated, settings: Sequence[tuple[int, float]]) -> float:
    return max(
        abs(result.mean(_name(d, a), "kurtosis") / result.mean(_name(d, a), "kurtosis_closed_form") - 1)
        for d, a in settings
    )


def _exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of the best fit of values = c sizes**p."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _claims(result: Calculated) -> list[Claim]:
    large = [(d, float(d)) for d in SIZES if d >= 256]
    error = _relative_error(result, large)
    grown = _exponent([d for d, _ in large], [result.mean(_name(d, a), "kurtosis") for d, a in large])
    identity = max(abs(simplified_kurtosis(d) / spike_kurtosis(d, d) - 1) for d in SIZES)
    one_hot = float(mixture_kurtosis(4.0, np.eye(4)[0]))
    printed = spike_kurtosis(4, 4, as_printed=True)
    gpt2 = [row for name, row in MODELS.items() if name.startswith("GPT-2")]
    trained = _exponent([d for d, _, _ in gpt2], [measured for *_, measured in gpt2])
    shares = [measured / spike_kurtosis(alpha, d) for d, alpha, measured in MODELS.values()]
    last = FIXED_SIZES[-1]
    return [
        Claim(
            verdict(error < 0.01 and abs(grown - 1) < 0.02),
            f"At alpha = D kurtosis is D - 4 + 12/D - 6/D^2 and grows as D. Samples differ from the closed form by "
            f"{error:.1e} at most for D of 256 to 4,096, and grow as D^{grown:.3f}; (G.4) equals (G.3), corrected, to "
            f"{identity:.0e} (criterion: samples within 1%, exponent within 0.02 of 1).",
        ),
        Claim(
            verdict(math.isclose(printed, one_hot)),
            f"(G.3) as the paper prints it is the line above it. At D = alpha = 4 the line above gives {one_hot:.3f}, "
            f"the printed (G.3) {printed:.3f}: its term -6 alpha^2/D^3 must be -6 alpha^2/D^2, as the paper's own "
            f"substitution of alpha = D has it (criterion: equal). At D = 1,024 the slip changes "
            f"{spike_kurtosis(1024, 1024, as_printed=True) - spike_kurtosis(1024, 1024):.1e} of "
            f"{spike_kurtosis(1024, 1024):,.0f}, so nothing that follows from it.",
        ),
        Claim(
            verdict(abs(result.mean(_name(last, FIXED_ALPHA), "kurtosis") - 3) < 0.1),
            f"At fixed alpha kurtosis goes to 3 as D grows. At alpha = {FIXED_ALPHA:g}: "
            + ", ".join(f"{_digits(result.mean(_name(d, FIXED_ALPHA), 'kurtosis'))} at D = {d:,}" for d in FIXED_SIZES)
            + " (criterion: within 0.1 of 3 at the largest D). It is near 3 only for D far above alpha^4, about "
            "alpha^4/D + 3.",
        ),
        Claim(
            verdict(0.8 < trained < 1.3),
            f"Trained models follow the growth. The kurtosis that the paper measured in its four GPT-2 grows as "
            f"D^{trained:.2f} (criterion: exponent 0.8 to 1.3) and is {min(shares):.0%} to {max(shares):.0%} of what "
            f"one outlier channel of the paper's alpha gives, which is within "
            f"{max(abs(spike_kurtosis(a, d) / (d - 2) - 1) for d, a, _ in MODELS.values()):.2%} of the largest that D "
            f"values can have: a sketch of the layers with outliers, not of the mean over layers.",
        ),
    ]


def _picture(result: Calculated) -> Picture:
    sizes = [d for d in SIZES if d >= 64]
    curves = {
        "alpha = D, samples": (sizes, [result.values(_name(d, d), "kurtosis") for d in sizes]),
        "alpha = D, closed form": (sizes, [[spike_kurtosis(d, d)] for d in sizes]),
        "GPT-2, measured by the paper": ([], []),
        "GPT-2's alpha, closed form": ([], []),
    }
    for name, (d, alpha, measured) in MODELS.items():
        if name.startswith("GPT-2"):
            for label, value in zip(list(curves)[2:], (measured, spike_kurtosis(alpha, d)), strict=True):
                curves[label][0].append(d)
                curves[label][1].append([value])
    figure = drawing.lines(
        {label: (x, np.array(y).T) for label, (x, y) in curves.items()},
        x_label="D", y_label="kurtosis", reference=(GAUSSIAN, "Gaussian"), pairs=True,
    )  # fmt: skip
    return Picture("kurtosis_by_size", "Kurtosis of a vector with one outlier channel, and of trained models.", figure)


def report(result: Calculated) -> Report:
    """Closed forms, samples and the paper's own measurements side by side."""
    return Report(
        title="Appendix G: kurtosis grows with the number of channels",
        summary=[
            "A hidden state is drawn as x = alpha e_i + z: one outlier channel of size alpha, standard normal noise z "
            "in all D channels. Its kurtosis has a closed form, equation (G.3), which is checked against samples and "
            "set beside what the paper measured in trained models.",
            f"{SAMPLES} vectors for each row and seed (16 for D over 4,096). Samples use the kurtosis of Eq. 2, with "
            "the mean of the vector itself; the closed form is the paper's, a ratio of means about a known mean. "
            "They part where D is small: at D = 4 the closed form is above the largest kurtosis that four values can "
            "have, 2.33.",
        ],
        claims=_claims(result),
        tables=_tables(result),
        pictures=[_picture(result)],
        notes=result.notes(),
        links=result.links(),
    )


CALCULATION = Calculation("appendix_g", "kurtosis of a vector with one outlier channel grows with D", compute, report)
