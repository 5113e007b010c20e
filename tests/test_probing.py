"""Figures 2, 4, 5 and 6: which key takes over, output weights and their moments, outputs in other bases."""

import math
from collections import Counter
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from orthojax import analysis
from orthojax.config import Config, OptimConfig, RotationConfig, changed_fields, replace
from orthojax.errors import UserError
from orthojax.experiments.base_configs import LANGUAGE_MODEL, cured
from orthojax.experiments.catalog import find
from orthojax.experiments.from_attention import (
    channels,
    figure2,
    figure4,
    figure6,
    models,
    output_weights,
    relaxed_mask,
)
from orthojax.experiments.from_attention.channels import OUTLIER_SCORE
from orthojax.experiments.from_attention.output_weights import output_bases, output_kernels
from orthojax.experiments.from_attention.paper_configs import paper_runs
from orthojax.experiments.measures import Measured
from orthojax.model import LoadedModel
from orthojax.optim import rotate
from orthojax.train import Inputs, list_arrays, load, make_rotation, open_inputs, read_optimizer_state, train
from orthojax.train.evaluation import validation_loss_nats

TEXT = "What goes up must come down, unless it is fast enough, or nobody has told it so. "


# By key position.


def test_mass_and_fraction_by_key_are_those_of_loops_over_queries():
    weights = np.random.default_rng(0).dirichlet(np.ones(7), size=(3, 2, 6))
    weights[0, 0, 4] = [0.5, 0.5, 0, 0, 0, 0, 0]  # a tie
    weights[0, 0, 5] = 0  # nothing, as ReLU may have
    mass, fraction = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    for b, n, t, j in product(range(3), range(2), range(2, 6), range(4)):
        row = weights[b, n, t]
        mass[b, n, j] += row[j] / 4
        fraction[b, n, j] += (row[j] > 0 and all(row[j] > row[i] for i in range(7) if i != j)) / 4
    np.testing.assert_allclose(relaxed_mask.attention_mass_by_key(weights, 4, 2), mass, rtol=1e-5)
    np.testing.assert_allclose(relaxed_mask.attention_fraction_by_key(weights, 4, 2), fraction, rtol=1e-5)


def test_the_fraction_of_key_0_over_all_queries_is_that_of_the_papers_table():
    weights = np.random.default_rng(1).dirichlet(np.ones(5), size=(2, 3, 5))
    by_key = relaxed_mask.attention_fraction_by_key(weights, 1, 0)
    np.testing.assert_allclose(jnp.mean(by_key), analysis.first_attention_fraction(weights), rtol=1e-6)


def test_equal_logits_give_the_mass_that_the_closed_form_says():
    causal = np.tril(np.ones((1, 1, 12, 12)))
    mass = relaxed_mask.attention_mass_by_key(causal / causal.sum(-1, keepdims=True), 5, 5)
    np.testing.assert_allclose(mass, relaxed_mask.equal_logits_mass(12, 5), rtol=1e-6)


@pytest.mark.parametrize(("draws", "categories"), [(1, 4), (3, 4), (5, 3)])
def test_the_test_of_uniformity_counts_every_sequence_of_winners(draws, categories):
    squares = Counter(
        sum(count**2 for count in Counter(sequence).values()) for sequence in product(range(categories), repeat=draws)
    )
    for sequence in ([0] * draws, list(range(draws)), [0, 0, 1][:draws]):
        counts = [sequence.count(i) for i in range(categories)]
        draws_counted = sum(counts)
        if draws_counted != draws:
            continue
        wanted = sum(n for square, n in squares.items() if square >= sum(c * c for c in counts)) / categories**draws
        assert relaxed_mask.uniformity_p_value(counts) == pytest.approx(wanted, rel=1e-12)


def test_five_seeds_refute_ten_equal_keys_by_four_wins_alone_and_two_seeds_never():
    p_value = relaxed_mask.uniformity_p_value
    assert p_value([5, *[0] * 9]) == pytest.approx(1e-4)
    assert p_value([4, 1, *[0] * 8]) == pytest.approx(1e-4 + 450 / 1e5)
    assert p_value([3, 1, 1, *[0] * 7]) > 0.05
    assert p_value([1] * 5 + [0] * 5) == 1.0


# By channel.


def test_norms_and_summed_moments_are_by_output_channel():
    kernel = np.array([[3.0, 1.0, 0.0], [4.0, 1.0, 2.0]])
    np.testing.assert_allclose(channels.channel_norms(kernel), [5.0, math.sqrt(2), 2.0])
    np.testing.assert_allclose(channels.summed_second_moments(kernel), [7.0, 2.0, 2.0])


