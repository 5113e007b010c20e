"""The training loop: batches in, metrics.jsonl and checkpoints out, exact resume."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from orthojax.config import Config, to_json
from orthojax.errors import Interrupted
from orthojax.train.checkpoint import Checkpoints, read_config, require_same_data
from orthojax.train.data import Inputs, batches
from orthojax.train.distributed import StopRequest, from_primary, is_primary, stop_on_signals, sync_start
from orthojax.train.evaluation import Probed, make_probe, probe_metrics, validation_loss_nats
from orthojax.train.loading import find_model, initial_params
from orthojax.train.metrics import MetricLog, open_mirrors, read_metrics, require_finite
from orthojax.train.step import Program, TrainState, build, shapes_of
from orthojax.train.workdir import claimed, keep_config, keep_tokenizer, require_same_config


def train(
    config: Config,
    inputs: Inputs,
    workdir: Path,
    *,
    on_start: Callable[[int], None] = lambda step: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
    on_line: Callable[[dict[str, Any]], None] = lambda line: None,
) -> TrainState:
    """Trains to `train.steps`, resuming from the newest checkpoint of the workdir if there is one.

    Writes `config.json`, `tokenizer.json`, `metrics.jsonl` and `checkpoints/` under the workdir. On the same machine, a
    run that was stopped anywhere, even by kill -9, ends with the same bits as one that was not.

    Runs on the mesh of `config.mesh`, and may resume on another one. With several processes, each calls this, with a
    workdir that all of them see; only process 0 writes the config and the metrics.

    Args:
      config: The run.
      inputs: Its data, from `open_inputs`.
      workdir: Its folder.
      on_start: Called once with the number of steps already done.
      on_step: Called with (step, loss in nats) of every step, once the losses of its dispatch are known.
      on_line: Called with every line of metrics.jsonl.

    Raises:
      UserError: If the workdir, a checkpoint, the disk or the number of devices does not allow the run.
      DivergedError: If a loss, a gradient or the parameters are not finite.
      Interrupted: On SIGINT, SIGTERM or a preemption notice, when the state is saved.
    """
    program, settings, path = build(config, inputs.task), config.train, workdir / "metrics.jsonl"
    keep, keep_every = settings.keep_checkpoints, settings.keep_every_steps
    with (
        _started(config, inputs, workdir) as check_folder,
        Checkpoints(workdir / "checkpoints", keep=keep, keep_every_steps=keep_every) as checkpoints,
    ):
        state = _newest_state(config, inputs, program, checkpoints) or _initial_state(config, inputs, program)
        if is_primary():
            keep_config(workdir, config)
            keep_tokenizer(workdir, inputs.tokenizer_path)
        step = int(state.step)
        # A run that was stopped at a step before validating does that first.
        owed = settings.validates_at(step) and not from_primary(lambda: _is_validated(path, step))
        on_start(step)
        if step >= settings.steps and not owed:
            return state
        mirrors = open_mirrors(config, workdir) if is_primary() else []
        written = path if is_primary() else None
        log = MetricLog(config, written, step, mirrors=mirrors, on_step=on_step, on_line=on_line)
        with log, stop_on_signals() as stop:
            probe = make_probe(config, inputs, program.mesh, workdir / "probes")
            run = _Run(config, inputs, program, checkpoints, log, probe, stop, check_folder)
            state = run.train(state, step, owed)
    if stop.signum is not None:  # and the checkpoint is written
        raise Interrupted(stop.signum, int(state.step))
    return state


@contextlib.contextmanager
def _started(config: Config, inputs: Inputs, workdir: Path) -> Iterator[Callable[[], None]]:
    """Starts the same run in all processes, in a folder that no other call uses; yields a check of the folder."""
    same = {"config": to_json(config), "data": json.dumps(inputs.provenance, sort_keys=True)}
    with contextlib.ExitStack() as held:
        check = sync_start(lambda: held.enter_context(claimed(workdir, config)) if is_primary() else None, same)
        yield check or (lambda: None)


def _newest_state(config: Config, inputs: Inputs, program: Program, checkpoints: Checkpoints) -> TrainState | None:
    def accept(folder: Path) -> None:
        require_same_config(config, read_config(folder), folder)
        require_same_data(folder, inputs.provenance)

    # Only into shapes and shardings, since a second state may not fit in memory.
    return checkpoints.restore_newest(shapes_of(program), accept)


def _initial_state(config: Config, inputs: Inputs, program: Program) -> TrainState:
    """Returns the state before the first step, with the parameters of `train.init_from` if that is given."""
    state, init_from = program.init(jax.random.key(config.train.seed)), config.train.init_from
    if not init_from:
        return state
    path = from_primary(lambda: str(find_model(init_from)[0]))  # the newest checkpoint may change while others look
    like = program.shardings and program.shardings.params
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    jax.tree.map(lambda x: x.delete(), state.params)  # two sets of parameters may not fit in memory
    return state._replace(params=jax.device_put(initial_params(config, inputs.provenance, path, like), shardings))


def _is_validated(path: Path, step: int) -> bool:
    return any(line["step"] == step and "validation_loss_nats" in line for line in read_metrics(path))


@dataclasses.dataclass(frozen=True)
class _Run:
    """The dispatches of a run, and what follows each: the log, validation, a checkpoint."""

    config: Config
    inputs: Inputs
    program: Program
    checkpoints: Checkpoints
    log: MetricLog
    probe: Callable[[int, Any], Probed | None]
    stop: StopRequest
    check_folder: Callable[[], None]

    def train(self, state: TrainState, step: int, owed: bool) -> TrainState:
        """Trains to the last step, or to the one after which the run is asked to stop; first an owed validation."""
        if step == 0 and (start := self.probe(0, state.params)):
            self.log.write({"step": 0} | probe_metrics(jax.device_get(start)))
        with contextlib.closing(batches(self.config, self.inputs, self.program.mesh, step)) as stream:
            stopping = owed and self._is_stopped_in_validation(step, state)
            while not stopping and step < self.config.train.steps:
                dispatch = next(stream)
                state, metrics = self.program.steps(state, dispatch.batches, dispatch.count)
                step = dispatch.steps[-1]
                self.checkpoints.check()
                self.check_folder()
                self.log.put(dispatch.steps, metrics, self.probe(step, state.params))  # waits for the previous dispatch
                stopping = self.stop.check() is not None
                if not stopping and self.config.train.validates_at(step):
                    stopping = self._is_stopped_in_validation(step, state)
                self._save(step, state, stopping=stopping)
        return state

    def _is_stopped_in_validation(self, step: int, state: TrainState) -> bool:
        """Logs the validation loss; returns whether a signal cut that off, for the resumed run to redo."""
        self.log.flush()

        def leave() -> None:
            if (signum := self.stop.check()) is not None:
                raise Interrupted(signum)

        try:
            with self.log.pause():
                loss = validation_loss_nats(self.config, state.params, self.inputs, leave)
        except Interrupted:
            return True
        require_finite("validation loss", step, loss)
        self.log.write({"step": step, "validation_loss_nats": loss})
        return False

    def _save(self, step: int, state: TrainState, *, stopping: bool) -> None:
        if not stopping and not self.config.train.saves_at(step):
            return
        self.log.flush()
        # The loss was that of the parameters before this step; those that are saved must also be finite.
        require_finite("norm of the parameters", step, self.log.param_norm)
        self.checkpoints.save(state, self.config, self.inputs.provenance)
