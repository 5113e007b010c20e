"""What only an NVIDIA GPU can show; skipped without one: JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_gpu.py."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_oracle import SINK, check_definition, normal, qkv
from test_chunked_cross_entropy import chunked, numpy_loss, problem, relative_error

from orthojax.config import Config, DataConfig, OptimConfig, TrainConfig
from orthojax.model import gpt2
from orthojax.ops import dot_product_attention
from orthojax.optim import Rotation, orthoadam
from orthojax.train.step import TrainState, init_state, make_train_step

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")

LENGTHS = {"query_seq_lengths": np.array([100, 256], np.int32), "key_value_seq_lengths": np.array([256, 40], np.int32)}
CASES = {
    "softmax": ("softmax", {"is_causal": True}),
    "softmax1": ("softmax1", {"is_causal": True}),
    "softmax1, not causal": ("softmax1", {}),
    "softmax1, grouped heads": ("softmax1", {"is_causal": True, "kv_heads": 2}),
    "softmax1, wide heads": ("softmax1", {"is_causal": True, "width": 128}),
    "softmax1, odd length": ("softmax1", {"is_causal": True, "length": 101}),
    "softmax1, window": ("softmax1", {"is_causal": True, "local_window_size": (32, 0)}),
    "softmax1, lengths": ("softmax1", LENGTHS),
    "softmax1, mask": ("softmax1", {"mask": np.random.default_rng(0).random((2, 1, 256, 256)) < 0.5}),
    "softmax1, bias": ("softmax1", {"is_causal": True, "bias_shape": (1, 4, 256, 256)}),
    "softmax_n": (0.5, {"is_causal": True}),
    "learned sinks": (SINK, {"is_causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_cudnn_is_the_definition(case):
    """Against float64 NumPy and its slopes, on inputs that bfloat16 holds exactly."""
    normalizer, options = CASES[case]
    options = dict(options)
    length, width = options.pop("length", 256), options.pop("width", 64)
    arrays = qkv(length, length, options.pop("kv_heads", 4), width=width)
    if shape := options.pop("bias_shape", None):
        arrays.append(normal(*shape, seed=5))
    arrays = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in arrays]

    def attend(*arrays, **options):
        halves = [array.astype(jnp.bfloat16) for array in arrays]
        return dot_product_attention(*halves, implementation="cudnn", **options).astype(jnp.float32)

    check_definition(attend, arrays, normalizer, rtol=2e-2, atol=2e-2, slope_tolerance=1e-2, **options)


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
@pytest.mark.parametrize("case", ["length", "mask", "low", "bias"])
def test_what_has_made_nan_in_other_kernels(normalizer, case):
    """Lengths that are odd multiples of 64, masks, normalizers below the least float32, a bias of another dtype."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in qkv(192, 192, width=64))
    if case == "low":  # logits of about -200
        q, k = jnp.full_like(q, 5.0), jnp.full_like(k, -5.0) + k
    options = {"is_causal": True, "normalizer": normalizer}
    if case == "mask":
        options["mask"] = jnp.asarray(np.random.default_rng(0).random((2, 1, 192, 192)) < 0.5)
    if case == "bias":
        options["bias"] = jnp.asarray(normal(1, 4, 192, 192, seed=5), jnp.float32)

    def loss(implementation, *arrays):
        return jnp.sum(dot_product_attention(*arrays, implementation=implementation, **options).astype(jnp.float32))

    slopes = [jax.grad(loss, argnums=(1, 2, 3))(name, q, k, v) for name in ("cudnn", "xla")]
    for got, wanted in zip(*slopes, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), wanted.astype(jnp.float32), rtol=5e-2, atol=5e-2)


def test_device_picks_cudnn_but_not_for_float32():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in qkv(256, 256, width=64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True)).lower(q, k, v)
        assert "fmha" in program.as_text()
        with pytest.raises(UserWarning, match="falls back"):
            dot_product_attention(*(a.astype(jnp.float32) for a in (q, k, v)), is_causal=True)


@pytest.mark.parametrize("logits_dtype", [None, "bfloat16"])
def test_the_loss_of_chunks_is_that_of_float64(logits_dtype):
    """Products of bfloat16 numbers, summed in float32: only logits in bfloat16 are rounded, by up to 2^-9."""
    operands = problem(4, 96, 64, 5000, dtype=jnp.bfloat16)
    loss, dx, dW = chunked(*operands, 32, logits_dtype=logits_dtype)
    expected = numpy_loss(*operands)
    assert relative_error(loss, expected[0]) < (1e-5 if logits_dtype is None else 2e-3)
    assert relative_error(dx, expected[1]) < (2**-7 if logits_dtype is None else 2**-4)
    assert relative_error(dW, expected[2]) < (2**-8 if logits_dtype is None else 2**-4)


@pytest.mark.parametrize("kind", ["hadamard", "haar", "dct"])
def test_orthoadam_steps_as_on_a_cpu(kind):
    """To 2%: products of the rotation are TF32, and Adam's first updates are signs, even of gradients near zero.

    On an H200 it was 0.65% (hadamard), 0.74% (haar) and under 0.5% (dct).
    """
    shapes = {"kernel": (512, 2048), "stack": (3, 512, 512), "scale": (512,)}
    params = {name: jnp.asarray(normal(*shape, seed=i), jnp.float32) for i, (name, shape) in enumerate(shapes.items())}
    optimizer = orthoadam(1e-2, rotation=Rotation(kind=kind, axes=512))

    def steps(params):
        state = optimizer.init(params)
        for i in range(3):
            grads = jax.tree.map(lambda p, i=i: jnp.sin((3 + i) * p), params)
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    here, there = jax.devices("cpu")[0], jax.devices()[0]
    expected, found = (jax.device_get(jax.jit(steps)(jax.device_put(params, at))) for at in (here, there))
    for name, before in params.items():
        moved = np.linalg.norm(expected[name] - np.asarray(before))
        assert np.linalg.norm(found[name] - expected[name]) < 2e-2 * moved


@pytest.mark.parametrize("normalizer", ["softmax", "softmax1"])
def test_training_is_that_of_a_cpu(normalizer):
    """The first losses in bfloat16 with cuDNN are those in float32 on the CPU, to what bfloat16 holds."""
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "d_mlp": 1024, "vocab_size": 512, "max_length": 256}
    model = gpt2("tiny", **sizes, norm="rmsnorm_single", use_bias=False, normalizer=normalizer, dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, 512, (8, 257)).astype(np.int32)

    def losses(model, place):
        config = Config(
            model=model,
            optim=OptimConfig(learning_rate=1e-3, warmup_steps=2),
            data=DataConfig(sequence_length=256),
            train=TrainConfig(steps=10, batch_size=8),
        )
        with jax.default_device(place):
            state, found = init_state(config), []
            assert isinstance(state, TrainState)
            step = make_train_step(config)
            for _ in range(5):
                state, reported = step(state, jnp.asarray(tokens))
                found.append(float(reported.loss_sum_nats) / float(reported.target_tokens))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = losses(model, jax.devices()[0])
    expected = losses(dataclasses.replace(model, dtype="float32"), jax.devices("cpu")[0])
    np.testing.assert_allclose(found, expected, rtol=5e-3)
    assert expected[-1] < expected[0]
