"""The basis of every parameter: decided only from its path, shape and dtype, then drawn or hashed."""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import math
import re
import typing
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax.errors import UserError
from orthojax.formatting import align
from orthojax.ops import orthogonal
from orthojax.ops.statistics import wide_dtype
from orthojax.optim import axes as axes_rule
from orthojax.optim.axes import GenericAxes, KernelLayout, Mark, RotatedAxes, Rule, checked_axes, is_integer

Kind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
Scope = Literal["layer", "parameter", "tree"]

_MAX_HAAR_SIZE = 4096  # a larger axis is left alone: its matrix would take 64 MB for every layer
_TOO_LONG = f"over {_MAX_HAAR_SIZE}"
_MAX_HAAR_RATIO = 8  # elements of the matrices of a parameter, as a multiple of its own

AxesRule = Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The orthogonal matrix Q of every parameter, and the axes that it rotates.

    Every parameter, and every layer of a stacked one, has its own Q, a function of only (seed, name, layer, length):
    equal on every machine and mesh (`haar` up to the rounding of LAPACK), and for scanned and unrolled layers whose
    number is the first in their path (`layers_2`, not `Transformer_0/layers_2`). Renaming a module changes its Q. Two
    parameters of one tree that would share a Q because they are numbered in different ways (`a_0/w`, `a/0/w`) are
    refused.

    Attributes:
      kind: `hadamard`: a fixed Hadamard transform after random signs (Sylvester's and Paley's constructions over
        primes; a cosine transform, or a product with one, for other sizes); stateless. `haar`: a dense uniformly random
        matrix, as in the paper; kept in the state (float32; float64 for float64 parameters); axes over 4,096 are left
        alone. `dct`: a cosine transform after random signs. Controls: `identity`, and `signed_permutation`, under which
        Adam is invariant.
      axes: A number is d_model, the width of the residual stream: the axis of that length is rotated in every kernel
        and embedding table, by the rule `generic_axes`. None finds d_model from names and shapes, and refuses an
        ambiguous tree (two towers, no embedding table, a masked part). `output`, `input` or `both` of every kernel are
        for comparison: outliers come back with them in long runs. It can also be a function
        (path, jax.ShapeDtypeStruct) -> RotatedAxes | None; None leaves the parameter alone.
      seed: 0 to 2**32 - 1.
      scope: `layer` as above. Two controls: with `parameter` the layers of a parameter share Q; with `tree` all axes of
        one size share it, which for a network is little more than Adam in a different frame.
      layout: A function path -> jax.sharding.Sharding | None: how a parameter's moments are sharded, made by
        `layout_of` from the parameters' shardings or those of `zero1`. Needed for `zero1`, and on a mesh of Auto axes
        if rotated axes are sharded (otherwise whole axes may be transferred). A sharded axis is rotated between two
        all-to-alls of one shard, a whole axis without communication. The basis never depends on the mesh. Inside your
        own `shard_map`, an array counts as the whole parameter: keep rotated axes whole there.
      kernel_layout: For the rule: kernels are `in_out` (flax, haiku) or `out_in` (equinox, PyTorch).
      embeddings: For the rule: a regular expression that matches in the paths of embedding tables and in no others, if
        their names do not show it; "" if there are none, which also silences the warning that none was found.
      stacked: For the rule: the axis that counts layers in kernels of three axes or more, such as 1 for kernels
        [d_model, layers, f]; None for the first ones.

    """

    kind: Kind = "hadamard"
    axes: GenericAxes | int | AxesRule | None = None
    seed: int = 0
    scope: Scope = "layer"
    layout: Callable[[str], jax.sharding.Sharding | None] | None = None
    kernel_layout: KernelLayout = "in_out"
    embeddings: str | None = None
    stacked: int | None = None

    # Not callable, on purpose: optax.inject_hyperparams takes every callable argument for a schedule.

    def __post_init__(self):
        if self.axes is not None and not callable(self.axes):
            object.__setattr__(self, "axes", checked_axes(self.axes))
        literals = {"kind": Kind, "scope": Scope, "kernel_layout": KernelLayout}
        for name, allowed in literals.items():
            value, names = getattr(self, name), typing.get_args(allowed)
            if not isinstance(value, str) or value not in names:
                raise ValueError(f"Rotation {name}={value!r}; allowed: {', '.join(names)}")
        if not is_integer(self.seed, 0, 2**32 - 1):
            raise ValueError(f"Rotation seed={self.seed!r}; allowed: an integer 0 to 2**32 - 1")
        object.__setattr__(self, "seed", int(self.seed))
        if self.layout is not None and not callable(self.layout):
            raise ValueError(f"Rotation layout={self.layout!r}; allowed: None or a function path -> Sharding | None")
        if self.stacked is not None and not is_integer(self.stacked, 0, 7):
            raise ValueError(f"Rotation stacked={self.stacked!r}; allowed: None, or an axis from 0 to 7")
        if callable(self.axes) and (self.kernel_layout, self.embeddings, self.stacked) != ("in_out", None, None):
            raise ValueError("Rotation kernel_layout, embeddings and stacked: allowed only if axes is no function")
        try:
            re.compile(self.embeddings or "")
        except (re.error, TypeError) as error:
            raise ValueError(f"Rotation embeddings={self.embeddings!r} is no regular expression: {error}") from None


DEFAULT_ROTATION = Rotation()


def require_rotation(rotation: Rotation) -> None:
    """Raises TypeError for anything but a Rotation, such as the name of a kind."""
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation={rotation!r:.80}; allowed: a Rotation, such as Rotation(kind='haar')")


def leaf_path(keys: tuple[Any, ...]) -> str:
    """Returns the plain path of a parameter, equal for every wrapping of the same tree.

    A leading `params` and the `.value` of a box (flax's Partitioned, nnx's variables) are dropped: some libraries show
    them at init and not at update. The path is "" for a tree that is one array.

    >>> jax.tree_util.tree_map_with_path(lambda keys, _: leaf_path(keys), {"params": {"mlp": [0]}})
    {'params': {'mlp': ['mlp/0']}}
    """
    # Only an attribute is a box: a dict entry "value" may be the value projection.
    is_box = bool(keys) and isinstance(keys[-1], jax.tree_util.GetAttrKey) and keys[-1].name == "value"
    return _plain(keys[:-1] if is_box else keys)


def _plain(keys: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/").removeprefix("params/")


def leaf_paths(tree: Any) -> list[str]:
    """Returns the path of every leaf, as `leaf_path`, but the whole path for an attribute `value` with siblings."""
    every = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_left_out)  # frozen siblings are siblings
    siblings = collections.Counter(keys[:-1] for keys, _ in every)
    present = [keys for keys, leaf in every if not _is_left_out(leaf)]
    return [leaf_path(keys) if siblings[keys[:-1]] == 1 else _plain(keys) for keys in present]


def _is_left_out(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _basis_name(path: str, is_stacked: bool) -> tuple[str, int, bool]:
    """Returns name, number, whether it has one: equal for `layers_3/x`, `layers/3/x` and slice 3 of scanned `layers/x`.

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
    shape: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    stacked: tuple[int, ...] = ()
    stacked_shape: tuple[int, ...] = ()
    left_alone: tuple[str, ...] = ()  # reasons, for the whole parameter or for single axes
    mark: Mark = ""  # of the generic rule
    is_chosen: bool = False  # whether some of its axes were to be rotated


