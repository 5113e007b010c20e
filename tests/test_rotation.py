"""Bases and the axes that they rotate: rules, uniqueness, state, refusals and layout."""

import collections
import functools
import math
import zlib
from typing import Any

import adopters
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from orthojax import optim
from orthojax.config import ModelConfig, RotationConfig
from orthojax.errors import UserError
from orthojax.model import Transformer
from orthojax.ops import orthogonal
from orthojax.optim import RotatedAxes, Rotation, describe, generic_axes, in_rotated_basis, orthoadam, rotate
from orthojax.optim.rotation import basis_constants, plan_tree
from orthojax.train.optimizer import make_rotation

OUTPUT = Rotation(axes="output")
KINDS = ("haar", "hadamard", "dct", "signed_permutation")


def rotated(rotation, params, back=False):
    transform = (optim.unrotate if back else rotate)(rotation)
    return transform.update(params, transform.init(params))[0]


def eyes(shapes):
    return {
        path: jnp.asarray(np.tile(np.eye(shape[-1], dtype=np.float32), (*shape[:-2], 1, 1)))
        for path, shape in shapes.items()
    }


def bases(rotation, shapes):
    """Returns Q^T of every layer of every parameter, by path and layer."""
    out = rotated(rotation, eyes(shapes))
    return {(path, i): q for path, x in out.items() for i, q in enumerate(np.reshape(x, (-1, *x.shape[-2:])))}


