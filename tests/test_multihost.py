"""Several processes on this machine as one run: equal losses, one set of files, and nobody waits for the dead."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import foreign_reader
import numpy as np
import pytest
from small_runs import ROOT, cpu_environment, flip
from tiny_run import by_path

from orthojax.errors import UserError
from orthojax.train import distributed, find_checkpoint, read_metrics, read_params, verify_checkpoint

FLAGS = {"data.kind": "bigram_backcopy", "data.sequence_length": 16, "eval.sequences": 32}
FLAGS |= {f"model.{k}": v for k, v in dict(vocab_size=256, d_model=32, num_layers=2, num_heads=4, d_mlp=64).items()}
FLAGS |= {"optim.optimizer": "orthoadam", "optim.warmup_steps": 2, "train.steps": 8, "train.batch_size": 16}
FLAGS |= {"train.log_every_steps": 1, "train.eval_every_steps": 4, "train.checkpoint_every_steps": 4}


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(arguments, devices, **options):
    environment = cpu_environment(JAX_NUM_CPU_DEVICES=str(devices), PYTHONUNBUFFERED="1")
    options |= {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], **options)


def start_together(workdir, caches, flags_of_each, devices):
    """Starts launch/train.py in each process, with flags of its own."""
    together = [f"--coordinator_address=localhost:{free_port()}", f"--num_processes={len(flags_of_each)}"]
    started = []
    for i, (cache, flags) in enumerate(zip(caches, flags_of_each, strict=True)):
        command = [str(ROOT / "launch/train.py"), f"--workdir={workdir}", f"--cache_dir={cache}"]
        command += [f"--config.{name}={value}" for name, value in flags.items()]
        started.append(start([*command, *together, f"--process_id={i}"] if len(caches) > 1 else command, devices))
    return started


def finish(started):
    """(exit status, console, errors) of each process."""
    ends = [process.communicate(timeout=400) for process in started]
    return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


def run(workdir, cache, mesh, processes=1):
    """The console and errors of each process over eight devices."""
    ends = finish(start_together(workdir, [cache] * processes, [FLAGS | mesh] * processes, 8 // processes))
    assert [status for status, *_ in ends] == [0] * processes, ends
    return [end[1:] for end in ends]


def losses(workdir):
    """(step, name) -> loss, of training and validation."""
    logged = read_metrics(workdir / "metrics.jsonl")
    return {f"{name} {line['step']}": line[name] for line in logged for name in line if name.endswith("loss_nats")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder / "run", folder / "cache", {})
    return folder


MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.fixture(scope="module")
def of_two(alone, tmp_path_factory):
    """The same run by two processes."""
    workdir = tmp_path_factory.mktemp("of_two") / "run"
    return workdir, run(workdir, alone / "cache", MESH, 2)


@pytest.mark.slow
def test_two_processes_are_one_run(alone, of_two, tmp_path):
    workdir, ends = of_two
    want = losses(alone / "run")
    assert len(want) == 8 + 2
    assert losses(workdir) == pytest.approx(want, abs=1e-5, rel=0)
    assert ["done" in console for console, _ in ends] == [True, False]
    assert json.loads((workdir / "config.json").read_text())["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    # Each wrote its own shards of the one checkpoint, and other programs read them.
    checkpoint, other = (folder / "checkpoints/8" for folder in (workdir, alone / "run"))
    files = json.loads((checkpoint / "checksums/metadata").read_text())["files"]
    assert {name.split("/")[1] for name in files} >= {"ocdbt.process_0", "ocdbt.process_1"}
    assert verify_checkpoint(checkpoint) == verify_checkpoint(other)
    (arrays,) = foreign_reader.read(tmp_path, checkpoint / "params")
    assert {name: (list(x.shape), x.tobytes()) for name, x in arrays.items()} == {
        name: (list(x.shape), np.asarray(x).tobytes()) for name, x in by_path(read_params(checkpoint)).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "mesh"), [(1, {}), (4, {"mesh.fsdp": -1})])
def test_another_number_of_processes_resumes(alone, of_two, tmp_path, processes, mesh):
    copy = Path(shutil.copytree(of_two[0], tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints/8")
    run(copy, alone / "cache", mesh, processes)
    assert losses(copy) == pytest.approx(losses(alone / "run"), abs=1e-5, rel=0)


@pytest.mark.slow
def test_all_processes_agree_on_a_damaged_checkpoint(alone, of_two, tmp_path):
    """The damage lies in what one process alone checks; both go back to the step before."""
    copy = Path(shutil.copytree(of_two[0], tmp_path / "run"))
    flip(next((copy / "checkpoints/8/params/ocdbt.process_1").glob("d/*")))
    ends = run(copy, alone / "cache", MESH, 2)
    assert ["the damaged one is now" in errors for _, errors in ends] == [True, False]
    assert {path.name for path in (copy / "checkpoints").glob("[0-9]*")} == {"4", "8", "8.damaged-1"}
    assert losses(copy) == losses(of_two[0])


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_notice_to_one_process_stops_all_alike(alone, tmp_path, signum):
    workdir, flags = tmp_path / "run", FLAGS | MESH | {"train.steps": 3000, "train.eval_every_steps": 0}
    started = start_together(workdir, [alone / "cache"] * 2, [flags] * 2, 4)
    while len(losses(workdir)) < 5:
        assert [process.poll() for process in started] == [None, None]
        time.sleep(0.1)
    started[1].send_signal(signum)
    ends = finish(started)
    assert [status for status, *_ in ends] == [128 + signal.SIGTERM] * 2, ends
    step = find_checkpoint(workdir).name
    assert all(f"stopped at step {step}," in errors for *_, errors in ends)
    assert verify_checkpoint(find_checkpoint(workdir)) > 0


MEETING = """
import sys, time
import numpy as np
from orthojax.train import distributed
distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.experimental import multihost_utils
with distributed.failing_alone():
    while sys.argv[2] == "0" or sys.stdin.readline():
        assert multihost_utils.process_allgather(np.ones(2)).sum() == 4
        print("met", flush=True)
        time.sleep(0.1)
    raise ZeroDivisionError
