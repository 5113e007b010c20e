"""Figure 6: the kurtosis of what each layer adds to the hidden states, in four orthonormal bases.

If OrthoAdam only moved outliers into its own basis, activations would show them there. X [T, D] is taken in two ways:
`added`, what a whole block adds to the hidden states (attention output plus MLP output, x_m - x_{m-1}), which is how
appendix F words it; and `mlp`, the MLP's part alone, which is what the kernel writes whose basis Q is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import analysis
from orthojax.experiments.claims import GAUSSIAN, NO_OUTLIERS, OUTLIERS, Claim, Revision
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.channels import in_singular_basis
from orthojax.experiments.from_attention.models import SCALES, grid, variant_name
from orthojax.experiments.from_attention.output_weights import output_bases
from orthojax.experiments.measures import Measure, Measured, by_layer
from orthojax.experiments.pictures import LayerCurves
from orthojax.experiments.results import Quantity, Result, Results, metric, pairs
from orthojax.experiments.tables import LayerTable
from orthojax.formatting import number
from orthojax.model import LoadedModel, Taps
from orthojax.ops.statistics import at_least_float32, kurtosis
from orthojax.train import Inputs

CURED, VANILLA = variant_name("gpt2_350m", "cured"), variant_name("gpt2_350m", "vanilla")
SEQUENCES = 64  # of the evaluation set, at most
_AT_ONCE = 8  # sequences, since the activations of all layers of so many are held
_BASES = {"x": "X", "xq": "X Q", "xqt": "X Q^T", "xv": "X V"}
_WHAT = {"added": "what a block adds", "mlp": "MLP output alone"}
_SAME = 1.25
_SAMPLES = 8  # matrices of Gaussian values; their kurtosis hardly varies


def _observe(taps: Taps) -> dict[str, jax.Array]:
    attention, mlp = at_least_float32(taps.attention_output), at_least_float32(taps.mlp_output)
    return {"added": attention + mlp, "mlp": mlp}


@jax.jit
def _mean_kurtosis(x: jax.Array, bases: jax.Array | None) -> jax.Array:
    """Over channels of X Q, mean over positions: [L, B, T, D], [L, D, E] -> [L, B]."""
    rotated = x if bases is None else jnp.einsum("LBTD,LDE->LBTE", x, bases, precision="highest")
    return jnp.mean(kurtosis(rotated), axis=-1)


def kurtosis_in_bases(x: jax.Array, bases: np.ndarray | None) -> dict[str, np.ndarray]:
    """Kurtosis over channels of X, X Q, X Q^T and X V, mean over positions.

    Args:
      x: Activations of every layer, [L, B, T, D] float32.
      bases: Q of every layer, [L, D, D]; None leaves out X Q and X Q^T.

    Returns:
      `x`, `xq`, `xqt` and `xv` -> [L, B]. V are the right singular vectors of each sequence's X.
    """
    found = {"x": _mean_kurtosis(x, None)}
    if bases is not None:
        found |= {"xq": _mean_kurtosis(x, bases), "xqt": _mean_kurtosis(x, bases.swapaxes(1, 2))}
    found["xv"] = _mean_kurtosis(in_singular_basis(x).astype(np.float32), None)
    return jax.device_get(found)


def _measure(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    bases = output_bases(loaded.config, "mlp_output") if loaded.config.optim.is_rotated else None
    rows, found = inputs.evaluation[:SEQUENCES], []
    for i in range(0, len(rows), _AT_ONCE):
        activations: Any = analysis.measure(loaded, [rows[i : i + _AT_ONCE, :-1]], _observe)
        found.append({what: kurtosis_in_bases(x, bases) for what, x in activations.items()})
    on_progress("bases")
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1).astype(np.float64).mean(1), *found)
    metrics = {}
    for what, of_bases in joined.items():
        for basis, layers in of_bases.items():
            metrics |= by_layer(f"{what}_kurtosis_{basis}", layers)
    return Measured(metrics, {})


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


def _variants(scale: str) -> tuple[Variant, ...]:
    return grid(scale, ("gpt2_350m",), ("cured", "vanilla"))


def _largest_ratio(cured: Result) -> float:
    """The largest ratio, either way, of the kurtosis in OrthoAdam's basis and of X, over layers and seeds."""
    ratios = [
        np.abs(np.log(cured.layers(f"{what}_kurtosis_{basis}") / cured.layers(f"{what}_kurtosis_x"))).max()
        for what in _WHAT
        for basis in ("xq", "xqt")
    ]
    return float(np.exp(max(ratios)))


def _near_gaussian(cured: Result, vanilla: Result) -> bool:
    return max(cured[f"{what}_kurtosis_{basis}"] for what in _WHAT for basis in ("x", "xq", "xqt")) < NO_OUTLIERS


def _gaussian(cured: Result) -> tuple[float, float]:
    return gaussian_kurtosis(cured.config.data.sequence_length, cured.config.model.d_model)


