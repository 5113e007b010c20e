"""A study from its variants to its report, with models that take a second."""

import base64
import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.page import Claim, Report, Table, to_text, write_report
from orthojax.experiments.study.example import example_maps
from orthojax.experiments.study.study import Experiment, run_study
from orthojax.experiments.study.variant import Variant, run_name

from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.experiments.base_configs import BACKCOPY_MODEL, LANGUAGE_MODEL, cured, with_normalizer
from orthojax.experiments.ours import quick, quick_report
from orthojax.experiments.study import measures
from orthojax.fields import replace
from orthojax.train import evaluate, init_state, open_inputs

SEEDS = (0, 1)
PROSE = "The quick brown fox jumps over the lazy dog, and nobody in particular is very much surprised by that. "


def folders(workdir):
    return {"runs_dir": workdir / "runs", "cache_dir": workdir / "data"}


def small(config: Config, **changes) -> Config:
    shrink = {
        "train.steps": 2,
        "train.batch_size": 4,
        "train.log_every_steps": 1,
        "train.eval_every_steps": 2,
        "train.checkpoint_every_steps": 2,
        "eval.sequences": 4,
        "eval.batch_size": 2,
        "model.d_model": 16,
        "model.num_heads": 2,
        "model.num_layers": 1,
        "model.scan_layers": False,
        "model.d_mlp": 16,
        "model.max_length": 16,
        "data.sequence_length": 16,
        "optim.warmup_steps": 1,
    }
    return replace(config, shrink | changes)


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text(PROSE * 60, encoding="utf-8")
    data = {"data.kind": "text", "data.paths": (str(text),), "data.tokenizer": "bytes", "model.vocab_size": 258}
    language = small(LANGUAGE_MODEL, **data)
    backcopy = small(BACKCOPY_MODEL)
    return (
        Variant("vanilla", "softmax + Adam", language),
        Variant("cured", "softmax-1 + OrthoAdam", cured(language)),
        Variant("backcopy_softmax", "softmax", backcopy),
        Variant("backcopy_softmax1", "softmax-1", with_normalizer(backcopy, "softmax1")),
        Variant("backcopy_relu", "ReLU", with_normalizer(backcopy, "relu")),
    )


@pytest.fixture(scope="module")
def experiment(variants):
    return Experiment("quick", "a small one", {"tiny": lambda: variants}, quick_report.report)


@pytest.fixture(scope="module")
def study(variants, tmp_path_factory):
    """One variant of each kind, two seeds; quantised perplexities, whose compilation takes longest, are left out."""
    workdir = tmp_path_factory.mktemp("study")
    trained = Experiment("quick", "a small one", {"tiny": lambda: (variants[0], variants[2])}, quick_report.report)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measures, "evaluate", functools.partial(evaluate, settings={}))
        yield run_study(trained, "tiny", SEEDS, workdir, **folders(workdir))


@pytest.fixture(scope="module")
def whole(study, experiment, variants):
    """The study as if the other variants had been trained, with the numbers of these, and quantised."""
    rows = []
    for variant in variants:
        like = "vanilla" if variant.config.data.kind == "text" else "backcopy_softmax"
        for row in [row for row in study.results["rows"] if row["variant"] == like]:
            quantized = {name: 10.0 for name in summaries.METRICS if name.startswith("perplexity_")}
            rows.append(row | {"variant": variant.name, "metrics": quantized | row["metrics"]})
    results = study.results | {"rows": rows}
    return dataclasses.replace(study, experiment=experiment, variants=variants, results=results)


def test_every_variant_and_seed_has_a_row_with_its_overrides(study):
    results = json.loads((study.workdir / "results.json").read_text())
    assert results["experiment"] == "quick"
    assert results["scale"] == "tiny"
    rows = {(row["variant"], row["seed"]): row for row in results["rows"]}
    assert set(rows) == {(variant.name, seed) for variant in study.variants for seed in SEEDS}
    overrides = rows["vanilla", 1]["overrides"]
    overrides = {path: tuple(v) if isinstance(v, list) else v for path, v in overrides.items()}
    assert replace(Config(), overrides) == study.variants[0].with_seed(1)
    assert results["provenance"]["versions"]["jax"]
    assert len(results["provenance"]["data"]) == 2  # the text and the synthetic task