SHAPES = {
    "q/kernel": (3, 8, 8), "k/kernel": (3, 8, 8), "up_0/kernel": (8, 8), "up_1/kernel": (8, 8), "up/kernel": (8, 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_has_its_own_basis(kind):
    found = bases(Rotation(kind, axes="output"), SHAPES)
    assert len(found) == 9
    assert len({np.round(q, 4).tobytes() for q in found.values()}) == 9
    for q in found.values():
        np.testing.assert_allclose(q @ q.T, np.eye(8), atol=1e-6)
    again, other = bases(Rotation(kind, axes="output"), SHAPES), bases(Rotation(kind, seed=1, axes="output"), SHAPES)
    for key, q in found.items():
        np.testing.assert_array_equal(q, again[key])
        assert np.abs(q - other[key]).max() > 0.1


PATHS = ["Dense_0", "Dense_1", "Dense_2", "layers_0/q", "layers_1/q", "layers_1/k", "stack/q", "stack/k"]
SHAPE = st.tuples(st.lists(st.integers(1, 3), max_size=2), st.sampled_from([64, 96, 128]))


@given(st.fixed_dictionaries(dict.fromkeys(PATHS, SHAPE)))
def test_no_two_layers_have_signs_in_common(shapes):
    """Covers unrolled layers, scanned stacks and stacks in unrolled layers, of equal and of different widths."""
    tree = {f"{path}/kernel": jax.ShapeDtypeStruct((*stack, 1, n), jnp.float32) for path, (stack, n) in shapes.items()}
    of_window = {}
    for plan in plan_tree(OUTPUT, tree).parameters:
        ((signs,),) = basis_constants(OUTPUT, plan, (), transpose=False)
        assert signs.shape == (*plan.shape[:-2], plan.shape[-1])
        for layer, row in enumerate(signs.reshape(-1, signs.shape[-1])):
            for start in range(len(row) - 47):
                owner = of_window.setdefault(row[start : start + 48].tobytes(), (plan.path, layer))
                assert owner == (plan.path, layer)


def test_equal_names_share_no_basis_if_lengths_differ_and_may_in_a_wider_scope():
    w = jnp.ones((4, 8))
    rotate(OUTPUT).init({"a_0": {"w": w}, "a": [{"w": jnp.ones((4, 16))}]})
    rotate(Rotation(scope="parameter", axes="output")).init({"a_0": {"w": w}, "a": [{"w": w}]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scope", "distinct"), [("parameter", 4), ("tree", 1)])
def test_wider_scopes_share_the_basis(kind, scope, distinct):
    found = bases(Rotation(kind, scope=scope, axes="output"), SHAPES)
    assert len({np.round(q, 4).tobytes() for q in found.values()}) == distinct
    assert len({np.round(found["q/kernel", i], 4).tobytes() for i in range(3)}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_unrotate_inverts_rotate_on_every_choice_of_axes(kind, x64):
    x = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 4, 3)))}
    choices = [
        RotatedAxes((3,)),
        RotatedAxes((1, 3), stacked=(0,)),
        RotatedAxes(((2, 3),), stacked=(0,)),
        RotatedAxes(((1, 3), 2), stacked=(0,)),  # not adjacent
        RotatedAxes(((3, 1),), stacked=(2, 0)),
    ]
    for choice in choices:
        rotation = Rotation(kind, axes=lambda path, leaf, choice=choice: choice)
        there, back = jax.jit(lambda x, r=rotation: ((y := rotated(r, x)), rotated(r, y, back=True)))(x)
        assert np.abs(there["w"] - x["w"]).max() > 0.1
        np.testing.assert_allclose(np.linalg.norm(there["w"]), np.linalg.norm(x["w"]), rtol=1e-12)
        np.testing.assert_allclose(back["w"], x["w"], atol=1e-12)


def test_groups_are_flattened_and_stacked_axes_counted(x64):
    """Expects Q of layer l = i_stacked0 * size_stacked1 + i_stacked1 on the row-major flat group."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    rotation = Rotation("hadamard", lambda path, leaf: RotatedAxes(((3, 1),), stacked=(2, 0)))
    got = rotated(rotation, {"w": jnp.asarray(x)})["w"]
    transform = np.asarray(orthogonal.fixed_transform(jnp.eye(15, dtype=jnp.float64), 0))
    signs = orthogonal.hash_signs(zlib.crc32(b"w/*:0:15:2"), range(8), 15)
    for i in range(4):
        for j in range(2):
            flat = x[j, :, i, :].T.reshape(15)
            want = (transform @ (signs[i * 2 + j] * flat)).reshape(5, 3).T
            np.testing.assert_allclose(got[j, :, i, :], want, atol=1e-12)


TABLES = """
    wte/embedding Embed_0/embedding layers/0/embedding transformer/~/embed/embeddings tok_emb/weight
    model/embed_tokens/weight word_embeddings/weight pos_emb/w embed/table wpe posemb_3 embedder/input_embedding gpt_wte
""".split()
KERNELS = """
    text_embedder/layers/mlp/kernel embed/proj/weight patch_embed/kernel embedding_norm/dense/w unembed/weight
    rotary_embedder/linear/w lm_head/weight normalizer/w w_q lora_b norm_proj/weight layernorm_dense/weight
""".split()
VECTORS = """
    layers/norm/scale ln/gamma mlp/bias attention/sink attention/sink_logits block/ls/gain layers/norm1/weight
    input_layernorm/weight attn_norm/w RMSNorm_0/weight cls_token embed/bias norm_final/w ln_attn/weight mlp_norm/weight
""".split()


@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, kind) for kind, paths in (("table", TABLES), ("kernel", KERNELS), ("vector", VECTORS)) for path in paths],
)
def test_last_names_tell_tables_kernels_and_vectors(path, kind):
    wanted = {"table": RotatedAxes((-1,)), "kernel": RotatedAxes((-1,)), "vector": None}
    out_in = wanted | {"kernel": RotatedAxes((-2,))}
    leaf = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert generic_axes(path, leaf) == wanted[kind]
    assert generic_axes(path, leaf, kernel_layout="out_in") == out_in[kind]
    assert generic_axes(path, leaf, "input") == ({"kernel": RotatedAxes((-2,))} | {"table": wanted["table"]}).get(kind)
    rows = {path: mark for path, _, _, mark in describe(OUTPUT, {path: leaf}).rows}
    assert (rows[path] == "embedding") == (kind == "table")


@pytest.mark.parametrize("kernel_layout", ["in_out", "out_in"])
def test_every_kernel_axis_of_a_length_is_rotated(kernel_layout):
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {
        "wte": s(512, 32), "head": {"kernel": s(32, 50_000)}, "up": {"kernel": s(32, 96)},
        "down": {"kernel": s(96, 32)}, "scanned": {"kernel": s(3, 32, 96)}, "square": {"kernel": s(32, 32)},
        "query": {"kernel": s(32, 4, 8)}, "out": {"kernel": s(4, 8, 32)}, "scanned_query": {"kernel": s(3, 32, 4, 8)},
        "fused": {"kernel": s(32, 3, 4, 8)}, "one_head": {"kernel": s(32, 1, 32)}, "experts": {"kernel": s(32, 32, 96)},
        "conv": {"kernel": s(5, 5, 3, 32)}, "patches": {"weight": s(32, 3, 8, 8)},
    }  # fmt: skip
    found = describe(Rotation(axes=np.int64(32), kernel_layout=kernel_layout), params)
    assert found == {
        "wte": "axes (1,): hadamard 32", "head/kernel": "axes (0,): hadamard 32",
        "up/kernel": "axes (0,): hadamard 32", "down/kernel": "axes (1,): hadamard 32",
        "scanned/kernel": "axes (1,): hadamard 32, 3 layers",
        "square/kernel": "axes (0,): hadamard 32; axes (1,): hadamard 32", "query/kernel": "axes (0,): hadamard 32",
        "scanned_query/kernel": "axes (1,): hadamard 32, 3 layers", "out/kernel": "axes (2,): hadamard 32",
        "conv/kernel": "axes (3,): hadamard 32, 25 layers", "fused/kernel": "axes (0,): hadamard 32",
        "one_head/kernel": "axes (0,): hadamard 32; axes (2,): hadamard 32",
        "patches/weight": "axes (0,): hadamard 32", "experts/kernel": "axes (1,): hadamard 32, 32 layers",
    }  # fmt: skip
    guessed = {path for path, _, _, mark in found.rows if mark == "unsure"}
    kernels = ("scanned", "square", "conv", "fused", "one_head", "experts")
    assert guessed == {"patches/weight", *(f"{name}/kernel" for name in kernels)}


READS, WRITES, EITHER = RotatedAxes((-2,)), RotatedAxes((-1,)), RotatedAxes((-2, -1))
NAMES = {
    READS: "layers_0/attn/query layers_0/attn/q_proj layers_0/attn/to_v h/mlp/gate_proj h/mlp/c_fc h/mlp/wi b/w_k",
    WRITES: "layers_0/attn/out layers_0/attn/o_proj layers_0/attn/c_proj h/mlp/down_proj h/mlp/fc_out b/w_o b/out_1",
    EITHER: "mlp/fc1 mlp/dense multi_head_attention/linear",
}


@pytest.mark.parametrize(("name", "axes"), [(name, axes) for axes, names in NAMES.items() for name in names.split()])
def test_square_kernels_turn_where_they_face_the_stream(name, axes):
    leaf = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    swapped = {READS: WRITES, WRITES: READS, EITHER: EITHER}[axes]
    assert generic_axes(f"{name}/kernel", leaf, 32) == axes
    assert generic_axes(f"{name}/kernel", leaf, 32, kernel_layout="out_in") == swapped
    # equinox and PyTorch call it weight and have it the other way round: unless the layout is named both are rotated.
    assert generic_axes(f"{name}/weight", leaf, 32) == EITHER
    assert generic_axes(f"{name}/weight", leaf, 32, kernel_layout="out_in") == swapped


@pytest.mark.parametrize("changes", [
    {},
    {"scan_layers": False},
    {"mlp": "swiglu", "d_mlp": 32, "gated_attention": True},
    {"gated_attention": "elementwise"},
    {"embedding_projection": True, "tie_embeddings": False},
])  # fmt: skip
def test_the_default_finds_the_d_model_axes_of_a_run(changes):
    """`Rotation()` and `Rotation(axes=d_model)` of one's own, and the default of `orthojax train`."""
    config = ModelConfig(d_model=32, num_layers=2, num_heads=4, vocab_size=64, max_length=8, **changes)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 8), int))["params"]
    measured = make_rotation(RotationConfig(seed=0))
    given, found, ours = (
        {path: what for path, what in describe(rotation, params).items() if not what.startswith("left alone")}
        for rotation in (Rotation(axes=32), Rotation(), measured)
    )
    assert given == found == ours
    assert any(leaf.shape[-2:] == (32, 32) for leaf in jax.tree.leaves(params))


