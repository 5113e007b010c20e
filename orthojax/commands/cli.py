"""What the command lines share: flags, `--config.x=` overrides, and errors that a user can act on."""

import atexit
import ctypes
import io
import os
import platform
import re
import runpy
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from orthojax.config import Config, describe_fields, describe_type, field_paths, flatten, from_json, nearest_field
from orthojax.config import replace as replace_fields
from orthojax.errors import Interrupted, UserError, as_user_error, how_to_install, nearest, printable
from orthojax.files import is_remote, require_local
from orthojax.stores import as_path, fetched

_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in a wheel, in a clone
_CONFIG_FILE = "Python file with get_config() -> orthojax.config.Config, or the config.json of a run"

# mallopt's parameters, as glibc's <malloc.h> numbers them.
_KEEP_FREED_MEMORY = {
    -4: 0,  # M_MMAP_MAX: no block has a mapping of its own, which would go back to the system when freed
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: the end of the heap is never given back
    -2: 500_000_000,  # M_TOP_PAD: the heap grows by 500 MB at a time
    -8: 1,  # M_ARENA_MAX: one heap, since what threads allocate in heaps of their own is mapped
}

_MAY_BE_EMPTY = ("compile_cache", "prompt", "system")  # others are empty if a shell variable is not set
_MAY_BE_ADDRESSES = ("prompt", "system", "attention_of", "input", "text")  # texts, or read through fsspec
_MAY_BE_ADDRESSES += ("config", "checkpoint", "model")  # which `as_path` opens, or refuses
_WORK_ON_STORES = ("orthojax.commands.train", "orthojax.commands.evaluate")

_overrides: dict[str, str] = {}
_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Terminal(io.TextIOWrapper):
    """Escapes control characters: what a model or a file says must not steer a terminal."""

    def write(self, text: str) -> int:
        """Writes text."""
        return super().write(text.translate(_CONTROLS))


def define_config() -> None:
    """Defines `--config=FILE`; `load_config` reads it and the `--config.x=` overrides."""
    flags.DEFINE_string("config", None, f"{_CONFIG_FILE}; the defaults without it. A Python file is executed.")


def define_cache_dir() -> None:
    """Defines `--cache_dir`."""
    flags.DEFINE_string("cache_dir", "runs/data", "Folder of tokenised corpora, shared by runs.")


def define_compile_cache() -> None:
    """Defines `--compile_cache`, for `orthojax.train.keep_compiled_programs`."""
    what = "Folder of compiled programs (native code), shared by runs; '' for none. Default ~/.cache/orthojax/xla."
    flags.DEFINE_string("compile_cache", None, what)


def named_paths(given: Sequence[str], flag: str = "--model=") -> dict[str, str]:
    """Returns name -> path, in order; a path without a name is named by its last part; raises UserError for bad names.

    >>> named_paths(["smollm2,tuned=runs/tuned", "runs/base/"])
    {'smollm2': 'smollm2', 'tuned': 'runs/tuned', 'base': 'runs/base/'}
    """
    found: dict[str, str] = {}
    for part in (part for text in given for part in text.split(",")):
        name, equals, path = part.partition("=")
        if not equals:
            last = part.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
            name, path = re.sub(r"[^\w.-]", "_", last).lstrip("._-") or "model", part
        if not path or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            problem = f"{flag}{part} has no path" if not path else f"{flag}{part} has the name {name!r}"
            raise UserError(problem, allowed=f"{flag}PATH, or {flag}NAME=PATH with a name of letters, digits, . _ -")
        if name in found:
            raise UserError(f"two are called {name!r}", allowed=f"{flag}NAME=PATH for one of them")
        found[name] = path
    return found


def tokenizing_progress() -> Callable[..., None]:
    """Returns a callback that shows each step of tokenisation as a bar: (what, bytes done, total bytes, tokens=0)."""
    from tqdm import tqdm

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


def load_config() -> Config:
    """Returns the config of `--config`, with every `--config.x=` override applied at once."""
    path = flags.FLAGS["config"].value
    return replace_fields(_config_from_file(_found(as_path(path, "config file"))) if path else Config(), _overrides)


def _found(path: Path) -> Path:
    """Returns the file of a config; one from the package is found in any folder, as configs/NAME.py or NAME."""
    require_local(path, "config file")
    if is_remote(path):
        if path.suffix != ".json":
            raise UserError(f"{path} is not on this machine", allowed="a config.json there, or a Python file here")
        copies = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, copies, ignore_errors=True)
        return fetched(path, Path(copies))
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    homes = [] if path.is_absolute() or not name.name else _SHIPPED
    shipped = name if name.suffix or not homes else name.with_suffix(".py")
    for file in (path, *(home / shipped for home in homes)):
        if os.path.isfile(file):  # pathlib raises for names that are too long
            return file
    near = path.parent.iterdir() if os.path.isdir(path.parent) and not os.path.lexists(path) else ()
    names = [str(file) for file in near if file.suffix in (".py", ".json")]
    names += [file.stem for home in _SHIPPED for file in home.glob("*.py")]
    inside = path / "config.json"
    hint = f"did you mean {str(inside)!r}?" if os.path.isfile(inside) else nearest(str(path), names)
    problem = f"no config file: {path}" if os.path.lexists(path) else f"no such config file: {path}"
    raise UserError(problem, allowed=_CONFIG_FILE, hint=hint)


