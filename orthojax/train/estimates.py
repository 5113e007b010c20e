"""What a run takes, by arithmetic and by a dry run, and model FLOPs utilization (MFU)."""

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config, ModelConfig
from orthojax.errors import UserError, nearest
from orthojax.formatting import byte_count
from orthojax.model import flops_per_token, parameter_count
from orthojax.ops import positions_at_once
from orthojax.train.mesh import ROWS, in_mesh
from orthojax.train.step import TrainState, build, require_attention, state_shapes

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets (NVIDIA prints them with sparsity, twice as
# large), by the exact `device_kind`: one that begins alike may be another chip, as H100 and H100 PCIe are.
_PEAK_FLOPS_PER_SECOND = {
    **dict.fromkeys(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), 312e12
    ),
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA RTX A6000": 154.8e12,
    "NVIDIA GeForce RTX 3090": 71e12,  # of the GeForce cards with sums in float32, as XLA takes them
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "TPU v3": 61.5e12,  # 123e12 a chip, whose two cores are two devices
    "TPU v4": 275e12,
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), 197e12),
    **dict.fromkeys(("TPU v5", "TPU v5p"), 459e12),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), 918e12),
    "TPU7x": 1153.5e12,  # 2307e12 a chip, as of v3
}
_MFU = (0.3, 0.4, 0.5)
_OTHERS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "TPU v5p")  # for the hours where this device's peak is unknown


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = True) -> int:
    """Floating-point operations that one training step needs for each token, forward and backward.

    6 for each parameter of a matrix product, and 12 T d_model in each layer that attends, or half of that where
    products with keys that the causal mask hides are not counted. For GPT-2, with V the padded vocabulary:
    6 (12 L d^2 + V d) + 6 L T d. Embedding look-ups, norms, recomputation and the optimizer are not counted.

    Args:
      model: Its kernels and attending layers count.
      sequence_length: T.
      causal: Count half of the attention matrix, as Megatron-LM and MaxText do; otherwise all of it, as PaLM does,
        which is `orthojax.model.flops_per_token`.

    Reference:
      PaLM, `arXiv 2204.02311 <https://arxiv.org/abs/2204.02311>`_, 2022, Appendix B. The causal half:
      FlashAttention-2, `arXiv 2307.08691 <https://arxiv.org/abs/2307.08691>`_, 2023, section 4.1.

    >>> from orthojax.model import gpt2
    >>> model_flops_per_token(gpt2("130m", vocab_size=50304), 1024)
    798031872
    """
    full = flops_per_token(model, sequence_length)
    if not causal:
        return full
    attending = sum(model.layer_attention(layer) for layer in range(model.num_layers))
    return full - 3 * attending * sequence_length * model.num_heads * (model.head_dim + model.value_dim)


