"""Runs command lines in processes of their own that need not import JAX and all else again: forks of this one.

Reads requests from standard input, one JSON list a line: [script, arguments, folder, file for its output, file for its
errors]. Answers each with the exit code. It has imported what scripts import, and has used no device yet: a process
that has cannot be forked.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import NoReturn

IMPORTED = ("analysis", "quant", "train")


def become(script: str, arguments: list[str], cwd: str, output: str, errors: str) -> NoReturn:
    """Turns this process into the command; frees nothing of what was imported, which would take longer than most."""
    os.chdir(cwd)
    for stream, path in ((sys.stdin, os.devnull), (sys.stdout, output), (sys.stderr, errors)):
        file = os.open(path, os.O_RDONLY if stream is sys.stdin else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(f"orthojax.{name}")
    gc.freeze()  # else collections in each child visit, and so copy, all that was imported
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become(*json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)


if __name__ == "__main__":
    main()