def test_rank_correlation_is_spearmans_also_with_ties():
    rng = np.random.default_rng(2)
    for a, b in ((rng.normal(size=50), rng.normal(size=50)), (rng.integers(0, 5, 40), rng.integers(0, 5, 40))):
        wanted = scipy.stats.spearmanr(a, b).statistic
        assert channels.rank_correlation(a, b) == pytest.approx(wanted, rel=1e-12)
    assert math.isnan(channels.rank_correlation([1, 1], [1, 2]))


def test_outlier_scores_depend_on_no_factor_and_find_what_was_planted():
    values = np.exp(0.1 * np.random.default_rng(3).normal(size=1000))
    values[[7, 8]] = 3.0, 0.3
    scores = channels.outlier_scores(values)
    logs = np.log(values)
    away = np.abs(logs - np.median(logs))
    np.testing.assert_allclose(scores, 0.6745 * (logs - np.median(logs)) / np.median(away), atol=1e-12)
    np.testing.assert_allclose(channels.outlier_scores(1e-12 * values), scores, rtol=1e-6)
    assert np.flatnonzero(scores > OUTLIER_SCORE).tolist() == [7]
    assert np.flatnonzero(scores < -OUTLIER_SCORE).tolist() == [8]
    assert channels.outlier_scores([1.0, 1.0, 1.0, 2.0]).tolist() == [0, 0, 0, math.inf]


def test_overlap_of_what_knows_nothing_of_each_other_is_what_chance_says():
    rng = np.random.default_rng(4)
    found = [channels.extreme_overlap(rng.normal(size=64), rng.normal(size=64), 8) for _ in range(2000)]
    assert np.mean(found) == pytest.approx(8 / 64, abs=0.01)
    values = rng.normal(size=64)
    assert channels.extreme_overlap(values, -values, 8) == 1.0
    assert channels.extreme_overlap(values, values, 8) == 0.0


def test_channel_metrics_tell_explained_outliers_from_others():
    rng = np.random.default_rng(5)
    norms, moments = np.exp(0.05 * rng.normal(size=(2, 128))), np.exp(0.05 * rng.normal(size=(2, 128)))
    norms[:, 3], moments[0, 3] = 4.0, 1e-3  # explained in the first layer alone
    metrics = output_weights.channel_metrics(norms, norms, moments)
    assert metrics["own_outlier_channels"] == metrics["outlier_channels"] == [1, 1]
    assert metrics["explained_outlier_channels"] == [1, 0]
    assert metrics["overlap"][0] >= 0.25  # one of four
    assert set(output_weights.channel_metrics(norms, norms, None)) == {"outlier_channels", "norm_peak"}


# Bases.


def run(kind="hadamard", axes="output", scope="layer", optimizer="orthoadam", seed=3, **changes) -> Config:
    rotation = RotationConfig(kind=kind, axes=axes, scope=scope, seed=seed)
    model = {"model.d_model": 24, "model.d_mlp": 40, "model.num_layers": 2, "model.num_heads": 2}
    optim = OptimConfig(optimizer=optimizer, rotation=rotation)
    return replace(Config(optim=optim), model | {"model.vocab_size": 32} | changes)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "axes", "scope", "part", "scan"),
    [
        ("hadamard", "output", "layer", "mlp_output", False),
        ("hadamard", "output", "layer", "attention_output", True),
        ("haar", "both", "layer", "mlp_output", True),
        pytest.param("hadamard", "both", "layer", "attention_output", False, marks=SLOW),
        pytest.param("hadamard", "output", "tree", "mlp_output", False, marks=SLOW),
        pytest.param("haar", "writers", "layer", "attention_output", False, marks=SLOW),
        pytest.param("dct", "residual", "layer", "mlp_output", True, marks=SLOW),
        pytest.param("signed_permutation", "output", "layer", "mlp_output", False, marks=SLOW),
    ],
)
def test_the_bases_are_those_that_the_optimizer_applies(kind, axes, scope, part, scan):
    config = run(kind, axes, scope)
    Q = output_bases(config, part)
    np.testing.assert_allclose(np.einsum("LDE,LFE->LDF", Q, Q), np.stack([np.eye(24)] * 2), atol=1e-5)
    width = 40 if part == "mlp_output" else 24
    kernels = np.random.default_rng(0).normal(size=(2, width, 24)).astype(np.float32)
    name, inner = part.split("_")
    layers = [{name: {inner: {"kernel": kernel}}} for kernel in (kernels if not scan else [kernels])]
    tree = {"layers": layers[0]} if scan else {f"layers_{i}": layer for i, layer in enumerate(layers)}
    np.testing.assert_array_equal(output_kernels(tree, part), kernels)
    rotation = rotate(make_rotation(config.optim.rotation))
    rotated = output_kernels(rotation.update(tree, rotation.init(tree))[0], part)
    wanted = kernels @ Q.swapaxes(1, 2)
    if axes == "both":  # a rotation of the inputs leaves W^T W as it is
        rotated, wanted = (x.swapaxes(1, 2) @ x for x in (rotated, wanted))
    np.testing.assert_allclose(rotated, wanted, atol=2e-4)
    assert (np.abs(Q[0] - Q[1]).max() > 0.1) == (scope == "layer")


