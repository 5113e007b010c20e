"""What the command lines share: flags, `--config.x=` overrides, and errors that a user can act on."""

import atexit
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging

from orthojax.config import (
    Config,
    describe_fields,
    describe_type,
    field_paths,
    flatten,
    from_json,
    meant,
    not_a_field,
    read_value,
    replace,
)
from orthojax.errors import PEER_LOST, Interrupted, UserError, as_user_error, how_to_install, message_of, nearest
from orthojax.machine import keep_freed_memory

# Which flag a positional argument was most likely meant for, in a command that takes none: the first that it has. In a
# command that takes one, these are tried as flags.
_MEANT_BY_POSITION = ("config", "checkpoint", "experiment", "input", "suite", "model")
_FLAGS = "the flags that --help lists"
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

    Where `--config.train.steps` leaves nothing after the warm-up, which the command line does not set, the warm-up
    becomes the same fraction of the steps as before.

    Raises:
      UserError: For a missing or broken file, an unknown field, a wrong value or an impossible combination.
    """
    path = flags.FLAGS["config"].value
    config = _config_from_file(Path(path)) if path else Config()
    warmup = {} if "optim.warmup_steps" in _overrides else _warmup_of_a_short_run(config)
    return replace(config, _overrides | warmup)


def _warmup_of_a_short_run(config: Config) -> dict[str, Any]:
    try:
        steps = read_value(_overrides.get("train.steps", ""), int)
    except (ValueError, OverflowError):
        return {}  # not given, or refused later
    before = config.optim.warmup_steps
    return {"optim.warmup_steps": before * steps // config.train.steps} if 0 < steps <= before else {}


_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in a wheel, in a clone


def _shipped(path: Path) -> Path:
    """A config that comes with the package, from wherever: configs/NAME.py, or NAME; else the path itself."""
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    if path.is_absolute() or not name.name:
        return path
    found = (home / name.with_suffix(".py") for home in _SHIPPED)
    return next((file for file in found if file.is_file()), path)


def _config_from_file(path: Path) -> Config:
    if not path.exists():
        path = _shipped(path)
    if not path.is_file():
        stored = path / "config.json"
        folders = [folder for folder in (path.parent, Path("configs")) if folder.is_dir()]
        files = [str(file) for folder in folders for file in folder.iterdir() if file.suffix in (".py", ".json")]
        files += [file.stem for home in _SHIPPED for file in sorted(home.glob("*.py"))]
        near = f"did you mean '{stored}'?" if stored.is_file() else nearest(str(path), files)
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
        value = value if equals else next(arguments, "--")
        if not equals and value.startswith("--"):
            raise UserError(f"--config.{name} has no value", allowed=f"--config.{name}=VALUE")
        _overrides[name] = value
    return rest


def _own_flags() -> dict[str, flags.Flag]:
    """The flags of this command by name, without those of libraries."""
    home = flags.FLAGS.find_module_defining_flag
    return {name: flags.FLAGS[name] for name in sorted(flags.FLAGS) if (home(name) or "").startswith("orthojax.")}


def flag_words(names: Iterable[str]) -> list[str]:
    """What can be typed for flags: `--name=`, and every field of the config where `config` is among them."""
    names = [f"config.{path}" for path in field_paths(Config)] * ("config" in names) + list(names)
    return [f"--{name}" if name in flags.FLAGS and flags.FLAGS[name].boolean else f"--{name}=" for name in names]


def typed(name: str) -> list[str]:
    """How a user of this process would start another command: a script of launch/ names its neighbour."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or script.name == "__main__.py":
        return ["orthojax", name]
    return ["python", str(script.with_name(f"{name}.py"))]


