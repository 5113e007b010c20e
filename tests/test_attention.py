"""Attention by plain XLA, whole and in chunks, and by cuDNN's rule: against the definition in float64 and jax.nn."""

import itertools
import re
from functools import partial

import attention_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import NORMALIZERS, SINK, assert_near, check_definition, cudnn_stand_ins, normal, qkv, reference

from orthojax.ops import attention_logits, attention_weights, dot_product_attention, visible_keys, weighted_values
from orthojax.ops.attention import merge, relaxed_causal_mask, xla

pytestmark = pytest.mark.usefixtures("forgotten")
B, T, S, N, H = 2, 5, 7, 4, 8
IMPLEMENTATIONS = ["xla", "xla_chunked"]
ALL_IMPLEMENTATIONS = [*IMPLEMENTATIONS, "cudnn", "splash"]
_slow = pytest.mark.slow


@pytest.fixture
def attend(implementation, monkeypatch):
    """attend(q, k, v, [bias], ...): chunks have at most three queries, so that there are many; kernels run on CPU."""
    monkeypatch.setitem(xla.CHUNK_BYTES, "cpu", 1)
    monkeypatch.setitem(xla.CAUSAL_CHUNK_BYTES, "cpu", 1)
    monkeypatch.setattr(xla, "FEWEST_QUERIES", 3)
    kernels = {"cudnn": attention_oracle.attend_by_cudnn, "splash": attention_oracle.attend_by_splash}
    with cudnn_stand_ins():
        yield kernels.get(implementation) or partial(dot_product_attention, implementation=implementation)


def _normalizer(name):
    value = NORMALIZERS[name]
    return jnp.asarray(value, jnp.float32) if isinstance(value, np.ndarray) else value


def _arrays(t=T, s=S, kv_heads=N, dtype=jnp.float32, width=H):
    return [jnp.asarray(a, dtype) for a in qkv(t, s, kv_heads, width=width)]


def _mask(*shape, seed=3):
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., -1:, :] = False  # the last query sees nothing
    return mask


def _ends(queries, keys):
    """Returns options with the lengths of queries and keys."""
    return {"query_seq_lengths": np.array(queries, np.int32), "key_value_seq_lengths": np.array(keys, np.int32)}


def _segments(length, *starts):
    """Returns ids int32 [B, length] of segments that start there in each row."""
    return np.array([np.searchsorted(row, np.arange(length), "right") for row in starts], np.int32)


# The contract: implementation x mask x normalizer.

