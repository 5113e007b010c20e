"""An experiment from its variants to its report, with models that take a second; the judge; the listing."""

import base64
import dataclasses
import functools
import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from orthojax import quant
from orthojax.config import FIRST_DEFAULTS, Config, replace, to_json
from orthojax.errors import UserError
from orthojax.experiments import drawing, runs
from orthojax.experiments.base_configs import BACKCOPY_MODEL, LANGUAGE_MODEL, cured
from orthojax.experiments.catalog import listing, measured_speed
from orthojax.experiments.claims import Claim, Revision, in_every_seed, judge, not_measured
from orthojax.experiments.costs import Stepper, _costs_of_group, measure_costs
from orthojax.experiments.experiment import Case, Experiment, Run, Variant, run_name
from orthojax.experiments.measures import ALWAYS, Measure, Measured, example_maps, store, stored
from orthojax.experiments.page import Report, Table, console_table, escape_markdown, make_report, write_report
from orthojax.experiments.pictures import LayerCurves, ModelMaps, TrainingCurves, draw_hidden, perplexity_and_kurtosis
from orthojax.experiments.results import Results
from orthojax.experiments.runs import Task, best_learning_rate, is_trained, training_flops, trial_config
from orthojax.experiments.study import given_model, run_experiment
from orthojax.experiments.tables import MetricTable, PairedTable, change_text, difference_text
from orthojax.files import read_again
from orthojax.model import LoadedModel, Transformer
from orthojax.train import init_state, open_inputs

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1)
PROSE = "The quick brown fox jumps over the lazy dog, and nobody in particular is very much surprised by that. "


def small(config: Config, **changes) -> Config:
    shape = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_mlp": 16, "max_length": 16, "scan_layers": False}
    train = {"steps": 2, "batch_size": 4, "log_every_steps": 1, "eval_every_steps": 2, "checkpoint_every_steps": 2}
    shrink = {f"model.{name}": value for name, value in shape.items()}
    shrink |= {f"train.{name}": value for name, value in train.items()}
    shrink |= {"eval.sequences": 4, "eval.batch_size": 2, "data.sequence_length": 16, "optim.warmup_steps": 1}
    return replace(config, shrink | changes)


BACKCOPY = Variant("backcopy", "softmax", small(BACKCOPY_MODEL))  # whose evaluation compiles fastest


def folders(home):
    return {"runs_dir": home / "runs", "cache_dir": home / "data"}


def experiment_of(*variants, **fields):
    return Experiment(**{"name": "made", "title": "made up", "variants": lambda scale: variants} | fields)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text(PROSE * 60, encoding="utf-8")
    data = {"data.kind": "text", "data.paths": (str(text),), "data.tokenizer": "bytes", "model.vocab_size": 258}
    config = small(LANGUAGE_MODEL, **data)
    one_basis = replace(cured(config), {"optim.rotation.seed": 0})  # so that seeds share their programs
    return Variant("vanilla", "softmax + Adam", config), Variant("cured", "softmax-1 + OrthoAdam", one_basis)


