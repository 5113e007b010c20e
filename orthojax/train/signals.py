"""Stopping a run from outside: the first signal saves the state, the second one ends it."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """What was asked for."""

    signum: int | None = None  # of the first signal


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a second one has its usual effect."""
    request = StopRequest()
    previous: dict[int, Any] = {}

    def restore():
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def note(signum, _):
        request.signum = signum
        restore()

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            previous[signum] = signal.signal(signum, note)
    except ValueError:  # not in the main thread: the caller's own handlers apply
        previous.clear()
    try:
        yield request
    finally:
        restore()
