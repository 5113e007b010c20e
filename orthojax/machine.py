"""The machine that a number was measured on: versions, device, memory."""

import contextlib
import ctypes
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")

# mallopt's parameters, as glibc's <malloc.h> numbers them: no block has a mapping of its own, which would go back to
# the system when it is freed; the end of the heap is never given back; the heap grows by 500 MB at a time; and there is
# one heap, since what threads allocate in heaps of their own is mapped.
_KEEP_FREED_MEMORY = {
    "M_MMAP_MAX": (-4, 0),
    "M_TRIM_THRESHOLD": (-1, 2**31 - 1),
    "M_TOP_PAD": (-2, 500_000_000),
    "M_ARENA_MAX": (-8, 1),
}
_SWITCH = "ORTHOJAX_KEEP_FREED_MEMORY"


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory for the next allocation instead of returning it to the system.

    XLA allocates and frees the temporaries of a program at every call. On a CPU they come from malloc, and glibc
    returns large ones at once, so that each training step takes new pages, which the system clears one by one. Call it
    before JAX starts. Only on Linux with glibc, and only where JAX will run on CPUs: the memory of other devices is
    allocated once by XLA itself. The process then holds the most memory it ever needed. The environment variable
    ORTHOJAX_KEEP_FREED_MEMORY=0 leaves everything as it is, in the processes it starts too.

    Returns:
      Whether freed memory is kept.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    on_cpu = platforms == "cpu" if platforms else not entry_points(group="jax_plugins")
    if platform.libc_ver()[0] != "glibc" or not on_cpu or os.environ.get(_SWITCH) == "0":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in _KEEP_FREED_MEMORY.values()])


def environment() -> dict[str, Any]:
    """Returns versions, device and date, for the JSON files of results.

    Returns:
      {"versions": {library: version}, "device": a one-line description, "date": "YYYY-MM-DD"}; a library that is not
      installed has no version there.
    """
    import jax

    from orthojax import __version__

    versions = {"orthojax": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "versions": versions,
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}, {os.cpu_count()} CPU cores",
        "date": time.strftime("%Y-%m-%d"),
    }


def available_memory_bytes() -> int | None:
    """Returns the host memory that can be allocated, file caches included; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # macOS has no such name, Windows no sysconf
        return None