def test_variants_start_from_the_same_parameters_and_batches(variants, tmp_path):
    vanilla, cured_run = (variant.with_seed(3) for variant in variants[:2])
    a, b = init_state(vanilla).params, init_state(cured_run).params
    jax.tree.map(np.testing.assert_array_equal, a, b)
    first, second = (open_inputs(config, tmp_path) for config in (vanilla, cured_run))
    for step in (0, 7):
        np.testing.assert_array_equal(first.batch(step), second.batch(step))
    assert not np.array_equal(first.batch(0), first.batch(7))


def test_seeds_differ(study):
    assert len(set(study.values("vanilla", "perplexity"))) == 2


def test_a_second_call_trains_nothing_and_gives_the_same_rows(study, monkeypatch):
    from orthojax.experiments.study import runs as module

    monkeypatch.setattr(module, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    again = run_study(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    assert again.results["rows"] == study.results["rows"]


def test_an_unfinished_run_is_evaluated_from_its_checkpoint(study):
    done = study.run_dir("vanilla", 0) / "measured/evaluation.json"
    before = json.loads(done.read_text())
    done.unlink()
    run_study(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    after = json.loads(done.read_text())
    assert after == before
    done.write_text(json.dumps(before))


def test_results_of_other_data_are_refused(study):
    (path,) = study.variants[0].config.data.paths
    before = Path(path).read_text()
    Path(path).write_text(before.replace("fox", "cat"))
    try:
        with pytest.raises(UserError, match="the data is not that of the checkpoint"):
            run_study(study.experiment, "tiny", SEEDS, study.workdir, **folders(study.workdir))
    finally:
        Path(path).write_text(before)


def test_experiments_share_the_runs_that_they_have_in_common(study, experiment, monkeypatch, tmp_path):
    from orthojax.experiments.study import runs as module

    monkeypatch.setattr(module, "train", lambda *args, **kwargs: pytest.fail("trained again"))
    renamed = dataclasses.replace(study.variants[1], name="another_name", label="another label")
    other = dataclasses.replace(experiment, name="other", scales={"tiny": lambda: (renamed,)})
    where = folders(study.workdir)
    shared = run_study(other, "tiny", (1,), tmp_path, **where)
    assert shared.values("another_name", "loss_nats") == study.values("backcopy_softmax", "loss_nats")[1:]
    assert shared.run_dir("another_name", 1).resolve() == study.run_dir("backcopy_softmax", 1).resolve()


def test_another_config_is_another_run(study):
    variant = study.variants[0]
    changed = dataclasses.replace(variant, config=replace(variant.config, {"train.steps": 6}))
    tried = dataclasses.replace(variant, learning_rates=(1e-3, 1e-2))
    names = {run_name(v, seed) for v in (variant, changed, tried) for seed in SEEDS}
    assert len(names) == 6


def test_a_diverging_variant_is_reported_and_the_others_finish(study, tmp_path, monkeypatch):
    from orthojax.experiments.study import runs as module

    good = study.variants[1]
    wild = {"optim.learning_rate": 1e30, "optim.eps": 1e-30, "train.steps": 6, "train.eval_every_steps": 0}
    broken = dataclasses.replace(good, name="broken", config=replace(good.config, wild))
    experiment = Experiment("quick", "one diverges", {"tiny": lambda: (broken, good)}, lambda study: study.failures())
    where = folders(study.workdir)
    done = run_study(experiment, "tiny", (0,), tmp_path, **where)
    assert [row["variant"] for row in done.results["rows"]] == ["broken", "backcopy_softmax"]
    assert done.results["rows"][0]["overrides"]["optim.learning_rate"] == 1e30
    (failure,) = experiment.report(done)
    assert "broken" in failure
    assert "not finite at step" in failure
    assert done.values("backcopy_softmax", "sink_attention")
    monkeypatch.setattr(module, "train", lambda *args, **kwargs: pytest.fail("diverged again"))
    assert run_study(experiment, "tiny", (0,), tmp_path, **where).results["rows"] == done.results["rows"]


def test_an_unknown_scale_names_the_known_ones(experiment, tmp_path):
    with pytest.raises(UserError, match="has no scale 'paper'") as error:
        run_study(experiment, "paper", (0,), tmp_path / "w", **folders(tmp_path))
    assert "tiny" in str(error.value)
    assert not (tmp_path / "w").exists()


def test_report_files_are_complete_and_self_contained(whole):
    study = whole
    report = study.experiment.report(study)
    write_report(report, study.workdir)
    page = (study.workdir / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page)
    sources = re.findall(r'src="data:image/(svg\+xml|png);base64,([^"]+)"', page)
    assert len(sources) == len(report.pictures)
    for form, content in sources:
        start = base64.b64decode(content)[:8]
        assert start == b"\x89PNG\r\n\x1a\n" if form == "png" else start.startswith(b"<?xml")
    markdown = (study.workdir / "report.md").read_text()
    names = {
        "training_curves",
        "kurtosis_by_layer",
        "max_abs_by_layer",
        "first_attention_by_layer",
        "attention_map",
        "hidden_states",
        "quantization",
        "backcopy",
    }
    assert {picture.name for picture in report.pictures} == names
    for picture in report.pictures:
        assert (study.workdir / "figures" / f"{picture.name}.{picture.form}").stat().st_size > 1000
        assert picture.name in markdown
    for line in markdown.splitlines():
        if line.startswith("| "):
            assert len(re.findall(r"(?<!\\)\|", line)) in {len(table.columns) + 1 for table in report.tables}
    for claim in report.claims:
        assert "criterion" in claim.whole().lower()
        assert claim.text in markdown


def test_tables_show_mean_and_range_of_the_seeds(whole):
    table = whole.experiment.report(whole).tables[0]
    values = whole.values("vanilla", "perplexity")
    cell = dict(zip(table.columns, table.rows[0], strict=True))["softmax + Adam"]
    mean, low, high = (float(x.replace(",", "")) for x in re.findall(r"[\d.,]+", cell))
    assert mean == pytest.approx(np.mean(values), rel=0.01)
    assert (low, high) == pytest.approx((min(values), max(values)), rel=0.01)


def test_the_page_escapes_what_it_shows(tmp_path):
    report = Report(
        "<script>", ["a & b"], [Claim("holds", "1 < 2")], [Table("t", ["", "x"], [["r", "<i>"]])], [], [], []
    )
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "1 &lt; 2" in page


def test_many_links_are_folded(tmp_path):
    for count, folded in ((12, False), (13, True)):
        links = [("results.json", "results.json"), *((f"run {i}", f"runs/{i}/config.json") for i in range(count))]
        write_report(Report("t", [], [], [], [], [], links), tmp_path)
        page = (tmp_path / "report.html").read_text()
        assert page.count("<a href=") == count + 1
        assert (f"<summary>{count} files of runs</summary>" in page) == folded
        assert "[results.json](results.json)" in (tmp_path / "report.md").read_text()


def test_console_table_is_aligned():
    lines = to_text(Table("caption", ["", "a"], [["long name", "1"], ["x", "22"]])).splitlines()
    assert lines[0] == "caption"
    assert len({len(line) for line in lines[1:]}) == 1


def test_example_attention_rows_sum_to_one_for_softmax_and_less_for_softmax1(variants):
    tokens = np.arange(17)
    for variant, lowest in zip(variants[:2], (1 - 1e-5, 0.0), strict=True):
        maps = example_maps(variant.config, init_state(variant.config).params, tokens)
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


def test_the_default_experiment_exists_and_its_variants_differ_only_where_they_should():
    variants = {variant.name: variant.config for variant in quick.EXPERIMENT.variants("tiny")}
    assert variants["cured"] == cured(variants["vanilla"])
    assert (
        dataclasses.replace(variants["cured"], model=variants["vanilla"].model, optim=variants["vanilla"].optim)
        == variants["vanilla"]
    )
    assert variants["vanilla"].model.norm == "rmsnorm_single"
    assert not variants["vanilla"].model.use_bias
