"""One transformer for all families, and the presets that name them.

The presets are plain values; flax is imported when `Transformer` is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from orthojax.model.presets import flops_per_token, gpt2, llama2, parameter_count

if TYPE_CHECKING:
    from orthojax.model.dense import LinearFunction, linear, plain_product
    from orthojax.model.layers import stack_layers, unstack_layers
    from orthojax.model.loaded import LoadedModel, mesh_of
    from orthojax.model.transformer import Observe, Taps, Transformer

_HOME = {
    "LinearFunction": "dense",
    "LoadedModel": "loaded",
    "Observe": "transformer",
    "Taps": "transformer",
    "Transformer": "transformer",
    "linear": "dense",
    "mesh_of": "loaded",
    "plain_product": "dense",
    "stack_layers": "layers",
    "unstack_layers": "layers",
}

__all__ = [
    "LinearFunction",
    "LoadedModel",
    "Observe",
    "Taps",
    "Transformer",
    "flops_per_token",
    "gpt2",
    "linear",
    "llama2",
    "mesh_of",
    "parameter_count",
    "plain_product",
    "stack_layers",
    "unstack_layers",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"orthojax.model.{_HOME[name]}"), name)
    raise AttributeError(f"module 'orthojax.model' has no attribute {name!r}")
