"""`attention_fn` inside flax's own MultiHeadAttention, linen and nnx."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import orthojax

pytestmark = pytest.mark.usefixtures("flax_promotes_ranks")
BATCH, LENGTH, WIDTH, HEADS = 2, 7, 16, 4
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)
PADDING = jnp.asarray(RNG.random((BATCH, 1, 1, LENGTH)) < 0.7).at[..., 0].set(True)


@pytest.fixture
def flax_promotes_ranks():
    """Its layers add biases [heads, width] to [B, T, heads, width], which our own code may not do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def definition(normalizer, q, k, v, visible):
    """float64: exp(x) / (n + sum exp(x)) over the visible keys; q, k, v [B, T, N, H]."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    x = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    e = np.where(visible, np.exp(x), 0.0)
    weights = e / ({"softmax": 0.0, "softmax1": 1.0}[normalizer] + e.sum(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights, v)


def linen(attention_fn, **call):
    """(output, what the layer's own projections give `definition`, the projection of its result)."""
    layer = nn.MultiHeadAttention(num_heads=HEADS, attention_fn=attention_fn)
    params = layer.init(jax.random.key(1), X)["params"]
    q, k, v = (
        np.einsum("btd,dnh->btnh", X, params[name]["kernel"]) + params[name]["bias"]
        for name in ("query", "key", "value")
    )
    out = params["out"]
    return layer.apply({"params": params}, X, **call), (q, k, v), (out["kernel"], out["bias"])


def nnx_layer(attention_fn, **call):
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(1))
    q, k, v = (
        np.einsum("btd,dnh->btnh", X, part.kernel[...]) + part.bias[...]
        for part in (layer.query, layer.key, layer.value)
    )
    return layer(X, **call), (q, k, v), (layer.out.kernel[...], layer.out.bias[...])


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
CASES = {
    "nothing hidden": ({}, {}, np.ones((1, 1, 1, LENGTH), bool)),
    "causal": ({"is_causal": True}, {}, CAUSAL),
    "flax's causal mask, of floats": ({}, {"mask": nn.make_causal_mask(X[..., 0])}, CAUSAL),
    "causal and padding": ({"is_causal": True}, {"mask": PADDING}, CAUSAL & np.asarray(PADDING)),
}


@pytest.mark.parametrize("library", [linen, nnx_layer])
@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
@pytest.mark.parametrize("case", CASES)
def test_flax_attends_by_the_definition(library, normalizer, case):
    made, called, visible = CASES[case]
    output, (q, k, v), (kernel, bias) = library(orthojax.attention_fn(normalizer, **made), **called)
    expected = np.einsum("btnh,nhd->btd", definition(normalizer, q, k, v, visible), kernel) + bias
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("library", [linen, nnx_layer])
def test_softmax_is_flax_own_attention(library):
    own = {linen: nn.dot_product_attention, nnx_layer: nnx.dot_product_attention}[library]
    mask = {"mask": nn.make_causal_mask(X[..., 0])}
    ours = library(orthojax.attention_fn("softmax"), **mask)[0]
    np.testing.assert_allclose(ours, library(own, **mask)[0], rtol=1e-5, atol=1e-6)


def test_nnx_says_causal_when_it_calls():
    ours = nnx_layer(orthojax.attention_fn(), is_causal=True)[0]
    np.testing.assert_array_equal(ours, nnx_layer(orthojax.attention_fn(is_causal=True))[0])


def test_cached_decoding_sees_all_that_is_cached():
    causal = nnx.MultiHeadAttention(
        HEADS, WIDTH, attention_fn=orthojax.attention_fn(is_causal=True), decode=True, rngs=nnx.Rngs(1)
    )
    whole = causal(X, decode=False)
    causal.init_cache(X.shape)
    for t in range(LENGTH):
        np.testing.assert_allclose(causal(X[:, t : t + 1]), whole[:, t : t + 1], rtol=1e-5, atol=1e-6)


def test_more_batch_axes_are_one():
    q, k, v = (jnp.asarray(RNG.normal(size=(2, 3, LENGTH, HEADS, 4)), jnp.float32) for _ in range(3))
    mask = jnp.asarray(RNG.random((3, 1, LENGTH, LENGTH)) < 0.5)  # shared by the first of the two
    bias = jnp.asarray(RNG.normal(size=(LENGTH, LENGTH)), jnp.float32)
    attend = orthojax.attention_fn()
    output = attend(q, k, v, bias=bias, mask=mask)
    assert output.shape == q.shape
    for i, j in np.ndindex(2, 3):
        alone = orthojax.dot_product_attention(q[i, j], k[i, j], v[i, j], bias, mask[j])
        np.testing.assert_allclose(output[i, j], alone, rtol=1e-6, atol=1e-6)


def test_dtype_is_that_of_the_layer():
    layer = nn.MultiHeadAttention(num_heads=HEADS, attention_fn=orthojax.attention_fn(), dtype=jnp.bfloat16)
    assert layer.init_with_output(jax.random.key(1), X)[0].dtype == jnp.bfloat16
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    assert orthojax.attention_fn()(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"dropout_rate": 0.1}, "dropout"),
        ({"precision": "highest"}, "precision"),
        ({"module": object()}, "sown"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "einsum"),
    ],
)
def test_what_it_would_ignore_is_refused(asked, problem):
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    with pytest.raises(NotImplementedError, match=problem):
        orthojax.attention_fn()(q, q, q, **asked)
    assert orthojax.attention_fn()(q, q, q, dropout_rate=0.1, deterministic=True).shape == q.shape


@pytest.mark.parametrize("sow", [linen, nnx_layer])
def test_sowing_through_the_layer_is_refused(sow):
    with pytest.raises(NotImplementedError, match="sown"):
        sow(orthojax.attention_fn(), sow_weights=True)


@pytest.mark.parametrize(("queries", "mask"), [(1, None), (3, None), (3, np.ones((1, 1, 3, LENGTH), bool))])
def test_causal_attention_of_other_lengths_is_refused_but_for_one_query_with_a_mask(queries, mask):
    q = X.reshape(BATCH, LENGTH, HEADS, -1)
    with pytest.raises(ValueError, match=f"causal attention of {queries} queries to 7 keys"):
        orthojax.attention_fn(is_causal=True)(q[:, :queries], q, q, mask=mask)
