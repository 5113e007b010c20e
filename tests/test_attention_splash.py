"""The TPU kernel without a TPU: its numbers in interpret mode, its structure by lowering for TPUs."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.ops import dot_product_attention
from orthojax.ops.attention import forbid_fallback, splash, splash_kernel, visible_keys
from orthojax.ops.attention.dot_product import prepare_inputs

SINKS = (0.3, -1.0, 2.0, -np.inf)
N = len(SINKS)


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel as plain XLA."""
    monkeypatch.setattr(splash, "_INTERPRET", True)


def _arrays(T, S, kv_heads=2, width=8, dtype=np.float32, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, T, N, width), (batch, S, kv_heads, width), (batch, S, kv_heads, width), (batch, T, N, width)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def _attend(q, k, v, **options):
    return dot_product_attention(q, k, v, implementation="splash", **options)


def reference(q, k, v, sinks, *, scale=None, is_causal=False, local_window_size=None, query_ends=None, key_ends=None):
    """exp(x_i) / (exp(sink) + sum_j exp(x_j)) @ v in float64; without sinks, rows that see nothing are spread."""
    batch, T, heads, width = q.shape
    S = k.shape[1]
    k, v = (np.repeat(a, heads // a.shape[2], 2) for a in (k, v))
    x = (width**-0.5 if scale is None else scale) * np.einsum("btnh,bsnh->bnts", q, k)
    t, s = np.arange(T)[:, None], np.arange(S)[None]
    left, right = local_window_size or (T, S)
    seen = (s >= t - left) & (s <= t + (0 if is_causal else right))
    rows = np.ones((batch, 1, T, 1), bool) if query_ends is None else (t < query_ends[:, None, None, None])
    seen = seen & (s < (S if key_ends is None else key_ends[:, None, None, None]))
    seen = np.broadcast_to(seen & rows, x.shape)
    sinks = np.broadcast_to(-np.inf if sinks is None else sinks, (heads,))[None, :, None, None]
    shift = np.maximum(np.where(seen, x, -np.inf).max(-1, keepdims=True), sinks)
    shift = np.where(np.isfinite(shift), shift, 0.0)
    weights = np.exp(np.where(seen, x, -np.inf) - shift)
    total = weights.sum(-1, keepdims=True) + np.exp(sinks - shift)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0.0)
    return np.einsum("bnts,bsnh->btnh", weights, v), ~seen.any(-1) & rows[..., 0]


def _spread(out, blind, v):
    """jax.nn's softmax: a row that sees nothing is the mean of all values."""
    mean = np.repeat(v.mean(1, keepdims=True), out.shape[2] // v.shape[2], 2)
    return np.where(np.swapaxes(blind, 1, 2)[..., None], mean, out)


ENDS = {"query_ends": np.array([3, 100]), "key_ends": np.array([70, 0])}
# name: T, S, key-value heads, normalizer, options
CASES = {
    "softmax-1, causal": (128, 128, 4, "softmax1", {"is_causal": True}),
    "softmax-1, odd lengths, padded keys": (130, 260, 1, "softmax1", {"scale": 1.3, "key_ends": np.array([259, 1])}),
    "softmax_n, window": (130, 100, 2, 0.5, {"local_window_size": (9, 3)}),
    "sinks, causal window, both lengths": (
        130,
        130,
        1,
        SINKS,
        {"is_causal": True, "local_window_size": (60, 5), **ENDS},
    ),
    "sinks, one query": (1, 5, 2, SINKS, {}),
    "softmax, rows without keys": (
        300,
        100,
        2,
        "softmax",
        {"local_window_size": (9, 3), "query_ends": np.array([200, 300])},
    ),
    "softmax, both lengths": (130, 100, 2, "softmax", ENDS),
    "softmax_n with n = 0, rows without keys": (130, 100, 2, 0.0, ENDS),
    "softmax, plain": (128, 256, 2, "softmax", {}),
}
CASES["bfloat16, sinks, causal"] = (128, 128, 2, (0.3, -1.0, 2.0, 0.0), {"is_causal": True})
QUICK = ("softmax-1, causal", "sinks, causal window, both lengths")


@functools.cache
def _step(case):
    """Compiled: (query, key, value, sinks, gradient of the output) to (output, four gradients)."""
    _, _, _, normalizer, options = CASES[case]
    fixed = {name: value for name, value in options.items() if not name.endswith("_ends")}
    for name, end in (("query_seq_lengths", "query_ends"), ("key_value_seq_lengths", "key_ends")):
        if end in options:
            fixed[name] = jnp.asarray(options[end])

    def loss(q, k, v, sinks, d_out):
        out = _attend(q, k, v, normalizer=sinks if isinstance(normalizer, tuple) else normalizer, **fixed)
        return jnp.sum((out * d_out).astype(jnp.float32)), out

    def step(*arguments):
        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*arguments)
        return out, gradients

    return jax.jit(step)


def _exact(case, q, k, v, sinks):
    _, _, _, normalizer, options = CASES[case]
    if not isinstance(normalizer, tuple):
        sinks = {"softmax1": 0.0, "softmax": None, 0.5: np.log(0.5), 0.0: None}[normalizer]
    out, blind = reference(q, k, v, sinks, **options)
    return _spread(out, blind, v) if normalizer == "softmax" else out


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES if "bfloat16" not in case],
)
def test_output_and_gradients_are_the_definition_and_its_finite_differences(case):
    T, S, kv_heads, normalizer, _ = CASES[case]
    q, k, v, d_out = _arrays(T, S, kv_heads)
    learned = isinstance(normalizer, tuple)
    arguments = (q, k, v, jnp.asarray(normalizer if learned else [0.0]))
    out, gradients = _step(case)(*arguments, d_out)
    arguments = [np.asarray(a, np.float64) for a in arguments]
    np.testing.assert_allclose(out, _exact(case, *arguments), rtol=1e-5, atol=2e-6)

    rng, step = np.random.default_rng(1), 1e-5
    for i, gradient in enumerate(gradients[: 3 + learned]):
        assert np.isfinite(gradient).all()
        direction = rng.normal(size=gradient.shape)
        plus, minus = (
            np.sum(_exact(case, *arguments[:i], arguments[i] + h * direction, *arguments[i + 1 :]) * np.asarray(d_out))
            for h in (step, -step)
        )
        terms = np.asarray(gradient, np.float64) * direction
        assert np.abs(terms).sum() > 0.01
        assert abs((plus - minus) / (2 * step) - terms.sum()) < 1e-5 * np.abs(terms).sum() + 1e-6
    if case == "sinks, causal window, both lengths":  # rows that see nothing, and a head without a sink
        assert (out[0, 3:] == 0.0).all()
        assert (out[1] == 0.0).all()
        assert (gradients[0][1] == 0.0).all()
        assert gradients[3][3] == 0.0


