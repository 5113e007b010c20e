"""Every block of code and every command of README and the guides runs, or at least exists with its flags."""

import doctest
import importlib
import json
import re
import subprocess
import textwrap
import types
from pathlib import Path

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from flax import nnx
from tiny_run import drawn_params

import orthojax
from orthojax.commands import COMMANDS
from orthojax.config import Config, field_paths, fields_affecting, flatten, replace
from orthojax.errors import UserError
from orthojax.experiments import base
from orthojax.experiments.catalog import find
from orthojax.experiments.study import make_report, read_results
from orthojax.files import write_with_digest
from orthojax.model import parameter_count

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
HISTORY = {"LOG.md"}  # commands of code that is gone
GENERATED = {"claims.md"}  # the site's build checks its links
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED),
    *sorted((ROOT / "results").glob("*.md")),
]


def blocks(language: str, text: str = README) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def names_of(word: str, page: str = "", **names) -> dict:
    """Runs the only block of Python in a guide, or the README, that has a word, and returns its names."""
    (found,) = [block for block in blocks("python", GUIDES.get(page, README)) if word in block]
    exec(found, names)
    return names


def test_optimizers_of_the_guide_are_equal():
    names = names_of("from_parts", "optimizer.md")
    params = {"kernel": jax.random.normal(jax.random.key(0), (32, 4)), "embedding": jnp.ones((8, 32))}
    grads = jax.tree.map(jnp.sin, params)
    whole, _ = names["optimizer"].update(grads, names["optimizer"].init(params), params)
    chained, _ = names["from_parts"].update(grads, names["from_parts"].init(params), params)
    assert jnp.allclose(chained["kernel"], whole["kernel"], atol=1e-7)
    undecayed = orthojax.orthoadam(1e-3, rotation=names["r"])
    assert not jnp.allclose(undecayed.update(grads, undecayed.init(params))[0]["kernel"], whole["kernel"], atol=1e-6)
    plain = optax.lion(1e-4)
    lion, unrotated = (of.update(grads, of.init(params), params)[0] for of in (names["lion"], plain))
    assert not jnp.allclose(lion["kernel"], unrotated["kernel"], rtol=1e-2)
    assert np.linalg.norm(lion["kernel"]) == pytest.approx(np.linalg.norm(unrotated["kernel"]), rel=0.1)
    assert (lion["kernel"] * grads["kernel"]).sum() < 0  # downhill


def test_axes_rule_of_the_guide_fits_flax_attention():
    names = names_of("def axes", "optimizer.md", orthojax=orthojax)
    attention, x = nn.MultiHeadDotProductAttention(num_heads=4), jnp.ones((1, 6, 16))
    params = {"attention": attention.init(jax.random.key(0), x)["params"], "embedding": jnp.ones((8, 16))}
    found = orthojax.optim.describe(orthojax.Rotation(axes=names["axes"]), params)
    expected = {f"attention/{name}/kernel": "axes (1, 2): hadamard 16" for name in ("key", "query", "value")}
    expected["attention/out/kernel"] = "axes (2,): hadamard 16"
    assert {path: what for path, what in found.items() if "kernel" in path} == expected
    names["optimizer"].init(params)


def test_the_norm_of_the_guide_is_that_of_the_model():
    x = jax.random.normal(jax.random.key(0), (2, 16)) + 1.0
    of_flax = "`nn.RMSNorm(feature_axes=())`, in nnx `nnx.RMSNorm(1, feature_axes=(), rngs=rngs)`"
    assert of_flax in GUIDES["optimizer.md"]
    y, params = nn.RMSNorm(feature_axes=()).init_with_output(jax.random.key(0), x)
    of_nnx = nnx.RMSNorm(1, feature_axes=(), rngs=nnx.Rngs(0))
    assert of_nnx.scale.shape == (1,)
    assert jnp.allclose(of_nnx(x), y)
    assert "in haiku `hk.RMSNorm(-1, param_axis=())`" in GUIDES["optimizer.md"]
    of_haiku = hk.without_apply_rng(hk.transform(lambda x: hk.RMSNorm(-1, param_axis=())(x)))
    scale = of_haiku.init(jax.random.key(0), x)
    assert [leaf.size for leaf in jax.tree.leaves(scale)] == [1]
    assert jnp.allclose(of_haiku.apply(scale, x), y, atol=1e-4)
    assert jax.tree.map(jnp.shape, params) == {"params": {"scale": ()}}
    assert jnp.allclose(y, x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6), atol=1e-6)


