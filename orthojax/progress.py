"""Progress of long work: a bar on a terminal, plain lines elsewhere, and an estimate of the time left."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from orthojax.errors import printable


class Progress:
    """Shows how much of a known amount of work is done, in the caller's unit of work."""

    def __init__(self, total: float, *, stream: TextIO | None = None, every_seconds: float = 10.0):
        """Starts the clock; `every_seconds` paces plain lines on `stream` (standard error), a terminal gets a bar."""
        self._total, self._every = max(total, 1e-9), every_seconds
        self._stream = sys.stderr if stream is None else stream
        self.done = self._skipped = 0.0
        self._start = self._began = time.monotonic()
        self._last_line = -float("inf")
        self._bar = None
        if self._stream.isatty():
            columns, lines = shutil.get_terminal_size()  # 80 x 24 if the terminal does not say; tqdm would show nothing
            width = 20 if columns >= 120 else 4  # the message and the time left matter more
            self._room = columns - width - len("100%|| ")
            form = f"{{percentage:3.0f}}%|{{bar:{width}}}| {{desc}}"
            self._bar = tqdm(total=self._total, file=self._stream, bar_format=form, ncols=columns, nrows=lines)

    def skip(self, work: float) -> None:
        """Counts work that an earlier call did, which says nothing about the speed of this one."""
        self._skipped += work
        self.advance(work)

    def restart(self) -> None:
        """Takes the speed from here on: what came before, as compiling does, says nothing about the rest."""
        self._skipped, self._began = self.done, time.monotonic()

    def advance(self, work: float, message: str = "") -> None:
        """Adds finished work and shows it with a message; without one it is only counted."""
        self.done = min(self.done + work, self._total)
        if not message:
            return
        message = printable(message)
        now, fresh = time.monotonic(), self.done - self._skipped
        passed, working = now - self._start, now - self._began
        left = _clock(working * (self._total - self.done) / fresh) if fresh > 0.01 * self._total else ""
        if self._bar is not None:
            self._bar.n = self.done
            tail = f" | {_clock(passed)}{left and f', {left} left'}"
            room = max(self._room - len(tail), 3)
            self._bar.set_description_str((message if len(message) <= room else message[: room - 3] + "...") + tail)
        elif passed - self._last_line >= self._every:
            self._last_line, percent = passed, 100 * self.done / self._total
            left = left and f", about {left} left"
            print(f"{percent:3.0f}% {message} | {_clock(passed)} elapsed{left}", file=self._stream, flush=True)

    def finish(self, message: str) -> None:
        """Shows that all is done, however short it took, and ends the bar."""
        self._every = 0.0
        self.advance(self._total - self.done, message)
        self.close()

    def say(self, message: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(printable(message), file=self._stream)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokenizing_progress(stream: TextIO | None = None) -> Callable[..., None]:
    """A callback that shows one step of tokenisation after the other: (what, bytes done, bytes in all, tokens=0).

    What is done at the first call for a step was done by an earlier process, and says nothing about the speed.
    """
    shown: dict[str, tuple[Progress, int, float]] = {}

    def report(what: str, done: int, total: int, tokens: int = 0) -> None:
        if what not in shown:
            for finished, *_ in shown.values():
                finished.close()
            shown[what] = Progress(max(total, 1), stream=stream, every_seconds=2.0), tokens, time.monotonic()
            shown[what][0].skip(done)
        progress, before, begin = shown[what]
        size = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB"
        speed = (tokens - before) / 1e6 / max(time.monotonic() - begin, 1e-9)
        message = what if what.startswith("training ") else f"tokenising {what}"
        message += f": {size}" + (f", {tokens / 1e6:.1f}M tokens, {speed:.2f}M tokens/s" if tokens else "")
        progress.advance(done - progress.done, message) if done < total else progress.finish(message)

    return report


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
