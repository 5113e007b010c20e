"""What operations refuse: arguments that do not fit, and what a vendor's kernel cannot do."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused
from test_chunked_cross_entropy import loss_of, problem
from test_normalizers import ALL

import orthojax
from orthojax.ops import dot_product_attention, orthogonal, quantize, rotary, statistics, yarn_frequencies
from orthojax.ops.normalizers import apply_normalizer, softmax_with_sink

X = np.ones((2, 3), np.float32)
ONES = jnp.ones((1, 2, 3, 3))
FUNCTIONS = [
    (lambda _, normalizer: apply_normalizer(normalizer, ONES), [
        ("softmx", "softmx"), (-0.5, "-0.5"), (np.nan, "nan"), (jnp.zeros(3), ("(3,)", "(2,)")),
        (jnp.zeros((1, 2)), "(1, 2)"), (None, "None"), (True, "True"), ([0.0, 0.0], "array")], ValueError),
    (lambda _, name: ALL[name](X, where=jnp.ones((2, 3), jnp.int32)), [(name, "boolean") for name in ALL], ValueError),
    (lambda _, shape, axis: softmax_with_sink(jnp.zeros((2, 3)), jnp.zeros(shape), axis), [
        (shape, axis, ("sink of shape", "(2, 3)"))
        for shape, axis in (((3,), -1), ((2, 3), -1), ((2, 1), 0), ((1, 2, 1), -1))], ValueError),
    (lambda _, width, *where: rotary(jnp.zeros((4, 1, width)), *where), [
        (2, jnp.arange(5), "positions (5,)"), (2, jnp.arange(4), -1.0, "theta=-1.0"), (5, jnp.arange(4), "width")],
     ValueError),
    (lambda _, function, *what: function(*what), [
        *((function, what, f"of type {type(what).__name__}; allowed: an array of real numbers")
          for function in (orthojax.softmax1, orthojax.kurtosis, quantize.absmax, statistics.norm)
          for what in ("x", None, {}, lambda: 0, [[1], [1, 2]], 10**400)),
        *((function, X, axis, f"{axis!r} of an array with 2 axes")
          for function in (orthojax.softmax1, orthojax.kurtosis, statistics.norm_ratio)
          for axis in ("x", 2, -3, 0.5, (0, 0), b"x", True)),
        (orthojax.softmax1, X, -1, "x", "where of type str")], ValueError),
    (lambda _: yarn_frequencies(8, 1.0, 4.0, 64), "theta=1.0", ValueError),
    (lambda _: statistics.kurtosis(jnp.zeros(3, jnp.complex64)), "complex64; allowed: an array of real", ValueError),
    (lambda _, dtype, axis, kind: orthogonal.fixed_transform(jnp.zeros((4, 1, 2), dtype), axis, kind=kind), [
        (float, 0, "dtc", "'dtc'"), (float, -1, "hadamard", "axis=-1"), (int, 0, "dct", "int32")], ValueError),
    (lambda _, *how: quantize.absmax(X, *how), [
        (1, "bits=1"), (17, "bits=17"), (8.0, "bits=8.0"), (None, "bits=None"), (8, "token", "axes='token'")],
     ValueError),
    (lambda _, function, *how: function(X, *how), [
        (function, axis, f"axis={axis}") for function in (quantize.mxfp4, quantize.nvfp4) for axis in (5, -3, 0.5)]
     + [(quantize.e4m3, 2, 4, "axes=2"), *((quantize.e4m3, -1, block, f"block={block}") for block in (0, 2.5))],
     ValueError),
    (lambda _, function: function(X.astype(int)), [
        (function, "int") for function in (quantize.zeropoint, quantize.e4m3, quantize.mxfp4, quantize.nvfp4)],
     ValueError),
    (lambda _, hidden, kernel, targets, weights: loss_of(targets, weights, 0)(hidden, kernel), [
        (*problem(), "positions=0")], ValueError),
]  # fmt: skip


def attend(_, shape=(2, 5, 4, 8), *, key=(2, 7, 2, 8), value=None, dtype=np.float32, **options):
    """Attends with zeros."""
    arrays = (np.zeros(shape, dtype), np.zeros(key, np.float32), np.zeros(value or key, np.float32))
    dot_product_attention(*arrays, **options)


def attend_by(implementation, shapes, dtypes, **options):
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    dot_product_attention(*arrays, implementation=implementation, **options)


def by_cudnn(_, options, dtype=jnp.bfloat16, width=8, length=6, keys=None):
    shapes = [(2, n, 4, width) for n in (length, keys or length, keys or length)]
    attend_by("cudnn", shapes, [dtype] * 3, **options)


def by_splash(_, options, dtypes=(jnp.float32,) * 3):
    attend_by("splash", [(2, 128, 4, 8)] * 3, dtypes, **options)


def on_explicit_axes(_, implementation, spec, key_heads=2, keys=None):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    q, k = (jnp.zeros((4, 128, heads, 8), jnp.bfloat16) for heads in (8, key_heads))
    q, k = jax.device_put(q, NamedSharding(mesh, spec)), jax.device_put(k, NamedSharding(mesh, keys or P()))
    jax.eval_shape(lambda *arrays: dot_product_attention(*arrays, implementation=implementation), q, k, k)


def with_window(window):
    q = jnp.zeros((2, 6, 4, 8), jnp.bfloat16)
    return dot_product_attention(q, q, q, is_causal=True, local_window_size=window, implementation="cudnn")


def in_float64(folder):
    with jax.enable_x64(True):
        by_splash(folder, {})


HEADED = jnp.ones((2, 7, 4, 4))


def in_flax(_, asked):
    orthojax.attention_fn(implementation="splash")(HEADED, HEADED, HEADED, **asked)


def of_queries(_, queries, mask):
    orthojax.attention_fn(is_causal=True)(HEADED[:, :queries], HEADED, HEADED, mask=mask)


SEGMENTS = jnp.zeros((2, 6), jnp.int32)
ATTENTION = [
    (lambda d, options: attend(d, **options), [
        ({"key": (2, 7, 2, 8, 1)}, "key"), ({"shape": (2, 5, 4, 6)}, "width"), ({"shape": (2, 5, 3, 8)}, "heads"),
        ({"dtype": np.int32}, "int32"), ({"bias": np.zeros((2, 4, 5, 6), np.float32)}, "bias"),
        ({"mask": np.zeros((1, 1, 5, 7), np.float32)}, "mask"), ({"implementation": "cuda"}, "'cuda'"),
        ({"query_seq_lengths": jnp.array([1, 2, 3])}, "query_seq_lengths"), ({"value": (2, 7, 4, 8)}, "widths only"),
        ({"bias": np.zeros((2, 4, 5, 7), bool)}, "bool; what hides keys is a mask"),
        ({"scale": np.zeros((3, 1, 1), np.float32)}, "scale"), ({"scale": [0.5]}, "scale"),
        *(({"segment_ids": ids}, "segment_ids must be integers of shape (2, 5), and (2, 7) for the keys") for ids in (
            np.zeros((2, 5), np.int32), (np.zeros((2, 5), np.int32), np.zeros((2, 7))), ())),
        ({"is_causal": "False"}, "is_causal must be True or False, got 'False'"),
        *(({"normalizer": np.zeros(4, kind)}, "floating dtype") for kind in (complex, int, bool)),
        *(({"logits_soft_cap": cap}, "logits_soft_cap") for cap in (0.0, np.inf, np.ones(1))),
        *(({"local_window_size": size}, "local_window_size") for size in ("1", (1, 2, 3), 1.5, np.ones(2)))],
     ValueError),
    (lambda _, option: orthojax.attention_fn(**option), [  # where it is given, before it is called
        ({"normalizer": "softmx1"}, "'softmx1'"), ({"implementation": "cuda"}, "'cuda'")], ValueError),
    (by_cudnn, [
        ({"normalizer": "relu"}, "'relu'"), ({"normalizer": "softpick"}, "'softpick'"),
        ({"scale": jnp.float32(0.5)}, "scale"), ({"logits_soft_cap": 50.0}, "soft cap"),
        ({"local_window_size": (-1, 0)}, "window"), ({}, jnp.float32, "float32"), ({}, jnp.bfloat16, 12, "12"),
        ({"mask": jnp.ones((5, 5), bool)}, jnp.bfloat16, 8, 5, "even"), ({"local_window_size": 2}, "causal"),
        ({"local_window_size": (2, 0)}, jnp.bfloat16, 8, 6, 4, "keys"),
        ({"normalizer": 0.0, "mask": jnp.ones((6, 6), bool)}, "n = 0"),
        ({"segment_ids": SEGMENTS[:, :5]}, jnp.bfloat16, 8, 5, "segments the numbers of queries and keys must be even"),
        ({"segment_ids": SEGMENTS, "local_window_size": (2, 0)}, "a window cannot be combined with"),
        ({"segment_ids": SEGMENTS, "normalizer": 0.0}, "segments: rows that see no key")], NotImplementedError),
    (lambda _: jax.eval_shape(with_window, 3), "known when tracing", NotImplementedError),
    (by_splash, [
        ({"bias": jnp.zeros((1, 1, 128, 128))}, "bias=None"), ({"mask": jnp.ones((1, 1, 128, 128), bool)}, "mask"),
        ({"normalizer": "relu"}, "'relu'"), ({"normalizer": "softpick"}, "'softpick'"),
        ({"scale": jnp.ones((4, 1, 1))}, "scale"), ({"local_window_size": (3, -1)}, "window"),
        ({}, [jnp.bfloat16, jnp.float32, jnp.float32], "bfloat16, float32")], NotImplementedError),
    (in_float64, "jax_enable_x64", NotImplementedError),
    (on_explicit_axes, [
        ("cudnn", P(None, "x"), "batch and heads"), ("cudnn", P(None, None, "x"), "key-value heads"),
        ("splash", P("x"), "Explicit")], NotImplementedError),
    (on_explicit_axes, [
        (of, query, 2, keys, f"key is sharded along its {words}")
        for of in ("xla", "xla_chunked", "cudnn") for query, keys, words in (
            (P(None, "x"), P(None, "x"), "sequence"), (P("x"), P(None, "x"), "sequence"),
            (P(*[None] * 3, "x"), P(*[None] * 3, "x"), "sequence or width"))], ValueError),
    (in_flax, [
        ({"dropout_rate": 0.1}, "drop by 'splash'"), ({"module": object()}, "sow"),  # of a flax layer that sows weights
        ({"precision": "highest"}, "precision"), ({"qk_attn_weights_einsum": jnp.einsum}, "einsum")],
     NotImplementedError),
    (of_queries, [(n, mask, f"{n} queries to 7 keys") for n, mask in (
        (1, None), (3, None), (3, np.ones((1, 1, 3, 7), bool)))], ValueError),
]  # fmt: skip


test_refused = refused(*FUNCTIONS, *ATTENTION)
