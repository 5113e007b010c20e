"""Whether cuDNN's kernel can run here, and the form of it that needs none of JAX's private functions."""

import ctypes
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from orthojax.ops.attention import (
    cudnn,
    cudnn_kernel,
    dot_product_attention,
    forbid_fallback,
    xla,
)
from orthojax.ops.attention import dot_product as choice
from orthojax.ops.attention.dot_product import prepare_inputs

B, T, N, H = 2, 6, 4, 8
SINK = jnp.array([0.3, -1.0, 4.3, 0.0])


def _arrays(kv_heads=2, s=T, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(B, n, heads, H)), dtype) for n, heads in ((T, N), (s, kv_heads), (s, kv_heads))
    ]


def _inputs(q, k, v, bias=None, mask=None, **options):
    names = ("scale", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
    options = dict.fromkeys(names) | {"normalizer": "softmax1", "is_causal": False} | options
    return prepare_inputs(q, k, v, bias, mask, **options)


def _results(attend, *arrays):
    """Output and gradients."""

    def both(*arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, *pullback(jnp.sin(jnp.arange(output.size, dtype=output.dtype).reshape(output.shape)))

    return jax.jit(both)(*arrays)


def _error(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(1.0, np.abs(b).max())


# The form of public functions alone, by the other implementation of the same public function.

LENGTHS = {"query_seq_lengths": jnp.array([4, 6], jnp.int32), "key_value_seq_lengths": jnp.array([6, 0], jnp.int32)}
PUBLIC = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"is_causal": True, "scale": 0.7},
    "more keys": {"s": 9},
    "lengths": {**LENGTHS},
    "causal lengths": {"is_causal": True, **LENGTHS},
}


@pytest.mark.parametrize(
    ("case", "normalizer"),
    [
        ("plain", "softmax1"),
        ("causal lengths", "softmax1"),
        ("causal", 2.5),
        ("more keys", "sink"),
        ("causal lengths", "sink"),
        *(pytest.param(case, "sink", marks=pytest.mark.slow) for case in ("plain", "causal", "scale", "lengths")),
    ],
)
def test_the_public_form_is_the_same_attention(case, normalizer):
    options = dict(PUBLIC[case])
    arrays = _arrays(s=options.pop("s", T))
    learned = normalizer == "sink"

    def form(attend):
        return lambda q, k, v, sink: attend(_inputs(q, k, v, normalizer=sink if learned else normalizer, **options))

    got = _results(form(lambda inputs: cudnn.with_sink_key(inputs, "xla")), *arrays, SINK)
    for a, b in zip(got, _results(form(xla.attend), *arrays, SINK), strict=True):
        assert _error(a, b) < 1e-5


def test_softmax_in_the_public_form_is_jax_nn_with_all_options():
    q, k, v = _arrays()
    bias, mask = jnp.sin(jnp.arange(T * T, dtype=jnp.float32)).reshape(T, T), jnp.tri(T, dtype=bool)
    options = {"normalizer": "softmax", "local_window_size": (2, 0), **LENGTHS}
    inputs = _inputs(q, k, v, bias, mask, **options)
    got = jax.jit(lambda: cudnn.with_sink_key(inputs, "xla"))()
    assert _error(got, jax.jit(lambda: xla.attend(inputs))()) < 1e-5


def test_a_sink_logit_in_half_precision_is_not_rounded_to_it():
    q, k, v = (jnp.zeros((1, 4, 1, H), jnp.bfloat16), jnp.zeros((1, 4, 1, H), jnp.bfloat16), jnp.ones((1, 4, 1, H)))
    logit = 6.99  # bfloat16 has 6.96875 and 7
    inputs = _inputs(q, k, v.astype(q.dtype), normalizer=jnp.array([logit]))
    got = jax.jit(lambda: cudnn.with_sink_key(inputs, "xla"))()
    np.testing.assert_allclose(np.asarray(got, np.float64), 4 / (4 + np.exp(logit)), rtol=5e-3)


@pytest.fixture
def no_private_module(monkeypatch):
    monkeypatch.setattr(cudnn, "private_module", lambda: None)


@pytest.mark.usefixtures("no_private_module")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mask": jnp.ones((T, T), bool)}, "bias or a mask needs 'softmax'"),
        ({"bias": jnp.ones((T, T))}, "bias or a mask needs 'softmax'"),
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
    q = jnp.zeros((B, T, N, options.pop("width", H)), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=problem):
        dot_product_attention(q, q, q, implementation="cudnn", **options)


@pytest.mark.usefixtures("no_private_module")
def test_without_the_private_module_attention_is_the_public_form(monkeypatch):
    monkeypatch.setattr(cudnn, "with_sink_key", lambda inputs, implementation: (implementation, inputs))
    inputs = _inputs(*_arrays(dtype=jnp.bfloat16))
    assert not cudnn.unsupported(inputs)
    assert cudnn.attend(inputs) == ("cudnn", inputs)


def test_a_private_module_that_has_changed_is_not_used(monkeypatch):
    real = cudnn_kernel.private_module()
    assert real is not None  # the versions of JAX that are supported have it
    names = [name for name in dir(real) if not name.startswith("__")]
    for change in ({"MaskType": None}, {"_dot_product_attention_bwd_p_wrapper": None}, {"AttentionLayout": None}):
        changed = types.SimpleNamespace(**{name: getattr(real, name) for name in names} | change)
        monkeypatch.setattr(cudnn_kernel.importlib, "import_module", lambda name, changed=changed: changed)
        assert cudnn_kernel.private_module.__wrapped__() is None
    monkeypatch.setattr(cudnn_kernel.importlib, "import_module", lambda name: real)
    assert cudnn_kernel.private_module.__wrapped__() is real


# The probe. What it asks of the machine is two functions: which GPU there is, and where the wheels' libraries are.


_preload_builtins = cudnn.preload_builtins.__wrapped__  # without its memory


def _gpu(monkeypatch, capability, folders=()):
    monkeypatch.setattr(cudnn, "compute_capability", lambda: capability)
    monkeypatch.setattr(cudnn, "_library_folders", lambda: list(folders))
    monkeypatch.setattr(cudnn, "preload_builtins", _preload_builtins)


def test_here_the_kernel_is_unavailable():
    assert "needs an NVIDIA GPU" in cudnn.unavailable()
    assert "'cpu'" in cudnn.unavailable()
    assert cudnn.widest_head() == 256


class _Backend:
    def __init__(self, version, capability="9.0"):
        self.client = types.SimpleNamespace(platform_version=version)
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("version", "capability", "found", "widest"),
    [("cuda 13000", "9.0", (9, 0), 256), ("cuda 12080", "8.6", (8, 6), 128), ("rocm 60200", "gfx942", None, 256)],
)
def test_a_gpu_is_told_by_its_platform(monkeypatch, version, capability, found, widest):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [_Backend(version, capability)])
    assert cudnn.compute_capability() == found
    assert cudnn.widest_head() == widest
    if found is None:
        assert "needs an NVIDIA GPU" in cudnn.problem(xla.attend)


