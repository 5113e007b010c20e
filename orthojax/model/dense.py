"""The linear layers of the transformer, and how they start."""

from typing import Any, Protocol, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig
from orthojax.ops.quantize import Quantized

F = TypeVar("F", bound="LinearFunction")
_PLAIN = "is_plain_product"


class LinearFunction(Protocol):
    """What a linear layer computes; `quant` puts a quantised one in its place."""

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        """Maps x [..., in], kernel [in, out], bias [out] to [..., out]; `path` is the layer's, as layers/mlp/input."""
        ...


def plain_product(function: F) -> F:
    """Marks a linear function as x @ kernel + bias, whatever it says of where things are: its head may go in chunks."""
    setattr(function, _PLAIN, True)
    return function


def is_plain_product(function: LinearFunction) -> bool:
    """Whether it bears the mark of `plain_product`."""
    return getattr(function, _PLAIN, False)


@plain_product
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
    """The product x @ kernel + bias; logits (`head`) stay float32, rounded to bfloat16 they make a noisy loss."""
    y = jnp.matmul(x, kernel, preferred_element_type=jnp.float32 if path == "head" else None)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Linear(nn.Module):
    """The one linear layer: every kernel of the model but the embeddings passes through `function`."""

    features: int
    use_bias: bool
    init_std: float
    dtype: Any
    function: LinearFunction

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., features] in `dtype`."""
        given = self.get_variable("params", "kernel")
        if isinstance(given, Quantized):  # its integers have another shape, and keep their type
            kernel: Any = given
        else:
            init = nn.initializers.normal(self.init_std)
            kernel = self.param("kernel", init, (x.shape[-1], self.features), jnp.float32).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else None
        bias = None if bias is None else bias.astype(self.dtype)
        return self.function(x.astype(self.dtype), kernel, bias, "/".join(self.path))


class Part(nn.Module):
    """What attention and MLP share: a config and the way to make a linear layer from it."""

    config: ModelConfig
    linear: LinearFunction

    def dense(self, name: str, features: int, *, writes_residual: bool = False) -> Linear:
        """A linear layer of this part, called `name`; one that writes to the residual stream starts smaller."""
        c = self.config
        # GPT-2's rule: 2 num_layers terms add up in the residual stream, so each starts that much smaller.
        std = c.init_std / (2 * c.num_layers) ** 0.5 if writes_residual else c.init_std
        return Linear(features, c.use_bias, std, jnp.dtype(c.dtype), self.linear, name=name)
