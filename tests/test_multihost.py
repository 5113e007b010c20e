"""Several processes on this machine as one run, nobody waits for the dead; and what starts them on clusters."""

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
    mesh = json.loads((workdir / "config.json").read_text())["mesh"]
    assert mesh == {"data": 2, "fsdp": 2, "tensor": 2, "gather_table": False}
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


@pytest.mark.parametrize(("victim", "signum", "seconds"), [
    (1, signal.SIGKILL, 20),
    pytest.param(0, signal.SIGKILL, 20, marks=pytest.mark.slow),
    pytest.param(1, signal.SIGSTOP, 60, marks=pytest.mark.slow),  # three times the heartbeat's, on a busy machine
    pytest.param(1, None, 60, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_process_that_is_left_alone_ends(victim, signum, seconds, tmp_path, monkeypatch):
    """In three lines, and with a status after which a scheduler starts all again; one that fails says why, at once."""
    monkeypatch.setenv("ORTHOJAX_FAILED", str(tmp_path / "failed"))
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
            assert (tmp_path / "failed").exists()
        else:
            processes[victim].send_signal(signum)
        _, errors = processes[1 - victim].communicate(timeout=120)
        assert time.monotonic() - started < seconds
        assert processes[1 - victim].returncode == distributed.LOST == 75
        assert errors.startswith("error: another process of this run died or hangs\n")
        assert len(errors.splitlines()) == 3, errors
        assert signum is None or not (tmp_path / "failed").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


PREPARING = """
import sys, time
import jax
from orthojax.train import distributed
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
print(distributed.sync_start(lambda: time.sleep(40 * (sys.argv[2] == "0")) or sys.argv[2]))
"""


@pytest.mark.slow
def test_a_process_that_prepares_for_long_is_waited_for():
    """A collective would give up after half a minute."""
    address = f"localhost:{free_port()}"
    processes = [start(["-c", PREPARING, address, str(i)], 1) for i in range(2)]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [out.split()[-1] for out, _ in said] == ["0", "1"]


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


LAUNCH = ROOT / "launch"
SCRIPTS = [LAUNCH / "slurm.sbatch", LAUNCH / "tpu_pod.sh"]


def command(folder, name, text):
    """Puts a stand-in for a program of the cluster into a folder of commands."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def environment(folder, **more):
    return cpu_environment(PATH=f"{folder}:{os.environ['PATH']}", **more)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


def test_slurm_gets_cores_a_signal_and_the_gpus_of_the_node():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SCRIPTS[0].read_text(), re.M))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert "gpus-per-task" not in asked
    assert int(asked["cpus-per-task"]) > 1
    assert (asked["signal"], asked["requeue"]) == ("TERM@300", "")


@pytest.mark.parametrize(
    ("status", "restarts", "again"), [(0, 0, 0), (2, 0, 0), (75, 0, 1), (143, 3, 1), (143, 100, 0)]
)
def test_slurm_requeues_what_was_stopped_or_lost(tmp_path, status, restarts, again):
    command(tmp_path, "srun", f'echo "$XLA_FLAGS" "$@"; exit {status}')
    command(tmp_path, "scontrol", 'echo "again: $*"')
    done = subprocess.run(
        ["bash", SCRIPTS[0], "--workdir=W"], capture_output=True, text=True,
        env=environment(tmp_path, SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="6", SLURM_RESTART_COUNT=str(restarts)),
    )  # fmt: skip
    assert done.returncode == status
    assert "--cpus-per-task=6 " in done.stdout
    assert done.stdout.count("again: requeue 7") == again


@pytest.mark.parametrize(("alone", "again"), [(2, 0), (1, 0), (137, 1)])
def test_slurm_does_not_requeue_what_fails_in_one_process(tmp_path, alone, again):
    """The others then end with 75, as they do if it was killed, and srun returns the highest status."""
    command(tmp_path, "srun", 'highest=0; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "${@:4}"; status=$?; '
            "[ $status -gt $highest ] && highest=$status; done; exit $highest")  # fmt: skip
    failed = "" if alone == 137 else "touch $ORTHOJAX_FAILED; "
    command(tmp_path, "orthojax", f"[ $SLURM_PROCID = 0 ] && exit 75; {failed}exit {alone}")
    command(tmp_path, "scontrol", 'echo "again: $*"')
    done = subprocess.run(
        ["bash", SCRIPTS[0], "--workdir=W"], capture_output=True, text=True, cwd=tmp_path,
        env=environment(tmp_path, SLURM_JOB_ID="7"),
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("again: requeue 7")) == (max(75, alone), again)
    assert not (tmp_path / "orthojax-failed-7").exists()


def test_flags_of_xla_are_known():
    """An unknown one ends the process."""
    (flags,) = re.findall(r'XLA_FLAGS="(.*) \$', SCRIPTS[0].read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=cpu_environment(XLA_FLAGS=flags), capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_tpu_workers_run_it_detached_and_again_if_one_is_lost(tmp_path):
    command(tmp_path, "gcloud", 'printf "%s\\n" "$@"')
    sent = subprocess.run(
        [SCRIPTS[1], "pod", "zone", "--workdir=/a b"], env=environment(tmp_path), capture_output=True, text=True
    ).stdout.splitlines()
    assert "--worker=all" in sent
    remote = next(line for line in sent if line.startswith("--command=")).removeprefix("--command=")
    command(tmp_path, "sleep", "")
    command(tmp_path, "orthojax", f'printf "%s|" "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls; '
            f'n=$(wc -l < {tmp_path}/calls); [ $n -eq 3 ] && exit 2; [ $n -eq 1 ] && exit 137; exit 75')  # fmt: skip
    (tmp_path / "home/orthojax").mkdir(parents=True)
    subprocess.run(["bash", "-c", f"{remote} wait"], cwd=tmp_path / "home", env=environment(tmp_path), check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert calls[0].split("|")[:2] == ["train", "--multihost"]
    assert "--workdir=/a b" in calls[0].split("|")


def test_jobset_restarts_what_is_lost_and_not_what_fails():
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())["spec"]
    (job,) = (each["template"]["spec"] for each in spec["replicatedJobs"])
    assert spec["failurePolicy"]["maxRestarts"] > 0
    assert job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [1, 2]}
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 300
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert "--multihost" in container["args"]


@pytest.mark.slow
def test_two_processes_find_each_other_as_under_slurm(tmp_path):
    """The script itself, with a stand-in for srun that starts two tasks on this machine."""
    tasks = 'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "${@:4}" & pids+=($!); done; '
    command(tmp_path, "srun", f"{tasks}for pid in ${{pids[@]}}; do wait $pid || exit $?; done")
    command(tmp_path, "orthojax", 'exec python3 -m orthojax "$@"')
    flags = [f"--config.{name}={value}" for name, value in (FLAGS | {"mesh.data": -1}).items()]
    given = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2")
    given |= {"SLURM_STEP_NUM_NODES": "1", "JAX_NUM_CPU_DEVICES": "1", "ORTHOJAX_COMPILE_CACHE": ""}
    done = subprocess.run(
        ["bash", SCRIPTS[0], f"--workdir={tmp_path}/run", f"--cache_dir={tmp_path}/cache", *flags],
        capture_output=True, text=True, env=environment(tmp_path, **given), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 8 + 2
