import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from small_runs import CONFIG, bits, flip, largest, losses, snapshot

from orthojax.config import Config, from_json, replace, to_json
from orthojax.errors import Interrupted, UserError
from orthojax.train import (
    Checkpoints,
    DamagedError,
    Inputs,
    find_checkpoint,
    init_state,
    list_arrays,
    load,
    loading,
    make_train_step,
    read_config,
    read_json_item,
    read_metrics,
    read_params,
    require_same_data,
    train,
    verify_checkpoint,
)
from orthojax.train.checkpoint import Retention, Validation
from orthojax.train.checkpoint.manager import write_errors

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# What Orbax leaves behind when it cannot read, besides the exception that it raises.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def rows(step):
    return np.random.default_rng(step).integers(0, 258, (4, 9), dtype=np.int32)


INPUTS = Inputs(rows, np.tile(rows(99), (2, 1)), None, {"source": "test", "train": {"n_tokens": 7}}, None)


def kept(workdir):
    """The names of the checkpoints that stay."""
    return {path.name for path in (workdir / "checkpoints").glob("[0-9]*")}


class Stop(Exception):
    pass


def stop_at(step):
    def on_step(done, loss):
        if done == step:
            raise Stop

    return on_step


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


@pytest.mark.parametrize(("trained", "read"), [("cudnn", "auto"), ("splash", "auto"), ("xla_chunked", "xla_chunked")])
def test_a_model_trained_with_the_attention_of_another_platform_is_read_on_this_one(
    finished, monkeypatch, trained, read
):
    there = lambda folder: replace(read_config(folder), {"model.attention_implementation": trained})  # noqa: E731
    monkeypatch.setattr(loading, "read_config", there)
    loaded = load(finished[0])
    assert loaded.config.model.attention_implementation == read
    assert loaded.model.config == loaded.config.model
    assert loaded.model.apply({"params": loaded.params}, np.zeros((1, 4), np.int32))[0].shape == (1, 4, 258)


def test_the_newest_checkpoints_stay_are_found_from_every_folder_and_have_plain_names(finished, monkeypatch):
    assert sorted(path.name for path in (finished[0] / "checkpoints").iterdir()) == ["11", "9", "metadata"]
    for where in ("", "checkpoints", "checkpoints/9"):
        step = find_checkpoint(finished[0] / where)
        assert step == finished[0].absolute() / "checkpoints" / ("9" if where.endswith("9") else "11")
        monkeypatch.chdir(finished[0] / where)
        assert find_checkpoint(Path(".")) == step
    names = [f"{item}/{path}" for item in ("params", "opt_state") for path, _, _ in list_arrays(step, item)]
    kernel = "layers_0/attention/query/kernel"
    assert {f"params/{kernel}", f"opt_state/orthoadam/inner/mu/{kernel}", f"opt_state/orthoadam/inner/nu/{kernel}",
            "opt_state/learning_rate/count", "params/token_embedding/embedding"} <= set(names)  # fmt: skip


def test_a_folder_of_runs_or_a_study_is_no_checkpoint_but_its_runs_are_named(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    for i in range(5):
        shutil.copytree(finished[0], tmp_path / f"models/run{i}")
    rows = [{"run": "../models/run2"}, {"run": "../models/absent"}, {"run": "a" * 300}]
    (tmp_path / "study/results.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(UserError, match=r"no orthojax checkpoint(.|\n)*did you mean one of its runs: models/run2\?$"):
        find_checkpoint(Path("study"))
    for content in ("", "[" * 100_000, '{"rows": 3}', '{"rows": [3]}', '{"rows": [{"run": 3}]}'):
        (tmp_path / "study/results.json").write_text(content)
        with pytest.raises(UserError, match=r"one step's folder$"):
            find_checkpoint(Path("study"))
    with pytest.raises(UserError, match=r"its runs: models/run\d, models/run\d, models/run\d and 2 more\?$"):
        find_checkpoint(Path("models"))
    for name in ("a" * 300, "study/results.json", "absent"):
        with pytest.raises(UserError, match=r"no such checkpoint|is not a folder"):
            find_checkpoint(Path(name))


# Resuming.


@pytest.mark.parametrize("step", [*(pytest.param(step, marks=pytest.mark.slow) for step in (1, 7)), 3])
def test_a_run_that_was_stopped_ends_with_the_same_bits(finished, tmp_path, step):
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, tmp_path, on_step=stop_at(step))
    starts = []
    state = train(CONFIG, INPUTS, tmp_path, on_start=starts.append)
    # The loss of a step is looked at one step later; at a checkpoint at once, before it is saved.
    assert starts == [max(saved for saved in (0, 3, 6, 9) if saved <= step - (step % 3 == 0))]
    assert bits(state) == finished[1]
    assert losses(tmp_path) == losses(finished[0])
    assert make_train_step(CONFIG)._cache_size() <= 2  # one program for a new state, one for a restored one


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(11, marks=pytest.mark.slow)])
def test_a_signal_cuts_a_validation_off_which_is_done_first_on_resume(finished, tmp_path, step):
    """It may take minutes, and whoever stops the run waits for seconds."""
    with pytest.raises(Interrupted) as stopped:
        train(CONFIG, INPUTS, tmp_path, on_step=signal_at(step))
    assert stopped.value.signum == signal.SIGTERM
    assert find_checkpoint(tmp_path).name == str(step)
    assert "validation_loss_nats" not in read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert bits(train(CONFIG, INPUTS, tmp_path)) == finished[1]
    assert losses(tmp_path) == losses(finished[0])


