"""Figure 3 and appendices E, G and H of the paper: closed forms, samples, trajectories in two bases, reports."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from orthojax.experiments.reporting.page import write_report
from orthojax.experiments.study.calculation import Calculation, run_calculation

from orthojax.errors import UserError
from orthojax.experiments.catalog import ALL, find
from orthojax.experiments.from_attention import appendix_e, appendix_g, appendix_h
from orthojax.experiments.from_attention import spiked_vector as spiked
from orthojax.experiments.from_attention.equivariance import layer_deviations

TRIALS = {trial.name: trial for trial in appendix_e.trials()}
INDEPENDENT = {"sgd_plain", "sgd", "novograd", "muon", "orthoadam_follows"}


# G: closed forms.


def kurtosis_by_quadrature(alpha: float, q: np.ndarray) -> float:
    """Fourth over squared second moment of alpha q_j + z about alpha mean(q), over j and z, by Gauss-Hermite."""
    z, weights = np.polynomial.hermite_e.hermegauss(12)
    values = alpha * (q - q.mean())[:, None] + z
    second, fourth = (np.mean(values**p @ weights) / math.sqrt(2 * math.pi) for p in (2, 4))
    return fourth / second**2


@pytest.mark.parametrize("alpha", [0.5, 4.0, 70.0])
def test_kurtosis_of_a_turned_spike_is_that_of_its_moments(alpha):
    directions = np.random.default_rng(0).standard_normal((3, 24))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    expected = [kurtosis_by_quadrature(alpha, q) for q in directions]
    np.testing.assert_allclose(spiked.mixture_kurtosis(alpha, directions), expected, rtol=1e-12)
    balanced = np.repeat([1.0, -1.0], 12) / math.sqrt(24)
    a = alpha**2 / 24
    assert spiked.mixture_kurtosis(alpha, balanced) == pytest.approx(1 + (4 * a + 2) / (a + 1) ** 2)
    assert spiked.mixture_kurtosis(alpha, np.full(24, 24**-0.5)) == pytest.approx(3)


@pytest.mark.parametrize(("alpha", "size"), [(4, 4), (10, 64), (1856, 512), (768, 768)])
def test_g3_is_the_line_above_it_only_where_its_slip_is_corrected(alpha, size):
    a, d = Fraction(alpha), Fraction(size)
    at_i, elsewhere = a * (1 - 1 / d), a / d
    fourth = (at_i**4 + 6 * at_i**2 + 3) / d + (d - 1) / d * (3 + 6 * elsewhere**2 + elsewhere**4)
    exact = fourth / (a**2 / d * (1 - 1 / d) + 1) ** 2
    slip = 6 * a**2 * (1 / d**2 - 1 / d**3) / (a**2 / d * (1 - 1 / d) + 1) ** 2
    assert spiked.spike_kurtosis(alpha, size) == pytest.approx(float(exact), rel=1e-12)
    assert spiked.spike_kurtosis(alpha, size, as_printed=True) == pytest.approx(float(exact + slip), rel=1e-12)
    if alpha == size:
        assert spiked.simplified_kurtosis(size) == pytest.approx(float(exact), rel=1e-12)


# H: means of the largest entry.


def test_the_mean_maximum_agrees_with_the_cases_that_are_known():
    assert spiked.mean_max_abs(np.zeros(2)) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-8)
    for mu in (0.3, 2.0, 5000.0):  # a folded normal
        below = 0.5 * math.erfc(mu / math.sqrt(2))
        folded = math.sqrt(2 / math.pi) * math.exp(-(mu**2) / 2) + mu * (1 - 2 * below)
        assert spiked.mean_max_abs(np.array([-mu])) == pytest.approx(folded, rel=1e-8)
        assert spiked.mean_max_abs(np.array([mu]), 2) == pytest.approx(1 + mu**2, rel=1e-8)
    draws = np.abs(np.random.default_rng(0).standard_normal((20_000, 50)) + np.linspace(0, 3, 50)).max(1)
    assert abs(spiked.mean_max_abs(np.linspace(0, 3, 50)) - draws.mean()) < 4 * draws.std() / math.sqrt(len(draws))


def test_the_mean_largest_entry_of_a_direction_in_space_is_that_of_a_grid_on_the_sphere():
    height = (np.arange(1000) + 0.5) / 1000  # uniform on a sphere, by Archimedes
    angle = (np.arange(1000) + 0.5) / 1000 * np.pi / 4
    largest = np.maximum(height[:, None], np.sqrt(1 - height[:, None] ** 2) * np.cos(angle))
    assert spiked.mean_norm_ratio_of_direction(3) == pytest.approx(largest.mean(), rel=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rotation", ["aligned", "hadamard", "haar"])
def test_a_turn_is_orthogonal_and_spreads_the_spike_as_it_says(rotation):
    x, channels = spiked.spiked_vectors(50.0, 16, 32, seed=1)
    y = spiked.turn(x, channels, rotation, seed=3)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-12)
    columns = spiked.turn(np.eye(16)[channels], channels, rotation, seed=3)
    expected = {"aligned": columns, "hadamard": np.abs(columns), "haar": np.full((32, 16), 0.25)}[rotation]
    np.testing.assert_allclose(expected, 0.25, rtol=1e-12)
    # The noise is turned along: Q is linear.
    rest = x - 50.0 * np.eye(16)[channels]
    np.testing.assert_allclose(y, 50.0 * columns + spiked.turn(rest, channels, rotation, seed=3), atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_samples_agree_with_the_closed_forms(monkeypatch):
    monkeypatch.setattr(appendix_h, "SIZES", (64,))
    rows = {case.variant: case for case in appendix_h.compute(5)}
    assert len(rows) == 3 * 4
    for case in rows.values():
        m, alpha = case.metrics, case.overrides["alpha"]
        assert m["norm_ratio_squared"] == pytest.approx(m["norm_ratio_squared_closed_form"], rel=0.06)
        # A mean over 256 vectors of 64 values: a standard error of sqrt(24 / 64 / 256) = 0.04 where they are Gaussian.
        # Away from alpha = D the closed form before rotation is a ratio of means.
        tolerance = 0.1 * m["kurtosis_closed_form"] if alpha == 8 else 0.2
        assert abs(m["kurtosis"] - m["kurtosis_closed_form"]) < tolerance, case


def test_the_steps_of_the_derivation_stand_in_their_order():
    steps = appendix_h.limits(1024)
    exact, bound, printed_below, corrected, printed, boxed = (value * 1024 for value in steps.values())
    assert boxed == 1
    assert 1 < exact < corrected < bound < printed_below < 1.25  # sqrt(2 ln D) is above the mean maximum
    assert printed == pytest.approx(corrected + math.sqrt(1024))


# E: two bases.


def adam_by_hand(seed: int, frame: np.ndarray, b1=0.9, b2=0.999, eps=1e-8, learning_rate=5e-3) -> np.ndarray:
    start, readout, inputs, targets = appendix_e.task(seed)
    kernel, mu, nu, path = start @ frame.T, 0.0, 0.0, []
    for t, (x, y) in enumerate(zip(inputs, targets, strict=True), 1):
        hidden = np.tanh(x @ kernel @ frame)
        error = hidden @ readout - y
        gradient = x.T @ (2 / error.size * error @ readout.T * (1 - hidden**2)) @ frame.T
        mu, nu = b1 * mu + (1 - b1) * gradient, b2 * nu + (1 - b2) * gradient**2
        kernel = kernel - learning_rate * (mu / (1 - b1**t)) / (np.sqrt(nu / (1 - b2**t)) + eps)
        path.append(kernel @ frame)
    return np.array(path)


@pytest.mark.usefixtures("x64")
def test_adam_takes_another_path_in_another_basis_by_as_much_as_adam_by_hand():
    found = appendix_e.deviations(TRIALS["adam"], seed=2)
    identity, *others = appendix_e.frames(2)
    plain, start = adam_by_hand(2, identity), appendix_e.task(2)[0]
    for frame, deviation in zip(others, found, strict=True):
        gap = np.linalg.norm(adam_by_hand(2, frame) - plain, axis=(1, 2))
        expected = gap / np.linalg.norm(plain - start, axis=(1, 2))
        np.testing.assert_allclose(deviation, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "name",
    [name if name in ("sgd", "orthoadam_follows") else pytest.param(name, marks=pytest.mark.slow) for name in TRIALS],
)
def test_which_optimizers_take_the_same_path_in_every_basis(name):
    haar, permuted = appendix_e.deviations(TRIALS[name], seed=0)
    assert (haar.max() < 1e-10) == (name in INDEPENDENT)
    assert haar.max() < 1e-10 or haar.max() > 0.1
    # Only an optimizer with a basis of its own sees a signed permutation.
    assert (permuted.max() < 1e-10) == (name != "orthoadam")


@pytest.mark.usefixtures("x64")
def test_which_layers_commute_with_a_rotation():
    found = layer_deviations(seed=0)
    fixed = {name for name, (deviation, _) in found.items() if deviation < 1e-12}
    turned = {name for name, (_, deviation) in found.items() if deviation < 1e-12}
    assert fixed == {"rmsnorm_single", "rmsnorm_equal"}
    assert turned == {"rmsnorm_single", "linear", "affine", "bias"}
    assert min(d for pair in found.values() for d in pair if d > 1e-12) > 0.1


# Reports.

VERDICTS = {
    "appendix_e": "yyyyynn",
    "appendix_g": "ynyy",
    "appendix_h": "yynnnyyn",
    "figure3": "yy",
}


def test_every_calculation_has_its_verdicts_here():
    assert {found.name for found in ALL if isinstance(found, Calculation)} == set(VERDICTS)


def test_a_scale_that_trains_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no scale 'paper'"):
        run_calculation(appendix_g.CALCULATION, "paper", (0,), tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_results_and_report_are_written_as_those_of_other_experiments(tmp_path, monkeypatch):
    monkeypatch.setattr(appendix_g, "SIZES", (256, 512))
    monkeypatch.setattr(appendix_g, "FIXED_SIZES", (64, 4096))
    monkeypatch.setattr(appendix_g, "SAMPLES", 4)
    result = run_calculation(appendix_g.CALCULATION, "tiny", (0, 4), tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored == result.results
    assert stored["provenance"]["seeds"] == [0, 4]
    assert all(set(row) == {"variant", "seed", "overrides", "metrics"} for row in stored["rows"])
    assert len({(row["variant"], row["seed"]) for row in stored["rows"]}) == len(stored["rows"]) == 2 * (2 + 5 + 2)
    assert result.values("D512_alpha512", "kurtosis") == pytest.approx([508.0, 508.0], rel=1e-3)
    report = appendix_g.CALCULATION.report(result)
    write_report(report, tmp_path)
    for file in ("report.md", "report.html", "figures/kurtosis_by_size.svg"):
        assert (tmp_path / file).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", VERDICTS)
def test_every_report_says_what_holds(name, tmp_path):
    calculation = find(name)
    assert isinstance(calculation, Calculation)
    result = run_calculation(calculation, "tiny", (0, 1), tmp_path)
    rows = [(row["variant"], row["seed"]) for row in result.results["rows"]]
    assert len(set(rows)) == len(rows)
    assert all(math.isfinite(value) for row in result.results["rows"] for value in row["metrics"].values())
    report = calculation.report(result)
    assert "".join("y" if claim.verdict == "holds" else "n" for claim in report.claims) == VERDICTS[name]
    assert all("criterion" in claim.whole().lower() for claim in report.claims)
    assert all(len(row) == len(table.columns) for table in report.tables for row in table.rows)
    write_report(report, tmp_path)
    for picture in report.pictures:
        assert (tmp_path / "figures" / f"{picture.name}.{picture.form}").stat().st_size > 1000
