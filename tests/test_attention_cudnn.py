"""The real custom derivative with its rules for vmap and meshes, on CPU: only cuDNN's two primitives are stand-ins.

Its numbers are those of the contract in test_attention.py.
"""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax._src.cudnn.fused_attention_stablehlo as vendor
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import SINK as SINK64
from attention_oracle import assert_near, cudnn_stand_ins, normal, qkv
from attention_oracle import attend_by_cudnn as _attend
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from thinned import quick_and_slow

from orthojax.ops.attention import cudnn, dot_product_attention
from orthojax.ops.attention.cudnn import private_module

pytestmark = pytest.mark.usefixtures("forgotten")
B, N, H = 2, 4, 8
SINK = jnp.asarray(SINK64, jnp.float32)
LENGTHS = {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([6, 3], np.int32)}


@pytest.fixture(autouse=True)
def _stand_ins():
    with cudnn_stand_ins():
        yield


def _arrays(t=6, s=6, kv_heads=N, bias_shape=(1, 1, 1, 1), dtype=np.float32, seed=0):
    return [jnp.asarray(a, dtype) for a in (*qkv(t, s, kv_heads, seed=seed), normal(*bias_shape, seed=seed + 1))]


def results(attend, weights, *arrays):
    """Returns output and gradients."""
    output, pullback = jax.vjp(attend, *arrays)
    return output, pullback(jnp.asarray(weights, output.dtype))


MESHED = {
    "sink": {"normalizer": SINK},
    "one key head": {"normalizer": "softmax1", "kv_heads": 1},
    "lengths": {"normalizer": SINK, **LENGTHS},
    "bias of each": {"normalizer": "softmax1", "bias_shape": (B, N, 6, 6)},
    "bias for all sequences": {"normalizer": SINK, "bias_shape": (1, N, 6, 6), "kv_heads": 2},
}


def _meshed(case):
    """Returns a function and its arrays, sink and bias included."""
    options = dict(MESHED[case])
    has_bias = "bias_shape" in options
    arrays = _arrays(kv_heads=options.pop("kv_heads", N))[:3]
    arrays += [_arrays(bias_shape=options.pop("bias_shape", (1, 1, 1, 1)), seed=1)[3]]
    normalizer = options.pop("normalizer")
    learned = isinstance(normalizer, jax.Array)

    def attend(q, k, v, bias, sink):
        bias = bias if has_bias else None
        return _attend(q, k, v, bias, normalizer=sink if learned else normalizer, is_causal=True, **options)

    return attend, (*arrays, SINK)


def _placed(mesh, arrays, kind):
    """Cuts rows over both axes; bias and sink are whole if the compiler may choose, or else cut like their axes."""
    rows, bias = P("data", None, "tensor", None), arrays[3].shape
    keys, specs = rows if arrays[1].shape[2] > 1 else P("data"), [P(), P()]
    if kind == AxisType.Explicit:
        specs = [P("data" if bias[0] == B else None, "tensor" if bias[1] == N else None, None, None), P("tensor")]
    return jax.device_put(list(arrays), [NamedSharding(mesh, spec) for spec in (rows, keys, keys, *specs)])


QUICK = [("sink", AxisType.Auto), ("bias for all sequences", AxisType.Auto), ("one key head", AxisType.Explicit)]


@pytest.mark.parametrize(("case", "kind"), [
    pytest.param(case, kind, marks=[pytest.mark.slow] * ((case, kind) not in QUICK))
    for case in MESHED
    for kind in (AxisType.Auto, AxisType.Explicit)
])  # fmt: skip
def test_over_batch_and_heads_nothing_is_gathered(case, kind):
    attend, arrays = _meshed(case)
    weights = jnp.asarray(normal(*arrays[0].shape, seed=5), jnp.float32)
    both = jax.jit(partial(results, attend))
    expected = both(weights, *arrays)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    placed = _placed(mesh, arrays, kind)
    compiled = both.lower(jax.device_put(weights, placed[0].sharding), *placed).compile()
    got = compiled(jax.device_put(weights, placed[0].sharding), *placed)
    assert got[0].sharding.is_equivalent_to(placed[0].sharding, 4)
    assert_near(got, expected)
    assert not re.findall("all-gather|all-to-all|collective-permute", compiled.as_text())


