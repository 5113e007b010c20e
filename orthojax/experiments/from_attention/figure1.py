"""Figure 1: attention map and hidden states of softmax with Adam and of softmax-1 with OrthoAdam."""

from functools import partial

from orthojax.experiments.from_attention.models import METHOD_LABELS, SCALES, grid, variant_name
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.criteria import (
    DOMINANCE,
    NO_OUTLIERS,
    OUTLIERS,
    chance_of_first,
    gaussian_kurtosis_limit,
)
from orthojax.experiments.reporting.model_pictures import model_pictures
from orthojax.experiments.reporting.page import Claim, Report, verdict
from orthojax.experiments.study.study import Experiment, Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range

MODEL = "gpt2_130m"
VANILLA, CURED = variant_name(MODEL, "vanilla"), variant_name(MODEL, "cured")
_METRICS = {
    "perplexity": "perplexity",
    "first_attention_fraction": "first token gets most attention, fraction",
    "first_attention_mass": "attention mass on the first token",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, others",
    "max_abs_first": "max |x|, first token",
    "max_abs_rest": "max |x|, others",
}
# Section 2.1: pretrained GPT2-Medium on the validation split of C4.
PAPER_FRACTION, PAPER_MASS = 0.76, 0.52


def two_variants(scale: str) -> tuple[Variant, ...]:
    """GPT2 130M, or what stands for it, vanilla and cured, named after their methods alone."""
    return tuple(
        Variant(v.name, METHOD_LABELS[method], v.config)
        for method in ("vanilla", "cured")
        for v in grid(scale, (MODEL,), (method,))
    )


def _claims(study: Study) -> list[Claim]:
    def both(metric: str) -> tuple[str, str]:
        return mean_and_range(study.values(VANILLA, metric)), mean_and_range(study.values(CURED, metric))

    config = study.variants[0].config
    dominance = DOMINANCE * chance_of_first(config.data.sequence_length)
    limit = gaussian_kurtosis_limit(config.model.d_model)
    fraction = study.mean(VANILLA, "first_attention_fraction"), study.mean(CURED, "first_attention_fraction")
    mass, kurtosis = both("first_attention_mass"), (both("kurtosis_first"), both("kurtosis_rest"))
    of_vanilla, of_cured = (
        [study.mean(name, f"kurtosis_{part}") for part in ("first", "rest")] for name in (VANILLA, CURED)
    )
    shown = both("first_attention_fraction")
    at_scale = study.scale == "paper"  # where a phenomenon has to show; a small model may just not have it yet
    return [
        Claim(
            verdict(fraction[0] > dominance, visible=fraction[0] > dominance or at_scale),
            f"With softmax and Adam the first key token dominates. It has the largest weight for {shown[0]} of all "
            f"(query, head) pairs and {mass[0]} of all attention; the paper's GPT2-Medium {PAPER_FRACTION:g} and "
            f"{PAPER_MASS:g} (criterion: the former above {dominance:.2g}, {DOMINANCE:g} times what chance gives; "
            f"visible where it does, or at the paper's scale).",
        ),
        Claim(
            verdict(fraction[1] <= fraction[0] / 2, visible=fraction[0] > dominance),
            f"Softmax-1 eliminates that dominance. Cured, the share of pairs is {shown[1]} and the mass {mass[1]} "
            f"(criterion: at most half the share of pairs; visible where the first token dominates with softmax).",
        ),
        Claim(
            verdict(of_vanilla[1] > OUTLIERS, visible=of_vanilla[1] > OUTLIERS or at_scale),
            f"With softmax and Adam the hidden states have outlier channels. Kurtosis of the first token "
            f"{kurtosis[0][0]}, of others {kurtosis[1][0]} (criterion: of others above {OUTLIERS:g}, where a Gaussian "
            f"has 3; visible where it is, or at the paper's scale).",
        ),
        Claim(
            verdict(of_cured[0] <= limit and of_cured[1] < NO_OUTLIERS, visible=of_vanilla[1] > OUTLIERS),
            f"OrthoAdam and softmax-1 remove them. Kurtosis of the first token {kurtosis[0][1]}, of others "
            f"{kurtosis[1][1]}; perplexity {both('perplexity')[1]} against {both('perplexity')[0]} (criterion: of the "
            f"first token, which is one vector in each layer, at most {limit:.2f}, three standard deviations above "
            f"a Gaussian's; of others below {NO_OUTLIERS:g}; visible where softmax and Adam has more than "
            f"{OUTLIERS:g}).",
        ),
    ]


def report(study: Study) -> Report:
    """Maps of both models and of every given one, and the numbers behind them."""
    return summaries.study_report(
        study,
        "Figure 1: first-token dominance and outlier activations, with and without",
        [
            "The paper shows a pretrained GPT2-Medium above, which --model=NAME=CHECKPOINT adds to these maps, and its "
            "own model with softmax-1 and OrthoAdam below.",
        ],
        claims=[] if study.failures() else _claims(study),
        tables=[
            summaries.metric_table(study, "What the maps show, in numbers", study.variants, _METRICS, rows="variants")
        ],
        pictures=model_pictures(study, study.variants),
    )


EXPERIMENT = Experiment(
    name="figure1",
    title="attention map and hidden states, vanilla and cured",
    scales={scale: partial(two_variants, scale) for scale in SCALES},
    report=report,
    takes_models=True,
)
