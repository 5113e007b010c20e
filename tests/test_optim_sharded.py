"""The optimizer on a mesh of fake devices: equal numbers, stable shardings, and what travels between devices."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.optim import (
    RotatedAxes,
    Rotation,
    in_rotated_basis,
    layout_of,
    orthoadam,
    rotate,
    scale_by_orthoadam,
    state_shardings,
    unrotate,
    zero1,
)

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
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


def unzip(pairs):
    """(shapes, specs) by path."""
    return tuple({path: pair[i] for path, pair in pairs.items()} for i in (0, 1))


SHAPES, SPECS = unzip(MODEL)

# Half the time of compilation; the passes that decide what travels are the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def make_mesh(shape, kind=AUTO, names=NAMES):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def place_by(mesh, specs, shapes):
    """Shardings as jit itself writes them: with trailing None over Explicit axes, without over Auto ones."""

    def sharding(spec, shape):
        full = (*spec, *[None] * (len(shape) - len(spec)))
        while full and full[-1] is None and EXPLICIT not in mesh.axis_types:
            full = full[:-1]
        return NamedSharding(mesh, P(*full))

    return jax.tree.map(sharding, specs, shapes, is_leaf=lambda x: isinstance(x, P))


def random_tree(shapes, dtype, seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def run(optimizer, trees, shardings=None, moments=None, out_shardings=True, state=None):
    """(params, state, HLO) after one jitted step for every tree but the first, which is the parameters.

    On the way: parameters and state stay where they are, and one program does all steps.
    """
    put = (lambda x: jax.tree.map(jnp.asarray, x)) if shardings is None else (lambda x: jax.device_put(x, shardings))
    params, outs = put(trees[0]), None
    if shardings is not None:
        state_at = state_shardings(optimizer, params, shardings if moments is None else moments)
        outs = (shardings, state_at) if out_shardings else None
        state = jit(optimizer.init, out_shardings=state_at)(params) if state is None else state
    state = jit(optimizer.init)(params) if state is None else state

    @functools.partial(jit, out_shardings=outs)
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    hlo = step.lower(params, state, put(trees[1])).compile().as_text()
    for tree in trees[1:]:
        before = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (params, state))
        params, state = step(params, state, put(tree))
        if shardings is not None:
            assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), (params, state)) == before
    assert step._cache_size() == 1
    return params, state, hlo


BYTES = {"f64": 8, "f32": 4, "bf16": 2, "s32": 4, "u32": 4, "s8": 1, "pred": 1}
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(?:-start)?\("
)


def collectives(hlo):
    """(kind, bytes of the result on one device) of every collective in a compiled program, sorted."""
    found = []
    for result, kind in COLLECTIVE.findall(hlo):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
        found.append((kind, sum(BYTES[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays)))
    return sorted(found)


def expected_exchanges(rotated, shapes, specs, mesh, itemsize):
    """Four all-to-alls for every rotated dimension that is split: there and back, of gradient and of update."""
    out = []
    for path, shape in shapes.items():
        split = [math.prod(mesh.shape[n] for n in ((e,) if isinstance(e, str) else e or ())) for e in specs[path]]
        split += [1] * (len(shape) - len(split))
        for dim in rotated(path, shape):
            if (width := split[dim]) > 1:
                local = [n // s for n, s in zip(shape, split, strict=True)]
                if not any(n % width == 0 for d, n in enumerate(local) if d != dim):
                    other = max((n, d) for d, n in enumerate(local) if d != dim)[1]
                    local[other] += -local[other] % width
                out.extend([("all-to-all", itemsize * math.prod(local))] * 4)
    return sorted(out)


def both_kernel_axes(path, shape):
    if path.endswith("embedding"):
        return (len(shape) - 1,)
    return (len(shape) - 2, len(shape) - 1) if path.endswith("kernel") else ()


def assert_close(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol), a, b)


def test_the_counter_sees_every_collective():
    mesh = make_mesh((8,), names=("fsdp",))
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    x = jax.device_put(jnp.ones((16, 8)), split)
    hlo = lambda f, out: jax.jit(f, out_shardings=out).lower(x).compile().as_text()  # noqa: E731
    assert collectives(hlo(lambda x: x + 1, split)) == []
    assert collectives(hlo(lambda x: x + 1, whole)) == [("all-gather", 512)]
    assert collectives(hlo(lambda x: jnp.sum(x, 0), whole)) == [("all-reduce", 32)]
    assert collectives(hlo(lambda x: x + 1, NamedSharding(mesh, P(None, "fsdp")))) == [("all-to-all", 64)]


@pytest.fixture(scope="module")
def unsharded():
    """Parameters after three updates on one device, by kind."""
    found = {}

    def get(kind):
        if kind not in found:
            trees = [random_tree(SHAPES, np.float64, seed) for seed in range(4)]
            found[kind] = trees, run(orthoadam(1e-2, rotation=Rotation(kind, "both")), trees)[0]
        return found[kind]

    return get


MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 2)]
QUICK = {
    (AUTO, (8, 1, 1), "hadamard"),
    (AUTO, (1, 2, 2), "hadamard"),
    (AUTO, (1, 4, 2), "haar"),
    (EXPLICIT, (2, 2, 2), "haar"),
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in itertools.product((AUTO, EXPLICIT), MESHES, ("hadamard", "haar"))
]


@pytest.mark.parametrize(("mesh_kind", "shape", "kind"), CASES)
def test_update_equals_the_unsharded_one_and_only_shards_travel(mesh_kind, shape, kind, unsharded, x64):
    trees, want = unsharded(kind)
    mesh = make_mesh(shape, mesh_kind)
    shardings = place_by(mesh, SPECS, SHAPES)
    # Explicit axes tell where an array is, Auto axes do not.
    rotation = Rotation(kind, "both", layout=layout_of(shardings) if mesh_kind == AUTO else None)
    propagated = shape in ((2, 2, 2), (1, 2, 2))
    got, state, hlo = run(orthoadam(1e-2, rotation=rotation), trees, shardings, out_shardings=not propagated)
    assert_close(got, want, 1e-10)
    assert collectives(hlo) == expected_exchanges(both_kernel_axes, SHAPES, SPECS, mesh, 8)
    for basis in jax.tree.leaves(state[0].basis):
        assert basis.sharding.is_fully_replicated


UNSPLIT = {  # the output axis is rotated
    "stacked/kernel": ((8, 16, 24), P(None, "fsdp")),
    "by_layer/kernel": ((8, 16, 24), P("fsdp", "tensor")),
    "embedding": ((24, 16), P(("fsdp", "tensor"))),
    "norm/scale": ((8, 16), P("fsdp", "tensor")),
}


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
@pytest.mark.parametrize("given", ["layout", "explicit axes", "nothing"])
def test_nothing_travels_where_the_rotated_axis_is_whole(given, kind):
    """Also float32; and with Auto axes the compiler needs no layout for this."""
    shapes, specs = unzip(UNSPLIT)
    trees = [random_tree(shapes, np.float32, seed) for seed in range(3)]
    want, _, _ = run(orthoadam(1e-2, rotation=Rotation(kind)), trees)
    shardings = place_by(make_mesh((1, 4, 2), EXPLICIT if given == "explicit axes" else AUTO), specs, shapes)
    rotation = Rotation(kind, layout=layout_of(shardings) if given == "layout" else None)
    got, _, hlo = run(orthoadam(1e-2, rotation=rotation), trees, shardings, out_shardings=given == "layout")
    assert_close(got, want, 1e-6)
    assert collectives(hlo) == []


@pytest.mark.parametrize("kind", ["hadamard", pytest.param("haar", marks=pytest.mark.slow)])
def test_a_state_continues_on_another_mesh(kind, x64, tmp_path):
    names = ("token_embedding/embedding", "layers/mlp/up/kernel")
    shapes, specs = unzip({name: MODEL[name] for name in names})
    trees = [random_tree(shapes, np.float64, seed) for seed in range(4)]
    plain = Rotation(kind, "both")
    want, _, _ = run(orthoadam(1e-2, rotation=plain), trees)
    first = place_by(make_mesh((2, 2, 2)), specs, shapes)
    second = place_by(make_mesh((1, 4), EXPLICIT, NAMES[1:]), specs, shapes)
    saved = run(orthoadam(1e-2, rotation=dataclasses.replace(plain, layout=layout_of(first))), trees[:3], first)[:2]
    optimizer = orthoadam(1e-2, rotation=plain)
    there = second, state_shardings(optimizer, saved[0], second)
    like = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), saved, there)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        params, state = checkpointer.restore(tmp_path / "state", like)
    got, _, _ = run(optimizer, [params, trees[3]], second, state=state)
    assert_close(got, want, 1e-10)


def test_a_moment_layout_in_which_the_rotated_axis_is_whole_halves_what_travels(x64):
    shapes, mesh = {"w/kernel": (2, 16, 24)}, make_mesh((8,), names=("fsdp",))
    trees = [random_tree(shapes, np.float64, seed) for seed in range(4)]
    want, _, _ = run(orthoadam(1e-2), trees)
    stored = place_by(mesh, {"w/kernel": P(None, None, "fsdp")}, shapes)
    turned = place_by(mesh, {"w/kernel": P(None, "fsdp")}, shapes)
    optimizer = orthoadam(1e-2, rotation=Rotation(layout=layout_of(turned)))
    got, _, hlo = run(optimizer, trees, stored, moments=turned)
    assert_close(got, want, 1e-10)
    assert collectives(hlo) == [("all-to-all", 2 * 16 * 3 * 8)] * 2


@pytest.mark.parametrize(
    ("kind", "mesh_kind"), [("haar", AUTO), pytest.param("hadamard", EXPLICIT, marks=pytest.mark.slow)]
)
def test_zero1(kind, mesh_kind, x64):
    """Moments split over data: state bytes over its size, equal numbers, one all-gather of each update."""
    shapes = {"a/kernel": (4, 16, 24), "b/kernel": (16, 8), "odd/kernel": (3, 5), "norm/scale": (16,), "bias": (5,)}
    specs = {"a/kernel": P(), "b/kernel": P("fsdp"), "odd/kernel": P(), "norm/scale": P(), "bias": P()}
    trees = [random_tree(shapes, np.float64, seed) for seed in range(4)]
    want, _, _ = run(orthoadam(1e-2, rotation=Rotation(kind)), trees)
    mesh = make_mesh((4, 2), mesh_kind, NAMES[:2])
    shardings = place_by(mesh, specs, shapes)
    moments = zero1(Rotation(kind), jax.tree.map(jnp.asarray, trees[0]), shardings)
    expected = {
        "a/kernel": P(None, "data"),  # the longest that is not rotated
        "b/kernel": P(("fsdp", "data")),  # split already, but not rotated
        "odd/kernel": P(),
        "norm/scale": P("data"),
        "bias": P(),
    }
    assert moments == place_by(mesh, expected, shapes)
    rotation = Rotation(kind, layout=layout_of(moments))
    optimizer = orthoadam(1e-2, rotation=rotation)
    # By Explicit axes the updates leave as the gradients came; by Auto axes the caller says where the sum is to be.
    got, state, hlo = run(optimizer, trees, shardings, moments, out_shardings=mesh_kind == AUTO)
    assert_close(got, want, 1e-10)
    mu = state[0].inner.mu
    local = {path: x.addressable_shards[0].data.size for path, x in mu.items()}
    assert local == {"a/kernel": 384, "b/kernel": 16, "odd/kernel": 15, "norm/scale": 4, "bias": 5}
    # What a device holds of each updated parameter: all of it, or its fsdp half.
    assert collectives(hlo) == [("all-gather", 8 * n) for n in (16, 64, 4 * 16 * 24)]
    params, gradient = (jax.device_put(tree, shardings) for tree in trees[:2])
    updates, state = optimizer.update(gradient, optimizer.init(params), params)  # outside of jit
    assert jax.tree.map(lambda x: x.sharding, (updates, state[0].inner.nu)) == (shardings, moments)


@pytest.mark.parametrize("mesh_kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)])
def test_the_literal_chain_and_other_inner_transformations(mesh_kind, x64):
    shapes, specs = {"w/kernel": (4, 16, 24)}, {"w/kernel": P(None, "tensor", "fsdp")}
    trees = [random_tree(shapes, np.float64, seed) for seed in range(4)]
    shardings = place_by(make_mesh((1, 4, 2), mesh_kind), specs, shapes)
    plain = Rotation("haar")
    ours = Rotation("haar", layout=layout_of(shardings) if mesh_kind == AUTO else None)
    for make in (
        lambda r: optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r)),
        lambda r: in_rotated_basis(optax.adamw(1e-2), r),  # reads the rotated parameters
    ):
        want, _, _ = run(make(plain), trees)
        with jax.set_mesh(shardings["w/kernel"].mesh):
            got, _, hlo = run(make(ours), trees, shardings, out_shardings=False)
        assert_close(got, want, 1e-10)
        assert {kind for kind, _ in collectives(hlo)} == {"all-to-all"}


@pytest.mark.parametrize(
    ("mesh_kind", "kind"),
    [
        pytest.param(AUTO, "haar", marks=pytest.mark.slow),
        pytest.param(AUTO, "signed_permutation", marks=pytest.mark.slow),
        pytest.param(EXPLICIT, "hadamard", marks=pytest.mark.slow),
    ],
)
def test_groups_and_indivisible_axes(mesh_kind, kind, x64):
    """Several axes in one group, each split; and the cases that need a gather: no other axis, or a stacked odd one."""
    cases = {
        "group": ((3, 4, 8, 6), P(None, "fsdp", "tensor"), RotatedAxes(((1, 2), 3), stacked=(0,))),
        "apart": ((4, 6, 8), P("tensor", None, "fsdp"), RotatedAxes(((2, 0),))),
        "layers": ((8, 8), P("tensor", "fsdp"), RotatedAxes((1,), stacked=(0,))),
        "gathered": ((2, 4), P("tensor", "fsdp"), RotatedAxes(((0, 1),))),
        "gathered_odd": ((3, 8), P(None, "fsdp"), RotatedAxes((1,), stacked=(0,))),
    }
    shapes, specs = ({path: case[i] for path, case in cases.items()} for i in (0, 1))
    shardings = place_by(make_mesh((1, 4, 2), mesh_kind), specs, shapes)
    x = random_tree(shapes, np.float64, 0)
    placed = jax.device_put(x, shardings)
    plain = Rotation(kind, lambda path, leaf: cases[path][2])
    ours = dataclasses.replace(plain, layout=layout_of(shardings) if mesh_kind == AUTO else None)
    state = rotate(ours).init(placed)
    want, _ = jit(rotate(plain).update)(x, state)
    compiled = jit(rotate(ours).update).lower(placed, state).compile()
    got, _ = compiled(placed, state)
    assert jax.tree.map(lambda x: x.sharding, got) == shardings
    assert_close(got, want, 1e-12)
    assert_close(jit(unrotate(ours).update)(got, state)[0], x, 1e-12)
    sizes = [size for name, size in collectives(compiled.as_text()) if name == "all-gather"]
    assert sizes == [16, 64, 192]  # of (2, 4) one axis and then the other, all of (3, 8); nothing else


@pytest.mark.slow
@pytest.mark.parametrize("mesh_kind", [AUTO, EXPLICIT])
def test_outside_of_jit_in_scan_vmap_and_eval_shape(mesh_kind):
    shapes, specs = {"w/kernel": (4, 16, 24), "b": (24,)}, {"w/kernel": P(None, "tensor", "fsdp"), "b": P("fsdp")}
    trees = [random_tree(shapes, np.float32, seed) for seed in range(3)]
    optimizer = orthoadam(1e-2)
    want, _, _ = run(optimizer, trees)
    shardings = place_by(make_mesh((1, 4, 2), mesh_kind), specs, shapes)
    params, *gradients = (jax.device_put(tree, shardings) for tree in trees)
    shapes_of_state = jax.eval_shape(optimizer.init, params)

    got, state = params, optimizer.init(params)  # outside of jit the arrays tell where they are, with any mesh
    assert jax.tree.map(jnp.shape, shapes_of_state) == jax.tree.map(jnp.shape, state)
    for moment in (state[0].inner.mu, state[0].inner.nu):
        assert jax.tree.map(lambda x: x.sharding, moment) == shardings
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, got)
        assert jax.tree.map(lambda x: x.sharding, updates) == shardings
        got = optax.apply_updates(got, updates)
    assert_close(got, want, 2e-5)

    if mesh_kind == AUTO:
        optimizer = orthoadam(1e-2, rotation=Rotation(layout=layout_of(shardings)))
    stacked = jax.device_put(
        jax.tree.map(lambda *x: np.stack(x), *trees[1:]),
        jax.tree.map(lambda s: NamedSharding(s.mesh, P(None, *s.spec)), shardings),
    )

    @jit
    def scanned(params, state, stacked):
        def step(carry, gradient):
            updates, state = optimizer.update(gradient, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, state), stacked)[0][0]

    assert_close(scanned(params, optimizer.init(params), stacked), want, 2e-5)

    one_step = jit(lambda g: optimizer.update(g, optimizer.init(params), params)[0])
    both = jit(jax.vmap(lambda g: optimizer.update(g, optimizer.init(params), params)[0]))(stacked)
    for i, gradient in enumerate(gradients):
        assert_close(jax.tree.map(lambda x, i=i: x[i], both), one_step(gradient), 2e-5)


def test_a_mesh_of_both_kinds_of_axes(x64):
    """Explicit axes tell us, the Auto axis stays the compiler's."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(EXPLICIT, AUTO))
    shapes = {"w/kernel": (16, 24)}
    trees = [random_tree(shapes, np.float64, seed) for seed in range(3)]
    want, _, _ = run(orthoadam(1e-2), trees)
    shardings = place_by(mesh, {"w/kernel": P("tensor", "fsdp")}, shapes)
    got, _, _ = run(orthoadam(1e-2), trees, shardings)
    assert_close(got, want, 1e-10)
    x = jax.device_put(trees[1], shardings)
    turned, _ = rotate().update(x, rotate().init(x))  # outside of jit both are known
    assert turned["w/kernel"].sharding == shardings["w/kernel"]
    assert_close(turned, rotate().update(trees[1], rotate().init(x))[0], 1e-12)