def _config_from_file(path: Path) -> Config:
    if path.suffix not in (".py", ".json"):
        raise UserError(f"not a config file: {path}", allowed=_CONFIG_FILE)
    try:
        if path.suffix == ".json":
            return from_json(Config, path.read_text(encoding="utf-8"))
        get_config = runpy.run_path(str(path)).get("get_config")
        config = get_config() if callable(get_config) else None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the file is the user's
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        try:
            said = f": {error}"
        except Exception:  # for an error that cannot be printed
            said = ""
        raise UserError(f"config file {path}{where}: {type(error).__name__}{said}") from error
    if not isinstance(config, Config):
        raise UserError(f"config file {path} has no get_config() that returns a Config", allowed=_CONFIG_FILE)
    return config


def _take_overrides(arguments: Sequence[str]) -> list[str]:
    """Moves `--config.x=value` and `--config.x value` out of the arguments: absl would call them unknown."""
    rest, remaining = [], iter(arguments)
    for argument in remaining:
        if not argument.startswith("--config."):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix("--config.").partition("=")
        value = value if equals else next(remaining, "--")
        if not equals and value.startswith("--"):
            raise UserError(f"--config.{name} has no value", allowed=f"--config.{name}=VALUE")
        _overrides[name] = value
    return rest


def _own_flags() -> list[flags.Flag]:
    home = flags.FLAGS.find_module_defining_flag
    return [flags.FLAGS[name] for name in sorted(flags.FLAGS) if (home(name) or "").startswith("orthojax.")]


