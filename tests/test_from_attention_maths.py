"""The mathematics and the measures of From Attention to Activation: closed forms, samples, bases, overlaps, losses."""

import itertools
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from tiny_run import TINY, drawn_params, inputs, loaded

from orthojax import analysis
from orthojax.config import Config, EvalConfig, OptimConfig, RotationConfig, replace
from orthojax.errors import UserError
from orthojax.experiments.base import cured
from orthojax.experiments.from_attention import appendices, channels, measures, rotations
from orthojax.model import LoadedModel
from orthojax.optim import rotate
from orthojax.train import init_state, load, make_rotation, read_optimizer_state, train
from orthojax.train.evaluation import validation_loss_nats

TRIALS = {trial.name: trial for trial in rotations.trials()}
INDEPENDENT = {"sgd_plain", "sgd", "muon", "orthoadam_follows"}


# Appendix G: the kurtosis of a spiked vector.


def kurtosis_by_quadrature(alpha, q):
    """Fourth over squared second moment of alpha q_j + z about alpha mean(q), over j and z, by Gauss-Hermite."""
    z, weights = np.polynomial.hermite_e.hermegauss(12)
    values = alpha * (q - q.mean())[:, None] + z
    second, fourth = (np.mean(values**p @ weights) / math.sqrt(2 * math.pi) for p in (2, 4))
    return fourth / second**2


@pytest.mark.parametrize("alpha", [0.5, 4.0, 70.0])
def test_kurtosis_of_rotated_spike_is_that_of_moments(alpha):
    directions = np.random.default_rng(0).standard_normal((3, 24))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    expected = [kurtosis_by_quadrature(alpha, q) for q in directions]
    np.testing.assert_allclose(rotations.mixture_kurtosis(alpha, directions), expected, rtol=1e-12)


@pytest.mark.parametrize(("alpha", "size"), [(4, 4), (10, 64), (1856, 512), (768, 768)])
def test_g3_is_exact_once_its_slip_is_corrected(alpha, size):
    a, d = Fraction(alpha), Fraction(size)
    at_i, elsewhere = a * (1 - 1 / d), a / d
    fourth = (at_i**4 + 6 * at_i**2 + 3) / d + (d - 1) / d * (3 + 6 * elsewhere**2 + elsewhere**4)
    exact = fourth / (a**2 / d * (1 - 1 / d) + 1) ** 2
    slip = 6 * a**2 * (1 / d**2 - 1 / d**3) / (a**2 / d * (1 - 1 / d) + 1) ** 2
    assert rotations.spike_kurtosis(alpha, size) == pytest.approx(float(exact), rel=1e-12)
    assert rotations.spike_kurtosis(alpha, size, as_printed=True) == pytest.approx(float(exact + slip), rel=1e-12)
    if alpha == size:
        assert rotations.simplified_kurtosis(size) == pytest.approx(float(exact), rel=1e-12)


# Appendix H: its largest entry.


def test_mean_maximum_is_that_of_known_cases():
    assert rotations.mean_max_abs(np.zeros(2)) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-8)
    for mu in (0.3, 2.0, 5000.0):  # a folded normal
        below = 0.5 * math.erfc(mu / math.sqrt(2))
        folded = math.sqrt(2 / math.pi) * math.exp(-(mu**2) / 2) + mu * (1 - 2 * below)
        assert rotations.mean_max_abs(np.array([-mu])) == pytest.approx(folded, rel=1e-8)
        assert rotations.mean_max_abs(np.array([mu]), 2) == pytest.approx(1 + mu**2, rel=1e-8)
    shifts = np.linspace(0, 3, 50)
    draws = np.abs(np.random.default_rng(0).standard_normal((20_000, 50)) + shifts).max(1)
    assert abs(rotations.mean_max_abs(shifts) - draws.mean()) < 4 * draws.std() / math.sqrt(len(draws))


@pytest.mark.parametrize("rotation", ["aligned", "hadamard", "haar"])
def test_a_rotation_is_orthogonal_and_spreads_the_spike(rotation, x64):
    x, spikes = rotations.spiked_vectors(50.0, 16, 32, seed=1)
    y = rotations.rotate(x, spikes, rotation, seed=3)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-12)
    columns = rotations.rotate(np.eye(16)[spikes], spikes, rotation, seed=3)
    if rotation == "haar":  # no entry of a random matrix is like another
        assert len(np.unique(np.abs(columns).round(12))) > 16
    else:
        np.testing.assert_allclose(columns if rotation == "aligned" else np.abs(columns), 0.25, rtol=1e-12)
    noise = rotations.rotate(x - 50.0 * np.eye(16)[spikes], spikes, rotation, seed=3)
    np.testing.assert_allclose(y, 50.0 * columns + noise, atol=1e-12)