@pytest.mark.usefixtures("interpreted")
def test_scores_of_ten_thousand_keep_output_and_gradients_finite_and_right():
    q, k, v, d_out = _arrays(128, 128, kv_heads=4)
    q = q * 3e3  # logits of either sign: one key or none takes everything
    out, gradients = _step("softmax-1, causal")(q, k, v, jnp.zeros(1), d_out)
    assert np.abs(np.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5).max() > 1e4
    exact = _exact("softmax-1, causal", *(np.asarray(a, np.float64) for a in (q, k, v)), None)
    # float32 knows a logit of 3e4 to 2e-3, which is the relative error of a weight.
    np.testing.assert_allclose(out, exact, rtol=5e-3, atol=5e-3)
    assert (np.abs(exact[:, 0]).max(-1) == 0.0).any()  # query 0 sees one key
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_large_negative_logits_in_bfloat16_attend_nowhere():
    _, k, v, d_out = _arrays(128, 128, width=64, dtype=jnp.bfloat16)
    k = jnp.abs(k) + 1
    sinks = jnp.zeros(N)
    out, gradients = _step("bfloat16, sinks, causal")(jnp.full_like(d_out, -20.0), k, v, sinks, d_out)  # below -160
    assert out.dtype == jnp.bfloat16
    assert (out == 0.0).all()
    assert all((gradient == 0.0).all() for gradient in gradients)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_bfloat16_is_as_near_to_the_definition_as_its_roundings_allow(width):
    case = "bfloat16, sinks, causal"
    q, k, v, d_out = _arrays(128, 128, width=width, dtype=jnp.bfloat16)
    sinks = jnp.asarray(CASES[case][3])
    out, gradients = _step(case)(q, k, v, sinks, d_out)
    assert out.dtype == gradients[0].dtype == jnp.bfloat16
    *arguments, d_out = (np.asarray(a, np.float64) for a in (q, k, v, sinks, d_out))
    exact = _exact(case, *arguments)
    # The output is rounded once, by 1/512 of itself at most; a scale that is no power of two rounds the query as well.
    error = np.sqrt(np.mean((np.asarray(out, np.float64) - exact) ** 2) / np.mean(exact**2))
    assert error < (0.002 if width == 64 else 0.003)
    for head, h in enumerate(np.eye(N) * 1e-5):
        plus, minus = (np.sum(_exact(case, *arguments[:3], arguments[3] + step) * d_out) for step in (h, -h))
        np.testing.assert_allclose(gradients[3][head], (plus - minus) / 2e-5, rtol=0.01, atol=0.1)


