"""Tables 1, 4 and 7 of From Attention to Activation: what their reports conclude, and models that are only measured."""

import dataclasses
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.study.study import Study, given_model, run_study
from orthojax.experiments.study.variant import Variant, run_name

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.from_attention import table1, table4, table7
from orthojax.experiments.from_attention.models import MODELS, grid
from orthojax.experiments.from_attention.paper_tables import TABLE_1, TABLE_3, TABLE_4, TABLE_7
from orthojax.fields import replace
from orthojax.train import open_inputs, optimizer_state_bytes, train

FOUR_BITS = "perplexity_int4_zeropoint"
DATA = {"file_count": 3, "source": "prose", "source_sha256": "0" * 64, "tokenizer": "bytes", "train": {"n_tokens": 10}}


def made_up(experiment, variants, metrics, seeds=(0, 1, 2), **extra):
    """A study whose metrics are `metrics(variant name, seed)`; None is a run that failed."""
    rows = []
    for seed in seeds:
        for v in variants:
            values = metrics(v.name, seed)
            row = {"variant": v.name, "seed": seed, "overrides": {}, "metrics": values or {}, "run": v.name}
            rows.append(row if values is not None else row | {"failed": "the loss is not finite at step 3"})
    provenance = {"versions": {"jax": "0"}, "device": "cpu", "seeds": list(seeds), "data": [DATA], "date": "2000-01-01"}
    results = {"rows": rows, "provenance": provenance | {"training_seconds": 60.0}} | extra
    return Study(experiment, "tiny", tuple(variants), tuple(seeds), Path(), results)


def verdicts(report):
    plt.close("all")
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    for table in report.tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    return [claim.verdict for claim in report.claims]


# Table 1.

GIVEN = Variant("theirs", "theirs", LANGUAGE_MODEL)  # softmax and Adam, as most models that others train


def four_bits(change, seeds=(0, 1, 2), given=()):
    """Table 1 with a float perplexity of 60 + seed and `change(name)` as what 4 bits add to it."""
    variants = (*table1.EXPERIMENT.variants("tiny"), *given)

    def metrics(name, seed):
        kurtosis = dict.fromkeys(("kurtosis_first", "kurtosis_rest"), 3.0 + change(name))
        return {"perplexity": 60.0 + seed, FOUR_BITS: (60.0 + seed) * (1 + change(name))} | kurtosis

    return made_up(table1.EXPERIMENT, variants, metrics, seeds)


def paper_change(name):
    """What Table 3 prints, and for a given model what Table 1 prints of GPT2-Large, the least broken one."""
    if name == "theirs":
        return TABLE_1["GPT2-Large 812M"][FOUR_BITS] / TABLE_1["GPT2-Large 812M"]["perplexity"] - 1
    model, _, method = name.rpartition("_")
    return TABLE_3[MODELS[model], method][FOUR_BITS] / TABLE_3[MODELS[model], method]["perplexity"] - 1


def test_the_papers_own_numbers_meet_the_criteria_of_table_1(tmp_path):
    report = table1.EXPERIMENT.report(four_bits(paper_change, given=(GIVEN,)))
    write_report(report, tmp_path)
    assert verdicts(report) == ["holds"] * 3
    rows = {row[0]: row for row in report.tables[0].rows}
    assert rows["theirs"][5:] == ["", "", ""]
    assert rows["GPT2 1.4B, softmax-1 + OrthoAdam"][5:] == ["13.33", "13.6", "0.3"]
    assert "theirs +2165.87%" in report.claims[0].whole()


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("theirs", 0.9, ["does not hold", "holds", "holds"]),
        ("llama2_130m_vanilla", 0.2, ["holds"] * 3),  # the paper's too stays usable
        ("gpt2_60m_vanilla", 0.05, ["does not hold", "holds", "does not hold"]),  # less than its cured form's 0.065
        ("gpt2_1_4b_cured", 0.21, ["holds", "does not hold", "holds"]),
    ],
)
def test_one_model_turns_the_verdicts_that_are_about_it(name, change, expected):
    study = four_bits(lambda n: change if n == name else paper_change(n), seeds=(0,), given=(GIVEN,))
    assert verdicts(table1.EXPERIMENT.report(study)) == expected


def test_where_four_bits_cost_nothing_nothing_is_claimed_and_a_given_cured_model_is_ours():
    study = four_bits(lambda name: 0.005 if "vanilla" in name else 0.001)
    assert verdicts(table1.EXPERIMENT.report(study)) == ["not visible at this scale"] * 3
    little = four_bits(lambda name: 0.15 if "vanilla" in name else 0.1)  # broken is nobody
    assert verdicts(table1.EXPERIMENT.report(little)) == ["does not hold", "not visible at this scale", "holds"]
    ours = Variant("theirs", "theirs", table1.EXPERIMENT.variants("tiny")[1].config)
    claims = table1.EXPERIMENT.report(four_bits(paper_change, given=(ours,))).claims
    assert "theirs" not in claims[0].whole()
    assert "theirs" in claims[1].whole()
    plt.close("all")


