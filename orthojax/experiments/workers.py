"""Tasks in several processes: one worker at each place, which takes one task after the other.

The first Ctrl-C or SIGTERM is passed on to the workers, which save the state of the run that they train; the second
kills them. Workers end when their parent does.
"""

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from absl import logging

from orthojax.errors import Interrupted, UserError
from orthojax.experiments.places import Place
from orthojax.machine import keep_freed_memory

T = TypeVar("T")
R = TypeVar("R")
_SHOWN = 2  # workers whose last message is shown


def run_all(
    do: Callable[[T, Any], R],
    tasks: Sequence[T],
    where: Sequence[Place],
    reporter: Any,
    *,
    setup: Callable[[], object],
    lost: Callable[[T, str], R],
) -> list[R]:
    """`[do(task, reporter) for task in tasks]`, in as many processes as there are places.

    Args:
      do: A module-level function; what it takes and returns travels between processes.
      tasks: In the order in which they start.
      where: Of the workers; with one place, or one task, this process does everything.
      reporter: A `Reporter`; gets the progress of all of them.
      setup: Called once in every process.
      lost: (task, reason) -> the result of a task whose worker was killed.

    Raises:
      UserError: The first that a task raised; the others have then saved their state and ended.
      Interrupted: On SIGINT or SIGTERM, when every worker has saved its state and ended.
      KeyboardInterrupt: On a second one, which kills the workers.
      OSError: As a task raised it.
      RuntimeError: For a bug in a worker, with its traceback.
    """
    if len(where) == 1 or len(tasks) == 1:
        setup()
        return [do(task, reporter) for task in tasks]
    pool = _Pool(do, setup, reporter, lost)
    with pool.open():
        return pool.run(tasks, where)


class _Worker:
    """A worker process, and the task that it is working on."""

    def __init__(self, place: Place, setup: Callable[[], object]):
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "orthojax.experiments.workers", str(theirs.fileno())]
        environment = {**os.environ, **dict(place.environment), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # SIGINT is blocked until `serve` says what it does: a Python that is starting would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # A session of its own: Ctrl-C reaches the parent alone.
            self.process = subprocess.Popen(
                command, env=environment, start_new_session=True, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        if place.cores:
            os.sched_setaffinity(self.process.pid, place.cores)  # before it imports JAX
        self.place, self.task, self.message = place, -1, ""
        self.send((setup, logging.get_verbosity()))

    def send(self, message: Any) -> None:
        """Does nothing where the worker is gone: reading from it shows that."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def read(self) -> tuple[str, Any]:
        """The next event; "gone" where there is none left."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return "gone", ()

    def close(self) -> None:
        """Waits for its end; events that are on their way are dropped."""
        self.send(None)
        while self.read()[0] != "gone":
            pass
        self.process.wait()
        self.connection.close()


class _Pool:
    """Workers and their signals."""

    def __init__(self, do: Any, setup: Any, reporter: Any, lost: Any):
        self._do, self._setup, self._reporter, self._lost = do, setup, reporter, lost
        self._workers: list[_Worker] = []
        self._signum: int | None = None
        self._stopping = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Passes signals on to the workers; all of them have ended when this ends."""
        before = {signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except BaseException:
            self._stop()
            raise
        finally:
            for worker in self._workers:
                worker.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, _: Any) -> None:
        if self._signum is not None:
            for worker in self._workers:
                worker.process.kill()
            raise KeyboardInterrupt
        self._signum = signum
        self._stop()

    def _stop(self) -> None:
        """Once: a worker saves the state of its run at the first signal, and would die of a second."""
        if not self._stopping:
            self._stopping = True
            for worker in self._workers:
                if worker.process.poll() is None:
                    worker.process.send_signal(signal.SIGINT)

    def run(self, tasks: Sequence[Any], where: Sequence[Place]) -> list[Any]:
        """The results in the order of the tasks."""
        results: dict[int, Any] = {}
        waiting = list(reversed(range(len(tasks))))
        busy: dict[Connection, _Worker] = {}

        def start(place: Place) -> None:
            if waiting and not self._stopping:
                worker = _Worker(place, self._setup)
                self._workers.append(worker)
                busy[worker.connection] = worker
                assign(worker)

        def assign(worker: _Worker) -> None:
            if waiting and not self._stopping:
                worker.task = waiting.pop()
                worker.send((self._do, tasks[worker.task]))
            else:
                release(worker)

        def release(worker: _Worker) -> None:
            del busy[worker.connection]
            worker.message = ""
            worker.send(None)  # its memory is wanted

        for place in where[: len(tasks)]:
            start(place)
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # pyright: ignore[reportArgumentType]
                kind, content = worker.read()
                if kind == "done":
                    results[worker.task] = content
                    assign(worker)
                elif kind == "raised":
                    raise content
                elif kind == "stopped":
                    self._signum = self._signum or content  # a signal from elsewhere stops all, too
                    self._stop()
                    release(worker)
                elif kind == "gone":
                    release(worker)
                    if not self._stopping:
                        results[worker.task] = self._lost(tasks[worker.task], _how_it_ended(worker))
                        start(worker.place)
                else:
                    self._report(worker, kind, content)
        if self._signum is not None:
            raise Interrupted(self._signum)
        return [results[i] for i in range(len(tasks))]

    def _report(self, worker: _Worker, kind: str, content: tuple[Any, ...]) -> None:
        """Progress shows the last messages of the first workers, always in the same order."""
        if kind == "advance" and content[1]:
            worker.message = content[1]
            shown = [worker.message for worker in self._workers if worker.message]
            more = f"; {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            content = (content[0], "; ".join(shown[:_SHOWN]) + more)
        getattr(self._reporter, kind)(*content)


def _how_it_ended(worker: _Worker) -> str:
    """The reason for a row.

    Raises:
      RuntimeError: Where it was not killed but failed outside of its tasks.
    """
    code = worker.process.wait()
    if code >= 0:
        raise RuntimeError(f"a worker ended with exit code {code}; its output is above")
    memory = ", possibly out of memory" if -code == signal.SIGKILL else ""
    return f"worker killed ({signal.Signals(-code).name}){memory}"


# In a worker.


class _Events:
    """A `Reporter` whose messages travel to the parent."""

    def __init__(self, connection: Connection):
        self._connection = connection

    def send(self, kind: str, content: Any) -> None:
        try:
            self._connection.send((kind, content))
        except OSError:
            os._exit(1)  # the parent is gone

    def advance(self, work: float, message: str = "") -> None:
        self.send("advance", (work, message))

    def skip(self, work: float) -> None:
        self.send("skip", (work,))

    def say(self, message: str) -> None:
        self.send("say", (message,))


def _outcome(do: Callable[[Any, Any], Any], task: Any, events: _Events) -> tuple[str, Any]:
    try:
        return "done", do(task, events)
    except Interrupted as stop:
        return "stopped", stop.signum
    except UserError as error:
        return "raised", UserError(str(error))  # its subclasses may take other arguments
    except OSError as error:
        return "raised", error
    except Exception:
        return "raised", RuntimeError(f"in a worker:\n{traceback.format_exc()}")


def serve(connection: Connection) -> None:
    """Takes tasks until there are no more; libraries log as much as in the parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to every process; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # `train` saves its state; elsewhere this ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        setup, verbosity = connection.recv()
        logging.set_verbosity(verbosity)
        setup()
        while (message := connection.recv()) is not None:
            (do, task), events = message, _Events(connection)
            events.send(*_outcome(do, task, events))


if __name__ == "__main__":
    keep_freed_memory()
    serve(Connection(int(sys.argv[1])))
