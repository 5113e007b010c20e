"""What optimizers refuse: rotations, axes, trees and layouts that do not fit, and numbers that mean nothing."""

import adopters
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from optax import contrib
from refusals import refused
from test_rotation import shapes_of

from orthojax import optim
from orthojax.config import OptimConfig
from orthojax.optim import RotatedAxes, Rotation, describe, in_rotated_basis, orthoadam, rotate
from orthojax.train import learning_rate_schedule, make_optimizer

OUTPUT, HAAR = Rotation(axes="output"), Rotation("haar", axes="output")
W, SQUARE = jnp.ones((4, 8)), jnp.ones((4, 4))


def rotated(_, axes, tree):
    """Rotates a tree along what a rule says of every parameter."""
    transform = rotate(Rotation(axes=lambda path, leaf: axes))
    transform.update(tree, transform.init(tree))


ROTATIONS = [
    (lambda _, fields: Rotation(**fields), [(fields, next(iter(fields))) for fields in (
        {"kind": "hadamar"}, {"axes": "outputs"}, {"axes": 16_385}, {"axes": True}, {"scope": "layers"},
        {"seed": -1}, {"seed": 1.0}, {"layout": "replicated"}, {"kernel_layout": "oi"}, {"embeddings": "(wte"},
        {"kernel_layout": "out_in", "axes": optim.generic_axes})], ValueError),
    (lambda _, *fields: RotatedAxes(*fields), [(*fields, "RotatedAxes") for fields in (
        ((),), (((),),), ((0, 0),), (((0, 1), 1),), ((1,), (1,)), (-1,), ((0,), 0))], ValueError),
    (rotated, [(RotatedAxes(axes), {"mlp": {"kernel": SQUARE}}, "mlp/kernel") for axes in ((2,), (-3,), (1, -1))],
     ValueError),
    (rotated, [(axes, {"kernel": W}, "kernel") for axes in ("output", (), False, (-1,))], TypeError),
    (lambda _, make: make("haar"), [(make, "rotation='haar'") for make in (  # a rotation is not given by its name
        lambda name: orthoadam(0.1, rotation=name), rotate, lambda name: describe(name, {}))], TypeError),
    (lambda _, hyperparameter: optim.scale_by_orthoadam(**hyperparameter), [
        (wrong, (f"{next(iter(wrong))}=", "allowed")) for wrong in (
            {"b1": 1.0}, {"b2": 1.5}, {"b1": -0.1}, {"b2": np.nan}, {"eps": -1e-8}, {"eps": np.inf},
            {"eps_root": -1.0}, {"nu_dtype": "int16"}, {"mu_dtype": jnp.int32},
            {"mu_dtype": "x"})], ValueError),
    (lambda _, wrong: optim.orthoadam(**{"learning_rate": 0.1} | wrong), [
        (wrong, (next(iter(wrong)), "allowed")) for wrong in (
            {"b1": "x"}, {"eps": [1e-8]}, {"learning_rate": "x"}, {"learning_rate": np.nan}, {"learning_rate": 10**400},
            {"weight_decay": {}},
            {"weight_decay": np.ones(2)}, {"mask": "x"}, {"mask": {"a": 1}})], ValueError),
    (lambda _, *schedule: optim.warmup_cosine(*schedule), [
        (1.0, 5, 4, 0.0, "allowed"), (1.0, 0, 4, 1.5, "allowed")], ValueError),
]  # fmt: skip
NANODO = shapes_of(adopters.DECIDED["nanodo"][1])
OURS = {path: "ours" if len(leaf.shape) > 1 else "theirs" for path, leaf in NANODO.items()}


def update(optimizer, gradients, params):
    optimizer.update(gradients, optimizer.init(params), params)


def of_pairs(_):
    params = optax.LookaheadParams.init_synced({"kernel": W})
    in_rotated = in_rotated_basis(optax.lookahead(optax.sgd(0.1), 5, 0.5), OUTPUT)
    in_rotated.update({"kernel": W}, in_rotated.init(params), params)


