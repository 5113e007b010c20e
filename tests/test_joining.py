"""Results of runs that were trained apart become those of one call."""

import copy
import json
from pathlib import Path

import pytest
from committed import RESULTS

from orthojax.errors import UserError
from orthojax.experiments.catalog import find
from orthojax.experiments.claims import judge
from orthojax.experiments.joining import join
from orthojax.experiments.rerender import read_raw, rerender, results_of

SOURCE = RESULTS / "ordinary-text/results.json"
PATHS = Path("one/results.json"), Path("other/results.json")


def of_seeds(seeds, source=SOURCE):
    """What a call with these seeds would have written."""
    raw = copy.deepcopy(read_raw(source))
    raw["rows"] = [row for row in raw["rows"] if row["seed"] in seeds]
    raw["provenance"]["seeds"] = list(seeds)
    raw["provenance"]["training_seconds"] = round(sum(row["seconds"] for row in raw["rows"]), 1)
    return raw


def two_parts():
    first, second = of_seeds([12, 10]), of_seeds([11, 13, 14])
    second["provenance"] |= {"date": "2027-01-02", "device": "another machine"}
    return dict(zip(PATHS, (first, second), strict=True))


def rows_of(raw):
    return {(row["variant"], row["seed"]): row["metrics"] for row in raw["rows"]}


def test_seeds_of_two_calls_give_the_numbers_and_verdicts_of_one():
    parts, whole = two_parts(), read_raw(SOURCE)
    before = copy.deepcopy(parts)
    joined = join(parts, Path("joined"))
    assert parts == before
    assert rows_of(joined) == rows_of(whole)
    assert joined["provenance"]["seeds"] == [10, 11, 12, 13, 14]
    assert joined["provenance"]["training_seconds"] == pytest.approx(sum(row["seconds"] for row in whole["rows"]))
    assert joined["provenance"]["data"] == whole["provenance"]["data"]
    experiment = find("ordinary_text")
    judged = [
        [judge(claim, results_of(experiment, raw, Path())) for claim in experiment.claims] for raw in (joined, whole)
    ]
    assert [of.verdict for of in judged[0]] == [of.verdict for of in judged[1]]
    assert "holds" in judged[0][0].verdict
    assert [of.cases for of in judged[0]] == [of.cases for of in judged[1]]


def test_each_part_says_where_and_when_it_was_made_and_runs_are_found_from_the_new_folder():
    joined = join(two_parts(), Path("joined"))
    provenance = joined["provenance"]
    assert (provenance["date"], provenance["device"].split("; ")[1]) == ("2027-01-02", "another machine")
    assert [part["seeds"] for part in provenance["joined"]] == [[12, 10], [11, 13, 14]]
    (run,) = {row["run"] for row in read_raw(SOURCE)["rows"] if (row["variant"], row["seed"]) == ("vanilla", 10)}
    assert joined["rows"][0]["run"] == run  # both folders are beside each other
    assert join(two_parts(), Path())["rows"][0]["run"] == run.removeprefix("../")


def test_joining_again_doubles_nothing():
    once = join(two_parts(), Path("joined"))
    again = join({Path("joined/results.json"): once, **two_parts()}, Path("all"))
    assert again["rows"] == once["rows"]
    assert again["provenance"] == once["provenance"]


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("results.json")), ids=lambda path: path.parent.name)
def test_every_committed_result_joins_with_itself_to_itself(path):
    raw = read_raw(path)
    if raw["experiment"] == "analyze":
        return  # no experiment
    copied = path.with_name("copy")
    if not raw["rows"]:
        with pytest.raises(UserError, match="no runs to join"):
            join({path: raw, copied: raw}, path.parent)
        return
    joined = join({path: raw, copied: raw}, path.parent)
    assert rows_of(joined) == rows_of(raw)
    assert joined["provenance"]["data"] == raw["provenance"]["data"]


def test_a_run_that_failed_in_one_part_and_finished_in_another_has_finished():
    first, second = of_seeds([10, 11]), of_seeds([11])
    failed = [row | {"metrics": {}, "failed": "out of memory"} if row["seed"] == 11 else row for row in first["rows"]]
    first["rows"] = failed
    for parts in ((first, second), (second, first)):
        joined = join(dict(zip(PATHS, parts, strict=True)), Path("joined"))
        assert rows_of(joined) == rows_of(of_seeds([10, 11]))
        assert not [row for row in joined["rows"] if "failed" in row]


