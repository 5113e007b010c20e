"""Checkpoints: resuming bit for bit, damage, other configs, and kills at random moments."""

import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from small_runs import CONFIG, ROOT, TEXT, cpu_environment, flip, largest, snapshot, times
from tiny_run import Stop, bits, inputs, rows, stop_at
from tiny_run import lines as losses

from orthojax import train as training
from orthojax.config import Config, from_json, replace, to_json
from orthojax.errors import Interrupted, UserError
from orthojax.train import DamagedError, find_checkpoint, read_metrics, read_params, train, verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# What Orbax leaves behind when it cannot read, besides the exception that it raises.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


INPUTS = inputs(batch=partial(rows, vocab=258), evaluation=8, vocab=258, bits=None, train={"n_tokens": 7})


def signal_at(step):
    """Sends a signal when the loss of a step is known; where the run validates after it, just before."""

    def on_step(done, loss):
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_step


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing disturbed, and its final state."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, bits(train(CONFIG, INPUTS, workdir))


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def test_a_step_that_training_removes_while_it_is_read_gives_way_to_the_newer(copy, monkeypatch):
    read, steps = read_params, copy / "checkpoints"
    (steps / "11").rename(copy / "newer")

    def removed_meanwhile(folder):
        if folder.name == "9":
            (copy / "newer").rename(steps / "11")
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr("orthojax.train.loading.read_params", removed_meanwhile)
    loaded = training.load(copy)
    assert loaded.source == steps.absolute() / "11"
    with pytest.raises(UserError, match="no such model"):
        training.load(steps / "9")


def test_checkpoints_are_found_and_have_plain_names(finished, monkeypatch):
    assert sorted(path.name for path in (finished[0] / "checkpoints").iterdir()) == ["11", "9", "metadata"]
    for where in ("", "checkpoints", "checkpoints/9"):
        step = find_checkpoint(finished[0] / where)
        assert step == finished[0].absolute() / "checkpoints" / ("9" if where.endswith("9") else "11")
        monkeypatch.chdir(finished[0] / where)
        assert find_checkpoint(Path(".")) == step
    names = [f"{item}/{path}" for item in ("params", "opt_state") for path, _, _ in training.list_arrays(step, item)]
    kernel = "layers_0/attention/query/kernel"
    assert {f"params/{kernel}", f"opt_state/orthoadam/inner/mu/{kernel}", f"opt_state/orthoadam/inner/nu/{kernel}",
            "opt_state/learning_rate/count", "params/token_embedding/embedding"} <= set(names)  # fmt: skip


def test_a_folder_without_checkpoints_names_its_runs(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished[0], tmp_path / "models/run2")
    with pytest.raises(UserError, match="models/run2"):
        find_checkpoint(Path("models"))
    for name in ("a" * 300, "models/run2/config.json", "absent"):
        with pytest.raises(UserError, match="checkpoint"):
            find_checkpoint(Path(name))


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.slow) for step in (1, 7)), 3])
def test_a_stopped_run_ends_with_the_same_bits(finished, tmp_path, step):
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, tmp_path, on_step=stop_at(step))
    starts = []
    state = train(CONFIG, INPUTS, tmp_path, on_start=starts.append)
    # The loss of a step is looked at one step later; at a checkpoint at once, before it is saved.
    assert starts == [max(saved for saved in (0, 3, 6, 9) if saved <= step - (step % 3 == 0))]
    assert bits(state) == finished[1]
    assert losses(tmp_path) == losses(finished[0])
    assert training.build(CONFIG).steps._cache_size() <= 2  # one program for a new state, one for a restored one


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(11, marks=pytest.mark.slow)])
def test_a_validation_cut_off_is_done_on_resume(finished, tmp_path, step):
    """It may take minutes, and whoever stops the run waits for seconds."""
    with pytest.raises(Interrupted) as stopped:
        train(CONFIG, INPUTS, tmp_path, on_step=signal_at(step))
    assert stopped.value.signum == signal.SIGTERM
    assert find_checkpoint(tmp_path).name == str(step)
    assert "validation_loss_nats" not in read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert bits(train(CONFIG, INPUTS, tmp_path)) == finished[1]
    assert losses(tmp_path) == losses(finished[0])


def test_a_finished_run_is_not_touched_again(finished, copy):
    before = times(copy)
    assert bits(train(CONFIG, INPUTS, copy, on_step=stop_at(1))) == finished[1]
    assert times(copy) == before


