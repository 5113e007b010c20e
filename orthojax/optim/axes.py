"""The rotated axes of a parameter, by its name and shape: kernels, embedding tables and vectors."""

import dataclasses
import re
import typing
from typing import Any, Literal

import jax
import numpy as np

GenericAxes = Literal["output", "input", "both"]
KernelLayout = Literal["in_out", "out_in"]
Mark = Literal["", "embedding", "unsure"]

_MAX_GENERIC_SIZE = 16_384


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
    """Tells if a value is an integer, of NumPy too, within the limits; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and smallest <= int(value) <= largest


def checked_axes(axes: Any) -> GenericAxes | int:
    """Returns `axes` of the rule, an integer of NumPy as one of Python; ValueError if it is no name and no length."""
    if is_integer(axes, 2, _MAX_GENERIC_SIZE):
        return int(axes)
    names = typing.get_args(GenericAxes)
    if axes not in names:
        raise ValueError(
            f"Rotation axes={axes!r}; allowed: {', '.join(names)}, a length of 2 to {_MAX_GENERIC_SIZE}, or a function "
            "(path, shape) -> RotatedAxes | None"
        )
    return axes


# Names of arrays, and of the modules that hold them, in lower case and without numbers.
_KERNEL = re.compile(r"(.*_)?(kernel|weights?|w[a-z]?)(_.*)?")
_OF_MODULE = re.compile(r"weights?|w|table")  # what it is, only the module's name tells
_TABLE = re.compile(
    r"(?!.*(patch|unembed))(.*emb(s|eds?|edder|eddings?)?(_(tokens?|positions?|in|table|weights?))?|(.*_)?w[tp]e)"
)
_VECTOR = re.compile(r"b|(.*_)?(bias|scale|offset|gain|gamma|beta|sinks?|sink_logits?|(cls|class|mask)_token)")
_NORM = re.compile(r"(?!.*(proj|linear|dense|conv))(.*norms?|(.*_)?(ln|rms))(_.*)?")  # not a linear layer behind one
# Kernels that write to the residual stream or read it, if the shape does not say it.
_WRITER = re.compile(r"(.*_)?(o|out|output|wo|down)(_?proj(ection)?)?|(.*_)?c_proj|proj_out")
_READER = re.compile(
    r"(.*_)?(q|k|v|query|key|value|w[qkvi]|gate|up|in|input)(_?proj(ection)?)?|(.*_)?c_(attn|fc)|proj_in"
)


def generic_axes(
    path: str,
    leaf: jax.ShapeDtypeStruct,
    axes: GenericAxes | int = "output",
    kernel_layout: KernelLayout = "in_out",
    embeddings: str | None = None,
) -> RotatedAxes | None:
    """Returns the rotated axes by the default rule, for any tree; a rule of your own may fall back on it.

    By the last names of the path, and the shape:

    - An embedding table [vocab, d] (embedding, embed_tokens, tok_emb, wte, wpe, ..., or the weight, w or table of such
      a module) is rotated along its last axis, with one basis for all rows.
    - Vectors are left alone, stacked ones [L, d] too: bias, b, scale, offset, gain, gamma, beta, sink, cls_token and
      the like, the weight of a norm, and any array with one axis longer than 1 that is not named as a kernel.
    - The last two axes of the rest are a kernel and those before them stacked layers: right for Dense and Linear,
      scanned or not. Name the axes yourself (a rule for `Rotation.axes`) if it is not: in a convolution each spatial
      position counts as a layer, and so does, unless `axes` is a number, each row of flax's query [d, heads, head_dim],
      for which `RotatedAxes(((1, 2),))` is better, and each head of its out, for which `RotatedAxes((2,))` is.

    Args:
      path: The parameter's path, as `describe` prints it.
      leaf: Its shape and dtype.
      axes: Which axes of a kernel. A number is d_model: the axis of that length, wherever it is, also in flax's query
        [d_model, heads, head_dim] and out [heads, head_dim, d_model]; a kernel without such an axis is left alone. Of a
        square kernel the name decides: query, key, value, q_proj, gate, up, wi, c_attn and the like read the residual
        stream, out, output, o_proj, wo, down, c_proj write to it; under another name both axes are rotated. Only axes
        of length 2 to 16,384 are rotated.
      kernel_layout: A kernel is [in, out] (flax, haiku) or [out, in] (equinox, PyTorch). If `axes` is a number,
        only square kernels need it; those called weight are rotated along both axes unless this says `out_in`.
      embeddings: A regular expression, found in the paths of tables, which then are not told by name; "" for none.

    Raises:
      ValueError: For other `axes`.

    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), "float32"))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    >>> generic_axes("mlp/weight", jax.ShapeDtypeStruct((256, 64), "float32"), kernel_layout="out_in")
    RotatedAxes(groups=((-2,),), stacked=())
    >>> generic_axes("query/kernel", jax.ShapeDtypeStruct((64, 4, 16), "float32"), axes=64)
    RotatedAxes(groups=((-3,),), stacked=())
    """
    found, _ = judge(path, leaf.shape, checked_axes(axes), kernel_layout, embeddings)
    return None if isinstance(found, str) else found


def judge(
    path: str, shape: tuple[int, ...], axes: GenericAxes | int, kernel_layout: KernelLayout, embeddings: str | None
) -> tuple[RotatedAxes | str, Mark]:
    """Decides as `generic_axes`, with the reason if nothing is rotated; and a mark of tables and of guesses."""
    parts = [part for part in path.lower().split("/") if not part.isdigit()]
    name, module = [*(re.sub(r"_?[0-9]+", "", part) for part in reversed(parts)), "", ""][:2]
    kernel, guessed = _KERNEL.fullmatch(name), False
    if len(shape) < 2:
        return f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}, fewer than 2", ""
    if embeddings is None:
        table = _TABLE.fullmatch(module if _OF_MODULE.fullmatch(name) else name)
    else:
        table = embeddings and re.search(embeddings, path)
    if table:
        chosen, stacked = [-1], ()
    elif _VECTOR.fullmatch(name):
        return f"named {name!r}", ""
    elif _OF_MODULE.fullmatch(name) and _NORM.fullmatch(module):
        return f"{name!r} of {module!r}", ""
    elif not kernel and sum(length > 1 for length in shape) < 2:
        return "a vector by its shape", "unsure"
    elif isinstance(axes, int):
        chosen = [axis for axis in range(-len(shape), 0) if shape[axis] == axes]
        if -2 in chosen:  # [..., d_model, f]: as many layers or experts before it would be a coincidence
            chosen = [axis for axis in chosen if axis >= -2]
        kernel_ndim = max(2, -min(chosen, default=-2))  # flax's query is [d_model, heads, head_dim]
        if chosen == [-2, -1]:
            chosen = _facing_stream(name, module, kernel_layout)
            guessed = len(chosen) > 1
        elif chosen == [-1] and len(shape) > 2 and shape[-3] * shape[-2] == axes and "out" in (name, module):
            kernel_ndim = 3  # and its out [heads, head_dim, d_model]; other kernels of three axes are stacked
        stacked = tuple(range(len(shape) - kernel_ndim))
    else:
        output, before = (-1, -2) if kernel_layout == "in_out" else (-2, -1)
        chosen = {"output": [output], "input": [before], "both": [-2, -1]}[axes]
        stacked = tuple(range(len(shape) - 2))
    groups = tuple((axis,) for axis in chosen if 2 <= shape[axis] <= _MAX_GENERIC_SIZE)
    mark: Mark = "embedding" if table else "" if kernel and len(shape) == 2 and not guessed else "unsure"
    if groups:
        return RotatedAxes(groups, stacked), mark
    return without_length(axes) if isinstance(axes, int) else f"no {axes} axis of length 2 to {_MAX_GENERIC_SIZE}", mark


def _facing_stream(name: str, module: str, layout: KernelLayout) -> list[int]:
    """Returns which axes of a square kernel face the residual stream, by its own or its module's name; or both."""
    for word in (name, module) if layout == "out_in" or not re.fullmatch(r"(.*_)?weights?", name) else ():
        if (writes := _WRITER.fullmatch(word)) or _READER.fullmatch(word):
            return [-1 if bool(writes) == (layout == "in_out") else -2]
    return [-2, -1]


def without_length(length: int) -> str:
    """Returns the reason why a kernel without an axis of that length is left alone."""
    return f"no axis of length {length}"
