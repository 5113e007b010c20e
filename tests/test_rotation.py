"""Which basis on which axes: rules, uniqueness, state, refusals and layout."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from orthojax.config import ModelConfig, RotationConfig
from orthojax.model import Transformer
from orthojax.ops import orthogonal
from orthojax.optim import (
    RotatedAxes,
    Rotation,
    RotationState,
    describe,
    generic_axes,
    orthoadam,
    rotate,
    unrotate,
)
from orthojax.optim.rotation import basis_constants, plan_tree
from orthojax.train.optimizer import make_rotation

KINDS = ("haar", "hadamard", "dct", "signed_permutation")


def rotated(rotation, params, back=False):
    transform = (unrotate if back else rotate)(rotation)
    return transform.update(params, transform.init(params))[0]


def eyes(shapes):
    return {
        path: jnp.asarray(np.tile(np.eye(shape[-1], dtype=np.float32), (*shape[:-2], 1, 1)))
        for path, shape in shapes.items()
    }


def bases(rotation, shapes):
    """Q^T of every layer of every parameter, by path and layer."""
    out = rotated(rotation, eyes(shapes))
    return {(path, i): q for path, x in out.items() for i, q in enumerate(np.reshape(x, (-1, *x.shape[-2:])))}


SHAPES = {
    "q/kernel": (3, 8, 8),
    "k/kernel": (3, 8, 8),
    "up_0/kernel": (8, 8),
    "up_1/kernel": (8, 8),
    "up/kernel": (8, 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_every_parameter_has_its_own_basis(kind):
    found = bases(Rotation(kind), SHAPES)
    assert len(found) == 9
    assert len({np.round(q, 4).tobytes() for q in found.values()}) == 9
    for q in found.values():
        np.testing.assert_allclose(q @ q.T, np.eye(8), atol=1e-6)
    again, other = bases(Rotation(kind), SHAPES), bases(Rotation(kind, seed=1), SHAPES)
    for key, q in found.items():
        np.testing.assert_array_equal(q, again[key])
        assert np.abs(q - other[key]).max() > 0.1


PATHS = ["Dense_0", "Dense_1", "Dense_2", "layers_0/q", "layers_1/q", "layers_1/k", "stack/q", "stack/k"]
SHAPE = st.tuples(st.lists(st.integers(1, 3), max_size=2), st.sampled_from([64, 96, 128]))


@given(st.fixed_dictionaries(dict.fromkeys(PATHS, SHAPE)))
def test_no_two_parameters_or_layers_have_signs_in_common(shapes):
    """Of unrolled layers, scanned stacks, stacks in unrolled layers, of equal and of different widths."""
    tree = {f"{path}/kernel": jax.ShapeDtypeStruct((*stack, 1, n), jnp.float32) for path, (stack, n) in shapes.items()}
    of_window = {}
    for leaf, plan in plan_tree(Rotation(), tree):
        ((signs,),) = basis_constants(Rotation(), plan, (), transpose=False)
        assert signs.shape == (*leaf.shape[:-2], leaf.shape[-1])
        for layer, row in enumerate(signs.reshape(-1, signs.shape[-1])):
            for start in range(len(row) - 47):
                owner = of_window.setdefault(row[start : start + 48].tobytes(), (plan.path, layer))
                assert owner == (plan.path, layer)


def test_parameters_that_would_share_a_basis_are_refused():
    w, haar = jnp.ones((4, 8)), Rotation("haar")
    for tree, words in (
        ({"params": {"w": w}, "w": w}, r"\['params'\]\['w'\] and \['w'\] are both the parameter 'w'"),
        ({"a": {"b": w}, "a/b": w}, "both the parameter 'a/b'"),
        ({"a_0": {"w": w}, "a": [{"w": w}]}, "'a_0'.* would share a basis.* numbered; allowed: another name"),
        ({"a_1": {"w": w}, "a": {"w": jnp.ones((2, 4, 8))}}, "would share a basis"),
    ):
        for make in (rotate(Rotation()).init, orthoadam(0.1, rotation=haar).init, lambda t: describe(haar, t)):
            with pytest.raises(ValueError, match=words):
                make(tree)
    # Of other lengths they share nothing, and a wider scope means to share.
    rotate(Rotation()).init({"a_0": {"w": w}, "a": [{"w": jnp.ones((4, 16))}]})
    rotate(Rotation(scope="parameter")).init({"a_0": {"w": w}, "a": [{"w": w}]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scope", "distinct"), [("parameter", 4), ("tree", 1)])
def test_wider_scopes_share_the_basis(kind, scope, distinct):
    found = bases(Rotation(kind, scope=scope), SHAPES)
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
        RotatedAxes((0,), stacked=(3,)),
    ]
    for choice in choices:
        rotation = Rotation(kind, axes=lambda path, leaf, choice=choice: choice)
        there, back = jax.jit(lambda x, r=rotation: ((y := rotated(r, x)), rotated(r, y, back=True)))(x)
        assert np.abs(there["w"] - x["w"]).max() > 0.1
        np.testing.assert_allclose(np.linalg.norm(there["w"]), np.linalg.norm(x["w"]), rtol=1e-12)
        np.testing.assert_allclose(back["w"], x["w"], atol=1e-12)


def test_a_group_is_flattened_and_stacked_axes_are_counted_in_their_order(x64):
    """Against the definition: Q of layer l = i_stacked0 * size_stacked1 + i_stacked1, on the row-major flat group."""
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


def test_the_axes_of_a_kernel():
    x = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((8, 12)), jnp.float32)}
    gram_rows, gram_columns = (lambda y: y @ y.T), (lambda y: y.T @ y)
    for axes, keeps_rows, keeps_columns in (("output", True, False), ("input", False, True), ("both", False, False)):
        y = rotated(Rotation(axes=axes), x)["w"]
        assert np.allclose(gram_rows(y), gram_rows(x["w"]), atol=1e-4) == keeps_rows
        assert np.allclose(gram_columns(y), gram_columns(x["w"]), atol=1e-4) == keeps_columns


TABLES = """
    wte/embedding wpe/embedding Embed_0/embedding layers/0/embedding transformer/~/embed/embeddings
    emb/weight tok_emb/weight wte/weight model/embed_tokens/weight word_embeddings/weight pos_emb/w embed/table
    wte wpe pos_embedding posemb_3 embedder/input_embedding token_embedding position_embeddings gpt_wte