def test_the_guide_describes_muon(capsys):
    names_of("muon_orthoadam", "optimizer.md", orthojax=orthojax)
    (shown,) = [block for block in blocks("text", GUIDES["optimizer.md"]) if "group" in block]
    assert capsys.readouterr().out.strip() == shown.strip()


def test_the_lines_of_the_recipe_run_in_a_block():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            names = names_of("attention_fn", "which_recipe.md", self=self, nn=nn, orthojax=orthojax, num_heads=4)
            return nn.MultiHeadAttention(4, attention_fn=names["attend"])(x)

    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    params = Attention().init(jax.random.key(1), x)
    gradient = jax.grad(lambda p: Attention().apply(p, x)[0, 5, 0])(params)["params"]["sink"]
    assert gradient.shape == (4,)
    assert (gradient != 0).all()


def test_a_recipe_of_one_s_own_is_ranked_beside_ours(tmp_path, monkeypatch):
    """The file of the guide, with results of another recipe in place of hours of training."""
    (block,) = [block for block in blocks("python", GUIDES["which_recipe.md"]) if "own_recipes" in block]
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    study, board = find("mine:STUDY"), find("mine:BOARD")
    assert study.runs_at("tiny")["lion"].optim.optimizer == "lion"
    ours = json.loads((ROOT / "results/preventions_sinks/results.json").read_text())
    rows = [row | {"variant": "lion"} for row in ours["rows"] if row["variant"] == "muon_sinks"]
    ours.pop("sha256")
    write_with_digest(tmp_path / "results.json", {**ours, "experiment": "mine", "rows": rows})
    report = make_report(read_results(board, tmp_path, ROOT / "results/preventions_sinks"))
    (ranked,) = [table for table in report.tables if table.caption.startswith("Ranked")]
    names = [row[0] for row in ranked.rows]
    assert names.index("muon_orthoadam_sinks") == 0
    assert abs(names.index("lion") - names.index("muon_sinks")) == 1
    assert "--experiment=mine:BOARD" in report.notes[0]
    for name, says in (("mine:NO", "no attribute 'NO'"), ("nowhere:X", "No module"), ("json:dumps", "is a function")):
        with pytest.raises(UserError, match=says):
            find(name)
    (tmp_path / "named.py").write_text("from orthojax.experiments.catalog import ALL\nSTUDY = ALL[0]")
    with pytest.raises(UserError, match="has the name of another, 'quick'"):
        find("named:STUDY")


def test_guide_shards_the_state_over_the_data_axis():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = {"kernel": jnp.ones((8, 16))}
    shardings = {"kernel": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))}
    r = orthojax.Rotation(axes=16, embeddings="")
    names = names_of("zero1", "optimizer.md", orthojax=orthojax, params=params, shardings=shardings, r=r)
    state = jax.jit(names["optimizer"].init, out_shardings=names["state_shardings"])(params)
    assert state[0].inner.mu["kernel"].addressable_shards[0].data.shape == (2, 8)
    whole = types.SimpleNamespace(opt_state=names["optimizer"].init(params))
    names_of("nnx_optimizer", "optimizer.md", **names | {"jax": jax, "nnx_optimizer": whole})
    assert whole.opt_state[0].inner.mu["kernel"].addressable_shards[0].data.shape == (2, 8)