CASES = {
    # name: (T, S, key-value heads, options)
    "causal": (10, 10, 2, {"is_causal": True}),
    "one query": (1, 9, 2, {}),
    "one key": (7, 1, 4, {"bias": normal(1, N, 7, 1)}),
    "plain, one key head": (11, 5, 1, {"scale": 0.7}),
    "more queries than keys, causal": (11, 4, 2, {"is_causal": True}),
    "window": (10, 10, 4, {"local_window_size": (2, 1)}),
    "window to the left, narrow values": (10, 10, 2, {"local_window_size": (3, 0), "value": normal(B, 10, 2, 5)}),
    "window of later keys, soft cap, scale of each": (7, 11, 2, {"local_window_size": (-1, 2), "logits_soft_cap": 0.8,
                                                                 "scale": normal(1, N, 7, 11)}),
    "window of earlier keys, scale of heads": (8, 8, 4, {"local_window_size": (2, -1), "is_causal": True,
                                                         "scale": normal(N, 1, 1)}),
    "causal window, grouped": (10, 10, 2, {"local_window_size": 3, "is_causal": True}),
    "window beyond the keys": (11, 5, 4, {"local_window_size": (1, 0)}),
    "mask with an empty row": (8, 8, 2, {"mask": _mask(B, N, 8, 8), "is_causal": True,
                                         "bias": 0.3 * normal(1, N, 8, 8)}),
    "mask of keys, bias of keys": (10, 8, 4, {"mask": np.arange(8).reshape(1, 1, 1, 8) % 3 < 2,
                                              "bias": normal(1, N, 1, 8)}),
    "bias of each, both lengths": (8, 8, 2, {"bias": normal(B, N, 8, 8), **_ends([4, 8], [8, 3])}),
    "lengths": (9, 9, 4, {**_ends([4, 9], [9, 0]), "is_causal": True}),
    "everything": (10, 8, 2, {"bias": normal(1, N, 10, 8), "mask": _mask(B, 1, 10, 8), "is_causal": True,
                              "local_window_size": (3, 2), **_ends([10, 5], [8, 4]), "scale": 1.3}),
    "segments, causal": (10, 10, 2, {"segment_ids": _segments(10, [3, 7, 8], [5]), "is_causal": True}),
    "segments that some keys lack": (8, 6, 4, {"segment_ids": (_segments(8, [2, 7], [4]), _segments(6, [3], [0])),
                                               "mask": _mask(B, 1, 8, 6)}),
    "segments, window, lengths": (12, 12, 2, {"segment_ids": _segments(12, [3], [2, 3, 9]), "is_causal": True,
                                              "local_window_size": 3, **_ends([12, 8], [10, 12])}),
}  # fmt: skip
# What one query sees matters to all normalizers alike; these differ in what they do with the other keys.
KINDS = ["softmax", "softmax1", "relu"]  # they differ in the keys that a query does not see
WITH_GRADIENTS = ("causal window, grouped", "window of later keys, soft cap, scale of each", "everything")
WITH_GRADIENTS += ("segments, causal", "segments, window, lengths")
NOT_BY_CUDNN = ("window", "window beyond the keys", "everything", "segments, window, lengths")
BY_CUDNN = [case for case in CASES if case not in NOT_BY_CUDNN and "scale of" not in case]
SINKS = ["softmax", "softmax1", "softmax_n", 3.0, 0.0]
QUICK = {case: [KINDS[i % 3]] for i, case in enumerate(CASES)}
QUICK |= {case: list(NORMALIZERS) for case in ("everything", "segments, causal", "segments that some keys lack")}
CONTRACT = [("xla_chunked", case, names) for case, names in QUICK.items()]
CONTRACT += [("cudnn", case, ["sink", *(SINKS if case == "causal" else [])]) for case in BY_CUDNN]
CONTRACT += [pytest.param(of, case, list(NORMALIZERS), marks=_slow) for of in IMPLEMENTATIONS for case in CASES]


@pytest.mark.parametrize(("implementation", "case", "names"), CONTRACT)
def test_output_and_gradients_are_the_definition(attend, implementation, case, names):
    t, s, kv_heads, options = CASES[case]
    options, by_xla = dict(options), implementation in IMPLEMENTATIONS
    arrays = [*qkv(t, s, kv_heads), *([options.pop("bias")] if "bias" in options else [])]
    arrays[2] = options.pop("value", arrays[2])
    tolerances = {"rtol": 1e-11, "atol": 1e-13, "slope_tolerance": 1e-7}
    tolerances = tolerances if by_xla else dict.fromkeys(tolerances, 1e-5)
    with jax.enable_x64(by_xla):
        for name in names:
            gradients = not by_xla or case in WITH_GRADIENTS
            normalizer = NORMALIZERS.get(name, name)
            output, _ = check_definition(attend, arrays, normalizer, gradients=gradients, **tolerances, **options)
            assert output.dtype == (jnp.float64 if by_xla else jnp.float32)


