"""The mathematics of the paper's figures and appendices: closed forms, samples, two bases, overlaps, losses."""

import functools
import itertools
import math
from fractions import Fraction
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from tiny_run import drawn_params

from orthojax.analysis import chance_of_first
from orthojax.config import Config, DataConfig, EvalConfig, replace
from orthojax.experiments import drawing
from orthojax.experiments.claims import gaussian_kurtosis_limit
from orthojax.experiments.from_attention import appendix_e, appendix_h, figure4, maps
from orthojax.experiments.from_attention import spiked_vector as spiked
from orthojax.experiments.from_attention.equivariance import layer_deviations
from orthojax.experiments.from_attention.training_curves import running_mean, stability, window_of
from orthojax.experiments.looks import BLUE, VERMILLION, looks
from orthojax.experiments.ours import normalizers
from orthojax.experiments.quantization import int8_error_bound
from orthojax.model import LoadedModel, Transformer, gpt2
from orthojax.ops.quantize import absmax
from orthojax.train import Inputs, init_state

POSITIONS, CHANNEL_COUNT = 6, 64
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
def test_kurtosis_of_a_rotated_spike_is_that_of_its_moments(alpha):
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
def test_a_rotation_is_orthogonal_and_spreads_the_spike_as_it_says(rotation):
    x, channels = spiked.spiked_vectors(50.0, 16, 32, seed=1)
    y = spiked.rotate(x, channels, rotation, seed=3)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-12)
    columns = spiked.rotate(np.eye(16)[channels], channels, rotation, seed=3)
    np.testing.assert_allclose(np.linalg.norm(columns, axis=1), 1.0, rtol=1e-12)
    if rotation == "haar":  # no entry of a random matrix is like another
        assert len(np.unique(np.abs(columns).round(12))) > 16
    else:
        np.testing.assert_allclose(columns if rotation == "aligned" else np.abs(columns), 0.25, rtol=1e-12)
    # The noise is rotated along: Q is linear.
    rest = x - 50.0 * np.eye(16)[channels]
    np.testing.assert_allclose(y, 50.0 * columns + spiked.rotate(rest, channels, rotation, seed=3), atol=1e-12)


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
    rotated = {name for name, (_, deviation) in found.items() if deviation < 1e-12}
    assert fixed == {"rmsnorm_single", "rmsnorm_equal"}
    assert rotated == {"rmsnorm_single", "linear", "affine", "bias"}
    assert min(d for pair in found.values() for d in pair if d > 1e-12) > 0.1


# The overlap of channels.


def pairwise(sets):
    """Mean of |A & B| / |A| over all pairs, one by one."""
    return np.mean([len(a & b) / len(a) for a, b in itertools.combinations(sets, 2)])


def largest(values, count):
    """Sorted one after the other, ties to the lower index."""
    return set(sorted(range(len(values)), key=lambda d: (-values[d], d))[:count])


def test_overlap_is_the_mean_over_pairs_of_what_two_sets_share():
    rng = np.random.default_rng(0)
    magnitude = rng.normal(size=(3, 7, 96)).astype(np.float32).round(1)  # with ties
    members = np.asarray(maps.ranks(magnitude) < 3)
    sets = [[largest(row, 3) for row in rows] for rows in magnitude]
    assert [[set(np.flatnonzero(row)) for row in rows] for rows in members] == sets
    np.testing.assert_allclose(maps.mean_overlap(members, axis=1), [pairwise(rows) for rows in sets], atol=1e-6)
    by_column = [pairwise([sets[i][j] for i in range(3)]) for j in range(7)]
    np.testing.assert_allclose(maps.mean_overlap(members, axis=0), by_column, atol=1e-6)