# Which keys the kernel is told that each query sees.


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (9, 3), (200, 500), (500, 130)])
@pytest.mark.parametrize(("T", "S"), [(1, 5), (128, 128), (130, 100), (130, 260), (300, 100)])
def test_the_mask_of_padded_lengths_is_that_of_visible_keys(T, S, window, is_causal):
    q, k, v, _ = (np.zeros((1, length, 1, 8), np.float32) for length in (T, S, S, T))
    options = {"is_causal": is_causal, "local_window_size": window}
    lengths = {"query_seq_lengths": None, "key_value_seq_lengths": None}
    inputs = prepare_inputs(q, k, v, None, None, normalizer="softmax", scale=None, **options, **lengths)
    visible = splash._visible(inputs)
    padded = visible.lengths
    assert all(p % 128 == 0 and p - 128 < n <= p for n, p in zip((T, S), padded, strict=True))
    is_open = visible.left is visible.right is visible.keys is None
    seen = np.ones(padded, bool) if is_open else np.asarray(visible[:, :])
    expected = visible_keys(1, T, S, **options)
    expected = np.ones((T, S), bool) if expected is None else np.asarray(expected)[0, 0]
    np.testing.assert_array_equal(seen[:T, :S], expected)
    assert not seen[:T, S:].any()
    blind = splash._blind(inputs)
    np.testing.assert_array_equal(np.zeros(T, bool) if blind is None else blind[0], ~expected.any(1))


# Sharded over batch and heads.


def _sharded_problem():
    q, k, v, _ = _arrays(128, 128, batch=8)
    ends = jnp.arange(8, dtype=jnp.int32) * 16

    def loss(q, k, v, ends, attend=_attend):
        out = attend(q, k, v, ends)
        return jnp.sum(out * out), out

    def causal(q, k, v, ends):
        return _attend(q, k, v, is_causal=True, key_value_seq_lengths=ends)

    def step(*arguments, attend=causal):
        return jax.value_and_grad(lambda *a: loss(*a, attend=attend), (0, 1, 2), has_aux=True)(*arguments)

    return (q, k, v, ends), causal, step


