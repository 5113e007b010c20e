"""Both papers' measurements of any model: known weights, evaluation's numbers, interventions, resuming, devices."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot as plt
from tiny_run import TINY, blank_state, drawn_params, inputs, rows

from orthojax import analysis, quant
from orthojax.config import ModelConfig, replace
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError
from orthojax.experiments.analyzing import Asked, Given, analyze, measure_models, pages
from orthojax.experiments.analyzing.domains import bootstrap
from orthojax.experiments.analyzing.measuring import measure_model, spread_over_devices, work
from orthojax.experiments.analyzing.naming import named_files, named_models
from orthojax.experiments.analyzing.stages import Kept, identity
from orthojax.experiments.analyzing.texts import Cut, open_ids, open_text
from orthojax.formatting import number
from orthojax.model import parameter_shapes, write_folder
from orthojax.progress import Progress
from orthojax.train import Checkpoints, evaluate, load

T = 8
CONFIG = replace(TINY, {"model.num_layers": 2, "model.normalizer": "softmax", "model.d_model": 32})
# Embedding channels of the planted model: what only the first token has, all have, all but the first have.
FIRST, ALL, OTHERS, WRITTEN, LARGE = 0, 1, 2, 3, 5
PLANTED = ModelConfig(
    vocab_size=16, max_length=T, d_model=8, num_layers=1, num_heads=2, position="none", norm="none", mlp="none",
    normalizer="softmax", tie_embeddings=True, scan_layers=False,
)  # fmt: skip


def planted():
    """Head 0 attends to the first token alone (logit 200), head 1 to all keys alike; token 0 has |x| = 40 in a channel.

    Both heads read OTHERS, which the first token lacks, so that its values are 0; both write to WRITTEN.
    """
    tree = parameter_shapes(PLANTED)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
    table = params["token_embedding"]["embedding"]
    table[:, ALL], table[1:, OTHERS] = 1.0, 1.0
    table[0, FIRST], table[0, LARGE] = 1.0, 40.0
    table[15, WRITTEN] = 0.5  # so that what is written moves the logit of a token, which no text has
    attention = params["layers_0"]["attention"]
    attention["query"]["kernel"][ALL, 0] = attention["key"]["kernel"][FIRST, 0] = 20.0  # scaled by 1 / sqrt(4)
    attention["value"]["kernel"][OTHERS, [0, 4]] = 1.0
    attention["output"]["kernel"][[0, 4], WRITTEN] = 3.0, 2.0
    return params


def tokens_with_first(count=8):
    tokens = np.random.default_rng(0).integers(1, 15, (count, T + 1), dtype=np.int32)
    tokens[:, 0] = 0
    return tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a planted folder and of a random run, and token ids for each."""
    folder = tmp_path_factory.mktemp("models")
    write_folder(folder / "planted", PLANTED, planted())
    with Checkpoints(folder / "run" / "checkpoints", keep=1) as checkpoints:
        state = blank_state(CONFIG)._replace(params=drawn_params(CONFIG.model))
        checkpoints.save(state, CONFIG, inputs().provenance)
    np.save(folder / "planted.npy", tokens_with_first())
    np.save(folder / "run.npy", rows(3, 16))
    return folder


def measured(path, ids, workdir, asked, *, domains=(), on_all_devices=False):
    """What is measured of a model, and how many parts that took."""
    loaded = load(path)
    cut = Cut(0, T)
    text, *others = (open_ids(f"ids{i}", ids, loaded.model.config, dataclasses.replace(cut, rows=r), workdir / "texts")
                     for i, r in enumerate((0, *domains)))  # fmt: skip
    with Progress(work(text, others, asked, 4)) as progress:
        kept = Kept(workdir / "parts", loaded, progress, "model")
        model = spread_over_devices(loaded) if on_all_devices else loaded
        return measure_model(model, text, others, asked, kept), kept.measured


