"""SOAP against its equations in float64 NumPy, and as an optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from orthojax.errors import UserError
from orthojax.optim import RotatedAxes, Rotation, layout_of, scale_by_soap, state_shardings, zero1

B1, B2, BETA, EPS, FREQUENCY = 0.8, 0.9, 0.95, 1e-6, 3
# Square kernels: of the first gradient of others one factor has a null space, where any basis is as good.
SHAPES = {"mlp": {"kernel": (6, 6), "bias": (6,)}, "wte": (9, 6), "scanned": (2, 4, 4)}


def gradients(steps, seed=0, shapes=None):
    """Of very different size by direction, with a mean."""
    rng = np.random.default_rng(seed)
    shapes = SHAPES if shapes is None else shapes

    def draw(shape):
        mean, mix = rng.standard_normal(shape), rng.standard_normal((shape[-1], shape[-1]))
        return [0.3 * mean + rng.standard_normal(shape) @ mix for _ in range(steps)]

    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return [jax.tree.unflatten(treedef, of) for of in zip(*map(draw, leaves), strict=True)]


def updates_of(optimizer, grads):
    """Updates of every step, and the last state."""
    state, update, found = optimizer.init(grads[0]), jax.jit(optimizer.update), []
    for grad in grads:
        updates, state = update(grad, state)
        found.append(jax.tree.map(np.asarray, updates))
    return found, state


def by_equations(grads, rotated_axes):
    """Algorithm 3 of the paper for one matrix, with the eigenvectors as columns that are sorted by size."""
    factors = {axis: np.zeros((grads[0].shape[axis],) * 2) for axis in rotated_axes}
    columns = {axis: np.eye(len(of)) for axis, of in factors.items()}
    mu, nu, found = np.zeros(grads[0].shape), np.zeros(grads[0].shape), []

    def along(x, matrices):
        for axis, matrix in matrices.items():
            x = np.moveaxis(np.tensordot(matrix, x, (1, axis)), 0, axis)
        return x

    for t, grad in enumerate(grads):
        if t == 0:
            found.append(np.zeros(grad.shape))
        else:
            into = {axis: of.T for axis, of in columns.items()}
            mu = B1 * mu + (1 - B1) * grad
            nu = B2 * nu + (1 - B2) * along(grad, into) ** 2
            scaled = along(mu, into) / (1 - B1**t) / (np.sqrt(nu / (1 - B2**t)) + EPS)
            found.append(along(scaled, columns))
        for axis in rotated_axes:
            rows = np.moveaxis(grad, axis, 0).reshape(grad.shape[axis], -1)
            factors[axis] = BETA * factors[axis] + (1 - BETA) * rows @ rows.T
            if t == 0:
                columns[axis] = np.linalg.eigh(factors[axis])[1]
            elif t % FREQUENCY == 0:
                order = np.argsort(-np.diag(columns[axis].T @ factors[axis] @ columns[axis]))
                nu = np.take(nu, order, axis)
                columns[axis] = np.linalg.qr(factors[axis] @ columns[axis][:, order])[0]
    return found


def test_updates_are_those_of_the_equations(x64):
    grads = gradients(14)
    got, _ = updates_of(scale_by_soap(B1, B2, EPS, shampoo_beta=BETA, precondition_frequency=FREQUENCY), grads)
    want = {
        "kernel": by_equations([of["mlp"]["kernel"] for of in grads], (0, 1)),
        "bias": by_equations([of["mlp"]["bias"] for of in grads], ()),
        "wte": by_equations([of["wte"] for of in grads], (1,)),
        "layer_0": by_equations([of["scanned"][0] for of in grads], (0, 1)),
        "layer_1": by_equations([of["scanned"][1] for of in grads], (0, 1)),
    }
    for t, of in enumerate(got):
        layers = {f"layer_{i}": of["scanned"][i] for i in range(2)}
        for name, updates in {**of["mlp"], "wte": of["wte"], **layers}.items():
            np.testing.assert_allclose(updates, want[name][t], atol=1e-9, err_msg=f"{name}, step {t}")


def test_without_bases_it_is_adam_one_step_later(x64):
    grads = gradients(5)
    soap = scale_by_soap(B1, B2, EPS, rotation=Rotation(axes=lambda path, leaf: None))
    (first, *later), _ = updates_of(soap, grads)
    want, _ = updates_of(optax.scale_by_adam(B1, B2, EPS), grads[1:])
    assert not any(np.any(x) for x in jax.tree.leaves(first))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), later, want)


def test_no_frame_of_the_parameters_is_preferred(x64):
    """Unlike Adam: gradients in another frame give the same updates in that frame."""
    grads = [of["mlp"]["kernel"] for of in gradients(9)]
    left, right = (np.linalg.qr(np.random.default_rng(seed).standard_normal((6, 6)))[0] for seed in (1, 2))
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2)
    got, _ = updates_of(soap, [{"kernel": left @ of @ right} for of in grads])
    want, _ = updates_of(soap, [{"kernel": of} for of in grads])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"], left @ b["kernel"] @ right, atol=1e-9)


def test_the_basis_becomes_that_of_the_gradients(x64):
    grads = [{"kernel": of["mlp"]["kernel"]} for of in gradients(300)]
    _, state = updates_of(scale_by_soap(shampoo_beta=0.99, precondition_frequency=1), grads)
    for of in jax.tree.leaves(state.basis):
        np.testing.assert_allclose(of @ of.T, np.eye(6), atol=1e-12)
    # From the right, where directions differ in size.
    basis, gram = (np.asarray(of["kernel"]["basis_1"]) for of in (state.basis, state.gram))
    seen = basis @ gram @ basis.T
    assert np.abs(seen - np.diag(np.diag(seen))).max() < 0.02 * np.diag(seen).max()


def test_a_group_of_axes_has_one_basis(x64):
    """flax's query [d_model, heads, head_dim], as the matrix it stands for."""
    grads = gradients(5, shapes={"kernel": (6, 6)})
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2)
    rotation = Rotation(axes=lambda path, leaf: RotatedAxes((0, (1, 2))))
    split = scale_by_soap(B1, B2, EPS, precondition_frequency=2, rotation=rotation)
    got, _ = updates_of(split, [{"kernel": of["kernel"].reshape(6, 2, 3)} for of in grads])
    want, _ = updates_of(soap, grads)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"].reshape(6, 6), b["kernel"], atol=1e-9)


