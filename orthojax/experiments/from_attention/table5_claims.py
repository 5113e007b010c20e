"""What the paper says of Table 5, each sentence with a criterion."""

from collections.abc import Sequence

from orthojax.experiments.from_attention.ablation import BY_NAME, Row, row_name
from orthojax.experiments.from_attention.beside_the_paper import Case, arrow, judge, length_of, means
from orthojax.experiments.from_attention.paper_tables import TABLE_5
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
from orthojax.formatting import number, percent


def _row(norm: str, optimizer: str, softmax1: bool, position: str = "Absolute", biases: bool = False) -> str:
    row: Row = (biases, position, norm, optimizer, softmax1)
    assert row in TABLE_5
    return row_name(row)


_STOCK = _row("LayerNorm", "Adam", False, biases=True)
_NO_BIASES = _row("LayerNorm", "Adam", False)
_NO_POSITIONS = _row("LayerNorm", "Adam", False, position="None")
_ROTARY = _row("LayerNorm", "Adam", False, position="Rotary")
_LAYERNORM = _row("LayerNorm", "Adam", True)
_RMSNORM_M = _row("RMSNorm-M", "Adam", True)
_ADAM = _row("RMSNorm-S", "Adam", True)
_RMSPROP = _row("RMSNorm-S", "RMSProp", True)
_MOMENTUM = _row("RMSNorm-S", "SGD w/mom", True)
_SGD = _row("RMSNorm-S", "SGD w/o mom", True)
_CURED = _row("RMSNorm-S", "OrthoAdam", True)
_WITHOUT = {
    "softmax instead of softmax-1": _row("RMSNorm-S", "OrthoAdam", False),
    "RMSNorm-M instead of RMSNorm-S": _row("RMSNorm-M", "OrthoAdam", True),
    "LayerNorm instead of RMSNorm-S": _row("LayerNorm", "OrthoAdam", True),
}
# A model whose perplexity is further above Adam's has learnt less, and its kurtosis says nothing of the optimizer.
_LEARNT = 0.1
_FRACTION, _MASS, _POOLED = "first_attention_fraction", "first_attention_mass", "kurtosis_pooled"
_TRIPLE = ("kurtosis_first", "kurtosis_rest", _POOLED)


def claims(study: Study) -> list[Claim]:
    """In the order of the paper: attention, norms, optimizers, all three together."""
    return [*_attention(study), _dominance_again(study), *_norms(study), *_optimizers(study), *_together(study)]


def _paper(metric: str, *names: str) -> list[float]:
    return [TABLE_5[BY_NAME[name]][metric] for name in names]


def _kurtosis(study: Study, *names: str) -> str:
    """Pooled, and the paper's."""
    return arrow(means(study, _POOLED, *names), _paper("kurtosis", *names))


def _attention(study: Study) -> list[Claim]:
    chance = chance_of_first(length_of(study))
    dominates = f"{DOMINANCE:g} times the {chance:.3f} that equal logits give, or more"

    def argmax(*names: str) -> str:
        return f"argmax {arrow(means(study, _FRACTION, *names), _paper(_FRACTION, *names))}"

    def dominated(*names: str) -> bool:
        return min(means(study, _FRACTION, *names)) >= DOMINANCE * chance

    def positions(label: str, reference: str, without: str) -> Case:
        mass = means(study, _MASS, reference, without)
        fraction = means(study, _FRACTION, reference, without)
        text = f"{argmax(reference, without)}, mass {arrow(mass, [0.17, 0.10])}"
        return Case(text, fraction[1] < fraction[0] and mass[1] < mass[0] and dominated(without), dominated(reference))

    def neither(label: str, stock: str, *others: str) -> Case:
        return Case(argmax(stock, *others), dominated(*others), dominated(stock))

    def softmax1(label: str, reference: str, *others: str) -> Case:
        values = means(study, _FRACTION, *others)
        most = chance + 0.5 * (study.mean(reference, _FRACTION) - chance)
        paper = _paper(_FRACTION, *others)
        text = (
            f"argmax {number(study.mean(reference, _FRACTION))} with softmax (paper 0.308), {number(min(values))} to "
            f"{number(max(values))} with softmax-1 (paper {min(paper):g} to {max(paper):g})"
        )
        return Case(text, max(values) <= most, dominated(reference))

    visible = f"visible where the softmax row with LayerNorm has {dominates}"
    with_softmax1 = [name for name, (*_, is_softmax1) in BY_NAME.items() if is_softmax1]
    return [
        judge(
            study,
            "Without positions the first token dominates less, but still (3.1: argmax 33% → 20%, mass 17% → 10%; its "
            "33% is the row with biases). Both rows without biases:",
            f"argmax and mass fall, and argmax stays {dominates}; {visible}",
            {"": [_NO_BIASES, _NO_POSITIONS]},
            positions,
        ),
        judge(
            study,
            "Neither biases nor a kind of positions cause the dominance (3.1, 5.3). With biases, without, without "
            "positions, rotary:",
            f"each of the others has {dominates}; visible where the first has",
            {"": [_STOCK, _NO_BIASES, _NO_POSITIONS, _ROTARY]},
            neither,
        ),
        judge(
            study,
            "Softmax-1 brings it down to about 2%, which is what chance gives at 256 tokens (5.3).",
            f"in every softmax-1 row at most half of what exceeds equal logits is left; {visible}",
            {"": [_NO_BIASES, *with_softmax1]},
            softmax1,
        ),
    ]


