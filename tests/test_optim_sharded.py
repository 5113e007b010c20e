"""The optimizer on a mesh of fake devices: equal numbers, stable shardings, and what travels between devices."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
SHAPES = {
    "token_embedding": {"embedding": (24, 16)},
    "position_embedding": {"embedding": (7, 16)},
    "layers": {
        "attention": {"query": {"kernel": (2, 16, 16)}, "output": {"kernel": (2, 16, 16)}},
        "mlp": {"up": {"kernel": (2, 16, 32), "bias": (2, 32)}, "down": {"kernel": (2, 32, 16)}},
        "norm": {"scale": (2, 16)},
    },
    "layers_2": {"mlp": {"up": {"kernel": (16, 32)}}},
    "final_norm": {"scale": (16,)},
    "head": {"kernel": (16, 24)},
}
SPECS = {
    "token_embedding": {"embedding": P("tensor", "fsdp")},
    "position_embedding": {"embedding": P(None, "fsdp")},
    "layers": {
        "attention": {"query": {"kernel": P(None, "fsdp", "tensor")}, "output": {"kernel": P(None, "tensor", "fsdp")}},
        "mlp": {
            "up": {"kernel": P(None, "fsdp", "tensor"), "bias": P(None, "tensor")},
            "down": {"kernel": P(None, "tensor", "fsdp")},
        },
        "norm": {"scale": P(None, "fsdp")},
    },
    "layers_2": {"mlp": {"up": {"kernel": P(("fsdp", "tensor"), None)}}},
    "final_norm": {"scale": P("fsdp")},
    "head": {"kernel": P("fsdp", "tensor")},
}


def make_mesh(shape, kind=AUTO, names=NAMES):
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def place_by(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def random_tree(shapes, dtype, seed):
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def run(optimizer, trees, shardings=None, moments=None, out_shardings=True, state=None):
    """(params, state, jitted update, its HLO) after one update for every tree but the first, the parameters."""
    put = (lambda x: jax.tree.map(jnp.asarray, x)) if shardings is None else (lambda x: jax.device_put(x, shardings))
    params = put(trees[0])
    update = jax.jit(optimizer.update)
    if shardings is not None:
        state_at = state_shardings(optimizer, params, shardings if moments is None else moments)
        state = jax.jit(optimizer.init, out_shardings=state_at)(params) if state is None else state
        if out_shardings:
            update = jax.jit(optimizer.update, out_shardings=(shardings, state_at))
    state = optimizer.init(params) if state is None else state
    hlo = update.lower(put(trees[1]), state, params).compile().as_text()
    for tree in trees[1:]:
        before = where((params, state))
        updates, state = update(put(tree), state, params)
        assert where((updates, state)) == before
        params = jax.tree.map(jnp.add, params, updates)
    assert update._cache_size() == 1
    return params, state, hlo


def where(tree):
    # Equal tuples stand for equal types of jitted arguments: what differs here would compile again.
    return [(x.shape, x.dtype, spec_of(x)) for x in jax.tree.leaves(tree)]


def spec_of(x):
    if not isinstance(x.sharding, NamedSharding):
        return ()
    spec = list(x.sharding.spec)
    while spec and spec[-1] is None:
        spec.pop()
    return x.sharding.mesh.shape, tuple(spec)


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

    def leaf(keys, shape, spec):
        split = [math.prod(mesh.shape[n] for n in ((e,) if isinstance(e, str) else e or ())) for e in spec]
        split += [1] * (len(shape) - len(split))
        for dim in rotated(jax.tree_util.keystr(keys, simple=True, separator="/"), shape):
            if (width := split[dim]) > 1:
                local = [n // s for n, s in zip(shape, split, strict=True)]
                if not any(n % width == 0 for d, n in enumerate(local) if d != dim):
                    other = max((n, d) for d, n in enumerate(local) if d != dim)[1]
                    local[other] += -local[other] % width
                out.extend([("all-to-all", itemsize * math.prod(local))] * 4)

    jax.tree_util.tree_map_with_path(leaf, shapes, specs, is_leaf=lambda x: isinstance(x, tuple))
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
    """Parameters after three updates on one device, by kind and axes."""
    found = {}

    def get(kind, axes):
        if (kind, axes) not in found:
            trees = [random_tree(SHAPES, np.float64, seed) for seed in range(4)]
            found[kind, axes] = trees, run(orthoadam(1e-2, rotation=Rotation(kind, axes)), trees)[0]
        return found[kind, axes]

    return get


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 2, 2)])
@pytest.mark.parametrize("mesh_kind", [AUTO, EXPLICIT])
def test_update_equals_the_unsharded_one_and_only_shards_travel(mesh_kind, shape, kind, unsharded, x64):
    trees, want = unsharded(kind, "both")
    mesh = make_mesh(shape, mesh_kind)
    shardings = place_by(mesh, SPECS)
    # Explicit axes tell where an array is, Auto axes do not.
    rotation = Rotation(kind, "both", layout=layout_of(shardings) if mesh_kind == AUTO else None)
    propagated = shape in ((2, 2, 2), (1, 2, 2))
    got, state, hlo = run(orthoadam(1e-2, rotation=rotation), trees, shardings, out_shardings=not propagated)
    assert_close(got, want, 1e-10)
    assert collectives(hlo) == expected_exchanges(both_kernel_axes, SHAPES, SPECS, mesh, 8)
    for basis in jax.tree.leaves(state[0].basis):
        assert basis.sharding.is_fully_replicated
