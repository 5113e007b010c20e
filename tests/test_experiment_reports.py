"""What reports conclude from numbers: studies with made-up metrics, and small real ones for what studies measure."""

import dataclasses
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.study.learning_rates import TRIAL_STEPS, best_learning_rate, trial_config
from orthojax.experiments.study.study import Experiment, Study, run_study
from orthojax.experiments.study.variant import Variant

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.catalog import ALL, find
from orthojax.experiments.ours import optimizer_outliers, rotation_ablation
from orthojax.fields import changed_fields, replace
from orthojax.optim import Rotation
from orthojax.train import make_rotation, optimizer_state_bytes, read_metrics

SETTINGS = ("int8_fine", "int8_fine_per_token", "int8_moderate", "int8_coarse", "int4_zeropoint")


def made_up(experiment, kurtosis, perplexity, seeds=(0, 1, 2), **extra):
    """A study whose kurtosis and perplexity by variant are given; each seed is a little above the one before."""
    variants = experiment.variants("tiny")
    rows = []
    for seed in seeds:
        for v in variants:
            k, p = kurtosis(v.name), perplexity(v.name) + 0.1 * seed
            metrics = dict.fromkeys(("max_abs_first", "max_abs_rest", "first_attention_mass", "norm_ratio_rest"), 0.5)
            metrics |= {"perplexity": p} | {f"perplexity_{name}": p * 1.01 for name in SETTINGS}
            for name in ("kurtosis_first", "kurtosis_rest", "rotated_kurtosis_first", "rotated_kurtosis_rest"):
                value = k if not name.startswith("rotated") else 30.0
                metrics |= {name: value} | {f"{name}/layer_{layer}": value for layer in range(4)}
            rates = {f"{rate:g}": 5.0 + i for i, rate in enumerate(v.learning_rates)}
            row = {"variant": v.name, "seed": seed, "overrides": changed_fields(Config(), v.config)}
            row |= {"metrics": metrics, "run": f"{v.name}-seed{seed}"}
            rows.append(row | ({"learning_rates": rates} if rates else {}))
    data = {"file_count": 3, "source_sha256": "0" * 64, "tokenizer": "bpe:2048", "train": {"n_tokens": 10}}
    provenance = {"versions": {"jax": "0"}, "device": "cpu", "seeds": list(seeds), "data": [data], "date": "2000-01-01"}
    results = {"rows": rows, "provenance": provenance | {"training_seconds": 60.0}} | extra
    return Study(experiment, "tiny", variants, tuple(seeds), Path(), results)


CURED = {"haar_output", "hadamard_output", "dct_output", "hadamard_both", "haar_both", "hadamard_residual"}
CURED |= {"hadamard_writers", "embeddings_only", "shared", "fixed_in_model"}
CURED |= {v.name for v in rotation_ablation.SETTINGS}


def ablation(kurtosis=lambda name: 3.0 if name in CURED else 8.0, perplexity=lambda name: 60.0 + ("both" in name)):
    experiment = rotation_ablation.EXPERIMENT
    costs = {
        v.name: {"step_ratio": [1.5, 1.4, 1.6], "step_seconds": 0.1, "optimizer_state_bytes": 1000}
        for v in experiment.variants("tiny")
    }
    return made_up(experiment, kurtosis, perplexity, costs=costs)


def test_the_ablation_report_tells_every_variant_and_every_claim_with_its_criterion(tmp_path):
    report = rotation_ablation.EXPERIMENT.report(ablation())
    for table in report.tables:
        assert len(table.rows) == len(rotation_ablation.EXPERIMENT.variants("tiny"))
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert [claim.verdict for claim in report.claims] == ["holds"] * 7
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    write_report(report, tmp_path)
    assert (tmp_path / "figures/perplexity_and_kurtosis.svg").stat().st_size > 1000
    for line in (tmp_path / "report.md").read_text().splitlines():
        if line.startswith("| "):  # a bar inside a cell is no border, in headings too
            assert len(re.findall(r"(?<!\\)\|", line)) - 1 in {len(table.columns) for table in report.tables}
    plt.close("all")


@pytest.mark.parametrize(
    ("variant", "value", "claim"),
    [
        ("dct_output", 4.0, "A structured rotation"),
        ("hadamard_input", 3.0, "the axis that writes"),
        ("no_embeddings", 3.0, "The embedding tables"),
        ("shared", 9.0, "One matrix for the whole tree"),
        ("fixed_in_model", 5.0, "A fixed matrix inside"),
    ],
)
def test_a_kurtosis_that_contradicts_a_claim_of_the_ablation_turns_its_verdict_alone(variant, value, claim):
    study = ablation(lambda name: value if name == variant else (3.0 if name in CURED else 8.0))
    wrong = [c for c in rotation_ablation.EXPERIMENT.report(study).claims if c.verdict != "holds"]
    assert len(wrong) == 1
    assert claim in wrong[0].text
    plt.close("all")


