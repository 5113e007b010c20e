"""The launchers of clusters: valid, with the flags that orthojax has, and run as far as one machine can."""

import os
import re
import subprocess
import sys

import pytest
from small_runs import ROOT, cpu_environment
from test_multihost import FLAGS, losses

LAUNCH = ROOT / "launch"
SCRIPTS = [LAUNCH / "slurm.sbatch", LAUNCH / "tpu_pod.sh"]


def command(folder, name, text):
    """Puts a stand-in for a program of the cluster into a folder of commands."""
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def environment(folder, **more):
    return cpu_environment(PATH=f"{folder}:{os.environ['PATH']}", **more)


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
            f'[ $(wc -l < {tmp_path}/calls) -eq 3 ] && exit 2; exit 75')  # fmt: skip
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
    flags = [f"--config.{name}={value}" for name, value in FLAGS.items()]
    given = dict(SLURM_JOB_ID=str(os.getpid()), SLURM_STEP_NODELIST="localhost", SLURM_NTASKS="2")
    given |= {"SLURM_STEP_NUM_NODES": "1", "JAX_NUM_CPU_DEVICES": "1", "ORTHOJAX_COMPILE_CACHE": ""}
    done = subprocess.run(
        ["bash", SCRIPTS[0], f"--workdir={tmp_path}/run", f"--cache_dir={tmp_path}/cache", *flags],
        capture_output=True, text=True, env=environment(tmp_path, **given),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 8 + 2
