"""The logit lens gives the model's logits at the end, and contributions of its parts add up to them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_oracle import stacked_params

from orthojax import analysis
from orthojax.config import Config, ModelConfig
from orthojax.errors import UserError
from orthojax.model import Interventions, LoadedModel, Transformer

SMALL = {"vocab_size": 19, "max_length": 64, "d_model": 16, "num_layers": 3, "num_heads": 4, "d_mlp": 24}
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 8))
CASES = {
    "llama": {"norm": "rmsnorm", "position": "rotary", "num_kv_heads": 2, "mlp": "swiglu", "tie_embeddings": False},
    "gpt2": {"norm": "layernorm", "use_bias": True, "normalizer": "softmax"},
    "single": {"norm": "rmsnorm_single", "scan_layers": False, "embedding_projection": True},
    "olmo2": {"norm": "rmsnorm", "block": "output_norm"},
    "no norm": {"norm": "none", "block": "parallel"},
}


def a_model(**changes):
    config = ModelConfig(**SMALL | changes)
    return LoadedModel(Transformer(config), stacked_params(config), Config(config), None, Path())


@pytest.mark.parametrize("name", CASES)
def test_contributions_add_up_to_the_logits(name):
    loaded = a_model(**CASES[name])
    adds = CASES[name].get("block") != "output_norm"
    with jax.default_matmul_precision("highest"):
        expected = loaded.model.apply({"params": loaded.params}, TOKENS[:, :-1])[0]
        states = analysis.measure(loaded, [TOKENS[:, :-1]], lambda taps: taps.residual)
        logits = analysis.logit_lens(loaded, states)
        found = analysis.logit_attribution(loaded, TOKENS) if adds else None
    assert logits.shape == (3, 2, 7, 19)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits[-1] / scale, expected / scale, atol=1e-5)
    assert np.abs(logits[0] - expected).max() > 0.01 * scale
    if found is None:
        return
    target = np.take_along_axis(np.asarray(expected), TOKENS[:, 1:, None], -1)[..., 0]
    total = found.embedding + found.attention.sum(0) + found.mlp.sum(0) + found.bias
    np.testing.assert_allclose(total / scale, target / scale, atol=1e-5)
    if CASES[name].get("use_bias"):  # which heads leave out
        return
    np.testing.assert_allclose(found.heads.sum(1) / scale, found.attention / scale, atol=1e-5)


def test_what_heads_add_is_what_goes_with_them():
    loaded = a_model(**CASES["llama"])
    found = analysis.logit_attribution(loaded, TOKENS)
    scale = np.ones((3, 4), np.float32)
    scale[2, 1] = 0.0  # of the last layer, so that only its MLP is between
    without = Interventions(head_scale=jnp.asarray(scale))
    seen = analysis.measure(loaded, [TOKENS[:, :-1]], lambda taps: taps.attention_output, without)
    plain = analysis.measure(loaded, [TOKENS[:, :-1]], lambda taps: (taps.attention_output, taps.residual))
    gone, last = np.asarray(plain[0][2] - seen[2]), np.asarray(plain[1][-1])
    rms = np.sqrt((np.asarray(last, np.float64) ** 2).mean(-1, keepdims=True) + loaded.config.model.norm_eps)
    columns = np.moveaxis(np.asarray(loaded.params["head"]["kernel"])[:, TOKENS[:, 1:]], 0, -1)
    expected = (gone / rms * np.asarray(loaded.params["final_norm"]["scale"]) * columns).sum(-1)
    np.testing.assert_allclose(found.heads[2, 1], expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        {"block": "post_norm"},
        {"block": "output_norm"},
        {"gated_attention": True},
        {"attention": (True, False, True), "scan_layers": False},
        {"gated_norm_rank": 2},
    ],
)
def test_models_whose_parts_do_not_add_up_are_refused(changes):
    with pytest.raises(UserError, match=next(iter(changes)).split("_")[0]):
        analysis.logit_attribution(a_model(**changes), TOKENS)
