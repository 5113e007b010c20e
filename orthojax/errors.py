"""Errors that the command lines report without a traceback."""

import difflib
from collections.abc import Iterable

# What a process ends with when another one of its run is gone, or never came.
PEER_LOST = """error: another process of this run has ended or cannot be reached, so this one ends too
  its own message says why; all need the same --coordinator_address and --num_processes
  started again, all of them resume from the last checkpoint
"""


class UserError(ValueError):
    """Invalid input: the command lines print it without a traceback and exit with code 2."""

    def __init__(self, problem: str, *, allowed: str = "", hint: str = ""):
        """Joins the parts that are given, one line each.

        Args:
          problem: What was wrong, with the offending value.
          allowed: What is allowed instead.
          hint: The nearest right name, or what to do next.
        """
        super().__init__("\n".join(line for line in (problem, allowed and f"allowed: {allowed}", hint) if line))


class Interrupted(Exception):
    """The run was asked to stop and has saved its state.

    Attributes:
      signum: The signal that asked.
    """

    def __init__(self, signum: int, step: int | None = None):
        super().__init__(signum, step)  # so that it travels between processes
        self.signum = signum
        self._step = step

    def __str__(self) -> str:
        at = "" if self._step is None else f" at step {self._step}"
        return f"stopped{at}, state saved; run the same command to resume"


def nearest(name: str, names: Iterable[str]) -> str:
    """The hint 'did you mean ...?' for a mistyped name, or '' where nothing is near."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {found[0]!r}?" if found else ""
