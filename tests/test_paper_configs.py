"""The paper's runs: each is one command that a lab note shows, with the paper's numbers and the hours that follow."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orthojax.config import Config, flatten, from_json, replace, to_json
from orthojax.experiments.from_attention.paper_configs import DIFFERS, FILES, NOT_STATED, PaperRun, paper_runs
from orthojax.model import parameter_count
from orthojax.train import model_flops_per_token, peak_flops_per_second

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "configs/paper"
RUNS = paper_runs()
OUTLIERS = (
    ("perplexity",),
    ("kurtosis_first", "kurtosis_rest"),
    ("max_abs_first", "max_abs_rest"),
    ("first_attention_fraction",),
    ("perplexity_int8_coarse", "perplexity_int8_moderate", "perplexity_int8_fine"),
    ("perplexity_int4_zeropoint",),
)
ABLATION = (("perplexity",), ("kurtosis",), ("max_abs",), ("first_attention_fraction",))


def lines(run: PaperRun) -> list[str]:
    """What the lab note says of a run: its flags, then the paper's numbers and the hours of one H200."""
    columns = ABLATION if run.file.startswith("ablation") else OUTLIERS
    cells = [" ".join(str(run.expected.get(name, "-")) for name in names) for names in columns]
    train, length = run.config.train, run.config.data.sequence_length
    tokens = train.steps * train.batch_size * length
    seconds = tokens * model_flops_per_token(run.config.model, length) / (0.35 * peak_flops_per_second("NVIDIA H200"))
    return [run.flags or "(no flags)", "  " + " | ".join([*cells, f"{seconds / 3600:.3g} h"])]


def note(file):
    spec = importlib.util.spec_from_file_location(f"paper_{file}", FOLDER / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", FILES)
def test_a_lab_note_shows_every_run_of_its_file_and_no_other(file):
    module = note(file)
    assert module.get_config() == FILES[file]()
    for heading in ("Reproduces:", "Data:", "Command:", "Expected:", "Hardware:"):
        assert heading in module.__doc__
    assert f"--config=configs/paper/{file}.py" in module.__doc__
    shown = [line.removeprefix("    ") for line in module.__doc__.splitlines() if line.startswith("    ")]
    shown = shown[next(i for i, line in enumerate(shown) if line.startswith(("(no flags)", "--config."))) :]
    assert shown == [line for run in RUNS if run.file == file for line in lines(run)]


def test_every_config_of_the_folder_is_one_of_these():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(FILES) == {run.file for run in RUNS}


def test_flags_are_all_different_and_each_is_read(tmp_path):
    assert len({to_json(run.config) for run in RUNS}) == len(RUNS) == 5 * 4 + 8 + 14 + 1
    for run in RUNS:
        assert from_json(Config, to_json(run.config)) == run.config
        typed = dict(flag.removeprefix("--config.").split("=") for flag in run.flags.split())
        assert replace(FILES[run.file](), typed) == run.config
        for path in run.changes:  # none is idle
            without = {other: value for other, value in run.changes.items() if other != path}
            assert run._replace(changes=without).config != run.config


# Appendix A of the paper.

SIZES = {  # file: (parameters, steps, warm-up steps, billions of tokens)
    "gpt2_60m": (60e6, 160_000, 1_000, 21),
    "gpt2_130m": (130e6, 320_000, 2_000, 42),
    "gpt2_350m": (350e6, 960_000, 6_000, 126),
    "gpt2_1_4b": (1.4e9, 600_000, 10_000, 79),
    "llama2_130m": (130e6, 320_000, 2_000, 42),
    "ablation_130m": (130e6, 40_000, 2_000, 5),
    "ablation_130m_sgd": (130e6, 320_000, 2_000, 42),
}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.file} {run.flags}")
def test_parameters_tokens_and_settings_are_the_papers(run):
    config, (parameters, steps, warmup, billions) = run.config, SIZES[run.file]
    assert abs(parameter_count(config.model) / parameters - 1.0) < 0.1
    assert (config.train.steps, config.optim.warmup_steps, config.train.batch_size) == (steps, warmup, 512)
    assert config.eval.sequences == 100_000
    assert [config.mesh_sizes(devices) for devices in (8, 64, 256)] == [(n, 1, 1) for n in (8, 64, 256)]
    length = config.data.sequence_length
    assert round(config.train.steps * config.train.batch_size * 256 / 1e9) == billions
    assert config.optim.learning_rate == (0.2 if config.optim.optimizer == "sgd" else 1e-3)
    assert config.model.position == "rotary" or length <= config.model.max_length
    llama = run.file.startswith("llama2")
    assert (config.data.bos, config.model.tie_embeddings) == (llama, not llama)
    if not run.file.startswith("ablation"):
        assert (config.model.norm, config.model.use_bias) == ("rmsnorm_single", False)


