"""First-token dominance on two cores: text with repeated passages, ordinary text, and what removes the dominance."""

from orthojax.config import replace
from orthojax.experiments import claims as c
from orthojax.experiments.base import METHODS, REPEATED_MODEL
from orthojax.experiments.claims import Claim
from orthojax.experiments.measures import FOUR_BIT, FOUR_BITS
from orthojax.experiments.study import Study, grid
from orthojax.report.pictures import ByStep, Maps
from orthojax.report.tables import Columns, Paired

_MEASURED = ["perplexity kurtosis_first kurtosis_rest max_abs_first first_attention_fraction first_attention_mass",
             "sink_rate", c.DRAIN, c.PEAK]  # fmt: skip
_DRAINED = 0.5
_BY_STEP = (ByStep("first_attention_fraction", name="dominance"),
            ByStep("kurtosis_first kurtosis_rest", y_scale="log", name="kurtosis"))  # fmt: skip
_HEADLINES = ("first_attention_fraction", "kurtosis_first", "perplexity")


def _change_from(vanilla: str, rows: str) -> Paired:
    changes, differences = "perplexity kurtosis_first kurtosis_rest", "first_attention_fraction first_attention_mass"
    return Paired("Change from softmax + Adam, paired by seed", vanilla, rows, changes, differences)


# What each method does to dominance, drains, outliers, perplexity and damage, in every case.
_V, _S, _O, _C = "vanilla_*", "softmax1_*", "orthoadam_*", "cured_*"
_HAS_DRAIN = c.DRAIN[_V] < _DRAINED
_DOMINATES = Claim("The first token dominates when text repeats itself.", c.dominated(_V))
_BY_METHOD = [
    c.halved("Softmax-1 alone takes away half of the dominance, or more.", _S, _V),
    Claim("OrthoAdam alone leaves it.", c.excess_left(_O, _V) >= 0.5, c.dominated(_V)),
    c.halved("Both together take away half of it, or more.", _C, _V),
    Claim("The values of the first token are drained under softmax.", _HAS_DRAIN, c.dominated(_V)),
    Claim("Softmax-1 keeps them.", c.DRAIN[_S] >= _DRAINED, _HAS_DRAIN),
    c.cured_outliers("Both together leave no outliers.", _C, _V),
    c.no_perplexity_lost("They cost no perplexity.", _C, _V),
    *(c.loses_less(setting, f"They lose less at {setting}.", _C, _V) for setting in (c.COARSE, c.MODERATE, c.INT4)),
]

REPEATED_PASSAGES = Study(
    name="repeated_passages",
    title="Text with repeated passages: dominance, drains, outliers and damage; four methods, ReLU, SGD",
    runs=lambda scale: {
        **grid(REPEATED_MODEL, METHODS, {"64_bos": {}}),
        "relu": replace(REPEATED_MODEL, {"model.normalizer": "relu"}),
        "sgd": replace(
            REPEATED_MODEL, {"optim.optimizer": "sgd", "optim.momentum": 0.9, "optim.learning_rate": 0.3}
        ),
    },
    seeds=(5, 6, 7, 8, 9),
    note="The main job's setting: passages of 40 to 110 characters, each written two or three times, 2,000 steps. ReLU "
    "and SGD are mitigations that Active-Dormant Attention Heads names (section 3). Criteria were committed before any "
    "run of these seeds.",
    columns=_MEASURED,
    tables=[Columns("Perplexity lost to quantisation", [c.lost(c.MODERATE), c.lost(c.COARSE), c.lost(c.INT4)]),
            _change_from("vanilla_64_bos", "*")],
    claims=[
        _DOMINATES,
        *_BY_METHOD,
        Claim("ReLU attention has neither dominance nor drain.",
              (c.excess_left("relu", "vanilla_64_bos") <= 0.5) & (c.DRAIN["relu"] >= _DRAINED),
              c.dominated("vanilla_64_bos")),
        Claim("SGD has no outliers.", c.worst("sgd") < c.NO_OUTLIERS,
              c.outliers("vanilla_64_bos") & (c.PPL["sgd"] < 1.1 * c.PPL["vanilla_64_bos"])),
    ],
    headlines=[(metric, "vanilla_64_bos", "cured_64_bos") for metric in _HEADLINES],
    pictures=[*_BY_STEP, Maps("vanilla_64_bos cured_64_bos")],
)  # fmt: skip


