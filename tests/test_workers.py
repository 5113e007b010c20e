"""Real processes: what they are given, what they tell, and how they end."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from absl import logging
from orthojax.experiments.study.places import Place, places
from orthojax.experiments.study.workers import run_all

from orthojax.errors import Interrupted, UserError
from orthojax.experiments.study import places as module
from orthojax.progress import Progress

ROOT = Path(__file__).parents[1]
TWO = [Place(), Place()]


class Heard:
    """A `Teller` that remembers."""

    def __init__(self):
        self.work, self.messages, self.lines = 0.0, [], []

    def advance(self, work, message=""):
        self.work += work
        self.messages.append(message)

    def skip(self, work):
        self.work += work

    def say(self, message):
        self.lines.append(message)


def square(x, tell):
    tell.say(f"at {x}")
    tell.skip(1.0)
    tell.advance(1.0, f"task {x}")
    return x * x, os.getpid()


def fail(kind, tell):
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


def reason(task, why, tell):
    tell.say(f"lost {task}")
    return f"{task}: {why}"


def test_results_come_in_the_order_of_the_tasks_from_two_processes_and_everything_is_told():
    heard = Heard()
    results = run_all(square, [3, 1, 2, 4], TWO, heard, lost=reason)
    assert [value for value, _ in results] == [9, 1, 4, 16]
    pids = {pid for _, pid in results}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2  # a fast one may do all
    assert heard.work == 8.0
    assert sorted(heard.lines) == ["at 1", "at 2", "at 3", "at 4"]


def test_one_place_or_one_task_is_this_process():
    prepared = []
    for tasks, where in (([2, 3], [Place()]), ([2], TWO)):
        results = run_all(square, tasks, where, Heard(), prepare=lambda: prepared.append(1), lost=reason)
        assert {pid for _, pid in results} == {os.getpid()}
    assert prepared == [1, 1]


def verbosity(task, tell):
    return os.getpid(), logging.get_verbosity()


def test_libraries_log_in_workers_as_much_as_in_the_parent():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        results = run_all(verbosity, [1, 2], TWO, Heard(), lost=reason)
    finally:
        logging.set_verbosity(before)
    assert {level for _, level in results} == {logging.FATAL}
    assert os.getpid() not in {pid for pid, _ in results}


def test_a_killed_worker_loses_its_task_alone():
    heard = Heard()
    results = run_all(fail, ["a", "killed", "b", "c"], TWO, heard, lost=reason)
    assert heard.lines == ["lost killed"]
    assert results == ["a", "killed: its process was ended by SIGKILL, as for want of memory", "b", "c"]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user", UserError, "the file is wrong\nallowed: a right one\ndid you mean it?"),
        ("ours", RuntimeError, "KeyError: 'a defect'"),
        ("disk", OSError, "No space left on device"),
        pytest.param("exits", RuntimeError, "exit code 3", marks=pytest.mark.slow),
    ],
)
def test_what_a_task_raises_arrives(kind, error, words):
    with pytest.raises(error) as raised:
        run_all(fail, ["a", kind, "b"], TWO, Heard(), lost=reason)
    assert words in str(raised.value)
    if kind == "ours":
        assert "Traceback" in str(raised.value)
    if kind == "disk":
        assert (raised.value.errno, raised.value.filename) == (28, "metrics.jsonl")
        assert "in fail" in "".join(raised.value.__notes__)


# Programs that are told to stop.

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

from orthojax import cli
from orthojax.errors import Interrupted
from orthojax.experiments.study.places import Place
from orthojax.experiments.study.workers import run_all


class Silent:
    advance = skip = say = lambda *words: None


def train(name, tell):
    # Stops as `orthojax.train.train` does: the first signal is noted, a second one has its usual effect.
    asked, before = [], {{}}

    def note(signum, _):
        asked.append(signum)
        for each, handler in before.items():
            signal.signal(each, handler)

    before |= {{each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}}
    Path(name + ".begun").write_text(str(os.getpid()))
    for step in range(600):
        time.sleep({step_seconds})
        tell.advance(1.0, name)
        if asked:
            time.sleep({saving_seconds})
            Path(name + ".saved").write_text("")
            raise Interrupted(asked[0], step)


def measure(name, tell):
    Path(name + ".begun").write_text(str(os.getpid()))
    time.sleep(600)


if __name__ == "__main__":
    cli.run(lambda _: run_all({do}, ["a", "b", "c"], [Place(), Place()], Silent, lost=lambda *_: None))
"""


