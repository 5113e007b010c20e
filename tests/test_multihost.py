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

import numpy as np
import pytest

from orthojax.errors import UserError
from orthojax.train import distributed, list_arrays, read_metrics

ROOT = Path(__file__).parents[1]
FLAGS = {
    "data.kind": "bigram_backcopy",
    "data.sequence_length": 16,
    "model.vocab_size": 256,
    "model.d_model": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.d_mlp": 64,
    "optim.optimizer": "orthoadam",
    "optim.warmup_steps": 2,
    "train.steps": 8,
    "train.batch_size": 16,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 4,
    "train.checkpoint_every_steps": 4,
    "eval.sequences": 32,
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(arguments, devices):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(workdir, cache, mesh, processes=1):
    """launch/train.py over eight devices; the console of each process, without what the CPU's own transport says."""
    flags = [f"--config.{name}={value}" for name, value in (FLAGS | mesh).items()]
    command = ["launch/train.py", f"--workdir={workdir}", f"--cache_dir={cache}", *flags]
    if processes > 1:
        command += [f"--coordinator_address=localhost:{free_port()}", f"--num_processes={processes}"]
    started = [
        start([str(ROOT / command[0]), *command[1:], *([f"--process_id={i}"] if processes > 1 else [])], 8 // processes)
        for i in range(processes)
    ]
    consoles = []
    for process in started:
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
        # Lines of the transport's threads may be interleaved.
        consoles.append([line for line in out.splitlines() if line and not re.search(r"Gloo|peer ranks", line)])
    return consoles


def losses(workdir):
    """(step, name) -> loss, of training and validation."""
    lines = read_metrics(Path(workdir) / "metrics.jsonl")
    return {(line["step"], name): line[name] for line in lines for name in line if name.endswith("loss_nats")}


def assert_same_losses(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-5), key


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    console = run(folder / "run", folder / "cache", {})
    return folder, console[0]


MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.mark.slow
def test_one_process_says_which_devices_it_leaves_out(alone):
    assert "  uses 1 of 8 devices; --config.mesh.data=-1 takes all" in alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_are_one_run_that_goes_on_with_another_number(alone, tmp_path, processes):
    folder, want = alone[0], losses(alone[0] / "run")
    assert len(want) == 8 + 2
    workdir = tmp_path / "run"
    consoles = run(workdir, folder / "cache", MESH, processes)
    assert any("done" in line for line in consoles[0])
    assert consoles[1:] == [[]] * (processes - 1)
    assert_same_losses(losses(workdir), want)
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
        assert_same_losses(losses(copy), want)


POLICY = """
import dataclasses, json, sys
import jax, numpy as np
from pathlib import Path
from orthojax.config import Config, DataConfig, EvalConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.train import Inputs, distributed, train

workdir, policy, start_from, address, count, index = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
if count > 1:
    distributed.initialize(address, count, index)
config = Config(
    model=ModelConfig(vocab_size=32, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False,
                      tie_embeddings=False),
    optim=OptimConfig(learning_rate=0.01, warmup_steps=0),
    data=DataConfig(sequence_length=8),
    train=TrainConfig(steps=12, batch_size=8, log_every_steps=1, checkpoint_every_steps=4, eval_every_steps=4,
                      keep_best=1, probe_every_steps=5, probe_sequences=3, on_bad_step=policy, spike_nats=3.0,
                      loss_chunk_positions=3, init_from=start_from),
    eval=EvalConfig(sequences=8, batch_size=8),
    mesh=MeshConfig(1, 1, 1) if count == 1 else MeshConfig(2, 2, 2),
)

def rows(step):
    rows = np.random.default_rng(step).integers(0, 32, (8, 9), dtype=np.int32)
    if step in (2, 6, 8):
        rows[1, 4] = 1000  # an id that the model does not have: the loss is nan
    return rows

train(config, Inputs(rows, rows(999), None, {"source": "test"}, None), Path(workdir))
"""


def run_policy(workdir, policy, start_from, count):
    address = f"localhost:{free_port()}"
    arguments = ["-c", POLICY, str(workdir), policy, str(start_from), address, str(count)]
    processes = [start([*arguments, str(i)], 8 // count) for i in range(count)]
    ends = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, ends
    return read_metrics(workdir / "metrics.jsonl"), {path.name for path in (workdir / "checkpoints").iterdir()}


@pytest.mark.slow
def test_two_processes_judge_steps_keep_checkpoints_and_begin_alike(tmp_path):
    """Every process decides for itself; the second run begins with the parameters of the first."""
    before = ""
    for policy in ("skip", "roll_back"):
        lines, kept = run_policy(tmp_path / f"{policy}_1", policy, before, 1)
        others, also_kept = run_policy(tmp_path / f"{policy}_2", policy, before, 2)
        before = tmp_path / f"{policy}_1"
        assert len([line for line in lines if "event" in line]) == {"skip": 3, "roll_back": 3}[policy]
        assert kept == also_kept
        assert len(lines) == len(others)
        for a, b in zip(lines, others, strict=True):
            assert a.keys() == b.keys()
            for key in a.keys() - {"tokens_per_second"}:
                close = pytest.approx(a[key], rel=1e-3, abs=1e-5) if isinstance(a[key], float) else a[key]
                assert b[key] == close, (key, a["step"])


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
def test_who_loses_another_process_does_not_wait_for_ever(victim):
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
    ("given", "message"),
    [
        (("localhost:1", None, None), "coordinator_address=localhost:1, num_processes=None, process_id=None"),
        ((None, 2, 0), "coordinator_address=None, num_processes=2, process_id=0"),
        (("localhost:1", 2, 2), "process_id=2 of 2 processes"),
        (("localhost", 2, 0), "coordinator_address=localhost\nallowed: HOST:PORT"),
        ((":8476", 2, 0), "coordinator_address=:8476\nallowed: HOST:PORT"),
        (("localhost:http", 2, 0), "localhost:http\nallowed: HOST:PORT of process 0, with a port of 1 to 65535"),
        (("localhost:65536", 2, 1), "port of 1 to 65535"),
        (("two words:8476", 2, 1), "coordinator_address=two words:8476: "),
    ],
)
def test_processes_that_are_not_described_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        distributed.initialize(*given)


def test_without_a_cluster_the_error_says_what_to_give(monkeypatch):
    def none_found(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(distributed.jax.distributed, "initialize", none_found)
    with pytest.raises(UserError, match="cannot connect: coordinator_address should be defined") as error:
        distributed.initialize()
    assert "--coordinator_address=HOST:PORT" in str(error.value)


def flags_of_text(tmp_path, text, **changes):
    """One process's command line on a text file of its own."""
    path = tmp_path / f"{text[:5]}.txt"
    path.write_text(text * 400)
    flags = FLAGS | {"data.kind": "text", "data.tokenizer": "bytes", "model.vocab_size": 258, "mesh.data": 2} | changes
    flags |= {"data.paths": str(path), "train.steps": 4}
    return [f"--config.{name}={value}" for name, value in flags.items()]


def run_two(tmp_path, workdir, first, second):
    """(exit status, console, errors) of two processes, each with its own flags, as on machines of its own."""
    together = [f"--workdir={workdir}", f"--coordinator_address=localhost:{free_port()}", "--num_processes=2"]
    script, caches = str(ROOT / "launch/train.py"), [f"--cache_dir={tmp_path / f'cache{i}'}" for i in range(2)]
    started = [
        start([script, *together, f"--process_id={i}", caches[i], *flags], 1) for i, flags in enumerate((first, second))
    ]
    ends = [process.communicate(timeout=200) for process in started]
    return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


def test_processes_with_other_data_or_another_config_end_together(tmp_path):
    """Each would train on, and their gradients would be added up."""
    text = flags_of_text(tmp_path, "the quick brown fox. ")
    other = flags_of_text(tmp_path, "a lazy dog is it. ", **{"train.seed": 7})
    for status, _, errors in run_two(tmp_path, tmp_path / "run", text, other):
        assert status == 2
        assert "not as that of process 0 are config of process 1 and data of process 1" in errors
    assert not (tmp_path / "run" / "checkpoints").exists()
    ends = run_two(tmp_path, tmp_path / "run", text, text)
    assert [status for status, *_ in ends] == [0, 0], ends
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) > 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [status for status, *_ in run_two(tmp_path, tmp_path / "run", text, text)] == [0, 0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    # What one of them finds before the run begins: another config than that of the folder, which is told by its name.
    first, second = run_two(tmp_path, tmp_path / "run", text, [*text, "--config.train.seed=7"])
    assert (first[0], second[0]) == (2, 2)
    assert "error: process 1 cannot start" in first[2]
    assert "train.seed differ" in second[2]


@pytest.mark.parametrize(("here", "there"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("error", [UserError, PermissionError])
def test_what_one_process_cannot_do_ends_all(monkeypatch, here, there, error):
    def prepare():
        if here:
            raise error("the folder is a file")

    def gathered(own):
        return np.stack([own, np.concatenate([np.array([there], np.uint8), own[1:]])])

    monkeypatch.setattr(distributed.jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gathered)
    if not (here or there):
        distributed.sync_start(prepare, {"config": "a"})
        assert distributed.is_primary()
        return
    message = "the folder is a file" if here else "process 1 cannot start"
    with pytest.raises(error if here else UserError, match=message):
        distributed.sync_start(prepare, {"config": "a"})


def test_many_processes_stop_at_the_number_that_they_agreed_on_though_one_goes_back(monkeypatch):
    """A run that rolls back meets its steps again; what it asks with must not, or the agreed number may never come."""
    asked = []

    def reached(number):
        asked.append(number)
        return number == 9

    monkeypatch.setattr(distributed.multihost_utils, "reached_preemption_sync_point", reached)
    stop = distributed.StopRequest(agreed=True)
    answers = [stop.at(step) for step in (7, 8, 5, 6, 7)]  # back to step 4 after step 8
    assert asked == [7, 8, 9]
    assert answers == [None, None, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM]  # until it can save
    assert stop.signum == signal.SIGTERM
