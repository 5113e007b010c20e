"""Figures 1, 7 to 44 of From Attention to Activation: what is measured for them, and what their reports conclude."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.from_attention.hidden_maps import CHANNELS, _overlap_claims, largest_channels
from orthojax.experiments.reporting import drawing, model_pictures
from orthojax.experiments.reporting.criteria import chance_of_first, gaussian_kurtosis_limit
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.reporting.summaries import layer_curves, training_curves
from orthojax.experiments.study.measures import Measure, Measured, keep
from orthojax.experiments.study.study import Study

from orthojax.config import Config, DataConfig, EvalConfig, changed_fields, replace
from orthojax.experiments.catalog import find
from orthojax.experiments.from_attention.models import MODELS
from orthojax.experiments.from_attention.paper_tables import TABLE_2
from orthojax.experiments.from_attention.training_curves import SIMILAR_NATS, running_mean, spikes, window_of
from orthojax.experiments.study import channel_overlap as overlap
from orthojax.model import gpt2
from orthojax.train import init_state

POSITIONS, CHANNEL_COUNT = 6, 64
METHODS = ("vanilla", "softmax1", "orthoadam", "cured")


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


# The overlap of channels.


def pairwise(sets):
    """Mean of |A & B| / |A| over all pairs, one by one."""
    return np.mean([len(a & b) / len(a) for a, b in itertools.combinations(sets, 2)])


def largest(values, count):
    """Sorted one after the other, ties to the lower index."""
    return set(sorted(range(len(values)), key=lambda d: (-values[d], d))[:count])


def test_overlap_is_the_mean_over_pairs_of_what_two_sets_share():
    rng = np.random.default_rng(0)
    magnitude = rng.normal(size=(3, 7, 96)).astype(np.float32).round(1)  # with ties
    members = np.asarray(overlap.ranks(magnitude) < 3)
    sets = [[largest(row, 3) for row in rows] for rows in magnitude]
    assert [[set(np.flatnonzero(row)) for row in rows] for rows in members] == sets
    np.testing.assert_allclose(overlap.mean_overlap(members, axis=1), [pairwise(rows) for rows in sets], atol=1e-6)
    by_column = [pairwise([sets[i][j] for i in range(3)]) for j in range(7)]
    np.testing.assert_allclose(overlap.mean_overlap(members, axis=0), by_column, atol=1e-6)


def test_random_sets_overlap_by_k_over_d_and_equal_ones_wholly():
    D, k, n = 256, 8, 400
    random = overlap.ranks(np.random.default_rng(1).normal(size=(n, D))) < k
    # A pair's overlap is hypergeometric: variance k/D (1-k/D) (D-k) / (k (D-1)); pairs are nearly uncorrelated.
    deviation = np.sqrt(k / D * (1 - k / D) * (D - k) / (k * (D - 1)) / (n * (n - 1) / 2))
    assert abs(float(overlap.mean_overlap(random, axis=0)) - k / D) < 5 * deviation
    same = np.tile(np.asarray(random)[:1], (n, 1))
    assert float(overlap.mean_overlap(same, axis=0)) == pytest.approx(1.0, abs=1e-6)


class Planted:
    """In place of a model: the tokens of a sequence say which hidden states it has."""

    def __init__(self, hidden):
        self.hidden = hidden  # [B, layers, T, D]

    def __call__(self, config):
        return self

    def apply(self, variables, tokens, *, observe):
        hidden = jax.numpy.asarray(self.hidden)[tokens[:, 0]]
        seen = [observe(type("Taps", (), {"residual": hidden[:, layer]})) for layer in range(hidden.shape[1])]
        return None, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *seen)


def measured(hidden, monkeypatch):
    monkeypatch.setattr(overlap, "Transformer", Planted(np.asarray(hidden, np.float32)))
    overlap._sets.cache_clear()  # which would know another model of this config
    B, _, T, D = hidden.shape
    # More than one batch, and a smaller last one.
    config = replace(Config(eval=EvalConfig(batch_size=2)), {"model.d_model": D})
    return overlap.channel_overlap(config, {}, np.tile(np.arange(B)[:, None], (1, T + 1)))


def test_planted_outlier_channels_are_the_same_everywhere(monkeypatch):
    hidden = np.random.default_rng(0).normal(size=(4, 2, POSITIONS, CHANNEL_COUNT))
    hidden[..., 40] += 50.0
    one = measured(hidden, monkeypatch).metrics
    hidden[..., 7] += 50.0  # D // 32 = 2 channels
    two = measured(hidden, monkeypatch).metrics
    for key in ("sequences", "positions", "layers"):
        assert one[f"largest_channel_between_{key}"] == pytest.approx(1.0, abs=1e-6)
        assert one[f"largest_channels_between_{key}"] < 0.9  # the second is any
        assert two[f"largest_channels_between_{key}"] == pytest.approx(1.0, abs=1e-6)
        assert two[f"largest_channel_between_{key}"] < 0.9  # they take turns
    assert (two["largest_channels_by_chance"], two["largest_channel_by_chance"]) == (2 / 64, 1 / 64)


def test_the_overlaps_of_a_model_are_those_of_sets_taken_one_by_one(monkeypatch):
    hidden = np.random.default_rng(2).normal(size=(5, 2, POSITIONS, CHANNEL_COUNT)).astype(np.float32)
    hidden[:, :1, :, 3] += 2.0  # in half of the layers
    metrics, _ = measured(hidden, monkeypatch)
    mean = np.abs(hidden.astype(np.float64)).mean(axis=2)  # [B, layers, D]
    for name, k in (("largest_channels", 2), ("largest_channel", 1)):
        sets = [[largest(mean[b, layer], k) for layer in range(2)] for b in range(5)]
        between_sequences = [pairwise([sets[b][layer] for b in range(5)]) for layer in range(2)]
        between_positions = [
            np.mean([pairwise([largest(abs(row), k) for row in hidden[b, layer]]) for b in range(5)])
            for layer in range(2)
        ]
        expected = {"sequences": between_sequences, "positions": between_positions}
        for key, values in expected.items():
            found = [metrics[f"{name}_between_{key}/layer_{layer}"] for layer in range(2)]
            np.testing.assert_allclose(found, values, atol=1e-6)
            assert metrics[f"{name}_between_{key}"] == pytest.approx(np.mean(values), abs=1e-6)
        between_layers = np.mean([pairwise(rows) for rows in sets])
        assert metrics[f"{name}_between_layers"] == pytest.approx(between_layers, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, False])
def test_a_model_with_one_layer_has_no_overlap_between_layers(scanned):
    model = gpt2("tiny", num_layers=1, d_model=32, num_heads=2, vocab_size=8, max_length=8, scan_layers=scanned)
    config = Config(model=model, data=DataConfig(sequence_length=8))
    tokens = np.random.default_rng(0).integers(0, 8, (3, 9))
    metrics, _ = overlap.channel_overlap(config, init_state(config).params, tokens)
    assert "largest_channels_between_layers" not in metrics
    assert 0.0 <= metrics["largest_channels_between_sequences"] <= 1.0


def test_the_channels_that_are_shown_are_those_of_the_largest_values():
    hidden = np.zeros((4, POSITIONS, CHANNEL_COUNT))
    hidden[0, 3, [9, 2, 50]] = [7.0, 9.0, 8.0]
    hidden[1, 0, 11] = 99.0  # of the first layer alone
    assert largest_channels(hidden, 3).tolist() == [2, 9, 50]


# What no dominance and no outlier look like.


def test_chance_and_limit_are_what_samples_give():
    rng = np.random.default_rng(0)
    weights = np.tril(rng.random((4000, 8, 8)))
    share = (weights.argmax(-1) == 0).mean()
    assert share == pytest.approx(chance_of_first(8), abs=4 * 0.5 / np.sqrt(4000 * 8))
    x = rng.normal(size=(20_000, 96))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    kurtosis = (x**4).mean(-1)
    assert gaussian_kurtosis_limit(96) == pytest.approx(3 + 3 * kurtosis.std(), rel=0.05)
    assert np.mean(kurtosis > gaussian_kurtosis_limit(96)) < 0.02


# Losses.


def test_the_running_mean_is_of_the_last_values_up_to_each():
    losses = np.random.default_rng(0).normal(size=(2, 9))
    for window in (1, 3, 20):
        expected = [[row[max(0, i + 1 - window) : i + 1].mean() for i in range(9)] for row in losses]
        np.testing.assert_allclose(running_mean(losses, window), expected, atol=1e-12)


def test_a_spike_is_more_than_a_nat_above_the_mean_before_it_and_after_warm_up():
    steps, losses = np.arange(20, 520, 20), np.linspace(6.0, 4.0, 25)
    assert window_of(25) == 3
    assert spikes(steps, losses, 100) == 0
    losses[10] = losses[7:10].mean() + 1.01
    assert spikes(steps, losses, 100) == 1
    assert spikes(steps, losses, 300) == 0  # step 220 is before
    losses[10] = losses[7:10].mean() + 0.99
    assert spikes(steps, losses, 100) == 0


# Reports.

VALUES = {  # by method: what the paper would have, of every layer
    "first_attention_fraction": ([0.1, 0.6, 0.5, 0.2], [0.02] * 4, [0.1, 0.5, 0.3, 0.2], [0.02] * 4),
    "first_attention_mass": ([0.2, 0.5, 0.5, 0.3], [0.03] * 4, [0.2, 0.5, 0.5, 0.3], [0.03] * 4),
    "kurtosis_first": ([10, 20, 40, 45], [8, 9, 20, 30], [5, 8, 9, 20], [3, 3.1, 3, 3.4]),
    "norm_ratio_first": ([0.5, 0.6, 0.7, 0.8], [0.5, 0.6, 0.7, 0.8], [0.45, 0.5, 0.6, 0.7], [0.25] * 4),
    "max_abs_first": ([30, 50, 52, 40], [30, 40, 41, 42], [20, 30, 40, 50], [8, 9, 9, 10]),
    "kurtosis_rest": ([6, 7, 8, 9], [6, 7, 8, 9], [3, 4, 4, 5], [3] * 4),
}
SINGLE = {"perplexity": 50.0, "max_abs_rest": 10.0, "loss_nats": 4.0}
# The same channels where there are outliers, others where not.
OVERLAPS = [f"{sets}_between_{key}" for sets in ("largest_channel", "largest_channels") for key in
            ("sequences", "positions", "layers")]  # fmt: skip


def made_up(name, workdir=None, *, seeds=(0, 1), change=None, failed=(), losses=None):
    """A study with the values above, changed by `change(variant, metric, values)`, and runs on disk where wanted."""
    experiment = find(name)
    variants, rows = experiment.variants("tiny"), []
    for seed, v in itertools.product(seeds, variants):
        method = v.name.rsplit("_", 1)[1]
        metrics = {}
        for metric, by_method in VALUES.items():
            values = np.array(by_method[METHODS.index(method)], float)
            values = change(v.name, metric, values) if change else values
            metrics |= {f"{metric}/layer_{i}": float(value) for i, value in enumerate(values)}
            metrics[metric] = float(values.mean())
        single = SINGLE | dict.fromkeys(OVERLAPS, 0.3 if method == "cured" else 0.9)
        metrics |= {
            key: float(change(v.name, key, np.array(value))) if change else value for key, value in single.items()
        }
        row = {"variant": v.name, "seed": seed, "overrides": changed_fields(Config(), v.config), "metrics": metrics}
        row["run"] = f"{v.name}-seed{seed}"
        rows.append(row | ({"metrics": {}, "failed": "killed"} if (v.name, seed) in failed else {}))
        if workdir and (v.name, seed) not in failed:
            write_run(workdir / row["run"], losses)
    data = {"file_count": 3, "source_sha256": "0" * 64, "tokenizer": "bpe:2048", "train": {"n_tokens": 10}}
    provenance = {"versions": {"jax": "0"}, "device": "cpu", "seeds": list(seeds), "data": [data], "date": "2000-01-01"}
    results = {"rows": rows, "provenance": provenance | {"training_seconds": 60.0}}
    return Study(experiment, "tiny", variants, tuple(seeds), workdir or Path(), results)


def write_run(folder, losses):
    rng = np.random.default_rng(0)
    maps = {"attention": rng.random((4, 8, 8)), "hidden": rng.random((4, 8, CHANNEL_COUNT)), "tokens": np.arange(8)}
    keep(folder, Measure("maps", lambda *_: Measured({}, {})), Measured({}, maps))
    lines = [{"step": 20 * i, "loss_nats": loss} for i, loss in enumerate(losses or [7.0, 6.0, 5.0, 4.5, 4.4], 1)]
    lines += [{"step": step, "validation_loss_nats": 5.0 - step / 100} for step in (50, 100)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def layer_claims(study):
    """Those of a report on layers, without its pictures."""
    return study.experiment.report.keywords["quantity"].claims(study)


def verdicts(study):
    return [claim.verdict for claim in study.experiment.report(study).claims]


@pytest.mark.parametrize("name", ["figure7", *slow("figure12", "figure17", "figure22")])
def test_every_claim_on_layers_holds_for_what_the_paper_describes_and_has_a_criterion(name):
    study = made_up(name)
    report = study.experiment.report(study)
    assert {claim.verdict for claim in report.claims} == {"holds"}
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    assert len(report.tables[0].rows) == 20
    first = int(name.removeprefix("figure"))
    numbers = [int(re.findall(r"figure(\d+)_", picture.name)[0]) - first for picture in report.pictures]
    assert numbers == [0, 1, 2, 2, 3]  # one for each model; 350M and 1.4B are one figure there
    for picture in report.pictures:
        labels = [line.get_label() for line in picture.figure.axes[0].get_lines()]
        assert labels[:4] == ["softmax + Adam", "softmax-1 + Adam", "softmax + OrthoAdam", "softmax-1 + OrthoAdam"]
    plt.close("all")


@pytest.mark.parametrize(
    ("name", "method", "values", "claim"),
    [
        ("figure7", "vanilla", [0.6, 0.5, 0.4, 0.2], "With softmax and Adam, dominance begins low"),
        ("figure7", "orthoadam", [0.1, 0.5, 0.3, 0.5], "With softmax and OrthoAdam, dominance falls"),
        ("figure7", "cured", [0.1, 0.4, 0.1, 0.1], "With OrthoAdam, softmax-1 removes"),
        ("figure12", "softmax1", [30, 20, 10, 9], "With softmax-1 and Adam, the kurtosis"),
        ("figure12", "vanilla", [40, 41, 42, 43], "With softmax and Adam, the kurtosis"),  # no growth to speak of
        ("figure12", "orthoadam", [11, 12, 13, 14], "With OrthoAdam alone"),
        ("figure12", "cured", [3, 5, 3, 3], "With both"),
        ("figure17", "vanilla", [0.8, 0.7, 0.6, 0.5], "With softmax and Adam, the norm ratio"),
        ("figure22", "vanilla", [30, 20, 50, 60], "outliers of the first token are established"),
        ("figure22", "cured", [8, 9, 9, 60], "smaller activations"),
    ],
)  # fmt: skip
def test_layers_that_contradict_a_claim_turn_its_verdict_alone(name, method, values, claim):
    metric = find(name).report.keywords["quantity"].metric

    def change(variant, key, old):
        turned = key == metric and variant.endswith(f"_{method}")
        return np.array(values, float) if turned and not variant.startswith("llama2") else old  # most models

    study = made_up(name, change=change)
    wrong = [c for c in layer_claims(study) if c.verdict != "holds"]
    assert [c.verdict for c in wrong] == ["does not hold"]
    assert claim in wrong[0].text


def test_without_dominance_or_outliers_nothing_is_claimed_of_them():
    flat = {"first_attention_fraction": 0.07, "kurtosis_first": 3.0, "norm_ratio_first": 0.25}
    for name in ("figure7", "figure12", "figure17", "figure22"):
        study = made_up(name, change=lambda _, metric, old: np.full_like(old, flat.get(metric, 1.0)))
        assert {claim.verdict for claim in layer_claims(study)} == {"not visible at this scale"}


def test_layers_stand_between_0_and_1_and_a_single_one_at_0():
    study = made_up("figure7")
    (x, _), *_ = layer_curves(study, study.variants, "kurtosis_first", normalized=True).values()
    assert x == [0, 1 / 3, 2 / 3, 1]
    single = made_up("figure7", change=lambda _, __, old: old[:1] if old.ndim else old)
    (x, y), *_ = layer_curves(single, single.variants, "kurtosis_first", normalized=True).values()
    assert x == [0]
    assert y.shape == (2, 1)
    assert "holds" not in {claim.verdict for claim in layer_claims(single)[:2]}


@pytest.mark.parametrize(
    "name", ["figure1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("figure27", "figure34"))]
)
def test_reports_of_maps_show_every_model_and_hold_for_what_the_paper_describes(name, tmp_path):
    study = made_up(name, tmp_path)
    report = study.experiment.report(study)
    assert [claim.verdict for claim in report.claims] == ["holds"] * len(report.claims)
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    write_report(report, tmp_path)
    for picture in report.pictures:
        assert (tmp_path / f"figures/{picture.name}.png").stat().st_size > 1000
    plt.close("all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "metric", "value", "claim"),
    [
        ("figure1", "gpt2_130m_cured", "first_attention_fraction", 0.3, "Softmax-1 eliminates"),
        ("figure1", "gpt2_130m_cured", "kurtosis_rest", 3.6, "OrthoAdam and softmax-1 remove"),
        ("figure34", "gpt2_130m_cured", "first_attention_mass", 0.3, "no layer has it"),
    ],
)  # fmt: skip
def test_numbers_that_contradict_a_claim_on_maps_turn_its_verdict_alone(name, variant, metric, value, claim, tmp_path):
    def change(v, key, old):
        return np.full_like(old, value) if (v, key) == (variant, metric) else old

    study = made_up(name, tmp_path, change=change)
    wrong = [c for c in study.experiment.report(study).claims if c.verdict != "holds"]
    assert [c.verdict for c in wrong] == ["does not hold"]
    assert claim in wrong[0].text
    plt.close("all")


def test_channels_are_the_same_by_either_size_of_set_and_only_where_that_says_something_of_outliers():
    def verdict_of_positions(vanilla, cured=(0.3, 0.3)):
        values = {"gpt2_130m_vanilla": vanilla, "gpt2_130m_cured": cured}

        def change(v, key, old):
            sets, _, what = key.partition("_between_")
            return np.array(values[v][sets == "largest_channels"]) if what == "positions" else old

        claims = _overlap_claims(made_up("figure27", change=change))
        assert [claim.verdict for claim in claims if "for every position" not in claim.text] == ["holds"] * 2
        return claims[1].verdict

    assert verdict_of_positions((0.5, 0.9)) == "holds"
    assert verdict_of_positions((0.9, 0.5)) == "holds"
    assert verdict_of_positions((0.7, 0.7)) == "does not hold"
    assert verdict_of_positions((0.9, 0.9), cured=(0.9, 0.5)) == "holds"  # by the second size
    assert verdict_of_positions((0.9, 0.7), cured=(0.85, 0.3)) == "does not hold"  # by one and the same size
    assert verdict_of_positions((0.86, 0.83), cured=(0.78, 0.75)) == "does not hold"  # hardly more than without
    assert verdict_of_positions((0.99, 0.99), cured=(0.8, 0.85)) == "not visible at this scale"


@pytest.mark.slow
def test_what_a_small_model_does_not_have_yet_is_no_failure_and_at_the_papers_scale_it_is(tmp_path):
    def change(variant, metric, old):
        return np.full_like(old, 0.05) if metric == "first_attention_fraction" else old

    study = made_up("figure1", tmp_path, change=change)
    assert verdicts(study)[:2] == ["not visible at this scale"] * 2
    assert verdicts(dataclasses.replace(study, scale="paper"))[:2] == ["does not hold", "not visible at this scale"]
    plt.close("all")


def test_losses_are_similar_where_those_of_the_papers_table_2_are():
    def differences(model):
        base = TABLE_2[model, "vanilla"]["perplexity"]
        return [math.log(TABLE_2[model, m]["perplexity"] / base) for m in METHODS if (model, m) in TABLE_2]

    largest = max(value for model in MODELS.values() for value in differences(model))
    assert largest < SIMILAR_NATS < 1.5 * largest


@pytest.mark.slow
def test_training_curves_hold_for_equal_losses_without_spikes(tmp_path):
    study = made_up("figure41", tmp_path)
    report = study.experiment.report(study)
    assert [claim.verdict for claim in report.claims] == ["holds"] * 4
    assert [picture.name.split("_")[0] for picture in report.pictures] == [
        "figure41", "figure42", "figure43", "figure43", "figure44",
    ]  # fmt: skip
    assert len(report.tables[0].rows) == 20
    worse = made_up(
        "figure41", tmp_path, change=lambda v, m, old: old + 0.03 * (m == "loss_nats" and v == "gpt2_350m_softmax1")
    )
    assert verdicts(worse) == ["holds", "does not hold", "holds", "holds"]
    spiky = made_up("figure41", tmp_path, seeds=(0,), losses=[7.0] * 20 + [5.0] * 5 + [6.2] + [5.0] * 5)
    assert verdicts(spiky)[0] == "does not hold"  # the spike at step 520, where warm-up has ended at 100
    plt.close("all")


@pytest.mark.parametrize(
    "name",
    [
        "figure1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("figure7", "figure27", "figure34", "figure41")),
    ],
)
def test_runs_that_failed_are_told_and_the_others_are_shown(name, tmp_path):
    failed = {("gpt2_130m_vanilla", 0), ("gpt2_130m_cured", 0), ("gpt2_130m_cured", 1)}
    study = made_up(name, tmp_path, failed=failed)
    report = study.experiment.report(study)
    assert sum("killed" in text for text in report.summary) == 3
    assert report.claims == []
    assert any("failed" in row for row in report.tables[0].rows)
    write_report(report, tmp_path)
    curves = training_curves(study, study.variants, "loss_nats")
    labels = {v.name: v.label for v in study.variants}
    assert curves[labels["gpt2_130m_vanilla"]][1].shape == (1, 5)
    assert labels["gpt2_130m_cured"] not in curves
    plt.close("all")


# Pictures.


@pytest.mark.slow
def test_pictures_of_models_have_a_panel_for_every_model_that_finished(tmp_path):
    study = made_up("figure7", tmp_path, failed={("llama2_130m_cured", 0), ("llama2_130m_cured", 1)})
    pictures = model_pictures.model_pictures(study, study.variants)
    assert [picture.name for picture in pictures] == ["attention_map", "hidden_states"]
    for picture in pictures:
        shown = [ax.get_title() for ax in picture.figure.axes if ax.get_visible() and ax.get_images()]
        assert len(shown) == 19
        assert all(MODELS["llama2_130m"] in title for title in shown[-3:])
    assert model_pictures.model_pictures(study, study.variants[-1:]) == []
    plt.close("all")


def test_a_method_has_one_colour_whatever_else_is_drawn():
    labels = ["ReLU", "softmax-1 + OrthoAdam", "sigmoid", "GPT2 60M, softmax + Adam", "GPT2 130M, softmax + Adam"]
    looks = drawing.looks(labels)
    assert [color for color, _ in looks[1::2]] == [
        drawing.METHOD_COLORS["softmax-1 + OrthoAdam"],
        drawing.METHOD_COLORS["softmax + Adam"],
    ]
    assert looks[3][0] == looks[4][0]
    assert looks[3][1] != looks[4][1]
    assert len(set(drawing.looks([f"curve {i}" for i in range(40)]))) == 40
    pairs = drawing.looks(["a first", "a others", "b first", "b others"], pairs=True)
    assert [pairs[0][0], pairs[2][0]] == [pairs[1][0], pairs[3][0]]
    assert pairs[0][0] != pairs[2][0]
    assert [style for _, style in pairs] == ["-", "--"] * 2


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (5, (2, 4))])
def test_panels_wrap_over_rows_and_share_one_scale(count, grid):
    figure = drawing.maps(
        {str(i): np.full((3, 3), i + 1.0) for i in range(count)}, x_label="x", y_label="y", value_label="v"
    )
    panels = [ax for ax in figure.axes if ax.get_images()]
    assert len(panels) == count
    assert {ax.get_images()[0].norm.vmax for ax in panels} == {count}
    spec = panels[0].get_gridspec()
    assert (spec.nrows, spec.ncols) == grid
    assert sum(bool(ax.get_xlabel()) for ax in panels) == min(count, grid[1])  # below every column
    plt.close("all")


def test_a_hidden_map_names_its_channels():
    figure = model_pictures.draw_hidden({"a": np.ones((3, 2))}, channels=[5, 61])
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["5", "61"]
    assert CHANNELS <= 20  # as many names as fit below a panel
    plt.close("all")
