"""Which few linear layers have to stay in float for a rounded model to predict as the float one does."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from orthojax.quant.settings import KERNELS_BUT_HEAD, map_kernels

if TYPE_CHECKING:
    from orthojax.model import LinearFunction


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Switched:
    """Kernels [..., in, out] of which each may stay in float: arrays, so that one program serves every choice."""

    kernel: jax.Array
    rounded: jax.Array  # bool [...]

    def reshape(self, *shape: Any) -> jax.Array:
        """Returns the kernels in another shape: code that reads a kernel as an array may be given these."""
        return self.kernel.reshape(*shape)


def linear_layers(params: Any) -> list[str]:
    """Lists the linear layers of a model but the head, those of a scanned stack one by one: layers_0/mlp/input."""
    names: list[str] = []
    map_kernels(params, KERNELS_BUT_HEAD, lambda kernel, path: names.extend(_names(kernel, path)))
    return names


def _names(kernel: Any, path: str) -> list[str]:
    path = path.removesuffix("/kernel")
    if jnp.ndim(kernel) == 2:
        return [path]
    return [re.sub(r"(^|/)layers/", rf"\1layers_{layer}/", path) for layer in range(len(kernel))]


def switched_params(params: Any, in_float: Collection[str]) -> Any:
    """Returns parameters for a model of `switching` linear layers; those named `in_float` are not rounded."""

    def switched(kernel: Any, path: str) -> Switched:
        rounded = jnp.array([name not in in_float for name in _names(kernel, path)])
        return Switched(jnp.asarray(kernel), rounded.reshape(jnp.shape(kernel)[:-2]))

    return map_kernels(params, KERNELS_BUT_HEAD, switched)


@functools.cache  # the same function for the same one, so that jit compiles a model with it once
def switching(function: "LinearFunction") -> "LinearFunction":
    """Makes a linear function that rounds as another one does, except where a `Switched` kernel says float."""
    from orthojax.model import linear as float_linear  # here, as in `linear`

    def linear(x: jax.Array, kernel: Any, bias: jax.Array | None, path: str) -> jax.Array:
        if not isinstance(kernel, Switched):
            return function(x, kernel, bias, path)
        of = [lambda f=f: f(x, kernel.kernel.astype(x.dtype), bias, path) for f in (function, float_linear)]
        return jax.lax.cond(kernel.rounded, *of)

    return linear


def rescue(candidates: Sequence[str], score: Callable[[list[str]], float], count: int = 3) -> list[str]:
    """Chooses linear layers one after the other, each time the one with which the score becomes smallest.

    `score` takes the layers that stay in float; nan is never the smallest. The result may be shorter than `count`.

    >>> rescue(["a", "b", "c"], lambda chosen: 5 - len(chosen) - 2 * ("b" in chosen), count=2)
    ['b', 'a']
    """
    chosen: list[str] = []
    while len(chosen) < min(count, len(candidates)):
        scores = {name: score([*chosen, name]) for name in candidates if name not in chosen}
        scores = {name: value for name, value in scores.items() if value == value}
        if not scores:
            break
        chosen.append(min(scores, key=scores.__getitem__))
    return chosen
