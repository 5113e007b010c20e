"""Several processes on this machine as one run: equal losses, one set of files, and nobody waits for the dead."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orthojax.errors import UserError
from orthojax.train import distributed, list_arrays, read_metrics

ROOT = Path(__file__).parents[1]
FLAGS = {"data.kind": "bigram_backcopy", "data.sequence_length": 16, "eval.sequences": 32}
FLAGS |= {f"model.{k}": v for k, v in dict(vocab_size=256, d_model=32, num_layers=2, num_heads=4, d_mlp=64).items()}
FLAGS |= {"optim.optimizer": "orthoadam", "optim.warmup_steps": 2, "train.steps": 8, "train.batch_size": 16}
FLAGS |= {"train.log_every_steps": 1, "train.eval_every_steps": 4, "train.checkpoint_every_steps": 4}


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(arguments, devices):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def train_together(workdir, caches, flags_of_each, devices):
    """(exit status, console, errors) of launch/train.py in each process, with flags of its own."""
    together = [f"--coordinator_address=localhost:{free_port()}", f"--num_processes={len(flags_of_each)}"]
    started = []
    for i, (cache, flags) in enumerate(zip(caches, flags_of_each, strict=True)):
        command = [str(ROOT / "launch/train.py"), f"--workdir={workdir}", f"--cache_dir={cache}"]
        command += [f"--config.{name}={value}" for name, value in flags.items()]
        started.append(start([*command, *together, f"--process_id={i}"] if len(caches) > 1 else command, devices))
    ends = [process.communicate(timeout=400) for process in started]
    return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


def run(workdir, cache, mesh, processes=1):
    """The console of each process over eight devices, without what the CPU's own transport says."""
    ends = train_together(workdir, [cache] * processes, [FLAGS | mesh] * processes, 8 // processes)
    assert [status for status, *_ in ends] == [0] * processes, ends
    # Lines of the transport's threads may be interleaved.
    return [
        [line for line in out.splitlines() if line and not re.search(r"Gloo|peer ranks", line)] for _, out, _ in ends
    ]


def losses(workdir):
    """(step, name) -> loss, of training and validation."""
    logged = read_metrics(workdir / "metrics.jsonl")
    return {f"{name} {line['step']}": line[name] for line in logged for name in line if name.endswith("loss_nats")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    (console,) = run(folder / "run", folder / "cache", {})
    assert "  uses 1 of 8 devices; --config.mesh.data=-1 takes all" in console
    return folder


MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_are_one_run(alone, tmp_path, processes):
    folder, want = alone, losses(alone / "run")
    assert len(want) == 8 + 2
    want = pytest.approx(want, abs=1e-5, rel=0)
    workdir = tmp_path / "run"
    consoles = run(workdir, folder / "cache", MESH, processes)
    assert any("done" in line for line in consoles[0])
    assert consoles[1:] == [[]] * (processes - 1)
    assert losses(workdir) == want
    assert json.loads((workdir / "config.json").read_text())["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    # Every process wrote its own shards of the one checkpoint.
    assert len(list((workdir / "checkpoints" / "8" / "params").glob("ocdbt.process_*"))) == processes
    arrays = list_arrays(workdir / "checkpoints" / "8", "params")
    assert arrays == list_arrays(folder / "run" / "checkpoints" / "8", "params")
    # From the checkpoint in the middle on: another number of processes, another mesh, and one device.
    for others, mesh in ((6 - processes, {"mesh.fsdp": -1}), (1, {})):
        copy = Path(shutil.copytree(workdir, tmp_path / f"with_{others}"))
        shutil.rmtree(copy / "checkpoints" / "8")
        run(copy, folder / "cache", mesh, others)
        assert losses(copy) == want


MEETING = """
import sys, time
import numpy as np
from orthojax.train import distributed
distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), heartbeat_timeout_seconds=10)
from jax.experimental import multihost_utils
while True:
    assert multihost_utils.process_allgather(np.ones(2)).sum() == 4
    print("met", flush=True)
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_ends_the_others(victim):
    address = f"localhost:{free_port()}"
    processes = [start(["-c", MEETING, address, str(i)], 1) for i in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            while process.stdout.readline() != "met\n":
                assert process.poll() is None
        processes[victim].send_signal(signal.SIGKILL)
        started = time.monotonic()
        assert processes[1 - victim].wait(timeout=120) != 0
        assert time.monotonic() - started < 60  # six times the heartbeat's timeout, on a machine that is busy
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("localhost:1", None, None), "num_processes=None"),
        ((None, 2, 0), "coordinator_address=None"),
        (("localhost:1", 2, 2), "process_id=2"),
        (("localhost", 2, 0), "coordinator_address=localhost"),
        ((":8476", 2, 0), "coordinator_address=:8476"),
        (("two words:8476", 2, 1), "coordinator_address=two words:8476"),
    ],
)
def test_processes_that_are_not_described_are_refused(given, name):
    with pytest.raises(UserError, match=name):
        distributed.initialize(*given)


@pytest.mark.slow
def test_processes_of_different_runs_end_together(tmp_path):
    """Each would train on, and their gradients would be added up."""
    for name, text in (("text", "the quick brown fox. "), ("other", "a lazy dog is it. ")):
        (tmp_path / name).write_text(text * 400)
    text = FLAGS | {"data.kind": "text", "data.tokenizer": "bytes", "data.paths": tmp_path / "text", "mesh.data": 2}
    text |= {"model.vocab_size": 258, "train.steps": 4}
    metrics, seed = tmp_path / "run/metrics.jsonl", {"train.seed": 7}

    def run_two(*flags):  # as on machines of their own
        return train_together(tmp_path / "run", [tmp_path / "cache0", tmp_path / "cache1"], flags, 1)

    for status, _, errors in run_two(text, text | seed | {"data.paths": tmp_path / "other"}):
        assert status == 2
        assert "config of process [1]" in errors
    assert not (tmp_path / "run" / "checkpoints").exists()
    ends = run_two(text, text)
    assert [status for status, *_ in ends] == [0, 0], ends
    before = metrics.read_text()
    assert before
    assert [status for status, *_ in run_two(text, text)] == [0, 0]
    assert metrics.read_text() == before
    # What one of them finds before the run begins: another config than that of the folder, whose field is named.
    first, second = run_two(text, text | seed)
    assert (first[0], second[0]) == (2, 2)
    assert "process [1]" in first[2]
    assert "train.seed=7" in second[2]
