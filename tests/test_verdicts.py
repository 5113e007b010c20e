"""The committed results under the claims as they are: verdicts, reports and the page of claims."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from orthojax.experiments.study import command
from orthojax.report.page import markdown

ROOT = Path(__file__).parents[1]
NOT_JUDGED = {"analyze", "damage", "remaining_outliers"}  # no study: a command, and two whose numbers others still read


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


def test_cells_of_reports_have_at_most_twelve_words(reports):
    for folder, report in reports.items():
        cells = [cell for table in report.tables for row in (table.columns, *table.rows) for cell in row]
        assert [str(cell) for cell in cells if len(str(cell).split()) > 12] == [], folder


def test_reports_of_committed_results_are_up_to_date(reports):
    different = [folder for folder, report in reports.items() if (folder / "report.md").read_text() != markdown(report)]
    assert different == []


def test_random_effects_are_those_of_a_balanced_analysis_of_variance():
    random_effects = runpy.run_path(str(ROOT / "results" / "perplexity.py"))["random_effects"]
    drawn = np.random.default_rng(0).normal(size=(8, 5)) + 2 * np.random.default_rng(1).normal(size=(8, 1))
    # With as many seeds everywhere both variances together are that of the settings' means.
    mean, error = random_effects([list(of) for of in drawn])
    assert mean == pytest.approx(drawn.mean())
    assert error == pytest.approx(drawn.mean(1).std(ddof=1) / np.sqrt(8))
    means = np.arange(4.0) * 1e-6  # which differ by less than seeds do: no variance between settings
    scattered = means[:, None] + np.array([-1.0, 0.0, 1.0])
    assert random_effects([list(of) for of in scattered])[1] == pytest.approx(1 / np.sqrt(12))


def test_the_readme_has_what_the_cure_costs_over_all_pairs(capsys):
    runpy.run_path(str(ROOT / "results" / "perplexity.py"), run_name="__main__")
    assert "9 settings, 35 seeds: -0.14% (-1.49% to +1.23%); within 1%: p = 0.11" in capsys.readouterr().out
    assert "-0.1% (95% interval -1.5 to +1.2; within 1%: p = 0.11)" in (ROOT / "README.md").read_text()