def test_samples_agree_with_the_closed_forms(x64):
    rows = list(itertools.islice(appendices.APPENDIX_H.rows(5), 3 * 4))
    assert {row.overrides["size"] for row in rows} == {64}
    for row in rows:
        m, alpha = row.metrics, row.overrides["alpha"]
        assert m["norm_ratio_squared"] == pytest.approx(m["norm_ratio_squared_closed_form"], rel=0.06)
        # A mean over 256 vectors of 64 values: a standard error of sqrt(24 / 64 / 256) = 0.04 if they are Gaussian.
        # Away from alpha = D the closed form before rotation is a ratio of means.
        tolerance = 0.1 * m["kurtosis_closed_form"] if alpha == 8 else 0.2
        assert abs(m["kurtosis"] - m["kurtosis_closed_form"]) < tolerance, row.variant


# Appendix E: two bases.


def adam_by_hand(seed, frame, b1=0.9, b2=0.999, eps=1e-8, learning_rate=5e-3):
    start, readout, batches, targets = rotations.task(seed)
    kernel, mu, nu, path = start @ frame.T, 0.0, 0.0, []
    for t, (x, y) in enumerate(zip(batches, targets, strict=True), 1):
        hidden = np.tanh(x @ kernel @ frame)
        error = hidden @ readout - y
        gradient = x.T @ (2 / error.size * error @ readout.T * (1 - hidden**2)) @ frame.T
        mu, nu = b1 * mu + (1 - b1) * gradient, b2 * nu + (1 - b2) * gradient**2
        kernel = kernel - learning_rate * (mu / (1 - b1**t)) / (np.sqrt(nu / (1 - b2**t)) + eps)
        path.append(kernel @ frame)
    return np.array(path)


def test_adam_leaves_its_path_as_adam_by_hand(x64):
    found = rotations.deviations(TRIALS["adam"], seed=2)
    identity, *others = rotations.frames(2)
    plain, start = adam_by_hand(2, identity), rotations.task(2)[0]
    for frame, deviation in zip(others, found, strict=True):
        gap = np.linalg.norm(adam_by_hand(2, frame) - plain, axis=(1, 2))
        np.testing.assert_allclose(deviation, gap / np.linalg.norm(plain - start, axis=(1, 2)), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "name", [name if "sgd" in name else pytest.param(name, marks=pytest.mark.slow) for name in TRIALS]
)
def test_some_optimizers_take_one_path_in_every_basis(name, x64):
    haar, permuted = rotations.deviations(TRIALS[name], seed=0)
    assert (haar.max() < 1e-10) == (name in INDEPENDENT)
    assert haar.max() < 1e-10 or haar.max() > 0.1
    # Only an optimizer with a basis of its own sees a signed permutation.
    assert (permuted.max() < 1e-10) == (name != "orthoadam")


def test_some_layers_commute_with_a_rotation(x64):
    found = rotations.layer_deviations(seed=0)
    assert {name for name, (fixed, _) in found.items() if fixed < 1e-12} == {"rmsnorm_single", "rmsnorm_equal"}
    along = {name for name, (_, along) in found.items() if along < 1e-12}
    assert along == {"rmsnorm_single", "linear", "affine", "bias"}
    assert min(d for pair in found.values() for d in pair if d > 1e-12) > 0.1


def pairwise(sets):
    """Mean of |A & B| / |A| over all pairs, one by one."""
    return np.mean([len(a & b) / len(a) for a, b in itertools.combinations(sets, 2)])


def largest(values, count):
    """Sorted one after the other, ties to the lower index."""
    return set(sorted(range(len(values)), key=lambda d: (-values[d], d))[:count])


class Planted:
    """In place of a model: the tokens of a sequence say which hidden states it has."""

    def __init__(self, hidden):
        self.hidden = hidden  # [B, layers, T, D]

    def apply(self, variables, tokens, *, observe, head):
        hidden = jnp.asarray(self.hidden)[tokens[:, 0]]
        seen = [observe(type("Taps", (), {"residual": hidden[:, layer]})) for layer in range(hidden.shape[1])]
        return None, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)


