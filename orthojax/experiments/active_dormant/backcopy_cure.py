"""Whether the cure of From Attention to Activation removes sinks, drains and peaks on Bigram-Backcopy.

Softmax-1 and OrthoAdam (arXiv 2410.17174), alone and together, on the task of Active-Dormant Attention Heads (arXiv
2410.13835), with one, two and three layers. Neither paper has this. Softmax-n with n = T, where the null starts with
half of the weight or more, was added when one seed of the others was there: `softmax1_sinks` says why it should do what
softmax-1 does not.
"""

from collections.abc import Callable, Mapping

from orthojax import quant
from orthojax.experiments.active_dormant.models import (
    DRAIN,
    ORTHOADAM,
    OUTLIERS,
    PEAK,
    RISKS,
    SEEDS,
    config,
)
from orthojax.experiments.claims import NO_OUTLIERS, C, Claim, O, Revision, S, V, every, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import StepCurves
from orthojax.experiments.results import Quantity, Result, Results, metric, penalty
from orthojax.experiments.tables import MetricTable, PairedTable

DEPTHS = (1, 2, 3)
NORMS = {"layernorm": "LayerNorm", "rmsnorm_single": "RMSNormSingle"}
N, CN = "softmaxn", "curedn"
METHODS = {V: "softmax + Adam", S: "softmax-1 + Adam", O: "softmax + OrthoAdam", C: "softmax-1 + OrthoAdam",
           N: "softmax-T + Adam", CN: "softmax-T + OrthoAdam"}  # fmt: skip

_SINK = "sink_attention_rest"
REMOVED: dict[str, tuple[str | Quantity, Callable[[float], bool], str]] = {
    "the sink": (_SINK, lambda value: value < 0.2, "weight on <s> below 0.2 in every layer"),
    "the value drain": (DRAIN, lambda value: value > 0.5, "value norm of <s> above 0.5 of the others' in every layer"),
    "the residual-state peak": (PEAK, lambda value: value < 2, "residual norm of <s> below 2 times the others' after "
                                "every layer"),
}  # fmt: skip


_SETTINGS = [f"perplexity_{name}" for name in quant.SETTINGS]
_WORST = Quantity("worst quantised perplexity over float32's", lambda of: max(map(of.__getitem__, _SETTINGS))
                  / of.perplexity)  # fmt: skip


def _variants(scale: str) -> tuple[Variant, ...]:
    published, variants = scale == "small", []
    for norm, words in NORMS.items():
        for depth in DEPTHS:
            for method, label in METHODS.items():
                changes = {"model__normalizer": "softmax1"} if method in (S, C) else {}
                if method in (N, CN):
                    n = float(config(published=published).data.sequence_length)
                    changes = {"model__normalizer": "softmax_n", "model__normalizer_n": n}
                changes |= ORTHOADAM if method in (O, C, CN) else {}
                changes |= {"model__norm": norm, "model__norm_bias": None} if norm != "layernorm" else {}
                run = config(depth, published=published, **changes)
                plural = "layer" if depth == 1 else "layers"
                variants.append(Variant(f"{method}_{depth}_{norm}", f"{label}, {depth} {plural}, {words}", run))
    return tuple(variants)


def _groups(results: Results) -> Mapping[str, Mapping[str, str]]:
    groups: dict[str, dict[str, str]] = {}
    for result in results:
        method, depth, norm = result.name.split("_", 2)
        groups.setdefault(f"{depth} layer{'s' * (depth != '1')}, {NORMS[norm]}", {})[method] = result.name
    return groups


def _removal_claims(method: str) -> list[Claim]:
    claims = []
    for what, (quantity, removed, criterion) in REMOVED.items():
        claims.append(
            Claim(
                f"{METHODS[method]} removes {what}.", (V, method), (quantity,),
                lambda v, m, q=quantity, removed=removed: every(m, q, removed),
                f"{criterion}, in every seed; testable where it is there in every seed of softmax + Adam",
                lambda v, m, q=quantity, removed=removed: every(v, q, lambda value: not removed(value)),
            )
        )  # fmt: skip
    return claims


