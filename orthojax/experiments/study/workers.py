"""Tasks on everything the machine has: a process for every core of a CPU, or for every GPU.

A model of a study at `tiny` scale is too small for two cores: two such runs at once, one on each, finish 1.2 to 1.4
times sooner than one after the other (measured, 64 to 160 channels wide). Where there is one accelerator, this process
does everything.
"""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, TypeVar

from orthojax.errors import Interrupted, UserError
from orthojax.experiments.study.runs import Teller

T = TypeVar("T")
R = TypeVar("R")
_MEMORY_BYTES = 2 << 30  # that a worker should have


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker runs.

    Attributes:
      cores: Of the CPU; empty for any.
      environment: Variables that JAX reads.
    """

    cores: tuple[int, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def enter(self) -> None:
        """Moves this process there; to be called before JAX looks for devices."""
        os.environ.update(self.environment)
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def places(jobs: int | None = None) -> list[Place]:
    """Where the workers of this machine run; a single one is this process itself.

    Args:
      jobs: How many at most; None takes one for each GPU, or where there is none, for each core whose share of the
        free memory is 2 GB.
    """
    gpus = _gpus()
    if gpus:
        found = [Place(environment=(("CUDA_VISIBLE_DEVICES", gpu),)) for gpu in gpus]
        return found[:jobs]
    if not hasattr(os, "sched_setaffinity"):  # macOS, where nothing says which cores a process may use
        return [Place()] * (jobs or 1)
    cores = sorted(os.sched_getaffinity(0))
    count = min(jobs or _by_memory(len(cores)), len(cores))
    return [Place(cores=tuple(cores[i::count])) for i in range(count)]


def _gpus() -> list[str]:
    """The NVIDIA GPUs that JAX would use; asking JAX itself would take their memory."""
    if os.environ.get("JAX_PLATFORMS", "cuda").split(",")[0] not in ("cuda", "gpu"):
        return []
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    return [path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def _by_memory(cores: int) -> int:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, free // _MEMORY_BYTES))


def do_nothing() -> None:
    """Prepares nothing."""


def run_all(
    do: Callable[[T, Teller], R],
    tasks: Sequence[T],
    where: Sequence[Place],
    tell: Teller,
    *,
    prepare: Callable[[], object] = do_nothing,
    lost: Callable[[T], R],
) -> list[R]:
    """`[do(task, tell) for task in tasks]`, in as many processes as there are places.

    Args:
      do: A function of a module; what it takes and gives travels between processes.
      tasks: In the order in which they begin.
      where: Of the workers; one place means this process.
      tell: Gets what all of them tell.
      prepare: Called once in every process.
      lost: The result of a task whose worker died, killed for want of memory for example.

    Raises:
      UserError: The first that a task raised, when the others have been stopped.
      Interrupted: On SIGINT or SIGTERM, when every worker has saved its state and ended.
      RuntimeError: For a fault of ours in a worker, with its traceback.
    """
    if len(where) == 1 or len(tasks) == 1:
        prepare()
        return [do(task, tell) for task in tasks]
    pool = _Pool(do, prepare, tell)
    with pool.open(where[: len(tasks)]):
        return pool.run(tasks, lost)


class _Told:
    """A `Teller` whose words travel to the parent."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def advance(self, work: float, message: str = "") -> None:
        self._connection.send(("advance", work, message))

    def skip(self, work: float) -> None:
        self._connection.send(("skip", work))

    def say(self, message: str) -> None:
        self._connection.send(("say", message))


def _serve(
    connection: Connection, place: Place, do: Callable[[Any, Teller], Any], prepare: Callable[[], object]
) -> None:
    """What a worker does: takes tasks until there are no more."""
    os.setsid()  # Ctrl-C reaches the parent alone, which passes it on once
    place.enter()
    prepare()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (task := connection.recv()) is not None:
            connection.send(_answer(do, task, _Told(connection)))


def _answer(do: Callable[[Any, Teller], Any], task: Any, tell: Teller) -> tuple[str, Any]:
    try:
        return "done", do(task, tell)
    except (UserError, Interrupted) as error:
        return "raised", error
    except BrokenPipeError:
        raise
    except Exception:
        return "raised", RuntimeError(f"in a worker:\n{traceback.format_exc()}")


class _Pool(Generic[T, R]):
    """Workers, and which task each of them is at."""

    def __init__(self, do: Callable[[T, Teller], R], prepare: Callable[[], object], tell: Teller):
        self._do, self._prepare, self._tell = do, prepare, tell
        self._workers: dict[Connection, tuple[BaseProcess, Place]] = {}
        self._signum: int | None = None

    @contextlib.contextmanager
    def open(self, where: Sequence[Place]) -> Iterator[None]:
        """Starts the workers, and ends them whatever happens; signals are passed on to them."""
        before = {signum: signal.signal(signum, self._stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            for place in where:
                self._start(place)
            yield
        finally:
            if self._signum is None:
                self._terminate()
            for connection, (process, _) in self._workers.items():
                process.join()
                connection.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _stop(self, signum: int, _: Any) -> None:
        if self._signum is not None:  # a second signal: now
            for process, _place in self._workers.values():
                process.kill()
            raise KeyboardInterrupt
        self._signum = signum
        self._terminate()

    def _terminate(self) -> None:
        """Once for each worker: it saves the state of the run that it is in, and would die of a second signal."""
        for process, _ in self._workers.values():
            process.terminate()

    def _start(self, place: Place) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, place, self._do, self._prepare))
        process.start()
        theirs.close()
        self._workers[ours] = (process, place)
        return ours

    def run(self, tasks: Sequence[T], lost: Callable[[T], R]) -> list[R]:
        """The results in the order of the tasks."""
        results: dict[int, R] = {}
        left = iter(range(len(tasks)))
        at: dict[Connection, int] = {}

        def give(connection: Connection) -> None:
            index = None if self._signum is not None else next(left, None)
            if index is not None:
                at[connection] = index
                connection.send(tasks[index])

        for connection in list(self._workers):
            give(connection)
        while at:
            for connection, message in self._messages(list(at)):
                if message is None:
                    index, (_, place) = at.pop(connection), self._workers.pop(connection)
                    if self._signum is None:
                        results[index] = lost(tasks[index])
                        give(self._start(place))
                elif message[0] == "done":
                    results[at.pop(connection)] = message[1]
                    give(connection)
                elif message[0] == "raised" and not isinstance(message[1], Interrupted):
                    raise message[1]
                elif message[0] == "raised":
                    at.pop(connection)
                else:
                    getattr(self._tell, message[0])(*message[1:])
        if self._signum is not None:
            raise Interrupted(self._signum)
        return [results[i] for i in range(len(tasks))]

    def _messages(self, connections: list[Connection]) -> Generator[tuple[Connection, Any], None, None]:
        """What has arrived; None from a worker that is gone."""
        for ready in wait(connections):
            connection: Any = ready
            try:
                message = connection.recv()
            except (EOFError, ConnectionResetError):
                message = None
            yield connection, message
