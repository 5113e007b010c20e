"""The machine that a number was measured on: versions, device, memory."""

import contextlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def environment() -> dict[str, Any]:
    """Returns what JSON files of results record: {"versions": {library: version}, "device", "date": "YYYY-MM-DD"}."""
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