class TreePlan(NamedTuple):
    """The treatment of a tree: a function of paths, shapes and dtypes, so that init and every update agree."""

    name: str  # of all bases and axes; equal for scanned and unrolled layers
    parameters: tuple[Plan, ...]  # one for each leaf


def plan_tree(rotation: Rotation, tree: Any) -> TreePlan:
    """Plans every parameter of a tree of arrays or jax.ShapeDtypeStruct.

    Raises:
      ValueError: If two parameters have one name or would share a basis unasked; UserError with `Rotation.axes=None` if
        d_model is in doubt.
    """
    leaves = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    nodes = jax.tree.leaves(tree, is_leaf=_is_left_out)
    is_part = any(isinstance(node, optax.MaskedNode) for node in nodes)
    return _plan_leaves(rotation, tuple((path, _shape_of(leaf)) for path, leaf in leaves), is_part)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct | None:
    is_array = hasattr(leaf, "shape") or isinstance(leaf, int | float | complex)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if is_array else None


@functools.lru_cache(maxsize=64)  # outside jit, every update plans
def _plan_leaves(
    rotation: Rotation, leaves: tuple[tuple[str, jax.ShapeDtypeStruct | None], ...], is_part: bool
) -> TreePlan:
    """Plans leaves (path, shape and dtype; None if it is not an array)."""
    shapes = {path: s.shape for path, s in leaves if s is not None and jnp.issubdtype(s.dtype, jnp.floating)}
    axes = rotation.axes
    if axes is None and rotation.kind != "identity":
        axes = axes_rule.find_d_model(shapes, rotation.embeddings, is_part, rotation.stacked)
    rule = axes if callable(axes) else Rule(axes, rotation.kernel_layout, rotation.embeddings, rotation.stacked)
    plans = tuple(_plan_leaf(rotation, rule, path, shape, shapes) for path, shape in leaves)
    if len({plan.path for plan in plans}) < len(plans):
        (name, _), *_ = collections.Counter(plan.path for plan in plans).most_common(1)
        raise ValueError(f"two parameters are named {name!r}; allowed: one")
    bases = {}
    for plan, group in [(p, g) for p in plans for g in p.groups] if rotation.scope == "layer" else ():
        key = _name_key(group)
        # As `hash_bits` counts, modulo 2**32.
        rows = dict.fromkeys(((key, layer * group.size % 2**32) for layer in group.layers), plan.path)
        if shared := bases.keys() & rows.keys():
            problem = "would share a basis, as their names differ only in how they are numbered"
            both = f"{bases[shared.pop()]!r} and {plan.path!r}"
            raise ValueError(f"{both} {problem}; allowed: another name for one of them")
        bases |= rows
    return TreePlan(_plan_name(rotation, axes, plans), plans)


