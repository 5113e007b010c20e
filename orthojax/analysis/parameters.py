"""What single parameters contribute: norms of their gradients and updates, and their share in a change of the model.

Parameters are named by their path, `layers_0/attention/query/kernel`; those of a scanned stack are split by layer,
so that both forms of a model have the same names.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.model import unstack_layers


def by_name(tree: Any) -> dict[str, jax.Array]:
    """The leaves of a tree like a model's parameters; stacked layers, along the first axis, one by one.

    >>> sorted(by_name({"head": {"kernel": jnp.ones(3)}, "layers": {"norm": {"scale": jnp.ones(2)}}}))
    ['head/kernel', 'layers_0/norm/scale', 'layers_1/norm/scale']
    """
    tree = unstack_layers(tree) if "layers" in tree else tree
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def parameter_norms(tree: Any) -> dict[str, jax.Array]:
    """The Frobenius and the spectral norm of every parameter, or of anything with their shapes, by name: [2] float32.

    The spectral norm is the largest singular value; of a vector it is the norm again.
    """

    def norms(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        frobenius = spectral = jnp.linalg.norm(x.ravel())
        if x.ndim == 2:
            # From the smaller Gram matrix, in a third of the time of a singular value decomposition.
            x = (x if x.shape[0] <= x.shape[1] else x.T) / jnp.where(frobenius == 0.0, 1.0, frobenius)
            spectral = frobenius * jnp.sqrt(jnp.linalg.eigvalsh(x @ x.T)[-1])
        return jnp.stack([frobenius, spectral])

    return {name: norms(leaf) for name, leaf in by_name(tree).items()}


def change_attribution(
    function: Callable[[Any], jax.Array], before: Any, after: Any, *, nodes: int = 2
) -> dict[str, jax.Array]:
    """What each parameter contributes to the change of a function of all of them.

    Equation: <grad f(p), p_after - p_before> of each parameter p, with the gradient averaged over the way from one to
    the other, by Gauss-Legendre quadrature; so the contributions add up to f(after) - f(before), up to an error that
    falls with the 2 `nodes`-th power of the step. With one step of an optimizer between them and one gradient it is the
    'norm influence' of the code of Active-Dormant Attention Heads (arXiv 2410.13835).

    Args:
      function: Parameters -> a vector [M] of what is to be explained.
      before: Parameters.
      after: Parameters of the same structure.
      nodes: Gradients that are averaged.

    Returns:
      By name, [M].

    >>> before, after = {"a": jnp.array(1.0), "b": jnp.array(2.0)}, {"a": jnp.array(2.0), "b": jnp.array(3.0)}
    >>> parts = change_attribution(lambda p: (p["a"] * p["b"])[None], before, after)
    >>> {name: round(float(part[0]), 5) for name, part in parts.items()}
    {'a': 2.5, 'b': 1.5}
    """
    places, weights = np.polynomial.legendre.leggauss(nodes)
    delta = jax.tree.map(jnp.subtract, after, before)

    def add(total: Any, node: jax.Array) -> tuple[Any, None]:
        at = jax.tree.map(lambda p, d: p + node[0].astype(p.dtype) * d, before, delta)
        return jax.tree.map(lambda t, g: t + node[1].astype(g.dtype) * g, total, jax.jacrev(function)(at)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(jax.jacrev(function), before))
    # A loop, so that the gradient is compiled once.
    total, _ = jax.lax.scan(add, zeros, jnp.stack([(1 + places) / 2, weights / 2], axis=1))
    products = jax.tree.map(lambda g, d: jnp.moveaxis(g * d[None], 0, -1), total, delta)
    return {name: jnp.sum(x.reshape(-1, x.shape[-1]), axis=0) for name, x in by_name(products).items()}
