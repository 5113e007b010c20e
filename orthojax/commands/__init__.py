"""The commands: `orthojax NAME`, or `python -m orthojax NAME`, or in a clone `python launch/NAME.py`.

A command is a module with `define_flags()` and `main(arguments)`, whose docstring is its help. Flags of absl are global
to the process, so only the command that runs defines its own.
"""

import importlib
import sys
from types import ModuleType

from orthojax import __version__
from orthojax.commands import cli
from orthojax.errors import UserError, nearest

COMMANDS = ("train", "evaluate", "analyze", "generate", "export", "reproduce", "prepare", "inspect", "compare")


def start(name: str) -> None:
    """Runs a command with the arguments of this process."""
    command = _module(name)
    command.define_flags()
    positional, several = getattr(command, "POSITIONAL", ""), getattr(command, "SEVERAL", False)
    cli.run(command.main, positional=positional, several=several)


def main() -> None:
    """Runs `orthojax NAME ...`."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help"):
        print(_help())
    elif name == "--version":
        print(__version__)
    elif name not in COMMANDS:
        allowed, hint = " | ".join(COMMANDS), nearest(name, COMMANDS)
        cli.fail(UserError(f"unknown command {name!r}", allowed=allowed, hint=hint))
    else:
        sys.argv[1:] = arguments
        start(name)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"orthojax.commands.{name}")


def _help() -> str:
    about = {name: (_module(name).__doc__ or "").partition(":")[0] for name in COMMANDS}
    lines = ["usage: orthojax COMMAND [FLAGS]", "", *(f"  {name:10} {says}" for name, says in about.items())]
    return "\n".join([*lines, "", "orthojax COMMAND --help lists its flags."])