def _plan_name(rotation: Rotation, axes: Any, plans: tuple[Plan, ...]) -> str:
    found = []
    for plan in plans:
        for group in plan.groups:
            name = group.name if rotation.scope == "layer" else plan.path
            from_last = [axis - len(plan.shape) for axis in group.axes]
            found += [f"{name} {layer} {from_last}" for layer in group.layers]
    checksum = zlib.crc32("\n".join(sorted(found)).encode())
    of_axes = "rule" if callable(axes) else axes
    return f"{rotation.kind}_axes_{of_axes}_seed_{rotation.seed}_{rotation.scope}_{checksum:08x}"


def _plan_leaf(
    rotation: Rotation,
    rule: Rule | AxesRule,
    path: str,
    shape: jax.ShapeDtypeStruct | None,
    shapes: axes_rule.Shapes,
) -> Plan:
    if shape is None:
        return Plan(path, left_alone=("not an array",))
    found, mark = _axes_or_reason(rotation, rule, path, shape, shapes)
    if isinstance(found, str):
        return Plan(path, shape.shape, left_alone=(found,), mark=mark)

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
        most = f"{_MAX_HAAR_RATIO} times its {shape.size}"
        problem = f"haar matrices of {[group.size for group in groups]} rows have {elements} elements, over {most}"
        raise UserError(f"{path} {shape.shape}: {problem}", allowed="fewer rotated axes, or the kind hadamard")
    return Plan(path, shape.shape, tuple(groups), stacked, stacked_shape, tuple(left_alone), mark, is_chosen=True)


