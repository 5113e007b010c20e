"""Errors that the command lines report without a traceback."""

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator

# Errors of the operating system that a user can act on. A missing file is not among them: it may be our fault.
_OF_THE_SYSTEM = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE),
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ESTALE),
)
# Module -> the extra that installs it.
_EXTRAS = {
    **dict.fromkeys(("array_record", "google", "grain", "tensorflow_datasets", "tokenizers"), "train"),
    **dict.fromkeys(("etils", "flax", "orbax", "tqdm"), "train"),
    **dict.fromkeys(("jinja2", "matplotlib", "scipy"), "reports"),
    **dict.fromkeys(("gguf", "safetensors"), "pretrained"),
}


class UserError(ValueError):
    """Invalid input: the command lines print it without a traceback and exit with code 2."""

    def __init__(self, problem: str, *, allowed: str = "", hint: str = ""):
        """Joins the problem, what is allowed instead, and the nearest valid name or what to do next, on a line each."""
        super().__init__(printable("\n".join(filter(None, (problem, allowed and f"allowed: {allowed}", hint)))))


class NonFiniteError(UserError):
    """Weights, activations or a loss are NaN or infinite, so that nothing that is computed from them says anything."""


class Interrupted(Exception):
    """A signal asked the run to stop, and its state is saved; the step is given if it is known."""

    def __init__(self, signum: int, step: int | None = None):
        super().__init__(signum, step)  # so that it can be passed between processes
        self.signum, self.step = signum, step

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"stopped{at}, state saved; run the same command to resume"


def as_user_error(error: OSError) -> UserError | None:
    """Returns the user error for an error of the operating system, such as a full disk; None for our own."""
    if error.errno not in _OF_THE_SYSTEM:
        return None
    return UserError(f"{error.strerror}: {error.filename or 'while reading or writing'}")


def printable(text: str) -> str:
    r"""Escapes control characters other than line breaks: a name must not steer a terminal.

    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def how_to_install(error: ModuleNotFoundError) -> str:
    """Returns the command that installs a missing module, or '' if no extra has it.

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
    """Returns the hint 'did you mean ...?' for a mistyped name, or '' if none is close.

    >>> nearest("sofmax1", ["softmax1", "relu"])
    "did you mean 'softmax1'?"
    """
    found = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {found[0]!r}?" if found else ""