def test_an_existing_model_that_two_machines_measured_is_there_once():
    parts = two_parts()
    row = parts[PATHS[0]]["rows"][0]
    nearly = {name: value * 1.0001 for name, value in row["metrics"].items()}
    parts[PATHS[1]]["rows"].append(row | {"metrics": nearly})
    assert rows_of(join(parts, Path("joined"))) == rows_of(read_raw(SOURCE))


def test_rates_that_trials_chose_may_differ_between_seeds():
    path = RESULTS / "optimizer-outliers/results.json"
    parts = {PATHS[0]: of_seeds([0], path), PATHS[1]: of_seeds([0], path)}
    for row in parts[PATHS[1]]["rows"]:
        row["seed"], row["overrides"]["optim.learning_rate"] = 1, 0.123
    assert len(join(parts, Path("joined"))["rows"]) == 2 * len(parts[PATHS[0]]["rows"])
    for part in parts.values():
        for row in part["rows"]:
            del row["learning_rates"]
    with pytest.raises(UserError, match=r"optim\.learning_rate=0\.123"):
        join(parts, Path("joined"))


def test_costs_are_those_of_the_first_part_that_has_them():
    path = RESULTS / "parity/results.json"
    raw = read_raw(path)
    parts = {PATHS[0]: of_seeds([0], path), PATHS[1]: of_seeds([1, 2], path)}
    del parts[PATHS[0]]["costs"]
    assert join(parts, Path("joined"))["costs"] == raw["costs"]
    of_lion = {"step_seconds": 1.0}
    parts[PATHS[0]]["costs"] = {"lion_500": of_lion, "muon_500": {"failed": "out of memory"}}
    assert join(parts, Path("joined"))["costs"] == raw["costs"] | {"lion_500": of_lion}


def change(part, path, value):
    *folders, last = path
    for name in folders:
        part = part[name]
    part[last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["experiment"], "table2", ["experiment 'table2'", "'ordinary_text'", "one experiment"]),
        (["scale"], "small", ["scale 'small'", "'tiny'"]),
        (["rows", 0, "overrides", "train.steps"], 7, ["has train.steps=7 in other", "2000 in one"]),
        (["rows", 1, "overrides", "model.d_mlp"], 9, ["model.d_mlp=9 in other", "None in one"]),
        (["rows", 0, "seed"], 10, ["vanilla, seed 10, has other numbers in other", "than in one", "each run once"]),
        (["provenance", "data", 0, "source_sha256"], "0", ["the text of other", "not that of one", "same text"]),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(path, value, words):
    parts = two_parts()
    change(parts[PATHS[1]], path, value)
    with pytest.raises(UserError) as error:
        join(parts, Path("joined"))
    assert not [word for word in words if word not in str(error.value)]


def test_the_report_of_joined_results_has_the_command_of_all_seeds_and_a_line_for_each_part(tmp_path):
    source = tmp_path / "results.json"
    first, joined = of_seeds([12, 10]), join(two_parts(), tmp_path)
    rerender(find("ordinary_text"), first, source, tmp_path)  # an earlier report in the same folder
    assert "- orthojax reproduce --experiment=ordinary_text --scale=tiny --seeds=12,10\n" in report(tmp_path)
    source.write_text(json.dumps(joined))
    rerender(find("ordinary_text"), joined, source, tmp_path)
    assert "- orthojax reproduce --experiment=ordinary_text --scale=tiny --seeds=10,11,12,13,14\n" in report(tmp_path)
    date = first["provenance"]["date"]
    for line in (f"- seeds 12, 10: {date}, ", "- seeds 11, 13, 14: 2027-01-02, another machine, orthojax"):
        assert line in report(tmp_path)


def test_a_report_without_its_runs_says_that_pictures_are_left_out(tmp_path):
    raw = join(two_parts(), tmp_path)
    rerender(find("ordinary_text"), raw, tmp_path / "results.json", tmp_path)
    assert "](figures/" not in report(tmp_path)
    assert "without training; pictures that need the runs are left out, since these are not here\n" in report(tmp_path)


def report(folder):
    return (folder / "report.md").read_text()
