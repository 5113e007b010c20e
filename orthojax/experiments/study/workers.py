"""Tasks in several processes: each has its place, tells what it does, and saves its state when it is asked to stop.

Ctrl-C and SIGTERM reach the parent, which passes them on once: a worker that trains saves its state and ends, one that
does something else ends at once. A second signal kills. Workers end where their parent is killed.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

from absl import logging

from orthojax.errors import Interrupted, UserError
from orthojax.experiments.study.places import Place

T = TypeVar("T")
R = TypeVar("R")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOWN = 2  # workers whose last words stand in the progress


class Teller(Protocol):
    """Takes what there is to tell of long work, as `orthojax.progress.Progress` does; the caller chooses the unit."""

    def advance(self, work: float, message: str = "") -> None:
        """Work that was done."""
        ...

    def skip(self, work: float) -> None:
        """Work that an earlier call did."""
        ...

    def say(self, message: str) -> None:
        """A line of its own."""
        ...


def do_nothing() -> None:
    """Prepares nothing."""


def run_all(
    do: Callable[[T, Teller], R],
    tasks: Sequence[T],
    where: Sequence[Place],
    tell: Teller,
    *,
    prepare: Callable[[], object] = do_nothing,
    lost: Callable[[T, str, Teller], R],
) -> list[R]:
    """`[do(task, tell) for task in tasks]`, in as many processes as there are places.

    Args:
      do: A function of a module; what it takes and gives travels between processes.
      tasks: In the order in which they begin.
      where: Of the workers; with one place, or one task, this process does everything.
      tell: Gets what all of them tell.
      prepare: Called once in every process.
      lost: (task, reason, tell) -> the result of a task whose worker was killed, for want of memory for example.

    Raises:
      UserError: The first that a task raised; the others have then saved their state and ended.
      Interrupted: On SIGINT or SIGTERM, when every worker has saved its state and ended.
      KeyboardInterrupt: On a second one, which kills the workers.
      OSError: As a task raised it.
      RuntimeError: For a fault of ours in a worker, with its traceback.
    """
    if len(where) == 1 or len(tasks) == 1:
        prepare()
        return [do(task, tell) for task in tasks]
    pool = _Pool(do, prepare, tell, lost)
    with pool.open():
        return pool.run(tasks, where)


# In a worker.


class _Told:
    """A `Teller` whose words travel to the parent."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def advance(self, work: float, message: str = "") -> None:
        self._send("advance", work, message)

    def skip(self, work: float) -> None:
        self._send("skip", work)

    def say(self, message: str) -> None:
        self._send("say", message)

    def _send(self, *words: Any) -> None:
        try:
            self._connection.send(words)
        except OSError:
            sys.exit(1)  # the parent is gone


def _serve(
    connection: Connection,
    place: Place,
    do: Callable[[Any, Teller], Any],
    prepare: Callable[[], object],
    verbosity: int,
) -> None:
    """What a worker does: takes tasks until there are no more; libraries log as much as in the parent.

    SIGTERM stays blocked: schedulers send it to every process, and the parent alone says when to stop.
    """
    os.setsid()  # Ctrl-C reaches the parent alone
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `train` saves its state; where nothing is trained, this ends it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logging.set_verbosity(verbosity)
    place.enter()
    prepare()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while (task := connection.recv()) is not None:
            connection.send(_answer(do, task, _Told(connection)))


def _answer(do: Callable[[Any, Teller], Any], task: Any, tell: Teller) -> tuple[str, Any]:
    try:
        return "done", do(task, tell)
    except Interrupted as stop:
        return "stopped", stop.signum
    except UserError as error:
        return "raised", UserError(str(error))  # its subclasses may want other arguments
    except OSError as error:
        error.add_note(f"in a worker:\n{traceback.format_exc()}")
        return "raised", error
    except Exception:
        return "raised", RuntimeError(f"in a worker:\n{traceback.format_exc()}")


# In the parent.


