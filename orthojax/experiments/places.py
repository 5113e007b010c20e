"""Where the workers of an experiment run: one for each GPU, or for each CPU core with memory.

A model at `tiny` scale is too small for two cores: two such runs at once, one on each, finish 1.2 to 1.4 times sooner
than one after the other (measured, 64 to 160 channels wide). Small models do not fill a large GPU either: `--jobs` may
put several workers on one.
"""

import importlib.metadata
import importlib.util
import math
import os
from pathlib import Path
from typing import NamedTuple

from orthojax.machine import available_memory_bytes

_WORKER_BYTES = 2 << 30  # memory that a worker should have
_GPU_SHARE = 0.75  # of a GPU's memory for the workers on it together, as JAX takes for a process alone
# How a user says what a process takes; the first is set where several workers share a GPU.
_GPU_MEMORY = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


class Place(NamedTuple):
    """Where a worker runs."""

    cores: tuple[int, ...] = ()  # of the CPU; empty for any
    environment: tuple[tuple[str, str], ...] = ()  # variables that JAX reads


def places(jobs: int | None = None) -> list[Place]:
    """Where the workers of this machine run; a single one is this process itself.

    JAX is not asked, which would allocate an accelerator's memory.

    Args:
      jobs: How many at most; None takes one for each NVIDIA GPU, one for other accelerators, or without any one for
        each core whose share of the free memory is 2 GB. With more jobs than GPUs, several workers share a GPU and
        split its memory equally, unless the environment already limits what a process takes.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cuda,tpu,cpu"
    gpus = _gpus() if "cuda" in platforms or "gpu" in platforms else []
    if gpus:
        return _on_gpus(gpus, jobs or len(gpus))
    if platforms != "cpu" and _other_accelerator():
        return [Place()]
    if not hasattr(os, "sched_setaffinity"):  # macOS does not say which cores a process may use
        return [Place()] * (jobs or 1)
    cores = sorted(os.sched_getaffinity(0))
    count = min(jobs or _fitting(len(cores)), len(cores))
    return [Place(cores=tuple(cores[i::count])) for i in range(count)]


def device_count(where: list[Place]) -> int:
    """How many devices the workers have, by which long work is divided: those that share a GPU have one."""
    return len(set(where)) if where[0].environment else len(where)


def _on_gpus(gpus: list[str], jobs: int) -> list[Place]:
    together = math.ceil(jobs / len(gpus))  # on the fullest
    memory = ()
    if together > 1 and not any(name in os.environ for name in _GPU_MEMORY):
        memory = ((_GPU_MEMORY[0], f"{_GPU_SHARE / together:.3f}"),)
    return [Place(environment=(("CUDA_VISIBLE_DEVICES", gpu), *memory)) for gpu in (gpus * together)[:jobs]]


def _gpus() -> list[str]:
    """The NVIDIA GPUs that JAX would use, as CUDA_VISIBLE_DEVICES names them."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu not in ("", "-1")]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def _other_accelerator() -> bool:
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    return importlib.util.find_spec("libtpu") is not None or any("cuda" not in name for name in plugins)


def _fitting(cores: int) -> int:
    """How many workers the free memory, and the limits of a container, have room for."""
    quota, _, period = _control_group("cpu.max").partition(" ")
    allowed = math.ceil(int(quota) / int(period)) if quota.isdigit() else cores
    limit, free = _control_group("memory.max"), available_memory_bytes()
    memory = min(int(limit) if limit.isdigit() else math.inf, math.inf if free is None else free)
    return int(max(1, min(cores, allowed, memory // _WORKER_BYTES)))


def _control_group(name: str) -> str:
    """A limit of the container, "max ..." where there is none, "" where none can be read."""
    try:
        return Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