@pytest.mark.parametrize("change", [{"axes": "input"}, {"axes": "none"}, {"optimizer": "adam"}, {"kind": "identity"}])
def test_what_has_no_basis_there_is_refused(change):
    with pytest.raises(UserError, match="no d_model x d_model basis for mlp/output"):
        output_bases(run(**change), "mlp_output")


def float64_kurtosis(x):
    centred = x - x.mean(-1, keepdims=True)
    return (centred**4).mean(-1) / (centred**2).mean(-1) ** 2


def test_kurtosis_in_bases_is_that_of_numpy_with_its_own_singular_vectors():
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(2, 3, 5, 8)) * np.linspace(1, 9, 8)).astype(np.float32)
    Q = np.stack([np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2)])
    found = figure6.kurtosis_in_bases(jnp.asarray(x), Q.astype(np.float32))
    x = x.astype(np.float64)
    for layer, b in product(range(2), range(3)):
        X = x[layer, b]
        for name, basis in (("x", np.eye(8)), ("xq", Q[layer]), ("xqt", Q[layer].T)):
            assert found[name][layer, b] == pytest.approx(float64_kurtosis(X @ basis).mean(), rel=1e-4)
    V = [np.linalg.svd(X)[2].T for X in x.reshape(-1, 5, 8)]
    turned = np.asarray(channels.in_singular_basis(x.reshape(-1, 5, 8).astype(np.float32)))
    # Signs of singular vectors are arbitrary.
    np.testing.assert_allclose(
        np.abs(turned), [np.abs(X @ v) for X, v in zip(x.reshape(-1, 5, 8), V, strict=True)], atol=1e-5
    )
    assert np.all(turned[..., 5:] == 0)
    wanted = float64_kurtosis(turned.astype(np.float64)).mean(-1).reshape(2, 3)
    np.testing.assert_allclose(found["xv"], wanted, rtol=1e-4)
    assert set(figure6.kurtosis_in_bases(jnp.asarray(x), None)) == {"x", "xv"}


@pytest.mark.parametrize(("T", "D"), [(9, 4), (4, 9)])
def test_the_singular_basis_is_that_of_numpy_for_sequences_of_any_length(T, D):
    x = np.random.default_rng(8).normal(size=(2, T, D)).astype(np.float32)
    wanted = [np.abs(X @ np.linalg.svd(X)[2].T) for X in x.astype(np.float64)]
    np.testing.assert_allclose(np.abs(channels.in_singular_basis(x)), wanted, atol=1e-6)


def test_gaussians_are_3_in_every_basis_and_a_spike_planted_in_one_shows_there_alone():
    D, T = 128, 16
    Q = output_bases(run(**{"model.d_model": D}), "mlp_output")
    noise = np.random.default_rng(7).normal(size=(2, 2, T, D)).astype(np.float32)
    found = {name: float(jnp.mean(value)) for name, value in figure6.kurtosis_in_bases(noise, Q).items()}
    expected = 3 * (D - 1) / (D + 1)  # of D independent Gaussians
    assert all(found[name] == pytest.approx(expected, abs=0.15) for name in ("x", "xq", "xqt"))
    spike = np.zeros_like(noise)
    spike[..., 5] = 60.0
    # Rows y of OrthoAdam's basis are y Q in the model's, and come back by Q^T.
    x = np.einsum("LBTD,LDE->LBTE", noise + spike, Q)
    found = {name: float(jnp.mean(value)) for name, value in figure6.kurtosis_in_bases(x, Q).items()}
    assert found["xqt"] > 60
    assert max(found["x"], found["xq"]) < 4
    assert found["xv"] > 60  # one direction has most of the energy


# Runs.