@pytest.fixture(scope="module")
def unsharded():
    """Loss, output and gradients on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash, "_INTERPRET", True)
        arguments, _, step = _sharded_problem()
        return jax.jit(step)(*arguments)


def _check_sharded(compiled, arguments, expected, spec):
    assert not re.search(r"(all-gather|all-to-all|collective-permute)(-start)?\(", compiled.as_text())
    got = compiled(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert got[0][1].sharding.spec == spec


MESHES = {"data and heads": (("data", "tensor"), (4, 2)), "data, fsdp, heads": (("data", "fsdp", "tensor"), (2, 2, 2))}
SHARDED = [("data, fsdp, heads", True)]
SHARDED += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (("data, fsdp, heads", False), ("data and heads", False), ("data and heads", True))
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("mesh", "mesh_is_set"), SHARDED)
def test_jit_with_shardings_gathers_nothing(mesh, mesh_is_set, unsharded):
    names, shape = MESHES[mesh]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    batch = names[:-1] if len(names) > 2 else names[0]
    arguments, _, step = _sharded_problem()
    heads, rows = (NamedSharding(mesh, spec) for spec in (P(batch, None, "tensor"), P(batch)))
    jitted = jax.jit(step, in_shardings=(heads, heads, heads, rows))
    with jax.set_mesh(mesh if mesh_is_set else jax.sharding.get_mesh()):
        compiled = jitted.lower(*arguments).compile()
    placed = jax.device_put(arguments, (heads, heads, heads, rows))
    _check_sharded(compiled, placed, unsharded, P(batch, None, "tensor"))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_explicit_axes_are_taken_from_the_types(unsharded):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    arguments, _, step = _sharded_problem()
    heads, rows = (NamedSharding(mesh, spec) for spec in (P("x", None, "y"), P("x")))
    placed = jax.device_put(arguments, (heads, heads, heads, rows))
    _check_sharded(jax.jit(step).lower(*placed).compile(), placed, unsharded, P("x", None, "y", None))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("manual", [("x", "y"), ("x",)])
@pytest.mark.filterwarnings("ignore:attention by .splash. is not split")
def test_inside_a_shard_map(manual, unsharded):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    arguments, causal, step = _sharded_problem()
    heads = P("x", None, "y") if "y" in manual else P("x")
    inside = jax.shard_map(
        causal,
        mesh=mesh,
        in_specs=(heads, heads, heads, P("x")),
        out_specs=heads,
        axis_names=set(manual),
        check_vma=False,
    )
    compiled = jax.jit(lambda *a: step(*a, attend=inside)).lower(*arguments).compile()
    for a, b in zip(jax.tree.leaves(compiled(*arguments)), jax.tree.leaves(unsharded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_key_value_heads_that_an_axis_does_not_divide_are_gathered_and_right(unsharded):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    arguments, _, step = _sharded_problem()  # 4 query heads, 2 key-value heads, 4 shards
    query, rows = (NamedSharding(mesh, spec) for spec in (P("data", None, "tensor"), P("data")))
    got = jax.jit(step, in_shardings=(query, rows, rows, rows))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(unsharded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.slow
def test_vmap_is_a_batch(unsharded):
    (q, k, v, ends), causal, step = _sharded_problem()

    def folded(q, k, v, ends):
        q, k, v, ends = (a.reshape(2, 4, *a.shape[1:]) for a in (q, k, v, ends))
        return jax.vmap(causal)(q, k, v, ends).reshape(8, *q.shape[2:])

    got = jax.jit(lambda *a: step(*a, attend=folded))(q, k, v, ends)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(unsharded), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("interpreted")
def test_axes_of_other_names_are_warned_of_and_those_that_divide_are_used():
    arguments, causal, _ = _sharded_problem()
    splash_kernel._warn_of_others.cache_clear()
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)),
        pytest.warns(UserWarning, match=r"not split over the mesh axes 'model': .*heads over 'tensor'"),
    ):
        jax.eval_shape(causal, *arguments)
    shapes = [a.shape for a in (jnp.zeros((4, 2, 8, 8)), jnp.zeros((4, 2, 8, 8)))]
    specs, _ = splash_kernel._specs(
        ("bntd", "bksd"), (), shapes, {"b": ("data", "fsdp"), "n": ("tensor",), "k": ("tensor",)},
        {"data": 4, "fsdp": 2, "tensor": 2},
    )  # fmt: skip
    assert specs == [P(("data",), ("tensor",), None, None)] * 2  # 4 sequences over 4, not over 8


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
def test_blocks_are_the_largest_that_divide_the_length(length, block, monkeypatch):
    made = []
    monkeypatch.setattr(splash_kernel.kernels, "BlockSizes", lambda **sizes: made.append(sizes))
    monkeypatch.setattr(splash_kernel.kernels, "make_splash_mha", lambda *_, **__: None)
    visible = splash_kernel.Visible((-(-length // 128) * 128, 128), None, 0, None)
    splash_kernel._kernel(visible, interpret=False, with_lse=True)
    assert {name: size for name, size in made[0].items() if "block_q" in name} == {
        "block_q": block,
        "block_q_dkv": block,
    }
    assert {size for name, size in made[0].items() if "kv" in name and "q" not in name} == {128}


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


@pytest.mark.parametrize("mesh_is_set", [False, True])
def test_sharded_programs_lower_for_tpus_and_reach_their_compiler_as_kernels(mesh_is_set):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "tensor"))
    arguments = [jax.ShapeDtypeStruct((8, *shape[1:]), jnp.bfloat16) for shape in SHAPES]
    with jax.set_mesh(mesh if mesh_is_set else jax.sharding.get_mesh()):
        traced = jax.jit(_gradients(is_causal=True), in_shardings=(sharding,) * 3).trace(*arguments)
        lowered = traced.lower(lowering_platforms=("tpu",))
    assert _kernels(lowered.as_text()).total() == (2 if mesh_is_set else 0)  # otherwise it is the partitioner who asks
    with pytest.raises(jax.errors.JaxRuntimeError, match="tpu_custom_call"):  # a CPU's compiler, after partitioning
        lowered.compile()


# What is refused, and why the kernel is not chosen.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"bias": jnp.zeros((1, 1, 128, 128))}, "bias=None"),
        ({"mask": jnp.ones((1, 1, 128, 128), bool)}, "mask.*is_causal, local_window_size and sequence lengths"),
        ({"normalizer": "relu"}, "'relu' has no kernel; allowed: 'softmax1', 'softmax', a number"),
        ({"normalizer": "sigmoid"}, "'sigmoid'"),
    ],
)
def test_what_the_kernel_cannot_do_is_named(options, problem):
    q, k, v, _ = _arrays(128, 128)
    with pytest.raises(NotImplementedError, match=problem):
        _attend(q, k, v, **options)


def test_dtypes_are_named():
    q, k, v, _ = _arrays(128, 128)
    with pytest.raises(NotImplementedError, match="float16; allowed: one of float32, bfloat16"):
        _attend(*(a.astype(jnp.float16) for a in (q, k, v)))
    with pytest.raises(NotImplementedError, match="bfloat16, float32; allowed: one of"):
        _attend(q.astype(jnp.bfloat16), k, v)


@pytest.mark.parametrize("normalizer", ["softmax2", -1.0, True, jnp.zeros(3)])
def test_a_normalizer_that_is_none_is_the_users_error(normalizer):
    q, k, v, _ = _arrays(128, 128)
    with pytest.raises(ValueError, match=r"normalizer|softmax_n|sink logits"):
        _attend(q, k, v, normalizer=normalizer)


@pytest.mark.usefixtures("x64")
def test_x64_mode_is_refused():
    q, k, v, _ = _arrays(128, 128)
    with pytest.raises(NotImplementedError, match="allowed: jax_enable_x64 off"):
        _attend(q, k, v)


def test_a_shard_map_that_checks_varying_axes_is_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v, _ = _arrays(128, 128, batch=8)
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
