import dataclasses
import functools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.errors import UserError
from orthojax.fields import replace, to_json
from orthojax.train import (
    Checkpoints,
    Inputs,
    find_checkpoint,
    list_arrays,
    loop,
    read_config,
    read_json_item,
    read_metrics,
    read_params,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
ROOT = Path(__file__).parents[1]
CONFIG = Config(
    model=ModelConfig(vocab_size=258, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False),
    optim=OptimConfig(optimizer="orthoadam", learning_rate=0.01, warmup_steps=2),
    data=DataConfig(sequence_length=8),
    train=TrainConfig(steps=11, batch_size=4, log_every_steps=2, eval_every_steps=4, checkpoint_every_steps=3),
    eval=EvalConfig(sequences=8, batch_size=8),
)


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Every run in this process shares its two compiled functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "init_state", functools.cache(loop.init_state))
        patch.setattr(loop, "make_train_step", functools.cache(loop.make_train_step))
        first = loop.init_state
        patch.setattr(loop, "init_state", lambda config: jax.tree.map(jax.numpy.copy, first(config)))
        # What Orbax leaves behind when it cannot read, besides the exception that it raises.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        yield


def rows(step):
    return np.random.default_rng(step).integers(0, 258, (4, 9), dtype=np.int32)


INPUTS = Inputs(rows, np.tile(rows(99), (2, 1)), None, {"source": "test", "train": {"n_tokens": 7}}, None)


def losses(workdir):
    """All that metrics.jsonl says, but for the speed."""
    lines = read_metrics(Path(workdir) / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def bits(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): (np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes())
        for path, leaf in leaves
    }


def restored(workdir, config, step):
    with Checkpoints(Path(workdir) / "checkpoints", keep=2) as checkpoints:
        return checkpoints.restore(loop.init_state(config), step)


class Stop(Exception):
    pass


def stop_at(step):
    def on_step(done, loss):
        if done == step:
            raise Stop

    return on_step


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing disturbed, and its final state."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, bits(train(CONFIG, INPUTS, workdir))


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


@pytest.mark.parametrize("kind", ["haar", "hadamard"])
def test_a_restored_state_is_the_saved_one(tmp_path, kind):
    config = replace(CONFIG, {"optim.rotation.kind": kind, "optim.weight_decay": 0.1})
    state = loop.init_state(config)._replace(step=jax.numpy.int32(5))
    state = state._replace(opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        checkpoints.save(state, config, {"source": "test"})
    assert bits(restored(tmp_path, config, 5)) == bits(state)
    folder = find_checkpoint(tmp_path)
    assert bits(read_params(folder)) == bits(state.params)
    assert read_config(folder) == config
    assert read_json_item(folder, "data") == {"source": "test", "next_step": 5}


def test_the_newest_checkpoints_stay(finished):
    assert sorted(p.name for p in (finished[0] / "checkpoints").iterdir()) == ["11", "9", "metadata"]
    assert find_checkpoint(finished[0]) == finished[0].absolute() / "checkpoints" / "11"


@pytest.mark.parametrize("where", ["", "checkpoints", "checkpoints/9"])
def test_a_checkpoint_is_found_from_every_folder(finished, where, monkeypatch):
    found = find_checkpoint(finished[0] / where)
    assert found.name == ("9" if where.endswith("9") else "11")
    monkeypatch.chdir(finished[0] / where)
    assert find_checkpoint(Path(".")) == found


FOREIGN_READER = """
import json, sys, pathlib
import jax
import orbax.checkpoint as ocp

step = pathlib.Path(sys.argv[1])
checkpointer = ocp.StandardCheckpointer()
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
names, sums = [], {}
for item in ("params", "opt_state"):
    tree = checkpointer.metadata(step / item).item_metadata.tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names += [f"{item}/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, leaf in leaves]
    if item == "params":
        like = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), tree)
        params = checkpointer.restore(step / item, like)
        sums = {"kernel": float(params["layers_0"]["attention"]["query"]["kernel"].sum())}
assert not [name for name in sys.modules if name.startswith("orthojax")]
print(json.dumps([names, sums, ocp.CheckpointManager(step.parent).latest_step()]))
"""


def test_plain_orbax_reads_it_and_finds_plain_names(finished):
    step = find_checkpoint(finished[0])
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_READER, str(step)], capture_output=True, text=True, check=True, cwd="/"
    )
    names, sums, latest = json.loads(done.stdout)
    kernel = "layers_0/attention/query/kernel"
    assert {f"params/{kernel}", f"opt_state/orthoadam/inner/mu/{kernel}", f"opt_state/orthoadam/inner/nu/{kernel}",
            "opt_state/learning_rate/count", "params/token_embedding/embedding"} <= set(names)  # fmt: skip
    assert names == [f"{item}/{path}" for item in ("params", "opt_state") for path, _, _ in list_arrays(step, item)]
    expected = read_params(step)["layers_0"]["attention"]["query"]["kernel"].sum()
    assert sums["kernel"] == pytest.approx(float(expected), rel=1e-6)
    assert latest == 11