def test_an_old_gpu_is_refused_without_trying(monkeypatch):
    _gpu(monkeypatch, (7, 5))
    assert cudnn.problem(lambda inputs: 1 / 0) == "cuDNN's attention needs compute capability 8.0, got 7.5"


def test_a_kernel_that_runs_and_agrees_is_available(monkeypatch):
    _gpu(monkeypatch, (9, 0))
    assert cudnn.problem(xla.attend) == ""


def test_a_kernel_that_is_wrong_in_its_gradients_alone_is_found(monkeypatch):
    _gpu(monkeypatch, (9, 0))

    def naive(inputs):
        output, lse = jax.nn.dot_product_attention(
            inputs.query, inputs.key, inputs.value, is_causal=inputs.is_causal, return_residual=True
        )
        return output * jax.nn.sigmoid(lse)[..., None]

    assert "is wrong: it differs" in cudnn.problem(naive)
    assert "is wrong" in cudnn.problem(lambda inputs: xla.attend(inputs) * jnp.nan)


def test_a_kernel_that_fails_comes_with_advice(monkeypatch, tmp_path):
    def fails(inputs):
        raise RuntimeError("No valid engine configs\nand many more lines")

    _gpu(monkeypatch, (9, 0))
    problem = cudnn.problem(fails)
    assert problem == (
        "cuDNN's attention fails: RuntimeError: No valid engine configs. With CUDA 13, cuDNN wants libnvrtc-builtins "
        "on the path of the loader (LD_LIBRARY_PATH)"
    )
    (tmp_path / "libnvrtc-builtins.so.13.0").write_text("not a library")
    _gpu(monkeypatch, (9, 0), [tmp_path])
    problem = cudnn.problem(fails)
    assert f"LD_LIBRARY_PATH={tmp_path}:$LD_LIBRARY_PATH" in problem
    assert "libnvrtc-builtins.so.13.0" in problem  # what could not be loaded


def test_the_builtins_are_loaded_before_the_kernel_is_tried(monkeypatch, tmp_path):
    done = []
    (tmp_path / "libnvrtc-builtins.so.13.1").touch()
    (tmp_path / "libnvrtc.so.13").touch()
    _gpu(monkeypatch, (9, 0), [tmp_path])
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: done.append((name, mode)))

    def attend(inputs):
        done.append("tried")
        return xla.attend(inputs)

    assert cudnn.problem(attend) == ""
    assert done[0] == (str(tmp_path / "libnvrtc-builtins.so.13.1"), ctypes.RTLD_GLOBAL)
    assert set(done[1:]) == {"tried"}
    _gpu(monkeypatch, None, [tmp_path])
    assert cudnn.preload_builtins() == ""
    assert len([entry for entry in done if entry != "tried"]) == 1  # nothing is loaded where there is no GPU


def test_the_folders_of_the_wheels_are_found_where_python_finds_packages(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    assert folder not in cudnn._library_folders()
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert folder in cudnn._library_folders()


def test_the_probe_runs_while_another_function_is_traced(monkeypatch):
    _gpu(monkeypatch, (9, 0))
    seen = []

    def probing(x):
        seen.append(cudnn.problem(xla.attend))
        return 2 * x

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    jax.jit(probing)(jnp.ones(4))
    jax.jit(jax.vmap(jax.grad(lambda x: probing(x))))(jnp.ones(4))
    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(probing, out_specs=P("x")))(jax.sharding.reshard(jnp.ones(4), P("x")))
    assert seen
    assert set(seen) == {""}


def test_the_choice_asks_the_kernel_once_and_falls_back_with_its_reason(monkeypatch):
    monkeypatch.setitem(choice._KERNELS, "cpu", "cudnn")
    choice._warn.cache_clear()
    q = jnp.zeros((B, T, N, H), jnp.bfloat16)
    with pytest.warns(UserWarning, match=r"'cudnn' to plain XLA.*needs an NVIDIA GPU"):
        got = dot_product_attention(q, q, q)
    assert (got == 0.0).all()
    with forbid_fallback(), pytest.raises(NotImplementedError, match=r"may not fall back.*needs an NVIDIA GPU"):
        dot_product_attention(q, q, q)
    with forbid_fallback(), pytest.raises(NotImplementedError, match="got float32"):
        dot_product_attention(*[q.astype(jnp.float32)] * 3)
    choice._warn.cache_clear()
