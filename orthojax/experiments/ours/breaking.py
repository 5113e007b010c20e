"""Vanilla and cured in the setting that int8 damages most."""

from orthojax import quant
from orthojax.experiments.base import BREAKING_MODEL, cured
from orthojax.experiments.claims import COARSE, PEAK, Claim, cured_outliers, equivalent, halved, lost
from orthojax.experiments.measures import FOUR_BIT, FOUR_BITS
from orthojax.experiments.study import Study
from orthojax.report.pictures import LOSS, ByStep
from orthojax.report.tables import Columns

BREAKS = Study(
    name="breaks",
    title="Vanilla in the setting that int8 damages most, three seeds, and the cure",
    runs=lambda scale: {"vanilla": BREAKING_MODEL, "cured": cured(BREAKING_MODEL)},
    seeds=(0, 1, 2),
    measures=(FOUR_BITS,),
    note="Repeated passages, rotary positions, swiglu, weight decay 0.5, 8,000 steps of 1,024 tokens. The setting was "
    "chosen on vanilla models of seed 100.",
    columns=["perplexity kurtosis_first kurtosis_rest first_attention_fraction first_attention_mass", PEAK],
    tables=[Columns("Perplexity lost to rounding", [lost(name) for name in (*quant.SETTINGS, *FOUR_BIT)])],
    claims=[
        Claim("Vanilla loses 20% or more at int8 coarse, in every seed.",
              (lost(COARSE)["vanilla"] >= 0.2).in_every_seed()),
        Claim("Cured loses less than 3%, in every seed.", (lost(COARSE)["cured"] < 0.03).in_every_seed(),
              lost(COARSE)["vanilla"] >= 0.05),
        Claim("At 4 bits cured loses less than half of what vanilla loses.",
              lost("w4a4")["cured"] < 0.5 * lost("w4a4")["vanilla"]),
        halved("The cure takes half of the dominance away, or more.", "cured", "vanilla"),
        cured_outliers("The cure leaves no outliers.", "cured", "vanilla"),
        equivalent("Perplexity is the same within 1%.", "cured", "vanilla"),
    ],
    headlines=[(metric, "vanilla", "cured") for metric in (lost(COARSE), "kurtosis_first", "perplexity")],
    pictures=[ByStep("first_attention_fraction", name="dominance"), ByStep("kurtosis_first kurtosis_rest",
              y_scale="log", name="kurtosis"), LOSS],
)  # fmt: skip
