import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import model_oracle
import numpy as np
import pytest
from small_runs import CONFIG as SMALL
from small_runs import ROOT, TEXT, python, snapshot

import orthojax
from orthojax.config import Config, describe_fields, replace, to_json
from orthojax.formatting import number
from orthojax.model.generation import generate
from orthojax.pretrained import write_folder
from orthojax.train import find_checkpoint

SCRIPTS = ("train", "evaluate", "analyze", "generate", "export", "inspect_checkpoint", "prepare_data", "reproduce")
CONFIG = replace(
    SMALL,
    TEXT
    | {"train.steps": 6, "train.log_every_steps": 1, "train.eval_every_steps": 3, "eval.batch_size": 4}
    | {"optim.warmup_steps": 1},
)
PROGRESS = re.compile(r"^(.*\d+%\||compil(ing|ed)|resumes after step|step \d+/|all \d+ steps)|^\s*$")


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """Keeps compiled programs between the commands, because many are the same."""
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


def complaint(done):
    """The lines of an error as a user must see it: exit code 2, at most three lines besides the progress."""
    lines = [line for line in done.stderr.splitlines() if not PROGRESS.match(line)]
    assert done.returncode == 2, done.stderr
    assert 1 <= len(lines) <= 3, done.stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.stderr + done.stdout
    return "\n".join(lines)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a text, a config file, a cache and a finished run `run`."""
    home = tmp_path_factory.mktemp("trained")
    (home / "text.txt").write_text("the sink and the peak, the norm and the token. " * 60)
    (home / "binary").write_bytes(bytes(range(128, 256)))
    (home / "small.json").write_text(to_json(CONFIG))
    (home / "small.py").write_text(
        "from pathlib import Path\nfrom orthojax.config import Config\nfrom orthojax.config import from_json\n\n\n"
        "def get_config():\n    return from_json(Config, Path('small.json').read_text())\n"
    )
    done = run("train", "--config=small.py", "--cache_dir=cache", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "workdir runs/small\n" in done.stdout
    (home / "runs/small").rename(home / "run")
    (home / "runs").rmdir()
    return home


@pytest.fixture
def home(trained, tmp_path):
    """A copy of `trained` that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "home"))


# What is refused, most of it before anything heavy is imported. (script, arguments, what the lines name.)

