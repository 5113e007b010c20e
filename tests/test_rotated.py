"""Rotation after training keeps the logits of every kind of model; a float prefix those of the rows behind it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from tiny_run import drawn_params

from orthojax import quant
from orthojax.model import Transformer, gpt2, llama2

SIZES = {"d_model": 48, "num_layers": 2, "num_heads": 4, "d_mlp": 40, "vocab_size": 32, "max_length": 8}
LLAMA = llama2("tiny", **SIZES, num_kv_heads=2)
CONFIGS = {
    "gpt2": gpt2("tiny", **SIZES, norm="rmsnorm_single"),
    "llama2": LLAMA,
    "tied": dataclasses.replace(LLAMA, tie_embeddings=True, scan_layers=False, qk_norm="head"),
    "parallel": dataclasses.replace(
        LLAMA, block="parallel", use_bias=True, gated_attention=True, normalizer="softmax1"
    ),
    "capped, scaled embeddings": dataclasses.replace(
        LLAMA, mlp="geglu", scale_embeddings=True, attention_soft_cap=1.5, final_soft_cap=3.0, use_bias="attention"
    ),
    "gate": dataclasses.replace(LLAMA, gated_attention="elementwise"),
    "linear": dataclasses.replace(LLAMA, mlp=("linear", "none"), attention=(False, True), scan_layers=False),
    "no norm": dataclasses.replace(LLAMA, norm="none", mlp="relu", normalizer="learned_sink"),
}
IDS = np.random.default_rng(0).integers(0, 32, (3, 8))


def drawn(config, std=0.3):
    """Parameters whose scales differ by channel."""

    def scaled(path, leaf):
        factor = np.exp(0.5 * np.random.default_rng(1).normal(size=leaf.shape))
        return leaf * jnp.asarray(factor, leaf.dtype) if "scale" in str(path[-1]) else leaf

    return jax.tree_util.tree_map_with_path(scaled, drawn_params(config, std))


def logits(model, params):
    return np.asarray(jax.jit(lambda params: model.apply({"params": params}, IDS)[0])(params))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_stay(name):
    config = CONFIGS[name]
    params = drawn(config)
    rotated, new, wrap = quant.rotate_after_training(params, config, seed=3)
    expected = logits(Transformer(config), params)
    found = logits(Transformer(new, linear=wrap(Transformer(new).linear)), rotated)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    assert new.tie_embeddings == (name == "gpt2")
    assert jax.tree.map(jnp.shape, rotated) == jax.tree.map(lambda x: x.shape, drawn_params(new))
    without = logits(Transformer(new), rotated)  # the hidden units are transformed
    assert np.abs(without - expected).max() > 0.01 * np.abs(expected).max()
    other = quant.rotate_after_training(params, config, seed=4)[0]
    assert np.abs(other["token_embedding"]["embedding"] - rotated["token_embedding"]["embedding"]).max() > 0.1


def test_the_head_may_still_be_computed_in_chunks():
    params, config, wrap = quant.rotate_after_training(drawn(LLAMA), LLAMA)
    model = Transformer(config, linear=wrap(Transformer(config).linear))
    assert model.head_kernel(params)[1] == 1
    assert wrap(model.linear) is wrap(model.linear)


@pytest.mark.parametrize("bits", [6, 8])
def test_a_model_with_an_outlier_channel_is_saved(bits):
    # Large in every token, and hardly read: it says little, but is in the way of the others.
    params = jax.tree.map(np.array, drawn(LLAMA))
    params["token_embedding"]["embedding"][:, 5] = 20.0
    for kernels in (*params["layers"]["attention"].values(), *params["layers"]["mlp"].values(), params["head"]):
        if kernels["kernel"].shape[-2] == LLAMA.d_model:
            kernels["kernel"][..., 5, :] *= 0.01
    expected = logits(Transformer(LLAMA), params)
    rotated, config, wrap = quant.rotate_after_training(params, LLAMA)
    # Inputs are what it ruins. Kernels of few bits would not do: rotated, their errors meet all of the outlier.
    setting = dataclasses.replace(quant.INT8_FINE_PER_TOKEN, activation_bits=bits)
    plain, better = quant.rounded_model(LLAMA, setting), quant.rounded_model(config, setting)
    error = np.linalg.norm(logits(plain, params) - expected)
    assert np.linalg.norm(logits(better.clone(linear=wrap(better.linear)), rotated) - expected) < 0.5 * error


# A float prefix: rows after it are those of the whole sequence, and only they are rounded.

CONFIG = llama2("tiny", d_model=16, d_mlp=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=32, max_length=16)
PARAMS = drawn_params(CONFIG, 0.3)
PREFIX, ROWS = np.array([3, 7]), np.random.default_rng(0).integers(4, 32, (3, 9))
WHOLE = np.concatenate([np.broadcast_to(PREFIX, (3, 2)), ROWS], axis=1)


@functools.partial(jax.jit, static_argnums=0)
def both(model, params):
    """Returns logits of the rows after the float prefix, and those of the whole sequence."""
    cache = quant.prefix_cache(Transformer(CONFIG), params, PREFIX, 3, 9)
    whole = model.apply({"params": params}, WHOLE)[0][:, 2:]
    return model.apply({"params": params}, ROWS, cache=cache)[0], whole


def test_without_rounding_it_is_the_whole_sequence():
    found, expected = both(Transformer(CONFIG), PARAMS)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_what_is_massive_in_the_prefix_does_not_reach_the_rounding():
    # Channel 0 belongs to token 3, and one hidden unit of the first MLP reads it alone: other tokens share its scale.
    params = jax.tree.map(np.array, PARAMS)
    params["token_embedding"]["embedding"][:, 0] = np.where(np.arange(32) == 3, 100.0, 0.0)
    params["layers"]["attention"]["output"]["kernel"][0, :, 0] = 0.0
    for part in ("gate", "input"):
        params["layers"]["mlp"][part]["kernel"][0, :, 0] = np.where(np.arange(16) == 0, 10.0, 0.0)
    params = jax.tree.map(jnp.asarray, params)
    _, exact = both(Transformer(CONFIG), params)
    found, together = both(quant.rounded_model(CONFIG, quant.INT8_COARSE), params)
    assert 0 < np.abs(found - exact).mean() < 0.2 * np.abs(together - exact).mean()


test_refused = refused(
    (lambda _, changes: quant.rotate_after_training({}, dataclasses.replace(LLAMA, **changes)), [
        ({"norm": "layernorm"}, "norm='layernorm'"), ({"block": "output_norm"}, "block='output_norm'"),
        ({"embedding_projection": True}, "embedding_projection")]),
    (lambda _, prefix: quant.prefix_cache(Transformer(CONFIG), PARAMS, np.array(prefix), 3, 9), [
        *((prefix, "a prefix of shape") for prefix in ([], [[1, 2]])),
        *((prefix, "prefix: token ids") for prefix in ([99], [-1], [1.5], [True]))]),
)  # fmt: skip
