"""The rotated axes of a parameter, by its name and shape: kernels, embedding tables and vectors; and d_model."""

import collections
import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from orthojax.errors import UserError

GenericAxes = Literal["output", "input", "both"]
KernelLayout = Literal["in_out", "out_in"]
Mark = Literal["", "embedding", "unsure"]
Shapes = Mapping[str, tuple[int, ...]]  # of all parameters of a tree, by path

_MAX_GENERIC_SIZE = 16_384
_MAX_LAYERS = 128  # an axis longer than this, and than the kernel behind it, does not count layers


@dataclasses.dataclass(frozen=True)
class RotatedAxes:
    """The rotated axes of one parameter.

    Axes in neither field share the basis: a kernel [in, out] with `groups=((1,),)` multiplies every row by one Q.

    Attributes:
      groups: Each group of axes is flattened to one axis and rotated in its own basis; a bare integer is a group of
        one. Axes may be negative.
      stacked: Axes that count layers, experts, ...: every slice along them has its own basis.

    Raises:
      ValueError: For no group, an empty one, or an axis named twice.

    >>> RotatedAxes((-1,), stacked=(0,))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    """

    groups: tuple[tuple[int, ...] | int, ...]
    stacked: tuple[int, ...] = ()

    def __post_init__(self):
        if not isinstance(self.groups, tuple | list) or not isinstance(self.stacked, tuple | list):
            raise ValueError(f"{self}; allowed: tuples, as in RotatedAxes((-1,))")
        groups = tuple((group,) if isinstance(group, int | np.integer) else tuple(group) for group in self.groups)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "stacked", tuple(self.stacked))
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if not groups or not all(groups) or len(set(named)) < len(named):
            raise ValueError(f"{self}; allowed: at least one group of at least one axis, and every axis once")

    def of(self, path: str, ndim: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """Returns (groups, stacked) with axes in 0..ndim-1; ValueError if the parameter has no such axis."""
        groups: Any = self.groups  # tuples since __post_init__
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if any(not -ndim <= axis < ndim for axis in named) or len({axis % ndim for axis in named}) < len(named):
            raise ValueError(f"{path}: {self} does not fit a parameter of {ndim} axes; allowed: each of its axes once")
        return tuple(tuple(a % ndim for a in group) for group in groups), tuple(a % ndim for a in self.stacked)


def is_integer(value: Any, smallest: int, largest: int) -> bool:
    """Returns whether a value is an integer, also NumPy's, within the limits; a bool is not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and smallest <= int(value) <= largest


def checked_axes(axes: Any) -> GenericAxes | int:
    """Returns `axes` of the rule, NumPy integers as Python's; ValueError if it is neither a name nor a length."""
    if is_integer(axes, 2, _MAX_GENERIC_SIZE):
        return int(axes)
    names = typing.get_args(GenericAxes)
    if not (isinstance(axes, str) and axes in names):
        allowed = f"{', '.join(names)}, a length of 2 to {_MAX_GENERIC_SIZE}, or a function (path, shape) -> axes"
        raise ValueError(f"Rotation axes={axes!r}; allowed: {allowed}")
    return typing.cast(GenericAxes, axes)


# Names of arrays, and of the modules that hold them, in lower case and without numbers.
_KERNEL = re.compile(r"(.*_)?(kernel|weights?|w[a-z]?|lora_[ab])(_.*)?")
_OF_MODULE = re.compile(r"weights?|w|table")  # only the module's name says what it is
_TABLE = re.compile(
    r"(?!.*(patch|unembed))(.*emb(s|eds?|edder|eddings?)?(_(tokens?|positions?|in|linear|table|weights?))?|(.*_)?w[tp]e)"
)
_VECTOR = re.compile(r"b|(.*_)?(bias|scale|offset|gain|gamma|beta|sinks?|sink_logits?|(cls|class|mask)_token)")
_PER_CHANNEL = re.compile(r"b|(.*_)?(bias|scale|offset|gain|gamma|beta)(_.*)?")
_OF_VALUES = re.compile(r"value_embed(s|ding|dings)?")  # tables that are added to values, not to the residual stream
_ROUTER = re.compile(r"(.*_)?(router|gate)")  # may be [experts, d_model] beside experts that lead
_NORM = re.compile(r"(?!.*(proj|linear|dense|conv))(.*norms?|(.*_)?(ln|rms))(_.*)?")  # not a linear layer behind one
# Kernels that write to the residual stream or read it, if the shape does not say it; a `proj` only in attention.
_WRITER = re.compile(r"(.*_)?(o|out|output|wo|down)(_?proj(ection)?)?|(.*_)?c_proj|proj_out|(.*_)?att(n|ention)/proj")
_READER = re.compile(
    r"(.*_)?(q|k|v|query|key|value|receptance|w[qkvi]|gate|up|in|input)(_?proj(ection)?)?|(.*_)?c_(attn|fc)|proj_in"
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The fields of `Rotation` for the generic rule; see there."""

    axes: GenericAxes | int | None
    kernel_layout: KernelLayout = "in_out"
    embeddings: str | None = None
    stacked: int | None = None


def generic_axes(
    path: str,
    leaf: jax.ShapeDtypeStruct,
    axes: GenericAxes | int = "output",
    kernel_layout: KernelLayout = "in_out",
    embeddings: str | None = None,
    stacked: int | None = None,
) -> RotatedAxes | None:
    """Returns the rotated axes by the default rule, from the last names of the path and the shape.

    - An embedding table (embedding, embed_tokens, tok_emb, wte, wpe, ..., or the weight, w or table of such a module)
      is rotated along its axis of length `axes`, or its last one if `axes` is a name, with one basis for all rows.
    - Vectors, also stacked ones [L, d], are left alone: bias, b, scale, offset, gain, gamma, beta, sink, cls_token and
      the like, the weight or kernel of a norm or of a module called so (`scale/weights`), and any array with one axis
      longer than 1 that is not named as a kernel. So is an array [L, d] whose name says nothing, if all kernels of
      three axes or more beside it have L layers. A `b` beside an `a` in the tree is a matrix.
    - In all other arrays the last two axes are a kernel and those before them stacked layers, which is right for Dense
      and Linear, scanned or not. If it is wrong, name the axes yourself (a rule for `Rotation.axes`): in a convolution
      each spatial position counts as a layer; unless `axes` is a number, so do each row of flax's query
      [d, heads, head_dim], for which `RotatedAxes(((1, 2),))` is better, and each head of its out, for which
      `RotatedAxes((2,))` is. An axis over 128 that is longer than the kernel behind it does not count layers; its
      slices share a basis.

    Args:
      path: The parameter's path, as `describe` prints it.
      leaf: Its shape and dtype.
      axes: Which axes of a kernel. A number is d_model: the axis of that length, wherever it is, also in flax's query
        [d_model, heads, head_dim] and out [heads, head_dim, d_model]; a kernel without such an axis is left alone. For
        a square kernel the name decides: query, key, value, q_proj, gate, up, wi, c_attn and the like read the residual
        stream, while out, output, o_proj, wo, down and c_proj write to it; with another name, both axes are rotated.
        Only axes of length 2 to 16,384 are rotated.
      kernel_layout: A kernel is [in, out] (flax, haiku) or [out, in] (equinox, PyTorch). If `axes` is a number,
        only square kernels need it; those called weight are rotated along both axes unless this says `out_in`.
      embeddings: A regular expression that matches in the paths of tables, which are then not recognised by name; ""
        for none.
      stacked: The axis that counts layers in kernels of three axes or more; None for the first ones.

    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), "float32"))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    >>> generic_axes("mlp/weight", jax.ShapeDtypeStruct((256, 64), "float32"), kernel_layout="out_in")
    RotatedAxes(groups=((-2,),), stacked=())
    >>> generic_axes("query/kernel", jax.ShapeDtypeStruct((64, 4, 16), "float32"), axes=64)
    RotatedAxes(groups=((-3,),), stacked=())
    >>> generic_axes("wo/kernel", jax.ShapeDtypeStruct((256, 12, 64), "float32"), axes=64, stacked=1)
    RotatedAxes(groups=((-1,),), stacked=(1,))
    """
    rule = Rule(checked_axes(axes), kernel_layout, embeddings, stacked)
    found, _ = judge(path, leaf.shape, rule, {path: leaf.shape})
    return None if isinstance(found, str) else found


_BY_SHAPE, _STACKED = "a vector by its shape", "a vector of each layer by its shape"


class _Names(NamedTuple):
    """The last names of a path in lower case and without numbers, and what they say of the parameter."""

    name: str
    module: str
    parent: str  # of the module
    is_table: bool
    is_kernel: bool  # is named as one
    why_vector: str  # "" if it is not one


def _names(path: str, shape: tuple[int, ...], rule: Rule, shapes: Shapes) -> _Names:
    parts = [part for part in path.lower().split("/") if not part.isdigit()]
    name, module, parent = [*(re.sub(r"_?[0-9]+", "", part) for part in reversed(parts)), "", "", ""][:3]
    if rule.embeddings is None:
        table = bool(_TABLE.fullmatch(module if _OF_MODULE.fullmatch(name) else name))
    else:
        table = bool(rule.embeddings and re.search(rule.embeddings, path))
    why, is_kernel = "", bool(_KERNEL.fullmatch(name))
    if len(shape) < 2:
        why = f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}, fewer than 2"
    elif rule.embeddings is None and (of_values := [n for n in (name, module) if _OF_VALUES.fullmatch(n)]):
        why = f"named {of_values[0]!r}"
    elif not table and _VECTOR.fullmatch(name) and not _is_factor(path, shapes):
        why = f"named {name!r}"
    elif not table and len(module) > 1 and _OF_MODULE.fullmatch(name) and _VECTOR.fullmatch(module):
        why = f"{name!r} of {module!r}"
    elif not table and _of_norm(name, module) and min(shape) <= _MAX_LAYERS:  # else of an adaptive norm
        why = f"{name!r} of {module!r}"
    elif not table and not is_kernel and _long_axes(shape) < 2:
        why = _BY_SHAPE
    elif not table and not is_kernel and not _ROUTER.fullmatch(name) and _is_stacked_vector(path, rule, shapes):
        why = _STACKED
    return _Names(name, module, parent, table, is_kernel, why)


def _long_axes(shape: tuple[int, ...]) -> int:
    return sum(length > 1 for length in shape)


def _is_stacked_vector(path: str, rule: Rule, shapes: Shapes) -> bool:
    """Returns whether an array is [L, d], apart from axes of length 1, beside kernels of L layers.

    Only the nearest module that has kernels of three axes or more counts, and all of them must have L layers: the heads
    of one attention kernel are no layers.
    """
    axis = rule.stacked or 0
    if _long_axes(shapes[path]) != 2 or axis >= len(shapes[path]) or shapes[path][axis] < 2:
        return False
    return next((layers for layers, _ in _stacks(path, rule, shapes)), False)


def _stacks(path: str, rule: Rule, shapes: Shapes) -> Iterator[tuple[bool, bool]]:
    """Yields what each module around a parameter that has kernels of three axes or more says, the nearest first.

    That is, whether all of these kernels have as many layers as the parameter, and whether some vector, by its name,
    has as well.
    """
    parts, axis = path.split("/"), rule.stacked or 0
    layers = shapes[path][axis] if axis < len(shapes[path]) else 0
    for depth in range(len(parts) - 1, -1, -1):
        prefix = "".join(f"{part}/" for part in parts[:depth])
        beside = {other: shape for other, shape in shapes.items() if other.startswith(prefix)}
        kernels = [shape for shape in beside.values() if _long_axes(shape) > 2 and axis < len(shape)]
        if kernels:
            vectors = (
                len(shape) == 2
                and shape[min(axis, 1)] == layers
                and _VECTOR.fullmatch(other.lower().rpartition("/")[2])
                for other, shape in beside.items()
            )
            yield layers <= _MAX_LAYERS and all(shape[axis] == layers for shape in kernels), any(vectors)


def _of_norm(name: str, module: str) -> bool:
    return bool((_OF_MODULE.fullmatch(name) or name == "kernel") and _NORM.fullmatch(module))


def is_per_channel(path: str) -> bool:
    """Returns whether a vector is a norm's scale or a bias, by its name."""
    parts = [part for part in path.lower().split("/") if not part.isdigit()]
    name, module = [*reversed(parts), ""][:2]
    return bool(_PER_CHANNEL.fullmatch(name) or _PER_CHANNEL.fullmatch(module) or _of_norm(name, module))


