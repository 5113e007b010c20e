"""What is said of variants of which some seeds lack a metric, or that were not trained here."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from committed import committed

from orthojax.experiments.catalog import find
from orthojax.experiments.claims import C, Claim, V, judge
from orthojax.experiments.experiment import Variant
from orthojax.experiments.headlines import headlines
from orthojax.experiments.results import NotMeasured, Results, as_quantity, on_shared_seeds, pairs

VANILLA, CURED = "vanilla_64_bos_6000", "cured_64_bos_6000"
EXPERIMENT = find("repeated_longer")


def changed(change):
    """Committed results of five seeds after `change(row)` on every row."""
    results = committed(EXPERIMENT)
    for row in results.raw["rows"]:
        change(row)
    return Results(EXPERIMENT, results.scale, results.seeds, results.workdir, results.raw, results.variants)


def drop_perplexity(row):
    if (row["variant"], row["seed"]) == (CURED, 1):
        del row["metrics"]["perplexity"]


def fail(row):
    if (row["variant"], row["seed"]) == (CURED, 1):
        row["failed"] = "out of memory"
    if (row["variant"], row["seed"]) == (VANILLA, 1):
        row["metrics"]["perplexity"] = 30.0


def test_a_metric_that_one_seed_lacks_is_counted_and_has_no_mean():
    results = changed(drop_perplexity)
    cured, perplexity = results[CURED], as_quantity("perplexity")
    assert cured.cell(perplexity).endswith(" (4 of 5 seeds)")
    assert cured.mean_cell(perplexity) == "-"
    assert "perplexity" not in cured
    for read in (lambda: cured.perplexity, lambda: cured.mean("perplexity")):
        with pytest.raises(NotMeasured, match="perplexity"):
            read()
    assert list(pairs(cured, results[VANILLA], "perplexity")) == [2, 3, 4, 5]
    (claim,) = [of for of in EXPERIMENT.claims if of.says == "They cost no perplexity."]
    judged = judge(claim, results)
    assert "Not measured, since a run failed or a metric is missing: 6,000 steps." in judged.closing
    assert not [case for case in judged.cases if case.startswith("6,000")]


def test_layers_that_one_seed_lacks_are_not_shown_as_those_of_all():
    name = "kurtosis_first"

    def drop(row):
        if (row["variant"], row["seed"]) == (CURED, 1):
            del row["metrics"][f"{name}/layer_2"]

    assert changed(lambda row: None)[CURED].layers(name).shape == (5, 4)
    with pytest.raises(NotMeasured, match=name):
        changed(drop)[CURED].layers(name)


def test_the_top_of_the_page_compares_the_seeds_that_its_claims_compare():
    results = changed(fail)
    _, shared = on_shared_seeds([results[VANILLA], results[CURED]])
    assert shared == [2, 3, 4, 5]
    (shown,) = [of for of in headlines(results) if of.label == "perplexity"]
    means = [np.mean([results[name].by_seed("perplexity")[seed] for seed in shared]) for name in (VANILLA, CURED)]
    assert [float(text) for text in shown.texts] == pytest.approx(means, abs=0.06)
    assert results[VANILLA].perplexity > means[0] + 1  # of all five seeds


def test_by_up_to_is_judged_on_the_largest_case_that_is_testable():
    claim = Claim(
        "It falls by up to a half.", (V, C), ("perplexity",), lambda v, c: c.perplexity <= 0.5 * v.perplexity,
        "by a half", lambda v, c: v.steps == 6_000, largest=lambda v, c: -v.steps,
    )  # fmt: skip
    judged = judge(claim, changed(lambda row: None))
    assert judged.verdict == "does not hold"
    assert [case.partition(":")[0] for case in judged.cases] == ["6,000 steps"]
    never = dataclasses.replace(claim, testable=lambda v, c: False)
    assert judge(never, changed(lambda row: None)).cases[0].startswith("2,000 steps")


def test_two_existing_models_are_a_pair_whatever_their_seeds():
    config = committed(EXPERIMENT)[VANILLA].config
    variants = [Variant(name, name, config, checkpoint=Path("x")) for name in ("base", "tuned")]
    rows = [
        {"variant": name, "seed": seed, "overrides": {}, "run": "x", "metrics": {"perplexity": value}}
        for name, seed, value in (("base", 0, 20.0), ("tuned", 1, 18.0))
    ]
    results = Results(find("table7"), "tiny", (0,), Path(), {"rows": rows}, variants)
    assert pairs(results["tuned"], results["base"], "perplexity") == {0: (18.0, 20.0)}
