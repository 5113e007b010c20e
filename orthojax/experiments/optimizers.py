"""Optimizers that experiments compare and nothing else needs: functions of an `OptimConfig`.

A run names one as `optim.optimizer=orthojax.experiments.optimizers:lamb`.
"""

from typing import get_args

import optax
import optax.contrib

from orthojax.config import OptimConfig, OptimizerName


def named(name: str) -> str:
    """Returns what a config calls an optimizer: its own name for it, or that of a function of this module."""
    return name if name in get_args(OptimizerName) else f"{__name__}:{name}"


def adagrad(config: OptimConfig) -> optax.GradientTransformation:
    """Adagrad. The usual initial accumulator of 0.1 is far above the squared gradients of a language model."""
    return optax.scale_by_rss(initial_accumulator_value=0.0, eps=config.eps)


def adamax(config: OptimConfig) -> optax.GradientTransformation:
    """AdaMax."""
    return optax.scale_by_adamax(config.b1, config.b2, config.eps)


def amsgrad(config: OptimConfig) -> optax.GradientTransformation:
    """AMSGrad."""
    return optax.scale_by_amsgrad(config.b1, config.b2, config.eps)


def adabelief(config: OptimConfig) -> optax.GradientTransformation:
    """AdaBelief."""
    return optax.scale_by_belief(config.b1, config.b2, eps=1e-16)


def adafactor(config: OptimConfig) -> optax.GradientTransformation:
    """Adafactor, with updates clipped by block."""
    del config
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


def signum(config: OptimConfig) -> optax.GradientTransformation:
    """The sign of momentum."""
    return optax.chain(optax.trace(config.momentum), optax.scale_by_sign())


def lamb(config: OptimConfig) -> optax.GradientTransformation:
    """LAMB; its trust ratio is that of the update without weight decay, unlike `optax.lamb`."""
    return optax.chain(optax.scale_by_adam(config.b1, config.b2, config.eps), optax.scale_by_trust_ratio())


def novograd(config: OptimConfig) -> optax.GradientTransformation:
    """NovoGrad."""
    return optax.scale_by_novograd(config.b1, config.b2, config.eps)


def ademamix(config: OptimConfig) -> optax.GradientTransformation:
    """AdEMAMix."""
    return optax.contrib.scale_by_ademamix(config.b1, config.b2, eps=config.eps)
