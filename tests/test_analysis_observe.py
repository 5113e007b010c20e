"""Statistics of layers and batches: keys, averages over layers, independence of the split into batches, measuring."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax import analysis
from orthojax.config import Config
from orthojax.model import LoadedModel, Transformer, gpt2

L, B, N, T, D, V = 3, 8, 2, 6, 16, 5

FIRST_AND_REST = {
    f"{name}_{where}"
    for name in ("kurtosis", "max_abs", "norm_ratio", "value_norm", "residual_norm")
    for where in ("first", "rest")
}
LANGUAGE_MODEL_KEYS = FIRST_AND_REST | {
    *("kurtosis_pooled", "max_abs_first_maximum", "max_abs_rest_maximum"),
    *("first_attention_fraction", "first_attention_mass", "sink_rate"),
}
BACKCOPY_KEYS = {name for name in FIRST_AND_REST if "norm_" in name and "ratio" not in name}
BACKCOPY_KEYS |= {"sink_attention", "sink_attention_rest", "sink_logit_gap"}


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


# The one loop. Functions of the module, so that one program serves all calls.


def _scaled_residual(taps, scale):
    return {"residual": scale * taps.residual, "weights": taps.attention_weights}


def _largest(logits, scale):
    return scale * jnp.max(logits, axis=-1)[None]


@pytest.fixture(scope="module")
def loaded():
    model = gpt2("tiny", d_model=8, num_layers=2, num_heads=2, d_mlp=8, vocab_size=16, max_length=8)
    params = jax.jit(Transformer(model).init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return LoadedModel(Transformer(model), jax.tree.map(lambda leaf: 5 * leaf, params), Config(), None, Path())


TOKENS = np.random.default_rng(0).integers(0, 16, (6, 8))


@pytest.mark.parametrize("devices", [1, 2])
def test_measure_joins_batches_with_their_arguments_and_outputs_on_any_mesh(loaded, devices):
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        loaded = loaded._replace(params=jax.device_put(loaded.params, placed))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    else:
        rows = jax.devices()[0]
    batches = [
        (jax.device_put(TOKENS[:4], rows), jnp.float32(2.0)),
        (jax.device_put(TOKENS[4:], rows), jnp.float32(3.0)),
    ]
    whole = jax.jit(lambda params: loaded.model.apply({"params": params}, TOKENS, observe=lambda taps: taps))
    logits, taps = jax.device_get(whole(jax.device_get(loaded.params)))
    scale = np.float32([2, 2, 2, 2, 3, 3]).reshape(6, 1, 1)
    seen, largest = analysis.measure(
        loaded, iter(batches), _scaled_residual, output=_largest, join=analysis.concatenate
    )
    np.testing.assert_allclose(seen["residual"], scale * taps.residual, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen["weights"], taps.attention_weights, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(largest[0], scale[..., 0] * logits.max(-1), rtol=1e-5)
    one = analysis.measure(loaded, batches[:1], _scaled_residual)
    np.testing.assert_allclose(one["residual"], 2 * taps.residual[:, :4], rtol=1e-5, atol=1e-6)
    assert one["residual"].is_fully_replicated


def test_measured_statistics_do_not_depend_on_the_batches_and_compile_once(loaded):
    whole = analysis.finalize(analysis.measure(loaded, [TOKENS], analysis.observe_language_model))
    assert whole["sequences"] == 6
    parts = [TOKENS[:3], TOKENS[3:]]
    assert_same(whole, analysis.finalize(analysis.measure(loaded, parts, analysis.observe_language_model)))
    calls = []

    def counting(taps):
        calls.append(taps)
        return analysis.observe_language_model(taps)

    for _ in range(2):
        analysis.measure(loaded, parts, counting)
    traced = len(calls)
    analysis.measure(loaded, parts, counting)
    assert 1 <= len(calls) == traced
    with pytest.raises(ValueError, match="no batches"):
        analysis.measure(loaded, [], analysis.observe_language_model)
