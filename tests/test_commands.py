"""`orthojax COMMAND`: what it lists and refuses, and what it says if an extra is missing."""

import os
import platform
import subprocess
import sys

import pytest
from small_runs import ROOT, python

import orthojax
from orthojax.commands import COMMANDS
from orthojax.commands.cli import keep_freed_memory
from orthojax.errors import how_to_install


def run(*arguments, cwd, code=None):
    """`python -m orthojax`, or other code with its arguments."""
    return python(*(["-c", code] if code else ["-m", "orthojax"]), *arguments, cwd=cwd)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(tmp_path, arguments):
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    modules = {path.stem for path in (ROOT / "orthojax/commands").glob("*.py")}
    assert set(COMMANDS) <= modules


def test_scripts_start_the_commands(tmp_path):
    starting = [path.read_text() for path in (ROOT / "launch").glob("*.py") if path.stem != "benchmark"]
    assert {text.split('start("')[1].split('"')[0] for text in starting} <= set(COMMANDS)
    assert run("generate", "--help", cwd=tmp_path).stdout == python(ROOT / "launch/generate.py", "--help").stdout


def test_version_is_printed(tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"{orthojax.__version__}\n"


def test_mistyped_command_is_refused(tmp_path):
    done = run("trian", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 3
    assert "'trian'" in done.stderr
    assert "'train'" in done.stderr


def test_configs_of_the_package_are_found_everywhere(tmp_path):
    for name in ("tiny_cured", "configs/tiny_cured.py", "paper/gpt2_60m"):
        impossible = run("train", f"--config={name}", "--config.train.steps=0", cwd=tmp_path)
        assert "train.steps=0" in impossible.stderr
    done = run("train", "--config=tiny_curde", cwd=tmp_path)
    assert done.returncode == 2
    assert "'tiny_cured'" in done.stderr
    for name in ("configs", "/tiny_cured", "configs/mine.py"):
        assert run("train", f"--config={name}", cwd=tmp_path).returncode == 2


LEFT_ALONE = """
import signal, sys, time
from orthojax.commands import cli
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
cli.stop_without(int(sys.argv[1]))
time.sleep(100)
"""
KILLED = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
os.kill(os.getpid(), 9)
"""


def test_processes_of_a_study_do_not_outlive_it(tmp_path):
    done = run(LEFT_ALONE, cwd=tmp_path, code=KILLED)  # returns when the inner process closes its output
    assert (done.returncode, done.stdout) == (-9, "saved\n")


NOTHING_ESCAPES = """
import sys
from orthojax.commands import cli
sys.argv = ["x"]
cli.run(lambda _: print("workdir caf\\udce9 größer"))
"""


def test_output_that_its_encoding_lacks_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run(cwd=tmp_path, code=NOTHING_ESCAPES)
    assert (done.returncode, done.stdout) == (0, "workdir caf\\udce9 gr\\xf6\\xdfer\n"), done.stderr


BLOCKED = """
import sys

class Without:  # a finder to which some packages are not installed
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("flax", ["train", "--config=tiny_cured"], "train"),
        ("orbax", ["inspect", "."], "train"),
        ("matplotlib", ["reproduce", "--list"], "reports"),
    ],
)
def test_command_names_the_missing_extra(tmp_path, missing, command, extra):
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    code = BLOCKED.format([missing]) + "from orthojax.commands import main\nmain()"
    done = run(*command, cwd=tmp_path, code=code)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing}")
    assert done.stderr.splitlines()[1:] == [f"  pip install 'orthojax[{extra}]'"]


