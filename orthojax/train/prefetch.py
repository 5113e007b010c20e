"""Reading ahead: the next batches are prepared while the devices work on this one."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetched(prepare: Callable[[int], T], start: int, stop: int, *, depth: int = 2) -> Generator[T, None, None]:
    """prepare(start), ..., prepare(stop - 1), in order, each made in a background thread before it is wanted.

    Close it (`contextlib.closing`) where it may not be used up: what is being prepared is then awaited, what waits is
    dropped.

    Args:
      prepare: A pure function of the step.
      start: The first step.
      stop: One past the last.
      depth: How many are prepared ahead of the one in use.

    Raises:
      Exception: What `prepare` raised, when the step that it was for is reached.

    >>> list(prefetched(lambda step: step**2, 2, 5))
    [4, 9, 16]
    """
    with ThreadPoolExecutor(1, "prefetch") as pool:
        ahead = deque(pool.submit(prepare, step) for step in range(start, min(start + depth, stop)))
        try:
            for step in range(start, stop):
                ready = ahead.popleft().result()
                if step + depth < stop:
                    ahead.append(pool.submit(prepare, step + depth))
                yield ready
        finally:
            for waiting in ahead:
                waiting.cancel()
