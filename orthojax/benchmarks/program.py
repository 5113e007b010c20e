"""Compiling a jitted function with nothing remembered, timed, and what the compiled program takes."""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """A compiled function.

    Attributes:
      run: The executable, a jax.stages.Compiled; called like the function.
      lower_seconds: Tracing and lowering.
      compile_seconds: XLA's own time.
      cpu_seconds: Processor time of both, over all threads: what other work on the machine hardly changes.
      memory: Bytes as the compiler counts them: `argument_bytes` and `output_bytes`, which share `donated_bytes`, and
        `temp_bytes` besides both. None where the backend does not tell.
    """

    run: Any
    lower_seconds: float
    compile_seconds: float
    cpu_seconds: float
    memory: dict[str, int | None]

    @property
    def peak_bytes(self) -> int | None:
        """All that one call needs: arguments, results and temporaries, memory that is given over counted once."""
        sizes = [self.memory[f"{name}_bytes"] for name in ("argument", "output", "temp", "donated")]
        if any(size is None for size in sizes):
            return None
        *needed, donated = (size or 0 for size in sizes)
        return sum(needed) - donated


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
        "output_bytes": "output_size_in_bytes",
        "donated_bytes": "alias_size_in_bytes",
        "temp_bytes": "temp_size_in_bytes",
    }
    memory = {ours: getattr(analysis, theirs, None) for ours, theirs in names.items()}
    return Program(compiled, middle - started, ended - middle, cpu_ended - cpu_started, memory)


def tree_bytes(shapes: Any) -> int:
    """Bytes of a tree of arrays or shapes.

    >>> tree_bytes({"mu": jax.ShapeDtypeStruct((768, 768), jax.numpy.float32)})
    2359296
    """
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def free_bytes() -> int | None:
    """Memory that the default device has left, or None where nobody says."""
    if stats := jax.devices()[0].memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    info = Path("/proc/meminfo")
    if jax.default_backend() != "cpu" or not info.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in info.open() if line.startswith("MemAvailable"))
