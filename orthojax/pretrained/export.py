"""Models that leave: as a family of transformers if one computes the same, else with `modeling_orthojax.py`."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from orthojax.config import ModelConfig
from orthojax.model import fold_embedding_projection, parameter_shapes
from orthojax.model.attention import layer_frequencies, layer_scales
from orthojax.pretrained.configs import write_config
from orthojax.pretrained.families import FAMILIES

OWN = "orthojax"  # the model_type of models that no family expresses
CODE = Path(__file__).with_name("modeling_orthojax.py")  # their code, for PyTorch
_CLASSES = {"AutoConfig": "OrthojaxConfig", "AutoModelForCausalLM": "OrthojaxForCausalLM"}


def family_of(config: ModelConfig) -> str | None:
    """Returns the `model_type` of the first family that computes what a model does; None if there is none."""
    return next((name for name, family in FAMILIES.items() if write_config(family, config)), None)


def as_family(config: ModelConfig, params: Any) -> tuple[ModelConfig, Any]:
    """Returns a model with equal logits that a family expresses, if there is one; else the same model.

    A norm with one scale becomes one with equal scales, softmax-1 a learned sink of 0, softmax_n one of ln(n), and
    the matrices of `embedding_projection` go into the token table and the head.
    """
    plain, folded = config, params
    if config.embedding_projection:
        folded, plain = fold_embedding_projection(params, config)
    n = {"softmax1": 1.0, "softmax_n": plain.normalizer_n}.get(plain.normalizer, 0.0)
    changes: dict[str, Any] = {"norm": "rmsnorm"} if plain.norm == "rmsnorm_single" else {}
    plain = dataclasses.replace(plain, **changes | ({"normalizer": "learned_sink"} if n else {}))
    if family_of(plain) is None:
        return config, params

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "sink" and n:
            return jnp.full(like.shape, math.log(n))
        found: Any = functools.reduce(lambda node, key: node[key.key], path, folded)
        return found if found.shape == like.shape else jnp.broadcast_to(found[..., None], like.shape)

    return plain, jax.tree_util.tree_map_with_path(leaf, parameter_shapes(plain))


def field_without_code(config: ModelConfig) -> str | None:
    """Returns the first field of a model, with its value, that the code does not know; None if it knows all."""
    scaling = "none" if config.rope is None else config.rope.scaling
    known = {
        "latent": config.latent is None,
        "mlp": not any(config.layer_mlp(layer) in ("experts", "swiglu_clamped") for layer in range(config.num_layers)),
        "embedding_projection": not config.embedding_projection,
        # A cache counts tokens by what attention stored.
        "attention": any(config.layer_attention(layer) for layer in range(config.num_layers)),
        "rope": scaling not in ("dynamic", "longrope"),  # whose frequencies depend on the length of the text
    }
    name = next((name for name, is_known in known.items() if not is_known), None)
    return name and f"model.{name}={getattr(config, name)}"


def code_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields of config.json that the code reads besides `model`; none for a model that it does not know."""
    if field_without_code(config):
        return {}
    scales = [_scales(config, layer) for layer in range(config.num_layers)]
    return {
        "architectures": [_CLASSES["AutoModelForCausalLM"]],
        "auto_map": {kind: f"{CODE.stem}.{name}" for kind, name in _CLASSES.items()},
        "scales": scales[0] if all(each == scales[0] for each in scales) else scales,
    }


def _scales(config: ModelConfig, layer: int) -> dict[str, Any]:
    rotated, products = layer_scales(config, layer)
    frequencies = layer_frequencies(config, layer, jnp.arange(1)).tolist() if config.layer_rotates(layer) else None
    return {"frequencies": frequencies, "rotated": rotated, "products": products}
