"""Examples, notebooks and benchmarks run as they stand, each in a process of its own, and print what they should."""

import json
import re
import runpy
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from small_runs import ROOT, python
from tiny_run import TINY as RUN
from tiny_run import drawn_params, loaded

from orthojax import analysis
from orthojax.config import replace
from orthojax.data.tokenizers import ByteTokenizer
from orthojax.model import Interventions, generate

slow = pytest.mark.slow
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(path, *arguments, **options):
    done = python(ROOT / path, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@slow
@pytest.mark.parametrize("name", ["orthoadam", "adamw"])
@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_training(library, name):
    printed = re.fullmatch(r"(\w+): ([\d.]+) -> ([\d.]+) nats per byte\n", run(f"examples/{library}_training.py", name))
    assert printed
    assert printed[1] == name
    first, last = float(printed[2]), float(printed[3])
    assert first > 4.5  # about ln 128 = 4.85, before anything is learned
    assert last < 3.0


@slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_the_recipe_resumes_bit_for_bit(library, tmp_path):
    def losses():
        return re.findall(r"step \d+: ([\d.]+)", run(f"examples/recommended_{library}.py", str(tmp_path / "run")))

    whole = losses()
    assert len(whole) == 3
    assert float(whole[-1]) < 2.6  # of ln 128 = 4.85
    for step in (40, 60):
        shutil.rmtree(tmp_path / f"run/{step}")
    assert losses() == whole[1:]


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_attention_in_ten_lines(library, capsys):
    path = ROOT / "examples" / f"{library}_attention.py"
    assert sum(map(bool, path.read_text(encoding="utf-8").splitlines()[1:])) <= 10
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == "(2, 16, 64)\n"


def test_the_model_for_lm_eval_has_its_interface(monkeypatch):
    """With a stub of the package: requests are those of its tasks, sums are those of one row at a time."""
    names = ("lm_eval", "lm_eval.__main__", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    of = {"cli_evaluate": None, "LM": type("LM", (), {}), "register_model": lambda name: lambda model: model}
    for name in names:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**of))
    config = replace(RUN, {"model.vocab_size": 258, "model.max_length": 32, "data.sequence_length": 12})
    own = loaded(config, drawn_params(config.model, 0.3))._replace(tokenizer=ByteTokenizer())
    monkeypatch.setattr("orthojax.load", lambda path: own)
    model = runpy.run_path(str(ROOT / "examples/lm_eval_model.py"))["Orthojax"]("a", batch_size=2, max_length=12)

    def sums(ids, count):
        logits = np.asarray(own.model.apply({"params": own.params}, np.array([ids[:-1]]))[0][0], np.float64)
        log_probs = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
        chosen = log_probs[np.arange(len(ids) - 1), ids[1:]][-count:]
        return chosen.sum(), bool((chosen == log_probs.max(-1)[-count:]).all())

    def asked(*arguments):
        return [SimpleNamespace(args=of) for of in arguments]

    # Spaces at the end of a context belong to the continuation; long rows lose their start; BOS if there is no context.
    found = model.loglikelihood(asked(("ab ", "cd"), ("", "xy"), ("0123456789", "abcd"), ("ab", " cd")))
    expected = [sums([*b"ab cd"], 3), sums([256, *b"xy"], 2), sums([*b"123456789abcd"], 4), sums([*b"ab cd"], 3)]
    np.testing.assert_allclose([of[0] for of in found], [of[0] for of in expected], rtol=1e-5)
    assert [of[1] for of in found] == [of[1] for of in expected]
    text = b"a text of some more bytes"
    windows = [([256, *text[:12]], 12), ([*text[11:24]], 12), ([*text[12:25]], 1)]  # the last one has a full context
    (whole,) = model.loglikelihood_rolling(asked((text.decode(),)))
    assert whole == pytest.approx(sum(sums(*of)[0] for of in windows), rel=1e-5)
    (made,) = model.generate_until(asked(("ab", {"until": [], "max_gen_toks": 6})))
    assert made == own.tokenizer.decode(generate(own, [*b"ab"], 6))
    stop = made[1:2] or "z"
    (cut,) = model.generate_until(asked(("ab", {"until": stop, "max_gen_toks": 6})))
    assert cut == made.split(stop)[0]
    # Nothing is cut in silence, and the length is the model's, not that of what it was measured on.
    with pytest.raises(ValueError, match="13 tokens; allowed: up to 12"):
        model.loglikelihood(asked(("a", "0123456789abc")))
    with pytest.raises(ValueError, match="max_gen_toks=12; allowed: below 12"):
        model.generate_until(asked(("ab", {"max_gen_toks": 12})))
    assert type(model)("a").length == 32


