"""Real processes: what they are given, what they report, and how they end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from absl import logging

from orthojax.errors import UserError
from orthojax.experiments import places as module
from orthojax.experiments.places import Place, device_count, places
from orthojax.experiments.workers import run_all

ROOT = Path(__file__).parents[1]
TWO = [Place(), Place()]


class Heard:
    """A `Reporter` that remembers."""

    def __init__(self):
        self.work, self.messages, self.lines = 0.0, [], []

    def advance(self, work, message=""):
        self.work += work
        self.messages.append(message)

    def skip(self, work):
        self.work += work

    def say(self, message):
        self.lines.append(message)


def nothing():
    pass


def lost(task, reason):
    return f"{task}: {reason}"


def run(do, tasks, where=TWO, heard=None, setup=nothing):
    return run_all(do, tasks, where, heard or Heard(), setup=setup, lost=lost)


def square(x, reporter):
    print("what a library prints is no event")
    reporter.say(f"at {x}")
    reporter.skip(1.0)
    reporter.advance(1.0, f"task {x}")
    return x * x, os.getpid(), logging.get_verbosity()


def fail(kind, reporter):
    if kind == "user":
        raise UserError("the file is wrong", allowed="a right one", hint="did you mean it?")
    if kind == "ours":
        return {}["a defect"]
    if kind == "disk":
        raise OSError(28, "No space left on device", "metrics.jsonl")
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exits":
        sys.exit(3)
    return kind


def test_results_are_in_the_order_of_the_tasks_and_everything_is_reported():
    heard, before = Heard(), logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        results = run(square, [3, 1, 2, 4], heard=heard)
    finally:
        logging.set_verbosity(before)
    assert [value for value, _, _ in results] == [9, 1, 4, 16]
    assert os.getpid() not in {pid for _, pid, _ in results}
    assert {level for _, _, level in results} == {logging.FATAL}  # libraries log as much as in the parent
    assert heard.work == 8.0
    assert sorted(heard.lines) == ["at 1", "at 2", "at 3", "at 4"]


def test_one_place_or_one_task_is_this_process():
    prepared = []
    for tasks, where in (([2, 3], [Place()]), ([2], TWO)):
        results = run(square, tasks, where, setup=lambda: prepared.append(1))
        assert {pid for _, pid, _ in results} == {os.getpid()}
    assert prepared == [1, 1]


def test_a_killed_worker_loses_its_task_alone():
    results = run(fail, ["a", "killed", "b", "c"])
    assert results == ["a", "killed: worker killed (SIGKILL), possibly out of memory", "b", "c"]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user", UserError, "the file is wrong\nallowed: a right one\ndid you mean it?"),
        ("ours", RuntimeError, "KeyError: 'a defect'"),
        ("disk", OSError, "No space left on device: 'metrics.jsonl'"),
        ("exits", RuntimeError, "exit code 3"),
    ],
)
def test_what_a_task_raises_arrives(kind, error, words):
    with pytest.raises(error) as raised:
        run(fail, ["a", kind, "b"])
    assert words in str(raised.value)


def where_am_i(x, reporter):
    time.sleep(0.2)  # so that each worker has one
    return sorted(os.sched_getaffinity(0)), os.environ.get("SOME_VARIABLE")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_a_place_pins_its_worker():
    core = max(os.sched_getaffinity(0))
    assert run(where_am_i, [1, 2], [Place((core,), (("SOME_VARIABLE", "7"),))] * 2) == [([core], "7")] * 2


def talk(name, reporter):
    for step in range(3):
        reporter.advance(1.0, f"{name} step {step}")
        time.sleep(0.02)


def test_progress_shows_two_workers_in_a_steady_order():
    heard = Heard()
    run(talk, ["a", "b", "c"], [Place()] * 3, heard)
    assert heard.work == 9.0
    shown = [message.split("; ") for message in heard.messages]
    assert all(parts[2] == "1 more" for parts in shown if len(parts) == 3)
    assert all(len(parts) <= 3 and parts[:2] == sorted(parts[:2]) for parts in shown)


# Programs that are asked to stop.

PROGRAM = """
import os, time
from pathlib import Path

from orthojax.errors import Interrupted
from orthojax.experiments.places import Place
from orthojax.experiments.workers import run_all
from orthojax.train.distributed import stop_on_signals


class Silent:
    advance = skip = say = lambda *words: None


def train(name, reporter):
    with stop_on_signals() as asked:  # as `orthojax.train.train` does
        Path(name + ".begun").write_text(str(os.getpid()))
        for step in range(600):
            time.sleep(0.05)
            reporter.advance(1.0, name)
            if asked.signum:
                time.sleep({saving_seconds})
                Path(name + ".saved").write_text("")
                raise Interrupted(asked.signum)


def measure(name, reporter):
    Path(name + ".begun").write_text(str(os.getpid()))
    time.sleep(600)


def nothing(*_):
    pass
"""
START = """
import program
from orthojax.commands import cli

cli.run(lambda _: program.run_all(
    program.{do}, ["a", "b", "c"], [program.Place()] * 2, program.Silent, setup=program.nothing, lost=program.nothing))
