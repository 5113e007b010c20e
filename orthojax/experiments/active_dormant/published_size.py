"""The one-layer model of Active-Dormant Attention Heads at its published size, beside its published first 1,000 steps.

A tenth of the published steps: what two cores train in little more than an hour.
"""

from collections.abc import Callable

from orthojax.experiments.active_dormant.models import RISKS, config
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Table
from orthojax.experiments.results import Results, metric
from orthojax.model import LoadedModel
from orthojax.train import Inputs, read_metrics

STEPS = (0, 100, 200, 300, 500, 1000)
_GAP = "sink_logit_gap_tokens"
SHOWN = {
    "sink_attention": "attention to <s>",
    _GAP: "logit gap, mean over tokens",
    "sink_logit_gap_q10": "10% of tokens",
    "sink_logit_gap_q90": "90% of tokens",
    "value_norm_first": "value norm of <s>",
    "residual_norm_first": "residual norm of <s>",
    RISKS[0]: "backcopy risk (nats)",
}
# One seed; in the order of STEPS, None where the data of the figure were not read off.
PUBLISHED = {
    "sink_attention": (0.0225, 0.027, 0.223, 0.560, 0.648, 0.779),
    _GAP: (-0.12, -0.10, 0.89, 3.46, 5.45, 9.70),
    "sink_logit_gap_q10": (-0.4, -1.2, -1.9, None, 0.4, 4.2),
    "sink_logit_gap_q90": (0.2, 1.1, 4.0, None, 12.0, 14.4),
    "value_norm_first": (5.20, 8.71, 8.74, 5.52, 4.85, 3.51),
    "residual_norm_first": (24.3, 31.1, 28.3, 25.4, 25.4, 27.0),
    RISKS[0]: (4.30, 2.62, 1.05, 0.442, 0.190, 7.5e-3),
}


def _at(name: str, step: int) -> str:
    return f"{name}/step_{step}"


def _by_step(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    lines = {line["step"]: line for line in read_metrics(loaded.source.parents[1] / "metrics.jsonl")}
    found = {_at(name, step): float(lines[step][name]) for name in SHOWN for step in STEPS if name in lines[step]}
    on_progress("steps")
    return Measured(found, {})


BY_STEP = Measure("published_steps", _by_step)


def _table(results: Results) -> Table:
    result = results.first
    rows = []
    for name, words in SHOWN.items():
        rows.append([words, *(result.cell(metric(_at(name, step))) for step in STEPS)])
        rows.append(["paper", *("-" if x is None else f"{x:g}" for x in PUBLISHED[name])])
    return Table("The first 1,000 steps", ["", *(f"step {step:,}" for step in STEPS)], rows)


def _near(name: str, low: float, high: float) -> Claim:
    at, there = _at(name, STEPS[-1]), PUBLISHED[name][-1]
    assert there is not None
    return Claim(f"After 1,000 steps: {SHOWN[name]} as published, {there:g}.", ("softmax",), (at,),
                 lambda of: low <= of.mean(at) <= high, f"{low:g} to {high:g}")  # fmt: skip


CLAIMS = (
    _near("sink_attention", 0.65, 0.9),
    _near(_GAP, 7.0, 13.0),
    _near("value_norm_first", 2.3, 5.3),
    _near("residual_norm_first", 20.0, 34.0),
    _near(RISKS[0], 0.0, 0.05),
)


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Width {c.model.d_model}, {c.train.steps:,} of 10,000 steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens, AdamW at {c.optim.learning_rate:g}; one seed, as in the paper. Its text is "
        "another one, so that marginals and bigrams differ."
    ]


def _variants(scale: str) -> tuple[Variant, ...]:
    changes = {"train__steps": STEPS[-1], "train__probe_steps": STEPS, "train__checkpoint_every_steps": 50}
    changes["train__accumulation_steps"] = 8  # 0.7 of the time on a CPU, whose caches 512 x 256 tokens do not fit
    return (Variant("softmax", "softmax", config(1, published=True, **changes)),)


EXPERIMENT = Experiment(
    name="published_size",
    title="Bigram-Backcopy, one layer at the published size: the first 1,000 steps",
    variants=_variants,
    seeds=(1,),
    about=_about,
    measures=(BY_STEP,),
    tables=(_table,),
    claims=CLAIMS,
)