def test_what_a_kill_leaves_behind_is_dropped(finished, copy):
    """Half-written checkpoints, metrics past the restored step, and corrupt lines."""
    shutil.rmtree(copy / "checkpoints" / "11")
    (copy / "checkpoints" / "10.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    corrupt = [b"\0" * 9 + b"\n", b"[1]\n", b"{}\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n"]
    late = [b'{"step": 12, "loss_nats": 1.0}\n', b'{"step": 13, "loss\xc3']
    (copy / "metrics.jsonl").write_bytes(b"".join([lines[0], *corrupt, *lines[1:], *late]))
    train(CONFIG, INPUTS, copy)
    assert losses(copy) == losses(finished[0])
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["11", "9", "metadata"]


CHANGED = {"optim.b1": 0.5, "train.steps": 20, "train.seed": 1, "train.batch_size": 8, "data.seed": 1}
CHANGED |= {"model.dtype": "bfloat16", "eval.sequences": 16}


@pytest.mark.parametrize(("changes", "facts", "content", "words"), [
    *(({path: value}, {}, "kept", path) for path, value in CHANGED.items()),
    *(({}, {name: "other"}, "kept", name) for name in ("source", "train")),
    *(({}, {}, content, r"config\.json") for content in ("", "[1]", '{"model": 3}', None)),
])  # fmt: skip
def test_resuming_with_other_numbers_data_or_a_damaged_config_is_refused(copy, changes, facts, content, words):
    path = copy / "config.json"
    if content != "kept":
        path.unlink()
        path.mkdir() if content is None else path.write_text(content)
    before = snapshot(copy)
    with pytest.raises(UserError, match=words):
        train(replace(CONFIG, changes), INPUTS._replace(provenance=INPUTS.provenance | facts), copy)
    assert snapshot(copy) == before


@pytest.mark.parametrize("item", ["config", "data", "checksums"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", None, "no folder"])
def test_a_damaged_json_item_is_named(copy, item, content):
    step = find_checkpoint(copy)
    path = step / item / "metadata"
    path.unlink()
    if content == "no folder":  # as a checkpoint of another program has none
        shutil.rmtree(path.parent)
    elif content is not None:
        path.write_bytes(content)
    read = {"config": training.read_config, "checksums": read_params}
    read["data"] = lambda step: training.read_json_item(step, "data")
    with pytest.raises(DamagedError, match=f"checkpoints/11.*{item}"):
        read[item](step)


def test_damage_to_any_byte_of_any_file_found(finished, copy):
    """Every file but the marks that Orbax leaves; Orbax itself restores a flipped byte of an array silently."""
    step, rng = find_checkpoint(copy), random.Random(0)
    files = [path for path in step.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
    files.remove(step / "_CHECKPOINT_METADATA")
    assert sum(path.parent.name == "d" for path in files) >= 4
    size = verify_checkpoint(step)
    assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(training.init_state(CONFIG)[1:]))
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        for damaged in (flipped, content[:-1], content + b"0", b"", None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(DamagedError, match=r"checksum|is missing"):
                verify_checkpoint(step)
        path.write_bytes(content)
    assert verify_checkpoint(step) == size


DAMAGE = {
    "a flipped byte in the parameters": lambda step: flip(largest(step / "params")),
    "a flipped byte in the config": lambda step: flip(step / "config/metadata"),
    "a flipped byte in the checksums": lambda step: flip(step / "checksums/metadata"),
    "no parameters": lambda step: shutil.rmtree(step / "params"),
    "empty moments": lambda step: largest(step / "opt_state").write_bytes(b""),
    "no checksums": lambda step: shutil.rmtree(step / "checksums"),
}
CASES = [case if i < 2 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(DAMAGE)]


@pytest.mark.parametrize("case", CASES)
def test_training_resumes_before_a_damaged_checkpoint(finished, copy, case, capsys):
    step, aside, starts = copy / "checkpoints" / "11", copy / "checkpoints" / "11.damaged-1", []
    DAMAGE[case](step)
    damaged = snapshot(step)
    assert bits(train(CONFIG, INPUTS, copy, on_start=starts.append)) == finished[1]
    assert starts == [9]
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(aside) in warning
    assert snapshot(aside) == damaged
    assert losses(copy) == losses(finished[0])
    assert verify_checkpoint(step) > 0  # written again


def test_nothing_is_touched_if_every_checkpoint_is_damaged(copy):
    for step in ("9", "11"):
        DAMAGE["no parameters"](copy / "checkpoints" / step)
    before = snapshot(copy)
    with pytest.raises(UserError, match="checkpoints/11"):
        train(CONFIG, INPUTS, copy)
    assert snapshot(copy) == before


def test_a_damaged_checkpoint_names_the_others(copy):
    DAMAGE["a flipped byte in the parameters"](copy / "checkpoints" / "11")
    with pytest.raises(DamagedError, match=r"/checkpoints: 9$"):
        read_params(find_checkpoint(copy))
    read_params(find_checkpoint(copy / "checkpoints/9"))


def test_logging_and_retention_may_change_on_resume(finished, tmp_path):
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, tmp_path, on_step=stop_at(4))
    other = replace(
        CONFIG,
        {"train.log_every_steps": 1, "train.eval_every_steps": 5, "train.checkpoint_every_steps": 2,
         "train.keep_checkpoints": 3, "train.keep_every_steps": 4},
    )  # fmt: skip
    assert bits(train(other, INPUTS, tmp_path)) == finished[1]
    assert from_json(Config, (tmp_path / "config.json").read_text()) == other  # the newest
    assert training.read_config(tmp_path / "checkpoints" / "11") == other
    # Three newest and the multiples of four.
    assert {path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")} == {"4", "8", "10", "11"}


def test_a_failed_background_write_stops_the_run(tmp_path):
    done, unlimited = [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(step, _):
        deadline = time.monotonic() + 60
        while step == 5 and not (tmp_path / "checkpoints/3").exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # the one before is complete when the disk gets full
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))  # stands in for it
        done.append(step)
        time.sleep(0.05 * (step > 6))

    try:
        with pytest.raises(UserError, match=r"cannot write a checkpoint to(.|\n)*the checkpoint of step 3 is kept"):
            train(CONFIG, INPUTS, tmp_path, on_step=on_step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert done[-1] < 11  # not at the end of the run only
    assert find_checkpoint(tmp_path).name == "3"
    # Threads of this process may still write other files of the failed step; a user's next try is another process.
    before = None
    while (now := sorted((tmp_path / "checkpoints").rglob("*"))) != before:
        before = now
        time.sleep(0.3)
    starts = []
    train(CONFIG, INPUTS, tmp_path, on_start=starts.append)
    assert starts == [3]
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def test_only_a_checkpoint_decides_that_a_run_began(copy):
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match=r"train\.seed=5 \(was 0\)"):
        train(replace(CONFIG, {"train.seed": 5}), INPUTS, copy)
    train(CONFIG, INPUTS, copy)  # what it began with
    shutil.rmtree(copy)
    with pytest.raises(UserError, match="nope"):
        train(replace(CONFIG, {"train.init_from": "nope"}), INPUTS, copy)
    train(replace(CONFIG, {"train.steps": 3}), INPUTS, copy)


def command(home, workdir):
    folders = {"config": "config.json", "workdir": workdir, "cache_dir": "cache", "compile_cache": "compiled"}
    arguments = [f"--{flag}={home / folder}" for flag, folder in folders.items()]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch/train.py"), *arguments], cwd=home,
        env=cpu_environment(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_to_the_end(home, workdir):
    process = command(home, workdir)
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    assert "damaged" not in error


def logged_step(workdir):
    return max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)


def disturb(home, workdir, signum, *, steps=0, seconds=0.0):
    """Starts the run and sends it a signal, so many steps beyond the last ones that it logged, then so much time."""
    wanted, process = logged_step(workdir) + steps, command(home, workdir)
    while steps and process.poll() is None and logged_step(workdir) < wanted:
        time.sleep(0.002)
    time.sleep(seconds)
    process.send_signal(signum)
    return process.wait(timeout=120), process.communicate()[1]


def everything(workdir):
    """What is logged and kept, nothing half-written or set aside, and the last checkpoint, which must be whole."""
    step, kept = find_checkpoint(workdir), {path.name for path in (workdir / "checkpoints").iterdir()}
    arrays = bits(read_params(step)), bits(training.read_optimizer_state(step)), verify_checkpoint(step)
    return losses(workdir), kept, step.name, arrays


@pytest.fixture(scope="module")
def long_home(tmp_path_factory):
    """Text and config of a run that is long enough for many kills, and an undisturbed run of the command line."""
    home = tmp_path_factory.mktemp("home")
    steps = {"train.steps": 400, "train.eval_every_steps": 50, "train.log_every_steps": 1}
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "sink", "peak", "the"], 3000)
    (home / "text.txt").write_text(" ".join(words))
    (home / "config.json").write_text(to_json(replace(CONFIG, TEXT | steps)))
    run_to_the_end(home, home / "whole")
    return home


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_kills_at_random_moments_lose_nothing(long_home, tmp_path, seed):
    """Four runs of 25 kills each; most of the time between two steps is a checkpoint being written."""
    rng, workdir, writing, began = random.Random(seed), tmp_path / "run", 0, time.monotonic()
    for kill in range(25):
        # Every fifth one strikes while it starts: imports, restoring, the first program.
        starting = kill % 5 == 4
        seconds = rng.uniform(0.2, 5.0) if starting else rng.uniform(0.0, 0.1)
        returned, error = disturb(
            long_home, workdir, signal.SIGKILL, steps=0 if starting else rng.randint(1, 12), seconds=seconds
        )
        assert returned == -signal.SIGKILL, error
        writing += bool(list((workdir / "checkpoints").glob("*tmp*")))  # a checkpoint that is not complete
        if kill == 12:  # saved and killed runs follow one another
            returned, error = disturb(long_home, workdir, signal.SIGINT, steps=1)
            assert returned == 128 + signal.SIGINT, error
            step = int(find_checkpoint(workdir).name)
            assert f"stopped at step {step}, state saved" in error.splitlines()[-1]
            assert "Traceback" not in error
            assert logged_step(workdir) == step
    seconds, step = time.monotonic() - began, logged_step(workdir)
    print(f"\n{writing} of 25 kills struck while a checkpoint was written; step {step} of 400; {seconds:.0f} s")
    assert writing >= 3
    run_to_the_end(long_home, workdir)
    assert everything(workdir) == everything(long_home / "whole")


def test_a_model_of_the_same_arrays_is_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "11")
    other = replace(CONFIG, {"model.normalizer": "softmax"})
    (copy / "config.json").write_text(to_json(other))
    with pytest.raises(UserError, match=r"model.normalizer=softmax \(was softmax1\)"):
        train(other, INPUTS, copy)
