"""Table 7: a fine-tuned model is measured on the rows of its base, whatever text it was trained on."""

import pytest
from test_study import _one_quantisation, folders, small  # noqa: F401  (a fixture of every test)

from orthojax import load
from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.experiments.base_configs import LANGUAGE_MODEL
from orthojax.experiments.catalog import find
from orthojax.experiments.claims import judge
from orthojax.experiments.page import make_report
from orthojax.experiments.rerender import read_raw, results_of
from orthojax.experiments.study import given_model, run_experiment
from orthojax.train import evaluate, open_inputs, train

TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog, and nobody in particular is very much surprised by that. ",
    "answers": "Question: what is it? Answer: it is what it is. ",
}
# Dominance and kurtosis, which two steps do not make; the second model's within 5% of the first's.
OUTLIERS = {
    name: {
        "first_attention_fraction": fraction,
        "first_attention_mass": 0.5,
        "kurtosis_first": kurtosis,
        "kurtosis_pooled": 10.0,
    }
    for name, fraction, kurtosis in (("base", 0.90, 100.0), ("tuned", 0.88, 103.0))
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A base model of bytes and the same one trained further on other text in longer rows of another seed: folders."""
    home = tmp_path_factory.mktemp("pair")
    for name, text in TEXTS.items():
        (home / f"{name}.txt").write_text(text * 80, encoding="utf-8")
    data = {"data.kind": "text", "data.paths": (str(home / "prose.txt"),), "data.tokenizer": "bytes"}
    base = small(LANGUAGE_MODEL, **data, **{"model.vocab_size": 258})
    other = {"data.paths": (str(home / "answers.txt"),), "data.sequence_length": 12, "data.seed": 5}
    tuned = replace(base, other | {"train.init_from": str(home / "base"), "train.steps": 4, "train.seed": 5})
    for name, config in (("base", base), ("tuned", tuned)):
        train(config, open_inputs(config, home / "data"), home / name)
    return home


def without(row, name):
    return {key: value for key, value in row.items() if key != name}


def measure(home, workdir, *names):
    models = [given_model(name, home / name) for name in names]
    return run_experiment(find("table7"), "tiny", (0,), workdir, models=models, **folders(home))


def test_both_are_measured_on_the_rows_of_the_base(pair, tmp_path):
    results = measure(pair, tmp_path, "base", "tuned")
    base, tuned = load(pair / "base"), load(pair / "tuned")
    inputs = open_inputs(base.config, pair / "data")
    expected = evaluate(tuned._replace(config=base.config), inputs)
    for name in ("perplexity", "kurtosis_first", "first_attention_mass"):
        assert results["tuned"][name] == pytest.approx(expected[name], rel=1e-6)
    on_its_own = evaluate(tuned, open_inputs(tuned.config, pair / "data"))
    assert results["tuned"].perplexity != pytest.approx(on_its_own["perplexity"], rel=0.01)
    assert results["tuned"].sequence_length == base.config.data.sequence_length == 16
    assert results["base"].perplexity == pytest.approx(evaluate(base, inputs)["perplexity"], rel=1e-6)


def test_the_report_says_so_and_a_report_written_again_knows_it(pair, tmp_path):
    results = measure(pair, tmp_path, "base", "tuned")
    again = results_of(find("table7"), read_raw(tmp_path / "results.json"), tmp_path)
    for of in (results, again):
        assert of["tuned"].data == of["base"].data != of["tuned"].config.data
        report = make_report(of)
        assert "the rows that the base model's own run holds out" in report.summary[0]
        (note,) = (line for line in report.notes if line.startswith("tuned: "))
        assert note.startswith(
            f"tuned: initialised from {pair / 'base'}; trained on data that differs from base's in: "
        )
        assert note.endswith("paths, seed, sequence_length")


def test_where_both_are_measured_on_the_same_rows_the_claims_are_testable(pair, tmp_path):
    results = measure(pair, tmp_path, "base", "tuned")
    raw = results.raw | {
        "rows": [row | {"metrics": row["metrics"] | OUTLIERS[row["variant"]]} for row in results.raw["rows"]]
    }
    attention, first, pooled, _ = find("table7").claims
    together = results_of(find("table7"), raw, tmp_path)
    assert [judge(claim, together).verdict for claim in (attention, first, pooled)] == [
        "holds",
        "holds",
        "does not hold",
    ]
    apart = results_of(find("table7"), raw | {"rows": [without(row, "measured_on") for row in raw["rows"]]}, tmp_path)
    assert {judge(claim, apart).verdict for claim in (attention, first, pooled)} == {"not testable at this scale"}


def test_a_model_whose_ids_are_other_text_is_refused(pair, tmp_path):
    config = replace(load(pair / "base").config, {"data.tokenizer": "bpe:270", "model.vocab_size": 270})
    train(config, open_inputs(config, pair / "data"), pair / "other")
    with pytest.raises(UserError, match="other, seed 0: its tokenizer reads other text from the rows of the model"):
        measure(pair, tmp_path, "base", "other")