""".split()  # fmt: skip
KERNELS = """
    text_embedder/layers/mlp/kernel embed/proj/weight patch_embed/kernel patch_embed/weight embedding_norm/dense/w
    unembed unembed/weight rotary_embedder/linear/w newt/weight lm_head/weight normalizer/w w_q lora_b
    norm_proj/weight norm_linear/w ln_proj/weight layernorm_dense/weight norm_out_proj/weight rms_linear/weight
""".split()  # fmt: skip
VECTORS = """
    layers/norm/scale ln/gamma ln/beta mlp/bias mlp/b attention/sink attention/sink_logits block/ls/gain
    layers/norm1/weight ln_f/weight input_layernorm/weight attn_norm/w RMSNorm_0/weight cls_token embed/bias
    norm_attn/weight norm_final/w rms/weight ln_attn/weight rmsnorm_0/w norm2_out/weight mlp_norm/weight
""".split()  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kind"),
    [(path, kind) for kind, paths in (("table", TABLES), ("kernel", KERNELS), ("vector", VECTORS)) for path in paths],
)
def test_tables_kernels_and_vectors_are_told_by_their_last_names(path, kind):
    wanted = {"table": RotatedAxes((-1,)), "kernel": RotatedAxes((-1,)), "vector": None}
    out_in = wanted | {"kernel": RotatedAxes((-2,))}
    leaf = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert generic_axes(path, leaf) == wanted[kind]
    assert generic_axes(path, leaf, kernel_layout="out_in") == out_in[kind]
    assert generic_axes(path, leaf, "input") == ({"kernel": RotatedAxes((-2,))} | {"table": wanted["table"]}).get(kind)
    rows = {path: mark for path, _, _, mark in describe(Rotation(), {path: leaf}).rows}
    assert (rows[path] == "embedding") == (kind == "table")


@pytest.mark.parametrize("kernel_layout", ["in_out", "out_in"])
def test_every_kernel_axis_of_a_length_is_rotated(kernel_layout):
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {
        "wte": s(512, 32), "head": {"kernel": s(32, 50_000)}, "up": {"kernel": s(32, 96)},
        "down": {"kernel": s(96, 32)}, "scanned": {"kernel": s(3, 32, 96)}, "square": {"kernel": s(32, 32)},
        "query": {"kernel": s(32, 4, 8)}, "out": {"kernel": s(4, 8, 32)}, "scanned_query": {"kernel": s(3, 32, 4, 8)},
        "conv": {"kernel": s(5, 5, 3, 32)}, "inner": {"kernel": s(96, 48)}, "norm": {"scale": s(3, 32)},
        "fused": {"kernel": s(32, 3, 4, 8)}, "one_head": {"kernel": s(32, 1, 32)},
        "patches": {"weight": s(32, 3, 8, 8)}, "experts": {"kernel": s(32, 32, 96)},
        "stacked_down": {"down_proj": {"kernel": s(4, 8, 32)}},
    }  # fmt: skip
    for length in (32, np.int64(32)):
        found = describe(Rotation(axes=length, kernel_layout=kernel_layout), params)
        assert found == {
            "wte": "axes (1,): hadamard 32",
            "head/kernel": "axes (0,): hadamard 32",
            "up/kernel": "axes (0,): hadamard 32",
            "down/kernel": "axes (1,): hadamard 32",
            "scanned/kernel": "axes (1,): hadamard 32, 3 layers",
            "square/kernel": "axes (0,): hadamard 32; axes (1,): hadamard 32",
            "query/kernel": "axes (0,): hadamard 32",
            "scanned_query/kernel": "axes (1,): hadamard 32, 3 layers",
            "out/kernel": "axes (2,): hadamard 32",
            "conv/kernel": "axes (3,): hadamard 32, 25 layers",
            "inner/kernel": "left alone: no axis of length 32",
            "norm/scale": "left alone: named 'scale'",
            "fused/kernel": "axes (0,): hadamard 32",
            "one_head/kernel": "axes (0,): hadamard 32; axes (2,): hadamard 32",
            "patches/weight": "axes (0,): hadamard 32",
            "experts/kernel": "axes (1,): hadamard 32, 32 layers",
            "stacked_down/down_proj/kernel": "axes (2,): hadamard 32, 4 layers",
        }
        guessed = {path for path, _, _, mark in found.rows if mark == "unsure"}
        kernels = ("scanned", "square", "query", "scanned_query", "out", "conv", "fused", "one_head", "experts")
        assert guessed == {"patches/weight", "stacked_down/down_proj/kernel", *(f"{name}/kernel" for name in kernels)}


READS, WRITES, EITHER = "reads", "writes", "either"


@pytest.mark.parametrize(
    ("path", "faces"),
    [
        *((f"layers_0/attn/{name}/kernel", READS) for name in ("query", "key", "value", "q_proj", "to_v", "gate_proj")),
        *(
            (f"layers_0/attn/{name}/kernel", WRITES)
            for name in ("out", "output", "o_proj", "out_proj", "c_proj", "to_out")
        ),
        *((f"h/3/mlp/{name}/kernel", READS) for name in ("up_proj", "c_fc", "fc_in", "wi")),
        *((f"h/3/mlp/{name}/kernel", WRITES) for name in ("down_proj", "fc_out", "wo", "proj_out")),
        *((f"block/{name}", READS) for name in ("wq", "w_k", "query_0")),
        *((f"block/{name}", WRITES) for name in ("wo", "w_o", "out_1")),
        ("multi_head_attention/query/w", READS),
        ("multi_head_attention/linear/w", EITHER),
        ("mlp/fc1/kernel", EITHER),
        ("mlp/dense/kernel", EITHER),
    ],
)
def test_the_axis_of_a_square_kernel_is_the_one_that_faces_the_residual_stream(path, faces):
    leaf = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    axes = {READS: RotatedAxes((-2,)), WRITES: RotatedAxes((-1,)), EITHER: RotatedAxes((-2, -1))}
    assert generic_axes(path, leaf, 32) == axes[faces]
    swapped = {READS: WRITES, WRITES: READS, EITHER: EITHER}
    assert generic_axes(path, leaf, 32, kernel_layout="out_in") == axes[swapped[faces]]
    # equinox and PyTorch call it weight and have it the other way round: unless the layout is named both are rotated.
    path = path.rpartition("/")[0] + "/weight"
    if faces is not EITHER and path.count("/") > 1:
        assert generic_axes(path, leaf, 32) == axes[EITHER]
        assert generic_axes(path, leaf, 32, kernel_layout="out_in") == axes[swapped[faces]]


@pytest.mark.parametrize(
    "changes", [{}, {"scan_layers": False}, {"mlp": "swiglu", "d_mlp": 32, "gated_attention": True}]
)
def test_the_length_d_model_rotates_the_axes_that_were_measured(changes):
    """`Rotation(axes=d_model)` in a project of one's own, and optim.rotation.axes=residual of `orthojax train`."""
    config = ModelConfig(d_model=32, num_layers=2, num_heads=4, vocab_size=64, max_length=8, **changes)
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 8), int))["params"]
    measured = make_rotation(RotationConfig(axes="residual", seed=0))
    generic, ours = (
        {path: what for path, what in describe(rotation, params).items() if not what.startswith("left alone")}
        for rotation in (Rotation(axes=32), measured)
    )
    assert generic == ours
    assert any(leaf.shape[-2:] == (32, 32) for leaf in jax.tree.leaves(params))


