"""Table 2: five models x {softmax, softmax-1} x {Adam, OrthoAdam}; claims of the abstract, sections 3.2 and 5.1."""

from collections.abc import Callable
from functools import partial

from orthojax.analysis import chance_of_first
from orthojax.experiments.claims import (
    DOMINANCE,
    DOMINANCE_TESTABLE,
    FRACTION,
    GAUSSIAN,
    KURTOSIS,
    MASS,
    MAX_ABS,
    NO_OUTLIERS,
    OUTLIERS,
    PPL,
    C,
    Claim,
    Names,
    O,
    Revision,
    S,
    V,
    chance,
    dominated,
    excess_left,
    excess_of_first_left,
    has_outliers,
    in_every_seed,
    kurtosis_left,
    reduction,
    rest_has_outliers,
    shrinks_by_a_third,
    worst_kurtosis,
)
from orthojax.experiments.cure_claims import no_perplexity_lost
from orthojax.experiments.experiment import Experiment
from orthojax.experiments.from_attention.models import (
    GRID,
    METHOD_LABELS,
    SCALES,
    about,
    about_chance,
    by_model,
    grid,
    paper_of_grid,
    stand_in,
    variant_name,
)
from orthojax.experiments.from_attention.output_weights import OUTPUT_WEIGHTS, OutputNorms
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.labels import LABELS
from orthojax.experiments.pictures import ModelMaps, TrainingCurves, perplexity_and_kurtosis
from orthojax.experiments.quantization import COARSE, INT4, INT8, TESTABLE_LOSS, about_int8
from orthojax.experiments.results import Numbers, Result, Results, metric, pairs, penalty
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.formatting import percent


def _both_dominated(vanilla: Result, *_: Result) -> bool:
    return dominated(vanilla) and vanilla.first_attention_mass >= DOMINANCE * chance(vanilla)


def _dominance_left(before: Result, after: Result) -> float:
    """What is left of what exceeds equal logits, the larger fraction of argmax and mass, with softmax-1 after."""
    equal = chance_of_first(after.sequence_length, softmax1=True)
    mass = excess_left(before.first_attention_mass, after.first_attention_mass, chance(before), equal)
    return max(excess_of_first_left(before, after), mass)


_REMOVED = f"at most half of what exceeds equal logits is left, argmax and mass; {DOMINANCE_TESTABLE}, both"
_OUTLIERS = f"testable where vanilla's is above {OUTLIERS:g}"
_EVERY_SEED = f"{_OUTLIERS} in every seed"


def _first_has_outliers(of: Numbers) -> bool:
    return of.kurtosis_first > OUTLIERS


def _in_every_seed(
    says: str,
    of: Names,
    show: Names,
    holds: Callable[..., bool],
    criterion: str,
    outliers: Callable[..., bool],
    which: str = "",
) -> Claim:
    """A claim about models with outliers in every seed; one with outliers in the mean alone can still contradict it."""
    every = in_every_seed(outliers)
    return Claim(
        says, of, show, holds,
        f"{criterion}; {_EVERY_SEED}{which}, or in the mean where it contradicts the claim",
        lambda vanilla, *others: every(vanilla) or (outliers(vanilla) and not holds(vanilla, *others)),
        revised=Revision("means over seeds counted GPT2 60M, of which one seed of three has outliers, and Llama2's "
                         "other tokens, of which one has",
                         {"criterion": f"{criterion}; {_OUTLIERS}{which}", "testable": outliers}),
    )  # fmt: skip


def _lose_more(vanilla: Result, *others: Result) -> list[str]:
    """The labels of those that coarse costs more than vanilla, in every seed."""
    more = (pairs(other, vanilla, penalty(COARSE)).values() for other in others)
    return [other.label for other, of in zip(others, more, strict=True) if all(a > b for a, b in of)]


def _costs_by_seed(*of: Result) -> str:
    return "by seed " + " → ".join("/".join(map(percent, result.values(penalty(COARSE)))) for result in of)


