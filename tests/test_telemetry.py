import contextlib
import dataclasses
import functools
import math
import shutil
import struct
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tiny_run import TINY, assert_trees_close, drawn_params, inputs, loaded, rows

import orthojax
from orthojax import analysis
from orthojax import train as training
from orthojax.config import replace
from orthojax.data import BigramBackcopy, default_text
from orthojax.errors import NonFiniteError, UserError
from orthojax.model import llama2
from orthojax.places import locate
from orthojax.pretrained import write_folder
from orthojax.train import Inputs, evaluate, init_state, keep_compiled_programs, read_metrics, train
from orthojax.train.evaluation import PROBED, make_probe, probe_metrics
from orthojax.train.metrics import MetricLog
from orthojax.train.step import StepMetrics

CHANGES = {"model.num_layers": 2, "model.scan_layers": True, "optim.warmup_steps": 2, "train.steps": 8}
CHANGES |= {"train.log_every_steps": 2, "train.probe_every_steps": 3, "train.probe_sequences": 4, "eval.batch_size": 4}
CONFIG = replace(TINY, CHANGES | {"eval.sequences": 12})
INPUTS = inputs(evaluation=12, bits=None)


def norm(tree):
    return math.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree)))


@functools.cache
def states():
    """The parameters before the first step and after each."""
    state, step = init_state(CONFIG), training.make_train_step(CONFIG)
    params = [jax.tree.map(np.array, state.params)]
    for i in range(8):
        state, _ = step(state, rows(i))
        params.append(jax.tree.map(np.array, state.params))
    return params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run with all telemetry on: its folder, the lines of on_line, its state."""
    folder, lines = tmp_path_factory.mktemp("run"), []
    state = train(replace(CONFIG, {"train.tensorboard": True}), INPUTS, folder, on_line=lines.append)
    return folder, lines, state


def test_a_line_has_norms_and_rate_of_step(run):
    params = states()
    lines = [line for line in read_metrics(run[0] / "metrics.jsonl") if "loss_nats" in line]
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8]
    schedule = training.learning_rate_schedule(CONFIG.optim, 8)
    for line in lines:
        before, after = params[line["step"] - 1], params[line["step"]]
        assert line["param_norm"] == pytest.approx(norm(after), rel=1e-5)
        update = jax.tree.map(np.subtract, after, before)
        assert line["update_norm"] == pytest.approx(norm(update), rel=1e-4, abs=1e-9)
        assert line["update_to_param_ratio"] == pytest.approx(norm(update) / norm(after), rel=1e-4, abs=1e-9)
        assert line["learning_rate"] == pytest.approx(float(schedule(line["step"] - 1)), rel=1e-6)
        assert "mfu" not in line  # the peak of this device is not known
    assert max(line["update_norm"] for line in lines) > 0.1
    assert run[1] == read_metrics(run[0] / "metrics.jsonl")  # what on_line got


def test_time_of_validation_is_not_in_the_speed(tmp_path):
    metrics = StepMetrics(*(np.ones(1) for _ in StepMetrics._fields))
    lines = []
    with MetricLog(CONFIG, tmp_path / "metrics.jsonl", 0, on_line=lines.append) as log:
        log.put(range(1, 2), metrics)
        with log.pause():
            time.sleep(1.0)
        log.flush()
    assert lines[0]["tokens_per_second"] > 2


def test_metrics_are_fetched_one_dispatch_late(tmp_path):
    fetched = []

    class Recorded(float):
        def __array__(self, *_, **__):
            fetched.append(int(self))
            return np.ones(2)

    with MetricLog(CONFIG, tmp_path / "metrics.jsonl", 0) as log:
        for step in (1, 3, 5):
            log.put(range(step, step + 2), StepMetrics(*(Recorded(step) for _ in StepMetrics._fields)))
            assert set(fetched) == set(range(1, step, 2))


def test_the_probe_equals_the_evaluation_of_its_rows(run):
    lines = [line for line in read_metrics(run[0] / "metrics.jsonl") if "kurtosis_first" in line]
    assert [line["step"] for line in lines] == [3, 6]
    params = states()
    for line in lines:
        few = INPUTS._replace(evaluation=INPUTS.evaluation[[0, 3, 6, 9]])
        expected = evaluate(loaded(CONFIG, params[line["step"]]), few, settings={})
        names = {f"{name}{suffix}" for name in PROBED for suffix in ("", "/layer_0", "/layer_1")}
        sinks = {"sink_rate", "sink_rate/layer_0", "sink_rate/layer_1"}
        assert line.keys() == names | sinks | {"step", "probe_sequences"}
        for name in names | sinks:
            assert line[name] == pytest.approx(expected[name], rel=1e-5), name
        assert line["probe_sequences"] == 4
    assert lines[0]["kurtosis_first/layer_0"] != lines[0]["kurtosis_first/layer_1"]


def norms_by_step(config, rows, folder):
    """A function that `train.probe` names."""
    folder.mkdir()

    def write(step, params):
        (folder / f"{step}.txt").write_text(f"{rows.shape} {norm(params)}")

    return write


def test_a_function_of_the_config_sees_every_probe(tmp_path):
    train(replace(CONFIG, {"train.probe": "test_telemetry:norms_by_step", "train.probe_steps": (0,)}), INPUTS, tmp_path)
    assert {path.stem for path in (tmp_path / "probes").iterdir()} == {"0", "3", "6"}
    for step in (0, 6):
        assert (tmp_path / f"probes/{step}.txt").read_text() == f"(4, 9) {norm(states()[step])}"
    with pytest.raises(UserError, match=r"train\.probe"):
        train(replace(CONFIG, {"train.probe": "no.such:module"}), INPUTS, tmp_path / "other")


def test_probing_changes_no_bit_of_the_run(run):
    assert_trees_close(run[2].params, states()[-1], rtol=0, atol=0)


@pytest.mark.slow
def test_bigram_backcopy_is_probed_with_its_own_statistics(tmp_path):
    task = BigramBackcopy.from_text(default_text(), 3)
    config = replace(CONFIG, {"model.vocab_size": task.vocab_size, "data.kind": "bigram_backcopy"})
    data = Inputs(rows, np.asarray(task.batch(0, 4, 8, 7)), None, {}, task)
    params = init_state(config).params
    metrics = probe_metrics(make_probe(config, data, None, tmp_path)(3, params))
    expected = evaluate(loaded(config, params), data)
    assert metrics.pop("probe_sequences") == 4
    assert expected.keys() >= {"loss_nats", "backcopy_risk_nats", "bigram_excess_risk_nats"}
    assert not expected.keys() & {"perplexity", "bits_per_byte"}
    assert metrics.keys() >= {"sink_attention", "sink_logit_gap/layer_1", "value_norm_first", "residual_norm_rest"}
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-5), name


def scalars(folder):
    """(tag, step) -> every value, from the records of the event files: length, its checksum, bytes, their checksum."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            for value in event.summary.value:
                found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found


