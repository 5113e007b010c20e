"""The parts of a block besides attention: linear layers, norms, MLPs and mixtures of experts."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import ExpertsConfig, GatedMlp, Mlp, ModelConfig
from orthojax.ops.products import is_head, kernel_product

F = TypeVar("F", bound="LinearFunction")


class LinearFunction(Protocol):
    """A function that a linear layer computes; `quant` substitutes quantised ones."""

    def __call__(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
        """Maps x [..., in], kernel [in, out], bias [out] to [..., out]; `path` is the layer's, as layers/mlp/input."""
        ...


def plain_product(function: F) -> F:
    """Marks a linear function as x @ kernel + bias, up to sharding constraints: its head may be computed in chunks."""
    function.is_plain_product = True  # pyright: ignore
    return function


@plain_product
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
    """Computes x @ kernel + bias; logits (`head`) stay float32, since bfloat16 ones would make the loss noisy."""
    y = kernel_product(x, kernel, preferred_element_type=jnp.float32 if is_head(path) else None)
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


class Linear(nn.Module):
    """The one linear layer: every kernel of the model except the embeddings passes through `function`."""

    features: int
    use_bias: bool
    kernel_init: nn.initializers.Initializer
    dtype: Any
    function: LinearFunction

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., in] to [..., features] in `dtype`."""
        kernel: Any = self.get_variable("params", "kernel")
        bias = None
        if isinstance(kernel, jax.Array | np.ndarray | None):  # others, as `Switched`, are for the function to read
            shape = (x.shape[-1], self.features)
            kernel = self.param("kernel", self.kernel_init, shape, jnp.float32).astype(self.dtype)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32).astype(self.dtype)
        return self.function(x.astype(self.dtype), kernel, bias, "/".join(self.path))  # pyright: ignore[reportArgumentType]


def kernel_initializer(config: ModelConfig, *, writes_residual: bool = False) -> nn.initializers.Initializer:
    """Returns the initializer of kernels; normal ones that write to the residual stream are smaller."""
    if config.kernel_init == "uniform_fan_in":
        return nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")  # the variance of U(-1, 1)
    # GPT-2's rule: 2 num_layers terms add up in the residual stream.
    return nn.initializers.normal(config.init_std / ((2 * config.num_layers) ** 0.5 if writes_residual else 1.0))


class Part(nn.Module):
    """The base of attention and MLP: the config and a way to create linear layers."""

    config: ModelConfig
    linear: LinearFunction

    def dense(self, name: str, features: int, *, use_bias: bool | None = None, writes_residual: bool = False) -> Linear:
        """Makes a linear layer of this part, called `name`; `use_bias=None` takes the config's."""
        c, init = self.config, kernel_initializer(self.config, writes_residual=writes_residual)
        bias = c.has_bias if use_bias is None else use_bias
        return Linear(features, bias, init, jnp.dtype(c.dtype), self.linear, name=name)


class Norm(nn.Module):
    """Normalisation over the last axis, in float32.

    `rmsnorm_single` is RMSNorm with one scalar scale: it commutes with every rotation of the channels, so it prefers no
    basis. Only `layernorm` has a bias.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., D] to [..., D] float32."""
        c = self.config
        if c.norm == "none":
            return x
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if c.norm.startswith("layernorm"):
            x -= jnp.mean(x, -1, keepdims=True)
        x *= jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + c.norm_eps)
        shape, as_x = () if c.norm == "rmsnorm_single" else (x.shape[-1],), (1,) * (x.ndim - 1) + (-1,)
        if c.norm != "layernorm_nonparametric":
            x *= self.param("scale", nn.initializers.ones, shape, jnp.float32).reshape(as_x)
        if c.has_norm_bias:
            x += self.param("bias", nn.initializers.zeros, shape, jnp.float32).reshape(as_x)
        return x


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies by a factor of the config; without one, programs stay as they are."""
    return x if factor == 1.0 else x * factor


def _swiglu_clamped(hidden: jax.Array, gate: jax.Array, alpha: float = 1.702, limit: float = 7.0) -> jax.Array:
    gate = jnp.minimum(gate, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(hidden, -limit, limit) + 1.0)


_ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": lambda hidden, gate: jax.nn.silu(gate) * hidden,
    "geglu": lambda hidden, gate: jax.nn.gelu(gate) * hidden,
    "swiglu_clamped": _swiglu_clamped,
}


def _recomputed(activation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """On a GPU, keeps only the arguments of an activation for the backward pass, which computes it again.

    Memory traffic takes the time there, and a GELU that keeps nothing else can be fused into the product before it.
    """
    return jax.checkpoint(activation) if jax.default_backend() == "gpu" else activation


class Feedforward(Part):
    """The MLP of one block, or a part of it; `width` is the number of hidden units, None the config's.

    With `hidden_bias` the hidden units have biases and the output has none, regardless of the config.
    """

    kind: Mlp
    width: int | None = None
    hidden_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; `factor` [B, T, width] or [width] multiplies the hidden units."""
        c = self.config
        width = c.d_mlp if self.width is None else self.width
        if self.kind != "linear":
            parts = ("input", "gate") if self.kind in get_args(GatedMlp) else ("input",)
            hidden = [self.dense(part, width, use_bias=self.hidden_bias or None)(x) for part in parts]
            x = _recomputed(_ACTIVATIONS[self.kind])(*hidden)
            if factor is not None:
                x *= factor.astype(x.dtype).reshape((1,) * (x.ndim - factor.ndim) + factor.shape)
        bias = False if self.hidden_bias else None
        return self.dense("output", c.d_model, use_bias=bias, writes_residual=True)(x)


