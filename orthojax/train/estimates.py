"""The lines about a run before it begins: what it is, and what it needs by arithmetic and by a dry run."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from orthojax.config import Config, ModelConfig
from orthojax.formatting import byte_count
from orthojax.model import flops_per_token, parameter_count
from orthojax.train.mesh import ROWS, make_mesh
from orthojax.train.step import build, require_attention, shapes_of

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets (NVIDIA prints them with sparsity, twice as
# large), by the exact `device_kind`: one with the same beginning may be another chip, as with H100 and H100 PCIe.
_PEAK_FLOPS_PER_SECOND = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Counts the floating-point operations that one training step needs for each token, forward and backward.

    It counts 6 for each parameter of a matrix product, and 6 T d_model, for sequences of length T, in each layer with
    attention: products with keys that the causal mask hides are not counted, as in Megatron-LM and MaxText;
    `model.flops_per_token` counts them, and so does this function for full attention; a prefix counts as causal. For
    GPT-2, with V the padded vocabulary: 6 (12 L d^2 + V d) + 6 L T d. Embedding look-ups, norms, recomputation and the
    optimizer are not counted.

    Reference:
      PaLM, `arXiv 2204.02311 <https://arxiv.org/abs/2204.02311>`_, 2022, Appendix B. The causal half:
      FlashAttention-2, `arXiv 2307.08691 <https://arxiv.org/abs/2307.08691>`_, 2023, section 4.1.

    >>> from orthojax.model import gpt2
    >>> model_flops_per_token(gpt2("130m", vocab_size=50304), 1024)
    798031872
    """
    attending = sum(model.layer_attention(layer) for layer in range(model.num_layers))
    hidden = 3 * attending * sequence_length * model.num_heads * (model.head_dim + model.value_dim)
    return flops_per_token(model, sequence_length) - hidden


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, device_kind: str | None = None, device_count: int | None = None
) -> float | None:
    """MFU = tokens/s * FLOPs per token / (peak bfloat16 FLOP/s * devices), a fraction; None if the peak is unknown.

    Tokens are those of all devices together; by default, all devices that JAX sees.

    >>> round(model_flops_utilization(500_000, 798_031_872, "NVIDIA H200", 1), 3)
    0.403
    """
    peak = _PEAK_FLOPS_PER_SECOND.get(jax.devices()[0].device_kind if device_kind is None else device_kind)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * (jax.device_count() if device_count is None else device_count))


def _bytes_on_one_device(tree: Any) -> int:
    """Counts the bytes on each device of a tree of jax.ShapeDtypeStruct; for the largest shard if shards differ."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def entry(name: str, text: str) -> str:
    """Returns one line of what a run says about itself."""
    return f"  {name:11}  {text}"


def opening(config: Config) -> list[str]:
    """Returns lines about a run before it begins."""
    require_attention(config.model)
    model, optim, train, mesh = config.model, config.optim, config.train, make_mesh(config)
    layers = f"{model.num_layers} layers of {model.num_heads} heads, d_model {model.d_model}"
    name = f"{optim.optimizer}{', rotated' if optim.rotated else ''}"
    if optim.muon_embeddings:
        name += f", {optim.muon_embeddings} on embeddings"
    if optim.has_rotation:
        name += f" ({optim.rotation.kind}, axes {optim.rotation.axes})"
    steps = f"{optim.warmup_steps:,} step{'s' * (optim.warmup_steps > 1)}"
    warmup = f"with {steps} of warm-up" if optim.warmup_steps else "without warm-up"
    momentum = "" if optim.momentum_or_default is None else f", momentum {optim.momentum_or_default:g}"
    sizes = "" if mesh is None else f", mesh {', '.join(f'{name} {size}' for name, size in mesh.shape.items())}"
    lines = {
        "model": f"{parameter_count(model):,} parameters: {layers}, {model.normalizer} attention, {model.dtype}",
        "training": f"{train.steps:,} steps of {train.batch_size} x {config.data.sequence_length} tokens",
        "optimizer": f"{name}{momentum}, learning rate {optim.learning_rate:g} {warmup}, "
        f"weight decay {optim.weight_decay:g}",
        "devices": f"{1 if mesh is None else mesh.size} x {jax.devices()[0].device_kind}{sizes}",
    }
    if train.init_from:
        lines["begins with"] = f"the parameters of {train.init_from}"
    return [*map(entry, lines, lines.values()), *_wasted(config, mesh)]


def _wasted(config: Config, mesh: Mesh | None) -> list[str]:
    """Returns warnings if the mesh leaves devices out, or if all devices of `tensor` do the same work."""
    model, count, lines = config.model, jax.device_count(), []
    used, tensor = (1, 1) if mesh is None else (mesh.size, mesh.shape["tensor"])
    if used < count:
        lines.append(f"  uses {used} of {count} devices; --config.mesh.data=-1 takes all")
    sizes = {"key-value heads": model.kv_heads, "MLP width": model.d_mlp, "vocabulary": model.vocab_size}
    if whole := [f"{name} {size:,}" for name, size in sizes.items() if size % tensor]:
        lines.append(f"  mesh.tensor={tensor} does not divide, and leaves whole: {', '.join(whole)}")
    return lines


def describe_data(provenance: dict[str, Any]) -> str:
    """Returns the line about the data of a run, `Inputs.provenance`; every checkpoint records exactly what it was."""
    parts = [provenance["source"]]
    if "file_count" in provenance:
        parts.append(f"{provenance['file_count']:,} files, tokenizer {provenance['tokenizer']}")
        parts += [f"{provenance[split]['n_tokens']:,} {split} tokens" for split in ("train", "validation")]
    return entry("data", ", ".join(parts))


def dry_run(config: Config) -> Iterator[str]:
    """Yields lines that say what a run will need on its mesh: nothing is allocated and no data is read.

    The last ones come once its step is compiled, which may take a minute.
    """
    yield from opening(config)
    program, train, length = build(config), config.train, config.data.sequence_length
    state, tokens = shapes_of(program), train.steps * train.batch_size * length
    flops = model_flops_per_token(config.model, length)
    yield entry("tokens", f"{tokens:,}")
    yield entry("FLOPs", f"{tokens * flops:.3g}, {flops:,} a token")
    rows = None if program.mesh is None else NamedSharding(program.mesh, ROWS)
    batch = jax.ShapeDtypeStruct((train.batch_size, config.data.row_length), jnp.int32, sharding=rows)
    compiled = program.step.lower(state, batch).compile()  # pyright: ignore[reportFunctionMemberAccess]
    parts = {
        "parameters": _bytes_on_one_device(state.params),
        "optimizer state": _bytes_on_one_device(state.opt_state),
        "gradients, activations, logits": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    }
    yield f"memory of each device, as compiled for {jax.default_backend()}:"
    for name, size in parts.items():
        yield f"  {name}: {byte_count(size)}"
    yield f"  together: {byte_count(sum(size or 0 for size in parts.values()))}"
