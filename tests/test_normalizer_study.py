"""The study of normalizers and optimizers: its runs, its own measure, and what its report concludes."""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from orthojax.experiments.ours.normalizers_report import NORMALIZERS, OPTIMIZERS, variant_name
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import run_name

from orthojax.config import changed_fields, replace
from orthojax.experiments.from_attention.models import grid
from orthojax.experiments.ours import normalizers
from orthojax.model import Taps, Transformer
from orthojax.train import Inputs, init_state

EXPERIMENT = normalizers.EXPERIMENT
DATA = {"file_count": 3, "source_sha256": "0" * 64, "tokenizer": "bpe:2048", "train": {"n_tokens": 10}}
# (kurtosis of the first token, of others, dominance, perplexity) as the paper would have them.
EXPECTED = {
    "adam": lambda normalizer: (30.0, 8.0, 0.5 if normalizer == "softmax" else 0.02, 60.0),
    "orthoadam": lambda normalizer: (20.0, 3.0, 0.4, 60.5) if normalizer == "softmax" else (3.0, 3.0, 0.02, 60.5),
    "sgd": lambda normalizer: (3.2, 3.2, 0.02, 80.0),
}


def study(seeds=(0, 1), **changes):
    """As the paper would have it, but for `changes`: variant -> its four numbers, None for a run that failed."""
    rows = []
    for seed in seeds:
        for optimizer, expected in EXPECTED.items():
            for normalizer in NORMALIZERS:
                name = variant_name(normalizer, optimizer)
                numbers = changes.get(name, expected(normalizer))
                row = {"variant": name, "seed": seed, "overrides": {}, "metrics": {}, "run": name}
                if numbers is None:
                    rows.append(row | {"failed": "the loss is not finite at step 3"})
                    continue
                first, rest, dominance, perplexity = numbers
                metrics = {"kurtosis_first": first, "kurtosis_rest": rest, "first_attention_fraction": dominance}
                metrics |= {"first_attention_share": 0.1, "first_attention_mass": 0.1, "perplexity": perplexity + seed}
                rows.append(row | {"metrics": metrics})
    provenance = {
        "versions": {"jax": "0"},
        "device": "cpu",
        "data": [DATA],
        "date": "2000-01-01",
        "training_seconds": 1.0,
    }
    results = {"rows": rows, "provenance": provenance}
    return Study(EXPERIMENT, "tiny", EXPERIMENT.variants("tiny"), tuple(seeds), Path(), results)


def told(made):
    report = EXPERIMENT.report(made)
    plt.close("all")
    return report, [claim.verdict for claim in report.claims]


def test_what_the_paper_says_is_found_where_it_is(tmp_path):
    report, verdicts = told(study())
    assert verdicts == ["holds"] * 6
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    write_report(report, tmp_path)
    removed = {row[0]: [cell.split(",")[0] for cell in row[1:]] for row in report.tables[0].rows}
    assert removed["softmax"] == ["neither", "neither", "both"]
    assert removed["softmax-1"] == ["dominance", "both", "both"]
    assert len(report.tables[1].rows) == len(NORMALIZERS) * len(OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "numbers", "claim"),
    [
        ("gated_adam", (30.0, 8.0, 0.3, 60.0), 0),
        ("relu_adam", (3.0, 3.0, 0.02, 60.0), 1),
        ("sigmoid_orthoadam", (3.0, 4.0, 0.02, 60.0), 2),
        ("softmax_orthoadam", (3.0, 3.0, 0.4, 60.0), 3),
        ("clipped_softmax_sgd", (5.0, 3.0, 0.02, 80.0), 4),
        ("learned_sink_sgd", (3.0, 3.0, 0.02, 59.0), 5),
    ],
)
def test_one_run_that_contradicts_a_claim_turns_its_verdict_alone(name, numbers, claim):
    _, verdicts = told(study((0,), **{name: numbers}))
    assert [i for i, verdict in enumerate(verdicts) if verdict != "holds"] == [claim]
    assert verdicts[claim] == "does not hold"


def test_what_softmax_does_not_show_is_not_claimed():
    calm = {variant_name(n, o): (3.0, 3.0, 0.05, 60.0 + (o == "sgd")) for n in NORMALIZERS for o in OPTIMIZERS}
    report, verdicts = told(study(**calm))
    assert verdicts == ["not visible at this scale"] * 5 + ["holds"]
    assert "no dominance and no outliers at this scale" in report.tables[0].caption
    assert {cell.split(",")[0] for row in report.tables[0].rows for cell in row[1:]} == {"neither"}


def test_a_failed_run_is_told_and_the_others_stay():
    report, verdicts = told(study(sigmoid_sgd=None))
    assert verdicts == []
    assert any("not finite at step 3" in text for text in report.summary)
    rows = {row[0]: row for row in report.tables[0].rows}
    assert rows["sigmoid"][3] == "failed"
    assert rows["softmax-1"][1].startswith("dominance, 60.5")


def test_four_of_its_runs_are_those_of_table_2_and_the_others_change_one_thing():
    for scale in EXPERIMENT.scales:
        variants = {v.name: v for v in EXPERIMENT.variants(scale)}
        own = {run_name(v, 0) for v in variants.values()}
        assert len(own) == len(variants) == 21
        assert {run_name(v, 0) for v in grid(scale, models=("gpt2_60m",))} < own
        base = variants["softmax_adam"].config
        changes = {name: changed_fields(base, v.config) for name, v in variants.items()}
        assert changes["gated_adam"] == {"model.gated_attention": True}
        assert changes["relu_orthoadam"] == {"model.normalizer": "relu", "optim.optimizer": "orthoadam"}
        assert changes["softmax_sgd"]["train.steps"] == 2 * base.train.steps


def test_its_measure_is_the_share_of_key_0_in_the_weights_of_a_relu_model(monkeypatch, tmp_path):
    config = EXPERIMENT.variants("tiny")[0].config
    shape = {"vocab_size": 30, "d_model": 16, "num_heads": 2, "num_layers": 2, "d_mlp": 16, "max_length": 8}
    changes = {f"model.{name}": value for name, value in shape.items()} | {"data.sequence_length": 8}
    config = replace(config, changes | {"model.normalizer": "relu", "model.init_std": 0.5, "eval.batch_size": 2})
    params = init_state(config).params
    tokens = np.random.default_rng(0).integers(0, 30, (3, 9))  # a batch of two, and one of one
    monkeypatch.setattr(normalizers, "read_params", lambda path: params)
    inputs = Inputs(batch=None, evaluation=tokens, bits_per_nat_of_loss=None, provenance={}, task=None)
    (measure,) = EXPERIMENT.measures
    measured = measure.measure(config, tmp_path, inputs, lambda part: None).metrics

    def observe(taps: Taps):
        return taps.attention_weights

    _, weights = jax.jit(lambda p, t: Transformer(config.model).apply({"params": p}, t, observe=observe))(
        params, tokens[:, :-1]
    )
    weights = np.asarray(weights, np.float64)
    total = weights.sum(-1)
    assert (total == 0).any()  # rows that attend to nothing
    share = np.divide(weights[..., 0], total, out=np.zeros_like(total), where=total > 0)
    np.testing.assert_allclose(measured["first_attention_share"], share.mean(), rtol=1e-5)