class _Pool(Generic[T, R]):
    """Workers, and which task each of them is at."""

    def __init__(
        self,
        do: Callable[[T, Teller], R],
        prepare: Callable[[], object],
        tell: Teller,
        lost: Callable[[T, str, Teller], R],
    ):
        self._do, self._prepare, self._tell, self._lost = do, prepare, tell, lost
        self._workers: dict[Connection, tuple[BaseProcess, Place]] = {}
        self._at: dict[Connection, int] = {}  # the task of each that works
        self._words: dict[Connection, str] = {}  # its last
        self._signum: int | None = None
        self._asked = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Signals are passed on to the workers, and all of them have ended when this ends."""
        before = {signum: signal.signal(signum, self._on_signal) for signum in _SIGNALS}
        try:
            yield
        except BaseException:
            self._ask_to_stop()
            raise
        finally:
            try:
                self._end()
            finally:
                for signum, handler in before.items():
                    signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: Any) -> None:
        if self._signum is not None:  # a second signal: now
            for process, _place in self._workers.values():
                process.kill()
            raise KeyboardInterrupt
        self._signum = signum
        self._ask_to_stop()

    def _ask_to_stop(self) -> None:
        """Once: a worker saves the state of the run that it is in, and would die of a second signal."""
        if not self._asked:
            self._asked = True
            for process, _ in self._workers.values():
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGINT)

    def _end(self) -> None:
        for connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
        for connection, (process, _) in self._workers.items():
            with contextlib.suppress(EOFError, OSError):
                while True:
                    connection.recv()  # what is on its way, so that a worker that saves does not wait for a reader
            process.join()
            connection.close()

    def _start(self, place: Place) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        told = (theirs, place, self._do, self._prepare, logging.get_verbosity())
        process = context.Process(target=_serve, args=told)
        resource_tracker.ensure_running()  # else `start` starts it, and unblocks signals when it has
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the worker begins with them blocked
        try:
            process.start()
            self._workers[ours] = (process, place)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return ours

    def run(self, tasks: Sequence[T], where: Sequence[Place]) -> list[R]:
        """The results in the order of the tasks."""
        results: dict[int, R] = {}
        left = list(reversed(range(len(tasks))))

        def give(connection: Connection) -> None:
            if left and not self._asked:
                self._at[connection] = left.pop()
                with contextlib.suppress(OSError):  # it was killed; reading from it will tell
                    connection.send(tasks[self._at[connection]])
            else:
                with contextlib.suppress(OSError):
                    connection.send(None)  # its memory is wanted

        for place in where[: len(tasks)]:
            if not self._asked:
                give(self._start(place))
        while self._at:
            for connection in [ready for ready in wait(list(self._at)) if isinstance(ready, Connection)]:
                kind, *rest = self._read(connection)
                if kind in ("advance", "skip", "say"):
                    self._pass_on(connection, kind, *rest)
                    continue
                index = self._at.pop(connection)
                self._words.pop(connection, None)
                if kind == "done":
                    results[index] = rest[0]
                    give(connection)
                elif kind == "raised":
                    raise rest[0]
                elif kind == "stopped" and self._signum is None:  # by a signal from elsewhere: so do all
                    self._signum = rest[0]
                    self._ask_to_stop()
                elif kind == "gone" and not self._asked:
                    results[index] = self._lost(tasks[index], self._how_it_ended(connection), self._tell)
                    if left:
                        give(self._start(self._workers[connection][1]))
        if self._signum is not None:
            raise Interrupted(self._signum)
        return [results[i] for i in range(len(tasks))]

    def _read(self, connection: Connection) -> tuple[Any, ...]:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError):
            return ("gone",)

    def _how_it_ended(self, connection: Connection) -> str:
        """The reason for a row.

        Raises:
          RuntimeError: Where it was not killed but failed outside of its tasks.
        """
        process, _ = self._workers[connection]
        process.join()
        code = process.exitcode or 0
        if code >= 0:
            raise RuntimeError(f"a worker ended with exit code {code}; what it said is above")
        want = ", as for want of memory" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{want}"

    def _pass_on(self, connection: Connection, kind: str, *words: Any) -> None:
        """Progress shows what the first workers are at, always in the same order, so that it can be read."""
        if kind == "advance" and words[1]:
            self._words[connection] = words[1]
            shown = [self._words[worker] for worker in self._workers if worker in self._words]
            more = f"; {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            words = (words[0], "; ".join(shown[:_SHOWN]) + more)
        getattr(self._tell, kind)(*words)
