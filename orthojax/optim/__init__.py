"""Optimizers: rotation of gradients as optax transformations, OrthoAdam, schedules.

>>> import optax
>>> r = Rotation(kind="haar")
>>> in_parts = optax.chain(rotate(r), optax.scale_by_adam(), unrotate(r))
>>> the_same = scale_by_orthoadam(rotation=r)
"""

from orthojax.optim.axes import RotatedAxes as RotatedAxes
from orthojax.optim.axes import generic_axes as generic_axes
from orthojax.optim.layout import by_layers as by_layers
from orthojax.optim.layout import layout_of as layout_of
from orthojax.optim.layout import state_shardings as state_shardings
from orthojax.optim.layout import zero1 as zero1
from orthojax.optim.muon import muon_orthoadam as muon_orthoadam
from orthojax.optim.muon import scale_by_muon_orthoadam as scale_by_muon_orthoadam
from orthojax.optim.orthoadam import orthoadam as orthoadam
from orthojax.optim.orthoadam import scale_by_adam as scale_by_adam
from orthojax.optim.orthoadam import scale_by_orthoadam as scale_by_orthoadam
from orthojax.optim.orthoadam import warmup_cosine as warmup_cosine
from orthojax.optim.rotation import Rotation as Rotation
from orthojax.optim.rotation import describe as describe
from orthojax.optim.rotation import leaf_path as leaf_path
from orthojax.optim.transform import RotatedState as RotatedState
from orthojax.optim.transform import RotationState as RotationState
from orthojax.optim.transform import in_rotated_basis as in_rotated_basis
from orthojax.optim.transform import rotate as rotate
from orthojax.optim.transform import unrotate as unrotate
