"""The TPU kernel without a TPU: its numbers in interpret mode, its structure by lowering for TPUs."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import check_definition, normal, qkv, reference, visible
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.ops import dot_product_attention
from orthojax.ops.attention import forbid_fallback, splash, splash_kernel
from orthojax.ops.attention.dot_product import prepare_inputs

SINKS = np.array([0.3, -1.0, 2.0, -np.inf])
N = len(SINKS)
_attend = partial(dot_product_attention, implementation="splash")
_slow = pytest.mark.slow


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel as plain XLA."""
    monkeypatch.setattr(splash, "_INTERPRET", True)


def _arrays(T, S, kv_heads=2, width=8, dtype=np.float32, batch=2):
    """Query, key, value and a gradient of the output."""
    arrays = (*qkv(T, S, kv_heads, width=width, batch=batch), normal(batch, T, N, width, seed=1))
    return [jnp.asarray(a, dtype) for a in arrays]


ENDS = {"query_seq_lengths": np.array([3, 100]), "key_value_seq_lengths": np.array([70, 0])}
CASES = {
    # name: (T, S, key-value heads, normalizer, options)
    "softmax-1, causal": (128, 128, 4, "softmax1", {"is_causal": True}),
    "sinks, causal window, both lengths": (130, 130, 1, SINKS, {"is_causal": True, "local_window_size": (60, 5),
                                                                **ENDS}),
    "softmax-1, odd lengths, padded keys": (130, 260, 1, "softmax1", {"scale": 1.3,
                                                                      "key_value_seq_lengths": np.array([259, 1])}),
    "softmax_n, window": (130, 100, 2, 0.5, {"local_window_size": (9, 3)}),
    "sinks, one query": (1, 5, 2, SINKS, {}),
    "softmax, rows without keys": (300, 100, 2, "softmax", {"local_window_size": (9, 3),
                                                            "query_seq_lengths": np.array([200, 300])}),
    "softmax, both lengths": (130, 100, 2, "softmax", ENDS),
    "softmax_n with n = 0, rows without keys": (130, 100, 2, 0.0, ENDS),
    "softmax, plain": (128, 256, 2, "softmax", {}),
}  # fmt: skip
QUICK = ("softmax-1, causal", "sinks, causal window, both lengths")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", [pytest.param(case, marks=[_slow] * (case not in QUICK)) for case in CASES])
def test_output_and_gradients_are_the_definition_and_its_slopes(case):
    T, S, kv_heads, normalizer, options = CASES[case]
    tolerances = {"rtol": 1e-5, "atol": 2e-6, "slope_tolerance": 1e-5}
    _, gradients = check_definition(_attend, qkv(T, S, kv_heads), normalizer, **tolerances, **options)
    if isinstance(normalizer, np.ndarray):
        assert gradients[3][3] == 0.0  # a head without a sink


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("width", [64, pytest.param(128, marks=_slow)])
def test_bfloat16_is_as_near_to_the_definition_as_its_roundings_allow(width):
    q, k, v, d_out = _arrays(128, 128, width=width, dtype=jnp.bfloat16)
    sinks = np.array([0.3, -1.0, 2.0, 0.0])
    attend = lambda q, k, v, sinks: _attend(q, k, v, normalizer=sinks, is_causal=True)  # noqa: E731
    out, pullback = jax.vjp(jax.jit(attend), q, k, v, jnp.asarray(sinks, jnp.float32))
    gradients = pullback(d_out)
    assert out.dtype == gradients[0].dtype == jnp.bfloat16
    *arrays, d_out = (np.asarray(a, np.float64) for a in (q, k, v, d_out))
    exact = reference(*arrays, normalizer=sinks, is_causal=True)
    # The output is rounded once, by 1/512 of itself at most; a scale that is no power of two rounds the query as well.
    error = np.sqrt(np.mean((np.asarray(out, np.float64) - exact) ** 2) / np.mean(exact**2))
    assert error < (0.002 if width == 64 else 0.003)
    for head, h in enumerate(np.eye(N) * 1e-5):
        plus, minus = (np.sum(reference(*arrays, normalizer=sinks + s, is_causal=True) * d_out) for s in (h, -h))
        np.testing.assert_allclose(gradients[3][head], (plus - minus) / 2e-5, rtol=0.01, atol=0.1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (9, 3), (200, 500), (500, 130)])