def test_attention_of_the_documents_is_that_of_the_library():
    given = dict(zip(("query", "key", "value"), jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8)), strict=True))
    names = names_of("dot_product_attention", jnp=jnp, heads=2, orthojax=orthojax, **given)
    softmax1 = names_of("dot_product_attention", "attention.md", orthojax=orthojax, **given)["out"]
    assert softmax1.shape == (1, 4, 2, 8)
    assert jnp.allclose(names["out"], softmax1, atol=1e-6)  # of sinks of 0
    names["optimizer"].init({"kernel": jnp.ones((32, 16)), "embedding": jnp.ones((4, 32))})
    by_hand = names_of("einsum", "attention.md", mask=jnp.tril(jnp.ones((4, 4), bool)), **given)["out"]
    assert jnp.allclose(by_hand, orthojax.dot_product_attention(**given, is_causal=True), atol=1e-6)


def test_model_and_rounding_of_the_guides_run():
    names = names_of("Transformer", "model.md")
    assert names["logits"].shape == (1, 16, names["config"].vocab_size)
    assert 0 < names_of("quantize_params", "measure.md")["error"] < 2 / 15  # of a range of 2 in 16 levels


def test_what_nnx_sows_is_summarised(capsys):
    class Block(nnx.Module):
        def __init__(self, rngs):
            attend = orthojax.attention_fn("softmax1", is_causal=True)
            self.attention = nnx.MultiHeadAttention(4, 16, decode=False, attention_fn=attend, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(x, sow_weights=True)
            self.sow(nnx.Intermediate, "hidden", x)
            return x

    model, x = nnx.Sequential(*(Block(nnx.Rngs(i)) for i in range(2))), jax.random.normal(jax.random.key(0), (2, 8, 16))
    names = names_of("nnx.capture", "measure.md", nnx=nnx, model=model, x=x, orthojax=orthojax)
    assert [weights.shape for weights in names["weights"]] == [(2, 4, 8, 8)] * 2
    assert jnp.allclose(names["hidden"][1], model(x), atol=1e-6)
    assert "first_attention_mass" in capsys.readouterr().out


def test_flax_attends_as_the_guide_says():
    layer = names_of("MultiHeadAttention", "attention.md")["layer"]
    x = jax.random.normal(jax.random.key(0), (1, 6, 16))
    out, _ = layer.init_with_output(jax.random.key(1), x)
    changed, _ = layer.init_with_output(jax.random.key(1), x.at[:, -1].add(1.0))
    assert jnp.allclose(changed[:, :-1], out[:, :-1])


def test_the_optimizers_of_the_readme_run():
    names = names_of("Rotation()")
    params = {"kernel": jnp.ones((32, 16)), "embedding": jnp.ones((4, 32))}
    names["optimizer"].update(params, names["optimizer"].init(params), params)
    found = orthojax.optim.describe(names["r"], params)
    assert {path: what[:10] for path, what in found.items()} == {"kernel": "axes (0,):", "embedding": "axes (1,):"}


@pytest.mark.parametrize("page", [page for page, text in GUIDES.items() if ">>> " in text])
def test_doctests_of_the_guides(page):
    assert doctest.testfile(str(ROOT / "docs" / page), module_relative=False) == (
        0, len(re.findall(r"^>>> (?!#)", GUIDES[page], re.MULTILINE))
    )  # fmt: skip


FRAMEWORKS = [block for block in blocks("python", GUIDES["frameworks.md"]) if "describe(" in block]


@pytest.mark.parametrize("code", FRAMEWORKS, ids=["dicts", "linen", "nnx", "equinox", "haiku"])
def test_optimizer_guide_trains_in_every_framework(code, capsys):
    assert len(code.strip().splitlines()) <= 14
    exec(code, {})
    lines = capsys.readouterr().out.splitlines()
    rotated = [line for line in lines if "hadamard" in line]
    assert len(rotated) >= 2
    assert "unsure" not in "".join(lines)


def test_config_of_the_guide_is_the_cured_model():
    config = names_of("get_config", "train.md")["get_config"]()
    cure = {"model.normalizer": "softmax1", "model.norm": "rmsnorm_single", "model.use_bias": False}
    cure |= {"optim.optimizer": "orthoadam", "optim.rotation.axes": "d_model"}
    assert config == replace(config, cure)
    for preset in (orthojax.gpt2("130m"), orthojax.llama2("130m")):
        assert (preset.normalizer, preset.norm == "rmsnorm_single") == ("softmax", False)


def test_every_block_of_python_is_tested():
    tested = {"optimizer.md": 5, "frameworks.md": len(FRAMEWORKS), "attention.md": 3, "model.md": 1, "measure.md": 5}
    tested |= {"checkpoints.md": 3, "train.md": 1, "which_recipe.md": 2}  # four of all in other files
    for page, text in GUIDES.items():
        plain = [block for block in blocks("python", text) if ">>> " not in block]
        assert len(plain) == tested.get(page, 0), page
    assert len(blocks("python")) == 2


def commands_of(text: str) -> list[list[str]]:
    """The words of every `orthojax COMMAND` in code."""
    code = [*re.findall(r"`(orthojax [^`]+)`", text), *(b for of in ("sh", "bash") for b in blocks(of, text))]
    lines = [line for part in code for line in re.split(r"[\n;&\"]", part.replace("\\\n", " "))]
    found = [re.search(r"(?:^|[\s/])orthojax ((?:[a-z]+)(?: .*)?)$", line.strip()) for line in lines]
    return [match[1].split() for match in found if match]


def flags_of(command: str) -> set[str]:
    """The flags that a command defines."""
    before = set(flags.FLAGS)
    importlib.import_module(f"orthojax.commands.{command}").define_flags()
    own = set(flags.FLAGS) - before
    flags.FLAGS.remove_flag_values(own)
    return own


def test_commands_of_the_documents_exist_with_flags():
    found = [command for page in PAGES if page.name not in HISTORY for command in commands_of(page.read_text())]
    assert len(found) > 30
    known = {name: flags_of(name) for name in COMMANDS}
    for name, *arguments in found:
        if name != "COMMAND":
            used = {re.split(r"[.=]", argument[2:])[0] for argument in arguments if argument.startswith("--")}
            assert used - {"help", "FLAGS"} <= known[name], (name, arguments)


def test_interventions_of_the_guide_run():
    config = Config(orthojax.gpt2("tiny", num_layers=2, d_model=16, d_mlp=16, vocab_size=8))
    model, tokens = orthojax.Transformer(config.model), np.arange(8)[None]
    loaded = orthojax.LoadedModel(model, drawn_params(config.model), config, None, ROOT)
    names = names_of("Interventions", "measure.md", orthojax=orthojax, np=np, loaded=loaded, tokens=tokens)
    kurtosis = names["kurtosis_without_head"]
    assert kurtosis.shape == (2, 4)
    assert len(set(kurtosis.ravel())) == 8


def test_parameter_counts_of_the_guide():
    rows = re.findall(r"\| `(gpt2|llama2)\(\"([\w.]+)\"\)` \| (\d+) x (\d+) \| ([\d,]+) \|", GUIDES["model.md"])
    assert len(rows) == 5
    for family, size, layers, width, count in rows:
        config = getattr(orthojax, family)(size)
        assert (config.num_layers, config.d_model) == (int(layers), int(width))
        assert parameter_count(config) == int(count.replace(",", ""))


def test_fields_and_files_of_the_documents_exist():
    fields = field_paths(Config)
    for page in PAGES:
        text = page.read_text()
        if page.name not in HISTORY:
            assert set(re.findall(r"--config\.([\w.]+)=", text)) <= set(fields), page
            for path in re.findall(r"`((?:launch|configs|tests|results|orthojax)/[\w/.]+\.(?:py|md))", text):
                assert (ROOT / path).exists(), (page, path)


def test_the_readme_is_short_and_in_order():
    assert len(README.split()) <= 700
    assert len(README[: README.index("```")].split()) <= 250
    order = ["- **OrthoAdam**", "![Perplexity of", "| Adam, softmax", "## Try it", "## Use it", "## Measure a model",
             "## What to expect", "## More"]  # fmt: skip
    places = [README.index(part) for part in order]
    assert places == sorted(places)
    (table,) = re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)  # of four rows
    assert len(table.splitlines()) == 6


