"""Stopping a run from outside: the first signal saves the state, the second one ends it.

One process: SIGTERM or SIGINT, noted and obeyed after the step that runs.

Many processes: they must all save at the same step, and only some may be told. JAX's coordination service takes
SIGTERM, which is what schedulers send as the notice of a preemption, on any process, and lets all of them agree on a
step that none has passed; it listens once `jax.distributed.initialize` has run, and about once a second. So SIGTERM is
left to it, and SIGINT is passed on to it as SIGTERM. A second SIGINT interrupts its own process as usual.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """What was asked for."""

    def __init__(self, *, agreed: bool):
        """Nothing yet.

        Args:
          agreed: Many processes run, and must stop at the same step.
        """
        self.signum: int | None = None  # of the first signal to this process
        self._agreed, self._asked = agreed, 0

    def at(self, step: int) -> int | None:
        """The signal that stops the run after this step, or one before it; asked by every process after every step.

        On one process this costs nothing; on many it reads a counter of this process.
        """
        if not self._agreed or self.signum is not None:
            return self.signum
        # The processes agree on one number that all of them will reach, which steps are not: a run may go back to a
        # checkpoint. All ask equally often, so that this is the same number in each.
        self._asked = max(self._asked + 1, step)
        if multihost_utils.reached_preemption_sync_point(self._asked):
            self.signum = signal.SIGTERM
        return self.signum


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a second one has its usual effect."""
    request = StopRequest(agreed=jax.process_count() > 1)
    previous: dict[int, Any] = {}

    def restore():
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def note(signum, _):
        restore()
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # to the coordination service
        else:
            request.signum = signum

    try:
        for signum in (signal.SIGINT,) if jax.process_count() > 1 else (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    except ValueError:  # not in the main thread: the caller's own handlers apply
        previous.clear()
    try:
        yield request
    finally:
        restore()