LENGTHS = {"query_seq_lengths": jnp.array([3, 5]), "key_value_seq_lengths": jnp.array([7, 4])}
MASK = np.random.default_rng(1).random((B, N, T, S)) < 0.5
MASK[..., 0] = True
BIAS = normal(B, N, T, S, seed=2, dtype=np.float32)
EVERYTHING = {"mask": jnp.asarray(MASK), "is_causal": True, **LENGTHS}
JAX_NN = [(T, S, 2, EVERYTHING | {"scale": 1.3}), (T, S, 2, {"local_window_size": (1, 0), "is_causal": True})]
JAX_NN += [(1, 9, 2, {}), (13, 13, N, {"is_causal": True}), (T, S, N, {"local_window_size": np.array([-1, 3])})]
JAX_NN += [(T, S, N, {"local_window_size": 2, "scale": np.arange(1.0, 5.0, dtype=np.float32).reshape(1, N, 1, 1)})]
JAX_NN += [(T, S, 2, {"scale": np.float32(0.7), "bias": np.arange(S).reshape(1, 1, 1, S)})]


def _results(attend, *arrays):
    """Returns output and gradients of the compiled function."""

    def both(*arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, *pullback(jnp.cos(output))

    return jax.jit(both)(*arrays)


@pytest.mark.parametrize(("t", "s", "kv_heads", "options"), JAX_NN)
def test_softmax_is_jax_nn_dot_product_attention(t, s, kv_heads, options):
    arrays = _arrays(t, s, kv_heads, width=H if t == T else 3)
    arrays += [jnp.asarray(BIAS)] if options.get("mask") is not None else []
    ours = _results(partial(dot_product_attention, normalizer="softmax", **options), *arrays)
    for a, b in zip(ours, _results(partial(jax.nn.dot_product_attention, **options), *arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [np.uint32(2**32 - 1), np.int8(127), np.uint8(255)])
def test_traced_windows_of_any_integer_type_do_not_wrap(size):
    query = jnp.asarray(np.random.default_rng(0).standard_normal((1, 8, 1, 4)), jnp.float32)
    wide = jax.jit(lambda size: dot_product_attention(query, query, query, local_window_size=size))(size)
    np.testing.assert_allclose(wide, dot_product_attention(query, query, query), rtol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "name"), [("xla", "softmax"), ("xla_chunked", "softmax"), ("xla_chunked", "softmax1")]
)
def test_windows_may_differ_between_the_layers_of_a_scan(attend, name):
    windows, (q, k, v) = np.array([2, 9, 0, -1]), _arrays(10, 10, 2)

    def layer(total, window):
        options = {"normalizer": name, "scale": 0.1 * (window + 2)}
        causal = attend(q, k, v, local_window_size=(window, 0), is_causal=True, **options)
        return total + causal, attend(q, k, v, local_window_size=window, **options)

    total, outputs = jax.jit(lambda windows: jax.lax.scan(layer, jnp.zeros_like(q), windows))(windows)
    arrays = [np.asarray(a, np.float64) for a in (q, k, v)]
    of = [{"normalizer": name, "scale": 0.1 * (w + 2)} for w in windows]
    expected = [reference(*arrays, local_window_size=w, **o) for w, o in zip(windows, of, strict=True)]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    causal = {"is_causal": True}
    expected = (reference(*arrays, local_window_size=(w, 0), **causal, **o) for w, o in zip(windows, of, strict=True))
    np.testing.assert_allclose(total, sum(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("softmax1", jnp.float16), *((name, jnp.bfloat16) for name in NORMALIZERS)]
)
def test_logits_of_half_precision_are_float32(name, dtype):
    q, k, v = _arrays(kv_heads=2, dtype=dtype)
    got = dot_product_attention(q, k, v, normalizer=_normalizer(name), is_causal=True)
    assert got.dtype == dtype
    assert attention_logits(q, k).dtype == jnp.float32
    exact = reference(*(np.asarray(a, np.float64) for a in (q, k, v)), normalizer=NORMALIZERS[name], is_causal=True)
    # Two roundings (the weights, the output) of relative size eps / 2 each, against the sum of absolute terms.
    bound = 2 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(v, np.float64)).max() * max(1.0, np.abs(exact).max())
    assert np.abs(np.asarray(got, np.float64) - exact).max() < bound