def as_scalars(lines):
    return {(name, line["step"]): [np.float32(v)] for line in lines for name, v in line.items() if name != "step"}


@pytest.mark.slow
def test_tensorboard_has_every_number_once_after_a_resume(run, tmp_path):
    assert scalars(run[0] / "tensorboard") == as_scalars(read_metrics(run[0] / "metrics.jsonl"))
    shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/8")
    (tmp_path / "run/tensorboard/note.txt").write_text("not ours")
    train(replace(CONFIG, {"train.tensorboard": True}), INPUTS, tmp_path / "run")
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6, 6, 8]
    assert scalars(tmp_path / "run/tensorboard") == as_scalars(lines)
    assert (tmp_path / "run/tensorboard/note.txt").exists()


# Weights & Biases, by a stand-in for its package: the real one starts a process.


class StandIn:
    """Keeps what is logged by run, and where a run is, as wandb does."""

    def __init__(self):
        self.runs, self.opened = {}, []

    def init(self, **options):
        self.opened.append(options)
        self.options, self.logged = options, self.runs.setdefault(options["id"], [])
        return self

    @property
    def step(self):
        return self.logged[-1][0] if self.logged else 0

    def log(self, numbers, step):
        assert step >= self.step  # wandb drops what comes later
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


def test_wandb_logs_once_and_a_resumed_run_continues(tmp_path, monkeypatch):
    library = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", library)
    config = replace(CONFIG, {"train.wandb": True})
    train(config, INPUTS, tmp_path / "run")
    ((name, logged),) = library.runs.items()
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [step for step, _ in logged] == [line["step"] for line in lines]
    assert [numbers for _, numbers in logged] == [{k: v for k, v in line.items() if k != "step"} for line in lines]
    assert library.finished
    assert library.opened[0]["config"]["train.steps"] == config.train.steps
    shutil.rmtree(tmp_path / "run/checkpoints/8")
    train(config, INPUTS, tmp_path / "run")
    assert list(library.runs) == [name]  # the same run
    steps = [step for step, _ in logged]
    assert steps == sorted(steps)
    assert {step for step, _ in logged} == {line["step"] for line in lines}
    shutil.rmtree(tmp_path / "run")
    train(config, INPUTS, tmp_path / "run")
    assert len(library.runs) == 2  # another run in a folder of the same path


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_mirror_without_its_package_is_refused(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=package) as error:
        train(replace(CONFIG, {f"train.{name}": True}), INPUTS, tmp_path / "run")
    assert f"orthojax[{name}]" in str(error.value)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loop_transfers_nothing_unasked(tmp_path, size):
    config = replace(CONFIG, {"train.checkpoint_every_steps": 3, "train.eval_every_steps": 3})
    config = replace(config, {"mesh.data": size, "mesh.fsdp": size, "mesh.tensor": size})
    seen = []
    with contextlib.ExitStack() as stack:

        def on_start(_):
            stack.enter_context(jax.transfer_guard("disallow"))

        def on_step(step, _):
            seen.append(step)
            if step == 4:  # the guard is awake
                with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):
                    jax.numpy.add(np.ones(2), 1)

        train(config, INPUTS, tmp_path, on_start=on_start, on_step=on_step)
    assert seen == list(range(1, 9))


