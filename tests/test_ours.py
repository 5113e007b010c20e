"""The measures of our own studies on tiny models: rounding, streams of tokens, checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import TINY, blank_state, drawn_params, inputs, loaded

from orthojax import quant
from orthojax.config import replace
from orthojax.experiments.ours import rounding, smollm2
from orthojax.experiments.ours.long_pair import LONG_PAIR, SETTINGS
from orthojax.experiments.ours.streaming import STREAMED
from orthojax.ops.quantize import absmax
from orthojax.train import Checkpoints, evaluate, load

LARGEST_FLOAT16 = float(jnp.finfo(jnp.float16).max)


@pytest.fixture
def _two_settings(monkeypatch):
    """Evaluations have two of the five quantisations: each is a program more."""
    for name in quant.SETTINGS.keys() - {"int8_coarse", "int8_moderate"}:
        monkeypatch.delitem(quant.SETTINGS, name)


def rounded(scan_layers, factor=1.0, settings=None):
    """Returns the metrics of `rounding.DAMAGED`, and those of an evaluation with the head rounded as well."""
    config = replace(TINY, {"model.scan_layers": scan_layers})
    params = drawn_params(config.model, 0.3)
    if factor > 1:  # a norm follows before the head
        params["layers"]["mlp"]["output"]["kernel"] *= factor
    model = loaded(config, params)
    found = rounding.DAMAGED.measure(model, inputs(), lambda part: None)
    return found.metrics, evaluate(model, inputs(), settings=settings or {}, quantize_head=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_two_settings")
@pytest.mark.parametrize("scan_layers", [True, False])
def test_rounded_perplexities_are_those_of_evaluations(scan_layers):
    of = {"int8_coarse": quant.INT8_COARSE} | {name: quant.setting_named(name) for name in rounding.FOUR_BIT}
    found, evaluated = rounded(scan_layers, settings=of)
    for name in (*rounding.FOUR_BIT, "int8_coarse_with_head"):
        assert found[f"perplexity_{name}"] == pytest.approx(evaluated[f"perplexity_{name}"], rel=1e-5)
    assert found["perplexity_w4a4"] != pytest.approx(evaluated["perplexity"], rel=1e-4)
    for name, tolerance in (("int8_moderate_static", 0.05), ("int8_coarse_static", 0.05), ("float16", 0.01)):
        assert found[f"perplexity_{name}"] == pytest.approx(evaluated["perplexity"], rel=tolerance)
    assert 0 < found["largest_value"] < LARGEST_FLOAT16


@pytest.mark.slow
@pytest.mark.usefixtures("_two_settings")
def test_what_overflows_float16_predicts_nothing():
    found, _ = rounded(True, factor=1e6)
    assert found["largest_value"] > LARGEST_FLOAT16
    assert found["perplexity_float16"] > 1e300 > found["perplexity_bfloat16"]


@pytest.mark.parametrize("d_model", [96, 2048])
def test_no_outlier_makes_int8_worse_than_width_allows(d_model):
    """After a norm with one scale int8 changes x by at most sqrt(D) / 254 of its root mean square, if that is 1."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, d_model))
    x[np.arange(64), rng.integers(0, d_model, 64)] += np.geomspace(1, 1e5, 64)  # outliers of all sizes
    x /= np.sqrt((x**2).mean(-1, keepdims=True))
    step = np.abs(x).max() / 127
    error, bound = np.abs(np.round(x / step) * step - x).max(), math.sqrt(d_model) / 254
    assert 0.9 * bound < error <= bound * (1 + 1e-5)
    np.testing.assert_allclose(np.abs(np.asarray(absmax(x, 8)) - x).max(), error, rtol=1e-3)


T, VOCABULARY = 8, 32


def streamed(**attention):
    """Returns the metrics of a model whose attention has these parameters."""
    config = replace(TINY, {"model.position": "rotary", "data.bos": True})
    params = drawn_params(config.model, 0.4)  # losses that differ from token to token
    params["layers_0"]["attention"] |= attention
    tokens = np.random.default_rng(0).integers(0, VOCABULARY - 1, 128 * 8 * T + 1, dtype=np.uint16)
    rows = np.full((1, T + 1), VOCABULARY - 1, np.int32)
    found = STREAMED.measure(
        loaded(config, params), inputs()._replace(evaluation=rows, held_out=tokens), lambda part: None
    )
    assert {name: of.shape for name, of in found.arrays.items()} == dict.fromkeys(("window", "sinks", "whole"), (32,))
    return found.metrics


@pytest.mark.slow
def test_streams_and_new_texts_compared_on_same_tokens():
    # A model without attention predicts a token from the one before alone, wherever that stands.
    found = streamed(output={"kernel": jnp.zeros((16, 16))})
    ratios = {name: value for name, value in found.items() if "ratio" in name}
    assert len(ratios) == 3 * 2
    assert list(ratios.values()) == pytest.approx([1.0] * 6, rel=1e-5)
    assert found["perplexity_anew_4"] != pytest.approx(found["perplexity_anew_8"], rel=1e-4)
    with_attention = streamed()
    assert all(abs(with_attention[name] - 1) > 1e-4 for name in ratios)


def test_a_stream_is_summarized_by_window():
    losses = np.repeat(np.arange(5.0), 256) + np.array([[0.5], [-0.5]])
    found = smollm2.stream_summary(losses)
    assert [found[f"loss_{i}"] for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert found["perplexity"] == pytest.approx(np.exp(2.5))


def test_kept_checkpoints_evaluated_as_they_are_and_rounded(tmp_path, monkeypatch):
    for name in [*SETTINGS][2:]:  # each is a program more
        monkeypatch.delitem(SETTINGS, name)
    config = replace(TINY, {"train.checkpoint_every_steps": 2, "train.keep_every_steps": 4, "train.steps": 12})
    with Checkpoints(tmp_path / "checkpoints", keep=2, keep_every_steps=4) as checkpoints:
        for step in range(2, 13, 2):
            state = blank_state(config)._replace(step=np.int32(step), params=drawn_params(config.model, 0.05 * step))
            checkpoints.save(state, config, inputs().provenance)
    (measure,) = LONG_PAIR.measures
    found = measure.measure(load(tmp_path), inputs(), lambda part: None).metrics
    steps = {int(name.rpartition("_")[2]) for name in found if "/step_" in name}
    assert steps == {4, 8, 12}
    for step in sorted(steps):
        expected = evaluate(load(tmp_path / f"checkpoints/{step}"), inputs(), settings=SETTINGS)
        for name in ("perplexity", "kurtosis_rest", *(f"perplexity_{of}" for of in SETTINGS)):
            assert found[f"{name}/step_{step}"] == pytest.approx(expected[name], rel=1e-5)
    assert all(found[f"perplexity_{of}"] == found[f"perplexity_{of}/step_12"] for of in SETTINGS)