def test_a_length_that_no_kernel_has_warns(recwarn):
    kernel, table = {"mlp": {"kernel": jnp.ones((4, 8))}}, {"wte": jnp.ones((8, 6))}
    for params in (table, kernel | {"wte": jnp.ones((8, 4))}):
        orthoadam(0.1, rotation=Rotation(axes=params["wte"].shape[1])).init(params)
    assert not recwarn
    for params, length, words in ((kernel | table, 6, "no kernel"), (kernel | table, 8, "no embedding table")):
        with pytest.warns(UserWarning, match=rf"axes={length}\).*{words}") as seen:
            orthoadam(0.1, rotation=Rotation(axes=length)).init(params)
        assert len(seen) == 1


def test_axes_too_long_for_haar_warn_and_stay():
    params = {"long": {"kernel": jnp.ones((5000, 2))}, "other": {"kernel": jnp.ones((4, 8))}}
    rule = lambda path, leaf: RotatedAxes(((0,),))  # noqa: E731
    for rotation in (Rotation("haar", axes=5000, embeddings=""), Rotation("haar", axes=rule)):
        with pytest.warns(UserWarning, match="long/kernel") as seen:
            orthoadam(0.1, rotation=rotation).init(params)
        assert len(seen) == 1
        assert "over 4096" in describe(rotation, params)["long/kernel"]