# Going on.


@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_run_that_was_stopped_ends_with_the_same_bits(finished, tmp_path, step):
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, tmp_path, on_step=stop_at(step))
    starts = []
    state = train(CONFIG, INPUTS, tmp_path, on_start=starts.append)
    # The loss of a step is looked at one step later; at a checkpoint at once, before it is saved.
    assert starts == [max(saved for saved in (0, 3, 6, 9) if saved <= step - (step % 3 == 0))]
    assert bits(state) == finished[1]
    assert losses(tmp_path) == losses(finished[0])
    assert loop.make_train_step(CONFIG)._cache_size() <= 2  # one program for a new state, one for a restored one


def test_a_finished_run_is_not_touched_again(finished, copy):
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
    assert bits(train(CONFIG, INPUTS, copy, on_step=stop_at(1))) == finished[1]
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()} == before


def test_metrics_past_the_restored_step_and_a_cut_line_are_dropped(finished, copy):
    shutil.rmtree(copy / "checkpoints" / "11")
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 12, "loss_nats": 1.0}\n{"step": 13, "loss_na\xc3')
    train(CONFIG, INPUTS, copy)
    assert losses(copy) == losses(finished[0])


def test_a_kill_while_metrics_are_cut_back_loses_nothing(copy, monkeypatch):
    shutil.rmtree(copy / "checkpoints" / "11")
    before = (copy / "metrics.jsonl").read_text()

    def killed(*_):
        raise Stop

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Stop):
        train(CONFIG, INPUTS, copy)
    assert (copy / "metrics.jsonl").read_text() == before


def test_a_half_written_checkpoint_is_removed(copy):
    leftover = copy / "checkpoints" / "10.orbax-checkpoint-tmp"
    (leftover / "params").mkdir(parents=True)
    shutil.rmtree(copy / "checkpoints" / "11")
    train(CONFIG, INPUTS, copy)
    assert sorted(p.name for p in (copy / "checkpoints").iterdir()) == ["11", "9", "metadata"]


def snapshot(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_another_config_in_the_same_workdir_is_refused(copy):
    before = snapshot(copy)
    with pytest.raises(UserError, match=r"optim.b1, train.steps differ"):
        train(replace(CONFIG, {"optim.b1": 0.5, "train.steps": 20}), INPUTS, copy)
    assert snapshot(copy) == before


def test_checkpoints_of_a_model_with_the_same_arrays_but_another_meaning_are_refused(copy):
    shutil.rmtree(copy / "checkpoints" / "11")
    other = replace(CONFIG, {"model.normalizer": "softmax"})
    (copy / "config.json").write_text(to_json(other))
    with pytest.raises(UserError, match=r"model.normalizer differ"):
        train(other, INPUTS, copy)


@pytest.mark.parametrize("name", ["source", "train"])
def test_other_data_in_the_same_workdir_is_refused(copy, name):
    other = INPUTS._replace(provenance=INPUTS.provenance | {name: "other"})
    with pytest.raises(UserError, match=rf"{name} is 'other'"):
        train(CONFIG, other, copy)


@pytest.mark.parametrize("content", ["", "[1]", '{"model": 3}', "\xff"])
def test_a_damaged_config_json_is_named(copy, content):
    (copy / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        train(CONFIG, INPUTS, copy)


# Damage.


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", None])
@pytest.mark.parametrize("item", ["config", "data", "checksums"])
def test_a_damaged_json_item_is_named(copy, item, content):
    step = find_checkpoint(copy)
    path = step / item / "metadata"
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"11 is not a complete orthojax checkpoint: item '{item}'"):
        read_params(step) if item == "checksums" else read_json_item(step, item)


def array_files(step, item):
    return sorted(path for path in (step / item).rglob("*") if path.is_file() and path.parent.name == "d")


def test_a_flipped_byte_is_noticed_or_changes_nothing(finished, copy):
    step = find_checkpoint(copy)
    good, rng, refused = bits(read_params(step)), random.Random(0), 0
    for file in array_files(step, "params"):
        content = file.read_bytes()
        for _ in range(3):
            damaged = bytearray(content)
            damaged[rng.randrange(len(content))] ^= 0x10
            file.write_bytes(damaged)
            try:
                assert bits(read_params(step)) == good
            except UserError:
                refused += 1
        file.write_bytes(content)
    assert refused >= 3
    assert bits(read_params(step)) == good


@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_a_wrong_number_is_refused_by_name_where_orbax_is_silent(copy, item):
    path = copy / "checkpoints" / "11" / "checksums" / "metadata"
    checksums = json.loads(path.read_text())
    name = next(name for name in checksums[item] if name.endswith("mlp/input/kernel"))
    checksums[item][name] ^= 1
    path.write_text(json.dumps(checksums))
    with pytest.raises(UserError, match=f"{item}/{name}"):
        restored(copy, CONFIG, 11)


@pytest.mark.parametrize("item", ["params", "opt_state"])
def test_truncated_arrays_are_refused(copy, item):
    step = find_checkpoint(copy)
    for file in array_files(step, item):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"cannot read the checkpoint .*/11") as error:
        restored(copy, CONFIG, 11)
    assert len(str(error.value).splitlines()) <= 3
    if item == "params":
        with pytest.raises(UserError, match=r"cannot read the checkpoint .*/11"):
            read_params(step)


