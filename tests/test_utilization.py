"""FLOPs per token, peaks and MFU: closed forms, the matrix products that JAX traces, XLA's own count."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from orthojax.config import ModelConfig
from orthojax.model import Transformer, flops_per_token, gpt2, llama2
from orthojax.train import model_flops_per_token, model_flops_utilization, peak_flops_per_second

SMALL = {"vocab_size": 96, "max_length": 64, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_mlp": 160}
SMALL |= {"scan_layers": False}
MODELS = {
    "gpt2": gpt2("tiny", **SMALL),
    "llama2": llama2("tiny", **SMALL),
    "grouped": llama2("tiny", **SMALL, num_kv_heads=2),
    "gated": ModelConfig(**SMALL, gated_attention=True, normalizer="learned_sink", use_bias=True),
    "mixed layers": ModelConfig(**SMALL, attention=(True, False), mlp=("linear", "swiglu"), tie_embeddings=False),
    "no mlp": ModelConfig(**SMALL, attention=(False, True), mlp="none"),
    "no attention": ModelConfig(**SMALL, attention=False, mlp="relu", normalizer="relu"),
}


def closed_form(layers, d, vocab, length):
    """GPT-2 with an MLP of 4 d and tied embeddings, half of the attention matrix counted."""
    return 6 * (layers * 12 * d**2 + vocab * d) + 6 * layers * length * d


@pytest.mark.parametrize(
    ("size", "layers", "d"), [("60m", 12, 512), ("130m", 12, 768), ("350m", 24, 1024), ("1.4b", 24, 2048)]
)
@pytest.mark.parametrize("length", [256, 1024])
def test_gpt2_sizes_are_the_closed_form(size, layers, d, length):
    model = gpt2(size, vocab_size=50_304)
    assert model_flops_per_token(model, length) == closed_form(layers, d, 50_304, length)
    both = closed_form(layers, d, 50_304, length) + 6 * layers * length * d
    assert model_flops_per_token(model, length, causal=False) == both == flops_per_token(model, length)


def test_llama2_by_hand():
    d, d_mlp = 768, 2048
    kernels = 12 * (4 * d**2 + 3 * d * d_mlp) + 32_000 * d  # the head, not the embedding
    assert model_flops_per_token(llama2("130m"), 512) == 6 * kernels + 6 * 12 * 512 * d


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_and_attending_layer_counts(name):
    model, length = MODELS[name], 16
    shapes = jax.eval_shape(Transformer(model).init, jax.random.key(0), jnp.zeros((1, length), jnp.int32))["params"]
    paths = {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]}
    counted = sum(leaf.size for path, leaf in paths.items() if path.endswith("/kernel"))
    counted += paths["token_embedding/embedding"].size if model.tie_embeddings else 0
    attending = sum(f"layers_{layer}/attention/query/kernel" in paths for layer in range(model.num_layers))
    assert model_flops_per_token(model, length) == 6 * counted + 6 * attending * length * model.d_model


def traced_flops(function, *args):
    """2 m n k of every matrix product that the results of a function need."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return matrix_products_flops(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def matrix_products_flops(jaxpr):
    """Also inside jitted and custom-derivative functions."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(np.prod(equation.outvars[0].aval.shape) * depth)
        total += sum(matrix_products_flops(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params))
    return total


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_trace_just_these_products(name):
    """No tolerance: XLA's plain attention computes the whole matrix, so `causal=False` counts every product."""
    model, batch, length = MODELS[name], 3, 32
    tokens = jnp.zeros((batch, length), jnp.int32)
    params = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens)["params"]

    def loss(params):
        return jnp.sum(Transformer(model).apply({"params": params}, tokens)[0])

    expected = batch * length * model_flops_per_token(model, length, causal=False)
    assert traced_flops(jax.value_and_grad(loss), params) == expected
    assert 3 * traced_flops(loss, params) == expected


@pytest.mark.parametrize("name", ["gpt2", "grouped", "mixed layers"])
def test_xla_counts_the_forward_pass_alike(name):
    """Within 4%: XLA also counts elementwise work, here 1% to 2.2% of the whole."""
    model, batch, length = dataclasses.replace(MODELS[name], d_model=128, d_mlp=512), 2, 32
    tokens = jnp.zeros((batch, length), jnp.int32)
    params = jax.eval_shape(Transformer(model).init, jax.random.key(0), tokens)["params"]
    forward = jax.jit(lambda params: Transformer(model).apply({"params": params}, tokens)[0])
    counted = forward.lower(params).compile().cost_analysis()["flops"]
    products = batch * length * model_flops_per_token(model, length, causal=False) / 3
    assert products <= counted <= 1.04 * products


def test_peaks_go_by_the_exact_kind_of_device():
    assert peak_flops_per_second("NVIDIA H200") == peak_flops_per_second("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_per_second("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops_per_second("TPU v5") == 459e12
    assert peak_flops_per_second("TPU v5 lite") == 197e12
    assert peak_flops_per_second("TPU v6 lite") == 918e12
    assert 2 * peak_flops_per_second("TPU v3") == 123e12  # two devices make a chip
    for unknown in ("cpu", "", "NVIDIA H100", "NVIDIA H200 NVL", "TPU v5 lite pod"):
        assert peak_flops_per_second(unknown) is None


def test_utilization_is_the_share_of_the_peak_of_all_devices():
    flops = closed_form(12, 768, 50_304, 1024)
    assert model_flops_utilization(989e12 / flops, flops, "NVIDIA H200", 1) == pytest.approx(1.0)
    assert model_flops_utilization(463_000, flops, "NVIDIA H100 80GB HBM3", 1) == pytest.approx(0.3736, abs=1e-4)
    assert model_flops_utilization(463_000, flops, "NVIDIA H200", 8) == pytest.approx(0.3736 / 8, abs=1e-4)


def test_an_unknown_device_has_no_utilization():
    assert model_flops_utilization(463_000, 10**9) is None  # the CPU that runs the tests
    assert model_flops_utilization(463_000, 10**9, "a chip of next year", 4) is None


def test_devices_are_those_of_jax_where_not_given(monkeypatch):
    class Device:
        device_kind = "TPU v4"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert model_flops_utilization(275e12, 4, device_count=None) == pytest.approx(4 / jax.device_count())
