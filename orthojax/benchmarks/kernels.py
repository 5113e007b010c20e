"""Kernels against what they replace: attention against softmax attention, integer linear layers against float32."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import quant
from orthojax.benchmarks.suite import (
    TINY_MODEL,
    Case,
    Column,
    Comparison,
    Contender,
    LeftOut,
    Row,
    Suite,
    TimeBudget,
    compile_program,
    random_like,
    tree_bytes,
)
from orthojax.model import LinearFunction, Transformer, gpt2, linear, parameter_shapes
from orthojax.ops.attention import Implementation, cudnn, dot_product_attention
from orthojax.ops.attention.dot_product import prepare_inputs

# Attention: softmax-1 and learned sinks against softmax by the same kind of kernel.

# (query, key, value [B, T, N, H], sink logits float32 [N]) -> [B, T, N, H]; causal. All but one ignore the sink.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
Shape = tuple[int, int, int, int]

# Dependent calls in one program, which is a repetition: on an accelerator a single one is too short to time.
_CALLS, _CPU_CALLS = 10, 2
_SHAPES: dict[str, tuple[Shape, ...]] = {
    "accelerator": ((32, 1024, 12, 64), (8, 4096, 12, 64), (128, 256, 12, 64), (8, 2048, 16, 128)),
    "cpu": ((4, 256, 12, 64), (2, 1024, 12, 64), (1, 2048, 12, 64)),
    "cpu xla_chunked": ((1, 4096, 4, 64),),
    "tiny": ((1, 128, 2, 16),),
}


def ours(implementation: Implementation, normalizer: str) -> Attend:
    """Our attention with a normalizer by name, or with the sink logits as "learned sink"."""
    return lambda query, key, value, sink: dot_product_attention(
        query,
        key,
        value,
        normalizer=sink if normalizer == "learned sink" else normalizer,  # pyright: ignore
        is_causal=True,
        implementation=implementation,
    )


def vendor_softmax(implementation: Any) -> Attend:
    """Softmax by `jax.nn`, without any code of ours."""
    return lambda query, key, value, sink: jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )


def zero_row(implementation: str) -> Attend:
    """softmax-1 from `jax.nn` alone: the fallback where JAX's private cuDNN module is not as expected."""
    return lambda query, key, value, sink: cudnn.with_sink_key(
        prepare_inputs(query, key, value, normalizer="softmax1", is_causal=True), implementation
    )


def attention_cases(platform: str, tiny: bool) -> list[Case]:
    """What is measured on a platform (as `jax.default_backend()` names it), the most important first."""
    kernels: dict[str, tuple[Implementation, Implementation]] = {"gpu": ("cudnn", "xla"), "tpu": ("splash", "xla")}
    place = "cpu" if platform == "cpu" else "accelerator"
    return [
        _attention_case(implementation, shape, platform, backward)
        for implementation in kernels.get(platform, ("xla", "xla_chunked"))
        for shape in (_SHAPES["tiny"] if tiny else _SHAPES.get(f"{place} {implementation}", _SHAPES[place]))
        for backward in (True, False)
    ]


def _attention_case(implementation: Implementation, shape: Shape, platform: str, backward: bool) -> Case:
    """Attentions by one kind of kernel against its softmax, forward and backward or forward alone."""
    dtype, calls = (jnp.float32, _CPU_CALLS) if platform == "cpu" else (jnp.bfloat16, _CALLS)
    attentions = {name: ours(implementation, name) for name in ("softmax", "softmax1", "learned sink")}
    if implementation == "cudnn":
        # jax.nn's own kernel where it is a kernel; its plain XLA is slower than ours, which would flatter.
        attentions |= {"softmax": vendor_softmax("cudnn"), "softmax1 by a zero row": zero_row("cudnn")}
    if implementation == "xla":
        attentions["softmax of jax.nn"] = vendor_softmax("xla")

    def contender(attend: Attend) -> Contender:
        if implementation == "cudnn" and (why := cudnn.unavailable()):
            raise LeftOut(why)  # asking has also loaded what cuDNN needs, which `jax.nn` does not
        operands = attention_operands(shape, dtype)
        program = compile_program(jax.jit(repeated(attend, backward, calls)), *operands)
        jax.block_until_ready(program.run(*operands))
        return Contender(lambda _: program.run(*operands), program.sizes)

    passes = "forward + backward" if backward else "forward"
    name = f"{implementation} {'x'.join(map(str, shape))} {jnp.dtype(dtype).name} {passes}"
    return Case(name, {each: functools.partial(contender, attend) for each, attend in attentions.items()})


@functools.lru_cache(maxsize=1)  # the cases of one shape come one after the other
def attention_operands(shape: Shape, dtype: Any) -> tuple[jax.Array, ...]:
    """Cotangent of the output, query, key, value; sink logits, float32: all standard normal."""
    *large, sink = random_like([jax.ShapeDtypeStruct(s, jnp.float32) for s in (*[shape] * 4, shape[2:3])], 1.0)
    return *(x.astype(dtype) for x in large), sink


def repeated(attend: Attend, backward: bool, calls: int) -> Callable[..., Any]:
    """A function of the operands that attends `calls` times, with the last output as the next query.

    With `backward` it returns the last output and the gradients of query, key, value and sink, and the gradients of
    query and value are the next query and value.
    """

    def forward(cotangent, query, key, value, sink):
        del cotangent
        return jax.lax.fori_loop(0, calls, lambda _, query: attend(query, key, value, sink), query)

    def with_gradients(cotangent, query, key, value, sink):
        def call(_, results):
            # With a new query alone, cotangent @ value^T would be the same in all calls, and computed once. A new
            # key as well would let the gradients fade from call to call.
            _, query, _, value, _ = results
            output, pullback = jax.vjp(attend, query, key, value, sink)
            return output, *pullback(cotangent)  # without the output, its product would not be computed at all

        return jax.lax.fori_loop(0, calls, call, (query, query, key, value, sink))

    return with_gradients if backward else forward


