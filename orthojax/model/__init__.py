"""One transformer for all families, and the presets that name them.

The presets are plain values; flax is imported when `Transformer` is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from orthojax.model.presets import bigram_backcopy as bigram_backcopy
from orthojax.model.presets import gpt2 as gpt2
from orthojax.model.presets import llama2 as llama2

if TYPE_CHECKING:
    from orthojax.model.cache import KVCache as KVCache
    from orthojax.model.cache import init_cache as init_cache
    from orthojax.model.generation import generate as generate
    from orthojax.model.generation import stream as stream
    from orthojax.model.generation import stream_loss_nats as stream_loss_nats
    from orthojax.model.interventions import Interventions as Interventions
    from orthojax.model.interventions import Observe as Observe
    from orthojax.model.interventions import Taps as Taps
    from orthojax.model.interventions import attention_pattern as attention_pattern
    from orthojax.model.layers import LinearFunction as LinearFunction
    from orthojax.model.layers import Norm as Norm
    from orthojax.model.layers import linear as linear
    from orthojax.model.layers import plain_product as plain_product
    from orthojax.model.loaded import LoadedModel as LoadedModel
    from orthojax.model.loaded import fold_embedding_projection as fold_embedding_projection
    from orthojax.model.loaded import mesh_of as mesh_of
    from orthojax.model.loaded import stack_layers as stack_layers
    from orthojax.model.loaded import unstack_layers as unstack_layers
    from orthojax.model.transformer import Transformer as Transformer
    from orthojax.model.transformer import flops_per_token as flops_per_token
    from orthojax.model.transformer import parameter_count as parameter_count
    from orthojax.model.transformer import parameter_shapes as parameter_shapes
    from orthojax.model.transformer import segment_positions as segment_positions

_LAZY = {
    "cache": ("KVCache", "init_cache"),
    "generation": ("generate", "stream", "stream_loss_nats"),
    "interventions": ("Interventions", "Observe", "Taps", "attention_pattern"),
    "layers": ("LinearFunction", "Norm", "linear", "plain_product"),
    "loaded": ("LoadedModel", "fold_embedding_projection", "mesh_of", "stack_layers", "unstack_layers"),
    "transformer": ("Transformer", "flops_per_token", "parameter_count", "parameter_shapes", "segment_positions"),
}


def __dir__() -> list[str]:
    return sorted({"bigram_backcopy", "gpt2", "llama2"}.union(*_LAZY.values()))


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"orthojax.model.{module}"), name)
    raise AttributeError(f"module 'orthojax.model' has no attribute {name!r}")
