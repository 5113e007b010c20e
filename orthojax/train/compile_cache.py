"""Compiled programs kept on disk, so that a run that is started again does not compile again."""

import os
import warnings
from pathlib import Path
from typing import Any

import jax


def default_folder() -> Path:
    """`orthojax/xla` in the user's cache: under XDG_CACHE_HOME, else ~/.cache.

    Raises:
      RuntimeError: Where the user has no home.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "orthojax" / "xla"


def keep_compiled_programs(folder: str | None = None) -> Path | None:
    """Turns on JAX's own persistent cache, whose keys hold the program, its options, the versions and the device.

    For programs, not for libraries: it holds for the whole process. JAX keeps what takes it longer than
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS to compile, a second unless set. Where the folder cannot be written, a
    warning says so and nothing is kept.

    Args:
      folder: Where; "" keeps nothing; None means JAX_COMPILATION_CACHE_DIR where that is set, else `default_folder`,
        and nothing where JAX_ENABLE_COMPILATION_CACHE is false.

    Returns:
      Where programs are kept, or None.
    """
    settings: Any = jax.config
    if folder == "" or (folder is None and not settings.jax_enable_compilation_cache):
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    chosen = folder or settings.jax_compilation_cache_dir
    try:
        path = Path(chosen) if chosen else default_folder()
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {path}")
    except (OSError, RuntimeError) as error:
        warnings.warn(f"compiled programs are not kept: {error}; --compile_cache=DIR is another folder", stacklevel=2)
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    return path
