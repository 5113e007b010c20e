"""The basis of every parameter: decided from its path, shape and dtype alone, then drawn or hashed."""

import dataclasses
import functools
import math
import re
import typing
import warnings
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.errors import UserError
from orthojax.formatting import align
from orthojax.ops import orthogonal
from orthojax.ops.statistics import wide_dtype
from orthojax.optim.axes import (
    GenericAxes,
    KernelLayout,
    Mark,
    RotatedAxes,
    checked_axes,
    is_integer,
    judge,
    without_length,
)

Kind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
Scope = Literal["layer", "parameter", "tree"]

_MAX_HAAR_SIZE = 4096  # a larger axis is left alone: its matrix would take 64 MB for every layer
_TOO_LONG = f"over {_MAX_HAAR_SIZE}"
_MAX_HAAR_RATIO = 8  # elements of the matrices of a parameter, as a multiple of its own

AxesRule = Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix Q of every parameter, and the axes that it rotates.

    Every parameter, and every layer of a stacked one, has its own Q, a function of (seed, name, layer, length) alone:
    the same on every machine and mesh (`haar` up to the rounding of LAPACK), and for scanned and unrolled layers whose
    number is the first in their path (`layers_2`, not `Transformer_0/layers_2`).
    Renaming a module changes its Q. Two parameters of one tree that would share a Q, as they are numbered in different
    ways (`a_0/w`, `a/0/w`), are refused.

    Attributes:
      kind: `hadamard`: a fixed Hadamard transform after random signs (Sylvester's and Paley's constructions over
        primes; a cosine transform, or a product with one, for other sizes); stateless. `haar`: a dense uniformly random
        matrix, as in the paper; kept in the state (float32; float64 for float64 parameters); axes over 4,096 are left
        alone. `dct`: a cosine transform after random signs. Controls: `identity`, and `signed_permutation`, under which
        Adam is invariant.
      axes: Which axes of a kernel: `output`, `input`, `both`, or those of a length (2 to 16,384), as in
        `Rotation(axes=d_model)`, by the rule `generic_axes`, which also says what is a kernel, an embedding table or
        neither; or a function (path, jax.ShapeDtypeStruct) -> RotatedAxes | None; None leaves the parameter
        alone.
      seed: 0 to 2**32 - 1.
      scope: `layer` as above. Two controls: with `parameter` the layers of a parameter share Q; with `tree` all axes of
        one size do, which for a network is little more than Adam in a different frame.
      layout: A function path -> jax.sharding.Sharding | None: how a parameter's moments are sharded, from `layout_of`
        the parameters' shardings or those of `zero1`. Needed on a mesh of Auto axes, since jit does not expose
        shardings, if rotated axes are sharded (whole axes may travel otherwise), and for `zero1`. A sharded axis is
        rotated between two all-to-alls of one shard, a whole one without communication: moments whose layout keeps
        the rotated axis whole halve the traffic. The basis never depends on the mesh. Inside a `shard_map` of your own
        an array counts as the whole parameter: keep rotated axes whole there.
      kernel_layout: Of the rule: kernels are `in_out` (flax, haiku) or `out_in` (equinox, PyTorch).
      embeddings: Of the rule: a regular expression, found in the paths of embedding tables and in no other, if their
        names do not tell; "" if there are none, which also silences the warning that none was found.

    Raises:
      ValueError: For a value that is not allowed.
    """

    kind: Kind = "hadamard"
    axes: GenericAxes | int | AxesRule = "output"
    seed: int = 0
    scope: Scope = "layer"
    layout: Callable[[str], jax.sharding.Sharding | None] | None = None
    kernel_layout: KernelLayout = "in_out"
    embeddings: str | None = None

    # Not callable, on purpose: optax.inject_hyperparams takes every callable argument for a schedule.

    def __post_init__(self):
        if not callable(self.axes):
            object.__setattr__(self, "axes", checked_axes(self.axes))
        literals = {"kind": Kind, "scope": Scope, "kernel_layout": KernelLayout}
        for name, allowed in literals.items():
            value, names = getattr(self, name), typing.get_args(allowed)
            if value not in names:
                raise ValueError(f"Rotation {name}={value!r}; allowed: {', '.join(names)}")
        if not is_integer(self.seed, 0, 2**32 - 1):
            raise ValueError(f"Rotation seed={self.seed!r}; allowed: an integer 0 to 2**32 - 1")
        object.__setattr__(self, "seed", int(self.seed))
        if self.layout is not None and not callable(self.layout):
            raise ValueError(f"Rotation layout={self.layout!r}; allowed: None or a function path -> Sharding | None")
        if callable(self.axes) and (self.kernel_layout, self.embeddings) != ("in_out", None):
            raise ValueError(
                "Rotation kernel_layout and embeddings have no effect if axes is a function; allowed: neither"
            )
        try:
            re.compile(self.embeddings or "")
        except (re.error, TypeError) as error:
            raise ValueError(
                f"Rotation embeddings={self.embeddings!r}: {error}; allowed: a regular expression"
            ) from None


DEFAULT_ROTATION = Rotation()


def require_rotation(rotation: Rotation) -> None:
    """Raises TypeError for anything but a Rotation, such as the name of a kind."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation={rotation!r:.80}; allowed: a Rotation, such as Rotation(kind='haar')")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns the plain path of a parameter, equal for every wrapping of the same tree.

    A leading `params` and the `.value` of a box (flax's Partitioned, nnx's variables) are dropped: some libraries show
    them at init and not at update. An array that is an attribute of that name has the path of its module.

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