@pytest.mark.parametrize(("T", "S"), [(1, 5), (128, 128), (130, 100), (130, 260), (300, 100)])
def test_the_kernels_mask_of_padded_lengths_is_the_definition(T, S, window, is_causal):
    q, k, v, _ = (np.zeros((1, length, 1, 8), np.float32) for length in (T, S, S, T))
    inputs = prepare_inputs(q, k, v, normalizer="softmax", is_causal=is_causal, local_window_size=window)
    mask = splash._visible(inputs)
    padded = mask.lengths
    assert all(p % 128 == 0 and p - 128 < n <= p for n, p in zip((T, S), padded, strict=True))
    is_open = mask.left is mask.right is mask.keys is None
    seen = np.ones(padded, bool) if is_open else np.asarray(mask[:, :])
    expected = visible((1, 1, T, S), is_causal=is_causal, window=window)[0, 0]
    np.testing.assert_array_equal(seen[:T, :S], expected)
    assert not seen[:T, S:].any()
    blind = splash._blind(inputs)
    np.testing.assert_array_equal(np.zeros(T, bool) if blind is None else blind[0], ~expected.any(1))


# Sharded over batch and heads.


ENDS_OF_KEYS = jnp.arange(8, dtype=jnp.int32) * 16
BATCH = (*_arrays(128, 128, batch=8)[:3], ENDS_OF_KEYS)


def _causal(q, k, v, ends):
    return _attend(q, k, v, is_causal=True, key_value_seq_lengths=ends)


def _step(*arguments, attend=_causal):
    """Loss, output and gradients."""

    def loss(*arguments):
        out = attend(*arguments)
        return jnp.sum(out * out), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)


@pytest.fixture(scope="module")
def unsharded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash, "_INTERPRET", True)
        return jax.jit(_step)(*BATCH)


def _assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


KINDS = [
    (("data", "fsdp", "tensor"), (2, 2, 2), AxisType.Auto),
    pytest.param(("data", "tensor"), (4, 2), AxisType.Auto, marks=_slow),
    pytest.param(("x", "y"), (4, 2), AxisType.Explicit, marks=_slow),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("names", "shape", "kind"), KINDS)
def test_over_a_mesh_nothing_is_gathered(names, shape, kind, unsharded):
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    batch = names[:-1] if len(names) > 2 else names[0]
    heads, rows = (NamedSharding(mesh, spec) for spec in (P(batch, None, names[-1]), P(batch)))
    placed = jax.device_put(BATCH, (heads, heads, heads, rows))
    with jax.set_mesh(mesh if kind == AxisType.Auto else jax.sharding.get_mesh()):
        jitted = jax.jit(_step, in_shardings=(heads, heads, heads, rows)) if kind == AxisType.Auto else jax.jit(_step)
        compiled = jitted.lower(*placed).compile()
    assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", compiled.as_text())
    got = compiled(*placed)
    _assert_equal(got, unsharded)
    assert got[0][1].sharding.is_equivalent_to(heads, 4)


@pytest.mark.usefixtures("interpreted")
@_slow
@pytest.mark.parametrize("manual", [("x", "y"), ("x",)])
@pytest.mark.filterwarnings("ignore:attention by .splash. is not split")
def test_inside_a_shard_map(manual, unsharded):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    heads = P("x", None, "y") if "y" in manual else P("x")
    inside = jax.shard_map(
        _causal,
        mesh=mesh,
        in_specs=(heads, heads, heads, P("x")),
        out_specs=heads,
        axis_names=set(manual),
        check_vma=False,
    )
    compiled = jax.jit(lambda *a: _step(*a, attend=inside)).lower(*BATCH).compile()
    _assert_equal(compiled(*BATCH), unsharded)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.usefixtures("interpreted")
@_slow
def test_key_value_heads_that_an_axis_does_not_divide_are_gathered_and_right(unsharded):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    # 4 query heads, 2 key-value heads, 4 shards
    query, rows = (NamedSharding(mesh, spec) for spec in (P("data", None, "tensor"), P("data")))
    with jax.set_mesh(mesh):
        _assert_equal(jax.jit(_step, in_shardings=(query, rows, rows, rows))(*BATCH), unsharded)


