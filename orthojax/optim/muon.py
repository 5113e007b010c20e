"""Muon with OrthoAdam: matrices by Muon, embeddings and the head by OrthoAdam, vectors by Adam.

Muon's update of a matrix is the nearest matrix whose singular values are all about 1, which makes no outlier channels;
that of an embedding table would make every token's row equally large, so tables have OrthoAdam, or Adam.
"""

import collections
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, MuonState

from orthojax.errors import UserError
from orthojax.ops.statistics import wide_dtype
from orthojax.optim import axes as axes_rule
from orthojax.optim.layout import Names, axes_width, gather_axes, over_shards, split_sharding
from orthojax.optim.orthoadam import (
    check_dtypes,
    check_hyperparams,
    decayed_and_scaled,
    scale_by_adam,
    scale_by_orthoadam,
)
from orthojax.optim.rotation import (
    DEFAULT_ROTATION,
    Description,
    Rotation,
    describable,
    describe,
    leaf_paths,
    outliers_may_return,
    plan_tree,
    require_rotation,
)

Embeddings = Literal["orthoadam", "adam", "muon"]
Choice = MuonDimensionNumbers | Literal["embedding", "adam"]
Groups = Callable[[str, jax.ShapeDtypeStruct], Choice]
Layout = Callable[[str], jax.sharding.Sharding | None]
Sides = tuple[tuple[int, ...], tuple[int, ...]]  # the axes of a matrix's rows, and of its columns, 0 and up

_RMS = 0.2  # of an update, as Adam's usually is: Muon is Scalable for LLM Training, arXiv 2502.16982, section 2.2
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's author, Keller Jordan
_STEPS = 5
# Added to a matrix's norm before its singular values are made 1. Clipping may leave much less than optax's 1e-8 beside
# a huge gradient; this is just above norms whose squares are 0 in float32.
_EPS = 1e-15


