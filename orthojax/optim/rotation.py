"""Which basis on which axes of which parameter: decided from its path, shape and dtype alone."""

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.ops import orthogonal

Kind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
GenericAxes = Literal["output", "input", "both"]
Scope = Literal["layer", "parameter", "tree"]

_MAX_GENERIC_SIZE = 16_384
_MAX_HAAR_SIZE = 4096  # a larger axis is left alone: its matrix would take 64 MB for every layer
_MAX_HAAR_RATIO = 8  # elements of the matrices of a parameter, as a multiple of its own
_VECTOR_NAMES = ("bias", "b", "scale", "offset")


@dataclasses.dataclass(frozen=True)
class RotatedAxes:
    """The rotated axes of one parameter.

    Axes in neither field share the basis: a kernel [in, out] with `groups=((1,),)` multiplies every row with one Q.

    Attributes:
      groups: Each group of axes is flattened to one axis and rotated in its own basis; a bare integer is a group of
        one. Axes may be negative.
      stacked: Axes that count layers, experts, ...: every slice along them has its own basis. A scanned layer axis
        belongs here.

    Raises:
      ValueError: For no group, an empty one, or an axis named twice.

    >>> RotatedAxes((-1,), stacked=(0,))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    """

    groups: tuple[tuple[int, ...] | int, ...]
    stacked: tuple[int, ...] = ()

    def __post_init__(self):
        if not isinstance(self.groups, tuple | list) or not isinstance(self.stacked, tuple | list):
            raise ValueError(
                f"RotatedAxes(groups={self.groups}, stacked={self.stacked}); allowed: tuples, as in RotatedAxes((-1,))"
            )
        groups = tuple((group,) if isinstance(group, int) else tuple(group) for group in self.groups)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "stacked", tuple(self.stacked))
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if not groups or not all(groups) or len(set(named)) < len(named):
            raise ValueError(f"{self}; allowed: at least one group of at least one axis, and every axis once")

    def of(self, path: str, ndim: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """(groups, stacked) with axes in 0..ndim-1; ValueError where the parameter has no such axis."""
        groups: Any = self.groups  # tuples since __post_init__
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if any(not -ndim <= axis < ndim for axis in named) or len({axis % ndim for axis in named}) < len(named):
            raise ValueError(f"{path}: {self} does not fit a parameter of {ndim} axes; allowed: each of its axes once")
        return tuple(tuple(a % ndim for a in group) for group in groups), tuple(a % ndim for a in self.stacked)


AxesRule = Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]


def generic_axes(path: str, leaf: jax.ShapeDtypeStruct, axes: GenericAxes = "output") -> RotatedAxes | None:
    """The default rule, for any tree; a rule of your own may fall back on it.

    Left alone: fewer than two axes, and the names bias, b, scale, offset (a scanned scale is [L, d]). Where the path
    contains "embed": the last axis, one basis for all rows. Else the last two axes are a kernel [in, out] and those
    before them stacked layers: right for Dense and Linear of flax and haiku, scanned or not. Name the axes yourself (a
    rule for `Rotation.axes`) where it is not:

    - Equinox's and PyTorch's kernels are [out, in]: ask for "input" to rotate their output. A norm scale called weight
      is safe as a vector, but stacked [L, d] it looks like a kernel.
    - flax's attention: query, key and value [d, heads, head_dim] are rotated within each head only, every row of d
      counting as a layer; out [heads, head_dim, d] has a basis for each head. Valid but weak, and `haar` refuses out
      where d is over 8 head_dim, and the others where head_dim is over 8 heads. `RotatedAxes(((1, 2),))` and
      `RotatedAxes((2,))` take them for the matrices [d, heads * head_dim] and [heads * head_dim, d].
    - Convolutions: each spatial position counts as a layer.

    Args:
      path: The parameter's path, as `describe` prints it.
      leaf: Its shape and dtype.
      axes: The kernel axes: `output` is the last, `input` the one before. Only those of length 2 to 16,384 are rotated.

    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), jnp.float32))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    """
    found = _generic_axes(path, leaf, axes)
    return None if isinstance(found, str) else found