def of_examples(_):
    gradients = {"kernel": jnp.ones((3, 4, 8))}  # of three examples
    private = in_rotated_basis(contrib.differentially_private_aggregate(1.0, 1.0, 0), OUTPUT)
    private.update(gradients, private.init(gradients))


TREES = [
    (lambda _, make, tree: make(tree), [  # parameters would share a basis
        (make, tree, words)
        for tree, words in (({"params": {"w": W}, "w": W}, "'w'"), ({"a": {"b": W}, "a/b": W}, "'a/b'"),
                            ({"a_0": {"w": W}, "a": [{"w": W}]}, "'a_0/w'"))
        for make in (rotate(OUTPUT).init, orthoadam(0.1, rotation=HAAR).init, lambda tree: describe(HAAR, tree))],
     ValueError),
    (lambda _, tree: orthoadam(0.1).init(shapes_of(tree)), [
        (tree, ("not certain of d_model", "Rotation(axes=")) for tree in adopters.REFUSED.values()]),
    (lambda _, part: part.init(NANODO), [(part, ("masked part", "axes=512")) for part in (
        optax.partition({"ours": orthoadam(0.1), "theirs": optax.sgd(0.1)}, OURS),
        optax.masked(orthoadam(0.1), {path: label == "ours" for path, label in OURS.items()}))]),
    (lambda _: orthoadam(1e-3, rotation=HAAR).init({"head": {"kernel": jnp.zeros((4, 64))}}), "head/kernel",
     ValueError),  # whose basis is far larger
    (lambda _: update(orthoadam(0.1, rotation=OUTPUT), {"layers/kernel": jnp.ones((3, 2, 4, 8)), "other": W[:, :1]},
                      {"layers/kernel": jnp.ones((2, 4, 8)), "other": W}), ("layers/kernel", "(3, 2, 4, 8)"),
     ValueError),
    (of_pairs, ("'kernel' of shape (4, 8)", "fast/kernel"), ValueError),
    (of_examples, "(4, 8) against shape (3, 4, 8)", ValueError),
]  # fmt: skip
MESH = jax.make_mesh((2, 4), ("data", "fsdp"), devices=jax.devices()[:8])
SHAPES = shapes_of({"w": (6, 8), "b": (8,)})
AT = dict.fromkeys(SHAPES, NamedSharding(MESH, PartitionSpec("fsdp")))
ELSEWHERE = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())


def by_layout(_):
    layout = rotate(Rotation(layout=optim.layout_of(AT), axes="output"))
    jax.eval_shape(layout.update, SHAPES, layout.init(SHAPES))


def make(config):
    return make_optimizer(config, schedule=learning_rate_schedule(config, 200))


LAYOUTS = [
    (lambda _: optim.zero1(OUTPUT, SHAPES, AT | {"w": "data"}), "w: its sharding", ValueError),
    (lambda _: optim.zero1(OUTPUT, SHAPES, AT, axis="dat"), "axis='dat'", ValueError),
    (lambda _: optim.state_shardings(orthoadam(0.1, rotation=OUTPUT), SHAPES, AT | {"b": ELSEWHERE}), "2 meshes",
     ValueError),
    (by_layout, "w: (6, 8)", ValueError),
]  # fmt: skip
OPTIMIZERS = [
    # Of names that Muon does not know every parameter would silently get Adam.
    (lambda _, path: make(OptimConfig(optimizer="muon")).init({path: SQUARE}), [
        (path, f"'{path}'") for path in ("mlp/w", "layers/norm/weight")]),
    (lambda _, name: make(OptimConfig(optimizer=name, warmup_steps=0)), [(name, name) for name in (
        "no.such.module:adam", "optax:no_such_function", "os:getcwd", "os:sep", "builtins:repr", "optax:adam")]),
]  # fmt: skip


test_refused = refused(*ROTATIONS, *TREES, *LAYOUTS, *OPTIMIZERS)