def test_chunks_do_not_round_keys_as_values():
    q, k, v = _arrays()
    q, k, v = q * 8, k * 8, v.astype(jnp.bfloat16)  # as after a norm of queries and keys
    plain, chunked = (dot_product_attention(q, k, v, is_causal=True, implementation=of) for of in IMPLEMENTATIONS)
    np.testing.assert_array_equal(np.asarray(plain, np.float32), np.asarray(chunked, np.float32))


DTYPES = {jnp.float32: "sink", jnp.bfloat16: "softmax1", jnp.float16: "softmax"}
EXTREMES = [("xla", jnp.float32), ("xla_chunked", jnp.bfloat16), ("cudnn", jnp.float16), ("splash", jnp.float32)]


@pytest.mark.parametrize(("implementation", "dtype"), EXTREMES)
def test_scores_of_ten_thousand_are_exact_and_differentiable(attend, dtype):
    channel, normalizer = np.eye(H)[0], NORMALIZERS[DTYPES[dtype]]
    q = 100 * np.sign(normal(B, 6, N, 1)) * channel  # scores are -10,000, -7,500 .. 10,000:
    k = np.arange(-50, 100, 25).reshape(1, 6, 1, 1) * np.ones((B, 6, N, 1)) * channel  # one key takes it all or none
    arrays = [jnp.asarray(a, dtype) for a in (q, k, normal(B, 6, N, H, seed=2))]
    options = {"normalizer": normalizer, "is_causal": True, "scale": 1.0}
    got, *gradients = _results(partial(attend, **options), *arrays)
    exact = reference(*(np.asarray(a, np.float64) for a in arrays), **options)
    tolerance = 4 * float(jnp.finfo(dtype).eps) if dtype == jnp.float32 else 4e-3
    assert np.abs(np.asarray(got, np.float64) - exact).max() < tolerance * max(1.0, np.abs(exact).max())
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("xla", jnp.float16), ("xla_chunked", jnp.float32), ("cudnn", jnp.bfloat16), ("splash", jnp.bfloat16)],
)
def test_large_negative_logits_attend_nowhere(attend, dtype):
    ones = jnp.ones((B, 6, N, H), dtype)
    results = _results(partial(attend, is_causal=True), -150 * ones, 60 * ones, ones)  # logits are -25,456
    assert results[0].dtype == dtype
    assert all((array == 0.0).all() for array in results)


@pytest.mark.parametrize("implementation", ["xla_chunked"])
def test_gradients_of_chunks_are_summed_in_float32(attend):
    t = 600  # 200 chunks: a sum in bfloat16 would stop growing at 256 times its terms
    ones = jnp.ones((1, t, 1, 1), jnp.bfloat16)
    total = lambda v: jnp.sum(attend(ones, ones, v, normalizer=0.0).astype(jnp.float32))  # noqa: E731
    np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(total))(ones), np.float64), 1.0, rtol=2.0**-7)


@pytest.mark.parametrize(("name", "kv_heads"), [("softmax1", N), *((name, 2) for name in NORMALIZERS)])
def test_weights_times_values_are_the_output(name, kv_heads):
    q, k, v = _arrays(kv_heads=kv_heads, dtype=jnp.bfloat16)
    hides = {"mask": jnp.asarray(MASK), "is_causal": True}
    options = {"bias": jnp.asarray(BIAS), "normalizer": _normalizer(name), "scale": 0.4}
    weights = attention_weights(q, k, mask=visible_keys(B, T, S, **hides), **options)
    assert (weights.shape, weights.dtype) == ((B, N, T, S), jnp.float32)
    assert (np.asarray(weights)[~attention_oracle.visible(weights.shape, MASK, True)] == 0.0).all()
    output = weighted_values(weights, v)
    np.testing.assert_array_equal(dot_product_attention(q, k, v, implementation="xla", **hides, **options), output)
    rounded = np.asarray(weights.astype(jnp.bfloat16), np.float64)
    exact = np.einsum("BNTS,BSNH->BTNH", rounded, np.repeat(np.asarray(v, np.float64), N // kv_heads, 2))
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("xla_chunked", marks=_slow), "splash"])
def test_on_a_mesh_nothing_travels(attend):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    both = ("data", "fsdp")
    heads, rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(both, None, "tensor"), jax.P(both)))
    arrays = (*(jnp.tile(a, (2, 1, 1, 1)) for a in _arrays(10, 10, 2)), jnp.array([5, 3, 10, 6]))

    def loss(q, k, v, ends):
        output = attend(q, k, v, is_causal=True, key_value_seq_lengths=ends)
        return jnp.sum(jnp.square(output)), output

    gradients = jax.grad(loss, (0, 1, 2), has_aux=True)
    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients, in_shardings=(heads, heads, heads, rows)).lower(*arrays).compile()
    assert not re.search(r"(all-gather|all-to-all|all-reduce|collective-permute)(-start)?\(", compiled.as_text())
    found = compiled(*jax.device_put(arrays, (heads, heads, heads, rows)))
    assert_near(found, jax.jit(gradients)(*arrays))
    assert found[1].sharding.is_equivalent_to(heads, 4)