def scale_by_muon_orthoadam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    ns_dtype: Any = None,
    embeddings: Embeddings | None = "orthoadam",
    rotation: Rotation = DEFAULT_ROTATION,
    groups: Groups | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales updates by Muon, OrthoAdam and Adam, each where it belongs; see `muon_orthoadam`.

    A matrix G, of shape m x n once its axes are flattened, gets

    .. math::
      M_t = \mu M_{t-1} + (1 - \mu) G_t, \quad
      N_t = \mu \frac{M_t}{1 - \mu^{t+1}} + (1 - \mu) \frac{G_t}{1 - \mu^t}, \quad
      S_t = 0.2 \sqrt{\max(m, n)} \, \mathrm{NS}_5(N_t)

    with :math:`\mu` = `momentum` and five Newton-Schulz steps X <- 3.4445 X - 4.7750 (X X^T) X + 2.0315 (X X^T)^2 X
    from N / |N|, in `ns_dtype`. It is `optax.contrib.scale_by_muon` with `consistent_rms=0.2`, except for `eps`
    beside |N|, which is 1e-15. Every slice along stacked layers or experts is a matrix of its own.

    The state is that of `optax.partition`: `inner_states["muon"]`, `["adam"]` and, if asked for, `["orthoadam"]`.

    Raises:
      UserError: In `init`, for parameters that the rule cannot tell, or in doubt of d_model; in the update, inside of
        `jax.shard_map` for gradients that differ between devices: a shard is no matrix.
    """
    check_hyperparams({"b1": b1, "b2": b2, "eps": eps, "momentum": momentum})
    check_dtypes({"mu_dtype": mu_dtype, "nu_dtype": nu_dtype, "ns_dtype": ns_dtype})
    require_rotation(rotation)
    if embeddings not in (None, "orthoadam", "adam", "muon"):
        raise ValueError(f"embeddings={embeddings!r}; allowed: 'orthoadam', 'adam', 'muon' or None")

    def parts(tree: Any) -> optax.GradientTransformationExtraArgs:
        found = _groups_of(rotation, embeddings, groups, tree)
        adam = scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nu_dtype=nu_dtype)
        orthogonalize = functools.partial(_orthogonalize, found, rotation.layout, ns_dtype)
        # Chained, as in checkpoints of 0.1.
        muon = optax.chain(_scale_by_muon(momentum, mu_dtype, orthogonalize), optax.identity())
        made: dict[Any, Any] = {"muon": muon, "adam": adam}
        if embeddings == "orthoadam":
            axes = found.d_model if rotation.axes is None else rotation.axes
            rotated = dataclasses.replace(rotation, axes=axes)
            made["orthoadam"] = scale_by_orthoadam(b1, b2, eps, mu_dtype=mu_dtype, nu_dtype=nu_dtype, rotation=rotated)
        return optax.partition(made, lambda tree: _by_path(lambda path, _: found.of[path].label, tree))

    def init_fn(params):
        found = _groups_of(rotation, embeddings, groups, params)
        if guesses := [path for path, group in found.of.items() if group.unsure]:
            shown = ", ".join(guesses[:3]) + (", ..." if len(guesses) > 3 else "")
            hint = "print(orthojax.optim.describe(transformation, params)) shows what is found"
            counts = f"{len(guesses)} of {len(found.of)} parameters"
            warnings.warn(f"the treatment of {counts} is a guess ({shown}); {hint}", stacklevel=2)
        with warnings.catch_warnings():  # of the rotation, which does not know the groups
            warnings.filterwarnings("ignore", "the treatment of")
            return parts(params).init(params)

    def update_fn(updates, state, params=None, **extra_args):
        return parts(updates).update(updates, state, params, **extra_args)

    made = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return describable(made, lambda params: _describe(rotation, embeddings, groups, params))


def muon_orthoadam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    ns_dtype: Any = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    embeddings: Embeddings | None = "orthoadam",
    rotation: Rotation = DEFAULT_ROTATION,
    groups: Groups | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes Muon for matrices, OrthoAdam for embedding tables and the head, and Adam for vectors.

    All updates have Adam's usual size, an RMS of about 0.2, so one learning rate serves all; Adam's first steps are
    larger, up to 1, so warm up. `scale_by_muon_orthoadam` has the equations. Matrices are found by the rule that finds
    d_model: [in, out] kernels, stacked [layers, in, out] or [experts, in, out], and flax's attention kernels of three
    axes. `describe(optimizer, params)` shows what is found.

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the first moment of Adam and OrthoAdam.
      b2: Decay of their second moment.
      eps: Added to the root of their second moment.
      momentum: Muon's, with Nesterov's step.
      mu_dtype: Dtype of momentum and first moments; that of the parameters by default.
      nu_dtype: Dtype of the second moments; those of bfloat16 parameters hardly move unless it is float32.
      ns_dtype: Dtype of Muon's Newton-Schulz steps, None for at least float32; bfloat16 halves what devices exchange.
      weight_decay: Decoupled, times the learning rate.
      mask: A tree of bools, or a function of the parameters that returns one: what decays. None for matrices, tables
        and the head: norm scales, biases and sink logits do not.
      embeddings: The optimizer of embedding tables and of an untied head; None for Adam on tables and Muon on the head.
      rotation: That of OrthoAdam, and how matrices and tables are named: its `axes` (d_model), `embeddings`, `stacked`
        and `kernel_layout`. With its `layout` (see `layout_of`) every device orthogonalises its share of the matrices,
        for one exchange of shards; without it, over Auto mesh axes, every device does all of them.
      groups: Replaces the rule: (path, shape and dtype) -> "embedding", "adam", or for a matrix
        `optax.contrib.MuonDimensionNumbers`, axes of the whole array; every slice along the others is a matrix.

    Returns:
      An optax transformation with extra arguments, for `optax.chain`, `inject_hyperparams` (with `static_args` for
      `mask` and `groups`), `MultiSteps` and so on.

    Raises:
      ValueError: For hyperparameters that make no sense; others as for `scale_by_muon_orthoadam`.

    Reference:
      Muon: An optimizer for hidden layers, Keller Jordan, 2024; Muon is Scalable for LLM Training, `arXiv 2502.16982
      <https://arxiv.org/abs/2502.16982>`_, 2025 (the size of updates); OSP, `arXiv 2506.19697
      <https://arxiv.org/abs/2506.19697>`_, 2025 (Adam on embeddings); OrthoAdam as in `scale_by_orthoadam`.

    >>> import jax.numpy as jnp
    >>> params = {"wte": jnp.ones((64, 16)), "mlp": {"kernel": jnp.ones((16, 48)), "bias": jnp.ones(48)}}
    >>> print(describe(muon_orthoadam(1e-3), params))
    parameter   shape   group      how
    mlp/bias    48      adam       1 axis, fewer than 2
    mlp/kernel  16, 48  muon       16 x 48
    wte         64, 16  orthoadam  axes (1,): hadamard 16  table
    """
    scaling = scale_by_muon_orthoadam(
        b1, b2, eps, momentum=momentum, mu_dtype=mu_dtype, nu_dtype=nu_dtype, ns_dtype=ns_dtype, embeddings=embeddings,
        rotation=rotation, groups=groups,
    )  # fmt: skip

    def decays(params: Any) -> Any:
        found = _groups_of(rotation, embeddings, groups, params).of
        return _by_path(lambda path, _: not found[path].is_vector, params)

    made = decayed_and_scaled(scaling, learning_rate, weight_decay, decays if mask is None else mask)
    return describable(made, lambda params: _describe(rotation, embeddings, groups, params))


