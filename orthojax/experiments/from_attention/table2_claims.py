"""What the paper says of Table 2 (abstract, sections 3.2 and 5.1, conclusion), each sentence with a criterion."""

from collections.abc import Callable

from orthojax.experiments.from_attention.beside_the_paper import Case, arrow, judge, length_of, means, models_of
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.reporting.criteria import (
    DOMINANCE,
    EQUAL_PERPLEXITY,
    GAUSSIAN,
    NO_OUTLIERS,
    OUTLIERS,
    chance_of_first,
)
from orthojax.experiments.reporting.page import Claim
from orthojax.experiments.study.comparisons import change_text
from orthojax.experiments.study.study import Study
from orthojax.formatting import percent

_FRACTION, _MASS = "first_attention_fraction", "first_attention_mass"
_PARTS = {"kurtosis_first": "first token", "kurtosis_rest": "others"}


def claims(study: Study) -> list[Claim]:
    """In the order: perplexity, attention, outliers."""
    attention = [*_attention(study), _less_dominance(study)]
    outliers = [*_single_methods(study), *_both_methods(study), _less_kurtosis(study), _activations(study)]
    return [*_perplexity(study), *attention, *outliers]


def _paper(label: str, metric: str, *methods: str) -> list[float | None]:
    return [TABLE_2.get((label, method), {}).get(metric) for method in methods]


def _perplexity(study: Study) -> list[Claim]:
    def against(vanilla: str, label: str, method: str, other: str) -> tuple[str, float]:
        before, after = means(study, "perplexity", vanilla, other)
        paper = _paper(label, "perplexity", "vanilla", method)
        changed = change_text(study.pairs(other, vanilla, "perplexity"))
        return f"{changed}, {arrow([before, after], paper)}", after / before - 1

    def cured(label: str, vanilla: str, other: str) -> Case:
        text, change = against(vanilla, label, "cured", other)
        return Case(text, change <= EQUAL_PERPLEXITY)

    def alone(label: str, vanilla: str, softmax1: str, orthoadam: str) -> Case:
        first, a = against(vanilla, label, "softmax1", softmax1)
        second, b = against(vanilla, label, "orthoadam", orthoadam)
        return Case(f"softmax-1 {first}, OrthoAdam {second}", max(abs(a), abs(b)) <= 0.02)

    return [
        judge(
            study,
            "Perplexity with softmax-1 and OrthoAdam together is equal to vanilla's or lower (5.1). Change:",
            f"mean at most {EQUAL_PERPLEXITY:.0%} above vanilla's, in every model",
            models_of(study, "vanilla", "cured"),
            cured,
        ),
        judge(
            study,
            "Each of the two alone leaves perplexity similar (3.2, caption of Table 2). Change:",
            "both means within 2% of vanilla's, in every model; the paper's own largest is 1.6%",
            models_of(study, "vanilla", "softmax1", "orthoadam"),
            alone,
        ),
    ]


