"""`orthojax analyze`: planted heads in closed form, knock-outs, rows of text, series of checkpoints, its files."""

import io
import json
import math
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_commands import run
from tiny_run import TINY, blank_state, drawn_params, inputs, rows
from tiny_run import loaded as tiny_loaded

from orthojax.cards import measure_model, read_rows, read_token_ids
from orthojax.cards.activations import save_activations
from orthojax.cards.measures import prepared
from orthojax.cards.page import attention_picture
from orthojax.commands import analyze
from orthojax.commands.analyze import series
from orthojax.commands.cli import named_paths
from orthojax.config import ModelConfig, replace
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.errors import UserError
from orthojax.model import Interventions, parameter_shapes
from orthojax.pretrained import write_folder
from orthojax.train import Checkpoints, evaluate, evaluate_by_head, load, open_inputs
from orthojax.train.evaluation import knock_out, sliding_loss_nats

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
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameter_shapes(PLANTED))
    table = params["token_embedding"]["embedding"]
    table[:, ALL], table[1:, OTHERS] = 1.0, 1.0
    table[0, FIRST], table[0, LARGE] = 1.0, 40.0
    table[15, WRITTEN] = 0.5  # so that what is written moves the logit of a token, which no text has
    attention = params["layers_0"]["attention"]
    attention["query"]["kernel"][ALL, 0] = attention["key"]["kernel"][FIRST, 0] = 20.0  # scaled by 1 / sqrt(4)
    attention["value"]["kernel"][OTHERS, [0, 4]] = 1.0
    attention["output"]["kernel"][[0, 4], WRITTEN] = 3.0, 2.0
    return params


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a planted folder and of a random run with two checkpoints, and token ids for each."""
    folder = tmp_path_factory.mktemp("models")
    write_folder(folder / "planted", PLANTED, planted())
    with Checkpoints(folder / "run" / "checkpoints", keep=2) as checkpoints:
        state = blank_state(CONFIG)._replace(params=drawn_params(CONFIG.model))
        for step in (5, 20):
            checkpoints.save(state._replace(step=np.asarray(step)), CONFIG, inputs().provenance)
    tokens = np.random.default_rng(0).integers(1, 15, (8, T + 1), dtype=np.int32)
    tokens[:, 0] = 0
    np.save(folder / "planted.npy", tokens)
    np.save(folder / "run.npy", rows(3, 16))
    return folder


def opened(models, name):
    return load(models / name), read_token_ids(models / f"{name}.npy", rows=0, length=T)


def test_planted_sinks_drains_and_outliers_are_found(models):
    loaded, tokens = opened(models, "planted")
    found = measure_model(loaded, tokens)
    found.arrays.update(knock_out(loaded, tokens, 4))
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
    assert (found.metrics["sink_rate"], found.metrics["max_abs_first"]) == (1.0, 40.0)  # H_8 / 8 is 0.34
    assert found.metrics["residual_norm_first"] == pytest.approx(size)
    channels = found.arrays["max_abs_by_channel"][0]
    assert (np.argmax(channels), channels[LARGE]) == (LARGE, 40.0)
    # Head 0 writes nothing, so that it costs nothing to remove it; without the other nothing of attention is left.
    head_0, head_1 = found.arrays["knocked_out_head"][0]
    assert abs(head_0) < 1e-6 < 1e-3 < abs(head_1)
    assert found.arrays["knocked_out_attention"] == pytest.approx(head_1)


@pytest.mark.parametrize("name", ["planted", "run"])
def test_saved_activations_are_those_of_the_model(models, name, tmp_path):
    """Unrolled and scanned layers, and a last batch with fewer rows."""
    loaded, found = opened(models, name)
    loaded, tokens = prepared(loaded, T, 3), found.evaluation[:, :-1]
    save_activations(loaded, tokens, ["residual", "attention", "values"], tmp_path / "of.safetensors")
    saved = load_file(tmp_path / "of.safetensors")
    np.testing.assert_array_equal(saved["tokens"], tokens)

    def observe(taps):
        return {"residual": taps.residual, "attention": taps.attention_weights, "values": taps.values}

    _, seen = loaded.model.apply({"params": loaded.params}, tokens, observe=observe)
    for kind, wanted in seen.items():
        np.testing.assert_allclose(saved[kind], np.moveaxis(wanted, 1, 0), atol=1e-5, err_msg=kind)
    if name == "planted":
        np.testing.assert_allclose(saved["attention"][:, 0, 0, :, 0], 1.0, atol=1e-6)  # head 0 sees the first token
    with pytest.raises(UserError, match=r"(?s)'residuals'.*did you mean 'residual'"):
        save_activations(loaded, tokens, ["residuals"], tmp_path / "other")
    with pytest.raises(UserError, match=r"need [\d.]+ GB"):
        save_activations(loaded, np.broadcast_to(tokens[:1], (10**7, T)), ["attention"], tmp_path / "other")


def test_metrics_are_those_of_evaluate(models):
    loaded, tokens = opened(models, "run")
    expected = evaluate(loaded, tokens, settings={})
    found = measure_model(loaded, tokens)
    assert {name: found.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    for name in ("first_attention_mass", "first_attention_fraction", "value_norm_rest"):
        assert found.arrays[name].mean() == pytest.approx(expected[name], rel=1e-5)


def test_interventions_change_what_is_evaluated(models):
    loaded, tokens = opened(models, "planted")
    metrics, *_ = evaluate_by_head(loaded, tokens, interventions=Interventions(attention_scale=np.zeros(1)))
    assert metrics["residual_norm_rest"] == pytest.approx(math.sqrt(2))


def test_knocking_out_is_zeroing_kernels(models):
    loaded, tokens = opened(models, "run")
    found, used = knock_out(loaded, tokens, 3), tokens.evaluation[:3]

    @jax.jit
    def loss(params):
        log_probs = jax.nn.log_softmax(loaded.model.apply({"params": params}, used[:, :-1])[0])
        return -jnp.mean(jnp.take_along_axis(log_probs, used[:, 1:, None], -1))

    before, width = loss(loaded.params), CONFIG.model.head_dim
    for layer, head in np.ndindex(2, 2):
        params = jax.tree.map(np.array, loaded.params)
        params[f"layers_{layer}"]["attention"]["output"]["kernel"][head * width : (head + 1) * width] = 0.0
        assert found["knocked_out_head"][layer, head] == pytest.approx(float(loss(params) - before), abs=2e-6)


def test_a_task_is_measured_by_head_too(tmp_path):
    task = {"data.kind": "bigram_backcopy", "model.vocab_size": 128, "model.max_length": 32, "data.sequence_length": 32}
    config = replace(CONFIG, task)
    found = measure_model(tiny_loaded(config, drawn_params(config.model)), open_inputs(config, tmp_path))
    assert found.arrays["sink_attention"].shape == (2, 2)
    by_layer = [found.metrics[f"sink_attention/layer_{layer}"] for layer in range(2)]
    np.testing.assert_allclose(found.arrays["sink_attention"].mean(1), by_layer, rtol=1e-6)


def test_rows_of_text_are_those_of_its_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "b.txt").write_text("klm")
    files, tokenizer = [str(tmp_path / name) for name in ("a.txt", "b.txt")], ByteTokenizer()
    stream = np.array([*b"abcdefghij", 257, *b"klm", 257], np.int32)
    text = read_rows(files, tokenizer, rows=0, length=4, packed=True)
    np.testing.assert_array_equal(text.evaluation, stream.reshape(3, 5))
    assert text.bits_per_nat_of_loss == pytest.approx(15 / 13 / math.log(2))
    text = read_rows(files, tokenizer, rows=0, length=2)  # one document to a row, and no separator
    np.testing.assert_array_equal(text.evaluation, [[*b"abc"], [*b"klm"], [*b"def"], [*b"ghi"]])
    assert text.special_ids == (256, 257)
    text = read_rows(files, tokenizer, rows=2, length=4, bos=True)
    np.testing.assert_array_equal(text.evaluation, [[256, *b"abcd"], [256, *b"efgh"]])
    with pytest.raises(UserError, match="31 tokens"):
        read_rows(files, tokenizer, rows=0, length=30)


def test_attention_to_a_text_is_drawn_with_its_tokens(models):
    loaded, tokens = opened(models, "planted")
    picture = attention_picture(loaded, "a", tokens.evaluation[0, :4], [(0, 1), (0, 0)], ["<s>", "b", "c", "d"])
    maps = [axes for axes in picture.figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["layer 0, head 1", "layer 0, head 0"]
    alike, first = (np.ma.filled(axes.images[0].get_array(), np.nan) for axes in maps)
    triangle = np.where(np.tri(4), 0.0, np.nan)
    np.testing.assert_allclose(alike, triangle + 1 / np.arange(1, 5)[:, None], atol=1e-6)
    np.testing.assert_allclose(first, triangle + np.eye(4)[0], atol=1e-6)
    assert [label.get_text() for label in maps[0].get_yticklabels()] == ["<s>", "b", "c", "d"]
    for heads, count, named in (([(1, 0)], 4, "layer 1"), ([(0, 0)], 65, "65 tokens")):
        with pytest.raises(UserError, match=named):
            attention_picture(loaded, "a", np.zeros(count, np.int32), heads, [""] * count)


@pytest.mark.parametrize(("length", "stride", "count"), [(8, 3, 30), (8, 8, 30), (6, 1, 13), (8, 5, 4), (8, 4, 8)])
def test_a_sliding_window_predicts_every_token_in_its_first_window(models, length, stride, count):
    loaded, _ = opened(models, "run")
    loaded = loaded._replace(config=replace(loaded.config, {"eval.batch_size": 2}))
    tokens = np.random.default_rng(count).integers(0, 16, count, dtype=np.int32)

    def loss(given, target):
        logits = np.asarray(loaded.model.apply({"params": loaded.params}, given[None])[0][0, -1], np.float64)
        return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target]

    expected, start, end = [], 0, min(length, count)  # the window that first has token i, from its start
    for i in range(1, count):
        while i >= end:
            start, end = start + stride, min(start + stride + length, count)
        if i > start:
            expected.append(loss(tokens[start:i], tokens[i]))
    assert sliding_loss_nats(loaded, tokens, length, stride) == pytest.approx(np.mean(expected), abs=1e-5)


def test_a_sliding_window_of_no_text_is_refused(models):
    loaded, _ = opened(models, "run")
    for tokens, stride in ((1, 2), (9, 0), (9, 9)):
        with pytest.raises(UserError, match="stride"):
            sliding_loss_nats(loaded, np.zeros(tokens, np.int32), 8, stride)


def test_files_that_hold_no_token_ids_are_refused(tmp_path):
    good, npz = io.BytesIO(), io.BytesIO()
    np.save(good, np.arange(90, dtype=np.int32))
    np.savez(npz, ids=np.arange(90))
    whole = good.getvalue()
    contents = [b"", whole[:20], whole[:-4], whole.replace(b"(90,), ", b"(9000000000000,), "), npz.getvalue()]
    objects = [2**40, -(2**40), 2**32, {}, 1.5, True, "a"]  # in 32 bits the first ones would be 0
    for content in [*contents, *(np.full((4, 9), value) for value in objects), np.full(90, 2**64 - 1, np.uint64)]:
        if isinstance(content, bytes):
            (tmp_path / "ids.npy").write_bytes(content)
        else:
            np.save(tmp_path / "ids.npy", content)
        with pytest.raises(UserError, match=r"ids\.npy"):
            read_token_ids(tmp_path / "ids.npy", rows=0, length=8)


def test_token_ids_may_be_a_stream(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(20))
    found = read_token_ids(tmp_path / "ids.npy", rows=0, length=8)
    np.testing.assert_array_equal(found.evaluation, np.arange(18).reshape(2, 9))
    with pytest.raises(UserError, match="no row of 31"):
        read_token_ids(tmp_path / "ids.npy", rows=0, length=30)


def test_checkpoints_of_run_are_a_series_by_step(models):
    checkpoints = models / "run" / "checkpoints"
    wanted = {"5": str(checkpoints / "5"), "20": str(checkpoints / "20")}
    assert list(series(str(models / "run")).items()) == list(wanted.items())
    assert series(str(checkpoints)) == wanted
    with pytest.raises(UserError, match="planted"):
        series(str(models / "planted"))


def test_a_series_may_be_of_folders_checkpoints_and_revisions(models, tmp_path):
    run = models / "run"
    assert series(f"{run}@20,step5") == {"20": str(run / "checkpoints/20"), "5": str(run / "checkpoints/5")}
    (tmp_path / "step1000-tokens2B").mkdir()
    expected = {"1000": str(tmp_path / "step1000-tokens2B"), "2000": f"{tmp_path}@step2000"}
    assert series(f"{tmp_path}@step1000-tokens2B,step2000") == expected
    for wrong in ("a@main,step1", "a@step1,step01"):
        with pytest.raises(UserError, match="another number"):
            series(wrong)


def test_models_of_two_shapes_are_no_series(models, tmp_path, monkeypatch):
    for step in ("1000", "2000"):
        shutil.copytree(models / "run/checkpoints/5", tmp_path / step)
    config = tmp_path / "2000/config/metadata"
    config.write_text(config.read_text().replace('"d_mlp": ', '"d_mlp": 1'))
    given = {"model": [str(tmp_path)], "checkpoints": True, "heads": ["0.0"], "stride": 0, "token_ids": "", "text": []}
    more = {"settings": [], "quick": True, "card": [], "length": 0}
    monkeypatch.setattr(analyze, "FLAGS", SimpleNamespace(save=[], windows=[], sinks=None, **given, **more))
    with pytest.raises(UserError, match=r"models in .* differ: 1000, 2000"):
        analyze.main([])


@pytest.mark.parametrize(
    ("windows", "sinks"), [(["x"], None), (["4"], None), ([], ["0"]), (["8"], []), (["8"], ["-1"])]
)
def test_wrong_windows_are_refused_before_any_work(windows, sinks, monkeypatch):
    monkeypatch.setattr(analyze, "FLAGS", SimpleNamespace(windows=windows, sinks=sinks))
    with pytest.raises(UserError, match=r"--windows|--sinks"):
        analyze._streamed()


@pytest.mark.parametrize("given", ["a=x,a=y", "a=", "../a=x"])
def test_wrong_names_are_refused(given):
    with pytest.raises(UserError, match=r"'../a'|has no path|called 'a'"):
        named_paths([given])


@pytest.mark.slow
def test_the_command_writes_results_and_reports(models, tmp_path):
    options = [f"--token_ids={models / 'planted.npy'}", f"--length={T}", "--settings=none", "--knock_out=2"]
    done = run("analyze", f"--model=sink={models / 'planted'},random={models / 'run'}", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "runs/analyze/sink-random/results.json").read_text())
    assert {"experiment", "scale", "provenance", "rows", "sha256"} == found.keys()
    assert [(row["variant"], row["seed"]) for row in found["rows"]] == [("sink", 0), ("random", 0)]
    assert found["rows"][0]["metrics"]["sink_rate"] == 1.0
    report = (tmp_path / "runs/analyze/sink-random/report.md").read_text()
    assert all(f"figures/{path.name}" in report for path in (tmp_path / "runs/analyze/sink-random/figures").iterdir())
    arrays = np.load(tmp_path / "runs/analyze/sink-random/arrays/sink.npz")
    assert arrays["first_attention_mass"].shape == (1, 2)


@pytest.mark.slow
def test_a_series_is_drawn_over_steps(models, tmp_path):
    options = [f"--token_ids={models / 'run.npy'}", f"--length={T}", "--settings=none", "--rows=4"]
    done = run("analyze", f"--model={models / 'run'}@5,20", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "runs/analyze/run_checkpoints/results.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["5", "20"]
    assert (tmp_path / "runs/analyze/run_checkpoints/figures/kurtosis_first_by_step.svg").exists()


@pytest.mark.slow
@pytest.mark.pretrained
def test_smollm2_has_the_numbers_of_another_script():
    loaded = load("smollm2")
    assert loaded.tokenizer is not None
    text = read_rows(["topics"], loaded.tokenizer, rows=16, length=256)
    metrics = measure_model(loaded, text).metrics
    expected = {
        "perplexity": 18.96, "first_attention_fraction": 0.551, "first_attention_mass": 0.370, "sink_rate": 0.637,
        "kurtosis_first": 471, "kurtosis_rest": 95, "max_abs_first": 13_685, "max_abs_rest": 358,
        "norm_ratio_first": 0.924, "norm_ratio_rest": 0.560, "residual_norm_first": 13_883, "value_norm_first": 8.5,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=6e-3), name


def test_ids_that_the_model_lacks_are_refused(models):
    loaded, _ = opened(models, "planted")
    with pytest.raises(UserError, match="token id"):
        measure_model(loaded, read_token_ids(models / "run.npy", rows=0, length=T))