def _singular_is_larger(cured: Result) -> bool:
    return all((cured.layers(f"{what}_kurtosis_xv") > cured.layers(f"{what}_kurtosis_x")).all() for what in _WHAT)


def _vanilla_is_larger(cured: Result, vanilla: Result) -> bool:
    return all(a > b for a, b in pairs(vanilla, cured, "added_kurtosis_x").values())


def _has_outliers(cured: Result, vanilla: Result) -> bool:
    return vanilla.added_kurtosis_x > OUTLIERS


def _shown(*bases: str) -> list[Quantity]:
    return [metric(f"{what}_kurtosis_{basis}", f"{_BASES[basis]}, {_WHAT[what]}") for what in _WHAT for basis in bases]


def _bases_text(cured: Result, vanilla: Result) -> str:
    """Every basis of the cured model, and what makes the claim testable of the other."""
    bases = [f"{quantity.label} {quantity.show(cured.mean(quantity))}" for quantity in _shown("x", "xq", "xqt")]
    return f"cured: {', '.join(bases)}; vanilla: X {number(vanilla.added_kurtosis_x)}"


_SEEN = f"testable where the kurtosis of the vanilla model's X, what a block adds, is above {OUTLIERS:g}"
CLAIMS = (
    Claim("Outliers do not hide in OrthoAdam's basis (Figure 6).", (CURED, VANILLA), (),
          lambda c, v: _largest_ratio(c) < _SAME, f"below {_SAME}; {_SEEN}", _has_outliers,
          detail=lambda c, v:
          f"{_bases_text(c, v)}; farthest from X in any layer and seed by a factor of {_largest_ratio(c):.2f}"),
    Claim("In all three bases the kurtosis is near that of a Gaussian, 3.", (CURED, VANILLA), (), _near_gaussian,
          f"means over layers and seeds of the cured model all below {NO_OUTLIERS}; {_SEEN}", _has_outliers,
          detail=_bases_text),
    Claim("A basis with larger kurtosis exists: that of the singular vectors, X V. Any matrix has one, so this says "
          "nothing of outliers.", (CURED,), _shown("x", "xv"), _singular_is_larger,
          "above X in every layer and seed; testable where the mean of each X V is above that of Gaussians",
          lambda c: min(c.layers(f"{what}_kurtosis_xv").mean() for what in _WHAT) > _gaussian(c)[1],
          detail=lambda c: "independent Gaussian values of the same shape {:.2f} and {:.2f}".format(*_gaussian(c)),
          revised=Revision("Gaussian values met it, too",
                           {"testable": None, "criterion": "above X in every layer and seed"})),
    Claim("The vanilla model's layers write outliers.", (CURED, VANILLA), _shown("x")[:1],
          lambda *of: _has_outliers(*of) and _vanilla_is_larger(*of),
          f"kurtosis of X above {OUTLIERS:g}, and larger than cured in every seed",
          revised=Revision("it was judged only where it is true",
                           {"criterion": f"larger than cured in every seed; {_SEEN}", "holds": _vanilla_is_larger,
                            "testable": _has_outliers})),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        f"GPT2 350M, or what stands for it, {results.first.config.train.steps} steps. X [T, D] is what a layer adds to "
        "the hidden states of one sequence: attention output plus MLP output, which is x_m - x_(m-1); and the MLP's "
        "part alone. Q is OrthoAdam's matrix for the output channels of that layer's MLP output kernel (a gradient row "
        "g becomes Q g, so X Q^T is X in OrthoAdam's basis), V the right singular vectors of each sequence's X. Where "
        "a sequence has fewer tokens than there are channels, X V has channels that are 0."
    ]


EXPERIMENT = Experiment(
    name="figure6",
    title="Figure 6: kurtosis of each layer's output in the basis of OrthoAdam and in that of its singular vectors",
    variants=_variants,
    scales=SCALES,
    about=_about,
    tables=(
        LayerTable(
            "Kurtosis over channels, mean over positions and sequences",
            {f"{what}_kurtosis_{basis}": f"{_BASES[basis]}, {_WHAT[what]}" for what in _WHAT for basis in _BASES},
        ),
    ),
    claims=CLAIMS,
    pictures=[
        LayerCurves(
            f"kurtosis_in_bases_{what}",
            f"Kurtosis of {words}, in four bases.",
            "kurtosis",
            {f"{what}_kurtosis_{basis}": symbol for basis, symbol in _BASES.items()},
            y_scale="log",
            reference=(GAUSSIAN, "Gaussian"),
            label=lambda result: result.label.split(", ")[-1],
        )
        for what, words in _WHAT.items()
    ],
    measures=(Measure("bases", _measure),),
    notes=lambda results: [f"kurtosis in other bases: the first {SEQUENCES} sequences of these, at most"],
)
