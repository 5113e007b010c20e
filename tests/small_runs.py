"""A small run, files that tests compare and damage, and processes with one CPU device."""

import os
import subprocess
import sys
from pathlib import Path

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig

ROOT = Path(__file__).parents[1]
CONFIG = Config(
    model=ModelConfig(vocab_size=258, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False),
    optim=OptimConfig(optimizer="orthoadam", learning_rate=0.01, warmup_steps=2),
    data=DataConfig(sequence_length=8),
    train=TrainConfig(steps=11, batch_size=4, log_every_steps=2, eval_every_steps=4, checkpoint_every_steps=3),
    eval=EvalConfig(sequences=8, batch_size=8),
)
TEXT = {"data.kind": "text", "data.paths": ("text.txt",), "data.tokenizer": "bytes"}  # changes for the command lines


def snapshot(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder):
    """When each file of a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path, where=0.5):
    """Changes one bit."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 0x10
    path.write_bytes(content)


def cpu_environment(**more):
    """Of a process with one CPU device, whose small programs compile fast."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT), **more}


def python(*arguments, cwd=None, **environment):
    """Runs Python in a process with one CPU device, and returns how it ended."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=cpu_environment(**environment), capture_output=True, text=True, timeout=300
    )
