"""Table 5 of From Attention to Activation (arXiv 2410.17174): the fourteen rows of the ablation."""

from orthojax.experiments.claims import (
    FIRST,
    FRACTION,
    GAUSSIAN,
    MASS,
    MAX_FIRST,
    MAX_REST,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    REST,
    Claim,
    Expr,
    Metric,
    all_of,
    check,
    dominated,
    excess_left,
    fraction_left,
    largest,
)
from orthojax.experiments.from_attention.models import ABLATION, SCALES, ablation, about, about_chance
from orthojax.experiments.from_attention.output_weights import OUTPUT_WEIGHTS, output_norms
from orthojax.experiments.from_attention.paper_tables import TABLE_5
from orthojax.experiments.pictures import Maps, Points
from orthojax.experiments.results import Numbers, Result
from orthojax.experiments.study import Study

# In the order of the table.
(
    STOCK, NO_BIASES, NO_POSITIONS, ROTARY, LAYERNORM, RMSNORM_M, ADAM, RMSPROP, MOMENTUM, SGD,
    CURED, WITHOUT_SOFTMAX1, CURED_RMSNORM_M, CURED_LAYERNORM,
) = ABLATION  # fmt: skip
POOLED = Metric("kurtosis_pooled")


def _max_abs(of: Numbers) -> float:
    """Returns the larger of the two; the paper does not say over which tokens its largest activation is taken."""
    return of["max_abs"] if "max_abs" in of else max(of["max_abs_first"], of["max_abs_rest"])


def _left(before: str, after: str) -> Expr:
    return fraction_left(POOLED[before], POOLED[after], GAUSSIAN)


def _fewer_outliers(adam: Result, other: Result) -> bool:
    """RMSProp: kurtosis between Adam's and 4; SGD: a tenth or less of Adam's excess over 3."""
    kurtosis, of_adam = other["kurtosis_pooled"], adam["kurtosis_pooled"]
    if other.name == RMSPROP:
        return of_adam > kurtosis > OUTLIERS
    return of_adam > GAUSSIAN and kurtosis - GAUSSIAN <= 0.1 * (of_adam - GAUSSIAN)