def _is_factor(path: str, shapes: Shapes) -> bool:
    """Returns whether a parameter `b` is the second factor of a low-rank product, with an `a` beside it."""
    parent, _, name = path.rpartition("/")
    return name in ("b", "B") and len(shapes.get(f"{parent}/{'a' if name == 'b' else 'A'}".lstrip("/"), ())) > 1


def judge(path: str, shape: tuple[int, ...], rule: Rule, shapes: Shapes) -> tuple[RotatedAxes | str, Mark]:
    """Decides like `generic_axes`, with the reason if nothing is rotated, and marks tables and guesses."""
    names = _names(path, shape, rule, shapes)
    axes, ndim = rule.axes, len(shape)
    in_stack = ndim == 3 and any(all(evidence) for evidence in _stacks(path, rule, shapes))
    certain = names.is_kernel and (ndim == 2 or in_stack)
    if names.why_vector:
        guessed = ndim > 1 and (_of_norm(names.name, names.module) or names.why_vector in (_BY_SHAPE, _STACKED))
        return names.why_vector, "unsure" if guessed else ""
    if rule.stacked is not None and ndim > 2 and not names.is_table:
        return _judge_stacked(path, shape, rule, shapes)
    stacked: tuple[int, ...] = ()
    if names.is_table:  # the last axis, unless only another one has the length
        has = [axis for axis in range(-ndim, 0) if shape[axis] == axes]
        chosen = has[-1:] if isinstance(axes, int) else [-1]
    elif isinstance(axes, int):
        chosen, kernel_ndim, named = _of_length(axes, path, names, shape, rule, shapes)
        stacked = _layers(shape, kernel_ndim, chosen)
        certain = named or (certain and len(chosen) < 2)
    else:
        output, before = (-1, -2) if rule.kernel_layout == "in_out" else (-2, -1)
        chosen = {"output": [output], "input": [before], "both": [-2, -1]}[axes or "output"]
        stacked = _layers(shape, 2, chosen)
    groups = tuple((axis,) for axis in chosen if 2 <= shape[axis] <= _MAX_GENERIC_SIZE)
    mark: Mark = "embedding" if names.is_table else "" if certain else "unsure"
    if groups:
        return RotatedAxes(groups, stacked), mark
    return without_length(axes) if isinstance(axes, int) else f"no {axes} axis of length 2 to {_MAX_GENERIC_SIZE}", mark


