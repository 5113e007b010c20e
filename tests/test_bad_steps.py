import functools
import math
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import flip, largest
from tiny_run import TINY as CONFIG
from tiny_run import assert_trees_close, bits, inputs, lines, rows

from orthojax.config import Config, replace
from orthojax.errors import Interrupted, UserError
from orthojax.model import Transformer
from orthojax.train import (
    DivergedError,
    init_state,
    learning_rate_schedule,
    leave_out_bad_steps,
    make_optimizer,
    make_train_step,
    train,
)  # fmt: skip
from orthojax.train.step import loss_sum_nats
from orthojax.train.step_logger import MOST_IN_A_ROW, step_before

SKIP = replace(CONFIG, {"train.on_bad_step": "skip", "train.spike_nats": 2.0})
BACK = replace(CONFIG, {"train.on_bad_step": "roll_back"})


def trained_on(config, batches):
    """The state after these batches and no others, by the step alone."""
    state, step = init_state(config), make_train_step(config)
    for batch in batches:
        state, _ = step(state, rows(batch))
    return state


# The device's part.

TREE = {"a": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}, "scale": np.float32([-0.0, 0.0, 2.0])}
CHAINS = {
    "adam": lambda: optax.scale_by_adam(),
    "sgd": lambda: optax.trace(0.9),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 1.0 / (1.0 + count)),
}


def gradients(seed, poison=None):
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), TREE)
    if poison is not None:
        tree["a"]["kernel"][1, 2] = poison
    return tree


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(
    ("loss", "poison"),
    [
        *((math.nan, None), (1.0, math.nan), (9.0, None)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((math.inf, None), (1.0, -math.inf))),
    ],
)
def test_a_bad_step_has_not_happened(name, loss, poison):
    chain = optax.named_chain(("scaling", CHAINS[name]()), ("rate", optax.scale(-0.1)))
    optimizer = leave_out_bad_steps(chain, spike_nats=2.0)

    @jax.jit
    def step(params, state, grads, loss):
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params, state = step(TREE, optimizer.init(TREE), gradients(0), 1.0)
    params["scale"] = jnp.asarray(TREE["scale"])  # with a -0.0, whose sign an update of 0.0 would lose
    after, new = step(params, state, gradients(1, poison), loss)
    assert bits(after) == bits(params)
    assert bits([new["scaling"], new["rate"]]) == bits([state["scaling"], state["rate"]])
    assert list(new) == ["scaling", "rate", "bad_steps"]
    assert new["bad_steps"]._fields == ("loss_mean_nats", "good_steps", "skipped_steps", "in_a_row")
    assert [int(x) for x in new["bad_steps"][1:]] == [1, 1, 1]
    assert float(new["bad_steps"].loss_mean_nats) == 1.0
    # The next good step is the one that the chain by itself would take.
    good, newer = step(after, new, gradients(2), 1.5)
    updates, inner = jax.jit(chain.update)(gradients(2), {k: state[k] for k in ("scaling", "rate")}, params)
    assert_trees_close((good, newer["scaling"]), (optax.apply_updates(params, updates), inner["scaling"]), rtol=1e-6)
    assert [int(x) for x in newer["bad_steps"][1:]] == [2, 1, 0]


def test_a_state_made_outside_of_jit_can_be_donated():
    optimizer = leave_out_bad_steps(optax.named_chain(("none", optax.identity())))
    step = jax.jit(lambda state, x: optimizer.update({"x": x}, state, value=1.0)[1], donate_argnums=0)
    assert int(step(optimizer.init({"x": jnp.ones(2)}), jnp.ones(2))["bad_steps"].good_steps) == 1


