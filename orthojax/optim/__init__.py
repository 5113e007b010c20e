"""Optimizers: rotation of gradients as optax transformations, OrthoAdam, schedules.

>>> import optax
>>> r = Rotation(kind="haar")
>>> in_parts = optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r))
>>> the_same = scale_by_orthoadam(rotation=r)
"""

from orthojax.optim.axes import RotatedAxes, generic_axes
from orthojax.optim.layout import layout_of, state_shardings, zero1
from orthojax.optim.orthoadam import orthoadam, scale_by_orthoadam
from orthojax.optim.rotation import Rotation, describe, leaf_path
from orthojax.optim.schedules import warmup_cosine
from orthojax.optim.transform import RotatedState, RotationState, in_rotated_basis, rotate, unrotate

__all__ = [
    "RotatedAxes",
    "RotatedState",
    "Rotation",
    "RotationState",
    "describe",
    "generic_axes",
    "in_rotated_basis",
    "layout_of",
    "leaf_path",
    "orthoadam",
    "rotate",
    "scale_by_orthoadam",
    "state_shardings",
    "unrotate",
    "warmup_cosine",
    "zero1",
]
