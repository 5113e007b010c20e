"""A float prefix: rows after it are those of the whole sequence, and only they are rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import drawn_params

from orthojax import quant
from orthojax.errors import UserError
from orthojax.model import Transformer, llama2

CONFIG = llama2("tiny", d_model=16, d_mlp=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=32, max_length=16)
PARAMS = drawn_params(CONFIG, 0.3)
PREFIX, ROWS = np.array([3, 7]), np.random.default_rng(0).integers(4, 32, (3, 9))
WHOLE = np.concatenate([np.broadcast_to(PREFIX, (3, 2)), ROWS], axis=1)


def after_prefix(model, params=PARAMS):
    cache = quant.prefix_cache(Transformer(CONFIG), params, PREFIX, 3, 9)
    return np.asarray(model.apply({"params": params}, ROWS, cache=cache)[0])


def test_without_rounding_it_is_the_whole_sequence():
    expected = np.asarray(Transformer(CONFIG).apply({"params": PARAMS}, WHOLE)[0])[:, 2:]
    np.testing.assert_allclose(after_prefix(Transformer(CONFIG)), expected, atol=1e-5 * np.abs(expected).max())


def test_what_is_massive_in_the_prefix_does_not_reach_the_rounding():
    # Channel 0 belongs to token 3, and one hidden unit of the first MLP reads it alone: other tokens share its scale.
    params = jax.tree.map(np.array, PARAMS)
    params["token_embedding"]["embedding"][:, 0] = np.where(np.arange(32) == 3, 100.0, 0.0)
    params["layers"]["attention"]["output"]["kernel"][0, :, 0] = 0.0
    for part in ("gate", "input"):
        params["layers"]["mlp"][part]["kernel"][0, :, 0] = np.where(np.arange(16) == 0, 10.0, 0.0)
    params = jax.tree.map(jnp.asarray, params)
    rounded = quant.rounded_model(CONFIG, quant.INT8_COARSE)
    exact = np.asarray(Transformer(CONFIG).apply({"params": params}, WHOLE)[0])[:, 2:]
    together = np.asarray(rounded.apply({"params": params}, WHOLE)[0])[:, 2:]
    error = np.abs(after_prefix(rounded, params) - exact).mean()
    assert 0 < error < 0.2 * np.abs(together - exact).mean()


@pytest.mark.parametrize("prefix", [[], [[1, 2]], [99], [-1], [1.5], [True]])
def test_what_is_no_prefix_is_refused(prefix):
    with pytest.raises(UserError, match=r"a prefix of shape|prefix: token ids"):
        quant.prefix_cache(Transformer(CONFIG), PARAMS, np.array(prefix), 3, 9)