SMALL_RUN = ["--config=small.py", "--cache_dir=cache"]
WRITE = ["--model=run", "--prompt=a"]
REFUSED = {
    "mistyped flag": ("train", ["--wrkdir=a"], ["wrkdir", "--workdir=..."]),
    "flag without a value": ("train", ["--workdir"], ["--workdir", "allowed: ", "--FLAG=VALUE"]),
    "rows in letters": ("analyze", ["--rows=abc"], ["--rows=abc is not valid", "allowed: a non-negative integer"]),
    "maybe": ("analyze", ["--quick=maybe"], ["--quick=maybe", "allowed: ", "true or false"]),
    "export to nowhere": ("export", ["--model=run"], ["--to is missing", "--to=DIR"]),
    "export into a file": ("export", ["--model=run", "--to=small.json"], ["small.json is a file"]),
    "positional argument": ("train", ["configs/x.py"], ["'configs/x.py'"]),
    "override without dashes": ("train", ["learning_rate=3"], ["did you mean --config.optim.learning_rate=...?"]),
    "field without its group": ("train", ["--steps", "20"], ["did you mean --config.train.steps=...?"]),
    "two positional arguments": ("inspect_checkpoint", ["a", "b"], ["2 arguments", "a checkpoint folder"]),
    "no positional argument": ("inspect_checkpoint", [], ["0 arguments", "a checkpoint folder"]),
    # What fields may be is in tests/test_config.py.
    "mistyped field": ("train", ["--config.model.d_modle=8"], ["model.d_modle", "model.d_model"]),
    "override without a value": ("train", ["--config.train.steps"], ["--config.train.steps", "VALUE"]),
    "override without a config": ("evaluate", ["--config.train.steps=3"], ["config"]),
    "a flag file that is no text": ("train", ["--flagfile=binary"], ["--flagfile cannot be read"]),
    "no flag file": ("train", ["--flagfile=nowhere"], ["--flagfile", "nowhere", "allowed: a UTF-8 file"]),
    "an empty config": ("train", ["--config=", "--workdir=new"], ["--config= is empty"]),
    "an empty workdir": ("train", [*SMALL_RUN, "--workdir="], ["--workdir= is empty"]),
    "an empty list": ("analyze", ["--model=run", "--text="], ["--text= is empty"]),
    "a folder as a config": ("train", ["--config=."], ["no config file: ."]),
    "a file as a run": ("evaluate", ["--checkpoint=text.txt"], ["text.txt is no folder"]),
    "a file as a model": ("analyze", ["--model=small.json"], ["small.json is no model", ".gguf"]),
    "a workdir that is not UTF-8": ("train", [*SMALL_RUN, "--workdir=new\udce9"], ["new\\udce9", "UTF-8"]),
    "a prompt that is not UTF-8": ("generate", ["--model=run", "--prompt=the\udce9"], ["'the\\udce9'", "UTF-8"]),
    "devices that no process has": ("train", ["--dry_run", "--pretend_devices=1000000"], ["2048"]),
    "missing config file": ("train", ["--config=smal.py"], ["smal.py", "'small.py'"]),
    "config file that is no Python": ("train", ["--config=text.txt"], ["text.txt", "Python file"]),
    "config of a run without a workdir": ("train", ["--config=run/config.json"], ["run/config.json", "--workdir"]),
    "a run as a config": ("train", ["--config=run"], ["'run/config.json'"]),
    "no checkpoint named": ("evaluate", [], ["--checkpoint"]),
    "no output named": ("prepare_data", [], ["--output"]),
    "unknown scale": ("reproduce", ["--scale=tinny"], ["'tinny'", "'tiny'"]),
    "seeds that are no numbers": ("reproduce", ["--seeds=1,two"], ["1,two"]),
    "unknown experiment": ("reproduce", ["--experiment=quik"], ["'quik'", "'quick'"]),
    "no model to write": ("generate", ["--prompt=a"], ["--model"]),
    "no prompt": ("generate", ["--model=run"], ["--prompt"]),
    "a temperature in words": ("generate", [*WRITE, "--temperature=hot"], ["=hot is not valid", "allowed: a number"]),
    "a prompt longer than learned positions": (
        "generate", ["--model=run", "--prompt=the sink and the peak"], ["21 tokens", "a window of 8"],
    ),
    "a mistyped run": ("evaluate", ["--checkpoint=runn"], ["'run'"]),
    "a folder of runs": ("inspect_checkpoint", ["."], ["run"]),
    "token files of a missing text": ("prepare_data", ["--input=nope.txt", "--output=new"], ["nope.txt"]),
    "no model to analyze": ("analyze", [], ["--model"]),
    # Wrong files; tests/test_data_refused.py has more of the data.
    "vocabulary larger than the model": (
        "train", [*SMALL_RUN, "--workdir=new", "--config.model.vocab_size=100"], ["vocab_size=100", "258"]),
    "workdir that is a file": ("train", [*SMALL_RUN, "--workdir=text.txt"], ["text.txt is a file"]),
    "workdir of another config": ("train", [*SMALL_RUN, "--workdir=run", "--config.optim.b1=0.5"], ["run", "optim.b1"]),
}  # fmt: skip
ADDRESSED = {
    "train": "--cache_dir=A --compile_cache=A",
    "analyze": "--workdir=A --token_ids=A --tokenizer=A --card=A",
    "generate": "--prompt_file=A --tokenizer=A",
    "inspect_checkpoint": "A",
    "prepare_data": "--output=A --tfds_dir=A",
    "reproduce": "--workdir=A --runs_dir=A --cache_dir=A --report=A",
}
STORED = {  # which are read and written there, but fsspec's package for gs:// is missing
    "train": "--workdir=A --config=A --config.train.init_from=A",
    "evaluate": "--checkpoint=A",
    "analyze": "--model=A --model=name=A",
    "reproduce": "--model=A",
}
REFUSED |= {
    f"{script}, an address as {flag}": (script, [flag.replace("A", "gs://bucket/x")], [f"gs://bucket/x {said}"])
    for table, said in ((ADDRESSED, "is an address"), (STORED, "cannot be reached"))
    for script, flags in table.items()
    for flag in flags.split()
}
TOKENS = ["--config.data.kind=tokens", "--config.data.paths=s3://b/train.bin,s3://b/validation.bin"]
REFUSED["an address of token files"] = (
    "train",
    [*TOKENS, "--workdir=new"],
    ["s3://b/train.bin cannot be reached", "s3fs"],
)


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_and_write_nothing(trained, case):
    script, arguments, words = REFUSED[case]
    before = snapshot(trained)
    error = complaint(run(script, *arguments, cwd=trained))
    assert all(word in error for word in words), error
    assert snapshot(trained) == before


