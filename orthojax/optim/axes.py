"""Which axes of which parameter are rotated, and under which name."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal

import jax

GenericAxes = Literal["output", "input", "both"]

_MAX_GENERIC_SIZE = 16_384
_VECTOR_NAMES = ("bias", "b", "scale", "offset")


@dataclasses.dataclass(frozen=True)
class RotatedAxes:
    """The rotated axes of one parameter.

    Axes in neither field share the basis: a kernel [in, out] with `groups=((1,),)` multiplies every row with one Q.

    Attributes:
      groups: Each group of axes is flattened to one axis and turned by its own basis; a bare integer is a group of one.
        Axes may be negative.
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
        named = [axis for group in groups for axis in group] + list(self.stacked)
        if not groups or not all(groups) or len(set(named)) < len(named):
            raise ValueError(
                f"RotatedAxes(groups={groups}, stacked={self.stacked}); "
                "allowed: at least one group of at least one axis, and every axis once"
            )

    def of(self, path: str, ndim: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """(groups, stacked) with axes in 0..ndim-1.

        Raises:
          ValueError: Where the parameter has no such axis, or one axis is named in two ways.
        """
        groups: Any = self.groups  # tuples since __post_init__
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if any(not -ndim <= axis < ndim for axis in named) or len({axis % ndim for axis in named}) < len(named):
            raise ValueError(f"{path}: {self} does not fit a parameter of {ndim} axes; allowed: each of its axes once")
        return tuple(tuple(a % ndim for a in group) for group in groups), tuple(a % ndim for a in self.stacked)


AxesRule = Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]


def generic_axes_or_reason(path: str, leaf: jax.ShapeDtypeStruct, axes: GenericAxes) -> RotatedAxes | str:
    """As `generic_axes`, with the reason where nothing is rotated."""
    name = path.rpartition("/")[2]
    if len(leaf.shape) < 2:
        return f"{len(leaf.shape)} axes, fewer than 2"
    if name in _VECTOR_NAMES:
        return f"its name is {name!r}"
    if "embed" in path.lower():
        chosen, stacked = [-1], ()
    else:
        chosen = {"output": [-1], "input": [-2], "both": [-2, -1]}[axes]
        stacked = tuple(range(len(leaf.shape) - 2))
    groups = tuple((axis,) for axis in chosen if 2 <= leaf.shape[axis] <= _MAX_GENERIC_SIZE)
    if not groups:
        return f"no {axes} axis of length 2 to {_MAX_GENERIC_SIZE}"
    return RotatedAxes(groups, stacked)


def generic_axes(path: str, leaf: jax.ShapeDtypeStruct, axes: GenericAxes = "output") -> RotatedAxes | None:
    """The rule for trees that we know nothing about; a rule of your own may call it for what it does not decide itself.

    Left alone: fewer than two axes, and the names bias, b, scale, offset whatever their shape (a scanned scale is [L,
    d]). Where the path contains "embed": the last axis, one basis for all rows. Else the last two axes are taken for a
    kernel [in, out] and the axes before them for stacked layers. That is right for Dense and Linear of flax and haiku,
    scanned or not. Name the axes yourself (a rule for `Rotation.axes`) where it is not:

    - Equinox's and PyTorch's kernels are [out, in]: ask for "input" to turn what they write. A gain that is called
      weight is safe as a vector, but stacked [L, d] it looks like a kernel.
    - flax's attention: query, key and value [d, heads, head_dim] are turned within each head only, every row of d
      counting as a layer; out [heads, head_dim, d] has a basis for each head. Valid but weak, and `haar` refuses out
      where d is over 8 head_dim, and the others where head_dim is over 8 heads. `RotatedAxes(((1, 2),))` and
      `RotatedAxes((2,))` take them for the matrices [d, heads * head_dim] and [heads * head_dim, d].
    - Convolutions: each spatial position counts as a layer.

    Args:
      path: The parameter's path, as `describe` prints it.
      leaf: Its shape and dtype.
      axes: The kernel axes: `output` is the last, `input` the one before. Only those of length 2 to 16,384 are rotated.

    >>> import jax.numpy as jnp
    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), jnp.float32))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    """
    found = generic_axes_or_reason(path, leaf, axes)
    return None if isinstance(found, str) else found


def leaf_path(keys: tuple[Any, ...]) -> str:
    """The plain path of a parameter, equal for every wrapping of the same tree.

    A leading `params` and the `.value` of a box (flax's Partitioned, nnx's variables) are dropped, since some
    libraries show them at init and not at update.

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
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    return path.removeprefix("params/")


def canonical_name(path: str, is_stacked: bool) -> tuple[str, int]:
    """The name and number that identify a basis.

    They are the same for `layers_3/x` and for `layers/3/x`, whose number is 3; and with `number * slices + slice` as
    the number of each slice along stacked axes, also for slice 3 of a scanned `layers/x`. Parameters whose names differ
    in nothing else share a basis.

    Args:
      path: From `leaf_path`.
      is_stacked: Whether the parameter has stacked axes.

    Returns:
      (name, number). Names of numbered and of stacked parameters end in "/*", so that `w` and `w_0` differ.

    >>> canonical_name("layers_3/mlp/kernel", False), canonical_name("layers/3/mlp/kernel", False)
    (('layers/mlp/kernel/*', 3), ('layers/mlp/kernel/*', 3))
    >>> canonical_name("layers/mlp/kernel", True), canonical_name("head/kernel", False)
    (('layers/mlp/kernel/*', 0), ('head/kernel', 0))
    """
    parts = path.split("/")
    for i, part in enumerate(parts):
        if numbered := re.fullmatch(r"(?:(.*)_)?([0-9]+)", part):
            stem = [numbered[1]] if numbered[1] else []
            return "/".join([*parts[:i], *stem, *parts[i + 1 :], "*"]), int(numbered[2]) % 2**32
    return (f"{path}/*" if is_stacked else path), 0
