"""The optimizer of a run, built from its config: an optax chain whose parts have plain names in the checkpoint."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from orthojax.config import OptimConfig, RotationConfig
from orthojax.optim import RotatedAxes, Rotation, rotate, scale_by_orthoadam, warmup_cosine

_WRITERS = ("attention/output", "mlp/output")
_TABLES = ("token_embedding", "position_embedding", "head")


def rotated_axes(rotation: RotationConfig) -> Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]:
    """Which axes of the transformer's own parameters are rotated.

    Kernels are [in, out], or [layers, in, out] where layers are scanned; each layer has its own basis. Tables (token,
    position, an untied head) are rotated along d_model only, sharing one basis over their rows. Gains, biases and
    sink logits are left alone.

    Args:
      rotation: Its `axes` and `embeddings` decide.
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
        writes = module.endswith(_WRITERS)
        chosen = {
            "output": (last,),
            "input": (before,),
            "both": (before, last),
            "residual": (last if writes else before,),
            "writers": (last,) if writes else (),
        }[rotation.axes]
        return RotatedAxes(tuple((axis,) for axis in chosen), stacked=tuple(range(before))) if chosen else None

    return axes


def make_rotation(config: RotationConfig) -> Rotation:
    """The `Rotation` of a run's config, for the transformer's own parameters."""
    return Rotation(kind=config.kind, axes=rotated_axes(config), seed=config.seed, scope=config.scope)


def shared_basis(config: OptimConfig, d_model: int) -> jax.Array | None:
    """The one matrix Q [d_model, d_model] that every parameter shares under the scope `tree`, else None.

    Training there is Adam on a network whose residual stream is Q x, so Q x is where its outliers are looked for.
    """
    if config.optimizer != "orthoadam" or config.rotation.scope != "tree":
        return None
    rotation = dataclasses.replace(make_rotation(config.rotation), axes="output")
    turn = rotate(rotation)
    rows = {"unit_vectors": jnp.eye(d_model)}
    return turn.update(rows, turn.init(rows))[0]["unit_vectors"].T


def decay_mask(params: optax.Params) -> optax.Params:
    """True where weight decay applies: kernels and embeddings, not gains, biases and sink logits."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: str(path[-1].key) in ("kernel", "embedding"),
        params,
    )


def learning_rate_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Linear warm-up and cosine decay over `steps` optimizer steps."""
    return warmup_cosine(config.learning_rate, config.warmup_steps, steps, config.final_learning_rate_fraction)


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, the optimizer's own scaling, decoupled weight decay, learning rate.

    Args:
      config: The optimizer and its schedule.
      steps: Length of the run, where the schedule ends.

    Returns:
      A named chain, so that a checkpoint shows `opt_state/orthoadam/...`.
    """
    scalings: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adam": lambda: optax.scale_by_adam(config.b1, config.b2, config.eps),
        "orthoadam": lambda: scale_by_orthoadam(
            config.b1, config.b2, config.eps, rotation=make_rotation(config.rotation)
        ),
        # RMSProp is Adam without a first moment, bias correction included.
        "rmsprop": lambda: optax.scale_by_adam(0.0, config.b2, config.eps),
        "sgd": lambda: optax.trace(config.momentum) if config.momentum else optax.identity(),
    }
    parts: list[tuple[str, optax.GradientTransformation]] = []
    if config.clip_norm is not None:
        parts.append(("clip", optax.clip_by_global_norm(config.clip_norm)))
    parts.append((config.optimizer, scalings[config.optimizer]()))
    if config.weight_decay:
        parts.append(("weight_decay", optax.add_decayed_weights(config.weight_decay, decay_mask)))
    parts.append(("learning_rate", optax.scale_by_learning_rate(learning_rate_schedule(config, steps))))
    return optax.named_chain(*parts)
