"""The trained tables: which runs they share, and what reports conclude from made-up numbers and the paper's own."""

import dataclasses
import functools
import html
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.reporting import summaries
from orthojax.experiments.reporting.criteria import chance_of_first
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant, run_name

from orthojax.config import Config
from orthojax.experiments.from_attention import ablation, models, table2, table3, table5, table6, table8, table9
from orthojax.experiments.from_attention.beside_the_paper import GRID
from orthojax.experiments.from_attention.output_weights import MEASURE, WORDS
from orthojax.experiments.from_attention.paper_configs import paper_runs
from orthojax.experiments.from_attention.paper_tables import TABLE_2, TABLE_3, TABLE_5, TABLE_6, TABLE_8, TABLE_9
from orthojax.fields import changed_fields

TABLES = {
    f"table{i}": t.EXPERIMENT
    for i, t in zip((2, 3, 5, 6, 8, 9), (table2, table3, table5, table6, table8, table9), strict=True)
}
PER_TOKEN = "perplexity_int8_fine_per_token"


def names(experiment, scale):
    return {run_name(variant, 0) for variant in experiment.variants(scale)}


@pytest.mark.parametrize("scale", models.SCALES)
def test_tables_share_the_runs_of_table_2(scale):
    shared = names(table2.EXPERIMENT, scale)
    assert len(shared) == 20
    assert names(table9.EXPERIMENT, scale) == shared
    for experiment, count in ((table3.EXPERIMENT, 10), (table8.EXPERIMENT, 5)):
        assert len(names(experiment, scale)) == count
        assert names(experiment, scale) <= shared
    assert len(names(table6.EXPERIMENT, scale)) == 12
    assert len(names(table6.EXPERIMENT, scale) & shared) == 4  # those of the first length


def test_at_paper_scale_every_run_is_one_of_the_papers():
    theirs = {run.config for run in paper_runs()}
    for experiment in TABLES.values():
        assert {variant.config for variant in experiment.variants("paper")} <= theirs
    ours = {variant.config for experiment in TABLES.values() for variant in experiment.variants("paper")}
    (relaxed,) = theirs - ours
    assert relaxed.model.relaxed_causal_tokens == 10  # Figure 2


def test_table_6_differs_in_lengths_alone():
    by_name = {variant.name: variant.config for variant in table6.variants("tiny")}
    for name, config in by_name.items():
        model, _, method = name.rsplit("_", 2)
        changed = changed_fields(by_name[f"{model}_64_{method}"], config)
        assert set(changed) <= {"data.sequence_length", "model.max_length"}


# Reports.


def row_metrics(**given):
    """Every metric that a report shows, in a vanilla model that nothing happens to."""
    base = dict.fromkeys(("perplexity", "kurtosis_first", "kurtosis_rest", "kurtosis_pooled"), 20.0)
    base |= dict.fromkeys(("max_abs_first", "max_abs_rest", "max_abs_first_maximum", "max_abs_rest_maximum"), 50.0)
    base |= {"first_attention_fraction": 0.4, "first_attention_mass": 0.4} | given
    for key in ("int8_coarse", "int8_moderate", "int8_fine", "int8_fine_per_token", "int4_zeropoint"):
        base.setdefault(f"perplexity_{key}", 1.1 * base["perplexity"])
    return base


def study_of(experiment, scale, metrics, seeds=(0,), workdir=Path(), variants=None):
    """A study whose metrics by variant are given, of each seed a little above those of the one before; None fails."""
    variants, rows = variants or experiment.variants(scale), []
    for seed in seeds:
        for v in variants:
            given = metrics(v)
            row = {"variant": v.name, "seed": seed, "run": f"{v.name}-{seed}", "metrics": {}}
            row["overrides"] = changed_fields(Config(), v.config)
            if given is None:
                row["failed"] = "the loss is not finite at step 3"
            else:
                row["metrics"] = {key: value * (1 + 0.001 * seed) for key, value in given.items()}
            rows.append(row)
    data = {"source": "C4", "file_count": 3, "source_sha256": "0" * 64, "tokenizer": "x", "train": {"n_tokens": 10}}
    provenance = {"versions": {"jax": "0"}, "device": "cpu", "seeds": list(seeds), "data": [data], "date": "2000-01-01"}
    results = {"rows": rows, "provenance": provenance | {"training_seconds": 60.0}}
    return Study(experiment, scale, variants, tuple(seeds), workdir, results)


