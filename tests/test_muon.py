"""`muon_orthoadam`: its equations in float64 NumPy, optax's own Muon, groups of known trees, wrappers, meshes."""

import functools
import re
import warnings

import adopters
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from refusals import refused

from orthojax import Rotation, muon_orthoadam, scale_by_orthoadam
from orthojax.errors import UserError
from orthojax.optim import describe, layout_of, scale_by_muon_orthoadam, state_shardings

B1, B2, EPS, MU = 0.8, 0.95, 1e-6, 0.9
D, N, H, V, F, L = 16, 2, 4, 40, 24, 3
SHAPES = {
    "embed/embedding": (V, D), "blocks_0/attention/query/kernel": (D, N, H),
    "blocks_0/attention/out/kernel": (N, H, D), "blocks_0/mlp/Dense_0/kernel": (D, F),
    "blocks_0/mlp/Dense_0/bias": (F,), "blocks_0/mlp/Dense_1/kernel": (F, D), "blocks_0/norm/scale": (D,),
    "blocks_0/attention/sink": (N,), "experts/kernel": (L, D, F), "lm_head/kernel": (D, V),
}  # fmt: skip
SIDES = {
    "blocks_0/attention/query/kernel": (1, D, N * H), "blocks_0/attention/out/kernel": (1, N * H, D),
    "blocks_0/mlp/Dense_0/kernel": (1, D, F), "blocks_0/mlp/Dense_1/kernel": (1, F, D), "experts/kernel": (L, D, F),
}  # fmt: skip


def nested(flat):
    """Returns {"a/b": x} as {"a": {"b": x}}."""
    tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, tree)[name] = leaf
    return tree


def flat(tree):
    return {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in jax.tree.leaves_with_path(tree)}


