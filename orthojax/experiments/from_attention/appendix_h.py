"""Appendix H of From Attention to Activation: what an orthogonal matrix does to a vector with one outlier channel."""

import math
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from orthojax.experiments import drawing
from orthojax.experiments.claims import GAUSSIAN, Claim, Revision
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.from_attention.spiked_vector import (
    LABELS,
    RotationName,
    direction_kurtosis,
    mean_max_abs,
    mean_norm_ratio_of_direction,
    mean_squared_norm_ratio,
    mixture_kurtosis,
    rotate,
    simplified_kurtosis,
    spiked_vectors,
)
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.results import Numbers, Quantity, Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.ops.statistics import kurtosis, norm_ratio

SAMPLES = 256
SIZES = (64, 256, 1024)  # powers of two, as in Sylvester's construction, which the paper names


class Setting(NamedTuple):
    """One row."""

    rotation: RotationName
    size: int
    alpha: float

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.rotation}_D{self.size}_alpha{self.alpha:g}"


def alphas(size: int) -> tuple[float, ...]:
    """The spikes of one D: as long as all the noise together, D, and 10 D; the paper's models have 4 to 39 D."""
    return (math.sqrt(size), 1.0 * size, 10.0 * size)


@jax.jit
def _measure(y: jax.Array) -> dict[str, jax.Array]:
    ratio = norm_ratio(y)
    per_vector = {"kurtosis": kurtosis(y), "norm_ratio": ratio, "norm_ratio_squared": ratio**2}
    return {name: values.mean() for name, values in per_vector.items()}


def compute(seed: int) -> list[Case]:
    """Norm ratio and kurtosis of sampled vectors before and after each rotation, with their closed forms."""
    cases = []
    for size in SIZES:
        drawn = [spiked_vectors(alpha, size, SAMPLES, seed) for alpha in alphas(size)]
        x, channels = np.concatenate([x for x, _ in drawn]), np.concatenate([c for _, c in drawn])
        for rotation in LABELS:
            # The columns Q e_i too, in the same call: Q is drawn once.
            both = np.concatenate([x, np.eye(size)[channels]])
            rotated = np.split(rotate(both, np.tile(channels, 2), rotation, seed), 2 * len(drawn))
            for alpha, y, columns in zip(alphas(size), rotated, rotated[len(drawn) :], strict=False):
                gaussian = rotation in ("aligned", "haar")  # exactly, but for an offset or a length
                exact = direction_kurtosis(size) if gaussian else float(np.mean(mixture_kurtosis(alpha, columns)))
                metrics = {name: float(value) for name, value in _measure(y).items()} | {
                    "kurtosis_closed_form": exact,
                    "norm_ratio_squared_closed_form": mean_squared_norm_ratio(alpha, size, rotation),
                }
                setting = Setting(rotation, size, alpha)
                cases.append(Case(setting.name, setting._asdict(), metrics))
    return cases


def limits(size: int) -> dict[str, float]:
    r"""The steps of the paper's derivation of :math:`\|y\|_\infty^2 / \|y\|_2^2` at alpha = D, aligned Q.

    Args:
      size: D.
    """
    log = math.log(size)
    return {
        "exact mean of the maximum": mean_squared_norm_ratio(size, size, "aligned"),
        "maximum of noise taken as sqrt(2 ln D)": (size + math.sqrt(2 * size * log)) ** 2 / (size * (size**2 + size)),
        "the same with the printed D^2 + 1 below": (size + 2 * math.sqrt(2 * size * log) + 2 * log) / (size**2 + 1),
        "last line, corrected: 1/D + 2 sqrt(2 ln D)/D^1.5": 1 / size + 2 * math.sqrt(2 * log) / size**1.5,
        "last line, printed: 1/D + (D + 2 sqrt(2 ln D))/D^1.5": 1 / size + (size + 2 * math.sqrt(2 * log)) / size**1.5,
        "boxed: 1/D": 1 / size,
    }


_ALL = [Setting(rotation, size, alpha) for size in SIZES for alpha in alphas(size) for rotation in LABELS]
_SETTINGS = {setting.name: setting for setting in _ALL}
_LARGEST = SIZES[-1]


def _printed(setting: Setting) -> dict[str, float]:
    """What the paper says of a setting; of the Hadamard matrix its kurtosis alone."""
    rotation, size, alpha = setting
    ratio = {"none": {"norm_ratio_squared": 1.0}, "aligned": {"norm_ratio_squared": 1 / size}}.get(rotation, {})
    if rotation == "none":
        return ratio | ({"kurtosis": simplified_kurtosis(size)} if alpha == size else {})
    return ratio | ({} if rotation == "haar" else {"kurtosis": GAUSSIAN})


