"""How `figure6` is told."""

import functools

import numpy as np

from orthojax.analysis import in_singular_basis
from orthojax.experiments.from_attention.models import variant_name
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.criteria import GAUSSIAN, NO_OUTLIERS, OUTLIERS
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.study import Study
from orthojax.formatting import mean_and_range as spread

CURED, VANILLA = variant_name("gpt2_350m", "cured"), variant_name("gpt2_350m", "vanilla")
_BASES = {"x": "X", "xq": "X Q", "xqt": "X Q^T", "xv": "X V"}
_WHAT = {"added": "what a block adds", "mlp": "MLP output alone"}
SEQUENCES = 64  # of the evaluation set, at most
_SAME = 1.25
_SAMPLES = 8  # matrices of Gaussian values; their kurtosis hardly varies


def _rows(study: Study) -> list[tuple[str, str, str]]:
    """(label, variant, metric) of everything that is measured."""
    labels = {v.name: v.label for v in study.variants}
    return [
        (f"{labels[variant]}: {_BASES[basis]}, {words}", variant, f"{what}_kurtosis_{basis}")
        for what, words in _WHAT.items()
        for variant, bases in ((CURED, tuple(_BASES)), (VANILLA, ("x", "xv")))
        for basis in bases
    ]


def _tables(study: Study) -> list[Table]:
    layers = study.variants[0].config.model.num_layers
    body = []
    for label, variant, metric in _rows(study):
        by_layer = study.by_layer(variant, metric)
        cells = [spread([float(value) for value in values]) for values in by_layer.T] or ["failed"] * layers
        body.append([label, spread(study.values(variant, metric)), *cells])
    columns = ["", "all layers", *(f"layer {layer + 1}" for layer in range(layers))]
    return [Table("Kurtosis over channels, mean over positions and sequences", columns, body)]


def _largest_ratio(study: Study, what: str, basis: str) -> float:
    """How far the kurtosis in a basis is from that of X, as the largest ratio of a layer and seed, either way."""
    x, y = (study.by_layer(CURED, f"{what}_kurtosis_{name}") for name in ("x", basis))
    return float(np.exp(np.max(np.abs(np.log(y / x)))))


@functools.cache
def gaussian_kurtosis(tokens: int, d_model: int) -> tuple[float, float]:
    """Kurtosis over channels, mean over positions, of independent Gaussian values X [T, D] and of their X V.

    Args:
      tokens: T.
      d_model: D.
    """
    x = np.random.default_rng(0).normal(size=(_SAMPLES, tokens, d_model))

    def mean_kurtosis(values: np.ndarray) -> float:
        centred = values - values.mean(-1, keepdims=True)
        return float(((centred**4).mean(-1) / (centred**2).mean(-1) ** 2).mean())

    return mean_kurtosis(x), mean_kurtosis(in_singular_basis(x))


def _singular_basis(study: Study, shown: str) -> Claim:
    """Of X V, beside what it is of a matrix in which nothing sticks out."""
    config = study.variants[0].config
    shape = config.data.sequence_length, config.model.d_model
    x, xv = gaussian_kurtosis(*shape)
    measured = {what: study.by_layer(CURED, f"{what}_kurtosis_xv") for what in _WHAT}
    larger = all(bool((xvs > study.by_layer(CURED, f"{what}_kurtosis_x")).all()) for what, xvs in measured.items())
    return Claim(
        verdict(larger, visible=min(float(xvs.mean()) for xvs in measured.values()) > xv),
        f"A basis with larger kurtosis exists: that of the singular vectors, X V: {shown}. Any matrix has one: "
        f"independent Gaussian values of the same shape, {shape[0]} x {shape[1]}, have {x:.2f} in X and {xv:.2f} in "
        f"X V, so this says nothing of outliers (criterion: above X in every layer and seed; visible where the mean "
        f"of each X V is above that of the Gaussian values).",
    )