def _axes_or_reason(
    rotation: Rotation, rule: Rule | AxesRule, path: str, shape: jax.ShapeDtypeStruct, shapes: axes_rule.Shapes
) -> tuple[RotatedAxes | str, Mark]:
    if rotation.kind == "identity":
        return "identity rotation", ""
    if not jnp.issubdtype(shape.dtype, jnp.floating):
        return f"dtype {shape.dtype}", ""
    if shape.size == 0:
        return "empty", ""
    if isinstance(rule, Rule):
        return axes_rule.judge(path, shape.shape, rule, shapes)
    found = rule(path, shape)
    if found is not None and not isinstance(found, RotatedAxes):
        raise TypeError(f"{path}: the axes rule returned {found!r}; allowed: RotatedAxes or None")
    return ("by the axes rule" if found is None else found), ""


def _name_key(group: Group) -> int:
    return zlib.crc32(group.name.encode())


def _warn_of_plans(rotation: Rotation, tree_plan: TreePlan) -> None:
    """Warns if axes are too long for Haar matrices, if none has the asked length or no table is found; of guesses."""
    problems, plans = [], tree_plan.parameters
    if too_long := [plan.path for plan in plans if any(_TOO_LONG in reason for reason in plan.left_alone)]:
        shown = ", ".join(too_long[:3])
        problems.append(f"haar does not rotate axes {_TOO_LONG} ({shown}); kind='hadamard' does")
    kernels = [plan for plan in plans if plan.mark != "embedding"]
    tables = [plan for plan in plans if plan.mark == "embedding"]
    if isinstance(rotation.axes, int):
        without = any(axes_rule.without_length(rotation.axes) in plan.left_alone for plan in kernels)
        if without and not any(plan.is_chosen for plan in kernels):
            problems.append(f"Rotation(axes={rotation.axes}) should be d_model, and no kernel has an axis so long")
        elif tables and not any(rotation.axes in plan.shape for plan in tables):
            problems.append(f"Rotation(axes={rotation.axes}) should be d_model, and no embedding table is so wide")
    rotated = [plan.path for plan in kernels if plan.groups]
    if rotated and not tables and not callable(rotation.axes) and rotation.embeddings != "":
        problems.append(
            f"the rotation found kernels ({', '.join(rotated[:3])}) but no embedding table by name; one that is not "
            "rotated along d_model brings the outliers back. Rotation(embeddings=PATTERN) names the tables, "
            "embeddings='' says that there are none"
        )
    if unsure := [plan.path for plan in plans if plan.mark == "unsure"]:
        shown = ", ".join(path or "the array itself" for path in unsure[:3]) + (", ..." if len(unsure) > 3 else "")
        problems.append(f"the treatment of {len(unsure)} of {len(plans)} parameters is a guess ({shown})")
    for problem in problems:
        hint = "print(orthojax.optim.describe(rotation, params)) shows what is found"
        warnings.warn(f"{problem}; {hint}", stacklevel=2)


# The numbers of a basis: matrices are kept in the state; signs are in the program, as constants or computed.


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

    # Jitted: a callback by itself is not a program of a mesh with Explicit axes.
    @jax.jit
    def drawn() -> jax.Array:
        # As words: the callback's thread does not know of a local jax.enable_x64, and would refuse float64.
        bits = jax.pure_callback(draw, jax.ShapeDtypeStruct((*shape, words), np.uint32))
        return jax.lax.bitcast_convert_type(bits if words > 1 else bits[..., 0], dtype)

    basis, given = drawn(), rotation.layout(plan.path) if rotation.layout else None
    if isinstance(given, NamedSharding) and isinstance(basis, jax.core.Tracer):
        # From the device of the callback to all, before a part: in one step XLA warns.
        everywhere = NamedSharding(given.mesh, PartitionSpec())
        is_explicit = AxisType.Explicit in given.mesh.axis_types
        basis = (jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint)(basis, everywhere)
    return basis


