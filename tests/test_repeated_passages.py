"""The experiment on repeated passages: its grid of runs, and the verdicts on made-up results."""

import pytest
from planted_results import made_up

from orthojax.analysis import chance_of_first
from orthojax.experiments.claims import judge
from orthojax.experiments.ours.repeated_passages import CLAIMS, EXPERIMENT, SHARES


def test_the_grid_has_every_method_and_share_and_two_other_mitigations():
    variants = {variant.name: variant.config for variant in EXPERIMENT.variants_at("tiny")}
    assert len(variants) == 4 + 2 * (len(SHARES) - 1) + 2
    assert {(c.train.batch_size, c.data.sequence_length, c.data.bos) for c in variants.values()} == {(16, 64, True)}
    methods = {(c.model.normalizer, c.optim.optimizer) for name, c in variants.items() if name.endswith("_64_bos")}
    assert methods == {(n, o) for n in ("softmax", "softmax1") for o in ("adam", "orthoadam")}
    shares = {c.data.repeated_share for name, c in variants.items() if name.startswith("vanilla")}
    assert shares == set(SHARES)
    assert variants["relu"].model.normalizer == "relu"
    assert variants["sgd"].optim.momentum == 0.9


CALM = {
    **{"perplexity": 20.0, "kurtosis_first": 3.0, "kurtosis_rest": 3.0},
    **{"value_norm_first": 1.0, "value_norm_rest": 1.0},
    **{f"perplexity_{name}": 20.01 for name in ("int8_moderate", "int8_coarse", "int4_zeropoint")},
}  # fmt: skip
SINKING = CALM | {
    **{"kurtosis_first": 30.0, "value_norm_first": 0.2},
    **{f"perplexity_{name}": 20.5 for name in ("int8_moderate", "int8_coarse", "int4_zeropoint")},
}
HELD = ["holds"] * len(CLAIMS)


def judged(changes):
    def metrics(name):
        equal = chance_of_first(64)
        share = float(name.split("_")[-1]) / 100 if "share" in name else 1.0
        vanilla, orthoadam = name.startswith(("vanilla", "sgd")), name.startswith("orthoadam")
        of = SINKING if vanilla or orthoadam else CALM
        of = of | {"kurtosis_first": 3.0} if name == "sgd" else of
        times = 1.5 + 4 * share if vanilla or orthoadam else 1.0
        return of | {"first_attention_fraction": times * equal} | changes.get(name, {})

    results = made_up(EXPERIMENT, metrics, scale="tiny")
    return [judge(claim, results).verdict for claim in CLAIMS]


def test_what_the_claims_expect_holds():
    assert judged({}) == HELD


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("vanilla_share_30", {"first_attention_fraction": 0.9}, [1]),
        ("vanilla_share_0", {"first_attention_fraction": 0.18}, [1, 2]),
        ("softmax1_64_bos", {"first_attention_fraction": 0.3}, [3]),
        ("orthoadam_64_bos", {"first_attention_fraction": 0.1}, [4]),
        ("cured_64_bos", {"first_attention_fraction": 0.3}, [5]),
        ("vanilla_64_bos", {"value_norm_first": 0.6}, [6, 7]),
        ("softmax1_64_bos", {"value_norm_first": 0.3}, [7]),
        ("cured_64_bos", {"kurtosis_rest": 3.6}, [8]),
        ("cured_64_bos", {"perplexity": 20.3}, [9]),
        ("cured_64_bos", {"perplexity_int8_coarse": 21.0}, [10]),
        ("relu", {"value_norm_first": 0.4}, [13]),
        ("sgd", {"kurtosis_rest": 3.6}, [14]),
    ],
)
def test_one_number_that_contradicts_a_claim_changes_its_verdict(name, changes, wrong):
    assert [i for i, verdict in enumerate(judged({name: changes})) if verdict != "holds"] == wrong


def test_without_dominance_its_removal_is_not_testable():
    verdicts = judged({"vanilla_64_bos": {"first_attention_fraction": 0.04}})
    assert verdicts[0] == "does not hold"
    assert {verdicts[i] for i in (3, 4, 5, 6, 13)} == {"not testable at this scale"}