MASS = {"vanilla": 0.46, "softmax1": 0.04, "orthoadam": 0.4, "cured": 0.04}


def of_table_2(variant):
    model, method = GRID[variant.name]
    key = models.MODELS[model], method
    return row_metrics(**TABLE_2[key], first_attention_mass=MASS[method]) if key in TABLE_2 else None


def of_table_3(variant):
    model, method = GRID[variant.name]
    return row_metrics(**TABLE_3[models.MODELS[model], method])


def of_table_5(variant):
    paper = TABLE_5[ablation.BY_NAME[variant.name]]
    kurtosis = dict.fromkeys(("kurtosis_first", "kurtosis_rest", "kurtosis_pooled"), paper["kurtosis"])
    largest = dict.fromkeys(("max_abs_first", "max_abs_rest"), paper["max_abs"])
    fraction = paper["first_attention_fraction"]
    return row_metrics(perplexity=paper["perplexity"], first_attention_fraction=fraction,
                       first_attention_mass=fraction / 2, **kurtosis, **largest)  # fmt: skip


def of_table_6(variant):
    model, length, method = variant.name.rsplit("_", 2)
    key = (model.removeprefix("gpt2_"), int(length), method)
    return row_metrics(**TABLE_6.get(key, TABLE_3[models.MODELS[model], method]))


def of_table_9(variant):
    layers = np.arange(1.0, 13.0)
    by_layer = {
        "kurtosis_first": layers,
        "norm_ratio_first": layers**2,
        "kurtosis_rest": layers,
        "norm_ratio_rest": 1 / layers,
    }
    return row_metrics() | {f"{key}/layer_{i}": y for key, values in by_layer.items() for i, y in enumerate(values)}


PAPER = {"table2": of_table_2, "table3": of_table_3, "table5": of_table_5, "table6": of_table_6, "table8": of_table_2,
         "table9": of_table_9}  # fmt: skip


@functools.cache
def conclude(name, metrics=None, **options):
    report = TABLES[name].report(study_of(TABLES[name], "paper", metrics or PAPER[name], **options))
    plt.close("all")
    return report


# What the paper's own numbers contradict: Llama2's outliers stay with OrthoAdam alone, 60M and 130M keep a kurtosis of
# 7 to 10 with both, cured Llama2 loses a fifth at coarse. The correlation planted above is negative for other tokens.
CONTRADICTED = {
    "table2": ["OrthoAdam alone removes the outliers", "Both together leave no outliers"],
    "table3": ["Cured models maintain performance"],
    "table9": ["Kurtosis and norm ratio go together"],
}


@pytest.mark.parametrize("name", TABLES)
def test_from_the_papers_numbers_follow_the_papers_claims_but_where_its_tables_contradict_them(name):
    claims = conclude(name).claims
    wrong = [claim.whole() for claim in claims if claim.verdict != "holds"]
    assert len(wrong) == len(CONTRADICTED.get(name, []))
    for text, expected in zip(wrong, CONTRADICTED.get(name, []), strict=True):
        assert text.startswith(expected)
    assert all("Criterion: " in claim.closing and not re.search(r"\bnan\b", claim.whole()) for claim in claims)


@pytest.mark.parametrize("name", TABLES)
def test_our_columns_show_the_papers_numbers_when_they_are_ours(name):
    if name in ("table5", "table9"):
        return
    table = conclude(name).tables[0]
    pairs = [(i, i + 1) for i, heading in enumerate(table.columns[1:-1], 1) if table.columns[i + 1] == "paper"]
    assert name == "table8" or len(pairs) >= 4
    shown = [row for row in table.rows if "failed" not in row]
    assert shown
    assert all(row[ours] == row[paper] for row in shown for ours, paper in pairs)


