"""The residual stream of the first token and its gradient, as the probe of a run.

Active-Dormant Attention Heads (arXiv 2410.13835) states: if upper layers have a sink on <s>, the gradients with
respect to its residual state keep one direction, given by the null space of the value matrices above and by the key of
<s>; norms let them decay as the state grows; Adam turns them into constant updates, so the state grows linearly. The
statement is about attention, through which the state acts on other positions, so the gradient here is taken of their
loss, without the prediction at <s> itself.

A run with `train.probe = "orthojax.experiments.active_dormant.mechanism_probe:mechanism_probe"` writes the arrays of
every probe to probes/step_N.npz.

Under a causal mask position 0 sees only itself, so its states do not depend on the rest of a sequence. Legend: L
layers, B batch, T positions, D d_model. The parameters are those of `Transformer.init`; all results are float32.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config, MeshConfig
from orthojax.errors import UserError
from orthojax.files import make_folder, write_atomically
from orthojax.model import Interventions, Transformer, unstack_layers
from orthojax.ops import cross_entropy_nats

_ROWS = 16  # rows of a probe whose gradients are taken


def _first_states(model: Transformer, params: Any, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream after each block [L, D] and the keys in it [L, K, H], of position 0."""
    observe = lambda taps: (taps.residual[0, 0], taps.keys[0, 0])  # noqa: E731
    observed = model.apply({"params": params}, jnp.reshape(token, (1, 1)), observe=observe, head=False)[1]
    return jax.tree.map(lambda x: x.astype(jnp.float32), observed)


def first_residual_gradients(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """Computes gradients with respect to the residual stream at position 0 after each block, [L, D].

    The loss is summed over all other positions and divided by all B T targets. The same vector is moved in all
    sequences, with the output of the blocks below held fixed; `tokens`, int [B, T + 1], have the same first token.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    L = model.config.num_layers

    def loss(residual: jax.Array, layer: jax.Array) -> jax.Array:
        share = (jnp.arange(L) == layer)[:, None] & (jnp.arange(inputs.shape[1]) == 0)[None]
        values = jnp.broadcast_to(residual, (L, 1, 1, residual.size))
        given = Interventions(residual=values, residual_share=share.astype(jnp.float32))
        logits: Any = model.apply({"params": params}, inputs, interventions=given)[0]
        return jnp.sum(cross_entropy_nats(logits, targets)[:, 1:]) / targets.size

    of_each = (_first_states(model, params, tokens[0, 0])[0], jnp.arange(L))
    return jax.lax.map(lambda of: jax.grad(loss)(*of), of_each)


def _blocks(model: Transformer, params: Any) -> list[Any]:
    layers = unstack_layers(params) if "layers" in params else params
    return [layers[f"layers_{i}"] for i in range(model.config.num_layers)]


def _read_by(block: Any, name: str) -> jax.Array:
    """Returns the kernel [D, K * width] of keys or values times the gain of the norm before it."""
    gain = jnp.reshape(block.get("attention_norm", {}).get("scale", jnp.ones(1)), (-1, 1))
    return gain * block["attention"][name]["kernel"].astype(jnp.float32)


def weak_directions(model: Transformer, params: Any) -> jax.Array:
    """Returns projectors [L, D, D] onto the weakest quarter of directions from which heads above a block read values.

    Definition: the D / 4 eigenvectors of least eigenvalue of sum over heads and layers above of A A^T, with A = diag(g)
    W_V^h W_O^h from the normed residual stream to the output of the head; nan if no layer above attends. A random
    vector has a quarter of its squared norm there.
    """
    c, above, projectors = model.config, jnp.zeros((model.config.d_model,) * 2), []
    for block in reversed(_blocks(model, params)):
        _, vectors = jnp.linalg.eigh(above)
        weak = vectors[:, : round(0.25 * c.d_model)]
        projectors.append(jnp.where(jnp.any(above != 0.0), weak @ weak.T, jnp.nan))
        if "attention" in block:
            value = _read_by(block, "value").reshape(c.d_model, c.kv_heads, c.value_dim)
            value = jnp.repeat(value, c.num_heads // c.kv_heads, axis=1)
            output = block["attention"]["output"]["kernel"].reshape(c.num_heads, c.value_dim, c.d_model)
            written = jnp.einsum("CNH,NHD->CND", value, output)
            above = above + jnp.einsum("CND,END->CE", written, written)
    return jnp.stack(projectors[::-1])


def key_directions(model: Transformer, params: Any, token: jax.Array) -> jax.Array:
    """Returns the direction after each block in which the residual stream moves the key of position 0 along itself.

    Definition: diag(g) W_K k of the next block, summed over heads, with k its key of position 0; nan after the last
    block and if the next block does not attend.
    """
    _, keys = _first_states(model, params, token)
    none = jnp.full(model.config.d_model, jnp.nan)
    above = enumerate(_blocks(model, params)[1:], 1)
    read = (_read_by(block, "key") @ keys[layer].ravel() if "attention" in block else none for layer, block in above)
    return jnp.stack([*read, none])


def first_token_mechanism(model: Transformer, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Measures the paper's statements about the gradient of the first token's residual stream, with its vectors.

    For int [B, T + 1] tokens with the same first token, after each block: `first_gradient_weak_share` [L], the share of
    the gradient's squared norm in `weak_directions`; `first_gradient_key_cosine` [L], the cosine of its negative with
    `key_directions`; `first_residual` and `first_gradient`, [L, D]. After the last block, to which nothing attends, the
    gradient is 0, and ratios to its norm are nan.
    """
    gradient, along = first_residual_gradients(model, params, tokens), key_directions(model, params, tokens[0, 0])
    norm = jnp.linalg.norm(gradient, axis=-1)
    weak = jnp.einsum("LD,LDE,LE->L", gradient, weak_directions(model, params), gradient)
    return {
        "first_gradient_weak_share": weak / norm**2,
        "first_gradient_key_cosine": jnp.sum(-gradient * along, axis=-1) / (norm * jnp.linalg.norm(along, axis=-1)),
        "first_residual": _first_states(model, params, tokens[0, 0])[0],
        "first_gradient": gradient,
    }


def probe_file(folder: Path, step: int) -> Path:
    """Returns the file of a step's arrays in the `probes` folder of a run."""
    return folder / f"step_{step:08d}.npz"


def mechanism_probe(config: Config, rows: np.ndarray, folder: Path) -> Callable[[int, Any], None]:
    """Returns the function of a run that writes the arrays of a probe, given a step and the parameters after it.

    A file has `step` and the arrays of `first_token_mechanism`; rows are int32 [probe_sequences, T + 1]. Raises
    UserError if sequences start with different tokens, or the run has a mesh.
    """
    if len(set(rows[:, 0])) > 1 or config.mesh != MeshConfig():
        problem = "train.probe follows the first token of all sequences, on one device"
        raise UserError(problem, allowed="data with one BOS or more and no mesh, or no such probe")
    make_folder(folder, "folder of probes")
    model, tokens = Transformer(config.model), jnp.asarray(rows[:_ROWS])
    measure = jax.jit(functools.partial(first_token_mechanism, model))

    def write(step: int, params: Any) -> None:
        arrays = jax.device_get(measure(params, tokens))
        write_atomically(probe_file(folder, step), functools.partial(np.savez_compressed, step=step, **arrays))

    return write
