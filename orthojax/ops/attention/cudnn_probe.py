"""Whether cuDNN's attention runs in this process, found out by running it once.

On CUDA 13 cuDNN compiles its attention kernels with NVRTC, which opens `libnvrtc-builtins` by its bare name. The wheel
that brings it is on no search path, and JAX loads NVRTC itself only, so that cuDNN finds no execution plan
(https://github.com/jax-ml/jax/issues/32430). Loading the builtins beforehand lets the name resolve.
"""

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops.attention import xla
from orthojax.ops.attention.cudnn_kernel import outside_of_traces
from orthojax.ops.attention.inputs import AttentionInputs

_LEAST_CAPABILITY = (8, 0)  # Ampere
_TOLERANCE = 0.05  # of bfloat16 numbers near 1; a kernel that is wrong is wrong by far more


def compute_capability() -> tuple[int, int] | None:
    """That of the default backend's GPU, or None where that backend is not NVIDIA's."""
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version:
        return None
    major, minor = device.compute_capability.split(".")
    return int(major), int(minor)


def widest_head() -> int:
    """The largest head width of the kernel: 256 from Hopper on, which is also assumed where no GPU is at hand."""
    return 128 if (compute_capability() or (9, 0)) < (9, 0) else 256


def _library_folders() -> list[Path]:
    """Where the CUDA 13 wheels put their libraries."""
    package = importlib.util.find_spec("nvidia")
    places = [] if package is None else package.submodule_search_locations or []
    return [folder for place in places if (folder := Path(place) / "cu13" / "lib").is_dir()]


@functools.cache
def preload_builtins() -> str:
    """Loads the builtins of NVRTC where a CUDA 13 wheel has them and a CUDA GPU is used.

    Returns:
      What went wrong, or "".
    """
    if compute_capability() is None:
        return ""
    for folder in _library_folders():
        for library in sorted(folder.glob("libnvrtc-builtins.so*")):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                return str(error)
    return ""


def _advice() -> str:
    folders = _library_folders()
    if not folders:
        return ". With CUDA 13, cuDNN wants libnvrtc-builtins on the path of the loader (LD_LIBRARY_PATH)"
    path = ":".join(map(str, folders))
    return f". With CUDA 13, cuDNN may miss libnvrtc-builtins: try LD_LIBRARY_PATH={path}:$LD_LIBRARY_PATH"


def problem(attend: Callable[[AttentionInputs], jax.Array]) -> str:
    """Why the kernel cannot run here, or "".

    Args:
      attend: The attention to try, forward and backward, against plain XLA.
    """
    capability = compute_capability()
    if capability is None:
        backend = jax.default_backend()
        found = "the GPU is of another make" if backend == "gpu" else f"the default backend is {backend!r}"
        return f"cuDNN needs an NVIDIA GPU, and {found}"
    if capability < _LEAST_CAPABILITY:
        return "cuDNN's attention needs compute capability {}.{}, got {}.{}".format(*_LEAST_CAPABILITY, *capability)
    not_loaded = preload_builtins()
    try:
        error = outside_of_traces(lambda: _largest_difference(attend))
    except Exception as raised:  # whatever the vendor's stack raises, the caller falls back
        detail = str(raised).strip().split("\n")[0][:300]
        loading = f" (and {not_loaded})" if not_loaded else ""
        return f"cuDNN's attention fails: {type(raised).__name__}: {detail}{loading}{_advice()}"
    if not error < _TOLERANCE:  # not a number is a failure, too
        return f"cuDNN's attention is wrong: it differs from XLA's by {error:.2g} where {_TOLERANCE} is allowed"
    return ""


def _largest_difference(attend: Callable[[AttentionInputs], jax.Array]) -> float:
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in np.random.default_rng(0).normal(size=(3, 1, 64, 1, 64)))

    def results(attend, q, k, v):
        def loss(q, k, v):
            output = attend(AttentionInputs(q, k, v, None, None, "softmax1", 0.125, True, None, None, None))
            return jnp.mean(jnp.square(output.astype(jnp.float32))) * 64, output

        (_, output), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return output, *gradients

    got, expected = (jax.device_get(jax.jit(results, static_argnums=0)(f, q, k, v)) for f in (attend, xla.attend))
    pairs = zip(got, expected, strict=True)
    return max(float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max()) for a, b in pairs)