def shapes_of(tree):
    return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in tree.items()}


@pytest.mark.parametrize("name", adopters.DECIDED)
def test_the_width_of_well_known_trees_is_found(name):
    d_model, shapes = adopters.DECIDED[name]
    stacked = 1 if name.startswith("maxtext") else None
    plan = plan_tree(Rotation(stacked=stacked), shapes_of(shapes))
    assert plan == plan_tree(Rotation(axes=d_model, stacked=stacked), shapes_of(shapes))
    for leaf in plan.parameters:
        assert {group.size for group in leaf.groups} <= {d_model}
        # No kernel or table that faces the stream is forgotten, and no long axis is taken for layers.
        is_vector = len(leaf.shape) < 2 or (
            leaf.left_alone[:1] and leaf.left_alone[0].startswith(("named", "'", "a vector"))
        )
        assert leaf.groups or d_model not in leaf.shape or is_vector, leaf
        assert all(len(group.layers) <= 256 for group in leaf.groups)  # experts


def test_programs_hold_no_more_signs_than_the_longest_edge_has():
    """Of 58 layers of 256 experts a kernel has 106 million signs, which are computed where they are used."""
    shapes = {"embedding": (129280, 7168), "layers/we_down": (58, 256, 2048, 7168), "layers/wo": (61, 16384, 7168)}
    transform, shapes = rotate(Rotation(axes=7168)), shapes_of(shapes)
    program = jax.jit(transform.update).lower(shapes, jax.eval_shape(transform.init, shapes)).as_text()
    assert len(program) < 300_000
    small = {"embedding": jnp.ones((9, 8)), "layers": {"kernel": jnp.ones((3, 2, 8, 4))}}  # 48 signs, an edge of 8
    plan = plan_tree(Rotation(), small).parameters[1]
    ((signs,),) = basis_constants(Rotation(), plan, (), transpose=False)
    assert isinstance(signs, jax.Array)
    (group,) = plan.groups
    key = zlib.crc32(group.name.encode())
    np.testing.assert_array_equal(signs, orthogonal.hash_signs(key, group.layers, 8).reshape(3, 2, 8))