def test_a_failed_run_of_table_1_is_told_and_the_others_stay():
    study = four_bits(paper_change)
    study.results["rows"][0] |= {"metrics": {}, "failed": "the loss is not finite at step 3"}
    report = table1.EXPERIMENT.report(study)
    assert verdicts(report) == []
    assert any("not finite at step 3" in text for text in report.summary)
    assert report.tables[0].rows[0][1].startswith("61.5 (61 to 62)")


def test_tables_1_and_4_are_about_runs_of_the_grid():
    shared = {run_name(v, 0) for v in grid("tiny")}
    for experiment in (table1.EXPERIMENT, table4.EXPERIMENT):
        assert {run_name(v, 0) for v in experiment.variants("tiny")} < shared
        assert set(experiment.scales) == {"tiny", "small", "paper"}


# Table 4.


def costs(ratio, memory, **others):
    def of(name):
        cured = name.endswith("cured")
        step = [ratio if cured else 1.0] * 3
        sizes = {"optimizer_state_bytes": 100, "program_bytes": None if memory is None else memory if cured else 1e6}
        return {"step_ratio": step, "step_seconds": 0.1 * step[0]} | sizes

    return {v.name: of(v.name) for v in table4.EXPERIMENT.variants("tiny")} | others


@pytest.mark.parametrize(
    ("ratio", "memory", "expected"),
    [
        (1.25, 1.05e6, ["holds", "holds"]),  # the paper's worst
        (1.3, 0.9e6, ["does not hold", "holds"]),
        (0.9, 1.1e6, ["holds", "does not hold"]),
        (1.0, None, ["holds", "not visible at this scale"]),
    ],
)
def test_speed_and_memory_are_ratios_beside_the_papers(ratio, memory, expected, tmp_path):
    study = made_up(table4.EXPERIMENT, table4.EXPERIMENT.variants("tiny"), None, (), costs=costs(ratio, memory))
    report = table4.EXPERIMENT.report(study)
    write_report(report, tmp_path)
    assert verdicts(report) == expected
    speed = {row[0]: row for row in report.tables[0].rows}
    assert speed["GPT2 130M"][1] == "10"
    assert float(speed["GPT2 130M"][3].split()[0]) == pytest.approx(1 / ratio, abs=0.005)
    assert float(speed["GPT2 130M"][-1]) == pytest.approx(6.0 / 7.5)
    assert speed["Llama2 130M"][-1] == ""


def test_the_paper_prints_two_rows_for_every_gpt2_and_none_for_llama2():
    assert {label for label, _ in TABLE_4} == set(MODELS.values()) - {"Llama2 130M"}


def test_a_model_that_does_not_fit_leaves_the_others():
    failed = {name: {"failed": "out of memory"} for name in ("gpt2_1_4b_vanilla", "gpt2_1_4b_cured")}
    made = costs(1.1, 1e6, **failed)
    report = table4.EXPERIMENT.report(
        made_up(table4.EXPERIMENT, grid("tiny", methods=("vanilla", "cured")), None, (), costs=made)
    )
    assert verdicts(report) == ["holds", "holds"]
    assert "gpt2_1_4b_cured: out of memory" in report.summary
    assert report.tables[1].rows[3][1:7] == ["failed"] * 6


# Table 7, and real models.


def pair(fraction=1.0, mass=1.0, first=1.0, pooled=1.3, base=0.95, tokenizer="bytes"):
    configs = [replace(LANGUAGE_MODEL, {"data.tokenizer": name}) for name in ("bytes", tokenizer, "bytes")]
    variants = [Variant(name, name, c) for name, c in zip(("base", "tuned", "odd"), configs, strict=True)]

    def metrics(name, seed):
        tuned = name == "tuned"
        values = {
            "first_attention_fraction": base * (fraction if tuned else 1.0),
            "first_attention_mass": 0.7 * (mass if tuned else 1.0),
            "kurtosis_first": 1000.0 * (first if tuned else 1.0),
            "kurtosis_pooled": 50.0 * (pooled if tuned else 1.0),
        }
        return values | {"kurtosis_rest": 40.0, "perplexity": 20.0}

    return made_up(table7.EXPERIMENT, variants, metrics, seeds=(0,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["holds"] * 3),
        ({"mass": 0.7013 / 0.7349}, ["holds"] * 3),  # the paper's own
        ({"fraction": 0.94}, ["does not hold", "holds", "holds"]),
        ({"mass": 1.06}, ["does not hold", "holds", "holds"]),
        ({"first": 0.9}, ["holds", "does not hold", "holds"]),
        ({"pooled": 1.0}, ["holds", "holds", "does not hold"]),
        ({"base": 0.1}, ["not visible at this scale", "holds", "holds"]),
        ({"tokenizer": "bpe:2048"}, ["not visible at this scale"] * 3),  # another model on another text
        ({"tokenizer": "bpe:2048", "first": 0.5}, ["not visible at this scale"] * 3),
    ],
)
def test_what_fine_tuning_changes_decides_the_verdicts_of_table_7(changes, expected):
    report = table7.EXPERIMENT.report(pair(**changes))
    assert verdicts(report) == expected
    assert [row[0] for row in report.tables[0].rows] == ["base", "tuned", "odd"]
    assert [row[0] for row in report.tables[1].rows] == ["base to tuned"]
    assert any("odd has no second model" in text for text in report.summary)
    assert list(TABLE_7["Llama-3.1-8B"].values()) == [0.9545, 0.7349, 1227.0, 55.0]


