"""Quantised checkpoints: what is written, what a foreign reader finds, what is refused, and the command line."""

import hashlib
import json
import shutil

import foreign_reader
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import CONFIG as SMALL
from small_runs import ROOT, TEXT, bits, by_path

from orthojax import quant
from orthojax.config import replace, to_json
from orthojax.errors import UserError
from orthojax.model import parameter_shapes
from orthojax.ops.quantize import absmax, zeropoint
from orthojax.train import (
    Checkpoints,
    DamagedError,
    TrainState,
    find_checkpoint,
    is_quantized,
    list_arrays,
    load,
    quantize_checkpoint,
    quantize_model,
    read_config,
    read_json_item,
    read_params,
    read_quantized,
    verify_checkpoint,
)

CONFIG = replace(
    SMALL,
    TEXT | {"model.d_model": 64, "model.num_layers": 2, "model.d_mlp": 128, "model.scan_layers": True,
            "train.steps": 4, "eval.batch_size": 4},
)  # fmt: skip
W4A8 = quant.setting_named("w4a8_group64")
KERNEL = "layers/mlp/output/kernel"


@pytest.fixture(scope="module")
def float_step(tmp_path_factory):
    """A checkpoint of random parameters after seven steps."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), parameter_shapes(CONFIG.model)
    )
    state = TrainState(jnp.int32(7), params, {"count": jnp.int32(7)})
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(state, CONFIG, {"source": "test"})
    return find_checkpoint(folder)


@pytest.fixture(scope="module")
def quantized_step(float_step, tmp_path_factory):
    return quantize_checkpoint(float_step, W4A8, tmp_path_factory.mktemp("quantized") / "checkpoints")


def test_what_is_read_is_what_was_quantised(float_step, quantized_step):
    setting, params = read_quantized(find_checkpoint(quantized_step.parent.parent))
    assert setting == W4A8
    assert bits(params) == bits(quant.integer_params(read_params(float_step), W4A8))
    assert read_config(quantized_step) == CONFIG
    assert read_json_item(quantized_step, "data") == {"source": "test", "next_step": 7}
    assert is_quantized(quantized_step)
    assert not is_quantized(float_step)
    assert verify_checkpoint(quantized_step) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_a_foreign_reader_finds_plain_names_and_decodes_them_with_numpy(float_step, quantized_step, tmp_path):
    (arrays,) = foreign_reader.read(tmp_path, quantized_step / "params")
    packed, step = arrays[f"{KERNEL}/integers"], arrays[f"{KERNEL}/step"]
    assert packed.dtype == np.uint8
    assert packed.shape == (2, 64, 64)
    assert step.shape == (2, 2, 64)  # layers, groups, outputs
    nibbles = np.stack([packed & 15, packed >> 4], axis=-2).reshape(2, 128, 64).astype(np.int64)
    values = (nibbles - 16 * (nibbles > 7)).reshape(2, 2, 64, 64) * step[:, :, None]
    kernel = np.asarray(by_path(read_params(float_step))[KERNEL], np.float64).reshape(2, 2, 64, 64)
    expected = np.abs(kernel).max(2, keepdims=True) / 7
    np.testing.assert_allclose(values, np.round(kernel / expected) * expected, rtol=1e-5)
    kinds = {path.rpartition("/")[2]: dtype for path, _, dtype in list_arrays(quantized_step, "params")}
    assert kinds["integers"] == "uint8"
    assert kinds["embedding"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_zeropoint", "int8_moderate"])
def test_other_settings_and_a_second_writing(float_step, tmp_path, name):
    setting = quant.setting_named(name)
    quantize_checkpoint(float_step, W4A8, tmp_path)
    step = quantize_checkpoint(float_step, setting, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["7"]
    got, params = read_quantized(step)
    assert got == setting
    expected = by_path(read_params(float_step))[KERNEL]
    expected = zeropoint(expected, 4, 1) if name == "int4_zeropoint" else absmax(expected, 8, (1, 2))
    kernel = params["layers"]["mlp"]["output"]["kernel"]
    np.testing.assert_allclose(kernel.reshape(2, 128, 64), expected, rtol=1e-5, atol=1e-6)


def test_a_model_in_memory_is_written_as_that_of_a_run(float_step, quantized_step, tmp_path):
    loaded = load(float_step)
    again = load(quantize_model(loaded, W4A8, tmp_path / "mine"))
    of_run = load(quantized_step)
    assert (again.config, again.model) == (of_run.config, of_run.model)
    assert bits(again.params) == bits(of_run.params)
    with pytest.raises(UserError, match="holds the checkpoints of a run"):
        quantize_model(loaded, W4A8, float_step.parent)


def test_refusals(float_step, quantized_step, tmp_path):
    with pytest.raises(UserError, match="is quantised: its kernels are integers"):
        read_params(quantized_step)
    with pytest.raises(UserError, match="is not quantised"):
        read_quantized(float_step)
    with pytest.raises(UserError, match="cannot be pulled out of the sum"):
        quantize_checkpoint(float_step, quant.INT8_FINE, tmp_path / "fine")
    with pytest.raises(UserError, match="group_size=128 does not divide the 64 input features of layers/attention"):
        quantize_checkpoint(float_step, quant.setting_named("w4a8_group128"), tmp_path / "large")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="holds the checkpoints of a run"):
        quantize_checkpoint(float_step, W4A8, float_step.parent)
    assert not is_quantized(float_step)


@pytest.mark.slow
def test_damage_is_found(float_step, tmp_path):
    step = quantize_checkpoint(float_step, W4A8, tmp_path)
    header = step / "quantization" / "metadata"
    whole = header.read_text()
    header.write_text(whole.replace('"activation_bits": 8', '"activation_bits": 4'))
    with pytest.raises(DamagedError, match="quantization/metadata does not match its checksum"):
        read_quantized(step)
    header.write_text(json.dumps({**json.loads(whole), "version": 99}))
    with pytest.raises(UserError, match="version 99"):
        read_quantized(step)
    header.write_text(whole)
    read_quantized(step)


def test_a_quantised_checkpoint_of_another_model_is_refused(quantized_step, tmp_path):
    step = shutil.copytree(quantized_step, tmp_path / "7")
    (step / "config/metadata").write_text(to_json(replace(CONFIG, {"model.d_mlp": 256})))
    manifest = json.loads((step / "checksums/metadata").read_text())
    manifest["files"]["config/metadata"] = hashlib.sha256((step / "config/metadata").read_bytes()).hexdigest()
    (step / "checksums/metadata").write_text(json.dumps(manifest))
    with pytest.raises(DamagedError, match="do not fit its config: layers/mlp/input/kernel"):
        read_quantized(step)


@pytest.mark.slow
def test_the_command_line_quantises_evaluates_and_evaluates_again(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 400)
    (tmp_path / "config.json").write_text(to_json(CONFIG))

    def run(script, *arguments, status=0):
        done = foreign_reader.run(ROOT / f"launch/{script}.py", *arguments, cwd=tmp_path)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    run("train", "--config=config.json", "--workdir=run", "--compile_cache=")
    evaluate = ("evaluate", "--compile_cache=")
    run(*evaluate, "--checkpoint=run", "--settings=w4a8_group64")
    simulated = json.loads((tmp_path / "run/evaluation.json").read_text())["metrics"]
    assert {key for key in simulated if key.startswith("perplexity_")} == {
        f"perplexity_{name}" for name in (*quant.SETTINGS, "w4a8_group64")
    }
    run(*evaluate, "--checkpoint=run", "--quantize=w4a8_group64")
    folder = tmp_path / "run/quantized/w4a8_group64"
    first = json.loads((folder / "evaluation.json").read_text())
    assert first["quantization"]["group_size"] == 64
    # An activation that falls between two integers in the one may fall on the other side in the other.
    assert first["metrics"]["perplexity"] == pytest.approx(simulated["perplexity_w4a8_group64"], rel=1e-3)
    run(*evaluate, f"--checkpoint={folder}")
    assert json.loads((folder / "evaluation.json").read_text()) == first
    assert "kernel/integers" in run("inspect_checkpoint", str(folder), "--verify")
    for checkpoint, flags, words in [
        ("run", ["--quantize=w4a8", "--workdir=run"], "holds the checkpoints of a run"),
        ("run", ["--quantize=w4a8_group46"], "did you mean 'w4a8_group64'?"),
        (folder, ["--settings=w4a8"], "needs the kernels of a float checkpoint"),
        (folder, ["--quantize=w4a8"], "its kernels are integers"),
    ]:
        assert words in run(*evaluate, f"--checkpoint={checkpoint}", *flags, status=2)
