"""Models that others trained: folders of config.json and safetensors, and GGUF files, read and, the former, written.

A family is a table of rows for its config and its tensors (`families`), read both ways.
"""

from orthojax.data.published import locate
from orthojax.pretrained.configs import computed_as
from orthojax.pretrained.families import FAMILIES
from orthojax.pretrained.folders import is_pretrained, read_folder, read_folder_config, write_folder
from orthojax.pretrained.gguf import read_gguf, read_gguf_config
from orthojax.pretrained.tokens import begins_with_bos, with_declared_tokens

__all__ = [
    "FAMILIES",
    "begins_with_bos",
    "computed_as",
    "is_pretrained",
    "locate",
    "read_folder",
    "read_folder_config",
    "read_gguf",
    "read_gguf_config",
    "with_declared_tokens",
    "write_folder",
]