def test_planted_sinks_drains_and_outliers_are_found_in_closed_form(models, tmp_path):
    of_heads = ("active_head:0.0", "first_head:0.1", "zero_head:0.1+zero_first_value:0", "dormant_heads:0.9")
    of_layers = ("zero_attention:0", "mean_attention:*")
    asked = Asked(settings=(), interventions=of_heads + of_layers, sweep_rows=4)
    found, _ = measured(models / "planted", models / "planted.npy", tmp_path, asked)
    t = np.arange(1, T + 1)
    alike, size = np.mean(1 / t), np.sqrt(1 + 1 + 40**2)  # the norm of the first token's embedding
    by_head = {
        "first_attention_mass": (1.0, alike),
        "first_attention_fraction": (1.0, 1 / T),  # equal weights are no strict maximum but at query 0
        "attention_entropy_nats": (0.0, np.mean(np.log(t))),
        "sink_logit_gap": (200.0, 0.0),
        "value_norm_first": (0.0, 0.0),
        "value_norm_rest": (3.0, 2.0),
        "null_mass": (0.0, 0.0),
    }
    for name, values in by_head.items():
        np.testing.assert_allclose(found.arrays[name], [values], atol=1e-5, err_msg=name)
        assert found.metrics[f"{name}/layer_0"] == pytest.approx(np.mean(values), abs=1e-5)
    metrics = found.metrics
    assert (metrics["sink_rate"], metrics["max_abs_first"]) == (1.0, 40.0)  # H_8 / 8 is 0.34
    assert metrics["residual_norm_first"] == pytest.approx(size)
    channels, positions = found.arrays["max_abs_by_channel"][0], found.arrays["max_abs_by_position"][0]
    assert (np.argmax(channels), np.argmax(positions), channels[LARGE]) == (LARGE, 0, 40.0)
    written = 2.0 * (t - 1) / t  # by head 1; head 0 writes the first token's value, which is 0
    np.testing.assert_allclose(found.arrays["mean_attention_output"][0, WRITTEN], written.mean(), rtol=1e-5)

    changed = found.changed
    assert changed["active_head:0.0"]["first_attention_mass"] == pytest.approx((1 / T + alike) / 2)
    assert changed["first_head:0.1"]["first_attention_fraction"] == 1.0
    assert changed["zero_attention:0"]["residual_norm_rest"] == pytest.approx(math.sqrt(2))
    mean = math.hypot(math.sqrt(2), written.mean())
    assert changed["mean_attention:*"]["residual_norm_rest"] == pytest.approx(mean, rel=1e-5)
    assert changed["zero_head:0.1+zero_first_value:0"]["residual_norm_rest"] == pytest.approx(math.sqrt(2))
    # Head 0 is dormant: it writes nothing, so that zeroing it costs nothing.
    dormant = changed["dormant_heads:0.9 (1 heads)"]
    assert dormant["loss_nats"] == pytest.approx(metrics["loss_nats"], abs=1e-6)
    assert sum("1 random heads" in name for name in changed) == 3
    np.testing.assert_allclose(found.arrays["sweep/ids0"][0, 0], 0.0, atol=1e-6)
    assert np.abs(found.arrays["sweep/ids0"][0, 1]).min() > 1e-3


@pytest.mark.parametrize("quantize_head", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_are_those_of_evaluation_and_of_measure(models, tmp_path, quantize_head):
    setting = {"int8_coarse": quant.INT8_COARSE}
    asked = Asked(8, settings=tuple(setting), quantize_head=quantize_head)
    found, _ = measured(models / "run", models / "run.npy", tmp_path, asked)
    loaded, tokens = load(models / "run"), np.load(models / "run.npy")
    of = inputs()._replace(evaluation=tokens)
    expected = evaluate(loaded, of, settings=setting, quantize_head=quantize_head)
    del expected["bits_per_byte"]  # token ids have no bytes
    assert expected.keys() <= found.metrics.keys()
    for name, value in expected.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5), name

    def mass(taps):
        return analysis.observe_language_model(taps).total["first_attention_mass"]

    observed = analysis.measure(loaded, [tokens[:, :-1]], mass)
    np.testing.assert_allclose(found.arrays["first_attention_mass"], observed / 16, 1e-5)


