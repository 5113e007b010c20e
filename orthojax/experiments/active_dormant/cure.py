"""Whether the cure of From Attention to Activation removes sinks, drains and peaks on Bigram-Backcopy.

Softmax-1 and OrthoAdam (arXiv 2410.17174), alone and together, on the task of Active-Dormant Attention Heads (arXiv
2410.13835), with one, two and three layers. Neither paper has this.
"""

from collections.abc import Callable, Mapping

from orthojax.experiments.active_dormant.models import HISTORY, INTERVENTIONS, ORTHOADAM, OUTLIERS, RISKS, SEEDS, config
from orthojax.experiments.active_dormant.three_layers import worst_layer
from orthojax.experiments.claims import C, Claim, O, S, V
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import StepCurves
from orthojax.experiments.results import Numbers, Quantity, Result, Results
from orthojax.experiments.tables import MetricTable

DEPTHS = (1, 2, 3)
NORMS = {"layernorm": "LayerNorm", "rmsnorm_single": "RMSNormSingle"}
METHODS = {V: "softmax + Adam", S: "softmax-1 + Adam", O: "softmax + OrthoAdam", C: "softmax-1 + OrthoAdam"}

# Of the layers, the one in which the phenomenon is most pronounced.
_SINK = "sink_attention_rest"
_PEAK = worst_layer("residual_peak_ratio")


def _least_drain(of: Numbers) -> float:
    return min(of[f"value_drain/layer_{i}"] for i in range(int(of.num_layers)))


_DRAIN = Quantity("value norm of <s> over the others', smallest of the layers", _least_drain)
REMOVED: dict[str, tuple[str | Quantity, Callable[[float], bool], str]] = {
    "the sink": (_SINK, lambda value: value < 0.2, "weight on <s> below 0.2 in every layer"),
    "the value drain": (_DRAIN, lambda value: value > 0.5, "value norm of <s> above 0.5 of the others' in every layer"),
    "the residual-state peak": (_PEAK, lambda value: value < 2, "residual norm of <s> below 2 times the others' after "
                                "every layer"),
}  # fmt: skip


def _variants(scale: str) -> tuple[Variant, ...]:
    small, variants = scale == "small", []
    for norm, words in NORMS.items():
        for depth in DEPTHS:
            for method, label in METHODS.items():
                changes = {"model__normalizer": "softmax1"} if method in (S, C) else {}
                changes |= ORTHOADAM if method in (O, C) else {}
                changes |= {"model__norm": norm, "model__norm_bias": None} if norm != "layernorm" else {}
                run = config(depth, small=small, **changes)
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
    says = f"{METHODS[method]} removes" if method != V else "softmax + Adam shows none of"
    claims = []
    for what, (quantity, removed, criterion) in REMOVED.items():
        claims.append(
            Claim(
                f"{says} {what}.", (V, method), (quantity,),
                lambda v, m, q=quantity, removed=removed: bool(m.values(q)) and all(map(removed, m.values(q))),
                f"{criterion}, in every seed; testable where it is there in every seed of softmax + Adam",
                lambda v, m, q=quantity, removed=removed: bool(v.values(q)) and not any(map(removed, v.values(q))),
            )
        )  # fmt: skip
    return claims


CLAIMS = (
    *(claim for method in (S, O, C) for claim in _removal_claims(method)),
    *(Claim(f"{METHODS[method]} still copies.", (V, method), RISKS[:1],
            lambda v, m: m.mean(RISKS[0]) < 0.01, "backcopy excess risk below 0.01 nats",
            lambda v, m: v.mean(RISKS[0]) < 0.01) for method in (S, O, C)),
    *(Claim(f"{METHODS[method]} costs nothing on the bigram.", (V, method), RISKS[1:],
            lambda v, m: m.mean(RISKS[1]) <= v.mean(RISKS[1]) + 0.005, "excess risk at most 0.005 nats higher")
      for method in (S, O, C)),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Blocks of width {c.model.d_model} with one head, {c.train.steps} steps of {c.train.batch_size} x "
        f"{c.data.sequence_length} tokens at rate {c.optim.learning_rate:g}; OrthoAdam with Haar bases that differ by "
        "seed. A phenomenon counts as there where it is in one layer."
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
    measures=(HISTORY, INTERVENTIONS, OUTLIERS),
    tables=(
        *(MetricTable(f"Sinks, drains and peaks; {words}", [_SINK, "null_mass", _DRAIN, _PEAK, *RISKS],
                      keep=_of_norm(norm)) for norm, words in NORMS.items()),
        *(MetricTable(f"The measures of From Attention to Activation; {words}",
                      ["first_attention_fraction", "first_attention_mass", "kurtosis_first", "kurtosis_rest",
                       "max_abs_first", "max_abs_rest", "perplexity", "perplexity_int8_coarse",
                       "perplexity_int4_zeropoint"], keep=_of_norm(norm)) for norm, words in NORMS.items()),
    ),
    claims=CLAIMS,
    pictures=(
        StepCurves("sink", "Attention of non-triggers to <s>, three layers, LayerNorm; largest of the layers.",
                   "mean weight on <s>", {_SINK: ""}, keep=lambda r: r.name.endswith("_3_layernorm")),
        StepCurves("peak", "Residual norm of <s> over that of others, after the first of three layers, LayerNorm.",
                   "ratio", {"residual_peak_ratio/layer_0": ""}, "log", keep=lambda r: r.name.endswith("_3_layernorm")),
    ),
)  # fmt: skip