def _attention(study: Study) -> list[Claim]:
    chance = chance_of_first(length_of(study))
    uniform = {_FRACTION: (chance, chance), _MASS: (chance, chance_of_first(length_of(study), softmax1=True))}
    at_chance = f"vanilla has {DOMINANCE:g} times the {chance:.3f} that equal logits give, or more"

    def excess(metric: str, before: float, after: float, *, softmax1: bool) -> float:
        """What is left of what exceeds equal logits, as a fraction."""
        first, second = uniform[metric][0], uniform[metric][softmax1]
        return (after - second) / (before - first) if before > first else float("inf")

    def removed(label: str, vanilla: str, softmax1: str) -> Case:
        fraction, mass = means(study, _FRACTION, vanilla, softmax1), means(study, _MASS, vanilla, softmax1)
        left = [excess(_FRACTION, *fraction, softmax1=True), excess(_MASS, *mass, softmax1=True)]
        paper = _paper(label, _FRACTION, "vanilla", "softmax1")
        return Case(
            f"argmax {arrow(fraction, paper)}, mass {arrow(mass)}",
            max(left) <= 0.5,
            fraction[0] >= DOMINANCE * chance and mass[0] >= DOMINANCE * chance,
        )

    def kept(label: str, vanilla: str, orthoadam: str) -> Case:
        fraction = means(study, _FRACTION, vanilla, orthoadam)
        paper = _paper(label, _FRACTION, "vanilla", "orthoadam")
        return Case(
            f"argmax {arrow(fraction, paper)}",
            excess(_FRACTION, *fraction, softmax1=False) >= 0.5,
            fraction[0] >= DOMINANCE * chance,
        )

    return [
        judge(
            study,
            "Softmax-1 alone removes first-token dominance (3.2, 5.1).",
            f"at most half is left of what exceeds equal logits, argmax and mass; visible where {at_chance}, both",
            models_of(study, "vanilla", "softmax1"),
            removed,
        ),
        judge(
            study,
            "It is softmax-1 that does it: OrthoAdam alone leaves the dominance (2.2, 5.1).",
            f"at least half of the argmax that exceeds equal logits is left; visible where {at_chance}",
            models_of(study, "vanilla", "orthoadam"),
            kept,
        ),
        judge(
            study,
            "Section 3.2's two models (those of Table 2's GPT2 130M, by its numbers), softmax → softmax-1: argmax "
            "53% → 2%, mass 46% → 4% in the paper.",
            f"both at most half of what exceeds equal logits; visible where {at_chance}, both",
            {label: names for label, names in models_of(study, "vanilla", "softmax1").items() if label == "GPT2 130M"},
            removed,
        ),
    ]


def _less_dominance(study: Study) -> Claim:
    return _largest(
        study,
        "First-token dominance falls by up to 95% (abstract: 65% to 3.3%; conclusion).",
        "the largest reduction of argmax, softmax-1 with OrthoAdam against vanilla, is 90% or more; visible where "
        "equal logits would be as large a reduction",
        _FRACTION,
        wanted=0.9,
        floor=chance_of_first(length_of(study)),
    )


def _largest(study: Study, sentence: str, criterion: str, metric: str, *, wanted: float, floor: float) -> Claim:
    """A claim of the form 'by up to': the largest reduction of a metric from vanilla to cured over all models."""
    groups = models_of(study, "vanilla", "cured")
    done = {label: names for label, names in groups.items() if all(study.values(name, metric) for name in names)}
    if not done:
        return judge(study, sentence, criterion, groups, lambda *_: Case("", False))
    reductions = {}
    for label, names in done.items():
        before, after = means(study, metric, *names)
        reductions[label] = 1 - after / before
    best = max(reductions, key=lambda label: reductions[label])

    def case(label: str, vanilla: str, cured: str) -> Case:
        values = means(study, metric, vanilla, cured)
        text = f"{arrow(values, _paper(label, metric, 'vanilla', 'cured'))}, {percent(-reductions[label])}"
        return Case(text, reductions[label] >= wanted, 1 - floor / values[0] >= wanted)

    return judge(study, f"{sentence} The largest here:", criterion, {best: done[best]}, case)


def _single_methods(study: Study) -> list[Claim]:
    def left(metric: str, method: str, holds: Callable[[float], bool]) -> Callable[..., Case]:
        """How much of a vanilla model's excess of kurtosis over a Gaussian's a method leaves."""

        def case(label: str, vanilla: str, other: str) -> Case:
            before, after = means(study, metric, vanilla, other)
            excess = (after - GAUSSIAN) / (before - GAUSSIAN) if before > GAUSSIAN else float("inf")
            return Case(
                arrow([before, after], _paper(label, metric, "vanilla", method)), holds(excess), before > OUTLIERS
            )

        return case

    visible = f"visible where vanilla's is above {OUTLIERS:g}"
    stays = f"at least half of the kurtosis above {GAUSSIAN:g} is left; {visible}"
    return [
        judge(
            study,
            "Softmax-1 alone leaves the outliers of other tokens where they were. Their kurtosis:",
            stays,
            models_of(study, "vanilla", "softmax1"),
            left("kurtosis_rest", "softmax1", lambda excess: excess >= 0.5),
        ),
        judge(
            study,
            "OrthoAdam alone removes the outliers of other tokens (in the paper not in Llama2). Their kurtosis:",
            f"at most half of the kurtosis above {GAUSSIAN:g} is left; {visible}",
            models_of(study, "vanilla", "orthoadam"),
            left("kurtosis_rest", "orthoadam", lambda excess: excess <= 0.5),
        ),
        judge(
            study,
            "OrthoAdam alone does not remove those of the first token. Kurtosis of the first token:",
            stays,
            models_of(study, "vanilla", "orthoadam"),
            left("kurtosis_first", "orthoadam", lambda excess: excess >= 0.5),
        ),
    ]


