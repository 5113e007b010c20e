"""Table 5: the fourteen rows of the ablation; claims of sections 3.1, 4.1 and 5.3."""

import dataclasses

from orthojax.experiments.claims import (
    DOMINANCE,
    EQUAL_PERPLEXITY,
    FRACTION,
    GAUSSIAN,
    KURTOSIS,
    MASS,
    MAX_ABS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    Claim,
    Revision,
    above_by_seed,
    dominated,
    excess_of_first_left,
    kurtosis_left,
    shrinks_by_a_third,
)
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention.models import BY_NAME, SCALES, Row, ablation, about, about_chance, row_label
from orthojax.experiments.from_attention.output_weights import OUTPUT_WEIGHTS, OutputNorms
from orthojax.experiments.from_attention.paper_tables import TABLE_5
from orthojax.experiments.pictures import ModelMaps, perplexity_and_kurtosis
from orthojax.experiments.results import Quantity, Result, Results, metric, pairs
from orthojax.experiments.tables import MetricTable, change_text
from orthojax.formatting import percent

# In the order of TABLE_5.
(
    _STOCK, _NO_BIASES, _NO_POSITIONS, _ROTARY, _LAYERNORM, _RMSNORM_M, _ADAM, _RMSPROP, _MOMENTUM, _SGD,
    _CURED, _WITHOUT_SOFTMAX1, _CURED_RMSNORM_M, _CURED_LAYERNORM,
) = BY_NAME  # fmt: skip
# A model whose perplexity is further above Adam's has learned less, and its kurtosis says nothing about the optimizer.
_LEARNT = 0.1
_POOLED = metric("kurtosis_pooled", "pooled kurtosis")
# The paper does not say over which tokens its largest activation is taken.
_LARGEST = Quantity(
    "max |x|, larger of the two",
    lambda of: of.max_abs if "max_abs" in of else max(of.max_abs_first, of.max_abs_rest),
)


def _paper(row: Row) -> dict[str, float]:
    printed = dict(TABLE_5[row])
    return {"kurtosis_pooled": printed.pop("kurtosis"), **printed}


def _has_outliers(result: Result) -> bool:
    return result.kurtosis_pooled > OUTLIERS


def _fewer_outliers(adam: Result, other: Result) -> bool:
    if other.name == _RMSPROP:
        return adam.kurtosis_pooled > other.kurtosis_pooled > OUTLIERS
    return kurtosis_left("kurtosis_pooled", adam, other) <= 0.1


def _adaptive_alone(adam: Result, rmsprop: Result, *sgd: Result) -> bool:
    most = GAUSSIAN + 0.1 * (adam.kurtosis_pooled - GAUSSIAN)
    return adam.kurtosis_pooled > rmsprop.kurtosis_pooled > OUTLIERS and max(r.kurtosis_pooled for r in sgd) <= most


def _above_others(adam: Result, momentum: Result, sgd: Result) -> list[float]:
    """By which fraction SGD's perplexity is above the others', in every seed."""
    return [*above_by_seed(sgd, adam), *above_by_seed(sgd, momentum)]


def _similar_perplexities(*of: Result) -> bool:
    stock, no_biases, softmax1, rmsnorm, rotary, none = (result.perplexity for result in of)
    return all(abs(value / stock - 1) <= 0.02 for value in (no_biases, softmax1, rmsnorm)) and rotary < no_biases < none


