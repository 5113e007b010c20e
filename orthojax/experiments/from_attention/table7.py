"""Table 7: attention to the first token and kurtosis of a model before and after fine-tuning on instructions.

It trains nothing: the models are given in pairs, --model=BASE=CHECKPOINT,TUNED=CHECKPOINT, and a pair of orthojax's own
is one run and another that began from it with train.init_from.
"""

from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.from_attention.paper_tables import TABLE_7
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.criteria import DOMINANCE, OUTLIERS, chance_of_first
from orthojax.experiments.reporting.page import Claim, Report, Table, verdict
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.fields import changed_fields
from orthojax.formatting import number

# The paper's four columns, and what it does not print.
_METRICS = {
    "first_attention_fraction": "first token most attended, fraction",
    "first_attention_mass": "attention mass on the first token",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_pooled": "kurtosis, mean over all positions",
}
_MORE = {"kurtosis_rest": "kurtosis, other tokens", "perplexity": "perplexity"}

Pair = tuple[Variant, Variant]
_SAME = 0.05  # a change of at most this fraction leaves a number as it was
_ON_THE_SAME = "and where both have the same data: otherwise model and text change together"


def _pairs(study: Study) -> list[Pair]:
    """The models two by two; an odd one at the end has none."""
    return list(zip(study.variants[::2], study.variants[1::2], strict=False))


def _change(study: Study, pair: Pair, metric: str) -> float:
    """Of a metric by fine-tuning, as a fraction."""
    return study.mean(pair[1].name, metric) / study.mean(pair[0].name, metric) - 1


def _least(variant: Variant) -> float:
    """The fraction of (query, head) pairs from which on the first token dominates."""
    return DOMINANCE * chance_of_first(variant.config.data.sequence_length)


def _tables(study: Study) -> list[Table]:
    columns = [*_METRICS.values(), *_MORE.values()]

    def change(pair: Pair) -> list[str]:
        return [f"{_change(study, pair, metric):+.1%}" for metric in (*_METRICS, *_MORE)]

    printed = [[model, *map(number, metrics.values())] for model, metrics in TABLE_7.items()]
    base, tuned = TABLE_7.values()
    printed.append(["change", *(f"{tuned[metric] / base[metric] - 1:+.1%}" for metric in _METRICS)])
    return [
        summaries.metric_table(study, "The given models", study.variants, _METRICS | _MORE, rows="variants"),
        Table(
            "Change by fine-tuning",
            ["", *columns],
            [[f"{base.label} to {tuned.label}", *change((base, tuned))] for base, tuned in _measured(study)],
        ),
        Table("What Table 7 of the paper prints", ["", *_METRICS.values()], printed),
    ]


def _measured(study: Study) -> list[Pair]:
    return [pair for pair in _pairs(study) if all(study.values(v.name, "kurtosis_pooled") for v in pair)]


def _other_data(pair: Pair) -> list[str]:
    """Fields of the data that the two do not share; with any, they are measured on different text."""
    return sorted(changed_fields(pair[0].config.data, pair[1].config.data))


def _claims(study: Study) -> list[Claim]:
    pairs = _measured(study)
    comparable = [p for p in pairs if not _other_data(p)]
    dominated = [p for p in comparable if study.mean(p[0].name, "first_attention_fraction") >= _least(p[0])]
    peaked = [p for p in comparable if study.mean(p[0].name, "kurtosis_first") > OUTLIERS]
    spiky = [p for p in comparable if study.mean(p[0].name, "kurtosis_pooled") > OUTLIERS]

    def told(metric: str) -> str:
        return "; ".join(
            f"{base.label} {number(study.mean(base.name, metric))}, {tuned.label} "
            f"{number(study.mean(tuned.name, metric))} ({_change(study, (base, tuned), metric):+.1%})"
            for base, tuned in pairs
        )

    def same(pair: Pair, *metrics: str) -> bool:
        return all(abs(_change(study, pair, metric)) <= _SAME for metric in metrics)

    return [
        Claim(
            verdict(
                all(same(p, "first_attention_fraction", "first_attention_mass") for p in dominated),
                visible=bool(dominated),
            ),
            f"Fine-tuning leaves the attention to the first token as it was. Most attended: "
            f"{told('first_attention_fraction')}; mass: {told('first_attention_mass')}. The paper: 95.45% to 95.53%, "
            f"and 73.49% to 70.13% (criterion: both within {_SAME:.0%} of the base model's; visible where the first "
            f"token is most attended by {DOMINANCE:g} times the fraction of pairs that chance gives, or more, in it, "
            f"{_ON_THE_SAME}).",
        ),
        Claim(
            verdict(all(same(p, "kurtosis_first") for p in peaked), visible=bool(peaked)),
            f"It leaves the kurtosis of the first token as it was: {told('kurtosis_first')}. The paper: 1227 to 1228 "
            f"(criterion: within {_SAME:.0%}; visible where the base model's is above {OUTLIERS:g}, {_ON_THE_SAME}).",
        ),
        Claim(
            verdict(all(_change(study, p, "kurtosis_pooled") > _SAME for p in spiky), visible=bool(spiky)),
            f"It raises the mean kurtosis: {told('kurtosis_pooled')}. The paper: 55 to 69 (criterion: by more than "
            f"{_SAME:.0%}; visible where the base model's is above {OUTLIERS:g}, {_ON_THE_SAME}).",
        ),
    ]


def _origins(study: Study) -> list[str]:
    """What each second model began from, by its own config, and on what else than its base it was trained."""
    return [
        f"{tuned.label}: begins from {tuned.config.train.init_from or 'no other model, by its config'}; data that "
        f"differs from {base.label}'s: {', '.join(_other_data((base, tuned))) or 'none'}"
        for base, tuned in _pairs(study)
    ]


def report(study: Study) -> Report:
    """The given models, pair by pair, and whether the second of each is like the first."""
    odd = [f"{study.variants[-1].label} has no second model." for _ in range(len(study.variants) % 2)]
    return summaries.study_report(
        study,
        "Table 7: first-token attention and kurtosis before and after fine-tuning",
        [
            "The given models in their order, two by two: a base model, and the same one fine-tuned. The paper has "
            "Llama-3.1-8B and its Instruct form. Its 'average kurtosis' is here the mean over all positions, the first "
            "among them, of every layer. Each model is measured on the held-out rows of its own data, so where these "
            "differ the change is of model and text together. "
            "One pair is an anecdote: there is no spread.",
            *odd,
        ],
        claims=_claims(study) if _measured(study) else [],
        tables=_tables(study),
        extra_notes=_origins(study),
    )


EXPERIMENT = Experiment(
    name="table7",
    title="given models before and after fine-tuning (--model=BASE=CHECKPOINT,TUNED=CHECKPOINT)",
    scales=dict.fromkeys(SCALES, lambda: ()),
    report=report,
    takes_models=True,
)
