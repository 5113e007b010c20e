"""Evaluation of parameters: on the fixed evaluation set, and on a few of its rows during training."""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from orthojax import analysis, quant
from orthojax.config import Config
from orthojax.data import BigramBackcopy
from orthojax.errors import UserError
from orthojax.files import finite
from orthojax.model import Interventions, LoadedModel, Transformer, linear, mesh_of
from orthojax.ops.cross_entropy import perplexity
from orthojax.train.data import Inputs
from orthojax.train.mesh import constrain, in_mesh, place_rows
from orthojax.train.optimizer import imported, shared_basis
from orthojax.train.step import loss_sum_nats, split_tokens

Metrics = dict[str, float]
_Observe = Callable[..., analysis.Statistics]


def _place(mesh: Mesh | None, *arrays: np.ndarray) -> tuple[Any, ...]:
    return tuple(place_rows(mesh, len(rows), lambda start, stop, rows=rows: rows[start:stop]) for rows in arrays)


def _batches(config: Config, inputs: Inputs) -> Iterator[np.ndarray]:
    size = config.eval.batch_size
    return (inputs.evaluation[i : i + size] for i in range(0, len(inputs.evaluation), size))


@functools.partial(jax.jit, static_argnums=0)
def _loss(
    model: Transformer, params: Any, tokens: jax.Array, interventions: Interventions | None
) -> tuple[jax.Array, jax.Array]:
    # Replicated, so that every process can read it.
    return constrain(loss_sum_nats(model, params, tokens, interventions=interventions), PartitionSpec())


def validation_loss_nats(
    config: Config,
    params: Any,
    inputs: Inputs,
    after_batch: Callable[[], None] = lambda: None,
    *,
    model: Transformer | None = None,
    interventions: Interventions | None = None,
) -> float:
    """Computes the mean loss over all counted target positions of the evaluation set, in nats.

    `after_batch` may raise; `model` may have other linear layers than the config's; one compiled program serves all
    values of `interventions` with the same shapes.
    """
    model = Transformer(config.model) if model is None else model
    mesh = mesh_of(params)
    sums: list[Any] = []
    with in_mesh(mesh):
        for rows in _batches(config, inputs):
            sums.append(_loss(model, params, *_place(mesh, rows), interventions))
            if len(sums) > 1:  # one late, so that the devices do not wait for the host
                sums[-2] = jax.device_get(sums[-2])
            after_batch()
    totals, counts = zip(*jax.device_get(sums), strict=True)
    return sum(map(float, totals)) / sum(map(float, counts))


def settings_that_do_not_fit(loaded: LoadedModel, settings: Mapping[str, quant.QuantizationSetting]) -> dict[str, str]:
    """Returns name -> reason for settings whose groups do not divide the input features of a kernel."""
    found = {}
    for name, setting in settings.items():
        if setting.group_size is None:
            continue
        model = quant.rounded_model(loaded.config.model, setting)
        try:
            jax.eval_shape(model.apply, {"params": loaded.params}, jnp.zeros((1, 2), jnp.int32))
        except UserError as error:
            found[name] = str(error).partition("\n")[0]
    return found


