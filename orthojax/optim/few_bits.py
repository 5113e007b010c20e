"""Adam whose moments have 8 or 4 bits, in blocks with a scale each."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

from orthojax.ops.orthogonal import hashed, position_bits
from orthojax.ops.packing import Packing, pack, packed_zeros, packing_of, unpack
from orthojax.ops.statistics import wide_dtype
from orthojax.optim.layout import known_sharding
from orthojax.optim.rotation import leaf_paths


def _noise(path: str, count: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two arrays like x of numbers in [0, 1), hashes of path, step and position: equal on every mesh."""
    key = hashed(jnp.uint32(zlib.crc32(path.encode())), count.astype(jnp.uint32))
    draw = functools.partial(position_bits, shape=x.shape)
    if jax.default_backend() == "cpu":
        # In a branch, which no fusion takes in: else each that reads them draws them again, and not in vectors.
        bits = jax.lax.cond(count >= 0, draw, lambda _: jnp.zeros(x.shape, jnp.uint32), key)
    else:
        bits = draw(key)
    unit = jnp.float32(2.0**-16)
    return (bits & 0xFFFF).astype(jnp.float32) * unit, (bits >> 16).astype(jnp.float32) * unit


class _Moment(NamedTuple):
    """How one of the moments is kept: in few bits where there are blocks, else in a floating dtype."""

    dtype: Any
    signed: bool  # else the root is kept

    def packing(self, leaf: Any) -> Packing | None:
        packing = packing_of(self.dtype)
        return packing if packing and packing.block_of(jnp.shape(leaf)) else None

    def _floating_dtype(self, leaf: Any) -> Any:
        return jnp.result_type(leaf) if self.dtype is None or packing_of(self.dtype) else self.dtype

    def zeros(self, leaf: Any) -> Any:
        if packing := self.packing(leaf):
            return packed_zeros(jnp.shape(leaf), packing, signed=self.signed)
        return jnp.zeros_like(leaf, dtype=self._floating_dtype(leaf))

    def kept(self, x: jax.Array, leaf: jax.Array, noise: jax.Array | None) -> Any:
        """Rounds a moment of the gradient `leaf`."""
        if packing := self.packing(leaf):
            return pack(x if self.signed else jnp.sqrt(x), packing, signed=self.signed, noise=noise)
        return x.astype(self._floating_dtype(leaf))

    def floating(self, kept: Any, leaf: jax.Array) -> jax.Array:
        if packing := self.packing(leaf):
            found = unpack(kept, packing.bits, signed=self.signed)
            return found if self.signed else jnp.square(found)
        return kept.astype(wide_dtype(leaf))


def scale_by_adam_of_few_bits(
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    eps_root: jax.typing.ArrayLike,
    mu_dtype: Any,
    nu_dtype: Any,
) -> optax.GradientTransformation:
    """Makes Adam with the state of `optax.scale_by_adam`, whose moments of "int8", "int4" or a `Packing` are `Packed`.

    The step is computed from moments in float, of which the first and the root of the second are rounded afterwards.
    """
    of_mu, of_nu = _Moment(mu_dtype, signed=True), _Moment(nu_dtype, signed=False)

    def init_fn(params):
        mu, nu = (jax.tree.map(moment.zeros, params) for moment in (of_mu, of_nu))
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, nu)

    def update_fn(updates, state, params=None):
        del params
        count = optax.safe_increment(state.count)

        def leaf(path: str, g: jax.Array, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
            new = functools.partial(step, path)
            if (explicit := known_sharding(g)) is None or AxisType.Explicit not in explicit.mesh.axis_types:
                return new(count, g, mu, nu)
            # Which parts of a reshaped axis are where is the compiler's.
            like = jax.tree.map(lambda x: jax.typeof(x).sharding, (g, mu, nu))
            automatic: Any = jax.sharding.auto_axes(new, out_sharding=like)
            return automatic(count, g, mu, nu)

        def step(path: str, count: Any, g: jax.Array, mu: Any, nu: Any) -> tuple[Any, Any, Any]:
            wide = g.astype(wide_dtype(g))
            mu = b1 * of_mu.floating(mu, g) + (1 - b1) * wide
            nu = b2 * of_nu.floating(nu, g) + (1 - b2) * jnp.square(wide)
            mu, nu = jax.lax.optimization_barrier((mu, nu))  # else all is computed again for scales and for codes
            c1, c2 = (1 - jnp.asarray(b, wide.dtype) ** count for b in (b1, b2))
            s = (mu / c1) / (jnp.sqrt(nu / c2 + eps_root) + eps)
            packings = (moment.packing(g) for moment in (of_mu, of_nu))
            at_random = any(packing is not None and packing.at_random for packing in packings)
            noise = _noise(path, count, g) if at_random else (None, None)
            return s.astype(g.dtype), of_mu.kept(mu, g, noise[0]), of_nu.kept(nu, g, noise[1])

        leaves, treedef = jax.tree.flatten(updates)
        moments = (treedef.flatten_up_to(moment) for moment in (state.mu, state.nu))
        found = [leaf(*of) for of in zip(leaf_paths(updates), leaves, *moments, strict=True)]
        steps, mu, nu = (treedef.unflatten([of[k] for of in found]) for k in range(3))
        return steps, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)