_ADDED = Revision("the claim was added to runs that were there")
_LEFT = f"at least half of the kurtosis above {GAUSSIAN:g} is left"
_GONE = f"at most half of the kurtosis above {GAUSSIAN:g} is left"
_NONE = f"both below {NO_OUTLIERS:g}, a Gaussian having {GAUSSIAN:g}"
_LOWEST = "softmax-1 lowers the first token's, OrthoAdam the others', and both together are lowest"


def _two(results: Results) -> dict[str, Names]:
    models = ("gpt2_130m", "llama2_130m")
    return {" → ".join(stand_in(of, results.scale) for of in models): [variant_name(of, V) for of in models]}


CLAIMS = (
    no_perplexity_lost("Perplexity with softmax-1 and OrthoAdam together is equal to vanilla's or lower (5.1)."),
    Claim("Each of the two alone leaves perplexity similar (3.2, caption of Table 2).", (V, S, O), (PPL,),
          lambda v, s, o: max(abs(x.perplexity / v.perplexity - 1) for x in (s, o)) <= 0.02,
          "both means within 2% of vanilla's, in every model; the paper's own largest is 1.6%"),
    Claim("Softmax-1 alone removes first-token dominance (3.2, 5.1).", (V, S), (FRACTION, MASS),
          lambda v, s: _dominance_left(v, s) <= 0.5, _REMOVED, _both_dominated),
    Claim("It is softmax-1 that does it: OrthoAdam alone leaves the dominance (2.2, 5.1).", (V, O), (FRACTION,),
          lambda v, o: excess_of_first_left(v, o) >= 0.5,
          f"at least half of the argmax that exceeds equal logits is left; {DOMINANCE_TESTABLE}", dominated),
    Claim("Section 3.2's two models (those of Table 2's GPT2 130M, by its numbers): with softmax-1 argmax falls from "
          "53% to 2%, mass from 46% to 4%.", (V, S), (FRACTION, MASS),
          lambda v, s: _dominance_left(v, s) <= 0.5, _REMOVED, _both_dominated,
          where=lambda label: "GPT2 130M" in label),
    Claim("First-token dominance falls by up to 95% (abstract: 65% to 3.3%; conclusion).", (V, C), (FRACTION,),
          lambda v, c: reduction(FRACTION, v, c) >= 0.9,
          "the largest reduction of argmax is 90% or more; testable where equal logits would be as large one",
          lambda v, c: 1 - chance(v) / v.first_attention_fraction >= 0.9, largest=partial(reduction, FRACTION)),
    _in_every_seed("Softmax-1 alone leaves the outliers of other tokens where they were.", (V, S), ("kurtosis_rest",),
                   lambda v, s: kurtosis_left("kurtosis_rest", v, s) >= 0.5, _LEFT, rest_has_outliers),
    _in_every_seed("OrthoAdam alone removes the outliers of other tokens (in the paper not in Llama2).", (V, O),
                   ("kurtosis_rest",), lambda v, o: kurtosis_left("kurtosis_rest", v, o) <= 0.5, _GONE,
                   rest_has_outliers),
    Claim("OrthoAdam alone does not remove those of the first token, which go with its dominance (2.2).", (V, O),
          ("kurtosis_first", FRACTION),
          lambda v, o: kurtosis_left("kurtosis_first", v, o) >= 0.5, f"{_LEFT}; {_EVERY_SEED}, and where it has "
          f"{DOMINANCE:g} times the argmax that equal logits give",
          lambda v, o: in_every_seed(_first_has_outliers)(v) and dominated(v),
          revised=Revision("without dominance nothing keeps the outliers there",
                           {"criterion": f"{_LEFT}; {_OUTLIERS}", "testable": lambda v, o: _first_has_outliers(v)})),
    _in_every_seed("Both together leave no outliers.", (V, C), KURTOSIS,
                   lambda v, c: worst_kurtosis(c) < NO_OUTLIERS, _NONE, has_outliers, ", either"),
    _in_every_seed("Each method lowers kurtosis, both together lower it most (5.1).", (V, S, O, C), KURTOSIS,
                   lambda v, s, o, c: s.kurtosis_first < v.kurtosis_first and o.kurtosis_rest < v.kurtosis_rest
                   and all(c[key] == min(x[key] for x in (v, s, o, c)) for key in KURTOSIS),
                   _LOWEST, has_outliers, ", either"),
    Claim("Kurtosis falls by up to 99.8% (abstract: 1657 to 3.1; conclusion).", (V, C), ("kurtosis_first",),
          lambda v, c: reduction("kurtosis_first", v, c) >= 0.99, "the largest reduction of the first token's kurtosis "
          "is 99% or more; testable where a Gaussian's 3 would be as large a reduction, for which vanilla must reach "
          "300; that of D channels cannot exceed D - 2 + 1 / (D - 1)",
          lambda v, c: 1 - GAUSSIAN / v.kurtosis_first >= 0.99, largest=partial(reduction, "kurtosis_first")),
    Claim("The largest activations shrink (5.1).", (V, C), MAX_ABS, shrinks_by_a_third,
          "by a third or more, first token and others, in every model"),
    Claim("A BOS does not cause the dominance (3.1: Llama2 has one, GPT2 none).", _two, (FRACTION,),
          lambda *of: all(map(dominated, of)),
          f"both have {DOMINANCE:g} times the argmax that equal logits give; testable where one has and they differ in "
          "the BOS", lambda gpt2, llama: gpt2.config.data.bos != llama.config.data.bos
          and any(map(dominated, (gpt2, llama))), revised=_ADDED),
    Claim("Nor does the activation (3.1: SiLU in Llama2, GELU in GPT2).", _two, (FRACTION,),
          lambda *of: all(map(dominated, of)),
          f"both have {DOMINANCE:g} times the argmax that equal logits give; testable where one has",
          lambda *of: any(map(dominated, of)), revised=_ADDED),
    Claim("(Ours) No method makes a model less robust to int8 coarse than vanilla in every seed.", (V, S, O, C),
          (penalty(COARSE),),
          lambda *of: not _lose_more(*of),
          f"none loses more than vanilla in every seed; testable where one loses {TESTABLE_LOSS:.1%} or more",
          lambda *of: max(result.mean(penalty(COARSE)) for result in of) >= TESTABLE_LOSS, detail=_costs_by_seed,
          revised=_ADDED),
)  # fmt: skip


