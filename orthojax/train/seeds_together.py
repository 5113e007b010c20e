"""Several seeds of one run in one compiled call: the training step under `jax.vmap`, each seed with its own folder."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
from orthojax.errors import Interrupted
from orthojax.fields import replace
from orthojax.train.bad_steps import DivergedError
from orthojax.train.checkpoint import Checkpoints
from orthojax.train.evaluation import validation_loss_nats
from orthojax.train.inputs import Inputs
from orthojax.train.loop import newest_state, train
from orthojax.train.metric_writer import MetricWriter
from orthojax.train.prefetch import prefetched
from orthojax.train.probe import Probe
from orthojax.train.recorder import Recorder
from orthojax.train.signals import StopRequest, stop_on_signals
from orthojax.train.step import StepMetrics, TrainState, make_train_step
from orthojax.train.tensorboard import TensorBoard
from orthojax.train.workdir import alone_in, prepare_workdir


def can_train_seeds(config: Config) -> bool:
    """Whether `train_seeds` trains seeds of this run: on one device, where a bad step ends a run."""
    mesh = config.mesh
    return (mesh.data, mesh.fsdp, mesh.tensor) == (1, 1, 1) and config.train.on_bad_step == "stop"


def train_seeds(
    configs: Sequence[Config],
    inputs: Sequence[Inputs],
    workdirs: Sequence[Path],
    *,
    on_start: Callable[[int, int], None] = lambda index, step: None,
    on_step: Callable[[int, int, float], None] = lambda index, step, loss: None,
) -> list[TrainState | DivergedError]:
    """As `train` for each of the runs, with the same batches, in one compiled call for each step.

    Every folder is as `train` leaves it, but that tokens per second are those of that seed while the others run as
    well. The numbers agree with those of each alone up to rounding (1e-5 in float32 over 20 steps). Runs whose newest
    checkpoints are at different steps go on one by one. Where a run diverges, the others go on.

    The bases of a rotation depend on `optim.rotation.seed`, which is no seed of a run: all share them, here and alone.

    Args:
      configs: Runs that differ in `train.seed` and `data.seed` only.
      inputs: The data of each.
      workdirs: The folder of each.
      on_start: Called with (index of the run, steps already done).
      on_step: Called with (index of the run, step, loss in nats).

    Returns:
      For each its final state, or why it diverged.

    Raises:
      ValueError: For runs that differ in more than their seeds, or that `can_train_seeds` refuses.
      UserError: Where a workdir, a checkpoint or the disk does not allow it.
      Interrupted: On SIGINT or SIGTERM, when all states are saved.
    """
    alike = {replace(config, {"train.seed": 0, "data.seed": 0}) for config in configs}
    if len(alike) != 1 or not can_train_seeds(configs[0]):
        raise ValueError(
            "runs that differ in more than their seeds; allowed: seeds of one run, no mesh, on_bad_step=stop"
        )
    with contextlib.ExitStack() as stack:
        seeds = [_Seed(i, *one, on_step, stack) for i, one in enumerate(zip(configs, inputs, workdirs, strict=True))]
        if len({seed.step for seed in seeds}) == 1:
            for seed in seeds:
                on_start(seed.index, seed.step)
            return _together(seeds, stack)
    ends: list[TrainState | DivergedError] = []
    for i, one in enumerate(zip(configs, inputs, workdirs, strict=True)):
        try:
            told = {"on_start": lambda step, i=i: on_start(i, step), "on_step": lambda *x, i=i: on_step(i, *x)}
            ends.append(train(*one, **told))
        except DivergedError as error:
            ends.append(error)
    return ends


class _Seed:
    """One of the runs: its folder, and what follows each of its steps."""

    def __init__(
        self,
        index: int,
        config: Config,
        inputs: Inputs,
        workdir: Path,
        on_step: Callable[[int, int, float], None],
        stack: contextlib.ExitStack,
    ):
        self.index, self.config, self.inputs, self._workdir = index, config, inputs, workdir
        self._on_step = on_step
        self.error: DivergedError | None = None
        stack.enter_context(alone_in(workdir))
        prepare_workdir(workdir, config)
        train = config.train
        kept = {"keep_every_steps": train.keep_every_steps, "keep_best": train.keep_best}
        self._checkpoints = stack.enter_context(
            Checkpoints(workdir / "checkpoints", keep=train.keep_checkpoints, **kept)
        )
        self.state, _ = newest_state(self._checkpoints, config, inputs)
        self.step = int(self.state.step)

    def start(self, stack: contextlib.ExitStack) -> None:
        """Opens metrics.jsonl."""
        tensorboard = TensorBoard(self._workdir / "tensorboard") if self.config.train.tensorboard else None
        writer = MetricWriter(self._workdir / "metrics.jsonl", self.step, tensorboard=tensorboard)
        self._writer = stack.enter_context(writer)
        self._recorder = Recorder(self.config, self._writer, lambda *told: self._on_step(self.index, *told))
        self._recorder.start(self.step)
        self._probe = Probe(self.config, self.inputs, None)

    def after(self, step: int, metrics: StepMetrics, state: Callable[[], TrainState], *, stopping: bool) -> None:
        """Tells, validates and saves what the schedule asks for after a step; notes where the run ends here.

        Args:
          step: The step that was taken.
          metrics: What it tells.
          state: Gives the state of this run after it.
          stopping: The run is to stop, and so is saved.
        """
        train = self.config.train
        is_last = step == train.steps
        validates = bool(train.eval_every_steps) and (is_last or step % train.eval_every_steps == 0)
        saves = is_last or stopping or step % train.checkpoint_every_steps == 0
        probes = bool(train.probe_every_steps) and step % train.probe_every_steps == 0
        self._checkpoints.check()
        try:
            now = state() if validates or saves or probes else None
            self._recorder.put(step, metrics, self._probe(step, now.params) if now else None)
            if validates and now:
                self._validate(step, now)
            if saves and now:
                self._recorder.flush()
                self._recorder.require_finite("norm of the parameters", step, self._recorder.param_norm)
                self._checkpoints.save(now, self.config, self.inputs.provenance)
        except DivergedError as error:
            self.error = error

    def _validate(self, step: int, state: TrainState) -> None:
        self._recorder.flush()
        with self._recorder.pause():
            loss = validation_loss_nats(self.config, state.params, self.inputs)
        self._recorder.require_finite("validation loss", step, loss)
        self._writer.write({"step": step, "validation_loss_nats": loss})
        self._checkpoints.validated(step, loss)

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self._checkpoints.wait()


@functools.lru_cache(maxsize=32)
def _at_once(
    train_step: Callable[[TrainState, jax.Array], tuple[TrainState, StepMetrics]], count: int
) -> Callable[[TrainState, jax.Array], tuple[TrainState, list[StepMetrics]]]:
    """The jitted step (stacked state, tokens int32 [S, B, T + 1]) -> (stacked state, metrics of each seed)."""

    def steps(state: TrainState, tokens: jax.Array) -> tuple[TrainState, list[StepMetrics]]:
        state, metrics = jax.vmap(train_step)(state, tokens)
        return state, [_part(metrics, i) for i in range(count)]

    return jax.jit(steps, donate_argnums=0)


def _part(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _together(seeds: Sequence[_Seed], stack: contextlib.ExitStack) -> list[TrainState | DivergedError]:
    """Trains all of them to the end."""
    config, step = seeds[0].config, seeds[0].step
    if step >= config.train.steps:
        return [seed.state for seed in seeds]
    for seed in seeds:
        seed.start(stack)
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(seed.state for seed in seeds))
    for seed in seeds:
        del seed.state  # its memory is needed
    with stop_on_signals() as stop:
        state = _train(seeds, state, step, stop)
    for seed in seeds:
        seed.wait()
    if stop.signum is not None:
        raise Interrupted(stop.signum, config.train.steps)
    return [seed.error or _part(state, seed.index) for seed in seeds]


def _train(seeds: Sequence[_Seed], state: TrainState, step: int, stop: StopRequest) -> TrainState:
    """The steps; a run that has diverged keeps its place in the stack, and nothing of it is read."""
    config = seeds[0].config
    take_step = _at_once(make_train_step(config), len(seeds))

    def read(step: int) -> jax.Array:
        return jax.device_put(np.stack([seed.inputs.batch(step - 1) for seed in seeds]))

    with contextlib.closing(prefetched(read, step + 1, config.train.steps + 1)) as batches:
        for tokens in batches:
            step += 1
            state, metrics = take_step(state, tokens)
            stopping = stop.at(step)  # asked once: a later signal belongs to the next step
            for seed, told in zip(seeds, metrics, strict=True):
                if seed.error is None:
                    part = functools.partial(_part, state, seed.index)
                    seed.after(step, told, part, stopping=stopping is not None)
            if all(seed.error for seed in seeds):
                break
            if stopping is not None:
                for seed in seeds:
                    seed.wait()
                raise Interrupted(stopping, step)
    return state
