"""Where everything that a step changes is on a mesh: first-match rules for parameters, and the moments after them."""

import math
import re
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orthojax.config import Config, ModelConfig
from orthojax.model import linear, plain_product
from orthojax.optim import Rotation, leaf_path, zero1
from orthojax.train.mesh import ROWS, constrain
from orthojax.train.optimizer import make_rotation


class Rule(NamedTuple):
    """Which dimensions of a parameter are split; they count from the end, so that scanned layers are like others."""

    pattern: str  # of the end of its path
    tensor: int | None = None  # over `tensor`
    units: int | None = None  # what `tensor` must divide, where that is not the dimension itself
    fsdp: tuple[int, ...] = ()  # over `fsdp`: the first that it divides


def rules(model: ModelConfig) -> tuple[Rule, ...]:
    """The rules of the transformer's parameters, the first match counts.

    `tensor` splits heads, MLP width and vocabulary; a head is never cut, nor parted from its group. `fsdp` splits the
    axis that is not rotated by default (kernels [in, out] are rotated along `out`, tables [n, d_model] and the head
    [d_model, n] along d_model), so that rotated moments need no communication; the other axis where that does not
    divide. A dimension that does not divide stays whole, and so do vectors, but for biases of split outputs.
    """
    heads = model.kv_heads
    return (
        Rule(r"attention/(query|key|value|gate)/kernel", tensor=-1, units=heads, fsdp=(-2, -1)),
        Rule(r"attention/(query|key|value|gate)/bias", tensor=-1, units=heads),
        Rule(r"attention/output/kernel", tensor=-2, units=heads, fsdp=(-2, -1)),
        Rule(r"mlp/(input|gate)/kernel", tensor=-1, fsdp=(-2, -1)),
        Rule(r"mlp/(input|gate)/bias", tensor=-1),
        Rule(r"mlp/output/kernel", tensor=-2, fsdp=(-2, -1)),
        Rule(r"token_embedding/embedding", tensor=-2, fsdp=(-2, -1)),
        Rule(r"position_embedding/embedding", fsdp=(-2, -1)),
        Rule(r"head/kernel", tensor=-1, fsdp=(-1, -2)),
        Rule(r".*"),
    )


def _spec(rule: Rule, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    names: list[tuple[str, ...]] = [()] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    if tensor > 1 and rule.tensor is not None:
        units = shape[rule.tensor] if rule.units is None else rule.units
        if units % tensor == 0 and shape[rule.tensor] % tensor == 0:
            names[rule.tensor] = ("tensor",)
    if fsdp > 1:
        width = {dim: fsdp * math.prod(mesh.shape[name] for name in names[dim]) for dim in rule.fsdp}
        chosen = next((dim for dim in rule.fsdp if shape[dim] % width[dim] == 0), None)
        if chosen is not None:
            names[chosen] += ("fsdp",)
    while names and not names[-1]:  # as jit itself writes it
        names.pop()
    return PartitionSpec(*(over[0] if len(over) == 1 else over or None for over in names))


def parameter_shardings(model: ModelConfig, shapes: Any, mesh: Mesh) -> Any:
    """A tree like the parameters of NamedSharding, by `rules`.

    Args:
      model: Whose parameters they are.
      shapes: Their shapes, stacked or unrolled.
      mesh: With the axes data, fsdp and tensor.
    """
    table = rules(model)

    def of(keys: tuple[Any, ...], leaf: Any) -> NamedSharding:
        rule = next(rule for rule in table if re.search(rf"(^|/)({rule.pattern})$", leaf_path(keys)))
        return NamedSharding(mesh, _spec(rule, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(of, shapes)


def moment_shardings(config: Config, shapes: Any, shardings: Any) -> Any:
    """Where the optimizer's moments are: as the parameters, and split over `data` too (ZeRO stage 1).

    Args:
      config: Tells what is rotated; bases depend on neither mesh nor layout.
      shapes: Of the parameters.
      shardings: Of the parameters.
    """
    if jax.tree.leaves(shardings)[0].mesh.shape["data"] == 1:
        return shardings
    rotation = make_rotation(config.optim.rotation) if config.optim.is_rotated else Rotation("identity")
    return zero1(rotation, shapes, shardings)


@plain_product
def linear_on_rows(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
    """`orthojax.model.linear` whose argument and result are split by rows, so that kernels travel and activations stay.

    Without that the compiler may gather activations, which are larger, instead of an `fsdp` part of a kernel.
    """
    rows = PartitionSpec(*ROWS, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
    return constrain(linear(constrain(x, rows), kernel, bias, path), rows)