def _times(size: int, numbers: Numbers, name: str = "norm_ratio_squared") -> float:
    return numbers[name] * size


def _table(size: int) -> MetricTable:
    def label(result: Result) -> str:
        return f"alpha = {_SETTINGS[result.name].alpha:g}: {LABELS[_SETTINGS[result.name].rotation]}"

    columns = (
        Quantity("D max|y|^2 / ||y||^2", partial(_times, size), "{:,.3f}".format),
        Quantity("closed form", partial(_times, size, name="norm_ratio_squared_closed_form"), "{:,.3f}".format),
        metric("norm_ratio", "max|y| / ||y||"),
        metric("kurtosis", "kurtosis", "{:.3f}".format),
        metric("kurtosis_closed_form", "closed form", "{:.3f}".format),
    )
    return MetricTable(f"D = {size}", columns, keep=lambda r: _SETTINGS[r.name].size == size, label=label)


def _derivation(results: Results) -> Table:
    steps = {size: limits(size) for size in SIZES}
    rows = [[step, *(f"{size * steps[size][step]:,.3f}" for size in SIZES)] for step in steps[_LARGEST]]
    shown = {size: Quantity("", partial(_times, size), "{:,.3f}".format) for size in SIZES}
    sampled = [results[Setting("aligned", size, float(size)).name].cell(of) for size, of in shown.items()]
    caption = "The paper's derivation step by step: D max|y|^2 / ||y||^2 at alpha = D, Q e_i = 1/sqrt(D)"
    return Table(caption, ["", *(f"D = {size}" for size in SIZES)], [["samples", *sampled], *rows])


def _at(rotation: RotationName, multiple: float = 1.0) -> str:
    """The name of a row of the largest D, alpha a multiple of it."""
    return Setting(rotation, _LARGEST, multiple * _LARGEST).name


def _every_alpha(rotation: RotationName) -> tuple[str, ...]:
    return tuple(Setting(rotation, _LARGEST, alpha).name for alpha in alphas(_LARGEST))


def _from_gaussian(*of: Result) -> float:
    return max(abs(result.kurtosis - GAUSSIAN) for result in of)


def _kurtosis_text(*of: Result) -> str:
    shown = [f"{r.kurtosis:.3f} at alpha = {alpha:g}" for r, alpha in zip(of, alphas(_LARGEST), strict=True)]
    return f"D = {_LARGEST}: {', '.join(shown)}; exact mean of D Gaussian values {direction_kurtosis(_LARGEST):.3f}"


