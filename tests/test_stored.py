"""Edited files of ours, as results.json and the folder of a run: each is rendered or refused, never a traceback."""

import contextlib
import copy
import io
import json
import math
import re

import pytest
from absl import flags
from matplotlib import pyplot as plt
from test_compare import made
from tiny_run import TINY

from orthojax.commands import compare
from orthojax.config import Config, to_json
from orthojax.errors import UserError
from orthojax.experiments.claims import DRAIN, FRACTION, PPL, Claim
from orthojax.experiments.measures import Measure
from orthojax.experiments.study import Study, make_report, read_results
from orthojax.files import read_with_digest, write_with_digest
from orthojax.report.page import print_report, write_report
from orthojax.report.pictures import KURTOSIS, ByStep
from orthojax.report.tables import Paired

STUDY = Study(
    name="made",
    title="made up",
    runs=lambda scale: {"vanilla": Config(), "cured": Config()},
    columns=["perplexity first_attention_fraction", DRAIN],
    tables=[Paired("Changes", "vanilla", "cured", changes="perplexity", differences="first_attention_fraction")],
    claims=[Claim("Better.", PPL["cured"] < PPL["vanilla"], 1 / FRACTION["vanilla"] > 0)],
    headlines=[("perplexity", "vanilla", "cured")],
    pictures=[KURTOSIS, ByStep("x")],
)
METRICS = {"perplexity": 9.0, "first_attention_fraction": 0.5, "value_norm_first": 1.0, "value_norm_rest": 2.0,
           "kurtosis_first/layer_0": 3.0, "kurtosis_first/layer_1": 4.0, "x/step_1": 1.0, "x/step_2": 2.0}  # fmt: skip
ROWS = [{"variant": name, "seed": seed, "overrides": {"train.seed": seed}, "metrics": METRICS, "run": "runs/a"}
        for name in ("vanilla", "cured") for seed in (0, 1, 2)]  # fmt: skip
DATA = [{"source": "text", "source_sha256": "ab", "train": {"n_tokens": 12}}]
PROVENANCE = {"seeds": [0, 1, 2], "date": "2026-01-01", "device": "cpu", "versions": {"jax": "1"}, "data": DATA,
              "wall_seconds": 60.0}  # fmt: skip
RESULTS = {"experiment": "made", "scale": "tiny", "provenance": PROVENANCE, "rows": ROWS}
ODD = [
    None,
    True,
    -1,
    0,
    0.5,
    1e308,
    10**400,
    math.nan,
    -math.inf,
    "",
    "x",
    "\0",
    "\ud800",
    "y" * 5000,
    [],
    [1],
    {},
    {"a": 1},
]
BYTES = {
    "empty": b"", "list": b"[]", "number": b"3", "null": b"null", "no JSON": b"{", "deep": b"[" * 100_000,
    "digits": b"1" * 5000, "latin-1": '{"é": 1}'.encode("latin-1"), "UTF-16": json.dumps(RESULTS).encode("utf-16"),
    "marked": b"\xef\xbb\xbf" + json.dumps(RESULTS).encode(), "zeros": bytes(100),
}  # fmt: skip


def places(value, path=()):
    """The path of every value in a JSON document; of lists that of the first item."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(document, path, change):
    document = copy.deepcopy(document)
    at = document
    for key in path[:-1]:
        at = at[key]
    change(at, path[-1])
    return json.dumps(document).encode()


def edits(document, mine=lambda path: True):
    """Every value of a document gone, and replaced by every odd one."""
    for path in filter(mine, places(document)):
        yield f"{path} gone", changed(document, path, lambda at, key: at.pop(key))
        for odd in ODD:
            yield f"{path} {str(odd)[:9]!r}", changed(document, path, lambda at, key, odd=odd: at.__setitem__(key, odd))


def outcome(render):
    """What came of a file: 'rendered', or the message with which it was refused."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            render()
        except UserError as error:
            short = len(str(error).splitlines()) <= 3 and len(str(error)) < 1000
            return str(error) if short else f"too long: {error}"
        finally:
            plt.close("all")
    return "rendered"


@pytest.fixture
def render(tmp_path):
    def of(content):
        (tmp_path / "results.json").write_bytes(content)
        report = make_report(read_results(STUDY, tmp_path))
        write_report(report, tmp_path / "report")
        print_report(report)

    return of


@pytest.fixture(scope="module", autouse=True)
def _flags_and_figures():
    """Figures are drawn and not rendered, which takes ten times as long as all else."""
    compare.define_flags()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orthojax.report.page.svg", lambda figure: b"")
        yield
    flags.FLAGS.remove_flag_values(["workdir"])


@pytest.fixture
def compared(tmp_path):
    evaluation = {"metrics": {"perplexity": 8.0, "perplexity_int8_coarse": 9.0, "kurtosis_first/layer_0": 3.0}}
    runs = [str(made(tmp_path / name, evaluation=evaluation)) for name in "ab"]
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["pytest"])
    flags.FLAGS.workdir = str(tmp_path / "compared")

    def of(file, content):
        before = (tmp_path / "b" / file).read_bytes()
        (tmp_path / "b" / file).write_bytes(content)
        try:
            compare.main(runs)
        finally:
            (tmp_path / "b" / file).write_bytes(before)

    return of


@pytest.mark.parametrize("part", RESULTS)
def test_edited_results_are_rendered_or_refused(render, tmp_path, part):
    assert outcome(lambda: render(json.dumps(RESULTS).encode())) == "rendered"
    found = {name: outcome(lambda content=content: render(content))
             for name, content in edits(RESULTS, lambda path: path[0] == part)}  # fmt: skip
    assert {name: said for name, said in found.items() if said != "rendered" and str(tmp_path) not in said} == {}