@pytest.mark.parametrize(
    ("variant", "change", "claim"),
    [
        ("hadamard_both", -1.0, "Both axes cost perplexity"),
        ("identity", 0.01, "no rotation for Adam"),
        ("signed_permutation", 1.0, "no rotation for Adam"),
    ],
)
def test_a_perplexity_that_contradicts_a_claim_of_the_ablation_turns_its_verdict_alone(variant, change, claim):
    study = ablation(perplexity=lambda name: 60.0 + ("both" in name) + change * (name == variant))
    wrong = [c for c in rotation_ablation.EXPERIMENT.report(study).claims if c.verdict != "holds"]
    assert len(wrong) == 1
    assert claim in wrong[0].text
    plt.close("all")


@pytest.mark.parametrize("failed", [{("dct_output", 1)}, {("vanilla", seed) for seed in (0, 1, 2)}, {("adam", 0)}])
def test_a_run_that_failed_is_told_and_the_others_stay(failed, tmp_path):
    study = ablation()
    for row in study.results["rows"]:
        if (row["variant"], row["seed"]) in failed:
            row |= {"metrics": {}, "failed": "the loss is not finite at step 3"}
    report = rotation_ablation.EXPERIMENT.report(study)
    assert any("not finite at step 3" in text for text in report.summary)
    assert report.claims == []
    write_report(report, tmp_path)
    perplexities = {row[0]: row[1] for row in report.tables[0].rows}
    assert perplexities["haar, output"].startswith("60.1 (60 to 60.2)")
    assert (perplexities["softmax, Adam"] == "failed") == (("vanilla", 2) in failed)


def test_without_outliers_there_is_nothing_to_cure():
    study = ablation(lambda name: 3.0)
    claims = rotation_ablation.EXPERIMENT.report(study).claims
    assert claims[0].verdict == "not visible at this scale"
    plt.close("all")


def test_the_ablation_changes_one_factor_at_a_time():
    base = {v.name: v for v in rotation_ablation.EXPERIMENT.variants("tiny")}
    reference = base["hadamard_output"].config
    for name, variant in base.items():
        changed = set(changed_fields(reference, variant.config))
        if name == "vanilla":
            assert changed == {"optim.optimizer", "model.normalizer"}
        elif name == "adam":
            assert changed == {"optim.optimizer"}
        elif name == "fixed_in_model":
            assert changed == {"optim.optimizer", "model.fixed_rotation"}
        else:
            assert len(changed - {"optim.rotation.axes"}) <= 1
            assert "optim.optimizer" not in changed
    assert make_rotation(base["hadamard_output"].config.optim.rotation).kind == "hadamard"
    assert base["hadamard_output"].config.optim.rotation == Config().optim.rotation  # the base is the default
    assert Rotation().kind == "hadamard"


# The table of optimizers.

PLAIN_OUTLIERS = {"adam", "rmsprop", "lion"}


def outliers(kurtosis):
    return made_up(optimizer_outliers.EXPERIMENT, kurtosis, lambda name: 60.0)


def test_the_optimizer_report_names_who_makes_outliers_and_who_is_cured(tmp_path):
    report = optimizer_outliers.EXPERIMENT.report(outliers(lambda name: 9.0 if name in PLAIN_OUTLIERS else 3.0))
    first, second = report.claims
    assert (first.verdict, second.verdict) == ("holds", "holds")
    assert all(label in first.text.split("not above")[0] for label in ("Adam 9.0", "RMSProp 9.0", "Lion 9.0"))
    assert "Of 3 with outliers 3" in second.text
    write_report(report, tmp_path)
    rates = report.tables[-1]
    assert len(rates.rows) == 3 * len(optimizer_outliers.EXPERIMENT.variants("tiny"))
    report = optimizer_outliers.EXPERIMENT.report(
        outliers(lambda name: 9.0 if name in PLAIN_OUTLIERS | {"lion_rotated"} else 3.0)
    )
    assert [claim.verdict for claim in report.claims] == ["holds", "does not hold"]
    plt.close("all")


def test_optimizers_come_in_pairs_that_differ_in_the_basis_alone():
    variants = optimizer_outliers.EXPERIMENT.variants("tiny")
    assert len(variants) >= 24
    for plain, rotated in zip(variants[::2], variants[1::2], strict=True):
        assert changed_fields(plain.config, rotated.config) == {"optim.rotated": True}
        assert plain.learning_rates == rotated.learning_rates
        assert len(plain.learning_rates) == 3


# What studies measure, with a model that takes a second.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text("What goes up must come down, unless it is fast enough. " * 60, encoding="utf-8")
    return replace(
        LANGUAGE_MODEL,
        {
            "data.kind": "text", "data.paths": (str(text),), "data.tokenizer": "bytes", "data.sequence_length": 16,
            "model.vocab_size": 258, "model.d_model": 16, "model.num_heads": 2, "model.num_layers": 1,
            "model.d_mlp": 16, "model.max_length": 16, "train.steps": 4, "train.batch_size": 4,
            "train.log_every_steps": 2, "train.eval_every_steps": 2, "train.checkpoint_every_steps": 2,
            "eval.sequences": 4, "eval.batch_size": 2, "optim.warmup_steps": 1,
        },
    )  # fmt: skip


