"""The cure of From Attention to Activation (arXiv 2410.17174) on the task of Active-Dormant Attention Heads.

Neither paper has this. Softmax-n with n = T, whose null starts with half of the weight or more, was added when one seed
of the others was there: `softmax1_sinks` says why it should do what softmax-1 does not.
"""

from orthojax import quant
from orthojax.config import Config
from orthojax.experiments.active_dormant.model_measures import OUTLIERS
from orthojax.experiments.active_dormant.runs import (
    BIGRAM,
    COPY,
    DRAIN,
    ORTHOADAM,
    PEAK,
    RISKS,
    SCALES,
    SEEDS,
    SINK,
    backcopy,
)
from orthojax.experiments.claims import FIRST, FRACTION, NO_OUTLIERS, REST, Claim, Expr, Metric, lost
from orthojax.experiments.cure import OUTCOME
from orthojax.experiments.pictures import ByStep
from orthojax.experiments.study import Study, grid
from orthojax.experiments.tables import Columns, Paired

_METHODS = ("softmax1", "orthoadam", "cured", "softmaxn", "curedn")
_V = "vanilla_*"
_SETTINGS = tuple(quant.SETTINGS)
_WORST = Metric("worst quantised perplexity over float32's",
                lambda of: max(of[f"perplexity_{name}"] for name in _SETTINGS) / of["perplexity"])  # fmt: skip
_ADDED = "when one seed was there"


def _runs(scale: str) -> dict[str, Config]:
    base = backcopy(scale)
    softmax1 = {"model.normalizer": "softmax1"}
    softmax_n = {"model.normalizer": "softmax_n", "model.normalizer_n": float(base.data.sequence_length)}
    return grid(
        base,
        {"": {}},
        {"vanilla": {}, "softmax1": softmax1, "orthoadam": ORTHOADAM, "cured": softmax1 | ORTHOADAM,
         "softmaxn": softmax_n, "curedn": softmax_n | ORTHOADAM},
        {str(depth): {"model.num_layers": depth} for depth in (1, 2, 3)},
        {"layernorm": {}, "rmsnorm_single": {"model.norm": "rmsnorm_single"}},
    )  # fmt: skip


def _removes(method: str) -> list[Claim]:
    """Returns the claims that a method removes what vanilla has in every seed: sink, drain and peak."""

    def claim(what: str, removed: Expr, present: Expr) -> Claim:
        return Claim(f"{method} removes the {what}.", removed.in_every_seed(), present.in_every_seed())

    of = f"{method}_*"
    return [
        claim("sink", SINK[of] < 0.2, SINK[_V] >= 0.2),
        claim("value drain", DRAIN[of] > 0.5, DRAIN[_V] <= 0.5),
        claim("residual-state peak", PEAK[of] < 2, PEAK[_V] >= 2),
    ]


BACKCOPY_CURE = Study(
    name="backcopy_cure",
    title="Bigram-Backcopy under the cure: softmax-1 and OrthoAdam against sinks, drains and peaks, by depth and norm",
    runs=_runs,
    scales=SCALES,
    seeds=SEEDS,
    measures=(OUTLIERS,),
    note="cured is softmax-1 with OrthoAdam, whose Haar bases differ by seed; softmaxn and curedn have softmax-n "
    "instead, with n the length of a sequence. Names give method, layers and norm. A phenomenon counts as there if it "
    "is in one layer.",
    columns=[SINK, "null_mass", DRAIN, PEAK, *RISKS, "perplexity"],
    tables=[
        Columns("The measures of From Attention to Activation", OUTCOME),
        Columns("Perplexity lost to quantisation", [lost(name) for name in _SETTINGS]),
        *(Paired(f"Change from vanilla, paired by seed: {method}", _V, f"{method}_*", "kurtosis_first kurtosis_rest",
                 [SINK, DRAIN, PEAK, *RISKS, FRACTION]) for method in ("cured", "curedn")),
    ],
    claims=[
        *(claim for method in _METHODS for claim in _removes(method)),
        *(Claim(f"{method} still copies.", COPY[f"{method}_*"] < 0.01, COPY[_V] < 0.01) for method in _METHODS),
        *(Claim(f"{method} costs nothing on the bigram.", BIGRAM[f"{method}_*"] <= BIGRAM[_V] + 0.005)
          for method in _METHODS),
        *(Claim(f"{method} leaves no outlier channels at {words}.",
                (kurtosis[f"{method}_*"] < NO_OUTLIERS).in_every_seed(), (kurtosis[_V] > NO_OUTLIERS).in_every_seed(),
                added=_ADDED)
          for words, kurtosis in {"other tokens": REST, "<s>": FIRST}.items()
          for method in ("orthoadam", "cured", "curedn")),
        *(Claim(f"{method} lowers how often the first token gets most attention, to less than half.",
                FRACTION[f"{method}_*"] < 0.5 * FRACTION[_V], added=_ADDED)
          for method in ("softmax1", "cured", "softmaxn", "curedn")),
        Claim("No quantisation setting costs softmax + Adam 1% of perplexity.", (_WORST[_V] < 1.01).in_every_seed(),
              added=_ADDED),
    ],
    pictures=[
        ByStep("sink_attention_rest", "*_3_layernorm", x_scale="log", name="sink"),
        ByStep("residual_peak_ratio/layer_0", "*_3_layernorm", "log", "log", name="peak"),
    ],
)  # fmt: skip
