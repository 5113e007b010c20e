"""Figure 1: attention map and hidden states of softmax with Adam and of softmax-1 with OrthoAdam."""

from collections.abc import Callable

from orthojax.experiments.claims import (
    DOMINANCE,
    FRACTION,
    KURTOSIS,
    MASS,
    MAX_ABS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    Claim,
    Revision,
    dominated,
    gaussian_kurtosis_limit,
    rest_has_outliers,
)
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import METHOD_LABELS, SCALES, grid, variant_name
from orthojax.experiments.pictures import ModelMaps
from orthojax.experiments.results import Result, Results
from orthojax.experiments.tables import MetricTable

MODEL = "gpt2_130m"
VANILLA, CURED = variant_name(MODEL, "vanilla"), variant_name(MODEL, "cured")


def two_variants(scale: str) -> tuple[Variant, ...]:
    """GPT2 130M, or what stands for it, vanilla and cured, labelled by method alone."""
    return tuple(
        Variant(v.name, METHOD_LABELS[method], v.config)
        for method in ("vanilla", "cured")
        for v in grid(scale, (MODEL,), (method,))
    )


def _about(results: Results) -> list[str]:
    return [
        "The paper shows a pretrained GPT2-Medium above, which --model=NAME=CHECKPOINT adds to these maps, and its own "
        "model with softmax-1 and OrthoAdam below."
    ]


def _could_fail(holds: Callable[[Result], bool]) -> Revision:
    """The first criterion called a model below the paper's scale not testable wherever the claim did not hold."""

    def testable(vanilla: Result) -> bool:
        return holds(vanilla) or vanilla.config.data.kind != "embedded"

    first = {"testable": testable, "criterion": "the same; testable where it does, or at the paper's scale"}
    return Revision("below the paper's scale it could not fail", first)


_OUTLIERS = f"testable where that of others is above {OUTLIERS:g} with softmax and Adam"
CLAIMS = (
    Claim("With softmax and Adam the first key token dominates.", (VANILLA,), (FRACTION, MASS), dominated,
          f"it gets most attention of more than {DOMINANCE:g} times as many (query, head) pairs as chance gives",
          detail=lambda v: "the paper's pretrained GPT2-Medium: 0.76 and 0.52", revised=_could_fail(dominated)),
    Claim("Softmax-1, here with OrthoAdam, eliminates that dominance.", (VANILLA, CURED), (FRACTION, MASS),
          lambda v, c: c[FRACTION] <= v[FRACTION] / 2,
          "at most half of the pairs that attend most to it are left; testable where the first token dominates with "
          "softmax", dominated),
    Claim("With softmax and Adam the hidden states have outlier channels.", (VANILLA,), KURTOSIS, rest_has_outliers,
          f"kurtosis of other tokens above {OUTLIERS:g}, where a Gaussian has 3",
          revised=_could_fail(rest_has_outliers)),
    Claim("OrthoAdam and softmax-1 remove them.", (VANILLA, CURED), (*KURTOSIS, PPL),
          lambda v, c: c.kurtosis_first <= gaussian_kurtosis_limit(v.d_model) and c.kurtosis_rest < NO_OUTLIERS,
          "kurtosis of the first token, which is one vector in each layer, at most 3 + 3 sqrt(24 / D), three standard "
          f"deviations above a Gaussian's; of others below {NO_OUTLIERS:g}; {_OUTLIERS}", rest_has_outliers),
)  # fmt: skip

EXPERIMENT = Experiment(
    name="figure1",
    title="Figure 1: attention map and hidden states, vanilla and cured",
    variants=two_variants,
    scales=SCALES,
    about=_about,
    tables=(MetricTable("What the maps show, in numbers", ("perplexity", FRACTION, MASS, *KURTOSIS, *MAX_ABS)),),
    claims=CLAIMS,
    pictures=(ModelMaps(),),
    takes_models=True,
)