@pytest.mark.slow
def test_the_best_learning_rate_of_short_trials_is_taken_and_trials_are_not_repeated(tiny, tmp_path, monkeypatch):
    from orthojax.experiments.study import learning_rates

    monkeypatch.setattr(learning_rates, "TRIAL_STEPS", 6)
    variant = Variant("adam", "Adam", tiny, learning_rates=(1e-5, 3e-2, 1e30))
    experiment = Experiment("trial", "", {"tiny": lambda: (variant,)}, lambda study: None)
    folders = {"runs_dir": tmp_path / "runs", "cache_dir": tmp_path / "data"}
    study = run_study(experiment, "tiny", (0,), tmp_path, **folders)
    (row,) = study.results["rows"]
    losses = row["learning_rates"]
    assert list(losses) == ["1e-05", "0.03", "1e+30"]
    assert losses["1e+30"] is None or losses["1e+30"] > losses["0.03"]
    assert losses["0.03"] < losses["1e-05"]
    assert row["overrides"]["optim.learning_rate"] == 0.03
    used = read_metrics(study.run_dir("adam", 0) / "metrics.jsonl")
    assert max(line.get("learning_rate", 0.0) for line in used) == pytest.approx(0.03)
    monkeypatch.setattr(learning_rates, "train", lambda *args, **kwargs: pytest.fail("tried again"))
    again = run_study(experiment, "tiny", (0,), tmp_path, **folders)
    assert again.results["rows"] == study.results["rows"]
    other = dataclasses.replace(variant, config=replace(tiny, {"train.batch_size": 8}))
    changed = dataclasses.replace(experiment, scales={"tiny": lambda: (other,)})
    with pytest.raises(pytest.fail.Exception, match="tried again"):  # another run, with trials of its own
        run_study(changed, "tiny", (0,), tmp_path, **folders)


def test_a_trial_is_a_short_run_of_the_same_config(tiny):
    trial = trial_config(replace(tiny, {"train.steps": 800, "optim.warmup_steps": 100}), 0.01)
    assert (trial.train.steps, trial.optim.warmup_steps, trial.optim.learning_rate) == (TRIAL_STEPS, 50, 0.01)
    assert trial.model == tiny.model


def test_when_every_trial_diverged_the_smallest_rate_is_left():
    assert best_learning_rate({"0.3": None, "0.1": None}) == 0.1


@pytest.mark.slow
def test_costs_are_measured_relative_to_the_reference_and_kept(tiny, tmp_path, monkeypatch):
    from orthojax.experiments.study import costs as module

    haar = {"optim.optimizer": "orthoadam", "optim.rotation.kind": "haar"}
    variants = (Variant("adam", "Adam", tiny), Variant("haar", "haar", replace(tiny, haar)))
    experiment = Experiment("c", "", {"tiny": lambda: variants}, lambda study: None, cost_reference=lambda _: "adam")
    folders = {"runs_dir": tmp_path / "runs", "cache_dir": tmp_path / "data"}
    study = run_study(experiment, "tiny", (0,), tmp_path, **folders)
    costs = json.loads((tmp_path / "results.json").read_text())["costs"]
    assert costs["adam"]["step_ratio"] == [1.0, 1.0, 1.0]
    assert 0.3 < costs["haar"]["step_ratio"][0] < 30
    stored = 4 * 16 * 16 * 8  # the output axis of four 16 x 16 attention, two MLP kernels and two tables
    assert costs["haar"]["optimizer_state_bytes"] - costs["adam"]["optimizer_state_bytes"] == stored
    assert costs["haar"]["optimizer_state_bytes"] == optimizer_state_bytes(variants[1].config)
    monkeypatch.setattr(module, "interleaved_seconds", lambda *args: pytest.fail("timed again"))
    other_runs = {v.name: replace(v.config, {"train.batch_size": 8}) for v in variants}
    with pytest.raises(pytest.fail.Exception, match="timed again"):
        module.measure_costs(other_runs, lambda _: "adam", tmp_path / "costs.json", print)
    assert run_study(experiment, "tiny", (0,), tmp_path, **folders).results["costs"] == costs
    assert np.isfinite(study.values("haar", "perplexity")).all()


def test_no_two_experiments_have_a_name_in_common():
    names = [name for found in ALL for name in (found.name, *found.also)]
    assert len(set(names)) == len(names)
    assert all(find(name).name == name or name in find(name).also for name in names)
    with pytest.raises(UserError, match="unknown experiment 'figure33x'"):
        find("figure33x")


@pytest.mark.parametrize("experiment", [found for found in ALL if isinstance(found, Experiment)], ids=lambda e: e.name)
def test_the_variants_of_an_experiment_have_names_of_their_own(experiment):
    for scale in experiment.scales:
        variants = experiment.variants(scale)
        assert len({variant.name for variant in variants}) == len(variants)