def _judge_stacked(path: str, shape: tuple[int, ...], rule: Rule, shapes: Shapes) -> tuple[RotatedAxes | str, Mark]:
    """Judges the slices along the axis `rule.stacked`."""
    layers = rule.stacked % len(shape) if rule.stacked is not None else 0
    rest = [axis for axis in range(len(shape)) if axis != layers]
    inner = {other: (*of[:layers], *of[layers + 1 :]) for other, of in shapes.items() if len(of) > 2}
    found, mark = judge(path, inner[path], dataclasses.replace(rule, stacked=None), inner)
    if isinstance(found, str):
        return found, mark
    groups, stacked = found.of(path, len(rest))
    there = tuple(tuple(rest[axis] - len(shape) for axis in group) for group in groups)
    return RotatedAxes(there, tuple(sorted([layers, *(rest[axis] for axis in stacked)]))), mark


def _layers(shape: tuple[int, ...], kernel_ndim: int, chosen: list[int]) -> tuple[int, ...]:
    """Returns the axes before the kernel, as those of stacked layers; none if one is too long to count layers."""
    stacked = tuple(range(len(shape) - kernel_ndim))
    kernel = range(-kernel_ndim, 0)
    beside = max((shape[axis] for axis in kernel if axis not in chosen), default=0)
    return stacked if all(shape[axis] <= max(_MAX_LAYERS, beside) for axis in stacked) else ()


