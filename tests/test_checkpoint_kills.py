"""Signals and kill -9 through the command line: nothing is lost, and the end has the bits of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.fields import to_json
from orthojax.train import find_checkpoint, read_json_item, read_metrics, read_params, verify_checkpoint

ROOT = Path(__file__).parents[1]


def config(steps, eval_every_steps, checkpoint_every_steps):
    return Config(
        model=ModelConfig(
            vocab_size=258, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False
        ),
        optim=OptimConfig(optimizer="orthoadam", learning_rate=0.01, warmup_steps=2),
        data=DataConfig(kind="text", paths=("text.txt",), tokenizer="bytes", sequence_length=8),
        train=TrainConfig(
            steps=steps, batch_size=4, log_every_steps=1, eval_every_steps=eval_every_steps,
            checkpoint_every_steps=checkpoint_every_steps,
        ),
        eval=EvalConfig(sequences=8, batch_size=8),
    )  # fmt: skip


def prepare(home, config):
    """Text and config, and an undisturbed run of the command line."""
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "sink", "peak", "the"], 3000)
    (home / "text.txt").write_text(" ".join(words))
    (home / "config.json").write_text(to_json(config))
    (home / "config.py").write_text(
        "from pathlib import Path\nfrom orthojax.config import Config\nfrom orthojax.fields import from_json\n"
        "def get_config():\n    return from_json(Config, Path('config.json').read_text())\n"
    )
    run_to_the_end(home, home / "whole")
    return home


def command(home, workdir):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(home / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = [f"--config={home}/config.py", f"--workdir={workdir}", f"--cache_dir={home}/cache"]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), *arguments], env=environment, cwd=home,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_to_the_end(home, workdir):
    process = command(home, workdir)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "damaged" not in error


def identity(path):
    try:
        status = path.stat()
    except FileNotFoundError:
        return None, 0
    return status.st_ino, status.st_size


def wait_for_a_step(process, workdir):
    """Until the run, which first writes metrics.jsonl anew, has logged a step of its own."""
    path = workdir / "metrics.jsonl"
    before = identity(path)[0]
    while process.poll() is None and identity(path)[0] in (None, before):
        time.sleep(0.005)
    size = identity(path)[1]
    while process.poll() is None and identity(path)[1] <= size:
        time.sleep(0.002)


def disturb(home, workdir, signum, *, seconds_after_a_step=None, seconds_after_the_start=None):
    """Starts the run and sends it a signal, so long after its first step or after its start."""
    process = command(home, workdir)
    if seconds_after_the_start is None:
        wait_for_a_step(process, workdir)
    time.sleep(seconds_after_a_step if seconds_after_the_start is None else seconds_after_the_start)
    process.send_signal(signum)
    return process.wait(timeout=120), process.communicate()[1]


def was_writing(workdir):
    """Whether a killed run has left a checkpoint that is not complete."""
    return bool(list((workdir / "checkpoints").glob("*tmp*")))


def losses(workdir):
    """All that metrics.jsonl says, but for the speed."""
    lines = read_metrics(workdir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def bits(tree):
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def assert_same_run(home, workdir):
    assert losses(workdir) == losses(home / "whole")
    a, b = (find_checkpoint(folder) for folder in (home / "whole", workdir))
    assert a.name == b.name
    assert bits(read_params(a)) == bits(read_params(b))
    assert verify_checkpoint(a) == verify_checkpoint(b)
    assert read_json_item(a, "checksums") == read_json_item(b, "checksums")  # the optimizer's state too
    steps = {path.name for path in (home / "whole" / "checkpoints").iterdir()}
    assert {path.name for path in (workdir / "checkpoints").iterdir()} == steps  # nothing half-written, none set aside


def assert_stopped_cleanly(returned, error, workdir, signum):
    assert returned == 128 + signum, error
    step = int(find_checkpoint(workdir).name)
    assert f"stopped at step {step}, state saved" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == step


def test_a_signal_saves_and_kills_lose_nothing(tmp_path):
    home, workdir = (
        prepare(tmp_path, config(steps=120, eval_every_steps=40, checkpoint_every_steps=4)),
        tmp_path / "run",
    )
    for seconds in (0.02, 0.15):
        assert disturb(home, workdir, signal.SIGKILL, seconds_after_a_step=seconds)[0] == -signal.SIGKILL
    returned, error = disturb(home, workdir, signal.SIGTERM, seconds_after_a_step=0.0)
    assert_stopped_cleanly(returned, error, workdir, signal.SIGTERM)
    run_to_the_end(home, workdir)
    assert_same_run(home, workdir)


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_lose_nothing(tmp_path, record_property):
    rng, workdir, writing, kills = random.Random(0), tmp_path / "run", 0, 100
    home = prepare(tmp_path, config(steps=1500, eval_every_steps=50, checkpoint_every_steps=3))
    for kill in range(kills):
        # Every fifth one strikes while it starts: imports, restoring, the first program.
        moment = (
            {"seconds_after_the_start": rng.uniform(0.2, 4.0)}
            if kill % 5 == 4
            else {"seconds_after_a_step": rng.uniform(0.0, 0.4)}
        )
        assert disturb(home, workdir, signal.SIGKILL, **moment)[0] == -signal.SIGKILL
        writing += was_writing(workdir)
        # Ctrl-C now and then, so that runs that were saved and runs that were killed follow one another.
        if kill % 25 == 24:
            returned, error = disturb(home, workdir, signal.SIGINT, seconds_after_a_step=0.0)
            assert_stopped_cleanly(returned, error, workdir, signal.SIGINT)
    step = read_metrics(workdir / "metrics.jsonl")[-1]["step"]
    print(f"{writing} of {kills} kills struck while a checkpoint was written; step {step} of 1500 was reached")
    record_property("kills_while_writing", writing)
    assert writing >= kills // 10
    run_to_the_end(home, workdir)
    assert_same_run(home, workdir)