def planted(hidden, params=None):
    """Returns a model with these hidden states [B, layers, T, D], and the tokens that ask for them."""
    # More than one batch, and a smaller last one.
    config = replace(Config(eval=EvalConfig(batch_size=2)), {"model.d_model": hidden.shape[-1]})
    model = LoadedModel(Planted(np.asarray(hidden, np.float32)), params or {}, config, None, Path())
    return model, np.tile(np.arange(len(hidden))[:, None], (1, hidden.shape[2] + 1))


def test_overlaps_of_a_model_are_those_of_sets():
    hidden = np.random.default_rng(2).normal(size=(5, 2, 6, 64)).astype(np.float32)
    hidden[:, :1, :, 3] += 2.0  # in half of the layers
    metrics = channels.channel_overlap(*planted(hidden))
    mean = np.abs(hidden.astype(np.float64)).mean(axis=2)  # [B, layers, D]
    for name, k in (("largest_channels", 2), ("largest_channel", 1)):
        sets = [[largest(mean[b, layer], k) for layer in range(2)] for b in range(5)]
        for layer in range(2):
            of_positions = [pairwise([largest(abs(row), k) for row in hidden[b, layer]]) for b in range(5)]
            expected = {"sequences": pairwise([of[layer] for of in sets]), "positions": np.mean(of_positions)}
            for key, value in expected.items():
                assert metrics[f"{name}_between_{key}/layer_{layer}"] == pytest.approx(value, abs=1e-6)
        between_layers = np.mean([pairwise(rows) for rows in sets])
        assert metrics[f"{name}_between_layers"] == pytest.approx(between_layers, abs=1e-6)


def test_the_largest_channel_is_ranked_among_output_weights():
    rng, D = np.random.default_rng(0), 64
    hidden = rng.normal(size=(3, 2, 4, D))
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
    found = channels.ranks_of_largest_channel(*planted(hidden, params))
    assert found["mlp_output"].tolist() == [0, 3]
    assert min(found["attention_output"]) >= D - 2


def test_jumps_and_rises_are_counted_after_warm_up():
    steps, losses = np.arange(20, 520, 20), np.linspace(6.0, 4.0, 25)

    def found(warmup_steps):
        log = [{"step": int(step), "loss_nats": loss} for step, loss in zip(steps, losses, strict=True)]
        held_out = [{"step": 125 * (i + 1), "validation_loss_nats": x} for i, x in enumerate((5.0, 4.5, 4.53, 4.2))]
        return measures.stability([*log, *held_out], warmup_steps)

    assert found(100)["loss_spikes"] == 0
    assert found(100)["loss_jump_nats"] < 0
    for jump, count in ((1.01, 1), (0.99, 0)):
        losses[10] = losses[7:10].mean() + jump
        assert found(100)["loss_spikes"] == count
        assert found(100)["loss_jump_nats"] == pytest.approx(jump)
    losses[10] += 0.1
    assert found(300)["loss_spikes"] == 0  # step 220 is before
    assert found(100)["validation_rise_nats"] == pytest.approx(0.03)
    assert measures.stability([], 100) == {"loss_spikes": 0.0}


# Figure 2: the first keys.


def test_mass_and_fraction_by_key_those_of_loops():
    weights = np.random.default_rng(0).dirichlet(np.ones(7), size=(3, 2, 6))
    weights[0, 0, 4] = [0.5, 0.5, 0, 0, 0, 0, 0]  # a tie
    weights[0, 0, 5] = 0  # nothing, as ReLU may have
    mass, fraction = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    for b, n, t, j in itertools.product(range(3), range(2), range(2, 6), range(4)):
        row = weights[b, n, t]
        mass[b, n, j] += row[j] / 4
        fraction[b, n, j] += (row[j] > 0 and all(row[j] > row[i] for i in range(7) if i != j)) / 4
    np.testing.assert_allclose(measures.attention_mass_by_key(weights, 4, 2), mass, rtol=1e-5)
    np.testing.assert_allclose(measures.attention_fraction_by_key(weights, 4, 2), fraction, rtol=1e-5)
    of_all = jnp.mean(measures.attention_fraction_by_key(weights, 1, 0))
    np.testing.assert_allclose(of_all, analysis.first_attention_fraction(weights), rtol=1e-6)


@pytest.mark.parametrize(("draws", "categories"), [(1, 4), (3, 4), (5, 3)])
def test_the_test_of_uniformity_counts_every_sequence(draws, categories):
    def statistic(sequence):
        return sum(count**2 for count in Counter(sequence).values())

    every = [statistic(sequence) for sequence in itertools.product(range(categories), repeat=draws)]
    for sequence in ([0] * draws, [i % categories for i in range(draws)]):
        expected = np.mean([square >= statistic(sequence) for square in every])
        found = measures.uniformity_p_value([sequence.count(i) for i in range(categories)])
        assert found == pytest.approx(expected, rel=1e-12)