class Experts(Part):
    """Routed experts, weighted by their probabilities, and shared ones: the mixture of DeepSeek-V2 and others.

    Definition: y = sum_e w_e(x) f_e(x) + sum_s f_s(x), with f gated MLPs and w the probabilities of the chosen
    experts. The implementation is for measuring: every expert is computed for every token, as one wide MLP whose hidden
    units are multiplied by w, so it costs E / per_token times what a grouped product would. Gradients reach the router
    only through the chosen probabilities; there is no auxiliary loss for balance. The hidden units of expert e are the
    e-th of E equal parts of the hidden units of `experts`; when quantised, all experts share one scale per output
    channel of `experts/output`.

    Reference:
      DeepSeekMoE, `arXiv 2401.06066 <https://arxiv.org/abs/2401.06066>`_, 2024; DeepSeek-V2,
      `arXiv 2405.04434 <https://arxiv.org/abs/2405.04434>`_, 2024, section 2.2.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        c, of = self.config, self.config.experts
        assert of is not None
        width = of.d_expert or c.d_mlp
        router = Linear(of.num_experts, of.use_bias, kernel_initializer(c), jnp.float32, self.linear, name="router")
        zeros, biased = nn.initializers.zeros, of.scores == "sigmoid"
        choice_bias = self.param("choice_bias", zeros, (of.num_experts,), jnp.float32) if biased else None
        weights = _routing(router(x), of, choice_bias)
        experts = Feedforward(c, self.linear, of.mlp, of.num_experts * width, of.use_bias, name="experts")
        y = experts(x, jnp.repeat(weights, width, axis=-1))
        if of.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (of.num_experts, c.d_model), jnp.float32)
            y += (weights @ bias).astype(y.dtype)
        if of.num_shared:
            shared = Feedforward(c, self.linear, of.mlp, of.num_shared * (of.d_shared or width), name="shared")(x)
            y += shared * jax.nn.sigmoid(self.dense("shared_gate", 1, use_bias=False)(x)) if of.gate_shared else shared
        return y


def _routing(logits: jax.Array, experts: ExpertsConfig, bias: jax.Array | None) -> jax.Array:
    """Computes the weights of routed experts: probabilities of the router times `scale`, 0 for those not chosen.

    The `per_token` likeliest experts are chosen, with groups only from the `groups_per_token` groups whose likeliest
    expert is likeliest; with a bias [E], probabilities are sigmoids, and the choice is that of `ExpertsConfig.scores`.
    Before that factor, weights sum to 1 only with `normalize`. Logits and weights are [..., E].
    """
    scores = jax.nn.softmax(logits, axis=-1) if bias is None else jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + jnp.broadcast_to(bias, scores.shape)
    if experts.groups_per_token < experts.groups:
        by_group = choice.reshape(*choice.shape[:-1], experts.groups, -1)
        best, _ = jax.lax.top_k(by_group, 1 if bias is None else min(2, by_group.shape[-1]))
        kept = _largest(jnp.sum(best, axis=-1), experts.groups_per_token)
        choice = jnp.where(kept[..., None] > 0.0, by_group, -jnp.inf).reshape(choice.shape)
    scores *= _largest(choice, experts.per_token)
    if experts.normalize:
        scores /= jnp.sum(scores, axis=-1, keepdims=True)
    return scores * experts.scale


def _largest(x: jax.Array, count: int) -> jax.Array:
    """Marks the `count` largest along the last axis, the first of equal ones, with 1 and the others with 0."""
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(x), count)
    return jnp.sum(jax.nn.one_hot(chosen, x.shape[-1], dtype=x.dtype), axis=-2)
