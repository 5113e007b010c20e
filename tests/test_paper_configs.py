"""The paper's runs: configs/paper/ has what the paper states, and its notes show the numbers that it prints."""

import re
import runpy
from pathlib import Path

import pytest

from orthojax.config import Config, replace
from orthojax.errors import UserError
from orthojax.experiments.base import config
from orthojax.experiments.from_attention import models, paper_tables
from orthojax.experiments.from_attention.tables import TABLE6
from orthojax.model import parameter_count
from orthojax.train import estimate

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


def test_the_folder_has_these_files_and_no_others():
    assert NOTES.keys() == STATED.keys()


@pytest.mark.parametrize("name", STATED)
def test_settings_are_those_that_the_paper_states(name):
    run, (parameters, steps, warmup, billions) = config(f"paper/{name}"), STATED[name]
    assert abs(parameter_count(run.model) / parameters - 1.0) < 0.1
    assert (run.train.steps, run.optim.warmup_steps, run.train.batch_size) == (steps, warmup, 512)
    assert round(estimate(run).tokens / 1e9) == billions
    assert (run.data.sequence_length, run.eval.sequences) == (256, 100_000)
    assert run.optim.learning_rate == (0.2 if name.endswith("sgd") else 1e-3)
    assert (run.model.norm, run.model.use_bias) == ("rmsnorm_single", False)
    is_llama = name.startswith("llama2")
    assert (run.data.bos, run.model.tie_embeddings) == (is_llama, not is_llama)
    assert [run.mesh_sizes(devices) for devices in (8, 64, 256)] == [(n, 1, 1) for n in (8, 64, 256)]


def test_vanilla_and_cured_are_changes_of_every_model():
    runs = models.grid("paper", methods=("vanilla", "cured"))
    for model in models.MODELS:
        assert runs[f"{model}_vanilla"] == config(f"paper/{model}")
        cured = runs[f"{model}_cured"]
        assert (cured.model.normalizer, cured.optim.optimizer) == ("softmax1", "orthoadam")


def test_longer_sequences_fit_the_position_table():
    for run in TABLE6.runs_at("paper").values():
        assert run.data.sequence_length <= run.model.max_length


def of_note(name):
    """Flags of each run -> the numbers of the line below."""
    runs = re.findall(r"^    (\(no flags\)|--config\.[^\n]*)\n      ([^\n]*)$", NOTES[name], re.MULTILINE)
    return {flags: [float(number) for number in re.findall(r"\d[\d.]*(?= |$)", line)][:-1] for flags, line in runs}


@pytest.mark.parametrize("name", STATED)
def test_notes_show_the_numbers_of_the_tables(name):
    shown = sorted(number for numbers in of_note(name).values() for number in numbers)
    paper = {
        row: printed | paper_tables.TABLE_3.get(row, {})
        for row, printed in (paper_tables.TABLE_2 | paper_tables.TABLE_6).items()
    }
    of_file = [printed for row, printed in paper.items() if row.startswith(name)]
    if name.startswith("ablation"):
        is_sgd = name.endswith("sgd")
        of_file = [of for row, of in paper_tables.TABLE_5.items() if row.startswith("sgd") == is_sgd]
    assert shown == sorted(number for printed in of_file for number in printed.values())


@pytest.mark.parametrize("name", STATED)
def test_flags_of_notes_are_read_and_hours_follow(name):
    for flags in of_note(name):
        changes = dict(flag.removeprefix("--config.").split("=") for flag in flags.split() if flag[0] == "-")
        run = replace(config(f"paper/{name}"), changes)
        assert (run == config(f"paper/{name}")) == (not changes)
        hours = estimate(run).hours("NVIDIA H200", mfu=0.35)
        assert re.search(rf"{re.escape(flags)}\n.* \| {hours:.3g} h$", NOTES[name], re.MULTILINE)


def test_rows_of_the_ablation_are_the_papers():
    runs = models.ablation("paper")
    assert list(runs) == list(paper_tables.TABLE_5)
    S, R, L = "rmsnorm_single", "rmsnorm", "layernorm"
    assert [
        (r.model.use_bias, r.model.position, r.model.norm, r.optim.optimizer, r.optim.momentum, r.model.normalizer)
        for r in runs.values()
    ] == [
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
    ]
    assert runs["sgd_momentum_rmsnorm_single_learned_softmax1"] == config("paper/ablation_130m_sgd")


@pytest.mark.parametrize(
    ("row", "coarse", "fine"),
    [
        (paper_tables.TABLE_3["gpt2_350m_vanilla"], 36.12, 0.13),
        (paper_tables.TABLE_3["llama2_130m_cured"], 3.54, 0.07),
        (paper_tables.TABLE_6["gpt2_60m_512_cured"], 0.53, 0.07),  # two rows of the print change places
        (paper_tables.TABLE_6["gpt2_130m_1024_cured"], 0.41, 0.07),  # 22.87, where the print has 23.87
    ],
)
def test_differences_of_perplexities_are_those_that_the_paper_prints(row, coarse, fine):
    assert row["perplexity_int8_coarse"] - row["perplexity"] == pytest.approx(coarse, abs=1e-6)
    assert row["perplexity_int8_fine"] - row["perplexity"] == pytest.approx(fine, abs=1e-6)


def test_an_estimate_is_the_closed_form():
    run = estimate(config("paper/gpt2_130m"))
    d, L, T, V = 768, 12, 256, 50_304
    assert run.parameters == V * d + 1024 * d + L * (12 * d * d + 2) + 1
    assert run.tokens_per_step == 131_072
    assert run.tokens == 320_000 * 131_072
    assert run.flops == run.tokens * (6 * (L * 12 * d * d + V * d) + 6 * L * T * d)
    # At the peak of one device for its seconds.
    assert run.hours("NVIDIA H200", mfu=1.0) == pytest.approx(run.flops / 989e12 / 3600)
    assert run.hours("NVIDIA H200", 8, mfu=0.25) == pytest.approx(run.hours("NVIDIA H200", mfu=1.0) / 2)


def test_hours_of_a_device_without_a_known_peak_are_refused():
    with pytest.raises(UserError, match="NVIDIA H20"):
        estimate(Config()).hours("NVIDIA H20", mfu=0.4)