def test_patching_a_head_is_reading_with_its_weights():
    config = replace(RUN, {"model.num_layers": 2, "model.num_heads": 2})
    own = loaded(config, drawn_params(config.model, 0.5))
    clean, other = (np.random.default_rng(seed).integers(0, 32, (1, 6)) for seed in (0, 1))
    found = runpy.run_path(str(ROOT / "examples/patch_heads.py"))["patched"](own, clean, other, 3)
    seen = [analysis.measure(own, [ids], lambda taps: taps.attention_weights) for ids in (clean, other)]

    def log_prob(weights):
        forced = Interventions(forced_weights=weights, forced_share=np.ones((2, 2)))
        return jax.nn.log_softmax(own.model.apply({"params": own.params}, other, interventions=forced)[0][0, -1])[3]

    # In the last layer nothing that heads read depends on what others do: their own weights are those of the prompt.
    mixed = np.array(seen[1])
    mixed[1, :, 1] = seen[0][1, :, 1]
    assert found[1, 1] == pytest.approx(float(log_prob(mixed) - log_prob(seen[1])), abs=1e-5)
    assert abs(found).max() > 1e-3


def test_without_a_sink_the_first_token_has_the_keys_of_the_second():
    config = replace(RUN, {"model.num_layers": 2, "model.num_heads": 2, "model.position": "learned"})
    params = jax.tree.map(np.array, drawn_params(config.model, 0.1))
    for layer in ("layers_0", "layers_1"):
        params[layer]["attention"]["key"]["kernel"] *= 9.0
    own, tokens = loaded(config, params), np.random.default_rng(0).integers(0, 32, (2, 8))
    (mass, loss), (without, changed) = runpy.run_path(str(ROOT / "examples/remove_sink.py"))["measured"](own, tokens)
    logits, taps = own.model.apply({"params": own.params}, tokens, observe=lambda taps: taps)
    assert mass == pytest.approx(float(np.mean(np.asarray(taps.attention_weights)[..., 1:, 0])), rel=1e-5)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits[:, 1:-1])), tokens[:, 2:, None], -1).mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)
    keys = np.array(taps.keys)  # each query then weighs the first token as the second one
    keys[:, :, 0] = keys[:, :, 1]
    given = Interventions(keys=keys, keys_share=np.pad(np.ones((2, 2, 1)), ((0, 0), (0, 0), (0, 7))))
    _, weights = own.model.apply(
        {"params": own.params}, tokens, interventions=given, observe=lambda taps: taps.attention_weights
    )
    np.testing.assert_allclose(weights[0, ..., 1:, 0], weights[0, ..., 1:, 1], rtol=1e-5)  # later keys have changed
    assert without == pytest.approx(float(np.mean(np.asarray(weights)[..., 1:, 0])), rel=1e-5)
    assert changed != pytest.approx(loss, abs=1e-4)
    assert without != pytest.approx(mass, rel=0.01)


def test_every_example_is_tested():
    tested = {"linen_attention.py", "nnx_attention.py", "nnx_training.py", "equinox_training.py"}
    tested |= {"recommended_linen.py", "recommended_nnx.py", "lm_eval_model.py", "patch_heads.py", "remove_sink.py"}
    assert {path.name for path in EXAMPLES} == tested


@slow
def test_the_file_for_optax_passes_its_own_tests():
    folder = ROOT / "examples/optax_contrib"
    text = (folder / "_orthoadam.py").read_text(encoding="utf-8").lower()
    assert "orthojax" not in text.replace("scale_by_orthoadam", "")
    done = python("_orthoadam_test.py", cwd=folder)
    assert done.returncode == 0, done.stderr


# Notebooks, from their first cell to their last: they print the kind of thing that they hold as outputs.

NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LARGEST_BYTES = 100_000


def cells(name, kind):
    return [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == kind]


