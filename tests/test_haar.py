"""The experiment on Haar matrices: what is run, and the verdicts on made-up results."""

import pytest
from planted_results import made_up

from orthojax.experiments.claims import judge
from orthojax.experiments.ours.haar import AXES, CLAIMS, EXPERIMENT, ROTATION_SEEDS


@pytest.mark.parametrize("scale", EXPERIMENT.scales)
def test_runs_differ_in_the_rotation_alone(scale):
    configs = {variant.name: variant.with_seed(3) for variant in EXPERIMENT.variants_at(scale)}
    assert configs["hadamard"].optim.rotation.axes == "output"
    rotations = {name: of.seeded_optim.rotation for name, of in configs.items() if name.startswith(("haar", "matr"))}
    assert {rotation.kind for rotation in rotations.values()} == {"haar"}
    assert [rotations[f"haar_{axes}"].axes for axes in AXES] == list(AXES)
    assert {rotations[f"haar_{axes}"].seed for axes in AXES} == {3}
    assert {rotations[f"matrices_{seed}"].seed for seed in ROTATION_SEEDS} == set(ROTATION_SEEDS)
    assert len({configs[name].model for name in configs if name != "vanilla"}) == 1


@pytest.mark.parametrize(
    ("name", "changes", "wrong"),
    [
        ("vanilla", {}, []),
        ("haar_residual", {"kurtosis_rest": 3.6}, [0]),
        ("matrices_102", {"kurtosis_first": 3.6}, [1]),
        ("matrices_102", {"perplexity": 80.9}, [1]),
        ("hadamard", {"perplexity": 80.9}, [2]),
        ("haar_both", {"perplexity": 80.9}, [3]),
        ("adam", {"kurtosis_first": 3.9}, [0]),
    ],
)
def test_verdicts(name, changes, wrong):
    def metrics(variant):
        outliers = 20.0 if variant in ("vanilla", "adam") else 3.0
        of = {"perplexity": 80.0, "kurtosis_first": outliers, "kurtosis_rest": 3.0}
        return of | (changes if variant == name else {})

    results = made_up(EXPERIMENT, metrics, scale="tiny")
    verdicts = [judge(claim, results).verdict for claim in CLAIMS]
    assert [i for i, verdict in enumerate(verdicts) if verdict != "holds"] == wrong
    if name == "adam":
        assert verdicts[0] == "not testable at this scale"