@pytest.fixture
def jax_settings():
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_where_compiled_programs_are_kept(jax_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_compiled_programs() == tmp_path / "cache/orthojax/xla"
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))  # as JAX_COMPILATION_CACHE_DIR does
    assert keep_compiled_programs() == tmp_path / "own"
    assert keep_compiled_programs(str(tmp_path / "flag")) == tmp_path / "flag"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "flag")
    assert keep_compiled_programs("") is None
    assert not jax.config.jax_enable_compilation_cache
    assert keep_compiled_programs() is None  # as with JAX_ENABLE_COMPILATION_CACHE=false


def test_damaged_programs_are_compiled_again(jax_settings, tmp_path):
    """Read back, one with a flipped byte ends the process."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", True)
    keep_compiled_programs(str(tmp_path))

    def result():
        jax.clear_caches()
        return float(jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))(jnp.ones(8)))

    first = result()
    entries = sorted(tmp_path.glob("*-cache"))
    whole = {path: path.read_bytes() for path in entries}
    damages = {"flipped": lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
               "cut": lambda content: content[: len(content) // 2]}  # fmt: skip
    for damage in damages.values():
        for path, content in whole.items():
            path.write_bytes(damage(content))
        assert result() == first
        assert all(path.read_bytes() != damage(whole[path]) for path in entries)
    stamps = {path: path.stat().st_mtime_ns for path in entries}
    assert result() == first
    assert stamps == {path: path.stat().st_mtime_ns for path in entries}  # read, not written
    compilation_cache.reset_cache()


def test_a_cache_folder_that_cannot_be_made_warns(jax_settings, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.warns(UserWarning, match="file"):
        assert keep_compiled_programs(str(tmp_path / "file/cache")) is None


def test_nothing_is_kept_without_a_home(jax_settings, tmp_path, monkeypatch):
    """A user that the system does not know, without HOME, has no home; a folder named ~ is none."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.warns(UserWarning, match="no home"):
        assert keep_compiled_programs() is None
    with pytest.raises(UserError, match="no such model"):
        locate("no-such/model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [2, np.inf, np.nan], ids=str)
def test_a_model_that_is_not_finite_is_no_cured_one(tmp_path, size):
    """Every share of NaN would be 0: no sink, no outlier."""
    sizes = {"vocab_size": 32, "max_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_mlp": 32}
    config = dataclasses.replace(TINY, model=llama2("tiny", **sizes, scan_layers=False))
    params = drawn_params(config.model)
    params["layers_1"]["mlp"]["input"]["kernel"] = params["layers_1"]["mlp"]["input"]["kernel"].at[0, 0].set(size)
    model = loaded(config, params)
    write_folder(tmp_path / "model", config.model, params)
    if np.isfinite(size):
        assert evaluate(model, inputs(), settings={})["kurtosis_first"] > 0
        assert orthojax.load(tmp_path / "model").params
        return
    with pytest.raises(NonFiniteError, match="hidden states of layer 1 are not finite"):
        evaluate(model, inputs(), settings={})
    with pytest.raises(NonFiniteError, match=r"mlp/input/kernel has values that are not finite"):
        orthojax.load(tmp_path / "model")
    tokens = rows(0)[:, :8]
    found = analysis.finalize(analysis.measure(model, [tokens], analysis.observe_language_model))
    shares = ("kurtosis_first", "kurtosis_rest", "norm_ratio_rest", "residual_norm_first")
    assert not any(math.isfinite(found[name]) for name in shares)
    weights = jnp.full((1, 2, 4, 4), jnp.nan)
    for share in (analysis.first_attention_fraction, analysis.gu_sink_rate):
        assert math.isnan(share(weights))
    assert math.isnan(analysis.sink_rate(jnp.array([0.5, jnp.nan])))