def what_varies(config):
    model, optim = config.model, config.optim
    return model.use_bias, model.position, model.norm, optim.optimizer, optim.momentum, model.normalizer


def test_rows_of_the_ablation_are_the_papers():
    rows = [run.config for run in RUNS if run.file.startswith("ablation")]
    S, R, L = "rmsnorm_single", "rmsnorm", "layernorm"
    assert [what_varies(config) for config in rows] == [
        (True, "learned", L, "adam", 0.0, "softmax"),
        (False, "learned", L, "adam", 0.0, "softmax"),
        (False, "none", L, "adam", 0.0, "softmax"),
        (False, "rotary", L, "adam", 0.0, "softmax"),
        (False, "learned", L, "adam", 0.0, "softmax1"),
        (False, "learned", R, "adam", 0.0, "softmax1"),
        (False, "learned", S, "adam", 0.0, "softmax1"),
        (False, "learned", S, "rmsprop", 0.0, "softmax1"),
        (False, "learned", S, "sgd", 0.9, "softmax1"),
        (False, "learned", S, "sgd", 0.0, "softmax1"),
        (False, "learned", S, "orthoadam", 0.0, "softmax1"),
        (False, "learned", S, "orthoadam", 0.0, "softmax"),
        (False, "learned", R, "orthoadam", 0.0, "softmax1"),
        (False, "learned", L, "orthoadam", 0.0, "softmax1"),
        (False, "learned", S, "adam", 0.0, "softmax"),  # Figure 2
    ]
    assert [c.model.relaxed_causal_tokens for c in rows] == [0] * 14 + [10]


def test_penalties_of_quantisation_are_the_differences_that_the_paper_prints():
    by_flags = {(run.file, run.flags): run.expected for run in RUNS}
    cured = "--config.model.normalizer=softmax1 --config.optim.optimizer=orthoadam"
    for key, coarse, fine in (
        (("gpt2_350m", ""), 36.12, 0.13),
        (("llama2_130m", cured), 3.54, 0.07),
        (("gpt2_60m", "--config.data.sequence_length=512 " + cured), 0.53, 0.07),  # two rows of the print change places
        (("gpt2_130m", "--config.data.sequence_length=1024 " + cured), 0.41, 0.07),  # 22.87, where it has 23.87
    ):
        expected = by_flags[key]
        assert expected["perplexity_int8_coarse"] - expected["perplexity"] == pytest.approx(coarse, abs=1e-6)
        assert expected["perplexity_int8_fine"] - expected["perplexity"] == pytest.approx(fine, abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "heading"), [(NOT_STATED, "Not stated, "), (DIFFERS, "What differs from the paper, on purpose:")]
)
def test_what_the_paper_does_not_state_or_has_otherwise_is_one_table_and_so_in_every_run(rows, heading):
    _, part = (FOLDER / "README.md").read_text().split(f"\n{heading}")
    _, *table = re.findall(r"^\| (.+?) \| (.+?) \|$", part.split("|\n\n")[0] + "|", re.MULTILINE)
    assert table == [(what, choice) for what, choice, _ in rows]
    for run in RUNS:
        flat = flatten(run.config)
        for what, _, fields in rows:
            for path, value in fields.items():
                assert flat[path] == value, (what, run)


def test_reading_a_config_imports_no_jax():
    module = "orthojax.experiments.from_attention.paper_configs"
    code = f"import sys; import {module} as p; p.paper_runs(); print('jax' in sys.modules)"
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