def evaluate(
    loaded: LoadedModel,
    inputs: Inputs,
    *,
    settings: Mapping[str, quant.QuantizationSetting] | None = None,
    quantize_head: bool = False,
    post_attention: bool = False,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Metrics:
    """Measures all metrics of a trained model; `evaluation_stages` gives the number of parts.

    Args:
      loaded: The model; its parameters may be on a mesh.
      inputs: Its data.
      settings: Quantisations by name; `quant.SETTINGS` if not given, none for a model whose kernels are integers.
      quantize_head: Also evaluate every setting with the output head quantised, whether tied to the embeddings or not.
      post_attention: Also measure the residual stream after attention, before the MLP.
      on_progress: Called with the name of each part once it is done.

    Returns:
      For text `perplexity`, `loss_nats`, `bits_per_byte`, the outlier and attention statistics of
      `analysis.observe_language_model` (also of `rotated_` hidden states if all parameters share one basis, and of
      `post_attention_` ones if asked for), `perplexity_<setting>` for each of `settings`, and
      `perplexity_<setting>_with_head`; for Bigram-Backcopy its risks and the statistics of `analysis.observe_backcopy`.
      Values by layer end in `/layer_i`.

    Raises:
      UserError: For a setting that does not fit the model, before anything is computed.
    """
    return _evaluate(loaded, inputs, settings, quantize_head, on_progress, post_attention=post_attention)[0]


def evaluate_by_head(
    loaded: LoadedModel,
    inputs: Inputs,
    *,
    interventions: Interventions | None = None,
    settings: Mapping[str, quant.QuantizationSetting] | None = None,
    quantize_head: bool = False,
    on_progress: Callable[[str], object] = lambda what: None,
) -> tuple[Metrics, dict[str, np.ndarray]]:
    """Measures like `evaluate`, and also every head, with or without interventions (quantised models without).

    Returns:
      The metrics, for text also `null_mass`, `attention_entropy_nats` and `sink_logit_gap`; and by name the arrays
      [L, N] of what is measured by head, for text also `max_abs_by_channel` [L, D].
    """
    return _evaluate(loaded, inputs, settings, quantize_head, on_progress, interventions, by_head=True)


def _evaluate(
    loaded: LoadedModel,
    inputs: Inputs,
    settings: Mapping[str, quant.QuantizationSetting] | None,
    quantize_head: bool,
    on_progress: Callable[[str], object],
    interventions: Interventions | None = None,
    **text_options: bool,
) -> tuple[Metrics, dict[str, np.ndarray]]:
    config, params = loaded.config, loaded.params
    if settings is None:
        settings = quant.SETTINGS if loaded.model.linear is linear else {}
    _require_fitting(loaded, settings)  # before hours of work
    loss = validation_loss_nats(config, params, inputs, model=loaded.model, interventions=interventions)
    if inputs.task is not None:
        mesh, (observe, risks_of) = mesh_of(params), observing(inputs.task)
        batches = (2 * _place(mesh, split_tokens(rows, config.model)[0]) for rows in _batches(config, inputs))
        statistics, risks = analysis.measure(loaded, batches, observe, interventions, output=risks_of)
        on_progress("statistics")
        metrics = {"loss_nats": loss} | analysis.finalize(statistics, by_head=True) | analysis.finalize(risks)
        return metrics, analysis.finalize_arrays(statistics)
    metrics: Metrics = {"perplexity": perplexity(loss), "loss_nats": loss}
    if inputs.bits_per_nat_of_loss is not None:
        metrics["bits_per_byte"] = loss * inputs.bits_per_nat_of_loss
    mesh, basis = mesh_of(params), shared_basis(config.seeded_optim, config.model.d_model)
    seen = (split_tokens(tokens, config.model)[0] for tokens in _batches(config, inputs))
    if ids := inputs.special_ids:
        batches: Any = ((*_place(mesh, tokens), basis, *_place(mesh, np.isin(tokens, ids))) for tokens in seen)
    else:
        batches = ((*_place(mesh, tokens), basis) for tokens in seen)
    statistics = analysis.measure(loaded, batches, _observing_text(**text_options), interventions)
    metrics |= analysis.finalize(statistics)
    on_progress("statistics")
    metrics |= rounded_perplexities(loaded, inputs, settings, quantize_head=quantize_head, on_progress=on_progress)
    return metrics, analysis.finalize_arrays(statistics)


def _require_fitting(loaded: LoadedModel, settings: Mapping[str, quant.QuantizationSetting]) -> None:
    for name, reason in settings_that_do_not_fit(loaded, settings).items():
        raise UserError(f"quantisation setting {name}: {reason}", allowed="the settings that fit this model")


def rounded_perplexities(
    loaded: LoadedModel,
    inputs: Inputs,
    settings: Mapping[str, quant.QuantizationSetting],
    *,
    quantize_head: bool = False,
    on_progress: Callable[[str], object] = lambda what: None,
) -> Metrics:
    """Measures the perplexity at each of `settings`; arguments and names are as for `evaluate`.

    Raises:
      UserError: For a setting that does not fit the model, before anything is computed.
    """
    _require_fitting(loaded, settings)
    metrics, model = {}, loaded.config.model
    for name, setting in settings.items():
        for suffix, head in {"": False, "_with_head": True}.items() if quantize_head else [("", False)]:
            include = "" if head else quant.ALL_BUT_HEAD
            quantized = quant.rounded_model(model, setting, include, linear_head=head)
            rounded = validation_loss_nats(loaded.config, loaded.params, inputs, model=quantized)
            metrics[f"perplexity_{name}{suffix}"] = perplexity(rounded)
            on_progress(name + suffix)
    return metrics


def evaluation_stages(
    config: Config,
    settings: Mapping[str, quant.QuantizationSetting] | None = None,
    *,
    quantize_head: bool = False,
) -> int:
    """Returns the number of times that `evaluate` calls `on_progress`."""
    if config.data.kind == "bigram_backcopy":
        return 1
    return 1 + (1 + quantize_head) * len(quant.SETTINGS if settings is None else settings)


@functools.cache
def _observing_text(**options: bool) -> _Observe:
    """Always returns the same function for these options, so that its programs are found again."""
    return lambda taps, basis, special=None: analysis.observe_language_model(
        taps, basis=basis, special=special, **options
    )


@functools.lru_cache(maxsize=8)
def observing(task: BigramBackcopy) -> tuple[_Observe, _Observe]:
    """Returns the observe functions of the layers and of the output, both given the tokens."""

    def observe(taps: analysis.Taps, tokens: jax.Array) -> analysis.Statistics:
        trigger, ids = task.is_trigger(tokens), task.vocab_size
        return analysis.observe_backcopy(trigger, task.bos_count, tokens=tokens, vocab_size=ids)(taps)

    def risks(logits: jax.Array, tokens: jax.Array) -> analysis.Statistics:
        # Ids that the model has but the task does not are impossible.
        more = logits.shape[-1] - task.vocab_size
        oracle = jnp.pad(task.oracle(tokens), ((0, 0), (0, 0), (0, more)))
        return analysis.observe_backcopy_risks(jax.nn.log_softmax(logits), oracle, task.is_trigger(tokens))

    return observe, risks


# Of what `analysis.observe_language_model` defines, the probe computes only these.
PROBED = ("kurtosis_first", "kurtosis_rest", "max_abs_first", "max_abs_rest")
PROBED += ("first_attention_fraction", "first_attention_mass")
Probed = tuple[analysis.Statistics, ...]  # of the layers and, if the data are a task, of the output


def _observe_probed(taps: analysis.Taps) -> analysis.Statistics:
    every = analysis.observe_language_model(taps)
    total, count = ({name: part[name] for name in PROBED} for part in (every.total, every.count))
    return every._replace(total=total, count=count, maximum={})


def make_probe(config: Config, inputs: Inputs, mesh: Mesh | None, folder: Path) -> Callable[[int, Any], Probed | None]:
    """Makes the measurement at the steps that `train.probe_every_steps` and `train.probe_steps` name.

    The measurement reads rows spread evenly over the evaluation set; the folder is for the function `train.probe`.

    Returns:
      (step, parameters after it; 0 is the start) -> the statistics, which stay on the device so that it does not wait
      for the host; None between probes.

    """
    train, model = config.train, Transformer(config.model)
    n, wanted = len(inputs.evaluation), min(len(inputs.evaluation), train.probe_sequences)
    rows = inputs.evaluation[[i * n // wanted for i in range(wanted)]]
    batch, observe, output = _place(mesh, split_tokens(rows, config.model)[0]), _observe_probed, None
    if inputs.task is not None:
        batch, (observe, output) = 2 * batch, observing(inputs.task)
    more = (
        imported("train.probe", train.probe, "config", "rows", "folder")(config, rows, folder) if train.probe else None
    )

    def probe(step: int, params: Any) -> Probed | None:
        if not train.probes_at(step):
            return None
        if more is not None:
            more(step, params)
        found = analysis.measure(LoadedModel(model, params, config, None, Path()), [batch], observe, output=output)
        return (found,) if output is None else found

    return probe


def probe_metrics(probed: Probed) -> dict[str, float]:
    """Returns finite values by the names that `evaluate` gives them, over all layers and by layer."""
    metrics = {name: value for part in probed for name, value in analysis.finalize(part).items()}
    metrics["probe_sequences"] = metrics.pop("sequences")
    return finite(metrics)