def test_random_sets_overlap_by_k_over_d_and_equal_ones_wholly():
    D, k, n = 256, 8, 400
    random = maps.ranks(np.random.default_rng(1).normal(size=(n, D))) < k
    # A pair's overlap is hypergeometric: variance k/D (1-k/D) (D-k) / (k (D-1)); pairs are nearly uncorrelated.
    deviation = np.sqrt(k / D * (1 - k / D) * (D - k) / (k * (D - 1)) / (n * (n - 1) / 2))
    assert abs(float(maps.mean_overlap(random, axis=0)) - k / D) < 5 * deviation
    same = np.tile(np.asarray(random)[:1], (n, 1))
    assert float(maps.mean_overlap(same, axis=0)) == pytest.approx(1.0, abs=1e-6)


class Planted:
    """In place of a model: the tokens of a sequence say which hidden states it has."""

    def __init__(self, hidden):
        self.hidden = hidden  # [B, layers, T, D]

    def apply(self, variables, tokens, *, observe, head):
        hidden = jax.numpy.asarray(self.hidden)[tokens[:, 0]]
        seen = [observe(type("Taps", (), {"residual": hidden[:, layer]})) for layer in range(hidden.shape[1])]
        return None, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *seen)


def measured(hidden):
    B, _, T, D = hidden.shape
    # More than one batch, and a smaller last one.
    config = replace(Config(eval=EvalConfig(batch_size=2)), {"model.d_model": D})
    loaded = LoadedModel(Planted(np.asarray(hidden, np.float32)), {}, config, None, Path())
    return maps.channel_overlap(loaded, np.tile(np.arange(B)[:, None], (1, T + 1)))


def test_planted_outlier_channels_are_the_same_everywhere():
    hidden = np.random.default_rng(0).normal(size=(4, 2, POSITIONS, CHANNEL_COUNT))
    hidden[..., 40] += 50.0
    one = measured(hidden)
    hidden[..., 7] += 50.0  # D // 32 = 2 channels
    two = measured(hidden)
    for key in ("sequences", "positions", "layers"):
        assert one[f"largest_channel_between_{key}"] == pytest.approx(1.0, abs=1e-6)
        assert one[f"largest_channels_between_{key}"] < 0.9  # the second is any
        assert two[f"largest_channels_between_{key}"] == pytest.approx(1.0, abs=1e-6)
        assert two[f"largest_channel_between_{key}"] < 0.9  # they take turns
    assert (two["largest_channels_by_chance"], two["largest_channel_by_chance"]) == (2 / 64, 1 / 64)


def test_the_overlaps_of_a_model_are_those_of_sets_taken_one_by_one():
    hidden = np.random.default_rng(2).normal(size=(5, 2, POSITIONS, CHANNEL_COUNT)).astype(np.float32)
    hidden[:, :1, :, 3] += 2.0  # in half of the layers
    metrics = measured(hidden)
    mean = np.abs(hidden.astype(np.float64)).mean(axis=2)  # [B, layers, D]
    for name, k in (("largest_channels", 2), ("largest_channel", 1)):
        sets = [[largest(mean[b, layer], k) for layer in range(2)] for b in range(5)]
        between_sequences = [pairwise([sets[b][layer] for b in range(5)]) for layer in range(2)]
        between_positions = [
            np.mean([pairwise([largest(abs(row), k) for row in hidden[b, layer]]) for b in range(5)])
            for layer in range(2)
        ]
        expected = {"sequences": between_sequences, "positions": between_positions}
        for key, values in expected.items():
            found = [metrics[f"{name}_between_{key}/layer_{layer}"] for layer in range(2)]
            np.testing.assert_allclose(found, values, atol=1e-6)
            assert metrics[f"{name}_between_{key}"] == pytest.approx(np.mean(values), abs=1e-6)
        between_layers = np.mean([pairwise(rows) for rows in sets])
        assert metrics[f"{name}_between_layers"] == pytest.approx(between_layers, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, False])
def test_a_model_with_one_layer_has_no_overlap_between_layers(scanned):
    model = gpt2("tiny", num_layers=1, d_model=32, num_heads=2, vocab_size=8, max_length=8, scan_layers=scanned)
    config = Config(model=model, data=DataConfig(sequence_length=8))
    tokens = np.random.default_rng(0).integers(0, 8, (3, 9))
    loaded = LoadedModel(Transformer(model), init_state(config).params, config, None, Path())
    metrics = maps.channel_overlap(loaded, tokens)
    assert "largest_channels_between_layers" not in metrics
    assert 0.0 <= metrics["largest_channels_between_sequences"] <= 1.0