def test_what_is_guessed_is_marked():
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {
        "wte": s(512, 32), "head": {"kernel": s(32, 64)}, "a": s(3, 32), "b": s(3, 32), "c": {"weight": s(3, 32, 32)},
        "cls": s(1, 1, 32), "narrow": {"kernel": s(1, 32)},
    }  # fmt: skip
    found = describe(Rotation(), params)
    assert {path: mark for path, _, _, mark in found.rows} == {
        "wte": "embedding", "head/kernel": "", "a": "unsure", "b": "", "c/weight": "unsure", "cls": "unsure",
        "narrow/kernel": "",
    }  # fmt: skip
    assert found["cls"] == "left alone: a vector by its shape"
    assert found["narrow/kernel"] == "axes (1,): hadamard 32"
    lines = str(found).splitlines()
    assert lines[0].split() == ["parameter", "shape", "rotation"]
    assert lines[-1].split(maxsplit=3) == ["wte", "512,", "32", "axes (1,): hadamard 32             embedding"]


def test_tables_and_layouts_are_named_where_names_do_not_tell():
    s = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    params = {"vocabulary": {"w": s(64, 32)}, "wte": s(64, 32), "mlp": {"w": s(64, 32)}}
    found = describe(Rotation(kernel_layout="out_in", embeddings="^vocab"), params)
    assert {path: (what[:10], mark) for path, _, what, mark in found.rows} == {
        "vocabulary/w": ("axes (1,):", "embedding"), "wte": ("axes (0,):", "unsure"), "mlp/w": ("axes (0,):", ""),
    }  # fmt: skip


