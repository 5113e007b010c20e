"""Programs that were compiled before, kept in files with checksums."""

import functools
import os
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import jax

from orthojax.files import require_local


def keep_compiled_programs(folder: str | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache for the whole process: meant for programs, not for libraries.

    Args:
      folder: Folder of the programs; "" keeps nothing; None means JAX_COMPILATION_CACHE_DIR if that is set, else
        `orthojax/xla` in the user's cache, and nothing if JAX_ENABLE_COMPILATION_CACHE is false.

    Returns:
      The folder; None if nothing is kept, with a warning if it cannot be made.
    """
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
