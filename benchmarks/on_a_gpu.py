"""Measures on a GPU what only a GPU can tell, in the order in which it matters: python benchmarks/on_a_gpu.py OUT.

Each stage is a process whose output is kept in OUT/STAGE.txt when it ends, so that a call after an interruption, or
with more time, goes on with the next one. No stage begins after --seconds, and the one that is running then is ended.
--dry needs no GPU: it runs every stage in small, or shows what it would run.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from orthojax.machine import environment

ROOT = Path(__file__).resolve().parents[1]
_SINKS = "--config.model.normalizer=learned_sink"
_MUON = ("--config.optim.optimizer=muon", "--config.optim.muon_embeddings=orthoadam", "--config.optim.weight_decay=0.1")
TRAINED = {"adam_sinks": (_SINKS,), "muon_orthoadam_sinks": (_SINKS, *_MUON)}  # beside small/long_pair


def stages(out: Path, dry: bool) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the command of every stage."""
    python, tiny = [sys.executable], ["--tiny", "--repeats=2"] if dry else []
    yield "tests", [*python, "-m", "pytest", "-n", "0", "-q", "tests/test_gpu.py"]
    yield "step", [*python, "benchmarks/gpu_step.py", *tiny, "--decisive", "--seconds=LEFT"]
    yield "attention", [*python, "benchmarks/attention.py", *tiny, "--json"]
    yield "crossover", [*python, "benchmarks/attention.py", *tiny, "--json", "--crossover"]
    for name, flags in TRAINED.items():
        workdir = out / name
        train = ["train", "--config=configs/python_packages.py", f"--workdir={workdir}", *flags]
        yield name, [*python, "-m", "orthojax", *train, *(["--dry_run"] if dry else [])]
        if not dry:
            yield f"{name}_evaluated", [*python, "-m", "orthojax", "evaluate", f"--checkpoint={workdir}"]
    yield "all_steps", [*python, "benchmarks/gpu_step.py", *tiny, "--seconds=LEFT"]


def run(command: list[str], kept: Path, seconds: float) -> str:
    """Runs a stage for so many seconds at most; keeps what it printed, if it ended by itself. Returns how it ended."""
    running = kept.with_suffix(".running")
    with running.open("a") as output:  # rows of an interrupted call stay
        print(json.dumps({"command": command[1:], "environment": environment()}), file=output, flush=True)
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            return f"not done, {running} has what it printed"
    if code < 0:
        return f"ended by signal {-code}, {running} has what it printed"
    running.replace(kept)  # a failure is an answer, too: the next call does not repeat it
    return "done" if code == 0 else f"failed with exit code {code}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path, help="folder of the results")
    options.add_argument("--seconds", type=float, default=570.0, help="for all stages together")
    options.add_argument("--dry", action="store_true", help="small shapes, without a GPU")
    arguments, started = options.parse_args(), time.monotonic()
    if not arguments.dry and not shutil.which("nvidia-smi"):
        sys.exit("no GPU here; allowed: --dry")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name, command in stages(out, arguments.dry):
        kept, left = out / f"{name}.txt", arguments.seconds - (time.monotonic() - started)
        if kept.exists() or left < 1:
            print(f"{name}: {'done before' if kept.exists() else 'no time left'}", flush=True)
            continue
        ended = run([part.replace("LEFT", f"{max(left - 15, 1):.0f}") for part in command], kept, left)
        print(f"{name}: {ended}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