def test_the_relaxed_run_is_the_papers_and_no_row_begins_with_a_bos():
    relaxed, plain = figure2.EXPERIMENT.variants_at("paper")
    assert relaxed.config == paper_runs()[-1].config
    for scale in models.SCALES:
        relaxed, plain = figure2.EXPERIMENT.variants_at(scale)
        assert changed_fields(plain.config, relaxed.config) == {"model.relaxed_causal_tokens": 10}
        assert not plain.config.data.bos
    assert figure2.EXPERIMENT.seeds == (0, 1, 2, 3, 4)
    assert find("figure5") is find("figure4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "prose.txt"
    text.write_text(TEXT * 60, encoding="utf-8")
    return replace(
        LANGUAGE_MODEL,
        {
            "data.kind": "text", "data.paths": (str(text),), "data.tokenizer": "bytes", "data.sequence_length": 16,
            "data.bos": False, "model.vocab_size": 258, "model.d_model": 32, "model.num_heads": 2,
            "model.num_layers": 2, "model.d_mlp": 16, "model.max_length": 16, "train.steps": 3, "train.batch_size": 4,
            "train.eval_every_steps": 3, "train.checkpoint_every_steps": 3, "eval.sequences": 8, "eval.batch_size": 4,
            "optim.warmup_steps": 1,
        },
    )  # fmt: skip


class Trained(NamedTuple):
    loaded: LoadedModel
    inputs: Inputs
    measured: dict[str, Measured]

    def observe(self, observe: Any) -> Any:
        """What every layer shows of the evaluation set."""
        tokens = self.inputs.evaluation[:, :-1]
        return self.loaded.model.apply({"params": self.loaded.params}, tokens, observe=observe)[1]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A vanilla and a cured model with a relaxed mask, and what the three experiments measure of them."""
    folder, relaxed, models = tmp_path_factory.mktemp("runs"), replace(tiny, {"model.relaxed_causal_tokens": 10}), {}
    for name, config in (("vanilla", relaxed), ("cured", cured(relaxed))):
        inputs = open_inputs(config, folder / "data")
        train(config, inputs, folder / name)
        loaded = load(folder / name)
        measures = [m for e in (figure2, figure4, figure6) for m in e.EXPERIMENT.measures]
        models[name] = Trained(loaded, inputs, {m.name: m.measure(loaded, inputs, lambda part: None) for m in measures})
    return models


@pytest.mark.slow
def test_the_first_keys_are_measured_over_all_sequences_heads_and_layers(trained):
    loaded, inputs, measured = trained["vanilla"]
    seen = np.asarray(trained["vanilla"].observe(lambda taps: taps.attention_weights), np.float64)  # [L, B, N, T, S]
    metrics, kept = measured["first_keys"]
    mass = seen[..., 10:, :10].mean(-2)
    np.testing.assert_allclose(kept["mass_by_head"], mass.mean(1), rtol=1e-5)
    np.testing.assert_allclose(kept["mass_by_sequence"], mass.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(kept["map"], seen.mean((0, 1, 2))[:, :24], rtol=1e-5)
    assert metrics["winner"] == np.argmax(mass.mean((0, 1, 2)))
    loss = validation_loss_nats(loaded.config, loaded.params, inputs)  # a relaxed evaluation has the same positions
    assert metrics["perplexity_after_first_keys"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.slow
def test_moments_are_read_from_the_checkpoint_and_compared_in_their_own_basis(trained):
    for name, (loaded, _, measured) in trained.items():
        config, checkpoint, params = loaded.config, loaded.source, loaded.params
        state = read_optimizer_state(checkpoint)
        assert {path for path, _, _ in list_arrays(checkpoint, "opt_state")} == {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(state)
        }
        nu = output_weights.second_moments(state)
        kept = measured["output_weights"].arrays
        summed = np.asarray(nu["layers_1"]["mlp"]["output"]["kernel"], np.float64).sum(0)
        np.testing.assert_allclose(kept["mlp_output_moments"][1], summed, rtol=1e-6)
        kernel = np.asarray(params["layers_1"]["mlp"]["output"]["kernel"])
        np.testing.assert_allclose(kept["mlp_output_norms"][1], np.sqrt((kernel**2).sum(0)), rtol=1e-5)
        own = kept["mlp_output_own_norms"]
        if name == "cured":
            kernel = kernel @ output_bases(config, "mlp_output")[1].T
        np.testing.assert_allclose(own[1], np.sqrt((kernel**2).sum(0)), rtol=1e-4)
        # A rotation keeps the whole.
        np.testing.assert_allclose((own**2).sum(1), (kept["mlp_output_norms"] ** 2).sum(1), rtol=1e-5)


def test_an_optimizer_without_second_moments_has_none():
    assert output_weights.second_moments({"sgd": {"trace": {"layers_0": 1}}, "count": 0}) is None


@pytest.mark.slow
def test_what_a_layer_adds_is_the_difference_of_hidden_states(trained):
    measured = trained["cured"].measured
    mlp, after, before = trained["cured"].observe(
        lambda taps: (taps.residual - taps.post_attention, taps.residual, taps.post_attention - taps.attention_output)
    )
    for what, x in (("added", after - before), ("mlp", mlp)):
        wanted = float64_kurtosis(np.asarray(x, np.float64)).mean((1, 2))
        found = [measured["bases"].metrics[f"{what}_kurtosis_x/layer_{layer}"] for layer in range(2)]
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
    assert "added_kurtosis_xq" in measured["bases"].metrics
    assert "added_kurtosis_xq" not in trained["vanilla"].measured["bases"].metrics
