"""What the command lines share: flags, `--config.x=` overrides, and errors that a user can act on."""

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from orthojax.config import Config, describe_type, field_paths, flatten, from_json, replace
from orthojax.errors import Interrupted, UserError, advice, nearest
from orthojax.machine import keep_freed_memory

_CONFIG_FILE = "Python file with get_config() -> orthojax.config.Config, or the config.json of a run"

_overrides: dict[str, str] = {}
_held_back: list[str] = []


def define_config() -> None:
    """Defines `--config=FILE`; `load_config` reads it and the `--config.x=` overrides."""
    flags.DEFINE_string("config", None, f"{_CONFIG_FILE}; the defaults without it.")


def define_cache_dir() -> None:
    """Defines `--cache_dir`, where tokenised corpora are kept between runs."""
    flags.DEFINE_string("cache_dir", "runs/data", "Folder of tokenised corpora, shared by runs.")


def define_compile_cache() -> None:
    """Defines `--compile_cache`, for `orthojax.train.keep_compiled_programs`."""
    what = "Folder of compiled programs, shared by runs; '' for none. Default ~/.cache/orthojax/xla."
    flags.DEFINE_string("compile_cache", None, what)


def load_config() -> Config:
    """The config of `--config`, with every `--config.x=` override applied at once.

    Raises:
      UserError: For a missing or broken file, an unknown field, a wrong value or an impossible combination.
    """
    path = flags.FLAGS["config"].value
    return replace(_config_from_file(Path(path)) if path else Config(), _overrides)


def _config_from_file(path: Path) -> Config:
    if not path.is_file():
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".py", ".json")] if path.parent.is_dir() else []
        near = nearest(path.name, names)
        raise UserError(f"no such config file: {path}", allowed=_CONFIG_FILE, hint=near)
    if path.suffix == ".json":
        try:
            return from_json(Config, path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
    if path.suffix != ".py":
        raise UserError(f"not a Python file: {path}", allowed=_CONFIG_FILE)
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        if not callable(get_config):
            raise UserError(f"config file {path} has no get_config()", allowed="get_config() -> orthojax.config.Config")
        config = get_config()
    except UserError:
        raise
    except Exception as error:  # the file is the user's
        raise UserError(f"config file {path} fails: {_where(error, path)}{type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(f"get_config() of {path} returned a {type(config).__name__}", allowed="orthojax.config.Config")
    return config


def _where(error: Exception, path: Path) -> str:
    """The line of the file that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"line {lines[-1]}, " if lines else ""


def _take_overrides(argv: Sequence[str]) -> list[str]:
    """Moves `--config.x=value` and `--config.x value` out of argv: absl would call them unknown."""
    rest, arguments = [], iter(argv)
    for argument in arguments:
        if not argument.startswith(("--config.", "-config.")):
            rest.append(argument)
            continue
        name, equals, value = argument.partition("config.")[2].partition("=")
        value = value if equals else next(arguments, None)
        if value is None:
            raise UserError(f"--config.{name} has no value", allowed=f"--config.{name}=VALUE")
        _overrides[name] = value
    return rest


def _help(main_module: Any) -> str:
    lines = [(main_module.__doc__ or "").strip(), "", "flags:"]
    own = flags.FLAGS.flags_by_module_dict().get(sys.argv[0], []) + flags.FLAGS.get_flags_for_module(main_module)
    shared = flags.FLAGS.flags_by_module_dict().get("orthojax.cli", [])
    for flag in sorted({flag.name: flag for flag in [*own, *shared]}.values(), key=lambda flag: flag.name):
        lines.append(f"  --{flag.name}={flag.default}  {flag.help}")
    if "config" in flags.FLAGS:
        lines += ["", "config fields, as in --config.optim.learning_rate=3e-4:"]
        defaults, hints = flatten(Config()), field_paths(Config)
        lines += [f"  --config.{path}={defaults[path]}  ({describe_type(hint)})" for path, hint in hints.items()]
    return "\n".join(lines)


def _fail(error: BaseException) -> NoReturn:
    lines = [line for line in str(error).splitlines() if line.strip()][:3]
    print("\n".join(["error: " + lines[0], *(f"  {line}" for line in lines[1:])]), file=sys.stderr)
    atexit.unregister(_print_held_back)
    warnings.simplefilter("ignore")  # Orbax leaves coroutines behind when a write fails
    sys.exit(2)


def _print_held_back() -> None:
    print(*_held_back, sep="", end="", file=sys.stderr)


def _hold_back_background_errors() -> None:
    """Tracebacks of other threads wait for the end: where the user is to blame, they would only bury the message."""

    def hold(kind: Any, error: Any, trace: Any) -> None:
        _held_back.append("".join(traceback.format_exception(kind, error, trace)))

    def hold_unless_main(kind: Any, error: Any, trace: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        (sys.__excepthook__ if is_main else hold)(kind, error, trace)

    sys.excepthook = hold_unless_main
    threading.excepthook = sys.unraisablehook = lambda report: hold(
        report.exc_type, report.exc_value, report.exc_traceback
    )
    atexit.register(_print_held_back)


def _guarded(call: Callable[[], Any]) -> Any:
    """Calls; a user error becomes at most three lines and exit code 2, a crash of ours keeps its traceback."""
    try:
        return call()
    except (UserError, flags.Error) as error:
        _fail(error)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        print("stopped; run the same command to resume", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as in `inspect_checkpoint.py DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        hint = advice(error)  # none for a missing file, which may be our fault: whoever opens a user's file says so
        if not hint:
            raise
        _fail(UserError(f"{error.strerror}: {error.filename or 'while reading or writing'}", hint=hint))


def run(main: Callable[[list[str]], None], *, positional: str = "") -> None:
    """Parses flags and calls `main` with the one positional argument named `positional`, if any, and reports errors."""
    main_module = sys.modules["__main__"]

    def parse(argv: Sequence[str]) -> list[str]:
        if any(argument in ("--help", "-h", "-help", "--helpfull", "--helpshort") for argument in argv[1:]):
            print(_help(main_module))
            sys.exit(0)

        def strictly() -> list[str]:
            rest = flags.FLAGS([argv[0], *_take_overrides(argv[1:])])[1:]
            if _overrides and "config" not in flags.FLAGS:
                raise UserError("this command reads no config", hint="the config of a checkpoint is stored in it")
            if positional and len(rest) != 1:
                raise UserError(f"{len(rest)} arguments given", allowed=f"one: {positional}")
            if rest and not positional:
                problem = f"unexpected argument {rest[0]!r}"
                raise UserError(problem, allowed="--flag=value", hint="--help lists the flags")
            return rest

        return _guarded(strictly)

    logging.set_verbosity(logging.FATAL)  # Orbax logs much, and all that it raises twice; --verbosity=0 brings it back
    _hold_back_background_errors()
    keep_freed_memory()
    # SIGTERM unwinds the stack, so that files are closed and half-written checkpoints finish.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    app.run(lambda arguments: _guarded(lambda: main(arguments)), flags_parser=parse)
