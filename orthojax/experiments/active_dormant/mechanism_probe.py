"""The residual stream of the first token and its gradient, as the probe of a run.

Active-Dormant Attention Heads (arXiv 2410.13835) states: if upper layers have a sink on <s>, the gradients with
respect to its residual state keep one direction, that of the null space of the value matrices above and of the key of
<s>; norms let them decay as the state grows; Adam makes constant updates of them, so the state grows linearly. The
statement is about attention, through which the state acts on other positions, so the gradient here is that of their
loss; that of the prediction at <s> itself, the larger one once the task is learned, stands apart.

A run with `train.probe = "orthojax.experiments.active_dormant.mechanism_probe:mechanism_probe"` writes the arrays of
every probe to probes/step_N.npz.

Under a causal mask position 0 sees itself alone, so its states do not depend on the rest of a sequence. Legend: L
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

WEAK = 0.25  # of all directions
_ROWS = 16  # rows of a probe whose gradients are taken


def first_residuals(model: Transformer, params: Any, token: jax.Array) -> jax.Array:
    """Returns the residual stream at position 0 after each block, [L, D], given the first token, int []."""
    return _first_states(model, params, token)[0]


def _first_states(model: Transformer, params: Any, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream after each block [L, D] and the keys in it [L, K, H], of position 0."""
    tokens = jnp.reshape(token, (1, 1))
    observed = model.apply(
        {"params": params}, tokens, observe=lambda taps: (taps.residual[0, 0], taps.keys[0, 0]), head=False
    )[1]
    return jax.tree.map(lambda x: x.astype(jnp.float32), observed)


