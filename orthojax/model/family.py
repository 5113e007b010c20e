"""What a family of published models is: rows for the fields of its config and for its weights, each read both ways."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orthojax.config import ModelConfig
from orthojax.errors import UserError

# Config fields.


class Same(NamedTuple):
    """A foreign field that is one of ours; `default` is what the foreign library takes where it is missing."""

    ours: str
    default: Any = ...


class Choice(NamedTuple):
    """A foreign field whose values are names of ours."""

    ours: str
    values: Mapping[Any, Any]
    default: Any = ...


class Only(NamedTuple):
    """A foreign field of which only some values are supported; the first is written, and taken where it is missing."""

    values: Sequence[Any]


class Equal(NamedTuple):
    """A foreign field that must have the value of another one, and has it where it is missing."""

    other: str


class More(NamedTuple):
    """Foreign fields that no row of their own explains."""

    names: frozenset[str]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]  # a foreign config -> fields of ours
    write: Callable[[ModelConfig], dict[str, Any]]  # back


FieldRow = Same | Choice | Only | Equal

# Weights.


class Transform(NamedTuple):
    """What a foreign tensor is in terms of ours: one or several arrays, and back."""

    read: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray]


class Weight(NamedTuple):
    """Where a tensor is there, and where its parts are here, of one layer.

    A row counts where a model has these parameters, so that optional biases need no condition.

    Attributes:
      there: Its name, with {} for the layer and {expert} for an expert.
      here: Paths of our parameters, beginning with `layers/` where it is in layers.
      how: What it is.
      share: The axis of our parameters of which each expert has an equal share.
      where: Models that have it, beside their parameters.
    """

    there: str
    here: Sequence[str]
    how: Transform
    share: int | None = None
    where: Callable[[ModelConfig], bool] = lambda c: True

    def places(self, config: ModelConfig) -> Iterator[tuple[int | None, int | None]]:
        """Every (layer, expert) that has such a tensor."""
        layers = range(config.num_layers) if "{}" in self.there else (None,)
        return itertools.product(layers, (None,) if self.share is None else range(config.num_experts))


SAME = Transform(lambda x, c: (x,), lambda x, c: x[0])
TRANSPOSED = Transform(lambda x, c: (x.T,), lambda x, c: x[0].T)
THIRDS = Transform(lambda x, c: np.split(x, 3, axis=-1), lambda x, c: np.concatenate(x, axis=-1))
PADDED_BY_TWO = Transform(lambda x, c: (x[2:],), lambda x, c: np.pad(x[0], ((2, 0), (0, 0))))


def unpair(x: np.ndarray, heads: int) -> np.ndarray:
    """Output rows [out, ...] of every head from neighbouring pairs, for rotary positions, to halves."""
    return np.swapaxes(x.reshape(heads, -1, 2, *x.shape[1:]), 1, 2).reshape(x.shape)


def pair(x: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `unpair`."""
    return np.swapaxes(x.reshape(heads, 2, -1, *x.shape[1:]), 1, 2).reshape(x.shape)


def _split_by_head(x: np.ndarray, c: ModelConfig) -> Sequence[np.ndarray]:
    by_head = x.reshape(c.num_heads, 3, c.head_dim, *x.shape[1:])
    return [by_head[:, part].reshape(-1, *x.shape[1:]).T for part in range(3)]


def _join_by_head(x: Sequence[np.ndarray], c: ModelConfig) -> np.ndarray:
    parts = [part.T.reshape(c.num_heads, c.head_dim, *part.T.shape[1:]) for part in x]
    return np.stack(parts, axis=1).reshape(-1, *x[0].T.shape[1:])


THIRDS_BY_HEAD = Transform(_split_by_head, _join_by_head)
QKV = ("query", "key", "value")


def norm_rows(there: str, here: str) -> list[Weight]:
    """Scale and bias of a norm."""
    return [Weight(f"{there}.weight", (f"{here}/scale",), SAME), Weight(f"{there}.bias", (f"{here}/bias",), SAME)]


def dense_rows(there: str, here: str, how: Transform = TRANSPOSED) -> list[Weight]:
    """Kernel and bias of a linear layer."""
    return [
        Weight(f"{there}.weight", (f"{here}/kernel",), how),
        Weight(f"{there}.bias", (f"{here}/bias",), SAME),
    ]


def fused_rows(there: str, how: Transform) -> list[Weight]:
    """Kernels and biases of queries, keys and values that are one tensor there."""
    names = ("kernel", "bias")
    return [Weight(f"{there}.{there_name}", tuple(f"layers/attention/{part}/{name}" for part in QKV), how)
            for there_name, name in zip(("weight", "bias"), names, strict=True)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """How one kind of published models is written down.

    Attributes:
      name: `model_type` in its config.json.
      architecture: The class of transformers.
      base: What all of its models have in common, as fields of `ModelConfig`.
      fields: Foreign field -> what it means.
      weights: The tensors.
      prefixes: What the names of tensors but the head's may begin with; the first is written.
      ignored: Ends of names of tensors that are no parameters.
      rotary: Whether `rope_parameters`, or the older fields, are read.
      rotary_fraction: What the foreign library takes where no field says it.
      mscales: Whether YaRN scales logits by `mscale` and `mscale_all_dim`.
      more: Fields that no single row explains.
    """

    name: str
    architecture: str
    base: Mapping[str, Any]
    fields: Mapping[str, FieldRow]
    weights: Sequence[Weight]
    prefixes: tuple[str, ...] = ("model.", "")
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    rotary: bool = True
    rotary_fraction: float = 1.0
    mscales: bool = False
    more: More | None = None


HEADS = ("lm_head.weight", "embed_out.weight")  # which have no prefix, and are left out where they are tied


def integer(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field of a foreign config.

    Raises:
      UserError: Where it is missing, or no integer.
    """
    value = default if given.get(name) is None else given[name]
    if value is None:
        raise UserError(f"the config has no {name}", allowed="an integer")
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name}={value!r} is not supported", allowed="an integer")
    return value


def foreign_names(family: Family, there: str) -> list[str]:
    """The names that a tensor of a table may have in a file, the one that is written first."""
    return [there] if there in HEADS else [prefix + there for prefix in family.prefixes]
