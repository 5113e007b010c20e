"""Every suite by name."""

from orthojax.benchmarks import attention, compilation, data, optimizer, quantization, telemetry, train_step
from orthojax.benchmarks.suite import Suite

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        optimizer.SUITE,
        compilation.SUITE,
        attention.SUITE,
        train_step.SUITE,
        telemetry.SUITE,
        quantization.SUITE,
        data.SUITE,
    )
}