def first_residual_gradients(model: Transformer, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes gradients of the loss with respect to the residual stream at position 0 after each block, [L, D] each.

    The same vector is moved in all sequences; that after one block, with what the blocks below compute held.

    Args:
      model: The model.
      params: Its parameters.
      tokens: int [B, T + 1], all with the same first token.

    Returns:
      Of the losses at all other positions, to which the state is a key and a value; and of the loss at position 0
      itself. Both losses are divided by all B T targets, so that the gradients add up to that of the mean loss.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    L = model.config.num_layers

    def loss(residual: jax.Array, layer: jax.Array, own: bool) -> jax.Array:
        # Its own prediction needs no other position.
        seen, wanted = (inputs[:, :1], targets[:, :1]) if own else (inputs, targets)
        share = (jnp.arange(L) == layer)[:, None] & (jnp.arange(seen.shape[1]) == 0)[None]
        values = jnp.broadcast_to(residual, (L, 1, 1, residual.size))
        given = Interventions(residual=values, residual_share=share.astype(jnp.float32))
        logits: Any = model.apply({"params": params}, seen, interventions=given)[0]
        losses = cross_entropy_nats(logits, wanted)
        return jnp.sum(losses if own else losses[:, 1:]) / targets.size

    of_each = (first_residuals(model, params, tokens[0, 0]), jnp.arange(L))
    others, own = (jax.lax.map(lambda of, own=own: jax.grad(loss)(*of, own), of_each) for own in (False, True))
    return others, own


def _blocks(model: Transformer, params: Any) -> list[Any]:
    layers = unstack_layers(params) if "layers" in params else params
    return [layers[f"layers_{i}"] for i in range(model.config.num_layers)]


def _read_by(model: Transformer, block: Any, name: str) -> jax.Array:
    """Returns the kernel [D, K * width] of keys or values times the gains of the norms before it and of its latent."""
    c, attention = model.config, block["attention"]
    kernel = attention[name]["kernel"].astype(jnp.float32)
    # A norm that comes after attention has no gain on what is read.
    gain = jnp.ones((1, 1)) if c.block in ("output_norm", "post_norm") else _gain(block, "attention_norm")
    if c.latent is not None:
        kernel = attention["latent"]["kernel"] @ (_gain(attention, "latent_norm") * kernel)
        if name == "key":
            shared = jnp.repeat(attention["rotary_key"]["kernel"][:, None], c.num_heads, axis=1)
            own = kernel.reshape(c.d_model, c.num_heads, -1)
            kernel = jnp.concatenate([shared, own], axis=-1).reshape(c.d_model, -1)
    return gain * kernel


def _gain(part: Any, norm: str) -> jax.Array:
    return jnp.reshape(part.get(norm, {}).get("scale", jnp.ones(1)), (-1, 1))


def weak_directions(model: Transformer, params: Any) -> jax.Array:
    """Returns projectors [L, D, D] on the weakest quarter of the directions from which heads above a block read values.

    Definition: the D / 4 eigenvectors of least eigenvalue of sum over heads and layers above of A A^T, with A = diag(g)
    W_V^h W_O^h from the normed residual stream to the output of the head; nan if no layer above attends. A random
    vector has a quarter of its squared norm there.
    """
    c, above, projectors = model.config, jnp.zeros((model.config.d_model,) * 2), []
    for block in reversed(_blocks(model, params)):
        _, vectors = jnp.linalg.eigh(above)
        weak = vectors[:, : round(WEAK * c.d_model)]
        projectors.append(jnp.where(jnp.any(above != 0.0), weak @ weak.T, jnp.nan))
        if "attention" in block:
            value = _read_by(model, block, "value").reshape(c.d_model, c.kv_heads, c.value_dim)
            value = jnp.repeat(value, c.num_heads // c.kv_heads, axis=1)
            output = block["attention"]["output"]["kernel"].reshape(c.num_heads, c.value_dim, c.d_model)
            written = jnp.einsum("CNH,NHD->CND", value, output)
            above = above + jnp.einsum("CND,END->CE", written, written)
    return jnp.stack(projectors[::-1])


def key_directions(model: Transformer, params: Any, token: jax.Array) -> jax.Array:
    """Returns the direction after each block in which the residual stream moves the key of position 0 along itself.

    Definition: diag(g) W_K k, summed over heads, of the next block, with k its key of position 0; nan after the last
    and if the next block does not attend.
    """
    c, (_, keys) = model.config, _first_states(model, params, token)
    directions = []
    for layer, block in enumerate(_blocks(model, params)[1:], 1):
        if "attention" in block:
            directions.append(_read_by(model, block, "key") @ keys[layer].ravel())
        else:
            directions.append(jnp.full(c.d_model, jnp.nan))
    return jnp.stack([*directions, jnp.full(c.d_model, jnp.nan)])


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the cosine of vectors along the last axis; nan if one is 0."""
    return jnp.sum(a * b, axis=-1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))


def first_token_mechanism(model: Transformer, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Measures the paper's statements on the gradient of the first token's residual stream, with its vectors.

    Args:
      model: The model.
      params: Its parameters.
      tokens: int [B, T + 1], all with the same first token.

    Returns:
      After each block, [L], of the gradient of the losses at other positions, `first_gradient_norm`;
      `first_gradient_weak_share`, the share of its squared norm in `weak_directions`; `first_gradient_key_cosine`,
      between its negative, the way that the state is pushed, and `key_directions`; `first_gradient_residual_cosine`,
      between its negative and the state itself. Of the gradient of its own loss `first_own_gradient_norm`. The vectors
      [L, D]: `first_residual`, `first_gradient`, `first_own_gradient`. After the last block, to which nothing attends,
      the former gradient is 0, and ratios to its norm are nan.
    """
    residual = first_residuals(model, params, tokens[0, 0])
    gradient, own = first_residual_gradients(model, params, tokens)
    norm = jnp.linalg.norm(gradient, axis=-1)
    weak = jnp.einsum("LD,LDE,LE->L", gradient, weak_directions(model, params), gradient)
    return {
        "first_gradient_norm": norm,
        "first_gradient_weak_share": weak / norm**2,
        "first_gradient_key_cosine": cosine(-gradient, key_directions(model, params, tokens[0, 0])),
        "first_gradient_residual_cosine": cosine(-gradient, residual),
        "first_own_gradient_norm": jnp.linalg.norm(own, axis=-1),
        "first_residual": residual,
        "first_gradient": gradient,
        "first_own_gradient": own,
    }


# What a run writes.


def probe_file(folder: Path, step: int) -> Path:
    """Returns the file of a step's arrays in the `probes` folder of a run."""
    return folder / f"step_{step:08d}.npz"


def mechanism_probe(config: Config, rows: np.ndarray, folder: Path) -> Callable[[int, Any], None]:
    """Returns the function of a run that writes the arrays of a probe, given a step and the parameters after it.

    The arrays of a file are `step` and those of `first_token_mechanism`.

    Args:
      config: The run, on one device.
      rows: Of the probe, int32 [probe_sequences, T + 1].
      folder: For the files.

    Raises:
      UserError: If sequences start with different tokens, or the run has a mesh.
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