def drawn(seed, shapes=None, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return nested(
        {path: jnp.asarray(rng.normal(size=s), dtype) for path, s in (SHAPES if shapes is None else shapes).items()}
    )


def updates_of(optimizer, steps=3, shapes=None, dtype=np.float32):
    """Returns the last update of some steps."""
    params = drawn(99, shapes, dtype)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(drawn(step, shapes, dtype), state, params)
    return flat(updates)


def reference_muon(gradients):
    """Muon with Nesterov's momentum of matrices [batch, m, n], in float64."""
    mean = 0.0
    for t, g in enumerate(gradients, 1):
        mean = MU * mean + (1 - MU) * g
        ahead = MU * mean / (1 - MU ** (t + 1)) + (1 - MU) * g / (1 - MU**t)
    found = []
    for x in ahead:
        m, n = x.shape
        x = x / (np.linalg.norm(x) + 1e-15)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        found.append(0.2 * max(m, n) ** 0.5 * x)
    return np.stack(found)


OPTIONS = {"b1": B1, "b2": B2, "eps": EPS, "momentum": MU}


def test_matrices_are_those_of_muon_and_the_rest_is_adam_s(x64):
    optimizer = scale_by_muon_orthoadam(**OPTIONS)
    found = updates_of(optimizer, dtype=np.float64)
    seen = [flat(drawn(step, dtype=np.float64)) for step in range(3)]
    for path, (batch, m, n) in SIDES.items():
        wanted = reference_muon([np.asarray(g[path], np.float64).reshape(batch, m, n) for g in seen])
        np.testing.assert_allclose(found[path], wanted.reshape(SHAPES[path]), rtol=1e-9, atol=1e-12, err_msg=path)
    adam = updates_of(optax.scale_by_adam(B1, B2, EPS), dtype=np.float64)
    orthoadam = updates_of(scale_by_orthoadam(B1, B2, EPS, rotation=Rotation(axes=D)), dtype=np.float64)
    for path in SHAPES.keys() - SIDES.keys():
        wanted = orthoadam if path in ("embed/embedding", "lm_head/kernel") else adam
        np.testing.assert_allclose(found[path], wanted[path], rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("embeddings", ["adam", "muon", None])
def test_optax_has_the_same_muon(embeddings):
    shapes = {path: shape for path, shape in SHAPES.items() if len(shape) < 3}
    by_muon = {"adam": (), "muon": ("embed/embedding", "lm_head/kernel"), None: ("lm_head/kernel",)}[embeddings]

    matrices = (*SIDES, *by_muon)
    dimensions = nested({path: MuonDimensionNumbers() if path in matrices else None for path in shapes})
    theirs = optax.contrib.muon(
        1.0, beta=MU, consistent_rms=0.2, adam_b1=B1, adam_b2=B2, eps=EPS, muon_weight_dimension_numbers=dimensions
    )
    ours = muon_orthoadam(1.0, **OPTIONS, embeddings=embeddings, rotation=Rotation(axes=D))
    found, wanted = updates_of(ours, shapes=shapes), updates_of(theirs, shapes=shapes)
    for path in shapes.keys() & {*matrices}:  # its Adam takes Nesterov's step as well
        np.testing.assert_allclose(found[path], wanted[path], rtol=2e-4, atol=2e-6, err_msg=path)


def test_layers_stacked_on_any_axis_are_those_by_themselves():
    one = {path: shape for path, shape in SHAPES.items() if path.startswith("blocks_0")}
    layers = [drawn(seed, one)["blocks_0"] for seed in range(L)]
    tree = {f"blocks_{i}": layer for i, layer in enumerate(layers)}
    optimizer = muon_orthoadam(0.1, **OPTIONS, rotation=Rotation(axes=D, embeddings=""))
    wanted = jax.jit(lambda g: optimizer.update(g, optimizer.init(g), g)[0])(tree)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    for axis in (0, 1):
        at = {path: min(axis, len(shape)) for path, shape in one.items()}
        by_layer = [flat({"blocks_0": layer}) for layer in layers]
        stacked = nested({path: np.stack([layer[path] for layer in by_layer], at[path]) for path in one})
        by_axis = muon_orthoadam(0.1, **OPTIONS, rotation=Rotation(stacked=axis, axes=D, embeddings=""))
        updates = flat(jax.jit(lambda g, o=by_axis: o.update(g, o.init(g), g)[0])(stacked))
        for path in one:
            for layer in range(L):
                expected = flat(wanted)[path.replace("0", str(layer), 1)]
                close(np.take(np.asarray(updates[path]), layer, at[path]), expected)


def test_decay_leaves_vectors_alone_and_a_mask_decides():
    params = drawn(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    for mask, decayed in (
        (None, {*SIDES, "embed/embedding", "lm_head/kernel"}),
        (lambda p: jax.tree.map(lambda _: False, p), set()),
    ):
        optimizer = muon_orthoadam(0.5, weight_decay=0.1, mask=mask)
        found = flat(optimizer.update(zero, optimizer.init(params), params)[0])
        for path, update in found.items():
            expected = -0.05 * flat(params)[path] if path in decayed else 0.0
            np.testing.assert_allclose(update, expected, atol=1e-7, err_msg=path)


# Tree -> (matrices, of tables and head, vectors), and how some matrices are flattened; None: refused.
GROUPS = {
    "nanodo": (
        (12, 2, 5),
        {"blocks_0/CausalAttn_0/query/kernel": "512 x 8*64", "blocks_1/Mlp_0/Dense_0/kernel": "512 x 2048"},
    ),
    "flax gemma3 1b": ((12, 1, 13), {"layers/0/attn/kv_einsum/kernel": "2*1*256 x 1152"}),
    "levanter llama": ((7, 2, 3), {"transformer/layers/stacked/self_attn/q_proj/weight/0": "8*3*64 x 2048, 4 of them"}),
    "jax-llm-examples gpt_oss": (
        None,
        {"layers/0/ffw/we_down": "2880 x 2880, 32 of them", "layers/1/attn/o": "64*64 x 2880"},
    ),
    "jaxrwkv rwkv6 1b6": (None, {"blocks/att/key/weight": "2048 x 2048, 24 of them"}),
    "big_vision ViT scan": (
        None,
        {
            "Transformer/encoderblock/MultiHeadDotProductAttention_0/key/kernel": "1152 x 16*72, 27 of them",
            "MAPHead_0/MultiHeadDotProductAttention_0/key/kernel": "1152 x 16*72",
            "embedding/kernel": "14*14*3 x 1152",
        },
    ),
    "huggingface FlaxGPT2 characters": ((8, 2, 18), {"transformer/h/0/attn/c_proj/kernel": "384 x 384"}),
    "tunix qwen3 30b a3b": (None, {"layers/0/mlp/down_proj": "768 x 2048, 128 of them"}),
    "huggingface FlaxViT": (None, {"embeddings/patch_embeddings/projection/kernel": "16*16*3 x 768"}),
    "maxtext llama": None,  # layers on axis 1
    "jax-llm-examples deepseek_r1": None,  # matrices of three axes without d_model
}


def shapes_of(name):
    return nested({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in adopters.DECIDED[name][1].items()})


@pytest.mark.parametrize("name", adopters.DECIDED)
def test_the_groups_of_known_trees(name):
    optimizer, tree = muon_orthoadam(1e-3), shapes_of(name)
    if name in GROUPS and GROUPS[name] is None:
        with pytest.raises(UserError, match="does not know which axes"):
            describe(optimizer, tree)
        return
    found = describe(optimizer, tree)
    shapes = adopters.DECIDED[name][1]
    for path, how in found.items():
        assert how.split()[0] == "adam" or len(shapes[path]) > 1, path
        # Whatever has two long axes and is no norm, bias or table is a matrix in these trees.
        is_long = sum(n > 1 for n in shapes[path]) > 1
        if how.split()[0] == "adam" and is_long:
            assert re.search("norm|ln|scale|bias|time_|conv|value_embeds", path), f"{path}: {how}"
    counts, hows = GROUPS.get(name, (None, {}))
    labels = [how.split()[0] for how in found.values()]
    assert counts in (None, tuple(labels.count(label) for label in ("muon", "orthoadam", "adam")))
    assert {path: found[path] for path in hows} == {path: f"muon {how}" for path, how in hows.items()}


# Small trees without a name that says attention, with sizes that coincide: path -> shape, and how the first is treated.
COINCIDENT = [
    ({"layers/out/kernel": (4, 4, D), "layers/query/kernel": (D, 4, 4), "layers/up/kernel": (D, 32)}, {}, "4*4 x 16"),
    ({"mlp/router/weight": (8, D), "mlp/up/weight": (8, 24, D), "mlp/down/weight": (8, D, 24)},
     {"kernel_layout": "out_in"}, "8 x 16"),
    ({"layers/q_proj/w": (4, D, D), "layers/o_proj/w": (4, D, D), "layers/sink": (4, 4)}, {}, "16 x 16, 4 of them"),
    ({"tail/kernel": (L, D), "layers/up/kernel": (L, D, F), "layers/norm/scale": (L, D)}, {}, "3 x 16"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "options", "how"), COINCIDENT)
def test_coinciding_sizes_decide_nothing(shapes, options, how):
    tree = nested({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in {"wte": (V, D), **shapes}.items()})
    found = describe(muon_orthoadam(1e-3, rotation=Rotation(**options)), tree)
    assert found[next(iter(shapes))] == f"muon {how}"


def test_moments_of_half_precision_may_be_float32():
    shapes = {"wte": (V, D), "w": (D, F), "scale": (D,)}
    optimizer = muon_orthoadam(1e-3, mu_dtype=jnp.float32, nu_dtype=jnp.float32, rotation=ROTATION)
    params = drawn(0, shapes, jnp.bfloat16)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    assert jnp.bfloat16 not in {x.dtype for x in jax.tree.leaves(state)}


def test_a_named_axis_of_layers_decides():
    found = describe(muon_orthoadam(1e-3, rotation=Rotation(stacked=1)), shapes_of("maxtext llama"))
    assert found["decoder/layers/mlp/wi_0/kernel"] == "muon 2048 x 7168, 16 of them"
    assert found["decoder/layers/self_attention/query/kernel"] == "muon 2048 x 8*128, 16 of them"


def test_what_is_a_guess_is_said():
    tree = {"wte": jnp.ones((V, D)), "mlp": {"up": jnp.ones((D, F)), "kernel": jnp.ones((F, D))}}
    with pytest.warns(UserWarning, match=r"1 of 3 parameters is a guess \(mlp/up\)"):
        muon_orthoadam(0.1).init(tree)
    with warnings.catch_warnings(action="error"):
        muon_orthoadam(0.1).init(drawn(0))


def test_a_rule_of_one_s_own_replaces_ours():
    def groups(path, leaf):
        return {"wte": "embedding", "b": "adam"}.get(path, MuonDimensionNumbers((0, 1), -1))

    tree = {"wte": jnp.ones((V, D)), "b": jnp.ones((2, 3)), "w": jnp.ones((2, 3, D))}
    optimizer = scale_by_muon_orthoadam(groups=groups)
    optimizer.update(tree, optimizer.init(tree))  # finds d_model in the whole tree
    found = describe(optimizer, tree)
    assert dict(found) == {"wte": "orthoadam axes (1,): hadamard 16", "b": "adam ", "w": "muon 2*3 x 16"}


test_refused = refused(
    (lambda _, given: muon_orthoadam(**{"learning_rate": 0.1} | given), [
        ({"momentum": 1.0}, "momentum=1.0"), ({"embeddings": "sgd"}, "'sgd'"),
        ({"learning_rate": "x"}, "learning_rate"), ({"mask": 3}, "mask=3")], ValueError),
    (lambda _, tree, options: muon_orthoadam(0.1, **options).init(tree), [
        ({"wte": jnp.ones((V, D)), "w": jnp.ones((D, 3, F))}, {}, ("w (16, 3, 24)", "groups=")),
        ({"wte": jnp.ones((V, D)), "w": jnp.ones((5, 6, 7)), "w_up": jnp.ones((D, F))}, {"rotation": Rotation(axes=D)},
         ("w (5, 6, 7)", "groups=")),
        ({"w": jnp.ones((D, F))}, {}, "not certain of d_model"),
        ({"w": jnp.ones((D, F))}, {"groups": lambda *_: MuonDimensionNumbers(0, 2), "rotation": Rotation(axes=D)},
         "MuonDimensionNumbers with"),
        ({"w": jnp.ones((D, F))}, {"groups": lambda *_: None, "rotation": Rotation(axes=D)}, "returned None")]),
    (lambda _, wrap: describe(wrap(muon_orthoadam(0.1)), {}), [
        (wrap, "unchained") for wrap in (optax.chain, lambda o: optax.MultiSteps(o, 2))], TypeError),
    (lambda _: muon_orthoadam(0.1, rotation=Rotation(axes=D)).init({"W_E": jnp.ones((V, D)), "w": jnp.ones((D, F))}),
     ("no embedding table", "embeddings=PATTERN")),
    (lambda _: muon_orthoadam(0.1, rotation="haar"), "rotation='haar'", TypeError),
)  # fmt: skip


ROTATION = Rotation(axes=D)
WRAPPED = {
    "chain": lambda: optax.chain(optax.clip(1e9), muon_orthoadam(0.1, rotation=ROTATION)),
    "masked": lambda: optax.masked(muon_orthoadam(0.1, rotation=ROTATION), lambda p: jax.tree.map(lambda _: True, p)),
    "apply_if_finite": lambda: optax.apply_if_finite(muon_orthoadam(0.1, rotation=ROTATION), 3),
    "MultiSteps": lambda: optax.MultiSteps(muon_orthoadam(0.1, rotation=ROTATION), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(muon_orthoadam)(0.1, rotation=ROTATION),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_it_steps_as_plain(name):
    params, plain = drawn(9), muon_orthoadam(0.1)
    wrapped = WRAPPED[name]()
    states = [optimizer.init(params) for optimizer in (plain, wrapped)]
    for seed in range(2):
        wanted, states[0] = jax.jit(plain.update)(drawn(seed), states[0], params)
        for _ in range(2 if name == "MultiSteps" else 1):
            found, states[1] = jax.jit(wrapped.update)(drawn(seed), states[1], params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


TOKENS = np.random.default_rng(3).integers(0, V, (4, 8))


@pytest.mark.filterwarnings("ignore:the treatment of")
def test_it_trains_a_model_of_nnx():
    """Linen's and dicts are trained by the examples and the guides; equinox's trees are in `adopters`."""
    optimizer, model = muon_orthoadam(0.02, weight_decay=0.01), Nnx(nnx.Rngs(0))
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def cross_entropy(model):
        logits = model(TOKENS)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    @nnx.jit
    def step(model, state):
        loss, grads = nnx.value_and_grad(cross_entropy)(model)
        state.update(model, grads)
        return loss

    losses = [float(step(model, state)) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.2
    labels = [how.split()[0] for how in describe(optimizer, nnx.state(model, nnx.Param)).values()]
    assert labels.count("muon") == 6  # query, key, value, out, up, down
    assert labels.count("orthoadam") == 2


MESHED = {
    "wte/embedding": ((V, D), P("fsdp", "tensor")),
    "layers/mlp/up/kernel": ((4, D, F), P(None, "fsdp", "tensor")),
    "layers/mlp/down/kernel": ((4, F, D), P("fsdp", "tensor")),
    "layers/norm/scale": ((4, D), P(None, "tensor")),
    "odd/experts/kernel": ((3, D, F), P(None, "fsdp", "tensor")),  # 3 and 1 slices do not divide over 4 devices
    **{f"odd/block_{k}/up/kernel": ((D, F), P("fsdp", "tensor")) for k in range(3)},
    "odd/out/kernel": ((N, 2 * H, D), P("tensor", None, "fsdp")),
    "head/kernel": ((D, V), P("tensor", "fsdp")),
}


def meshed(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    return mesh, nested({path: NamedSharding(mesh, spec) for path, (_, spec) in MESHED.items()})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_it_is_the_same_and_donated(kind):
    mesh, shardings = meshed(kind)
    shapes = {path: shape for path, (shape, _) in MESHED.items()}
    layout = layout_of(shardings) if kind == AxisType.Auto else None
    optimizer = muon_orthoadam(0.1, rotation=Rotation(axes=D, layout=layout))
    params = jax.device_put(drawn(7, shapes), shardings)
    at = state_shardings(optimizer, params, shardings)
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init, out_shardings=at)(params)
        step = jax.jit(optimizer.update, out_shardings=(shardings, at), donate_argnums=1)
        for seed in range(2):
            updates, new = step(jax.device_put(drawn(seed, shapes), shardings), state, params)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf.size)
            state = new
    mu = state[0].inner_states["muon"].inner_state[0].mu["layers"]["mlp"]["up"]["kernel"]
    assert mu.sharding.spec == P(None, "fsdp", "tensor")
    wanted = updates_of(muon_orthoadam(0.1, rotation=Rotation(axes=D)), 2, shapes)
    for path, update in flat(updates).items():
        np.testing.assert_allclose(update, wanted[path], rtol=1e-3, atol=1e-6, err_msg=path)


def exchanged(program):
    """The names of the collectives in a program's text, once each."""
    return set(re.findall(r" (all-[\w-]+|reduce-scatter|collective-permute)\(", program))


@pytest.mark.parametrize("ns_dtype", [None, "bfloat16"])
def test_every_device_orthogonalizes_its_share(ns_dtype, x64):
    """Whole matrices travel once, as shards, and the products are split over all devices."""
    dtype = np.float32 if ns_dtype else np.float64  # in which only the order of sums differs
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    shapes = {"layers/up/kernel": (8, 16, 32), **{f"block_{k}/up/kernel": (16, 32) for k in range(8)}}
    specs = {path: P(*[None] * (len(shape) - 1), "fsdp") for path, shape in shapes.items()}
    shardings = nested({path: NamedSharding(mesh, spec) for path, spec in specs.items()})

    def made(layout):
        rotation = Rotation(axes=16, embeddings="", layout=layout)
        return scale_by_muon_orthoadam(rotation=rotation, ns_dtype=ns_dtype)

    grads, one, split = drawn(0, shapes, dtype), made(None), made(layout_of(shardings))
    wanted, _ = jax.jit(one.update)(grads, one.init(grads))
    at = state_shardings(split, grads, shardings)
    update = jax.jit(split.update, in_shardings=(shardings, at), out_shardings=(shardings, at))
    got, _ = update(grads, split.init(grads))
    assert got["layers"]["up"]["kernel"].dtype == dtype
    tolerance = {"rtol": 0, "atol": 0.02 if ns_dtype else 1e-12}
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), got, wanted)
    compiled = update.lower(grads, split.init(grads)).compile()
    assert exchanged(compiled.as_text()) == {"all-to-all"}
    whole = jax.jit(one.update).lower(grads, one.init(grads)).compile()
    flops = [program.cost_analysis()["flops"] for program in (compiled, whole)]
    assert flops[1] > 6 * flops[0]


def test_a_shard_is_no_matrix():
    mesh = jax.make_mesh((8,), ("fsdp",))
    grads, optimizer = drawn(0, {"wte": (V, D), "mlp/kernel": (D, F)}), muon_orthoadam(0.1, rotation=ROTATION)

    def update(grads):
        return optimizer.update(grads, optimizer.init(grads), grads)[0]

    wanted = jax.jit(update)(grads)
    whole = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P()))(grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), whole, wanted)
    specs = {"wte": P(), "mlp": {"kernel": P(None, "fsdp")}}
    grads = jax.device_put(grads, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    for options, says in (({}, "its shard is no matrix"), ({"check_vma": False}, "nobody knows whether")):
        with pytest.raises(UserError, match=says):
            jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs, **options))(grads)