def test_the_channels_that_are_shown_are_those_of_the_largest_values():
    hidden = np.zeros((4, POSITIONS, CHANNEL_COUNT))
    hidden[0, 3, [9, 2, 50]] = [7.0, 9.0, 8.0]
    hidden[1, 0, 11] = 99.0  # of the first layer alone
    assert maps.largest_channels(hidden, 3).tolist() == [2, 9, 50]


# What no dominance and no outlier look like.


def test_chance_and_limit_are_what_samples_give():
    rng = np.random.default_rng(0)
    weights = np.tril(rng.random((4000, 8, 8)))
    share = (weights.argmax(-1) == 0).mean()
    assert share == pytest.approx(chance_of_first(8), abs=4 * 0.5 / np.sqrt(4000 * 8))
    x = rng.normal(size=(20_000, 96))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    kurtosis = (x**4).mean(-1)
    assert gaussian_kurtosis_limit(96) == pytest.approx(3 + 3 * kurtosis.std(), rel=0.05)
    assert np.mean(kurtosis > gaussian_kurtosis_limit(96)) < 0.02


# Losses.


def test_the_running_mean_is_of_the_last_values_up_to_each():
    losses = np.random.default_rng(0).normal(size=(2, 9))
    for window in (1, 3, 20):
        expected = [[row[max(0, i + 1 - window) : i + 1].mean() for i in range(9)] for row in losses]
        np.testing.assert_allclose(running_mean(losses, window), expected, atol=1e-12)


def test_a_jump_is_from_the_mean_before_it_after_warm_up_and_a_rise_from_the_evaluation_before():
    steps, losses = np.arange(20, 520, 20), np.linspace(6.0, 4.0, 25)
    assert window_of(25) == 3

    def found(warmup_steps):
        log = [{"step": int(step), "loss_nats": loss} for step, loss in zip(steps, losses, strict=True)]
        held_out = [{"step": 125 * (i + 1), "validation_loss_nats": x} for i, x in enumerate((5.0, 4.5, 4.53, 4.2))]
        return stability([*log, *held_out], warmup_steps)

    assert found(100)["loss_spikes"] == 0
    assert found(100)["loss_jump_nats"] < 0
    for jump, count in ((1.01, 1), (0.99, 0)):
        losses[10] = losses[7:10].mean() + jump
        assert found(100)["loss_spikes"] == count
        assert found(100)["loss_jump_nats"] == pytest.approx(jump)
    losses[10] += 0.1
    assert found(300)["loss_spikes"] == 0  # step 220 is before
    assert found(100)["validation_rise_nats"] == pytest.approx(0.03)
    assert stability([], 100) == {"loss_spikes": 0.0}
    assert "validation_rise_nats" not in stability([{"step": 1, "validation_loss_nats": 5.0}], 100)


# What int8 can cost.


@pytest.mark.parametrize("d_model", [96, 2048])
def test_no_outlier_makes_int8_worse_than_the_width_allows(d_model):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, d_model))
    x[np.arange(64), rng.integers(0, d_model, 64)] += np.geomspace(1, 1e5, 64)  # outliers of all sizes
    x /= np.sqrt((x**2).mean(-1, keepdims=True))  # as a norm with one scale gives them
    per_tensor = np.abs(np.asarray(absmax(x, 8)) - x).max()
    assert per_tensor <= int8_error_bound(d_model) * (1 + 1e-5)
    assert per_tensor > 0.9 * int8_error_bound(d_model)  # and it is attained


