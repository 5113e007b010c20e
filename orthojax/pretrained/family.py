"""Families of published models: rows for the fields of their configs and for their weights, each read both ways."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from orthojax.config import ModelConfig
from orthojax.errors import UserError

# Config fields.


class Same(NamedTuple):
    """A foreign field that is one of ours, by its dotted path; the foreign library takes `default` if it is missing."""

    ours: str
    default: Any = ...


class Choice(NamedTuple):
    """A foreign field whose values are names of ours."""

    ours: str
    values: Mapping[Any, Any]
    default: Any = ...


class Only(NamedTuple):
    """A foreign field with a few supported values; the first is written, and taken if it is missing."""

    values: Sequence[Any]


class Equal(NamedTuple):
    """A foreign field that must have the value of another one, and has it if it is missing."""

    other: str


class More(NamedTuple):
    """Foreign fields that no row of their own explains."""

    names: frozenset[str]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]  # a foreign config -> fields of ours
    write: Callable[[ModelConfig], dict[str, Any]]  # back


FieldRow = Same | Choice | Only | Equal

# Weights.


class Transform(NamedTuple):
    """A foreign tensor as one or several arrays of ours, and, if models are written, back."""

    read: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]
    write: Callable[[Sequence[np.ndarray], ModelConfig], np.ndarray] = lambda x, c: x[0]


class Weight(NamedTuple):
    """The name of a tensor there, and the paths of its parts here, of one layer.

    A row counts if a model has these parameters, so that optional biases need no condition.

    Attributes:
      there: Its name, with {} for the layer and {expert} for an expert.
      here: Paths of our parameters; those in layers begin with `layers/`.
      how: Between the two.
      share: The axis of our parameters of which each expert has an equal share.
      where: A further condition on the model.
    """

    there: str
    here: Sequence[str]
    how: Transform
    share: int | None = None
    where: Callable[[ModelConfig], bool] = lambda c: True

    def places(self, config: ModelConfig) -> Iterator[tuple[int | None, int | None]]:
        """Yields every (layer, expert) that has such a tensor."""
        layers = range(config.num_layers) if "{}" in self.there else (None,)
        return itertools.product(layers, (None,) if self.share is None else range(self.experts(config)))

    def experts(self, config: ModelConfig) -> int:
        """Returns how many experts a model has."""
        return 0 if config.experts is None else config.experts.num_experts


SAME = Transform(lambda x, c: (x,))
TRANSPOSED = Transform(lambda x, c: (x.T,), lambda x, c: x[0].T)
THIRDS = Transform(lambda x, c: np.split(x, 3, axis=-1), lambda x, c: np.concatenate(x, axis=-1))
PADDED_BY_TWO = Transform(lambda x, c: (x[2:],), lambda x, c: np.pad(x[0], ((2, 0), (0, 0))))


def unpair(x: np.ndarray, heads: int) -> np.ndarray:
    """Reorders output rows [out, ...] of every head from neighbouring pairs, for rotary positions, to halves."""
    return np.swapaxes(x.reshape(heads, -1, 2, *x.shape[1:]), 1, 2).reshape(x.shape)


def pair(x: np.ndarray, heads: int) -> np.ndarray:
    """Inverts `unpair`."""
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
    """Makes rows for scale and bias of a norm."""
    return [Weight(f"{there}.weight", (f"{here}/scale",), SAME), Weight(f"{there}.bias", (f"{here}/bias",), SAME)]


def dense_rows(there: str, here: str, how: Transform = TRANSPOSED) -> list[Weight]:
    """Makes rows for kernel and bias of a linear layer."""
    return [
        Weight(f"{there}.weight", (f"{here}/kernel",), how),
        Weight(f"{there}.bias", (f"{here}/bias",), SAME),
    ]


def fused_rows(there: str, how: Transform) -> list[Weight]:
    """Makes rows for kernels and biases of queries, keys and values that are one tensor there."""
    names = ("kernel", "bias")
    return [Weight(f"{there}.{there_name}", tuple(f"layers/attention/{part}/{name}" for part in QKV), how)
            for there_name, name in zip(("weight", "bias"), names, strict=True)]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of published models: its configs and its tensors.

    Attributes:
      name: `model_type` in its config.json.
      architecture: The class of transformers.
      base: Fields of `ModelConfig` that all of its models have in common.
      fields: Foreign field -> its meaning.
      weights: The tensors.
      prefixes: Beginnings of the names of all tensors but the head; the first is written.
      ignored: Ends of names of tensors that are no parameters.
      rotary: `rope_parameters`, or the older fields, are read.
      rotary_fraction: The share of rotated channels that the foreign library takes if no field says it.
      mscales: YaRN scales logits by `mscale` and `mscale_all_dim`.
      window_switch: Windows are on if `use_sliding_window` says so.
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
    window_switch: bool = False
    more: More | None = None


HEADS = ("lm_head.weight", "embed_out.weight")  # which have no prefix, and are left out if they are tied


def integer(given: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Reads an integer of a foreign config.

    Raises:
      UserError: If it is missing, or no integer.
    """
    value = default if given.get(name) is None else given[name]
    if value is None:
        raise UserError(f"the config has no {name}", allowed="an integer")
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name}={value!r} is not supported", allowed="an integer")
    return value


def foreign_names(family: Family, there: str) -> list[str]:
    """Returns the names that a tensor of a table may have in a file; the first is written."""
    return [there] if there in HEADS else [prefix + there for prefix in family.prefixes]
