"""Edited and damaged files of ours: each is rendered or refused, never a traceback, and no other number is read."""

import contextlib
import copy
import io
import json
import math
import random
import re

import numpy as np
import pytest
from matplotlib import pyplot as plt
from tiny_run import TINY

from orthojax import cards, train
from orthojax.cards.model_card import SCHEMA
from orthojax.config import Config, replace
from orthojax.data.token_files import open_token_file, write_token_file
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError
from orthojax.experiments.claims import DRAIN, FRACTION, PPL, Claim
from orthojax.experiments.measures import Measure
from orthojax.experiments.stored import read_results_file
from orthojax.experiments.study import Study, make_report, read_results
from orthojax.files import json_line, read_json, read_with_digest, write_text, write_with_digest
from orthojax.report.page import print_report, write_report
from orthojax.report.pictures import KURTOSIS, ByStep
from orthojax.report.tables import Paired
from orthojax.train.loading import _tokenizer

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
ROWS = [{"variant": name, "seed": seed, "overrides": {"seed": seed}, "metrics": METRICS, "run": "runs/a"}
        for name in ("vanilla", "cured") for seed in (0, 1, 2)]  # fmt: skip
DATA = [{"source": "text", "source_sha256": "ab", "train": {"n_tokens": 12}}]
PROVENANCE = {"seeds": [0, 1, 2], "date": "2026-01-01", "device": "cpu", "versions": {"jax": "1"}, "data": DATA,
              "wall_seconds": 60.0}  # fmt: skip
RESULTS = {"experiment": "made", "scale": "tiny", "provenance": PROVENANCE, "rows": ROWS}
ODD = [None, True, -1, 0, 0.5, 1e308, 10**400, math.nan, -math.inf, "", "x", "\0", "\ud800", "y" * 5000, [], [1], {},
       {"a": 1}, "gone"]  # fmt: skip
# What the places of RESULTS take of these; in lists the first item, after which the others move up if it is gone.
TAKEN = {
    "provenance": (), "provenance.seeds": (), "rows": ([],), "rows.0": ("gone",),
    **dict.fromkeys(("experiment", "scale", "rows.0.variant"), ("x",)),
    **dict.fromkeys(("provenance.seeds.0", "rows.0.seed", "provenance.data.0.train.n_tokens"), (0,)),
    "provenance.versions": ({}, "gone"), "provenance.data": ([], "gone"), "provenance.data.0.source": ("", "x"),
    **dict.fromkeys(("provenance.data.0", "provenance.data.0.train"), ("gone",)),
    **dict.fromkeys(("provenance.date", "provenance.device", "provenance.versions.jax", "rows.0.run",
                     "provenance.data.0.source_sha256"), ("", "x", "gone")),
    **dict.fromkeys(("rows.0.overrides", "rows.0.metrics"), ({}, {"a": 1})),
    "rows.0.overrides.seed": (*ODD[:-3], "gone"), "provenance.wall_seconds": (0, 0.5, 1e308, "gone"),
    **{f"rows.0.metrics.{name}": (-1, 0, 0.5, 1e308, "gone") for name in METRICS},
    **{f"rows.0.metrics.kurtosis_first/layer_{i}": (0, 0.5, 1e308, "gone") for i in (0, 1)},
    "rows.0.metrics.perplexity": (1e308, "gone"), "rows.0.metrics.first_attention_fraction": (0, 0.5, "gone"),
}  # fmt: skip


