"""Table 7: attention to the first token and kurtosis of a model before and after fine-tuning on instructions.

It trains nothing: the models are given in pairs, --model=BASE=CHECKPOINT,TUNED=CHECKPOINT, and a pair of orthojax's own
is one run and another that was initialised from it with train.init_from.
"""

import dataclasses
from collections.abc import Callable, Sequence

from orthojax.config import DataConfig, changed_fields
from orthojax.experiments.claims import DOMINANCE, OUTLIERS, Claim, Revision, dominated, not_measured
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.from_attention.paper_tables import TABLE_7
from orthojax.experiments.results import Result, Results, metric
from orthojax.experiments.tables import MetricTable, PairedTable, PrintedTable

_PRINTED = (
    metric("first_attention_fraction", "first token most attended, fraction"),
    metric("first_attention_mass"),
    metric("kurtosis_first"),
    metric("kurtosis_pooled", "kurtosis, mean over all positions"),
)
_METRICS = (*_PRINTED, "kurtosis_rest", "perplexity")

_SAME = 0.05  # a number that changes by at most this fraction is left as it was
_SAME_DATA = "and where both are measured on the same data: otherwise model and text change together"


def _pairs(results: Results) -> dict[str, dict[str, str]]:
    """`Experiment.groups`: the models two by two; the last of an odd number has no partner."""
    models = list(results)
    return {
        f"{base.label} → {tuned.label}": {"base": base.name, "tuned": tuned.name}
        for base, tuned in zip(models[::2], models[1::2], strict=False)
    }


def _other_text(base: DataConfig, tuned: DataConfig) -> list[str]:
    """Fields by which held-out rows differ, which do not depend on the seed."""
    return sorted({*changed_fields(base, tuned)} - {"seed"})


def _on_the_text_of_its_base(models: Sequence[Variant]) -> list[Variant]:
    """`Experiment.as_measured`: otherwise model and text would change together."""
    measured = list(models)
    for i, (base, tuned) in enumerate(zip(models[::2], models[1::2], strict=False)):
        if _other_text(base.config.data, tuned.config.data) or base.config.eval != tuned.config.eval:
            measured[2 * i + 1] = dataclasses.replace(tuned, measured_on=base.config)
    return measured


def _change(metric: str, base: Result, tuned: Result) -> float:
    return tuned[metric] / base[metric] - 1


def _other_data(base: Result, tuned: Result) -> list[str]:
    """Fields of the data in which the two were measured on different text."""
    return _other_text(base.data, tuned.data)


def _changed_text(criterion: str, testable: Callable[..., bool]) -> Revision:
    return Revision("the pair was measured on different texts", {"testable": testable, "criterion": criterion})


_LEAVES_KURTOSIS = f"within {_SAME:.0%}; testable where the base model's is above {OUTLIERS:g}"
_RAISES_KURTOSIS = f"by more than {_SAME:.0%}; testable where the base model's is above {OUTLIERS:g}"
_LEAVES_ATTENTION = (
    f"both within {_SAME:.0%} of the base model's; testable where in it the first token is the most attended "
    f"{DOMINANCE:g} times as often as by chance, or more"
)
CLAIMS = (
    Claim("Fine-tuning leaves the attention to the first token as it was. The paper: most attended 95.45% → 95.53%, "
          "mass 73.49% → 70.13%.", ("base", "tuned"), _PRINTED[:2],
          lambda *of: all(abs(_change(f"first_attention_{x}", *of)) <= _SAME for x in ("fraction", "mass")),
          f"{_LEAVES_ATTENTION}, {_SAME_DATA}", lambda b, t: not _other_data(b, t) and dominated(b),
          revised=_changed_text(_LEAVES_ATTENTION, dominated)),
    Claim("It leaves the kurtosis of the first token as it was. The paper: 1227 → 1228.", ("base", "tuned"),
          ("kurtosis_first",),
          lambda *of: abs(_change("kurtosis_first", *of)) <= _SAME,
          f"{_LEAVES_KURTOSIS}, {_SAME_DATA}", lambda b, t: not _other_data(b, t) and b.kurtosis_first > OUTLIERS,
          revised=_changed_text(_LEAVES_KURTOSIS, lambda b, t: b.kurtosis_first > OUTLIERS)),
    Claim("It raises the mean kurtosis. The paper: 55 → 69.", ("base", "tuned"), _PRINTED[3:],
          lambda *of: _change("kurtosis_pooled", *of) > _SAME,
          f"{_RAISES_KURTOSIS}, {_SAME_DATA}", lambda b, t: not _other_data(b, t) and b.kurtosis_pooled > OUTLIERS,
          revised=_changed_text(_RAISES_KURTOSIS, lambda b, t: b.kurtosis_pooled > OUTLIERS)),
    not_measured("Popular large language models attend most to the first token in 98% of attention heads (abstract; "
                 "introduction: 'up to 98% of the time').", "no such model is at hand, and the paper does not say "
                 "which has 98%: Llama-3.1-8B, the largest number that it prints, has 95.45% and 95.53% of (query, "
                 "head) pairs (appendix D)"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    models = list(results)
    same = not any(_other_data(results[of["base"]], results[of["tuned"]]) for of in _pairs(results).values())
    rows = (
        "Both are measured on the rows that the base model's own run holds out."
        if same
        else "Each model is measured on the held-out rows of its own data, so where these differ model and text change "
        "together."
    )
    return [
        "The given models in their order, two by two: a base model, and the same one fine-tuned. The paper has "
        "Llama-3.1-8B and its Instruct form. Its 'average kurtosis' is here the mean over all positions, the first "
        f"among them, of every layer. {rows}{' One pair is an anecdote: there is no spread.' * (len(models) < 4)}",
        *([f"{models[-1].label} has no second model."] if len(models) % 2 else []),
    ]


def _notes(results: Results) -> list[str]:
    """What each second model was initialised from, and on what other data it was trained, by its own config."""
    notes = []
    for roles in _pairs(results).values():
        base, tuned = results[roles["base"]], results[roles["tuned"]]
        origin = tuned.config.train.init_from or "no other model, by its config"
        differs = ", ".join(sorted(changed_fields(base.config.data, tuned.config.data))) or "none"
        notes.append(
            f"{tuned.label}: initialised from {origin}; trained on data that differs from {base.label}'s in: {differs}"
        )
    return notes


EXPERIMENT = Experiment(
    name="table7",
    title="Table 7: given models before and after fine-tuning (--model=BASE=CHECKPOINT,TUNED=CHECKPOINT)",
    variants=lambda scale: (),
    scales=SCALES,
    about=_about,
    groups=_pairs,
    tables=(
        MetricTable("The given models", _METRICS),
        PairedTable("Change by fine-tuning", "base", changes=_METRICS),
        PrintedTable("What Table 7 of the paper prints", _PRINTED, TABLE_7),
    ),
    claims=CLAIMS,
    takes_models=True,
    as_measured=_on_the_text_of_its_base,
    notes=_notes,
)
