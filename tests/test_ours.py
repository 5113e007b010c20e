"""The measures of our own studies on tiny models: rounding of recipes, checkpoints."""

import jax
import numpy as np
import pytest
from tiny_run import TINY, blank_state, drawn_params, inputs, loaded

from orthojax import quant
from orthojax.config import replace
from orthojax.experiments.measures import FOUR_BITS
from orthojax.experiments.ours.long_pair import LONG_PAIR, SETTINGS
from orthojax.experiments.ours.preventions import FORMATS, ROUNDED
from orthojax.model import fold_embedding_projection
from orthojax.train import Checkpoints, evaluate, load


def test_recipes_are_rounded_as_evaluations_are(monkeypatch):
    monkeypatch.setattr("orthojax.experiments.ours.preventions.FORMATS", ("int8_coarse", "w4a4"))
    monkeypatch.setattr("orthojax.experiments.ours.preventions._ROTATED", ("int8_coarse",))
    config = replace(TINY, {"model.embedding_projection": True, "model.gated_attention": "elementwise"})
    model = loaded(config, drawn_params(config.model, 0.3))
    found = ROUNDED.measure(model, inputs(), lambda part: None)
    params, folded = fold_embedding_projection(model.params, config.model)
    plain = loaded(replace(config, {"model.embedding_projection": False, "model.tie_embeddings": False}), params)
    assert plain.config.model == folded
    settings = {name: quant.setting_named(name) for name in ("int8_coarse", "w4a4")}
    wanted = evaluate(plain, inputs(), settings=settings)
    for name in settings:
        assert found[f"perplexity_{name}"] == pytest.approx(wanted[f"perplexity_{name}"], rel=1e-5)
    four_bits = FOUR_BITS.measure(plain, inputs(), lambda part: None)
    assert four_bits["perplexity_w4a4"] == pytest.approx(wanted["perplexity_w4a4"], rel=1e-5)
    assert found["perplexity_int8_coarse_rotated"] == pytest.approx(wanted["perplexity"], rel=0.05)
    assert 0 < found["last_state_error_int8_coarse"] < found["last_state_error_w4a4"]
    assert found["osp_kurtosis"] >= 0
    assert set(FORMATS) <= quant.SETTINGS.keys() | quant.MORE_SETTINGS.keys()
    assert all(np.isfinite(jax.tree.leaves(found)))


def test_kept_checkpoints_evaluated_as_they_are_and_rounded(tmp_path, monkeypatch):
    for name in [*SETTINGS][2:]:  # each is a program more
        monkeypatch.delitem(SETTINGS, name)
    config = replace(TINY, {"train.checkpoint_every_steps": 2, "train.keep_every_steps": 4, "train.steps": 12})
    with Checkpoints(tmp_path / "checkpoints", keep=2, keep_every_steps=4) as checkpoints:
        for step in range(2, 13, 2):
            state = blank_state(config)._replace(step=np.int32(step), params=drawn_params(config.model, 0.05 * step))
            checkpoints.save(state, config, inputs().provenance)
    (measure,) = LONG_PAIR.measures
    found = measure.measure(load(tmp_path), inputs(), lambda part: None)
    steps = {int(name.rpartition("_")[2]) for name in found if "/step_" in name}
    assert steps == {4, 8, 12}
    for step in sorted(steps):
        expected = evaluate(load(tmp_path / f"checkpoints/{step}"), inputs(), settings=SETTINGS)
        for name in ("perplexity", "kurtosis_rest", *(f"perplexity_{of}" for of in SETTINGS)):
            assert found[f"{name}/step_{step}"] == pytest.approx(expected[name], rel=1e-5)
    assert all(found[f"perplexity_{of}"] == found[f"perplexity_{of}/step_12"] for of in SETTINGS)
