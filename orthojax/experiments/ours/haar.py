"""The paper's own Q: Haar matrices on the row of Table 2 that stands for GPT2 130M, on other axes, and drawn anew.

The other tables have Hadamard matrices after random signs, which keep no matrix in the state; this is what that choice
rests on.
"""

from orthojax.config import replace
from orthojax.experiments.base_configs import cured, with_normalizer
from orthojax.experiments.claims import (
    EQUAL_PERPLEXITY,
    FRACTION,
    KURTOSIS,
    MASS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    Claim,
    has_outliers,
    worst_kurtosis,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import RUNS, SCALES
from orthojax.experiments.results import Results
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import percent

# As in `RotationConfig.axes`; `writers` are those that multiply what is written to the residual stream (Appendix F).
AXES = ("output", "writers", "residual", "both")
ROTATION_SEEDS = (100, 101, 102, 103, 104)


def _variants(scale: str) -> tuple[Variant, ...]:
    vanilla = RUNS[scale]("gpt2_130m")
    base = replace(cured(vanilla), {"optim.rotation.axes": "output"})
    haar = {axes: replace(base, {"optim.rotation.kind": "haar", "optim.rotation.axes": axes}) for axes in AXES}
    return (
        Variant("vanilla", "softmax, Adam", vanilla),
        Variant("adam", "softmax-1, Adam", with_normalizer(vanilla, "softmax1")),
        Variant("hadamard", "Hadamard, output", base),
        *(Variant(f"haar_{axes}", f"Haar, {axes}", config) for axes, config in haar.items()),
        *(
            Variant(f"matrices_{seed}", f"Haar, output, matrices {seed}",
                    replace(haar["output"], {"optim.rotation.seed": seed}))
            for seed in ROTATION_SEEDS
        ),
    )  # fmt: skip


_HAAR = tuple(f"haar_{axes}" for axes in AXES)
_MATRICES = tuple(f"matrices_{seed}" for seed in ROTATION_SEEDS)
_OTHER_SEEDS = {"matrices of five seeds": _MATRICES}


CLAIMS = (
    Claim("With Haar matrices there are no outliers either, on any axis.", ("adam", *_HAAR), KURTOSIS,
          lambda adam, *haar: max(map(worst_kurtosis, haar)) < NO_OUTLIERS,
          f"all below {NO_OUTLIERS:g}; testable where Adam is above {OUTLIERS:g}", has_outliers),
    Claim("Which matrices are drawn makes no difference.", _OTHER_SEEDS, KURTOSIS,
          lambda *of: max(map(worst_kurtosis, of)) < NO_OUTLIERS
          and max(r.perplexity for r in of) / min(r.perplexity for r in of) - 1 <= EQUAL_PERPLEXITY,
          f"kurtosis below {NO_OUTLIERS:g} with each, perplexities within {EQUAL_PERPLEXITY:.0%}",
          detail=lambda *of: "perplexity " + ", ".join(f"{r.perplexity:.2f}" for r in of)),
    Claim("Hadamard matrices do what Haar matrices do, on the output axis.", ("hadamard", "haar_output"),
          (*KURTOSIS, PPL), lambda hadamard, haar: worst_kurtosis(hadamard) < NO_OUTLIERS
          and abs(hadamard.perplexity / haar.perplexity - 1) <= EQUAL_PERPLEXITY,
          f"kurtosis below {NO_OUTLIERS:g}, perplexity within {EQUAL_PERPLEXITY:.0%}"),
    Claim("No axis costs perplexity.", ("vanilla", *_HAAR), (PPL,),
          lambda vanilla, *haar: all(r.perplexity / vanilla.perplexity - 1 <= EQUAL_PERPLEXITY for r in haar),
          f"each at most {EQUAL_PERPLEXITY:.0%} above softmax with Adam",
          detail=lambda vanilla, *haar: ", ".join(percent(r.perplexity / vanilla.perplexity - 1) for r in haar)),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    config = results.first.config
    return [
        f"{config.model.num_layers} layers of width {config.model.d_model}, {config.train.steps:,} steps; all but the "
        "first have softmax-1. The matrices of a run follow from its seed; those of the last five have seeds of their "
        "own, and the same for all seeds of the run."
    ]


EXPERIMENT = Experiment(
    name="haar",
    title="The paper's own Q: Haar matrices, on four axes and with five draws, on Table 2's GPT2 130M",
    variants=_variants,
    scales=SCALES,
    about=_about,
    tables=(
        MetricTable("Perplexity, outliers, first-token attention", ("perplexity", *KURTOSIS, "max_abs_first",
                                                                    "max_abs_rest", FRACTION, MASS)),
        PairedTable("Change from softmax-1 with Adam, paired by seed", "adam", ("perplexity", *KURTOSIS)),
    ),
    claims=CLAIMS,
)  # fmt: skip