def test_a_cut_unknown_to_the_kernel_is_gathered():
    arrays = _arrays(t=8, s=8, kv_heads=2)[:3]
    loss = lambda *arrays: jnp.sum(jnp.sin(_attend(*arrays, is_causal=True)))  # noqa: E731
    f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("data", None, "tensor"), P("data"), P("data"))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    assert_near(f(*placed), f(*arrays))


@pytest.mark.parametrize("case", quick_and_slow(["sink", "bias of each"], {"sink"}))
def test_inside_shard_map_parts_are_attended(case):
    attend, arrays = _meshed(case)
    weights = jnp.asarray(normal(*arrays[0].shape, seed=5), jnp.float32)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor", None)
    specs = (rows, rows, rows, P("data", "tensor") if case == "bias of each" else P(), P("tensor"))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
    got, expected = (jax.jit(partial(results, f))(weights, *arrays) for f in (mapped, attend))
    assert_near(got, expected)


@pytest.mark.parametrize("dtype", quick_and_slow([jnp.bfloat16, jnp.float16], {jnp.float16}))
def test_half_precision_is_near_the_definition(dtype):
    arrays = _arrays(t=8, s=8, kv_heads=2, bias_shape=(1, N, 8, 8), dtype=dtype)
    weights = normal(*arrays[0].shape, seed=5)

    def of(implementation, *arrays):
        def attend(q, k, v, bias, sink):
            options = {"is_causal": True, "implementation": implementation, **LENGTHS}
            return dot_product_attention(q, k, v, bias, normalizer=sink, **options)

        return jax.jit(partial(results, attend))(weights.astype(dtype), *arrays, SINK)

    got = of("cudnn", *arrays)
    assert [a.dtype for a in jax.tree.leaves(got)] == [dtype] * 5 + [jnp.float32]
    assert_near(got, of("xla", *(a.astype(jnp.float32) for a in arrays)), 2e-2)


def test_a_bias_beyond_float16_leaves_all_to_sinks():
    ones = jnp.ones((B, 6, N, H), jnp.float16)
    got = jax.jit(partial(results, _attend))(ones, ones, ones, ones, jnp.full((1, 1, 1, 6), -1e30))
    assert all((array == 0.0).all() for array in jax.tree.leaves(got))


@pytest.mark.parametrize(
    ("shared", "bias_batch"),
    [("bias", 1), ("lengths", B), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", B), ("key", 1)))],
)
def test_vmap_is_a_loop(shared, bias_batch):
    each = [_arrays(t=4, s=4, bias_shape=(bias_batch, N, 4, 4), seed=i) for i in range(3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*each, strict=True)]
    stacked += [jnp.stack([SINK + i for i in range(3)]), jnp.array([[3, 4], [1, 4], [0, 3]], jnp.int32)]
    names = ("query", "key", "value", "bias", "sink", "lengths")
    axes = tuple(None if name == shared else 0 for name in names)
    arguments = [array if axis == 0 else array[0] for array, axis in zip(stacked, axes, strict=True)]

    def loss(q, k, v, bias, sink, lengths):
        return jnp.sum(jnp.sin(_attend(q, k, v, bias, normalizer=sink, key_value_seq_lengths=lengths)))

    def total(*arguments):
        return jnp.sum(jax.vmap(loss, axes)(*arguments))

    f = jax.value_and_grad(loss, range(5))
    got = jax.jit(lambda *a: (jax.vmap(f, axes)(*a), jax.grad(total, range(5))(*a)))(*arguments)
    single = jax.jit(f)
    loop = [single(*(a if axis is None else a[i] for a, axis in zip(arguments, axes, strict=True))) for i in range(3)]
    loop = jax.tree.map(lambda *arrays: jnp.stack(arrays), *loop)
    summed = [a if axis == 0 else jnp.sum(a, 0) for a, axis in zip(loop[1], axes, strict=False)]
    assert_near(got, (loop, summed))


# What is compiled for CUDA, on a machine without it.

HALF = [jnp.asarray(a, jnp.bfloat16) for a in _arrays(kv_heads=2, bias_shape=(1, N, 6, 6))]


def _for_cuda(f, *arrays):
    """Lowers a program for CUDA; returns the names of its kernels and its text."""
    text = jax.jit(f).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"__cudnn\$\w+", text), text