@pytest.mark.usefixtures("interpreted")
@_slow
@pytest.mark.parametrize("mesh_is_set", [False, True])
def test_vmap_is_a_batch(mesh_is_set, unsharded):

    def folded(*arrays):
        halves = [a.reshape(2, 4, *a.shape[1:]) for a in arrays]
        return jax.vmap(_causal)(*halves).reshape(arrays[0].shape)

    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh if mesh_is_set else jax.sharding.get_mesh()):
        _assert_equal(jax.jit(lambda *a: _step(*a, attend=folded))(*BATCH), unsharded)


@pytest.mark.usefixtures("interpreted")
def test_axes_of_other_names_are_warned_of_and_those_that_divide_are_used():
    splash_kernel._warn_of_others.cache_clear()
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)),
        pytest.warns(UserWarning, match=r"not split over the mesh axes 'model': .*heads over 'tensor'"),
    ):
        jax.eval_shape(_causal, *BATCH)
    rows = jnp.zeros((4, 2, 8, 8))
    axes = splash_kernel._dividing(("data", "fsdp"), ("tensor",), rows, rows, {"data": 4, "fsdp": 2, "tensor": 2})
    assert axes == {"b": ("data",), "n": ("tensor",), "k": ("tensor",)}  # 4 sequences over 4, not over 8


# The structure of what is lowered for TPUs.


def _lowered(f, *shapes, **options):
    dtypes = [jnp.float32 if len(shape) == 1 else jnp.bfloat16 for shape in shapes]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return jax.jit(f, **options).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()


def _gradients(**options):
    def total(q, k, v, *sinks):
        normalizer = {"normalizer": sinks[0]} if sinks else {}
        return jnp.sum(_attend(q, k, v, **normalizer, **options).astype(jnp.float32))

    return lambda *arguments: jax.grad(total, tuple(range(len(arguments))))(*arguments)


def _kernels(text):
    names = re.findall(r'kernel_name = "(splash_\w+?)"', text)
    assert text.count("@tpu_custom_call") == len(names)
    return Counter(names)


SHAPES = ((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64))


@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
def test_forward_and_backward_are_one_kernel_each(width):
    shapes = [(*shape[:-1], width) for shape in SHAPES]
    text = _lowered(_gradients(is_causal=True), *shapes)
    assert _kernels(text) == {"splash_mha_fwd_residuals": 1, "splash_mha_dkv_no_residuals": 1}


def test_without_gradients_nothing_is_saved_for_them():
    text = _lowered(lambda q, k, v: _attend(q, k, v, local_window_size=(64, 0)), *SHAPES)
    assert _kernels(text) == {"splash_mha_fwd_no_residuals": 1}


def test_sinks_that_are_constants_cost_no_gradient():
    assert "exponential" not in _lowered(_gradients(), *SHAPES)  # those of the attention are inside the kernels
    assert "exponential" in _lowered(_gradients(), *SHAPES, (4,))


def test_softmax_takes_no_sinks_where_every_row_sees_something():
    def operands(normalizer):
        text = _lowered(lambda q, k, v: _attend(q, k, v, normalizer=normalizer, is_causal=True), *SHAPES)
        (call,) = re.findall(r"@tpu_custom_call\(([^)]*)\)", text)
        return call.count("%")

    assert operands("softmax1") == operands("softmax") + 1


@pytest.mark.parametrize(
    ("length", "block"), [(128, 128), (256, 256), (640, 128), (768, 256), (1000, 512), (1536, 512)]
)
def test_blocks_are_the_largest_that_divide_the_length(length, block):
    visible = splash_kernel.Visible((-(-length // 128) * 128, 128), None, 0, None)
    sizes = splash_kernel._kernel(visible, interpret=False, with_lse=True).kwargs["block_sizes"]
    assert (sizes.block_q, sizes.block_q_dkv) == (block, block)
    assert {sizes.block_kv, sizes.block_kv_compute, sizes.block_kv_dkv, sizes.block_kv_dkv_compute} == {128}


def test_long_sequences_lower_to_programs_without_a_mask_of_all_pairs():
    shapes = [(1, 8192, heads, 64) for heads in (4, 2, 2)]
    text = _lowered(_gradients(is_causal=True), *shapes)
    assert _kernels(text).total() == 2
    assert len(text) < 300_000  # a boolean for each pair would be 67 million
    assert "8192x8192" not in text


@pytest.mark.parametrize("mesh_is_set", [False, True])
def test_checkpoints_that_keep_attn_out_run_attention_once(mesh_is_set):
    def kernels(policy):
        def block(x, w):
            y = (x @ w).reshape(8, 128, 2, 64)
            return x + _attend(y, y, y, is_causal=True).reshape(x.shape), None

        def total(x, w):
            return jnp.sum(jax.lax.scan(jax.checkpoint(block, policy=policy, prevent_cse=False), x, w)[0])

        jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1)))(jnp.ones((8, 128, 128)), jnp.ones((3, 128, 128)))
        return Counter(_pallas_calls(jaxpr.jaxpr))

    policies = jax.checkpoint_policies
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh if mesh_is_set else jax.sharding.get_mesh()):
        kept, recomputed = kernels(policies.save_only_these_names("attn_out")), kernels(policies.nothing_saveable)
    assert kept == {"splash_mha_fwd_residuals": 1, "splash_mha_dkv_no_residuals": 1}
    assert recomputed == {"splash_mha_fwd_residuals": 2, "splash_mha_dkv_no_residuals": 1}


