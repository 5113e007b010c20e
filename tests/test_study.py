"""A study from its runs to its report, with models that take a second; and every study of the catalogue.

As a script it is what `run_study` starts in processes of its own: test_study.py HOME --seeds=0 --only=vanilla --jobs=1.
"""

import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags
from matplotlib import pyplot as plt
from small_runs import cpu_environment, times
from test_paper_tables import made_up
from tiny_run import TINY

from orthojax import quant
from orthojax.commands import reproduce
from orthojax.config import Config, replace
from orthojax.errors import Interrupted, UserError
from orthojax.experiments import catalog
from orthojax.experiments.active_dormant.measures import RISKS
from orthojax.experiments.base import cured
from orthojax.experiments.claims import Claim, Metric, not_measured
from orthojax.experiments.measures import Measure
from orthojax.experiments.running import run_name, run_study
from orthojax.experiments.study import Given, Row, Study, from_lists, make_report, read_results, results_of
from orthojax.files import read_with_digest
from orthojax.report.figures import lines
from orthojax.report.page import escape_markdown, print_report, write_report
from orthojax.report.pictures import KURTOSIS, LOSS, Bars, ByStep, Maps, Points
from orthojax.report.results import Missing
from orthojax.report.tables import Paired
from orthojax.train import find_checkpoint, load

PROSE = "The quick brown fox jumps over the lazy dog, and nobody in particular is very much surprised by that. "
SEEDS = (0, 1)
RESULTS = Path(__file__).parents[1] / "results"
PPL = Metric("perplexity")
CLAIMS = (
    Claim("Cured is <b>better</b>.", PPL["cured"] < PPL["vanilla"], PPL["vanilla"] > 0),
    Claim("There is a [third] model.", PPL["third"] < 1, added="after *all*"),
    Claim("It is not worse.", PPL["cured"] < 2 * PPL["vanilla"], revised=("too strict", Claim("", PPL["cured"] < 0))),
    not_measured("It is fast.", "nothing here has a clock"),
)


def study_of(runs=None, **fields):
    return Study(**{"name": "made", "title": "made up", "runs": runs and (lambda scale: runs)} | fields)


def language_models(home):
    """Returns two runs on bytes, a vanilla and a cured one."""
    data = {"data.kind": "text", "data.paths": (str(home / "prose.txt"),), "data.tokenizer": "bytes"}
    steps = {"train.steps": 3, "train.eval_every_steps": 2, "train.checkpoint_every_steps": 2}
    sizes = {"eval.sequences": 4, "eval.batch_size": 2, "model.vocab_size": 258}
    vanilla = replace(TINY, data | steps | sizes | {"model.normalizer": "softmax"})
    return {"vanilla": vanilla, "cured": replace(cured(vanilla), {"optim.rotation.seed": 0})}  # one program for seeds


def run(study, workdir, home, seeds=(0,), **more):
    return run_study(study, "tiny", seeds, workdir, runs_dir=home / "runs", cache_dir=home / "data", **more)


def steps_logged(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "loss_nats" in line]