def _basis_name(path: str, is_stacked: bool) -> tuple[str, int, bool]:
    """Returns name, number, and if it has one: equal for `layers_3/x`, `layers/3/x` and slice 3 of scanned `layers/x`.

    Names of numbered and of stacked parameters end in "/*", so that `w` and `w_0` differ.
    """
    parts = path.split("/")
    for i, part in enumerate(parts):
        if numbered := re.fullmatch(r"(?:(.*)_)?([0-9]+)", part):
            stem = [numbered[1]] if numbered[1] else []
            return "/".join([*parts[:i], *stem, *parts[i + 1 :], "*"]), int(numbered[2]) % 2**32, True
    return (f"{path}/*" if is_stacked else path), 0, False


class Group(NamedTuple):
    """One group of axes, rotated in one basis."""

    axes: tuple[int, ...]  # flattened to one axis of length `size`
    size: int
    name: str  # with the layer numbers, identifies the basis
    layers: tuple[int, ...]  # one number for each slice along the stacked axes, row-major


class Plan(NamedTuple):
    """The treatment of one parameter."""

    path: str
    groups: tuple[Group, ...] = ()
    stacked: tuple[int, ...] = ()
    stacked_shape: tuple[int, ...] = ()
    left_alone: tuple[str, ...] = ()  # reasons, of the whole parameter or of single axes
    mark: Mark = ""  # of the generic rule
    is_chosen: bool = False  # axes of it were to be rotated


def plan_leaf(rotation: Rotation, keys: tuple[Any, ...], leaf: Any) -> Plan:
    """Plans one parameter: a function of path, shape and dtype, so that init and every update agree."""
    path = leaf_path(keys)
    if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
        return Plan(path, left_alone=("not an array",))
    shape = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    found, mark = _axes_or_reason(rotation, path, shape)
    if isinstance(found, str):
        return Plan(path, left_alone=(found,), mark=mark)

    axes_of_groups, stacked = found.of(path, len(shape.shape))
    name, layer, is_numbered = _basis_name(path, bool(stacked))
    stacked_shape = tuple(shape.shape[axis] for axis in stacked)
    slices = math.prod(stacked_shape)  # of one layer, below: if no name has a number, the first axis counts layers
    layers = tuple(layer * slices + i for i in range(slices))
    of_layer = slices if is_numbered or not stacked else slices // stacked_shape[0]
    if rotation.scope != "layer":
        stacked, stacked_shape, layers, of_layer = (), (), (0,), 1
    groups, left_alone = [], []
    for i, axes in enumerate(axes_of_groups):
        size = math.prod(shape.shape[axis] for axis in axes)
        if size < 2:
            left_alone.append(f"axes {axes}: length {size}")
        elif rotation.kind == "haar" and size > _MAX_HAAR_SIZE:
            left_alone.append(f"axes {axes}: length {size} is {_TOO_LONG}")
        else:
            # Sizes too: rows of different lengths must not be parts of one sequence of signs.
            group_name = f":{size}" if rotation.scope == "tree" else f"{name}:{i}:{size}:{of_layer}"
            groups.append(Group(axes, size, group_name, layers))
    elements = sum(len(group.layers) * group.size**2 for group in groups)
    if rotation.kind == "haar" and elements > _MAX_HAAR_RATIO * shape.size:
        raise UserError(
            f"{path} {shape.shape}: haar matrices of {[group.size for group in groups]} rows have {elements} elements, "
            f"over {_MAX_HAAR_RATIO} times its {shape.size}",
            allowed="fewer rotated axes, or the rotation's kind hadamard",
        )
    return Plan(path, tuple(groups), stacked, stacked_shape, tuple(left_alone), mark, is_chosen=True)


def _axes_or_reason(rotation: Rotation, path: str, shape: jax.ShapeDtypeStruct) -> tuple[RotatedAxes | str, Mark]:
    if rotation.kind == "identity":
        return "identity rotation", ""
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return f"dtype {shape.dtype}", ""
    if shape.size == 0:
        return "empty", ""
    if not callable(rotation.axes):
        return judge(path, shape.shape, rotation.axes, rotation.kernel_layout, rotation.embeddings)
    found = rotation.axes(path, shape)
    if found is not None and not isinstance(found, RotatedAxes):
        raise TypeError(f"{path}: the axes rule returned {found!r}; allowed: RotatedAxes or None")
    return ("by the axes rule" if found is None else found), ""