def _dominance_again(study: Study) -> Claim:
    least = DOMINANCE * chance_of_first(length_of(study))

    def again(label: str, reference: str, cured: str, without: str) -> Case:
        values = means(study, _FRACTION, cured, without)
        return Case(
            f"argmax {arrow(values, _paper(_FRACTION, cured, without))}",
            values[1] >= least,
            study.mean(reference, _FRACTION) >= least,
        )

    return judge(
        study,
        "Taking softmax-1 away from the cured model brings the dominance back (5.3).",
        f"argmax at least {DOMINANCE:g} times what equal logits give; visible where softmax with LayerNorm has it",
        {"": [_NO_BIASES, _CURED, _WITHOUT["softmax instead of softmax-1"]]},
        again,
    )


def _norms(study: Study) -> list[Claim]:
    def multiple(label: str, layernorm: str, rmsnorm: str) -> Case:
        before, after = means(study, _POOLED, layernorm, rmsnorm)
        return Case(
            _kurtosis(study, layernorm, rmsnorm), after - GAUSSIAN >= 0.75 * (before - GAUSSIAN), before > OUTLIERS
        )

    def single(label: str, rmsnorm: str, one_gain: str) -> Case:
        before, after = means(study, _POOLED, rmsnorm, one_gain)
        largest = {part: means(study, f"max_abs_{part}", rmsnorm, one_gain) for part in ("first", "rest")}
        told = ", ".join(f"largest activation, {part}: {arrow(values)}" for part, values in largest.items())
        text = f"{_kurtosis(study, rmsnorm, one_gain)}, {percent(after / before - 1)}; {told} (paper 629 → 432)"
        return Case(text, 0.2 <= 1 - after / before <= 0.6, before > OUTLIERS)

    def perplexities(label: str, stock: str, *others: str) -> Case:
        values = means(study, "perplexity", stock, *others)
        same, positions = values[1:4], values[4:]
        holds = all(abs(value / values[0] - 1) <= 0.02 for value in same)
        text = f"{arrow(values, _paper('perplexity', stock, *others))}"
        return Case(text, holds and positions[0] < values[1] < positions[1])

    return [
        judge(
            study,
            "RMSNorm with a gain for every channel does not reduce outliers (5.3). Pooled kurtosis, LayerNorm → it:",
            f"at least three quarters of what is above {GAUSSIAN:g} stay; visible where LayerNorm's is above "
            f"{OUTLIERS:g}",
            {"": [_LAYERNORM, _RMSNORM_M]},
            multiple,
        ),
        judge(
            study,
            "One gain for all channels reduces them by about 40% (5.3). Pooled kurtosis, RMSNorm-M → RMSNorm-S:",
            f"kurtosis falls by 20% to 60%; visible where RMSNorm-M's is above {OUTLIERS:g}",
            {"": [_RMSNORM_M, _ADAM]},
            single,
        ),
        judge(
            study,
            "With Adam perplexity stays similar; rotary positions lower it, none raise it (5.3). First row, no biases, "
            "softmax-1, RMSNorm-S, rotary, none:",
            "the first three within 2% of the first row; rotary below the row without biases, none above",
            {"": [_STOCK, _NO_BIASES, _LAYERNORM, _ADAM, _ROTARY, _NO_POSITIONS]},
            perplexities,
        ),
    ]