class Group(NamedTuple):
    """How a parameter is updated."""

    label: Literal["muon", "orthoadam", "adam"]
    dimensions: Sides | None = None  # of Muon
    why: str = ""
    unsure: bool = False
    is_vector: bool = False


class _Found(NamedTuple):
    d_model: int | None
    of: Mapping[str, Group]  # by path


def _by_path(function: Callable[[str, Any], Any], tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([function(path, leaf) for path, leaf in zip(leaf_paths(tree), leaves, strict=True)])


def _groups_of(rotation: Rotation, embeddings: Embeddings | None, groups: Groups | None, tree: Any) -> _Found:
    """Finds the group of every parameter, from paths, shapes and dtypes alone, so that init and every update agree."""
    shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, optax.MaskedNode))
    is_part = any(isinstance(node, optax.MaskedNode) for node in nodes)
    leaves = tuple(zip(leaf_paths(tree), shapes, strict=True))
    return _groups_of_leaves(rotation, embeddings, groups, leaves, is_part)


@functools.lru_cache(maxsize=64)  # outside jit, every update asks
def _groups_of_leaves(
    rotation: Rotation,
    embeddings: Embeddings | None,
    groups: Groups | None,
    leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...],
    is_part: bool,
) -> _Found:
    shapes = {path: leaf.shape for path, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
    d_model = rotation.axes if isinstance(rotation.axes, int) else None
    if d_model is None and (groups is None or (rotation.axes is None and embeddings == "orthoadam")):
        d_model = axes_rule.find_d_model(shapes, rotation.embeddings, is_part, rotation.stacked)
    if groups is not None:
        chosen = {path: groups(path, leaf) for path, leaf in leaves}
        return _Found(d_model, {path: _chosen(path, leaf.shape, chosen[path], embeddings) for path, leaf in leaves})
    rule = axes_rule.Rule(d_model, rotation.kernel_layout, rotation.embeddings, rotation.stacked)
    found: dict[str, Group] = {}
    unknown = []
    for path, leaf in leaves:
        matrix = axes_rule.matrix_of(path, leaf.shape, rule, shapes) if path in shapes else f"dtype {leaf.dtype}"
        if isinstance(matrix, str):
            found[path] = Group("adam", None, matrix, is_vector=True)
        elif matrix.groups is None:
            unknown.append(f"{path} {leaf.shape}")
        else:
            found[path] = _group_of(matrix, embeddings)
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        stacked = "; or Rotation(stacked=AXIS), if that axis counts layers" if rotation.stacked is None else ""
        problem = f"Muon does not know which axes are the matrix in {shown}"
        raise UserError(problem, allowed=f"groups=, a function that says it{stacked}")
    if (
        rotation.embeddings != ""
        and found
        and not is_part
        and not any(group.why == "table" for group in found.values())
    ):
        problem = "no embedding table is known by its name, and Muon would take it for a matrix"
        raise UserError(problem, allowed="Rotation(embeddings=PATTERN), or embeddings='' if there is none")
    return _Found(d_model, found)


def _group_of(matrix: axes_rule.Matrix, embeddings: Embeddings | None) -> Group:
    label: Embeddings = "muon"
    if matrix.kind != "matrix":
        label = embeddings or ("adam" if matrix.kind == "table" else "muon")
    return Group(label, matrix.groups if label == "muon" else None, matrix.kind, matrix.unsure)


def _chosen(path: str, shape: tuple[int, ...], choice: Any, embeddings: Embeddings | None) -> Group:
    """Returns the group that a rule of the user names."""
    if choice == "adam":
        return Group("adam", is_vector=True)
    if choice == "embedding":
        return Group(embeddings or "adam", ((0,), (1,)) if embeddings == "muon" else None)
    if isinstance(choice, MuonDimensionNumbers):
        sides = [(side,) if isinstance(side, int) else tuple(side) for side in choice]
        axes = [axis % len(shape) for side in sides for axis in side if -len(shape) <= axis < len(shape)]
        if all(sides) and len(set(axes)) == sum(map(len, sides)):
            rows, columns = (tuple(axis % len(shape) for axis in side) for side in sides)
            return Group("muon", (rows, columns))
    problem = f"groups({path!r}, {shape}) returned {choice!r}"
    raise UserError(problem, allowed="MuonDimensionNumbers with different axes, 'embedding' or 'adam'")


def _describe(rotation: Rotation, embeddings: Embeddings | None, groups: Groups | None, params: Any) -> Description:
    found = _groups_of(rotation, embeddings, groups, params)
    axes = found.d_model if rotation.axes is None else rotation.axes
    rotated = dataclasses.replace(rotation, axes=axes) if embeddings == "orthoadam" else None
    plans = dict(describe(rotated, params)) if rotated else {}
    rows = []
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        group, how = found.of[path], found.of[path].why
        if group.dimensions is not None:
            sides = [[leaf.shape[axis] for axis in side] for side in group.dimensions]
            how = " x ".join("*".join(map(str, side)) for side in sides)
            others = math.prod(leaf.shape) // math.prod(map(math.prod, sides))
            how += f", {others} of them" if others > 1 else ""
        how = plans[path] if group.label == "orthoadam" else how
        mark = "unsure" if group.unsure else group.why if group.why in ("table", "head") else ""
        rows.append((path, ", ".join(map(str, jnp.shape(leaf))), group.label, how, mark))
    note = outliers_may_return(plan_tree(rotated, params)) if rotated else ""
    return Description(rows, note, heading=("parameter", "shape", "group", "how", ""))


# Muon itself.


def _scale_by_muon(
    momentum: jax.typing.ArrayLike, mu_dtype: Any, orthogonalize: Callable[[Any, jax.Array], Any]
) -> optax.GradientTransformation:
    """Makes Muon for the matrices of a tree, with the state of `optax.contrib.scale_by_muon`."""

    def init_fn(params):
        mu = optax.tree.zeros_like(params, dtype=mu_dtype)
        return MuonState(jnp.zeros([], jnp.int32), mu, jnp.array(_COEFFICIENTS))

    def update_fn(updates, state, params=None):
        del params
        mu = optax.tree.update_moment(updates, state.mu, momentum, 1)
        count = optax.safe_increment(state.count)
        ahead = jax.tree.map(
            lambda m, g: momentum * m + (1 - momentum) * g,
            optax.tree.bias_correction(mu, momentum, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, momentum, count),
        )
        mu = optax.tree.cast_like(mu, state.mu)
        scaled = optax.tree.cast_like(orthogonalize(ahead, state.ns_coeffs), updates)
        return scaled, MuonState(count, mu, state.ns_coeffs)

    return optax.GradientTransformation(init_fn, update_fn)


def _orthogonalize(found: _Found, layout: Layout | None, ns_dtype: Any, tree: Any, coefficients: jax.Array) -> Any:
    """Makes the singular values of every matrix about 1, scaled to the RMS of an update.

    Sharded parameters whose slices do not divide over the devices, such as those of a model without stacked layers, are
    computed together with all that are sharded alike: else some devices would idle, or all would do the same.
    """
    leaves, treedef = jax.tree.flatten(tree)
    together: dict[Any, list[int]] = collections.defaultdict(list)
    for k, (path, x) in enumerate(zip(leaf_paths(tree), leaves, strict=True)):
        _require_whole(path, x)
        dimensions = found.of[path].dimensions
        assert dimensions is not None
        sharding = split_sharding(path, x, layout(path) if layout else None)
        axes = [axis for side in dimensions for axis in side]
        slices = math.prod(length for axis, length in enumerate(x.shape) if axis not in axes)
        alone = sharding is None or slices % axes_width(sharding, axes) == 0
        together[(k if alone else -1, x.shape, x.dtype, dimensions, sharding)].append(k)
    for (*_, dimensions, sharding), members in together.items():
        arrays = tuple(leaves[k] for k in members)
        dtype = ns_dtype or wide_dtype(arrays[0])
        local = functools.partial(_orthogonalize_shards, dimensions=dimensions, dtype=dtype)
        new = local(arrays, coefficients) if sharding is None else over_shards(local, arrays, coefficients, sharding)
        for k, y in zip(members, new, strict=True):
            leaves[k] = y
    return treedef.unflatten(leaves)


def _orthogonalize_shards(
    arrays: tuple[jax.Array, ...],
    coefficients: jax.Array,
    names: Names | None = None,  # the mesh axes of each dimension
    *,
    dimensions: Sides,
    dtype: Any,
) -> tuple[jax.Array, ...]:
    """Orthogonalizes arrays of one shape; of shards, every device gets whole matrices, its part of all, for a while."""
    rows, columns = dimensions
    shape, x_dtype = arrays[0].shape, arrays[0].dtype
    batch = tuple(axis for axis in range(len(shape)) if axis not in (*rows, *columns))
    order = (*batch, *rows, *columns)
    slices, matrix_shape = math.prod(shape[axis] for axis in batch), [shape[axis] for axis in (*rows, *columns)]
    sent_dtype = min(x_dtype, jnp.dtype(dtype), key=lambda of: of.itemsize)
    x = jnp.concatenate([x.transpose(order).reshape(slices, *matrix_shape) for x in arrays]).astype(sent_dtype)
    back = lambda y: y  # noqa: E731
    if names is not None:
        x, _, back = gather_axes(x, range(1, x.ndim), (), [(), *(names[axis] for axis in (*rows, *columns))])
    m, n = math.prod(x.shape[1 : 1 + len(rows)]), math.prod(x.shape[1 + len(rows) :])
    y = _newton_schulz(x.reshape(len(x), m, n).astype(dtype), coefficients) * (_RMS * max(m, n) ** 0.5)
    y = back(y.astype(sent_dtype).reshape(x.shape)).astype(x_dtype)
    parts = y.reshape(len(arrays), *(shape[axis] for axis in order))
    return tuple(part.transpose(np.argsort(order)) for part in parts)


def _require_whole(path: str, x: jax.Array) -> None:
    """Refuses a shard inside of `jax.shard_map`, whose singular values are not those of the matrix."""
    if not (axes := jax.sharding.get_abstract_mesh().manual_axes):
        return

    def differs_over(value: Any) -> frozenset[str]:
        kind: Any = jax.typeof(value)
        manual = getattr(kind, "manual_axis_type", None)
        return getattr(kind, "vma", frozenset()) if manual is None else manual.varying | manual.unreduced

    if over := differs_over(x):
        problem = f"inside of shard_map the gradient of {path} differs over {sorted(over)}: its shard is no matrix"
        raise UserError(problem, allowed="an update outside of shard_map, or gradients that were summed over that axis")
    if not differs_over(jax.lax.axis_index(axes[0])):
        problem = f"inside of shard_map(check_vma=False) nobody knows whether {path} is whole"
        raise UserError(problem, allowed="shard_map with check_vma=True, or an update outside of it")


def _newton_schulz(x: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Computes five Newton-Schulz steps from x / |x|, of matrices [..., m, n]."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # the smaller square
    x = x / (jnp.linalg.norm(x, "fro", axis=(-2, -1), keepdims=True) + _EPS)
    c = coefficients.astype(x.dtype)
    for _ in range(_STEPS):
        a = x @ x.mT
        b = c[1] * a + c[2] * a @ a
        x = c[0] * x + b @ x
    return x.mT if is_tall else x