@pytest.mark.parametrize(
    ("name", "variant", "change", "turned"),
    [
        ("table2", "gpt2_1_4b_cured", {"perplexity": 13.6}, "Perplexity with softmax-1 and OrthoAdam together"),
        ("table2", "gpt2_60m_softmax1", {"kurtosis_rest": 20.0}, "Softmax-1 alone leaves the outliers"),
        ("table2", "gpt2_60m_orthoadam", {"kurtosis_first": 100.0}, "OrthoAdam alone does not remove"),
        ("table2", "gpt2_60m_orthoadam", {"first_attention_fraction": 0.1}, "It is softmax-1 that does it"),
        ("table2", "llama2_130m_softmax1", {"first_attention_mass": 0.3}, "Softmax-1 alone removes"),
        ("table2", "llama2_130m_cured", {"max_abs_rest": 1500.0}, "The largest activations shrink"),
        ("table3", "gpt2_350m_cured", {"perplexity_int8_moderate": 20.5}, "against int8 moderate"),
        ("table3", "gpt2_130m_cured", {"perplexity_int4_zeropoint": 26.0}, "Four bits are catastrophic"),
        ("table5", "adam_rmsnorm_learned_softmax1", {"kurtosis_pooled": 160.0}, "RMSNorm with a gain"),
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
)  # fmt: skip
def test_a_number_that_contradicts_a_claim_turns_its_verdict(name, variant, change, turned):
    def changed(v):
        found = PAPER[name](v)
        return found | change if v.name == variant else found

    before, after = conclude(name).claims, conclude(name, changed).claims
    assert len(before) == len(after)
    verdicts = {b.text: b.verdict for b in before}
    different = [a.text for b, a in zip(before, after, strict=True) if verdicts[b.text] != a.verdict]
    assert any(turned in text for text in different), different
    assert len(different) <= 2  # a claim may have a sharper form, and one of all models follows that of one


def test_the_largest_reduction_of_the_4_bit_penalty_is_not_that_of_the_largest_perplexity():
    def changed(v):  # vanilla 350M is by far the worst, and its cured form no better
        worse = {"perplexity_int4_zeropoint": 118507.1}
        return of_table_3(v) | worse if v.name == "gpt2_350m_cured" else of_table_3(v)

    (claim,) = [c for c in conclude("table3", changed).claims if c.text.startswith("The 4-bit penalty falls")]
    assert claim.verdict == "holds"
    assert "The largest here: GPT2 1.4B +3,564 → +0.27 points" in claim.text


@pytest.mark.parametrize(
    ("name", "text"),
    [("table3", "Cured models maintain performance"), ("table3", "The 4-bit penalty falls")],
)
def test_what_nobody_loses_is_not_kept_by_the_cured(name, text):
    def little(v):  # 1% with Adam, nothing when cured
        lost = 1.01 if v.name.endswith("vanilla") else 1.0
        return row_metrics(
            **{f"perplexity_{k}": 20.0 * lost for k in ("int8_coarse", "int8_moderate", "int4_zeropoint")}
        )

    verdicts = {c.text: c.verdict for c in conclude(name, little).claims}
    assert [v for t, v in verdicts.items() if t.startswith(text)] == ["not visible at this scale"]


def verdicts_of(claims, text):
    return [claim.verdict for claim in claims if text in claim.text]


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "table3",
            ["against int8 coarse", "against int8 fine", "against int4", "Cured models maintain", "Four bits are",
             "At coarse, cured outperforms"],
        ),
        ("table6", ["loses less to int8 coarse", "loses less to int8 moderate", "loses less to int8 fine"]),
    ],
)  # fmt: skip
def test_a_cured_model_that_loses_what_vanilla_keeps_is_seen(name, texts):
    def lost(v):
        after = 20.0 * (1.001 if v.name.endswith("vanilla") else 1.5)
        quantized = [key for key in row_metrics() if key.startswith("perplexity_")]
        return row_metrics(**dict.fromkeys(quantized, after))

    claims = conclude(name, lost).claims
    for text in texts:
        assert verdicts_of(claims, text) == ["does not hold"]