def test_a_spike_is_measured_from_the_running_mean_of_the_good_losses():
    losses = np.random.default_rng(0).normal(5.0, 0.6, 400).astype(np.float32)
    losses[[7, 150, 151]] += 4.0
    losses[200] = np.nan
    optimizer = leave_out_bad_steps(optax.named_chain(("none", optax.identity())), spike_nats=1.2)
    update = jax.jit(lambda state, loss: optimizer.update({"x": jnp.ones(2)}, state, value=loss)[1])
    state, mean, good, bad_steps = optimizer.init({"x": jnp.ones(2)}), 0.0, 0, []
    for step, loss in enumerate(losses):
        state = update(state, loss)
        if not math.isfinite(loss) or (good and loss > mean + 1.2):
            bad_steps.append(step)
        else:
            good += 1
            mean += (float(loss) - mean) / min(good, 100)
        assert int(state["bad_steps"].skipped_steps) == len(bad_steps), step
        assert float(state["bad_steps"].loss_mean_nats) == pytest.approx(mean, rel=1e-5)
    assert {7, 150, 151, 200} < set(bad_steps)
    assert len(bad_steps) < 40


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("orthoadam", marks=pytest.mark.slow)])
def test_without_a_policy_the_step_is_bit_for_bit_that_of_the_plain_optimizer(optimizer):
    config = replace(CONFIG, {"optim.optimizer": optimizer, "optim.weight_decay": 0.1})
    schedule = learning_rate_schedule(config.optim, config.train.steps)
    model, chain = Transformer(config.model), make_optimizer(config.seeded_optim, schedule=schedule)

    @jax.jit
    def plain_step(params, opt_state, tokens):
        def mean_loss(params):
            total, count = loss_sum_nats(model, params, tokens)
            return total / count

        updates, opt_state = chain.update(jax.grad(mean_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = trained_on(config, range(4))
    params = init_state(config).params
    opt_state = chain.init(params)
    for batch in range(4):
        params, opt_state = plain_step(params, opt_state, rows(batch))
    assert bits((state.params, state.opt_state)) == bits((params, opt_state))


# Skipping.

GOOD = [0, 1, 3, 4, 5, 8, 9, 10, 11]
POISONED = (2, 6, 7)  # batches: they are those of steps 3, 7 and 8


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    return bits(train(SKIP, inputs(POISONED), folder)), lines(folder)


def test_a_run_that_skips_ends_as_if_the_bad_batches_were_not_there(skipped):
    expected = bits(trained_on(SKIP, GOOD))
    assert {name for name in expected if skipped[0][name] != expected[name]} == {
        "step", "opt_state/bad_steps/skipped_steps"
    }  # fmt: skip
    events = [line for line in skipped[1] if "event" in line]
    assert [(line["step"], line["event"], line["skipped_steps"]) for line in events] == [
        (3, "skipped", 1), (7, "skipped", 2), (8, "skipped", 3)
    ]  # fmt: skip
    assert "the loss is not finite at step 7: nan" in events[1]["why"]
    skipped_steps = {line["step"]: line["skipped_steps"] for line in skipped[1] if "loss_nats" in line}
    assert skipped_steps == {1: 0, 2: 0, 4: 1, 5: 1, 6: 1, 9: 3, 10: 3, 11: 3, 12: 3}


class Killed(Exception):
    pass


def stop_at(wanted, how=None):
    stopped = []

    def on_step(step, _):
        if step == wanted and not stopped:  # a second signal would end the process
            stopped.append(step)
            if how is None:
                raise Killed
            signal.raise_signal(how)

    return on_step


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 6, pytest.param(8, marks=pytest.mark.slow)])
def test_a_run_killed_while_it_skips_ends_with_the_same_bits(skipped, tmp_path, step):
    with pytest.raises(Killed):
        train(SKIP, inputs(POISONED), tmp_path, on_step=stop_at(step))
    assert bits(train(SKIP, inputs(POISONED), tmp_path)) == skipped[0]
    assert lines(tmp_path) == skipped[1]


def constant(step):
    return np.full((4, 9), 3 if step != 10 else 21, np.int32)


def test_a_spike_is_skipped_and_stops_a_run_that_does_not_skip(tmp_path):
    train(SKIP, inputs(batch=constant), tmp_path / "skip")
    (event,) = lines(tmp_path / "skip", "event")
    assert event["step"] == 11
    loss, above, mean = map(
        float, re.findall(r"is ([\d.]+) nats, more than ([\d.]+) above its mean ([\d.]+)", event["why"])[0]
    )
    losses = [line["loss_nats"] for line in lines(tmp_path / "skip", "loss_nats")]
    assert above == 2.0
    assert mean == pytest.approx(np.mean(losses[:10]), rel=1e-3)
    assert loss > mean + 2.0
    assert losses[-1] < 1.0
    stop = replace(SKIP, {"train.on_bad_step": "stop"})
    with pytest.raises(DivergedError, match=r"the loss at step 11 is .* nats, more than 2 above") as error:
        train(stop, inputs(batch=constant), tmp_path / "stop")
    assert len(str(error.value).splitlines()) <= 3
    assert (tmp_path / "stop/checkpoints/8").is_dir()


def test_a_run_that_only_skips_stops(tmp_path):
    with pytest.raises(DivergedError, match=f"^{MOST_IN_A_ROW} steps in a row were skipped, 10 in all; .* step 12"):
        train(SKIP, inputs(range(2, 50)), tmp_path)
    assert [line["step"] for line in lines(tmp_path, "event")] == list(range(3, 13))


# Rolling back.


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """Step 7 is bad, and after going back to 4 the new step 6, which has batch 8."""
    folder = tmp_path_factory.mktemp("back")
    return bits(train(BACK, inputs((6, 8)), folder)), lines(folder)


def test_a_run_that_rolls_back_leaves_out_the_batches_since_the_checkpoint(rolled_back):
    # Steps 1-4 have batches 0-3; the bad ones take 4-6 and then 7-8 with them; step 5 has batch 9.
    assert rolled_back[0] == bits(trained_on(BACK, [0, 1, 2, 3, *range(9, 17)]))
    events = [line for line in rolled_back[1] if "event" in line]
    assert [(e["step"], e["to_step"], e["left_out_batches"], e["roll_backs"]) for e in events] == [
        (5, 4, 3, 1), (5, 4, 5, 2)
    ]  # fmt: skip
    assert ["step 7: nan" in events[0]["why"], "step 6: nan" in events[1]["why"]] == [True, True]
    steps = [line["step"] for line in rolled_back[1] if "loss_nats" in line]
    assert steps == list(range(1, 13))


