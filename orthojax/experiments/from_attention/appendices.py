"""Appendices E, G and H: what depends on the basis, and what a rotation does to a vector with one outlier channel."""

import math
from collections.abc import Iterator

import jax
import numpy as np

from orthojax.config import OptimConfig, changed_fields
from orthojax.experiments.claims import GAUSSIAN, Claim, Expr, Metric, all_of, check, function, largest
from orthojax.experiments.from_attention import rotations
from orthojax.experiments.from_attention.models import TABLE_2, TABLE_8
from orthojax.experiments.study import Row, Study
from orthojax.ops.statistics import kurtosis, norm_ratio
from orthojax.report.pictures import ByStep

_SAMPLES = 256


def _trained_in_two_bases(seed: int) -> Iterator[Row]:
    """Yields the deviations of every optimizer, and of the layers of a network."""
    for trial in rotations.trials():
        haar, permuted = rotations.deviations(trial, seed)
        metrics = {"deviation": float(haar.max()), "deviation_signed_permutation": float(permuted.max())}
        metrics |= {f"deviation/step_{step}": float(haar[step - 1]) for step in (1, 2, 5, 10, 20, 50, 100)}
        overrides = {f"optim.{name}": value for name, value in changed_fields(OptimConfig(), trial.config).items()}
        yield Row(trial.name, metrics, overrides | {"basis_follows": trial.basis_follows})
    for name, (fixed, rotated) in rotations.layer_deviations(seed).items():
        yield Row(f"layer_{name}", {"deviation": fixed, "deviation_turned_parameters": rotated})


_DEVIATION, _PERMUTED, _ALONG = (
    Metric(name) for name in ("deviation", "deviation_signed_permutation", "deviation_turned_parameters")
)


def _independent(*variants: str, metric: Metric = _DEVIATION) -> Expr:
    return all_of((metric[name] < 1e-9).in_every_seed() for name in variants)


def _dependent(*variants: str, metric: Metric = _DEVIATION) -> Expr:
    return all_of((metric[name] > 1e-2).in_every_seed() for name in variants)


APPENDIX_E = Study(
    name="appendix_e",
    title="Appendix E: which optimizers and layers depend on the basis",
    rows=_trained_in_two_bases,
    note="A kernel W is trained for a hundred steps, and W R^T, with R Haar or a signed permutation, on the loss that "
    "knows it in that basis, with equal batches. Deviations are relative to the distance from the start; rows "
    "`layer_*` are ||f(R x) - R f(x)|| / ||f(x)||, with parameters fixed and rotated along. When the appendix cites "
    "figures 6 and 5, its figures 4 and 5 are meant.",
    columns=[_DEVIATION, _PERMUTED, _ALONG],
    claims=[
        Claim("SGD, with momentum and without, is basis-independent.", _independent("sgd_plain", "sgd")),
        Claim("Adam and RMSProp are not.", _dependent("adam", "rmsprop")),
        Claim("OrthoAdam depends on its own basis and on no other. It is Adam in the basis Q; a random Q makes that "
              "basis unlike the model's, it does not make the optimizer basis-independent.",
              _independent("orthoadam_follows") & _dependent("orthoadam")),
        Claim("A signed permutation is no other basis for Adam and RMSProp.",
              _independent("adam", "rmsprop", metric=_PERMUTED)),
        Claim("RMSNormSingle is basis-independent; RMSNorm with a scale for each channel, LayerNorm and a fixed bias "
              "are not. LayerNorm is not even with equal scales, since it removes the mean, a fixed direction.",
              _independent("layer_rmsnorm_single")
              & _dependent("layer_rmsnorm", "layer_layernorm", "layer_layernorm_equal", "layer_bias")),
        Claim("By the paper's criterion, f(R x) = R f(x), a linear layer without bias is basis-independent. It would "
              "have to commute with every R, as multiples of the identity alone do. What holds is that R W R^T does in "
              "the other basis what W does in this one.", _independent("layer_linear")),
        Claim("In that sense, parameters rotated along, biases and scales for each channel are basis-dependent. The "
              "scales are, as no scales in the other basis do the same. A bias is not: R b is a bias. It is the "
              "elementwise optimizer that gives biases a basis.",
              _dependent("layer_affine", "layer_rmsnorm", metric=_ALONG)),
    ],
    pictures=[ByStep("deviation", y_scale="log", name="deviation_by_step")],
)  # fmt: skip

_SIZES = (4, 16, 64, 256, 512, 1024, 2048, 4096)
# D, alpha (Table 8) and measured kurtosis of the first token (Table 2) of the models trained with softmax and Adam.
_TRAINED = {
    name: (int(of["model.d_model"]), of["max_abs_first"], TABLE_2[name]["kurtosis_first"])
    for name, of in TABLE_8.items()
}
_FIXED_ALPHA, _FIXED_SIZES = 10.0, (64, 1024, 16_384, 262_144)


def _name(size: int, alpha: float) -> str:
    return f"D{size}_alpha{alpha:g}"


