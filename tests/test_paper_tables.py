"""Tables 1 to 9: the paper's own numbers, numbers that contradict a claim, and pairs before and after fine-tuning."""

import dataclasses
import functools

import numpy as np
import pytest

from orthojax import load
from orthojax.config import Config, replace
from orthojax.errors import UserError
from orthojax.experiments.base import LANGUAGE_MODEL
from orthojax.experiments.claims import judge
from orthojax.experiments.from_attention import paper_tables
from orthojax.experiments.from_attention.ablation import TABLE5
from orthojax.experiments.from_attention.models import SCALES
from orthojax.experiments.from_attention.tables import (
    TABLE1,
    TABLE2,
    TABLE3,
    TABLE4,
    TABLE6,
    TABLE7,
    TABLE8,
    TABLE9,
    on_the_text_of_its_base,
)
from orthojax.experiments.running import run_study
from orthojax.experiments.study import Given, make_report, results_of
from orthojax.train import evaluate, open_inputs, train

LOST = ("int8_coarse", "int8_moderate", "int8_fine", "int4_zeropoint")


def made_up(study, metrics, scale="paper", given=(), seeds=(0,)):
    """Returns results with `metrics(variant)`, or `metrics(variant, seed)` for several seeds; of None a failed run."""
    rows = []
    for name, overrides in (*((name, {}) for name in study.runs_at(scale)), *given):
        for seed in seeds:
            found = metrics(name, seed) if len(seeds) > 1 else metrics(name)
            row = {"variant": name, "seed": seed, "overrides": overrides, "metrics": found or {}}
            row |= {} if found else {"failed": "not in the paper"}
            rows.append(row | ({"given": True} if name in dict(given) else {}))
    provenance = {"seeds": list(seeds)}
    return results_of(study, {"experiment": study.name, "scale": scale, "provenance": provenance, "rows": rows})


def judged(study, metrics, **more):
    results = made_up(study, metrics, **more)
    return [judge(claim, results) for claim in study.claims]


def verdicts(study, metrics, **more):
    return [of.verdict for of in judged(study, metrics, **more)]


def row_metrics(**given):
    """Returns every metric that a claim reads, of a vanilla model that nothing happens to."""
    base = dict.fromkeys(("perplexity", "kurtosis_first", "kurtosis_rest", "kurtosis_pooled"), 20.0)
    base |= {"max_abs_first": 50.0, "max_abs_rest": 50.0, "first_attention_fraction": 0.4} | given
    base.setdefault("first_attention_mass", base["first_attention_fraction"] / 2)
    return {f"perplexity_{of}": 1.1 * base["perplexity"] for of in LOST} | base


def printed(table, name):
    return row_metrics(**table[name]) if name in table else None


def of_table_2(name):
    mass = {"softmax1": 0.04, "cured": 0.04}.get(name.rpartition("_")[2], 0.46)
    row = printed(paper_tables.TABLE_2, name)
    return row and row | {"first_attention_mass": mass}


def of_table_5(name):
    row = paper_tables.TABLE_5[name]
    kurtosis = dict.fromkeys(("kurtosis_first", "kurtosis_rest"), row["kurtosis_pooled"])
    return row_metrics(**row, **kurtosis, max_abs_first=row["max_abs"], max_abs_rest=row["max_abs"])


def of_table_9(name):
    layers = np.arange(1.0, 13.0)
    by_layer = {"kurtosis_first": layers, "norm_ratio_first": layers**2, "kurtosis_rest": layers}
    by_layer["norm_ratio_rest"] = 1 / layers
    return row_metrics() | {f"{key}/layer_{i}": y for key, values in by_layer.items() for i, y in enumerate(values)}


PAPER = {
    "table1": (TABLE1, functools.partial(printed, paper_tables.TABLE_3)),
    "table2": (TABLE2, of_table_2),
    "table3": (TABLE3, functools.partial(printed, paper_tables.TABLE_3)),
    "table5": (TABLE5, of_table_5),
    "table6": (TABLE6, functools.partial(printed, TABLE6.paper_at("paper"))),
    "table8": (TABLE8, of_table_2),
    "table9": (TABLE9, of_table_9),
}
# The paper's own numbers contradict these: Llama2's outliers stay with OrthoAdam alone, 60M and 130M keep a kurtosis of
# 7 to 10 with both, cured Llama2 loses a fifth at coarse, cured GPT2 60M as much at 4 bits as Llama2. The correlation
# of other tokens that is planted above is negative.
CONTRADICTED = {
    "table2": ["OrthoAdam alone removes the outliers", "Both together leave no outliers"],
    "table3": ["Cured models maintain performance"],
    "table9": ["Kurtosis and norm ratio go together"],
}