@pytest.fixture(scope="module", autouse=True)
def _one_quantisation():
    """Evaluations have one of the five: each is a program more for every model; tests/test_train.py has them all."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(quant.SETTINGS) - {"int8_coarse"}:
            patch.delitem(quant.SETTINGS, name)
        yield


@pytest.fixture(scope="module")
def study(language, tmp_path_factory):
    """Two language models and two seeds, with a claim, tables and one picture of each kind."""
    home = tmp_path_factory.mktemp("study")
    experiment = experiment_of(
        *language,
        claims=(Claim(says="It is lower.", of=("vanilla", "cured"), show=("perplexity",), holds=lambda v, c: False,
                      criterion="lower"),),
        tables=(MetricTable("Metrics", ("perplexity", "kurtosis_first")),
                PairedTable("Changes", "vanilla", ("perplexity",))),
        pictures=(TrainingCurves(), ModelMaps(), LayerCurves("layers", "By layer.", "kurtosis", {"kurtosis_first": ""}),
                  perplexity_and_kurtosis()),
    )  # fmt: skip
    return run_experiment(experiment, "tiny", SEEDS, home, **folders(home))


# What is run.


def test_every_variant_and_seed_has_a_row_with_its_overrides(study, language):
    raw = json.loads((study.workdir / "results.json").read_text())
    assert (raw["experiment"], raw["scale"]) == ("made", "tiny")
    rows = {(row["variant"], row["seed"]): row for row in raw["rows"]}
    assert set(rows) == {(variant.name, seed) for variant in language for seed in SEEDS}
    overrides = rows["cured", 1]["overrides"]
    overrides = {path: tuple(v) if isinstance(v, list) else v for path, v in overrides.items()}
    assert replace(FIRST_DEFAULTS, overrides) == language[1].with_seed(1)
    assert raw["provenance"]["versions"]["jax"]
    for row in raw["rows"]:
        assert row["trained"].keys() == {"date", "device", "versions"}
        assert [row["trained"][name] for name in ("device", "versions")] == [
            raw["provenance"][name] for name in ("device", "versions")
        ]
    assert [entry["tokenizer"] for entry in raw["provenance"]["data"]] == ["bytes"]
    assert len(set(study["vanilla"].values("perplexity"))) == 2


def test_variants_start_from_the_same_parameters_and_batches(language, tmp_path):
    configs = [variant.with_seed(3) for variant in language]
    jax.tree.map(np.testing.assert_array_equal, *(init_state(config).params for config in configs))
    first, second = (open_inputs(config, tmp_path) for config in configs)
    for step in (0, 7):
        np.testing.assert_array_equal(first.batch(step), second.batch(step))
    assert not np.array_equal(first.batch(0), first.batch(7))


def test_a_second_call_trains_nothing_and_shares_runs_with_other_experiments(study, language, monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    again = run_experiment(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    assert again.raw["rows"] == study.raw["rows"]
    renamed = dataclasses.replace(language[1], name="another", label="another label")
    shared = run_experiment(experiment_of(renamed), "tiny", (1,), tmp_path, **folders(study.workdir))
    assert shared["another"].values("loss_nats") == study["cured"].values("loss_nats")[1:]
    done = study["vanilla"].folders[0] / "measured/evaluation.json"
    before = json.loads(done.read_text())
    done.unlink()  # as if it had been stopped after training
    run_experiment(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    assert json.loads(done.read_text()) == before


def test_results_of_other_data_are_refused(study, language):
    path = Path(language[0].config.data.paths[0])
    before = path.read_text()
    path.write_text(before.replace("fox", "cat"))
    try:
        with pytest.raises(UserError, match="the data is not that of the checkpoint"):
            run_experiment(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    finally:
        path.write_text(before)


def test_another_config_is_another_run():
    changed = dataclasses.replace(BACKCOPY, config=replace(BACKCOPY.config, {"train.steps": 6}))
    tried = dataclasses.replace(BACKCOPY, learning_rates=(1e-3, 1e-2))
    assert len({run_name(v, seed) for v in (BACKCOPY, changed, tried) for seed in SEEDS}) == 6


def test_another_model_in_the_place_of_one_is_measured_again(tmp_path):
    (tmp_path / "5").mkdir()
    (tmp_path / "5/params").write_bytes(b"one")
    given = dataclasses.replace(BACKCOPY, checkpoint=tmp_path / "5")
    before = run_name(given, 0)
    assert run_name(given, 0) == before
    (tmp_path / "5/params").write_bytes(b"another")
    assert run_name(given, 0) != before


@pytest.mark.slow
def test_a_diverging_variant_is_reported_and_the_others_finish(tmp_path, monkeypatch):
    wild = {"optim.learning_rate": 1e30, "optim.eps": 1e-30, "train.steps": 6, "train.eval_every_steps": 0}
    broken = dataclasses.replace(BACKCOPY, name="broken", config=replace(BACKCOPY.config, wild))
    experiment = experiment_of(
        broken,
        BACKCOPY,
        tables=(MetricTable("t", ("sink_attention",)),),
        claims=(Claim(says="c", of=("broken",), show=(), holds=lambda b: b.sink_attention > 0, criterion="any"),),
    )
    done = run_experiment(experiment, "tiny", (0,), tmp_path, **folders(tmp_path))
    assert [row["variant"] for row in done.raw["rows"]] == ["broken", "backcopy"]
    report = make_report(done)
    assert any("broken, seed 0: the " in line and "not finite at step" in line for line in report.summary)
    assert report.tables[0].rows[0][1] == "failed"
    assert report.tables[0].rows[1][1] != "failed"
    assert report.claims[0].verdict == "not testable at this scale"
    assert report.pictures == []
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run_experiment(experiment, "tiny", (0,), tmp_path, **folders(tmp_path)).raw["rows"] == done.raw["rows"]


def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="has no scale 'paper'\nallowed: tiny"):
        run_experiment(experiment_of(BACKCOPY), "paper", (0,), tmp_path / "w")
    with pytest.raises(UserError, match="measures no existing models"):
        run_experiment(experiment_of(BACKCOPY), "tiny", (0,), tmp_path / "w", models=[BACKCOPY])
    with pytest.raises(UserError, match="has the name of a variant"):
        run_experiment(experiment_of(BACKCOPY, takes_models=True), "tiny", (0,), tmp_path / "w", models=[BACKCOPY])
    with pytest.raises(UserError, match="needs a model\nallowed: --model=NAME=CHECKPOINT"):
        run_experiment(experiment_of(takes_models=True), "tiny", (0,), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_a_given_model_is_measured_and_not_trained(study, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: pytest.fail("trained"))
    model = given_model("mine", study["cured"].folders[1])
    assert model.checkpoint.name == "2"
    done = run_experiment(
        experiment_of(takes_models=True), "tiny", (0,), tmp_path, models=[model], **folders(study.workdir)
    )
    assert done["mine"].given
    assert done["mine"].perplexity == pytest.approx(study["cured"].values("perplexity")[1], rel=1e-6)
    assert "--model=mine=" in make_report(done).notes[0]


def test_a_computation_runs_in_float64_and_its_rows_are_read_like_variants(tmp_path):
    def compute(seed):
        return [Case("row", {"label": "a row"}, {"value": float(jax.numpy.ones(()).dtype.itemsize + seed)})]

    claim = Claim(says="c", of=("row",), show=("value",), holds=lambda row: row.value == 8.5, criterion="8.5")
    experiment = Experiment(
        name="made", title="t", compute=compute, claims=(claim,), tables=(MetricTable("t", ("value",)),)
    )
    done = run_experiment(experiment, "tiny", (0, 1), tmp_path)
    report = make_report(done)
    assert report.claims[0].verdict == "holds"
    assert report.tables[0].rows == [["a row", "8.5 (8 to 9)"]]
    with pytest.raises(UserError, match="has no scale 'small'"):
        run_experiment(experiment, "small", (0,), tmp_path)


def test_parts_of_a_computation_that_finished_are_kept_until_its_settings_change(tmp_path, capsys):
    calls = []

    def part(name, fails=False):
        def compute(seed):
            calls.append((name, seed))
            if fails:
                raise KeyboardInterrupt
            return [Case(name, {}, {"value": float(seed)})]

        return compute

    def run(compute, settings=1, seeds=(0, 1)):
        calls.clear()
        made = Experiment(name="made", title="t", compute=compute, settings=settings)
        return run_experiment(made, "tiny", seeds, tmp_path).raw["rows"], list(calls)

    with pytest.raises(KeyboardInterrupt):
        run({"a": part("a"), "b": part("b", fails=True)})
    both = {"a": part("a"), "b": part("b")}
    rows, called = run(both)
    assert called == [("b", 0), ("a", 1), ("b", 1)]
    assert [(row["variant"], row["seed"], row["metrics"]["value"]) for row in rows] == [
        ("a", 0, 0.0), ("b", 0, 0.0), ("a", 1, 1.0), ("b", 1, 1.0),
    ]  # fmt: skip
    assert run(both) == (rows, [])
    (damaged,) = (tmp_path / "computed").glob("a-*-seed1.json")
    damaged.write_text("{}")
    assert run(both) == (rows, [("a", 1)])
    assert damaged.name in capsys.readouterr().err
    damaged.write_text(damaged.read_text().replace('"value": 1.0', '"value": NaN'))  # as earlier versions wrote it
    assert [row["metrics"] for row in run(both)[0]] == [{"value": 0.0}, {"value": 0.0}, {}, {"value": 1.0}]
    assert len(run(both, settings=2)[1]) == len(run(both, settings=None)[1]) == len(run(both, settings=None)[1]) == 4


# Learning rates.


@pytest.mark.slow
def test_trials_are_shorter_runs_and_the_best_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "TRIAL_STEPS", 3)
    trial = trial_config(replace(BACKCOPY.config, {"train.steps": 40, "optim.warmup_steps": 20}), 0.25)
    assert (trial.train.steps, trial.optim.learning_rate, trial.optim.warmup_steps) == (3, 0.25, 0)
    wild = dataclasses.replace(
        BACKCOPY, learning_rates=(2e-3, 1e30), config=replace(BACKCOPY.config, {"optim.eps": 1e-30})
    )
    done = run_experiment(experiment_of(wild), "tiny", (0,), tmp_path, **folders(tmp_path))
    (row,) = done.raw["rows"]
    assert row["learning_rates"]["1e+30"] is None
    assert row["learning_rates"]["0.002"] > 0
    assert row["overrides"]["optim.learning_rate"] == 2e-3
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    assert run_experiment(experiment_of(wild), "tiny", (0,), tmp_path, **folders(tmp_path)).raw["rows"] == [row]
    assert best_learning_rate({"0.1": None, "0.2": None}) == 0.1


# What is reported.


def test_report_files_are_complete_and_self_contained(study):
    report = make_report(study)
    write_report(report, study.workdir)
    page = (study.workdir / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page)
    sources = re.findall(r'src="data:image/(svg\+xml|png);base64,([^"]+)"', page)
    assert len(sources) == len(report.pictures) == 5
    for form, content in sources:
        start = base64.b64decode(content)[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if form == "png" else start.startswith(b"<?xml")
    markdown = (study.workdir / "report.md").read_text()
    for picture in report.pictures:
        assert (study.workdir / "figures" / f"{picture.name}.{picture.form}").stat().st_size > 1000
        assert picture.name in markdown
    for claim in report.claims:
        assert f"**{claim.verdict}**: {claim.says}" in markdown
        assert "Criterion: lower." in markdown
    assert "Python's own standard library" not in markdown  # the text is another
    assert "Seeds: 0, 1." in markdown
    assert "[results.json](results.json)" in markdown


def test_tables_show_mean_and_range_and_paired_changes(study):
    metrics, changes = make_report(study).tables
    values = study["vanilla"].values("perplexity")
    mean, low, high = (float(x.replace(",", "")) for x in re.findall(r"[\d.,]+", metrics.rows[0][1]))
    assert mean == pytest.approx(np.mean(values), rel=0.01)
    assert (low, high) == pytest.approx((min(values), max(values)), rel=0.01)
    assert [row[0] for row in changes.rows] == ["softmax-1 + OrthoAdam"]
    assert "95% CI" in changes.rows[0][1]


def test_paired_intervals_are_those_of_a_t_test():
    a, b = np.array([3.1, 2.9, 3.4, 3.0]), np.array([2.0, 2.2, 2.1, 2.4])
    low, high = stats.ttest_rel(a, b).confidence_interval(0.95)
    text = difference_text(dict(enumerate(zip(a, b, strict=True))))
    assert text == f"{np.mean(a - b):+.3g} (95% CI {low:+.3g} to {high:+.3g}, 4 seeds)"
    low, high = np.expm1(stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.95))
    change = math.exp(np.mean(np.log(a) - np.log(b))) - 1
    text = change_text(dict(enumerate(zip(a, b, strict=True))))
    assert text == f"{100 * change:+.1f}% (95% CI {100 * low:+.1f} to {100 * high:+.1f}, 4 seeds)"
    assert difference_text({}) == change_text({}) == "failed"


def test_the_page_escapes_what_it_shows_and_folds_many_links(tmp_path):
    for count, folded in ((12, False), (13, True)):
        links = [("results.json", "results.json"), *((f"run {i}", f"runs/{i}/config.json") for i in range(count))]
        table = Table("t | u", ["", "x"], [["r", "<i> | y"]])
        write_report(Report("<script>", ["a & b", "[x](y)"], [], [table], [], [], links), tmp_path)
        page, markdown = ((tmp_path / f"report.{form}").read_text() for form in ("html", "md"))
        assert "<script>" not in page
        assert "a &amp; b" in page
        assert page.count("<a href=") == count + 1
        assert (f"<summary>{count} files of runs</summary>" in page) == folded
        assert markdown.startswith("# \\<script>\n")
        assert "\n\\[x\\](y)\n" in markdown
        assert "| r | \\<i> \\| y |" in markdown
    lines = console_table(table).splitlines()
    assert len({len(line) for line in lines[2:]}) == 1


@given(st.text(alphabet="ab1 .)\\`*_[]()<>!&#;|~$+-=/:\n", max_size=12))
@example("<script>alert(1)</script>").via("HTML")
@example("12) a")
@example("![a](b) [a](b) `a` **a** __a__ &lt; ~~a~~")
def test_markdown_shows_any_text_as_it_is(text):
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    shown = html.escape(" ".join(text.split()))
    paragraph = f"<p>{shown}</p>\n" if shown else ""
    assert html.unescape(renderer.render(escape_markdown(text))) == html.unescape(paragraph)
    cell = renderer.render(f"| a |\n|---|\n| {escape_markdown(text)} |")
    assert html.unescape(f"<td>{shown}</td>") in html.unescape(cell)


def test_names_that_would_break_tables_files_or_figures_are_refused():
    for name in ("a/b", "../a", "a$b", "a\nb", "\x1b[31m", "a" * 81):
        with pytest.raises(UserError, match="allowed: a name of at most 80 characters"):
            given_model(name, Path("unused"))


def test_example_attention_rows_sum_to_one_for_softmax_and_less_for_softmax1(language):
    for variant, lowest in zip(language, (1 - 1e-5, 0.0), strict=True):
        params, model = init_state(variant.config).params, Transformer(variant.config.model)
        maps = example_maps(LoadedModel(model, params, variant.config, None, Path()), np.arange(17))
        assert maps["attention"].shape == (4, 16, 16)
        assert maps["hidden"].shape == (4, 16, 16)
        sums = maps["attention"].sum(-1)
        assert (sums > lowest).all()
        assert (sums < 1 + 1e-5).all()
        assert (sums < 0.99).any() == (variant.name == "cured")
        assert np.triu(maps["attention"], 1).max() == 0.0


def test_figures_draw_what_they_are_given():
    figure = drawing.lines({"a": ([1, 2], np.array([[1.0, 3.0], [3.0, 5.0]]))}, x_label="x", y_label="y")
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [2.0, 4.0]  # the mean over seeds
    figure = drawing.bars(["g"], {"a": np.array([[1.0]]), "b": np.array([[2.0]])}, y_label="y")
    assert sorted(bar.get_height() for bar in figure.axes[0].patches) == [1.0, 2.0]
    figure = drawing.maps({"a": np.eye(3), "b": 2 * np.eye(3)}, x_label="", y_label="", value_label="", log=True)
    assert {image.norm.vmax for ax in figure.axes for image in ax.get_images()} == {2.0}  # one scale for all panels
    plt.close("all")


@pytest.mark.parametrize(("largest", "top", "extend"), [(19.0, 19.0, "neither"), (21.0, 3.0, "max")])
def test_colours_of_hidden_states_end_where_the_smaller_map_can_still_be_seen(largest, top, extend):
    figure = draw_hidden({"real": largest * np.eye(3), "ours": np.eye(3)})
    (bar,) = {image.colorbar for ax in figure.axes for image in ax.get_images()} - {None}
    assert {image.norm.vmax for ax in figure.axes for image in ax.get_images()} == {top}
    assert bar.extend == extend  # an arrow says that there is more
    plt.close("all")


# The judge.


def results_of(metrics, groups=None):
    """Results of computed rows: variant -> metrics of each seed; [] is a variant that failed."""
    rows = [
        {"variant": name, "seed": seed, "overrides": {"label": name.upper()}, "metrics": values}
        for name, seeds in metrics.items()
        for seed, values in enumerate(seeds or [{}])
    ]
    fields = {"groups": (lambda results: groups)} if groups else {}
    experiment = Experiment(name="made", title="t", compute=lambda seed: [], **fields)
    from orthojax.experiments.results import Results

    return Results(experiment, "tiny", (0,), Path(), {"rows": rows})


GROUPS = {model: {"old": f"{model}_old", "new": f"{model}_new"} for model in "abc"}


def halved(**fields):
    given = {"says": "It halves.", "of": ("old", "new"), "show": ("x",), "criterion": "at most half; testable above 1"}
    predicates = {"holds": lambda old, new: new.x <= old.x / 2, "testable": lambda old, new: old.x > 1}
    return Claim(**given | predicates | fields)


@pytest.mark.parametrize(
    ("pairs", "fields", "verdict", "closing"),
    [
        ({"a": (8, 4), "b": (4, 1), "c": (2, 1)}, {}, "holds", "Holds in 3 of 3 testable cases."),
        ({"a": (8, 4), "b": (4, 3), "c": (2, 1)}, {}, "does not hold", "Holds in 2 of 3 testable cases."),
        ({"a": (8, 4), "b": (4, 3), "c": (2, 1)}, {"most": True}, "holds", "in most of the testable cases."),
        ({"a": (8, 4), "b": (4, 3), "c": (2, 2)}, {"most": True}, "does not hold", "Holds in 1 of 3"),
        ({"a": (8, 4), "b": (1, 3), "c": (1, 1)}, {}, "holds", "Holds in 1 of 1 testable cases."),
        ({"a": (1, 4), "b": (1, 3), "c": (1, 1)}, {}, "not testable at this scale", "Criterion: at most half"),
        ({"a": (8, 4), "b": (4, 3), "c": (2, 2)}, {"where": "a".__eq__}, "holds", "Criterion: at most half"),
        ({"a": (8, 4), "b": (4, 3), "c": (9, 2)}, {"largest": lambda old, new: old.x}, "holds", "Criterion:"),
        ({"a": (8, 4), "b": (4, None), "c": (2, 1)}, {}, "holds", "a metric is missing: b."),
        ({"a": (None, 4)}, {}, "not testable at this scale", "a metric is missing: a, b, c."),
    ],
)
def test_verdicts(pairs, fields, verdict, closing):
    metrics = {}
    for model, values in pairs.items():
        for role, value in zip(("old", "new"), values, strict=True):
            metrics[f"{model}_{role}"] = [] if value is None else [{"x": value - 0.5}, {"x": value + 0.5}]
    judged = judge(halved(**fields), results_of(metrics, GROUPS))
    assert judged.verdict == verdict
    assert closing in judged.closing
    assert "nan" not in judged.paragraph


def test_a_revised_criterion_gives_the_verdict_of_the_first_one_from_the_numbers():
    results = results_of({"p": [{"x": 4.0}], "q": [{"x": 3.0}]})
    first = {"holds": lambda old, new: new.x < old.x, "testable": None, "criterion": "any less"}
    judged = judge(halved(of=("p", "q"), revised=Revision("less is not half", first)), results)
    assert judged.verdict == "does not hold"
    expected = "Criterion revised after the data: less is not half. First: any less; under it: holds."
    assert judged.closing.endswith(expected)
    assert expected in judged.paragraph  # so in all three forms
    more = results_of({"p": [{"x": 4.0}], "q": [{"x": 5.0}]})
    assert judge(halved(of=("p", "q"), revised=Revision("", first)), more).closing.endswith("under it: does not hold.")
    added = judge(halved(of=("p", "q"), revised=Revision("added later")), results)
    assert added.closing.endswith("Criterion set after the data: added later.")


def test_what_nothing_measures_is_listed_and_never_judged():
    judged = judge(not_measured("Whales sing.", "there is no whale"), results_of({"p": [{"x": 4.0}]}))
    assert judged == ("not measured", "Whales sing.", (), "Not measured: there is no whale.")


def test_in_every_seed_is_no_mean():
    results = results_of({"p": [{"x": 9.0}, {"x": 0.5}], "q": [{"x": 3.0}, {"x": 3.0}], "r": []})
    above = in_every_seed(lambda of: of.x > 1)
    assert [above(results[name]) for name in ("p", "q", "r")] == [False, True, False]
    assert judge(halved(of=("p", "q"), testable=above), results).verdict == "not testable at this scale"


def test_claims_find_their_variants_by_role_by_name_or_by_a_function():
    results = results_of({"p": [{"x": 4.0}], "q": [{"x": 1.0}], "r": [{"x": 3.0}]})
    for of in (("p", "q"), {"": ("p", "q")}, lambda results: {"": ("p", "q")}):
        assert judge(halved(of=of), results).cases == ["x: P 4, Q 1"]
    both = judge(halved(of={"one": ("p", "q"), "two": ("p", "r")}), results)
    assert both.cases == ["one: 4 → 1", "two: 4 → 3 (does not hold)"]
    assert both.says == "It halves. X:"


# The listing.


def made(home, variant, seconds):
    folder = home / run_name(variant, 0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(variant.with_seed(0)))
    (folder / "trained.seconds").write_text(f"{seconds}\n")
    for measure in ALWAYS:
        store(folder, measure, Measured({"value": 1.0}, {}))


def long_runs():
    steps = {"a": 2000, "b": 3000, "c": 4000}
    return [Variant(name, name, replace(BACKCOPY.config, {"train.steps": n})) for name, n in steps.items()]


def test_the_list_counts_what_is_done_and_shared_runs_once(tmp_path):
    a, b, c = long_runs()
    made(tmp_path, a, training_flops(a.with_seed(0)) / 1e6)  # a megaflop a second
    found = [
        experiment_of(a, b, name="first", also=("figure7", "figure8", "figure9")),
        experiment_of(b, c, name="second", scales=("tiny", "paper")),
        experiment_of(name="given", takes_models=True),
        experiment_of(a, b, name="timed", trains=False),
        Experiment(name="formula", title="t", compute=lambda seed: []),
        Experiment(name="flow", title="t", compute=lambda seed: [], seconds_per_seed=150.0, seeds=(0, 1)),
    ]
    text = listing(found, "tiny", None, tmp_path, 1)
    rows = {re.split(r" {2,}", line)[0]: re.split(r" {2,}", line)[1:3] for line in text.splitlines()}
    minutes = {v.name: Task(Run(v, 0, tmp_path), (), tmp_path).cost / 1e6 / 60 for v in (a, b, c)}
    assert rows["first, figure7 ... figure9"] == ["2 (1 done)", f"{minutes['b']:,.0f}"]
    assert rows["second"] == ["2 (0 done)", f"{minutes['b'] + minutes['c']:,.0f}"]
    assert rows["all experiments together"][0] == "3 (1 done)"
    assert rows["given"] == ["-", "needs --model"]
    assert rows["timed"] == ["-", "a few"]
    assert rows["formula"] == ["-", "under 1"]
    assert rows["flow"] == ["-", "5"]
    assert re.search(r"\nflow +- +8 ", listing(found, "tiny", [1, 2, 3], tmp_path, 1))
    assert "median of the 1 finished runs" in text
    at_once = listing(found, "tiny", None, tmp_path, 2)
    assert f"{minutes['c']:,.0f}" in at_once  # no faster than the longest run
    with pytest.raises(UserError, match="no experiment has the scale 'small'"):
        listing(found, "small", None, tmp_path, 1)


def test_what_is_not_measured_yet_of_a_trained_run_takes_its_time(tmp_path):
    a = long_runs()[0]
    task = Task(Run(a, 0, tmp_path / run_name(a, 0)), (), tmp_path)
    assert task.remaining(pytest.fail) == task.cost > training_flops(a.config)
    made(tmp_path, a, 1.0)
    assert task.remaining(pytest.fail) == 0.0
    more = dataclasses.replace(task, measures=(Measure("more", print, lambda config: 7),))
    assert more.remaining(pytest.fail) == 7 * task.stage_cost
    (task.run.folder / "measured/evaluation.json").unlink()
    (task.run.folder / "measured/maps.json").unlink()
    assert task.remaining(pytest.fail) == pytest.approx(task.cost - training_flops(a.config))
    (task.run.folder / "diverged.txt").write_text("at step 3\n")
    assert task.remaining(pytest.fail) == 0.0


def test_the_speed_is_the_median_of_finished_runs_without_damaged_ones(tmp_path):
    said = []
    assert measured_speed(tmp_path, said.append) is None
    for variant, speed in zip(long_runs(), (1e6, 3e6, 9e6), strict=True):
        made(tmp_path, variant, training_flops(variant.config) / speed)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/trained.seconds").write_text("1.0")
    assert measured_speed(tmp_path, said.append).flops_per_second == pytest.approx(3e6)
    assert said == [f"warning: no such config: {tmp_path}/damaged/config.json"]


# Damaged files of earlier calls. What can be made again is, and the file is named; the rest is asked for.

DAMAGE = {
    "empty": b"",
    "cut": b'{"perplexity": ',
    "another kind": b"[1]",
    "texts for numbers": b'{"perplexity": "low", "0.1": "low"}',
    "nested": b"[" * 100_000,
    "bytes": b"\xff\x00" * 50,
}
REPORTED = "is damaged and is made again"


def read_costs(folder, say):
    costs = {"a": {"step_ratio": [1.0] * 3, "step_seconds": 1.0, "optimizer_state_bytes": 1, "program_bytes": None}}
    timed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orthojax.experiments.costs._costs_of_group", lambda *_: timed.append("a") or costs)
        found = measure_costs(
            {"a": BACKCOPY.config}, str, folder / "costs.json", lambda line: REPORTED in line and say(line)
        )
    assert found == costs
    return None if timed else found


def test_costs_that_could_not_be_measured_are_tried_again_and_no_others(tmp_path):
    timed, fails = [], ["b"]

    def costs_of(group, base):
        timed.append(base)
        if base in fails:
            raise jax.errors.JaxRuntimeError("out of memory\nby far")
        return {
            name: {"step_ratio": [1.0] * 3, "step_seconds": 1.0, "optimizer_state_bytes": 1, "program_bytes": None}
            for name in group
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orthojax.experiments.costs._costs_of_group", costs_of)
        call = functools.partial(
            measure_costs, {"a": BACKCOPY.config, "b": BACKCOPY.config}, str, tmp_path / "costs.json", print
        )
        assert call()["b"] == {"failed": "out of memory"}
        fails.clear()
        assert call()["b"]["step_seconds"] == 1.0
        assert timed == ["a", "b", "b"]
        assert call().keys() == {"a", "b"}
        assert timed == ["a", "b", "b"]


def test_steps_that_differ_in_cost_are_timed_together(monkeypatch):
    """SOAP improves its basis in one step of ten, so that a median of single steps would leave that out."""
    soap = replace(BACKCOPY.config, {"optim.optimizer": "soap"})
    taken = {"adam": 0, "soap": 0}

    class Counting(Stepper):
        def __init__(self, config):
            super().__init__(config)
            program = self._program

            def counted(*of):
                taken[config.optim.optimizer] += 1
                return program(*of)

            counted.memory_analysis = program.memory_analysis
            self._program = counted

    monkeypatch.setattr("orthojax.experiments.costs.Stepper", Counting)
    monkeypatch.setattr(
        "orthojax.experiments.costs.interleaved_seconds",
        lambda functions, _: {name: [float(function() is not None)] * 3 for name, function in functions.items()},
    )
    found = _costs_of_group({"vanilla": BACKCOPY.config, "soap": soap}, "vanilla")
    assert taken == {"adam": 1, "soap": 10}
    assert (found["vanilla"]["step_seconds"], found["soap"]["step_seconds"]) == (1.0, 0.1)
    assert found["soap"]["step_ratio"] == pytest.approx([0.1] * 3)


def test_a_report_says_when_runs_were_trained_where_another_call_did(study, tmp_path):
    raw = json.loads((study.workdir / "results.json").read_text())
    assert not [note for note in make_report(study).notes if "of the runs were trained" in note]
    raw["rows"][0]["trained"] |= {"date": "2020-02-02", "versions": {"jax": "0.4"}}
    results = Results(study.experiment, "tiny", SEEDS, study.workdir, raw, study.variants)
    (old,) = [note for note in make_report(results).notes if "2020-02-02" in note]
    assert old.startswith("1 of the runs were trained on 2020-02-02, cpu x ")
    path = tmp_path / "trained.json"
    said: list[str] = []
    for content in ("{", "{}", '{"date": "x", "device": "y", "versions": 1}'):
        path.write_text(content)
        assert runs._trained_on(path, said.append) is None
    assert len(said) == 3
    assert all("is damaged and left out" in line for line in said)
    assert runs._trained_on(tmp_path / "missing.json", said.append) is None


READERS = {  # file of a run -> what reads it, None for what is made again
    "measured/evaluation.json": lambda folder, say: stored(folder, ALWAYS[0], say),
    "measured/maps.npz": lambda folder, say: stored(folder, ALWAYS[1], say),
    "trained.seconds": lambda folder, say: is_trained(folder, say) or None,
    "learning_rates/losses.json": lambda folder, say: read_again(
        folder / "learning_rates/losses.json", "losses", runs._parse_losses, say
    ),
    "costs.json": read_costs,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with every file of `READERS`."""
    folder = tmp_path_factory.mktemp("whole")
    store(folder, ALWAYS[0], Measured({"perplexity": 2.0}, {}))
    store(folder, ALWAYS[1], Measured({}, {"attention": np.eye(3)}))
    (folder / "trained.seconds").write_text("1.5\n")
    (folder / "learning_rates").mkdir()
    (folder / "learning_rates/losses.json").write_text('{"0.1": null, "0.2": 3}\n')
    assert read_costs(folder, print) is None
    for read in READERS.values():
        assert read(folder, pytest.fail) is not None
    return folder


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_of_an_earlier_call_is_named_and_made_again(whole, tmp_path, name):
    for damage in DAMAGE.values():
        folder, said = Path(shutil.copytree(whole, tmp_path, dirs_exist_ok=True)), []
        (folder / name).write_bytes(damage)
        assert READERS[name](folder, said.append) is None
        assert len(said) == 1
        assert f"{folder / name} {REPORTED}" in said[0]
        assert len(said[0].splitlines()) == 1
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")):
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
        make(folder / name)
        with pytest.raises(UserError, match="move it away") as raised:
            READERS[name](folder, pytest.fail)
        assert str(folder / name) in str(raised.value)


