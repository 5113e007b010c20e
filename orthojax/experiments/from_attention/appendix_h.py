"""Appendix H of From Attention to Activation: what an orthogonal matrix does to a vector with one outlier channel."""

import math
from typing import NamedTuple

import jax
import numpy as np

from orthojax.experiments.from_attention.spiked_vector import (
    LABELS,
    RotationName,
    direction_kurtosis,
    mean_max_abs,
    mean_norm_ratio_of_direction,
    mean_squared_norm_ratio,
    mixture_kurtosis,
    simplified_kurtosis,
    spiked_vectors,
    turn,
)
from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.criteria import GAUSSIAN
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.calculation import Calculated, Calculation, Case
from orthojax.ops.statistics import kurtosis, norm_ratio

SAMPLES = 256
SIZES = (64, 256, 1024)  # powers of two, as in Sylvester's construction, which the paper names
MULTIPLES = (1.0, 10.0)  # alpha / D; the paper's models have 4 to 39
ROTATED: tuple[RotationName, ...] = ("aligned", "hadamard", "haar")


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
    """The spikes of one D: as long as all the noise together, D, and 10 D."""
    return (math.sqrt(size), *(multiple * size for multiple in MULTIPLES))


@jax.jit
def _measure(y: jax.Array) -> dict[str, jax.Array]:
    ratio = norm_ratio(y)
    per_vector = {"kurtosis": kurtosis(y), "norm_ratio": ratio, "norm_ratio_squared": ratio**2}
    return {name: values.mean() for name, values in per_vector.items()}


def _closed_form_kurtosis(setting: Setting, columns: np.ndarray) -> float:
    if setting.rotation in ("aligned", "haar"):  # exact: a Gaussian vector, but for an offset or a length
        return direction_kurtosis(setting.size)
    return float(np.mean(mixture_kurtosis(setting.alpha, columns)))


def compute(seed: int) -> list[Case]:
    """Norm ratio and kurtosis of sampled vectors before and after each rotation, with their closed forms."""
    cases = []
    for size in SIZES:
        drawn = [spiked_vectors(alpha, size, SAMPLES, seed) for alpha in alphas(size)]
        x, channels = np.concatenate([x for x, _ in drawn]), np.concatenate([c for _, c in drawn])
        for rotation in LABELS:
            # The columns Q e_i too, in the same call: Q is drawn once.
            both = np.concatenate([x, np.eye(size)[channels]])
            turned = np.split(turn(both, np.tile(channels, 2), rotation, seed), 2 * len(drawn))
            for alpha, y, columns in zip(alphas(size), turned, turned[len(drawn) :], strict=False):
                setting = Setting(rotation, size, alpha)
                metrics = {name: float(value) for name, value in _measure(y).items()} | {
                    "kurtosis_closed_form": _closed_form_kurtosis(setting, columns),
                    "norm_ratio_squared_closed_form": mean_squared_norm_ratio(alpha, size, rotation),
                }
                cases.append(Case(setting.name, {"rotation": rotation, "size": size, "alpha": alpha}, metrics))
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


def _times(size: int):
    """Shows a squared ratio as a multiple of 1/D."""
    return lambda value: f"{value * size:,.3f}"


def _settings() -> list[Setting]:
    return [Setting(rotation, size, alpha) for size in SIZES for alpha in alphas(size) for rotation in LABELS]


def _tables(result: Calculated) -> list[Table]:
    ratios, kurtoses = [], []
    for s in _settings():
        first = [f"D = {s.size}, alpha = {s.alpha:g}: {LABELS[s.rotation]}"]
        closed, times = result.mean(s.name, "norm_ratio_squared_closed_form"), _times(s.size)
        said = f"{s.size}" if s.rotation == "none" else "1" if s.rotation == "aligned" else ""
        shown = result.show(s.name, "norm_ratio_squared", times)
        ratios.append([*first, shown, times(closed), said, result.show(s.name, "norm_ratio")])
        before = f"{simplified_kurtosis(s.size):.3f}" if s.alpha == s.size else ""
        said = {"none": before, "aligned": "3", "hadamard": "3"}.get(s.rotation, "")
        closed = f"{result.mean(s.name, 'kurtosis_closed_form'):.3f}"
        kurtoses.append([*first, result.show(s.name, "kurtosis", lambda value: f"{value:.3f}"), closed, said])
    steps = {size: limits(size) for size in SIZES}
    sampled = [
        result.show(Setting("aligned", size, float(size)).name, "norm_ratio_squared", _times(size)) for size in SIZES
    ]
    rows = [[step, *(_times(size)(steps[size][step]) for size in SIZES)] for step in steps[SIZES[0]]]
    return [
        Table(
            "D times the squared ratio max|y|^2 / ||y||^2, and the ratio itself",
            ["", "samples", "closed form", "paper", "max|y| / ||y||, samples"],
            ratios,
        ),
        Table("Kurtosis", ["", "samples", "closed form", "paper"], kurtoses),
        Table(
            "The paper's derivation step by step: D max|y|^2 / ||y||^2 at alpha = D, Q e_i = 1/sqrt(D)",
            ["", *(f"D = {size}" for size in SIZES)],
            [["samples", *sampled], *rows],
        ),
    ]


