"""Compiling a jitted function with nothing remembered, timed, and what the compiled program takes."""

import time
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """A compiled function.

    Attributes:
      run: The executable, a jax.stages.Compiled; called like the function.
      lower_seconds: Tracing and lowering.
      compile_seconds: XLA's own time.
      cpu_seconds: Processor time of both, over all threads: what other work on the machine hardly changes.
      memory: Bytes as the compiler counts them: `argument_bytes`, of which `donated_bytes` are given over to results,
        and `temp_bytes` besides arguments and results. None where the backend does not tell.
    """

    run: Any
    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float
    memory: dict[str, int | None]


def compile_program(function: Any, *arguments: Any) -> Program:
    """Traces, lowers and compiles as a new process would: JAX's caches are cleared first.

    A persistent compilation cache is not: whoever times compilation has it switched off.

    Args:
      function: From jax.jit.
      *arguments: Arrays or jax.ShapeDtypeStruct; only shapes and dtypes matter.
    """
    jax.clear_caches()
    started, cpu_started = time.perf_counter(), time.process_time()
    lowered = function.lower(*arguments)
    middle = time.perf_counter()
    compiled = lowered.compile()
    ended, cpu_ended = time.perf_counter(), time.process_time()
    analysis = compiled.memory_analysis()
    names = {
        "argument_bytes": "argument_size_in_bytes",
        "donated_bytes": "alias_size_in_bytes",
        "temp_bytes": "temp_size_in_bytes",
    }
    memory = {ours: getattr(analysis, theirs, None) for ours, theirs in names.items()}
    return Program(compiled, middle - started, ended - middle, cpu_ended - cpu_started, memory)
