"""What the experiments on Bigram-Backcopy say of made-up results: rule for ten cells, removal, published numbers."""

import itertools
from pathlib import Path

import pytest
from planted_results import made_up

from orthojax.experiments.active_dormant import (
    backcopy_cure,
    break_conditions_cells,
    break_conditions_map,
    one_layer,
    three_layers,
)
from orthojax.experiments.active_dormant.models import DRAIN, PEAK, RISKS
from orthojax.experiments.claims import judge
from orthojax.experiments.rerender import read_raw, results_of


def layered(sinks, drains, peaks, **metrics):
    """Metrics of a model whose layers have these sinks, value ratios and residual ratios."""
    found = {"sink_attention_rest": max(sinks), RISKS[0]: 0.0, RISKS[1]: 0.0, "num_layers": float(len(sinks))}
    for i, (sink, drain, peak) in enumerate(zip(sinks, drains, peaks, strict=True)):
        found |= {f"sink_attention_rest/layer_{i}": sink}
        found |= {f"value_norm_first/layer_{i}": 3 * drain, f"value_norm_rest/layer_{i}": 3.0}
        found |= {f"residual_norm_first/layer_{i}": 7 * peak, f"residual_norm_rest/layer_{i}": 7.0}
    return found | metrics


def verdicts(experiment, metrics, **options):
    results = made_up(experiment, metrics, **options)
    return {claim.says: judge(claim, results).verdict for claim in experiment.claims}


def test_the_worst_layer_counts():
    of = layered([0.1, 0.9, 0.2], [0.9, 0.2, float("nan")], [1.0, 1.5, 4.0])
    results = made_up(backcopy_cure.EXPERIMENT, lambda name: of, scale="tiny")
    assert results.first.mean(PEAK) == pytest.approx(4.0)
    assert results.first.mean(DRAIN) == pytest.approx(0.2)  # a layer without attention has no values


def test_ten_cells_are_chosen_by_the_rule():
    cells = {v.name: i for i, v in enumerate(break_conditions_map.EXPERIMENT.variants_at("tiny"))}

    def metrics(name):
        i, depth = cells[name], int(name.rsplit("_", 1)[1])
        if i < 3:
            return None  # failed
        # The larger i, the larger the peak; the sink the other way round from cell 100 on, and equal before.
        sink = 0.5 if i < 100 else 0.9 - i / 1000
        of = layered([sink] * depth, [1.0] * depth, [1.0 + i] * depth)
        return of | {RISKS[0]: 0.2 if i in (3, 143) else 0.0}  # these two have not learned to copy

    chosen = break_conditions_map.chosen(made_up(break_conditions_map.EXPERIMENT, metrics, scale="tiny"))
    names = list(cells)
    by_name = sorted(names[7:100])
    assert chosen[:3] == [names[142], names[141], names[140]]
    assert chosen[3:6] == [names[4], names[5], names[6]]
    assert chosen[6:8] == [names[100], names[101]]
    assert chosen[8:] == by_name[:2]  # equal values go by name
    assert break_conditions_map.chosen(made_up(break_conditions_map.EXPERIMENT, lambda name: None, scale="tiny")) == []


def test_the_cells_with_five_seeds_are_those_that_the_rule_names_on_the_committed_map():
    experiment = break_conditions_map.EXPERIMENT
    folder = Path(__file__).parent.parent / "results" / "break-conditions-map"
    results = results_of(experiment, read_raw(folder / "results.json"), folder)
    assert tuple(break_conditions_map.chosen(results)) == break_conditions_cells.CELLS
    assert {v.name for v in break_conditions_cells.EXPERIMENT.variants_at("tiny")} == set(break_conditions_cells.CELLS)


SHOWN = {"sink": ([0.9], [0.2], [3.0]), "none": ([0.1], [0.8], [1.5])}


def of_cure(cured, **changes):
    """Metrics by variant: methods in `cured` show nothing, all others everything."""

    def metrics(name):
        method, depth, _ = name.split("_", 2)
        sinks, drains, peaks = ([x] * int(depth) for (x,) in SHOWN["none" if method in cured else "sink"])
        outliers = {"kurtosis_first": 9.0, "kurtosis_rest": 6.0, "first_attention_fraction": 0.6, "perplexity": 4.0}
        outliers |= dict.fromkeys(("perplexity_int8_fine", "perplexity_int8_fine_per_token"), 4.01)
        outliers |= dict.fromkeys(("perplexity_int8_moderate", "perplexity_int8_coarse"), 4.02)
        return layered(sinks, drains, peaks) | outliers | {"perplexity_int4_zeropoint": 4.03} | changes.get(name, {})

    return metrics


@pytest.mark.parametrize("method", ["softmax1", "orthoadam", "cured", "softmaxn", "curedn"])
def test_a_method_removes_what_is_in_no_layer_of_any_depth_and_norm(method):
    experiment, words = backcopy_cure.EXPERIMENT, backcopy_cure.METHODS
    found = verdicts(experiment, of_cure({method}), seeds=(1, 2), scale="tiny")
    for of, what in itertools.product(words, backcopy_cure.REMOVED):
        if of != "vanilla":
            assert found[f"{words[of]} removes {what}."] == ("holds" if of == method else "does not hold")
    assert found[f"{words[method]} still copies."] == "holds"
    # One layer of one model that shows it is enough.
    again = layered([0.1, 0.3], [0.8, 0.4], [1.5, 2.5])
    found = verdicts(experiment, of_cure({method}, **{f"{method}_2_layernorm": again}), scale="tiny")
    for what in backcopy_cure.REMOVED:
        assert found[f"{words[method]} removes {what}."] == "does not hold"
    found = verdicts(experiment, of_cure({"vanilla", method}), scale="tiny")
    for what in backcopy_cure.REMOVED:
        assert found[f"{words[method]} removes {what}."] == "not testable at this scale"


def test_published_numbers_give_the_verdicts_of_the_paper():
    """Where the paper prints what a claim reads."""
    published = one_layer.PUBLISHED["softmax"]
    of = {**published, "sink_attention_rest": published["sink_attention"], "bigram_excess_risk_nats": 0.0}
    of |= {"sink_logit_gap": published["sink_logit_gap_tokens"], "learning_rate": 3e-4}
    results = made_up(one_layer.EXPERIMENT, lambda name: of if name == "softmax" else None, scale="tiny")
    found = {claim.says: judge(claim, results).verdict for claim in one_layer.EXPERIMENT.claims}
    assert {says: verdict for says, verdict in found.items() if verdict == "does not hold"} == {}
    held = {says for says, verdict in found.items() if verdict == "holds"}
    assert {"Non-triggers attend to <s>.", "The gap grows straight in ln t.", "Logits on <s> are concentrated.",
            "The value of <s> rises before it is drained.", "The MLP has the bigram."} <= held  # fmt: skip

    def three(name):
        return three_layers.PUBLISHED.get(name, {}) | {"sink_attention_rest": 0.9}

    results = made_up(three_layers.EXPERIMENT, three, scale="tiny")
    found = {claim.says: judge(claim, results).verdict for claim in three_layers.EXPERIMENT.claims}
    for says in ("Under Adam the residual norm of <s> after the first layer grows.",
                 "ReLU attention removes the peak after the first layer."):  # fmt: skip
        assert found[says] == "holds"