def _ratio_claims(result: Calculated) -> list[Claim]:
    size = SIZES[-1]

    def squared(rotation: RotationName, alpha: float) -> float:
        return result.mean(Setting(rotation, size, alpha).name, "norm_ratio_squared")

    before = squared("none", float(size))
    near, far = squared("aligned", float(size)) * size, squared("aligned", 10.0 * size) * size
    hadamard, haar = (squared(rotation, 10.0 * size) * size for rotation in ("hadamard", "haar"))
    plain = result.mean(Setting("aligned", size, 10.0 * size).name, "norm_ratio")
    noise, bound = mean_max_abs(np.zeros(size)), math.sqrt(2 * math.log(size))
    last = limits(size)["last line, printed: 1/D + (D + 2 sqrt(2 ln D))/D^1.5"] * size
    return [
        Claim(
            verdict(before > 0.99),
            f"Before rotation max|x|^2 / ||x||^2 is about 1: {before:.4f} at D = alpha = {size} (criterion: above "
            f"0.99; closed form alpha^2 / (alpha^2 + D) = {size / (size + 1):.4f}).",
        ),
        Claim(
            verdict(near < 1.5 and far < 1.05),
            f"With Q e_i = 1/sqrt(D) it falls to about 1/D: {near:.3f}/D at alpha = D = {size}, {far:.3f}/D at alpha = "
            f"10 D (criterion: below 1.5/D and 1.05/D). A Hadamard matrix with random signs does the same, "
            f"{hadamard:.3f}/D.",
        ),
        Claim(
            verdict(haar < 1.5),
            f"With a random (Haar) matrix, which is what OrthoAdam takes in the paper, it falls to about 1/D: "
            f"{haar:.2f}/D, whatever alpha (criterion: below 1.5/D). A Haar matrix makes Gaussian values, whose "
            f"largest of D is about sqrt(2 ln D): O(ln D / D), exactly {mean_max_abs(np.zeros(size), 2):.2f}/D.",
        ),
        Claim(
            verdict(plain * size < 1.5),
            f"The ratio itself, max|y| / ||y||, falls to about 1/D, as section 4.2 words it: {plain:.4f} is "
            f"{plain * size:.1f}/D (criterion: below 1.5/D). It is {plain * math.sqrt(size):.2f}/sqrt(D); 1/D is its "
            f"square.",
        ),
        Claim(
            verdict(last < 1.5),
            f"The last line of the derivation, as printed, is O(1/D): at D = {size} it is {last:.1f}/D, since "
            f"(D + 2 sqrt(2 ln D))/D^1.5 is above 1/sqrt(D) (criterion: below 1.5/D). With 2 sqrt(2 ln D)/D^1.5, "
            f"which follows from the line above, it is "
            f"{limits(size)['last line, corrected: 1/D + 2 sqrt(2 ln D)/D^1.5'] * size:.3f}/D. Two smaller things: "
            f"the denominator D^2 + 1 must be D^2 + D, and sqrt(2 ln D) = {bound:.2f} stands for a mean maximum of "
            f"|z| that is {noise:.2f}.",
        ),
    ]