_ADAM_HAS_OUTLIERS = POOLED[ADAM] > OUTLIERS
_OTHER = "*_rmsnorm_single_learned_softmax1"  # an optimizer, with all else as Adam
_ATTENTION = [
    Claim("Without positions the first token dominates less, but still (3.1: argmax 33% → 20%, mass 17% → 10%; its 33% "
          "is the row with biases). Both rows without biases.",
          (FRACTION[NO_POSITIONS] < FRACTION[NO_BIASES]) & (MASS[NO_POSITIONS] < MASS[NO_BIASES])
          & dominated(NO_POSITIONS), dominated(NO_BIASES)),
    Claim("Neither biases nor a kind of positions cause the dominance (3.1, 5.3).",
          all_of(map(dominated, (NO_BIASES, NO_POSITIONS, ROTARY))), dominated(STOCK)),
    Claim("Softmax-1 brings it down to about 2%, which is what chance gives at 256 tokens (5.3).",
          excess_left("*_softmax1", NO_BIASES) <= 0.5, dominated(NO_BIASES)),
    Claim("Taking softmax-1 away from the cured model brings the dominance back (5.3).",
          dominated(WITHOUT_SOFTMAX1), dominated(NO_BIASES)),
]  # fmt: skip
_NORMS = [
    Claim("Biases do not cause outliers: they stay without (4.1, 5.3: kurtosis 291.7 → 263.7; Llama2 has none either).",
          _left(STOCK, NO_BIASES) >= 0.75, POOLED[STOCK] > OUTLIERS,
          added="the claim was added to the runs of scale tiny, with the criterion of the next one"),
    Claim("RMSNorm with a scale for every channel does not reduce outliers (5.3).",
          _left(LAYERNORM, RMSNORM_M) >= 0.75, POOLED[LAYERNORM] > OUTLIERS),
    Claim("One scale for all channels reduces them by about 40% (5.3).",
          (1 - POOLED[ADAM] / POOLED[RMSNORM_M] >= 0.2) & (1 - POOLED[ADAM] / POOLED[RMSNORM_M] <= 0.6),
          POOLED[RMSNORM_M] > OUTLIERS),
    Claim("With Adam perplexity stays similar; rotary positions lower it, none raise it (5.3).",
          (largest(*(abs(PPL[name] / PPL[STOCK] - 1) for name in (NO_BIASES, LAYERNORM, ADAM))) <= 0.02)
          & (PPL[ROTARY] < PPL[NO_BIASES]) & (PPL[NO_BIASES] < PPL[NO_POSITIONS])),
]  # fmt: skip
_OPTIMIZERS = [
    # A model whose perplexity is far above Adam's has learned less, and its kurtosis says nothing about the optimizer.
    Claim("It is adaptive optimizers that make outliers: kurtosis 140 with Adam, 70 with RMSProp, about 3 to 5 with "
          "SGD (4.1, 5.3).", check(_fewer_outliers, ADAM, _OTHER, shows=[POOLED, PPL]),
          _ADAM_HAS_OUTLIERS & (PPL[_OTHER] <= 1.1 * PPL[ADAM]), cases=("rmsprop", "sgd_momentum", "sgd"),
          revised=("a model that has learned less says nothing about its optimizer; at scale tiny this leaves out "
                   "RMSProp, which contradicts the claim, and SGD without momentum",
                   Claim("", (POOLED[ADAM] > POOLED[RMSPROP]) & (POOLED[RMSPROP] > OUTLIERS)
                         & (largest(POOLED[MOMENTUM], POOLED[SGD]) <= GAUSSIAN + 0.1 * (POOLED[ADAM] - GAUSSIAN)),
                         _ADAM_HAS_OUTLIERS))),
    Claim("SGD without momentum has a much higher perplexity (5.3; section 4.1 says so of SGD altogether, but Table "
          "5's lowest is SGD with momentum, at 8 times the steps).",
          ((PPL[SGD] / PPL[ADAM] - 1 > 0.05) & (PPL[SGD] / PPL[MOMENTUM] - 1 > 0.05)).in_every_seed(),
          revised=("at scale tiny one seed of three learned as well as Adam, which the mean hid",
                   Claim("", PPL[SGD] > 1.05 * largest(PPL[ADAM], PPL[MOMENTUM])))),
]  # fmt: skip
_TOGETHER = [
    Claim("OrthoAdam with softmax-1 and RMSNorm-S has a kurtosis of 3 at Adam's perplexity (5.3).",
          (largest(POOLED[CURED], FIRST[CURED], REST[CURED]) < NO_OUTLIERS) & (PPL[CURED] / PPL[ADAM] - 1 <= 0.01),
          _ADAM_HAS_OUTLIERS),
    Claim("It shrinks the largest activation (5.3).",
          (MAX_FIRST[CURED] < 0.67 * MAX_FIRST[ADAM]) & (MAX_REST[CURED] < 0.67 * MAX_REST[ADAM])),
    Claim("All three are needed: with softmax, RMSNorm-M or LayerNorm instead outliers are back (5.3).",
          (POOLED["orthoadam_*"] > OUTLIERS) & (POOLED[CURED] < OUTLIERS), _ADAM_HAS_OUTLIERS,
          cases=[name.removeprefix("orthoadam_") for name in (WITHOUT_SOFTMAX1, CURED_RMSNORM_M, CURED_LAYERNORM)]),
]  # fmt: skip

TABLE5 = Study(
    name="table5",
    title="Table 5: what makes outliers, and what removes them: biases, positions, norms, optimizers, softmax-1",
    runs=ablation,
    scales=SCALES,
    measures=(OUTPUT_WEIGHTS,),
    note=lambda results: f"{about(results)} The paper has 40,000 steps at a peak learning rate of 0.001, for SGD "
    f"320,000 at 0.2. It does not say over which tokens its kurtosis and largest activation are taken. "
    f"{about_chance(results)}",
    paper=TABLE_5,
    columns=[
        Metric("steps", lambda of: of["train.steps"]),
        Metric("learning rate", lambda of: of["optim.learning_rate"]),
        "perplexity kurtosis_first kurtosis_rest kurtosis_pooled "
        "first_attention_fraction first_attention_mass max_abs_first max_abs_rest",
        Metric("max |x|, larger of the two", _max_abs),
    ],
    claims=[*_ATTENTION, *_NORMS, *_OPTIMIZERS, *_TOGETHER],
    pictures=[
        Points("perplexity_and_kurtosis", "Perplexity and kurtosis.", PPL, POOLED,
               {"Adam": "adam_*", "RMSProp": "rmsprop_*", "SGD": "sgd_*", "OrthoAdam": "orthoadam_*"}, y_scale="log",
               references={"Gaussian": GAUSSIAN}),
        Maps(), output_norms,
    ],
)  # fmt: skip