def test_the_largest_channel_is_ranked_among_the_weights_that_write_it():
    rng, D = np.random.default_rng(0), 64
    hidden = rng.normal(size=(3, 2, 4, D)).astype(np.float32)
    hidden[:, 0, :, 5] -= 20.0
    hidden[:, 1, :, 7] += 20.0
    kernels = rng.normal(size=(2, 2, 16, D))  # [layer, part]
    kernels[0, 0, :, 5] *= 10.0
    kernels[1, 0, :, [1, 2, 3]] *= 10.0
    kernels[1, 0, :, 7] *= 5.0
    kernels[:, 1, :, [5, 7]] *= 0.01
    parts = ("mlp", "attention")
    params = {
        f"layers_{i}": {part: {"output": {"kernel": of[j]}} for j, part in enumerate(parts)}
        for i, of in enumerate(kernels)
    }
    loaded = LoadedModel(Planted(hidden), params, Config(), None, Path())
    found = figure4.ranks_of_largest_channel(loaded, np.tile(np.arange(3)[:, None], (1, 5)))
    assert found["mlp_output"].tolist() == [0, 3]
    assert min(found["attention_output"]) >= D - 2


# The share of key 0.


def test_the_share_is_that_of_key_0_in_the_weights_of_a_relu_model():
    config = normalizers.EXPERIMENT.variants_at("tiny")[0].config
    shape = {"vocab_size": 30, "d_model": 16, "num_heads": 2, "num_layers": 2, "d_mlp": 16, "max_length": 8}
    changes = {f"model.{name}": value for name, value in shape.items()} | {"data.sequence_length": 8}
    config = replace(config, changes | {"model.normalizer": "relu", "eval.batch_size": 2})
    loaded = LoadedModel(Transformer(config.model), drawn_params(config.model, 0.5), config, None, Path())
    tokens = np.random.default_rng(0).integers(0, 30, (3, 9))  # a batch of two, and one of one
    inputs = Inputs(batch=None, evaluation=tokens, bits_per_nat_of_loss=None, provenance={}, task=None)
    (measure,) = normalizers.EXPERIMENT.measures
    found = measure.measure(loaded, inputs, lambda part: None).metrics["first_attention_share"]
    apply = functools.partial(loaded.model.apply, observe=lambda taps: taps.attention_weights)
    weights = np.asarray(jax.jit(apply)({"params": loaded.params}, tokens[:, :-1])[1], np.float64)
    total = weights.sum(-1)
    assert (total == 0).any()  # rows that attend to nothing
    share = np.divide(weights[..., 0], total, out=np.zeros_like(total), where=total > 0)
    np.testing.assert_allclose(found, share.mean(), rtol=1e-5)


# Pictures.


def test_a_method_has_one_colour_whatever_else_is_drawn():
    labels = ["ReLU", "softmax-1 + OrthoAdam", "sigmoid", "GPT2 60M, softmax + Adam", "GPT2 130M, softmax + Adam"]
    looked = looks(labels)
    assert [look.color for look in looked[1:]] == [BLUE, looked[2].color, VERMILLION, VERMILLION]
    assert looked[2].color not in (BLUE, VERMILLION)
    assert looked[3].dash != looked[4].dash
    assert len({look[:2] for look in looks([f"curve {i}" for i in range(40)])}) == 40
    pairs = looks(["a first", "a others", "b first", "b others"], pairs=True)
    assert [pairs[0][0], pairs[2][0]] == [pairs[1][0], pairs[3][0]]
    assert pairs[0][0] != pairs[2][0]
    assert [look.dash for look in pairs] == ["-", "--"] * 2


@pytest.mark.parametrize(("count", "grid"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (5, (2, 4))])
def test_panels_wrap_over_rows_and_share_one_scale(count, grid):
    figure = drawing.maps(
        {str(i): np.full((3, 3), i + 1.0) for i in range(count)}, x_label="x", y_label="y", value_label="v"
    )
    panels = [ax for ax in figure.axes if ax.get_images()]
    assert len(panels) == count
    assert {ax.get_images()[0].norm.vmax for ax in panels} == {count}
    spec = panels[0].get_gridspec()
    assert (spec.nrows, spec.ncols) == grid
    assert sum(bool(ax.get_xlabel()) for ax in panels) == min(count, grid[1])  # below every column
    plt.close("all")