def stop_between_two_roll_backs():
    seen = []

    def on_step(step, _):
        seen.append(step)
        if seen == [1, 2, 3, 4, 5, 6, 5]:
            raise Killed

    return on_step


@pytest.mark.parametrize(
    ("stop", "how"),
    [
        # One more checkpoint, after step 7 was found to be bad and another was not yet.
        pytest.param(functools.partial(stop_at, 6, signal.SIGTERM), Interrupted, marks=pytest.mark.slow),
        (stop_between_two_roll_backs, Killed),
        *(pytest.param(functools.partial(stop_at, step), Killed, marks=pytest.mark.slow) for step in (2, 6, 9)),
        *(
            pytest.param(functools.partial(stop_at, step, signal.SIGTERM), Interrupted, marks=pytest.mark.slow)
            for step in (5, 9)
        ),
    ],
)
def test_a_run_stopped_anywhere_rolls_back_to_the_same_place(rolled_back, tmp_path, stop, how):
    with pytest.raises(how):
        train(BACK, inputs((6, 8)), tmp_path, on_step=stop())
    assert bits(train(BACK, inputs((6, 8)), tmp_path)) == rolled_back[0]
    assert lines(tmp_path) == rolled_back[1]


@pytest.mark.slow
def test_a_run_stopped_twice_since_the_scheduled_checkpoint_rolls_back_to_it(tmp_path):
    config = replace(BACK, {"train.checkpoint_every_steps": 6})
    whole = bits(train(config, inputs((11,)), tmp_path / "whole"))
    for step in (6, 8):  # each leaves a checkpoint, and two of the newest stay
        with pytest.raises(Interrupted):
            train(config, inputs((11,)), tmp_path / "stopped", on_step=stop_at(step, signal.SIGTERM))
    kept = {int(path.name) for path in (tmp_path / "stopped/checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {6, 7, 10}
    assert bits(train(config, inputs((11,)), tmp_path / "stopped")) == whole
    (event,) = lines(tmp_path / "stopped", "event")
    assert event["to_step"] == 6


def test_a_roll_back_to_a_damaged_checkpoint_takes_the_newest_intact_one(tmp_path, capsys):
    with pytest.raises(Interrupted):
        train(BACK, inputs((6,)), tmp_path, on_step=stop_at(4, signal.SIGTERM))
    flip(largest(tmp_path / "checkpoints/4/params"))
    assert int(train(BACK, inputs((6,)), tmp_path).step) == BACK.train.steps
    (event,) = lines(tmp_path, "event")
    assert (event["to_step"], event["left_out_batches"]) == (5, 2)
    assert re.search(r"warning: .*checkpoints/4.*rolling back to the newest intact", capsys.readouterr().err, re.DOTALL)


def test_where_a_run_rolls_back_to_may_not_change_when_it_resumes(tmp_path):
    with pytest.raises(Killed):
        train(BACK, inputs(), tmp_path, on_step=stop_at(6))
    seldom = {"train.checkpoint_every_steps": 100}
    with pytest.raises(UserError, match=r"checkpoint_every_steps=100 \(was 4\)"):
        train(replace(BACK, seldom), inputs(), tmp_path)


@pytest.mark.slow
def test_a_run_without_a_checkpoint_rolls_back_to_its_beginning_and_not_for_ever(tmp_path):
    assert bits(train(BACK, inputs((1,)), tmp_path / "a")) == bits(trained_on(BACK, range(2, 14)))
    with pytest.raises(DivergedError, match="rolled back 9 times to step 4 without getting further"):
        train(BACK, inputs(range(5, 100)), tmp_path / "b")


@pytest.mark.parametrize(
    ("bad", "kept", "back_to"),
    [(3, [], None), (3, [2], None), (9, [4, 8], 8), (8, [4], 4), (7, [4, 6], 4), (7, [6], 6)],
)
def test_the_checkpoint_to_go_back_to_is_the_last_of_the_schedule_unless_it_is_gone(tmp_path, bad, kept, back_to):
    for step in kept:
        (tmp_path / str(step)).mkdir()
    assert step_before(bad, 4, tmp_path, kept[-1] if kept else None) == back_to


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.on_bad_step", "rollback", ["stop | skip | roll_back", "did you mean 'roll_back'?"]),
        ("train.spike_nats", "0", ["train.spike_nats=0", "> 0"]),
        ("train.spike_nats", "inf", ["inf", "finite"]),
        ("train.probe_every_steps", "-1", ["probe_every_steps=-1", "at least 0"]),
        ("train.probe_sequences", "0", ["probe_sequences=0", "at least 1"]),
    ],
)
def test_an_impossible_policy_is_refused(path, value, words):
    with pytest.raises(UserError) as error:
        replace(Config(), {path: value})
    assert all(word in str(error.value) for word in words)
