"""What a measured number depends on besides the code that measured it: versions, device, day."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from orthojax import __version__

_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:  # not everything needs every library: benchmarks read no data
        return None


def environment() -> dict[str, Any]:
    """Versions, device and date, for the JSON files of results.

    Returns:
      {"versions": {library: version}, "device": one line of words, "date": "YYYY-MM-DD"}; the version of a library
      that is not installed is None.
    """
    return {
        "versions": {"orthojax": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in _LIBRARIES},
        "device": f"{jax.devices()[0].device_kind} x {jax.device_count()}, {os.cpu_count()} CPU cores",
        "date": time.strftime("%Y-%m-%d"),
    }