def test_half_precision_is_near_and_odd_leaves_pass():
    """Moments and bases are in float32; updates are those of the same gradients in float32, rounded."""
    grads = [of["mlp"] | {"empty": np.zeros((0, 4)), "none": None, "gain": 0.5} for of in gradients(12)]
    half = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), of) for of in grads]
    got, state = updates_of(scale_by_soap(precondition_frequency=4), half)
    whole = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), of) for of in half]
    want, _ = updates_of(scale_by_soap(precondition_frequency=4), whole)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    close = lambda a, b: np.testing.assert_allclose(a.astype(np.float32), b, atol=0.02)  # noqa: E731
    jax.tree.map(close, got, want)
    assert np.abs(got[-1]["kernel"].astype(np.float32)).max() > 0.1


def test_axes_of_any_length_have_a_basis_up_to_a_limit():
    shapes = {"a_0": {"kernel": jnp.ones((300, 10))}, "a": {"0": {"kernel": jnp.ones((4, 40))}}}
    state = scale_by_soap(max_precond_dim=30).init(shapes)
    assert jax.tree.map(jnp.shape, state.basis) == {
        "a_0": {"kernel": {"basis_0": (10, 10)}}, "a": {"0": {"kernel": {"basis_0": (4, 4)}}},
    }  # fmt: skip
    assert scale_by_soap().init(shapes).basis["a_0"]["kernel"]["basis_0"].shape == (300, 300)
    odd = scale_by_soap().init({"odd": jnp.ones((300, 10))})  # a guess as well, but nothing is stacked
    assert odd.basis["odd"]["basis_0"].shape == (300, 300)


def test_the_first_update_is_zero_and_changes_no_moment_whatever_the_gradient():
    optimizer, grad = scale_by_soap(eps=0.0), {"kernel": jnp.full((3, 3), jnp.nan), "bias": jnp.zeros(3)}
    updates, state = optimizer.update(grad, optimizer.init(grad))
    assert not any(np.any(x) for x in jax.tree.leaves((updates, state.mu, state.nu)))


def test_decay_of_the_basis_is_that_of_the_second_moment_unless_named():
    grads = [{"kernel": of["mlp"]["kernel"]} for of in gradients(4)]
    grams = []
    for beta in (None, 0.9, 0.5):
        _, state = updates_of(scale_by_soap(b2=0.9, shampoo_beta=beta), grads)
        grams.append(np.asarray(state.gram["kernel"]["basis_0"]))
    np.testing.assert_array_equal(grams[0], grams[1])
    assert np.abs(grams[0] - grams[2]).max() > 0.1