_SQUARED = Quantity(f"D max|y|^2 / ||y||^2 at D = {_LARGEST}", partial(_times, _LARGEST), "{:.3f}".format)
*_, _CORRECTED, _LAST, _ = (value * _LARGEST for value in limits(_LARGEST).values())
_NOISE, _NOISE_SQUARED = (mean_max_abs(np.zeros(_LARGEST), power) for power in (1, 2))
_BOUND = math.sqrt(2 * math.log(_LARGEST))
CLAIMS = (
    Claim("Before rotation max|x|^2 / ||x||^2 is about 1.", (_at("none"),),
          (metric("norm_ratio_squared", f"at D = alpha = {_LARGEST}", "{:.4f}".format),),
          lambda r: r.norm_ratio_squared > 0.99, "above 0.99",
          detail=lambda r: f"closed form alpha^2 / (alpha^2 + D) = {_LARGEST / (_LARGEST + 1):.4f}"),
    Claim("With Q e_i = 1/sqrt(D) it falls to about 1/D, as it does with a Hadamard matrix and random signs (the third "
          "number, at alpha = 10 D).", (_at("aligned"), _at("aligned", 10.0), _at("hadamard", 10.0)), (_SQUARED,),
          lambda near, *far: _times(_LARGEST, near) < 1.5 and all(_times(_LARGEST, of) < 1.05 for of in far),
          "below 1.5/D at alpha = D and 1.05/D at alpha = 10 D",
          revised=Revision("the Hadamard matrix had been shown, but not judged", {
              "holds": lambda near, far, hadamard: _times(_LARGEST, near) < 1.5 and _times(_LARGEST, far) < 1.05,
              "criterion": "the same of Q e_i = 1/sqrt(D) alone"})),
    Claim("With a random (Haar) matrix, which is what OrthoAdam takes in the paper, it falls to about 1/D. A Haar "
          "matrix makes Gaussian values, whose largest of D is about sqrt(2 ln D): O(ln D / D), whatever alpha.",
          (_at("haar", 10.0),), (_SQUARED,),
          lambda r: _times(_LARGEST, r) < 1.5, "below 1.5/D", detail=lambda r: f"exactly {_NOISE_SQUARED:.2f}"),
    Claim("The ratio itself, max|y| / ||y||, falls to about 1/D, as section 4.2 words it. 1/D is its square.",
          (_at("aligned", 10.0),), (metric("norm_ratio", "ratio", "{:.4f}".format),),
          lambda r: r.norm_ratio * _LARGEST < 1.5, "below 1.5/D",
          detail=lambda r: f"{r.norm_ratio * _LARGEST:.1f}/D, {r.norm_ratio * math.sqrt(_LARGEST):.2f}/sqrt(D)"),
    Claim("The last line of the derivation, as printed, is O(1/D).", (), (),
          lambda: _LAST < 1.5, "below 1.5/D",
          detail=lambda: f"at D = {_LARGEST} it is {_LAST:.1f}/D, since (D + 2 sqrt(2 ln D))/D^1.5 is above 1/sqrt(D); "
          f"with 2 sqrt(2 ln D)/D^1.5, which follows from the line above, it is {_CORRECTED:.3f}/D; two smaller "
          f"things: the denominator D^2 + 1 must be D^2 + D, and sqrt(2 ln D) = {_BOUND:.2f} stands "
          f"for a mean maximum of |z| that is {_NOISE:.2f}"),
    Claim("With Q e_i = 1/sqrt(D) kurtosis becomes 3. It is the kurtosis of the noise: the spike has become an offset, "
          "and without z it has none (0/0).", _every_alpha("aligned"), (),
          lambda *of: _from_gaussian(*of) < 0.05, "within 0.05 for every alpha; exact mean 3 (D - 1)/(D + 1)",
          detail=_kurtosis_text),
    Claim("With a Haar matrix kurtosis becomes 3, with noise and without.", _every_alpha("haar"), (),
          lambda *of: _from_gaussian(*of) < 0.2, "within 0.2 for every alpha: one matrix for each seed",
          detail=_kurtosis_text),
    Claim("With normalised Hadamard matrices, which the paper names as the exact form of Q, kurtosis becomes 3. All "
          "columns but one are half +1/sqrt(D), half -1/sqrt(D): two values of equal size, kurtosis 1 + (4a + 2)/(a + "
          "1)^2 with a = alpha^2/D. Random signs change the sign of Q e_i and nothing else. As a remedy that is no "
          "loss: 1 is the smallest kurtosis.", _every_alpha("hadamard"), (),
          lambda *of: _from_gaussian(*of) < 0.2, "within 0.2 for every alpha", detail=_kurtosis_text),
)  # fmt: skip


def _pictures(results: Results) -> list[Picture]:
    pictures = []
    for name, key, y_label, caption in (
        ("norm_ratio", "norm_ratio_squared", "max|y|^2 / ||y||^2", "Squared ratio of largest entry to length"),
        ("kurtosis", "kurtosis", "kurtosis", "Kurtosis"),
    ):
        curves = {}
        for rotation, label in LABELS.items():
            of = [results[Setting(rotation, size, float(size)).name] for size in SIZES]
            curves[f"{label}, samples"] = (list(SIZES), np.array([result.values(key) for result in of]).T)
            closed = np.array([result.mean(f"{key}_closed_form") for result in of])
            curves[f"{label}, closed form"] = (list(SIZES), closed)
        line = {"Gaussian": GAUSSIAN} if key == "kurtosis" else {}
        figure = drawing.lines(
            curves, x_label="D = alpha", y_label=y_label, y_scale="log", references=line, integer_x=True, pairs=True
        )
        pictures.append(Picture(name, f"{caption}, before and after rotation.", figure))
    return pictures


def _about(results: Results) -> list[str]:
    return [
        "x = alpha e_i + z, one outlier channel of size alpha in standard normal noise, is rotated by an orthogonal Q. "
        "What becomes of the largest entry and of kurtosis depends on which Q: the paper's, with all entries of Q e_i "
        "equal to 1/sqrt(D) (here a reflection); a Hadamard matrix after random signs, as in our OrthoAdam; a Haar "
        "matrix, as in the paper's.",
        f"{SAMPLES} vectors with random i for each D, alpha and seed; one Hadamard and one Haar matrix for each D and "
        "seed. Closed forms for a Haar matrix are exact means (a spike alone has mean max|y| / ||y|| = "
        f"{mean_norm_ratio_of_direction(_LARGEST):.4f} at D = {_LARGEST}); the others are ratios of means.",
    ]


EXPERIMENT = Experiment(
    name="appendix_h",
    title="Appendix H: a rotation lowers the largest entry and the kurtosis",
    compute=compute,
    about=_about,
    paper={name: _printed(setting) for name, setting in _SETTINGS.items()},
    tables=(*map(_table, SIZES), _derivation),
    claims=CLAIMS,
    pictures=(_pictures,),
)