def test_table_7_without_models_says_what_it_needs(tmp_path):
    with pytest.raises(UserError, match="'table7' needs a model") as error:
        run_study(table7.EXPERIMENT, "tiny", (0,), tmp_path / "w", runs_dir=tmp_path, cache_dir=tmp_path)
    assert "--model=NAME=CHECKPOINT" in str(error.value)
    assert not (tmp_path / "w").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Config:
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text("What goes up must come down, unless it is fast enough. " * 60, encoding="utf-8")
    shape = {"vocab_size": 258, "d_model": 16, "num_heads": 2, "num_layers": 1, "d_mlp": 16, "max_length": 16}
    changes = {"data.kind": "text", "data.paths": (str(text),), "data.tokenizer": "bytes", "data.sequence_length": 16}
    changes |= {f"model.{name}": value for name, value in shape.items()}
    changes |= {"train.steps": 4, "train.batch_size": 4, "train.eval_every_steps": 4, "train.probe_every_steps": 0}
    return replace(LANGUAGE_MODEL, changes | {"eval.sequences": 4, "eval.batch_size": 4, "optim.warmup_steps": 1})


@pytest.mark.slow
def test_a_model_and_the_one_fine_tuned_from_it_are_measured_side_by_side(run, tmp_path):
    inputs = open_inputs(run, tmp_path / "data")
    train(run, inputs, tmp_path / "base")
    tuned = replace(run, {"train.init_from": str(tmp_path / "base"), "optim.learning_rate": 1e-9})
    train(tuned, inputs, tmp_path / "tuned")
    models = [given_model(name, tmp_path / name) for name in ("base", "tuned")]
    folders = {"runs_dir": tmp_path / "runs", "cache_dir": tmp_path / "data"}
    study = run_study(table7.EXPERIMENT, "tiny", (0,), tmp_path / "study", models=models, **folders)
    report = table7.EXPERIMENT.report(study)
    write_report(report, study.workdir)
    base, same = (study.values(name, "kurtosis_pooled")[0] for name in ("base", "tuned"))
    np.testing.assert_allclose(same, base, rtol=1e-4)  # a learning rate of next to nothing
    assert base != same
    assert all(cell == "+0.0%" or cell == "-0.0%" for cell in report.tables[1].rows[0][1:])
    told = [note for note in report.notes if note.startswith("tuned: begins from")]
    assert str(tmp_path / "base") in told[0]
    assert "none" in told[0]
    assert "--model=base=" in report.notes[0]
    assert list((tmp_path / "runs").glob("*")) == []


@pytest.mark.slow
def test_table_4_trains_nothing_and_counts_bytes_as_the_compiler_and_the_optimizer_do(run, tmp_path):
    variants = tuple(
        dataclasses.replace(v, config=replace(run, {"model.normalizer": v.config.model.normalizer}
        | {"optim.optimizer": v.config.optim.optimizer}))
        for v in table4.EXPERIMENT.variants("tiny")
    )  # fmt: skip
    experiment = dataclasses.replace(table4.EXPERIMENT, scales={"tiny": lambda: variants})
    study = run_study(experiment, "tiny", (0, 1), tmp_path, runs_dir=tmp_path / "runs", cache_dir=tmp_path / "data")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["rows"] == []
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "data").exists()
    for v in variants:
        cost = results["costs"][v.name]
        state = optimizer_state_bytes(v.config)
        assert cost["optimizer_state_bytes"] == state
        # Parameters, as many bytes as each of the two moments, are in it too; and more than that.
        assert cost["program_bytes"] > 1.4 * state
        assert cost["step_seconds"] > 0
        assert (cost["step_ratio"] == [1.0, 1.0, 1.0]) == v.name.endswith("vanilla")
    assert len(verdicts(experiment.report(study))) == 2