def changed_table_5(**changes):
    """The paper's rows, of which some have other numbers; names as in Table 5 of the optimizers."""
    rows = {"rmsprop": "rmsprop", "momentum": "sgd_momentum", "sgd": "sgd"}
    names = {f"{rows[key]}_rmsnorm_single_learned_softmax1": change for key, change in changes.items()}
    return lambda v: of_table_5(v) | names.get(v.name, {})


@pytest.mark.parametrize(
    ("changes", "verdict", "counted"),
    [
        ({}, "holds", "in 2 of 2"),  # the paper's SGD without momentum is 25% above Adam, so it says nothing
        ({"sgd": {"kurtosis_pooled": 60.0}}, "holds", "in 2 of 2"),
        ({"sgd": {"perplexity": 27.0}}, "holds", "in 3 of 3"),
        ({"sgd": {"perplexity": 27.0, "kurtosis_pooled": 60.0}}, "does not hold", "in 2 of 3"),
        ({"momentum": {"kurtosis_pooled": 60.0}}, "does not hold", "in 1 of 2"),
        ({"rmsprop": {"kurtosis_pooled": 3.0}}, "does not hold", "in 1 of 2"),
        ({"rmsprop": {"kurtosis_pooled": 3.0, "perplexity": 30.0}}, "holds", "in 1 of 1"),
        ({name: {"perplexity": 40.0} for name in ("rmsprop", "momentum", "sgd")}, "not visible at this scale", ""),
    ],
)
def test_an_optimizer_is_judged_by_its_outliers_where_it_has_learnt_as_much_as_adam(changes, verdict, counted):
    (claim,) = [c for c in conclude("table5", changed_table_5(**changes)).claims if "It is adaptive" in c.text]
    assert claim.verdict == verdict
    assert counted in claim.closing


def test_sgd_without_momentum_must_be_worse_in_every_seed():
    study = study_of(TABLES["table5"], "paper", of_table_5, (0, 1, 2))
    text = "SGD without momentum has a much higher"
    assert verdicts_of(table5.table5_claims.claims(study), text) == ["holds"]
    (row,) = [
        row
        for row in study.results["rows"]
        if (row["variant"], row["seed"]) == ("sgd_rmsnorm_single_learned_softmax1", 1)
    ]
    row["metrics"]["perplexity"] = 26.7  # the mean is still far above
    assert study.mean(row["variant"], "perplexity") > 1.1 * 26.6
    assert verdicts_of(table5.table5_claims.claims(study), text) == ["does not hold"]
    row["metrics"].clear()  # a seed that failed is not compared with others
    assert verdicts_of(table5.table5_claims.claims(study), text) == ["holds"]


@pytest.mark.parametrize(
    ("vanilla", "cured", "verdict"),
    [(31.9, 31.8, "holds"), (31.9, 33.0, "does not hold"), (28.0, 20.0, "holds"), (28.0, 33.0, "holds")],
)
def test_that_longer_sequences_cost_nothing_shows_only_where_more_tokens_do_not_pay(vanilla, cured, verdict):
    ends = {"gpt2_60m_1024_vanilla": vanilla, "gpt2_60m_1024_cured": cured}

    def changed(v):
        found = of_table_6(v)
        return found | {"perplexity": ends[v.name]} if v.name in ends else found

    (claim,) = [c for c in conclude("table6", changed).claims if c.text.startswith("Longer sequences cost")]
    assert claim.verdict == verdict  # of 130M, where 60M is not to be seen
    assert ("nothing to see" in claim.cases[0]) == (vanilla < 30)
    assert f"vanilla 31.88 → {vanilla:.2f} (paper 31.88 → 33.52)" in claim.cases[0]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("which", ["first", "all"])
