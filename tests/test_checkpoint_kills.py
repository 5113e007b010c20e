"""Signals and kill -9 at random moments: nothing is lost, and the end has the bits of an undisturbed run.

One of each is in test_command_lines.py.
"""

import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small_runs import CONFIG, ROOT, TEXT, cpu_environment
from tiny_run import bits
from tiny_run import lines as losses

from orthojax.config import replace, to_json
from orthojax.train import find_checkpoint, read_metrics, read_optimizer_state, read_params, verify_checkpoint


def prepare(home, steps, eval_every_steps, checkpoint_every_steps):
    """Text and config, and an undisturbed run of the command line."""
    config = replace(
        CONFIG,
        TEXT | {"train.steps": steps, "train.eval_every_steps": eval_every_steps, "train.log_every_steps": 1,
                "train.checkpoint_every_steps": checkpoint_every_steps},
    )  # fmt: skip
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "sink", "peak", "the"], 3000)
    (home / "text.txt").write_text(" ".join(words))
    (home / "config.json").write_text(to_json(config))
    run_to_the_end(home, home / "whole")
    return home


def command(home, workdir):
    folders = {"config": "config.json", "workdir": workdir, "cache_dir": "cache", "compile_cache": "compiled"}
    arguments = [f"--{flag}={home / folder}" for flag, folder in folders.items()]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch/train.py"), *arguments], cwd=home,
        env=cpu_environment(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_to_the_end(home, workdir):
    process = command(home, workdir)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "damaged" not in error


def logged_step(workdir):
    return max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)


def disturb(home, workdir, signum, *, steps=0, seconds=0.0):
    """Starts the run and sends it a signal, so many steps beyond the last ones that it logged, then so much time."""
    wanted, process = logged_step(workdir) + steps, command(home, workdir)
    while steps and process.poll() is None and logged_step(workdir) < wanted:
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signum)
    return process.wait(timeout=120), process.communicate()[1]


def assert_same_run(home, workdir):
    assert losses(workdir) == losses(home / "whole")
    a, b = (find_checkpoint(folder) for folder in (home / "whole", workdir))
    assert a.name == b.name
    assert bits(read_params(a)) == bits(read_params(b))
    assert bits(read_optimizer_state(a)) == bits(read_optimizer_state(b))
    assert verify_checkpoint(a) == verify_checkpoint(b)
    steps = {path.name for path in (home / "whole" / "checkpoints").iterdir()}
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == steps  # nothing half-written, none set aside


def assert_stopped_cleanly(returned, error, workdir, signum):
    assert returned == 128 + signum, error
    step = int(find_checkpoint(workdir).name)
    assert f"stopped at step {step}, state saved" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == step


@pytest.fixture(scope="module")
def long_home(tmp_path_factory):
    """A run that is long enough for many kills, undisturbed."""
    return prepare(tmp_path_factory.mktemp("home"), steps=400, eval_every_steps=50, checkpoint_every_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_kills_at_random_moments_lose_nothing(long_home, tmp_path, seed):
    """Four runs of 25 kills each; most of the time between two steps is a checkpoint being written."""
    rng, workdir, writing, began = random.Random(seed), tmp_path / "run", 0, time.monotonic()
    for kill in range(25):
        # Every fifth one strikes while it starts: imports, restoring, the first program.
        starting = kill % 5 == 4
        seconds = rng.uniform(0.2, 5.0) if starting else rng.uniform(0.0, 0.1)
        returned, error = disturb(
            long_home, workdir, signal.SIGKILL, steps=0 if starting else rng.randint(1, 12), seconds=seconds
        )
        assert returned == -signal.SIGKILL, error
        writing += bool(list((workdir / "checkpoints").glob("*tmp*")))  # a checkpoint that is not complete
        if kill == 12:  # saved and killed runs follow one another
            returned, error = disturb(long_home, workdir, signal.SIGINT, steps=1)
            assert_stopped_cleanly(returned, error, workdir, signal.SIGINT)
    step = read_metrics(workdir / "metrics.jsonl")[-1]["step"]
    seconds = time.monotonic() - began
    print(f"\n{writing} of 25 kills struck while a checkpoint was written; step {step} of 400; {seconds:.0f} s")
    assert writing >= 3
    run_to_the_end(long_home, workdir)
    assert_same_run(long_home, workdir)