def _width(result: Result) -> str:
    return f"{result.d_model:g} wide{', Llama2' if result.name.startswith('llama2') else ''}"


_COLUMNS = (
    metric("perplexity", "PPL"),
    *(metric(f"kurtosis_{part}", f"kurtosis, {part}") for part in ("first", "rest")),
    *(metric(f"max_abs_{part}", f"max |x|, {part}") for part in ("first", "rest")),
    metric(FRACTION, "%first (argmax)"),
    metric(MASS, "mass on first"),
)

EXPERIMENT = Experiment(
    name="table2",
    title="Table 2: softmax-1 and OrthoAdam, alone and together: perplexity, outliers, first-token attention",
    variants=grid,
    scales=SCALES,
    about=lambda results: [about(results), about_chance(results), about_int8(results)],
    groups=by_model,
    paper=paper_of_grid(TABLE_2),
    tables=(
        MetricTable("Perplexity, outliers, first-token attention", _COLUMNS),
        PairedTable(
            "Change from softmax + Adam of the same model, paired by seed", "vanilla", _COLUMNS[:5], _COLUMNS[5:]
        ),
        MetricTable("Perplexity lost to quantisation", [penalty(s, LABELS[s]) for s in (*INT8, INT4)]),
    ),
    claims=CLAIMS,
    headlines=[
        (quantity, [variant_name("gpt2_1_4b", method) for method in (V, C)])
        for quantity in ("kurtosis_first", FRACTION, PPL)
    ],
    figure="perplexity_and_kurtosis",
    pictures=(
        TrainingCurves(
            lambda r: GRID[r.name][1] in ("vanilla", "cured"), lambda r: METHOD_LABELS[GRID[r.name][1]],
            lambda r: r.label.rpartition(", ")[0],
        ),
        perplexity_and_kurtosis(lambda r: METHOD_LABELS[GRID[r.name][1]], _width),
        ModelMaps(),
        OutputNorms(),
    ),
    measures=(OUTPUT_WEIGHTS,),
)  # fmt: skip