def _generic_axes(path: str, leaf: jax.ShapeDtypeStruct, axes: GenericAxes) -> RotatedAxes | str:
    """As `generic_axes`, with the reason where nothing is rotated."""
    name = path.rpartition("/")[2]
    if len(leaf.shape) < 2:
        return f"{len(leaf.shape)} axes, fewer than 2"
    if name in _VECTOR_NAMES:
        return f"named {name!r}"
    if "embed" in path.lower():
        chosen, stacked = [-1], ()
    else:
        chosen = {"output": [-1], "input": [-2], "both": [-2, -1]}[axes]
        stacked = tuple(range(len(leaf.shape) - 2))
    groups = tuple((axis,) for axis in chosen if 2 <= leaf.shape[axis] <= _MAX_GENERIC_SIZE)
    return RotatedAxes(groups, stacked) if groups else f"no {axes} axis of length 2 to {_MAX_GENERIC_SIZE}"


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which orthogonal matrix Q, on which axes of which parameter.

    Every parameter, and every layer of a stacked one, has its own Q, a function of (seed, name, layer) alone: the same
    on every machine and mesh (`haar` up to the rounding of LAPACK), and for scanned and unrolled layers. Renaming a
    module changes its Q; names that differ only in how they are numbered (`a_0/w`, `a/0/w`) share one.

    Attributes:
      kind: `hadamard`: a fixed Hadamard transform after random signs (Sylvester's and Paley's constructions over
        primes; a cosine transform, or a product with one, for other sizes); stateless. `haar`: a dense uniformly random
        matrix, as in the paper; kept in the state (float32; float64 for float64 parameters); axes over 4,096 are left
        alone. `dct`: a cosine transform after random signs. Controls: `identity`, and `signed_permutation`, under which
        Adam is invariant.
      axes: `output` (last kernel axis), `input` (the one before) or `both`, by the rule `generic_axes`; or a function
        (path, jax.ShapeDtypeStruct) -> RotatedAxes | None, where None leaves the parameter alone.
      seed: 0 to 2**32 - 1.
      scope: `layer` as above. Two controls: with `parameter` the layers of a parameter share Q; with `tree` all axes of
        one size do, which for a network is little more than Adam in a different frame.
      layout: A function path -> jax.sharding.Sharding | None: how a parameter's moments are sharded, from `layout_of`
        the parameters' shardings or those of `zero1`. Needed on a mesh of Auto axes, where jit does not expose
        shardings, if rotated axes are sharded (whole axes may travel otherwise), and for `zero1`. A sharded axis is
        rotated between two all-to-alls of one shard, a whole one without communication: moments whose layout keeps
        the rotated axis whole halve the traffic. The basis never depends on the mesh. Inside a `shard_map` of your own
        an array counts as the whole parameter: keep rotated axes whole there.

    Raises:
      ValueError: For a value that is not allowed.
    """

    kind: Kind = "hadamard"
    axes: GenericAxes | AxesRule = "output"
    seed: int = 0
    scope: Scope = "layer"
    layout: Callable[[str], jax.sharding.Sharding | None] | None = None

    # Not callable, on purpose: optax.inject_hyperparams takes every callable argument for a schedule.

    def __post_init__(self):
        for name, allowed in (("kind", Kind), ("scope", Scope), ("axes", GenericAxes)):
            value, names = getattr(self, name), typing.get_args(allowed)
            if value not in names and not (name == "axes" and callable(value)):
                extra = " or a function (path, shape) -> RotatedAxes | None" if name == "axes" else ""
                raise ValueError(f"Rotation {name}={value!r}; allowed: {', '.join(names)}{extra}")
        integer = isinstance(self.seed, int | np.integer) and not isinstance(self.seed, bool)
        if not integer or not 0 <= self.seed < 2**32:
            raise ValueError(f"Rotation seed={self.seed!r}; allowed: an integer 0 to 2**32 - 1")
        object.__setattr__(self, "seed", int(self.seed))
        if self.layout is not None and not callable(self.layout):
            raise ValueError(f"Rotation layout={self.layout!r}; allowed: None or a function path -> Sharding | None")


DEFAULT_ROTATION = Rotation()


def require_rotation(rotation: Rotation) -> None:
    """Raises TypeError for what only looks like a rotation, such as the name of a kind."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation={rotation!r}; allowed: a Rotation, such as Rotation(kind='haar')")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """The plain path of a parameter, equal for every wrapping of the same tree.

    A leading `params` and the `.value` of a box (flax's Partitioned, nnx's variables) are dropped: some libraries show
    them at init and not at update.

    Args:
      keys: A key path of `jax.tree_util`.

    Returns:
      Names separated by "/"; "" for a tree that is one array.

    >>> jax.tree_util.tree_map_with_path(lambda keys, _: leaf_path(keys), {"params": {"mlp": [0]}})
    {'params': {'mlp': ['mlp/0']}}
    """
    # Only an attribute is a box: a dict entry "value" may be the value projection.
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value":
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/").removeprefix("params/")


def _basis_name(path: str, is_stacked: bool) -> tuple[str, int]:
    """Name and number that identify a basis: equal for `layers_3/x`, `layers/3/x` and slice 3 of scanned `layers/x`.

    Names of numbered and of stacked parameters end in "/*", so that `w` and `w_0` differ.
    """
    parts = path.split("/")
    for i, part in enumerate(parts):
        if numbered := re.fullmatch(r"(?:(.*)_)?([0-9]+)", part):
            stem = [numbered[1]] if numbered[1] else []
            return "/".join([*parts[:i], *stem, *parts[i + 1 :], "*"]), int(numbered[2]) % 2**32
    return (f"{path}/*" if is_stacked else path), 0


