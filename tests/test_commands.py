"""`orthojax COMMAND`: what it lists and refuses, what it says if an extra is missing; and `orthojax compare`."""

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from small_runs import ROOT, python
from tiny_run import TINY

import orthojax
from orthojax.commands import COMMANDS
from orthojax.commands import compare as command
from orthojax.commands.cli import keep_freed_memory
from orthojax.config import replace, to_json
from orthojax.errors import UserError, how_to_install


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


@pytest.mark.parametrize(("missing", "command", "extra"), [
    ("flax", ["train", "--config=tiny_cured"], "train"),
    ("orbax", ["inspect", "."], "train"),
    ("matplotlib", ["reproduce", "--list"], "reports"),
])  # fmt: skip
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


INTERRUPTED = """
from orthojax.commands import cli
from orthojax.errors import Interrupted
def main(_):
    raise Interrupted(15, 3)
cli.run(main)
"""


def test_an_interrupted_run_says_where(tmp_path):
    done = run(cwd=tmp_path, code=INTERRUPTED)
    assert (done.returncode, done.stderr) == (143, "stopped at step 3, state saved; run the same command to resume\n")


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


LINES = [
    {"step": 1, "loss_nats": 3.0, "learning_rate": 0.02, "grad_norm": 1.0, "tokens_per_second": 10.0},
    {"step": 2, "kurtosis_first": 9.0, "kurtosis_first/layer_0": 9.0},
    {"step": 4, "validation_loss_nats": 2.5},
    {"step": 4, "loss_nats": 2.0, "learning_rate": 0.02, "grad_norm": 0.5, "tokens_per_second": 20.0},
]


def made(folder, changes=None, lines=LINES, evaluation=None):
    folder.mkdir()
    (folder / "config.json").write_text(to_json(replace(TINY, changes or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def rows_of(report):
    """The rows of all tables of a report in Markdown by their first cell."""
    cells = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


def test_runs_are_compared(tmp_path):
    evaluations = [{"perplexity": 9.0, "loss_nats": 2.1972, "kurtosis_first": 4.0},
                   {"perplexity": 8.0, "loss_nats": 2.0794, "kurtosis_first": 3.0}]  # fmt: skip
    made(tmp_path / "a", {"optim.learning_rate": 0.5}, evaluation={"metrics": evaluations[0]})
    made(tmp_path / "b", evaluation={"metrics": evaluations[1]})
    done = run("compare", "a", "tuned=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optim.learning_rate" in done.stdout
    rows = rows_of((tmp_path / "runs/compare/report.md").read_text())
    assert rows["optim.learning_rate"] == ["0.5", "0.02"]
    assert "optim.optimizer" not in rows
    assert rows["perplexity"][:2] == ["9", "8"]
    assert rows["loss (nats)"][:2] == ["2.2", "2.08"]  # not the training loss
    assert rows["held-out loss (nats)"][:2] == ["2.5", "2.5"]
    assert rows["kurtosis, first token"][:2] == ["4", "3"]  # as evaluated
    # Of the others there is one point.
    drawn = {path.stem for path in (tmp_path / "runs/compare/figures").iterdir()}
    assert drawn == {"loss_nats_by_step", "grad_norm_by_step"}


def test_a_run_that_was_not_evaluated_is_compared_as_logged(tmp_path, compare, capsys):
    made(tmp_path / "a")
    made(tmp_path / "b", evaluation={"metrics": {"perplexity": 8.0, "kurtosis_first": 3.0}})
    compare("a", "b")
    printed = capsys.readouterr().out
    assert "Not evaluated: a (orthojax evaluate --checkpoint=a)" in printed
    rows = rows_of((tmp_path / "report/report.md").read_text())
    assert "perplexity" not in rows
    assert rows["kurtosis, first token"][:2] == ["9", "9"]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """The command in this process, with arguments that are parsed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "FLAGS", SimpleNamespace(workdir="report"))
    return lambda *arguments: command.main(list(arguments))


@pytest.mark.parametrize(
    ("changes", "says", "differ"),
    [({"eval.sequences": 8}, "evaluations differ", True), ({}, "Their configs are the same.", False)],
)
def test_other_evaluations_and_equal_configs_are_pointed_out(tmp_path, compare, capsys, changes, says, differ):
    made(tmp_path / "a"), made(tmp_path / "b", changes)
    compare("a", "b")
    printed = capsys.readouterr().out
    assert says in printed
    assert ("Fields of the config" in printed) == differ


WRONG = {"a": "only one run", "a missing": "missing", "a a": "'a'", "a damaged": "evaluation.json"}


@pytest.mark.parametrize(("arguments", "says"), WRONG.items())
def test_wrong_arguments_are_refused(tmp_path, compare, arguments, says):
    made(tmp_path / "a"), made(tmp_path / "damaged", evaluation=[])
    with pytest.raises(UserError, match=says) as refused:
        compare(*arguments.split())
    assert len(str(refused.value).splitlines()) <= 3
    assert not (tmp_path / "report").exists()


ODD = [None, True, -1, 1e308, 10**400, math.nan, -math.inf, "x", "\0", "\ud800", [1], {"a": 1}]
EDITED = [
    *(("evaluation.json", [of], r"evaluation\.json") for of in (
        3, {}, {"metrics": [1]}, {"metrics": {"perplexity": 0.5}}, {"metrics": {"kurtosis_first": math.nan}})),
    *(("evaluation.json", [{"metrics": of}], "") for of in ({}, {"perplexity": 1e308, "x": -1e308})),
    *(("metrics.jsonl", [{"step": step}], r"step is .*\nallowed: an integer, 0") for step in (-1, True, 10**400)),
    ("metrics.jsonl", [3, {}, {"step": None}, {"step": 0.5}, {"step": "x"}], "no valid line"),
    ("metrics.jsonl", [{"step": 1, "loss_nats": x, "kurtosis_first": x} for x in ODD], ""),
    ("metrics.jsonl", [{"step": i, "loss_nats": x, "kurtosis_first": x} for i, x in enumerate(ODD)], ""),
    *(("config.json", [of], r"config\.json") for of in (3, {}, {"model": 3}, {"data": {"paths": [1]}})),
]  # fmt: skip


def test_edited_runs_are_compared_or_refused(tmp_path, compare):
    made(tmp_path / "a"), made(tmp_path / "b", evaluation={"metrics": {"perplexity": 8.0}})
    for name, lines, says in EDITED:
        file = tmp_path / "b" / name
        before = file.read_text()
        file.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(UserError, match=says) if says else contextlib.nullcontext() as refused:
            compare("a", "b")
        assert not says or len(str(refused.value).splitlines()) <= 3
        file.write_text(before)


def test_no_run_ends_the_command(tmp_path):
    done = run("compare", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("0 arguments")) == (2, 1)