def assert_is_the_run(config: Config, run: str):
    """Compares with the row of a study, [SCALE/]STUDY/VARIANT, in every field that affects a result."""
    *scale, study, variant = run.split("/")
    measured = find(study).runs_at(*scale or ["tiny"])[variant]
    here, there = (flatten(c) | {"optim.momentum": c.optim.momentum_or_default} for c in (config, measured))
    names = fields_affecting(Config, "numbers", "start", "computation")
    differences = {name: (here[name], there[name]) for name in names if here[name] != there[name]}
    assert not differences, f"(here, in {run}): {differences}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_configs_are_the_runs_that_they_reproduce(path):
    run = re.search(r"^Reproduces: ([\w/]+)", path.read_text(), re.MULTILINE)
    assert run
    assert_is_the_run(base.config(path.stem), run[1])


def test_commands_that_claim_a_measured_run_are_that_run():
    """`<!-- run: STUDY/VARIANT ... -->` stands above them; in the documents with results above every one."""
    checked = dict.fromkeys((page.name for page in PAGES), 0)
    for page in PAGES:
        for claimed, block in re.findall(r"<!-- run: (.+?) -->\n+```sh\n(.*?)```", page.read_text(), re.DOTALL):
            commands = [words for words in commands_of(f"```sh\n{block}```") if words[0] == "train"]
            for run, (_, name, *flags_given) in zip(claimed.split(), commands, strict=True):
                overrides = [flag.removeprefix("--config.") for flag in flags_given if flag.startswith("--config.")]
                changes = dict(override.split("=") for override in overrides)
                assert_is_the_run(replace(base.config(name.removeprefix("--config=")), changes), run)
                checked[page.name] += 1
    assert checked["which_recipe.md"] == GUIDES["which_recipe.md"].count("orthojax train") == 2
    assert checked["README.md"] == README.count("orthojax train") == 0


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those written by hand."""
    text = path.read_text()
    names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {*names, *re.findall(r'<a id="([^"]+)"', text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + "-" + page.name)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" not in link:
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), link
            assert not anchor or anchor in anchors_of(path), link


def test_the_version_is_the_same_everywhere():
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == orthojax.__version__
    released = re.search(r"^## (\S+) \(\d", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)  # the newest with a date
    assert released[1] == orthojax.__version__


def test_ci_runs_the_test_command_of_the_readme():
    pattern = re.search(r"grep -m 1 -E '([^']+)' README.md", (ROOT / ".ci/run").read_text())
    assert pattern
    found = subprocess.run(["grep", "-m", "1", "-E", pattern[1], ROOT / "README.md"], capture_output=True, text=True)
    assert found.stdout.strip() == blocks("sh")[1].strip()


def test_code_of_the_guides_has_80_columns():
    """80 characters are what the site shows at 1280 pixels."""
    texts = [README, *GUIDES.values()]
    found = [line for text in texts for block in blocks(r"\w+", text) for line in block.splitlines()]
    assert len(found) > 200
    assert [line for line in found if len(line) > 80] == [block.strip() for block in blocks("sh")][:2]  # to copy whole


def test_constraints_hold_no_addresses_and_both_stacks():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.\-\[\]]+==[\w.]+( ; .+)?", line) for line in lines)
    for package in ("jax", "jaxlib", "flax", "numpy"):
        assert len([line for line in lines if line.startswith(f"{package}==")]) == 2