def _of_length(
    d_model: int, path: str, names: _Names, shape: tuple[int, ...], rule: Rule, shapes: Shapes
) -> tuple[list[int], int, bool]:
    """Returns the rotated axes of that length, the number of axes of the kernel, and whether its name says so."""
    first, second, last = (0, 0, *shape)[-3:]
    if len(shape) > 2 and second != d_model:  # attention kernels, by their names or by each other
        block = path.split("/")[:-2]
        known = {shapes[other][-3:] for other in shapes if other.split("/")[:-2] == block}
        if first == d_model and (names.module in ("query", "key", "value") or (second, last, d_model) in known):
            return [-3], 3, True  # [d_model, heads, head_dim]
        if last == d_model != first and (d_model, first, second) in known:
            return [-1], 3, True  # [heads, head_dim, d_model]
    chosen = [axis for axis in range(-len(shape), 0) if shape[axis] == d_model]
    if -2 in chosen:  # [..., d_model, f]: that many layers or experts before it would be a coincidence
        chosen = [axis for axis in chosen if axis >= -2]
    kernel_ndim = max(2, -min(chosen, default=-2))
    if chosen == [-2, -1]:
        return _facing_stream(names, rule.kernel_layout), 2, False
    if chosen == [-1] and len(shape) > 2 and shape[-3] * shape[-2] == d_model and "out" in names[:2]:
        kernel_ndim = 3  # an out without its query; other kernels of three axes are stacked
    return chosen, kernel_ndim, False