def _help(about: str) -> str:
    lines = [about.strip(), "", "flags:"]
    lines += [f"  --{flag.name}={flag.default}  {flag.help}" for flag in _own_flags()]
    if "config" in flags.FLAGS:
        lines += ["", "config fields, as in --config.optim.learning_rate=3e-4:"]
        defaults, texts = flatten(Config()), describe_fields(Config)
        for path, hint in field_paths(Config).items():
            lines.append(f"  --config.{path}={defaults[path]}  ({describe_type(hint)})")
            lines += textwrap.wrap(texts[path], 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _nearest_flag(name: str) -> str:
    known = [flag.name for flag in _own_flags()]
    if "config" in flags.FLAGS:
        known += [f"config.{path}" for path in field_paths(Config)]
    return nearest_field(name, known).replace("'", "--", 1).replace("'", "=...")


def _wrong_value(said: str) -> UserError:
    """Returns the error for absl's `flag --NAME=VALUE: in Python's words`."""
    given = re.match(r"flag (--(\w+)=.*?): ", said, re.DOTALL)
    if given is None:
        return UserError(said)
    parser = flags.FLAGS[given[2]].parser
    return UserError(f"{given[1]} is not valid", allowed=parser.syntactic_help or "true or false")


def fail(error: BaseException) -> NoReturn:
    """Ends the process with at most three lines and exit code 2."""
    first, *rest = [line for line in str(error).splitlines() if line.strip()][:3]
    message = "\n".join([f"error: {first}", *(f"  {line}" for line in rest)])
    if "tqdm" in sys.modules:  # a bar may still be shown: print above it
        sys.modules["tqdm"].tqdm.write(message, file=sys.stderr)
    else:
        print(message, file=sys.stderr)
    sys.exit(2)


def guarded(call: Callable[[], Any]) -> Any:
    """Calls a function; a user error becomes at most three lines and exit code 2, our own crash keeps its traceback."""
    try:
        result = call()
        sys.stdout.flush()  # here, where a closed pipe is not a crash
        return result
    except (UserError, flags.Error) as error:
        fail(error)
    except NotImplementedError as error:
        if not str(error).startswith("attention"):  # a kernel that was asked for and does not support the arguments
            raise
        fail(UserError(str(error), allowed="--config.model.attention_implementation=auto"))
    except ModuleNotFoundError as error:
        if not (hint := how_to_install(error)):
            raise
        fail(UserError(f"{error.name} is not installed", hint=hint))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # as in `orthojax inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if not (found := as_user_error(error)):
            raise
        fail(found)


def _parse(argv: Sequence[str], positional: str, several: bool, about: str) -> list[str]:
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv[1:]):
        print(_help(about))
        sys.exit(0)
    allowed = f"{positional}, and the flags that --help lists" if positional else "the flags that --help lists"
    try:
        rest = flags.FLAGS([argv[0], *_take_overrides(argv[1:])])[1:]
    except flags.UnrecognizedFlagError as error:
        hint = _nearest_flag(error.flagname)
        raise UserError(f"unknown flag --{error.flagname}", allowed=allowed, hint=hint) from None
    except flags.IllegalFlagValueError as error:
        raise _wrong_value(str(error)) from None
    except (UnicodeDecodeError, flags.CantOpenFlagFileError) as error:
        problem = f"--flagfile cannot be read: {error}".replace("ERROR:: Unable to open flagfile: ", "")
        raise UserError(problem, allowed="a UTF-8 file with a flag in each line") from None
    except flags.Error as error:  # a flag at the end, without its value
        raise UserError(str(error), allowed="--FLAG=VALUE, as --help lists them") from None
    if _overrides and "config" not in flags.FLAGS:
        raise UserError("this command reads no config", hint="the config of a checkpoint is stored in it")
    if positional and (not rest or (len(rest) > 1 and not several)):
        raise UserError(f"{len(rest)} arguments given", allowed=positional if several else f"exactly one: {positional}")
    for flag in _own_flags():
        if flag.present and flag.value in ("", []) and flag.name not in _MAY_BE_EMPTY:
            raise UserError(f"--{flag.name}= is empty", allowed=f"--{flag.name}=VALUE, or no --{flag.name}")
    values = [(flag.name, flag.value) for flag in _own_flags() if flag.name not in _MAY_BE_ADDRESSES]
    if flags.FLAGS.find_module_defining_flag("workdir") in _WORK_ON_STORES:
        values = [(name, value) for name, value in values if name != "workdir"]
    values += [("positional argument", argument) for argument in rest]
    for name, value in values:
        for path in value if isinstance(value, list) else [value]:
            require_local(str(path), f"--{name}" if name in flags.FLAGS else name)
    if rest and not positional:
        hint = _nearest_flag(rest[0].partition("=")[0])
        raise UserError(f"unexpected argument {rest[0]!r}", allowed=allowed, hint=hint)
    return rest


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory for the next allocation instead of returning it to the system.

    On a CPU XLA's temporaries come from malloc, and glibc returns large ones at once, so each training step takes new
    pages, which the system clears one by one. Call it before any thread starts. It does nothing without glibc, on other
    devices, and with the environment variable ORTHOJAX_KEEP_FREED_MEMORY=0. The process then holds its peak memory.

    Returns:
      Whether freed memory is kept.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    on_cpu = platforms == "cpu" if platforms else not entry_points(group="jax_plugins")
    if platform.libc_ver()[0] != "glibc" or not on_cpu or os.environ.get("ORTHOJAX_KEEP_FREED_MEMORY") == "0":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(parameter, value) == 1 for parameter, value in _KEEP_FREED_MEMORY.items()])


def stop_without(parent: int) -> None:
    """Stops this process by SIGTERM, which saves its state, once its parent process is gone, even by kill -9.

    `parent` is the parent's process id.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    keep_freed_memory()  # before the first thread, which would get a heap of its own and share it with JAX's
    threading.Thread(target=watch, daemon=True).start()


def run(main: Callable[[list[str]], None], *, positional: str = "", several: bool = False) -> None:
    """Parses flags, calls `main` with the positional arguments, and reports errors.

    The docstring of `main`'s module is the help; `positional` describes an argument, '' if there are none.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that its encoding lacks are escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
        if sys.stdout.isatty():
            sys.stdout = Terminal(sys.stdout.buffer, sys.stdout.encoding, "backslashreplace", line_buffering=True)
    if not {"", os.getcwd()} & {*sys.path}:  # so that module:NAME of this folder is found, as by python -m orthojax
        sys.path.append(os.getcwd())
    logging.set_verbosity(logging.FATAL)  # Orbax logs a lot, and its exceptions twice; --verbosity=0 restores it
    keep_freed_memory()
    # Before NumPy and SciPy load it: OpenBLAS's own threads spin while they wait for each other, and if other work
    # keeps cores busy, as XLA does here, a QR decomposition takes many times as long with them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # SIGTERM unwinds the stack, so that files are closed and half-written checkpoints finish.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    about = sys.modules[main.__module__].__doc__ or ""
    try:
        app.run(
            lambda arguments: guarded(lambda: main(arguments)),
            flags_parser=lambda argv: guarded(lambda: _parse(argv, positional, several, about)),
        )
    except SystemExit as end:
        if isinstance(end.code, int) and end.code > 128:  # by a signal, when everything was closed
            sys.stdout.flush()
            sys.stderr.flush()
            # Python's own end would wait for XLA's threads, and one that compiles may then never come back.
            os._exit(end.code)
        raise
