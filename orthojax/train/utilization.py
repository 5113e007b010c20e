"""Model FLOPs utilization (MFU): which share of the devices' peak the model's own matrix products reach."""

import jax

from orthojax.config import ModelConfig
from orthojax.model import flops_per_token

# Dense bfloat16 FLOP/s of one JAX device, from the vendors' data sheets (NVIDIA prints them with sparsity, twice as
# large), by the exact `device_kind`: one that begins alike may be another chip, as H100 and H100 PCIe are.
_PEAK_FLOPS_PER_SECOND = {
    **dict.fromkeys(
        (
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
        ),
        312e12,
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


def model_flops_per_token(model: ModelConfig, sequence_length: int, *, causal: bool = True) -> int:
    """Floating-point operations that one training step needs for each token, forward and backward.

    6 for each parameter of a matrix product, and 12 T d_model in each layer that attends, or half of that where
    products with keys that the causal mask hides are not counted. For GPT-2, with V the padded vocabulary:
    6 (12 L d^2 + V d) + 6 L T d. Embedding look-ups, norms, recomputation and the optimizer are not counted.

    Args:
      model: Whose kernels and attending layers count.
      sequence_length: T.
      causal: Count half of the attention matrix, as Megatron-LM and MaxText do now; otherwise all of it, as PaLM
        does, which is `orthojax.model.flops_per_token`.

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
    return full - 6 * attending * sequence_length * model.d_model


def peak_flops_per_second(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device, or None for a device that is not in the table.

    Args:
      device_kind: As `jax.devices()[0].device_kind` says it.

    >>> peak_flops_per_second("NVIDIA H200"), peak_flops_per_second("cpu")
    (989000000000000.0, None)
    """
    return _PEAK_FLOPS_PER_SECOND.get(device_kind)


def device_kinds() -> list[str]:
    """The devices whose peak is known."""
    return list(_PEAK_FLOPS_PER_SECOND)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, device_kind: str | None = None, device_count: int | None = None
) -> float | None:
    """MFU = tokens/s * FLOPs per token / (peak FLOP/s * devices), a fraction.

    The peak is that of bfloat16, whatever the model computes in.

    Args:
      tokens_per_second: Of all devices together.
      flops_per_token: From `model_flops_per_token`.
      device_kind: Those of JAX where None.
      device_count: All that JAX sees, of all processes, where None.

    Returns:
      The fraction, or None where the peak is unknown.

    >>> round(model_flops_utilization(500_000, 798_031_872, "NVIDIA H200", 1), 3)
    0.403
    """
    peak = peak_flops_per_second(jax.devices()[0].device_kind if device_kind is None else device_kind)
    if peak is None:
        return None
    return tokens_per_second * flops_per_token / (peak * (jax.device_count() if device_count is None else device_count))