def test_runs_that_failed_are_told_in_tables_and_claims(name, which, tmp_path):
    first = TABLES[name].variants("tiny")[0].name

    def metrics(v):
        return None if which == "all" or v.name == first else (of_table_9(v) | row_metrics())

    report = TABLES[name].report(study_of(TABLES[name], "tiny", metrics, (0, 1), tmp_path))
    assert any("not finite at step 3" in text for text in report.summary)
    assert "failed" in report.tables[0].rows[0]
    assert len({len(row) for row in report.tables[0].rows} | {len(report.tables[0].columns)}) == 1
    told = [claim for claim in report.claims if "Not measured, since a run failed or is missing" in claim.closing]
    assert told if which == "first" else len(told) == len(report.claims)
    if which == "all":
        assert {claim.verdict for claim in report.claims} == {"not visible at this scale"}
    write_report(report, tmp_path)
    plt.close("all")


def test_where_vanilla_shows_nothing_there_is_nothing_to_see():
    chance = chance_of_first(64)
    calm = row_metrics(kurtosis_first=3.1, kurtosis_rest=3.0, kurtosis_pooled=3.0)
    calm |= dict.fromkeys(("first_attention_fraction", "first_attention_mass"), 1.4 * chance)
    calm |= {key: 20.05 for key in calm if key.startswith("perplexity_")}
    study = study_of(table2.EXPERIMENT, "tiny", lambda v: calm, variants=models.grid("tiny", ["gpt2_60m"]))
    verdicts = {claim.text.split(".")[0][:40]: claim.verdict for claim in table2.EXPERIMENT.report(study).claims}
    assert len([v for v in verdicts.values() if v == "not visible at this scale"]) == len(verdicts) - 3
    claims = table3.EXPERIMENT.report(study_of(table3.EXPERIMENT, "tiny", lambda v: calm)).claims
    assert {claim.verdict for claim in claims} == {"not visible at this scale"}
    plt.close("all")


@pytest.mark.slow
def test_pictures_of_a_finished_study_and_intervals_over_seeds(tmp_path):
    rng = np.random.default_rng(0)
    maps = {"attention": rng.random((1, 8, 8)), "hidden": rng.random((1, 8, 16))}
    norms = {f"{part}_norms": 1 + rng.random((4, 16)) for part in WORDS}
    for name, experiment in TABLES.items():
        failed = experiment.variants("tiny")[-1].name
        study = study_of(
            experiment,
            "tiny",
            lambda v, failed=failed: None if v.name == failed else row_metrics(loss_nats=3.0) | of_table_9(v),
            (0, 1, 2),
            tmp_path / name,
        )
        for row in study.results["rows"]:
            folder = study.workdir / row["run"]
            (folder / "measured").mkdir(parents=True)
            lines = [{"step": step, "validation_loss_nats": 5.0 - step / 100} for step in (0, 100, 200)]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
            if row["seed"] == 0:
                np.savez(folder / "measured/maps.npz", **maps)
                np.savez(folder / "measured/output_weights.npz", **norms)
        report = experiment.report(study)
        write_report(report, study.workdir)
        forms = [html.unescape((study.workdir / f"report.{form}").read_text()) for form in ("md", "html")]
        for claim in report.claims:  # in their parts, and as one paragraph
            parts = [claim.text, *claim.cases, claim.closing]
            assert all(part in form for part in parts for form in [*forms, claim.whole()])
        kept = [study.workdir / f"figures/{picture.name}.{picture.form}" for picture in report.pictures]
        assert all(path.stat().st_size > 1000 for path in kept)
        of_models = {"attention_map", "hidden_states", "mlp_output_norms", "attention_output_norms"}
        shown = {picture.name: picture.figure for picture in report.pictures}
        if name in ("table2", "table3", "table5"):
            assert experiment.measures == (MEASURE,)
            for picture in of_models:
                titles = [axes.get_title() for axes in shown[picture].axes if axes.get_title()]
                assert len(titles) == len(study.variants) - 1  # but the one that failed
        else:
            assert not of_models & set(shown)
        if name == "table2":  # Llama2 has no cured model to be drawn beside
            assert len(shown["training_curves"].axes[0].lines) == 8
        assert any("3 seeds)" in cell for table in report.tables for row in table.rows for cell in row) == (
            name in ("table2", "table3", "table6")
        )
        plt.close("all")