def printed(name):
    """Returns what its cells printed when it was saved."""
    outputs = [output for cell in cells(name, "code") for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")


def shape_of(text):
    """Removes the numbers, which depend on the machine and the Python that is read."""
    return [" ".join(re.sub(r"[-\d.,e+\[\]]+", " ", line).split()) for line in text.splitlines()]


def run_cells(name, tmp_path, **replaced):
    code = "\n".join("".join(cell["source"]) for cell in cells(name, "code"))
    for word, value in replaced.items():
        code, found = re.subn(rf"^{word} = .*$", f"{word} = {value}", code, flags=re.MULTILINE)
        assert found == 1
    done = python("-c", code, cwd=tmp_path, MPLBACKEND="agg")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saved_outputs_are_whole_without_errors(name):
    assert len(json.dumps(NOTEBOOKS[name])) < LARGEST_BYTES
    outputs = [output for cell in cells(name, "code") for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(tmp|home|root|work)/", json.dumps(outputs))
    numbers = [cell["execution_count"] for cell in cells(name, "code")]
    assert numbers == list(range(1, len(numbers) + 1))


SHORTER = {"STEPS": 150}


@pytest.mark.parametrize(("name", "replaced"), [
    ("measure_your_model", {}),
    *(pytest.param(name, SHORTER, marks=slow) for name in ("swap_the_optimizer", "bigram_backcopy")),
])  # fmt: skip
def test_notebooks_print_lines_like_the_saved_ones(name, replaced, tmp_path):
    assert shape_of(run_cells(name, tmp_path, **replaced)) == shape_of(printed(name))


@slow
@pytest.mark.pretrained
def test_the_real_model_prints_the_saved_lines(tmp_path):
    assert run_cells("real_model", tmp_path).splitlines()[1:] == printed("real_model").splitlines()[1:]


TINY = ("--tiny", "--repeats=2")
COMPARED = {
    "attention": {"softmax", "softmax1", "learned sink", "softmax of jax.nn"},
    "optimizer": {
        "optax.adamw",
        "optax.contrib.muon",
        *(f"orthoadam, {of}" for of in ("hadamard", "haar", "int8", "int4")),
    },
    "training": {"vanilla", "cured", "plain flax + optax"},
    "loop": {"one step per dispatch", "several steps per dispatch", "plain flax + optax"},
}


@slow
def test_muon_sends_every_matrix_once_more():
    flags = ("--tiny", "--json", "--mesh=1x8x1,2x2x2", "--optimizers=adam,muon")
    rows = json.loads(run("benchmarks/collectives.py", *flags))["rows"]
    assert all(1.0 < muon["/ first"] < 1.1 and muon["all-to-all GB"] > 0 for muon in rows[1::2])


@slow
def test_variants_of_the_step_are_timed_and_lowered():
    environment, *rows = map(json.loads, run("benchmarks/gpu_step.py", *TINY).splitlines())
    assert environment["environment"]["versions"]["jax"]
    variants = {row["variant"]: row for row in rows if "variant" in row}
    assert len(variants) == 4
    assert all(row["ratio"] > 0 and row["temp_bytes"] > 0 for row in variants.values())
    assert [row["attention"] for row in rows if "attention" in row] == ["softmax", "softmax1"]
    rows = [json.loads(line) for line in run("benchmarks/gpu_step.py", *TINY, "--lower").splitlines()]
    assert len({row["variant"] for row in rows}) == len(rows) >= len(variants)
    # Forward and backward, in each of the two layers; some versions of JAX write the body of an unrolled scan once.
    assert {row["attention_kernels"] for row in rows} <= {2, 4}


@slow
def test_launcher_prints_json_of_every_benchmark():
    results = [json.loads(line) for line in run("launch/benchmark.py", *TINY, "--json").splitlines()]
    assert len(results) == len(COMPARED)
    for result, names in zip(results, COMPARED.values(), strict=True):
        assert names <= {value for row in result["rows"] for value in row.values()}
        assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in result["rows"])
        assert result["versions"]["jax"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short_enough_to_be_copied(path):
    most = 80 if path.name == "lm_eval_model.py" else 59
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.parametrize("mesh", ["1x8x1", pytest.param("2x2x2", marks=slow)])
def test_orthoadam_sends_what_adam_sends(mesh):
    flags = ("--tiny", "--json", f"--mesh={mesh}", "--optimizers=adam,orthoadam")
    adam, ortho = json.loads(run("benchmarks/collectives.py", *flags))["rows"]
    assert adam["GB/step/device"] > 0.004  # all kernels and the table, there and back
    assert ortho["/ first"] == pytest.approx(1.0, abs=1e-4)
    assert adam["all-to-all GB"] == ortho["all-to-all GB"] == 0.0
