"""Which implementation computes an attention: by name, by platform, and what happens where a kernel cannot."""

import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.model import Transformer, gpt2
from orthojax.ops import dot_product_attention, forbid_fallback
from orthojax.ops.attention import dot_product as choice
from orthojax.ops.attention import xla

SHAPE = (1, 8, 2, 8)
Q, K, V = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).normal(size=(3, *SHAPE)))


class Kernel:
    """Stands for a vendor's: it doubles what plain XLA gives, so that its use shows."""

    def __init__(self, unsupported="", unavailable=""):
        self.problems = {"unsupported": unsupported, "unavailable": unavailable}

    def unsupported(self, inputs):
        return self.problems["unsupported"]

    def unavailable(self):
        return self.problems["unavailable"]

    def attend(self, inputs):
        return 2 * xla.attend(inputs)


@pytest.fixture
def on(monkeypatch):
    """on(platform, kernel): that default backend, with that module for its kernel."""

    def change(platform, kernel):
        real, name = choice._kernel, {"gpu": "cudnn", "tpu": "splash"}.get(platform)
        monkeypatch.setattr(choice, "_kernel", lambda asked: kernel if asked == name else real(asked))
        monkeypatch.setattr(choice, "_platform", lambda array: platform)
        choice._warn.cache_clear()

    yield change
    choice._warn.cache_clear()


def is_kernel(**options):
    plain = dot_product_attention(Q, K, V, implementation="xla")
    output = dot_product_attention(Q, K, V, **options)
    doubled = bool(np.allclose(output, 2 * plain, rtol=1e-5))
    assert doubled or np.allclose(output, plain, rtol=1e-5)
    return doubled


@pytest.mark.parametrize(("platform", "expected"), [("gpu", True), ("tpu", True), ("cpu", False), ("other", False)])
def test_none_picks_the_kernel_of_the_platform(on, platform, expected):
    on(platform, Kernel())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_kernel() is expected
        assert is_kernel(implementation="xla") is False
        with forbid_fallback():
            assert is_kernel() is expected


@pytest.mark.parametrize("where", ["unsupported", "unavailable"])
def test_none_falls_back_with_one_warning_for_each_reason(on, where):
    kernel = Kernel(**{where: "the first reason"})
    on("gpu", kernel)
    with pytest.warns(UserWarning, match="'cudnn' to plain XLA.*the first reason"):
        assert is_kernel() is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_kernel() is False
    kernel.problems[where] = "another reason"
    with pytest.warns(UserWarning, match="another reason"):
        assert is_kernel() is False


@pytest.mark.parametrize("where", ["unsupported", "unavailable"])
def test_within_forbid_fallback_none_refuses_with_the_reason(on, where):
    on("tpu", Kernel(**{where: "too wide"}))
    with forbid_fallback(), pytest.raises(NotImplementedError, match="fall back from 'splash' here: too wide"):
        dot_product_attention(Q, K, V)
    with pytest.warns(UserWarning, match="too wide"):
        assert is_kernel() is False


def test_the_ban_holds_in_its_own_thread_and_ends_with_an_error(on):
    on("gpu", Kernel(unsupported="no"))
    found = []

    def fail():
        with forbid_fallback():
            other = threading.Thread(target=lambda: found.append(choice._fallback_forbidden.get()))
            other.start()
            other.join()
            raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        fail()
    assert found == [False]
    with pytest.warns(UserWarning, match="falls back"):
        assert is_kernel() is False


def test_an_implementation_by_name_never_falls_back(on):
    on("gpu", Kernel(unsupported="rows are too long", unavailable="not asked"))
    with pytest.raises(NotImplementedError, match="implementation='cudnn': rows are too long"):
        dot_product_attention(Q, K, V, implementation="cudnn")


@pytest.mark.parametrize(("name", "hardware"), [("cudnn", "an NVIDIA GPU"), ("splash", "a TPU")])
@pytest.mark.parametrize("how", ["eager", "jit", "grad", "jit of grad", "vmap"])
def test_a_kernel_by_name_on_a_cpu_is_refused_when_it_is_compiled(name, hardware, how):
    q = jnp.ones((2, 128, 2, 64), jnp.bfloat16)

    def attend(q):
        return jnp.sum(dot_product_attention(q, q, q, implementation=name, is_causal=True))

    call = {
        "eager": attend,
        "jit": jax.jit(attend),
        "grad": jax.grad(attend),
        "jit of grad": jax.jit(jax.grad(attend)),
        "vmap": jax.vmap(attend),
    }[how]
    with pytest.raises(NotImplementedError, match=f"implementation='{name}' needs {hardware}.* compiled for 'cpu'"):
        call(q)


def test_one_query_is_left_to_xla(on):
    on("gpu", Kernel())
    one = dot_product_attention(Q[:, :1], K, V)
    np.testing.assert_allclose(one, dot_product_attention(Q[:, :1], K, V, implementation="xla"), rtol=1e-6)


@pytest.mark.parametrize(("length", "expected"), [(8, "xla"), (9, "xla_chunked")])
def test_many_weights_are_made_in_chunks(monkeypatch, length, expected):
    monkeypatch.setitem(choice._LARGEST_WEIGHTS_BYTES, "cpu", 4 * 2 * 8 * 8)
    asked = []
    attend = types.SimpleNamespace(attend=lambda inputs: inputs.query)
    monkeypatch.setattr(choice, "_kernel", lambda name: asked.append(name) or attend)
    dot_product_attention(*(jnp.zeros((1, length, 2, 8)) for _ in range(3)))
    assert asked == [expected]


def test_unknown_names_are_refused_with_all_that_are_known():
    with pytest.raises(ValueError, match="'flash'; allowed: None, 'xla', 'xla_chunked', 'cudnn', 'splash'"):
        dot_product_attention(Q, K, V, implementation="flash")


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True, "dots", "full"])
def test_a_model_on_cudnn_attends_once_forward_unless_it_keeps_nothing_and_once_backward_in_each_layer(scan, remat):
    config = gpt2(
        "tiny", d_model=32, d_mlp=32, num_heads=2, num_layers=2, vocab_size=16, max_length=64, dtype="bfloat16",
        normalizer="softmax1", attention_implementation="cudnn", scan_layers=scan, remat=remat,
    )  # fmt: skip
    model, tokens = Transformer(config), jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        return jnp.sum(model.apply(params, tokens)[0])

    text = jax.jit(jax.grad(loss)).trace(params, tokens).lower(lowering_platforms=("cuda",)).as_text()
    layers = 1 if scan else 2  # a scan's body stands once
    assert text.count("@__cudnn$fmhaSoftmax(") == layers * (2 if remat == "full" else 1)
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == layers


def test_none_picks_for_the_device_of_arrays_and_for_the_default_device_of_traces(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choice._platform(Q) == "cpu"

    def traced():
        seen = []
        jax.eval_shape(lambda q: (seen.append(choice._platform(q)), q)[1], Q)
        return seen[0]

    assert traced() == "gpu"
    with jax.default_device(jax.devices("cpu")[1]):
        assert traced() == "cpu"
    with jax.default_device("tpu"):
        assert traced() == "tpu"


def test_cudnn_by_name_says_what_is_wrong_with_it_on_a_gpu(on):
    on("gpu", Kernel(unavailable="its library is missing"))
    with pytest.raises(NotImplementedError, match="implementation='cudnn': its library is missing"):
        dot_product_attention(Q, K, V, implementation="cudnn")
    on("cpu", Kernel(unavailable="there is no GPU"))  # lowered here, run elsewhere
    dot_product_attention(Q, K, V, implementation="xla")