def _claims(study: Study) -> list[Claim]:
    shown = {
        basis: spread(study.values(CURED, f"added_kurtosis_{basis}")) + f", MLP alone "
        f"{spread(study.values(CURED, f'mlp_kurtosis_{basis}'))}"
        for basis in _BASES
    }  # fmt: skip
    means = [study.mean(CURED, f"{what}_kurtosis_{basis}") for what in _WHAT for basis in ("x", "xq", "xqt")]
    ratios = [_largest_ratio(study, what, basis) for what in _WHAT for basis in ("xq", "xqt")]
    vanilla = study.mean(VANILLA, "added_kurtosis_x")
    pairs = study.pairs(VANILLA, CURED, "added_kurtosis_x").values()
    visible = vanilla > OUTLIERS
    return [
        Claim(
            verdict(max(ratios) < _SAME, visible=visible),
            f"Outliers do not hide in OrthoAdam's basis (Figure 6). Cured, X: {shown['x']}; X Q: {shown['xq']}; X Q^T: "
            f"{shown['xqt']}; farthest from X in any layer and seed by a factor of {max(ratios):.2f} (criterion: below "
            f"{_SAME}; visible where the vanilla model's X is above {OUTLIERS:g}: {vanilla:.2f}).",
        ),
        Claim(
            verdict(max(means) < NO_OUTLIERS, visible=visible),
            f"In all three bases the kurtosis is near that of a Gaussian, 3. Means over layers and seeds "
            f"{min(means):.2f} to {max(means):.2f} (criterion: all below {NO_OUTLIERS}; visible as above).",
        ),
        _singular_basis(study, shown["xv"]),
        Claim(
            verdict(all(a > b for a, b in pairs), visible=visible),
            f"The vanilla model's layers write outliers. X: {spread(study.values(VANILLA, 'added_kurtosis_x'))} "
            f"vanilla, {spread(study.values(CURED, 'added_kurtosis_x'))} cured (criterion: larger in every seed; "
            f"visible as above).",
        ),
    ]


def _pictures(study: Study) -> list[Picture]:
    pictures = []
    labels = {CURED: "cured", VANILLA: "vanilla"}
    for what, words in _WHAT.items():
        curves = {}
        for variant, basis in (*((CURED, basis) for basis in _BASES), (VANILLA, "x")):
            y = study.by_layer(variant, f"{what}_kurtosis_{basis}")
            curves[f"{labels[variant]}, {_BASES[basis]}"] = (list(range(1, y.shape[1] + 1)), y)
        figure = drawing.lines(
            curves, x_label="layer", y_label="kurtosis", y_scale="log", reference=(GAUSSIAN, "Gaussian"), integer_x=True
        )
        pictures.append(Picture(f"kurtosis_in_bases_{what}", f"Kurtosis of {words}, in four bases.", figure))
    return pictures


def report(study: Study) -> Report:
    """Kurtosis by basis and layer, and whether outliers hide in one of them."""
    finished = not study.failures()
    config = study.variants[0].config
    return summaries.study_report(
        study,
        "What each layer adds, in other bases",
        [
            f"GPT2 350M, or what stands for it, {config.train.steps} steps. X [T, D] is what a layer adds to the "
            f"hidden states of one sequence: attention output plus MLP output, which is x_m - x_(m-1); and the "
            f"MLP's part alone. Q is OrthoAdam's matrix for the output channels of that layer's MLP output kernel (a "
            f"gradient row g becomes Q g, so X Q^T is X in OrthoAdam's basis), V the right singular vectors of each "
            f"sequence's X. Where a sequence has fewer tokens than there are channels, X V has channels that are 0.",
        ],
        claims=_claims(study) if finished else [],
        tables=_tables(study),
        pictures=_pictures(study) if finished else [],
        extra_notes=[f"kurtosis in other bases: the first {SEQUENCES} sequences of these, at most"],
    )