def started(folder, do="train", step_seconds=0.05, saving_seconds=0.3):
    """A program whose two workers are at work; it leads a process group, as under a shell."""
    (folder / "program.py").write_text(PROGRAM.format(do=do, step_seconds=step_seconds, saving_seconds=saving_seconds))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
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
    said = process.communicate(timeout=60)[1]
    waited(lambda: not any(map(is_running, pids)), seconds=20)
    return process.returncode, said


STOPPED = "stopped, state saved; run the same command to go on\n"


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
    assert ended(process, pids) == (130, "stopped; run the same command to go on\n")
    assert not list(tmp_path.glob("*.saved"))


@pytest.mark.slow
def test_workers_that_train_nothing_end_at_once_and_without_a_word(tmp_path):
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
    """At any moment: whatever was reached, all processes end and nothing is said but that."""
    for delay in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):
        (tmp_path / "program.py").write_text(PROGRAM.format(do="train", step_seconds=0.05, saving_seconds=0.1))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            [sys.executable, "program.py"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        waited(lambda pid=process.pid: (Path(f"/proc/{pid}/task/{pid}/children")).read_text().split(), process)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        assert (process.returncode, said) == (128 + signal.SIGINT, STOPPED), delay


# What progress shows.


def talk(name, tell):
    for step in range(3):
        tell.advance(1.0, f"{name} step {step}")
        time.sleep(0.02)


def test_progress_shows_two_workers_in_a_steady_order():
    heard = Heard()
    run_all(talk, ["a", "b", "c"], [Place()] * 3, heard, lost=reason)
    assert heard.work == 9.0
    both = [message.split("; ") for message in heard.messages]
    assert all(len(parts) <= 3 for parts in both)
    assert all(parts[2] == "1 more" for parts in both if len(parts) == 3)
    assert all(parts[:2] == sorted(parts[:2]) for parts in both)


def test_a_message_longer_than_the_terminal_leaves_room_for_the_time(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("orthojax.progress.shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    with Progress(10, stream=stream) as progress:
        progress.advance(5, "GPT2 60M, softmax + Adam, seed 0: step 12/500 loss 6.1; " * 2)
    line = stream.getvalue().split("\r")[-1].rstrip()
    assert re.fullmatch(r" 50%\|##  \| GPT2 60M, softmax \+ Adam, seed 0: step 12/500.*\.\.\. \| 0:00, 0:00 left", line)
    assert len(line) == 80


# Places.


@pytest.fixture
def machine(monkeypatch):
    """A machine with four cores, 7 GB free, and no accelerator."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(module, "_free_bytes", lambda: 7 << 30)
    monkeypatch.setattr(module, "_control_group", lambda name: "")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: [])
    return monkeypatch


def test_workers_share_the_cores_as_far_as_memory_goes(machine):
    assert [place.cores for place in places()] == [(0, 3), (1,), (2,)]
    assert [place.cores for place in places(2)] == [(0, 2), (1, 3)]
    assert len(places(9)) == 4
    machine.setattr(module, "_free_bytes", lambda: 1 << 30)
    assert [place.cores for place in places()] == [(0, 1, 2, 3)]


def test_the_limits_of_a_container_count(machine):
    limits = {"cpu.max": "150000 100000", "memory.max": "max"}
    machine.setattr(module, "_control_group", lambda name: limits[name])
    assert len(places()) == 2
    limits.update({"cpu.max": "max 100000", "memory.max": str(5 << 30)})
    assert len(places()) == 2
    limits["memory.max"] = "max"
    assert len(places()) == 3


def test_every_gpu_is_a_place(machine, tmp_path):
    machine.setattr(module.importlib.util, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [place.environment for place in places()] == [(("CUDA_VISIBLE_DEVICES", gpu),) for gpu in "25"]
    assert all(place.accelerator for place in places())
    assert len(places(1)) == 1
    machine.setenv("CUDA_VISIBLE_DEVICES", "-1")  # none
    assert not places()[0].accelerator
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert not places()[0].accelerator


def test_another_accelerator_is_one_place(machine):
    machine.setattr(module.importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    assert places() == [Place(accelerator=True)]
    machine.setenv("JAX_PLATFORMS", "cpu")
    assert len(places()) == 3


def test_a_place_pins_its_process(tmp_path):
    code = """
    import json, os
    from orthojax.experiments.study.places import Place
    core = max(os.sched_getaffinity(0))
    Place((core,), (("SOME_VARIABLE", "7"),)).enter()
    print(json.dumps([sorted(os.sched_getaffinity(0)) == [core], os.environ["SOME_VARIABLE"]]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, "7"]


def test_interrupted_says_what_happened():
    assert str(Interrupted(signal.SIGINT, 7)) == "stopped at step 7, state saved; run the same command to go on"
