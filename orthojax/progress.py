"""Progress of long work: a bar on a terminal, plain lines elsewhere, and an estimate of the time left."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 3, 0)] + "..."


class Progress:
    """Shows how much of a known amount of work is done; the unit of work is the caller's."""

    def __init__(self, total: float, *, stream: TextIO | None = None, every_seconds: float = 10.0):
        """Starts the clock.

        Args:
          total: All the work there is, done or not.
          stream: Where to show it; standard error where None.
          every_seconds: Between plain lines; a terminal gets a bar instead.
        """
        self._total, self._every = max(total, 1e-9), every_seconds
        self._stream = sys.stderr if stream is None else stream
        self.done = self._skipped = 0.0  # work, in the caller's unit
        self._start = time.monotonic()
        self._last_line = -float("inf")
        self._bar = None
        if self._stream.isatty():
            size = shutil.get_terminal_size()  # 80 x 24 where the terminal does not say; tqdm would show nothing
            width = 20 if size.columns >= 120 else 4  # the message and the time left matter more
            form = f"{{percentage:3.0f}}%|{{bar:{width}}}| {{desc}}"
            self._room = size.columns - width - len("100%|| ")
            self._bar = tqdm(
                total=self._total, file=self._stream, bar_format=form, ncols=size.columns, nrows=size.lines
            )

    def skip(self, work: float) -> None:
        """Counts work that an earlier call did: it says nothing about the speed of this one."""
        self._skipped += work
        self.advance(work)

    def advance(self, work: float, message: str = "") -> None:
        """Adds finished work and shows it."""
        self.done = min(self.done + work, self._total)
        if not message:
            return
        passed, left = _clock(time.monotonic() - self._start), self._left()
        status = f"{message} | {passed} elapsed{left and f', about {left} left'}"
        if self._bar is not None:
            self._bar.n = self.done
            tail = f" | {passed}{left and f', {left} left'}"
            self._bar.set_description_str(_cut(message, self._room - len(tail)) + tail)
        elif time.monotonic() - self._last_line >= self._every:
            self._last_line = time.monotonic()
            print(f"{100 * self.done / self._total:3.0f}% {status}", file=self._stream, flush=True)

    def finish(self, message: str) -> None:
        """Shows that all is done, however short it took, and ends the bar."""
        self._every = 0.0
        self.advance(self._total - self.done, message)
        self.close()

    def _left(self) -> str:
        fresh = self.done - self._skipped
        if fresh <= 0.01 * self._total:
            return ""
        seconds = (time.monotonic() - self._start) * (self._total - self.done) / fresh
        return _clock(seconds)

    def say(self, message: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            tqdm.write(message, file=self._stream)
        else:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokenizing_progress(stream: TextIO | None = None) -> Callable[[str, int, int], None]:
    """A callback that shows how far tokenising is: (what, bytes done, bytes in all), one thing after the other."""
    shown: dict[str, Progress] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in shown:
            for finished in shown.values():
                finished.close()
            shown[what] = Progress(max(total, 1), stream=stream, every_seconds=2.0)
        progress, label = shown[what], what if what.startswith("training ") else f"tokenising {what}"
        progress.advance(done - progress.done, f"{label}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")
        if done >= total:
            progress.close()

    return report


def preparation_progress(what: str, stream: TextIO | None = None) -> Callable[[int, int, int], None]:
    """A callback that shows how far a token file is: (bytes of the source done, in all, tokens so far).

    What was there at the first call was done before this process, and says nothing about its speed.
    """
    shown: list[Progress] = []
    begin = [0, time.monotonic()]

    def report(done: int, total: int, tokens: int) -> None:
        if not shown:
            shown.append(Progress(max(total, 1), stream=stream, every_seconds=2.0))
            shown[0].skip(done)
            begin[:] = tokens, time.monotonic()
        seconds = time.monotonic() - begin[1]
        speed = f", {(tokens - begin[0]) / seconds / 1e6:.2f}M tokens/s" if seconds else ""
        size = (
            f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total < 1e10 else f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
        )
        message = f"tokenising {what}: {size}, {tokens / 1e6:.1f}M tokens{speed}"
        if done >= total:
            shown[0].finish(message)
        else:
            shown[0].advance(done - shown[0].done, message)

    return report
