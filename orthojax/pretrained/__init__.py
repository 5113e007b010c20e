"""Pretrained models: folders of config.json and safetensors, and GGUF files, read and, the former, written.

A family is a table of rows for its config and its tensors (`families`), read both ways.
"""

from orthojax.data.tokenizers import begins_with_bos as begins_with_bos
from orthojax.data.tokenizers import with_declared_tokens as with_declared_tokens
from orthojax.places import is_pretrained as is_pretrained
from orthojax.places import locate as locate
from orthojax.pretrained.configs import computed_as as computed_as
from orthojax.pretrained.families import FAMILIES as FAMILIES
from orthojax.pretrained.folders import read_folder as read_folder
from orthojax.pretrained.folders import read_folder_config as read_folder_config
from orthojax.pretrained.folders import write_folder as write_folder
from orthojax.pretrained.gguf import read_gguf as read_gguf
from orthojax.pretrained.gguf import read_gguf_config as read_gguf_config
