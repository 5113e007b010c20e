"""The TPU kernel without a TPU: its numbers in interpret mode, its structure by lowering for TPUs."""

import re
import runpy
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_near, attend_by_splash, check_definition, normal, qkv
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from thinned import quick_and_slow

from orthojax.ops import dot_product_attention
from orthojax.ops.attention import splash
from orthojax.ops.attention.inputs import prepare_inputs

SINKS = np.array([0.3, -1.0, 2.0, -np.inf])
ENDS = {"query_seq_lengths": np.array([3, 100]), "key_value_seq_lengths": np.array([70, 0])}
CASES = {
    # name: (T, S, key-value heads, normalizer, options)
    "softmax-1, causal": (128, 128, 4, "softmax1", {"is_causal": True}),
    "sinks, causal window, both lengths": (130, 130, 1, SINKS, {"is_causal": True, "local_window_size": (60, 5),
                                                                **ENDS}),
    "softmax-1, odd lengths, padded keys": (130, 260, 1, "softmax1", {"scale": 1.3,
                                                                      "key_value_seq_lengths": np.array([259, 1])}),
    "softmax_n, window, rows without keys": (130, 100, 2, 0.5, {"local_window_size": (9, 3)}),
    "softmax-1, wide values, soft cap, window": (130, 130, 2, "softmax1", {
        "local_window_size": (20, 0), "logits_soft_cap": 1.5, "scale": 2.0, "value": normal(2, 130, 2, 70)}),
    "sinks, one query": (1, 5, 2, SINKS, {}),
    "softmax, plain": (128, 256, 2, "softmax", {}),
    "sinks, segments, both lengths": (130, 130, 2, SINKS, {"is_causal": True, **ENDS, "segment_ids": (
        np.arange(130) // np.array([[50], [33]]))}),
    "softmax-1, segments of queries and keys": (130, 100, 2, "softmax1", {"segment_ids": (
        np.arange(130) // np.array([[50], [33]]), np.arange(100) // np.array([[40], [150]]))}),
    "softmax_n with n = 0, both lengths": (130, 100, 2, 0.0, ENDS),
}  # fmt: skip
slow = pytest.mark.slow


@pytest.mark.parametrize("case", quick_and_slow(CASES, list(CASES)[2:]))
def test_output_and_gradients_are_the_definition(case):
    T, S, kv_heads, normalizer, options = CASES[case]
    query, key, value = qkv(T, S, kv_heads)
    arrays, options = (query, key, options.get("value", value)), {n: o for n, o in options.items() if n != "value"}
    tolerances = {"rtol": 1e-5, "atol": 2e-6, "slope_tolerance": 1e-5}
    _, gradients = check_definition(attend_by_splash, arrays, normalizer, **tolerances, **options)
    if isinstance(normalizer, np.ndarray):
        assert gradients[3][3] == 0.0  # a head without a sink


BATCH = (*(jnp.asarray(a, jnp.float32) for a in qkv(128, 128, 2, batch=8)), jnp.arange(8, dtype=jnp.int32) * 16)


def causal(q, k, v, ends):
    return attend_by_splash(q, k, v, is_causal=True, key_value_seq_lengths=ends)


def step(*arguments, function=causal):
    """Returns loss, output and gradients."""

    def loss(*arguments):
        out = function(*arguments)
        return jnp.sum(out * out), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)


@pytest.fixture(scope="module")
def unsharded():
    return jax.jit(step)(*BATCH)


def auto_mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@slow
def test_heads_that_no_axis_divides_are_right(unsharded):
    mesh = auto_mesh((2, 4), ("data", "tensor"))  # 4 query heads, 2 key-value heads, 4 shards
    query, rows = (NamedSharding(mesh, spec) for spec in (P("data", None, "tensor"), P("data")))
    with jax.set_mesh(mesh):
        assert_near(jax.jit(step, in_shardings=(query, rows, rows, rows))(*BATCH), unsharded)


@slow
@pytest.mark.parametrize("manual", [("x", "y"), ("x",)])
def test_inside_a_shard_map_parts_are_attended(manual, unsharded):
    heads = P("x", None, "y") if "y" in manual else P("x")
    inside = jax.shard_map(
        causal, mesh=auto_mesh((4, 2), ("x", "y")), in_specs=(heads, heads, heads, P("x")), out_specs=heads,
        axis_names=set(manual), check_vma=False,
    )  # fmt: skip
    assert_near(jax.jit(lambda *a: step(*a, function=inside))(*BATCH), unsharded)


SHAPES = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))


def kernels(function, shapes=SHAPES, **options):
    """Lowers a program for TPUs; returns its kernels and its text."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = jax.jit(function, **options).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()
    return Counter(re.findall(r'kernel_name = "(splash_\w+?)"', text)), text


def loss(q, k, v, **options):
    return jnp.sum(dot_product_attention(q, k, v, implementation="splash", **options).astype(jnp.float32))


def gradients(q, k, v):
    return jax.grad(lambda *arrays: loss(*arrays, is_causal=True), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("width", [8, 80, 256])
def test_forward_and_backward_are_one_kernel_each(width):
    found, _ = kernels(gradients, [(*shape[:-1], width) for shape in SHAPES])
    assert found == {"splash_mha_fwd_residuals": 1, "splash_mha_dkv_no_residuals": 1}
    assert kernels(loss)[0] == {"splash_mha_fwd_no_residuals": 1}


def test_long_sequences_have_no_mask_of_pairs():
    found, text = kernels(gradients, [(1, 8192, heads, 64) for heads in (4, 2, 2)])
    assert found.total() == 2
    assert len(text) < 300_000  # a boolean for each pair would be 67 million
    assert "8192x8192" not in text


def test_remat_that_keeps_attn_out_runs_attention_once():
    def forward_kernels(policy):
        def block(x, w):
            y = (x @ w).reshape(8, 128, 2, 64)
            out = dot_product_attention(y, y, y, is_causal=True, implementation="splash")
            return x + out.reshape(x.shape), None

        def total(x, w):
            y = jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, w)[0]
            return jnp.sum(y.astype(jnp.float32))

        return kernels(jax.grad(total, (0, 1)), [(8, 128, 128), (3, 128, 128)])[0]["splash_mha_fwd_residuals"]

    policies = jax.checkpoint_policies
    with jax.set_mesh(auto_mesh((4, 2), ("data", "tensor"))):
        assert forward_kernels(policies.save_only_these_names("attn_out")) == 1
        assert forward_kernels(policies.nothing_saveable) == 2


def test_a_kernel_of_another_form_is_named(monkeypatch):
    def problem():
        return runpy.run_path(splash.__file__)["unsupported"](prepare_inputs(*BATCH[:3], normalizer="softmax1"))

    assert problem() == ""
    monkeypatch.setattr(splash.kernels, "attention_reference", lambda mask, q, k, v, segment_ids: None)
    assert "has no sinks" in problem()
    name = splash.kernels.__name__
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])
    assert "has no splash kernel" in problem()


def test_an_argument_before_the_sinks_changes_nothing(monkeypatch, unsharded):
    original = splash.kernels._splash_attention

    def of_a_later_jax(a, b, c, q, k, v, segment_ids=None, new=None, sinks=None, **options):
        return original(a, b, c, q, k, v, segment_ids, sinks, **options)

    monkeypatch.setattr(splash.kernels, "_splash_attention", of_a_later_jax)
    assert_near(jax.jit(lambda *arguments: step(*arguments))(*BATCH), unsharded)
