"""The optimizer of a run, built from its config: an optax chain whose parts have plain names in the checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from orthojax.config import OptimConfig, RotationConfig, require
from orthojax.optim import (
    RotatedAxes,
    Rotation,
    in_rotated_basis,
    rotate,
    scale_by_orthoadam,
    scale_by_soap,
    warmup_cosine,
)

Layout = Callable[[str], jax.sharding.Sharding | None]

_WRITERS = ("attention/output", "mlp/output", "mlp/experts/output", "mlp/shared/output")
_TABLES = ("token_embedding", "position_embedding", "head")


def rotated_axes(rotation: RotationConfig) -> Callable[[str, jax.ShapeDtypeStruct], RotatedAxes | None]:
    """Which axes of the transformer's parameters are rotated, by `axes` and `embeddings` of the config.

    Kernels are [in, out], or [layers, in, out] where layers are scanned; each layer has its own basis. Tables (token,
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
        writes = module.endswith(_WRITERS)
        chosen = {
            "output": (last,),
            "input": (before,),
            "both": (before, last),
            "residual": (last if writes else before,),
            "writers": (last,) if writes else (),
            "none": (),
        }[rotation.axes]
        return RotatedAxes(tuple((axis,) for axis in chosen), stacked=tuple(range(before))) if chosen else None

    return axes


LEARNED_AXES = rotated_axes(RotationConfig(axes="both"))  # of SOAP's bases, whatever the config's rotation is


def make_rotation(config: RotationConfig, layout: Layout | None = None) -> Rotation:
    """The `Rotation` of a run, for the transformer's own parameters.

    Args:
      config: From `Config.seeded_optim`, so that its seed is a number.
      layout: Where moments are.

    Raises:
      UserError: For the bases of an older version, which are not computed any more, or without a seed.
    """
    require(config.basis == 2, f"optim.rotation.basis={config.basis} is that of an older orthojax", "2, in a new run")
    require(config.seed is not None, "optim.rotation.seed=none", "a number, or `seeded_optim` of the run's config")
    assert config.seed is not None
    return Rotation(config.kind, rotated_axes(config), config.seed, config.scope, layout)


def shared_basis(config: OptimConfig, d_model: int) -> jax.Array | None:
    """The one matrix Q [d_model, d_model] that every parameter shares under the scope `tree`, else None.

    Training there is Adam on a network whose residual stream is Q x, so Q x is where its outliers are looked for.
    """
    if not config.is_rotated or config.rotation.scope != "tree":
        return None
    rotation = rotate(dataclasses.replace(make_rotation(config.rotation), axes=lambda path, leaf: RotatedAxes((-1,))))
    rows = {"unit_vectors": jnp.eye(d_model)}
    rotated: Any = rotation.update(rows, rotation.init(rows))[0]
    return rotated["unit_vectors"].T


def decay_mask(params: optax.Params) -> optax.Params:
    """True where weight decay applies: kernels and embeddings, not norm scales, biases and sink logits."""
    return jax.tree_util.tree_map_with_path(lambda path, _: str(path[-1].key) in ("kernel", "embedding"), params)


def learning_rate_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Linear warm-up and cosine decay over `steps` optimizer steps."""
    return warmup_cosine(config.learning_rate, config.warmup_steps, steps, config.final_learning_rate_fraction)


def _muon(config: OptimConfig) -> optax.GradientTransformation:
    """Muon on kernels, Adam on embeddings and vectors; updates of both have Adam's usual size, 0.2 RMS."""

    def labels(params: optax.Params) -> optax.Params:
        def of(path: tuple[Any, ...], _: Any) -> str:
            return "muon" if str(path[-1].key) == "kernel" else "adam"

        return jax.tree_util.tree_map_with_path(of, params)

    def dimensions(params: optax.Params) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params)

    def to_rms(updates: optax.Updates, _: Any) -> optax.Updates:
        # All singular values are about 1, so that the RMS is 1 / sqrt(longer side).
        return jax.tree.map(lambda u: u * (0.2 * max(u.shape[-2:]) ** 0.5), updates)

    muon = optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=dimensions)
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    return optax.partition({"muon": optax.chain(muon, optax.stateless(to_rms)), "adam": adam}, labels)