_DOMINATES = f"{DOMINANCE:g} times what equal logits give, or more"
_SOFTMAX_DOMINATED = f"testable where the softmax row with LayerNorm and without biases has {_DOMINATES}"
_ADAM_OUTLIERS = f"testable where Adam's is above {OUTLIERS:g}"
_ATTENTION = (
    Claim("Without positions the first token dominates less, but still (3.1: argmax 33% → 20%, mass 17% → 10%; its 33% "
          "is the row with biases). Both rows without biases:", {"": (_NO_BIASES, _NO_POSITIONS)}, (FRACTION, MASS),
          lambda reference, without: all(without[key] < reference[key] for key in (FRACTION, MASS))
          and dominated(without), f"argmax and mass fall, and argmax stays {_DOMINATES}; {_SOFTMAX_DOMINATED}",
          dominated),
    Claim("Neither biases nor a kind of positions cause the dominance (3.1, 5.3). With biases → without → without "
          "positions → rotary:", {"": (_STOCK, _NO_BIASES, _NO_POSITIONS, _ROTARY)}, (FRACTION,),
          lambda stock, *others: all(map(dominated, others)),
          f"each of the others has {_DOMINATES}; testable where the first has", dominated),
    Claim("Softmax-1 brings it down to about 2%, which is what chance gives at 256 tokens (5.3).",
          {row_label(row): (name, _NO_BIASES) for name, row in BY_NAME.items() if row[-1]}, (FRACTION,),
          lambda softmax1, reference: excess_of_first_left(reference, softmax1) <= 0.5,
          f"in every softmax-1 row at most half of what exceeds equal logits is left; {_SOFTMAX_DOMINATED}",
          lambda softmax1, reference: dominated(reference), shown=1),
    Claim("Taking softmax-1 away from the cured model brings the dominance back (5.3).",
          {"": (_CURED, _WITHOUT_SOFTMAX1, _NO_BIASES)}, (FRACTION,),
          lambda cured, without, reference: dominated(without), f"argmax {_DOMINATES}; {_SOFTMAX_DOMINATED}",
          lambda cured, without, reference: dominated(reference), shown=2),
)  # fmt: skip
_NORMS = (
    Claim("Biases do not cause outliers: they stay without (4.1, 5.3: kurtosis 291.7 → 263.7; Llama2 has none either). "
          "With biases → without:", {"": (_STOCK, _NO_BIASES)}, (_POOLED, *KURTOSIS),
          lambda stock, without: kurtosis_left("kurtosis_pooled", stock, without) >= 0.75,
          f"at least three quarters of the pooled kurtosis above {GAUSSIAN:g} stay; testable where it is above "
          f"{OUTLIERS:g} with biases", lambda stock, without: _has_outliers(stock),
          revised=Revision("the claim was added to the runs of scale tiny, with the criterion of the next one")),
    Claim("RMSNorm with a scale for every channel does not reduce outliers (5.3). LayerNorm → it:",
          {"": (_LAYERNORM, _RMSNORM_M)}, (_POOLED,),
          lambda layernorm, rmsnorm: kurtosis_left("kurtosis_pooled", layernorm, rmsnorm) >= 0.75,
          f"at least three quarters of what is above {GAUSSIAN:g} stay; testable where LayerNorm's is above "
          f"{OUTLIERS:g}", lambda layernorm, rmsnorm: _has_outliers(layernorm)),
    Claim("One scale for all channels reduces them by about 40% (5.3). RMSNorm-M → RMSNorm-S:",
          {"": (_RMSNORM_M, _ADAM)}, (_POOLED, *MAX_ABS, _LARGEST),
          lambda rmsnorm, single: 0.2 <= 1 - single.kurtosis_pooled / rmsnorm.kurtosis_pooled <= 0.6,
          f"kurtosis falls by 20% to 60%; testable where RMSNorm-M's is above {OUTLIERS:g}",
          lambda rmsnorm, single: _has_outliers(rmsnorm)),
    Claim("With Adam perplexity stays similar; rotary positions lower it, none raise it (5.3). First row → no biases → "
          "softmax-1 → RMSNorm-S → rotary → none:",
          {"": (_STOCK, _NO_BIASES, _LAYERNORM, _ADAM, _ROTARY, _NO_POSITIONS)}, (PPL,), _similar_perplexities,
          "the first three within 2% of the first row; rotary below the row without biases, none above"),
)  # fmt: skip
_ADAPTIVE = f"Adam above RMSProp above {OUTLIERS:g}, and SGD has a tenth or less of Adam's excess over {GAUSSIAN:g}"
_OPTIMIZERS = (
    Claim("It is adaptive optimizers that make outliers: kurtosis 140 with Adam, 70 with RMSProp, about 3 to 5 with "
          "SGD (4.1, 5.3). Adam → it:",
          {"RMSProp": (_ADAM, _RMSPROP), "SGD with momentum": (_ADAM, _MOMENTUM), "SGD without momentum": (_ADAM,
          _SGD)}, (_POOLED, PPL, "steps"), _fewer_outliers,
          f"{_ADAPTIVE}; {_ADAM_OUTLIERS} and the other's perplexity at most {_LEARNT:.0%} above Adam's",
          lambda adam, other: _has_outliers(adam) and other.perplexity <= (1 + _LEARNT) * adam.perplexity,
          revised=Revision("a model that has learned less says nothing about its optimizer; at scale tiny this leaves "
                           "out RMSProp, which contradicts the claim, and SGD without momentum",
                           {"of": {"": (_ADAM, _RMSPROP, _MOMENTUM, _SGD)}, "holds": _adaptive_alone,
                            "testable": lambda adam, *_: _has_outliers(adam),
                            "criterion": f"{_ADAPTIVE}; {_ADAM_OUTLIERS}"})),
    Claim("SGD without momentum has a much higher perplexity (5.3; section 4.1 says so of SGD altogether, but Table "
          "5's lowest is SGD with momentum, at 8 times the steps). Adam → with momentum → without:",
          {"": (_ADAM, _MOMENTUM, _SGD)}, (PPL, "steps"),
          lambda *of: min(_above_others(*of)) > 0.05, "more than 5% above both others, in every seed",
          detail=lambda *of:
          f"without above Adam and above with, by seed: {', '.join(map(percent, _above_others(*of)))}",
          revised=Revision("at scale tiny one seed of three learned as well as Adam, which the mean hid",
                           {"holds": lambda adam, momentum, sgd: sgd.perplexity > 1.05 * max(adam.perplexity,
                            momentum.perplexity), "criterion": "the mean more than 5% above both others"})),
)  # fmt: skip
_TOGETHER = (
    Claim("OrthoAdam with softmax-1 and RMSNorm-S has a kurtosis of 3 at Adam's perplexity (5.3). Adam → it:",
          {"": (_ADAM, _CURED)}, (_POOLED, *KURTOSIS, PPL),
          lambda adam, cured: max(cured.kurtosis_pooled, cured.kurtosis_first, cured.kurtosis_rest) < NO_OUTLIERS
          and cured.perplexity / adam.perplexity - 1 <= EQUAL_PERPLEXITY, f"all three kurtoses below {NO_OUTLIERS:g}, "
          f"perplexity at most {EQUAL_PERPLEXITY:.0%} above; {_ADAM_OUTLIERS}", lambda adam, cured: _has_outliers(adam),
          detail=lambda adam, cured: f"change of perplexity {change_text(pairs(cured, adam, 'perplexity'))}"),
    Claim("It shrinks the largest activation (5.3). Adam → it:", {"": (_ADAM, _CURED)}, (*MAX_ABS, _LARGEST),
          shrinks_by_a_third, "by a third or more, first token and others"),
    Claim("All three are needed: with one taken away outliers are back (5.3). All three → one replaced:",
          {"softmax instead of softmax-1": (_CURED, _WITHOUT_SOFTMAX1, _ADAM),
          "RMSNorm-M instead of RMSNorm-S": (_CURED, _CURED_RMSNORM_M, _ADAM),
          "LayerNorm instead of RMSNorm-S": (_CURED, _CURED_LAYERNORM, _ADAM)}, (_POOLED, *KURTOSIS),
          lambda cured, without, adam: without.kurtosis_pooled > OUTLIERS > cured.kurtosis_pooled,
          f"pooled kurtosis above {OUTLIERS:g} each, and below with all three; {_ADAM_OUTLIERS}",
          lambda cured, without, adam: _has_outliers(adam), shown=2),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    return [
        about(results),
        "The paper has 40,000 steps at a peak learning rate of 0.001, for SGD 320,000 at 0.2. It does not say over "
        "which tokens its kurtosis and largest activation are taken: ours are of the first token, of the others, and "
        "of all (pooled).",
        about_chance(results),
    ]


def _number(result: Result) -> str:
    return str(list(BY_NAME).index(result.name) + 1)


def _short_label(result: Result) -> str:
    """The label as a whole would not fit on a panel."""
    return f"{_number(result)}. {result.label.split(',')[0]}"


def _optimizer(result: Result) -> str:
    return {"sgd": "SGD", "orthoadam": "OrthoAdam"}.get(result.config.optim.optimizer, "Adam, RMSProp")


EXPERIMENT = Experiment(
    name="table5",
    title="Table 5: what makes outliers, and what removes them: biases, positions, norms, optimizers, softmax-1",
    variants=ablation,
    scales=SCALES,
    about=_about,
    paper={name: _paper(row) for name, row in BY_NAME.items()},
    tables=(
        MetricTable(
            "Ablation: optimizer, normalisation, positions, biases, attention",
            (
                "steps",
                "learning_rate",
                metric("perplexity", "PPL"),
                metric("kurtosis_first", "kurtosis, first"),
                metric("kurtosis_rest", "kurtosis, rest"),
                metric("kurtosis_pooled", "kurtosis, pooled"),
                metric(FRACTION, "%first (argmax)"),
                metric(MASS, "mass on first"),
                metric("max_abs_first", "max |x|, first"),
                metric("max_abs_rest", "max |x|, rest"),
                _LARGEST,
            ),
            label=lambda result: f"{_number(result)}. {result.label}",
        ),
    ),
    claims=(*_ATTENTION, *_NORMS, *_OPTIMIZERS, *_TOGETHER),
    pictures=(
        dataclasses.replace(
            perplexity_and_kurtosis(_optimizer, _number, lambda of: of.kurtosis_pooled, "kurtosis, all tokens"),
            caption="Perplexity and kurtosis; numbers are rows of the table.",
        ),
        ModelMaps(label=_short_label),
        OutputNorms(_short_label),
    ),
    measures=(OUTPUT_WEIGHTS,),
)
