"""How `appendix_e` is told."""

import numpy as np

from orthojax.experiments.from_attention.equivariance import LAYERS
from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.calculation import Calculated
from orthojax.formatting import mean_and_range

EQUAL, DIFFERENT = 1e-9, 1e-2  # rounding after a hundred steps in float64 is below, another trajectory above
_SAID = {"sgd_plain": "independent", "sgd": "independent", "adam": "dependent", "rmsprop": "dependent"}
_SAID_OF_LAYERS = {"linear": "independent", "affine": "dependent", "rmsnorm_single": "independent"}
_SAID_OF_LAYERS |= {"rmsnorm": "dependent"}
_DRAWN = ("adam", "orthoadam", "orthoadam_follows", "muon", "sgd", "novograd")


def _size(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _kind(values: list[float]) -> str:
    return "independent" if max(values) < EQUAL else "dependent" if min(values) > DIFFERENT else "unclear"


def _labels(result: Calculated) -> dict[str, str]:
    rows = result.results["rows"]
    return {row["variant"]: row["overrides"]["label"] for row in rows if "label" in row["overrides"]}


def _tables(result: Calculated) -> list[Table]:
    optimizers = []
    for name, label in _labels(result).items():
        cells = [result.show(name, metric, _size) for metric in ("deviation", "deviation_signed_permutation")]
        optimizers.append([label, *cells, _kind(result.values(name, "deviation")), _SAID.get(name, "")])
    layers = []
    for name, label in LAYERS.items():
        cells = []
        for metric in ("deviation", "deviation_turned_parameters"):
            values = result.values(f"layer_{name}", metric)
            cells += [mean_and_range(values, _size), _kind(values)]
        if name.endswith("_equal"):
            cells[2:] = ["", ""]  # turned along, they are no longer equal
        layers.append([label, *cells, _SAID_OF_LAYERS.get(name, "")])
    return [
        Table(
            "Optimizers: largest deviation over the steps, relative to the distance from the start",
            ["", "R Haar", "R signed permutation", "of the basis", "paper"],
            optimizers,
        ),
        Table(
            "Layers: deviation of f'(R x) from R f(x), R Haar",
            ["", "parameters fixed", "of the basis", "parameters turned along", "of the basis", "paper"],
            layers,
        ),
    ]


def _claims(result: Calculated) -> list[Claim]:
    labels = _labels(result)
    kinds = {name: _kind(result.values(name, "deviation")) for name in labels}

    def shown(*names: str, metric: str = "deviation") -> str:
        return ", ".join(f"{labels[name]} {result.show(name, metric, _size)}" for name in names)

    independent = [name for name, kind in kinds.items() if kind == "independent"]
    permuted = {name: max(result.values(name, "deviation_signed_permutation")) for name in ("adam", "rmsprop")}
    return [
        Claim(
            verdict(all(kinds[name] == "independent" for name in ("sgd_plain", "sgd"))),
            f"SGD, with momentum and without, is basis-independent: {shown('sgd_plain', 'sgd')} (criterion: below "
            f"{EQUAL:g} for every seed).",
        ),
        Claim(
            verdict(all(kinds[name] == "dependent" for name in ("adam", "rmsprop"))),
            f"Adam and RMSProp are not: {shown('adam', 'rmsprop')} (criterion: above {DIFFERENT:g} for every seed). "
            f"Of the others only {', '.join(labels[n] for n in independent if n not in ('sgd_plain', 'sgd'))} are: "
            f"they use norms of whole parameters, singular values, or their own basis.",
        ),
        Claim(
            verdict(kinds["orthoadam_follows"] == "independent" and kinds["orthoadam"] == "dependent"),
            f"OrthoAdam depends on its own basis and on no other: {shown('orthoadam_follows', 'orthoadam')} "
            f"(criterion: below {EQUAL:g} and above {DIFFERENT:g}). It is Adam in the basis Q; a random Q makes that "
            f"basis unlike the model's, it does not make the optimizer basis-independent.",
        ),
        Claim(
            verdict(max(permuted.values()) < EQUAL),
            f"A signed permutation is no other basis for Adam and RMSProp: "
            f"{shown('adam', 'rmsprop', metric='deviation_signed_permutation')} (criterion: below {EQUAL:g}).",
        ),
        *_layer_claims(result),
    ]


def _layer_claims(result: Calculated) -> list[Claim]:
    def kind(name: str, metric: str = "deviation") -> str:
        return _kind(result.values(f"layer_{name}", metric))

    def shown(*names: str, metric: str = "deviation") -> str:
        return ", ".join(f"{LAYERS[n]} {mean_and_range(result.values(f'layer_{n}', metric), _size)}" for n in names)

    dependent = ("rmsnorm", "layernorm", "layernorm_equal", "bias")
    turned = "deviation_turned_parameters"
    return [
        Claim(
            verdict(kind("rmsnorm_single") == "independent" and all(kind(n) == "dependent" for n in dependent)),
            f"RMSNormSingle is basis-independent; RMSNorm with a gain for each channel, LayerNorm and a fixed bias are "
            f"not: {shown('rmsnorm_single', *dependent)} (criterion: below {EQUAL:g}, the others above "
            f"{DIFFERENT:g}). LayerNorm is not even with equal gains, since it removes the mean, a fixed direction.",
        ),
        Claim(
            verdict(kind("linear") == "independent"),
            f"By the paper's criterion, f(R x) = R f(x), a linear layer without bias is basis-independent: "
            f"{shown('linear')} (criterion: below {EQUAL:g}). It would have to commute with every R, as multiples of "
            f"the identity alone do. What holds is that R W R^T does in the other basis what W does in this one: "
            f"{shown('linear', metric=turned)}.",
        ),
        Claim(
            verdict(kind("affine", turned) == "dependent" and kind("rmsnorm", turned) == "dependent"),
            f"In that sense, parameters turned along, biases and gains for each channel are basis-dependent: "
            f"{shown('affine', 'rmsnorm', metric=turned)} (criterion: above {DIFFERENT:g}). The gains are, as no gains "
            f"in the other basis do the same. A bias is not: R b is a bias. It is the elementwise optimizer that "
            f"gives biases a basis.",
        ),
    ]


def _picture(result: Calculated) -> Picture:
    labels, curves = _labels(result), {}
    steps = [
        int(key.removeprefix("deviation/step_"))
        for key in result.results["rows"][0]["metrics"]
        if key.startswith("deviation/step_")
    ]
    for name in _DRAWN:
        values = [result.values(name, f"deviation/step_{step}") for step in steps]
        curves[labels[name]] = (steps, np.log10(np.array(values).T))
    figure = drawing.lines(curves, x_label="step", y_label="log10 of the deviation")
    return Picture(
        "deviation_by_step",
        "Training in two bases: how far apart, relative to the distance from the start; range over seeds.",
        figure,
    )


def report(result: Calculated) -> Report:
    """Deviations of trajectories and of layers, and what they say about the appendix."""
    return Report(
        title="Appendix E: what depends on the basis",
        summary=[
            "A kernel W is trained for a hundred steps, and W R^T, for an orthogonal R, is trained on the loss that "
            "knows it in that basis, with equal batches. A basis-independent optimizer takes the same path; any other "
            "goes elsewhere. The optimizers are those that a run's config names.",
            "The appendix argues for SGD and Adam from their update rules, and names f(R x) = R f(x) as the criterion "
            "for all functions. For an optimizer, whose function is the path from a loss to parameters, that is what "
            "is measured here. Where it cites figures 6 and 5, its figures 4 and 5 are meant.",
            "The task: tanh(x W) times a fixed matrix, mean squared error, noisy targets, fresh batches; W is 16 x 12.",
        ],
        claims=_claims(result),
        tables=_tables(result),
        pictures=[_picture(result)],
        notes=result.notes(),
        links=result.links(),
    )
