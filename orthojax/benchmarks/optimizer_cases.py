"""On which parameters, and with which rotations, the optimizers are compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.benchmarks.suite import TINY_MODEL
from orthojax.config import Config, DataConfig, ModelConfig
from orthojax.model import gpt2
from orthojax.train import parameter_shapes


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters on which the optimizers are compared.

    Attributes:
      name: For people.
      shapes: A tree of jax.ShapeDtypeStruct.
      rotations: What is measured on them: "KIND AXES", as in `RotationConfig`, and maybe "layer_by_layer" after it.
      left_out: What is not, of the same form, with the reason.
    """

    name: str
    shapes: Any
    rotations: tuple[str, ...]
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


KERNEL_ROTATIONS = tuple(
    f"{kind} {axes}" for kind in ("hadamard", "dct", "haar") for axes in ("output", "input", "both")
)
_MODEL_ROTATIONS = (
    *(f"hadamard {axes}" for axes in ("output", "input", "both", "residual")),
    *(f"{kind} {axes}" for kind in ("dct", "haar") for axes in ("output", "residual")),
)
_MODEL_LEFT_OUT = {
    "dct input": "to keep the run short; the kernels show it",
    "dct both": "to keep the run short; the kernels show it",
    "haar input": "to keep the run short; the kernels show it",
    "haar both": "to keep the run short; its matrices are 2.4 times as large as the parameters; the kernels show it",
}


def cases(tiny: bool) -> list[Case]:
    """Two kernels [in, out] of GPT-2 130M, and the whole of it unrolled and with stacked layers [layers, in, out].

    Args:
      tiny: A model that takes no time, and few rotations.
    """
    model = TINY_MODEL if tiny else gpt2("130m")
    on_kernels = ("hadamard output", "haar both") if tiny else KERNEL_ROTATIONS
    on_models = ("hadamard residual", "haar output") if tiny else _MODEL_ROTATIONS
    left_out = {} if tiny else _MODEL_LEFT_OUT
    found = []
    for columns in (model.d_model, model.d_mlp):
        shape = jax.ShapeDtypeStruct((model.d_model, columns), jnp.float32)
        found.append(Case(f"{model.d_model}x{columns}", {"kernel": shape}, on_kernels))
    for name, scan_layers in (("unrolled", False), ("stacked", True)):
        shapes = _model_shapes(dataclasses.replace(model, scan_layers=scan_layers))
        by_layer = (f"{on_models[0]} layer_by_layer",) if scan_layers else ()
        found.append(Case(f"gpt2 {'tiny' if tiny else '130m'} {name}", shapes, on_models + by_layer, left_out))
    return found


def _model_shapes(model: ModelConfig) -> Any:
    return parameter_shapes(Config(model=model, data=DataConfig(sequence_length=model.max_length)))