TRAIN_CONFIG = "from orthojax.config import TrainConfig\ndef get_config():\n    return TrainConfig"
BROKEN_CONFIGS = {
    "syntax": ("def get_config(:\n", ["SyntaxError", "line 1"]),
    "no get_config": ("config = 3\n", ["get_config()"]),
    "wrong type": ("def get_config():\n    return {'steps': 3}\n", ["get_config()"]),
    "raises": ("def get_config():\n    return 1 / 0\n", ["ZeroDivisionError", "line 2"]),
    "exits": ("import sys\nsys.exit(3)\n", ["SystemExit: 3", "line 2"]),
    "its own exception": ("class E(BaseException):\n    __str__ = None\nraise E\n", ["broken.py, line 3: E"]),
    "exits later": ("def get_config():\n    raise SystemExit\n", ["SystemExit", "line 2"]),
    "mistyped keyword": (f"{TRAIN_CONFIG}(step=3)\n", ["'step'", "line 3"]),
    "impossible": (f"{TRAIN_CONFIG}(steps=0)\n", ["train.steps=0"]),
    "not UTF-8": (b"# \xff\xfe\n", ["broken.py"]),
    "JSON that is cut": ("{", ["broken.json", "JSON"]),
    "JSON of something else": ('{"optimizer": 3}', ["broken.json", "optimizer"]),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_broken_config_file_is_named(tmp_path, case):
    text, words = BROKEN_CONFIGS[case]
    name = "broken.json" if case.startswith("JSON") else "broken.py"
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    error = complaint(run("train", f"--config={name}", "--workdir=new", cwd=tmp_path))
    assert all(word in error for word in words), error
    assert not (tmp_path / "new").exists()


def test_run_starts_from_the_config_of_another(trained, tmp_path):
    arguments = [f"--config={trained}/run/config.json", "--config.train.steps=3", f"--cache_dir={trained}/cache"]
    done = run("train", *arguments, f"--config.data.paths={trained}/text.txt", "--workdir=again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    changed = {"train": {"steps": 3}, "data": {"paths": [f"{trained}/text.txt"]}}
    folders = (trained / "run", tmp_path / "again")
    other, again = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert again == {part: values | changed.get(part, {}) for part, values in other.items()}


LIGHT = [
    *("train --config.train.steps=0", "train --config.train.init_from=/nowhere", "evaluate --checkpoint=/nowhere"),
    *("analyze --model=a=/nowhere", "generate --model=/nowhere --prompt=a", "inspect /nowhere"),
    *("reproduce --model=/nowhere", "analyze --model=/nowhere --checkpoints"),
]


def test_wrong_fields_and_missing_models_are_refused_before_heavy_imports(tmp_path):
    code = f"""
import os, sys
from orthojax import commands
for line in {LIGHT!r}:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    sys.argv = ["orthojax", *line.split()]
    try:
        commands.main()
    except SystemExit as done:
        print(done.code, sorted(sys.modules.keys() & {{"jax", "numpy", "flax", "orbax", "optax"}}), flush=True)
        os._exit(0)
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines() == ["2 []"] * len(LIGHT), done.stderr
    assert done.stderr.count("/nowhere") == len(LIGHT) - 1


def test_bad_checkpoint_is_neither_evaluated_nor_shown(home):
    for path in (home / "run/checkpoints/6/params/ocdbt.process_0/d").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    assert "run/checkpoints/6" in complaint(run("evaluate", "--checkpoint=run", "--cache_dir=cache", cwd=home))
    assert not list(home.rglob("evaluation.json"))
    complaint(run("inspect_checkpoint", "run", "--verify", cwd=home))


def test_unwritable_evaluation_is_refused_before_the_work(home):
    (home / "file").write_text("kept")
    done = run("evaluate", "--checkpoint=run", "--cache_dir=cache", "--workdir=file", cwd=home)
    assert "file" in complaint(done)
    assert "%" not in done.stderr
    assert (home / "file").read_text() == "kept"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag_and_config_field(tmp_path, script):
    done = run(script, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    name = {"prepare_data": "prepare", "inspect_checkpoint": "inspect"}.get(script, script)
    source = (ROOT / "orthojax/commands" / f"{name}.py").read_text()
    flags = re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source)
    assert flags
    assert all(f"--{flag}=" in done.stdout for flag in flags)
    assert source.split('"""')[1].splitlines()[0] in done.stdout
    words, described = " ".join(done.stdout.split()), describe_fields(Config).items()
    fields = [re.search(rf" --config\.{path}=.* {re.escape(text)}", words) for path, text in described]
    assert all(fields) if script == "train" else not any(fields)


WRITING = ["--tokens=5", "--temperature=0.8", "--seed=3"]
IDS = "--prompt_ids=116,104,101"


@pytest.fixture(scope="module")
def written(trained):
    """The run, and what it writes after "the"."""
    loaded = orthojax.load(trained / "run")
    return loaded, generate(loaded, list(b"the"), 5, temperature=0.8, seed=3)


def test_run_writes_text(home, written):
    loaded, expected = written
    (home / "prompt.txt").write_text("the")
    done = run("generate", "--prompt_file=prompt.txt", "--model=run", *WRITING, cwd=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == loaded.tokenizer.decode(expected) + "\n"
    done = run("generate", "--prompt=the", "--model=run", "--json", *WRITING, cwd=home)
    text = loaded.tokenizer.decode(expected)
    assert json.loads(done.stdout) == {"prompt_ids": list(b"the"), "token_ids": expected.tolist(), "text": text}


def test_model_without_tokenizer_writes_ids(home, written):
    loaded, expected = written
    write_folder(home / "exported", CONFIG.model, loaded.params)
    done = run("generate", "--model=exported", IDS, *WRITING, cwd=home)
    assert done.stdout.split() == [str(token) for token in expected]
    assert "--prompt_ids" in complaint(run("generate", "--model=exported", "--prompt=the", *WRITING, cwd=home))
    loaded.tokenizer.save(home / "tokenizer.json")
    arguments = ["--model=exported", "--prompt=the", "--tokenizer=tokenizer.json", *WRITING]
    assert run("generate", *arguments, cwd=home).stdout == loaded.tokenizer.decode(expected) + "\n"


def test_run_is_evaluated(home):
    run_dir = home / "run"
    assert json.loads((run_dir / "config.json").read_text()) == json.loads(to_json(CONFIG))
    # From inside the folder of the checkpoints; data.paths are relative to where the command is started.
    (run_dir / "checkpoints/text.txt").symlink_to(home / "text.txt")
    done = run("evaluate", "--checkpoint=3", f"--cache_dir={home}/cache", cwd=run_dir / "checkpoints")
    assert done.returncode == 0, done.stderr
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["checkpoint"].endswith("run/checkpoints/3")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    validation = {line["step"]: line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line}
    assert result["metrics"]["loss_nats"] == pytest.approx(validation[3], rel=1e-5)


def test_run_leaves_for_transformers(home):
    done = run("evaluate", "--checkpoint=run", "--cache_dir=cache", "--settings=none", cwd=home)
    assert done.returncode == 0, done.stderr
    done = run("export", "--model=run", "--to=out/mine", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "out/mine, with its modeling_orthojax.py" in done.stdout
    assert "transformers does not" in done.stdout  # read a tokenizer of bytes
    files = {"README.md", "config.json", "model.safetensors", "modeling_orthojax.py", "tokenizer.json"}
    assert {path.name for path in (home / "out/mine").iterdir()} == files
    card = (home / "out/mine/README.md").read_text()
    metrics = json.loads((home / "run/evaluation.json").read_text())["metrics"]
    perplexity = f"{metrics['perplexity']:.3g}"
    for word in ("export --model=run --to=out/mine", perplexity, "kurtosis_first", "trust_remote_code=True"):
        assert word in card, word
    ours, same = (orthojax.load(home / name) for name in ("run", "out/mine"))
    assert same.config.model == ours.config.model
    jax.tree.map(np.testing.assert_array_equal, ours.params, same.params)
    assert "out/mine is not empty" in complaint(run("export", "--model=run", "--to=out/mine", cwd=home))
    done = run("export", "--model=run/checkpoints/3", "--to=three", cwd=home)
    assert "evaluation.json is left out" in done.stderr
    assert "kurtosis_first" not in (home / "three/README.md").read_text()


def test_model_that_cannot_leave_is_named(home):
    config = model_oracle.CONFIGS["latent attention and experts"]
    write_folder(home / "latent", config, model_oracle.stacked_params(config))
    assert "model.latent=" in complaint(run("export", "--model=latent", "--to=out", cwd=home))


def test_run_shows_its_config_steps_and_losses(home):
    short = [*SMALL_RUN, "--workdir=new", "--config.train.steps=2", "--config.optim.learning_rate=0.5"]
    done = run("train", *short, cwd=home)
    assert done.returncode == 0, done.stderr
    for word in ("softmax1", "2 steps", "orthoadam", "0.5", "tokenizer bytes", "orthojax evaluate --checkpoint=new"):
        assert word in done.stdout, word
    lines = [json.loads(line) for line in (home / "new/metrics.jsonl").open()]
    (loss,) = [line["validation_loss_nats"] for line in lines if "validation_loss_nats" in line]
    assert f"{lines[1]['loss_nats']:.4g}" in done.stderr
    assert f"validation loss {number(loss)}" in done.stdout
    again = run("train", *short, cwd=home)
    assert again.stdout == done.stdout
    assert "2 steps are done" in again.stderr


CRASH = "from orthojax.commands import cli\ndef main(_):\n    raise KeyError('a defect')\ncli.run(main)"


def test_crash_of_ours_keeps_its_traceback(tmp_path):
    done = python("-c", CRASH, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a defect" in done.stderr


def test_closed_pipe_is_no_crash(trained):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "launch/train.py"), "--help"],
        cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    process.stdout.close()  # before it writes anything
    assert process.stderr.read() == b""
    assert process.wait() == 128 + 13


def test_checkpoint_is_not_evaluated_on_other_data(home):
    (home / "text.txt").write_text("quite another text, with other words in it and of another length. " * 60)
    error = complaint(run("evaluate", "--checkpoint=run", "--cache_dir=cache", cwd=home))
    assert "source_sha256" in error
    assert not list(home.rglob("evaluation.json"))


def test_token_files_are_made_and_trained_on(home):
    done = run("prepare_data", "--input=text.txt,", "--output=tokens", cwd=home)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (home / "tokens").iterdir()} == {
        "tokenizer.json", "train.bin", "train.json", "validation.bin", "validation.json",
    }  # fmt: skip
    arguments = [
        *SMALL_RUN, "--workdir=new", "--config.data.kind=tokens",
        "--config.data.paths=tokens/train.bin,tokens/validation.bin",
    ]  # fmt: skip
    done = run("train", *arguments, cwd=home)
    assert done.returncode == 0, done.stderr
    lines = (map(json.loads, (home / name / "metrics.jsonl").open()) for name in ("new", "run"))
    losses = [[(line["step"], line.get("loss_nats")) for line in of] for of in lines]
    assert losses[0] == losses[1]  # the same text as by data.kind=text


STOPPED = """
import os
import signal
import threading
import time
from pathlib import Path

from orthojax.config import Config, from_json


def stop():
    metrics = Path("new/metrics.jsonl")
    while not metrics.is_file() or '"step": 4,' not in metrics.read_text():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)


def get_config():
    threading.Thread(target=stop, daemon=True).start()
    return from_json(Config, Path("small.json").read_text())
"""


def test_terminated_run_says_where_it_stopped(home):
    (home / "stopped.py").write_text(STOPPED)
    arguments = ["--cache_dir=cache", "--config.train.steps=30", "--config.train.checkpoint_every_steps=30"]
    arguments.append("--config.train.eval_every_steps=0")
    done = run("train", "--config=stopped.py", "--workdir=new", *arguments, cwd=home)
    assert done.returncode == 128 + 15, done.stderr
    assert "Traceback" not in done.stderr
    assert f"step {find_checkpoint(home / 'new').name}, state saved" in done.stderr.splitlines()[-1]