def test_a_tree_without_a_table_warns_once_unless_it_is_said_to_have_none(recwarn):
    kernel, bias = {"mlp": {"kernel": jnp.ones((4, 8))}}, {"bias": jnp.ones(8)}
    quiet = (
        (Rotation(embeddings=""), kernel),
        (Rotation(axes=generic_axes), kernel),
        (Rotation("identity"), kernel),
        (Rotation(), bias),
        (Rotation(), kernel | {"wte": jnp.ones((8, 8))}),
        (Rotation(embeddings="kernel"), kernel),
    )
    for rotation, params in quiet:
        orthoadam(0.1, rotation=rotation).init(params)
    assert not recwarn
    optimizer = orthoadam(0.1)
    with pytest.warns(UserWarning, match="no embedding table") as seen:
        optimizer.init(kernel)
    assert len(seen) == 1


def test_describe_says_what_is_left_alone_and_why():
    s = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    params = {
        "embed": {"table": s(50257, 768)},
        "head": {"kernel": s(768, 50257)},
        "layers": {"mlp": {"kernel": s(12, 768, 3072), "bias": s(12, 3072)}, "norm": {"scale": s(12, 768)}},
        "gain": s(),
        "none": {"kernel": s(0, 4)},
        "steps": {"kernel": s(4, 4, dtype=jnp.int32)},
        "odd": {"kernel": s(262, 131)},
        "one": {"kernel": s(8, 1)},
    }
    found = describe(Rotation(axes="both"), params)
    assert found == {
        "embed/table": "axes (1,): hadamard 768 = 32 x 24",
        "gain": "left alone: 0 axes, fewer than 2",
        "head/kernel": "axes (0,): hadamard 768 = 32 x 24",
        "layers/mlp/bias": "left alone: named 'bias'",
        "layers/mlp/kernel": "axes (1,): hadamard 768 = 32 x 24, 12 layers; "
        "axes (2,): hadamard 3072 = 64 x 48, 12 layers",
        "layers/norm/scale": "left alone: named 'scale'",
        "none/kernel": "left alone: empty",
        "odd/kernel": "axes (0,): hadamard 262 (cosine); axes (1,): hadamard 131 (cosine)",
        "one/kernel": "axes (0,): hadamard 8",
        "steps/kernel": "left alone: dtype int32",
    }
    refused = describe(Rotation(), {"head": params["head"]})
    assert refused == {"head/kernel": "left alone: no output axis of length 2 to 16384"}
    haar = Rotation("haar", lambda path, leaf: RotatedAxes((0, 1)))
    wide = describe(haar, {"wide": s(4097, 1024)})
    assert wide == {"wide": "axes (1,): haar 1024; left alone: axes (0,): length 4097 is over 4096"}
    assert describe(Rotation(axes=lambda path, leaf: None), {"w": s(4, 4)}) == {"w": "left alone: by the axes rule"}