OF_LAYERS = {  # path: a shape with layers on axis 1 and d_model 64, its rotated axis; stacked axes as guessed, as named
    "wi/kernel": ((64, 4, 512), 0, (), (1,)),
    "wo/kernel": ((512, 4, 64), 2, (), (1,)),  # 512 are no layers
    "query/kernel": ((64, 4, 8, 32), 0, (), (1,)),
    "out/kernel": ((8, 4, 32, 64), 3, (0, 1), (1,)),
    "experts/wo/kernel": ((6, 4, 512, 64), 3, (0, 1), (0, 1)),
    "norm/scale": ((64, 4), None, (), ()),
    "table/embedding": ((512, 64), 1, (), ()),
}


@pytest.mark.parametrize("stacked", [None, 1])
def test_the_axis_of_layers_may_be_named(stacked):
    shapes = shapes_of({path: shape for path, (shape, *_) in OF_LAYERS.items()})
    for plan in plan_tree(Rotation(axes=64, stacked=stacked), shapes).parameters:
        shape, axis, guessed, named = OF_LAYERS[plan.path]
        assert plan.stacked == (named if stacked else guessed), plan
        assert [group.axes for group in plan.groups] == ([] if axis is None else [(axis,)])
        # Each layer has signs of its own, and no program holds more of them.
        layers = math.prod(shape[stack] for stack in plan.stacked)
        assert all(len(group.layers) == layers for group in plan.groups)