def _measure_attention(repeats: int, tiny: bool) -> Iterator[Row]:
    platform, budget = jax.default_backend(), TimeBudget(150.0)
    comparison = Comparison(
        ratios=("temp_bytes",),
        longest=15.0,
        fewest_calls=_CPU_CALLS if platform == "cpu" else _CALLS,
        shortest=0.0,
        # On a CPU the time of its cores, so that other programs count as little as they can.
        clock=time.process_time if platform == "cpu" else time.perf_counter,
    )
    for case in attention_cases(platform, tiny):
        yield from comparison.rows(case, repeats, budget)


ATTENTION = Suite(
    name="attention",
    title=(
        "Causal attention against softmax by the same kind of kernel (B x T x N x H): median ratio (quartiles),\n"
        "on a CPU of processor time, which all its cores add to"
    ),
    measure=_measure_attention,
    columns=(
        Column("time ratio", "seconds_ratio"),
        Column("softmax to itself", "control_ratio"),
        Column("call", "seconds", "seconds"),
        Column("softmax", "softmax_seconds", "seconds"),
        Column("temporary ratio", "temp_bytes_ratio", "{:.4g}"),
        Column("temporary", "temp_bytes", "bytes"),
        Column("of softmax", "softmax_temp_bytes", "bytes"),
    ),
    repeats=20,
)

# Quantisation: inputs are quantised within the measured time and multiplied as integers; where a setting leaves them
# float (int4_zeropoint), kernels are dequantised within it. Calls are timed with their dispatch.

_SETTINGS = ("int8_moderate", "int8_fine_per_token", "w8a8_group64", "w4a8", "w4a8_group64", "w4a4", "int4_zeropoint")
_TINY_SETTINGS = ("int8_moderate", "w4a8", "int4_zeropoint")

# (linear, params, inputs) -> outputs
Apply = Callable[[LinearFunction, Any, jax.Array], jax.Array]


def quantization_cases(tiny: bool) -> Iterator[Case]:
    """The widest kernel [in, out] of GPT-2 130M on one token and on many, and a forward pass of the model.

    The head of the model is its token table, which stays float32: a third of its parameters and of its products.
    """
    model, settings, many = (TINY_MODEL, _TINY_SETTINGS, 4) if tiny else (gpt2("130m"), _SETTINGS, 512)
    model = dataclasses.replace(model, scan_layers=False)
    length, generator = min(256, model.max_length), np.random.default_rng(1)
    kernel = {"kernel": jax.ShapeDtypeStruct((model.d_model, model.d_mlp), jnp.float32)}

    def layer(function: LinearFunction, params: Any, x: jax.Array) -> jax.Array:
        return function(x, params["kernel"], None, "mlp/input")

    def forward(function: LinearFunction, params: Any, tokens: jax.Array) -> jax.Array:
        return Transformer(model, linear=function).apply({"params": params}, tokens)[0]  # pyright: ignore

    for count, name in ((1, "1 token"), (many, f"{many} tokens")):
        x = jnp.asarray(generator.standard_normal((count, model.d_model), np.float32))
        yield from _quantization_cases(f"{name} x {model.d_model}x{model.d_mlp}", kernel, x, layer, settings)
    tokens = jnp.asarray(generator.integers(model.vocab_size, size=(1, length)), jnp.int32)
    shapes = parameter_shapes(model)
    name = f"gpt2, {model.num_layers} layers of {model.d_model}, 1x{length}"
    yield from _quantization_cases(name, shapes, tokens, forward, settings)


def _quantization_cases(
    name: str, shapes: Any, inputs: jax.Array, apply: Apply, settings: tuple[str, ...]
) -> Iterator[Case]:
    float_params = functools.cache(lambda: random_like(shapes, 0.02))

    def contender(setting_name: str) -> Contender:
        function, params = linear, float_params()
        if setting_name != "float32":
            setting = quant.setting_named(setting_name)
            function, params = quant.integer_linear(setting), quant.integer_params(params, setting)
        program = compile_program(jax.jit(lambda params, inputs: apply(function, params, inputs)), params, inputs)
        sizes = {"params_bytes": tree_bytes(params)} | program.sizes
        return Contender(lambda calls: [program.run(params, inputs) for _ in range(calls)], sizes)

    plain = functools.cache(lambda: contender("float32"))
    for each in settings:  # one at a time: what a contender holds is freed before the next is made
        yield Case(name, {"float32": plain, each: functools.partial(contender, each)})


def _measure_quantization(repeats: int, tiny: bool) -> Iterator[Row]:
    comparison, budget = Comparison(("params_bytes",), longest=20.0), TimeBudget(300.0)
    for case in quantization_cases(tiny):
        yield from comparison.rows(case, repeats, budget)


QUANTIZATION = Suite(
    name="quantization",
    title="Kernels of integers against float32: median ratio (quartiles); the head of a model stays float32",
    measure=_measure_quantization,
    columns=(
        Column("time ratio", "seconds_ratio"),
        Column("float32 to itself", "control_ratio"),
        Column("call", "seconds", "seconds"),
        Column("float32", "float32_seconds", "seconds"),
        Column("parameters", "params_bytes", "bytes"),
        Column("of float32", "float32_params_bytes", "bytes"),
        Column("temporary", "temp_bytes", "bytes"),
        Column("of float32", "float32_temp_bytes", "bytes"),
    ),
    repeats=10,
)
