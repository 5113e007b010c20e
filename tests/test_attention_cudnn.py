"""The real custom derivative with its rules for vmap and meshes, on CPU: only cuDNN's two primitives are stand-ins.

Its numbers are those of the contract in test_attention.py.
"""

import ctypes
import re
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import SINK as SINK64
from attention_oracle import attend_by_cudnn as _attend
from attention_oracle import check_definition, cudnn_stand_ins, normal, qkv
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from thinned import quick_and_slow

from orthojax.ops.attention import cudnn, cudnn_kernel, dot_product_attention, xla
from orthojax.ops.attention.dot_product import prepare_inputs

B, N, H = 2, 4, 8
SINK = jnp.asarray(SINK64, jnp.float32)
LENGTHS = {"query_seq_lengths": np.array([4, 6], np.int32), "key_value_seq_lengths": np.array([6, 3], np.int32)}
NO_KEYS = {"key_value_seq_lengths": np.array([0, 5], np.int32)}
TOLERANCES = {"rtol": 1e-5, "atol": 1e-5, "slope_tolerance": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def _forget_what_was_compiled():
    yield
    jax.clear_caches()


@pytest.fixture
def kernels():
    with cudnn_stand_ins():
        yield


def _arrays(t=6, s=6, kv_heads=N, bias_shape=(1, 1, 1, 1), dtype=np.float32, seed=0):
    return [jnp.asarray(a, dtype) for a in (*qkv(t, s, kv_heads, seed=seed), normal(*bias_shape, seed=seed + 1))]


def results(attend, weights, *arrays):
    """Output and gradients."""
    output, pullback = jax.vjp(attend, *arrays)
    return output, pullback(jnp.asarray(weights, output.dtype))


def assert_near(found, expected, tolerance=1e-5):
    """Largest differences relative to the largest number of each array, or to 1."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() < tolerance * max(1.0, np.abs(b).max())


# Meshes.

MESHED = {
    "sink": {"normalizer": SINK},
    "softmax1": {"normalizer": "softmax1", "kv_heads": 2},
    "one key head": {"normalizer": "softmax1", "kv_heads": 1},
    "lengths": {"normalizer": SINK, **LENGTHS},
    "one length": {"normalizer": "softmax1", "key_value_seq_lengths": jnp.array([6, 3], jnp.int32)},
    "bias of each": {"normalizer": "softmax1", "bias_shape": (B, N, 6, 6)},
    "bias for all sequences": {"normalizer": SINK, "bias_shape": (1, N, 6, 6), "kv_heads": 2},
    "bias for all": {"normalizer": "softmax", "bias_shape": (1, 1, 6, 6)},
}


def _meshed(case):
    """Arrays and a function of them all, sink and bias included."""
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
    """Rows cut over both axes. Bias and sink are whole where the compiler may choose, or else cut like their axes."""
    rows, bias = P("data", None, "tensor", None), arrays[3].shape
    keys, specs = rows if arrays[1].shape[2] > 1 else P("data"), [P(), P()]
    if kind == AxisType.Explicit:
        specs = [P("data" if bias[0] == B else None, "tensor" if bias[1] == N else None, None, None), P("tensor")]
    return jax.device_put(list(arrays), [NamedSharding(mesh, spec) for spec in (rows, keys, keys, *specs)])


QUICK = [("sink", AxisType.Auto), ("bias for all sequences", AxisType.Auto), ("one key head", AxisType.Explicit)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=[pytest.mark.slow] * ((case, kind) not in QUICK))
        for case in MESHED
        for kind in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_over_a_mesh_of_batch_and_heads_nothing_is_gathered(case, kind):
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "spec", quick_and_slow([P("data", None, "tensor"), P(None, ("data", "tensor"))], {P(None, ("data", "tensor"))})
)
def test_a_cut_that_the_kernel_cannot_have_is_gathered(spec):
    arrays = _arrays(t=8, s=8, kv_heads=2)[:3]
    loss = lambda *arrays: jnp.sum(jnp.sin(_attend(*arrays, is_causal=True)))  # noqa: E731
    f = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = (spec, P("data"), P("data"))
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    assert_near(f(*placed), f(*arrays))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", quick_and_slow(["sink", "bias of each"], {"sink"}))
def test_inside_shard_map_it_is_attention_of_the_parts(case):
    attend, arrays = _meshed(case)
    weights = jnp.asarray(normal(*arrays[0].shape, seed=5), jnp.float32)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor", None)
    specs = (rows, rows, rows, P("data", "tensor") if case == "bias of each" else P(), P("tensor"))
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
    got, expected = (jax.jit(partial(results, f))(weights, *arrays) for f in (mapped, attend))
    assert_near(got, expected)


# Precision and extremes.


def naive(q, k, v, normalizer="softmax1", is_causal=False):
    """The gate with plain differentiation."""
    del normalizer
    output, lse = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, return_residual=True)
    return output * jax.nn.sigmoid(lse)[..., None]


def test_the_gate_with_plain_differentiation_fails_the_check_of_gradients():
    # The output and the value's gradient are right, so nobody would notice.
    check_definition(naive, qkv(6, 6), "softmax1", **TOLERANCES, is_causal=True, gradients=False)
    with pytest.raises(AssertionError):
        check_definition(naive, qkv(6, 6), "softmax1", **(TOLERANCES | {"slope_tolerance": 0.01}), is_causal=True)


@pytest.mark.usefixtures("kernels")
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


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", quick_and_slow([jnp.bfloat16, jnp.float16], {jnp.bfloat16}))
def test_a_bias_beyond_what_the_dtype_may_add_leaves_all_to_the_sink(dtype):
    ones = jnp.ones((B, 6, N, H), dtype)
    got = jax.jit(partial(results, _attend))(ones, ones, ones, ones, jnp.full((1, 1, 1, 6), -1e30))
    assert all((array == 0.0).all() for array in jax.tree.leaves(got))


def test_a_wider_bias_is_taken_under_strict_promotion():
    ones, bias = jnp.ones((B, 6, N, H), jnp.bfloat16), jnp.zeros((1, 1, 1, 6))
    with jax.numpy_dtype_promotion("strict"):
        output, gradients = jax.eval_shape(partial(results, _attend), ones, ones, ones, ones, bias)
    assert [output.dtype, *(x.dtype for x in gradients)] == [jnp.bfloat16] * 4 + [jnp.float32]


@pytest.mark.usefixtures("kernels")
def test_numbers_that_are_not_are_not_hidden():
    q, k, v, _ = _arrays()
    got = jax.jit(lambda q: _attend(q, k, v, **LENGTHS))(q.at[0, 3, 1, 0].set(jnp.nan))
    assert jnp.isnan(got[0, 3, 1]).all()
    assert jnp.isfinite(got[1]).all()


# vmap.


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("shared", "bias_batch"),
    [
        ("bias", 1),
        ("lengths", B),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", B), ("query", B), ("bias", B), ("key", 1))),
    ],
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
    """The names of the kernels in what is lowered, and its text."""
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
    assert ("exponential" in text or "logistic" in text) == (normalizer != "softmax")  # no gate where there is no sink


@pytest.mark.parametrize(("wanted", "mask", "has_gradient"), [(0, False, False), (3, False, True), (0, True, False)])
def test_the_kernel_makes_a_gradient_of_the_bias_only_where_one_is_wanted(wanted, mask, has_gradient):
    def loss(q, k, v, bias):
        options = {"mask": jnp.ones((6, 6), bool)} if mask else {"bias": bias}
        return jnp.sum(_cudnn(q, k, v, **options).astype(jnp.float32))

    kernels, text = _for_cuda(jax.grad(loss, wanted), *HALF)
    assert kernels == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    (line,) = (line for line in text.splitlines() if "BiasSoftmaxBackward" in line)
    results = re.findall(r"tensor<[^>]*>", line.rsplit("->", 1)[1])
    assert len(results) == 4 + has_gradient  # query, key, value, workspace


def test_a_second_derivative_is_refused_in_words():
    q, k, v, _ = HALF

    def loss(q):
        return jnp.sum(_cudnn(q, k, v).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="'cudnn' has no second derivative"):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(loss)(q).astype(jnp.float32))), q)


# What is refused.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"normalizer": "relu"}, "'relu'.*allowed: 'softmax1'"),
        ({"scale": jnp.float32(0.5)}, "scale must be a number"),
        ({"dtype": jnp.float32}, "be bfloat16 or all float16, got float32"),
        ({"value_dtype": jnp.float16}, "all be bfloat16 or all float16, got bfloat16, float16"),
        ({"width": 12}, "multiple of 8 up to 256, got 12"),
        ({"width": 264}, "multiple of 8 up to 256, got 264"),
        ({"length": 5, "mask": jnp.ones((5, 5), bool)}, "must be even, got 5 and 5"),
        ({"length": 5, "bias": jnp.ones((5, 5))}, "must be even, got 5 and 5"),
        ({"local_window_size": 2}, r"\(left, 0\) or causal, got \(2, 2\)"),
        ({"local_window_size": (2, 0), "mask": jnp.ones((6, 6), bool)}, "window cannot be combined"),
        ({"local_window_size": (2, 0), "keys": 4}, "at least as many keys as queries, got 4 and 6"),
        ({"normalizer": 0.0, "mask": jnp.ones((6, 6), bool)}, "n = 0"),
        ({"normalizer": 0, "key_value_seq_lengths": jnp.array([1, 2])}, "n = 0"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(options, problem):
    options = dict(options)
    dtype, width = options.pop("dtype", jnp.bfloat16), options.pop("width", 8)
    value_dtype, length = options.pop("value_dtype", dtype), options.pop("length", 6)
    q, v = jnp.zeros((B, length, N, width), dtype), jnp.zeros((B, options.pop("keys", length), N, width), value_dtype)
    with pytest.raises(NotImplementedError, match=problem):
        dot_product_attention(q, v.astype(dtype), v, implementation="cudnn", **options)


def test_explicit_axes_that_the_kernel_cannot_be_cut_by_are_refused():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    q, k = jnp.zeros((4, 8, 8, 8), jnp.bfloat16), jnp.zeros((4, 8, 2, 8), jnp.bfloat16)
    for spec, problem in ((P(None, "x"), "only batch and heads"), (P(None, None, "x"), r"key-value heads \(2\)")):
        placed = jax.device_put(q, NamedSharding(mesh, spec))
        with pytest.raises(NotImplementedError, match=problem):
            dot_product_attention(placed, k, k, implementation="cudnn")


# The form of public functions alone, by the other implementation of the same public function.


@pytest.mark.parametrize(
    ("options", "normalizer"),
    [
        ({}, "softmax1"),
        ({"is_causal": True, **LENGTHS, **NO_KEYS}, "softmax1"),
        ({"is_causal": True}, 2.5),
        ({"s": 9, "scale": 0.7}, "sink"),
        ({"t": 7, "s": 8}, "softmax1"),
        ({"t": 9, "s": 6, "is_causal": True}, "softmax1"),
        ({"t": 6, "s": 8, "is_causal": True}, "softmax1"),
        ({"t": 7, "s": 9, "is_causal": True}, "softmax"),
        ({"t": 7, "s": 9, "query_seq_lengths": np.array([4, 7], np.int32)}, "softmax1"),
        ({"is_causal": True, **LENGTHS, **NO_KEYS}, "sink"),
        pytest.param({**LENGTHS, **NO_KEYS}, "sink", marks=pytest.mark.slow),
    ],
)
def test_the_public_form_is_the_same_attention_in_even_lengths(options, normalizer, monkeypatch):
    options, plain = dict(options), jax.nn.dot_product_attention
    arrays = qkv(options.pop("t", 6), options.pop("s", 6), 2)
    sink = np.array([0.3, -1.0, 4.3, 0.0])

    def even_only(query, key, value, *more, **options):  # as jax.nn's cuDNN in training
        assert query.shape[1] % 2 == key.shape[1] % 2 == 0
        return plain(query, key, value, *more, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even_only)

    def attend(q, k, v, normalizer, **options):
        return cudnn.with_sink_key(prepare_inputs(q, k, v, normalizer=normalizer, **options), "xla")

    check_definition(attend, arrays, sink if normalizer == "sink" else normalizer, **TOLERANCES, **options)


def test_softmax_in_the_public_form_is_jax_nn_with_all_options():
    mask, lengths = jnp.tri(6, dtype=bool), {name: jnp.asarray(x) for name, x in (LENGTHS | NO_KEYS).items()}
    options = {"normalizer": "softmax", "local_window_size": (2, 0), **lengths}
    inputs = prepare_inputs(*_arrays(kv_heads=2)[:3], jnp.asarray(normal(6, 6), jnp.float32), mask, **options)
    assert_near(*(jax.jit(f)() for f in (lambda: cudnn.with_sink_key(inputs, "xla"), lambda: xla.attend(inputs))))


def test_a_sink_logit_in_half_precision_is_not_rounded_to_it():
    zeros, logit = jnp.zeros((1, 4, 1, H), jnp.bfloat16), 6.99  # bfloat16 has 6.96875 and 7
    inputs = prepare_inputs(zeros, zeros, zeros + 1, normalizer=jnp.array([logit]))
    got = jax.jit(lambda: cudnn.with_sink_key(inputs, "xla"))()
    np.testing.assert_allclose(np.asarray(got, np.float64), 4 / (4 + np.exp(logit)), rtol=5e-3)


@pytest.fixture
def no_private_module(monkeypatch):
    monkeypatch.setattr(cudnn, "private_module", lambda: None)


@pytest.mark.usefixtures("no_private_module")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mask": jnp.ones((6, 6), bool)}, "bias or a mask needs 'softmax'"),
        ({"bias": jnp.ones((6, 6))}, "bias or a mask needs 'softmax'"),
        ({"local_window_size": (2, 0)}, "window needs 'softmax'"),
        ({"width": 256, "normalizer": 2.0}, "heads of at most 248, got 256"),
        ({"width": 256, "normalizer": SINK}, "heads of at most 248, got 256"),
        ({"normalizer": "relu"}, "'relu'"),
        ({}, "needs an NVIDIA GPU"),
        ({"normalizer": "softmax"}, "needs an NVIDIA GPU"),
    ],
)
def test_without_the_private_module_the_public_form_takes_over_or_refuses(options, problem):
    options = dict(options)
    q = jnp.zeros((B, 6, N, options.pop("width", H)), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=problem):
        dot_product_attention(q, q, q, implementation="cudnn", **options)


def test_a_private_module_that_has_changed_is_not_used(monkeypatch):
    real = cudnn_kernel.private_module()
    assert real is not None  # the versions of JAX that are supported have it
    names = [name for name in dir(real) if not name.startswith("__")]
    for change in ({"MaskType": None}, {"_dot_product_attention_bwd_p_wrapper": None}, {"AttentionLayout": None}):
        changed = types.SimpleNamespace(**{name: getattr(real, name) for name in names} | change)
        monkeypatch.setattr(cudnn_kernel.importlib, "import_module", lambda name, changed=changed: changed)
        assert cudnn_kernel.private_module.__wrapped__() is None


# The probe. What it asks of the machine is two functions: which GPU there is, and where the wheels' libraries are.

_probe, _preload_builtins = cudnn.unavailable.__wrapped__, cudnn.preload_builtins.__wrapped__  # without their memory


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability, attend=, folders=): such a GPU, on which cuDNN's attention is that function."""

    def change(capability, attend=xla.attend, folders=()):
        monkeypatch.setattr(cudnn, "compute_capability", lambda: capability)
        monkeypatch.setattr(cudnn, "_library_folders", lambda: list(folders))
        monkeypatch.setattr(cudnn, "preload_builtins", _preload_builtins)
        monkeypatch.setattr(cudnn, "attend", attend)

    return change


def test_here_the_kernel_is_unavailable():
    assert cudnn.unavailable() == "cuDNN needs an NVIDIA GPU, and the default backend is 'cpu'"
    assert cudnn.widest_head() == 256


@pytest.mark.parametrize(
    ("version", "capability", "found", "widest"),
    [("cuda 13000", "9.0", (9, 0), 256), ("cuda 12080", "8.6", (8, 6), 128), ("rocm 60200", "gfx942", None, 256)],
)
def test_a_gpu_is_known_by_its_platform(monkeypatch, version, capability, found, widest):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(client=client, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert cudnn.compute_capability() == found
    assert cudnn.widest_head() == widest
    if found is None:
        assert "needs an NVIDIA GPU" in _probe()


def test_an_old_gpu_is_refused_without_trying(gpu):
    gpu((7, 5), lambda inputs: 1 / 0)
    assert _probe() == "cuDNN's attention needs compute capability 8.0, got 7.5"


def test_a_kernel_that_is_wrong_in_its_gradients_alone_is_found(gpu):
    by_parts = lambda inputs: naive(inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal)  # noqa: E731
    for wrong in (by_parts, lambda inputs: xla.attend(inputs) * jnp.nan):
        gpu((9, 0), wrong)
        assert "is wrong: it differs" in _probe()


def test_a_kernel_that_fails_comes_with_advice(gpu, tmp_path):
    def fails(inputs):
        raise RuntimeError("No valid engine configs\nand many more lines")

    gpu((9, 0), fails)
    assert _probe() == (
        "cuDNN's attention fails: RuntimeError: No valid engine configs. With CUDA 13, cuDNN needs libnvrtc-builtins "
        "on the path of the loader (LD_LIBRARY_PATH)"
    )
    (tmp_path / "libnvrtc-builtins.so.13.0").write_text("not a library")
    gpu((9, 0), fails, [tmp_path])
    for part in (f"LD_LIBRARY_PATH={tmp_path}:$LD_LIBRARY_PATH", "libnvrtc-builtins.so.13.0"):  # what did not load
        assert part in _probe()


def test_the_builtins_are_loaded_before_the_kernel_is_tried(gpu, monkeypatch, tmp_path):
    done = []
    (tmp_path / "libnvrtc-builtins.so.13.1").touch()
    (tmp_path / "libnvrtc.so.13").touch()
    gpu((9, 0), lambda inputs: done.append("tried") or xla.attend(inputs), [tmp_path])
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: done.append((name, mode)))
    assert _probe() == ""
    assert done[0] == (str(tmp_path / "libnvrtc-builtins.so.13.1"), ctypes.RTLD_GLOBAL)
    assert set(done[1:]) == {"tried"}
    gpu(None, folders=[tmp_path])
    assert cudnn.preload_builtins() == ""
    assert len([entry for entry in done if entry != "tried"]) == 1  # nothing is loaded without a GPU


def test_the_folders_of_the_wheels_are_found_where_python_finds_packages(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    assert folder not in cudnn._library_folders()
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert folder in cudnn._library_folders()


def test_the_probe_runs_while_another_function_is_traced(gpu):
    gpu((9, 0))
    seen = []

    def probing(x):
        seen.append(_probe())
        return 2 * x

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    jax.jit(jax.vmap(jax.grad(lambda x: probing(x))))(jnp.ones(4))
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(probing, out_specs=P("x")))(jax.sharding.reshard(jnp.ones(4), P("x")))
    assert seen
    assert set(seen) == {""}
