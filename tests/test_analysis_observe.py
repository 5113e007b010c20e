"""Statistics of layers and batches: keys, averages over layers, and independence of the split into batches."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import analysis

L, B, N, T, D, V = 3, 8, 2, 6, 16, 5

LANGUAGE_MODEL_KEYS = {
    "kurtosis_first",
    "kurtosis_rest",
    "kurtosis_pooled",
    "max_abs_first",
    "max_abs_rest",
    "max_abs_first_maximum",
    "max_abs_rest_maximum",
    "first_attention_fraction",
    "first_attention_mass",
    "sink_rate",
    "norm_ratio_first",
    "norm_ratio_rest",
    "value_norm_first",
    "value_norm_rest",
    "residual_norm_first",
    "residual_norm_rest",
}
BACKCOPY_KEYS = {
    "sink_attention",
    "sink_attention_rest",
    "sink_logit_gap",
    "value_norm_first",
    "value_norm_rest",
    "residual_norm_first",
    "residual_norm_rest",
}


def layers_of_taps(seed=0):
    """Taps stacked over layers, leaves [L, B, ...]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(L, B, N, T, T)) * 2
    weights = np.exp(logits) * np.tril(np.ones((T, T)))
    weights[:, :, 1, :, 0] *= 5
    arrays = {
        "attention_logits": logits,
        "attention_weights": weights / (1 + weights.sum(-1, keepdims=True)),
        "value_norms": rng.uniform(size=(L, B, N, T)),
        "post_attention": rng.standard_t(4, (L, B, T, D)),
        "residual": rng.standard_t(4, (L, B, T, D)),
    }
    return {name: np.float32(array) for name, array in arrays.items()}


def observe_layers(observe, arrays, sequences=slice(None)):
    """Runs an observe function inside a scan over layers, as a model does."""

    def layer(carry, taps):
        return carry, observe(SimpleNamespace(**taps))

    return jax.lax.scan(layer, 0, {name: array[:, sequences] for name, array in arrays.items()})[1]


def with_layers(names):
    return {"sequences"} | names | {f"{name}/layer_{layer}" for name in names for layer in range(L)}


SPLITS = [slice(0, 2), slice(2, 8)]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_language_model_metrics_have_every_key_and_are_means_over_layers():
    arrays = layers_of_taps()
    metrics = analysis.finalize(observe_layers(analysis.observe_language_model, arrays))
    assert metrics.keys() == with_layers(LANGUAGE_MODEL_KEYS)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["sequences"] == B
    inputs = {"value": "value_norms", "first_": "attention_weights"}
    for name in LANGUAGE_MODEL_KEYS - {"sink_rate"}:
        source = next((array for prefix, array in inputs.items() if name.startswith(prefix)), "residual")
        metric = jax.jit(getattr(analysis, name))
        layers = [float(metric(arrays[source][layer])) for layer in range(L)]
        np.testing.assert_allclose([metrics[f"{name}/layer_{i}"] for i in range(L)], layers, rtol=1e-5, err_msg=name)
        over_layers = np.max if name.endswith("_maximum") else np.mean
        np.testing.assert_allclose(metrics[name], over_layers(layers), rtol=1e-5, err_msg=name)


def test_sink_rate_is_a_share_of_heads_over_the_whole_set():
    arrays = layers_of_taps()
    by_head = arrays["attention_weights"][..., 0].mean(axis=(1, 3))
    statistics = observe_layers(analysis.observe_language_model, arrays)
    threshold = float(np.sort(by_head.ravel())[2:4].mean())
    metrics = analysis.finalize(statistics, sink_threshold=threshold)
    assert metrics["sink_rate"] == pytest.approx((L * N - 3) / (L * N))
    assert metrics["sink_rate/layer_1"] == np.mean(by_head[1] > threshold)
    assert analysis.finalize(statistics)["sink_rate"] == np.mean(by_head > 0.3)