BESIDE = {  # names and shapes -> rotated parameters
    "low-rank factors": ({"q/a": (64, 8), "q/b": (8, 64), "up/w": (64, 256), "up/b": (256,)}, {"q/a", "q/b", "up/w"}),
    "stacked biases": ({"up/w": (4, 64, 256), "up/b": (4, 256), "down/b": (4, 64)}, {"up/w"}),
    "kernels of norms": (
        {"norm/kernel": (4, 64), "ln_1/kernel": (4, 64), "norm_proj/kernel": (64, 8)},
        {"norm_proj/kernel"},
    ),
    "a Linear called embed": ({"obs_embed/weight": (64, 17), "fc/weight": (64, 64)}, {"obs_embed/weight", "fc/weight"}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_names_beside_each_other_say_what_they_are(name):
    tree, rotated = BESIDE[name]
    plan = plan_tree(Rotation(axes=64), shapes_of(tree))
    assert {leaf.path for leaf in plan.parameters if leaf.groups} == rotated
    assert all(leaf.shape[axis] == 64 for leaf in plan.parameters for group in leaf.groups for axis in group.axes)


# A block whose vectors have names that say nothing: RWKV's, a norm's scale of penzai, DiT's output, nanochat's values.
BLOCK = {
    "att/receptance/weight": (64, 64), "att/key/weight": (64, 64), "att/output/weight": (64, 64),
    "att/time_decay": (64,), "att/time_mix_k": (1, 1, 64), "norm/scale/weights": (64,), "attn/proj/weight": (64, 64),
    "ffn/up/weight": (256, 64), "q/lora_a": (64, 8), "q/lora_b": (8, 96),
}  # fmt: skip
OUTSIDE = {"emb/weight": (300, 64), "head/weight": (300, 64), "value_embeds/0/weight": (300, 64)}


def test_stacked_and_unrolled_layers_are_treated_alike():
    unrolled = {f"blocks_{i}/{path}": shape for i in range(3) for path, shape in BLOCK.items()} | OUTSIDE
    stacked = {f"blocks/{path}": (3, *shape) for path, shape in BLOCK.items()} | OUTSIDE
    out_in = Rotation(kernel_layout="out_in")
    one, other = plan_tree(out_in, shapes_of(unrolled)), plan_tree(out_in, shapes_of(stacked))
    assert one.name == other.name
    found = {leaf.path: leaf for leaf in other.parameters}
    vectors = ("att/time_decay", "att/time_mix_k", "norm/scale/weights")
    assert all(found[f"blocks/{path}"].left_alone and not found[f"blocks/{path}"].groups for path in vectors)
    assert found["value_embeds/0/weight"].left_alone == ("named 'value_embeds'",)
    axes = {path: found[f"blocks/{path}"].groups[0].axes for path in BLOCK if 64 in BLOCK[path] and path not in vectors}
    assert axes == {path: (1 if "out" in path or "proj" in path or "lora" in path else 2,) for path in axes}
    with pytest.warns(UserWarning, match=r"of \d+ of 13 parameters is a guess \(blocks/"):
        orthoadam(0.1, rotation=out_in).init(shapes_of(stacked))


def test_heads_and_routers_are_no_layers():
    """Arrays [n, d] are kernels beside attention kernels of n heads, and where d_model leads them all."""
    for n, kernels in ((4, {"q": (4, 64, 16), "kv": (2, 64, 16)}), (64, {"q": (64, 4, 16), "o": (64, 4, 16)})):
        shapes = {f"attn/{path}": shape for path, shape in kernels.items()} | {
            "attn/custom": (n, 64),
            "head": (64, 300),
        }
        plans = {leaf.path: leaf for leaf in plan_tree(Rotation(axes=64), shapes_of(shapes)).parameters}
        assert plans["head"].groups or n == 64
        assert plans["attn/custom"].groups or n == 64
    moe = {"moe/up": (8, 64, 96), "moe/down": (8, 96, 64), "moe/router": (8, 64), "moe/bias_of": (8, 96)}
    plans = {leaf.path: leaf for leaf in plan_tree(Rotation(axes=64), shapes_of(moe)).parameters}
    assert plans["moe/router"].groups
    assert not plans["moe/bias_of"].groups


def test_stacked_vectors_confirm_stacked_kernels():
    stack = {"layers/up/kernel": (3, 64, 256), "layers/norm/scale": (3, 64), "wte": (300, 64)}
    marks = lambda rotation, shapes: {p: mark for p, _, _, mark in describe(rotation, shapes_of(shapes)).rows}  # noqa: E731
    assert marks(Rotation(), stack)["layers/up/kernel"] == ""
    del stack["layers/norm/scale"]
    assert marks(Rotation(), stack)["layers/up/kernel"] == "unsure"
    assert marks(Rotation(stacked=0), stack)["layers/up/kernel"] == ""


def test_describe_says_what_forfeits_the_cure():
    kernel = {"mlp/up/kernel": (64, 256), "wte": (300, 64)}
    text = lambda more: str(describe(Rotation(), shapes_of(kernel | more)))  # noqa: E731
    for name in ("ln_1/scale", "ln_1/weight", "mlp/down/bias", "norm/scale/weights"):
        assert f"outliers may return (Table 5 of arXiv 2410.17174): {name}" in text({name: (64,)})
    for more in ({}, {"ln_1/scale": ()}, {"q_norm/scale": (16,)}, {"sink": (4,)}, {"time_decay": (64,)}):
        assert "outliers" not in text(more)


def test_tables_and_layouts_may_be_named():
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {"vocabulary": {"w": s(64, 32)}, "wte": s(64, 32), "mlp": {"w": s(64, 32)}}
    found = describe(Rotation(kernel_layout="out_in", embeddings="^vocab", axes="output"), params)
    assert {path: (what[:10], mark) for path, _, what, mark in found.rows} == {
        "vocabulary/w": ("axes (1,):", "embedding"), "wte": ("axes (0,):", "unsure"), "mlp/w": ("axes (0,):", ""),
    }  # fmt: skip


def test_trees_without_tables_or_kernels_warn_once(recwarn):
    kernel, table = {"mlp": {"kernel": jnp.ones((4, 8))}}, {"wte": jnp.ones((8, 6))}
    for rotation, params in (
        (Rotation(embeddings="", axes="output"), kernel),
        (Rotation("identity"), kernel),
        (OUTPUT, {"bias": jnp.ones(8)}),
        (OUTPUT, kernel | table),
        (Rotation(axes=6), table),
    ):
        orthoadam(0.1, rotation=rotation).init(params)
    assert not recwarn
    for rotation, params, name in (
        (OUTPUT, kernel, "no embedding table"),
        (Rotation(axes=6), kernel | table, "no kernel"),
        (Rotation(axes=4), kernel | table, "no embedding table"),
        (Rotation("haar", axes=5000, embeddings=""), {"long": {"kernel": jnp.ones((5000, 2))}}, "long/kernel"),
    ):
        with pytest.warns(UserWarning, match=name) as seen:
            orthoadam(0.1, rotation=rotation).init(params)
        assert len(seen) == 1


def test_describe_says_what_is_left_alone_and_why():
    s = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    params = {
        "embed": {"table": s(50257, 768)}, "head": {"kernel": s(768, 50257)}, "gain": s(), "none": {"kernel": s(0, 4)},
        "layers": {"mlp": {"kernel": s(12, 768, 3072)}, "norm": {"scale": s(12, 768)}}, "one": {"kernel": s(8, 1)},
        "steps": {"kernel": s(4, 4, dtype=jnp.int32)}, "odd": {"kernel": s(262, 131)}, "vectors": s(1, 1, 32),
    }  # fmt: skip
    found = describe(Rotation(axes="both"), params)
    assert found == {
        "embed/table": "axes (1,): hadamard 768 = 32 x 24",
        "gain": "left alone: 0 axes, fewer than 2",
        "head/kernel": "axes (0,): hadamard 768 = 32 x 24",
        "layers/mlp/kernel": "axes (1,): hadamard 768 = 32 x 24, 12 layers; "
        "axes (2,): hadamard 3072 = 64 x 48, 12 layers",
        "layers/norm/scale": "left alone: named 'scale'",
        "none/kernel": "left alone: empty",
        "odd/kernel": "axes (0,): hadamard 262 (cosine); axes (1,): hadamard 131 (cosine)",
        "one/kernel": "axes (0,): hadamard 8",
        "steps/kernel": "left alone: dtype int32",
        "vectors": "left alone: a vector by its shape",
    }
    marks = {path: mark for path, _, _, mark in found.rows}
    assert (marks["embed/table"], marks["vectors"], marks["odd/kernel"]) == ("embedding", "unsure", "")
    assert str(found).splitlines()[0].split() == ["parameter", "shape", "rotation"]
    refused = describe(OUTPUT, {"head": params["head"]})
    assert refused == {"head/kernel": "left alone: no output axis of length 2 to 16384"}
    assert orthoadam(0.1).init({"bias": jnp.ones(3)})  # as nothing would be rotated, the width is not asked for
    assert describe(Rotation("haar", "both"), {"w": jnp.zeros((768, 3072))})  # 4.25 times its size
    haar = Rotation("haar", lambda path, leaf: RotatedAxes((0, 1)))
    wide = describe(haar, {"wide": s(4097, 1024)})
    assert wide == {"wide": "axes (1,): haar 1024; left alone: axes (0,): length 4097 is over 4096"}


PLANNED = {"wte": jnp.ones((16, 8)), "up": {"kernel": jnp.ones((8, 32))}, "down": {"kernel": jnp.ones((32, 8))}}
OTHER_PLANS = {
    "kind": Rotation("haar"), "axes": Rotation(axes=32), "output": Rotation(axes="output"), "seed": Rotation(seed=1),
    "scope": Rotation(scope="parameter"),
    "layout": Rotation(axes="output", kernel_layout="out_in"),
    "rule": Rotation(axes=lambda path, leaf: RotatedAxes((0,)) if "up" in path else None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Rotation.axes=32")
@pytest.mark.parametrize("other", OTHER_PLANS)
@pytest.mark.parametrize("make", [rotate, lambda r: in_rotated_basis(optax.scale_by_adam(), r)])
def test_states_of_another_plan_are_refused_with_both_named(make, other):
    mine, theirs = make(Rotation()), make(OTHER_PLANS[other])
    held, name = (min(transform.init(PLANNED).plan.keys() - {"checksum"}) for transform in (theirs, mine))
    for update in (mine.update, jax.jit(mine.update)):
        with pytest.raises(UserError, match=f"is of {held}; .* make {name}"):
            update(PLANNED, theirs.init(PLANNED))
    assert jax.tree.structure(mine.init(PLANNED)) != jax.tree.structure(theirs.init(PLANNED))
    # Of d_model given and found the plan is one; and of another tree it is not.
    given = make(Rotation(axes=8))
    assert given.update(PLANNED, mine.init(PLANNED))
    with pytest.raises(UserError, match="make hadamard_axes_8_seed_0_layer_"):
        given.update(PLANNED | {"head": {"kernel": jnp.ones((8, 16))}}, mine.init(PLANNED))


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_states_without_a_plan_are_refused_and_restored_leaves_are_nan(kind):
    transform = in_rotated_basis(optax.scale_by_adam(), Rotation(kind))
    state = transform.init(PLANNED)
    earlier = optim.RotatedState(state.basis, state.inner)
    for held in (earlier, optax.scale_by_adam().init(PLANNED)):
        with pytest.raises(UserError, match="names no bases of a rotation"):
            transform.update(PLANNED, held)
    leaf_by_leaf = state._replace(plan=jax.tree.map(lambda checksum: checksum + 1, state.plan))
    with pytest.raises(UserError, match="another plan, by its checksum"):
        transform.update(PLANNED, leaf_by_leaf)
    jitted = jax.jit(transform.update)
    updates, _ = jitted(PLANNED, leaf_by_leaf)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
    fresh = state if kind == "haar" else jax.tree.map(jnp.zeros_like, state)  # as of jax.eval_shape
    eager, *others = (update(PLANNED, held)[0] for held in (state, fresh) for update in (transform.update, jitted))
    for updates in others:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), eager, updates)


def test_haar_bases_are_drawn_late_and_jit(x64):
    """Shapes cost no QR (of 64 times 4,096 rows it would take minutes), and a program holds no matrix."""
    optimizer = orthoadam(1e-3, rotation=Rotation("haar", axes="output"))
    large = jax.eval_shape(optimizer.init, {"w": jax.ShapeDtypeStruct((64, 4096, 4096), jnp.float32)})
    assert large[0].basis["w"]["basis_0"].shape == (64, 4096, 4096)
    params = {"w": jnp.ones((2, 64, 64), jnp.float32)}
    assert len(jax.jit(optimizer.init).lower(params).as_text()) < 20_000
    want = orthogonal.haar((0, zlib.crc32(b"w/*:0:64:1"), 1), 64).astype(np.float32)
    replicated = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec())
    for init in (optimizer.init, jax.jit(optimizer.init), jax.jit(optimizer.init, out_shardings=replicated)):
        np.testing.assert_array_equal(init(params)[0].basis["w"]["basis_0"][1], want)


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_boxes_and_collections_do_not_change_the_basis(kind):
    """linen boxes and nnx variables show `.value` at init and hide it at update, and `params/` may be there or not."""
    nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    transform = rotate(Rotation(kind, axes="output"))
    plain = {"mlp": {"kernel": w}}
    want, _ = transform.update(plain, transform.init(plain))
    boxed = {"params": {"mlp": {"kernel": nn.Partitioned(w, (None, None))}}}
    state = transform.init(boxed)
    assert jax.tree.structure(state) == jax.tree.structure(transform.init(plain))
    for tree in (boxed, plain, {"params": plain}, nnx.State({"mlp": {"kernel": nnx.Param(w)}})):
        got, _ = transform.update(tree, state)
        np.testing.assert_array_equal(jax.tree.leaves(got)[0], want["mlp"]["kernel"])
    # A parameter that is called "value" is no box.
    assert list(describe(Rotation(kind, axes="output"), {"attention": {"value": w}})) == ["attention/value"]


def test_attributes_called_value_are_no_boxes():
    """A module with the attributes query, key and value, as an equinox one, against a box, whose only one is value."""
    fields = collections.namedtuple("Projections", "query key value")
    tree = {"embedding": jnp.ones((16, 8)), "attention": fields(*jnp.ones((3, 8, 8)))}
    assert set(describe(Rotation(), tree)) == {"embedding", *(f"attention/{name}" for name in fields._fields)}
    assert describe(Rotation(), tree)["attention/value"] == "axes (0,): hadamard 8"
    frozen = tree | {"attention": fields(None, None, jnp.ones((8, 8)))}
    assert "attention/value" in describe(Rotation(), frozen)
    alone = collections.namedtuple("Box", "value")(jnp.ones((8, 8)))
    assert "q_proj" in describe(Rotation(), tree | {"q_proj": alone})


@pytest.mark.parametrize("kind", KINDS)
def test_init_on_shapes_is_that_of_adamw(kind):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PLANNED)
    optimizer = orthoadam(0.1, rotation=Rotation(kind))
    found: Any = optimizer.init(shapes)
    jax.tree.map(np.testing.assert_array_equal, found[0].inner, optax.adamw(0.1).init(shapes)[0])
    assert (found[0].basis == ()) == (kind != "haar")
    jax.tree.map(np.testing.assert_array_equal, found, optimizer.init(PLANNED))