_noted: contextvars.ContextVar[dict[str, Plan] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting_bases() -> Iterator[dict[str, Plan]]:
    """Notes the plan of every basis that an init makes, by path: the state itself holds only arrays."""
    token = _noted.set(noted := {})
    try:
        yield noted
    finally:
        _noted.reset(token)


def init_basis(rotation: Rotation, params: optax.Params) -> tuple[Any, Any]:
    """Makes the contents of the state: the bases and the name of the plan; see `RotationState`."""
    plan = plan_tree(rotation, params)
    _warn_of_plans(rotation, plan)
    # Arrays, not empty dicts: optax.tree.map_params must see a non-parameter. Orbax saves none of size 0.
    # Under its name a restore misses it, under another one it reads the number of the file. Two arrays: a buffer that
    # two leaves share cannot be donated.
    checksums = [jnp.array(_checksum(plan), jnp.uint32) for _ in range(2)]
    named = dict(zip((plan.name, "checksum"), checksums, strict=True)) if plan.parameters else checksums[0]
    if rotation.kind != "haar":
        return (), named
    found: dict[str, Any] = {}
    for leaf, of_leaf in zip(jax.tree.leaves(params), plan.parameters, strict=True):
        for i, group in enumerate(of_leaf.groups):
            *parents, basis = _basis_path(of_leaf.path, i)
            node = functools.reduce(lambda node, part: node.setdefault(part, {}), parents, found)
            node[basis] = _draw_haar(rotation, of_leaf, group, wide_dtype(leaf))
            if (noted := _noted.get()) is not None:
                noted["/".join([*parents, basis])] = of_leaf
    return found or jnp.zeros((), jnp.float32), named


def _checksum(plan: TreePlan) -> np.uint32:
    return np.uint32(zlib.crc32(plan.name.encode()) | 1)


def is_of_plan(held: Any, plan: TreePlan) -> bool:
    """Returns whether a state was made for a plan, by the name in it; that of an empty tree fits every plan."""
    return not plan.parameters or (isinstance(held, dict) and plan.name in held)


def require_plan(rotation: Rotation, plan: TreePlan, held: Any) -> jax.Array | None:
    """Raises UserError if a state was made for another plan.

    Returns:
      None; or, if the state is traced, whether its checksum is the plan's, bool []: a file that is restored leaf by
      leaf (equinox's), or in part, has no names.
    """
    if not plan.parameters:
        return None
    if not isinstance(held, dict) or "checksum" not in held:
        problem = "the state names no bases of a rotation: it is another optimizer's, or of an earlier orthojax"
        raise UserError(problem, allowed=f"one that init makes, for {plan.name}")
    # A state of zeros is a fresh one, except for Haar matrices.
    known = [_checksum(plan)] + [np.uint32(0)] * (rotation.kind != "haar")
    checksum = held["checksum"]
    is_traced = isinstance(checksum, jax.core.Tracer)
    same = is_traced or all(any(number == good for good in known) for number in np.ravel(checksum))
    if not (is_of_plan(held, plan) and same):
        names = ", ".join(name for name in held if name not in ("checksum", plan.name))
        raise UserError(
            f"the state of the rotation is of {names or 'another plan, by its checksum'}; the Rotation and these "
            f"parameters make {plan.name}",
            allowed="the Rotation and the parameters that the state was made for",
        )
    return functools.reduce(jnp.logical_or, [checksum == good for good in known]) if is_traced else None


def basis_constants(rotation: Rotation, plan: Plan, basis: Any, transpose: bool) -> tuple[tuple[Any, ...], ...]:
    """Returns for each group, all layers: (Q [*stacked, n, n],), or (signs [*stacked, n],) and possibly an order."""
    if rotation.kind == "haar":
        paths = (_basis_path(plan.path, i) for i in range(len(plan.groups)))
        return tuple((functools.reduce(lambda node, part: node[part], path, basis),) for path in paths)
    found = []
    for group in plan.groups:
        key, shape = rotation.seed ^ _name_key(group), (*plan.stacked_shape, group.size)
        # A program holds one byte for each sign, and never more of them than the kernel's longest edge.
        computed = len(group.layers) * group.size > max(plan.shape)
        signs = orthogonal.traced_signs if computed else orthogonal.hash_signs
        constants: tuple[Any, ...] = (signs(key, group.layers, group.size).reshape(shape),)
        if rotation.kind == "signed_permutation":
            # Another key: the order of the hashes is not independent of their top bits.
            order = orthogonal.hash_permutations(key ^ 0xFFFFFFFF, group.layers, group.size).reshape(shape)
            constants += (np.argsort(order, axis=-1) if transpose else order,)
        found.append(constants)
    return tuple(found)


class Description(dict[str, str]):
    """The treatment of every parameter, by path; `str` gives a table with shapes and marks, and a note below it."""

    def __init__(self, rows: list[tuple[str, ...]], note: str = "", heading: tuple[str, ...] = ()):
        super().__init__((path, " ".join(what)) for path, _, *what, _ in rows)  # between shape and mark
        self.rows, self.note = rows, note
        self.heading = heading or ("parameter", "shape", "rotation", "")

    def __str__(self) -> str:
        table = align([self.heading, *self.rows])
        return "\n".join([*(line.rstrip() for line in table), *([self.note] if self.note else [])])


def outliers_may_return(plan: TreePlan) -> str:
    """Returns the note on norm scales and biases of the rotated width, or "" without any."""
    widths = {group.size for leaf in plan.parameters for group in leaf.groups}
    vectors = [leaf.path for leaf in plan.parameters if not leaf.groups and widths & set(leaf.shape)]
    per_channel = [path for path in vectors if axes_rule.is_per_channel(path)]
    if not per_channel:
        return ""
    shown = ", ".join(per_channel[:3]) + (", ..." if len(per_channel) > 3 else "")
    return f"per-channel norm scale or bias: outliers may return (Table 5 of arXiv 2410.17174): {shown}"


class _Describable(optax.GradientTransformationExtraArgs):
    """An optax transformation that `describe` understands."""

    describe: Callable[[Any], Description]


def describable(
    made: optax.GradientTransformation, describes: Callable[[Any], Description]
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation of which `describe` says what `describes` returns for some parameters."""
    made = _Describable(*optax.with_extra_args_support(made))
    made.describe = describes
    return made


def describe(rotation: Rotation | optax.GradientTransformation, params: Any) -> Description:
    """Describes what is rotated and how, and what is left alone and why, for arrays or jax.ShapeDtypeStruct.

    Instead of a Rotation, a transformation that `muon_orthoadam`, `orthoadam` or their scalings return.

    Returns:
      A dict by path, which prints as a table of path, shape, rotated axes and their kind, and a mark. The mark is
      `embedding`, or `unsure` for a guess: stacked layers among three or more axes that no stacked vector confirms, an
      array not named kernel, weight or w that is taken for a kernel, or one that is taken for a vector by its shape.
      Below the table stands which vectors may bring outliers back.

    >>> shapes = {"wte": (512, 768), "mlp": {"kernel": (12, 768, 1000), "bias": (12, 1000)}}
    >>> params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    >>> print(describe(Rotation(), params))
    parameter   shape          rotation
    mlp/bias    12, 1000       left alone: named 'bias'
    mlp/kernel  12, 768, 1000  axes (1,): hadamard 768 = 32 x 24, 12 layers
    wte         512, 768       axes (1,): hadamard 768 = 32 x 24             embedding
    >>> describe(Rotation(axes="output", kernel_layout="out_in"), {"weight": jnp.zeros((8, 64))})["weight"]
    'axes (0,): hadamard 8'
    """
    if isinstance(rotation, _Describable):
        return rotation.describe(params)
    if isinstance(rotation, optax.GradientTransformation) or hasattr(rotation, "update"):  # also MultiSteps
        raise TypeError("allowed: a Rotation, or what orthoadam, muon_orthoadam or their scalings return, unchained")
    require_rotation(rotation)
    rows, tree_plan = [], plan_tree(rotation, params)
    for plan in tree_plan.parameters:
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
        rows.append((plan.path, ", ".join(map(str, plan.shape)), what, plan.mark))
    return Description(rows, outliers_may_return(tree_plan))
