"""What a study does with its runs: who is trained together, what is listed, and a real command that is stopped."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from orthojax.experiments.study.calculation import Calculation
from orthojax.experiments.study.listing import Speed, calibrated_speed, listing, measured_speed, short_names
from orthojax.experiments.study.measures import ALWAYS, Measure, Measured, keep
from orthojax.experiments.study.places import Place
from orthojax.experiments.study.runs import left, lost
from orthojax.experiments.study.schedule import grouped, seeds_at_once
from orthojax.experiments.study.study import Experiment, run_study
from orthojax.experiments.study.tasks import Task, cost, stage_cost, training_flops
from orthojax.experiments.study.variant import Run, Variant, run_name

from orthojax.config import Config, DataConfig, EvalConfig, ModelConfig, OptimConfig, TrainConfig
from orthojax.errors import UserError
from orthojax.experiments.catalog import ALL
from orthojax.experiments.from_attention.models import tiny_run
from orthojax.experiments.study import costs, schedule
from orthojax.experiments.study import listing as module
from orthojax.fields import replace, to_json
from orthojax.model import gpt2
from orthojax.progress import Progress

ROOT = Path(__file__).parents[1]
TINY = Config(
    model=ModelConfig(vocab_size=128, max_length=8, d_model=16, num_layers=1, num_heads=2, d_mlp=16, scan_layers=False),
    optim=OptimConfig(optimizer="adam", learning_rate=1e-3, warmup_steps=1),
    data=DataConfig(kind="bigram_backcopy", sequence_length=8),
    train=TrainConfig(steps=2, batch_size=4, eval_every_steps=0, checkpoint_every_steps=2, probe_every_steps=0),
    eval=EvalConfig(sequences=4, batch_size=4),
)
GPU, CORES = [Place(accelerator=True)], [Place((0,)), Place((1,))]


def tasks_of(variants, seeds=(0, 1), home=Path("runs")):
    return [Task(Run(v, seed, home / run_name(v, seed)), (), home) for seed in seeds for v in variants]


# Who is trained together.


def test_seeds_are_trained_together_on_an_accelerator_where_a_step_is_small():
    assert seeds_at_once(TINY, accelerator=True)
    assert not seeds_at_once(TINY, accelerator=False)
    assert not seeds_at_once(replace(TINY, {"mesh.data": -1}), accelerator=True)
    assert not seeds_at_once(replace(TINY, {"train.on_bad_step": "skip"}), accelerator=True)
    large = Config(gpt2("130m"), data=DataConfig(sequence_length=256), train=TrainConfig(1000, 512))
    assert not seeds_at_once(large, accelerator=True)  # 1e14 FLOPs a step


def test_groups_are_the_seeds_of_a_variant():
    a, b = Variant("a", "a", TINY), Variant("b", "b", replace(TINY, {"optim.b1": 0.5}))
    trials = Variant("c", "c", TINY, learning_rates=(0.1, 0.2))
    groups, where = grouped(tasks_of([a, b, trials]), GPU)
    told = [[(task.run.variant.name, task.run.seed) for task in group] for group in groups]
    assert told == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("c", 0)], [("c", 1)]]
    assert where == GPU
    assert all(len(group) == 1 for group in grouped(tasks_of([a, b]), CORES)[0])


def test_no_place_is_left_without_work_for_the_sake_of_a_group():
    a = Variant("a", "a", TINY)
    groups, where = grouped(tasks_of([a]), GPU * 2)
    assert [len(group) for group in groups] == [1, 1]
    assert len(where) == 2


def test_runs_on_a_mesh_have_the_machine_for_themselves():
    a = Variant("a", "a", replace(TINY, {"mesh.data": 2}))
    groups, where = grouped(tasks_of([a]), GPU * 8)
    assert [len(group) for group in groups] == [1, 1]
    assert where == [Place(accelerator=True)]


@pytest.mark.slow
def test_a_study_whose_seeds_are_trained_together_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "seeds_at_once", lambda config, *, accelerator: True)
    variant = Variant("a", "a", TINY)
    experiment = Experiment("e", "", {"tiny": lambda: (variant,)}, lambda study: None)
    folders = {"runs_dir": tmp_path / "runs", "cache_dir": tmp_path / "data"}
    study = run_study(experiment, "tiny", (0, 1, 2), tmp_path / "w", **folders)
    for row in study.results["rows"]:
        assert row["trained_with"] == [0, 1, 2]
        assert row["seconds"] >= 0.0
        assert row["metrics"]["sink_attention"] > 0.0
    monkeypatch.undo()
    alone = run_study(
        experiment, "tiny", (0,), tmp_path / "v", runs_dir=tmp_path / "alone", cache_dir=tmp_path / "data"
    )
    assert "trained_with" not in alone.results["rows"][0]
    for name, value in alone.results["rows"][0]["metrics"].items():
        assert study.by_seed("a", name)[0] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    again = run_study(experiment, "tiny", (0, 1, 2), tmp_path / "w", **folders)
    assert again.results["rows"] == study.results["rows"]


def test_runs_whose_process_died_have_rows_with_the_reason():
    said = io.StringIO()
    (row, other) = lost(tasks_of([Variant("a", "A", TINY)]), "killed", Progress(1.0, stream=said))
    assert said.getvalue() == "A, seed 0: killed\nA, seed 1: killed\n"
    assert row == {"variant": "a", "seed": 0, "overrides": row["overrides"], "metrics": {}, "failed": "killed"}
    assert replace(Config(), other["overrides"]).train.seed == 1


# What is listed.


def made(home, variant, seed, seconds):
    folder = home / run_name(variant, seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(variant.with_seed(seed)))
    (folder / "trained.seconds").write_text(f"{seconds}\n")
    for measure in ALWAYS:
        keep(folder, measure, Measured({}, {}))


def experiments():
    lengths = {"a": 2000, "b": 3000, "c": 4000}
    a, b, c = (Variant(name, name, replace(TINY, {"train.steps": steps})) for name, steps in lengths.items())
    return (
        Experiment("first", "of two runs", {"tiny": lambda: (a, b)}, print, also=("figure7", "figure8", "figure9")),
        Experiment("second", "shares one", {"tiny": lambda: (b, c), "paper": lambda: (c,)}, print),
        Experiment("given", "measures models", {"tiny": lambda: ()}, print, takes_models=True),
        Experiment("timed", "trains nothing", {"tiny": lambda: (a, b)}, print, trains=False),
        Calculation("formula", "computed", lambda seed: [], print),
    ), (a, b, c)


def test_the_list_counts_what_is_done_and_shared_runs_once(tmp_path):
    found, (a, b, c) = experiments()
    config = a.with_seed(0)
    made(tmp_path, a, 0, training_flops(config) / 1e6)  # a megaflop a second
    rows = {
        line.split("  ")[0].strip(): line for line in listing(found, "tiny", None, tmp_path, [Place()]).splitlines()
    }
    minutes = {v.name: cost(task) / 1e6 / 60 for v, task in zip((a, b, c), tasks_of((a, b, c), (0,)), strict=True)}

    def cells(name):
        return re.split(r" {2,}", rows[name])[1:3]

    assert cells("first, figure7 ... figure9") == ["2 (1 done)", f"{minutes['b']:,.0f}"]
    assert cells("second") == ["2 (0 done)", f"{minutes['b'] + minutes['c']:,.0f}"]
    assert cells("all experiments together")[0] == "3 (1 done)"
    assert cells("given") == ["-", "needs --model"]
    assert cells("timed") == ["-", "a few"]
    assert cells("formula") == ["-", "under 1"]
    assert "median of the 1 runs" in "\n".join(rows.values())


def test_what_is_not_measured_yet_of_a_trained_run_takes_its_time(tmp_path):
    _, (a, *_) = experiments()
    (task,) = tasks_of((a,), (0,), tmp_path)
    training = training_flops(a.config)
    assert left(task) == cost(task) > training
    made(tmp_path, a, 0, 1.0)
    assert left(task) == 0.0
    assert left(dataclasses.replace(task, measures=(ALWAYS[0],))) == 0.0
    more = Measure("more", print, lambda config: 7)
    assert left(dataclasses.replace(task, measures=(more,))) == 7 * stage_cost(a.config)
    (task.run.folder / "measured/evaluation.json").unlink()
    (task.run.folder / "measured/maps.json").unlink()
    assert left(task) == pytest.approx(cost(task) - training)
    (task.run.folder / "diverged.txt").write_text("at step 3\n")
    assert left(task) == 0.0


def test_two_places_halve_the_time_but_of_the_longest_run(tmp_path):
    _, variants = experiments()
    tasks = {task.run.folder: task for task in tasks_of(variants, (0,), tmp_path)}
    speed, costs = Speed(1e6, ""), [cost(task) / 1e6 / 60 for task in tasks.values()]
    assert module._minutes(tasks, speed, 1) == pytest.approx(sum(costs))
    assert module._minutes(tasks, speed, 2) == pytest.approx(max(sum(costs) / 2, max(costs)))
    assert module._minutes(tasks, speed, 9) == pytest.approx(max(costs))


def test_minutes_of_years_are_not_counted():
    assert [module._clock(minutes) for minutes in (0.0, 0.5, 59.6, 600.0, 60_000.0)] == [
        "-", "under 1", "60", "600 (10 hours)", "60,000 (1,000 hours)",
    ]  # fmt: skip
    assert {module._clock(minutes) for minutes in (60_001.0, 1e9, float("inf"))} == {"over 1,000 hours here"}


def test_the_speed_is_the_median_of_finished_runs_and_damaged_ones_are_left_out(tmp_path):
    _, (a, b, c) = experiments()
    assert measured_speed(tmp_path) is None
    for variant, speed in ((a, 1e6), (b, 3e6), (c, 9e6)):
        made(tmp_path, variant, 0, training_flops(variant.config) / speed)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/trained.seconds").write_text("1.0")
    speed = measured_speed(tmp_path)
    assert speed.flops_per_second == pytest.approx(3e6)
    assert "median of the 3 runs" in speed.source


def test_a_scale_that_nothing_has_is_refused(tmp_path):
    found, _ = experiments()
    with pytest.raises(UserError, match="no experiment has the scale 'small'"):
        listing(found, "small", None, tmp_path, [Place()])


@pytest.mark.slow
def test_a_machine_without_runs_is_calibrated():
    cores = os.sched_getaffinity(0)
    speed = calibrated_speed(Place((min(cores),)))
    assert 1e6 < speed.flops_per_second < 1e15
    assert os.sched_getaffinity(0) == cores


def test_every_experiment_is_listed_with_all_its_names(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "calibrated_speed", lambda place: Speed(1e10, "one of a test"))
    text = listing(ALL, "tiny", (0, 1), tmp_path, CORES)
    for found in ALL:
        assert short_names([found.name, *found.also]) in text
        assert found.title in text
    assert "seeds 0, 1" in text
    assert "2 runs at once" in text


def test_costs_of_another_device_or_other_runs_are_measured_again(tmp_path, monkeypatch):
    devices, measured = ["cpu x 1"], []
    monkeypatch.setattr(costs, "environment", lambda: {"device": devices[-1]})
    monkeypatch.setattr(costs, "_costs_of_group", lambda group, base: measured.append(base) or {base: {}})

    def measure(config):
        return costs.measure_costs({"a": config}, lambda name: name, tmp_path / "costs.json", lambda line: None)

    assert measure(TINY) == measure(TINY) == {"a": {}}
    assert len(measured) == 1
    devices.append("another")
    measure(TINY)
    measure(TINY)
    assert len(measured) == 2
    measure(replace(TINY, {"train.batch_size": 8}))
    assert len(measured) == 3


# A real command, stopped and started again.

EXPERIMENT = """
from orthojax.experiments import catalog
from orthojax.experiments.reporting.page import Report
from orthojax.experiments.study.study import Experiment
from orthojax.experiments.study.variant import Variant
from orthojax.config import Config
from orthojax.fields import from_json, replace

