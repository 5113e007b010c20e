"""Several steps in one dispatch: when each ends, and that nothing but time depends on how many they are."""

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import TINY, Stop, bits, inputs, lines, stop_at

from orthojax import train as training
from orthojax.config import replace
from orthojax.errors import Interrupted, UserError
from orthojax.train import DivergedError, find_checkpoint, read_metrics, read_optimizer_state, read_params, train
from orthojax.train.data import spans, steps_per_dispatch

# Probes, validations and checkpoints at odd steps, none of them at the end of a dispatch of 4 but by chance.
CONFIG = replace(TINY, {
    "train.steps": 13, "train.log_every_steps": 2, "train.eval_every_steps": 7, "train.checkpoint_every_steps": 5,
    "train.probe_steps": (0, 1, 3), "train.probe_sequences": 2, "train.keep_checkpoints": 9, "eval.sequences": 8,
})  # fmt: skip
FREE = {"train.log_every_steps": 1, "train.eval_every_steps": 0, "train.checkpoint_every_steps": 100}
FREE |= {"train.probe_steps": (), "train.steps": 12}


def of(most, **changes):
    return replace(CONFIG, {"train.steps_per_dispatch": most} | changes)


def everything(workdir):
    """All that a run leaves but its speed."""
    steps = training.steps_in(workdir / "checkpoints")
    saved = {step: find_checkpoint(workdir / f"checkpoints/{step}") for step in steps}
    arrays = {step: (bits(read_params(folder)), bits(read_optimizer_state(folder))) for step, folder in saved.items()}
    return lines(workdir), arrays


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    """What a run with one step per dispatch leaves."""
    workdir = tmp_path_factory.mktemp("one")
    train(of(1), inputs(), workdir)
    return everything(workdir)


cadence = st.integers(0, 9)


@given(st.integers(1, 40), st.integers(1, 12), cadence, cadence, st.integers(1, 9), st.lists(cadence), st.data())
def test_dispatches_end_where_something_is_due(steps, most, evals, probes, saves, extra, data):
    config = replace(CONFIG, {
        "train.steps": steps, "train.steps_per_dispatch": most, "train.eval_every_steps": evals,
        "train.probe_every_steps": probes, "train.checkpoint_every_steps": saves, "train.probe_steps": tuple(extra),
    })  # fmt: skip
    start = data.draw(st.integers(0, steps))
    found = list(spans(config, start))
    assert [step for span in found for step in span] == list(range(start + 1, steps + 1))
    due = {step for every in (evals, probes, saves) if every for step in range(every, steps + 1, every)}
    due |= {steps, *extra}
    for span in found:
        assert not due & set(span[:-1])
        assert len(span) == steps_per_dispatch(config) <= most or span[-1] in due


def test_small_steps_share_a_dispatch_and_large_ones_do_not():
    free = of(None, **FREE)
    large = {"model.d_model": 512, "model.num_layers": 8, "model.d_mlp": 2048, "train.batch_size": 256}
    assert steps_per_dispatch(free) == free.train.steps
    assert steps_per_dispatch(replace(free, {"train.steps": 1000})) == 64
    assert steps_per_dispatch(replace(free, large)) == 1
    with pytest.raises(UserError, match="steps_per_dispatch=0"):
        of(0)


@pytest.mark.parametrize("most", [4, None])
def test_no_bit_depends_on_the_steps_of_a_dispatch(one_by_one, tmp_path, most):
    train(of(most), inputs(), tmp_path)
    found, expected = everything(tmp_path), one_by_one
    assert found == expected
    assert list(expected[1]) == [5, 10, 13]
    assert {line["step"] for line in expected[0] if "kurtosis_first" in line} == {0, 1, 3}
    assert {line["step"] for line in expected[0] if "validation_loss_nats" in line} == {7, 13}
    assert [line["step"] for line in expected[0] if "loss_nats" in line] == [1, 2, 4, 6, 8, 10, 12, 13]


@pytest.mark.parametrize("changes", [
    {"train.accumulation_steps": 2, "model.remat": "full"},
    {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "optim.optimizer": "sgd"},
], ids=["accumulated", "mesh"])  # fmt: skip
def test_nor_however_a_step_is_computed(tmp_path, changes):
    states = [train(of(most, **FREE, **changes), inputs(), tmp_path / f"{most}") for most in (1, 5)]
    assert bits(states[1]) == bits(states[0])
    assert lines(tmp_path / "5") == lines(tmp_path / "1")


def test_a_run_resumes_with_another_number(one_by_one, tmp_path):
    for most, killed in ((3, 7), (1, 12)):
        with pytest.raises(Stop):
            train(of(most), inputs(), tmp_path, on_step=stop_at(killed))
    train(of(None), inputs(), tmp_path)
    assert everything(tmp_path) == one_by_one


def test_a_loss_that_is_not_finite_has_its_own_step(tmp_path):
    with pytest.raises(DivergedError, match=r"loss .* at step 7"):
        train(of(5, **FREE), inputs((6,)), tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_signal_waits_for_the_end_of_a_dispatch(tmp_path):
    def signal_at_two(step, loss):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    config = of(3, **FREE)
    with pytest.raises(Interrupted):
        train(config, inputs(), tmp_path / "run", on_step=signal_at_two)
    # The losses of a dispatch are seen when the next one runs.
    assert find_checkpoint(tmp_path / "run").name == "6"
    assert bits(train(config, inputs(), tmp_path / "run")) == bits(train(config, inputs(), tmp_path / "whole"))


def test_the_steps_of_a_dispatch_share_its_time(tmp_path):
    train(of(4, **FREE), inputs(), tmp_path)
    speeds = [line["tokens_per_second"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert len(speeds) == 12
    for i in range(0, 12, 4):
        assert speeds[i : i + 4] == pytest.approx([speeds[i]] * 4, rel=1e-3)