def _help(about: str) -> str:
    lines = [about.strip(), "", "flags:"]
    lines += [f"  --{flag.name}={flag.default}  {flag.help}" for flag in _own_flags().values()]
    if "config" in flags.FLAGS:
        lines += ["", "config fields, as in --config.optim.learning_rate=3e-4:"]
        defaults, texts = flatten(Config()), describe_fields(Config)
        for path, hint in field_paths(Config).items():
            lines.append(f"  --config.{path}={defaults[path]}  ({describe_type(hint)})")
            lines += textwrap.wrap(texts[path], 112, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _meant_flags(name: str) -> str:
    """The hint for a flag that this command does not have."""
    fields = field_paths(Config) if "config" in flags.FLAGS else {}
    near = meant(name.removeprefix("config."), [*_own_flags(), *fields])
    typed = [f"--{'config.' if flag in fields else ''}{flag}=..." for flag in near]
    note = not_a_field(name) if fields else ""
    return note or (f"did you mean {' or '.join(typed)}?" if typed else "")


_KINDS = {"float": "a number", "int": "an integer", "bool": "true | false"}  # absl's name of a type -> ours


def _wrong_value(error: flags.IllegalFlagValueError) -> Exception:
    """The error for a flag whose value cannot be read, without what Python says of it; others as they are."""
    found = re.match(r"flag --(\w+)=(.*?): .*(?:could not convert|invalid literal|Non-boolean)", str(error))
    if not found:
        return error
    return UserError(f"--{found[1]}={found[2]!r}", allowed=_KINDS[flags.FLAGS[found[1]].flag_type()])


def _unexpected(argument: str) -> UserError:
    """The error for an argument without a flag, which names the flag that was meant."""
    name, equals, value = argument.partition("=")
    hint = ""
    if equals:  # as other programs take overrides
        hint = _meant_flags(name).replace("=...", f"={value}")
    elif flag := next((name for name in _MEANT_BY_POSITION if name in flags.FLAGS), None):
        hint = f"did you mean --{flag}={argument}?"
    return UserError(f"unexpected argument {argument!r}", allowed=_FLAGS, hint=hint)


def fail(error: BaseException) -> NoReturn:
    """Ends the process with at most three lines and exit code 2."""
    print(message_of(error), end="", file=sys.stderr)
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


# Passes on what native code writes, holds back from the first line on that may be about a lost process, and says in
# three lines that one was lost. It has to be a process of its own, because JAX aborts the one that loses another.
_FILTER = """
import re, sys
lost, held = sys.argv[1].encode(), b""
for line in sys.stdin.buffer:
    if held or line in lost or re.search(rb"coordination_service|preemption_sync|JAX distributed service", line):
        held += line
    else:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
known = lost in held or b"JAX distributed service detected fatal errors" in held
sys.stderr.buffer.write(lost if known else held)
"""


def shorten_lost_peers() -> None:
    """From here on, this process says in three lines that it ends because another process of its run is gone.

    JAX's native code then writes pages of its log and of stack traces to file descriptor 2. That becomes a pipe to a
    filter; `sys.stderr` stays what it was.
    """
    sys.stderr.flush()
    real = os.dup(2)
    command = [sys.executable, "-c", _FILTER, PEER_LOST]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=real, start_new_session=True)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), 2)
    process.stdin.close()
    sys.stderr = os.fdopen(real, "w", buffering=1, errors="backslashreplace")


def guarded(call: Callable[[], Any], extras: str = "", resumes: bool = False) -> Any:
    """Calls; a user error becomes at most three lines and exit code 2, a crash of ours keeps its traceback.

    Args:
      call: The work.
      extras: All that it needs, named together where a package of one is missing.
      resumes: Whether the same command resumes an interrupted one.
    """
    try:
        result = call()
        sys.stdout.flush()  # here, where a closed pipe is no crash
        return result
    except (UserError, flags.Error) as error:
        fail(error)
    except NotImplementedError as error:
        if not str(error).startswith("attention"):  # a kernel that was asked for and does not support the arguments
            raise
        fail(UserError(str(error), allowed="--config.model.attention_implementation=auto"))
    except ModuleNotFoundError as error:
        hint = how_to_install(error)
        if not hint:
            raise
        hint = f"pip install 'orthojax[{extras}]'" if extras else hint
        fail(UserError(f"{error.name} is not installed", hint=hint))
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:
        print(f"stopped{'; run the same command to resume' * resumes}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # as in `inspect_checkpoint.py DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        found = as_user_error(error)
        if found is None:  # as for a missing file, which may be our fault: whoever opens a user's file says so
            raise
        fail(found)


def _parse(argv: Sequence[str], positional: str, several: bool, about: str) -> list[str]:
    """The positional arguments; flags are kept by absl, overrides of the config here."""
    if any(argument in ("--help", "-h", "-help", "--helpfull", "--helpshort") for argument in argv[1:]):
        print(_help(about))
        sys.stdout.flush()
        sys.exit(0)
    try:
        rest = flags.FLAGS([argv[0], *_take_overrides(argv[1:])])[1:]
    except flags.UnrecognizedFlagError as error:
        allowed = f"{positional}, and {_FLAGS}" if positional else _FLAGS
        hint = _meant_flags(error.flagname)
        if positional and error.flagname in _MEANT_BY_POSITION:
            value = str(error.flagvalue).partition("=")[2]
            hint = f"did you mean {value or positional}, without --{error.flagname}?"
        raise UserError(f"unknown flag --{error.flagname}", allowed=allowed, hint=hint) from None
    except flags.IllegalFlagValueError as error:
        raise _wrong_value(error) from None
    if _overrides and "config" not in flags.FLAGS:
        raise UserError("this command reads no config", hint="the config of a checkpoint is stored in it")
    if positional and (not rest or (len(rest) > 1 and not several)):
        raise UserError(f"{len(rest)} arguments given", allowed=positional if several else f"exactly one: {positional}")
    if rest and not positional:
        raise _unexpected(rest[0])
    return rest


def run(
    main: Callable[[list[str]], None],
    *,
    positional: str = "",
    several: bool = False,
    extras: str = "",
    resumes: bool = False,
) -> None:
    """Parses flags, calls `main` with the positional arguments, and reports errors.

    Args:
      main: The command; the docstring of its module is the help.
      positional: What a positional argument is; '' for a command without one.
      several: Whether there may be more than one.
      extras: As of `guarded`.
      resumes: As of `guarded`.
    """
    logging.set_verbosity(logging.FATAL)  # Orbax logs much, and all that it raises twice; --verbosity=0 brings it back
    _hold_back_background_errors()
    keep_freed_memory()
    # SIGTERM unwinds the stack, so that files are closed and half-written checkpoints finish.
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    about = sys.modules[main.__module__].__doc__ or ""
    app.run(
        lambda arguments: guarded(lambda: main(arguments), extras, resumes),
        flags_parser=lambda argv: guarded(lambda: _parse(argv, positional, several, about)),
    )
