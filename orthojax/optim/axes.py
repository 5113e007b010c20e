"""Which axes of a parameter are rotated, by its name and shape: kernels, embedding tables and vectors."""

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
        """(groups, stacked) with axes in 0..ndim-1; ValueError where the parameter has no such axis."""
        groups: Any = self.groups  # tuples since __post_init__
        named = [axis for group in (*groups, self.stacked) for axis in group]
        if any(not -ndim <= axis < ndim for axis in named) or len({axis % ndim for axis in named}) < len(named):
            raise ValueError(f"{path}: {self} does not fit a parameter of {ndim} axes; allowed: each of its axes once")
        return tuple(tuple(a % ndim for a in group) for group in groups), tuple(a % ndim for a in self.stacked)


def is_integer(value: Any, smallest: int, largest: int) -> bool:
    """Whether it is an integer, of NumPy too, within the limits; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and smallest <= int(value) <= largest


def checked_axes(axes: Any) -> GenericAxes | int:
    """`axes` of the rule, an integer of NumPy as one of Python.

    Raises:
      ValueError: For what is neither a name nor a length.
    """
    if is_integer(axes, 2, _MAX_GENERIC_SIZE):
        return int(axes)
    names = typing.get_args(GenericAxes)
    if axes not in names:
        raise ValueError(
            f"Rotation axes={axes!r}; allowed: {', '.join(names)}, a length of 2 to {_MAX_GENERIC_SIZE}, or a function "
            "(path, shape) -> RotatedAxes | None"
        )
    return axes


# Names of arrays, and of the modules that hold them, in lower case.
_KERNEL = re.compile(r"(.*_)?(kernel|weights?|w[a-z0-9]?)(_.*)?")
_OF_MODULE = re.compile(r"weights?|w|table")  # what it is, only the module's name tells
_TABLE = re.compile(
    r"(?!.*(patch|unembed))(.*(emb|embs|embed|embeds|embedder|embeddings?)(_(tokens?|positions?|in|table|weights?))?"
    r"|(.*_)?w[tp]e)(_?[0-9]+)?"
)
_VECTOR = re.compile(
    r"b|(.*_)?(bias|scale|offset|gain|gamma|beta|sinks?|(cls|class|mask)_token|sink_logits?)(_?[0-9]+)?"
)
_NORM = re.compile(  # not the linear layer behind a norm
    r"(.*norm|(.*_)?(ln|rms))(?!.*(proj|linear|dense|conv))(_?[a-z0-9]{1,3}|[0-9]*(_[a-z0-9]+)+)?"
)

# Whether a kernel writes to the residual stream or reads it, where its shape does not say it.
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
    """The default rule, for any tree; a rule of your own may fall back on it.

    By the last names of the path, and the shape:

    - An embedding table [vocab, d] is rotated along its last axis, one basis for all rows. It is called embedding(s),
      wte, wpe or something that ends in emb or embed (tok_emb, pos_embed, embed_tokens, ...), or is the weight, w or
      table of a module that is.
    - Vectors are left alone, stacked ones [L, d] too: fewer than two axes; called bias, b, scale, offset, gain, gamma,
      beta, sink, cls_token or the like; the weight of a norm; any other name than a kernel's where one axis alone is
      longer than 1.
    - The last two axes of the rest are a kernel and those before them stacked layers: right for Dense and Linear,
      scanned or not. Name the axes yourself (a rule for `Rotation.axes`) where it is not. flax's attention, unless
      `axes` is a number: query, key and value [d, heads, head_dim] are rotated within each head only, every row of d
      counting as a layer; out [heads, head_dim, d] has a basis for each head. Valid but weak, and `haar` refuses out
      where d is over 8 head_dim, and the others where head_dim is over 8 heads. `RotatedAxes(((1, 2),))` and
      `RotatedAxes((2,))` take them for the matrices [d, heads * head_dim] and [heads * head_dim, d]. In a convolution
      each spatial position is a layer.

    Args:
      path: The parameter's path, as `describe` prints it.
      leaf: Its shape and dtype.
      axes: Which axes of a kernel; a number is d_model, for the axis of that length, wherever it is: the output of what
        writes to the residual stream, the input of what reads it; flax's query [d_model, heads, head_dim] and, where
        heads * head_dim is d_model, out [heads, head_dim, d_model] too, each with one basis. Of a square kernel the
        names query, key, value, q_proj, gate, up, wi, c_attn and the like say that it reads; out, output, o_proj, wo,
        down, c_proj that it writes; under another name both axes are rotated. A kernel without such an axis is left
        alone. Tables do not depend on it. Only axes of length 2 to 16,384 are rotated.
      kernel_layout: Whether a kernel is [in, out] (flax, haiku) or [out, in] (equinox, PyTorch). Where axes is a number
        only square kernels need it; one called weight, as in the latter two, is taken for neither unless this says
        `out_in`: both of its axes are rotated.
      embeddings: A regular expression: the tables are where it is found in the path, instead of by name; "" for none.

    Raises:
      ValueError: For other `axes`.

    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), "float32"))
    RotatedAxes(groups=((-1,),), stacked=(0,))
    >>> generic_axes("mlp/weight", jax.ShapeDtypeStruct((256, 64), "float32"), kernel_layout="out_in")
    RotatedAxes(groups=((-2,),), stacked=())
    >>> generic_axes("mlp/kernel", jax.ShapeDtypeStruct((12, 64, 256), "float32"), axes=64)
    RotatedAxes(groups=((-2,),), stacked=(0,))
    >>> generic_axes("query/kernel", jax.ShapeDtypeStruct((64, 4, 16), "float32"), axes=64)
    RotatedAxes(groups=((-3,),), stacked=())
    >>> generic_axes("o_proj/kernel", jax.ShapeDtypeStruct((64, 64), "float32"), axes=64)
    RotatedAxes(groups=((-1,),), stacked=())
    """
    found, _ = judge(path, leaf.shape, checked_axes(axes), kernel_layout, embeddings)
    return None if isinstance(found, str) else found


def judge(
    path: str, shape: tuple[int, ...], axes: GenericAxes | int, kernel_layout: KernelLayout, embeddings: str | None
) -> tuple[RotatedAxes | str, Mark]:
    """As `generic_axes`, with the reason where nothing is rotated; and whether it is a table, or a guess."""
    name, module = [*[part for part in reversed(path.lower().split("/")) if not part.isdigit()], "", ""][:2]
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
    else:
        output, before = (-1, -2) if kernel_layout == "in_out" else (-2, -1)
        kernel_ndim = 2
        if isinstance(axes, int):
            chosen = [axis for axis in range(-len(shape), 0) if shape[axis] == axes]
            if -2 in chosen:  # [..., d_model, f]: as many layers or experts before it would be a coincidence
                chosen = [axis for axis in chosen if axis >= -2]
            kernel_ndim = max(2, -min(chosen, default=-2))  # flax's query is [d_model, heads, head_dim]
            if chosen == [-2, -1]:
                chosen = _facing_stream(name, module, kernel_layout)
                guessed = len(chosen) > 1
            elif chosen == [-1] and len(shape) > 2 and shape[-3] * shape[-2] == axes and "out" in (name, module):
                kernel_ndim = 3  # and its out [heads, head_dim, d_model]; other kernels of three axes are stacked
        else:
            chosen = {"output": [output], "input": [before], "both": [-2, -1]}[axes]
        stacked = tuple(range(len(shape) - kernel_ndim))
    groups = tuple((axis,) for axis in chosen if 2 <= shape[axis] <= _MAX_GENERIC_SIZE)
    mark: Mark = "embedding" if table else "" if kernel and len(shape) == 2 and not guessed else "unsure"
    if groups:
        return RotatedAxes(groups, stacked), mark
    return without_length(axes) if isinstance(axes, int) else f"no {axes} axis of length 2 to {_MAX_GENERIC_SIZE}", mark


def _facing_stream(name: str, module: str, layout: KernelLayout) -> list[int]:
    """Which axes of a square kernel face the residual stream, by its own name or its module's: both where unknown."""
    writes = _writes(name, module)
    if writes is None or (layout == "in_out" and re.fullmatch(r"(.*_)?weights?", name)):
        return [-2, -1]
    return [-1 if writes == (layout == "in_out") else -2]


def _writes(name: str, module: str) -> bool | None:
    """Whether a kernel writes to the residual stream, by its own name or its module's; None where unknown."""
    for word in (re.sub(r"_?[0-9]+", "", word) for word in (name, module)):
        if (writes := _WRITER.fullmatch(word)) or _READER.fullmatch(word):
            return bool(writes)
    return None


def without_length(length: int) -> str:
    """The reason why a kernel without an axis of that length is left alone."""
    return f"no axis of length {length}"