_SETTINGS = [
    *((d, float(d)) for d in _SIZES),
    *((d, alpha) for d, alpha, _ in _TRAINED.values()),
    *((d, _FIXED_ALPHA) for d in _FIXED_SIZES),
]


def _spikes(seed: int) -> Iterator[Row]:
    """Yields the mean kurtosis of sampled vectors, beside the closed forms, for each D and alpha."""
    mean = jax.jit(kurtosis)  # compiled for each shape once, not operation by operation
    for size, alpha in _SETTINGS:
        samples = _SAMPLES if size <= 4096 else 16
        metrics = {
            "kurtosis": float(np.mean(mean(rotations.spiked_vectors(alpha, size, samples, seed)[0]))),
            "kurtosis_closed_form": rotations.spike_kurtosis(alpha, size),
            "kurtosis_as_printed": rotations.spike_kurtosis(alpha, size, as_printed=True),
        }
        yield Row(_name(size, alpha), metrics, {"size": size, "alpha": alpha, "samples": samples})


def _exponent(sizes: list[int], values: list[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


_LARGE = [d for d in _SIZES if d >= 256]
_KURTOSIS, _CLOSED = Metric("kurtosis"), Metric("kurtosis_closed_form")
_AT_D = [_KURTOSIS[_name(d, d)] for d in _LARGE]
_GPT2 = [row for name, row in _TRAINED.items() if name.startswith("gpt2")]
_EXPONENT = _exponent([d for d, *_ in _GPT2], [measured for *_, measured in _GPT2])
_GROWN = function("exponent of the growth with D", lambda *of: _exponent(_LARGE, list(of)), *_AT_D)
_ONE_HOT = float(rotations.mixture_kurtosis(4.0, np.eye(4)[0]))
_PRINTED = rotations.spike_kurtosis(4, 4, as_printed=True)
APPENDIX_G = Study(
    name="appendix_g",
    title="Appendix G: the kurtosis of a vector with one outlier channel grows with the number of channels",
    rows=_spikes,
    paper={_name(d, d): {"kurtosis_closed_form": rotations.simplified_kurtosis(d)} for d in _SIZES}
    | {_name(d, alpha): {"kurtosis": measured} for d, alpha, measured in _TRAINED.values()}
    | {_name(d, _FIXED_ALPHA): {"kurtosis": GAUSSIAN} for d in _FIXED_SIZES},
    note="x = alpha e_i + z: one outlier channel of size alpha, standard normal noise z in all D channels. The closed "
    "form, (G.3) corrected, is a ratio of means about a known mean, so samples part from it at small D. The paper's "
    "numbers are (G.4) at alpha = D, Table 2 at the D and alpha of Table 8, and its limit at alpha = 10.",
    columns="kurtosis kurtosis_closed_form kurtosis_as_printed",
    claims=[
        Claim("At alpha = D kurtosis is D - 4 + 12/D - 6/D^2 and grows as D.",
              (largest(*(abs(of / _CLOSED[_name(d, d)] - 1) for d, of in zip(_LARGE, _AT_D, strict=True))) < 0.01)
              & (abs(_GROWN - 1) < 0.02)),
        Claim("(G.3) as the paper prints it is the line above it: its term -6 alpha^2/D^3 must be -6 alpha^2/D^2.",
              function(f"{_PRINTED:.3f} = {_ONE_HOT:.3f} at D = alpha = 4", lambda: math.isclose(_PRINTED, _ONE_HOT))),
        Claim("At fixed alpha kurtosis goes to 3 as D grows. It is near 3 only for D far above alpha^4, about "
              "alpha^4/D + 3.", abs(_KURTOSIS[_name(_FIXED_SIZES[-1], _FIXED_ALPHA)] - GAUSSIAN) < 0.1),
        Claim("Trained models follow the growth.",
              function(f"0.8 < exponent {_EXPONENT:.2f} of the paper's four GPT-2 < 1.3",
                       lambda: 0.8 < _EXPONENT < 1.3)),
    ],
)  # fmt: skip

_ROTATED_SIZES = (64, 256, 1024)  # powers of two, as in Sylvester's construction, which the paper names
_D = _ROTATED_SIZES[-1]


def alphas(size: int) -> tuple[float, ...]:
    """Returns the spikes for one D: as long as all the noise, D, and 10 D; the paper's models have 4 to 39 D."""
    return (math.sqrt(size), 1.0 * size, 10.0 * size)


@jax.jit
def _measure(y: jax.Array) -> dict[str, jax.Array]:
    ratio = norm_ratio(y)
    per_vector = {"kurtosis": kurtosis(y), "norm_ratio": ratio, "norm_ratio_squared": ratio**2}
    return {name: values.mean() for name, values in per_vector.items()}


def _rotated(seed: int) -> Iterator[Row]:
    """Yields norm ratio and kurtosis of sampled vectors before and after each rotation, with their closed forms."""
    for size in _ROTATED_SIZES:
        drawn = [rotations.spiked_vectors(alpha, size, _SAMPLES, seed) for alpha in alphas(size)]
        x, channels = np.concatenate([x for x, _ in drawn]), np.concatenate([c for _, c in drawn])
        for rotation in rotations.ROTATIONS:
            # Also the columns Q e_i, in the same call: Q is drawn once.
            both = np.concatenate([x, np.eye(size)[channels]])
            rotated = np.split(rotations.rotate(both, np.tile(channels, 2), rotation, seed), 2 * len(drawn))
            for alpha, y, columns in zip(alphas(size), rotated, rotated[len(drawn) :], strict=False):
                closed = float(np.mean(rotations.mixture_kurtosis(alpha, columns)))
                if rotation in ("aligned", "haar"):  # exactly Gaussian values, except for an offset or a length
                    closed = rotations.direction_kurtosis(size)
                metrics = {name: float(value) for name, value in _measure(y).items()}
                metrics["kurtosis_closed_form"] = closed
                metrics["norm_ratio_squared_closed_form"] = rotations.mean_squared_norm_ratio(alpha, size, rotation)
                setting = {"rotation": rotation, "size": size, "alpha": alpha}
                yield Row(f"{rotation}_{_name(size, alpha)}", metrics, setting)


def _at(rotation: str, multiple: float = 1.0) -> str:
    return f"{rotation}_{_name(_D, multiple * _D)}"


def _times_d(variant: str) -> Expr:
    return Metric("norm_ratio_squared")[variant] * _D


def _within(limit: float, rotation: str) -> Expr:
    """Returns whether kurtosis is near 3 for every alpha; the exact mean of D Gaussian values is 3 (D - 1)/(D + 1)."""
    names = [f"{rotation}_{_name(_D, alpha)}" for alpha in alphas(_D)]
    words = f"kurtosis at D = {_D} within {limit:g} of 3 for every alpha"
    return check(lambda *of: max(abs(result["kurtosis"] - GAUSSIAN) for result in of) < limit, *names, words=words)


_NEAR, _FAR = _times_d(_at("aligned")) < 1.5, _times_d(_at("aligned", 10.0)) < 1.05
_PRINTED_LINE = 1 + (_D + 2 * math.sqrt(2 * math.log(_D))) / math.sqrt(_D)
APPENDIX_H = Study(
    name="appendix_h",
    title="Appendix H: a rotation lowers the largest entry and the kurtosis",
    rows=_rotated,
    note="x = alpha e_i + z is rotated by an orthogonal Q: the paper's, with all entries of Q e_i equal to 1/sqrt(D) "
    "(`aligned`, a reflection); a Hadamard matrix after random signs, as in our OrthoAdam; a Haar matrix, as in the "
    "paper's. Closed forms for a Haar matrix are exact means, the others are ratios of means.",
    columns="norm_ratio_squared norm_ratio_squared_closed_form norm_ratio kurtosis kurtosis_closed_form",
    claims=[
        Claim("Before rotation max|x|^2 / ||x||^2 is about 1.", Metric("norm_ratio_squared")[_at("none")] > 0.99),
        Claim("With Q e_i = 1/sqrt(D) it falls to about 1/D, as it does with a Hadamard matrix and random signs.",
              _NEAR & _FAR & (_times_d(_at("hadamard", 10.0)) < 1.05),
              revised=("the Hadamard matrix had been shown, but not judged", Claim("", _NEAR & _FAR))),
        Claim("With a random (Haar) matrix, which is what OrthoAdam takes in the paper, it falls to about 1/D. A Haar "
              "matrix makes Gaussian values, whose largest of D is about sqrt(2 ln D): O(ln D / D), whatever alpha.",
              _times_d(_at("haar", 10.0)) < 1.5),
        Claim("The ratio itself, max|y| / ||y||, falls to about 1/D, as section 4.2 words it. 1/D is its square.",
              Metric("norm_ratio")[_at("aligned", 10.0)] * _D < 1.5),
        Claim("The last line of the derivation, as printed, is O(1/D). (D + 2 sqrt(2 ln D))/D^1.5 is above 1/sqrt(D); "
              "2 sqrt(2 ln D)/D^1.5 follows from the line above, whose denominator D^2 + 1 must be D^2 + D.",
              function(f"{_PRINTED_LINE:.1f}/D at D = {_D} is below 1.5/D", lambda: _PRINTED_LINE < 1.5)),
        Claim("With Q e_i = 1/sqrt(D) kurtosis becomes 3. It is the kurtosis of the noise: the spike has become an "
              "offset, and without z it has none (0/0).", _within(0.05, "aligned")),
        Claim("With a Haar matrix kurtosis becomes 3, with noise and without.", _within(0.2, "haar")),
        Claim("With normalised Hadamard matrices, which the paper names as the exact form of Q, kurtosis becomes 3. "
              "All columns but one are half +1/sqrt(D), half -1/sqrt(D): two values of equal size, kurtosis 1 + (4a + "
              "2)/(a + 1)^2 with a = alpha^2/D. Random signs change the sign of Q e_i and nothing else. As a remedy "
              "that is no loss: 1 is the smallest kurtosis.", _within(0.2, "hadamard")),
    ],
)  # fmt: skip
