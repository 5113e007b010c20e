"""Checkpoints of several processes: written together, read by another number, and a notice to one that stops all."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import foreign_reader
import jax
import numpy as np
import pytest
from small_runs import cpu_environment, flip

from orthojax.train import Checkpoints, TrainState, find_checkpoint, verify_checkpoint

pytestmark = pytest.mark.slow

WORKER = """
import json, sys, time
import jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

task, folder, address, count, index = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
jax.config.update("jax_num_cpu_devices", 4 // count)
jax.distributed.initialize(address, count, index)
from orthojax.config import Config
from orthojax.errors import UserError
from orthojax.train import Checkpoints, TrainState
from orthojax.train.distributed import stop_on_signals

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))

def place(values, *axes):
    values = np.asarray(values)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(*axes)), lambda piece: values[piece])

def state_at(step, factor=1.0):
    kernel = np.arange(4096, dtype=np.float32).reshape(64, 64) * factor
    params = {"kernel": place(kernel, "fsdp", "tensor"), "scale": place(kernel[0]), "bias": place(kernel[1], "fsdp")}
    return TrainState(place(np.int32(step)), params, {"mu": jax.tree.map(lambda x: -x, params)})

def describe(state):
    parts = {name: [[[s.start or 0 for s in shard.index], np.asarray(shard.data).tolist()]
                    for shard in leaf.addressable_shards] for name, leaf in state.params.items()}
    return {"step": int(state.step), "parts": parts}

with Checkpoints(folder, keep=5) as checkpoints:
    if task == "save":
        for step in (3, 6):
            checkpoints.save(state_at(step, float(step)), Config(), {})
    elif task == "restore":
        try:
            print(json.dumps(describe(checkpoints.restore_newest(state_at(0, 0.0)))), flush=True)
        except UserError as error:
            print(json.dumps(str(error)), flush=True)
    else:
        with stop_on_signals() as stop:
            print("ready", flush=True)
            for step in range(1, 3000):
                state = state_at(step)
                time.sleep(0.02 * (1 + index))  # one of them is slower
                signum = stop.check()
                if signum is not None:
                    checkpoints.save(state, Config(), {})
                    print(json.dumps([step, int(signum)]), flush=True)
                    break
"""


def start(task, folder, count):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, task, str(folder), address, str(count), str(index)],
            env=cpu_environment(PYTHONUNBUFFERED="1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip


def finish(processes):
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), ends
    return ends


def kernel(step):
    return np.arange(4096, dtype=np.float32).reshape(64, 64) * step


def one_process_state():
    params = {"kernel": kernel(0), "scale": kernel(0)[0], "bias": kernel(0)[1]}
    return jax.tree.map(jax.numpy.asarray, TrainState(np.int32(0), params, {"mu": params}))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "checkpoints"
    finish(start("save", folder, 2))
    return folder


def assert_restored(ends, step):
    """Every process holds its parts of the right arrays, and together they hold all."""
    covered = np.zeros((64, 64))
    for out, _ in ends:
        restored = json.loads(out.splitlines()[-1])
        assert restored["step"] == step
        for start, values in restored["parts"]["kernel"]:
            where = tuple(slice(a, a + n) for a, n in zip(start, np.shape(values), strict=True))
            np.testing.assert_array_equal(np.float32(values), kernel(step)[where])
            covered[where] += 1
    assert np.all(covered == 1)


def test_two_processes_write_and_one_reads(written):
    manifest = json.loads((written / "6/checksums/metadata").read_text())
    assert {name.split("/")[1] for name in manifest["files"]} >= {"ocdbt.process_0", "ocdbt.process_1"}
    with Checkpoints(written, keep=5) as checkpoints:
        state = checkpoints.restore_newest(one_process_state())
    np.testing.assert_array_equal(state.params["kernel"], kernel(6))
    np.testing.assert_array_equal(state.opt_state["mu"]["bias"], -kernel(6)[1])
    assert verify_checkpoint(find_checkpoint(written)) == 2 * 4 * (4096 + 64 + 64)


def test_other_programs_read_what_two_processes_wrote(written, tmp_path):
    (arrays,) = foreign_reader.read(tmp_path, written / "6/params")
    shapes = {"kernel": (64, 64), "scale": (64,), "bias": (64,)}
    assert {name: values.shape for name, values in arrays.items()} == shapes
    np.testing.assert_array_equal(arrays["kernel"], kernel(6))
    np.testing.assert_array_equal(arrays["bias"], kernel(6)[1])
    done = foreign_reader.inspect(".", "--verify", cwd=written)
    assert done.returncode == 0, done.stderr
    assert f"checksums: all hold, of {2 * 4 * (4096 + 64 + 64):,} bytes" in done.stdout


@pytest.mark.parametrize("count", [1, 2, 4])
def test_another_number_of_processes_resumes(written, tmp_path, count):
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    assert_restored(finish(start("restore", copy, count)), 6)


def test_all_processes_agree_on_a_damaged_checkpoint(written, tmp_path):
    """The damage lies in what one process alone checks; both go back to the step before."""
    copy = Path(shutil.copytree(written, tmp_path / "copy"))
    flip(next((copy / "6/params/ocdbt.process_1").glob("d/*")))
    ends = finish(start("restore", copy, 2))
    assert_restored(ends, 3)
    assert [sum("is damaged" in line for line in error.splitlines()) for _, error in ends] == [1, 0]
    assert {path.name for path in copy.glob("[0-9]*")} == {"3", "6.damaged-1"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_notice_to_one_process_stops_all_at_the_same_step(tmp_path, signum):
    processes = start("stop", tmp_path / "checkpoints", 2)
    for process in processes:
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
    time.sleep(0.5)
    processes[1].send_signal(signum)
    (first, _), (second, _) = finish(processes)
    step, stopped_by = json.loads(first.splitlines()[-1])
    assert json.loads(second.splitlines()[-1]) == [step, stopped_by]
    assert stopped_by == signal.SIGTERM
    assert find_checkpoint(tmp_path).name == str(step)
    assert verify_checkpoint(find_checkpoint(tmp_path)) > 0
