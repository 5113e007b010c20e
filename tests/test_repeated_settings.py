"""Repeated passages in other settings: the grid of runs, and the verdicts on made-up results."""

import pytest
from planted_results import made_up

from orthojax.analysis import chance_of_first
from orthojax.config import replace
from orthojax.experiments.base_configs import REPEATED_MODEL, cured
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.repeated_settings import EXPERIMENTS, ROUNDED

LONGER, SETTINGS = EXPERIMENTS


def test_the_grids_have_all_methods_with_equal_batches_and_the_main_job_with_the_output_axis_in_them():
    variants = {variant.name: variant.config for of in EXPERIMENTS for variant in of.variants_at("tiny")}
    output_axis = replace(REPEATED_MODEL, {"optim.rotation.axes": "output"})
    assert variants["vanilla_64_bos_2000"] == output_axis
    assert variants["cured_64_bos_2000"] == cured(output_axis)
    assert {c.train.batch_size * c.data.sequence_length for c in variants.values()} == {1024}
    cells = {(c.data.sequence_length, c.data.bos, c.train.steps) for c in variants.values()}
    steps = {(True, 2000), (True, 6000), (False, 2000), (False, 6000)}
    assert cells == {(64, *of) for of in steps} | {(256, True, 2000), (256, False, 2000)}
    for name in ("64_bos_6000", "64_2000", "256_2000", "256_bos_2000"):
        methods = {(c.model.normalizer, c.optim.optimizer) for n, c in variants.items() if n.endswith(f"_{name}")}
        assert methods >= {(n, o) for n in ("softmax", "softmax1") for o in ("adam", "orthoadam")}


CALM = {
    **{"perplexity": 20.0, "kurtosis_first": 3.0, "kurtosis_rest": 3.0},
    **{"value_norm_first": 1.0, "value_norm_rest": 1.0, **dict.fromkeys(ROUNDED, 20.01)},
}
SINKING = CALM | {"kurtosis_first": 30.0, "value_norm_first": 0.2, **dict.fromkeys(ROUNDED, 20.5)}


def judged(experiment, changes):
    def metrics(name):
        _, length, *_, steps = name.split("_")
        sinks = name.startswith(("vanilla", "orthoadam"))
        times = (4.0 if steps == "6000" else 3.0) if sinks else 1.3
        fraction = times * chance_of_first(int(length))
        return (SINKING if sinks else CALM) | {"first_attention_fraction": fraction} | changes.get(name, {})

    results = made_up(experiment, metrics, scale="tiny")
    return [judge(claim, results).verdict for claim in experiment.claims]


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("none", {}, []),
        ("vanilla_64_bos_2000", {"first_attention_fraction": 0.1}, [0]),
        ("vanilla_64_bos_6000", {"first_attention_fraction": 0.2}, [1, 2]),
        ("cured_64_bos_6000", {"first_attention_fraction": 0.12}, [2]),
        ("softmax1_64_bos_6000", {"first_attention_fraction": 0.2}, [3]),
        ("orthoadam_64_bos_6000", {"first_attention_fraction": 0.1}, [4]),
        ("vanilla_64_bos_6000", {"value_norm_first": 0.6}, [6, 7]),
        ("softmax1_64_bos_6000", {"value_norm_first": 0.3}, [7]),
        ("cured_64_bos_6000", {"kurtosis_rest": 3.6}, [8]),
        ("cured_64_bos_6000", {"perplexity": 20.3}, [9]),
        ("cured_64_bos_6000", {"first_attention_fraction": 0.25}, [2, 5]),
        ("residual_64_bos_6000", {"first_attention_fraction": 0.25}, [15]),
        ("residual_64_bos_6000", {"kurtosis_first": 3.6}, [16]),
        ("residual_64_bos_6000", {"perplexity": 20.3}, [17]),
        ("cured_64_bos_6000", {"perplexity_int8_coarse": 21.0}, [10]),
        ("cured_64_bos_6000", {"perplexity_int8_moderate": 21.0}, [11]),
        ("cured_64_bos_2000", {"perplexity_int4_zeropoint": 21.0}, [12]),
        ("cured_64_bos_6000", {"perplexity_w4a8": 21.0}, [13]),
        ("cured_64_bos_6000", {"perplexity_w4a4": 21.0}, [14]),
    ],
)
def test_one_number_that_contradicts_a_claim_changes_its_verdict(name, changes, wrong):
    assert [i for i, verdict in enumerate(judged(LONGER, {name: changes})) if verdict != "holds"] == wrong


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("none", {}, []),
        ("vanilla_256_2000", {"first_attention_fraction": 0.045}, [0]),
        ("softmax1_256_bos_2000", {"first_attention_fraction": 0.1}, [1]),
        ("orthoadam_256_2000", {"first_attention_fraction": 0.03}, [2]),
        ("cured_64_2000", {"first_attention_fraction": 0.2}, [3]),
        ("vanilla_64_2000", {"value_norm_first": 0.6}, [4]),
        ("softmax1_64_2000", {"value_norm_first": 0.3}, [5]),
        ("cured_64_6000", {"kurtosis_first": 3.6}, [6]),
        ("cured_256_2000", {"perplexity": 20.3}, [7]),
        ("cured_256_bos_2000", {"perplexity_w4a4": 21.0}, [12]),
    ],
)
def test_every_setting_is_judged(name, changes, wrong):
    assert [i for i, verdict in enumerate(judged(SETTINGS, {name: changes})) if verdict != "holds"] == wrong


def test_claims_on_dominance_leave_out_the_settings_that_have_none():
    low = {"first_attention_fraction": 0.02}
    verdicts = judged(SETTINGS, {"vanilla_256_2000": low, "cured_256_2000": {"first_attention_fraction": 0.3}})
    assert verdicts[0] == "does not hold"
    assert verdicts[1:4] == ["holds"] * 3