def test_parts_of_updates_and_frozen_parameters_find_the_plan():
    """Of a tree that Rotation() decides; a frozen tower beside it would leave the whole in doubt."""
    tower = {"embedding": jnp.ones((50, 6)), "q": {"kernel": jnp.ones((6, 6))}}
    transform, text = in_rotated_basis(optax.scale_by_adam()), {"text": PLANNED, "vision": None}
    state = transform.init(text)
    want, _ = transform.update(text, state)
    updates, _ = transform.update(text, state, text | {"vision": tower})
    jax.tree.map(np.testing.assert_array_equal, updates, want)
    # Without its table, or its gradient, what is left would be in doubt.
    turned, _ = rotate().update({"up": PLANNED["up"], "wte": None}, rotate().init(PLANNED), PLANNED)
    whole, _ = rotate().update(PLANNED, rotate().init(PLANNED))
    np.testing.assert_array_equal(turned["up"]["kernel"], whole["up"]["kernel"])


def test_files_of_another_plan_are_refused(tmp_path):
    serialization, eqx = pytest.importorskip("flax.serialization"), pytest.importorskip("equinox")
    mine, theirs = (orthoadam(0.1, rotation=Rotation(seed=seed)) for seed in (0, 1))
    state, other = mine.init(PLANNED), theirs.init(PLANNED)
    assert serialization.from_bytes(state, serialization.to_bytes(state))
    with pytest.raises(ValueError, match="hadamard_axes_8_seed_0"):
        serialization.from_bytes(state, serialization.to_bytes(other))
    eqx.tree_serialise_leaves(tmp_path / "leaves", other)
    with pytest.raises(UserError, match="another plan"):
        mine.update(PLANNED, eqx.tree_deserialise_leaves(tmp_path / "leaves", state), PLANNED)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", other)
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match=r"(?s)axes_8_seed_0.*axes_8_seed_1"):
            checkpointer.restore(tmp_path / "orbax", state)
    partial = ocp.args.PyTreeRestore(state, partial_restore=True)  # which keeps our name, but not our checksum
    with (
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        pytest.raises(UserError, match="another plan"),
    ):
        mine.update(PLANNED, checkpointer.restore(tmp_path / "orbax", partial), PLANNED)


def test_what_is_no_array_is_left_alone():
    tree = {"kernel": jnp.ones((4, 8)), "activation": jax.nn.relu, "name": "dense"}
    assert describe(OUTPUT, tree)["activation"] == "left alone: not an array"
    params = {"kernel": tree["kernel"], "activation": None, "name": None}
    optimizer = orthoadam(0.1, rotation=OUTPUT)
    updates, _ = optimizer.update(params, optimizer.init(params), tree)  # a whole equinox model, say
    want, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], want["kernel"])
