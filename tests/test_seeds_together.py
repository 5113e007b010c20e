"""Several seeds in one compiled call against each of them alone."""

import dataclasses
import os
import signal

import jax
import numpy as np
import pytest

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.errors import Interrupted
from orthojax.fields import replace
from orthojax.train import (
    DivergedError,
    Inputs,
    can_train_seeds,
    find_checkpoint,
    read_json_item,
    read_metrics,
    read_params,
    train,
    train_seeds,
)

CONFIG = Config(
    model=ModelConfig(vocab_size=32, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=32, scan_layers=False),
    optim=OptimConfig(optimizer="adam", learning_rate=1e-2, warmup_steps=2),
    data=DataConfig(sequence_length=8),
    train=TrainConfig(
        steps=20, batch_size=4, log_every_steps=5, eval_every_steps=10, checkpoint_every_steps=10, probe_every_steps=0
    ),
    eval=EvalConfig(sequences=8, batch_size=8),
)  # fmt: skip
CURED = {"model.normalizer": "softmax1", "optim.optimizer": "orthoadam"}
PROBED = {"train.probe_every_steps": 10, "train.probe_sequences": 4}


def seeds_of(config, seeds=(0, 1)):
    return [replace(config, {"train.seed": seed, "data.seed": seed}) for seed in seeds]


def inputs_of(config, record=None):
    def tokens(step, rows, seed=config.data.seed):
        if record is not None:
            record.append((seed, step))
        return np.random.default_rng([seed, step]).integers(0, 32, (rows, 9), dtype=np.int32)

    return Inputs(lambda step: tokens(step, 4), tokens(999, 8), 0.75, {"source": "test"}, None)


def go(configs, home, **arguments):
    return train_seeds(
        configs, [inputs_of(c) for c in configs], [home / str(c.train.seed) for c in configs], **arguments
    )


def numbers(line):
    return {name: value for name, value in line.items() if name != "tokens_per_second"}


@pytest.mark.parametrize(
    "change",
    [CURED, pytest.param(PROBED, marks=pytest.mark.slow)],
    ids=["softmax1, orthoadam", "softmax, adam"],
)
def test_seeds_together_leave_what_each_alone_leaves(tmp_path, change):
    configs = seeds_of(replace(CONFIG, change))
    told = []
    ends = go(configs, tmp_path / "together", on_step=lambda *x: told.append(x[:2]))
    assert told.count((0, 20)) == told.count((1, 20)) == 1
    assert len(told) == 40
    for config, end in zip(configs, ends, strict=True):
        name = str(config.train.seed)
        alone = train(config, inputs_of(config), tmp_path / "alone" / name)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), end, alone)
        one, other = (tmp_path / kind / name for kind in ("together", "alone"))
        assert (one / "config.json").read_text() == (other / "config.json").read_text()
        lines = [read_metrics(folder / "metrics.jsonl") for folder in (one, other)]
        assert [list(line) for line in lines[0]] == [list(line) for line in lines[1]]
        for ours, theirs in zip(*lines, strict=True):
            assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-4, abs=1e-4)
        steps = [sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*")) for folder in (one, other)]
        assert steps[0] == steps[1] == ["10", "20"]
        for step in steps[0]:
            a, b = (read_params(folder / "checkpoints" / step) for folder in (one, other))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)
            for item in ("config", "data", "validation"):
                a, b = (read_json_item(folder / "checkpoints" / step, item) for folder in (one, other))
                assert a == (pytest.approx(b, rel=1e-4) if item == "validation" else b)


@pytest.mark.slow
def test_the_seeds_differ_and_each_reads_its_own_batches(tmp_path):
    configs, read = seeds_of(replace(CONFIG, {"train.steps": 6})), []
    ends = train_seeds(configs, [inputs_of(c, read) for c in configs], [tmp_path / "a", tmp_path / "b"])
    assert sorted(set(read) - {(0, 999), (1, 999)}) == [(seed, step) for seed in (0, 1) for step in range(6)]
    a, b = (end.params["token_embedding"]["embedding"] for end in ends)
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.slow
def test_a_seed_that_diverges_is_told_and_the_others_go_on(tmp_path):
    configs = seeds_of(CONFIG)
    poisoned = inputs_of(configs[0])
    # Only one seed meets an id that has no embedding, whose loss is not finite.
    bad = poisoned._replace(batch=lambda step: poisoned.batch(step) + (10**6 if step == 12 else 0))
    folders = [tmp_path / "0", tmp_path / "1"]
    ends = train_seeds(configs, [bad, inputs_of(configs[1])], folders)
    assert isinstance(ends[0], DivergedError)
    assert "not finite at step 13" in str(ends[0])
    assert int(ends[1].step) == 20
    assert find_checkpoint(folders[0]).name == "10"
    assert find_checkpoint(folders[1]).name == "20"
    with pytest.raises(DivergedError, match="not finite at step 13"):
        train(configs[0], bad, folders[0])


@pytest.mark.slow
def test_a_stopped_call_saves_every_seed_and_goes_on_to_the_same_end(tmp_path):
    configs = seeds_of(CONFIG)

    def stop(index, step, loss):
        if (index, step) == (1, 6):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        go(configs, tmp_path / "stopped", on_step=stop)
    assert stopped.value.signum == signal.SIGTERM
    (step,) = {find_checkpoint(tmp_path / "stopped" / name).name for name in "01"}
    assert step == "8"  # told one step late, and obeyed after the step that runs
    begun = []
    resumed = go(configs, tmp_path / "stopped", on_start=lambda *x: begun.append(x))
    assert begun == [(0, 8), (1, 8)]
    whole = go(configs, tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    assert go(configs, tmp_path / "whole", on_step=lambda *x: pytest.fail("trained again"))[1].step == 20


@pytest.mark.slow
def test_seeds_at_different_steps_go_on_one_by_one(tmp_path):
    configs = seeds_of(CONFIG)
    (tmp_path / "run").mkdir()
    train(configs[0], inputs_of(configs[0]), tmp_path / "run" / "0")
    begun = []
    ends = go(configs, tmp_path / "run", on_start=lambda *x: begun.append(x))
    assert begun == [(0, 20), (1, 0)]
    alone = train(configs[1], inputs_of(configs[1]), tmp_path / "alone")
    jax.tree.map(np.testing.assert_array_equal, ends[1], alone)


def test_only_seeds_of_one_run_are_taken(tmp_path):
    one, other = seeds_of(CONFIG)
    with pytest.raises(ValueError, match="differ in more than their seeds"):
        go([one, replace(other, {"optim.learning_rate": 1.0})], tmp_path)
    assert can_train_seeds(CONFIG)
    assert not can_train_seeds(replace(CONFIG, {"mesh.data": -1}))
    assert not can_train_seeds(replace(CONFIG, {"train.on_bad_step": "skip"}))
    skipping = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, on_bad_step="skip"))
    with pytest.raises(ValueError, match="on_bad_step=stop"):
        go(seeds_of(skipping), tmp_path)
    assert not list(tmp_path.iterdir())
