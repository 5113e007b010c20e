"""`orthojax compare`: fields that differ, how runs ended, curves, and what is refused."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
from test_commands import run
from tiny_run import TINY

from orthojax.commands import compare as command
from orthojax.config import replace, to_json
from orthojax.errors import UserError

LINES = [
    {"step": 1, "loss_nats": 3.0, "learning_rate": 0.02, "grad_norm": 1.0, "tokens_per_second": 10.0},
    {"step": 2, "kurtosis_first": 9.0, "kurtosis_first/layer_0": 9.0},
    {"step": 4, "validation_loss_nats": 2.5},
    {"step": 4, "loss_nats": 2.0, "learning_rate": 0.02, "grad_norm": 0.5, "tokens_per_second": 20.0},
]


def made(folder, changes=None, lines=LINES, evaluation=None):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(replace(TINY, changes or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def rows_of(report):
    """The rows of all tables of a report in Markdown by their first cell."""
    cells = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


def test_runs_are_compared(tmp_path):
    evaluations = [{"perplexity": 9.0, "loss_nats": 2.1972, "kurtosis_first": 4.0},
                   {"perplexity": 8.0, "loss_nats": 2.0794, "kurtosis_first": 3.0}]  # fmt: skip
    made(tmp_path / "a", {"optim.learning_rate": 0.5}, evaluation={"metrics": evaluations[0]})
    made(tmp_path / "b", evaluation={"metrics": evaluations[1]})
    done = run("compare", "a", "tuned=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optim.learning_rate" in done.stdout
    rows = rows_of((tmp_path / "runs/compare/report.md").read_text())
    assert rows["optim.learning_rate"] == ["0.5", "0.02"]
    assert "optim.optimizer" not in rows
    assert rows["perplexity"][:2] == ["9", "8"]
    assert rows["loss (nats)"][:2] == ["2.2", "2.08"]  # not the training loss
    assert rows["held-out loss (nats)"][:2] == ["2.5", "2.5"]
    assert rows["kurtosis, first token"][:2] == ["4", "3"]  # as evaluated
    # Of the others there is one point.
    drawn = {path.stem for path in (tmp_path / "runs/compare/figures").iterdir()}
    assert drawn == {"loss_nats_by_step", "grad_norm_by_step"}


def test_a_run_that_was_not_evaluated_is_compared_as_logged(tmp_path, compare, capsys):
    made(tmp_path / "a")
    made(tmp_path / "b", evaluation={"metrics": {"perplexity": 8.0, "kurtosis_first": 3.0}})
    compare("a", "b")
    printed = capsys.readouterr().out
    assert "Not evaluated: a (orthojax evaluate --checkpoint=a)" in printed
    rows = rows_of((tmp_path / "report/report.md").read_text())
    assert "perplexity" not in rows
    assert rows["kurtosis, first token"][:2] == ["9", "9"]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The command in this process, with arguments that are parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "FLAGS", SimpleNamespace(workdir="report"))
    return lambda *arguments: command.main(list(arguments))


@pytest.mark.parametrize(
    ("changes", "says", "differ"),
    [({"eval.sequences": 8}, "evaluations differ", True), ({}, "Their configs are the same.", False)],
)
def test_other_evaluations_and_equal_configs_are_pointed_out(tmp_path, compare, capsys, changes, says, differ):
    made(tmp_path / "a"), made(tmp_path / "b", changes)
    compare("a", "b")
    printed = capsys.readouterr().out
    assert says in printed
    assert ("Fields of the config" in printed) == differ


WRONG = {"a": "only one run", "a missing": "missing", "a a": "'a'", "a damaged": "evaluation.json"}


@pytest.mark.parametrize(("arguments", "says"), WRONG.items())
def test_wrong_arguments_are_refused(tmp_path, compare, arguments, says):
    made(tmp_path / "a"), made(tmp_path / "damaged", evaluation=[])
    with pytest.raises(UserError, match=says) as refused:
        compare(*arguments.split())
    assert len(str(refused.value).splitlines()) <= 3
    assert not (tmp_path / "report").exists()


ODD = [None, True, -1, 1e308, 10**400, math.nan, -math.inf, "x", "\0", "\ud800", [1], {"a": 1}]
EDITED = [
    *(("evaluation.json", [of], r"evaluation\.json") for of in (
        3, {}, {"metrics": [1]}, {"metrics": {"perplexity": 0.5}}, {"metrics": {"kurtosis_first": math.nan}})),
    *(("evaluation.json", [{"metrics": of}], "") for of in ({}, {"perplexity": 1e308, "x": -1e308})),
    *(("metrics.jsonl", [{"step": step}], r"step is .*\nallowed: an integer, 0") for step in (-1, True, 10**400)),
    ("metrics.jsonl", [3, {}, {"step": None}, {"step": 0.5}, {"step": "x"}], "no valid line"),
    ("metrics.jsonl", [{"step": 1, "loss_nats": x, "kurtosis_first": x} for x in ODD], ""),
    ("metrics.jsonl", [{"step": i, "loss_nats": x, "kurtosis_first": x} for i, x in enumerate(ODD)], ""),
    *(("config.json", [of], r"config\.json") for of in (3, {}, {"model": 3}, {"data": {"paths": [1]}})),
]  # fmt: skip


def test_edited_runs_are_compared_or_refused(tmp_path, compare):
    made(tmp_path / "a"), made(tmp_path / "b", evaluation={"metrics": {"perplexity": 8.0}})
    for name, lines, says in EDITED:
        file = tmp_path / "b" / name
        before = file.read_text()
        file.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(UserError, match=says) if says else contextlib.nullcontext() as refused:
            compare("a", "b")
        assert not says or len(str(refused.value).splitlines()) <= 3
        file.write_text(before)


def test_no_run_ends_the_command(tmp_path):
    done = run("compare", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("0 arguments")) == (2, 1)