def _optimizers(study: Study) -> list[Claim]:
    def kurtosis(label: str, adam: str, other: str) -> Case:
        before, after = means(study, _POOLED, adam, other)
        perplexities = means(study, "perplexity", adam, other)
        text = f"{_kurtosis(study, adam, other)}, perplexity {arrow(perplexities, _paper('perplexity', adam, other))}"
        holds = before > after > OUTLIERS if other == _RMSPROP else after <= GAUSSIAN + 0.1 * (before - GAUSSIAN)
        return Case(text, holds, before > OUTLIERS and perplexities[1] <= (1 + _LEARNT) * perplexities[0])

    def perplexity(label: str, *names: str) -> Case:
        adam, momentum, sgd = (study.by_seed(name, "perplexity") for name in names)
        above = [sgd[seed] / max(adam[seed], momentum[seed]) - 1 for seed in sgd if seed in adam and seed in momentum]
        text = arrow(means(study, "perplexity", *names), _paper("perplexity", *names))
        told = f"{text}; without momentum above the higher of the others, by seed: {', '.join(map(percent, above))}"
        return Case(told, min(above, default=0.0) > 0.05, bool(above))

    steps = {_variant(study, _SGD), _variant(study, _ADAM)}
    told = f" SGD has {max(steps) / min(steps):g} times the steps." if min(steps) else ""
    return [
        judge(
            study,
            "It is adaptive optimizers that make outliers: kurtosis 140 with Adam, 70 with RMSProp, about 3 to 5 with "
            f"SGD (4.1, 5.3).{told} Pooled, Adam → it:",
            f"Adam above RMSProp above {OUTLIERS:g}, and SGD has a tenth or less of Adam's excess over {GAUSSIAN:g}; "
            f"visible where Adam's is above {OUTLIERS:g} and the other's perplexity at most {_LEARNT:.0%} above Adam's",
            {
                "RMSProp": [_ADAM, _RMSPROP],
                "SGD with momentum": [_ADAM, _MOMENTUM],
                "SGD without momentum": [_ADAM, _SGD],
            },
            kurtosis,
        ),
        judge(
            study,
            "SGD without momentum has a much higher perplexity (5.3; section 4.1 says so of SGD altogether, but Table "
            "5's lowest is SGD with momentum, at 8 times the steps). Adam → with momentum → without:",
            "more than 5% above both others, in every seed",
            {"": [_ADAM, _MOMENTUM, _SGD]},
            perplexity,
        ),
    ]


def _variant(study: Study, name: str) -> int:
    """Steps of a variant; 0 where the study does not have it."""
    return next((v.config.train.steps for v in study.variants if v.name == name), 0)


def _together(study: Study) -> list[Claim]:
    def gone(label: str, adam: str, cured: str) -> Case:
        values = [study.mean(cured, metric) for metric in _TRIPLE]
        gap = study.mean(cured, "perplexity") / study.mean(adam, "perplexity") - 1
        text = (
            f"{_kurtosis(study, adam, cured)}; first {number(values[0])}, others {number(values[1])}; perplexity "
            f"{change_text(study.pairs(cured, adam, 'perplexity'))} (paper +0.8%)"
        )
        return Case(text, max(values) < NO_OUTLIERS and gap <= EQUAL_PERPLEXITY, study.mean(adam, _POOLED) > OUTLIERS)

    def smaller(label: str, adam: str, cured: str) -> Case:
        parts = [means(study, f"max_abs_{part}", adam, cured) for part in ("first", "rest")]
        text = f"{arrow(parts[0])} first token, {arrow(parts[1])} others (paper 432 → 43.5)"
        return Case(text, all(after < 0.67 * before for before, after in parts))

    def back(label: str, cured: str, without: str) -> Case:
        holds = study.mean(without, _POOLED) > OUTLIERS > study.mean(cured, _POOLED)
        return Case(_kurtosis(study, cured, without), holds, visible)

    visible = bool(study.values(_ADAM, _POOLED)) and study.mean(_ADAM, _POOLED) > OUTLIERS
    seen = f"visible where Adam's is above {OUTLIERS:g}"
    groups: dict[str, Sequence[str]] = {label: [_CURED, name] for label, name in _WITHOUT.items()}
    return [
        judge(
            study,
            "OrthoAdam with softmax-1 and RMSNorm-S has a kurtosis of 3 at Adam's perplexity (5.3). Pooled, Adam → it:",
            f"first, others and pooled below {NO_OUTLIERS:g}, perplexity at most {EQUAL_PERPLEXITY:.0%} above; {seen}",
            {"": [_ADAM, _CURED]},
            gone,
        ),
        judge(
            study,
            "It shrinks the largest activation (5.3).",
            "by a third or more, first token and others",
            {"": [_ADAM, _CURED]},
            smaller,
        ),
        judge(
            study,
            "All three are needed: with one taken away outliers are back (5.3). Pooled kurtosis, all three → one "
            "replaced:",
            f"above {OUTLIERS:g} each, and below with all three; {seen}",
            groups,
            back,
        ),
    ]