def test_first_keys_cover_sequences_heads_and_layers():
    changes = {"model.num_layers": 2, "model.max_length": 16, "model.relaxed_causal_tokens": 10}
    config = replace(TINY, changes | {"model.normalizer": "softmax", "data.sequence_length": 16})
    rows = np.random.default_rng(1).integers(0, 32, (5, 17), dtype=np.int32)
    model, data = loaded(config, drawn_params(config.model, 0.5)), inputs()._replace(evaluation=rows)
    metrics, arrays = measures.FIRST_KEYS.measure(model, data, lambda part: None)
    weights = model.model.apply({"params": model.params}, rows[:, :-1], observe=lambda taps: taps.attention_weights)[1]
    weights = np.asarray(weights, np.float64)  # [layers, B, N, T, S]
    mass = weights[..., 10:, :10].mean((1, 3))
    np.testing.assert_allclose(arrays["mass"], mass.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(arrays["map"], weights.mean((0, 1, 2))[:, :24], rtol=1e-5)
    winner = np.argmax(mass.mean((0, 1)))
    assert metrics["winner"] == winner
    assert metrics["winner_of_heads"] == np.mean(mass.argmax(-1) == winner)
    # A relaxed evaluation counts the same positions.
    loss = validation_loss_nats(config, model.params, data)
    assert metrics["perplexity_after_first_keys"] == pytest.approx(math.exp(loss), rel=1e-5)


# Figures 4 and 5: output weights and their moments.


def test_outlier_scores_find_plants_at_any_scale():
    values = np.exp(0.1 * np.random.default_rng(3).normal(size=1000))
    values[[7, 8]] = 3.0, 0.3
    scores, logs = channels.outlier_scores(values), np.log(values)
    away = np.abs(logs - np.median(logs))
    np.testing.assert_allclose(scores, 0.6745 * (logs - np.median(logs)) / np.median(away), atol=1e-12)
    np.testing.assert_allclose(channels.outlier_scores(1e-12 * values), scores, rtol=1e-6)
    assert np.flatnonzero(scores > channels.OUTLIER_SCORE).tolist() == [7]
    assert np.flatnonzero(scores < -channels.OUTLIER_SCORE).tolist() == [8]
    assert channels.outlier_scores([1.0, 1.0, 1.0, 2.0]).tolist() == [0, 0, 0, math.inf]


def run(kind="hadamard", axes="output", scope="layer", optimizer="orthoadam", **changes):
    rotation = RotationConfig(kind=kind, axes=axes, scope=scope, seed=3)
    model = {"model.d_model": 24, "model.d_mlp": 40, "model.num_layers": 2, "model.num_heads": 2}
    return replace(Config(optim=OptimConfig(optimizer=optimizer, rotation=rotation)), model | changes)


@pytest.mark.parametrize(("kind", "axes", "scope", "part", "scan"), [
    ("hadamard", "output", "layer", "mlp_output", False),
    ("hadamard", "output", "layer", "attention_output", True),
    ("haar", "both", "layer", "mlp_output", True),
    pytest.param("hadamard", "both", "tree", "attention_output", False, marks=pytest.mark.slow),
    pytest.param("haar", "writers", "layer", "attention_output", False, marks=pytest.mark.slow),
    pytest.param("dct", "d_model", "layer", "mlp_output", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_bases_are_those_that_the_optimizer_applies(kind, axes, scope, part, scan):
    config = run(kind, axes, scope)
    Q = channels.output_bases(config, part)
    np.testing.assert_allclose(np.einsum("LDE,LFE->LDF", Q, Q), np.stack([np.eye(24)] * 2), atol=1e-5)
    width = 40 if part == "mlp_output" else 24
    kernels = np.random.default_rng(0).normal(size=(2, width, 24)).astype(np.float32)
    name, inner = part.split("_")
    layers = [{name: {inner: {"kernel": kernel}}} for kernel in (kernels if not scan else [kernels])]
    tree = {"layers": layers[0]} if scan else {f"layers_{i}": layer for i, layer in enumerate(layers)}
    np.testing.assert_array_equal(channels.output_kernels(tree, part), kernels)
    rotation = rotate(make_rotation(config.optim.rotation))
    rotated = channels.output_kernels(rotation.update(tree, rotation.init(tree))[0], part)
    wanted = kernels @ Q.swapaxes(1, 2)
    if axes == "both":  # a rotation of the inputs leaves W^T W as it is
        rotated, wanted = (x.swapaxes(1, 2) @ x for x in (rotated, wanted))
    np.testing.assert_allclose(rotated, wanted, atol=2e-4)
    assert (np.abs(Q[0] - Q[1]).max() > 0.1) == (scope == "layer")


@pytest.mark.parametrize("change", [{"axes": "input"}, {"axes": "none"}, {"optimizer": "adam"}, {"kind": "identity"}])
def test_a_run_without_such_a_basis_is_refused(change):
    with pytest.raises(UserError, match="mlp/output"):
        channels.output_bases(run(**change), "mlp_output")


@pytest.mark.slow
def test_moments_of_run_are_compared_in_own_basis(tmp_path):
    changes = {"train.steps": 3, "train.checkpoint_every_steps": 3, "optim.rotation.axes": "output"}
    config = replace(cured(TINY), changes)
    train(config, inputs(), tmp_path)
    model = load(tmp_path)
    kept = channels.OUTPUT_WEIGHTS.measure(model, inputs(), lambda part: None)[1]
    nu = channels.second_moments(read_optimizer_state(model.source))["layers_0"]["mlp"]["output"]["kernel"]
    np.testing.assert_allclose(kept["mlp_output_moments"][0], np.asarray(nu, np.float64).sum(0), rtol=1e-6)
    kernel = np.asarray(model.params["layers_0"]["mlp"]["output"]["kernel"])
    for name, of in (("norms", kernel), ("own_norms", kernel @ channels.output_bases(config, "mlp_output")[0].T)):
        np.testing.assert_allclose(kept[f"mlp_output_{name}"][0], np.sqrt((of**2).sum(0)), rtol=1e-4)
    assert channels.second_moments({"sgd": {"trace": {"layers_0": 1}}, "count": 0}) is None


# Figure 6: other bases.


@pytest.mark.parametrize(("T", "D"), [(9, 4), (4, 9)])
def test_the_singular_basis_is_that_of_numpy(T, D):
    x = np.random.default_rng(8).normal(size=(2, T, D)).astype(np.float32)
    wanted = [np.abs(X @ np.linalg.svd(X)[2].T) for X in x.astype(np.float64)]
    np.testing.assert_allclose(np.abs(measures.in_singular_basis(x)), wanted, atol=1e-6)  # signs are arbitrary


def test_spike_shows_in_its_own_basis_alone():
    D, T = 128, 16
    Q = channels.output_bases(run(**{"model.d_model": D}), "mlp_output")
    noise = np.random.default_rng(7).normal(size=(2, 2, T, D)).astype(np.float32)
    found = {name: float(jnp.mean(value)) for name, value in measures.kurtosis_in_bases(noise, Q).items()}
    expected = rotations.direction_kurtosis(D)
    assert all(found[name] == pytest.approx(expected, abs=0.15) for name in ("x", "xq", "xqt"))
    spike = np.zeros_like(noise)
    spike[..., 5] = 60.0
    # Rows y of OrthoAdam's basis are y Q in the model's, and come back by Q^T.
    x = np.einsum("LBTD,LDE->LBTE", noise + spike, Q)
    found = {name: float(jnp.mean(value)) for name, value in measures.kurtosis_in_bases(x, Q).items()}
    assert min(found["xqt"], found["xv"]) > 60  # one direction has most of the energy
    assert max(found["x"], found["xq"]) < 4


def test_a_layer_adds_the_difference_of_hidden_states():
    config = replace(cured(TINY), {"model.num_layers": 2, "optim.rotation.axes": "output"})
    model = loaded(config, init_state(config).params)
    found = measures.BASES.measure(model, inputs(), lambda part: None)

    def observe(taps):
        before = taps.post_attention - taps.attention_output
        return {"mlp": taps.residual - taps.post_attention, "added": taps.residual - before}

    seen = model.model.apply({"params": model.params}, inputs().evaluation[:, :-1], observe=observe)[1]
    for what, x in seen.items():
        wanted = scipy.stats.kurtosis(np.float64(x), axis=-1, fisher=False).mean((1, 2))
        layers = [found[f"{what}_kurtosis_x/layer_{layer}"] for layer in range(2)]
        np.testing.assert_allclose(layers, wanted, rtol=1e-3)
    assert "added_kurtosis_xq" in found