_SEEN = Revision("first stated when one seed was there")
_FRACTION = metric("first_attention_fraction", "first token gets most attention, fraction")
_OF_PAPER_1 = (
    *(Claim(f"{METHODS[method]} leaves no outlier channels at {words}.", (V, method), (key,),
            lambda v, m, key=key: within(m, key, 0, NO_OUTLIERS),
            f"kurtosis below {NO_OUTLIERS:g} in every seed; testable where softmax + Adam has more in every seed",
            lambda v, m, key=key: within(v, key, NO_OUTLIERS, 1e9), revised=_SEEN)
      for key, words in {"kurtosis_rest": "other tokens", "kurtosis_first": "<s>"}.items()
      for method in (O, C, CN)),
    *(Claim(f"{METHODS[method]} lowers how often the first token gets most attention.", (V, method), (_FRACTION,),
            lambda v, m: m.mean(_FRACTION) < 0.5 * v.mean(_FRACTION), "to less than half", revised=_SEEN)
      for method in (S, C, N, CN)),
    Claim("No quantisation setting costs softmax + Adam much.", (V,), (_WORST,), lambda v: within(v, _WORST, 0, 1.01),
          "less than 1% of perplexity in every seed", revised=_SEEN),
)  # fmt: skip


CLAIMS = (
    *(claim for method in (S, O, C, N, CN) for claim in _removal_claims(method)),
    *(Claim(f"{METHODS[method]} still copies.", (V, method), RISKS[:1],
            lambda v, m: m.mean(RISKS[0]) < 0.01,
            "backcopy excess risk below 0.01 nats; testable where softmax + Adam's is",
            lambda v, m: v.mean(RISKS[0]) < 0.01) for method in (S, O, C, N, CN)),
    *(Claim(f"{METHODS[method]} costs nothing on the bigram.", (V, method), RISKS[1:],
            lambda v, m: m.mean(RISKS[1]) <= v.mean(RISKS[1]) + 0.005, "excess risk at most 0.005 nats higher")
      for method in (S, O, C, N, CN)),
    *_OF_PAPER_1,
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Blocks of width {c.model.d_model} with one head, {c.train.steps} steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens at rate {c.optim.learning_rate:g}; OrthoAdam with Haar bases that differ by "
        "seed; softmax-T is softmax-n with n the length of a sequence. A phenomenon counts as there where it is in one "
        "layer."
    ]


def _of_norm(norm: str) -> Callable[[Result], bool]:
    return lambda result: result.name.endswith(f"_{norm}")


EXPERIMENT = Experiment(
    name="backcopy_cure",
    title="Bigram-Backcopy under the cure: softmax-1 and OrthoAdam against sinks, drains and peaks, by depth and norm",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    groups=_groups,
    measures=(OUTLIERS,),
    tables=(
        *(MetricTable(f"Sinks, drains and peaks; {words}", [_SINK, "null_mass", DRAIN, PEAK, *RISKS],
                      keep=_of_norm(norm)) for norm, words in NORMS.items()),
        *(MetricTable(f"The measures of From Attention to Activation; {words}",
                      ["first_attention_fraction", "first_attention_mass", "kurtosis_first", "kurtosis_rest",
                       "max_abs_first", "max_abs_rest"], keep=_of_norm(norm)) for norm, words in NORMS.items()),
        MetricTable("Perplexity, and its change by quantisation", ["perplexity", *map(penalty, _SETTINGS)]),
        PairedTable("Change from softmax + Adam, mean over pairs of one seed with 95% interval", V,
                    changes=["kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest", "perplexity"],
                    differences=[_SINK, DRAIN, PEAK, *RISKS, _FRACTION]),
    ),
    claims=CLAIMS,
    pictures=(
        StepCurves("sink", "Attention of non-triggers to <s>, three layers, LayerNorm; largest of the layers.",
                   "mean weight on <s>", {_SINK: ""}, keep=lambda r: r.name.endswith("_3_layernorm")),
        StepCurves("peak", "Residual norm of <s> over that of others, after the first of three layers, LayerNorm.",
                   "ratio", {"residual_peak_ratio/layer_0": ""}, "log", keep=lambda r: r.name.endswith("_3_layernorm")),
    ),
)  # fmt: skip