def test_the_frame_of_a_report_names_every_corpus_and_copes_with_none():
    def told(study):
        report = summaries.study_report(study, "", ["About."], claims=[], tables=[], extra_notes=["Last."])
        assert report.summary[0] == "About."
        assert report.notes[-1] == "Last."
        return report.summary[1], "; ".join(report.notes)

    study = study_of(table9.EXPERIMENT, "tiny", of_table_9)
    data = study.results["provenance"]["data"]
    data += [data[0] | {"source": "prose", "source_sha256": "1" * 64}, {"source": "a task", "characters": "abc"}]
    summary, notes = told(study)
    assert all(text in notes for text in ("sha256 000", "sha256 111", "a task"))
    assert "prose" not in summary
    given = dataclasses.replace(study.variants[0], name="mine", checkpoint=Path("mine"))
    with_given, _ = told(dataclasses.replace(study, variants=(*study.variants, given)))
    assert "Given models may have other text: prose; and a task." in with_given
    assert "Seeds: " in with_given
    only_given, _ = told(dataclasses.replace(study, variants=(given,)))
    assert "Seeds: " not in only_given
    data.clear()
    summary, notes = told(study)
    assert "Python's own standard library" in summary
    assert "sha256" not in notes


def test_chance_is_the_harmonic_mean_of_the_keys_a_query_sees():
    rng = np.random.default_rng(0)
    length = 16
    logits = rng.normal(size=(4000, length, length))
    visible = np.tril(np.ones((length, length), bool))
    first = np.where(visible, logits, -np.inf).argmax(-1) == 0
    assert first.mean() == pytest.approx(chance_of_first(length), abs=0.005)
    weights = visible / (1 + visible.sum(-1, keepdims=True))
    assert weights[:, 0].mean() == pytest.approx(chance_of_first(length, softmax1=True))


# Table 9.


def test_the_correlation_is_that_of_numpy_and_undefined_without_variation():
    rng = np.random.default_rng(1)
    for n in (2, 4, 12):
        x, y = rng.normal(size=(2, n))
        assert table9.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    assert np.isnan(table9.pearson([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))


def test_table_9_correlates_over_layers_for_each_seed_and_takes_models():
    given = Variant("mine", "mine", models.tiny_run("gpt2_60m"))
    variants = (*table9.EXPERIMENT.variants("paper"), given)
    report = conclude("table9", variants=variants, seeds=(0, 1))
    table, layers = report.tables[0], np.arange(1.0, 13.0)
    first, rest = np.corrcoef(layers, layers**2)[0, 1], np.corrcoef(layers, 1 / layers)[0, 1]
    assert table.rows[0][1:] == ["12", f"{first:.3f} ({first:.3f} to {first:.3f})", "0.961",
                                 f"{rest:.3f} ({rest:.3f} to {rest:.3f})", "0.932"]  # fmt: skip
    assert table.rows[-1][0] == "mine"
    assert table.rows[-1][3] == table.rows[-1][5] == "-"
    assert set(TABLE_9) == set(TABLE_2)


def test_table_8_is_the_first_token_column_of_table_2():
    for label, (_, alpha) in TABLE_8.items():
        assert round(TABLE_2[label, "vanilla"]["max_abs_first"]) == alpha
    widths = {models.MODELS[GRID[v.name][0]]: v.config.model.d_model for v in table8.EXPERIMENT.variants("paper")}
    assert widths == {label: width for label, (width, _) in TABLE_8.items()}


def test_table_5_says_where_rates_and_steps_differ():
    rows = {row[0]: row[1] for row in conclude("table5").tables[0].rows}
    assert sum(text != "-" for text in rows.values()) == 2
    assert all(re.fullmatch(r"rate 0.2, 8 x the steps", text) for text in rows.values() if text != "-")
    tiny = table5.EXPERIMENT.report(study_of(table5.EXPERIMENT, "tiny", of_table_5))
    plt.close("all")
    told = [row[1] for row in tiny.tables[0].rows if row[1] != "-"]
    assert told == ["rate 0.0015", "rate 0.2, 2 x the steps", "rate 2, 2 x the steps"]
