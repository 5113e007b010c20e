"""The paper's runs: configs/paper/ has what the paper states, and its notes show the numbers that it prints."""

import re
import runpy
from pathlib import Path

import pytest

from orthojax.config import replace
from orthojax.experiments.base import config
from orthojax.experiments.from_attention import models, tables
from orthojax.model import parameter_count
from orthojax.train import model_flops_per_token

FOLDER = Path(__file__).parent.parent / "configs/paper"
NOTES = {path.stem: runpy.run_path(str(path))["__doc__"] for path in FOLDER.glob("*.py")}
# Appendix A of the paper: parameters, steps, warm-up steps, billions of tokens.
STATED = {
    "gpt2_60m": (60e6, 160_000, 1_000, 21),
    "gpt2_130m": (130e6, 320_000, 2_000, 42),
    "gpt2_350m": (350e6, 960_000, 6_000, 126),
    "gpt2_1_4b": (1.4e9, 600_000, 10_000, 79),
    "llama2_130m": (130e6, 320_000, 2_000, 42),
    "ablation_130m": (130e6, 40_000, 2_000, 5),
    "ablation_130m_sgd": (130e6, 320_000, 2_000, 42),
}


def tokens_of(run):
    return run.train.steps * run.train.batch_size * run.data.sequence_length


@pytest.mark.parametrize("name", STATED | NOTES)
def test_settings_are_those_that_the_paper_states(name):
    run, (parameters, steps, warmup, billions) = config(f"paper/{name}"), STATED[name]
    assert abs(parameter_count(run.model) / parameters - 1.0) < 0.1
    assert (run.train.steps, run.optim.warmup_steps, run.train.batch_size) == (steps, warmup, 512)
    assert round(tokens_of(run) / 1e9) == billions
    assert (run.data.sequence_length, run.eval.sequences) == (256, 100_000)
    assert run.optim.learning_rate == (0.2 if name.endswith("sgd") else 1e-3)
    assert (run.model.norm, run.model.use_bias) == ("rmsnorm_single", False)
    is_llama = name.startswith("llama2")
    assert (run.data.bos, run.model.tie_embeddings) == (is_llama, not is_llama)
    large = name in ("gpt2_350m", "gpt2_1_4b")  # their parameters are split
    assert [run.mesh_sizes(n) for n in (8, 64, 256)] == [(1, n, 1) if large else (n, 1, 1) for n in (8, 64, 256)]


def test_runs_of_tables_are_changes_of_these():
    runs = models.variants("paper", methods=("vanilla", "cured"))
    for model in models.MODELS:
        assert runs[f"{model}_vanilla"] == config(f"paper/{model}")
        cured = runs[f"{model}_cured"]
        assert (cured.model.normalizer, cured.optim.optimizer) == ("softmax1", "orthoadam")
    for scale in models.SCALES:
        assert all(of.data.sequence_length <= of.model.max_length for of in tables.TABLE6.runs_at(scale).values())


def of_note(name):
    """Flags of each run -> the numbers of the line below."""
    runs = re.findall(r"^    (\(no flags\)|--config\.[^\n]*)\n      ([^\n]*)$", NOTES[name], re.MULTILINE)
    return {flags: [float(number) for number in re.findall(r"\d[\d.]*(?= |$)", line)][:-1] for flags, line in runs}


@pytest.mark.parametrize("name", STATED)
def test_notes_show_flags_numbers_of_tables_and_hours(name):
    shown = sorted(number for numbers in of_note(name).values() for number in numbers)
    rows = {row: of | models.TABLE_3.get(row, {}) for row, of in (models.TABLE_2 | models.TABLE_6).items()}
    of_file = [printed for row, printed in rows.items() if row.startswith(name)]
    if name.startswith("ablation"):
        is_sgd = name.endswith("sgd")
        of_file = [of for row, of in models.TABLE_5.items() if row.startswith("sgd") == is_sgd]
    assert shown == sorted(number for printed in of_file for number in printed.values())
    for flags in of_note(name):
        changes = dict(flag.removeprefix("--config.").split("=") for flag in flags.split() if flag[0] == "-")
        run = replace(config(f"paper/{name}"), changes)
        assert (run == config(f"paper/{name}")) == (not changes)
        flops = tokens_of(run) * model_flops_per_token(run.model, run.data.sequence_length)
        hours = flops / (0.35 * 989e12) / 3600  # at 35% of the peak of an H200
        assert re.search(rf"{re.escape(flags)}\n.* \| {hours:.3g} h$", NOTES[name], re.MULTILINE)


def test_rows_of_ablation_are_what_their_names_say():
    runs = models.ablation("paper")
    assert list(runs) == list(models.TABLE_5)
    for name, run in runs.items():
        optimizer = run.optim.optimizer + "_momentum" * bool(run.optim.momentum)
        parts = (optimizer, run.model.norm, run.model.position, "biases" * run.model.use_bias, run.model.normalizer)
        assert name == "_".join(filter(None, parts))
    assert runs["sgd_momentum_rmsnorm_single_learned_softmax1"] == config("paper/ablation_130m_sgd")


@pytest.mark.parametrize(("name", "coarse", "fine"), [("gpt2_60m_512", 0.53, 0.07), ("gpt2_130m_1024", 0.41, 0.07)])
def test_corrected_misprints_have_the_differences_of_the_print(name, coarse, fine):
    row = models.TABLE_6[f"{name}_cured"]
    assert row["perplexity_int8_coarse"] - row["perplexity"] == pytest.approx(coarse, abs=1e-6)
    assert row["perplexity_int8_fine"] - row["perplexity"] == pytest.approx(fine, abs=1e-6)