def test_measurements_without_numbers_or_with_lost_arrays_are_made_again(whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    (folder / "measured/evaluation.json").write_text("{}")
    (folder / "measured/maps.npz").unlink()
    assert [stored(folder, measure, print) for measure in ALWAYS] == [None, None]


def test_a_study_with_damaged_files_ends_as_before_and_trains_nothing(study, language, tmp_path, monkeypatch):
    home = Path(shutil.copytree(study.workdir, tmp_path / "home"))
    folder = home / "runs" / run_name(language[0], 0)
    damaged = {"measured/evaluation.json", "measured/maps.npz", "trained.seconds"}
    for name in damaged:
        (folder / name).write_bytes(b"")
    (home / "results.json").write_bytes(b"")
    messages, trained = [], []
    monkeypatch.setattr(runs, "train", lambda *args, **kwargs: trained.append(args))  # resumes, and finds itself done
    monkeypatch.setattr("orthojax.progress.Progress.say", lambda self, message: messages.append(message))
    again = run_experiment(study.experiment, "tiny", SEEDS, home, **folders(home))
    assert [row["metrics"] for row in again.raw["rows"]] == [row["metrics"] for row in study.raw["rows"]]
    assert {name for name in damaged if any(f"{folder / name} {REPORTED}" in m for m in messages)} == damaged
    assert len(trained) == 1
    assert make_report(again).pictures
    (folder / "measured/maps.npz").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"maps.npz are damaged.*\ndelete .*maps.json and run the same command"):
        again["vanilla"].arrays("maps")


