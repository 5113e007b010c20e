"""Errors that the command lines report without a traceback."""

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator

# What a process ends with when another one of its run is gone, or never came.
PEER_LOST = """error: another process of this run has ended or cannot be reached, so this one ends too
  its own message says why; all need the same --coordinator_address and --num_processes
  start all of them again to resume from the last checkpoint
"""
_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space: the quota is used up",
    errno.EFBIG: "raise the limit on the size of files: ulimit -f",
    errno.EACCES: "choose a place that you may write to, or change its permissions",
    errno.EPERM: "choose a place that you may write to, or change its permissions",
    errno.EROFS: "choose a place on a file system that can be written to",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENFILE: "close other programs: the machine has too many open files",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "fix the symbolic link, which points back to itself",
    errno.EISDIR: "move the folder out of the way: a file must go there",
    errno.ENOTDIR: "move the file out of the way: a folder must go there",
    errno.EIO: "check the disk or the network file system",
    errno.ESTALE: "check the network file system, and run the same command again",
}
# Module -> the extra that installs it, of what is imported where it is used.
_EXTRAS = {
    **dict.fromkeys(("array_record", "google", "google_crc32c", "grain", "tensorflow_datasets", "tokenizers"), "train"),
    **dict.fromkeys(("etils", "flax", "orbax", "tqdm"), "train"),
    **dict.fromkeys(("jinja2", "matplotlib", "scipy"), "reports"),
    **dict.fromkeys(("gguf", "safetensors"), "pretrained"),
}
_LONGEST_NAME, _LONGEST_PATH = 160, 600  # in a message


class UserError(ValueError):
    """Invalid input: the command lines print it without a traceback and exit with code 2."""

    def __init__(self, problem: str, *, allowed: str = "", hint: str = ""):
        """Joins the parts that are given, one line each.

        Args:
          problem: What was wrong, with the offending value; of very long names the middle is left out.
          allowed: What is allowed instead.
          hint: The nearest right name, or what to do next.
        """
        text = "\n".join(line for line in (problem, allowed and f"allowed: {allowed}", hint) if line)
        for pattern, longest in ((r"[^\s/]+", _LONGEST_NAME), (r"\S+", _LONGEST_PATH)):
            text = re.sub(pattern, lambda word, longest=longest: _shortened(word[0], longest), text)
        super().__init__(printable(text))


class SharedError(UserError):
    """What every process of a run raises at the same step, as its divergence: nobody has to wait for another one."""


def message_of(error: BaseException) -> str:
    """What a command prints of an error before it ends: at most three lines."""
    first, *rest = [line for line in str(error).splitlines() if line.strip()][:3]
    return "\n".join([f"error: {first}", *(f"  {line}" for line in rest)]) + "\n"


def as_user_error(error: OSError) -> UserError | None:
    """An error of the operating system that a user can do something about; None for any other."""
    hint = advice(error)
    return UserError(f"{error.strerror}: {error.filename or 'while reading or writing'}", hint=hint) if hint else None


def printable(text: str) -> str:
    r"""The text with control characters but line breaks as escapes: a name must not steer a terminal.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _shortened(word: str, longest: int) -> str:
    return word if len(word) <= longest else f"{word[: longest // 2]}...{word[-longest // 3 :]}"


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


def advice(error: BaseException) -> str:
    """What a user can do about an error of the operating system, '' where that is unknown or nothing.

    Also where a library wrapped it: the causes are searched, and the messages for what the system calls its errors.

    >>> advice(OSError(errno.ENOSPC, "No space left on device"))
    'free some space'
    """
    seen: BaseException | None = error
    while seen is not None:
        code = seen.errno if isinstance(seen, OSError) else None
        code = code or next((code for code in _ADVICE if os.strerror(code) in str(seen)), None)
        if code in _ADVICE:
            return _ADVICE[code]
        seen = seen.__cause__ or seen.__context__
    return ""


def how_to_install(error: ModuleNotFoundError) -> str:
    """The command that installs a missing module, '' where no extra has it.

    >>> how_to_install(ModuleNotFoundError(name="flax.linen"))
    "pip install 'orthojax[train]'"
    """
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    return f"pip install 'orthojax[{extra}]'" if extra else ""


@contextlib.contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Turns an ImportError into a UserError: `what` needs a package that the extra `extra` installs."""
    try:
        yield
    except ImportError:
        hint = f"pip install 'orthojax[{extra}]'"
        raise UserError(f"{what} needs a package that is not installed", hint=hint) from None


def nearest(name: str, names: Iterable[str]) -> str:
    """The hint 'did you mean ...?' for a mistyped name, or '' where nothing is near."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {found[0]!r}?" if found else ""
