"""The training step as it is lowered for an NVIDIA GPU, on a machine without one."""

import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from orthojax.config import Config, DataConfig, TrainConfig, replace
from orthojax.model import gpt2
from orthojax.train import step
from orthojax.train.step import training_logits_dtype

B, T, V = 512, 256, 50_304
CONFIG = Config(
    model=gpt2("60m", vocab_size=V, dtype="bfloat16", normalizer="softmax1", attention_implementation="cudnn"),
    data=DataConfig(sequence_length=T),
    train=TrainConfig(batch_size=B),
)


def lowered(config):
    """Returns the text of a step, with what the code chooses for a GPU."""
    cpu = jax.devices("cpu")[0]  # the attention kernel is not asked if it runs here
    with jax.default_device(cpu), mock.patch("jax.default_backend", return_value="gpu"):
        step._build.cache_clear()
        program = step.build(config)
        shapes = jax.eval_shape(program.init, jax.random.key(0))
        traced = program.step.trace(shapes, jax.ShapeDtypeStruct((B, T + 1), jnp.int32))
    step._build.cache_clear()
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_step_never_has_all_logits():
    text = lowered(replace(CONFIG, {"model.num_layers": 1}))
    shapes = {match: [int(n) for n in match[0].split("x")] for match in re.findall(r"tensor<([\dx]+)x(\w+)>", text)}
    logits = {match: dims for match, dims in shapes.items() if V in dims and len(dims) == 3}
    # 412 MB of bfloat16 logits; what is computed from them is float32 in the program, and fused.
    assert {dtype for _, dtype in logits} >= {"bf16"}
    assert max(map(math.prod, logits.values())) == B * 8 * V == B * T * V // 32
    products = [line for line in text.splitlines() if "dot_general" in line and f"x{V}x" in line.rpartition("->")[2]]
    assert products
    assert all(line.rpartition("->")[2].strip().startswith(f"tensor<{B}x") for line in products)
    assert all("xbf16>" in line.rpartition("->")[2] for line in products)


@pytest.mark.parametrize(("backend", "dtype", "asked", "expected"), [
    ("gpu", "bfloat16", "auto", "bfloat16"),
    ("tpu", "bfloat16", "auto", "bfloat16"),
    ("cpu", "bfloat16", "auto", None),
    ("gpu", "float32", "auto", None),
    ("gpu", "bfloat16", "float32", None),
    ("cpu", "float32", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_the_dtype_of_logits_is_chosen_by_platform(backend, dtype, asked, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = replace(CONFIG, {"model.dtype": dtype, "train.logits_dtype": asked})
    assert training_logits_dtype(config) == expected