def test_language_model_statistics_do_not_depend_on_the_batches():
    arrays = layers_of_taps()
    whole = observe_layers(analysis.observe_language_model, arrays)
    parts = [observe_layers(analysis.observe_language_model, arrays, part) for part in SPLITS]
    assert_same(analysis.finalize(whole), analysis.finalize(analysis.combine(*parts)))
    assert_same(analysis.finalize(whole), analysis.finalize(jax.jit(analysis.combine)(*reversed(parts))))


def test_post_attention_residual_is_an_option():
    arrays = layers_of_taps()
    plain = analysis.finalize(observe_layers(analysis.observe_language_model, arrays))
    both = analysis.finalize(observe_layers(partial(analysis.observe_language_model, post_attention=True), arrays))
    assert plain.items() <= both.items()
    moved = arrays | {"residual": arrays["post_attention"]}
    swapped = analysis.finalize(observe_layers(analysis.observe_language_model, moved))
    extra = {name.removeprefix("post_attention_") for name in both.keys() - plain.keys()}
    assert "kurtosis_first/layer_0" in extra
    assert "max_abs_rest_maximum" in extra
    assert_same({name: both[f"post_attention_{name}"] for name in extra}, {name: swapped[name] for name in extra})


def triggers():
    is_trigger = np.random.default_rng(3).uniform(size=(B, T)) < 0.4
    is_trigger[:, :2] = False
    is_trigger[:2, 2:] = True  # the first part of the split has no query for the logit gap
    return is_trigger


def test_backcopy_metrics_have_every_key_and_the_sink_is_a_maximum_over_layers():
    arrays, is_trigger = layers_of_taps(), triggers()
    metrics = analysis.finalize(observe_layers(analysis.observe_backcopy(is_trigger), arrays))
    assert metrics.keys() == with_layers(BACKCOPY_KEYS)
    sinks = [float(analysis.sink_attention(weights, is_trigger)) for weights in arrays["attention_weights"]]
    gaps = [float(analysis.sink_logit_gap(logits, is_trigger)) for logits in arrays["attention_logits"]]
    np.testing.assert_allclose(metrics["sink_attention"], max(sinks), rtol=1e-5)
    np.testing.assert_allclose([metrics[f"sink_attention/layer_{i}"] for i in range(L)], sinks, rtol=1e-5)
    np.testing.assert_allclose(metrics["sink_logit_gap"], np.mean(gaps), rtol=1e-5)


def test_backcopy_statistics_do_not_depend_on_the_batches():
    arrays, is_trigger = layers_of_taps(), triggers()
    whole = observe_layers(analysis.observe_backcopy(is_trigger), arrays)
    parts = [observe_layers(analysis.observe_backcopy(is_trigger[part]), arrays, part) for part in SPLITS]
    assert_same(analysis.finalize(whole), analysis.finalize(analysis.combine(*parts)))


def test_risks_are_metrics_without_layers_and_do_not_depend_on_the_batches():
    rng = np.random.default_rng(4)
    oracle, is_trigger = rng.dirichlet(np.ones(V), (B, T)), triggers()
    log_probs = np.log(rng.dirichlet(np.ones(V), (B, T)))
    metrics = analysis.finalize(analysis.observe_backcopy_risks(log_probs, oracle, is_trigger))
    assert metrics.keys() == {"sequences", "backcopy_risk_nats", "bigram_excess_risk_nats"}
    for name in ("backcopy_risk_nats", "bigram_excess_risk_nats"):
        value = getattr(analysis, name)(log_probs, oracle, is_trigger)
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)
    parts = [analysis.observe_backcopy_risks(log_probs[s], oracle[s], is_trigger[s]) for s in SPLITS]
    assert_same(metrics, analysis.finalize(analysis.combine(*parts)))


def test_a_metric_without_any_term_is_nan_and_no_warning():
    statistics = analysis.Statistics(jnp.ones(2, jnp.int32), {"x": jnp.zeros(2)}, {"x": jnp.zeros(2, jnp.int32)}, {})
    assert np.isnan(analysis.finalize(statistics)["x"])
