"""The committed results under the claims as they are: verdicts, reports and the page of claims."""

import json
import runpy
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from orthojax.experiments.report import markdown

ROOT = Path(__file__).parents[1]


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
    assert {folder for folder, raw in found.items() if raw["experiment"] != "analyze"} <= judged


def test_the_page_of_claims_is_up_to_date(script):
    assert script["CLAIMS"].read_text() == script["claims"]()


def test_what_is_published_is_noted_for_the_command(script):
    assert script["PUBLISHED"].read_text() == script["published"]()
    for study, scale, results in script["committed"]():
        assert study.published[scale].seeds == results.seeds
        assert f"--seeds={','.join(map(str, results.seeds))}" in script["command"](results)
        assert script["folder"](study, scale).name == study.name == results.study.name


def test_cells_of_reports_have_at_most_twelve_words(reports):
    for folder, report in reports.items():
        cells = [cell for table in report.tables for row in (table.columns, *table.rows) for cell in row]
        assert [str(cell) for cell in cells if len(str(cell).split()) > 12] == [], folder


def test_reports_of_committed_results_are_up_to_date(reports):
    different = [folder for folder, report in reports.items() if (folder / "report.md").read_text() != markdown(report)]
    assert different == []