def test_core_works_without_extras(tmp_path):
    code = BLOCKED.format(["flax", "orbax", "grain", "tqdm", "scipy.stats", "matplotlib", "jinja2", "tokenizers",
                           "tensorflow_datasets", "tensorflow"])  # fmt: skip
    code += "import jax.numpy as jnp, numpy as np, orthojax\n"
    code += "from orthojax import analysis, ops, optim, quant\n"
    code += "optimizer = orthojax.orthoadam(1e-3, rotation=orthojax.Rotation(axes=4, embeddings=''))\n"
    code += "w = {'w': jnp.ones((4, 8))}\n"
    code += "assert optimizer.update(w, optimizer.init(w), w)[0]['w'].shape == (4, 8)\n"
    code += "assert np.isclose(orthojax.softmax1(jnp.zeros(1))[0], 0.5)\n"
    code += "q = jnp.ones((1, 2, 1, 4))\nassert orthojax.dot_product_attention(q, q, q).shape == q.shape\n"
    code += "assert orthojax.gpt2('130m').d_model == 768\n"
    code += "try:\n    orthojax.Transformer\nexcept ImportError as error:\n    print(error)\n"
    code += "import pydoc\nfrom orthojax import *\n"  # both read every name that is listed
    code += "print('class ModelConfig' in pydoc.plaintext.document(orthojax), 'Transformer' in globals())\n"
    done = run(cwd=tmp_path, code=code)
    assert done.stderr == ""
    assert done.stdout == "orthojax.Transformer needs flax: pip install 'orthojax[train]'\nTrue False\n"


def test_module_that_no_extra_has_is_a_crash():
    assert how_to_install(ModuleNotFoundError(name="of_the_user")) == ""
    assert how_to_install(ModuleNotFoundError()) == ""


SAYING = "from orthojax.commands import cli; cli.run(lambda _: print('a\\x1b]52;c;b\\x07\\x9b\\r\\tb \\u00e9\\nc'))"


def test_control_characters_are_escaped_on_a_terminal(tmp_path):
    """OSC 52, which writes to the clipboard, BEL and CSI; a pipe gets what was said."""
    ours, theirs = os.openpty()
    done = subprocess.run([sys.executable, "-c", SAYING], cwd=tmp_path, stdout=theirs, timeout=120, check=False,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"})  # fmt: skip
    assert done.returncode == 0
    shown = os.read(ours, 1000).decode()
    assert shown == "a\\x1b]52;c;b\\x07\\x9b\\r\tb \u00e9\r\nc\r\n"
    assert run(cwd=tmp_path, code=SAYING).stdout.startswith("a\x1b]52;c;b\x07")


STOPPED = """
import atexit, os, signal, time
from orthojax.commands import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's jobs in the background do not have
atexit.register(time.sleep, 600)  # as XLA's threads in the middle of a compilation
def main(_):
    try:
        print("begun")
        os.kill(os.getpid(), signal.NAME)
        time.sleep(600)
    finally:
        print("closed")
cli.run(main)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_stopped_process_ends_at_once(tmp_path, name, code):
    done = run(cwd=tmp_path, code=STOPPED.replace("NAME", name))
    assert (done.returncode, done.stdout.split()) == (code, ["begun", "closed"])


# The C library's allocator, observed from outside: the pages that a process takes from the system.

# Arrays of 64 MB, allocated, written and freed 20 times: 16,384 pages of 4 kB each time where they are given back.
# In threads, as JAX does it, of a process that watches its parent, as those of an experiment do.
FREEING = """
import concurrent.futures, os, resource, threading
from orthojax.commands.cli import keep_freed_memory, stop_without
stop_without(os.getppid())
kept = keep_freed_memory()
import numpy as np
every, one = threading.Barrier(4), threading.Lock()
def faults(_):
    every.wait()
    with one:
        np.ones(2**23)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            np.ones(2**23)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(kept, sum(pool.map(faults, range(4))), sep=";")
"""


def faults_of(switch):
    kept, faults = python("-c", FREEING, ORTHOJAX_KEEP_FREED_MEMORY=switch).stdout.strip().split(";")
    return kept == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_unless_switched_off():
    kept, faults = faults_of("1")
    assert kept
    kept, faults_without = faults_of("0")
    assert not kept
    assert faults_without > 20 * 16  # even where pages have 4 MB
    assert faults < faults_without / 10


def test_allocator_stays_if_jax_may_use_accelerators(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert not keep_freed_memory()
