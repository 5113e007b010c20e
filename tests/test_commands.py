"""`orthojax COMMAND`: what it lists and refuses, its completion, and what it says where an extra is missing."""

import importlib
import inspect
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import orthojax
from orthojax.commands import COMMANDS, _words, cli, completion
from orthojax.errors import UserError, how_to_install

ROOT = Path(orthojax.__file__).parent.parent


def run(*arguments, cwd, code=None):
    """`python -m orthojax`, or other code with its arguments."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "orthojax"]), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_help_lists_every_command(tmp_path, arguments):
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(COMMANDS)
    modules = {path.stem for path in (ROOT / "orthojax/commands").glob("*.py")}
    assert set(COMMANDS) == modules - {"__init__", "cli", "completion"}


def test_every_command_has_a_script_of_the_same_flags(tmp_path):
    scripts = {path.read_text().split('start("')[1].split('"')[0]: path for path in (ROOT / "launch").glob("*.py")}
    assert set(scripts) <= set(COMMANDS)
    assert run("generate", "--help", cwd=tmp_path).stdout == run(cwd=tmp_path, code=START.format("generate")).stdout


START = f"""
import runpy, sys
sys.argv = ["generate.py", "--help"]
runpy.run_path("{ROOT}/launch/{{}}.py", run_name="__main__")
"""


def test_the_version_is_printed(tmp_path):
    assert run("--version", cwd=tmp_path).stdout == f"{orthojax.__version__}\n"


def test_a_mistyped_command_is_refused_in_three_lines(tmp_path):
    done = run("trian", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: unknown command 'trian'", f"  allowed: {' | '.join(COMMANDS)}", "  did you mean 'train'?",
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["appendix_h", pytest.param("appendix_h/results.json", marks=pytest.mark.slow)])
def test_a_report_is_rendered_from_a_folder_of_results_or_its_file(tmp_path, source):
    done = run("reproduce", f"--render={ROOT / 'results' / source}", "--workdir=new", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written: new/report.md, report.html" in done.stdout
    assert "## What held and what did not" in (tmp_path / "new/report.md").read_text()
    assert "<!doctype html>" in (tmp_path / "new/report.html").read_text()


def test_parts_of_an_experiment_become_one_report_and_one_results_json(tmp_path):
    whole = json.loads((ROOT / "results/appendix_h/results.json").read_text())
    for seed in (0, 1):
        (tmp_path / f"seed_{seed}").mkdir()
        rows = [row for row in whole["rows"] if row["seed"] == seed]
        part = whole | {"rows": rows, "provenance": whole["provenance"] | {"seeds": [seed]}}
        (tmp_path / f"seed_{seed}/results.json").write_text(json.dumps(part))
    done = run("reproduce", "--render=seed_0,seed_1", "--workdir=both", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written: both/report.md, report.html, results.json" in done.stdout
    joined = json.loads((tmp_path / "both/results.json").read_text())
    assert joined["rows"] == [row for row in whole["rows"] if row["seed"] < 2]
    assert "--seeds=0,1\n- seed 0: " in (tmp_path / "both/report.md").read_text()
    before = (tmp_path / "seed_0/results.json").read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/results.json").write_bytes(before)
    for render, workdir, words in (
        ("seed_0,seed_1", "other", "other/results.json is there already"),
        ("seed_0,seed_0/results.json", "new", "twice"),
        ("seed_0,", "new", "--render=seed_0,"),
        ("", "new", "A,B"),
    ):
        done = run("reproduce", f"--render={render}", f"--workdir={workdir}", cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
    assert (tmp_path / "other/results.json").read_bytes() == before
    assert not (tmp_path / "new").exists()


# Completion.


@pytest.fixture(scope="module")
def bash_script():
    return completion.script("bash", words={name: _words(name) for name in COMMANDS})


def completed(script, *typed):
    """What bash offers for the last word."""
    words = " ".join(f"'{word}'" for word in ["orthojax", *typed])
    code = f"{script}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _orthojax; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_flags_and_fields(bash_script):
    assert completed(bash_script, "") == list(COMMANDS)
    assert completed(bash_script, "ev") == ["evaluate"]
    assert completed(bash_script, "train", "--work") == ["--workdir="]
    assert completed(bash_script, "train", "--config.optim.learning_r") == ["--config.optim.learning_rate="]
    assert completed(bash_script, "evaluate", "--config.") == []
    assert completed(bash_script, "inspect", "--v") == ["--verify"]  # no value follows
    assert completed(bash_script, "train", "--workdir", "=", "ru") == []  # files are bash's own


def test_completion_of_another_shell_is_refused():
    assert completion.script("zsh", words={}).startswith("autoload -U +X bashcompinit")
    with pytest.raises(UserError, match=r"shell 'fsh'\nallowed: orthojax completion bash \| zsh"):
        completion.script("fsh", words={})


# Configs of the package.


def test_configs_of_the_package_are_found_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("tiny_cured", "configs/tiny_cured.py", "configs/tiny_cured"):
        assert cli._shipped(Path(path)) == ROOT / "configs/tiny_cured.py"
    for path in ("mine.py", "/tiny_cured", "configs", "configs/mine.py"):
        assert cli._shipped(Path(path)) == Path(path)


def test_a_mistyped_config_is_compared_with_those_of_the_package(tmp_path):
    done = run("train", "--config=tiny_curde", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "  did you mean 'tiny_cured'?"
    assert run("train", "--config=configs", cwd=tmp_path).returncode == 2


# Missing extras.

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
        ("matplotlib", ["reproduce", "--list"], "train,reports"),
    ],
)
def test_a_command_names_the_extra_that_is_missing(tmp_path, missing, command, extra):
    code = BLOCKED.format([missing]) + "from orthojax.commands import main\nmain()"
    done = run(*command, cwd=tmp_path, code=code)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1:] == [f"  pip install 'orthojax[{extra}]'"]
    assert done.stderr.startswith(f"error: {missing}")
    assert "is not installed" in done.stderr


def test_the_core_works_without_extras_and_other_names_say_which_they_need(tmp_path):
    code = BLOCKED.format(["flax", "orbax", "grain", "tqdm", "scipy.stats", "matplotlib", "jinja2", "tokenizers",
                           "tensorflow_datasets", "tensorflow"])  # fmt: skip
    code += "import jax.numpy as jnp, numpy as np, orthojax\n"
    code += "from orthojax import analysis, ops, optim, quant\n"
    code += (
        "optimizer, w = orthojax.orthoadam(1e-3, rotation=orthojax.Rotation(embeddings='')), {'w': jnp.ones((4, 4))}\n"
    )
    code += "assert optimizer.update(w, optimizer.init(w), w)[0]['w'].shape == (4, 4)\n"
    code += "assert np.isclose(orthojax.softmax1(jnp.zeros(1))[0], 0.5)\n"
    code += "q = jnp.ones((1, 2, 1, 4))\nassert orthojax.dot_product_attention(q, q, q).shape == q.shape\n"
    code += "assert orthojax.gpt2('130m').d_model == 768\n"
    code += "try:\n    orthojax.Transformer\nexcept ImportError as error:\n    print(error)\n"
    code += "import pydoc\nfrom orthojax import *\n"  # both read every name that is listed
    code += "print('class ModelConfig' in pydoc.plaintext.document(orthojax), 'Transformer' in globals())\n"
    done = run(cwd=tmp_path, code=code)
    assert done.stderr == ""
    assert done.stdout == "orthojax.Transformer needs flax: pip install 'orthojax[train]'\nTrue False\n"


def test_a_module_that_no_extra_has_is_a_crash():
    assert how_to_install(ModuleNotFoundError(name="of_the_user")) == ""
    assert how_to_install(ModuleNotFoundError()) == ""


@pytest.mark.parametrize("package", ["analysis", "optim", "ops", "quant", "train"])
def test_help_lists_the_functions_of_a_package(package):
    module = importlib.import_module(f"orthojax.{package}")
    text = pydoc.plaintext.document(module)
    for name in module.__all__:
        if inspect.isfunction(getattr(module, name)):
            assert re.search(rf"^    {name}\(", text, re.MULTILINE), name


def test_public_names_are_listed_and_no_others():
    assert set(dir(orthojax)) == {*orthojax._HOME, *orthojax._PACKAGES, "__version__"}