"""


def started(folder, do="train", saving_seconds=0.3, wait=True):
    """A program whose two workers are at work; it leads a process group, as under a shell."""
    # A module of its own, since workers find functions by module: those of __main__ would be the worker's.
    (folder / "program.py").write_text(PROGRAM.format(saving_seconds=saving_seconds))
    (folder / "start.py").write_text(START.format(do=do))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "start.py"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    if not wait:
        return process, []
    waited(lambda: all((folder / f"{name}.begun").exists() for name in "ab"), process)
    time.sleep(0.2)
    return process, [int((folder / f"{name}.begun").read_text()) for name in "ab"]


def waited(done, process=None, seconds=120):
    for _ in range(20 * seconds):
        if done():
            return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(process.stderr.read() if process and process.poll() is not None else "too long")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(process, pids):
    errors = process.communicate(timeout=60)[1]
    waited(lambda: not any(map(is_running, pids)), seconds=20)
    return process.returncode, errors


STOPPED = "stopped, state saved; run the same command to resume\n"


def test_ctrl_c_lets_every_worker_save(tmp_path):
    process, pids = started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
    assert ended(process, pids) == (128 + signal.SIGINT, STOPPED)
    assert {path.name for path in tmp_path.glob("*.saved")} == {"a.saved", "b.saved"}
    assert not (tmp_path / "c.begun").exists()


@pytest.mark.slow
def test_sigterm_to_every_process_lets_every_worker_save(tmp_path):
    process, pids = started(tmp_path)
    for pid in (*pids, process.pid):  # as some schedulers do it
        os.kill(pid, signal.SIGTERM)
    assert ended(process, pids) == (128 + signal.SIGTERM, STOPPED)
    assert {path.name for path in tmp_path.glob("*.saved")} == {"a.saved", "b.saved"}


@pytest.mark.slow
def test_a_second_signal_kills(tmp_path):
    process, pids = started(tmp_path, saving_seconds=60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert ended(process, pids) == (130, "stopped; run the same command to resume\n")
    assert not list(tmp_path.glob("*.saved"))


@pytest.mark.slow
def test_workers_that_train_nothing_end_at_once_and_silently(tmp_path):
    process, pids = started(tmp_path, do="measure")
    process.send_signal(signal.SIGTERM)
    assert ended(process, pids) == (128 + signal.SIGTERM, STOPPED)


@pytest.mark.slow
def test_workers_end_where_their_parent_is_killed(tmp_path):
    process, pids = started(tmp_path)
    process.kill()
    assert ended(process, pids) == (-signal.SIGKILL, "")


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_all(tmp_path):
    process, pids = started(tmp_path)
    os.kill(pids[0], signal.SIGINT)
    assert ended(process, pids) == (128 + signal.SIGINT, STOPPED)
    assert {path.name for path in tmp_path.glob("*.saved")} == {"a.saved", "b.saved"}


@pytest.mark.slow
def test_a_signal_while_workers_start_leaves_nothing_behind(tmp_path):
    for delay in (0.0, 0.05, 0.1, 0.3, 0.5):
        process, _ = started(tmp_path, saving_seconds=0.1, wait=False)
        waited(lambda pid=process.pid: Path(f"/proc/{pid}/task/{pid}/children").read_text().split(), process)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        assert ended(process, []) == (128 + signal.SIGINT, STOPPED), delay


# Places.


@pytest.fixture
def machine(monkeypatch):
    """A machine with four cores, 7 GB free, and no accelerator."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 7 << 30)
    monkeypatch.setattr(module, "_control_group", lambda name: "")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: [])
    return monkeypatch


def test_workers_share_the_cores_as_far_as_memory_goes(machine):
    assert [place.cores for place in places()] == [(0, 3), (1,), (2,)]
    assert [place.cores for place in places(2)] == [(0, 2), (1, 3)]
    assert len(places(9)) == device_count(places(9)) == 4
    machine.setattr(module, "available_memory_bytes", lambda: 1 << 30)
    assert [place.cores for place in places()] == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("cpu", "memory", "count"),
    [("150000 100000", "max", 2), ("max 100000", str(5 << 30), 2), ("max 100000", "max", 3)],
)
def test_the_limits_of_a_container_count(machine, cpu, memory, count):
    machine.setattr(module, "_control_group", lambda name: {"cpu.max": cpu, "memory.max": memory}[name])
    assert len(places()) == count


def test_accelerators_are_places(machine):
    machine.setattr(module.importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [place.environment for place in places()] == [(("CUDA_VISIBLE_DEVICES", gpu),) for gpu in "25"]
    assert len(places(1)) == 1
    shared = [dict(place.environment) for place in places(3)]
    assert [found["CUDA_VISIBLE_DEVICES"] for found in shared] == ["2", "5", "2"]
    assert (device_count(places(3)), device_count(places(1))) == (2, 1)
    assert {found["XLA_CLIENT_MEM_FRACTION"] for found in shared} == {"0.375"}
    machine.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the user's own arrangement
    assert [place.environment for place in places(3)] == [(("CUDA_VISIBLE_DEVICES", gpu),) for gpu in "252"]
    machine.setenv("CUDA_VISIBLE_DEVICES", "-1")  # none
    assert len(places()) == 3
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert len(places()) == 3
    machine.delenv("JAX_PLATFORMS")
    machine.setattr(module.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    assert places() == [Place()]