@pytest.mark.slow
def test_the_best_stay_also_where_a_signal_cut_off_their_validation_and_across_restarts(tmp_path):
    """Also after a kill: the loss then stands in metrics.jsonl alone."""
    config = replace(
        CONFIG,
        {"train.keep_checkpoints": 1, "train.keep_best": 2, "train.keep_every_steps": 8, "train.eval_every_steps": 2,
         "train.checkpoint_every_steps": 2, "train.steps": 12, "optim.learning_rate": 10.0},  # diverges: step 2 is best
    )  # fmt: skip
    with pytest.raises(Interrupted):
        train(config, INPUTS, tmp_path, on_step=signal_at(2))
    with pytest.raises(Stop):
        train(config, INPUTS, tmp_path, on_step=stop_at(3))
    train(config, INPUTS, tmp_path)
    train(config, INPUTS, tmp_path)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    found = [(line["validation_loss_nats"], line["step"]) for line in lines if "validation_loss_nats" in line]
    assert [step for _, step in found] == [2, 4, 6, 8, 10, 12]
    best = {str(step) for _, step in sorted(found)[:2]}
    assert "2" in best
    assert kept(tmp_path) == best | {"8", "12"}
    assert read_json_item(tmp_path / "checkpoints/12", "validation") == {"step": 12, "loss_nats": found[-1][0]}


def test_a_finished_run_is_not_touched_again(finished, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert bits(train(CONFIG, INPUTS, copy, on_step=stop_at(1))) == finished[1]
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()} == before


