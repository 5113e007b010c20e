"""The card of a model: extremes, stages, schema and tables; what is wrong with a model, and what helps."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_analyze import LARGE, T, models, opened  # noqa: F401
from tiny_run import TINY, drawn_params, rows
from tiny_run import loaded as tiny_loaded

import orthojax
from orthojax import analysis, cards, quant, train
from orthojax.cards import rounding
from orthojax.cards.findings import remedies
from orthojax.cards.page import comparison, report
from orthojax.cards.text import rows_of_ids
from orthojax.commands import analyze, evaluate
from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.files import folder_of_one
from orthojax.model import Transformer, linear, unstack_layers
from orthojax.report import figures
from orthojax.train.step import split_tokens

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
        "model": [f"tiny={models / 'run'}"], "token_ids": str(ids), "length": T, "quick": True, "batch": 8, "text": [],
    }  # fmt: skip
    streamed = {"windows": [], "sinks": None}
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


@pytest.mark.parametrize(("rows", "says"), [
    (np.zeros((2, 9)), "float64"),
    (np.zeros(9, int), r"\(9,\)"),
    (np.zeros((2, 1), int), "two tokens"),
    (np.full((2, 9), 32), "token id 32"),
    (np.full((2, 9), 2**32), "token id 4294967296"),
    (np.tril(np.arange(2, 18).reshape(4, 4)), "2 of 4 rows end with token 0 repeatedly"),
    (np.array([[3, 3, 3, 1, 2], [5, 4, 3, 1, 2]], np.uint8), "1 of 2 rows begin with token 3"),
])  # fmt: skip
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


RUN = replace(TINY, {"model.num_layers": 2, "model.mlp": "swiglu"})
CONFIG = RUN.model
SETTING = quant.setting_named("w4a4")


def log_probs(model, params, tokens):
    logits = np.asarray(model.apply({"params": params}, tokens)[0], np.float64)
    return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False}, {"final_soft_cap": 0.5}, {"relaxed_causal_tokens": 3}]
)
def test_divergence_is_that_of_float64(changes):
    config = dataclasses.replace(CONFIG, **changes)
    params, model, other = drawn_params(config, 0.3), Transformer(config), quant.rounded_model(config, SETTING)
    tokens, targets, counted = split_tokens(rows(0), config)
    found = quant.divergence(model, params, other, params, tokens, targets, counted)
    p, q = (log_probs(of, params, tokens) for of in (model, other))
    first = counted.argmax()  # those before do not count
    for values, x in ((found.float_loss_nats, p), (found.loss_nats, q)):
        nats = -np.take_along_axis(x, targets[..., None], -1)[..., 0]
        np.testing.assert_allclose(values, nats[:, first:].mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.kl_nats, np.sum(np.exp(p) * (p - q), -1)[:, first:].mean(1), atol=1e-6)
    np.testing.assert_allclose(found.agreement, (p.argmax(-1) == q.argmax(-1))[:, first:].mean(1), rtol=1e-6)
    states = model.apply({"params": params}, tokens, head=False)[0]
    again = quant.divergence(model, params, other, params, tokens, targets, counted, states)
    np.testing.assert_allclose(again, found, atol=1e-6)


def test_a_model_that_overflows_agrees_nowhere():
    params, model = drawn_params(CONFIG), Transformer(CONFIG)
    broken = jax.tree.map(lambda x: x * np.nan, params)
    found = quant.divergence(model, params, model, broken, *split_tokens(rows(0), CONFIG))
    assert all(np.isnan(of).all() for of in found[1:])


@pytest.mark.parametrize("scan", [False, True])
def test_layers_that_are_switched_off_are_float(scan):
    config = dataclasses.replace(CONFIG, scan_layers=scan)
    params, tokens = drawn_params(config, 0.3), rows(0)[:, :8]
    names, rounded = quant.linear_layers(params), quant.quantized_linear(SETTING)
    flat = unstack_layers(params) if scan else params
    assert sorted(names) == sorted(quant.linear_layers(flat))
    model = Transformer(config, linear=quant.switching(rounded))
    chosen = {"layers_0/mlp/input", "layers_1/attention/value"}

    def by_path(x, kernel, bias, path):
        return (linear if path in chosen else rounded)(x, kernel, bias, path)

    plain = dataclasses.replace(config, scan_layers=False)
    expected = Transformer(plain, linear=by_path).apply({"params": flat}, tokens)[0]
    found = model.apply({"params": quant.switched_params(params, chosen)}, tokens)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    whole = model.apply({"params": quant.switched_params(params, names)}, tokens)[0]
    np.testing.assert_allclose(whole, Transformer(config).apply({"params": params}, tokens)[0], atol=2e-5)


def test_first_tokens_stay_float():
    params, tokens = drawn_params(CONFIG, 0.3), rows(0)[:, :8]
    rounded = quant.rounded_model(CONFIG, quant.setting_named("w4a4kv4"), float_tokens=2)
    found = rounded.apply({"params": params}, tokens)[0]
    plain = Transformer(CONFIG).apply({"params": params}, tokens)[0]
    np.testing.assert_allclose(found[:, :2], plain[:, :2], atol=1e-6)
    # What follows reads keys and values of a float prefix, as from its cache.
    rest = quant.rounded_model(CONFIG, quant.INT8_FINE_PER_TOKEN, float_tokens=2).apply({"params": params}, tokens)[0]
    cache = quant.prefix_cache(Transformer(CONFIG), params, tokens[0, :2], 1, tokens.shape[1] - 2)
    rounded = quant.rounded_model(CONFIG, quant.INT8_FINE_PER_TOKEN)
    expected = rounded.apply({"params": params}, tokens[:1, 2:], cache=cache)[0]
    np.testing.assert_allclose(rest[:1, 2:], expected, atol=1e-4)


def test_the_largest_logit_is_of_visible_keys():
    logits = np.array([[[[1.0, 9.0], [3.0, 2.0]], [[-5.0, 9.0], [-7.0, -6.0]]]])
    found = analysis.max_attention_logit_by_head(logits, np.tri(2, dtype=bool)[None, None])
    np.testing.assert_array_equal(found, [3.0, -5.0])


def entry(name="int8_coarse", bits=8, kl=1.0, **more):
    return {"format": name, "bits": bits, "kl_nats": kl, "kl_nats_se": 0.01, "loss_added_nats": kl, "agreement": 0.5,
            "loss_added_nats_se": 0.02, "lost": math.expm1(kl), "perplexity": 30.0} | more  # fmt: skip


def card(*formats, **activation):
    about = {"value": 400.0, "over_median": 2000.0, "layer": 1, "channel": 7, "text": "<s>", "position": 0}
    return {
        "model": {"name": "a", "d_model": 64},
        "measured": {"text": {"rows": 16, "length": 64}},
        "metrics": [{"name": "sink_rate", "value": 0.5, "measured_as": ""}],
        "largest_activations": [about | {"massive": True} | activation],
        "rounding": list(formats),
    }


def test_sentences_say_what_breaks_and_what_helps():
    layers = [{"layers": ["layers_1/mlp/output"], "kl_nats": 0.6}, {"layers": ["b", "c"], "kl_nats": 0.25}]
    broken = entry(kl_nats_per_token=0.02, kl_nats_float_first=1.2, kl_nats_rotated=0.7, float_layers=layers,
                   d_sink_nats=0.4, d_sink_nats_se=0.1)  # fmt: skip
    massive, fails, to_do = cards.findings(card(entry("w4a4", 4, 3.0), broken, entry("fp8_e4m3", 8, 0.001)))
    where = "channel 7 of '<s>' at position 0 after layer 1 has |x| = 400, 2,000 times the median (a Gaussian: 5.58)"
    sinks = "50% of the heads are sinks: they put over 30% of their weight on the first token."
    assert massive.says == f"Massive: {where}. {sinks}"
    costs = "adds 1 ± 0.02 nats to the loss (+172% perplexity); KL 1 ± 0.01, same likeliest token 50%"
    sink = "0.4 ± 0.1 of this goes with the first token in float (D_sink). 2 of 3 formats fail, also w4a4."
    assert fails.says == f"Fails: int8_coarse, {costs}; {sink}"
    assert list(remedies(broken)) == ["_per_token", "_float_layers", "_rotated", "_float_first"]
    tried = "scales for each token 98%, b, c in float 75%, a rotation 30%, the first token in float 0%"
    what = "What helps, and the share of the KL divergence that it removes"
    assert to_do.says == f"{what}: at int8_coarse, {tried}; at w4a4, nothing was tried."
    assert ("int8_coarse", "helps", "int8_coarse") in to_do.rows


def test_sentences_are_not_made_of_noise_or_of_cards_without_kl():
    _, fails, _ = cards.findings(card(entry(d_sink_nats=0.03, d_sink_nats_se=0.02)))
    assert "none of it measurably goes with the first token in float (D_sink 0.03 ± 0.02)" in fails.says
    overflow = {"format": "w4a4", "left_out": "it overflows", "kl_nats_rotated": 0.3, "kl_nats_per_token": 7.0}
    assert [words for _, words in remedies(overflow).values()] == [
        "a rotation (KL 0.3 nats)", "scales for each token (KL 7 nats)"]  # fmt: skip
    _, _, to_do = cards.findings(card(overflow))
    assert to_do.says.endswith(": at w4a4, a rotation (KL 0.3 nats), scales for each token (KL 7 nats).")
    old = {"format": "int8_coarse", "lost": 4.0, "lost_rotated": 0.2}  # of 0.1.0
    assert remedies(old) == {"_rotated": (0.95, "a rotation")}
    massive, *_ = cards.findings(card(entry()) | {"metrics": [{"name": "sink_rate", "value": 0.0}]})
    assert massive.says.endswith("No head is a sink: none puts over 30% of its weight on the first token.")


def test_cards_with_and_without_kl_stand_in_one_table():
    both = [card(entry()), card({"format": "int8_coarse", "lost": 0.3})]
    for of, name in zip(both, "ab", strict=True):
        of["model"] = of["model"] | {"name": name}
    table = comparison(both)
    column = [head for head in table.columns if "int8_coarse" in head]
    assert column == ["KL at int8_coarse (nats)"]
    assert [row[table.columns.index(column[0])] for row in table.rows] == ["1", "perplexity +30%"]


def test_a_healthy_model_is_said_to_be_healthy():
    found = cards.findings(card(entry(kl=0.01), massive=False, over_median=9.0))
    starts = ["Nothing is massive", "None of 1 formats fails: the worst, int8_coarse", "Nothing to do"]
    assert all(of.says.startswith(start) for of, start in zip(found, starts, strict=True))


def test_what_was_not_measured_is_no_no():
    found = cards.findings({"model": {"name": "a"}, "metrics": []})
    assert all("not measured" in of.says for of in found)
    # An overflow fails, and a format without numbers is neither well nor broken.
    _, fails, to_do = cards.findings(card(entry(kl=0.01), {"format": "w4a4", "left_out": "the perplexity overflows"}))
    assert fails.says.startswith("Fails: w4a4")
    assert "nothing was tried" in to_do.says
    _, fails, _ = cards.findings(card(entry(kl=0.01), {"format": "w4a4", "left_out": "groups"}))
    assert fails.says.endswith("Not measured: w4a4.")
    _, fails, _ = cards.findings(card({"format": "w4a4", "lost": 0.3}))  # of 0.1.0
    assert fails.says.startswith("Fails: w4a4, +30%.")


def test_scales_for_each_token_are_tried_for_outputs_too():
    """A query bias is huge: its output cannot be rounded with one scale, nor with one for each token."""
    params = jax.tree.map(np.array, drawn_params(replace(RUN, {"model.use_bias": True}).model, 0.3))
    params["layers_0"]["attention"]["query"]["bias"][3] = 3000.0
    run = replace(RUN, {"model.use_bias": True})
    measured = rounding.Rounding(tiny_loaded(run, params), rows_of_ids(rows(1, 8), "drawn"))
    found = measured.of_format(quant.INT8_COARSE, quick=True, quantize_head=False)
    float_outputs = measured.numbers(quant.rounded_model(run.model, quant.INT8_FINE_PER_TOKEN))
    assert found["kl_nats_per_token"] > 0.5 * found["kl_nats"] > 5 * float_outputs["kl_nats"]


def test_every_format_is_measured():
    own = tiny_loaded(RUN, drawn_params(CONFIG, 0.5))
    settings = {
        name: quant.setting_named(name) for name in ("int8_coarse", "int4_zeropoint", "w4a4", "fp8_e4m3", "nvfp4")
    }
    formats = cards.card(own, rows(1, 4), settings=settings)["rounding"]
    assert [of["format"] for of in formats if "kl_nats" in of and "left_out" not in of] == list(settings)


def test_errors_are_those_of_means_over_rows():
    own = tiny_loaded(RUN, drawn_params(CONFIG, 0.5))
    found = cards.card(own, rows(3, 6), settings={})
    by_name = {metric["name"]: metric for metric in found["metrics"]}
    assert "se" not in by_name["sink_rate"]
    each = [cards.card(own, row[None], settings={}) for row in rows(3, 6)]
    masses = [next(m["value"] for m in of["metrics"] if m["name"] == "first_attention_mass") for of in each]
    assert by_name["first_attention_mass"]["se"] == pytest.approx(np.std(masses, ddof=1) / 6**0.5, rel=1e-4)


def test_the_layer_that_breaks_is_found():
    """A hidden unit of one MLP is huge, and read with tiny weights: one scale for all rounds the others to 0."""
    params = jax.tree.map(np.array, drawn_params(CONFIG, 0.3))
    params["layers_1"]["mlp"]["input"]["kernel"][:, 3] *= 1e4
    params["layers_1"]["mlp"]["output"]["kernel"][3] /= 1e4
    measured = rounding.Rounding(tiny_loaded(RUN, params), rows_of_ids(rows(1, 8), "drawn"))
    setting = quant.QuantizationSetting(8, "absmax", "output_channel", inputs="tensor")
    found = measured.of_format(setting, quick=False, quantize_head=False)
    assert found["kl_nats"] > rounding.FAILS
    one, *more = found["float_layers"]
    assert one["layers"] == ["layers_1/mlp/output"]
    assert (len(more), one["kl_nats"] < found["kl_nats"] / 10) == (2, True)
    names = {name.removesuffix("_se") for name in found}
    assert {"d_sink_nats", "kl_nats_per_token", "lost_float_first", "agreement_float_first"} <= names
    assert "float_layers" not in measured.of_format(setting, quick=True, quantize_head=False)
