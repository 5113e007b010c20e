"""Trains one model: orthojax train --config=configs/tiny_cured.py --workdir=runs/mine.

Any field of the config can be set on the command line, as in --config.train.steps=2000 --config.train.seed=1.
Writes config.json, metrics.jsonl and checkpoints/ under the workdir. If started again with the same flags, it resumes.
--config.mesh.data=-1 uses all devices; --multihost joins the processes of a cluster, each started with
the same flags and a workdir that all of them see.
"""

import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from orthojax.commands import cli
from orthojax.config import Config
from orthojax.errors import UserError, printable
from orthojax.places import find_place
from orthojax.stores import as_path

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_config()
    cli.define_cache_dir()
    cli.define_compile_cache()
    flags.DEFINE_string("workdir", None, "Folder of the run; by default runs/NAME if the config is NAME.py.")
    flags.DEFINE_bool("multihost", False, "Join the processes that Slurm, Open MPI, GKE or Cloud TPU started.")
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT of process 0, if no cluster provides it; needs --num_processes, --process_id.",
    )
    flags.DEFINE_integer("num_processes", None, "Total number of processes on all machines.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0.", lower_bound=0)
    flags.DEFINE_bool("dry_run", False, "Estimate what the run would take, compile its step and exit; no data is read.")
    flags.DEFINE_integer(
        "pretend_devices", None, "For a dry run: as if there were this many devices.", lower_bound=1, upper_bound=2048
    )


def _workdir() -> Path:
    if FLAGS.workdir:
        return as_path(FLAGS.workdir, "workdir")
    config = Path(FLAGS.config or "train.py")
    if config.suffix == ".json":  # all of them are called config.json
        raise UserError(f"--workdir is missing, and {config} names no run", allowed="--workdir=DIR")
    return Path("runs", config.stem)


def _processes() -> tuple[str | None, int | None, int | None]:
    return FLAGS.coordinator_address, FLAGS.num_processes, FLAGS.process_id


def _dry_run(config: Config) -> None:
    if not FLAGS.dry_run:
        raise UserError("--pretend_devices without --dry_run", allowed="both, or neither")
    if FLAGS.multihost or _processes() != (None, None, None):
        raise UserError("a dry run joins no other processes", hint="--pretend_devices=N for the devices of all of them")
    import jax

    if FLAGS.pretend_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", FLAGS.pretend_devices)

    from orthojax.train import dry_run

    for line in dry_run(config):
        print(line, flush=True)


def _train_with_progress(config: Config, inputs: Any, workdir: Path) -> None:
    """Trains and shows every line of the metrics on standard error, on a terminal above a bar."""
    from tqdm import tqdm

    from orthojax.train import describe_line, train

    steps, compiled, started = config.train.steps, False, time.monotonic()
    with tqdm(total=steps, unit="step", disable=None, dynamic_ncols=True) as bar:

        def say(message: str) -> None:
            bar.write(printable(message), file=sys.stderr)

        def begin(done: int) -> None:
            bar.initial = bar.n = done
            if done:
                say(f"all {steps:,} steps are done" if done == steps else f"resumes after step {done:,} of {steps:,}")
            if done < steps:
                say("compiling ...")

        def count(step: int, _: float) -> None:
            nonlocal compiled
            if not compiled:
                compiled = True
                say(f"compiled, first step done: {time.monotonic() - started:.0f} s")
            bar.update(step - bar.n)

        def show(line: dict[str, Any]) -> None:
            say(describe_line(line, steps))

        train(config, inputs, workdir, on_start=begin, on_step=count, on_line=show)


def main(_: list[str]) -> None:
    config = cli.load_config()
    if FLAGS.dry_run or FLAGS.pretend_devices is not None:
        _dry_run(config)
        return
    workdir = _workdir()
    if config.train.init_from:
        find_place(config.train.init_from)

    from orthojax.train import distributed

    if FLAGS.multihost or _processes() != (None, None, None):
        distributed.initialize(*_processes())
    with distributed.failing_alone():
        _run(config, workdir)


def _run(config: Config, workdir: Path) -> None:
    """Trains in this process, alone or with others."""
    from orthojax.train import (
        check_workdir,
        closing,
        describe_data,
        distributed,
        keep_compiled_programs,
        open_inputs,
        opening,
        train,
    )

    is_primary = distributed.is_primary()

    def say(*lines: str) -> None:
        if is_primary:
            print(*lines, sep="\n", flush=True)

    def prepare() -> Any:
        check_workdir(workdir, config)
        keep_compiled_programs(FLAGS.compile_cache)
        say(f"workdir {workdir}", *opening(config))
        progress = cli.tokenizing_progress() if is_primary else None
        return open_inputs(config, Path(FLAGS.cache_dir), progress=progress)

    # Process 0 makes the token files of text, and the others find them, unless their disks are their own.
    begins = is_primary or config.data.kind not in ("embedded", "text")
    first = distributed.sync_start(lambda: prepare() if begins else None)
    inputs = distributed.sync_start(lambda: first or prepare())
    say(describe_data(inputs.provenance))
    if is_primary:
        _train_with_progress(config, inputs, workdir)
        cache = [] if FLAGS.cache_dir == FLAGS["cache_dir"].default else [f"--cache_dir={FLAGS.cache_dir}"]
        say(*closing(workdir, ["orthojax", "evaluate", f"--checkpoint={workdir}", *cache]))
    else:
        train(config, inputs, workdir)