def _pallas_calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield re.search(r"splash_\w+", str(equation.params.get("name") or equation.params["name_and_src_info"]))[0]
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = value if hasattr(value, "eqns") else getattr(value, "jaxpr", None)
            yield from _pallas_calls(inner) if hasattr(inner, "eqns") else ()


def test_sharded_programs_reach_the_tpus_compiler_as_kernels_and_without_a_mesh_are_refused():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    arguments = [jax.ShapeDtypeStruct((8, *shape[1:]), jnp.bfloat16) for shape in SHAPES]

    def lower():
        traced = jax.jit(_gradients(is_causal=True), in_shardings=(sharding,) * 3).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",))

    with jax.set_mesh(mesh):
        lowered = lower()
    assert _kernels(lowered.as_text()).total() == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="tpu_custom_call"):  # a CPU's compiler, after partitioning
        lowered.compile()
    with pytest.raises(NotImplementedError, match="cannot be automatically partitioned"):
        lower()


# What is refused, and why the kernel is not chosen.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bias": jnp.zeros((1, 1, 128, 128))}, "bias=None"),
        ({"mask": jnp.ones((1, 1, 128, 128), bool)}, "mask.*is_causal, local_window_size and sequence lengths"),
        ({"normalizer": "relu"}, "'relu' has no kernel; allowed: 'softmax1', 'softmax', a number"),
        ({"normalizer": "sigmoid"}, "'sigmoid'"),
        ({"dtypes": [jnp.float16] * 3}, "float16; allowed: one of float32, bfloat16"),
        ({"dtypes": [jnp.bfloat16, jnp.float32, jnp.float32]}, "bfloat16, float32; allowed: one of"),
    ],
)
def test_what_the_kernel_does_not_support_is_named(options, problem):
    options = dict(options)
    dtypes = options.pop("dtypes", [jnp.float32] * 3)
    arrays = [a.astype(dtype) for a, dtype in zip(_arrays(128, 128)[:3], dtypes, strict=True)]
    with pytest.raises(NotImplementedError, match=problem):
        _attend(*arrays, **options)


def test_x64_mode_and_a_shard_map_that_checks_varying_axes_are_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, _ = BATCH
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="allowed: jax_enable_x64 off"):
        _attend(q, k, v)
    with pytest.raises(NotImplementedError, match="allowed within shard_map: check_vma=False"):
        jax.eval_shape(jax.shard_map(_attend, mesh=mesh, in_specs=P("x"), out_specs=P("x")), q, k, v)


def test_unavailable_says_what_is_missing(monkeypatch):
    assert splash.unavailable() == "the kernel runs on TPUs; the backend is 'cpu'"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "jax.set_mesh" in splash.unavailable()  # eight devices
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        assert splash.unavailable() == ""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert splash.unavailable() == ""
    monkeypatch.setattr(splash, "_MISSING", "jax 9 has no splash kernel")
    assert splash.unavailable() == "jax 9 has no splash kernel"
    q, k, v, _ = _arrays(128, 128)
    with pytest.raises(NotImplementedError, match="jax 9 has no splash kernel"):
        _attend(q, k, v)


@pytest.mark.usefixtures("interpreted")
def test_on_a_tpu_it_is_chosen_and_one_query_is_not(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    q, k, v, _ = _arrays(128, 128)

    def kernels(*arrays):
        return list(_pallas_calls(jax.make_jaxpr(dot_product_attention)(*arrays).jaxpr))

    with forbid_fallback():
        assert kernels(q, k, v) == ["splash_mha_fwd_no_residuals"]
    assert kernels(q[:, :1], k, v) == []
