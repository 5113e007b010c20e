"""Table 6: longer training sequences, vanilla and cured, quantised; claims of 5.3 and appendix C."""

import numpy as np

from orthojax.config import replace
from orthojax.experiments import drawing
from orthojax.experiments.claims import EQUAL_PERPLEXITY, PPL, Claim, Revision
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention.models import LENGTHS, METHOD_LABELS, MODELS, RUNS, SCALES, about, stand_in
from orthojax.experiments.from_attention.paper_configs import METHODS
from orthojax.experiments.from_attention.paper_tables import TABLE_3, TABLE_6
from orthojax.experiments.labels import LABELS
from orthojax.experiments.page import Picture
from orthojax.experiments.quantization import (
    COARSE,
    INT8,
    PER_TOKEN,
    about_int8,
    loses_less,
    seen_in_either,
    tables,
)
from orthojax.experiments.results import Results, penalty

_SIZES = ("gpt2_60m", "gpt2_130m")
_PAIR = ("vanilla", "cured")
_COST = 0.02  # a perplexity that is at most this fraction above another costs nothing


def _name(model: str, length: int, method: str) -> str:
    return f"{model}_{length}_{method}"


def variants(scale: str) -> tuple[Variant, ...]:
    """Two sizes x three lengths x {vanilla, cured}; the runs of one of the lengths are those of Table 2."""
    return tuple(
        Variant(
            _name(model, length, method),
            f"{stand_in(model, scale)}, {length} tokens, {METHOD_LABELS[method]}",
            replace(RUNS[scale](model, length), METHODS[method]),
        )
        for model in _SIZES
        for length in LENGTHS[scale]
        for method in _PAIR
    )


def _paper(scale: str) -> dict[str, dict[str, float]]:
    """Its 256 tokens stand in Table 3."""
    printed = {}
    for model in _SIZES:
        for ours, theirs in zip(LENGTHS[scale], LENGTHS["paper"], strict=True):
            for method in _PAIR:
                shortest = {key: TABLE_3[MODELS[model], method][key] for key in ("perplexity", *INT8)}
                size = model.removeprefix("gpt2_")
                printed[_name(model, ours, method)] = TABLE_6.get((size, theirs, method), shortest)
    return printed


def _by_length(results: Results) -> dict[str, dict[str, str]]:
    """`Experiment.groups`: model and length -> method -> variant name."""
    return {
        f"{stand_in(model, results.scale)}, {length} tokens": {method: _name(model, length, method) for method in _PAIR}
        for model in _SIZES
        for length in LENGTHS[results.scale]
    }


def _ends(results: Results) -> dict[str, list[str]]:
    """For `Claim.of`: model -> vanilla and cured at the shortest length, then at the longest."""
    shortest, *_, longest = LENGTHS[results.scale]
    return {
        stand_in(model, results.scale): [
            _name(model, length, method) for method in _PAIR for length in (shortest, longest)
        ]
        for model in _SIZES
    }


_SMALLER = "cured loses the smaller fraction"
CLAIMS = (
    Claim("Longer sequences cost a cured model nothing (appendix C: +1.3% and +0.4%). Vanilla at the shortest → "
          "longest → cured at the shortest → longest:", _ends, (PPL,),
          lambda v_short, v_long, short, long: long.perplexity <= (1 + _COST) * short.perplexity,
          f"cured at the longest at most {_COST:.0%} above the shortest; testable where vanilla is not more than "
          f"{_COST:.0%} below, as the longer rows of a step are more tokens",
          lambda v_short, v_long, short, long: v_long.perplexity >= (1 - _COST) * v_short.perplexity,
          revised=Revision("where vanilla gains as much from more tokens, that cured does says nothing; changed when "
                           "runs of Table 2, which these share, were known",
                           {"testable": None,
                            "criterion": f"cured at the longest at most {_COST:.0%} above the shortest"})),
    Claim("Cured is not worse than vanilla at any length, and better at int8 coarse.", _PAIR, (PPL, COARSE),
          lambda v, c: c.perplexity <= (1 + EQUAL_PERPLEXITY) * v.perplexity and c[COARSE] < v[COARSE],
          f"at full precision at most {EQUAL_PERPLEXITY:.0%} above, at coarse below, at every length"),
    *(
        loses_less(
            setting,
            f"At every length cured loses less to {LABELS[setting]}.",
            _SMALLER,
            seen_in_either(setting, _SMALLER),
        )
        for setting in INT8
    ),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    lengths = ", ".join(map(str, LENGTHS[results.scale]))
    stand_ins = "" if results.scale == "paper" else f" Lengths of {lengths} tokens stand for 256, 512 and 1,024."
    return [
        about(results),
        f"A step has the same number of sequences at every length, so longer ones are also more tokens.{stand_ins} Two "
        "misprints are corrected in the paper's columns: the cured 60M rows of 256 and 512 tokens stand in each "
        "other's place, and the cured 130M one of 1,024 tokens has 23.87 for 22.87. Of its differences one pair is "
        "reversed, too (0.06 and 0.47); those shown are computed from its perplexities.",
        about_int8(results),
    ]


def _picture(results: Results) -> list[Picture]:
    lengths = LENGTHS[results.scale]
    panels = {}
    for model in _SIZES:
        lost = {m: [results[_name(model, length, m)].values(penalty(COARSE)) for length in lengths] for m in _PAIR}
        curves = {METHOD_LABELS[method]: (lengths, 100 * np.array(of).T) for method, of in lost.items()}
        panels[stand_in(model, results.scale)] = curves, {}
    figure = drawing.panels(
        panels, x_label="tokens of a sequence", y_label="perplexity lost at int8 coarse, %", integer_x=True
    )
    return [Picture("coarse_by_length", "Perplexity lost at int8 coarse by the length of training sequences.", figure)]


EXPERIMENT = Experiment(
    name="table6",
    title="Table 6: longer training sequences: two sizes x three lengths, vanilla and cured, quantised",
    variants=variants,
    scales=SCALES,
    about=_about,
    groups=_by_length,
    paper=_paper,
    tables=tables((*INT8, PER_TOKEN)),
    claims=CLAIMS,
    pictures=(_picture,),
)
