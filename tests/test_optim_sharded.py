"""The optimizer on a mesh of fake devices: equal numbers, stable shardings, and what travels between devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax import optim
from orthojax.errors import UserError
from orthojax.optim import Rotation, in_rotated_basis, layout_of, orthoadam, rotate

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
slow = pytest.mark.slow
OUTPUT = Rotation(axes="output", embeddings="")
NAMES = ("data", "fsdp", "tensor")

# A small transformer with scanned layers, an unrolled one, and 7 positions, which no mesh divides.
MODEL = {
    "token_embedding/embedding": ((24, 16), P("tensor", "fsdp")),
    "position_embedding/embedding": ((7, 16), P(None, "fsdp")),
    "layers/attention/output/kernel": ((2, 16, 16), P(None, "tensor", "fsdp")),
    "layers/mlp/up/kernel": ((2, 16, 32), P(None, "fsdp", "tensor")),
    "layers/mlp/up/bias": ((2, 32), P(None, "tensor")),
    "layers/norm/scale": ((2, 16), P(None, "fsdp")),
    "layers_2/mlp/down/kernel": ((32, 16), P(("fsdp", "tensor"))),
}


# Half the time of compilation; the passes that decide what travels are the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_mesh(shape, kind=AUTO, names=NAMES):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def place_by(mesh, specs, shapes):
    """Makes shardings as jit itself writes them: with trailing None over Explicit axes, without over Auto ones."""

    def sharding(spec, shape):
        full = (*spec, *[None] * (len(shape) - len(spec)))
        while full and full[-1] is None and EXPLICIT not in mesh.axis_types:
            full = full[:-1]
        return NamedSharding(mesh, P(*full))

    return jax.tree.map(sharding, specs, shapes, is_leaf=lambda x: isinstance(x, P))


def problem(mesh, arrays, count=4, dtype=np.float64):
    """Draws random trees of arrays that are given as (shape, spec), and their shardings."""
    shapes, specs = ({path: pair[i] for path, pair in arrays.items()} for i in (0, 1))
    generators = [np.random.default_rng(seed) for seed in range(count)]
    trees = [{path: np.asarray(g.standard_normal(n), dtype) for path, n in shapes.items()} for g in generators]
    return trees, place_by(mesh, specs, shapes)


def where_needed(shardings, mesh_kind):
    """Returns the layout for Auto axes; Explicit ones show the place of an array."""
    return layout_of(shardings) if mesh_kind == AUTO else None


def run(optimizer, trees, shardings=None, moments=None, out_shardings=True):
    """(params, state, HLO) after one jitted step for every tree but the first, which is the parameters.

    On the way: parameters and state stay where they are, and one program does all steps.
    """
    put = (lambda x: jax.tree.map(jnp.asarray, x)) if shardings is None else (lambda x: jax.device_put(x, shardings))
    params, outs = put(trees[0]), None
    if shardings is not None:
        state_at = optim.state_shardings(optimizer, params, shardings if moments is None else moments)
        outs = (shardings, state_at) if out_shardings else None
    state = jit(optimizer.init, out_shardings=None if shardings is None else state_at)(params)
    traces = []

    @functools.partial(jit, out_shardings=outs)
    def step(params, state, grads):
        traces.append(1)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    hlo = step.lower(params, state, put(trees[1])).compile().as_text()
    for tree in trees[1:]:
        before = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (params, state))
        params, state = step(params, state, put(tree))
        if shardings is not None:
            assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (params, state)) == before
    assert len(traces) == 1
    return params, state, hlo


BYTES = {"f64": 8, "f32": 4, "bf16": 2, "s32": 4, "u32": 4, "s8": 1, "pred": 1}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(")


def collectives(hlo):
    """(kind, bytes of the result on one device) of every collective in a compiled program, sorted."""
    found = []
    for result, kind in COLLECTIVE.findall(hlo):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        found.append((kind, sum(BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays)))
    return sorted(found)


def expected_exchanges(arrays, mesh, itemsize):
    """Lists four all-to-alls for every rotated dimension that is split: there and back, of gradient and of update."""
    out = []
    for path, (shape, spec) in arrays.items():
        split = [math.prod(mesh.shape[n] for n in ((e,) if isinstance(e, str) else e or ())) for e in spec]
        split += [1] * (len(shape) - len(split))
        kernel = (len(shape) - 2, len(shape) - 1) if path.endswith("kernel") else ()
        for dim in (len(shape) - 1,) if path.endswith("embedding") else kernel:
            if (width := split[dim]) > 1:
                local = [n // s for n, s in zip(shape, split, strict=True)]
                if not any(n % width == 0 for d, n in enumerate(local) if d != dim):
                    other = max((n, d) for d, n in enumerate(local) if d != dim)[1]
                    local[other] += -local[other] % width
                out.extend([("all-to-all", itemsize * math.prod(local))] * 4)
    return sorted(out)


def assert_close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol), a, b)


QUICK = [(AUTO, (8, 1, 1), "hadamard"), (AUTO, (1, 4, 2), "haar"), (EXPLICIT, (2, 2, 2), "haar")]
SLOW = [(AUTO, (1, 2, 2), "haar"), (EXPLICIT, (1, 8, 1), "hadamard"), (EXPLICIT, (1, 4, 2), "haar")]
CASES = [*QUICK, *(pytest.param(*case, marks=slow) for case in SLOW)]


@functools.cache
def unsharded(kind):
    """Returns parameters of `MODEL` after three updates on one device."""
    return run(orthoadam(1e-2, rotation=Rotation(kind, "both")), problem(make_mesh((1, 1, 1)), MODEL)[0])[0]


@pytest.mark.parametrize(("mesh_kind", "shape", "kind"), CASES)
def test_updates_are_unsharded_ones_and_shards_travel(mesh_kind, shape, kind, x64):
    mesh = make_mesh(shape, mesh_kind)
    trees, shardings = problem(mesh, MODEL)
    rotation = Rotation(kind, "both", layout=where_needed(shardings, mesh_kind))
    propagated = shape in ((2, 2, 2), (1, 2, 2))
    got, state, hlo = run(orthoadam(1e-2, rotation=rotation), trees, shardings, out_shardings=not propagated)
    assert_close(got, unsharded(kind), 1e-10)
    assert collectives(hlo) == expected_exchanges(MODEL, mesh, 8)
    for basis in jax.tree.leaves(state[0].basis):
        assert basis.sharding.is_fully_replicated


UNSPLIT = {  # the output axis is rotated
    "stacked/kernel": ((8, 16, 24), P(None, "fsdp")),
    "by_layer/kernel": ((8, 16, 24), P("fsdp", "tensor")),
    "embedding": ((24, 16), P(("fsdp", "tensor"))),
    "norm/scale": ((8, 16), P("fsdp", "tensor")),
}


@pytest.mark.parametrize(
    ("given", "kind"), [("layout", "hadamard"), ("explicit axes", "haar"), ("nothing", "hadamard")]
)
def test_nothing_travels_if_rotated_axes_are_whole(given, kind):
    """Covers float32, and Auto axes without a layout, which the compiler does not need for this."""
    mesh = make_mesh((1, 4, 2), EXPLICIT if given == "explicit axes" else AUTO)
    trees, shardings = problem(mesh, UNSPLIT, 3, np.float32)
    want, _, _ = run(orthoadam(1e-2, rotation=Rotation(kind, axes="output")), trees)
    rotation = Rotation(kind, layout=layout_of(shardings) if given == "layout" else None, axes="output")
    got, _, hlo = run(orthoadam(1e-2, rotation=rotation), trees, shardings, out_shardings=given == "layout")
    assert_close(got, want, 1e-6)
    assert collectives(hlo) == []


def test_moments_with_whole_axes_halve_what_travels(x64):
    mesh = make_mesh((8,), names=("fsdp",))
    trees, stored = problem(mesh, {"w/kernel": ((2, 16, 24), P(None, None, "fsdp"))})
    want, _, _ = run(orthoadam(1e-2, rotation=OUTPUT), trees)
    rotated = {"w/kernel": NamedSharding(mesh, P(None, "fsdp"))}
    got, _, hlo = run(
        orthoadam(1e-2, rotation=Rotation(layout=layout_of(rotated), axes="output")), trees, stored, moments=rotated
    )
    assert_close(got, want, 1e-10)
    assert collectives(hlo) == [("all-to-all", 2 * 16 * 3 * 8)] * 2


@pytest.mark.parametrize(("kind", "mesh_kind"), [("haar", AUTO), pytest.param("hadamard", EXPLICIT, marks=slow)])
def test_zero1_splits_moments_over_data(kind, mesh_kind, x64):
    """Checks state bytes over the size of data, equal numbers, and one all-gather of each update."""
    arrays = {  # shape, sharding of the parameter and of its moments, elements of a moment on one device
        "a/kernel": ((4, 16, 24), P(), P(None, "data"), 384),  # the longest that is not rotated
        "b/kernel": ((16, 8), P("fsdp"), P(("fsdp", "data")), 16),  # split already, but not rotated
        "odd/kernel": ((3, 5), P(), P(), 15),
        "norm/scale": ((16,), P(), P("data"), 4),
        "bias": ((5,), P(), P(), 5),
    }
    mesh = make_mesh((4, 2), mesh_kind, NAMES[:2])
    trees, shardings = problem(mesh, arrays)
    want, _, _ = run(orthoadam(1e-2, rotation=Rotation(kind, axes="output")), trees)
    moments = optim.zero1(Rotation(kind, axes="output"), jax.tree.map(jnp.asarray, trees[0]), shardings)
    assert moments == problem(mesh, {path: (shape, spec) for path, (shape, _, spec, _) in arrays.items()})[1]
    optimizer = orthoadam(1e-2, rotation=Rotation(kind, layout=layout_of(moments), axes="output"))
    # By Explicit axes the updates leave as the gradients came; by Auto axes the caller names the place of the sum.
    got, state, hlo = run(optimizer, trees, shardings, moments, out_shardings=mesh_kind == AUTO)
    assert_close(got, want, 1e-10)
    local = {path: x.addressable_shards[0].data.size for path, x in state[0].inner.mu.items()}
    assert local == {path: size for path, (_, _, _, size) in arrays.items()}
    # What a device holds of each updated parameter: all of it, or its fsdp half.
    assert collectives(hlo) == [("all-gather", 8 * n) for n in (16, 64, 4 * 16 * 24)]


@pytest.mark.parametrize("mesh_kind", [AUTO, EXPLICIT])
def test_by_layers_splits_haar_bases_for_one_exchange_each_way(mesh_kind, x64):
    """A device has the bases of its own layers; updates are those of one device, shards travel there and back once."""
    arrays = {  # shape, sharding of the parameter and of its moments
        "layers/kernel": ((8, 16, 24), P(None, None, ("tensor", "fsdp")), P(("tensor", "fsdp"))),
        "odd/kernel": ((3, 16, 24), P(None, None, "fsdp"), P(None, None, "fsdp")),
        "embedding": ((24, 16), P("fsdp"), P("fsdp")),
        "norm/scale": ((8, 16), P(None, "fsdp"), P(None, "fsdp")),
    }
    mesh = make_mesh((1, 4, 2), mesh_kind)
    trees, shardings = problem(mesh, {path: pair[:2] for path, pair in arrays.items()})
    rotation = Rotation("haar", axes=16)
    want, _, _ = run(orthoadam(1e-2, rotation=rotation), trees)
    moments = optim.by_layers(rotation, jax.tree.map(jnp.asarray, trees[0]), shardings)
    assert moments == problem(mesh, {path: (shape, spec) for path, (shape, _, spec) in arrays.items()})[1]
    optimizer = orthoadam(1e-2, rotation=Rotation("haar", axes=16, layout=layout_of(moments)))
    got, state, hlo = run(optimizer, trees, shardings, moments)
    assert_close(got, want, 1e-12)
    assert state[0].basis["layers"]["kernel"]["basis_0"].addressable_shards[0].data.shape == (1, 16, 16)
    assert state[0].basis["odd"]["kernel"]["basis_0"].sharding.is_fully_replicated
    assert collectives(hlo) == [("all-to-all", 8 * 8 * 16 * 24 // 8)] * 2


@slow
@pytest.mark.parametrize(("mesh_kind", "kind"), [(AUTO, "haar"), (AUTO, "signed_permutation"), (EXPLICIT, "hadamard")])
def test_groups_and_indivisible_axes(mesh_kind, kind, x64):
    """Covers groups of split axes, and the cases that need a gather: no other axis, or a stacked odd one."""
    arrays = {
        "group": ((3, 4, 8, 6), P(None, "fsdp", "tensor"), optim.RotatedAxes(((1, 2), 3), stacked=(0,))),
        "apart": ((4, 6, 8), P("tensor", None, "fsdp"), optim.RotatedAxes(((2, 0),))),
        "layers": ((8, 8), P("tensor", "fsdp"), optim.RotatedAxes((1,), stacked=(0,))),
        "gathered": ((2, 4), P("tensor", "fsdp"), optim.RotatedAxes(((0, 1),))),
        "gathered_odd": ((3, 8), P(None, "fsdp"), optim.RotatedAxes((1,), stacked=(0,))),
    }
    (x,), shardings = problem(make_mesh((1, 4, 2), mesh_kind), arrays, 1)
    placed, rule = jax.device_put(x, shardings), lambda path, leaf: arrays[path][2]
    plain, ours = Rotation(kind, rule), Rotation(kind, rule, layout=where_needed(shardings, mesh_kind))
    state = rotate(ours).init(placed)
    want, _ = jit(rotate(plain).update)(x, state)
    compiled = jit(rotate(ours).update).lower(placed, state).compile()
    got, _ = compiled(placed, state)
    assert jax.tree.map(lambda x: x.sharding, got) == shardings
    assert_close(got, want, 1e-12)
    assert_close(jit(optim.unrotate(ours).update)(got, state)[0], x, 1e-12)
    sizes = [size for name, size in collectives(compiled.as_text()) if name == "all-gather"]
    assert sizes == [16, 64, 192]  # of (2, 4) one axis and then the other, all of (3, 8); nothing else


@slow
@pytest.mark.parametrize("mesh_kind", [AUTO, EXPLICIT])
def test_updates_outside_of_jit_keep_shardings(mesh_kind):
    arrays = {"w/kernel": ((4, 16, 24), P(None, "tensor", "fsdp")), "b": ((24,), P("fsdp"))}
    trees, shardings = problem(make_mesh((1, 4, 2), mesh_kind), arrays, 3, np.float32)
    optimizer = orthoadam(1e-2, rotation=OUTPUT)
    want, _, _ = run(optimizer, trees)
    params, *gradients = (jax.device_put(tree, shardings) for tree in trees)

    got, state = params, optimizer.init(params)  # outside of jit the arrays show where they are, with any mesh
    for moment in (state[0].inner.mu, state[0].inner.nu):
        assert jax.tree.map(lambda x: x.sharding, moment) == shardings
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, got)
        assert jax.tree.map(lambda x: x.sharding, updates) == shardings
        got = optax.apply_updates(got, updates)
    assert_close(got, want, 2e-5)


def test_states_of_other_optimizers_have_shardings():
    arrays = {"w": ((256, 128), P(None, "fsdp")), "b": ((8,), P("fsdp"))}
    (params,), shardings = problem(make_mesh((2, 4), names=NAMES[:2]), arrays, 1, np.float32)
    params = jax.tree.map(jnp.asarray, params)
    factored = in_rotated_basis(optax.adafactor(1e-3), Rotation("haar", axes="output"))  # two factored moments of w
    for optimizer, like_w in (
        (factored, 0),
        (
            optax.partition(
                {"ours": orthoadam(1e-2, rotation=OUTPUT), "sgd": optax.sgd(0.1)}, {"w": "ours", "b": "sgd"}
            ),
            2,
        ),
        (in_rotated_basis(optax.contrib.muon(1e-2), OUTPUT), 1),
    ):
        found = optim.state_shardings(optimizer, params, shardings)
        state = jit(optimizer.init, out_shardings=found)(params)
        assert jax.tree.structure(found) == jax.tree.structure(state)
        wide = [x for x in jax.tree.leaves(state) if x.shape == (256, 128)]
        assert [x.sharding for x in wide] == [shardings["w"]] * like_w
        rest = [x for x in jax.tree.leaves(state) if x.shape not in ((256, 128), (8,))]
        assert all(x.sharding.is_fully_replicated for x in rest)


def test_each_device_updates_in_a_shard_map():
    """Includes the types of varying arrays: the state is shared, the gradient is each device's own."""
    params = {"layers": {"kernel": jnp.ones((3, 8, 16))}, "embedding": jnp.ones((4, 8))}
    optimizer = optim.scale_by_orthoadam(rotation=OUTPUT)
    state = optimizer.init(params)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AUTO,))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(2, *p.shape)), jnp.float32), params)

    def local(grads, state):
        updates, _ = optimizer.update(jax.tree.map(lambda g: g[0], grads), state)
        return jax.tree.map(lambda u: u[None], updates)

    split = PartitionSpec("data")
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split))(grads, state)
    for device in range(2):
        alone = local(jax.tree.map(lambda g, i=device: g[i : i + 1], grads), state)
        assert_close(jax.tree.map(lambda u, i=device: u[i : i + 1], found), alone, 1e-5)


