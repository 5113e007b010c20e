"""The C library's allocator, observed from outside: the pages that a process takes from the system."""

import platform

import pytest
from small_runs import python

from orthojax.commands.cli import keep_freed_memory

# Arrays of 64 MB, allocated, written and freed 20 times: 16,384 pages of 4 kB each time where they are given back.
# In threads, as JAX does it, of a process that watches its parent, as those of an experiment do.
_CODE = """
import concurrent.futures, os, resource, threading
from orthojax.commands.cli import keep_freed_memory, stop_without
stop_without(os.getppid())
kept = keep_freed_memory()
import numpy as np
every, one = threading.Barrier(4), threading.Lock()
def faults(_):
    every.wait()
    with one:
        np.ones(2**23)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            np.ones(2**23)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(kept, sum(pool.map(faults, range(4))), sep=";")
"""


def run(switch):
    kept, faults = python("-c", _CODE, ORTHOJAX_KEEP_FREED_MEMORY=switch).stdout.strip().split(";")
    return kept == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_unless_switched_off():
    kept, faults = run("1")
    assert kept
    kept, faults_without = run("0")
    assert not kept
    assert faults_without > 20 * 16  # even where pages have 4 MB
    assert faults < faults_without / 10


def test_allocator_stays_if_jax_may_use_accelerators(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert not keep_freed_memory()