def _kurtosis_claims(result: Calculated) -> list[Claim]:
    size = SIZES[-1]

    def shown(rotation: RotationName, alpha: float) -> str:
        return result.show(Setting(rotation, size, alpha).name, "kurtosis", lambda value: f"{value:.3f}")

    def off(rotation: RotationName) -> float:
        found = [result.mean(Setting(rotation, size, alpha).name, "kurtosis") for alpha in alphas(size)]
        return max(abs(value - 3) for value in found)

    exact = direction_kurtosis(size)
    return [
        Claim(
            verdict(off("aligned") < 0.05),
            f"With Q e_i = 1/sqrt(D) kurtosis becomes 3: {shown('aligned', float(size))} at D = alpha = {size} "
            f"(criterion: within 0.05 for every alpha; exact mean of D Gaussian values 3 (D - 1)/(D + 1) = "
            f"{exact:.3f}). It is the kurtosis of the noise: the spike has become an offset, and without z it has "
            f"none (0/0).",
        ),
        Claim(
            verdict(off("haar") < 0.2),
            f"With a Haar matrix kurtosis becomes 3: {shown('haar', float(size))} at D = alpha = {size}, with noise "
            f"and without (criterion: within 0.2 for every alpha: one matrix for each seed; exact mean {exact:.3f}).",
        ),
        Claim(
            verdict(off("hadamard") < 0.2),
            f"With normalised Hadamard matrices, which the paper names as the exact form of Q, kurtosis becomes 3: "
            f"{shown('hadamard', float(size))} at D = alpha = {size} and {shown('hadamard', math.sqrt(size))} at alpha "
            f"= sqrt(D) (criterion: within 0.2 for every alpha). All columns but one are half +1/sqrt(D), half "
            f"-1/sqrt(D): two values of equal size, kurtosis 1 + (4a + 2)/(a + 1)^2 with a = alpha^2/D. Random signs "
            f"change the sign of Q e_i and nothing else. As a remedy that is no loss: 1 is the smallest kurtosis.",
        ),
    ]


def _pictures(result: Calculated) -> list[Picture]:
    def curves(metric: str) -> dict[str, tuple[list[float], np.ndarray]]:
        found: dict[str, tuple[list[float], np.ndarray]] = {}
        for rotation, label in LABELS.items():
            names = [Setting(rotation, size, float(size)).name for size in SIZES]
            sampled, closed = (
                np.array([result.values(name, metric + end) for name in names]).T for end in ("", "_closed_form")
            )
            found[f"{label}, samples"] = (list(SIZES), sampled)
            found[f"{label}, closed form"] = (list(SIZES), closed.mean(0))
        return found

    ratio = drawing.lines(
        curves("norm_ratio_squared"), x_label="D = alpha", y_label="max|y|^2 / ||y||^2", y_scale="log",
        integer_x=True, pairs=True,
    )  # fmt: skip
    spread = drawing.lines(
        curves("kurtosis"), x_label="D = alpha", y_label="kurtosis", y_scale="log", reference=(GAUSSIAN, "Gaussian"),
        integer_x=True, pairs=True,
    )  # fmt: skip
    return [
        Picture("norm_ratio", "Squared ratio of largest entry to length, before and after rotation.", ratio),
        Picture("kurtosis", "Kurtosis before and after rotation.", spread),
    ]


def report(result: Calculated) -> Report:
    """Each step of the appendix beside exact means and samples, for three kinds of Q."""
    return Report(
        title="Appendix H: a rotation lowers the largest entry and the kurtosis",
        summary=[
            "x = alpha e_i + z, one outlier channel of size alpha in standard normal noise, is turned by an orthogonal "
            "Q. What becomes of the largest entry and of kurtosis depends on which Q: the paper's, with all entries of "
            "Q e_i equal to 1/sqrt(D) (here a reflection); a Hadamard matrix after random signs, as in our OrthoAdam; "
            "a Haar matrix, as in the paper's.",
            f"{SAMPLES} vectors with random i for each D, alpha and seed; one Hadamard and one Haar matrix for each D "
            f"and seed. Closed forms for a Haar matrix are exact means (a spike alone has mean max|y| / ||y|| = "
            f"{mean_norm_ratio_of_direction(SIZES[-1]):.4f} at D = {SIZES[-1]}); the others are ratios of means.",
        ],
        claims=[*_ratio_claims(result), *_kurtosis_claims(result)],
        tables=_tables(result),
        pictures=_pictures(result),
        notes=result.notes(),
        links=result.links(),
    )


CALCULATION = Calculation("appendix_h", "a rotation lowers norm ratio and kurtosis of a spike", compute, report)