def test_what_a_kill_leaves_behind_is_dropped(finished, copy, capsys):
    """Half-written checkpoints, metrics past the restored step, and corrupt lines."""
    shutil.rmtree(copy / "checkpoints" / "11")
    (copy / "checkpoints" / "10.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    corrupt = [b"\0" * 9 + b"\n", b"[1]\n", b"{}\n", b"[" * 100_000 + b"\n", b"9" * 5000 + b"\n"]
    late = [b'{"step": 12, "loss_nats": 1.0}\n', b'{"step": 13, "loss\xc3']
    (copy / "metrics.jsonl").write_bytes(b"".join([lines[0], *corrupt, *lines[1:], *late]))
    train(CONFIG, INPUTS, copy)
    assert losses(copy) == losses(finished[0])
    assert "metrics.jsonl has 5 " in capsys.readouterr().err
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["11", "9", "metadata"]


def test_another_config_in_the_same_workdir_is_refused(copy):
    before = snapshot(copy)
    changes = {"optim.b1": 0.5, "train.steps": 20, "train.seed": 1, "train.batch_size": 8, "data.seed": 1,
               "model.dtype": "bfloat16", "eval.sequences": 16}  # fmt: skip
    for path, value in changes.items():
        with pytest.raises(UserError, match=rf"another config: {path}={value} \(was "):
            train(replace(CONFIG, {path: value}), INPUTS, copy)
    with pytest.raises(UserError, match=r"optim.b1=0.5 \(was 0.9\), train.steps=20 \(was 11\)"):
        train(replace(CONFIG, {"optim.b1": 0.5, "train.steps": 20}), INPUTS, copy)
    assert snapshot(copy) == before


def test_checkpoints_of_a_model_with_the_same_arrays_but_another_meaning_are_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "11")
    other = replace(CONFIG, {"model.normalizer": "softmax"})
    (copy / "config.json").write_text(to_json(other))
    with pytest.raises(UserError, match=r"model.normalizer=softmax \(was softmax1\)"):
        train(other, INPUTS, copy)


def test_other_data_and_a_damaged_config_json_are_named(copy):
    require_same_data(copy / "checkpoints/11", INPUTS.provenance | {"bos_id": 3})  # earlier versions did not say it
    for name in ("source", "train"):
        other = INPUTS._replace(provenance=INPUTS.provenance | {name: "other"})
        with pytest.raises(UserError, match=rf"{name} is 'other'"):
            train(CONFIG, other, copy)
    for content in ("", "[1]", '{"model": 3}', "\xff", "[" * 100_000):
        (copy / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=r"config\.json"):
            train(CONFIG, INPUTS, copy)
    for name in ("config.json", "metrics.jsonl"):
        for make in (Path.mkdir, os.mkfifo):
            path = Path(shutil.copytree(copy, copy.parent / f"{name}-{make.__name__}")) / name
            if name != "config.json":
                (path.parent / "config.json").unlink()
            path.unlink()
            make(path)
            with pytest.raises(UserError, match=f"{name} is a (folder|pipe)"):
                train(CONFIG, INPUTS, path.parent)


# Damage.


def test_a_damaged_json_item_is_named(copy):
    step = find_checkpoint(copy)
    read = {"config": read_config, "data": lambda step: read_json_item(step, "data"), "checksums": read_params}
    for item in read:
        path = step / item / "metadata"
        whole = path.read_bytes()
        for content in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(DamagedError, match=f"cannot read the checkpoint .*/11: item '{item}'"):
                read[item](step)
            path.touch()
        for make in (Path.mkdir, os.mkfifo):
            path.unlink() if path.is_file() else path.rmdir()
            make(path)
            with pytest.raises(DamagedError, match=f"item '{item}': file is a (folder|pipe)"):
                read[item](step)
        path.unlink()
        path.write_bytes(whole)


def test_a_pipe_among_the_arrays_is_not_waited_for(copy):
    step = find_checkpoint(copy)
    (step / "params/_METADATA").unlink()
    os.mkfifo(step / "params/_METADATA")
    with pytest.raises(DamagedError, match="_METADATA is not a regular file"):
        read_params(step)


def test_damage_to_any_byte_of_any_file_is_found(finished, copy):
    """Every file but the marks that Orbax leaves; Orbax itself restores a flipped byte of an array silently."""
    step, rng = find_checkpoint(copy), random.Random(0)
    files = [path for path in step.rglob("*") if path.is_file() and path.name != "commit_success.txt"]
    files.remove(step / "_CHECKPOINT_METADATA")
    assert sum(path.parent.name == "d" for path in files) >= 4
    size = verify_checkpoint(step)
    assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(init_state(CONFIG)[1:]))
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
    "no validation loss": lambda step: shutil.rmtree(step / "validation"),
    "no checksums": lambda step: shutil.rmtree(step / "checksums"),
}
CASES = [case if i < 2 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(DAMAGE)]


@pytest.mark.parametrize("case", CASES)
def test_training_resumes_from_the_checkpoint_before_a_damaged_one(finished, copy, case, capsys):
    step, aside, starts = copy / "checkpoints" / "11", copy / "checkpoints" / "11.damaged", []
    DAMAGE[case](step)
    damaged = snapshot(step)
    assert bits(train(CONFIG, INPUTS, copy, on_start=starts.append)) == finished[1]
    assert starts == [9]
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: the checkpoint of step 11 is damaged: ")
    assert warning.endswith(f"resuming from step 9; the damaged one is now {aside}")
    assert snapshot(aside) == damaged
    assert losses(copy) == losses(finished[0])
    with Checkpoints(copy / "checkpoints", keep=2) as checkpoints:
        assert bits(checkpoints.restore(init_state(CONFIG), 11)) == finished[1]  # written again


def test_a_second_damage_of_the_same_step_gets_a_name_of_its_own(copy, capsys):
    for _ in range(2):
        DAMAGE["no parameters"](copy / "checkpoints" / "11")
        train(CONFIG, INPUTS, copy)
    assert kept(copy) == {"9", "11", "11.damaged", "11.damaged-2"}


def test_where_every_checkpoint_is_damaged_nothing_is_touched(copy):
    for step in ("9", "11"):
        DAMAGE["no parameters"](copy / "checkpoints" / step)
    before = snapshot(copy)
    with pytest.raises(UserError, match="all 2 are damaged") as refused:
        train(CONFIG, INPUTS, copy)
    assert len(str(refused.value).splitlines()) <= 3
    assert "checkpoints/11" in str(refused.value).splitlines()[0]
    assert snapshot(copy) == before


def test_a_named_checkpoint_that_is_damaged_is_refused_and_the_others_are_named(copy):
    DAMAGE["a flipped byte in the parameters"](copy / "checkpoints" / "11")
    with pytest.raises(DamagedError, match=r"checkpoints/11.*\n.*\nalso in .*/checkpoints: 9$"):
        read_params(find_checkpoint(copy))
    assert bits(read_params(find_checkpoint(copy / "checkpoints/9")))


