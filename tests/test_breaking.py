"""What breaks a model: the peak's two clocks and its probe; the measure of the comparison of preventions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import TINY, drawn_params, inputs, loaded, rows

from orthojax import quant
from orthojax.config import replace
from orthojax.experiments.ours.breaking import drift_over_walk, peak_probe, signal_to_noise
from orthojax.experiments.ours.preventions import FORMATS, ROUNDED
from orthojax.model import Transformer, fold_embedding_projection
from orthojax.train import evaluate


def test_signal_to_noise_is_that_of_the_distribution():
    rng = np.random.default_rng(0)
    mean, deviations = np.array([3.0, 0.0, 4.0]), np.array([1.0, 5.0, 2.0])
    drawn = mean + deviations * rng.normal(size=(20_000, 1, 3))
    np.testing.assert_allclose(signal_to_noise(jnp.asarray(drawn)), 5 / np.sqrt(30), rtol=0.02)
    noise = jnp.asarray(rng.normal(size=(400, 50, 3)))  # the biased estimate of nothing would be 1 / sqrt(400)
    assert float(jnp.mean(signal_to_noise(noise))) < 0.03


@pytest.mark.parametrize("decay", [0.0, 20.0])
def test_drift_over_walk_is_that_of_simulated_steps(decay):
    rate, steps, snr = 1e-3, 400, 0.5
    share = snr / np.sqrt(1 + snr**2)
    constant = walk = 0.0
    for _ in range(steps):  # variances of a walk of independent steps add up
        constant = (1 - rate * decay) * constant + rate * share
        walk = (1 - rate * decay) ** 2 * walk + rate**2
    assert drift_over_walk(snr, rate, decay, steps) == pytest.approx(constant / np.sqrt(walk), rel=1e-6)


def test_probe_writes_the_peak_and_what_rounding_costs(tmp_path):
    config = replace(TINY, {"model.num_layers": 2})
    params, tokens = drawn_params(config.model, 0.3), rows(3, 8)
    tokens[:, 0] = 0
    peak_probe(config, tokens, tmp_path)(7, params)
    (file,) = tmp_path.iterdir()
    with np.load(file) as arrays:
        found = dict(arrays)
    apply = Transformer(config.model).apply
    residual = apply({"params": params}, tokens[:, :-1], observe=lambda taps: taps.residual)[1]
    norms = np.linalg.norm(np.asarray(residual), axis=-1)  # [L, K, T]
    np.testing.assert_allclose(found["peak"], norms[:, :, 0].mean(1) / norms[:, :, 1:].mean((1, 2)), rtol=1e-4)
    for name, model in {
        "": Transformer(config.model),
        "_int8_coarse": quant.rounded_model(config.model, quant.INT8_COARSE),
    }.items():
        logits = np.asarray(model.apply({"params": params}, tokens[:, :-1])[0], np.float64)
        picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        loss = np.mean(np.log(np.exp(logits).sum(-1)) - picked)
        assert found[f"loss_nats{name}"] == pytest.approx(loss, rel=1e-4)
    assert found["step"] == 7
    assert found["gradient_snr"][0] >= 0  # of a model that is not trained, the mean is less than its error
    assert np.isnan(found["gradient_snr"][1])


def test_recipes_are_rounded_as_evaluations_are(monkeypatch):
    monkeypatch.setattr("orthojax.experiments.ours.preventions.FORMATS", ("int8_coarse", "w4a4"))
    monkeypatch.setattr("orthojax.experiments.ours.preventions._ROTATED", ("int8_coarse",))
    config = replace(TINY, {"model.embedding_projection": True, "model.gated_attention": "elementwise"})
    model = loaded(config, drawn_params(config.model, 0.3))
    found = ROUNDED.measure(model, inputs(), lambda part: None).metrics
    params, folded = fold_embedding_projection(model.params, config.model)
    plain = loaded(replace(config, {"model.embedding_projection": False, "model.tie_embeddings": False}), params)
    assert plain.config.model == folded
    settings = {name: quant.setting_named(name) for name in ("int8_coarse", "w4a4")}
    wanted = evaluate(plain, inputs(), settings=settings)
    for name in settings:
        assert found[f"perplexity_{name}"] == pytest.approx(wanted[f"perplexity_{name}"], rel=1e-5)
    assert found["perplexity_int8_coarse_rotated"] == pytest.approx(wanted["perplexity"], rel=0.05)
    assert 0 < found["last_state_error_int8_coarse"] < found["last_state_error_w4a4"]
    assert found["osp_kurtosis"] >= 0
    assert set(FORMATS) <= quant.SETTINGS.keys() | quant.MORE_SETTINGS.keys()
    assert all(np.isfinite(jax.tree.leaves(found)))