def _cudnn(q, k, v, bias=None, **options):
    return dot_product_attention(q, k, v, bias, is_causal=True, implementation="cudnn", **options)


@pytest.mark.parametrize("normalizer", ["softmax1", "softmax", "sink"])
def test_one_kernel_forward_and_one_backward(normalizer):
    normalizer = SINK if normalizer == "sink" else normalizer
    f = lambda q, k, v: jnp.sum(_cudnn(q, k, v, normalizer=normalizer).astype(jnp.float32))  # noqa: E731
    kernels, text = _for_cuda(f, *HALF[:3])
    assert kernels == ["__cudnn$fmhaSoftmax"]
    kernels, _ = _for_cuda(jax.grad(f, (0, 1, 2)), *HALF[:3])
    assert kernels == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert ("exponential" in text or "logistic" in text) == (normalizer != "softmax")  # no gate without a sink


@pytest.mark.parametrize("normalizer", ["softmax1", "softmax"])
def test_a_window_to_the_left_is_compiled_as_causal(normalizer):
    """The kernel takes the left side alone: without the causal mask every query would see all later keys."""
    attend = partial(dot_product_attention, implementation="cudnn", local_window_size=(3, 0), normalizer=normalizer)
    _, text = _for_cuda(jax.grad(lambda *arrays: jnp.sum(attend(*arrays).astype(jnp.float32))), *HALF[:3])
    text = text.replace("\\22", "")  # quotation marks
    assert re.findall(r"mask_type: (\w+)", text) == ["CAUSAL"] * 2
    assert re.findall(r"sliding_window_length: (\d+)", text) == ["4"] * 2  # its own position is one of them


@pytest.mark.parametrize(("wanted", "mask", "has_gradient"), [(0, False, False), (3, False, True), (0, True, False)])
def test_the_bias_has_a_gradient_if_wanted(wanted, mask, has_gradient):
    def loss(q, k, v, bias):
        options = {"mask": jnp.ones((6, 6), bool)} if mask else {"bias": bias}
        return jnp.sum(_cudnn(q, k, v, **options).astype(jnp.float32))

    kernels, text = _for_cuda(jax.grad(loss, wanted), *HALF)
    assert kernels == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    (line,) = (line for line in text.splitlines() if "BiasSoftmaxBackward" in line)
    results = re.findall(r"tensor<[^>]*>", line.rsplit("->", 1)[1])
    assert len(results) == 4 + has_gradient  # query, key, value, workspace


@pytest.mark.parametrize("name", ["fwd_p_wrapper", "bwd_p_wrapper", "MaskType"])
def test_private_names_of_another_form_are_said(name, monkeypatch):
    def bind(*arrays, name_of_a_later_jax, **parameters):
        raise AssertionError

    name = name if name == "MaskType" else f"_dot_product_attention_{name}"
    monkeypatch.setattr(vendor, name, SimpleNamespace(bind=bind))
    monkeypatch.setattr(cudnn, "private_module", private_module.__wrapped__)  # what is remembered is of another jax
    with pytest.raises(NotImplementedError, match="keeps its cuDNN primitives"):
        _cudnn(*HALF[:3])
    with jax.default_device("gpu"), pytest.warns(UserWarning, match="falls back.*keeps its cuDNN primitives"):
        jax.eval_shape(partial(dot_product_attention, is_causal=True), *HALF[:3])


def test_on_a_cpu_the_kernel_is_unavailable():
    assert "NVIDIA GPU" in cudnn.unavailable()
