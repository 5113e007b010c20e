"""Tasks around Bigram-Backcopy: no BOS and two, a delimiter, and the related rules for what follows a trigger.

Active-Dormant Attention Heads (arXiv 2410.13835), appendix.
"""

from orthojax.experiments.active_dormant.key_mass import KEY_MASS
from orthojax.experiments.active_dormant.models import HISTORY, RISKS, SEEDS, config
from orthojax.experiments.claims import Claim, Revision, within
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.pictures import StepCurves
from orthojax.experiments.results import Results, metric
from orthojax.experiments.tables import MetricTable

_SINK, _DRAIN = "sink_attention_rest", "value_drain"
# Value norms of <s> and of other tokens, read off figures; one seed.
PUBLISHED = {
    "no_bos": {RISKS[0]: 8.56e-5},
    "backward": {_DRAIN: 5.5 / 22},
}


def _variants(scale: str) -> tuple[Variant, ...]:
    published = scale == "small"

    def one(name: str, label: str, **changes: object) -> Variant:
        return Variant(name, label, config(1, published=published, **changes))

    # Without <s> the first token differs between sequences, and there is no one residual state to follow.
    no_details = {"train__probe_details": False}
    in_context = config(3, published=published, data__rule="in_context_bigram")
    return (
        one("bos", "one <s>"),
        one("two_bos", "two <s>", data__bos_tokens=2),
        one("no_bos", "no <s>", data__bos_tokens=0, **no_details),
        one("delimiter", "delimiter in the middle", data__delimiter=True),
        one("backward", "bigram-backward", data__rule="bigram_backward"),
        one("markov", "Markov, nothing to copy", data__rule="markov"),
        one("half", "copy with probability 1/2", data__other_rule_probability=0.5),
        Variant("in_context", "in-context bigram, 3 layers", in_context),
    )


_TOKEN = "largest_token"
_MOST = (metric(_TOKEN, "mass on the most attended token"), metric(f"{_TOKEN}_equal", "equal weights would give"),
         metric("token_value_ratio", "its value norm over the mean of all"))  # fmt: skip
_FIRST, _DELIMITER, _AT_TRIGGERS = _KEYS = (
    metric("first_key", "weight on the first token"), metric("delimiter_key", "weight on the delimiter"),
    metric("delimiter_key_triggers", "the same of trigger characters"),
)  # fmt: skip
_TRIGGERS = (metric("trigger_keys", "weight on triggers"), metric("trigger_keys_equal", "equal weights would give"))
CLAIMS = (
    Claim("With two <s> the sink is on them, together.", ("two_bos",), (_SINK, _DRAIN),
          lambda of: within(of, _SINK, 0.7, 2), "weight on both together above 0.7 in every seed"),
    Claim("They share it.", ("two_bos",), (_FIRST,), lambda of: within(of, _FIRST, 0.1, 0.9),
          "weight on the first of them 0.1 to 0.9 in every seed", revised=Revision("seen in these runs")),
    Claim("Without <s> the sink moves to other tokens.", ("no_bos",), (_SINK, *_MOST),
          lambda of: of.mean(_TOKEN) > 2 * of.mean(f"{_TOKEN}_equal") and of[_SINK] < 0.5,
          "less than half on the first token, and one token has twice what equal weights would give"),
    Claim("That token's value is drained.", ("no_bos",), _MOST, lambda of: of.token_value_ratio < 0.5,
          "value norm below half of the mean"),
    Claim("Without <s> the task is still learned.", ("no_bos",), RISKS,
          lambda of: of.backcopy_excess_risk_nats < 0.02, "backcopy excess risk below 0.02 nats"),
    Claim("After a delimiter, where no query needs the head, the sink is on <s> or on the delimiter.", ("delimiter",),
          (_FIRST, _DELIMITER), lambda of: of.mean(_FIRST) > 0.5 or of.mean(_DELIMITER) > 0.5,
          "more than half of the weight on one of the two",
          revised=Revision("any most attended token counted, at all positions", {
              "show": (_SINK, *_MOST[:2]), "holds": lambda of: of[_SINK] > 0.5 or of.mean(_TOKEN) > 0.5,
              "criterion": "more than half on <s> or on one token"})),
    Claim("The delimiter is the sink of trigger characters, which have nothing to copy after it.", ("delimiter",),
          (_AT_TRIGGERS,), lambda of: within(of, _AT_TRIGGERS, 0.9, 2), "weight above 0.9 on it, in every seed",
          revised=Revision("seen in these runs")),
    Claim("The in-context bigram has a sink in some layer above the first.", ("in_context",),
          tuple(metric(f"{_SINK}/layer_{i}", f"weight on <s>, layer {i + 1}") for i in range(3)),
          lambda of: max(of[f"{_SINK}/layer_1"], of[f"{_SINK}/layer_2"]) > 0.5, "above 0.5"),
    Claim("In the in-context bigram the value of <s> is drained there.", ("in_context",),
          tuple(metric(f"{_DRAIN}/layer_{i}", f"value ratio, layer {i + 1}") for i in range(3)),
          lambda of: min(of[f"{_DRAIN}/layer_1"], of[f"{_DRAIN}/layer_2"]) < 0.5,
          "value norm below half of the others'"),
    Claim("Bigram-backward has a weaker sink and drain than Bigram-Backcopy.", ("bos", "backward"), (_SINK, _DRAIN),
          lambda bos, back: back[_SINK] < bos[_SINK] and back[_DRAIN] > bos[_DRAIN],
          "less weight on <s>, and a larger value ratio"),
    Claim("Without anything to copy there is no sink.", ("markov",), (_SINK, _DRAIN), lambda of: of[_SINK] < 0.3,
          "weight on <s> below 0.3; a prediction of ours, made before: no head is needed, so none learns to be idle"),
    Claim("Copying half of the time is enough.", ("half",), (_SINK, _DRAIN), lambda of: of[_SINK] > 0.5,
          "weight on <s> above 0.5; a prediction of ours, made before"),
)  # fmt: skip


def _about(results: Results) -> list[str]:
    c = results.first.config
    return [
        f"Models of width {c.model.d_model} after {c.train.steps} steps; one layer where not said otherwise. Excess "
        "risks are above the exact oracle of each task. The most attended token is that with most weight above what "
        "equal weights would give, at non-trigger queries of the second half."
    ]


EXPERIMENT = Experiment(
    name="backcopy_rules",
    title="Tasks around Bigram-Backcopy: no BOS and two, a delimiter, in-context and backward bigrams, Markov",
    variants=_variants,
    scales=("tiny", "small"),
    seeds=SEEDS,
    about=_about,
    paper=PUBLISHED,
    measures=(HISTORY, KEY_MASS),
    tables=(MetricTable("At the end", [*RISKS, _SINK, _DRAIN, "active_at_triggers", "active_elsewhere"]),
            MetricTable("Late queries, those after the delimiter", [*_KEYS, *_MOST, *_TRIGGERS])),
    claims=CLAIMS,
    pictures=(StepCurves("sink", "Attention of non-triggers to <s>, or to the first token without it.",
                         "mean weight", {_SINK: ""}),),
)  # fmt: skip