def _facing_stream(names: _Names, layout: KernelLayout) -> list[int]:
    """Returns which axes of a square kernel face the residual stream, by its own or its module's name; or both."""
    known = layout == "out_in" or not re.fullmatch(r"(.*_)?weights?", names.name)
    for word in (names.name, names.module, f"{names.parent}/{names.module}") if known else ():
        if (writes := _WRITER.fullmatch(word)) or _READER.fullmatch(word):
            return [-1 if bool(writes) == (layout == "in_out") else -2]
    return [-2, -1]


class Matrix(NamedTuple):
    """A parameter as a matrix: two groups of axes, each flattened; every slice along the others is one by itself."""

    kind: Literal["matrix", "table", "head"]
    groups: tuple[tuple[int, ...], tuple[int, ...]] | None  # None if it is not known which
    unsure: bool = False


_HEAD = re.compile(r"(.*_)?(lm_?head|head|logits(_dense)?|unembed(der|ding)?|output_(embedding|layer)|decoder_pred)")
_CONVOLUTION = re.compile(r".*(conv|patch).*")
_ATTENTION = re.compile(r".*(attn|attention).*|[qkvo](_proj(ection)?)?")
_PROJECTION = re.compile(r"(query|key|value)(_proj(ection)?)?")  # around a kernel
_OF_TIME = re.compile(r"time_.*|(a_log|dt_bias)")  # RWKV's and Mamba's, without d_model or with a row for each layer