@pytest.mark.parametrize(
    ("implementation", "kind"), [*((of, "Auto") for of in ALL_IMPLEMENTATIONS), ("xla_chunked", "Explicit")]
)
def test_over_a_mesh_learned_sinks_segments_and_their_gradients_are_the_definition(attend, kind):
    rows, tolerances = jax.P("data", None, "tensor"), dict.fromkeys(("rtol", "atol", "slope_tolerance"), 1e-5)
    place = jax.lax.with_sharding_constraint if kind == "Auto" else jax.sharding.reshard

    def placed(*arrays, normalizer, **options):
        arrays = (place(a, rows) for a in arrays)
        return place(attend(*arrays, normalizer=place(normalizer, jax.P("tensor")), **options), rows)

    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    with jax.set_mesh(mesh):
        arrays, options = (
            qkv(10, 10, 2, batch=4),
            {"is_causal": True, "segment_ids": _segments(10, [3], [], [5, 6], [9])},
        )
        output, _ = check_definition(placed, arrays, NORMALIZERS["sink"], **options, **tolerances)
    assert output.sharding.shard_shape(output.shape) == (1, 10, 2, 8)


@pytest.mark.parametrize(("relaxed", "window"), [(0, None), (1, None), (5, None), (8, None), (5, 3), (0, 2)])
def test_relaxed_causal_mask_is_that_of_a_loop(relaxed, window):
    mask = np.asarray(relaxed_causal_mask(7, relaxed, window))
    assert mask.shape == (1, 1, 7, 7)
    for t, s in np.ndindex(7, 7):
        near = window is None or t - s < window
        assert mask[0, 0, t, s] == (near and (s <= t or (t < relaxed and s < relaxed)))
    queries, keys = jnp.array([3, 1, 6]), jnp.array([6, 0, 3, 4])
    part = relaxed_causal_mask(queries, relaxed, window, keys=keys)
    np.testing.assert_array_equal(part, mask[:, :, queries][..., keys])


def test_memory_of_chunks_is_linear_in_the_length():
    def temporary_bytes(t, implementation):
        attend = partial(dot_product_attention, is_causal=True, implementation=implementation)
        arrays = [jax.ShapeDtypeStruct((1, t, 8, 32), jnp.float32)] * 3
        gradient = jax.jit(jax.grad(lambda *arrays: jnp.sum(attend(*arrays)), (0, 1, 2)))
        return gradient.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    chunked = [temporary_bytes(t, "xla_chunked") for t in (2048, 4096, 8192)]
    full = [temporary_bytes(t, "xla") for t in (2048, 4096)]
    assert full[1] > 3.5 * full[0]  # so that the measure itself can fail
    for shorter, longer in itertools.pairwise(chunked):
        assert longer < 2.5 * shorter
    assert chunked[1] < full[1] / 3