@pytest.mark.parametrize("name", PAPER)
def test_numbers_of_the_paper_give_its_verdicts(name):
    wrong = [of.claim.says for of in judged(*PAPER[name]) if of.verdict != "holds"]
    expected = CONTRADICTED.get(name, [])
    assert len(wrong) == len(expected)
    assert all(says.startswith(text) for says, text in zip(wrong, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "variant", "change", "claim"),
    [
        ("table1", "gpt2_60m_cured", {"perplexity_int4_zeropoint": 70.0}, "They do not break"),
        ("table2", "gpt2_1_4b_cured", {"perplexity": 13.6}, "Perplexity with softmax-1 and OrthoAdam together"),
        ("table2", "gpt2_60m_softmax1", {"kurtosis_rest": 20.0}, "Softmax-1 alone leaves the outliers"),
        ("table2", "gpt2_60m_orthoadam", {"kurtosis_first": 100.0}, "OrthoAdam alone does not remove"),
        ("table2", "gpt2_60m_orthoadam", {"first_attention_fraction": 0.1}, "It is softmax-1 that does it"),
        ("table2", "llama2_130m_softmax1", {"first_attention_mass": 0.3}, "Softmax-1 alone removes"),
        ("table2", "llama2_130m_cured", {"max_abs_rest": 1500.0}, "The largest activations shrink"),
        ("table3", "gpt2_350m_cured", {"perplexity_int8_moderate": 20.5}, "int8_moderate"),
        ("table3", "gpt2_130m_cured", {"perplexity_int4_zeropoint": 26.0}, "Four bits are catastrophic"),
        ("table5", "adam_rmsnorm_learned_softmax1", {"kurtosis_pooled": 160.0}, "RMSNorm with a"),
        ("table5", "sgd_rmsnorm_single_learned_softmax1", {"perplexity": 27.0}, "SGD without momentum"),
        ("table5", "orthoadam_rmsnorm_single_learned_softmax", {"kurtosis_pooled": 3.1}, "All three are needed"),
        ("table5", "orthoadam_rmsnorm_single_learned_softmax1", {"max_abs_first": 400.0}, "It shrinks the largest"),
        ("table5", "rmsprop_rmsnorm_single_learned_softmax1", {"kurtosis_pooled": 3.9}, "It is adaptive optimizers"),
        ("table5", "adam_layernorm_none_softmax", {"first_attention_mass": 0.2}, "Without positions"),
        ("table6", "gpt2_60m_1024_cured", {"perplexity": 32.6}, "Longer sequences cost"),
        ("table6", "gpt2_130m_512_cured", {"perplexity_int8_fine": 23.5}, "At every length cured loses less"),
        ("table8", "gpt2_130m_vanilla", {"max_abs_first": 700.0}, "The largest activation alpha is"),
        ("table8", "gpt2_350m_vanilla", {"kurtosis_first": 500.0}, "Wider models have larger kurtosis"),
    ],
)
def test_a_contradicting_number_changes_the_verdict(name, variant, change, claim):
    study, metrics = PAPER[name]
    changed = judged(study, lambda v: (metrics(v) or {}) | (change if v == variant else {}) or None)
    pairs = zip(judged(study, metrics), changed, strict=True)
    different = [before.claim.says for before, after in pairs if before.verdict != after.verdict]
    assert any(claim in says for says in different), different
    assert len(different) <= 2  # a claim may have a sharper form, and one of all models follows that of one


@pytest.mark.parametrize(
    ("changes", "verdict", "counted"),
    [
        ({}, "holds", 2),  # the paper's SGD without momentum is 25% above Adam, so it says nothing
        ({"sgd": {"perplexity": 27.0}}, "holds", 3),
        ({"sgd": {"perplexity": 27.0, "kurtosis_pooled": 60.0}}, "does not hold", 3),
        ({"sgd_momentum": {"kurtosis_pooled": 60.0}}, "does not hold", 2),
        ({"rmsprop": {"kurtosis_pooled": 3.0, "perplexity": 30.0}}, "holds", 1),
        ({name: {"perplexity": 40.0} for name in ("rmsprop", "sgd_momentum", "sgd")}, "not testable", 0),
    ],
)
def test_optimizers_are_judged_if_they_learned_as_adam(changes, verdict, counted):
    def metrics(name):
        return of_table_5(name) | changes.get(name.removesuffix("_rmsnorm_single_learned_softmax1"), {})

    (claim,) = [of for of in judged(TABLE5, metrics) if "It is adaptive" in of.claim.says]
    assert claim.verdict == verdict
    assert sum(case.testable for case in claim.cases) == counted