def matrix_of(path: str, shape: tuple[int, ...], rule: Rule, shapes: Shapes) -> Matrix | str:
    """Finds the matrix in a parameter as `judge` finds d_model in it; a reason if it is a vector.

    - A kernel with an axis of d_model: that axis, and the other one beside stacked layers or experts. In attention, the
      other side has all heads; in a convolution, the window as well.
    - Another kernel of two axes, or of two beside stacked layers that vectors confirm.
    - The head is a kernel [d_model, n] that is called so, or the only one with as many n as a table has rows.
    """
    names, ndim = _names(path, shape, rule, shapes), len(shape)
    if names.why_vector:
        return names.why_vector
    if names.is_table:
        return Matrix("table", (tuple(range(ndim - 1)), (ndim - 1,)))
    if _long_axes(shape) < 2:
        return _BY_SHAPE
    if _OF_TIME.fullmatch(names.name) and _is_stacked_vector(path, rule, shapes):
        return _STACKED
    found, _ = judge(path, shape, rule, shapes)
    of_patches = names.name == "kernel" and ndim > 2 and bool(_TABLE.fullmatch(names.module))
    is_convolution = of_patches or any(_CONVOLUTION.fullmatch(name) for name in names[:3])
    is_attention = any(_ATTENTION.fullmatch(name) for name in names[:3])
    is_attention |= names.is_kernel and bool(_PROJECTION.fullmatch(names.module))
    is_attention |= "out" in names[:2] and ndim > 2 and shape[-3] * shape[-2] == rule.axes == shape[-1]
    layers = (rule.stacked or 0) % ndim if _has_layers(path, rule, shapes) else None
    groups: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    if is_convolution and rule.axes in shape:
        side = shape.index(rule.axes)
        groups = tuple(axis for axis in range(ndim) if axis != side), (side,)
    elif isinstance(found, RotatedAxes):
        faces, stacked = found.of(path, ndim)
        if is_attention:
            stacked = () if layers is None else (layers,)
        other = tuple(axis for axis in range(ndim) if axis not in (*faces[-1], *stacked))
        if not other:
            return _BY_SHAPE
        # [d_model, layers, n] looks like [d_model, heads, head_dim], except where layers are known or unrolled.
        heads = is_attention and (len(other) == 2 or layers is not None or "kv" in names.name + names.module)
        if len(other) == 1 or heads:
            groups = (faces[-1], other) if faces[-1] < other else (other, faces[-1])
    elif is_convolution or _OF_TIME.fullmatch(names.name):
        return f"{'a convolution' if is_convolution else repr(names.name)} with {found}"
    elif names.is_kernel and (ndim == 2 or (ndim == 3 and _in_stack(path, rule, shapes))):
        first, second = (axis for axis in range(ndim) if ndim == 2 or axis != (rule.stacked or 0) % ndim)
        groups = (first,), (second,)
    if ndim == 2 and rule.axes in shape:
        is_named = bool(_HEAD.fullmatch(names.module if names.is_kernel else names.name))
        if (is_wide := _is_as_wide_as_a_table(path, rule, shapes)) or is_named:
            return Matrix("head", ((0,), (1,)), not is_wide)
    return Matrix("matrix", groups, not names.is_kernel and not (is_attention and ndim < 4))


def _in_stack(path: str, rule: Rule, shapes: Shapes) -> bool:
    return rule.stacked is not None or any(all(evidence) for evidence in _stacks(path, rule, shapes))


def _is_as_wide_as_a_table(path: str, rule: Rule, shapes: Shapes) -> bool:
    """Returns whether a matrix [d_model, n] is the only one of that n, and a table has n rows."""

    def beside_d_model(shape: tuple[int, ...]) -> int | None:
        if len(shape) != 2 or rule.axes not in shape:
            return None
        return shape[1 - shape.index(rule.axes)]

    n = beside_d_model(shapes[path])
    same = [other for other, shape in shapes.items() if beside_d_model(shape) == n]
    tables = [other for other in same if _names(other, shapes[other], rule, shapes).is_table]
    return bool(tables) and len(same) == len(tables) + 1


def _has_layers(path: str, rule: Rule, shapes: Shapes) -> bool:
    """Returns whether the first axis of an attention kernel, or `rule.stacked`, counts layers and not heads.

    Some module around it must have kernels of three axes that all have as many, and among them one outside of
    attention, or a vector by its name.
    """
    if rule.stacked is not None:
        return True
    parts, layers = path.split("/"), shapes[path][0]
    for depth in range(len(parts) - 1, -1, -1):
        prefix = "".join(f"{part}/" for part in parts[:depth])
        beside = {other: of for other, of in shapes.items() if other.startswith(prefix)}
        kernels = {other: of for other, of in beside.items() if _long_axes(of) > 2}
        vectors = [
            other for other, of in beside.items() if len(of) > 1 and of[0] == layers and _is_called_vector(other)
        ]
        outside = [o for o in kernels if not any(map(_in_attention, o.lower().split("/")))]
        if (outside or vectors) and all(of[0] == layers for of in kernels.values()):
            return layers <= _MAX_LAYERS
    return False


