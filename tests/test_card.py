"""Extremes in closed form, and the card of a model: its stages, its schema, its tables."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from test_analyze import LARGE, T, models, opened  # noqa: F401

import orthojax
from orthojax import analysis, cards, quant, train
from orthojax.cards.page import comparison, report
from orthojax.commands import analyze, evaluate
from orthojax.errors import UserError
from orthojax.files import folder_of_one
from orthojax.report import figures

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "docs/card.schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}


def check(value, schema, path="card"):
    """Checks the parts of JSON Schema that ours has; names that it does not know are errors."""
    if "const" in schema:
        assert value == schema["const"], path
    kinds = schema.get("type", [])
    if isinstance(kinds, str):
        assert isinstance(value, TYPES[kinds]), f"{path} is {value!r}"
    for name in schema.get("required", []):
        assert name in value, f"{path}.{name}"
    if "properties" in schema:
        for name, part in value.items():
            check(part, schema["properties"].get(name) or schema["additionalProperties"], f"{path}.{name}")
    for i, part in enumerate(value if kinds == "array" else []):
        check(part, schema["items"], f"{path}[{i}]")


def extremes(tokens):
    """Extremes of 2 layers, drawn: small activations and flat attention."""
    draws = np.random.default_rng(0)
    L, (B, S) = 2, tokens.shape
    return analysis.Extremes(
        magnitude=draws.uniform(1, 2, (L, B, S)), channel=np.full((L, B, S), 3), median=np.full((L, B), 0.5),
        key_mass=draws.uniform(0, 0.2, (L, B, S)), head=np.zeros((L, B, S), int),
    )  # fmt: skip


def test_largest_activations_are_listed_by_channel_with_their_place():
    tokens = np.arange(24).reshape(2, 12)
    of = extremes(tokens)
    of.magnitude[1, :, 0], of.channel[1, :, 0] = [700.0, 900.0], 7  # the first token, in both rows
    of.magnitude[0, 1, 5], of.channel[0, 1, 5] = 200.0, 8  # not 1,000 times the median
    first, other, rest = analysis.largest_activations(of, tokens)
    assert first == (900.0, 1800.0, 1, 7, 12, 0, 2, True)
    assert other == (200.0, 400.0, 0, 8, 17, 5, 1, False)
    assert (rest.channel, rest.massive, rest.rows) == (3, False, 2)
    assert rest.value < 2


def test_secondary_sinks_are_named_by_token():
    tokens = np.array([[1, 5, 9, 9, 9, 9, 9, 9], [1, 9, 5, 9, 9, 9, 9, 9]])
    of = extremes(tokens)
    of.key_mass[:, :, 0] = of.key_mass[:, :, 6:] = 0.9  # the first key, and those that few queries see
    of.key_mass[:, 0, 1], of.key_mass[1, 1, 2], of.head[1, 1, 2] = 0.4, 0.6, 3  # token 5, in both rows
    of.key_mass[0, 1, 4] = 0.3  # not above it
    assert analysis.secondary_sinks(of, tokens) == [(0.6, 1, 3, 5, 2, 2, 2)]


def test_extremes_are_those_of_the_taps():
    draws = np.random.default_rng(1)
    weights = np.tril(draws.uniform(size=(2, 3, 6, 6)))
    hidden = draws.normal(size=(2, 6, 8))
    names = {name: None for name in analysis.Taps._fields}
    taps = analysis.Taps(**{**names, "residual": jnp.asarray(hidden), "attention_weights": jnp.asarray(weights)})
    found = analysis.observe_extremes(taps)
    np.testing.assert_allclose(found.magnitude, np.abs(hidden).max(-1), rtol=1e-6)
    np.testing.assert_array_equal(found.channel, np.abs(hidden).argmax(-1))
    np.testing.assert_allclose(found.median, [np.median(np.abs(row)) for row in hidden], rtol=1e-6)
    alpha = [[[weights[b, h, k:, k].mean() for k in range(6)] for h in range(3)] for b in range(2)]
    np.testing.assert_allclose(found.key_mass, np.max(alpha, 1), rtol=1e-6)
    np.testing.assert_array_equal(found.head, np.argmax(alpha, 1))


def test_stages_are_computed_once(tmp_path):
    said, calls = [], []

    def compute():
        calls.append(1)
        return {"a": 1.5}

    for of, option, count in (("x", 1, 1), ("x", 1, 1), ("y", 1, 2), ("y", 2, 3)):  # of another thing, again
        assert cards.Stages(tmp_path, of, said.append)("part", compute, option) == {"a": 1.5}
        assert len(calls) == count
    (tmp_path / "part.json").write_text("{")  # damaged
    assert cards.Stages(tmp_path, "y")("part", compute, 2) == {"a": 1.5}

    def refuse():
        raise UserError("norm='layernorm'", allowed="another")

    assert cards.Stages(tmp_path, "x", said.append)("refused", refuse) == {"left_out": "norm='layernorm'"}
    assert said == [*4 * ["part"], "refused"]
    assert not (tmp_path / "refused.json").exists()


def test_a_card_has_its_schema_and_names_the_planted_outlier(models, tmp_path):  # noqa: F811
    loaded, tokens = opened(models, "planted")
    settings = {name: quant.setting_named(name) for name in ("int8_coarse", "w4a4")}
    plan = cards.plan(loaded, tokens, settings)
    measured = cards.measure(loaded, settings, plan, cards.Stages(tmp_path, "x"))
    made = cards.make_card("planted", "here", measured, {"date": "2026-01-01", "text": tokens.provenance})
    check(json.loads(json.dumps(made)), SCHEMA)
    first = made["largest_activations"][0]
    assert (first["value"], first["channel"], first["position"], first["rows"]) == (40.0, LARGE, 0, 8)
    assert made["secondary_sinks"] == []
    metrics = {of["name"]: of for of in made["metrics"]}
    assert metrics["gu_sink_rate"]["value"] == 1.0  # H_8 / 8 is 0.34
    assert metrics["kurtosis_first"]["source"].startswith("From Attention to Activation")
    assert [of["format"] for of in made["rounding"]] == list(settings)
    of, expected = made["rounding"][0], train.evaluate(loaded, tokens, settings={"int8_coarse": quant.INT8_COARSE})
    assert math.log(of["perplexity"]) == pytest.approx(math.log(expected["perplexity_int8_coarse"]), rel=1e-6)
    for kind in ("", "_rotated"):  # the loss is 202 nats, in float32
        lost = of[f"perplexity{kind}"] / measured.metrics["perplexity"] - 1
        assert of[f"lost{kind}"] == pytest.approx(lost, abs=5e-4)
    assert "too short" in made["streaming"]["left_out"]
    page = report({"planted": measured}, [made], [])
    assert page.tables[0].caption.startswith("What rounding costs")
    assert page.pictures[0].name == "planted_heads"
    links = {table.link(row) for table in page.tables for row in table.rows} | {table.key for table in page.tables}
    assert {f"{key}/{row}" if row else key for _, rows in page.findings for _, key, row in rows} <= links
    assert "equal logits" not in str(page.sentences)
    blank = measured._replace(metrics=measured.metrics | {"loss_nats": math.log(16)})
    assert "the loss is that of equal logits" in str(report({"planted": blank}, [made], []).sentences)
    again = cards.measure(loaded, settings, plan, cards.Stages(tmp_path, "x"))  # from the stages
    assert again.metrics == measured.metrics


def test_python_returns_the_card_that_the_command_writes(models, tmp_path, monkeypatch):  # noqa: F811
    ids = models / "run.npy"
    given = {
        "model": [f"tiny={models / 'run'}"],
        "token_ids": str(ids),
        "length": T,
        "quick": True,
        "batch": 8,
        "text": [],
    }
    streamed = {"windows": [], "sinks": ["0"]}
    others = {"checkpoints": False, "stride": 0, "rows": 0, "knock_out": 0, "settings": [], "quantize_head": False}
    written = {"workdir": str(tmp_path), "card": [], "heads": ["0.0"], "attention_of": "", "compile_cache": ""}
    for command in (analyze, evaluate):
        monkeypatch.setattr(command, "FLAGS", SimpleNamespace(save=[], **streamed, **given, **others, **written))
    analyze.main([])
    with folder_of_one(tmp_path, "workdir"), pytest.raises(UserError, match="another process is working"):
        analyze.main([])
    (by_command,) = cards.read_cards(tmp_path / "card.json")
    rows = np.load(ids)
    made = orthojax.card(orthojax.load(models / "run"), rows, name="tiny", source=str(models / "run"), quick=True)
    check(made, SCHEMA)
    assert [of["format"] for of in made["rounding"]] == ["int8_coarse", "w4a4"]
    about, command = made.pop("measured"), by_command.pop("measured")
    assert made == by_command
    assert about["text"] | {"source": "run.npy (token ids)"} == command["text"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (np.zeros((2, 9)), "float64"),
        (np.zeros(9, int), r"\(9,\)"),
        (np.zeros((2, 1), int), "two tokens"),
        (np.full((2, 9), 32), "token id 32"),
        (np.full((2, 9), 2**32), "token id 4294967296"),
        (np.tril(np.arange(2, 18).reshape(4, 4)), "2 of 4 rows end with token 0 repeatedly"),
        (np.array([[3, 3, 3, 1, 2], [5, 4, 3, 1, 2]], np.uint8), "1 of 2 rows begin with token 3"),
    ],
)
def test_rows_that_a_card_cannot_read_are_refused(models, rows, says):  # noqa: F811
    with pytest.raises(UserError, match=says):
        orthojax.card(orthojax.load(models / "run"), rows)


def test_a_loss_that_is_not_finite_has_no_card(models):  # noqa: F811
    loaded, tokens = opened(models, "planted")
    params = loaded.params | {"token_embedding": {"embedding": loaded.params["token_embedding"]["embedding"] * np.nan}}
    with pytest.raises(UserError, match="not finite"):
        orthojax.card(loaded._replace(params=params), tokens, settings={}, quick=True)


def test_cards_are_compared_and_others_are_refused(tmp_path):
    both = []
    for name, value in (("a", 0.25), ("b", 0.5)):
        metrics = [{"name": "gu_sink_rate", "value": value, "measured_as": "as there"}]
        both.append({"schema": cards.SCHEMA, "model": {"name": name, "source": "a paper"}, "measured": {},
                     "metrics": metrics})  # fmt: skip
        check(both[-1], SCHEMA)
    both[1]["rounding"] = [{"format": "w4a4", "lost": 0.125}]
    (tmp_path / "b.json").write_text(json.dumps(both[1]))
    (tmp_path / "both.json").write_text(json.dumps(both))
    assert cards.read_cards(tmp_path / "both.json") == [both[0], *cards.read_cards(tmp_path / "b.json")]
    table = comparison(both)
    assert table.columns == ["model", "sinks at the first token", "lost at w4a4"]
    assert table.rows == [["a", "25%", "-"], ["b", "50%", "+12.5%"]]
    for wrong in (
        {"schema": "another"},
        [5],
        *(both[0] | {"metrics": [{"name": "x"} | value]} for value in ({}, {"value": 10**400}, {"value": True})),
        both[0] | {"rounding": [{}]},
        both[0] | {"rounding": None},
        both[0] | {"kv_cache": [{"format": "kv4", "lost": "x"}]},
    ):
        (tmp_path / "c.json").write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=r"c\.json is not a card"):
            cards.read_cards(tmp_path / "c.json")


@pytest.mark.parametrize("path", sorted((ROOT / "results/atlas").glob("*.json")), ids=lambda path: path.stem)
def test_the_atlas_has_the_schema(path):
    for of in cards.read_cards(path):
        check(of, SCHEMA)
        assert {entry["name"] for entry in of["metrics"]} <= analysis.CATALOGUE.keys()


def test_words_of_users_are_no_formulas():
    words = ["$^$", "a$b", "$\\nothing{$"]
    curve, names = ([0, 1], np.ones((2, 2))), {"x_label": "key", "y_label": "query", "x_ticks": words}
    for figure in (
        figures.maps({"$^$": np.eye(3)}, **names, value_label="weight"),
        figures.lines({"$^$": dict.fromkeys(words, curve)}, x_label="step", y_label="loss"),
        figures.bars(words, dict.fromkeys(words, np.ones((1, 3))), y_label="loss"),
        figures.numbers({"$^$": dict.fromkeys(words, ([1.0], "1"))}),
    ):
        figure.canvas.draw()  # which refuses a formula that does not end
