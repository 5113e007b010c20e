"""The committed results under the claims as they are: verdicts, reports and the page of claims."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from orthojax.experiments.study import command
from orthojax.report.page import markdown

ROOT = Path(__file__).parents[1]
# No study: a command, and those whose code is gone.
NOT_JUDGED = {"analyze", "bidirectional", "damage", "haar", "kv_cache", "parity", "preventions_soap",
              "preventions_time", "preventions_tuning", "remaining_outliers", "rotation_ablation", "smollm2_quantised",
              "smollm2_safe"}  # fmt: skip


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "results" / "verdicts.py"))


@pytest.fixture(scope="module")
def reports(script):
    """Folder -> report of every committed result."""
    made = {
        script["folder"](study, scale): script["with_committed_pictures"](results)
        for study, scale, results in script["committed"]()
    }
    plt.close("all")
    return made


def test_committed_results_have_the_committed_verdicts(script):
    assert script["differences"]() == []


def test_every_committed_result_is_judged(script):
    judged = {script["folder"](study, scale) for study, scale, _ in script["committed"]()}
    found = {path.parent: json.loads(path.read_text()) for path in (ROOT / "results").rglob("results.json")}
    assert {folder for folder, raw in found.items() if raw["experiment"] not in NOT_JUDGED} <= judged
    for name in NOT_JUDGED - {"analyze"}:  # their findings stand in the log
        assert f"`{name}`" in (ROOT / "results/LOG.md").read_text()


def test_the_page_of_claims_is_up_to_date(script):
    assert script["CLAIMS"].read_text() == script["claims"]()


def test_what_is_published_is_noted_for_the_command(script):
    assert script["PUBLISHED"].read_text() == script["published"]()
    for study, scale, results in script["committed"]():
        assert study.published[scale].seeds == results.seeds
        assert f"--seeds={','.join(map(str, results.seeds))}" in command(results)
        assert script["folder"](study, scale).name == study.name == results.study.name


def test_reports_of_committed_results_are_up_to_date(reports):
    different = [folder for folder, report in reports.items() if (folder / "report.md").read_text() != markdown(report)]
    assert different == []


@pytest.fixture(scope="module")
def believe():
    return runpy.run_path(str(ROOT / "results" / "believe.py"))


def test_what_to_believe_is_up_to_date(believe):
    assert (ROOT / "results/believe.md").read_text() == believe["report"]()


def test_random_effects_of_equally_many_pairs_are_the_t_interval_of_the_settings_means(believe):
    means = 2 * np.random.default_rng(0).normal(size=8)
    found = believe["effect"]([list(mean + np.array([-1.0, -0.5, 0.0, 0.5, 1.0])) for mean in means])
    between = means.var(ddof=1) - 0.625 / 5  # without what the scatter within adds
    wide = stats.t.ppf(0.975, 6) * np.sqrt(between + means.var(ddof=1) / 8)
    assert (found.settings, found.pairs, found.mean) == (8, 40, pytest.approx(means.mean()))
    assert found.interval == pytest.approx(stats.t.interval(0.95, 7, means.mean(), stats.sem(means)))
    assert found.prediction == pytest.approx((means.mean() - wide, means.mean() + wide))


def test_random_effects_of_other_cases(believe):
    one = believe["effect"]([[1.0, 2.0, 3.0]])
    assert one.interval == pytest.approx(stats.t.interval(0.95, 2, 2.0, 1 / np.sqrt(3)))
    assert one.prediction is None
    draws = np.random.default_rng(0).normal(size=(6, 3)) * np.array([[0.1], [0.1], [0.3], [1.0], [3.0], [10.0]])
    variances = believe["_variances"]([*draws, draws[0, :1]])
    own = draws.var(1, ddof=1)
    common = variances[-1]  # that of a single pair
    assert own.min() < common < own.max()
    assert ((variances[:-1] - own) * (common - own) > 0).all()  # drawn towards it


def test_pairs_are_of_the_same_config_seed_and_text(believe):
    sinks = {of.studies: of.pairs for of in believe["settings"]("learned sinks")}
    assert len(sinks) == 4  # optimizers
    assert {len(pairs) for pairs in sinks.values()} == {3}
    rows = json.loads((ROOT / "results/preventions_sinks/results.json").read_text())["rows"]
    by_run = {(row["variant"], row["seed"]): row["metrics"] for row in rows}
    before, after = sinks[("preventions_sinks/muon_sinks",)][1]
    assert (before["perplexity"], after["perplexity"]) == tuple(
        by_run[name, 2]["perplexity"] for name in ("muon", "muon_sinks")
    )
    cured = [of.studies for of in believe["settings"]("softmax-1 and OrthoAdam")]
    assert ("damage/cured_longer", "repeated_longer/d_model_64_bos_6000") in cured  # one setting in two studies
    assert not any("backcopy" in name or "masked" in name for of in cured for name in of)


def test_cells_of_reports_have_at_most_twelve_words(reports):
    for folder, report in reports.items():
        cells = [cell for table in report.tables for row in (table.columns, *table.rows) for cell in row]
        assert [str(cell) for cell in cells if len(str(cell).split()) > 12] == [], folder
