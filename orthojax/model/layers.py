"""What a block consists of besides attention: linear layers, norm and MLP. Legend: B batch, T positions, D d_model."""

from functools import partial
from typing import Any, Protocol, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from orthojax.config import Mlp, ModelConfig
from orthojax.ops.products import is_head, kernel_product
from orthojax.ops.quantize import Quantized

F = TypeVar("F", bound="LinearFunction")


class LinearFunction(Protocol):
    """What a linear layer computes; `quant` substitutes quantised ones."""

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        """Maps x [..., in], kernel [in, out], bias [out] to [..., out]; `path` is the layer's, as layers/mlp/input."""
        ...


def plain_product(function: F) -> F:
    """Marks a linear function as x @ kernel + bias, up to sharding constraints: its head may be computed in chunks."""
    function.is_plain_product = True  # pyright: ignore
    return function


def is_plain_product(function: LinearFunction) -> bool:
    """Whether it is marked by `plain_product`."""
    return getattr(function, "is_plain_product", False)


@plain_product
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
    """The product x @ kernel + bias; logits (`head`) stay float32, since bfloat16 ones would make the loss noisy."""
    y = kernel_product(x, kernel, preferred_element_type=jnp.float32 if is_head(path) else None)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Linear(nn.Module):
    """The one linear layer: every kernel of the model but the embeddings passes through `function`."""

    features: int
    use_bias: bool
    kernel_init: nn.initializers.Initializer
    dtype: Any
    function: LinearFunction

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., in] -> [..., features] in `dtype`."""
        given = self.get_variable("params", "kernel")
        if isinstance(given, Quantized):  # neither the shape nor the dtype of a float kernel
            kernel: Any = given
        else:
            kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32).astype(
                self.dtype
            )
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        return self.function(x.astype(self.dtype), kernel, bias, "/".join(self.path))


def kernel_initializer(config: ModelConfig, *, writes_residual: bool = False) -> nn.initializers.Initializer:
    """How kernels start; one that writes to the residual stream is smaller where they are normal."""
    if config.kernel_init == "uniform_fan_in":
        return nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")  # the variance of U(-1, 1)
    # GPT-2's rule: 2 num_layers terms add up in the residual stream.
    return nn.initializers.normal(config.init_std / ((2 * config.num_layers) ** 0.5 if writes_residual else 1.0))


class Part(nn.Module):
    """What attention and MLP share: the config and a way to create linear layers."""

    config: ModelConfig
    linear: LinearFunction

    def dense(self, name: str, features: int, *, use_bias: bool | None = None, writes_residual: bool = False) -> Linear:
        """A linear layer of this part, called `name`; its bias is that of the config where None."""
        c, init = self.config, kernel_initializer(self.config, writes_residual=writes_residual)
        bias = c.use_bias if use_bias is None else use_bias
        return Linear(features, bias, init, jnp.dtype(c.dtype), self.linear, name=name)


class Norm(nn.Module):
    """Normalisation over the last axis, in float32.

    `rmsnorm_single` is RMSNorm with one scalar scale: it commutes with every rotation of the channels, so it prefers no
    basis. Only `layernorm` has a bias.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] float32."""
        c = self.config
        if c.norm == "none":
            return x
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if c.norm == "layernorm":
            x -= jnp.mean(x, -1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + c.norm_eps)
        shape, as_x = () if c.norm == "rmsnorm_single" else (x.shape[-1],), (1,) * (x.ndim - 1) + (-1,)
        if c.norm_scale:
            x *= self.param("scale", nn.initializers.ones, shape, jnp.float32).reshape(as_x)
        if c.has_norm_bias:
            x += self.param("bias", nn.initializers.zeros, shape, jnp.float32).reshape(as_x)
        return x


_ACTIVATIONS = {"gelu": jax.nn.gelu, "gelu_exact": partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}


class Feedforward(Part):
    """The MLP of one block, or a part of it; `width` is that of its hidden units, None that of the config."""

    kind: Mlp
    width: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
        """[B, T, D] -> [B, T, D]; `factor` [B, T, width] multiplies the hidden units."""
        c = self.config
        width = c.d_mlp if self.width is None else self.width
        if self.kind != "linear":
            hidden = self.dense("input", width)(x)
            if self.kind == "swiglu":
                x = jax.nn.silu(self.dense("gate", width)(x)) * hidden
            else:
                x = _ACTIVATIONS[self.kind](hidden)
            x = x if factor is None else x * factor.astype(x.dtype)
        return self.dense("output", c.d_model, writes_residual=True)(x)