def test_parameters_that_the_config_does_not_describe_are_refused(copy):
    step = find_checkpoint(copy)
    (step / "config" / "metadata").write_text(to_json(replace(CONFIG, {"model.d_mlp": 64})))
    with pytest.raises(UserError, match=r"layers_0/mlp/input/kernel is \(16, 32\), not \(16, 64\)"):
        read_params(step)


# What stays.


def test_checkpoints_are_kept_by_number_by_interval_and_by_validation_loss():
    """Against a plain statement of the rule, over random histories of saving and measuring."""
    rng = random.Random(0)
    for _ in range(300):
        there, validations, newest = [], {}, None
        keep = Retention(rng.randint(1, 3), rng.choice([0, 4, 6]), rng.randint(0, 3), validations, rng.choice([0, 10]))
        for step in range(2, 40, 2):
            if rng.random() < 0.4:
                newest = Validation(step, rng.choice([1.0, 2.0, 3.0, 4.0]))
            there.append(step)
            if newest:
                validations[step] = newest
            carried = {loss: min(s for s in there if validations.get(s) == loss)
                       for loss in map(validations.get, there) if loss}  # fmt: skip
            order = {s: (loss.loss_nats, -s) for loss, s in carried.items()}  # of the better one is less
            wanted = {
                s
                for i, s in enumerate(there)
                if i >= len(there) - keep.newest
                or (keep.every_steps and s % keep.every_steps == 0)
                or (keep.scheduled_every_steps and s == max((s for s in there if s % 10 == 0), default=None))
                or (s in order and sum(other < order[s] for other in order.values()) < keep.best)
            }
            assert keep.kept(there) == wanted, (keep, there, validations)
            there = sorted(wanted)
        assert there[-1] == 38


def test_impossible_rules_are_refused():
    for changes, words in [
        ({"train.keep_best": -1}, "keep_best=-1"),
        ({"train.keep_best": 1, "train.eval_every_steps": 0}, "keep_best=1 without validation losses"),
        ({"train.keep_every_steps": 4}, "keep_every_steps=4 with train.checkpoint_every_steps=3"),
        ({"train.keep_every_steps": -3}, "keep_every_steps=-3"),
    ]:
        with pytest.raises(UserError, match=words):
            replace(CONFIG, changes)


# Resuming with another config.


def test_logging_and_retention_may_change_on_resume(finished, tmp_path):
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, tmp_path, on_step=stop_at(4))
    other = replace(
        CONFIG,
        {"train.log_every_steps": 1, "train.eval_every_steps": 5, "train.checkpoint_every_steps": 2,
         "train.keep_checkpoints": 3, "train.keep_best": 1, "train.keep_every_steps": 4},
    )  # fmt: skip
    assert bits(train(other, INPUTS, tmp_path)) == finished[1]
    assert from_json(Config, (tmp_path / "config.json").read_text()) == other  # the newest
    assert read_config(tmp_path / "checkpoints" / "11") == other
    train(CONFIG, INPUTS, tmp_path)


# Writing that fails in the background.


def test_what_to_do_about_a_failed_write_is_said_of_its_own_cause(tmp_path):
    full, files = (OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EMFILE))
    gone = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "params")
    cases = [
        (tmp_path, full, "no earlier checkpoint; free some space; run the same"),
        (tmp_path, ValueError(f"OUT_OF_RANGE: {full.strerror} [tensorstore]"), "; free some space; run the same"),
        (tmp_path, files, "; raise the limit on open files: ulimit -n; run the same"),
        (tmp_path, RuntimeError("something else"), "no earlier checkpoint; run the same"),
        (tmp_path / "gone", gone, "; the folder was deleted or moved while it was in use; run the same"),
    ]
    for folder, error, words in cases:
        with pytest.raises(UserError, match="cannot write a checkpoint to") as raised, write_errors(folder):
            raise error
        assert words in str(raised.value)


def test_a_write_that_fails_in_the_background_stops_the_run_and_keeps_the_last_good_one(tmp_path):
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


def test_a_config_is_compared_with_that_of_a_checkpoint_where_config_json_is_gone_and_stays_as_it_was(tmp_path):
    train(CONFIG, INPUTS, tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"another config: train\.seed=5 \(was 0\)"):
        train(replace(CONFIG, {"train.seed": 5}), INPUTS, tmp_path)
    assert not (tmp_path / "config.json").exists()
    train(CONFIG, INPUTS, tmp_path)  # what it began with
    assert (tmp_path / "config.json").exists()


def test_a_run_that_never_began_does_not_hold_its_folder(tmp_path):
    with pytest.raises(UserError, match="no such model"):
        train(replace(CONFIG, {"train.init_from": "nope"}), INPUTS, tmp_path)
    train(CONFIG, INPUTS, tmp_path)