def plan_tree(rotation: Rotation, params: Any) -> list[tuple[Any, Plan]]:
    """Returns (leaf, plan) of every parameter of a tree.

    Raises:
      ValueError: If two parameters have one name or would share a basis, but in a scope that shares them.
    """
    found, names, bases = [], {}, {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        plan, shown = plan_leaf(rotation, keys, leaf), jax.tree_util.keystr(keys)
        if plan.path in names:
            raise ValueError(f"{names[plan.path]} and {shown} are both the parameter {plan.path!r}; allowed: one")
        names[plan.path] = shown
        found.append((leaf, plan))
        for group in plan.groups if rotation.scope == "layer" else ():
            key = _name_key(group)
            # As `hash_bits` counts, modulo 2**32.
            rows = dict.fromkeys(((key, layer * group.size % 2**32) for layer in group.layers), shown)
            if shared := bases.keys() & rows.keys():
                raise ValueError(
                    f"{bases[shared.pop()]} and {shown} would share a basis, as their names differ only in how they "
                    "are numbered; allowed: another name for one of them"
                )
            bases |= rows
    return found


def _name_key(group: Group) -> int:
    """Returns the name of a basis as a number, 0 to 2**32 - 1."""
    return zlib.crc32(group.name.encode())


def _warn_of_plans(rotation: Rotation, plans: list[tuple[Any, Plan]]) -> None:
    """Warns if axes are too long for Haar matrices, if none has the asked length, and if no table is found."""
    problems = []
    if too_long := [plan.path for _, plan in plans if any(_TOO_LONG in reason for reason in plan.left_alone)]:
        shown = ", ".join(too_long[:3])
        problems.append(f"haar does not rotate axes {_TOO_LONG} ({shown}); kind='hadamard' does")
    kernels = [plan for _, plan in plans if plan.mark != "embedding"]
    tables = {plan.path: leaf.shape[-1] for leaf, plan in plans if plan.mark == "embedding"}
    if isinstance(rotation.axes, int):
        without = any(without_length(rotation.axes) in plan.left_alone for plan in kernels)
        if without and not any(plan.is_chosen for plan in kernels):
            problems.append(f"Rotation(axes={rotation.axes}) should be d_model, and no kernel has an axis so long")
        elif tables and rotation.axes not in tables.values():
            problems.append(f"Rotation(axes={rotation.axes}) should be d_model, and no embedding table is so wide")
    rotated = [plan.path for plan in kernels if plan.groups]
    if rotated and not tables and not callable(rotation.axes) and rotation.embeddings != "":
        problems.append(
            f"the rotation found kernels ({', '.join(rotated[:3])}) but no embedding table by name; one that is not "
            "rotated along d_model brings the outliers back. Rotation(embeddings=PATTERN) names the tables, "
            "embeddings='' says that there are none"
        )
    for problem in problems:
        hint = "print(orthojax.optim.describe(rotation, params)) shows what is found"
        warnings.warn(f"{problem}; {hint}", stacklevel=2)


# The numbers of a basis: matrices are kept in the state, signs are constants of the program.


def _basis_path(path: str, i: int) -> list[str]:
    return [*(path.split("/") if path else []), f"basis_{i}"]


def _basis_shape(plan: Plan, group: Group) -> tuple[int, ...]:
    return (*plan.stacked_shape, group.size, group.size)


def _draw_haar(rotation: Rotation, plan: Plan, group: Group, dtype: Any) -> jax.Array:
    """Draws Q of every layer, in a callback of known shape: eval_shape runs no QR, jit embeds no such constant."""
    key, shape = _name_key(group), _basis_shape(plan, group)
    words = np.dtype(dtype).itemsize // 4

    def draw() -> np.ndarray:
        seeds = [(rotation.seed, key, layer) for layer in group.layers]
        matrices = np.stack([orthogonal.haar(seed, group.size) for seed in seeds]).reshape(shape).astype(dtype)
        return matrices.view(np.uint32).reshape(*shape, words)

    # Jitted: a callback by itself is no program of a mesh with Explicit axes.
    @jax.jit
    def drawn() -> jax.Array:
        # As words: the callback's thread does not know of a local jax.enable_x64, and would refuse float64.
        bits = jax.pure_callback(draw, jax.ShapeDtypeStruct((*shape, words), np.uint32))
        return jax.lax.bitcast_convert_type(bits if words > 1 else bits[..., 0], dtype)

    return drawn()


def init_basis(rotation: Rotation, params: optax.Params) -> Any:
    """Makes what the state keeps of the bases of `params`; see `RotationState.basis`."""
    plans = plan_tree(rotation, params)
    _warn_of_plans(rotation, plans)
    if rotation.kind != "haar":
        return ()
    found: dict[str, Any] = {}
    for leaf, plan in plans:
        for i, group in enumerate(plan.groups):
            *parents, name = _basis_path(plan.path, i)
            node = functools.reduce(lambda node, part: node.setdefault(part, {}), parents, found)
            node[name] = _draw_haar(rotation, plan, group, wide_dtype(leaf))
    # An array, not an empty dict: optax.tree.map_params must see a non-parameter. Orbax saves none of size 0.
    return found or jnp.zeros((), jnp.float32)


def _stored_basis(basis: Any, plan: Plan, i: int) -> jax.Array:
    for part in _basis_path(plan.path, i):
        if not isinstance(basis, dict) or part not in basis:
            raise ValueError(
                f"{plan.path!r} has no basis in the state; allowed: the tree and the kind that the state was made for"
            )
        basis = basis[part]
    if basis.shape != (shape := _basis_shape(plan, plan.groups[i])):
        raise ValueError(f"{plan.path}: the basis in the state has shape {basis.shape}; allowed: {shape}")
    return basis


def basis_constants(rotation: Rotation, plan: Plan, basis: Any, transpose: bool) -> tuple[tuple[Any, ...], ...]:
    """Returns for each group, all layers: (Q [*stacked, n, n],), or (signs [*stacked, n],) and maybe an order."""
    if rotation.kind == "haar":
        return tuple((_stored_basis(basis, plan, i),) for i in range(len(plan.groups)))
    found = []
    for group in plan.groups:
        key, shape = rotation.seed ^ _name_key(group), (*plan.stacked_shape, group.size)
        # The program holds one byte for each sign.
        constants = (orthogonal.hash_signs(key, group.layers, group.size).reshape(shape),)
        if rotation.kind == "signed_permutation":
            # Another key: the order of the hashes is not independent of their top bits.
            order = orthogonal.hash_permutations(key ^ 0xFFFFFFFF, group.layers, group.size).reshape(shape)
            constants += (np.argsort(order, axis=-1) if transpose else order,)
        found.append(constants)
    return tuple(found)


class Description(dict[str, str]):
    """The treatment of every parameter, by path; as a text, a table with shapes and marks."""

    def __init__(self, rows: list[tuple[str, str, str, str]]):
        """Takes (path, shape, what, mark) of every parameter."""
        super().__init__((path, what) for path, _, what, _ in rows)
        self.rows = rows

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in align([("parameter", "shape", "rotation", ""), *self.rows]))


