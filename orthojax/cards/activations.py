"""The activations of a model as a file of safetensors, for other tools."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from orthojax import analysis
from orthojax.errors import UserError, nearest, needing
from orthojax.files import write_atomically
from orthojax.model import LoadedModel, Taps

_MOST_BYTES = 1 << 32
KINDS: dict[str, Callable[[Taps], jax.Array]] = {
    "residual": lambda taps: taps.residual,  # after each block
    "attention": lambda taps: taps.attention_weights,
    "values": lambda taps: taps.values,
}


@functools.cache  # one program for all batches
def _observing(kinds: tuple[str, ...]) -> Callable[[Taps], dict[str, jax.Array]]:
    return lambda taps: {kind: KINDS[kind](taps) for kind in kinds}


def require_kinds(kinds: Sequence[str]) -> None:
    """Refuses names that are no kind of activation."""
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"--save={kind!r}", allowed=", ".join(KINDS), hint=nearest(kind, KINDS))


def save_activations(loaded: LoadedModel, tokens: np.ndarray, kinds: Sequence[str], path: Path) -> None:
    """Writes what `kinds` name of every layer, and the tokens, as a file of safetensors.

    `residual` is float32 [rows, layers, T, d_model], `attention` [rows, layers, heads, T, T], `values`
    [rows, layers, T, kv_heads, value_dim], `tokens` int32 [rows, T].

    Raises:
      UserError: For an unknown kind, more than 4 GiB, or a missing package.
    """
    require_kinds(kinds)
    with needing("--save", "pretrained"):
        from safetensors.numpy import save
    observe, apply = _observing(tuple(kinds)), loaded.model.apply
    shapes = jax.eval_shape(lambda p, t: apply({"params": p}, t, observe=observe)[1], loaded.params, tokens[:1])
    needed = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) * len(tokens)
    if needed > _MOST_BYTES:
        problem = f"--save={','.join(kinds)}: {len(tokens)} rows of {tokens.shape[1]} tokens need {needed / 1e9:.3g} GB"
        raise UserError(problem, allowed="4.29 GB", hint="fewer --rows, or a smaller --length")
    batch, parts = loaded.config.eval.batch_size, []
    for start in range(0, len(tokens), batch):
        seen: Any = analysis.measure(loaded, [tokens[start : start + batch]], observe)
        parts.append({kind: np.moveaxis(np.asarray(x, np.float32), 1, 0) for kind, x in seen.items()})
    arrays = {kind: np.concatenate([part[kind] for part in parts]) for kind in kinds}
    arrays["tokens"] = tokens.astype(np.int32)
    # The package writes the memory of an array, whatever its order of axes.
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomically(path, lambda file: file.write(save(arrays)))