def peak_flops_per_second(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device by its `device_kind`; None where the table does not have it.

    >>> peak_flops_per_second("NVIDIA H200"), peak_flops_per_second("cpu")
    (989000000000000.0, None)
    """
    return _PEAK_FLOPS_PER_SECOND.get(device_kind)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, device_kind: str | None = None, device_count: int | None = None
) -> float | None:
    """MFU = tokens/s * FLOPs per token / (peak bfloat16 FLOP/s * devices), a fraction; None where the peak is unknown.

    Args:
      tokens_per_second: Of all devices together.
      flops_per_token: From `model_flops_per_token`.
      device_kind: None means JAX's own.
      device_count: None means all that JAX sees, of all processes.

    >>> round(model_flops_utilization(500_000, 798_031_872, "NVIDIA H200", 1), 3)
    0.403
    """
    peak = peak_flops_per_second(jax.devices()[0].device_kind if device_kind is None else device_kind)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * (jax.device_count() if device_count is None else device_count))


class Estimate(NamedTuple):
    """What a run will take."""

    parameters: int
    tokens_per_step: int  # target tokens of one optimizer step
    tokens: int  # of the whole run
    flops_per_token: int  # forward and backward, from `model_flops_per_token`: causal, without recomputation
    flops: int  # of the whole run

    def hours(self, device_kind: str, device_count: int = 1, *, mfu: float) -> float:
        """Hours of training at an MFU (a fraction) on so many devices of a `device_kind`, without evaluation.

        Raises:
          UserError: For a device whose peak is not known.
        """
        peak, kinds = peak_flops_per_second(device_kind), list(_PEAK_FLOPS_PER_SECOND)
        if peak is None:
            raise UserError(
                f"the peak of {device_kind!r} is not known", allowed=" | ".join(kinds), hint=nearest(device_kind, kinds)
            )
        return self.flops / (peak * device_count * mfu) / 3600.0


def estimate(config: Config) -> Estimate:
    """What a run will take, by arithmetic.

    >>> from orthojax.config import DataConfig, TrainConfig
    >>> from orthojax.model import gpt2
    >>> run = estimate(Config(gpt2("130m"), data=DataConfig(sequence_length=256), train=TrainConfig(1000, 512)))
    >>> run.parameters, run.tokens, round(run.hours("NVIDIA H200", 8, mfu=0.4), 4)
    (124439808, 131072000, 0.0087)
    """
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    tokens = tokens_per_step * config.train.steps
    flops = model_flops_per_token(config.model, config.data.sequence_length)
    return Estimate(parameter_count(config.model), tokens_per_step, tokens, flops, tokens * flops)


def bytes_on_one_device(tree: Any) -> int:
    """Bytes on each device of a tree of arrays or shapes; of the largest shard where shards differ.

    >>> bytes_on_one_device([jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((), "int32")])
    132
    """

    def of(leaf: Any) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def describe_devices(mesh: Mesh | None) -> str:
    """The devices of a mesh and its sizes; None is one device."""
    sizes = "" if mesh is None else f", mesh {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}"
    return f"{1 if mesh is None else mesh.size} x {jax.devices()[0].device_kind}{sizes}"


def dry_run(config: Config) -> Iterator[str]:
    """Lines that say what a run will take on its mesh: nothing is allocated and no data is read.

    The last ones come once its step is compiled, which may take a minute.

    Raises:
      UserError: As `require_attention` and `build`.
    """
    require_attention(config.model)
    program, plan, state = build(config), estimate(config), state_shapes(config)
    mesh, kind = program.mesh, jax.devices()[0].device_kind
    count = 1 if mesh is None else mesh.size
    yield f"devices: {describe_devices(mesh)}"
    yield f"parameters: {plan.parameters:,}"
    yield f"tokens: {plan.tokens:,} in {config.train.steps:,} steps of {plan.tokens_per_step:,}"
    yield f"FLOPs: {plan.flops:.3g}, {plan.flops_per_token:,} a token"
    yield f"hours on {count} device{'s' if count > 1 else ''} at an MFU of {', '.join(f'{mfu:.0%}' for mfu in _MFU)}:"
    for name in (kind,) if peak_flops_per_second(kind) else _OTHERS:
        yield f"  {name}: {', '.join(f'{plan.hours(name, count, mfu=mfu):.3g}' for mfu in _MFU)}"
    yield from _shardings(state)
    tokens = jax.ShapeDtypeStruct(
        (config.train.batch_size, config.data.sequence_length + 1),
        jnp.int32,
        sharding=None if mesh is None else NamedSharding(mesh, ROWS),
    )
    started = time.monotonic()
    compiled = program.step.lower(state, tokens).compile()  # pyright: ignore[reportFunctionMemberAccess]
    seconds = time.monotonic() - started
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    yield "memory of each device:"
    parts = {
        "parameters": bytes_on_one_device(state.params),
        "optimizer state": bytes_on_one_device(state.opt_state),
        "tokens of a batch": bytes_on_one_device(tokens),
        "gradients, activations, logits": temporary,
    }
    for name, size in parts.items():
        yield f"  {name}: {byte_count(size)}"
    yield f"    of these gradients, at most: {byte_count(bytes_on_one_device(state.params))}"
    yield f"    of these logits, each time that they are materialised: {byte_count(_logits_bytes(config, mesh))}"
    if temporary is not None:
        yield f"  together: {byte_count(sum(size or 0 for size in parts.values()))}"
    if jax.default_backend() == "cpu":
        yield "  (as a CPU's program; fused attention of GPUs and TPUs does not keep the matrix of weights)"
    yield f"compiled for {jax.default_backend()} in {seconds:.0f} s; nothing was trained"


def _logits_bytes(config: Config, mesh: Mesh | None) -> int:
    """Bytes on one device of the float32 logits of as many positions as the loss takes at once."""
    rows, vocabulary = config.train.batch_size // config.train.accumulation_steps, config.model.vocab_size
    with in_mesh(mesh):
        positions = positions_at_once(rows, config.data.sequence_length, vocabulary, config.train.loss_chunk_positions)
    data, fsdp, tensor = (1, 1, 1) if mesh is None else mesh.shape.values()
    return -(-rows // (data * fsdp)) * positions * (vocabulary if vocabulary % tensor else vocabulary // tensor) * 4


def _shardings(state: TrainState) -> Iterator[str]:
    yield "parameters by path: shape, how they and their moments are split, bytes on each device"
    where = {tuple(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        same = (other for keys, other in where.items() if keys[-len(path) :] == path and other.shape == leaf.shape)
        moments = {_spec(other) for other in same}
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        split = " | ".join([_spec(leaf), *sorted(moments)]) if leaf.sharding is not None else "whole"
        yield f"  {name} {leaf.shape}: {split}, {byte_count(bytes_on_one_device(leaf))}"


def _spec(leaf: Any) -> str:
    return "whole" if leaf.sharding is None or not any(leaf.sharding.spec) else str(tuple(leaf.sharding.spec))