@pytest.mark.parametrize(("nothing", "of"), [(0, "qkv"), (1, "q"), (3, "qkv"), (1, "kv"), (1, "qkv")])
def test_empty_axes_give_nothing(nothing, of):
    arrays = [np.delete(a, np.s_[:], nothing) if name in of else a for name, a in zip("qkv", _arrays(), strict=True)]
    for implementation, name in itertools.product((*IMPLEMENTATIONS, None), ("softmax", "softmax1", "sink", "relu")):
        options = {"normalizer": _normalizer(name), "implementation": implementation, "is_causal": True}
        output = dot_product_attention(*arrays, **options)
        np.testing.assert_array_equal(output, np.zeros(arrays[0].shape))
    assert attention_logits(*arrays[:2]).shape == (arrays[0].shape[0], N, arrays[0].shape[1], arrays[1].shape[1])


DEVICES, AXIS = 8, "sequence"
TOLERANCES = dict.fromkeys(("rtol", "atol", "slope_tolerance"), 1e-5)
LOGITS_OF_SINKS = {"softmax": None, "softmax1": 0.0, 0.5: np.log(0.5)}  # otherwise the normalizer is an array of them


def over_part(q, k, v, t, s):
    """Returns output and lse over the keys of one device, causal by positions; garbage where none is seen."""
    logits = jnp.where((s[None] <= t[:, None])[None, None], attention_logits(q, k), -jnp.inf)
    sees = jnp.isfinite(top := jax.lax.stop_gradient(jnp.max(logits, -1)))
    weights = jnp.exp(logits - jnp.where(sees, top, 0.0)[..., None])
    total = jnp.where(sees, jnp.sum(weights, -1), 1.0)
    lse = jnp.where(sees, jnp.where(sees, top, 0.0) + jnp.log(total), -jnp.inf)
    output = weighted_values(weights / total[..., None], v)
    return jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], output, 7.0), lse


def ring(q, k, v, sink, *, reverse):
    """Attends on one device of the ring, to which keys and values come one after the other."""
    here, T = jax.lax.axis_index(AXIS), q.shape[1]
    step = -1 if reverse else 1
    neighbours = [(i, (i + step) % DEVICES) for i in range(DEVICES)]
    found = None
    for turn in range(DEVICES):
        t, s = (T * device + jnp.arange(T) for device in (here, (here - step * turn) % DEVICES))
        new = over_part(q, k, v, t, s)
        found = new if found is None else merge(*(jnp.stack(pair) for pair in zip(found, new, strict=True)))
        k, v = jax.lax.ppermute((k, v), AXIS, neighbours)
    return merge(*(array[None] for array in found), sink=sink)[0]


@pytest.mark.parametrize("normalizer", [*LOGITS_OF_SINKS, "sinks"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_ring_of_devices_is_attention_over_all_keys(normalizer, reverse):
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P(None, AXIS)
    specs = {"in_specs": (rows, rows, rows, jax.P()), "out_specs": rows}
    attend_around = jax.shard_map(partial(ring, reverse=reverse), mesh=mesh, **specs)

    def attend(*arrays, normalizer, is_causal):
        sink = LOGITS_OF_SINKS[normalizer] if isinstance(normalizer, str | float) else normalizer
        return attend_around(*arrays, sink if sink is None else jnp.float32(sink))

    given = SINK if normalizer == "sinks" else normalizer
    check_definition(attend, qkv(16, 16, 2), given, is_causal=True, **TOLERANCES)


def test_a_query_that_sees_no_key_gets_zero_and_finite_gradients():
    outputs, lse = jnp.full((2, 1, 3, 1, 4), jnp.nan), jnp.full((2, 1, 1, 3), -jnp.inf)
    for sink in (None, jnp.zeros(1), jnp.full(1, -jnp.inf)):
        result = merge(outputs, lse, sink)
        np.testing.assert_array_equal(result[0], 0.0)
        np.testing.assert_array_equal(result[1], -np.inf if sink is None else sink[0])
        slopes = jax.grad(lambda *arrays, sink=sink: jnp.sum(merge(*arrays, sink)[0]), (0, 1))(outputs, lse)
        assert all((np.asarray(slope) == 0.0).all() for slope in slopes)