def test_states_that_are_not_like_parameters_and_what_is_refused():
    mesh = make_mesh((2, 4), names=("data", "fsdp"))
    params = {"w": jnp.ones((256, 128)), "b": jnp.ones(8)}
    shardings = place_by(mesh, {"w": P(None, "fsdp"), "b": P("fsdp")}, {"w": (256, 128), "b": (8,)})
    optimizer = in_rotated_basis(optax.adafactor(1e-3), Rotation("haar"))  # two factored moments of w
    found = state_shardings(optimizer, params, shardings)
    state = jit(optimizer.init, out_shardings=found)(params)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert {s.spec for s, x in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True) if x.ndim != 1} == {P()}
    with pytest.raises(ValueError, match="zero1 axis='dat'; allowed: an axis of the mesh, data, fsdp"):
        zero1(Rotation(), params, shardings, axis="dat")
    with pytest.raises(ValueError, match="got 2 meshes; allowed: one"):
        state_shardings(optimizer, params, {**shardings, "b": NamedSharding(make_mesh((8,), names=("x",)), P())})
    misnamed = scale_by_orthoadam(rotation=Rotation(layout=layout_of(shardings)))
    with pytest.raises(ValueError, match="'kernel' has no sharding in the layout; allowed: b, w"):
        misnamed.init({"kernel": jnp.ones((4, 4))})


