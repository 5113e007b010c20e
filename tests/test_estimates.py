"""FLOPs per token, peaks, MFU and dry runs: closed forms, what JAX traces, XLA's own count, the real state and step."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import model_oracle
import numpy as np
import pytest
from jax.interpreters import partial_eval
from thinned import quick_and_slow
from tiny_run import TINY

from orthojax.config import ModelConfig, replace
from orthojax.experiments.costs import interleaved_seconds, ratio_quartiles
from orthojax.model import Transformer, flops_per_token, gpt2, llama2, parameter_shapes
from orthojax.train import dry_run, init_state, model_flops_per_token, model_flops_utilization

SMALL = {"vocab_size": 96, "max_length": 64, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_mlp": 160}
SMALL |= {"scan_layers": False}
NAMES = ("gpt2", "llama2", "rich", "layers differ", "parts", "query latents, groups of experts")
MODELS = {name: model_oracle.CONFIGS[name] for name in NAMES}
MODELS["no attention"] = ModelConfig(**SMALL, attention=False, mlp="relu", normalizer="relu")


def closed_form(layers, d, vocab, length):
    """GPT-2 with an MLP of 4 d and tied embeddings, half of the attention matrix counted."""
    return 6 * (layers * 12 * d**2 + vocab * d) + 6 * layers * length * d


@pytest.mark.parametrize(
    ("size", "layers", "d"), [("60m", 12, 512), ("130m", 12, 768), ("350m", 24, 1024), ("1.4b", 24, 2048)]
)
@pytest.mark.parametrize("length", [256, 1024])
def test_gpt2_sizes_are_the_closed_form(size, layers, d, length):
    model = gpt2(size, vocab_size=50_304)
    assert model_flops_per_token(model, length) == closed_form(layers, d, 50_304, length)
    both = closed_form(layers, d, 50_304, length) + 6 * layers * length * d
    assert flops_per_token(model, length) == both


def traced_flops(function, *args):
    """2 m n k of every matrix product that the results of a function need."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return matrix_products_flops(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def matrix_products_flops(jaxpr):
    """Also inside jitted and custom-derivative functions."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(np.prod(equation.outvars[0].aval.shape) * depth)
        total += sum(matrix_products_flops(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params))
    return total


@pytest.mark.parametrize("name", quick_and_slow(MODELS, ("llama2", "no attention")))
def test_forward_and_backward_trace_just_these_products(name):
    """No tolerance: XLA's plain attention computes the whole matrix, so `flops_per_token` counts every product."""
    model, batch, length = MODELS[name], 3, 16
    tokens = jnp.zeros((batch, length), jnp.int32)
    params = parameter_shapes(model)

    def loss(params):
        return jnp.sum(Transformer(model).apply({"params": params}, tokens)[0])

    expected = batch * length * flops_per_token(model, length)
    assert traced_flops(jax.value_and_grad(loss), params) == expected
    assert 3 * traced_flops(loss, params) == expected


def test_utilization_is_the_share_of_the_peak():
    flops = closed_form(12, 768, 50_304, 1024)
    assert model_flops_utilization(989e12 / flops, flops, "NVIDIA H200", 1) == pytest.approx(1.0)
    assert model_flops_utilization(463_000, flops, "NVIDIA H200", 8) == pytest.approx(0.3736 / 8, abs=1e-4)
    assert model_flops_utilization(275e12, 4, "TPU v4") == pytest.approx(4 / jax.device_count())  # those of JAX
    for unknown in (None, "NVIDIA H100", "NVIDIA H200 NVL"):  # None is the CPU that runs the tests
        assert model_flops_utilization(463_000, flops, unknown, 1) is None


MODEL = gpt2("tiny", num_layers=2, d_model=32, num_heads=4, d_mlp=64, vocab_size=64, max_length=16)
CHANGES = {"optim.optimizer": "orthoadam", "data.sequence_length": 16, "train.steps": 10, "train.batch_size": 16}
RUN = replace(dataclasses.replace(TINY, model=MODEL), CHANGES)


@pytest.mark.parametrize(
    "mesh", [{"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_a_dry_run_counts_what_the_run_holds(mesh):
    config = replace(RUN, mesh)
    said = list(dry_run(config))
    found = dict(line.strip().split(": ", 1) for line in said if line.endswith("B"))
    state, first = init_state(config), jax.devices()[0]

    def held(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == first]
        return sum(shard.data.nbytes for shard in shards)

    sizes = {name: float(size.split()[0]) * {"kB": 1e3, "MB": 1e6}[size.split()[1]] for name, size in found.items()}
    assert sizes["parameters"] == pytest.approx(held(state.params), rel=0.01)
    assert sizes["optimizer state"] == pytest.approx(held(state.opt_state), rel=0.01)
    assert sizes.pop("together") == pytest.approx(sum(sizes.values()), rel=0.01)
    counts = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    for what in (f"{counts:,} parameters", "2,560", "8 x cpu" if mesh else "1 x cpu"):
        assert any(what in line for line in said), what


class FakeMachine:
    """Has a clock that its functions move by the given seconds, so that every expected second is known."""

    def __init__(self):
        self.now, self.calls = 100.0, []

    def clock(self):
        return self.now

    def function(self, name, seconds):
        left = list(seconds)

        def call():
            self.calls.append(name)
            self.now += left.pop(0)

        return call


def test_seconds_are_of_each_function_and_order_alternates():
    machine = FakeMachine()
    functions = {"a": machine.function("a", [500, 1, 2, 3]), "b": machine.function("b", [700, 10, 20, 30])}
    assert interleaved_seconds(functions, 3, clock=machine.clock) == {"a": [1, 2, 3], "b": [10, 20, 30]}
    assert machine.calls[-6:] == ["a", "b", "b", "a", "a", "b"]


def test_call_is_over_when_its_result_is_ready():
    machine = FakeMachine()

    class Result:
        def block_until_ready(self):
            machine.now += 5.0
            return self

    seconds = interleaved_seconds({"a": lambda: [Result(), Result()]}, 2, clock=machine.clock)
    assert seconds == {"a": [10.0, 10.0]}


def test_ratios_are_taken_within_a_repetition():
    """A machine that is ten times slower for a while changes no ratio, but both medians."""
    assert ratio_quartiles([3, 30, 30, 3], [2, 20, 20, 2]) == pytest.approx([1.5, 1.5, 1.5])
    assert ratio_quartiles([1, 3, 9], [1, 1, 9]) == pytest.approx([1.0, 1.0, 2.0])  # that of the medians is 3


def test_causality_halves_products_of_attention():
    model, length = llama2("tiny", **SMALL, d_head=24), 32
    attention = 6 * 2 * length * 4 * (24 + 24)  # layers, heads
    assert model_flops_per_token(model, length) == flops_per_token(model, length) - attention // 2
    wider = llama2("tiny", **SMALL, d_head=24, num_kv_heads=1)
    assert flops_per_token(model, 2 * length) - flops_per_token(model, length) == attention
    assert flops_per_token(wider, 2 * length) - flops_per_token(wider, length) == attention
