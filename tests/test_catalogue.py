"""The catalogue of metrics: every metric is in it, labels of variants, levels of chance of simulated models."""

import dataclasses

import numpy as np
import pytest
from tiny_run import TINY, drawn_params, inputs, loaded

from orthojax import analysis, ops
from orthojax.analysis import CATALOGUE, Conditions, chance, compared_with, define, label, limits
from orthojax.commands.evaluate import overview
from orthojax.config import replace
from orthojax.formatting import percent, share
from orthojax.train import describe_line, evaluate, open_inputs

T, D = 64, 16
GIVEN = Conditions(length=T, d_model=D, vocab_size=32)
TASK = {"data.kind": "bigram_backcopy", "model.vocab_size": 128, "model.max_length": 32, "data.sequence_length": 32}


@pytest.mark.parametrize("changes", [{}, TASK], ids=["text", "task"])
def test_every_metric_of_an_evaluation_is_defined(tmp_path, changes):
    config = replace(TINY, changes)
    of = open_inputs(config, tmp_path) if changes else inputs()
    metrics = evaluate(loaded(config, drawn_params(config.model)), of, post_attention=not changes)
    assert [name for name in metrics if name != "sequences" and define(name) is None] == []


def test_entries_are_complete_and_distinct():
    assert len({entry.label for entry in CATALOGUE.values()}) == len(CATALOGUE)
    for entry in CATALOGUE.values():
        assert entry.definition.endswith(".")
        assert entry.group
        assert bool(entry.chance) == bool(entry.chance_words)
        level = entry.chance(GIVEN) if entry.chance else None
        assert level is None or entry.low <= level <= entry.high
        assert not entry.curves or CATALOGUE[entry.curves].curves == entry.curves


def test_limits_are_those_of_every_place_and_variant():
    positive = ("loss_nats", "max_abs_rest/layer_1", "rotated_norm_ratio_first/layer_0/head_1")
    assert {limits(name) for name in (*positive, "post_attention_kurtosis_first")} == {(0.0, np.inf)}
    assert limits("sink_rate/step_20") == (0.0, 1.0)
    assert limits("perplexity/step_20") == limits("perplexity_int4_zeropoint") == (1.0, np.inf)
    assert limits("sink_logit_gap") == limits("of_an_experiment") == (-np.inf, np.inf)


@pytest.mark.parametrize(("name", "words"), [
    ("perplexity_int8_coarse", ("perplexity", "int8 coarse")),
    ("perplexity_w4a8_group64_with_head", ("perplexity", "w4a8 group64", "head")),
    ("kurtosis_first/layer_3", ("kurtosis", "first token", "layer 3")),
    ("sink_attention/layer_1/head_0", ("layer 1", "head 0")),
    ("post_attention_max_abs_rest", ("max |activation|", "other tokens", "after attention")),
    ("rotated_kurtosis_rest/layer_0", ("kurtosis", "basis", "layer 0")),
    ("of_an_experiment", ("of an experiment",)),
])  # fmt: skip
def test_labels_name_the_variant(name, words):
    assert all(word in label(name) for word in words)


@pytest.mark.parametrize("n", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("window", [None, 3])
def test_equal_logits_have_the_mass_of_chance(n, window):
    given = dataclasses.replace(GIVEN, n=n, windows=(window,))
    seen = np.tril(np.ones((T, T))) * np.triu(np.ones((T, T)), 1 - (window or T))
    weights = seen / (n + seen.sum(1, keepdims=True))
    assert chance("first_attention_mass", given) == pytest.approx(weights[:, 0].mean())
    shares = seen / seen.sum(1, keepdims=True)
    assert chance("first_attention_fraction", given) == pytest.approx(shares[:, 0].mean())


def test_windows_by_layer_have_the_mean_of_their_levels_of_chance():
    config = replace(TINY, {"model.attention_window": "none,3", "model.num_layers": 2, "model.scan_layers": "false"})
    given = analysis.conditions(config)
    assert given.windows == (None, 3)
    for name in ("first_attention_mass", "first_attention_fraction"):
        levels = [chance(name, dataclasses.replace(given, windows=(window,))) for window in (None, 3)]
        assert chance(name, given) == pytest.approx(sum(levels) / 2)
        assert [chance(f"{name}/layer_{layer}", given) for layer in (0, 1)] == levels


def test_equal_logits_have_the_sink_attention_of_chance():
    given = dataclasses.replace(GIVEN, bos_tokens=2)
    weights = np.asarray(ops.softmax(np.zeros((1, 1, T, T)), where=np.tri(T, dtype=bool)))
    no_trigger = np.zeros((1, T), bool)
    for name in ("sink_attention", "sink_attention_rest"):
        found = getattr(analysis, name)(weights, no_trigger, bos_count=2)
        assert chance(name, given) == pytest.approx(float(found), rel=1e-6)


@pytest.mark.parametrize(("name", "level"), [("relu", None), ("learned_sink", 1.0), ("softmax1", 1.0)])
def test_conditions_follow_the_normalizer(name, level):
    assert analysis.conditions(replace(TINY, {"model.normalizer": name})).n == level


def test_a_level_of_chance_is_told_in_words():
    assert compared_with("loss_nats", {}, GIVEN).startswith("3.47 ")
    assert compared_with("kurtosis_first/layer_0", {}, GIVEN).startswith("3 ")
    assert compared_with("residual_norm_first", {}, GIVEN) == ""
    assert compared_with("perplexity_w4a8", {"perplexity": 4.0, "perplexity_w4a8": 5.0}, GIVEN).startswith("+25")


def test_the_console_shows_every_metric_once():
    metrics = {"sequences": 16.0, "perplexity": 20.0, "kurtosis_first": 4.5, "kurtosis_first/layer_0": 4.5}
    metrics |= {"perplexity_w4a8": 22.0, "post_attention_kurtosis_first": 2.5, "of_an_experiment": 7.0}
    lines = overview(metrics, TINY)
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(shown) == sorted(name for name in metrics if "/" not in name and name != "sequences")
    (line,) = (line for line in lines if line.startswith("  kurtosis_first "))
    assert "4.5" in line
    assert compared_with("kurtosis_first", metrics, GIVEN) in line
    assert CATALOGUE["kurtosis_first"].definition in line


def test_a_logged_line_shows_its_metrics_by_label():
    line = {"step": 4, "loss_nats": 2.5, "kurtosis_first": 7.25, "kurtosis_first/layer_0": 7.0}
    shown = describe_line(line, 8)
    assert shown.startswith("step 4/8")
    assert all(f"{label(name)} {line[name]:.3g}" in shown for name in ("loss_nats", "kurtosis_first"))
    assert "layer" not in shown


def test_shares_are_rounded_once():
    values = np.concatenate([np.random.default_rng(0).uniform(5e-6, 9.99, 2000), np.geomspace(5.1e-6, 9.99, 2000)])
    for value in map(float, values):
        assert share(value) == f"{100 * value:.3g}%"
        assert percent(-value) == f"{-100 * value:.3g}%"
    assert {share(x) for x in (0.0, -0.0, 4.9e-6, -4.9e-6)} == {percent(-0.0)} == {"0%"}
