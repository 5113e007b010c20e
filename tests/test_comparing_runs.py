"""`orthojax compare`: what differs between runs, how they ended, and what is refused."""

import json

import pytest
from matplotlib import pyplot as plt
from test_commands import run
from tiny_run import TINY

from orthojax.analysis import chance_of_first
from orthojax.config import replace, to_json
from orthojax.errors import UserError
from orthojax.experiments.comparing_runs import comparing_page, read_run
from orthojax.formatting import number

pytestmark = pytest.mark.usefixtures("closed_figures")


@pytest.fixture
def closed_figures():
    yield
    plt.close("all")


LINES = [
    {"step": 1, "loss_nats": 3.0, "learning_rate": 0.02, "grad_norm": 1.0, "tokens_per_second": 10.0},
    {"step": 2, "kurtosis_first": 9.0, "kurtosis_first/layer_0": 9.0},
    {"step": 4, "validation_loss_nats": 2.5},
    {"step": 4, "loss_nats": 2.0, "learning_rate": 0.02, "grad_norm": 0.5, "tokens_per_second": 20.0},
]


def made(folder, changes=None, lines=LINES, evaluation=None, step=4):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(replace(TINY, changes or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluation:
        (folder / "evaluation.json").write_text(
            json.dumps({"checkpoint": f"checkpoints/{step}", "metrics": evaluation})
        )
    return folder


def table(report, caption):
    (found,) = [table for table in report.tables if table.caption == caption]
    return {row[0]: list(row[1:]) for row in found.rows}


@pytest.fixture
def page(tmp_path):
    evaluated = {"perplexity": 8.0, "loss_nats": 2.08, "kurtosis_first": 3.0, "sequences": 16}
    runs = {
        "plain": read_run(made(tmp_path / "plain", {"model.normalizer": "softmax"})),
        "cured": read_run(made(tmp_path / "cured", evaluation=evaluated)),
    }
    return comparing_page(runs, ["orthojax compare plain cured"])


def test_fields_that_differ_are_shown_and_no_others(page):
    assert table(page, "Fields of the config that differ") == {"model.normalizer": ["softmax", "softmax1"]}


def test_an_evaluation_comes_before_what_was_logged(page):
    ends = table(page, "How they ended")
    assert ends["perplexity"] == ["-", "8", "32 if all logits are equal"]
    assert ends["held-out loss (nats)"][:2] == ["-", "2.08"]
    assert ends["held-out loss while training (nats)"][:2] == ["2.5", "2.5"]
    assert ends["training loss of the last logged step (nats)"][:2] == ["2", "2"]
    assert ends["kurtosis, first token"] == ["9", "3", "3 for a Gaussian"]
    assert page.summary[1].startswith("Not evaluated: plain.")


def test_each_run_is_compared_with_its_own_level_of_chance(tmp_path):
    evaluated = {"perplexity": 8.0, "first_attention_mass": 0.25}
    runs = {
        name: read_run(made(tmp_path / name, {"model.normalizer": name}, evaluation=evaluated))
        for name in ("softmax", "softmax1")
    }
    mass = [number(chance_of_first(TINY.data.sequence_length, softmax1=n)) for n in (False, True)]
    said = table(comparing_page(runs, []), "How they ended")["attention mass on the first token"][-1]
    assert said == f"softmax: {mass[0]} if all logits are 0; softmax1: {mass[1]} if all logits are 0"


def test_curves_are_of_what_was_logged(page):
    names = {picture.name for picture in page.pictures}
    assert names == {"training_loss", "gradient_norm", "learning_rate"}  # of the others there is one point
    (losses,) = [picture.figure for picture in page.pictures if picture.name == "training_loss"]
    for line in losses.axes[0].get_lines():
        assert [list(values) for values in line.get_data()] == [[1, 4], [3.0, 2.0]]


def test_runs_on_other_data_are_said_to_be(tmp_path):
    runs = {"a": read_run(made(tmp_path / "a")), "b": read_run(made(tmp_path / "b", {"eval.sequences": 8}))}
    assert any("data or evaluations differ" in text for text in comparing_page(runs, []).summary)
    same = {"a": runs["a"], "b": read_run(made(tmp_path / "c", {"data.seed": 1}))}
    assert not any("differ:" in text for text in comparing_page(same, []).summary)
    same = {"a": runs["a"], "b": read_run(made(tmp_path / "d"))}
    assert table(comparing_page(same, []), "Fields of the config that differ") == {"none": ["", ""]}


def test_an_evaluation_of_an_earlier_checkpoint_is_said(tmp_path):
    metrics = {"perplexity": 8.0, "loss_nats": 2.08}
    runs = {"new": read_run(made(tmp_path / "a", evaluation=metrics))}
    made(tmp_path / "b", evaluation=metrics, step=2)
    (tmp_path / "b/checkpoints/4").mkdir(parents=True)
    runs["old"] = read_run(tmp_path / "b")
    (warning,) = [text for text in comparing_page(runs, []).summary if "evaluated at" in text]
    assert warning.startswith("old was evaluated at step 2, and its newest checkpoint is of step 4")


def test_the_command_writes_the_page(tmp_path):
    made(tmp_path / "a"), made(tmp_path / "b", {"optim.learning_rate": 0.5})
    done = run("compare", "a", "tuned=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optim.learning_rate" in done.stdout
    assert done.stdout.endswith("written: runs/compare/report.html\n")
    text = (tmp_path / "runs/compare/report.md").read_text()
    assert "orthojax compare a tuned=b" in text
    assert "| optim.learning_rate | 0.02 | 0.5 |" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "0 arguments given"),
        (["a"], "error: only one run given: a"),
        (["a", "missing"], "missing is not a run: it has no config.json"),
        (["a", "a"], "two are called 'a'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, says):
    made(tmp_path / "a")
    done = run("compare", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) <= 3
    assert not (tmp_path / "runs").exists()


def test_folders_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(UserError, match="has logged no step yet"):
        read_run(made(tmp_path / "new", lines=[]))
    folder = made(tmp_path / "damaged")
    (folder / "evaluation.json").write_text("[]")
    with pytest.raises(UserError, match="has no metrics"):
        read_run(folder)