def test_what_optax_and_orbax_do_with_a_state(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {"mlp": {"kernel": jnp.ones((6, 6)), "bias": jnp.ones(6)}}
    grads = [of["mlp"] for of in gradients(4, shapes={"mlp": {"kernel": (6, 6), "bias": (6,)}})]
    static = ("precondition_frequency", "max_precond_dim")
    optimizer = optax.inject_hyperparams(scale_by_soap, static_args=static)(b1=0.5, precondition_frequency=2)
    got, _ = updates_of(optimizer, [{"mlp": of} for of in grads])
    want, plain = updates_of(scale_by_soap(0.5, precondition_frequency=2), [{"mlp": of} for of in grads])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)
    masked, _ = updates_of(
        optax.masked(scale_by_soap(0.5, precondition_frequency=2), {"mlp": {"kernel": True, "bias": False}}),
        [{"mlp": of} for of in grads],
    )
    np.testing.assert_allclose(masked[-1]["mlp"]["kernel"], want[-1]["mlp"]["kernel"], atol=1e-5)
    np.testing.assert_allclose(masked[-1]["mlp"]["bias"], grads[-1]["bias"], atol=1e-6)
    marked = optax.tree.map_params(
        scale_by_soap(), lambda _: "moment", plain, transform_non_params=lambda x: jax.tree.map(lambda _: "other", x)
    )
    assert set(jax.tree.leaves((marked.mu, marked.nu))) == {"moment"}
    assert set(jax.tree.leaves((marked.count, marked.basis, marked.gram))) == {"other"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", plain)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(scale_by_soap().init, params))
    jax.tree.map(np.testing.assert_array_equal, restored, plain)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", None)])
def test_sharded_kernels_have_the_updates_of_whole_ones(axis_type, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    grads = [{"kernel": jnp.asarray(of["mlp"]["kernel"], jnp.float32)} for of in gradients(5)]
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2)
    want, _ = updates_of(soap, grads)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(of, NamedSharding(mesh, spec)) for of in grads]
        got, _ = updates_of(soap, sharded)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"], b["kernel"], atol=1e-3)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_moments_lie_on_a_mesh_as_the_layout_says(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(axis_type,) * 2)
    at = {"kernel": NamedSharding(mesh, P("fsdp", None) if axis_type is AxisType.Explicit else P("fsdp"))}
    grads = [
        {"kernel": jnp.asarray(of["mlp"]["kernel"], jnp.float32)}
        for of in gradients(5, shapes={"mlp": {"kernel": (8, 8)}})
    ]
    want, _ = updates_of(scale_by_soap(B1, B2, EPS, precondition_frequency=2), grads)
    moments = zero1(Rotation(axes="both"), grads[0], at)
    rotation = Rotation(axes="both", layout=layout_of(moments))
    soap = scale_by_soap(B1, B2, EPS, precondition_frequency=2, rotation=rotation)
    grads = [jax.device_put(of, at) for of in grads]
    with jax.set_mesh(mesh):
        state = soap.init(grads[0])
        assert {x.sharding for of in (state.mu, state.nu) for x in jax.tree.leaves(of)} == {moments["kernel"]}
        where = state_shardings(soap, grads[0], moments)
        state, update, got = jax.jit(soap.init, out_shardings=where)(grads[0]), jax.jit(soap.update), []
        for grad in grads:
            updates, state = update(grad, state)
            got.append(updates)
            assert state.mu["kernel"].sharding.is_equivalent_to(moments["kernel"], 2)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a["kernel"], b["kernel"], atol=1e-3)


def test_integers_and_wider_gradients_pass(x64):
    grads = [{"w": of["mlp"]["kernel"], "steps": np.arange(16).reshape(4, 4) + i} for i, of in enumerate(gradients(3))]
    soap = scale_by_soap(B1, B2, EPS)
    state = soap.init({"w": jnp.ones((6, 6), jnp.float32), "steps": jnp.ones((4, 4), jnp.int32)})
    kinds = jax.tree.map(lambda x: x.dtype, state)
    for grad in grads:
        updates, state = soap.update(grad, state)
    assert jax.tree.map(lambda x: x.dtype, state) == kinds
    want, _ = updates_of(soap, [{"w": of["w"].astype(np.float32)} for of in grads])
    np.testing.assert_allclose(updates["w"], want[-1]["w"], atol=1e-3)
    assert np.abs(want[-1]["w"]).max() > 0.1


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({}, {"precondition_frequency": 0}, "precondition_frequency=0"),
        ({"w": jnp.ones((2, 2), jnp.complex64)}, {}, "complex64"),
        # flax's attention: 4 layers of [2, 64], as it seems.
        ({"out": {"kernel": jnp.ones((4, 2, 64))}}, {}, r"out/kernel \(4, 2, 64\): with stacked axes \(0,\)"),
    ],
)
def test_what_it_cannot_do_is_refused(params, given, message):
    with pytest.raises((ValueError, UserError), match=message):
        scale_by_soap(**given).init(params)