@pytest.fixture(scope="module", autouse=True)
def _one_setting():
    """Evaluations have one quantisation of five: each is a program more for every model."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(quant.SETTINGS) - {"int8_coarse"}:
            patch.delitem(quant.SETTINGS, name)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    (folder / "prose.txt").write_text(PROSE * 60, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def study(home):
    return study_of(
        language_models(home),
        columns="perplexity kurtosis_first",
        tables=[Paired("Changes", "vanilla", "cured", changes="perplexity", differences="kurtosis_first")],
        claims=CLAIMS,
        headlines=[("perplexity", "vanilla", "cured")],
        pictures=[LOSS, KURTOSIS, Maps(), Bars("bars", "Two bars.", "kurtosis_first kurtosis_rest"),
                  Points("points", "Points.", "perplexity", "kurtosis_rest"), ByStep("nothing_of_this_name")],
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(study, home):
    return run(study, home / "work", home, SEEDS)


def test_every_variant_and_seed_has_a_row(results, study, home):
    raw = read_with_digest(home / "work/results.json", "results")
    assert raw == json.loads(json.dumps(results.raw))
    assert (raw["experiment"], raw["scale"], raw["provenance"]["seeds"]) == ("made", "tiny", [0, 1])
    assert {"date", "device", "versions", "data", "wall_seconds"} <= raw["provenance"].keys()
    (source,) = raw["provenance"]["data"]
    assert len(source["source_sha256"]) == 64
    rows = {(row["variant"], row["seed"]): row for row in raw["rows"]}
    assert rows.keys() == {(name, seed) for name in ("vanilla", "cured") for seed in SEEDS}
    for (name, seed), row in rows.items():
        seeded = {"train.seed": seed, "data.seed": seed}
        assert replace(Config(), from_lists(row["overrides"])) == replace(study.runs_at("tiny")[name], seeded)
        assert {"perplexity", "kurtosis_first/layer_0", "first_attention_mass"} <= row["metrics"].keys()
        assert steps_logged(home / "work" / row["run"]) == [1, 2, 3]
    assert len(set(results["vanilla"].values("perplexity"))) == 2


def test_numbers_of_another_text_are_not_reused(results, study, home):
    prose = home / "prose.txt"
    before = prose.read_text(encoding="utf-8")
    prose.write_text(before.replace("a", "e"), encoding="utf-8")
    with pytest.raises(UserError, match="the data is not that of the checkpoint"):
        run(study, home / "work", home, SEEDS)
    prose.write_text(before, encoding="utf-8")
    assert run(study, home / "work", home, SEEDS).raw == results.raw


def test_variant_has_means_arrays_and_logs_of_runs(results):
    vanilla = results["vanilla"]
    assert vanilla["perplexity"] == pytest.approx(np.mean([vanilla.only([s])["perplexity"] for s in SEEDS]))
    assert vanilla.layers("kurtosis_first").shape == (2, 1)
    assert vanilla.arrays("maps")["attention"].shape == (4, 8, 8)
    steps, losses = vanilla.logged("loss_nats")
    assert (steps, losses.shape) == ([1, 2, 3], (2, 3))
    for read in (lambda: vanilla["no_such"], lambda: vanilla.arrays("no_such"), lambda: vanilla.logged("no_such")):
        with pytest.raises(Missing):
            read()


def test_a_second_call_trains_and_measures_nothing(results, study, home, tmp_path):
    before = times(home / "runs")
    assert run(study, home / "work", home, SEEDS).raw["rows"] == results.raw["rows"]
    other = study_of({"another": study.runs_at("tiny")["cured"]})  # shares the run
    shared = run(other, tmp_path, home, (1,))
    assert shared["another"]["perplexity"] == results["cured"].values("perplexity")[1]
    assert times(home / "runs") == before
    measured = results["cured"].folders[1].resolve() / "measured/evaluation.json"
    content = json.loads(measured.read_text()) | {"sha256": 0}
    measured.unlink()  # as if it had been stopped after training
    run(study, home / "work", home, SEEDS)
    assert json.loads(measured.read_text()) | {"sha256": 0} == pytest.approx(content)
    assert [path for path, written in times(home / "runs").items() if written != before[path]] == [measured]


def test_a_measurement_that_was_changed_is_refused(tmp_path):
    metrics, calls = {"loss_nats": 0.1, "kurtosis_first": float("nan")}, []

    def of():
        measure = Measure("planted", lambda *_: calls.append(1) or (metrics, {"x": np.arange(3)}))
        return measure.of(tmp_path, lambda: None, None, print)

    text, arrays = (tmp_path / f"measured/planted.{kind}" for kind in ("json", "npz"))
    assert of() == of() == {"loss_nats": 0.1}
    assert len(calls) == 1
    before = arrays.read_bytes()
    arrays.write_bytes(before[:-9])
    with pytest.raises(UserError, match=r"planted\.json or its arrays were changed"):
        of()
    arrays.write_bytes(before)
    text.write_text('{"loss_nats": 0.3}')  # by an earlier version
    assert of() == {"loss_nats": 0.3}


def test_an_interrupted_call_goes_on_where_it_was(home, tmp_path):
    long = replace(language_models(home)["vanilla"], {"train.steps": 600, "train.checkpoint_every_steps": 500})
    study = study_of({"first": language_models(home)["vanilla"], "long": replace(long, {"train.eval_every_steps": 0})})
    log = tmp_path / "runs" / run_name(study.runs_at("tiny")["long"]) / "metrics.jsonl"

    def interrupt():
        while not (log.exists() and log.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    arguments = study, "tiny", (0,), tmp_path / "work"
    folders = {"runs_dir": tmp_path / "runs", "cache_dir": home / "data"}
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(Interrupted) as stopped:
        run_study(*arguments, **folders)
    thread.join()
    assert 0 < stopped.value.step < 600
    assert not (tmp_path / "work/results.json").exists()
    done = run_study(*arguments, **folders)
    assert all(len(done[name].seeds) == 1 for name in ("first", "long"))
    assert steps_logged(log.parent) == [*range(1, 601)]


def test_a_diverging_run_fails_and_others_go_on(study, home, tmp_path):
    wild = {"optim.learning_rate": 1e30, "optim.eps": 1e-30, "optim.clip_norm": None}
    broken = replace(study.runs_at("tiny")["vanilla"], wild)
    runs = {"third": broken, "cured": study.runs_at("tiny")["cured"]}
    study = dataclasses.replace(study, runs=lambda scale: runs)
    found = run(study, tmp_path, home)
    failed, finished = found.raw["rows"]
    assert failed["variant"] == "third"
    assert "not finite" in failed["failed"]
    assert finished["metrics"]["perplexity"] > 0
    report = make_report(found)
    assert report.failures[0].startswith("third, seed 0: ")
    assert [row[1].text == "failed" for row in report.tables[0].rows] == [True, False]
    assert [of.verdict for of in report.verdicts] == ["not testable"] * 3 + ["not measured"]
    before = times(home / "runs")
    assert run(study, tmp_path, home).raw["rows"] == found.raw["rows"]
    assert times(home / "runs") == before


def test_one_variant_alone_writes_no_results(study, home, tmp_path):
    alone = run(study, tmp_path, home, (1,), only="cured")
    assert alone["cured"].values("perplexity")
    assert not alone["vanilla"].started
    assert not (tmp_path / "results.json").exists()
    with pytest.raises(UserError, match=r"'curd'[^']*vanilla[^']*'cured'"):
        run(study, tmp_path, home, only="curd")


def test_existing_models_are_measured_and_not_trained(results, home, tmp_path):
    folder = results["cured"].folders[1]
    given = {"mine": Given(load(folder).config, find_checkpoint(folder))}
    study = study_of(models=lambda given: given, columns="perplexity", claims=[Claim("", PPL["mine"] > 0)])
    before = times(home / "runs")
    found = run(study, tmp_path, home, given=given)
    assert found["mine"].given
    assert found["mine"]["perplexity"] == pytest.approx(results["cured"].values("perplexity")[1], rel=1e-6)
    assert found["mine"].config == results_of(study, found.raw)["mine"].config
    assert make_report(found).verdicts[0].verdict == "holds"
    assert times(home / "runs") == before
    weights = next(path for path in folder.rglob("*") if path.is_file() and "params" in str(path))
    stamp = weights.stat()
    os.utime(weights, ns=(0, 0))  # as if other weights had been written there
    with pytest.raises(UserError, match="with other files"):
        run(study, tmp_path, home, given=given)
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert run(study, tmp_path, home, given=given).raw["rows"] == found.raw["rows"]


def test_computed_rows_are_float64_and_kept(tmp_path):
    calls = []

    def rows(seed):
        calls.append(seed)
        yield Row("row", {"size": float(jax.numpy.ones(()).dtype.itemsize + seed), "nothing": float("nan")}, {"n": 1})

    study = study_of(rows=rows, columns="size", claims=[Claim("", Metric("size")["row"] > 8.4)])
    first = run(study, tmp_path, tmp_path, SEEDS)
    assert first.raw["rows"][1] == {"variant": "row", "seed": 1, "overrides": {"n": 1}, "metrics": {"size": 9.0}}
    assert run(study, tmp_path, tmp_path, (0, 1, 2)).raw["rows"][:2] == first.raw["rows"]
    assert calls == [0, 1, 2]
    assert make_report(first).verdicts[0].verdict == "holds"
    assert not jax.config.jax_enable_x64


def test_costs_are_relative_to_the_reference(home, tmp_path):
    runs = language_models(home)
    study = study_of(runs, cost_reference=lambda name: "vanilla", trains=False, columns="cost_step_ratio")
    found = run(study, tmp_path / "work", tmp_path)
    assert found["vanilla"]["cost_step_ratio"] == found["vanilla"]["cost_optimizer_state_ratio"] == 1.0
    assert found["cured"]["cost_optimizer_state_bytes"] >= found["vanilla"]["cost_optimizer_state_bytes"]
    assert found["cured"]["cost_steps_per_second"] > 0
    assert not (tmp_path / "runs").exists()
    assert run(study, tmp_path / "work", tmp_path).raw["rows"] == found.raw["rows"]


@pytest.mark.slow
def test_processes_find_what_one_process_finds(results, study, home, tmp_path, monkeypatch):
    for name, value in cpu_environment(JAX_NUM_CPU_DEVICES="8").items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, __file__, str(home), str(tmp_path)]
    found = run_study(study, "tiny", SEEDS, tmp_path / "work", runs_dir=tmp_path / "runs", cache_dir=home / "data",
                      jobs=2, command=command)  # fmt: skip
    for ours, theirs in zip(found.raw["rows"], results.raw["rows"], strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4)
        assert [ours[key] for key in ("variant", "seed", "overrides")] == [
            theirs[key] for key in ("variant", "seed", "overrides")
        ]
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_process_that_ends_badly_is_a_failed_run(study, home, tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit(3 * ('--only=cured' in sys.argv))"]
    found = run(study, tmp_path, home, jobs=2, command=command)
    vanilla, lost = found.raw["rows"]
    assert "code 3" in lost["failed"]
    assert "failed" not in vanilla


def test_what_cannot_run_refused_before_anything_is_written(study, home, tmp_path):
    given = {"vanilla": Given(Config(), tmp_path)}
    takes = dataclasses.replace(study, models=lambda given: given)
    with pytest.raises(UserError, match="no scale 'tinny'"):
        run_study(study, "tinny", (0,), tmp_path / "work")
    with pytest.raises(UserError, match="no existing models"):
        run(study, tmp_path / "work", home, given=given)
    with pytest.raises(UserError, match="'vanilla' has the name of a variant"):
        run(takes, tmp_path / "work", home, given=given)
    with pytest.raises(UserError, match="--model"):
        run(study_of(models=lambda given: given), tmp_path / "work", home)
    assert not (tmp_path / "work").exists()
    with pytest.raises(UserError, match="'quik'"):
        catalog.find("quik")


def test_reports_contain_everything(results, tmp_path, capsys):
    report = make_report(results)
    write_report(report, tmp_path)
    print_report(report)
    console, text = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    page = html.unescape((tmp_path / "report.html").read_text())
    for claim in CLAIMS:
        assert claim.says in console
        assert claim.says in page
        assert escape_markdown(claim.says) in text
        assert claim.criterion in page
    assert "<b>better</b>" not in (tmp_path / "report.html").read_text()
    assert "\nCured is" not in text
    for shown in (re.sub(r"base64,[^\"]+", "", page), text, console):
        assert not re.search(r"\b(nan|inf|None)\b", shown)
        assert "under it: does not hold" in shown or shown is console
    assert [of.verdict for of in report.verdicts[1:]] == ["not testable", "holds", "not measured"]
    names = [picture.name for picture in report.pictures]
    by_layer = ["kurtosis_first_by_layer", "attention_by_key", "hidden_states"]
    assert names == ["headlines", "training_curves", *by_layer, "bars", "points"]
    for name in names:
        assert (tmp_path / f"figures/{name}.svg").read_bytes().startswith(b"<?xml")
        assert f"figures/{name}.svg" in text
    assert page.count('src="data:image/svg+xml;base64,') == len(names)
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    allowed = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    style = re.search(r"<style>(.*?)</style>", (tmp_path / "report.html").read_text(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    own = f"style-src 'sha256-{digest}'"  # and no script, as this page has no table to be sorted
    assert allowed[1].split("; ")[:4] == ["default-src 'none'", own, "script-src 'none'", "img-src data:"]
    assert not re.search(r"<script|\bstyle=|\bon\w+=", page)


def test_a_report_without_runs_leaves_their_pictures_out(results, study):
    committed = results_of(study, results.raw)
    report = make_report(committed)
    assert report.pictures[0].caption == "Perplexity. Bars are means; each point is a seed."
    assert [of.name for of in report.pictures] == ["headlines", "kurtosis_first_by_layer", "bars", "points"]
    ((_, numbers, _),) = report.headlines
    words = [tick.get_text() for tick in report.pictures[0].figure.axes[0].get_yticklabels()]
    assert words == [f"{name}  {text}" for name, text in zip(("vanilla", "cured"), numbers.split(" → "), strict=True)]
    assert report.verdicts == make_report(results).verdicts


def test_metric_that_a_seed_lacks_breaks_no_picture(study):
    def metrics(name, seed):
        share = {"sink_rate/step_1": 0.1, "sink_rate/step_2": 0.2}
        return share | {"x": 1.0, "x/step_1": 2.0, "x/step_2": 3.0} | ({"y": 2.0, "x/step_3": 4.0} if seed else {})

    pictures = [
        Bars("bars", "", "x y"), Bars("x", "", "x"), ByStep("x"), ByStep("sink_rate"), Points("points", "", "x", "y"),
    ]  # fmt: skip
    report = make_report(made_up(dataclasses.replace(study, pictures=pictures), metrics, scale="tiny", seeds=SEEDS))
    assert [picture.name for picture in report.pictures] == ["x", "x_by_step", "sink_rate_by_step"]
    (axes, *_) = report.pictures[1].figure.axes
    (percentages, *_) = report.pictures[2].figure.axes
    assert percentages.yaxis.get_major_formatter()(0.2) in ("20%", "20.0%")
    assert list(axes.get_lines()[0].get_xdata()) == [1, 2]


def test_names_of_studies_are_unique():
    names = [name for study in catalog.ALL for name in (study.name, *study.also)]
    assert len(set(names)) == len(names)
    assert all(catalog.find(name).title for name in names)


@pytest.mark.parametrize("study", catalog.ALL, ids=lambda study: study.name)
def test_every_study_has_what_claims_and_tables_name(study):
    assert bool(study.runs) + bool(study.rows) + bool(study.models) >= 1
    for scale in [scale for scale in study.scales if study.runs_at(scale)]:
        ones = dict.fromkeys(("perplexity", *(risk.name for risk in RISKS)), 1.0)
        results = made_up(study, lambda name, ones=ones: ones, scale)
        for claim in study.claims:
            first = [claim.revised[1]] if claim.revised else []
            for expression in [e for of in (claim, *first) for e in (of.holds, of.given, of.largest) if e is not None]:
                for name in expression.names:
                    start, _, end = name.partition("*")
                    known = [of for of in (*results, *results.aliases) if of.startswith(start) and of.endswith(end)]
                    assert known or study.models, f"{scale}: {name} in {claim.says}"
    assert all(of.says and (of.criterion or of.unmeasured) for of in study.claims)


def reproduced(*arguments):
    """Runs the command in this process."""
    before = set(flags.FLAGS)
    reproduce.define_flags()
    own = set(flags.FLAGS) - before
    try:
        flags.FLAGS(["reproduce", *arguments])
        reproduce.main([])
    finally:
        flags.FLAGS.unparse_flags()
        flags.FLAGS.remove_flag_values(own)


def test_studies_are_listed(capsys):
    reproduced("--list")
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if not line.startswith("    published: --scale=")]
    assert len(lines) == len(catalog.ALL)
    assert all(study.title in shown for study in catalog.ALL)
    assert "published: --scale=deep --seeds=3,4,5: 128 minutes a seed, summed over its runs (20" in shown
    assert "--seeds=0,1,2: 0.566 seconds a seed" in shown
    assert [line.split()[0] for line in lines if line.endswith("; needs --model=NAME=PATH")] == ["table7"]


@pytest.mark.parametrize(("arguments", "says"), [
    ([f"--report={RESULTS / 'figure3'}"], "# Figure 3"),
    ([f"--report={RESULTS / 'figure3'}", "--experiment=figure3", "--scale=tiny", "--seeds=2,0,1"], "# Figure 3"),
    ([f"--report={RESULTS / 'deep/table7'}"], "--seeds=0 --model=96_channels_s3=PATH,96_channels_s3_tuned=PATH,"),
    ([f"--report={RESULTS / 'figure3'}", "--experiment=quick"], "no variant of 'quick'"),
    (["--report="], "names no folder"),
    ([f"--report={RESULTS / 'figure3'},"], "names no folder"),
    ([f"--report={RESULTS / 'figure3'}", "--scale=deep"], "allowed: --scale=tiny --seeds=0,1,2"),
    ([f"--report={RESULTS / 'figure3'}", "--seeds=1"], "allowed: --scale=tiny --seeds=0,1,2"),
    ([f"--report={RESULTS / 'figure3'}", f"--model=a={RESULTS}"], "no --model"),
])  # fmt: skip
def test_a_report_is_of_the_study_that_its_file_names(tmp_path, capsys, arguments, says):
    try:
        reproduced(*arguments, f"--workdir={tmp_path / 'report'}")
        found = (tmp_path / "report/report.md").read_text().replace("\\", "")
    except UserError as error:
        found = str(error)
        assert not (tmp_path / "report").exists()
    assert says in found


@pytest.mark.parametrize(("arguments", "scale", "says"), [
    (["--experiment=table2", "--seeds=6"], "deep", "published: --scale=deep --seeds=3,4,5"),
    (["--experiment=table2", "--scale=tiny"], "tiny", "another scale than this"),
    ([], "tiny", "published: --scale=tiny --seeds=20,21,22,23,24: 5.63 minutes a seed"),
])  # fmt: skip
def test_the_published_scale_is_the_default_and_another_is_told(monkeypatch, capsys, arguments, scale, says):
    asked = []

    def run_study(study, scale, *args, **kwargs):
        asked.append(scale)
        raise UserError("enough")

    monkeypatch.setattr("orthojax.experiments.running.run_study", run_study)
    monkeypatch.setattr("orthojax.train.keep_compiled_programs", lambda folder: None)
    with pytest.raises(UserError, match="enough"):
        reproduced(*arguments)
    printed = capsys.readouterr().out
    assert asked == [scale]
    assert says in printed
    assert ("another scale" in printed) == (scale not in catalog.find("table2").published and "table2" in printed)


def test_report_of_another_scale_or_one_seed_names_the_published_ones():
    study = catalog.find("figure41")
    for scale, told, seeds in (("tiny", True, "0,1,2"), ("deep", False, "3,4,5")):
        report = make_report(made_up(study, lambda name: {"perplexity": 1.0}, scale))
        plt.close("all")
        assert ("--scale=deep --seeds=3,4,5" in " ".join(report.sentences)) == told
        assert f"One seed is an anecdote: --seeds={seeds} shows the spread." in report.sentences


if __name__ == "__main__":
    HOME, WORK, *FLAGS = sys.argv[1:]
    given = dict(flag.removeprefix("--").split("=") for flag in FLAGS)
    for setting in set(quant.SETTINGS) - {"int8_coarse"}:
        del quant.SETTINGS[setting]
    models = study_of(language_models(Path(HOME)))
    run_study(models, "tiny", (int(given["seeds"]),), Path(WORK) / "work", runs_dir=Path(WORK) / "runs",
              cache_dir=Path(HOME) / "data", only=given["only"])  # fmt: skip


def test_results_of_several_folders_are_read_together(results, study, home, tmp_path):
    run(study, tmp_path, home, (2,))
    together = read_results(study, home / "work", tmp_path)
    assert together.seeds == (0, 1, 2)
    assert together["cured"].values("perplexity")[:2] == results["cured"].values("perplexity")
    assert list(together["cured"].seeds) == [0, 1, 2]
    with pytest.raises(UserError, match="no variant of 'repeated_longer'"):
        read_results(catalog.find("repeated_longer"), home / "work")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="results"):
        read_results(study, tmp_path)
    with pytest.raises(UserError, match="results"):
        read_results(study, tmp_path / "nowhere")


def test_curves_of_many_decades_have_ticks_and_looks():
    curves = {f"curve {i}": ([1, 2, 3], np.array([1e-16, 1e-8, 1.0]) * (i + 1)) for i in range(50)}
    (axes,) = lines({"": curves}, x_label="x", y_label="y", y_scale="log").axes
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}) > 20
    assert all(tick == int(tick) for tick in axes.get_xticks())