"""


@pytest.mark.parametrize(
    ("victim", "signum", "seconds"),
    [
        (1, signal.SIGKILL, 20),
        pytest.param(0, signal.SIGKILL, 20, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, 60, marks=pytest.mark.slow),  # three times the heartbeat's, on a busy machine
        pytest.param(1, None, 60, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_left_alone_ends(victim, signum, seconds):
    """In three lines, and with a status after which a scheduler starts all again; one that fails says why, at once."""
    address = f"localhost:{free_port()}"
    processes = [start(["-c", MEETING, address, str(i)], 1, stdin=subprocess.PIPE) for i in range(2)]
    try:
        processes[1].stdin.write("meet\n" * 9)
        processes[1].stdin.flush()
        for process in processes:
            while process.stdout.readline() != "met\n":
                assert process.poll() is None, process.communicate()
        started = time.monotonic()
        if signum is None:
            _, errors = processes[1].communicate()  # ends its input
            assert (processes[1].returncode, errors.splitlines()[-1]) == (1, "ZeroDivisionError")
        else:
            processes[victim].send_signal(signum)
        _, errors = processes[1 - victim].communicate(timeout=120)
        assert time.monotonic() - started < seconds
        assert processes[1 - victim].returncode == distributed.LOST == 75
        assert errors.startswith("error: another process of this run died or hangs\n")
        assert len(errors.splitlines()) == 3, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "given", [("localhost:1", None, None), (None, 2, 0), ("localhost:1", 2, 2), ("localhost", 2, 0), (":8476", 2, 0)]
)
def test_processes_that_are_not_described_are_refused(given):
    with pytest.raises(UserError, match="coordinator_address"):
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
        return finish(start_together(tmp_path / "run", [tmp_path / "cache0", tmp_path / "cache1"], flags, 1))

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
