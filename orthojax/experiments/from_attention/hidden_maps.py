"""Figures 27 to 40: hidden states and attention maps of models, mean over layers and three single layers."""

from functools import partial

import numpy as np

from orthojax.experiments.from_attention.figure1 import CURED, VANILLA, two_variants
from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.criteria import DOMINANCE, OUTLIERS, chance_of_first
from orthojax.experiments.reporting.model_pictures import draw_attention, draw_hidden, example_of
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.study.channel_overlap import CHANNEL_OVERLAP, SEQUENCES
from orthojax.experiments.study.example import PANELS
from orthojax.experiments.study.study import Experiment, Study
from orthojax.formatting import mean_and_range as spread
from orthojax.formatting import number

CHANNELS = 16  # shown
_SAME = 0.8  # an overlap of at least this is 'the same channels'
_BEYOND = 0.1  # and this much more than the residual stream gives alone, which every layer reads and adds to
_OVERLAPS = {"between_sequences": "input", "between_positions": "position", "between_layers": "layer"}
_SETS = {"largest_channel": "the largest", "largest_channels": "a 32nd of all"}


def largest_channels(hidden: np.ndarray, count: int) -> np.ndarray:
    """The channels of the largest values at any position of the first panel, in increasing order.

    Args:
      hidden: |hidden state| of `PANELS`, [4, T, D].
      count: How many at most.
    """
    return np.sort(np.argsort(-hidden[0].max(axis=0), kind="stable")[:count])


def _hidden_pictures(study: Study) -> list[Picture]:
    pictures = []
    for variant in summaries.finished(study, study.variants):
        hidden = example_of(study, variant)["hidden"]
        channels = largest_channels(hidden, CHANNELS)
        caption = (
            f"{variant.label}: |hidden state| of one held-out sequence in the {len(channels)} channels that have the "
            f"largest values, of {hidden.shape[-1]}."
        )
        panels = dict(zip(PANELS, hidden[:, :, channels], strict=True))
        pictures.append(Picture(f"hidden_{variant.name}", caption, draw_hidden(panels, channels.tolist()), "png"))
    return pictures


def _attention_pictures(study: Study) -> list[Picture]:
    pictures = []
    for variant in summaries.finished(study, study.variants):
        panels = dict(zip(PANELS, example_of(study, variant)["attention"], strict=True))
        caption = f"{variant.label}: attention on one held-out sequence, mean over heads."
        pictures.append(Picture(f"attention_{variant.name}", caption, draw_attention(panels), "png"))
    return pictures


def _overlap_table(study: Study) -> Table:
    rows = {
        f"{sets}_{key}": f"{words}, {key.replace('_', ' ')}"
        for sets, words in _SETS.items()
        for key in (*_OVERLAPS, "by_chance")
    }
    rows["kurtosis_rest"] = "kurtosis, tokens but the first"
    return summaries.metric_table(study, "Overlap of the largest channels", study.variants, rows)


def _overlap_claims(study: Study) -> list[Claim]:
    """'The same feature channels always exhibit outlier activations' (section 2.2), of softmax and Adam."""
    kurtosis, claims = study.mean(VANILLA, "kurtosis_rest"), []
    for key, what in _OVERLAPS.items():
        overlaps = [[study.mean(v, f"{sets}_{key}") for v in (VANILLA, CURED)] for sets in _SETS]
        holds = any(overlap >= max(_SAME, without + _BEYOND) for overlap, without in overlaps)
        below = any(without < _SAME for _, without in overlaps)
        shown = "; ".join(
            f"{v.label} "
            + ", ".join(f"{spread(study.values(v.name, f'{sets}_{key}'))} ({words})" for sets, words in _SETS.items())
            for v in study.variants
        )
        claims.append(
            Claim(
                verdict(holds, visible=kurtosis > OUTLIERS and below),
                f"The same channels are the outliers for every {what}. Overlap {key.replace('_', ' ')}: {shown} "
                f"(criterion: for one of the two sizes at least {_SAME:g} with softmax and Adam, and at least "
                f"{_BEYOND:g} more than softmax-1 with OrthoAdam has at the same size: that model has no outliers to "
                f"share, so its overlap is what the residual stream alone gives; visible where the kurtosis of the "
                f"former's tokens but the first, {kurtosis:.1f}, is above {OUTLIERS:g}, and where the latter's overlap "
                f"is below {_SAME:g} for one size or both).",
            )
        )
    return claims