def test_going_on_from_the_checkpoint_before_a_damaged_one(finished, copy):
    for file in array_files(find_checkpoint(copy), "params"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="delete that step's folder to go on from the one before"):
        train(CONFIG, INPUTS, copy)
    shutil.rmtree(copy / "checkpoints" / "11")
    assert bits(train(CONFIG, INPUTS, copy)) == finished[1]


def test_parameters_that_the_config_does_not_describe_are_refused(copy):
    step = find_checkpoint(copy)
    (step / "config" / "metadata").write_text(to_json(replace(CONFIG, {"model.d_mlp": 64})))
    with pytest.raises(UserError, match=r"layers_0/mlp/input/kernel \(16, 64\), it is \(16, 32\)"):
        read_params(step)


# Signals and kills, through the command line.


def command(workdir, home):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(home / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = [f"--config={home}/config.py", f"--workdir={workdir}", f"--cache_dir={home}/cache"]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / "train.py"), *arguments], env=environment, cwd=home,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def last_step(workdir):
    try:
        return max((line["step"] for line in read_metrics(workdir / "metrics.jsonl")), default=0)
    except FileNotFoundError:
        return 0


def disturb(workdir, home, signum, steps, seconds=600.0):
    """Runs until so many steps more than ever before are done, or so long, and sends a signal."""
    wanted, stop = last_step(workdir) + steps, time.monotonic() + seconds
    process = command(workdir, home)
    while process.poll() is None and last_step(workdir) < wanted and time.monotonic() < stop:
        time.sleep(0.002)
    process.send_signal(signum)
    return process, process.communicate(timeout=120)[1]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Config, text, and an undisturbed run of the command line."""
    home = tmp_path_factory.mktemp("home")
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "sink", "peak", "the"], 3000)
    (home / "text.txt").write_text(" ".join(words))
    config = dataclasses.replace(
        CONFIG,
        data=DataConfig(kind="text", paths=("text.txt",), tokenizer="bytes", sequence_length=8),
        train=TrainConfig(steps=300, batch_size=4, log_every_steps=1, eval_every_steps=50, checkpoint_every_steps=20),
    )
    (home / "config.json").write_text(to_json(config))
    (home / "config.py").write_text(
        "from pathlib import Path\nfrom orthojax.config import Config\nfrom orthojax.fields import from_json\n"
        "def get_config():\n    return from_json(Config, Path('config.json').read_text())\n"
    )
    process = command(home / "whole", home)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    return home


def assert_same_run(home, workdir):
    assert losses(workdir) == losses(home / "whole")
    a, b = (find_checkpoint(folder) for folder in (home / "whole", workdir))
    assert a.name == b.name == "300"
    assert bits(read_params(a)) == bits(read_params(b))
    assert read_json_item(a, "checksums") == read_json_item(b, "checksums")  # the optimizer's state too
    assert not list((workdir / "checkpoints").glob("*tmp*"))


def assert_stopped_cleanly(process, error, workdir, signum):
    assert process.returncode == 128 + signum, error
    step = int(find_checkpoint(workdir).name)
    assert f"stopped at step {step}, state saved" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == step


def finish(home, workdir):
    process = command(workdir, home)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert_same_run(home, workdir)


def test_signals_save_and_kills_lose_nothing(home, tmp_path):
    workdir = tmp_path / "run"
    for signum, steps in ((signal.SIGTERM, 33), (signal.SIGKILL, 17), (signal.SIGINT, 12), (signal.SIGKILL, 31)):
        process, error = disturb(workdir, home, signum, steps)
        if signum == signal.SIGKILL:
            assert process.returncode == -signum, error
        else:
            assert_stopped_cleanly(process, error, workdir, signum)
    finish(home, workdir)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_ten_kills_at_random_moments_lose_nothing(home, tmp_path, seed):
    rng, workdir = random.Random(seed), tmp_path / "run"
    for kill in range(10):
        # Every third one strikes while it starts: imports, compilation, restoring.
        seconds = rng.uniform(0.5, 4.0) if kill % 3 == 2 else 600.0
        disturb(workdir, home, signal.SIGKILL, rng.randrange(1, 15), seconds)
    finish(home, workdir)
