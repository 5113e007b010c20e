"""The processes of a run: several as one, and stopping them from outside.

Stopping one process: the first SIGTERM or SIGINT saves the state after the running step, the second one ends it.
Several processes must all save at the same step, and only some may get the signal. JAX's coordination service takes
SIGTERM, which schedulers send as the notice of a preemption, on any process, and lets all processes agree on a step
that none has passed. So SIGTERM is left to the service, and SIGINT is passed on to it as SIGTERM.

A process that is left alone ends with three lines and the exit status 75, with which a scheduler may start all again.
It learns that from a collective that fails, or from JAX, whose service expects heartbeats from all, and which would
abort the process with a dump of its stacks.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from orthojax.errors import Interrupted, UserError

T = TypeVar("T")
LOST = 75  # EX_TEMPFAIL of sysexits.h
_LOST_WORDS = re.compile(rb"oordination|distributed service|Gloo|NCCL|UNAVAILABLE|DEADLINE_EXCEEDED|onnection")
_PREPARED_MS = 24 * 3600 * 1000  # process 0 may tokenise for hours; a lost process ends the wait
_starts = itertools.count()
_FAIL_TOGETHER_MS = 5000  # what others may need to fail for the same reason
_kept: list[Any] = []  # the handler that C calls


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 20,
) -> None:
    """Joins the processes of a run; call it before anything else in JAX.

    Without arguments it asks the cluster (Slurm, Open MPI, GKE, Cloud TPU). A process whose heartbeat stops ends all
    others with the exit status `LOST`. When restarted, they resume from the last checkpoint. If the others do not
    connect within five minutes, JAX ends this one with exit code 134. Raises UserError if only some of the three are
    given, they do not fit, or no cluster is found.
    """
    given = (coordinator_address, num_processes, process_id)
    if given != (None, None, None):
        fits = num_processes is not None and process_id is not None and 0 <= process_id < num_processes
        # JAX itself would try to connect for five minutes.
        if not fits or not re.fullmatch(r"[\w.:\[\]-]+:\d{1,5}", coordinator_address or ""):
            raise UserError(
                f"coordinator_address={coordinator_address}, num_processes={num_processes}, process_id={process_id}",
                allowed="HOST:PORT of process 0, their number N, and 0 to N - 1; or none of the three on a cluster",
            )
    try:
        jax.distributed.initialize(
            *given,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=max(100, heartbeat_timeout_seconds),  # the last checkpoint may be slow on one
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes cannot connect: {str(error).strip().splitlines()[0]}",
            allowed="a cluster that jax.distributed knows: Slurm, Open MPI, GKE, Cloud TPU",
            hint="elsewhere --coordinator_address=HOST:PORT --num_processes=N --process_id=I",
        ) from error
    if jax.process_count() > 1:
        _report_aborts()


def _end_lost(stderr: int, said: bytes) -> None:
    """Ends this process; `said` is what JAX said, of which the first line with a reason is shown."""
    reason = next((line for line in said.splitlines() if _LOST_WORDS.search(line)), b"").strip()[-200:]
    hint = b"the newest checkpoint is kept, and the same command in every process resumes from it"
    lines = (b"error: another process of this run died or hangs", reason, hint + b" (exit status 75)")
    os.write(stderr, b"\n  ".join(lines) + b"\n")
    os._exit(LOST)


def _report_aborts() -> None:
    """Makes JAX's abort, once another process is gone, three lines and the exit status `LOST`.

    What libraries write to file descriptor 2 is held back for a second, so that it can be left out then.
    """
    reader, writer = os.pipe()
    stderr, held, c = os.dup(2), bytearray(), ctypes.CDLL(None)
    sys.stderr = os.fdopen(os.dup(2), "w", 1, errors="backslashreplace")
    os.dup2(writer, 2)

    def collect() -> None:
        while select.select([reader], [], [], 0)[0]:
            held.extend(os.read(reader, 1 << 16))

    def forward() -> None:
        collect()
        os.write(stderr, held)
        held.clear()

    def follow() -> None:
        while select.select([reader], [], []):
            time.sleep(1)
            forward()

    def aborted(_: int) -> None:
        collect()
        if _LOST_WORDS.search(held):
            _end_lost(stderr, bytes(held))
        os.write(stderr, held)
        c.signal(signal.SIGABRT, None)  # the default

    faulthandler.enable(sys.stderr)  # absl has enabled it for the descriptor 2
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)  # Python's own would wait for the main thread
    _kept.append(handler)
    c.signal(signal.SIGABRT, handler)
    atexit.register(forward)
    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def failing_alone() -> Iterator[None]:
    """Lets a process that fails end at once, unless all do: at its end JAX would wait for the others.

    A failed collective becomes three lines and the exit status `LOST`.
    """
    try:
        yield
    except Interrupted:  # all stop at the same step
        raise
    except BaseException as error:
        from jax._src.distributed import global_state

        client: Any = global_state.client
        if client is None:
            raise
        said = " ".join(f"\n{e}" for e in (error, error.__cause__, error.__context__)).encode()
        # The exceptions of a failed collective have several types; their texts begin with a status.
        if re.search(rb"\n[A-Z_]+: ", said) and _LOST_WORDS.search(said) and b"RESOURCE_EXHAUSTED" not in said:
            _end_lost(sys.stderr.fileno(), said)
        try:
            client.wait_at_barrier("failed", _FAIL_TOGETHER_MS)
        except Exception:
            status: Any = error.code if isinstance(error, SystemExit) else 2
            known = isinstance(error, SystemExit | UserError | OSError)
            # The others will end as if this process had been lost, for a scheduler to start again: it would fail again.
            if (failed := os.environ.get("ORTHOJAX_FAILED")) and not isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    open(failed, "w").close()
            atexit.register(os._exit, status if known else 130 if isinstance(error, KeyboardInterrupt) else 1)
            atexit.register(sys.stdout.flush)  # runs first; both before what JAX has registered, and after the message
        raise


def is_primary() -> bool:
    """Returns whether this is process 0, the only one that writes config.json, metrics and to the console."""
    return jax.process_index() == 0


def sync_start(prepare: Callable[[], T], same: Mapping[str, str] | None = None) -> T:
    """Calls `prepare` on every process; returns its result if it succeeded on all and `same` agrees between them.

    Without this, the others would wait for a process that failed, or add the gradients of one that trains with another
    config or on other data.
    """
    prepared = failure = None
    try:
        prepared = prepare()
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        _wait_for_all()
        values = dict(same or {})
        first = from_primary(lambda: values)
        own = [failure is not None, *(values[name] != first[name] for name in first)]
        rows = np.asarray(multihost_utils.process_allgather(np.array(own)))  # [processes, 1 + one for each of `same`]
        # Before failures are reported: another config may fail for what process 0 has just written.
        for number, name in enumerate(first, 1):
            if others := np.flatnonzero(rows[:, number]).tolist():
                raise UserError(
                    f"the processes do not belong to one run: {name} of process {others} is not that of process 0",
                    allowed="the same config, the same files and the same version of Python on every machine",
                )
        failed = np.flatnonzero(rows[:, 0]).tolist()
        if failure is None and failed:
            raise UserError(f"process {failed} cannot start", hint="its own message says why")
    if failure is not None:
        raise failure
    return cast(T, prepared)


def _wait_for_all() -> None:
    """Waits until all processes are here, however long one takes: a collective gives up after half a minute."""
    from jax._src.distributed import global_state

    client: Any = global_state.client
    client.wait_at_barrier(f"start {next(_starts)}", _PREPARED_MS)


def from_primary(read: Callable[[], T]) -> T:
    """Returns on every process the JSON value that `read` returns on process 0, the only one that calls it."""
    value = read() if is_primary() else None
    if jax.process_count() == 1:
        return cast(T, value)
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    content = content if is_primary() else np.zeros(size, np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(content))))


class StopRequest:
    """A request to stop the run; `signum` is the first signal to this process, once there was one."""

    signum: int | None = None
    _asked = 0

    def check(self) -> int | None:
        """Returns the signal that stops the run now, or None; every process asks equally often."""
        # JAX lets all processes agree on a number that none has passed, here the number of times that they have asked.
        self._asked += 1
        if jax.process_count() > 1 and not self.signum and multihost_utils.reached_preemption_sync_point(self._asked):
            self.signum = signal.SIGTERM
        return self.signum


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a second one has its usual effect."""
    many = jax.process_count() > 1
    request, previous = StopRequest(), dict[int, Any]()

    def restore():
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def note(signum, _):
        restore()
        if many:
            os.kill(os.getpid(), signal.SIGTERM)  # to the coordination service
        else:
            request.signum = signum

    with contextlib.suppress(ValueError):  # not in the main thread: the caller's own handlers apply
        for signum in (signal.SIGINT,) if many else (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    try:
        yield request
    finally:
        restore()
