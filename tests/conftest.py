"""Every test sees eight fake CPU devices and strict broadcasting; nothing here needs a network or a GPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # the user's; a test that wants one names its folder

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# XLA's own passes run, and so the programs have their real structure; LLVM's, which cost more than tiny programs take.
jax.config.update("jax_disable_most_optimizations", True)

# The first example of a property pays for compilation, so a deadline would only measure that.
hypothesis.settings.register_profile("orthojax", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("orthojax")


@pytest.fixture
def x64():
    """Float64 for tests of formulas."""
    with jax.enable_x64(True):
        yield