def test_edited_runs_are_compared_or_refused(compared, tmp_path):
    found = {}
    for file in ("evaluation.json", "metrics.jsonl"):
        lines = (tmp_path / "b" / file).read_text().splitlines()
        first = json.loads(lines[0])
        for name, content in edits(first):
            content = b"\n".join([content, *map(str.encode, lines[1:])])
            found[f"{file} {name}"] = outcome(lambda content=content, file=file: compared(file, content))
    config = json.loads(to_json(TINY))
    for name, content in edits(config, lambda path: len(path) == 1 or path[-1] in ("d_model", "num_layers", "paths")):
        found[f"config.json {name}"] = outcome(lambda content=content: compared("config.json", content))
    assert len(found) > 300
    assert [name for name, said in found.items() if said.startswith("too long")] == []


@pytest.mark.parametrize("name", BYTES)
def test_files_that_hold_something_else_are_refused(render, compared, tmp_path, name):
    assert "results.json" in outcome(lambda: render(BYTES[name]))
    for file in ("config.json", "evaluation.json"):
        assert file in outcome(lambda file=file: compared(file, BYTES[name]))
    said = outcome(lambda: compared("metrics.jsonl", BYTES[name]))
    assert said == "rendered" if name == "empty" else "metrics.jsonl has no valid line" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["rows"].append(ROWS[1]), r"2 rows of vanilla, seed 1, in .*\nallowed: one of a"),
        (lambda raw: raw["rows"][1].update(variant="vanila"), r"the variant 'vanila'[^$]*did you mean 'vanilla'"),
        (lambda raw: raw["rows"][1].update(seed=7), r"rows\[1\] \(vanilla, seed 7\).*\nallowed: 0, 1, 2"),
        (lambda raw: raw.update(scale="tinny"), r"is of scale 'tinny'\nallowed: tiny"),
        (lambda raw: raw["rows"][0]["metrics"].update(perplexity=-1),
         r"rows\[0\] \(vanilla, seed 0\), metrics, perplexity is -1\nallowed: a finite number, 1 or more"),
        (lambda raw: raw["rows"][0]["metrics"].update(perplexity_int4_zeropoint=0), r"is 0\nallowed: .* above 0"),
        (lambda raw: raw["rows"][0]["metrics"].update(first_attention_fraction=1.2), r"1\.2\nallowed: .*0 to 1"),
        *((lambda raw, key=key: raw["rows"][0]["metrics"].update({key: -1}), rf"{key} is -1\nallowed: .*0 or more")
          for key in ("kurtosis_first", "rotated_kurtosis_rest/layer_1", "max_abs_rest", "norm_ratio_first",
                      "loss_nats")),
        *((lambda raw, key=key: raw["rows"][0]["metrics"].update({key: 10**30}), "rendered")
          for key in ("x/step_1", "kurtosis_first/layer_0", "kurtosis_first/layer_9999")),
        *((lambda raw, key=key: raw["rows"][0]["metrics"].update({key: 1.0}), r"layers, heads and steps as numbers")
          for key in ("x/layer_", "x/layer_99999999999", "x/layer_99999", "x/head_99999", "x/step_²", "x/step_one",
                      "x/layer_-1/y")),
        (lambda raw: raw["rows"][0].pop("seed"), r"\[0\] has no 'seed'\nallowed: .*variant, seed, overrides, metrics$"),
    ],
)  # fmt: skip
def test_refusals_name_row_field_and_what_is_allowed(render, change, says):
    raw = copy.deepcopy(RESULTS)
    change(raw)
    assert re.search(says, outcome(lambda: render(json.dumps(raw).encode())))


def test_a_joined_report_states_the_provenance_of_all(tmp_path):
    other = {"seeds": [3], "date": "2026-02-02", "device": "gpu", "versions": {"jax": "2", "flax": "1"},
             "data": [*DATA, {"source": "other"}], "wall_seconds": 30.5}  # fmt: skip
    rows = [row | {"seed": 3} for row in ROWS[:1]]
    for name, raw in {"a": RESULTS, "b": RESULTS | {"provenance": other, "rows": rows}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(raw))
    notes = make_report(read_results(STUDY, tmp_path / "a", tmp_path / "b")).notes
    assert "2026-01-01; 2026-02-02, cpu; gpu, jax 1 and 2, flax 1" in notes
    assert [note for note in notes if "sha256" in note] == [
        "text, 12 training tokens, sha256 ab", "other, sha256 unknown"]  # fmt: skip
    assert notes[-1] == "1.51 minutes of training and computing, summed over runs"
    assert read_results(STUDY, tmp_path / "a").raw == RESULTS
    assert "2 rows of vanilla, seed 0, in " in outcome(lambda: read_results(STUDY, tmp_path / "a", tmp_path / "a"))


def test_files_with_a_digest_are_read_until_they_are_changed(tmp_path):
    path = tmp_path / "computed.json"
    write_with_digest(path, {"rows": [{"metrics": {"x": 0.1}, "axes": (1, 2)}]})
    assert read_with_digest(path, "rows") == {"rows": [{"metrics": {"x": 0.1}, "axes": [1, 2]}]}
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2"))
    assert "computed.json or its arrays were changed" in outcome(lambda: read_with_digest(path, "rows"))


def test_measured_files_are_checked(tmp_path):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured/evaluation.json").write_text('{"perplexity": NaN}')
    with pytest.raises(UserError, match=r"evaluation\.json, 'perplexity' is nan\nallowed: a finite number"):
        Measure("evaluation", lambda *_: pytest.fail("measured again")).of(tmp_path, None, None, print)
