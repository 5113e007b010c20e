"""What a rotation does to each parameter, decided from its path, shape and dtype alone."""

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.optim.axes import AxesRule, GenericAxes, RotatedAxes, canonical_name, generic_axes_or_reason, leaf_path

Kind = Literal["haar", "hadamard", "dct", "identity", "signed_permutation"]
Scope = Literal["layer", "parameter", "tree"]

MAX_HAAR_SIZE = 4096  # a larger axis is left alone: its matrix would take 64 MB for every layer
MAX_HAAR_RATIO = 8  # elements of the matrices of a parameter, as a multiple of its own


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Which orthogonal matrix Q, on which axes of which parameter.

    Every parameter, and every layer of a stacked one, has its own Q, which is a function of (seed, name, layer) alone:
    the same on every machine and mesh (`haar` up to the rounding of LAPACK), and the same for scanned and unrolled
    layers. Renaming a module changes its Q; two names that differ in how they are numbered alone (`a_0/w`, `a/0/w`)
    share one.

    Attributes:
      kind: `hadamard`: a fixed Hadamard transform after random signs (sizes that Sylvester's and Paley's
        constructions over primes give; a cosine transform, or a product with one, elsewhere); keeps
        no state. `haar`: a dense uniformly random matrix, as in the paper; kept in the state (float32; float64 for
        float64 parameters); axes over 4,096 are left alone. `dct`: a cosine transform after random signs. Two controls:
        `identity`, and `signed_permutation`, which Adam does not notice.
      axes: `output` (last kernel axis), `input` (the one before) or `both`, by the rule `generic_axes`; or a function
        (path, jax.ShapeDtypeStruct) -> RotatedAxes | None, where None leaves the parameter alone.
      seed: 0 to 2**32 - 1.
      scope: `layer` as above. Two controls: with `parameter` the layers of a parameter share Q; with `tree` all axes of
        one size do, which for a network is little more than Adam seen from another frame.
      layout: A function path -> jax.sharding.Sharding | None: where a parameter's moments are, on a mesh. Made by
        `layout_of(shardings)`, of the parameters' shardings or of those of `zero1`. On a mesh of Auto axes jit does not
        tell us, so give it there if rotated axes are split: else whole axes of them may travel. Explicit axes need
        none but for `zero1`. A rotated axis that is split is turned between two all-to-alls of one shard (details in
        `layout.gather_axes`), one that is whole without communication: moments whose layout keeps the rotated axis
        whole halve what travels. The basis never depends on the mesh. Inside a `shard_map` of your own an array counts
        as the whole parameter: keep rotated axes whole there.

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
    """Refuses what only looks like a rotation, such as the name of a kind.

    Raises:
      TypeError: Unless `rotation` is a `Rotation`.
    """
    if not isinstance(rotation, Rotation):
        raise TypeError(f"rotation={rotation!r}; allowed: a Rotation, such as Rotation(kind='haar')")


class Turn(NamedTuple):
    """One group of axes that one basis turns."""

    axes: tuple[int, ...]  # flattened to one axis of length `size`
    size: int
    name: str  # with the layer numbers, identifies the basis
    layers: tuple[int, ...]  # one number for each slice along the stacked axes, row-major


class LeafPlan(NamedTuple):
    """What happens to one parameter."""

    path: str
    turns: tuple[Turn, ...]
    stacked: tuple[int, ...]
    stacked_shape: tuple[int, ...]
    left_alone: tuple[str, ...]  # reasons, of the whole parameter or of single axes


def plan_leaf(rotation: Rotation, keys: tuple[Any, ...], leaf: Any) -> LeafPlan:
    """What happens to one parameter: a function of path, shape and dtype, so that init and every update agree.

    Args:
      rotation: Which basis.
      keys: Key path of the parameter.
      leaf: An array, a scalar or a jax.ShapeDtypeStruct.

    Raises:
      TypeError: For a rule that returns something else.
      ValueError: For axes that the parameter does not have, or haar matrices over 8 times its size.
    """
    path = leaf_path(keys)
    if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
        return LeafPlan(path, (), (), (), ("it is no array",))
    shape = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    if rotation.kind == "identity":
        found = "the rotation is the identity"
    elif not jnp.issubdtype(shape.dtype, jnp.floating):
        found = f"its dtype is {shape.dtype}"
    elif shape.size == 0:
        found = "it is empty"
    elif callable(rotation.axes):
        found = rotation.axes(path, shape)
        if found is not None and not isinstance(found, RotatedAxes):
            raise TypeError(f"{path}: the axes rule returned {found!r}; allowed: RotatedAxes or None")
        found = "the axes rule says so" if found is None else found
    else:
        found = generic_axes_or_reason(path, shape, rotation.axes)
    if isinstance(found, str):
        return LeafPlan(path, (), (), (), (found,))

    groups, stacked = found.of(path, len(shape.shape))
    name, layer = canonical_name(path, bool(stacked))
    stacked_shape = tuple(shape.shape[axis] for axis in stacked)
    slices = math.prod(stacked_shape)
    layers = tuple(layer * slices + i for i in range(slices)) if stacked else (layer,)
    if rotation.scope != "layer":
        stacked, stacked_shape, layers = (), (), (0,)
    turns, left_alone = [], []
    for i, axes in enumerate(groups):
        size = math.prod(shape.shape[axis] for axis in axes)
        if size < 2:
            left_alone.append(f"axes {axes}: length {size}")
        elif rotation.kind == "haar" and size > MAX_HAAR_SIZE:
            left_alone.append(f"axes {axes}: length {size} is over {MAX_HAAR_SIZE}")
        else:
            turns.append(Turn(axes, size, ":" if rotation.scope == "tree" else f"{name}:{i}", layers))
    elements = sum(len(turn.layers) * turn.size**2 for turn in turns)
    if rotation.kind == "haar" and elements > MAX_HAAR_RATIO * shape.size:
        raise ValueError(
            f"{path} {shape.shape}: haar matrices of {[turn.size for turn in turns]} rows have {elements} elements, "
            f"over {MAX_HAAR_RATIO} times its {shape.size}; allowed: fewer axes (Rotation.axes), or kind='hadamard'"
        )
    return LeafPlan(path, tuple(turns), stacked, stacked_shape, tuple(left_alone))