class Group(NamedTuple):
    """One group of axes, rotated in one basis."""

    axes: tuple[int, ...]  # flattened to one axis of length `size`
    size: int
    name: str  # with the layer numbers, identifies the basis
    layers: tuple[int, ...]  # one number for each slice along the stacked axes, row-major


class Plan(NamedTuple):
    """What happens to one parameter."""

    path: str
    groups: tuple[Group, ...] = ()
    stacked: tuple[int, ...] = ()
    stacked_shape: tuple[int, ...] = ()
    left_alone: tuple[str, ...] = ()  # reasons, of the whole parameter or of single axes


def plan_leaf(rotation: Rotation, keys: tuple[Any, ...], leaf: Any) -> Plan:
    """What happens to one parameter: a function of path, shape and dtype, so that init and every update agree."""
    path = leaf_path(keys)
    if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
        return Plan(path, left_alone=("not an array",))
    shape = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    found = _axes_or_reason(rotation, path, shape)
    if isinstance(found, str):
        return Plan(path, left_alone=(found,))

    axes_of_groups, stacked = found.of(path, len(shape.shape))
    name, layer = _basis_name(path, bool(stacked))
    stacked_shape = tuple(shape.shape[axis] for axis in stacked)
    slices = math.prod(stacked_shape)
    layers = tuple(layer * slices + i for i in range(slices)) if stacked else (layer,)
    if rotation.scope != "layer":
        stacked, stacked_shape, layers = (), (), (0,)
    groups, left_alone = [], []
    for i, axes in enumerate(axes_of_groups):
        size = math.prod(shape.shape[axis] for axis in axes)
        if size < 2:
            left_alone.append(f"axes {axes}: length {size}")
        elif rotation.kind == "haar" and size > _MAX_HAAR_SIZE:
            left_alone.append(f"axes {axes}: length {size} is over {_MAX_HAAR_SIZE}")
        else:
            groups.append(Group(axes, size, ":" if rotation.scope == "tree" else f"{name}:{i}", layers))
    elements = sum(len(group.layers) * group.size**2 for group in groups)
    if rotation.kind == "haar" and elements > _MAX_HAAR_RATIO * shape.size:
        raise ValueError(
            f"{path} {shape.shape}: haar matrices of {[group.size for group in groups]} rows have {elements} elements, "
            f"over {_MAX_HAAR_RATIO} times its {shape.size}; allowed: fewer axes (Rotation.axes), or kind='hadamard'"
        )
    return Plan(path, tuple(groups), stacked, stacked_shape, tuple(left_alone))


def _axes_or_reason(rotation: Rotation, path: str, shape: jax.ShapeDtypeStruct) -> RotatedAxes | str:
    if rotation.kind == "identity":
        return "identity rotation"
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return f"dtype {shape.dtype}"
    if shape.size == 0:
        return "empty"
    if not callable(rotation.axes):
        return _generic_axes(path, shape, rotation.axes)
    found = rotation.axes(path, shape)
    if found is not None and not isinstance(found, RotatedAxes):
        raise TypeError(f"{path}: the axes rule returned {found!r}; allowed: RotatedAxes or None")
    return "by the axes rule" if found is None else found


def describe(rotation: Rotation, params: Any) -> dict[str, str]:
    """What is rotated and how, and what is left alone and why, by path.

    Args:
      rotation: Which basis.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.

    Raises:
      ValueError: As the init of the optimizer would.

    >>> params = {"kernel": jnp.zeros((2, 8, 768)), "bias": jnp.zeros(8)}
    >>> for path, what in describe(Rotation(), params).items():
    ...     print(f"{path}: {what}")
    bias: left alone: 1 axes, fewer than 2
    kernel: axes (2,): hadamard 768 = 24 x 32, 2 layers
    >>> describe(Rotation(), {"kernel": jnp.zeros((8, 1000))})
    {'kernel': 'axes (1,): hadamard 1000 = 25 (cosine) x 40'}
    """
    require_rotation(rotation)
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        plan = plan_leaf(rotation, keys, leaf)
        parts = []
        for group in plan.groups:
            text = f"axes {group.axes}: {rotation.kind} {group.size}"
            if rotation.kind == "hadamard":
                sizes = orthogonal.factor_sizes(group.size)
                names = [f"{n}" if orthogonal.hadamard_matrix(n) is not None else f"{n} (cosine)" for n in sizes]
                if names != [str(group.size)]:
                    text += " = " + " x ".join(names) if names else " (cosine)"
            parts.append(text + (f", {len(group.layers)} layers" if plan.stacked else ""))
        found[plan.path] = "; ".join([*parts, *(f"left alone: {reason}" for reason in plan.left_alone)])
    return found
