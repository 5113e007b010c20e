"""The optimizer of a run, built from its config: an optax chain whose parts have plain names in the checkpoint."""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from orthojax.config import OptimConfig, RotationConfig
from orthojax.errors import UserError
from orthojax.optim import (
    RotatedAxes,
    Rotation,
    in_rotated_basis,
    rotate,
    scale_by_adam,
    scale_by_muon_orthoadam,
    scale_by_orthoadam,
    warmup_cosine,
)

Layout = Callable[[str], jax.sharding.Sharding | None]

_WRITERS = ("attention/output", "mlp/output", "mlp/experts/output", "mlp/shared/output", "embedding_output")
_OURS = ("kernel", "embedding", "scale", "bias", "sink")  # names of parameters
_TABLES = ("token_embedding", "position_embedding", "head")


def rotated_axes(rotation: RotationConfig) -> Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]:
    """Returns the rule for the rotated axes of the transformer's parameters, by `axes` and `embeddings` of the config.

    Kernels are [in, out], or [layers, in, out] if layers are scanned; each layer has its own basis. Tables (token,
    position, an untied head) are rotated along d_model only, sharing one basis over their rows. Norm scales, biases
    and sink logits are left alone.
    """

    def axes(path: str, leaf: jax.ShapeDtypeStruct) -> RotatedAxes | None:
        module, _, name = path.rpartition("/")
        table = module in _TABLES
        if name not in ("kernel", "embedding") or (table and not rotation.embeddings):
            return None
        last, before = leaf.ndim - 1, leaf.ndim - 2
        if table:
            if rotation.axes == "writers" and module == "head":
                return None
            return RotatedAxes(((before if module == "head" else last,),))
        chosen = {
            "output": (last,),
            "input": (before,),
            "both": (before, last),
            "d_model": (last if module.endswith(_WRITERS) else before,),
            "writers": (last,) if module.endswith(_WRITERS) else (),
            "none": (),
        }[rotation.axes]
        return RotatedAxes(tuple((axis,) for axis in chosen), stacked=tuple(range(before))) if chosen else None

    return axes


def make_rotation(config: RotationConfig, layout: Layout | None = None) -> Rotation:
    """Makes the `Rotation` of a run, for the transformer's own parameters; `layout` shards moments, by path.

    Raises:
      UserError: Without a seed, which `Config.seeded_optim` fills in.
    """
    if config.seed is None:
        raise UserError("optim.rotation.seed=none", allowed="a number, or `seeded_optim` of the run's config")
    return Rotation(config.kind, rotated_axes(config), config.seed, config.scope, layout)


def shared_basis(config: OptimConfig, d_model: int) -> jax.Array | None:
    """Returns the one matrix Q [d_model, d_model] that every parameter shares under the scope `tree`, else None.

    Training is then Adam on a network whose residual stream is Q x, so its outliers are looked for in Q x.
    """
    if not config.is_rotated or config.rotation.scope != "tree":
        return None
    rotation = rotate(dataclasses.replace(make_rotation(config.rotation), axes=lambda path, leaf: RotatedAxes((-1,))))
    rows = {"unit_vectors": jnp.eye(d_model)}
    rotated: Any = rotation.update(rows, rotation.init(rows))[0]
    return rotated["unit_vectors"].T


def decay_mask(params: optax.Params) -> optax.Params:
    """Marks the parameters that decay: kernels and embeddings, not norm scales, biases and sink logits."""
    return jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key) in ("kernel", "embedding"), params)


