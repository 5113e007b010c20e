"""The one loop that applies a model and observes its layers."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from jax.sharding import PartitionSpec

from orthojax.analysis.observe import combine
from orthojax.model import mesh_of

if TYPE_CHECKING:
    from orthojax.model import Transformer


class Loaded(Protocol):
    """What is read of an `orthojax.model.LoadedModel`."""

    @property
    def model(self) -> "Transformer":
        """The model."""
        ...

    @property
    def params(self) -> Any:
        """Its parameters, on a mesh or not."""
        ...


def measure(
    loaded: Loaded,
    batches: Iterable[Any],
    observe: Callable[..., Any],
    *,
    output: Callable[..., Any] | None = None,
    join: Callable[[Any, Any], Any] = combine,
) -> Any:
    """Applies a model to batches and joins what is observed in its layers.

    There is one compiled program for each (model, observe, output) and shape of a batch: give functions of a module,
    or keep those that you make, so that a later call finds it. What they do not read is not computed. Where the
    parameters lie on a mesh, results are replicated, so that every process can read them.

    Args:
      loaded: A `LoadedModel`, or anything with `model` and `params`.
      batches: At least one; each is tokens int [B, T] (inputs without targets) or a tuple (tokens, *extra), on the
        devices already where there is a mesh.
      observe: `(taps, *extra)` -> pytree, called in every layer; its leaves come back as [L, ...].
      output: `(logits, *extra)` -> pytree, with logits float32 [B, T, V]. Without it the head is left out.
      join: Two batches' results -> one; applied to what is observed and to the output separately. `combine` adds
        `Statistics`, `concatenate` keeps every sequence.

    Returns:
      What was observed; with `output` the pair (observed, output).

    Raises:
      ValueError: Without batches.
    """
    mesh, total = mesh_of(loaded.params), None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        for batch in batches:
            tokens, *extra = batch if isinstance(batch, tuple) else (batch,)
            new = _apply(loaded.model, observe, output, loaded.params, tokens, *extra)
            total = new if total is None else tuple(join(a, b) for a, b in zip(total, new, strict=True))
    if total is None:
        raise ValueError("no batches to measure")
    return total if output is not None else total[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(
    model: "Transformer",
    observe: Callable[..., Any],
    output: Callable[..., Any] | None,
    params: Any,
    tokens: Any,
    *extra,
) -> tuple[Any, ...]:
    """(observed,) or (observed, output) of one batch, replicated where there is a mesh."""
    result: Any = model.apply(
        {"params": params}, tokens, observe=lambda taps: observe(taps, *extra), head=output is not None
    )
    logits, observed = result
    both = (observed,) if output is None else (observed, output(logits, *extra))
    if jax.sharding.get_abstract_mesh().empty:
        return both
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), both)


def concatenate(a: Any, b: Any) -> Any:
    """Joins what was observed in two batches along axis 1, the batch axis after that of layers; on the host.

    Args:
      a: Pytree of arrays [L, B, ...].
      b: The same of another batch.

    Returns:
      Pytree of NumPy arrays [L, B + B', ...].
    """
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *jax.device_get((a, b)))