def test_what_costs_nothing_is_not_testable():
    def lost(vanilla, cured):
        factor = {"vanilla": vanilla, "cured": cured}
        return lambda name: row_metrics() | {f"perplexity_{of}": 20.0 * factor[name.rpartition("_")[2]] for of in LOST}

    assert set(verdicts(TABLE3, lost(1.001, 1.001))) == {"not testable"}
    alone = verdicts(TABLE3, lost(1.001, 1.5))
    assert alone[:4] == ["does not hold"] * 4
    assert set(alone) == {"does not hold", "not testable"}


def verdict_of(beginning, metrics, **more):
    (claim,) = [of for of in judged(TABLE2, metrics, **more) if of.claim.says.startswith(beginning)]
    return claim.verdict


def test_a_method_that_loses_more_at_coarse_in_every_seed_contradicts():
    def verdict(**factors):
        def metrics(name, seed):
            factor = factors.get(name.rpartition("_")[2], (1.001, 1.001))[seed]
            return row_metrics(perplexity_int8_coarse=20.0 * factor)

        return verdict_of("(Ours) No method", metrics, seeds=(0, 1))

    assert verdict() == "not testable"
    assert verdict(vanilla=(1.01, 1.01)) == "holds"
    assert verdict(orthoadam=(1.012, 1.0)) == "holds"
    assert verdict(orthoadam=(1.012, 1.002)) == "does not hold"


def test_outliers_in_one_seed_are_not_those_of_a_model():
    def verdict(*of_vanilla):
        def metrics(name, seed):
            return row_metrics(kurtosis_rest=3.1, kurtosis_first=of_vanilla[seed] if "vanilla" in name else 3.0)

        return verdict_of("Both together leave no", metrics, seeds=(0, 1))

    assert verdict(20.0, 20.0) == "holds"
    assert verdict(20.0, 2.0) == "not testable"


@pytest.mark.parametrize(("fraction", "verdict"), [(0.3, "does not hold"), (0.03, "not testable")])
def test_outliers_of_the_first_token_are_judged_with_dominance(fraction, verdict):  # chance gives 0.024
    def metrics(name):
        kurtosis = 3.0 if "orthoadam" in name else 20.0
        return row_metrics(first_attention_fraction=fraction, kurtosis_first=kurtosis)

    assert verdict_of("OrthoAdam alone does not", metrics) == verdict


def test_given_models_are_cases_of_table_1_by_how_they_were_trained():
    vanilla = {"model.normalizer": "softmax", "optim.optimizer": "adam"}
    numbers = {"public": row_metrics(perplexity_int4_zeropoint=60.0), "mine": row_metrics(), "kept": row_metrics()}
    given = [("public", vanilla), ("mine", {}), ("kept", vanilla)]  # the default config is cured
    of_grid = lambda name: row_metrics(perplexity_int4_zeropoint=20.0)  # noqa: E731
    broken, unbroken, _ = judged(TABLE1, lambda name: numbers.get(name) or of_grid(name), given=given)
    assert {case.name: case.holds for case in broken.cases if not case.name.endswith("vanilla")} == {
        "public": True,
        "kept": False,
    }
    assert "mine" in [case.name for case in unbroken.cases]
    assert unbroken.verdict == "holds"  # testable because the public model breaks


@pytest.mark.parametrize("scale", SCALES)
def test_shortest_and_longest_sequences_are_those_of_the_scale(scale):
    results = made_up(TABLE6, lambda name: row_metrics(), scale)
    lengths = sorted({of.config.data.sequence_length for of in results.values()})
    assert results["gpt2_60m_shortest_cured"].config.data.sequence_length == lengths[0]
    assert results["gpt2_60m_longest_cured"].config.data.sequence_length == lengths[-1]


@pytest.mark.slow
def test_table_4_measures_costs_and_trains_nothing(tmp_path):
    small = {"model.num_layers": 1, "model.d_model": 16, "model.d_mlp": 16, "model.num_heads": 2, "train.batch_size": 2}
    runs = {name: replace(config, small) for name, config in TABLE4.runs_at("tiny").items() if "gpt2_60m" in name}
    study = dataclasses.replace(TABLE4, runs=lambda scale: runs)
    results = run_study(study, "tiny", (0,), tmp_path, runs_dir=tmp_path / "runs")
    assert results["gpt2_60m_vanilla"]["cost_step_ratio"] == 1.0
    assert results["gpt2_60m_cured"]["cost_steps_per_second"] > 0
    assert not (tmp_path / "runs").exists()