def _is_called_vector(path: str) -> bool:
    return is_per_channel(path) or bool(_VECTOR.fullmatch(path.lower().rpartition("/")[2]))


def _in_attention(part: str) -> bool:
    return bool(_ATTENTION.fullmatch(part) or _PROJECTION.fullmatch(part) or part == "out")


def without_length(length: int) -> str:
    """Returns the reason why a kernel without an axis of that length is left alone."""
    return f"no axis of length {length}"


def find_d_model(shapes: Shapes, embeddings: str | None, is_part: bool, stacked: int | None = None) -> int | None:
    """Finds d_model, the width of the residual stream, if names and shapes leave no doubt.

    It is the one length that most kernels (each counted once) have and that is the width of an embedding table (its
    last axis; for the largest table also the first one, if that is shorter), provided that at least half of the kernels
    have it and those without it are not a second tower: none has the width of another table or is square, and they are
    less than a third of all kernels or share no length.

    Args:
      shapes: Shapes of all parameters with floating dtype, by path.
      embeddings: As for `generic_axes`.
      is_part: Whether parts of the tree are masked, so that nothing is decided.
      stacked: As for `generic_axes`.

    Returns:
      The length, or None if no parameter would be rotated anyway.

    Raises:
      UserError: If in doubt, with the candidates.
    """
    rule = Rule(None, embeddings=embeddings, stacked=stacked)
    found = {path: _names(path, shape, rule, shapes) for path, shape in shapes.items()}
    tables = [shapes[path] for path, names in found.items() if names.is_table and len(shapes[path]) > 1]
    kernels = [shapes[path] for path, names in found.items() if not names.is_table and not names.why_vector]
    if not kernels and not tables:
        return None
    widths = {shape[-1] for shape in tables}
    if tables and (largest := max(tables, key=math.prod))[0] < largest[-1]:  # [d_model, vocab]
        widths.add(largest[0])
    counts = _counts(kernels)
    most = max(counts.values(), default=0)
    likely = [n for n in widths if counts[n] == most]
    if len(likely) == 1 and 2 * most >= len(kernels) and not is_part:
        without = [shape for shape in kernels if likely[0] not in shape]
        others = {shape[-1] for shape in tables if likely[0] not in shape}
        is_tower = any(others & set(shape) or (len(shape) == 2 and shape[0] == shape[1]) for shape in without)
        shared = max(_counts(without).values(), default=0) == len(without) and 3 * len(without) >= len(kernels)
        if most and not is_tower and not (without and shared):
            return likely[0]
    raise _in_doubt(kernels, tables, widths, is_part)


def _counts(kernels: Sequence[tuple[int, ...]]) -> collections.Counter[int]:
    rotatable = range(2, _MAX_GENERIC_SIZE + 1)
    return collections.Counter(length for shape in kernels for length in set(shape) if length in rotatable)


def _in_doubt(
    kernels: Sequence[tuple[int, ...]], tables: Sequence[tuple[int, ...]], widths: set[int], is_part: bool
) -> UserError:
    counts = _counts(kernels)
    # Short axes are those of layers, heads or ranks, unless there are no others.
    ranked = sorted(counts, key=lambda n: (n >= 16, n in widths and 4 * counts[n] >= len(kernels), counts[n], n))[::-1]
    ranked = ranked[:3] or sorted(widths)
    lengths = ", ".join(f"{n} (in {counts[n]} of {len(kernels)} kernels)" for n in ranked)
    shown = ", ".join(str(shape) for shape in tables[:3]) or "none by name"
    of = "a masked part of a tree does not show it" if is_part else f"embedding tables: {shown}"
    options = " or ".join(f"Rotation(axes={n})" for n in ranked)
    return UserError(
        f"Rotation() is not certain of d_model, the width of the residual stream: {lengths}; {of}",
        allowed=f"{options}, whichever is d_model"
        + ("" if tables or is_part else "; with embeddings='' if there are none"),
    )
