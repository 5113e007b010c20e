"""orthojax: language models without outlier activations and with weaker attention sinks.

Letters that name array axes inside functions: B batch, T query positions, S key positions, N query heads,
K key-value heads, H head width, D d_model, V vocabulary.

Public names resolve on first use, so a project that uses only the optimizer needs only jax and optax.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orthojax import analysis as analysis
    from orthojax import optim as optim
    from orthojax import quant as quant
    from orthojax.cards import card as card
    from orthojax.config import ModelConfig as ModelConfig
    from orthojax.model import Interventions as Interventions
    from orthojax.model import LoadedModel as LoadedModel
    from orthojax.model import Transformer as Transformer
    from orthojax.model import gpt2 as gpt2
    from orthojax.model import llama2 as llama2
    from orthojax.ops import attention_fn as attention_fn
    from orthojax.ops import dot_product_attention as dot_product_attention
    from orthojax.ops import kurtosis as kurtosis
    from orthojax.ops import softmax1 as softmax1
    from orthojax.optim import Rotation as Rotation
    from orthojax.optim import in_rotated_basis as in_rotated_basis
    from orthojax.optim import muon_orthoadam as muon_orthoadam
    from orthojax.optim import orthoadam as orthoadam
    from orthojax.optim import rotate as rotate
    from orthojax.optim import scale_by_orthoadam as scale_by_orthoadam
    from orthojax.optim import unrotate as unrotate
    from orthojax.train import load as load

__version__ = "0.1.1"

_HOME = {
    name: package
    for package, names in {
        "ops": ("softmax1", "attention_fn", "dot_product_attention", "kurtosis"),
        "optim": (
            "Rotation",
            "rotate",
            "unrotate",
            "in_rotated_basis",
            "muon_orthoadam",
            "orthoadam",
            "scale_by_orthoadam",
        ),
        "config": ("ModelConfig",),
        "model": ("Interventions", "LoadedModel", "Transformer", "gpt2", "llama2"),
        "train": ("load",),
        "cards": ("card",),
    }.items()
    for name in names
}
_PACKAGES = ("ops", "optim", "model", "data", "analysis", "quant", "pretrained", "train", "cards", "experiments")
# Without flax, which the extra `train` installs, help() and `import *` skip these; using one says what it needs.
_NEED_FLAX = frozenset({"Transformer", "card", "cards", "load", "pretrained", "train"})
_ABSENT = frozenset() if importlib.util.find_spec("flax") else _NEED_FLAX

__all__ = sorted({*_HOME, "analysis", "optim", "quant"} - _ABSENT)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    try:
        if name in _HOME:
            return getattr(importlib.import_module(f"orthojax.{_HOME[name]}"), name)
        if name in _PACKAGES:
            return importlib.import_module(f"orthojax.{name}")
    except ModuleNotFoundError as error:
        from orthojax.errors import how_to_install

        if hint := how_to_install(error):
            raise ImportError(f"orthojax.{name} needs {error.name}: {hint}") from error
        raise
    raise AttributeError(f"module 'orthojax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*_HOME, *_PACKAGES, "__version__"} - _ABSENT)
