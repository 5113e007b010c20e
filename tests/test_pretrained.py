"""Models from checkpoints, to measure and to start another run; allowed and refused differences."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import TINY, assert_trees_close, blank_state, drawn_params, inputs, rows

import orthojax
from orthojax.config import replace
from orthojax.data.tokenizers import make_tokenizer
from orthojax.errors import UserError
from orthojax.model import Transformer, parameter_shapes, stack_layers, unstack_layers
from orthojax.train import Checkpoints, load_params, read_config, train
from orthojax.train.workdir import keep_tokenizer

CHANGES = {"model.num_layers": 2, "model.normalizer": "softmax", "optim.warmup_steps": 1, "train.steps": 2}
CONFIG = replace(TINY, CHANGES)
MODEL, TOKENS, INPUTS = CONFIG.model, rows(7)[:, :-1], inputs(tokenizer_sha256="abc")


def assert_equal(a, b):
    assert_trees_close(a, b, rtol=0)


def save(config, workdir, data=None):
    """Writes a workdir with a checkpoint of an untrained model; returns it with the parameters."""
    state = blank_state(config)._replace(params=drawn_params(config.model, 0.05))
    with Checkpoints(workdir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(state, config, INPUTS.provenance if data is None else data)
    return workdir, jax.device_get(state.params)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the workdir and the parameters of a softmax model."""
    return save(CONFIG, tmp_path_factory.mktemp("softmax"))


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params):
    return model.apply({"params": params}, TOKENS)[0]


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/0"])
def test_a_run_is_loaded_from_its_folders(finished, where):
    workdir, params = finished
    loaded = orthojax.load(str(workdir / where))
    assert (loaded.config, loaded.source) == (CONFIG, workdir / "checkpoints/0")
    assert_equal(loaded.params, params)
    np.testing.assert_array_equal(logits(loaded.model, loaded.params), logits(Transformer(MODEL), params))
    assert loaded.tokenizer is None  # bpe:2048 comes with its corpus


@pytest.mark.parametrize("name", ["bytes", "bpe:260"])
def test_the_tokenizer_of_a_run_is_loaded(name, tmp_path):
    tokenizer = make_tokenizer(name, ["on and on and on"])
    for folder, sha256 in (("same", tokenizer.sha256), ("other", "abc")):
        save(replace(CONFIG, {"data.tokenizer": name}), tmp_path / folder, {"tokenizer_sha256": sha256})
        if name != "bytes":  # one that was trained on its corpus
            tokenizer.save(tmp_path / "cached.json")
            keep_tokenizer(tmp_path / folder, tmp_path / "cached.json")
    assert orthojax.load(tmp_path / "same").tokenizer == tokenizer
    assert orthojax.load(tmp_path / "other").tokenizer is None


def test_the_lines_of_the_guide_measure_a_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs/measure.md").read_text(), re.DOTALL)
    (lines,) = (block for block in blocks if "orthojax.load(" in block)
    workdir, _ = save(replace(CONFIG, {"model.max_length": 64}), tmp_path)
    scope = {}
    exec(lines.replace("runs/tiny_cured", str(workdir)), scope)
    assert scope["logits"].shape == (1, 64, MODEL.vocab_size)
    assert scope["statistics"]


def test_what_does_not_change_the_function_may_differ(finished):
    workdir, params = finished
    for changes in ({}, {"remat": True, "dtype": "bfloat16", "init_std": 0.5}):
        assert_equal(load_params(workdir, replace(MODEL, changes)), params)


@pytest.mark.slow
def test_layers_are_stacked_for_scans(finished, tmp_path):
    workdir, params = finished
    scanned = replace(MODEL, {"scan_layers": True})
    stacked = load_params(workdir, scanned)
    assert_equal(stacked, stack_layers(params))
    scanned_workdir, stacked = save(replace(CONFIG, {"model.scan_layers": True}), tmp_path)
    assert_equal(load_params(scanned_workdir, MODEL), unstack_layers(stacked))


@pytest.mark.parametrize("normalizer", ["softmax1", "softmax_n"])
def test_a_change_of_normalizer_must_be_allowed(finished, normalizer):
    workdir, params = finished
    other = replace(MODEL, {"normalizer": normalizer, "normalizer_n": 2.0 if normalizer == "softmax_n" else 1.0})
    with pytest.raises(UserError, match="allow_normalizer_change"):
        load_params(workdir, other)
    assert_equal(load_params(workdir, other, allow_normalizer_change=True), params)


OTHER = {"mlp": "relu", "norm_eps": 1e-3, "position": "rotary", "d_mlp": 64, "num_heads": 4, "tie_embeddings": False}


@pytest.mark.parametrize("field", OTHER)
def test_models_of_another_meaning_are_refused(finished, field):
    other = replace(MODEL, {field: OTHER[field], "normalizer": "softmax1"})
    with pytest.raises(UserError, match=rf"model\.{field}"):
        load_params(finished[0], other, allow_normalizer_change=True)


def test_learned_sinks_start_where_the_config_says(finished):
    sunk = replace(MODEL, {"normalizer": "learned_sink", "sink_init": -20.0})
    params = load_params(finished[0], sunk, allow_normalizer_change=True)
    tokens = jnp.zeros((1, 5), jnp.int32)
    logits, before = (
        jax.jit(Transformer(model).apply)({"params": of}, tokens)[0]
        for model, of in ((sunk, params), (MODEL, load_params(finished[0], MODEL)))
    )
    np.testing.assert_allclose(logits, before, atol=1e-5)  # still softmax
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, parameter_shapes(sunk))


@pytest.mark.slow
def test_a_run_starts_from_parameters_and_resumes(finished, tmp_path):
    workdir, params = finished
    changes = {"train.init_from": str(workdir), "train.allow_normalizer_change": True, "model.normalizer": "softmax1"}
    config = replace(CONFIG, changes)
    with pytest.raises(UserError, match="allow_normalizer_change"):
        train(replace(config, {"train.allow_normalizer_change": False}), INPUTS, tmp_path / "refused")
    after = jax.device_get(train(config, INPUTS, tmp_path / "tuned").params)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True))
    assert read_config(next((tmp_path / "tuned" / "checkpoints").glob("[0-9]*"))).model.normalizer == "softmax1"
    again = jax.device_get(train(config, INPUTS, tmp_path / "tuned").params)
    assert_equal(again, after)


@pytest.mark.parametrize("name", ["tokenizer_sha256", "characters"])
def test_other_token_ids_are_refused(finished, tmp_path, name):
    other = INPUTS._replace(provenance=INPUTS.provenance | {name: "xyz"})
    with pytest.raises(UserError, match=name):
        train(replace(CONFIG, {"train.init_from": str(finished[0])}), other, tmp_path / "tuned")