def _both_methods(study: Study) -> list[Claim]:
    def outliers(vanilla: str) -> bool:
        return max(means(study, "kurtosis_first", vanilla) + means(study, "kurtosis_rest", vanilla)) > OUTLIERS

    def gone(label: str, vanilla: str, cured: str) -> Case:
        values = {metric: means(study, metric, vanilla, cured) for metric in _PARTS}
        text = ", ".join(
            f"{words} {arrow(values[metric], _paper(label, metric, 'vanilla', 'cured'))}"
            for metric, words in _PARTS.items()
        )
        return Case(text, max(after for _, after in values.values()) < NO_OUTLIERS, outliers(vanilla))

    def most(label: str, vanilla: str, softmax1: str, orthoadam: str, cured: str) -> Case:
        values = {metric: means(study, metric, vanilla, softmax1, orthoadam, cured) for metric in _PARTS}
        text = ", ".join(f"{words} {arrow(values[metric])}" for metric, words in _PARTS.items())
        first, rest = values.values()
        holds = first[1] < first[0] and rest[2] < rest[0] and all(four[3] == min(four) for four in (first, rest))
        return Case(text, holds, outliers(vanilla))

    either = f"visible where vanilla's is above {OUTLIERS:g}, either"
    return [
        judge(
            study,
            "Both together leave no outliers. Kurtosis:",
            f"both below {NO_OUTLIERS:g}, a Gaussian having {GAUSSIAN:g}; {either}",
            models_of(study, "vanilla", "cured"),
            gone,
        ),
        judge(
            study,
            "Each method lowers kurtosis, both together lower it most (5.1). Vanilla → softmax-1 → OrthoAdam → both:",
            f"softmax-1 lowers the first token's, OrthoAdam the others', and both together are lowest; {either}",
            models_of(study, "vanilla", "softmax1", "orthoadam", "cured"),
            most,
        ),
    ]


def _less_kurtosis(study: Study) -> Claim:
    return _largest(
        study,
        "Kurtosis falls by up to 99.8% (abstract: 1657 to 3.1; conclusion).",
        "the largest reduction of the first token's kurtosis is 99% or more; visible where a Gaussian's 3 would be as "
        "large a reduction, for which vanilla must reach 300; that of D channels cannot exceed D - 2 + 1 / (D - 1)",
        "kurtosis_first",
        wanted=0.99,
        floor=GAUSSIAN,
    )


def _activations(study: Study) -> Claim:
    def smaller(label: str, vanilla: str, cured: str) -> Case:
        parts = {"first token": "max_abs_first", "others": "max_abs_rest"}
        values = {words: means(study, metric, vanilla, cured) for words, metric in parts.items()}
        text = ", ".join(
            f"{words} {arrow(values[words], _paper(label, metric, 'vanilla', 'cured'))}"
            for words, metric in parts.items()
        )
        return Case(text, all(after < 0.67 * before for before, after in values.values()))

    return judge(
        study,
        "The largest activations shrink (5.1). Mean largest |activation|:",
        "by a third or more, first token and others, in every model",
        models_of(study, "vanilla", "cured"),
        smaller,
    )