def test_moments_that_a_layout_contradicts_are_refused():
    """`nnx.Optimizer` gives moments the sharding metadata of their parameters."""
    mesh = make_mesh((4, 2), EXPLICIT, NAMES[:2])
    params = {"w": jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("fsdp", None)))}
    moments = optim.zero1(OUTPUT, params, jax.tree.map(lambda x: x.sharding, params))
    optimizer = orthoadam(0.1, rotation=Rotation(axes="output", embeddings="", layout=layout_of(moments)))
    with jax.set_mesh(mesh):
        state = optimizer.init(params)
        like_params = jax.tree.map(lambda x: jax.device_put(x, params["w"].sharding) if x.ndim == 2 else x, state)
        with pytest.raises(UserError, match=r"not sharded by the layout.*\n.*state_shardings"):
            jax.jit(optimizer.update)(params, like_params, params)
        placed = jax.device_put(like_params, optim.state_shardings(optimizer, params, moments))
        _, state = jax.jit(optimizer.update)(params, placed, params)
    assert state[0].inner.mu["w"].sharding.spec == moments["w"].spec


both_kinds_of_mesh = pytest.mark.parametrize("mesh_kind", [AUTO, pytest.param(EXPLICIT, marks=slow)])


@both_kinds_of_mesh
def test_other_inner_transformations_over_a_mesh(mesh_kind, x64):
    mesh = make_mesh((1, 4, 2), mesh_kind)
    trees, shardings = problem(mesh, {"w/kernel": ((4, 16, 24), P(None, "tensor", "fsdp"))})
    adamw = optax.adamw(1e-2)  # reads the rotated parameters
    want, _, _ = run(in_rotated_basis(adamw, Rotation("haar", axes="output")), trees)
    ours = in_rotated_basis(adamw, Rotation("haar", layout=where_needed(shardings, mesh_kind), axes="output"))
    with jax.set_mesh(mesh):
        got, _, hlo = run(ours, trees, shardings, out_shardings=False)
    assert_close(got, want, 1e-10)
    assert {kind for kind, _ in collectives(hlo)} == {"all-to-all"}
