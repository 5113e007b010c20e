"""Times causal attention with softmax-1 and learned sinks against softmax: python benchmarks/attention.py.

Each implementation of the platform, at several lengths, forward and backward; softmax of jax.nn is timed as well. On a
CPU processor seconds count, which other programs change little.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from comparing import compare, show, table_parser

from orthojax import dot_product_attention

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # query, key, value [B, T, N, H] -> [B, T, N, H]

IMPLEMENTATIONS = {"gpu": ("cudnn", "xla"), "tpu": ("splash", "xla"), "cpu": ("xla", "xla_chunked")}
SHAPES = {  # [B, T, N, H]
    "cpu": ((4, 256, 12, 64), (2, 1024, 12, 64)),
    "accelerator": ((128, 256, 12, 64), (32, 1024, 12, 64), (8, 4096, 12, 64)),
    "crossover": tuple((32_768 // T, T, 12, 64) for T in (64, 128, 192, 256, 384, 512)),
    "tiny": ((1, 128, 2, 16),),
}


def attentions(implementation: Any, heads: int) -> dict[str, Attend]:
    """Returns what is compared, by name; the first is the reference."""

    def ours(normalizer: Any) -> Attend:
        return lambda query, key, value: dot_product_attention(
            query, key, value, normalizer=normalizer, is_causal=True, implementation=implementation
        )

    def of_jax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        vendor = "cudnn" if implementation == "cudnn" else "xla"
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=vendor)

    return {
        "softmax": ours("softmax"),
        "softmax1": ours("softmax1"),
        "learned sink": ours(jnp.zeros(heads)),
        "softmax of jax.nn": of_jax,
    }


def repeated(attend: Attend, backward: bool, calls: int) -> Callable[..., Any]:
    """Returns a function of (cotangent, query, key, value) that attends so many times, each time on the last result.

    A single call is too short to time on an accelerator. In a backward call the gradients of query and value are the
    next query and value: with a new query alone, cotangent @ value^T would be computed once for all calls.
    """

    def forward(_: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return jax.lax.fori_loop(0, calls, lambda _, query: attend(query, key, value), query)

    def with_gradients(cotangent: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        def call(_: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            output, pullback = jax.vjp(attend, results[1], key, results[3])
            return output, *pullback(cotangent)  # without the output, its product would not be computed at all

        return jax.lax.fori_loop(0, calls, call, (query, query, key, value))

    return jax.jit(with_gradients if backward else forward)


def crossover(tiny: bool, repeats: int) -> list[dict[str, Any]]:
    """Times softmax-1 by each implementation of the platform against the first, where the default changes."""
    rows, platform = [], jax.default_backend()
    for shape in SHAPES["tiny" if tiny else "crossover"]:
        dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
        operands = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)]
        functions = {
            name: functools.partial(repeated(attentions(name, shape[2])["softmax1"], True, 10), *operands)
            for name in IMPLEMENTATIONS[platform]
        }
        for name, measured in compare(functions, repeats).items():
            rows.append({"implementation": name, "B x T": f"{shape[0]} x {shape[1]}"} | measured)
    return rows


def first_failure(functions: dict[str, Callable[[], Any]]) -> str | None:
    """Compiles and calls all; returns which of them the platform does not support, and why."""
    for name, function in functions.items():
        try:
            jax.block_until_ready(function())
        except (NotImplementedError, RuntimeError, ValueError) as error:  # RuntimeError: also out of memory
            return f"{name}: {str(error).splitlines()[0]}"
    return None


def main() -> None:
    options, platform = table_parser(__doc__ or ""), jax.default_backend()
    options.add_argument("--crossover", action="store_true", help="implementations against each other, short rows")
    arguments = options.parse_args()
    if arguments.crossover:
        rows = crossover(arguments.tiny, arguments.repeats)
        show("Softmax-1, forward + backward: median ratio, quartiles", rows, arguments.json)
        return
    on_cpu = platform == "cpu"
    dtype, calls = (jnp.float32, 2) if on_cpu else (jnp.bfloat16, 10)
    rows = []
    for shape in SHAPES["tiny" if arguments.tiny else "cpu" if on_cpu else "accelerator"]:
        operands = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)]
        for implementation in IMPLEMENTATIONS.get(platform, ("xla",)):
            for backward in (True, False):
                functions = {
                    name: functools.partial(repeated(attend, backward, calls), *operands)
                    for name, attend in attentions(implementation, shape[2]).items()
                }
                if failure := first_failure(functions):
                    print(f"left out: {implementation}, T {shape[1]}: {failure}", file=sys.stderr)
                    continue
                clock = time.process_time if on_cpu else time.perf_counter
                for name, measured in compare(functions, arguments.repeats, clock).items():
                    passes = "forward + backward" if backward else "forward"
                    of = {"implementation": implementation, "T": shape[1], "passes": passes, "attention": name}
                    measured["seconds"] /= calls
                    rows.append(of | {"B x N x H": f"{shape[0]} x {shape[2]} x {shape[3]}"} | measured)
    show(f"Causal attention against softmax, {jnp.dtype(dtype).name}: median ratio, quartiles", rows, arguments.json)


if __name__ == "__main__":
    main()
