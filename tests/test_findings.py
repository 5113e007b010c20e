"""What is wrong with a model and what helps: predictions beside the float model's, layers in float, the sentences."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from tiny_run import TINY, drawn_params, rows
from tiny_run import loaded as tiny_loaded

from orthojax import analysis, cards, quant
from orthojax.cards import rounding
from orthojax.cards.findings import remedies
from orthojax.cards.text import rows_of_ids
from orthojax.config import replace
from orthojax.model import Transformer, linear, unstack_layers
from orthojax.train.step import split_tokens

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

    expected = Transformer(dataclasses.replace(config, scan_layers=False), linear=by_path).apply(
        {"params": flat}, tokens
    )[0]
    found = model.apply({"params": quant.switched_params(params, chosen)}, tokens)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    whole = model.apply({"params": quant.switched_params(params, names)}, tokens)[0]
    np.testing.assert_allclose(whole, Transformer(config).apply({"params": params}, tokens)[0], atol=2e-5)


def test_first_tokens_stay_float():
    params, tokens = drawn_params(CONFIG, 0.3), rows(0)[:, :8]
    found = quant.rounded_model(CONFIG, quant.setting_named("w4a4kv4"), float_tokens=2).apply(
        {"params": params}, tokens
    )[0]
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
    assert massive.says == (
        f"Massive: {where}. 50% of the heads are sinks: over 30% of their weight is on the first token."
    )
    costs = "adds 1 ± 0.02 nats to the loss (+172% perplexity); KL 1 ± 0.01, same likeliest token 50%"
    sink = "0.4 ± 0.1 of this goes with the first token in float (D_sink). 2 of 3 formats fail, also w4a4."
    assert fails.says == f"Fails: int8_coarse, {costs}; {sink}"
    assert list(remedies(broken)) == ["_per_token", "_float_layers", "_rotated", "_float_first"]
    tried = "scales for each token 98%, b and c in float 75%, a rotation 30%, the first token in float nothing"
    assert to_do.says == f"What recovers the KL divergence: at int8_coarse, {tried}; at w4a4, nothing was tried."
    assert ("int8_coarse", "helps", "int8_coarse") in to_do.rows


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