def test_zeroing_heads_in_a_sweep_is_zeroing_rows_of_the_output_kernel(models, tmp_path):
    found, _ = measured(models / "run", models / "run.npy", tmp_path, Asked(8, settings=(), sweep_rows=3))
    loaded, tokens = load(models / "run"), np.load(models / "run.npy")[:3]

    @jax.jit
    def losses(params):
        log_probs = jax.nn.log_softmax(loaded.model.apply({"params": params}, tokens[:, :-1])[0])
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1)[..., 0].mean(-1)

    before, width = losses(loaded.params), CONFIG.model.head_dim
    for layer in range(2):
        for head in range(2):
            params = jax.tree.map(np.array, loaded.params)
            params[f"layers_{layer}"]["attention"]["output"]["kernel"][head * width : (head + 1) * width] = 0.0
            change = losses(params) - before
            np.testing.assert_allclose(found.arrays["sweep/ids0"][layer, head], change, atol=2e-6)


@pytest.mark.slow
def test_eight_devices_measure_what_one_does(models, tmp_path):
    asked = Asked(8, settings=("int8_moderate",), interventions=("zero_head:1.0",), sweep_rows=8)
    one, _ = measured(models / "run", models / "run.npy", tmp_path / "one", asked, domains=(12,))
    eight, _ = measured(
        models / "run", models / "run.npy", tmp_path / "eight", asked, domains=(12,), on_all_devices=True
    )
    assert len(jax.devices()) == 8
    assert one.metrics.keys() == eight.metrics.keys()
    for name, value in one.metrics.items():
        assert eight.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, array in one.arrays.items():
        np.testing.assert_allclose(eight.arrays[name], array, rtol=1e-5, atol=3e-6, err_msg=name)


def without_time(path):
    results = json.loads((path / "results.json").read_text())
    del results["provenance"]["wall_seconds"]
    return results


@pytest.mark.parametrize("settings", [(), pytest.param(("int8_fine",), marks=pytest.mark.slow)], ids=str)
def test_a_second_call_measures_only_what_is_missing_or_asked_for_in_addition(models, tmp_path, capsys, settings):
    given = Given(token_ids=str(models / "run.npy"), rows=16, length=T)
    names, asked = {"run": str(models / "run")}, Asked(8, settings=settings, sweep_rows=2)
    first = measure_models(names, given, asked, tmp_path)
    # Statistics and each setting in two parts, maps, the sweep of two layers.
    assert first.parts == 2 + 2 * len(settings) + 1 + 2
    before = without_time(tmp_path)
    assert measure_models(names, given, asked, tmp_path).parts == 0
    assert without_time(tmp_path) == before
    parts = sorted((tmp_path / "run/parts").iterdir())
    parts[0].unlink()  # as if a call had been stopped before
    parts[3].write_bytes(parts[3].read_bytes()[:50])
    assert measure_models(names, given, asked, tmp_path).parts == 2
    assert f"{parts[3]} is damaged" in capsys.readouterr().err
    assert without_time(tmp_path) == before
    more = measure_models(names, given, dataclasses.replace(asked, interventions=("zero_mlp:1",)), tmp_path)
    assert more.parts == 2
    labels = [row["overrides"]["label"] for row in more.results["rows"]]
    assert labels == ["run", "run, zero_mlp:1"]
    np.save(tmp_path / "other.npy", rows(4, 16))
    other = measure_models(names, dataclasses.replace(given, token_ids=str(tmp_path / "other.npy")), asked, tmp_path)
    assert other.parts == first.parts  # another text


def test_what_is_written_below_a_model_does_not_make_it_another(tmp_path):
    write_folder(tmp_path / "model", PLANTED, planted())
    (tmp_path / "model/tokenizer.json").write_text("{}")
    loaded = load(tmp_path / "model")
    before = identity(loaded)
    (tmp_path / "model/runs/analyze/parts").mkdir(parents=True)
    for name in ("runs/analyze/parts/statistics.npz", "runs/analyze/results.json", "README.md"):
        (tmp_path / "model" / name).write_text("x")
    assert identity(loaded) == before
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        with (tmp_path / "model" / name).open("ab") as file:
            file.write(b" ")
        assert identity(loaded) != before
        before = identity(loaded)