def _scaling(config: OptimConfig, layout: Layout | None) -> optax.GradientTransformation:
    """The optimizer proper, before weight decay and learning rate."""
    b1, b2, eps = config.b1, config.b2, config.eps
    adam = optax.scale_by_adam(b1, b2, eps)
    scalings: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adam": lambda: adam,
        # RMSProp is Adam without a first moment, bias correction included.
        "rmsprop": lambda: optax.scale_by_adam(0.0, b2, eps),
        "sgd": lambda: optax.trace(config.momentum) if config.momentum else optax.identity(),
        # The usual initial accumulator of 0.1 is far above the squared gradients of a language model.
        "adagrad": lambda: optax.scale_by_rss(initial_accumulator_value=0.0, eps=eps),
        "adamax": lambda: optax.scale_by_adamax(b1, b2, eps),
        "amsgrad": lambda: optax.scale_by_amsgrad(b1, b2, eps),
        "adabelief": lambda: optax.scale_by_belief(b1, b2, eps=1e-16),
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
        "lion": lambda: optax.scale_by_lion(b1, b2),
        "signum": lambda: optax.chain(optax.trace(config.momentum), optax.scale_by_sign()),
        "lamb": lambda: optax.chain(adam, optax.scale_by_trust_ratio()),
        "novograd": lambda: optax.scale_by_novograd(b1, b2, eps),
        "ademamix": lambda: optax.contrib.scale_by_ademamix(b1, b2, eps=eps),
        "muon": lambda: _muon(config),
        "soap": lambda: scale_by_soap(b1, b2, eps, rotation=Rotation(axes=LEARNED_AXES, layout=layout)),
    }
    if config.optimizer == "orthoadam":
        rotation = make_rotation(config.rotation, layout)
        return scale_by_orthoadam(b1, b2, eps, rotation=rotation, layer_by_layer=config.layer_by_layer)
    scaling = scalings[config.optimizer]()
    return in_rotated_basis(scaling, make_rotation(config.rotation, layout)) if config.rotated else scaling


def make_optimizer(
    config: OptimConfig, *, schedule: optax.Schedule, layout: Layout | None = None
) -> optax.GradientTransformation:
    """Clipping, the optimizer's own scaling, decoupled weight decay, learning rate.

    Args:
      config: The optimizer.
      schedule: Of the learning rate, from `learning_rate_schedule`.
      layout: On a mesh: where the moments of each parameter are, from `layout_of`.

    Returns:
      A named chain, so that a checkpoint shows `opt_state/orthoadam/...`.
    """
    parts: list[tuple[str, optax.GradientTransformation]] = []
    if config.clip_norm is not None:
        parts.append(("clip", optax.clip_by_global_norm(config.clip_norm)))
    parts.append((config.optimizer, _scaling(config, layout)))
    if config.weight_decay:
        parts.append(("weight_decay", optax.add_decayed_weights(config.weight_decay, decay_mask)))
    parts.append(("learning_rate", optax.scale_by_learning_rate(schedule)))
    if config.sink_anneal_steps:
        parts.append(("sink_anneal", anneal_sinks(config.sink_anneal_steps)))
    return optax.named_chain(*parts)


class SinkAnnealing(NamedTuple):
    """State of `anneal_sinks`."""

    count: jax.Array  # int32 []: steps done
    start: Any  # the sink logits of the first step, by path


def anneal_sinks(steps: int) -> optax.GradientTransformation:
    """Replaces the updates of learned sink logits: they go to 0 on a line, in so many steps, and stay there.

    Args:
      steps: After which they are 0.
    """

    def of(params: optax.Params) -> dict[str, jax.Array]:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {_name(path): leaf for path, leaf in leaves if _is_sink(path)}

    def init(params: optax.Params) -> SinkAnnealing:
        # An array where there is none, as in optax's own placeholder of the parameters, so that trees stay alike.
        return SinkAnnealing(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, of(params)) or jnp.zeros(()))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SinkAnnealing]:
        assert params is not None
        assert isinstance(state, SinkAnnealing)
        count = state.count + 1
        left = jnp.maximum(0.0, 1.0 - count / steps)
        sinks = of(params)

        def replaced(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
            return left * state.start[_name(path)] - sinks[_name(path)] if _is_sink(path) else update

        return jax.tree_util.tree_map_with_path(replaced, updates), SinkAnnealing(count, state.start)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _is_sink(path: tuple[Any, ...]) -> bool:
    return str(path[-1].key) == "sink"


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.key) for key in path)
