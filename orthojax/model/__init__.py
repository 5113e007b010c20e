"""One transformer for all families, and the presets that name them.

The presets are plain values; flax is imported when `Transformer` is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from orthojax.model.presets import bigram_backcopy as bigram_backcopy
from orthojax.model.presets import flops_per_token as flops_per_token
from orthojax.model.presets import gpt2 as gpt2
from orthojax.model.presets import llama2 as llama2
from orthojax.model.presets import parameter_count as parameter_count

if TYPE_CHECKING:
    from orthojax.model.cache import KVCache as KVCache
    from orthojax.model.cache import init_cache as init_cache
    from orthojax.model.family_configs import computed_as as computed_as
    from orthojax.model.gguf_files import read_gguf as read_gguf
    from orthojax.model.gguf_files import read_gguf_config as read_gguf_config
    from orthojax.model.interventions import Interventions as Interventions
    from orthojax.model.interventions import attention_pattern as attention_pattern
    from orthojax.model.layers import LinearFunction as LinearFunction
    from orthojax.model.layers import Norm as Norm
    from orthojax.model.layers import linear as linear
    from orthojax.model.layers import plain_product as plain_product
    from orthojax.model.loaded import LoadedModel as LoadedModel
    from orthojax.model.loaded import Observe as Observe
    from orthojax.model.loaded import Taps as Taps
    from orthojax.model.loaded import mesh_of as mesh_of
    from orthojax.model.loaded import stack_layers as stack_layers
    from orthojax.model.loaded import unstack_layers as unstack_layers
    from orthojax.model.pretrained import read_folder as read_folder
    from orthojax.model.pretrained import read_folder_config as read_folder_config
    from orthojax.model.pretrained import write_folder as write_folder
    from orthojax.model.transformer import Transformer as Transformer
    from orthojax.model.transformer import parameter_shapes as parameter_shapes

_LAZY = {
    "cache": ("KVCache", "init_cache"),
    "family_configs": ("computed_as",),
    "gguf_files": ("read_gguf", "read_gguf_config"),
    "interventions": ("Interventions", "attention_pattern"),
    "layers": ("LinearFunction", "Norm", "linear", "plain_product"),
    "loaded": ("LoadedModel", "Observe", "Taps", "mesh_of", "stack_layers", "unstack_layers"),
    "pretrained": ("read_folder", "read_folder_config", "write_folder"),
    "transformer": ("Transformer", "parameter_shapes"),
}

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    {"bigram_backcopy", "flops_per_token", "gpt2", "llama2", "parameter_count"}.union(*_LAZY.values())
)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"orthojax.model.{module}"), name)
    raise AttributeError(f"module 'orthojax.model' has no attribute {name!r}")