_ROUNDED = [c.lost(setting) for setting in (c.MODERATE, c.COARSE, c.INT4, *FOUR_BIT)]
_OUTPUT = replace(REPEATED_MODEL, {"optim.rotation.axes": "output"})
_D_MODEL = {"d_model": METHODS["cured"] | {"optim.rotation.axes": "d_model"}}
_SHORT, _LONG = "vanilla_64_bos_2000", "vanilla_64_bos_6000"
REPEATED_LONGER = Study(
    name="repeated_longer",
    title="Repeated passages, three times the steps: dominance, drains, outliers, damage; which part removes what",
    runs=lambda scale: {
        **grid(_OUTPUT, {name: METHODS[name] for name in ("vanilla", "cured")}, {"64_bos_2000": {}}),
        **grid(_OUTPUT, METHODS | _D_MODEL, {"64_bos_6000": {"train.steps": 6000}}),
    },
    seeds=(1, 2, 3, 4, 5),
    measures=(FOUR_BITS,),
    note="6,000 steps, and a pair of 2,000. OrthoAdam rotates the output axes, in `d_model` the d_model axes. "
    "Criteria were committed before any of these runs but seeds 1 and 2 of 2,000 steps; each part alone joined when "
    "seed 1 of vanilla and cured had run, the d_model axes when all others had.",
    columns=_MEASURED,
    tables=[Columns("Perplexity lost to rounding", _ROUNDED),
            _change_from("vanilla_*", "softmax1_* orthoadam_* cured_* d_model_*")],
    claims=[
        _DOMINATES,
        Claim("It dominates more after three times the steps.", c.FRACTION[_LONG] > c.FRACTION[_SHORT]),
        Claim("The cure leaves less of it after three times the steps.",
              c.excess_left("cured_64_bos_6000", _LONG) < c.excess_left("cured_64_bos_2000", _SHORT)),
        *_BY_METHOD,
        *(c.loses_less(setting, f"They lose less at {setting}.", _C, _V) for setting in FOUR_BIT),
        c.halved("Both together take away half of the dominance with the d_model axes rotated.", "d_model_*",
                 "vanilla_*"),
        c.cured_outliers("With the d_model axes rotated they leave no outliers.", "d_model_*", "vanilla_*"),
        c.no_perplexity_lost("With the d_model axes rotated they cost no perplexity.", "d_model_*", "vanilla_*"),
    ],
    headlines=[(metric, _LONG, "d_model_64_bos_6000") for metric in _HEADLINES],
    pictures=[*_BY_STEP, Maps("vanilla_64_bos_6000 cured_64_bos_6000")],
)  # fmt: skip

_PREFERRED = c.dominated("vanilla").in_every_seed()
ORDINARY_TEXT = Study(
    name="ordinary_text",
    title="Ordinary text with <s>: attention to the first token, and which part of the cure takes it away",
    runs=lambda scale: grid(replace(REPEATED_MODEL, {"data.repeated_share": 0.0}), METHODS),
    seeds=(10, 11, 12, 13, 14),
    note="The main job on text without repetition. Criteria were committed before these seeds were run; each part "
    "alone, with its claims, was added when the other two had run and before they had.",
    columns=_MEASURED,
    tables=[Columns("Perplexity lost to quantisation", [c.lost(c.MODERATE), c.lost(c.COARSE), c.lost(c.INT4)]),
            _change_from("vanilla", "*")],
    claims=[
        Claim("The first token is attended more than by chance on ordinary text as well.", _PREFERRED),
        Claim("The cure takes that away.", c.excess_left("cured", "vanilla") <= 0.25, _PREFERRED),
        c.cured_outliers("It leaves no outliers.", "cured", "vanilla"),
        c.no_perplexity_lost("It costs no perplexity.", "cured", "vanilla"),
        Claim("Softmax-1 alone takes it away as well.", c.excess_left("softmax1", "vanilla") <= 0.25, _PREFERRED),
        Claim("OrthoAdam alone leaves it.", c.excess_left("orthoadam", "vanilla") >= 0.5, _PREFERRED),
        Claim("Softmax-1 alone leaves the outliers.", c.outliers("softmax1"), c.outliers("vanilla")),
        c.cured_outliers("OrthoAdam alone leaves no outliers.", "orthoadam", "vanilla"),
        c.no_perplexity_lost("Softmax-1 alone costs no perplexity.", "softmax1", "vanilla"),
        c.no_perplexity_lost("OrthoAdam alone costs no perplexity.", "orthoadam", "vanilla"),
    ],
    pictures=[*_BY_STEP, Maps()],
)  # fmt: skip
