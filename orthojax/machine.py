"""The machine that a number was measured on: versions, device, memory; and the programs that are kept on it."""

import contextlib
import functools
import os
import platform
import time
import warnings
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from orthojax.files import require_local

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


def keep_compiled_programs(folder: str | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache for the whole process: meant for programs, not for libraries.

    Args:
      folder: Folder of the programs; "" keeps nothing; None means JAX_COMPILATION_CACHE_DIR if that is set, else
        `orthojax/xla` in the user's cache, and nothing if JAX_ENABLE_COMPILATION_CACHE is false.

    Returns:
      The folder; None if nothing is kept, with a warning if it cannot be made.
    """
    import jax

    settings, path = cast(Any, jax.config), None
    if folder or (folder is None and settings.jax_enable_compilation_cache):
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        path = Path(folder or settings.jax_compilation_cache_dir or Path(cache, "orthojax", "xla"))
        require_local(path, "folder of compiled programs")
        try:
            str(path).encode()  # XLA takes no other path
            if path.parts[0] == "~":
                raise OSError("this user has no home")
            path.mkdir(parents=True, exist_ok=True)
            settings.update("jax_compilation_cache_dir", str(path))
        except (OSError, UnicodeEncodeError) as error:
            warnings.warn(f"compiled programs are not kept: {error}; --compile_cache=DIR sets a folder", stacklevel=2)
            path = None
    settings.update("jax_enable_compilation_cache", path is not None)
    if path is not None:
        _check_entries()
    return path


@functools.cache
def _check_entries() -> None:
    """Gives JAX's files checksums: one with a flipped bit, or written in part, is machine code that ends the process.

    An entry without its checksum, or another one, is removed and compiled again.
    """
    try:
        from jax._src.lru_cache import LRUCache

        read, write = LRUCache.get, LRUCache.put
    except (ImportError, AttributeError):  # private, and another jax may have none
        warnings.warn("compiled programs are kept without checksums, which this jax has no place for", stacklevel=2)
        return

    def paths(cache: Any, key: str) -> tuple[Any, Any]:
        return cache.path / f"{key}-cache", cache.path / f"{key}-sha256"

    def get(self: Any, key: str) -> bytes | None:
        value = read(self, key)
        entry, checksum = paths(self, key)
        if value is None or (checksum.exists() and checksum.read_text() == sha256(value).hexdigest()):
            return value
        for path in (entry, checksum):
            path.unlink(missing_ok=True)
        return None

    def put(self: Any, key: str, value: bytes) -> None:
        write(self, key, value)
        entry, checksum = paths(self, key)
        if entry.exists() and entry.read_bytes() == value:  # else another process was first
            checksum.write_text(sha256(value).hexdigest())

    LRUCache.get, LRUCache.put = get, put