# Table 7.

TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog, and nobody in particular is very much surprised by that. ",
    "answers": "Question: what is it? Answer: it is what it is. ",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns the folder of a base model of bytes, and of the same one trained on other text in longer rows."""
    home = tmp_path_factory.mktemp("pair")
    for name, text in TEXTS.items():
        (home / f"{name}.txt").write_text(text * 80, encoding="utf-8")
    base = replace(
        LANGUAGE_MODEL,
        {
            "data.kind": "text", "data.paths": (str(home / "prose.txt"),), "data.tokenizer": "bytes",
            "data.repeated_share": 0.0, "data.sequence_length": 16, "model.vocab_size": 258, "model.d_model": 32,
            "model.num_heads": 2, "model.num_layers": 2, "model.d_mlp": 16, "model.max_length": 16, "train.steps": 3,
            "train.batch_size": 4, "train.probe_every_steps": 0, "train.eval_every_steps": 3,
            "train.checkpoint_every_steps": 3, "eval.sequences": 8, "eval.batch_size": 4, "optim.warmup_steps": 1,
        },
    )  # fmt: skip
    other = {"data.paths": (str(home / "answers.txt"),), "data.sequence_length": 12, "data.seed": 5}
    tuned = replace(base, other | {"train.init_from": str(home / "base"), "train.steps": 4, "train.seed": 5})
    for name, config in (("base", base), ("tuned", tuned)):
        train(config, open_inputs(config, home / "data"), home / name)
    return home


def measure(home, workdir, *names):
    given = {name: Given(load(home / name).config, load(home / name).source) for name in names}
    return run_study(TABLE7, "tiny", (0,), workdir, cache_dir=home / "data", given=given)


@pytest.mark.slow
def test_both_models_are_measured_on_the_rows_of_the_base(pair, tmp_path):
    results = measure(pair, tmp_path, "base", "tuned")
    base, tuned = load(pair / "base"), load(pair / "tuned")
    inputs = open_inputs(base.config, pair / "data")
    expected = evaluate(tuned._replace(config=base.config), inputs)
    for name in ("perplexity", "kurtosis_first", "first_attention_mass"):
        assert results["base after"][name] == results["tuned"][name] == pytest.approx(expected[name], rel=1e-6)
    on_its_own = evaluate(tuned, open_inputs(tuned.config, pair / "data"))
    assert results["tuned"]["perplexity"] != pytest.approx(on_its_own["perplexity"], rel=0.01)
    assert results["base"]["perplexity"] == pytest.approx(evaluate(base, inputs)["perplexity"], rel=1e-6)
    assert results["tuned"].config.data == results["base"].config.data
    (changes,) = [table for table in make_report(results).tables if table.caption.startswith("Change")]
    assert [row[0] for row in changes.rows] == ["tuned"]


@pytest.mark.slow
def test_a_model_whose_ids_are_other_text_is_refused(pair, tmp_path):
    config = replace(load(pair / "base").config, {"data.tokenizer": "bpe:270", "model.vocab_size": 270})
    train(config, open_inputs(config, pair / "data"), pair / "other")
    with pytest.raises(UserError, match="other: its tokenizer"):
        measure(pair, tmp_path, "base", "other")


def test_pairs_are_testable_if_measured_on_the_same_text():
    def numbers(fraction, kurtosis):
        return row_metrics(first_attention_fraction=fraction, kurtosis_first=kurtosis, kurtosis_pooled=10.0)

    of = {"base": numbers(0.90, 100.0), "tuned": numbers(0.88, 103.0)}
    together = verdicts(TABLE7, of.get, given=[("base", {}), ("tuned", {"data.seed": 5})])
    assert together == ["holds", "holds", "does not hold", "not measured"]
    apart = verdicts(TABLE7, of.get, given=[("base", {}), ("tuned", {"data.sequence_length": 12})])
    assert apart[:3] == ["not testable"] * 3


def test_models_on_the_same_text_are_measured_as_they_are(tmp_path):
    same = Given(replace(Config(), {"data.seed": 3}), tmp_path)
    models = {"base": Given(Config(), tmp_path), "tuned": same, "alone": same}
    assert on_the_text_of_its_base(models) == models