def learning_rate_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Makes a linear warm-up and cosine decay over `steps` optimizer steps."""
    return warmup_cosine(config.learning_rate, config.warmup_steps, steps, config.final_learning_rate_fraction)


def _muon(config: OptimConfig, layout: Layout | None) -> optax.GradientTransformation:
    """Makes Muon for kernels, Adam for vectors, and what the config asks for on embeddings and the head.

    Raises:
      UserError: In `init`, for parameters with names of another model, which would silently get Adam.
    """
    whole = MuonDimensionNumbers(-2, -1)

    def group(path: str, leaf: jax.ShapeDtypeStruct) -> Any:
        module, _, name = path.rpartition("/")
        if leaf.ndim > 1 and name not in _OURS:
            problem = f"optim.optimizer='muon' does not know the parameter {path!r} {leaf.shape}"
            raise UserError(problem, allowed="orthojax's own model, whose kernels it finds by name")
        if config.muon_embeddings and module in _TABLES:
            return whole if config.muon_embeddings == "muon" else "embedding"
        return whole if name == "kernel" else "adam"

    momentum: Any = config.momentum_or_default
    rotation = make_rotation(config.rotation, layout) if config.has_rotation else Rotation("identity", layout=layout)
    return scale_by_muon_orthoadam(config.b1, config.b2, config.eps, **_moment_dtypes(config), momentum=momentum,
                                   ns_dtype=config.ns_dtype, embeddings=config.muon_embeddings, rotation=rotation,
                                   groups=group)  # fmt: skip


def _moment_dtypes(config: OptimConfig) -> dict[str, Any]:
    of = {"mu_dtype": config.mu_dtype, "nu_dtype": config.nu_dtype}
    return {name: None if dtype == "float32" else dtype for name, dtype in of.items()}  # None is that of parameters


def _scaling(config: OptimConfig, layout: Layout | None) -> optax.GradientTransformation:
    """Makes the optimizer itself, before weight decay and learning rate."""
    b1, b2, eps = config.b1, config.b2, config.eps
    if config.optimizer == "orthoadam":
        rotation = make_rotation(config.rotation, layout)
        return scale_by_orthoadam(b1, b2, eps, **_moment_dtypes(config), rotation=rotation)
    scalings: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adam": lambda: scale_by_adam(b1, b2, eps, **_moment_dtypes(config)),
        # RMSProp is Adam without a first moment, bias correction included.
        "rmsprop": lambda: optax.scale_by_adam(0.0, b2, eps),
        "sgd": lambda: optax.trace(config.momentum) if config.momentum else optax.identity(),
        "lion": lambda: optax.scale_by_lion(b1, b2),
        "muon": lambda: _muon(config, layout),
    }
    make = scalings.get(config.optimizer) or functools.partial(
        imported("optim.optimizer", config.optimizer, "config"), config
    )
    try:
        scaling = make()
    except Exception as error:
        if ":" not in config.optimizer:
            raise
        raise UserError(f"optim.optimizer={config.optimizer!r}: {type(error).__name__}: {error}") from error
    if not (hasattr(scaling, "init") and hasattr(scaling, "update")):
        problem = f"optim.optimizer={config.optimizer!r} returns {type(scaling).__name__}"
        raise UserError(problem, allowed="a function of the OptimConfig that returns an optax transformation")
    return in_rotated_basis(scaling, make_rotation(config.rotation, layout)) if config.rotated else scaling


def imported(field: str, name: str, *arguments: str) -> Callable[..., Any]:
    """Returns the function that a field of the config names as `module:function`, which takes these arguments."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
        inspect.signature(found).bind(*arguments)  # TypeError for what is no such function
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        allowed = f"module:function, both of which exist, as function({', '.join(arguments)})"
        raise UserError(f"{field}={name!r}: {error}", allowed=allowed) from None
    return found


def make_optimizer(
    config: OptimConfig, *, schedule: optax.Schedule, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Chains clipping, the optimizer's own scaling, decoupled weight decay and the learning rate.

    The chain has names, so that a checkpoint shows `opt_state/orthoadam/...`. On a mesh, `layout` comes from
    `layout_of`.
    """
    parts: list[tuple[str, optax.GradientTransformation]] = []
    if config.clip_norm is not None:
        parts.append(("clip", optax.clip_by_global_norm(config.clip_norm)))
    parts.append((config.optimizer.rpartition(":")[2], _scaling(config, layout)))
    if config.weight_decay:
        parts.append(("weight_decay", optax.add_decayed_weights(config.weight_decay, decay_mask)))
    parts.append(("learning_rate", optax.scale_by_learning_rate(schedule)))
    return optax.named_chain(*parts)