CONFIG = from_json(Config, {config!r})
MADE = Experiment("made", "made up", {{"tiny": lambda: (
    Variant("a", "A", CONFIG), Variant("b", "B", replace(CONFIG, {{"optim.b1": 0.5}})))}},
    lambda study: Report("made", [], [], [], [], [], []))
catalog.ALL = (*catalog.ALL, MADE)
"""
START = """
import runpy, sys
sys.path.insert(0, ".")
import made
if __name__ == "__main__":
    runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_stopped_command_goes_on_where_it_was(tmp_path):
    config = replace(TINY, {"train.steps": 4000, "train.checkpoint_every_steps": 2000})
    (tmp_path / "made.py").write_text(EXPERIMENT.format(config=to_json(config)))
    (tmp_path / "start.py").write_text(START.format(script=str(ROOT / "launch/reproduce.py")))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "start.py", "--experiment=made", "--compile_cache=", "--jobs=2"]

    def start():
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    process = start()
    for _ in range(1200):
        if len(list(tmp_path.glob("runs/models/*/metrics.jsonl"))) == 2 or process.poll() is not None:
            break
        time.sleep(0.1)
    time.sleep(2.0)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, said
    assert said.splitlines()[-1] == "stopped, state saved; run the same command to go on"
    assert "Traceback" not in said
    steps = [int(path.name) for path in tmp_path.glob("runs/models/*/checkpoints/[0-9]*")]
    assert steps
    assert not (tmp_path / "runs/made-tiny/results.json").exists()
    process = start()
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    rows = json.loads((tmp_path / "runs/made-tiny/results.json").read_text())["rows"]
    assert [(row["variant"], row["seed"]) for row in rows] == [("a", 0), ("b", 0)]
    assert all(row["metrics"] and row["seconds"] > 1.0 for row in rows)


def test_the_tiny_runs_are_grouped_on_a_gpu_as_intended():
    assert seeds_at_once(tiny_run("gpt2_1_4b"), accelerator=True)