def hidden_report(study: Study) -> Report:
    """Maps of hidden states, and whether the same channels stick out everywhere."""
    return summaries.study_report(
        study,
        "Figures 27 to 33: hidden states",
        [
            "The paper shows pretrained models here; --model=NAME=CHECKPOINT adds any. Without one the report is of "
            "GPT2 130M, or of what stands for it at this scale.",
            f"The largest channels of a sequence and a layer are those with the largest mean |hidden state| over "
            f"positions, those of a position have the largest |hidden state|. Overlap is the share that two such sets "
            f"have in common, mean over all pairs: of up to {SEQUENCES} held-out sequences in the same layer, of the "
            f"positions of a sequence, and of the layers of a sequence. Sets of two sizes: the largest channel alone, "
            f"which several outliers may be in turns, and a 32nd of all channels, most of which are ordinary where "
            f"there are fewer outliers.",
        ],
        claims=[] if study.failures() else _overlap_claims(study),
        tables=[_overlap_table(study)],
        pictures=_hidden_pictures(study),
    )


def _attention_table(study: Study) -> Table:
    rows = []
    for variant in study.variants:
        layers = study.by_layer(variant.name, "first_attention_mass")
        shown = ", ".join(number(float(value)) for value in layers.mean(0)) if layers.size else "failed"
        means = [spread(study.values(variant.name, f"first_attention_{key}")) for key in ("fraction", "mass")]
        rows.append([variant.label, *means, shown])
    columns = ["fraction of pairs", "mass", "mass by layer, from the first"]
    return Table("Attention on the first token", ["", *columns], rows)


def _attention_claims(study: Study) -> list[Claim]:
    """'Generally after the first or second layer, first token attention dominance is highly established' (K)."""
    mass = {name: study.by_layer(name, "first_attention_mass").mean(0) for name in (VANILLA, CURED)}
    dominance = DOMINANCE * chance_of_first(study.variants[0].config.data.sequence_length)
    largest = float(mass[VANILLA].max())
    shown = {name: ", ".join(number(float(value)) for value in values) for name, values in mass.items()}
    visible = largest > dominance
    return [
        Claim(
            verdict(bool((mass[VANILLA][2:] >= largest / 2).all()), visible=visible),
            f"With softmax and Adam dominance is established after the first or second layer and persists. Mass on "
            f"the first token by layer: {shown[VANILLA]} (criterion: from the third layer on no layer has less than "
            f"half of the largest; visible where that is above {dominance:.2g}, {DOMINANCE:g} times what uniform "
            f"attention gives).",
        ),
        Claim(
            verdict(bool(mass[CURED].max() <= largest / 2), visible=visible),
            f"With softmax-1 and OrthoAdam no layer has it. Mass by layer: {shown[CURED]} (criterion: at most half of "
            f"the largest with softmax and Adam; visible as above).",
        ),
    ]


def attention_report(study: Study) -> Report:
    """Attention maps, and in which layers the first token dominates."""
    return summaries.study_report(
        study,
        "Figures 34 to 40: attention maps",
        [
            "The paper shows pretrained models here; --model=NAME=CHECKPOINT adds any. Without one the report is of "
            "GPT2 130M, or of what stands for it at this scale.",
        ],
        claims=[] if study.failures() else _attention_claims(study),
        tables=[_attention_table(study)],
        pictures=_attention_pictures(study),
    )


HIDDEN_STATES = Experiment(
    name="figure27",
    title="hidden states in the channels of the largest values; whether these are the same everywhere",
    scales={scale: partial(two_variants, scale) for scale in SCALES},
    report=hidden_report,
    also=tuple(f"figure{n}" for n in range(28, 34)),
    measures=(CHANNEL_OVERLAP,),
    takes_models=True,
)
ATTENTION_MAPS = Experiment(
    name="figure34",
    title="attention maps, mean over layers and three single layers",
    scales={scale: partial(two_variants, scale) for scale in SCALES},
    report=attention_report,
    also=tuple(f"figure{n}" for n in range(35, 41)),
    takes_models=True,
)
