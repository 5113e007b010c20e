"""Progress of long work, shown by tqdm."""

from collections.abc import Callable

from tqdm import tqdm

from orthojax.errors import printable


class Progress:
    """A tqdm bar for work of any unit, with a message and an estimate of the time left."""

    def __init__(self, total: float, *, every_seconds: float = 10.0):
        """Shows nothing yet; on a terminal the bar moves at once, elsewhere every so many seconds."""
        self._bar = tqdm(total=max(total, 1e-9), bar_format="{l_bar}{bar:20}| {elapsed}, {remaining} left{postfix}")
        if not self._bar.fp.isatty():
            self._bar.mininterval = every_seconds
        self.done = 0.0

    def skip(self, work: float) -> None:
        """Counts work that an earlier call did, which says nothing about the speed of this one."""
        self._bar.initial += work
        self.advance(work)

    def advance(self, work: float, message: str = "") -> None:
        """Adds finished work and shows it with a message."""
        if message:
            self._bar.set_postfix_str(printable(message), refresh=False)
        self.done += work
        self._bar.update(work)

    def finish(self, message: str) -> None:
        """Shows that all is done, and ends the bar."""
        self.advance(self._bar.total - self.done, message)
        self.close()

    def say(self, message: str) -> None:
        """Prints a line above the bar."""
        self._bar.write(printable(message), file=self._bar.fp)

    def close(self) -> None:
        """Ends the bar."""
        self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokenizing_progress() -> Callable[..., None]:
    """Returns a callback that shows each step of tokenisation as a bar: (what, bytes done, bytes in all, tokens=0)."""
    bars: dict[str, tqdm] = {}

    def report(what: str, done: int, total: int, tokens: int = 0) -> None:
        if what not in bars:
            name = what if what.startswith("training ") else f"tokenising {what}"
            bars[what] = tqdm(desc=printable(name), total=total, initial=done, unit="B", unit_scale=True)
        bar = bars[what]
        bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens" if tokens else "", refresh=False)
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return report