def test_the_list_names_damaged_files_and_goes_on(tmp_path):
    variants = long_runs()
    for variant in variants:
        made(tmp_path, variant, 1.0)
    a, b, c = (tmp_path / run_name(variant, 0) for variant in variants)
    (a / "measured/evaluation.json").write_bytes(b"[" * 100_000)
    (b / "trained.seconds").write_bytes(b"")
    (c / "config.json").write_bytes(b"[" * 100_000)
    (c / "diverged.txt").mkdir()
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other/trained.seconds")
    text = listing([experiment_of(*variants)], "tiny", None, tmp_path, 1)
    assert "3 (1 done)" in text
    _, _, named = text.partition("\nwarning: ")
    for path in (a / "measured/evaluation.json", b / "trained.seconds", c / "config.json", c / "diverged.txt"):
        assert named.count(str(path)) == 1, path
    assert "other/config.json" in named


# A real command, stopped and started again.

START = """
import sys
from orthojax.config import Config, from_json, replace
from orthojax.experiments import catalog
from orthojax.experiments.experiment import Experiment, Variant

CONFIG = from_json(Config, {config!r})
MADE = Experiment(name="made", title="made up", variants=lambda scale: (
    Variant("a", "A", CONFIG), Variant("b", "B", replace(CONFIG, {{"optim.b1": 0.5}}))))
catalog.ALL = (*catalog.ALL, MADE)
if __name__ == "__main__":
    import runpy
    runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_stopped_command_resumes(tmp_path):
    config = replace(BACKCOPY.config, {"train.steps": 4000, "train.checkpoint_every_steps": 2000})
    (tmp_path / "start.py").write_text(START.format(config=to_json(config), script=str(ROOT / "launch/reproduce.py")))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "start.py", "--experiment=made", "--compile_cache=", "--jobs=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    for _ in range(1200):
        if len(list(tmp_path.glob("runs/models/*/metrics.jsonl"))) == 2 or process.poll() is not None:
            break
        time.sleep(0.1)
    time.sleep(2.0)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "Traceback" not in errors
    assert "state saved; run the same command to resume" in errors.splitlines()[-1]
    assert list(tmp_path.glob("runs/models/*/checkpoints/[0-9]*"))
    assert not (tmp_path / "runs/made-tiny/results.json").exists()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    rows = json.loads((tmp_path / "runs/made-tiny/results.json").read_text())["rows"]
    assert [(row["variant"], row["seed"]) for row in rows] == [("a", 0), ("b", 0)]
    assert all(row["metrics"] and row["seconds"] > 1.0 for row in rows)