def places(value, name=""):
    """The name and the value of every place of a JSON document, of lists of the first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield f"{name}{key}", item
        yield from places(item, f"{name}{key}.")


def edited(edits):
    """RESULTS as JSON with other values in some places."""
    document = copy.deepcopy(RESULTS)
    for name, value in edits.items():
        *above, key = (int(key) if key.isdecimal() else key for key in name.split("."))
        at = document
        for part in above:
            at = at[part]
        at[key] = value
        if value == "gone":
            del at[key]
    return json.dumps(document)


@pytest.fixture
def outcome(tmp_path):
    """What comes of a results.json: None if it is taken, or the message with which it is refused."""

    def of(text, *, only_read=False):
        (tmp_path / "results.json").write_text(text)
        said = None
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                if only_read:
                    read_results_file(tmp_path / "results.json")
                else:
                    report = make_report(read_results(STUDY, tmp_path))
                    write_report(report, tmp_path / "report")
                    print_report(report)
            except UserError as error:
                said = str(error)
            finally:
                plt.close("all")
        assert said is None or (str(tmp_path) in said and len(said.splitlines()) <= 3 and len(said) < 1000)
        return said

    with pytest.MonkeyPatch.context() as patch:  # figures are drawn and not rendered, which takes ten times as long
        patch.setattr("orthojax.report.page.svg", lambda figure: b"")
        yield of


def test_every_place_takes_what_it_should(outcome):
    assert outcome(json.dumps(RESULTS), only_read=True) is None
    for name, _ in places(RESULTS):
        taken = [odd for odd in ODD if outcome(edited({name: odd}), only_read=True) is None]
        assert list(map(repr, taken)) == list(map(repr, TAKEN[name])), name


def test_what_is_read_is_rendered_or_refused(outcome):
    alone = {name for name, value in places(RESULTS) if isinstance(value, dict | list) or TAKEN[name] == ("x",)}
    found = {(name, str(odd)): outcome(edited({name: odd})) for name in alone for odd in TAKEN[name]}
    assert {of for of, said in found.items() if said} == {("scale", "x"), ("rows.0.variant", "x"), ("rows", "[]")}
    for k in range(6):  # several at once, in one row of three
        assert outcome(edited({name: of[k % len(of)] for name, of in TAKEN.items() if name not in alone})) is None


METRIC, PLACE = "rows.0.metrics.", "layers, heads and steps as numbers"
SAID = [
    ("rows.2.seed", 1, r"2 rows of vanilla, seed 1, in .*\nallowed: one of a"),
    ("rows.1.variant", "vanila", r"the variant 'vanila'[^$]*did you mean 'vanilla'"),
    ("rows.1.seed", 7, r"rows\[1\] \(vanilla, seed 7\).*\nallowed: 0, 1, 2"),
    ("scale", "tinny", r"is of scale 'tinny'\nallowed: tiny"),
    ("rows.0.seed", "gone", r"\[0\] has no 'seed'\nallowed: .*variant, seed, overrides, metrics$"),
    (f"{METRIC}perplexity", -1, r"rows\[0\] \(vanilla, seed 0\), metrics, perplexity is -1\nallowed: .*, 1 or more"),
    (f"{METRIC}first_attention_fraction", 1.2, r"1\.2\nallowed: a number, 0 to 1"),
    (f"{METRIC}rotated_kurtosis_rest/layer_1", -1, r"rest/layer_1 is -1\nallowed: .*0 or more"),
    *((f"{METRIC}{name}", 10**30, None) for name in ("x/step_1", "kurtosis_first/layer_0", "x/layer_9999")),
    *((f"{METRIC}x/{place}", 1.0, PLACE) for place in ("layer_", "layer_99999999999", "layer_99999", "head_99999",
                                                       "step_²", "step_one", "layer_-1/y")),
]  # fmt: skip


def test_refusals_name_row_field_and_what_is_allowed(outcome):
    for name, value, says in SAID:
        said = outcome(edited({name: value}))
        assert re.search(says, said) if says else said is None, (name, said)


def test_a_joined_report_states_the_provenance_of_all(tmp_path):
    other = {"seeds": [3], "date": "2026-02-02", "device": "gpu", "versions": {"jax": "2", "flax": "1"},
             "data": [*DATA, {"source": "other"}], "wall_seconds": 30.5}  # fmt: skip
    rows = [row | {"seed": 3} for row in ROWS[:1]]
    for name, raw in {"a": RESULTS, "b": RESULTS | {"provenance": other, "rows": rows}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(raw))
    together = read_results(STUDY, tmp_path / "a", tmp_path / "b")
    assert (together.seeds, list(together["vanilla"].seeds)) == ((0, 1, 2, 3), [0, 1, 2, 3])
    notes = make_report(together).notes
    assert "2026-01-01; 2026-02-02, cpu; gpu, jax 1 and 2, flax 1" in notes
    assert {"text, 12 training tokens, sha256 ab", "other"} <= set(notes)
    assert notes[-1] == "1.51 minutes of training and computing, summed over runs"
    assert read_results(STUDY, tmp_path / "a").raw == RESULTS
    with pytest.raises(UserError, match="2 rows of vanilla, seed 0, in "):
        read_results(STUDY, tmp_path / "a", tmp_path / "a")
    with pytest.raises(UserError, match="results"):
        read_results(STUDY, tmp_path / "nowhere")


def test_measured_files_are_checked(tmp_path):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured/evaluation.json").write_text('{"perplexity": NaN}')
    with pytest.raises(UserError, match=r"evaluation\.json, 'perplexity' is nan\nallowed: a finite number"):
        Measure("evaluation", lambda *_: pytest.fail("measured again")).of(tmp_path, None, None, print)


ONE_ROW = [{"variant": "a", "seed": 0, "overrides": {"x": 0.25}, "metrics": {"perplexity": 17.25, "loss_nats": 2.848}}]
OF_ONE_ROW = {"experiment": "made", "scale": "tiny", "provenance": {"seeds": [0]}, "rows": ONE_ROW}
CARD = {"schema": SCHEMA, "model": {"name": "a", "source": "b"}, "measured": {}, "metrics": [
    {"name": "kurtosis_first", "value": 12.5, "measured_as": "x", "source": "y"}],
    "rounding": [{"format": "w4a4", "perplexity": 18.75, "lost": 0.125}]}  # fmt: skip
LINES = [{"step": step, "loss_nats": 4 + step / 7} for step in range(1, 9)]
INFO = {"format_version": 2, "dtype": "uint16", "vocab_size": 258, "bos_id": 256, "eos_id": 257, "tokenizer": "bytes",
        "tokenizer_sha256": "ab", "source": "made", "source_sha256": "cd", "file_count": 1,
        "split": "train"}  # fmt: skip


def write_sidecar(path):
    write_token_file(path.with_suffix(".bin"), INFO, [(np.arange(9), 1, 12)])


# Kind -> its name, how it is written, and what is read of it.
KINDS = {
    "results": ("results.json", lambda path: write_with_digest(path, OF_ONE_ROW), read_results_file),
    "card": ("card.json", lambda path: write_with_digest(path, CARD), cards.read_cards),
    "stage": ("stage.json", lambda path: write_with_digest(path, {"x": 1.5}), lambda path: read_with_digest(path, "x")),
    "sidecar": ("t.json", write_sidecar, lambda path: open_token_file(path.with_suffix(".bin")).info),
    "metrics": ("metrics.jsonl", lambda path: write_text(path, "".join(map(json_line, LINES))), train.read_metrics),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_changes_no_number(kind, tmp_path):
    name, write, read = KINDS[kind]
    path = tmp_path / name
    write(path)
    before, content, draw, noticed = read(path), path.read_bytes(), random.Random(kind), 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            after = read(path)
        except UserError:
            noticed += 1
            continue
        noticed += after != before
        # Where the name of the sum is damaged, it is a field that nobody reads.
        if kind == "metrics":
            assert all(any(old.items() <= new.items() for old in before) for new in after)
        elif after != before:
            ((old, new),) = zip(*(x if isinstance(x, list) else [x] for x in (before, after)), strict=True)
            assert {key: new[key] for key in old} == old
    assert noticed > 100  # the others flip a blank, or one sign of JSON to another with its meaning


@pytest.mark.parametrize("kind", ["results", "card", "sidecar"])
def test_files_without_a_sum_are_read_and_said_to_be_unchecked(kind, tmp_path, capsys):
    name, write, read = KINDS[kind]
    write(tmp_path / name)
    before, values = read(tmp_path / name), read_json(tmp_path / name, "file")
    del values["sha256"]
    write_text(tmp_path / name, json.dumps(values))
    for _ in range(2):
        assert read(tmp_path / name) == before
    assert capsys.readouterr().err.count(f"{tmp_path / name} has no sha256") == 1


def test_damaged_lines_of_a_log_are_counted(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(json_line, LINES)).replace("4.142857", "3.142857") + '{"step": 9, "lo')
    assert train.read_metrics(path) == LINES[1:]
    assert capsys.readouterr().err == f"{path}: left out 2 damaged lines\n"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))  # as 0.1.0 wrote them
    assert train.read_metrics(path) == LINES


def test_another_tokenizer_beside_a_run_is_left_out_and_named(tmp_path, capsys):
    folder = tmp_path / "run/checkpoints/4"
    (folder / "data").mkdir(parents=True)
    (folder / "data/metadata").write_text(json.dumps({"tokenizer_sha256": ByteTokenizer().sha256}))
    (tmp_path / "run/tokenizer.json").write_text("{}")
    assert (
        _tokenizer(folder, replace(TINY, {"data.tokenizer": "bytes"})).sha256 == ByteTokenizer().sha256
    )  # which the config names
    assert f"{tmp_path / 'run/tokenizer.json'} is left out" in capsys.readouterr().err


@pytest.mark.parametrize("field", ["n_bytes", "n_documents", "eos_id", "bos_id", "vocab_size"])
def test_a_digit_of_a_sidecar_is_not_believed(field, tmp_path):
    write_sidecar(tmp_path / "t.json")
    values = json.loads((tmp_path / "t.json").read_text())
    write_text(tmp_path / "t.json", json.dumps(values | {field: values[field] + 1}))
    with pytest.raises(UserError, match="were changed since they were written"):
        open_token_file(tmp_path / "t.bin")
