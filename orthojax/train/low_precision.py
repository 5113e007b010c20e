"""Training whose matrix products are rounded to 4 or 8 bits: simulated, forward and both backward products."""

import functools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import TrainConfig
from orthojax.model import LinearFunction, linear, plain_product
from orthojax.ops.orthogonal import hadamard_matrix, hash_signs, position_bits
from orthojax.ops.products import kernel_product, transposed_product
from orthojax.ops.quantize import e4m3, e5m2, mxfp4, nvfp4, split_blocks

_FLOAT = ("head", "head_input", "embedding_output", "router", "shared_gate")  # linear layers that are not rounded
_TRANSFORMED = 16  # consecutive tokens of a row that the random Hadamard transform mixes


class Recipe(NamedTuple):
    r"""How the three products of a linear layer y = x W are rounded, for a gradient g of y.

    .. math::
        y = q(x)\,q(W), \quad \partial x = s(g)\,q(W)^\top, \quad \partial W = q(H x)^\top s(H g)

    q rounds to the nearest, in blocks along the axis that a product sums over; with `square` those of W are squares,
    so that forward and backward round it alike. s rounds to either neighbour with `stochastic`, the nearer the
    likelier, so that its mean is g, except what `nvfp4` clips or rounds to 0. H mixes 16 consecutive tokens of a row by
    a Hadamard matrix with random signs, the same in every layer and step, which spreads outliers and cancels in the
    product. FP8 has one scale a tensor, E4M3 forward and E5M2 for gradients, and none of these. Derivatives pass
    through the rounding.

    The noise of s is a hash of the layer's name, the first bits of the largest element of g, and the position: the same
    on resuming, and almost always the same on any mesh. With accumulation over `data` alone each device rounds its own
    part.

    Reference:
      Pretraining Large Language Models with NVFP4, `arXiv 2509.25149 <https://arxiv.org/abs/2509.25149>`_, 2025; of FP8
      `arXiv 2209.05433 <https://arxiv.org/abs/2209.05433>`_, 2022.
    """

    format: str  # nvfp4 | mxfp4 | fp8
    stochastic: bool = True
    hadamard: bool = True
    square: bool = True

    def rounded(self, x: jax.Array, axis: int | tuple[int, int]) -> jax.Array:
        """Computes q, in blocks along one axis or two."""
        return e4m3(x) if self.format == "fp8" else (nvfp4 if self.format == "nvfp4" else mxfp4)(x, axis)

    def gradient(self, g: jax.Array, axis: int, key: int) -> jax.Array:
        """Computes s, in blocks along an axis; equal keys and gradients have equal noise."""
        if self.format == "fp8":
            return e5m2(g)
        if not self.stochastic:
            return self.rounded(g, axis)
        largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(g.astype(jnp.float32))), jnp.uint32)
        # Without its last bits, in which two meshes may differ.
        bits = position_bits(jnp.uint32(key) ^ (largest >> 15), g.shape)
        noise = (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)
        return (nvfp4 if self.format == "nvfp4" else mxfp4)(g, axis, noise=noise)

    def mixed(self, x: jax.Array) -> jax.Array:
        """Computes H of the tokens, the axis before the last; the last of them are padded with zeros."""
        if not self.hadamard or self.format == "fp8":
            return x
        tokens = x.ndim - 2
        blocks = split_blocks(x, tokens, _TRANSFORMED)
        size = blocks.shape[tokens + 1]
        matrix = hadamard_matrix(size)
        if matrix is None:  # rows of a few tokens
            return x
        signed = (matrix * hash_signs(0, [0], size)[0] / size**0.5).astype(np.float32)
        mixed = jnp.einsum("ts,...sd->...td", signed.astype(x.dtype), blocks)
        return mixed.reshape(*x.shape[:tokens], -1, x.shape[-1])

    def kernel(self, kernel: jax.Array, contracted: int) -> jax.Array:
        """Computes q of a kernel [in, out] for a product that sums over one of its axes."""
        return self.rounded(kernel, (0, 1) if self.square else contracted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def low_precision_product(recipe: Recipe, key: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes x @ kernel as `recipe` says, [..., in] and [in, out] to [..., out]; `key` chooses its noise."""
    return kernel_product(recipe.rounded(x, -1), recipe.kernel(kernel, 0))


def _forward(recipe: Recipe, key: int, x: jax.Array, kernel: jax.Array) -> Any:
    return low_precision_product(recipe, key, x, kernel), (x, kernel)


def _backward(recipe: Recipe, key: int, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    of_x = kernel_product(recipe.gradient(g, -1, key), recipe.kernel(kernel, 1), contract=1)
    mixed, of_y = recipe.mixed(x), recipe.gradient(recipe.mixed(g), -2, ~key & 0xFFFFFFFF)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    of_kernel = transposed_product(recipe.rounded(mixed, -2), of_y, preferred_element_type=wide)
    return of_x.astype(x.dtype), of_kernel.astype(kernel.dtype)


low_precision_product.defvjp(_forward, _backward)


def training_linear(train: TrainConfig) -> LinearFunction:
    """Returns the linear layers of a run: with `train.matmul_format` rounded, except `_FLOAT`."""
    if not train.matmul_format:
        return linear
    parts = train.matmul_stochastic, train.matmul_hadamard, train.matmul_square
    return _rounded_linear(Recipe(train.matmul_format, *parts))


@functools.cache  # so that runs that agree share their programs
def _rounded_linear(recipe: Recipe) -> LinearFunction:
    @plain_product
    def rounded(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        if path.rpartition("/")[2] in _FLOAT:
            return linear(x, kernel, bias, path)
        y: Any = low_precision_product(recipe, zlib.crc32(path.encode()), x, kernel)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))

    return rounded


def gradient_to_noise(loss: Callable[[LinearFunction, Any], jax.Array], train: TrainConfig) -> Callable[[Any], Any]:
    r"""Returns the function of parameters that computes :math:`|g| / |\hat g - g|`, jitted.

    g is the gradient of `loss` (linear layers, parameters) without rounding, :math:`\hat g` that of the run's products.
    Below :math:`\sqrt 3` rounding is said to keep training from making progress.

    Reference:
      FP4 All the Way: Fully Quantized Training of LLMs, `arXiv 2505.19115 <https://arxiv.org/abs/2505.19115>`_, 2025;
      there the noise is of a gradient's elements, here it is measured.
    """
    rounded = training_linear(train)

    def norm(tree: Any) -> jax.Array:
        return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))

    @jax.jit
    def ratio(params: Any) -> jax.Array:
        exact, noisy = (jax.grad(functools.partial(loss, function))(params) for function in (linear, rounded))
        return norm(exact) / norm(jax.tree.map(jnp.subtract, noisy, exact))

    return ratio
