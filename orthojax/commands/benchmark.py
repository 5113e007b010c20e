"""Measures what softmax-1 and OrthoAdam cost on this machine: orthojax benchmark --suite=attention,train_step.

optimizer and compile: the step and the compilation of OrthoAdam against AdamW. attention: softmax-1 and learned sinks
against softmax by the same kind of kernel. train_step: time, MFU and memory of GPT-2's training step with both against
softmax and AdamW; these two take at most eight minutes together. telemetry: metrics and probes against the step.
quantization: linear layers and a model with kernels of int8 and int4 against float32, time and memory. data: token
files against the tokenizer library, and batches of rows. Both take some minutes.

Contenders and what they replace are interleaved within one process; ratios come with their spread. Writes
benchmark.json under the workdir after each row, and prints each row as it comes; the tables come last.
"""

import shlex
import sys
from pathlib import Path

from absl import flags

from orthojax.errors import UserError, nearest

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("suite", None, "What to measure, separated by commas; every suite where not given.")
    flags.DEFINE_integer("repeats", None, "Repetitions of each measurement; each suite's own number where not given.")
    flags.DEFINE_bool("tiny", False, "Small shapes, seconds in all: shows that everything runs, not how fast.")
    flags.DEFINE_string("workdir", "runs/benchmark", "Where benchmark.json goes.")


def main(_: list[str]) -> None:
    if FLAGS.repeats is not None and FLAGS.repeats < 1:
        raise UserError(f"--repeats={FLAGS.repeats}", allowed="at least 1")

    import jax

    from orthojax.benchmarks import SUITES, run_suites

    names = list(SUITES) if FLAGS.suite is None else FLAGS.suite.split(",")
    for name in names:
        if name not in SUITES:
            raise UserError(f"unknown suite {name!r}", allowed=" | ".join(SUITES), hint=nearest(name, SUITES))
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are measured
    command = shlex.join(["orthojax", "benchmark", *sys.argv[1:]])
    suites, workdir = [SUITES[name] for name in dict.fromkeys(names)], Path(FLAGS.workdir)
    try:
        run_suites(suites, workdir, repeats=FLAGS.repeats, tiny=FLAGS.tiny, command=command)
    except KeyboardInterrupt:
        print(f"stopped; {workdir / 'benchmark.json'} holds the rows that were printed", file=sys.stderr)
        sys.exit(130)
    print(f"\nwritten: {workdir / 'benchmark.json'}")