def test_rows_of_text_are_those_of_its_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klm")
    config, tokenizer = dataclasses.replace(PLANTED, vocab_size=258), ByteTokenizer()
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]

    def text(cut):
        return open_text("text", files, tokenizer, config, cut, tmp_path / "texts")

    stream = np.array([*b"abcdefghij", 257, *b"klm", 257], np.int32)
    np.testing.assert_array_equal(text(Cut(0, 4)).rows, stream.reshape(3, 5))
    np.testing.assert_array_equal(text(Cut(2, 4, bos=True)).rows, [[256, *b"abcd"], [256, *b"efgh"]])
    assert text(Cut(0, 4)).bits_per_nat_of_loss == pytest.approx(1 / math.log(2))  # a token is a byte
    assert text(Cut(0, 4)).sha256 == text(Cut(0, 4)).sha256 != text(Cut(1, 4)).sha256
    with pytest.raises(UserError, match="fewer than 31 tokens"):
        text(Cut(0, 30))
    with pytest.raises(UserError, match="token id 257, which the model does not have"):
        open_text("text", files, tokenizer, dataclasses.replace(PLANTED, vocab_size=257), Cut(0, 4), tmp_path / "small")


def test_intervals_of_domains_are_those_of_their_windows(models, tmp_path):
    found, _ = measured(models / "planted", models / "planted.npy", tmp_path, Asked(settings=()), domains=(6, 0))
    np.testing.assert_allclose(
        found.arrays["domain/ids1/active_score"], [[0.0, 1 - np.mean(1 / np.arange(1, 9))]], atol=1e-6
    )
    assert found.arrays["domain/ids2/active_share"][0, 1] == 7 / 8  # all queries but the first, which sees zeros
    assert found.metrics["domain/ids2/active_score_low"] == pytest.approx(found.metrics["domain/ids2/active_score"])
    values = np.random.default_rng(0).normal(2.0, 1.0, (100, 3))
    low, high = bootstrap(values)
    expected = 1.96 * values.std(0) / 10
    np.testing.assert_allclose(low, values.mean(0) - expected, atol=0.05)
    np.testing.assert_allclose(high, values.mean(0) + expected, atol=0.05)


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        ("zero_haed:0.1", "did you mean 'zero_head'"),
        ("zero_head:0", "LAYER.HEAD, each a number"),
        ("zero_head:0.2", "no head 2\nallowed: 0 to 1"),
        ("zero_mlp:2", "no layer 2\nallowed: 0 to 1"),
        ("dormant_heads:many", "has no number"),
        ("dormant_heads:0.5+zero_mlp:1", r"is joined with \+"),
    ],
)
def test_wrong_interventions_are_refused(models, tmp_path, intervention, message):
    with pytest.raises(UserError, match=message):
        measured(models / "run", models / "run.npy", tmp_path, Asked(8, settings=(), interventions=(intervention,)))


def test_a_model_without_dormant_heads_is_measured_with_a_note(models, tmp_path):
    asked = Asked(settings=(), interventions=("dormant_heads:1.0",))
    found, _ = measured(models / "run", models / "run.npy", tmp_path, asked)
    assert not found.changed
    assert found.notes[0].startswith("dormant_heads:1.0: no head has so much weight")


def test_a_run_is_measured_as_it_was_trained(tmp_path):
    changes = {"data.bos": True, "data.sequence_length": 6, "data.tokenizer": "bytes", "model.vocab_size": 258}
    config = replace(CONFIG, changes | {"model.position": "rotary"})
    with Checkpoints(tmp_path / "run" / "checkpoints", keep=1) as checkpoints:
        state = blank_state(config)._replace(params=drawn_params(config.model))
        checkpoints.save(state, config, inputs(tokenizer_sha256=ByteTokenizer().sha256).provenance)
    (tmp_path / "a.txt").write_text("plain text " * 9)
    for given, width, first in (({}, 6, 256), ({"bos": False, "length": 9}, 9, ord("p"))):
        of = measure_models(
            {"run": str(tmp_path / "run")},
            Given(text=(str(tmp_path / "a.txt"),), rows=2, **given),
            Asked(2, settings=()),
            tmp_path / "out",
        )
        text = of.runs["run"][2][0]
        assert text.rows.shape == (2, width + 1)
        assert text.rows[0, 0] == first
        assert ("begins with" in text.source) == (first == 256)