def test_a_haar_basis_far_larger_than_its_parameter_is_refused():
    assert describe(Rotation("haar", "both"), {"w": jnp.zeros((768, 3072))})  # 4.25 times its size
    with pytest.raises(
        ValueError, match=r"head/kernel \(4, 64\).* \[64\] rows have 4096 elements, over 8 times its 256"
    ):
        orthoadam(1e-3, rotation=Rotation("haar")).init({"head": {"kernel": jnp.zeros((4, 64))}})


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "hadamar"}, {"axes": "outputs"}, {"axes": 1}, {"axes": 16_385}, {"axes": True}, {"axes": 64.0},
        {"scope": "layers"}, {"seed": -1}, {"seed": 2**32}, {"seed": 1.0}, {"layout": "replicated"},
        {"kernel_layout": "oi"}, {"embeddings": "(wte"}, {"embeddings": 3},
        {"kernel_layout": "out_in", "axes": generic_axes},
    ],
)  # fmt: skip
def test_a_wrong_rotation_is_refused_when_it_is_made(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        Rotation(**fields)


def test_the_rule_refuses_what_is_no_axis():
    leaf = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert generic_axes("mlp/kernel", leaf, np.int64(64)) == generic_axes("mlp/kernel", leaf, 64)
    for axes in ("outputs", 1, True, 32_000, None):
        with pytest.raises(ValueError, match="axes="):
            generic_axes("mlp/kernel", leaf, axes)  # pyright: ignore[reportArgumentType]


def test_wrong_axes_are_refused():
    for fields in (((),), (((),),), ((0, 0),), (((0, 1), 1),), ((1,), (1,)), (-1,), ((0,), 0)):
        with pytest.raises(ValueError, match="RotatedAxes"):
            RotatedAxes(*fields)
    for axes in (RotatedAxes((2,)), RotatedAxes((-3,)), RotatedAxes((1, -1))):
        with pytest.raises(ValueError, match="mlp/kernel"):
            rotated(Rotation(axes=lambda path, leaf, axes=axes: axes), {"mlp": {"kernel": jnp.ones((4, 4))}})
    for found in ("output", (), False, (-1,)):
        with pytest.raises(TypeError, match="kernel"):
            rotated(Rotation(axes=lambda path, leaf, found=found: found), {"kernel": jnp.ones((4, 8))})


def test_a_rotation_is_hashable_and_not_callable():
    assert not callable(Rotation())
    assert len({Rotation(), Rotation("hadamard"), Rotation(seed=1)}) == 2
    assert Rotation(seed=np.int64(3)) == Rotation(seed=3)


def test_a_rotation_is_not_given_by_its_name():
    wrong: Any = "haar"
    for make in (lambda: orthoadam(0.1, rotation=wrong), lambda: rotate(wrong), lambda: unrotate(wrong)):
        with pytest.raises(TypeError, match="rotation='haar'"):
            make()
    with pytest.raises(TypeError, match="rotation='haar'"):
        describe(wrong, {})
    with pytest.raises(TypeError, match="b1=Rotation"):
        orthoadam(0.1, Rotation("haar"))  # pyright: ignore


def test_the_state():
    params = {"mlp": {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.ones(8)}}
    assert rotate(Rotation()).init(params) == RotationState(())
    state = rotate(Rotation("haar", "both")).init({"params": params})
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), state.basis) == {
        "mlp": {"kernel": {"basis_0": ((3, 4, 4), "float32"), "basis_1": ((3, 8, 8), "float32")}}
    }
    assert jax.tree.map(jnp.shape, rotate(Rotation("haar")).init({"bias": jnp.ones(4)})) == RotationState(())
    assert set(rotate(Rotation("haar")).init(jnp.ones((4, 4))).basis) == {"basis_0"}


def test_a_state_of_another_tree_or_kind_is_refused():
    haar, hadamard, params = rotate(Rotation("haar")), rotate(Rotation()), {"a": jnp.ones((4, 4))}
    state = haar.init(params)
    for other, mine in (({"c": jnp.ones((4, 4))}, state), (params, hadamard.init(params))):
        with pytest.raises(ValueError, match=r"'[ac]' has no basis"):
            haar.update(other, mine)
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        haar.update({"a": jnp.ones((4, 8))}, state)
    with pytest.raises(ValueError, match="'hadamard'"):
        hadamard.update(params, state)


def test_the_init_of_a_haar_basis_draws_late_and_jits(x64):
    """Shapes cost no QR (of 64 times 4,096 rows it would take minutes), and a program holds no matrix."""
    optimizer = orthoadam(1e-3, rotation=Rotation("haar"))
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
    transform = rotate(Rotation(kind))
    plain = {"mlp": {"kernel": w}}
    want, _ = transform.update(plain, transform.init(plain))
    boxed = {"params": {"mlp": {"kernel": nn.Partitioned(w, (None, None))}}}
    state = transform.init(boxed)
    assert jax.tree.structure(state) == jax.tree.structure(transform.init(plain))
    for tree in (boxed, plain, {"params": plain}, nnx.State({"mlp": {"kernel": nnx.Param(w)}})):
        got, _ = transform.update(tree, state)
        np.testing.assert_array_equal(jax.tree.leaves(got)[0], want["mlp"]["kernel"])
    # A parameter that is called "value" is no box.
    assert list(describe(Rotation(kind), {"attention": {"value": w}})) == ["attention/value"]


def test_what_is_no_array_is_left_alone():
    tree = {"kernel": jnp.ones((4, 8)), "activation": jax.nn.relu, "name": "dense"}
    assert describe(Rotation(), tree)["activation"] == "left alone: not an array"
    params = {"kernel": tree["kernel"], "activation": None, "name": None}
    optimizer = orthoadam(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), tree)  # a whole equinox model, say
    want, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["kernel"], want["kernel"])