@pytest.mark.parametrize(
    ("mesh_kind", "kind"), [(AUTO, "hadamard"), pytest.param(EXPLICIT, "haar", marks=pytest.mark.slow)]
)
def test_layer_by_layer_turns_the_layers_of_each_shard(mesh_kind, kind, x64):
    """Split layers need nothing from elsewhere; split rotated axes exchange one layer of one shard at a time."""
    shapes = {"over_layers/kernel": (8, 16, 24), "over_output/kernel": (3, 16, 24), "whole/kernel": (2, 8, 8)}
    specs = {
        "over_layers/kernel": P("fsdp", "tensor"),
        "over_output/kernel": P(None, None, "fsdp"),
        "whole/kernel": P(),
    }
    trees = [random_tree(shapes, np.float64, seed) for seed in range(4)]
    want, _, _ = run(orthoadam(1e-2, rotation=Rotation(kind)), trees)
    mesh = make_mesh((1, 4, 2), mesh_kind)
    shardings = place_by(mesh, specs, shapes)
    rotation = Rotation(kind, layout=layout_of(shardings) if mesh_kind == AUTO else None)
    got, _, hlo = run(orthoadam(1e-2, rotation=rotation, layer_by_layer=True), trees, shardings)
    assert_close(got, want, 1e-10)
    assert collectives(hlo) == [("all-to-all", 8 * 16 * 24 // 4)] * 4


@pytest.mark.parametrize("mesh_kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)])
def test_vmap_over_models_that_are_split_over_the_mesh(mesh_kind, x64):
    mesh = make_mesh((2, 4), mesh_kind, ("models", "fsdp"))
    shapes = {"w": {"kernel": (4, 16, 24)}}  # four models
    shardings = place_by(mesh, {"w": {"kernel": P("models", None, "fsdp")}}, shapes)
    optimizer = orthoadam(1e-2)
    trees = [random_tree(shapes, np.float64, seed) for seed in range(2)]
    step = lambda g, p: optimizer.update(g, optimizer.init(p), p)[0]  # noqa: E731
    want = jax.vmap(step)(*(jax.tree.map(jnp.asarray, tree) for tree in trees))
    got = jit(jax.vmap(step))(*(jax.device_put(tree, shardings) for tree in trees))
    assert_close(got, want, 1e-10)


def test_masked_and_partitioned_states_have_shardings():
    mesh = make_mesh((2, 4), names=("data", "fsdp"))
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(8)}
    shardings = place_by(mesh, {"w": P(None, "fsdp"), "b": P("fsdp")}, {"w": (8, 16), "b": (8,)})
    for optimizer in (
        optax.masked(orthoadam(1e-2), {"w": True, "b": False}),
        optax.partition({"ours": orthoadam(1e-2), "sgd": optax.sgd(0.1)}, {"w": "ours", "b": "sgd"}),
        in_rotated_basis(optax.contrib.muon(1e-2)),
    ):
        found = state_shardings(optimizer, params, shardings)
        state = jit(optimizer.init, out_shardings=found)(params)
        moments = [x for x in jax.tree.leaves(state) if x.shape == (8, 16)]
        assert moments
        assert all(x.sharding == shardings["w"] for x in moments)


def test_a_haar_basis_that_is_split_and_a_layout_that_does_not_divide(x64):
    mesh = make_mesh((2, 4), EXPLICIT, ("data", "fsdp"))
    x = random_tree({"w": (8, 16)}, np.float64, 0)
    transform = rotate(Rotation("haar"))
    state = transform.init(x)
    want, _ = transform.update(x, state)
    rows = NamedSharding(mesh, P("fsdp", None))
    placed = jax.device_put(x, {"w": NamedSharding(mesh, P(None, "fsdp"))})
    assert_close(jit(transform.update)(placed, jax.device_put(state, rows))[0], want, 1e-12)
    uneven = Rotation(layout=lambda path: NamedSharding(mesh, P("fsdp")))
    with pytest.raises(ValueError, match=r"w: \(6, 8\) does not divide over .*; allowed: multiples of \[4, 1\]"):
        jax.eval_shape(rotate(uneven).update, {"w": jax.ShapeDtypeStruct((6, 8), jnp.float64)}, rotate(uneven).init({}))
    for sharding in (None, jax.sharding.SingleDeviceSharding(jax.devices()[0])):
        with pytest.raises(ValueError, match=r"allowed: a jax\.sharding\.NamedSharding"):
            zero1(Rotation(), {"w": jnp.ones((8, 16))}, {"w": sharding} if sharding else {"w": "data"})
