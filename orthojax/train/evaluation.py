"""Evaluation of parameters on the fixed evaluation set: loss, outliers, attention, quantisation."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from orthojax import analysis, quant
from orthojax.config import Config
from orthojax.model import LinearFunction, Transformer, linear
from orthojax.train.inputs import Inputs
from orthojax.train.mesh import constrain, in_mesh, mesh_of, place_rows
from orthojax.train.optimizer import shared_basis
from orthojax.train.step import loss_sum_nats, split_tokens

Metrics = dict[str, float]


# Parameters are where training left them, on a mesh or not. What leaves a program is whole on every device, so that
# every process can read it.


@partial(jax.jit, static_argnums=(0, 3))
def _loss(model: Transformer, params: Any, tokens: jax.Array, positions: int | None) -> tuple[jax.Array, jax.Array]:
    return constrain(loss_sum_nats(model, params, tokens, positions), PartitionSpec())


@partial(jax.jit, static_argnums=0)
def _language_model_statistics(
    model: Transformer, params: Any, tokens: jax.Array, basis: jax.Array | None
) -> analysis.Statistics:
    inputs, _ = split_tokens(tokens)
    observe = partial(analysis.observe_language_model, basis=basis)
    observed: Any = model.apply({"params": params}, inputs, observe=observe)
    return constrain(observed[1], PartitionSpec())


@partial(jax.jit, static_argnums=0)
def _backcopy_statistics(model: Transformer, params: Any, tokens: jax.Array, oracle: jax.Array, is_trigger: jax.Array):
    inputs, _ = split_tokens(tokens)
    logits, statistics = model.apply({"params": params}, inputs, observe=analysis.observe_backcopy(is_trigger))
    log_probs = jax.nn.log_softmax(logits)
    risks = analysis.observe_backcopy_risks(log_probs, oracle, is_trigger)
    return constrain((statistics, risks), PartitionSpec())


def _batches(config: Config, inputs: Inputs) -> Iterator[np.ndarray]:
    size = config.eval.batch_size
    return (inputs.evaluation[i : i + size] for i in range(0, len(inputs.evaluation), size))


def _on_mesh(mesh: Mesh | None, rows: np.ndarray) -> Any:
    return place_rows(mesh, len(rows), lambda start, stop: rows[start:stop])


def mean_loss_nats(
    model: Transformer, params: Any, config: Config, inputs: Inputs, after_batch: Callable[[], None] = lambda: None
) -> float:
    """Mean next-token loss over all target positions of the evaluation set, in nats; `after_batch` may raise."""
    mesh, positions = mesh_of(params), config.train.loss_chunk_positions
    sums: list[Any] = []
    with in_mesh(mesh):
        for rows in _batches(config, inputs):
            sums.append(_loss(model, params, _on_mesh(mesh, rows), positions))
            if len(sums) > 1:  # one late, so that the devices do not wait for the host
                sums[-2] = jax.device_get(sums[-2])
            after_batch()
    totals, counts = zip(*jax.device_get(sums), strict=True)
    return sum(map(float, totals)) / sum(map(float, counts))


def validation_loss_nats(
    config: Config, params: Any, inputs: Inputs, after_batch: Callable[[], None] = lambda: None
) -> float:
    """`mean_loss_nats` of the model that the config describes."""
    return mean_loss_nats(Transformer(config.model), params, config, inputs, after_batch)


def _perplexity(loss_nats: float) -> float:
    return math.exp(min(loss_nats, 700.0))  # quantisation can ruin a model beyond the range of a float


def evaluate(
    config: Config,
    params: Any,
    inputs: Inputs,
    *,
    linear: LinearFunction = linear,
    settings: Mapping[str, quant.QuantizationSetting] | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Metrics:
    """All metrics of a trained model; `evaluation_stages` says how many parts that has.

    Args:
      config: What the parameters were trained with.
      params: The parameters.
      inputs: Their data.
      linear: What a linear layer computes, such as `quant.integer_linear(setting)` where the kernels are integers.
      settings: By which to quantise float parameters, by name; `quant.SETTINGS` where not given.
      on_progress: Called with the name of each part when it is done.

    Returns:
      For text `perplexity`, `loss_nats`, `bits_per_byte`, the outlier and attention statistics of
      `analysis.observe_language_model` (also of `rotated_` hidden states where all parameters share one basis), and
      `perplexity_<setting>` for every one of `settings`; for Bigram-Backcopy its risks and the statistics of
      `analysis.observe_backcopy`. Values by layer end in `/layer_i`.
    """
    model = Transformer(config.model, linear=linear)
    if inputs.task is not None:
        metrics = _evaluate_backcopy(model, params, config, inputs)
        on_progress("statistics")
        return metrics
    loss = mean_loss_nats(model, params, config, inputs)
    metrics: Metrics = {"perplexity": _perplexity(loss), "loss_nats": loss}
    if inputs.bits_per_nat_of_loss is not None:
        metrics["bits_per_byte"] = loss * inputs.bits_per_nat_of_loss
    statistics, basis, mesh = None, shared_basis(config.optim, config.model.d_model), mesh_of(params)
    with in_mesh(mesh):
        for tokens in _batches(config, inputs):
            new = _language_model_statistics(model, params, _on_mesh(mesh, tokens), basis)
            statistics = new if statistics is None else analysis.combine(statistics, new)
    assert statistics is not None
    metrics |= analysis.finalize(statistics)
    on_progress("statistics")
    for name, setting in (quant.SETTINGS if settings is None else settings).items():
        quantized = Transformer(config.model, linear=quant.quantized_linear(setting))
        metrics[f"perplexity_{name}"] = _perplexity(mean_loss_nats(quantized, params, config, inputs))
        on_progress(name)
    return metrics


def evaluation_stages(config: Config, settings: Mapping[str, quant.QuantizationSetting] | None = None) -> int:
    """How often `evaluate` calls `on_progress`."""
    return 1 if config.data.kind == "bigram_backcopy" else 1 + len(quant.SETTINGS if settings is None else settings)


def _evaluate_backcopy(model: Transformer, params: Any, config: Config, inputs: Inputs) -> Metrics:
    assert inputs.task is not None
    layers, risks, mesh = None, None, mesh_of(params)
    for tokens in _batches(config, inputs):
        oracle = inputs.task.oracle(tokens[:, :-1]).astype(np.float32)
        # Ids that the model has but the task has not are impossible.
        oracle = np.pad(oracle, ((0, 0), (0, 0), (0, config.model.vocab_size - oracle.shape[-1])))
        rows = [_on_mesh(mesh, array) for array in (tokens, oracle, inputs.task.is_trigger(tokens[:, :-1]))]
        with in_mesh(mesh):
            new = _backcopy_statistics(model, params, *rows)
        layers = new[0] if layers is None else analysis.combine(layers, new[0])
        risks = new[1] if risks is None else analysis.combine(risks, new[1])
    assert layers is not None
    assert risks is not None
    loss = mean_loss_nats(model, params, config, inputs)
    return {"loss_nats": loss} | analysis.finalize(layers) | analysis.finalize(risks)
