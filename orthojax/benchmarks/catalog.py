"""Every suite by name."""

from orthojax.benchmarks import compilation, optimizer
from orthojax.benchmarks.suite import Suite

SUITES: dict[str, Suite] = {suite.name: suite for suite in (optimizer.SUITE, compilation.SUITE)}