@pytest.mark.parametrize(
    ("length", "interventions", "message"),
    [
        (T + 1, (), "length=9 is longer than the positions of .*run\nallowed: 1 to 8"),
        (T, ("zero_mlp:2",), "no layer 2"),
    ],
)
def test_what_one_of_several_models_does_not_have_is_found_before_the_work(
    models, tmp_path, length, interventions, message
):
    config = dataclasses.replace(PLANTED, num_layers=3)
    tree = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(config))
    write_folder(tmp_path / "deep", config, tree)
    names = {"deep": str(tmp_path / "deep"), "run": str(models / "run")}
    given = Given(token_ids=str(models / "run.npy"), length=length)
    with pytest.raises(UserError, match=message):
        measure_models(names, given, Asked(interventions=interventions), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: named_models(["a=x,a=y"]), "two are called 'a'"),
        (lambda: named_models(["texts=x"]), "gives no path and name"),
        (lambda: named_models(["a="]), "gives no path and name"),
        (lambda: named_files(["a.py"]), "has no name or no files"),
        (lambda: named_files(["code=a", "code=b"]), "twice"),
    ],
)
def test_wrong_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_pages_of_several_models_compare_them(models, tmp_path):
    names = {name: str(models / path) for name, path in (("sink", "planted"), ("random", "run"))}
    given = Given(token_ids=str(models / "planted.npy"), rows=4, length=T)
    asked = Asked(4, settings=())
    analyzed = measure_models(names, given, asked, tmp_path)
    made, results = {}, json.loads((tmp_path / "results.json").read_text())
    for folder, page in pages(analyzed, asked, tmp_path):
        made[folder] = page
        plt.close("all")  # nothing is written here, which takes seconds
    assert any("batches of 8 rows" in note for note in made[tmp_path].notes)  # one for each of eight devices
    assert list(made) == [tmp_path / "sink", tmp_path / "random", tmp_path]
    row = next(row for row in made[tmp_path].tables[0].rows if row[0] == "attention mass on the first token")
    assert row[1:] == [f"{row['metrics']['first_attention_mass']:.3g}" for row in results["rows"]]
    layers = next(table for table in made[tmp_path / "sink"].tables if table.caption == "By layer")
    of_layer = dict(zip(layers.columns, layers.rows[0], strict=True))
    assert of_layer["largest channels"].startswith(f"{LARGE} (40)")
    assert of_layer["at position"] == "0"
    of_sink, found = made[tmp_path / "sink"], results["rows"][0]["metrics"]
    assert of_sink.title == "sink: attention, outliers and rounding"
    assert [(of.label, of.texts) for of in of_sink.headlines] == [
        ("kurtosis, first token", [number(found["kurtosis_first"])]),
        ("first token gets most attention, fraction", [number(found["first_attention_fraction"])]),
        ("perplexity", [f"{found['perplexity']:.4g}"]),
    ]
    assert of_sink.headlines[1].beside == f"{number(analysis.chance_of_first(T))} by chance"
    for name in names:
        with np.load(tmp_path / name / "measured/arrays.npz") as arrays:
            assert arrays["first_attention_mass"].shape == (2 if name == "random" else 1, 2)
    assert results["experiment"] == "analyze"
    assert [data["name"] for data in results["provenance"]["data"]] == ["text"]


@pytest.mark.slow
@pytest.mark.pretrained
def test_smollm2_has_the_numbers_that_a_script_of_its_own_found(tmp_path):
    done = analyze({"smollm2": "smollm2"}, Given(rows=16), Asked(settings=()), tmp_path)
    metrics = done.results["rows"][0]["metrics"]
    expected = {
        "perplexity": 18.96, "first_attention_fraction": 0.551, "first_attention_mass": 0.370, "sink_rate": 0.637,
        "kurtosis_first": 471, "kurtosis_rest": 95, "max_abs_first": 13_685, "max_abs_rest": 358,
        "norm_ratio_first": 0.924, "norm_ratio_rest": 0.560, "residual_norm_first": 13_883, "value_norm_first": 8.5,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=6e-3), name
