"""What README, CONTRIBUTING and the configs say is so."""

import importlib.util
import re
import subprocess
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import drawn_params

import orthojax
from orthojax.config import Config, field_paths
from orthojax.model import parameter_count

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def test_readme_opens_with_two_commands_that_stand_alone():
    commands = [block.strip() for block in blocks("sh")][:2]
    assert all(command.startswith("python3 -m venv .venv && ") and "\n" not in command for command in commands)
    assert commands[0].endswith("orthojax reproduce")
    assert "[test]" in commands[1]
    assert all("-c constraints.txt" in command for command in commands)


def test_ci_runs_the_very_test_command_of_the_readme():
    pattern = re.search(r"grep -m 1 -E '([^']+)' README.md", (ROOT / ".ci/run").read_text())
    assert pattern
    found = subprocess.run(["grep", "-m", "1", "-E", pattern[1], ROOT / "README.md"], capture_output=True, text=True)
    assert found.stdout.strip() == blocks("sh")[1].strip()


def test_optimizers_of_the_readme_are_the_same_and_run():
    (code,) = [block for block in blocks("python") if "from_parts" in block]
    names: dict = {}
    exec(code, names)
    params = {"kernel": jax.random.normal(jax.random.key(0), (8, 16))}
    grads = jax.tree.map(jnp.sin, params)
    whole, _ = names["optimizer"].update(grads, names["optimizer"].init(params), params)
    chained, _ = names["from_parts"].update(grads, names["from_parts"].init(params), params)
    assert jnp.allclose(chained["kernel"], whole["kernel"], atol=1e-7)
    undecayed = orthojax.orthoadam(1e-3)
    assert not jnp.allclose(undecayed.update(grads, undecayed.init(params))[0]["kernel"], whole["kernel"], atol=1e-6)
    lion, _ = names["lion"].update(grads, names["lion"].init(params), params)
    plain = optax.scale_by_lion()
    assert not jnp.allclose(lion["kernel"], plain.update(grads, plain.init(params), params)[0]["kernel"])


def test_the_readme_shards_the_state_over_the_data_axis():
    (code,) = [block for block in blocks("python") if "zero1" in block]
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {"kernel": jnp.ones((8, 16))}
    shardings = {"kernel": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))}
    names = {"orthojax": orthojax, "params": params, "shardings": shardings, "r": orthojax.Rotation()}
    exec(code, names)
    state = jax.jit(names["optimizer"].init, out_shardings=names["state_shardings"])(params)
    assert state[0].inner.mu["kernel"].addressable_shards[0].data.shape == (2, 8)


def test_attention_of_the_readme_runs():
    (code,) = [block for block in blocks("python") if "dot_product_attention" in block]
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
    names = {"orthojax": orthojax, "query": query, "key": key, "value": value}
    exec(code, names)
    assert names["out"].shape == (1, 4, 2, 8)


def test_interventions_of_the_readme_run():
    (code,) = [block for block in blocks("python") if "Interventions" in block]
    config = Config(orthojax.gpt2("tiny", num_layers=2, d_model=16, d_mlp=16, vocab_size=8))
    model, tokens = orthojax.Transformer(config.model), np.arange(8)[None]
    loaded = orthojax.LoadedModel(model, drawn_params(config.model), config, None, ROOT)
    names = {"orthojax": orthojax, "np": np, "loaded": loaded, "tokens": tokens}
    exec(code, names)
    kurtosis = names["kurtosis_without_head"]
    assert kurtosis.shape == (2, 4)
    assert len(set(kurtosis.ravel())) == 8


def test_parameter_counts_of_the_readme():
    rows = re.findall(r"\| `(gpt2|llama2)\(\"([\w.]+)\"\)` \| (\d+) x (\d+) \| ([\d,]+) \|", README)
    assert len(rows) == 5
    for family, size, layers, width, count in rows:
        config = getattr(orthojax, family)(size)
        assert (config.num_layers, config.d_model) == (int(layers), int(width))
        assert parameter_count(config) == int(count.replace(",", ""))


def test_fields_and_files_that_the_documents_name_exist():
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    fields = field_paths(Config)
    for path in re.findall(r"--config\.([\w.]+)=", text):
        assert path in fields
    for path in re.findall(r"`((?:launch|configs|tests|results)/[\w/.]+\.(?:py|md))", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs_are_lab_notes_that_build(path):
    spec = importlib.util.spec_from_file_location("a_config", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.get_config(), Config)
    for heading in ("Reproduces:", "Command:", "Expected:", "Hardware:"):
        assert heading in module.__doc__


def test_constraints_hold_no_addresses_and_both_stacks():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.\-\[\]]+==[\w.]+( ; .+)?", line) for line in lines)
    for package in ("jax", "jaxlib", "flax", "numpy"):
        assert len([line for line in lines if line.startswith(f"{package}==")]) == 2
