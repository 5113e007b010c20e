import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from small_runs import CONFIG as SMALL
from small_runs import ROOT, TEXT, bits, losses, snapshot

import orthojax
from orthojax.config import Config, describe_fields, replace, to_json
from orthojax.errors import PEER_LOST
from orthojax.generation import generate
from orthojax.model import write_folder
from orthojax.train import find_checkpoint, read_optimizer_state, read_params

SCRIPTS = ("train", "evaluate", "analyze", "generate", "inspect_checkpoint", "prepare_data", "reproduce", "benchmark")
CONFIG = replace(
    SMALL, TEXT | {"train.steps": 6, "train.log_every_steps": 1, "train.eval_every_steps": 3, "eval.batch_size": 4}
)
PROGRESS = re.compile(r"^( *\d+% |compil(ing|ed)|resumes after step)")


# Runs a script with a limit on the size of the files that it may write.
LIMITED = """
import resource, runpy, sys
del sys.argv[0]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[0]), int(sys.argv[0])))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """What every command runs under: compiled programs are kept between the commands, because many are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
        if server.cache_info().currsize:
            server().communicate()


@functools.cache
def server():
    command = [sys.executable, str(ROOT / "tests/command_server.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(script, *arguments, cwd):
    """A command line in a process of its own, a fork of the server; see command_server.py."""
    command = [str(ROOT / "launch" / f"{script}.py"), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        server().stdin.write(json.dumps([command[0], command[1:], str(cwd), str(output), str(errors)]) + "\n")
        server().stdin.flush()
        code = int(server().stdout.readline())
        return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text())


def run_from_scratch(script, *arguments, cwd, limit_bytes=None, code=None):
    """The same from the beginning, as a user starts it, or with a limit on what it may write, or of code."""
    start, environment = [str(ROOT / "launch" / f"{script}.py")], dict(os.environ)
    if code is not None:
        start = ["-c", code]
    elif limit_bytes is not None:
        start = ["-c", LIMITED, str(limit_bytes), *start]
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return subprocess.run(
        [sys.executable, *start, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def complaint(done):
    """The lines of an error as a user must see it: exit code 2, at most three lines besides the progress."""
    lines = [line for line in done.stderr.splitlines() if not PROGRESS.match(line)]
    assert done.returncode == 2, done.stderr
    assert 1 <= len(lines) <= 3, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stderr + done.stdout
    assert all(len(line) < 400 for line in lines), lines
    return "\n".join(lines)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a text, a config file, a cache and a finished run `run`."""
    home = tmp_path_factory.mktemp("trained")
    (home / "text.txt").write_text("the sink and the peak, the norm and the token. " * 60)
    (home / "small.json").write_text(to_json(CONFIG))
    (home / "small.py").write_text(
        "from pathlib import Path\nfrom orthojax.config import Config\nfrom orthojax.config import from_json\n\n\n"
        "def get_config():\n    return from_json(Config, Path('small.json').read_text())\n"
    )
    done = run("train", "--config=small.py", "--cache_dir=cache", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "workdir runs/small\n" in done.stdout
    assert "runs/" in (ROOT / ".gitignore").read_text().splitlines()
    (home / "runs/small").rename(home / "run")
    (home / "runs").rmdir()
    return home


@pytest.fixture
def home(trained, tmp_path):
    """A copy of `trained` that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "home"))


# What is refused, most of it before anything heavy is imported. (script, arguments, what the lines name.)

WRITE = ["--model=run", "--prompt=a"]
NEW = ["--workdir=new", "--runs_dir=models"]
REFUSED = {
    "unknown flag": ("train", ["--verbosely=1"], ["verbosely"]),
    "mistyped flag": ("train", ["--wrkdir=a"], ["wrkdir", "workdir"]),
    "flag without a value": ("train", ["--workdir"], ["workdir"]),
    "positional argument": ("train", ["configs/x.py"], ["'configs/x.py'", "did you mean --config=configs/x.py?"]),
    "positional checkpoint": ("evaluate", ["runs/a"], ["did you mean --checkpoint=runs/a?"]),
    "override without dashes": ("train", ["optim.lr=3"], ["did you mean --config.optim.learning_rate=3?"]),
    "name of another program": ("train", ["--lr=3"], ["--lr", "did you mean --config.optim.learning_rate=...?"]),
    "name without its group": ("train", ["--steps", "20"], ["did you mean --config.train.steps=...?"]),
    "name without config": ("train", ["--model.n_layer=3"], ["did you mean --config.model.num_layers=...?"]),
    "name of two fields": (
        "train", ["--batch-size=3"], ["did you mean --config.train.batch_size=... or --config.eval.batch_size=...?"],
    ),
    "flag of another program": ("train", ["--out_dir=a"], ["did you mean --workdir=...?"]),
    "checkpoint of a command that takes models": ("analyze", ["--checkpoint=run"], ["did you mean --model=...?"]),
    "no such setting": ("train", ["--dropout=0.1"], ["no dropout"]),
    "field of a command without a config": ("reproduce", ["--lr=3"], ["unknown flag --lr\n  allowed: the flags that"]),
    "flag of what has no name": ("inspect_checkpoint", ["--checkpoint=run"], ["a checkpoint folder, and the flags"]),
    "two positional arguments": ("inspect_checkpoint", ["a", "b"], ["2 arguments", "a checkpoint folder"]),
    "no positional argument": ("inspect_checkpoint", [], ["0 arguments", "a checkpoint folder"]),
    # What fields may be is in tests/test_config.py.
    "mistyped field": ("train", ["--config.model.d_modle=8"], ["model.d_modle", "did you mean 'model.d_model'"]),
    "mistyped value": ("train", ["--config.model.normalizer=sofmax1"], ["'sofmax1'", "did you mean 'softmax1'"]),
    "text for an integer": ("train", ["--config.train.steps=many"], ["train.steps='many'", "an integer"]),
    "values that do not fit": (
        "train", ["--config.train.steps=9", "--config.optim.warmup_steps=9"],
        ["warmup_steps=9 leaves nothing", "optim.warmup_steps of 0 to 8"],
    ),
    "override without a value": ("train", ["--config.train.steps"], ["--config.train.steps", "VALUE"]),
    "override without a value before a flag": (
        "train", ["--config.train.tensorboard", "--workdir=new"], ["--config.train.tensorboard has no value"],
    ),
    "override without a config": ("evaluate", ["--config.train.steps=3"], ["reads no config"]),
    "missing config file": ("train", ["--config=smal.py"], ["smal.py", "did you mean 'small.py'"]),
    "config file in a missing folder": ("train", ["--config=no/small.py"], ["no/small.py", "get_config()"]),
    "config file that is no Python": ("train", ["--config=text.txt"], ["text.txt", "Python file"]),
    "config file that is a folder": ("train", ["--config=cache"], ["cache", "Python file"]),
    "config of a run without a workdir": ("train", ["--config=run/config.json"], ["run/config.json", "--workdir"]),
    "mistyped config of a run": ("train", ["--config=run/confg.json"], ["run/confg.json", "'run/config.json'"]),
    "a run as a config": ("train", ["--config=run"], ["did you mean 'run/config.json'?"]),
    "no checkpoint named": ("evaluate", [], ["--checkpoint", "DIR"]),
    "no output named": ("prepare_data", [], ["--output", "DIR"]),
    "unknown scale": (
        "reproduce", ["--scale=tinny"], ["'tinny'", "tiny | deep | overnight | small | paper", "did you mean 'tiny'"],
    ),
    "results to join, and no folder for them": ("reproduce", ["--render=a,b"], ["--render=a,b", "--workdir=DIR"]),
    "seeds that are no numbers": ("reproduce", ["--seeds=1,two"], ["'1,two'", "0,1,2"]),
    "a negative seed": ("reproduce", ["--seeds=-1"], ["'-1'", "0 to"]),
    "a seed too large": ("reproduce", ["--seeds=4294967296"], ["4294967296", "2**32 - 1"]),
    "no job": ("reproduce", ["--jobs=0"], ["--jobs=0", "positive integer"]),
    "a model without a name": ("reproduce", ["--model=runs/a"], ["--model=runs/a", "NAME=CHECKPOINT"]),
    "two models of one name": ("reproduce", ["--model=a=x,a=y"], ["--model=a=x,a=y", "different names"]),
    "no repetition": ("benchmark", ["--repeats=0"], ["--repeats=0", "at least 1"]),
    "repetitions that are no number": ("benchmark", ["--repeats=many"], ["repeats", "many"]),
    "unknown suite": (
        "benchmark", ["--suite=compile,optimiser"], ["'optimiser'", "optimizer | compile", "did you mean 'optimizer'"],
    ),
    "no suite": ("benchmark", ["--suite="], ["unknown suite ''", "optimizer | compile"]),
    "1e3 is an integer": (
        "train", ["--config.train.steps=1e2", "--config.optim.warmup_steps", "1e3"],
        ["optim.warmup_steps=1000 leaves nothing of train.steps=100"],
    ),
    "no model to write": ("generate", ["--prompt=a"], ["--model is missing", "smollm2"]),
    "no prompt": ("generate", ["--model=run"], ["no prompt", "--prompt=TEXT"]),
    "two prompts": ("generate", ["--model=run", "--prompt=a", "--prompt_ids=1"], ["2 prompts: --prompt, --prompt_ids"]),
    "a negative temperature": ("generate", [*WRITE, "--temperature=-0.5"], ["temperature=-0.5", "1e-06 or more"]),
    "top_p of nothing": ("generate", [*WRITE, "--top_p=0"], ["top_p=0.0", "above 0"]),
    "top_p of more than all": ("generate", [*WRITE, "--top_p=1.5"], ["top_p=1.5", "1 at most"]),
    "no token to write": ("generate", [*WRITE, "--tokens=0"], ["steps=0", "at least 1"]),
    "sinks without a window": ("generate", [*WRITE, "--sinks=4"], ["sinks=4", "with a window"]),
    # Nor of what is looked up afterwards.
    "no such model to write": (
        "generate", ["--model=no/where", "--prompt=a"], ["no such model: no/where", "hf download"],
    ),
    "a prompt longer than learned positions": (
        "generate", ["--model=run", "--prompt=the sink and the peak"], ["a prompt of 21 tokens", "max_length=8"],
    ),
    "a window longer than learned positions": ("generate", [*WRITE, "--window=9"], ["9 tokens", "max_length=8"]),
    "a token that the model does not have": (
        "generate", ["--model=run", "--prompt_ids=1,300"], ["no token 300", "0 to 257"],
    ),
    "a prompt that is no ids": ("generate", ["--model=run", "--prompt_ids=1,b"], ["--prompt_ids=1,b", "integers"]),
    "a first token before ids": (
        "generate", ["--model=run", "--prompt_ids=1", "--bos"], ["--bos with --prompt_ids", "--prompt=TEXT"],
    ),
    "a mistyped path": ("generate", ["--model=run", "--prompt_file=tex.txt"], ["did you mean 'text.txt'?"]),
    "a mistyped run": ("evaluate", ["--checkpoint=runn"], ["did you mean 'run'?"]),
    "a model without its flag": ("generate", ["run"], ["'run'", "did you mean --model=run?"]),
    "a missing prompt": ("generate", ["--model=run", "--prompt_file=new"], ["no such prompt file: new"]),
    "unknown experiment": ("reproduce", ["--experiment=quik"], ["'quik'", "did you mean 'quick'?"]),
    "missing model": ("reproduce", ["--model=mine=nowhere", *NEW], ["nowhere", "no such model"]),
    "model where none is measured": (
        "reproduce", ["--experiment=table2", "--model=mine=run", *NEW], ["'table2' measures no existing models"],
    ),
    "a temperature in words": ("generate", [*WRITE, "--temperature=hot"], ["--temperature='hot'", "allowed: a number"]),
    "no jobs": ("reproduce", ["--jobs=0", *NEW], ["--jobs=0"]),
    "model of a calculation": (
        "reproduce", ["--experiment=appendix_h", "--model=mine=run", *NEW],
        ["'appendix_h' measures no existing models"],
    ),
    "a model with a name for another folder": ("reproduce", ["--model=../a=run", *NEW], ["'../a'", "without '/'"]),
    "a checkpoint by a flag": ("inspect_checkpoint", ["--checkpoint=run"], ["did you mean run, without --checkpoint?"]),
    "a folder of runs": ("inspect_checkpoint", ["."], ["no orthojax checkpoint", "did you mean one of its runs: run?"]),
    "a long name": ("inspect_checkpoint", ["a" * 300], ["no such checkpoint", "aaa...aaa"]),
    "missing scale": ("reproduce", ["--scale=paper", *NEW], ["has no scale 'paper'", "tiny"]),
    "token files into a folder in use": (
        "prepare_data", ["--input=text.txt", "--output=run"], ["run already exists"],
    ),
    "token files into a file": (
        "prepare_data", ["--input=text.txt", "--output=small.py/new"], ["small.py/new: small.py is a file"],
    ),
    "token files of a missing text": ("prepare_data", ["--input=nope.txt", "--output=new"], ["nope.txt"]),
    "token files of a device": ("prepare_data", ["--input=/dev/zero", "--output=new"], ["/dev/zero is a pipe or a"]),
    "token files of no text": ("prepare_data", ["--input=", "--output=new"], ["no text files"]),
    "token files by an impossible tokenizer": (
        "prepare_data", ["--input=text.txt", "--tokenizer=bpe:many", "--output=new"], ["'bpe:many'", "bpe:N"],
    ),
    "no model to analyze": ("analyze", [], ["--model is missing", "NAME=PATH"]),
    "an unknown model": (
        "analyze", ["--model=smolm2", "--workdir=new"], ["no such model: smolm2", "did you mean 'smollm2'?"],
    ),
    "an unknown setting": ("analyze", ["--model=run", "--settings=w4a9"], ["'w4a9'", "did you mean"]),
    "a text of no row": ("analyze", ["--model=run", "--text=small.py", "--rows=-1"], ["rows", "-1"]),
    "a text of another length": (
        "analyze", ["--model=run", "--text=text.txt", "--length=9", "--workdir=analysis"], ["--length=9", "1 to 8"],
    ),
    "benchmark into a file": ("benchmark", ["--tiny", "--workdir=text.txt"], ["text.txt is a file"]),
}  # fmt: skip


def some_quick(cases, count):
    """Every case; all but the first so many are slow, since each costs the start of a process."""
    return [case if i < count else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_at_once_and_nothing_is_written(trained, case):
    script, arguments, words = REFUSED[case]
    before = snapshot(trained)
    error = complaint(run(script, *arguments, cwd=trained))
    assert all(word in error for word in words), error
    assert snapshot(trained) == before


BROKEN_CONFIGS = {
    "syntax": ("def get_config(:\n", ["SyntaxError", "line 1"]),
    "import": ("import numpie\n", ["numpie"]),
    "no get_config": ("config = 3\n", ["has no get_config()", "orthojax.config.Config"]),
    "wrong type": ("def get_config():\n    return {'steps': 3}\n", ["returned a dict", "orthojax.config.Config"]),
    "raises": ("def get_config():\n    return 1 / 0\n", ["ZeroDivisionError", "line 2"]),
    "mistyped keyword": (
        "from orthojax.config import TrainConfig\ndef get_config():\n    return TrainConfig(step=3)\n",
        ["TypeError", "'step'", "line 3"],
    ),
    "impossible": (
        "from orthojax.config import TrainConfig\ndef get_config():\n    return TrainConfig(steps=0)\n",
        ["train.steps=0", "at least 1"],
    ),
    "not UTF-8": (b"# \xff\xfe\n", ["broken.py"]),
    "JSON that is cut": ("{", ["broken.json: ", "not a JSON config"]),
    "JSON of something else": ('{"optimizer": 3}', ["broken.json: ", "optimizer"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_a_broken_config_file_is_named_with_what_is_wrong(tmp_path, case):
    text, words = BROKEN_CONFIGS[case]
    name = "broken.json" if case.startswith("JSON") else "broken.py"
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    error = complaint(run("train", f"--config={name}", "--workdir=new", cwd=tmp_path))
    assert all(word in error for word in words), error
    assert not (tmp_path / "new").exists()


def test_a_run_starts_from_the_config_of_another(trained, tmp_path):
    arguments = [f"--config={trained}/run/config.json", "--config.train.steps=3", f"--cache_dir={trained}/cache"]
    done = run("train", *arguments, f"--config.data.paths={trained}/text.txt", "--workdir=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    changed = {"train": {"steps": 3}, "data": {"paths": [f"{trained}/text.txt"]}}
    other, again = (
        json.loads((folder / "config.json").read_text()) for folder in (trained / "run", tmp_path / "again")
    )
    assert again == {part: values | changed.get(part, {}) for part, values in other.items()}


def test_parsing_imports_nothing_heavy(tmp_path):
    code = (
        f"import runpy, sys, atexit\nsys.path.insert(0, '')\nsys.argv = ['train.py', '--config.train.steps=0']\n"
        f"atexit.register(lambda: print(sorted(sys.modules.keys() & {{'jax', 'numpy', 'flax', 'orbax', 'optax'}})))\n"
        f"runpy.run_path({str(ROOT / 'launch' / 'train.py')!r}, run_name='__main__')"
    )
    done = run_from_scratch("", cwd=tmp_path, code=code)
    assert done.returncode == 2
    assert done.stdout == "[]\n"


# Wrong files; tests/test_data_*.py have more of the data. (changed from the trained folder, arguments, words.)

SMALL = ["--config=small.py", "--cache_dir=cache"]


def write(name, content):
    def change(home):
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def text(name, *more):
    return [*SMALL, "--workdir=new", f"--config.data.paths={name}", *more]


FILES = {
    "missing text": (None, text("nope.txt"), ["nope.txt"]),
    "not UTF-8": (write("a.txt", b"abc\xff" * 400), text("a.txt"), ["a.txt", "UTF-8", "0xff", "offset 3"]),
    "unknown tokenizer": (None, text("text.txt", "--config.data.tokenizer=byte"), ["'byte'", "did you mean 'bytes'"]),
    "tokenizer that is no JSON": (
        write("tokenizer.json", "{"), text("text.txt", "--config.data.tokenizer=tokenizer.json"), ["tokenizer.json"],
    ),
    "vocabulary larger than the model": (
        None, text("text.txt", "--config.model.vocab_size=100"), ["model.vocab_size=100", "258"],
    ),
    "more rows than are held out": (
        None, text("text.txt", "--config.eval.sequences=100000"), ["eval.sequences=100000", "--config.eval.sequences="],
    ),
    "more steps than at the start": (
        None, [*SMALL, "--workdir=run", "--config.train.steps=8"],
        ["train.steps=8 (was 6)", "--workdir=NEW --config.train.init_from=run"],
    ),
    "workdir that is a file": (write("new", "kept"), [*SMALL, "--workdir=new"], ["new is a file"]),
    "workdir of another config": (
        None, [*SMALL, "--workdir=run", "--config.optim.b1=0.5"], ["run", "optim.b1", "another --workdir"],
    ),
    "damaged config.json": (write("run/config.json", "{"), [*SMALL, "--workdir=run"], ["run/config.json", "JSON"]),
    "checkpoints that are a file": (
        write("new/checkpoints", "kept"), [*SMALL, "--workdir=new"], ["new/checkpoints is a file"],
    ),
    "token files that are missing": (
        None,
        [*SMALL, "--workdir=new", "--config.data.kind=tokens", "--config.data.paths=a.bin,b.bin"],
        ["no token file a.bin", "orthojax prepare"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", some_quick(FILES, 7))
def test_wrong_files_are_refused_and_the_workdir_is_left_alone(home, case):
    change, arguments, words = FILES[case]
    if change:
        change(home)
    before = snapshot(home)
    error = complaint(run("train", *arguments, cwd=home))
    assert all(word in error for word in words), error
    after = {path: content for path, content in snapshot(home).items() if path.parts[0] != "cache"}
    before = {path: content for path, content in before.items() if path.parts[0] != "cache"}
    assert after == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_an_unwritable_workdir_is_named(home):
    assert "/proc/orthojax" in complaint(run("train", *SMALL, "--workdir=/proc/orthojax", cwd=home))


# Wrong checkpoints.


def remove(name):
    return lambda home: shutil.rmtree(home / name)


def halve(pattern):
    def change(home):
        files = [path for path in (home / "run/checkpoints/6").glob(pattern) if path.is_file()]
        assert files
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


def edit_config(edit):
    def change(home):
        path = home / "run/checkpoints/6/config/metadata"
        values = json.loads(path.read_text())
        edit(values["model"])
        path.write_text(json.dumps(values))

    return change


def foreign(home):
    shutil.rmtree(home / "run/checkpoints")
    with ocp.CheckpointManager(home / "run/checkpoints") as manager:
        manager.save(6, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": 1.0})))


CHECKPOINTS = {
    "missing": (remove("run"), ["run", "no such checkpoint"]),
    "empty": (remove("run/checkpoints"), ["no orthojax checkpoint", "run"]),
    "of another program": (foreign, ["cannot read the checkpoint", "'config'"]),
    "config no JSON": (write("run/checkpoints/6/config/metadata", "{"), ["'config'", "run/checkpoints/6"]),
    "config nested without end": (write("run/checkpoints/6/config/metadata", "[" * 100_000), ["'config'", "nested"]),
    "config of another model": (
        edit_config(lambda model: model.update(d_mlp=64)),
        ["layers_0/mlp/input/kernel", "(16, 64)", "(16, 32)"],
    ),
    "config of another version": (edit_config(lambda model: model.pop("d_mlp")), ["missing: d_mlp"]),
    "truncated arrays": (halve("params/ocdbt.process_0/d/*"), ["cannot read", "run/checkpoints/6"]),
    "truncated names": (halve("params/_METADATA"), ["cannot read", "run/checkpoints/6"]),
    "no checksums": (remove("run/checkpoints/6/checksums"), ["'checksums'", "run/checkpoints/6"]),
}


@pytest.mark.parametrize("case", some_quick(CHECKPOINTS, 3))
def test_a_bad_checkpoint_is_neither_evaluated_nor_shown(home, case):
    change, words = CHECKPOINTS[case]
    change(home)
    error = complaint(run("evaluate", "--checkpoint=run", "--cache_dir=cache", cwd=home))
    assert all(word in error for word in words), error
    assert not list(home.rglob("evaluation.json"))
    complaint(run("inspect_checkpoint", "run", "--verify", cwd=home))


def test_a_checkpoint_is_not_evaluated_on_other_data_than_its_own(home):
    (home / "text.txt").write_text("quite another text, with other words in it and of another length. " * 60)
    error = complaint(run("evaluate", "--checkpoint=run", "--cache_dir=cache", cwd=home))
    assert "run/checkpoints/6: source_sha256 is" in error, error
    assert not list(home.rglob("evaluation.json"))


def test_an_evaluation_that_cannot_be_written_is_refused_before_the_work(home):
    (home / "file").write_text("kept")
    done = run("evaluate", "--checkpoint=run", "--cache_dir=cache", "--workdir=file", cwd=home)
    assert "file" in complaint(done)
    assert not PROGRESS.search(done.stderr)
    assert (home / "file").read_text() == "kept"
    (home / "run/evaluation.json").mkdir()
    done = run("evaluate", "--checkpoint=run", "--cache_dir=cache", cwd=home)
    assert "run/evaluation.json is a folder" in complaint(done)
    assert not PROGRESS.search(done.stderr)


@pytest.mark.slow
def test_an_evaluation_is_shown_also_where_the_disk_is_full_when_it_is_written(home):
    arguments = ["evaluate", "--checkpoint=run", "--cache_dir=cache"]
    done = run_from_scratch(*arguments, cwd=home, limit_bytes=1024)
    assert "File too large" in complaint(done)
    assert "ulimit -f" in complaint(done)
    assert re.search(r"^  perplexity +\d", done.stdout, re.MULTILINE)
    assert not (home / "run/evaluation.json").exists()


@pytest.mark.slow
def test_the_list_writes_nothing(tmp_path):
    done = run("reproduce", "--list", "--compile_cache=", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "quick" in done.stdout
    assert "all experiments together" in done.stdout
    assert not list(tmp_path.iterdir())


# A full disk: a limit on the size of files stands in for it.


@pytest.mark.slow
def test_a_full_disk_while_saving_keeps_the_last_checkpoint(home):
    shutil.rmtree(home / "run/checkpoints/6")
    arguments = ["train", *SMALL, "--workdir=run"]
    error = complaint(run_from_scratch(*arguments, cwd=home, limit_bytes=4096))
    assert "cannot write a checkpoint to" in error
    assert "the checkpoint of step 3 is kept" in error
    assert (home / "run/checkpoints/3/params").is_dir()
    assert run(*arguments, cwd=home).returncode == 0
    assert (home / "run/checkpoints/6").is_dir()


@pytest.mark.slow
def test_a_full_disk_while_writing_metrics_names_the_file(home):
    error = complaint(run_from_scratch("train", *SMALL, "--workdir=new", cwd=home, limit_bytes=200))
    assert "new/" in error
    assert "File too large" in error


def test_a_full_disk_while_tokenising_leaves_no_half_cache(home):
    error = complaint(
        run_from_scratch("train", "--config=small.py", "--cache_dir=other", "--workdir=new", cwd=home, limit_bytes=1024)
    )
    assert "File too large" in error
    assert not [path for path in (home / "other").iterdir() if path.is_dir()]
    assert not (home / "new").exists()


# Preparing token files.


def test_token_files_are_made_trained_on_and_refused_when_cut(home):
    done = run("prepare_data", "--input=text.txt,", "--output=tokens", cwd=home)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^100% tokenising train and validation: .*M tokens/s", done.stderr, re.MULTILINE)) == 1
    assert {path.name for path in (home / "tokens").iterdir()} == {
        "source.json", "tokenizer.json", "train.bin", "train.json", "validation.bin", "validation.json",
    }  # fmt: skip
    arguments = [
        *SMALL, "--workdir=new", "--config.data.kind=tokens",
        "--config.data.paths=tokens/train.bin,tokens/validation.bin",
    ]  # fmt: skip
    done = run("train", *arguments, cwd=home)
    assert done.returncode == 0, done.stderr
    losses = [
        [(line["step"], line.get("loss_nats")) for line in map(json.loads, (home / name / "metrics.jsonl").open())]
        for name in ("new", "run")
    ]
    assert losses[0] == losses[1]  # the same text as by data.kind=text
    content = (home / "tokens/train.bin").read_bytes()
    (home / "tokens/train.bin").write_bytes(content[:-2])
    shutil.rmtree(home / "new")
    error = complaint(run("train", *arguments, cwd=home))
    assert "token file tokens/train.bin has" in error
    assert "cut short or replaced" in error
    assert not (home / "new").exists()


# What works.


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag_and_every_config_field(tmp_path, script):
    done = run(script, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    name = {"prepare_data": "prepare", "inspect_checkpoint": "inspect"}.get(script, script)
    source = (ROOT / "orthojax/commands" / f"{name}.py").read_text()
    flags = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source)
    flags += [flag for flag in ("config", "cache_dir") if f"cli.define_{flag}()" in source]
    assert flags or script == "inspect_checkpoint"
    assert all(f"--{flag}=" in done.stdout for flag in flags)
    assert source.split('"""')[1].splitlines()[0] in done.stdout
    words = " ".join(done.stdout.split())
    fields = [
        re.search(rf" --config\.{path}=.* {re.escape(text)}", words) for path, text in describe_fields(Config).items()
    ]
    assert all(fields) if script == "train" else not any(fields)


WRITING = ["--tokens=5", "--temperature=0.8", "--seed=3"]
IDS = "--prompt_ids=116,104,101"


@pytest.fixture(scope="module")
def written(trained):
    """The run, and what it writes after "the"."""
    loaded = orthojax.load(trained / "run")
    return loaded, generate(loaded, list(b"the"), 5, temperature=0.8, seed=3)


@pytest.mark.parametrize(
    "prompt", [pytest.param("--prompt=the", marks=pytest.mark.slow), "--prompt_file=prompt.txt",
               pytest.param(IDS, marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_run_writes_text(home, written, prompt):
    loaded, expected = written
    (home / "prompt.txt").write_text("the")
    done = run("generate", prompt, "--model=run", *WRITING, cwd=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == loaded.tokenizer.decode(expected) + "\n"
    assert re.fullmatch(r"5 tokens: the first after [\d.]+ s, then [\d.]+ tokens/s\n", done.stderr)


def test_a_model_without_a_tokenizer_writes_ids(home, written):
    loaded, expected = written
    write_folder(home / "exported", CONFIG.model, loaded.params)
    done = run("generate", "--model=exported", IDS, *WRITING, cwd=home)
    assert done.stdout.split() == [str(token) for token in expected]
    assert "--prompt_ids" in complaint(run("generate", "--model=exported", "--prompt=the", *WRITING, cwd=home))


@pytest.mark.slow
def test_a_model_without_a_tokenizer_writes_text_with_one_that_is_given(home, written):
    loaded, expected = written
    write_folder(home / "exported", CONFIG.model, loaded.params)
    loaded.tokenizer.save(home / "tokenizer.json")
    arguments = ["--model=exported", "--prompt=the", "--tokenizer=tokenizer.json", *WRITING]
    assert run("generate", *arguments, cwd=home).stdout == loaded.tokenizer.decode(expected) + "\n"


def test_a_run_is_analyzed(home):
    done = run("analyze", "--model=mine=run", "--text=text.txt", "--settings=none", "--workdir=new", cwd=home)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((home / "new/results.json").read_text())["rows"]
    assert row["variant"] == "mine"
    assert row["metrics"]["perplexity"] > 1.0


def test_a_run_is_trained_evaluated_and_inspected(home):
    run_dir = home / "run"
    assert json.loads((run_dir / "config.json").read_text()) == json.loads(to_json(CONFIG))
    # From inside the folder of the checkpoints; data.paths are relative to where the command is started.
    (run_dir / "checkpoints/text.txt").symlink_to(home / "text.txt")
    done = run("evaluate", "--checkpoint=3", f"--cache_dir={home}/cache", cwd=run_dir / "checkpoints")
    assert done.returncode == 0, done.stderr
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["checkpoint"].endswith("run/checkpoints/3")
    assert f"{result['metrics']['perplexity']:.6g}" in done.stdout
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    validation = {line["step"]: line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line}
    assert result["metrics"]["loss_nats"] == pytest.approx(validation[3], rel=1e-5)
    done = run("inspect_checkpoint", "run", cwd=home)
    assert done.returncode == 0, done.stderr
    for line in (r"step 6\b", r"model\.normalizer = softmax1", r"layers_0/attention/query/kernel +float32 +\[16, 16\]"):
        assert re.search(line, done.stdout), done.stdout


STOPPED = """
import os
import signal
import threading
import time
from pathlib import Path

from orthojax.config import Config, from_json


def stop():
    metrics = Path("new/metrics.jsonl")
    while not metrics.is_file() or '"step": {step},' not in metrics.read_text():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.{name})


def get_config():
    threading.Thread(target=stop, daemon=True).start()
    return from_json(Config, Path("small.json").read_text())
"""


def test_a_terminated_run_says_where_it_stopped(home):
    (home / "stopped.py").write_text(STOPPED.format(name="SIGTERM", step=4))
    arguments = ["--cache_dir=cache", "--config.train.steps=30", "--config.train.checkpoint_every_steps=30"]
    arguments.append("--config.train.eval_every_steps=0")
    done = run("train", "--config=stopped.py", "--workdir=new", *arguments, cwd=home)
    assert done.returncode == 128 + 15, done.stderr
    assert "Traceback" not in done.stderr
    assert f"stopped at step {find_checkpoint(home / 'new').name}, state saved" in done.stderr.splitlines()[-1]


@pytest.mark.slow  # runs in this process that are stopped are in test_checkpoint.py
@pytest.mark.parametrize("signals", [[("SIGTERM", 4, 128 + 15)], [("SIGKILL", 10, -9), ("SIGTERM", 22, 128 + 15)]])
def test_a_killed_and_a_terminated_run_end_with_the_same_bits(home, signals):
    """The config file starts the thread that sends the signal; test_checkpoint_kills.py has many more."""
    steps = signals[-1][1] + 18
    arguments = ["--cache_dir=cache", f"--config.train.steps={steps}", f"--config.train.eval_every_steps={steps}"]
    arguments.append(f"--config.train.checkpoint_every_steps={3 if len(signals) > 1 else steps}")
    assert run("train", "--config=small.py", "--workdir=whole", *arguments, cwd=home).returncode == 0
    for name, step, code in signals:
        (home / "stopped.py").write_text(STOPPED.format(name=name, step=step))
        done = run("train", "--config=stopped.py", "--workdir=new", *arguments, cwd=home)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert f"stopped at step {find_checkpoint(home / 'new').name}, state saved" in done.stderr.splitlines()[-1]
    assert run("train", "--config=small.py", "--workdir=new", *arguments, cwd=home).returncode == 0
    assert losses(home / "new") == losses(home / "whole")
    whole, new = (find_checkpoint(home / name) for name in ("whole", "new"))
    assert whole.name == new.name == str(steps)
    assert bits(read_params(new)) == bits(read_params(whole))
    assert bits(read_optimizer_state(new)) == bits(read_optimizer_state(whole))


def test_a_run_says_what_it_is_what_it_waits_for_and_how_it_ended(home):
    """A run of fewer steps than the warm-up of its config: the warm-up is shortened in proportion."""
    short = [*SMALL, "--workdir=new", "--config.train.steps=2", "--config.optim.learning_rate=0.5"]
    done = run("train", *short, cwd=home)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "workdir new"
    assert re.fullmatch(
        r"  model +[\d,]+ parameters: 1 layers? of 2 heads, d_model 16, softmax1 attention, float32", said[1]
    )
    assert "2 steps of 4 x 8 tokens" in said[2]
    assert said[3].endswith("orthoadam (hadamard, axes residual), learning rate 0.5 without warm-up")
    assert said[4].endswith("1 x cpu")
    assert re.fullmatch(r"  data +.*tokenizer bytes, [\d,]+ train tokens, [\d,]+ validation tokens", said[5])
    assert json.loads((home / "new/config.json").read_text())["optim"]["warmup_steps"] == 0
    assert json.loads((home / "new/tokenizer.json").read_text())["orthojax_tokenizer"] == "bytes"
    waited = [line for line in done.stderr.splitlines() if "%" not in line]
    assert waited[0] == "compiling ..."
    assert re.fullmatch(r"compiled, first step done: \d+ s", waited[1])
    assert len(waited) == 2
    lines = [json.loads(line) for line in (home / "new/metrics.jsonl").open()]
    (loss,) = [line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line]
    assert said[6].startswith(
        f"done: step 2, loss {lines[1]['loss_nats']:.4f}, validation loss {loss:.4f}, perplexity "
    )
    assert float(said[6].split()[-1].replace(",", "")) == pytest.approx(math.exp(loss), rel=0.01)
    assert said[7].split() == ["metrics", "new/metrics.jsonl"]
    command = said[9].partition("python ")[2].split()
    assert Path(command[0]) == ROOT / "launch/evaluate.py"
    assert command[1:] == ["--checkpoint=new", "--cache_dir=cache"]

    again = run("train", *short, cwd=home)
    assert again.stdout == done.stdout
    assert again.stderr == "all 2 steps are done\n"


LOSING = """
import os
from orthojax.commands import cli
cli.shorten_lost_peers()
os.write(2, b"of a library\\n")
os.write(2, b"W1122 preemption_sync_manager.cc:147] Failed\\nF1122 client.h:80] {fatal}\\n***")
os.abort()
"""


def test_native_logs_of_a_lost_process_become_three_lines_and_others_stay(tmp_path):
    fatal = "Terminating process because the JAX distributed service detected fatal errors. This most likely"
    done = run_from_scratch("", cwd=tmp_path, code=LOSING.format(fatal=fatal))
    assert done.stderr == "of a library\n" + PEER_LOST
    done = run_from_scratch("", cwd=tmp_path, code=LOSING.format(fatal="out of memory"))
    assert done.stderr.startswith(
        "of a library\nW1122 preemption_sync_manager.cc:147] Failed\nF1122 client.h:80] out of"
    )
    assert done.stderr.endswith("***")


CRASH = """
import sys, threading
sys.argv = ["train.py"]
from orthojax.commands import cli
from orthojax.errors import UserError

def other_thread():
    raise RuntimeError("in another thread")

def main(_):
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    {body}

cli.run(main)
"""


def test_a_crash_of_ours_keeps_its_traceback(tmp_path):
    done = run_from_scratch("", cwd=tmp_path, code=CRASH.format(body="raise KeyError('a defect')"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'a defect'" in done.stderr
    assert "RuntimeError: in another thread" in done.stderr


def test_errors_of_other_threads_are_shown_unless_the_user_is_to_blame(tmp_path):
    done = run_from_scratch("", cwd=tmp_path, code=CRASH.format(body="pass"))
    assert done.returncode == 0
    assert "RuntimeError: in another thread" in done.stderr
    done = run_from_scratch("", cwd=tmp_path, code=CRASH.format(body="raise UserError('wrong', hint='so')"))
    assert complaint(done) == "error: wrong\n  so"


@pytest.mark.parametrize(
    "command", [pytest.param(["inspect_checkpoint.py", "run"], marks=pytest.mark.slow), ["train.py", "--help"]]
)
def test_a_closed_pipe_is_no_crash(trained, command):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch" / command[0]), command[1]],
        cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    process.stdout.close()  # before it writes anything
    assert process.stderr.read() == b""
    assert process.wait() == 128 + 13