def describe(rotation: Rotation, params: Any) -> Description:
    """Describes what is rotated and how, and what is left alone and why.

    Args:
      rotation: Which basis.
      params: Arrays, or the jax.ShapeDtypeStruct of `jax.eval_shape`.

    Returns:
      A dict by path, which prints as a table of path, shape, rotated axes and their kind, and a mark. The mark is
      `embedding`, or `unsure` for a guess: the stacked layers among three or more axes, an array of another name than
      kernel, weight or w that is taken for a kernel, and one with a single long axis that is taken for a vector.

    Raises:
      ValueError: As the init of the optimizer would.

    >>> shapes = {"wte": (512, 768), "mlp": {"kernel": (12, 768, 1000), "bias": (12, 1000)}}
    >>> params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    >>> print(describe(Rotation(), params))
    parameter   shape          rotation
    mlp/bias    12, 1000       left alone: named 'bias'
    mlp/kernel  12, 768, 1000  axes (2,): hadamard 1000 = 25 (cosine) x 40, 12 layers  unsure
    wte         512, 768       axes (1,): hadamard 768 = 32 x 24                       embedding
    >>> describe(Rotation(kernel_layout="out_in"), {"weight": jnp.zeros((8, 64))})["weight"]
    'axes (0,): hadamard 8'
    """
    require_rotation(rotation)
    rows = []
    for leaf, plan in plan_tree(rotation, params):
        parts = []
        for group in plan.groups:
            text = f"axes {group.axes}: {rotation.kind} {group.size}"
            if rotation.kind == "hadamard":
                sizes = orthogonal.factor_sizes(group.size)
                names = [f"{n}" if orthogonal.hadamard_matrix(n) is not None else f"{n} (cosine)" for n in sizes]
                if names != [str(group.size)]:
                    text += " = " + " x ".join(names) if names else " (cosine)"
            parts.append(text + (f", {len(group.layers)} layers" if plan.stacked else ""))
        what = "; ".join([*parts, *(f"left alone: {reason}" for reason in plan.left_alone)])
        rows.append((plan.path, ", ".join(map(str, getattr(leaf, "shape", ()))), what, plan.mark))
    return Description(rows)
