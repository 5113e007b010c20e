"""Evaluation of parameters: on the fixed evaluation set, and on a few of its rows during training."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from orthojax import analysis, quant
from orthojax.config import Config
from orthojax.data import BigramBackcopy
from orthojax.errors import NonFiniteError, UserError
from orthojax.files import finite
from orthojax.model import Interventions, LoadedModel, Transformer, linear, mesh_of
from orthojax.model.generation import stream_loss_nats
from orthojax.ops.cross_entropy import cross_entropy_nats, perplexity
from orthojax.train.data import Inputs
from orthojax.train.low_precision import gradient_to_noise
from orthojax.train.mesh import constrain, in_mesh, place
from orthojax.train.optimizer import imported, shared_basis
from orthojax.train.step import loss_sum_nats, split_tokens

Metrics = dict[str, float]
Settings = Mapping[str, quant.QuantizationSetting]
Say = Callable[[str], object]  # called with the name of each part once it is done
_Observe = Callable[..., analysis.Statistics]


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
            (tokens,) = place(mesh, rows)
            sums.append(_loss(model, params, tokens, interventions))
            if len(sums) > 1:  # one late, so that the devices do not wait for the host
                sums[-2] = jax.device_get(sums[-2])
            after_batch()
    return _mean(sums)


def _mean(sums: Any) -> float:
    totals, counts = zip(*jax.device_get(sums), strict=True)
    return sum(map(float, totals)) / sum(map(float, counts))


def settings_that_do_not_fit(loaded: LoadedModel, settings: Settings) -> dict[str, str]:
    """Returns name -> reason for settings whose groups do not divide the input features of a kernel."""
    reasons = {}
    for name, setting in settings.items():
        if setting.group_size is None:
            continue
        model = quant.rounded_model(loaded.config.model, setting)
        try:
            jax.eval_shape(model.apply, {"params": loaded.params}, jnp.zeros((1, 2), jnp.int32))
        except UserError as error:
            reasons[name] = str(error).partition("\n")[0]
    return reasons


def evaluate(
    loaded: LoadedModel,
    inputs: Inputs,
    *,
    settings: Settings | None = None,
    quantize_head: bool = False,
    post_attention: bool = False,
    on_progress: Say = lambda what: None,
) -> Metrics:
    """Measures all metrics of a trained model.

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
    if settings is None:
        settings = quant.SETTINGS if loaded.model.linear is linear else {}
    _require_fitting(loaded, settings)  # before hours of work
    metrics = _measure(loaded, inputs, None, post_attention=post_attention)[0]
    on_progress("statistics")
    if inputs.task is None:
        metrics |= rounded_perplexities(loaded, inputs, settings, quantize_head=quantize_head, on_progress=on_progress)
    return metrics


def evaluate_by_head(
    loaded: LoadedModel, inputs: Inputs, *, interventions: Interventions | None = None
) -> tuple[Metrics, dict[str, np.ndarray], analysis.Extremes | None]:
    """Measures every head and the extremes of a model in float as well, with or without interventions.

    Returns the metrics of `evaluate`, for text also `null_mass`, `attention_entropy_nats`, `sink_logit_gap` and those
    of `analysis.observe_predictors`; by name the arrays [L, N] of what is measured by head, for text also
    `max_abs_by_channel` [L, D]; and for text the extremes of all layers and rows.
    """
    return _measure(loaded, inputs, interventions, by_head=True)


def _measure(
    loaded: LoadedModel, inputs: Inputs, interventions: Interventions | None, **text_options: bool
) -> tuple[Metrics, dict[str, np.ndarray], Any]:
    if inputs.task is None:
        measured = _measure_text(loaded, inputs, interventions, **text_options)
    else:
        measured = *_measure_task(loaded, inputs, inputs.task, interventions), None
    if interventions is None:
        _require_finite(measured[0], loaded)
    return measured


def _require_finite(metrics: Metrics, loaded: LoadedModel) -> None:
    """Refuses a model whose hidden states or loss are not finite: shares of them would look like those of a cure."""
    for name in ("kurtosis_first", "kurtosis_rest", "max_abs_first", "residual_norm_rest"):
        layers = (metrics.get(f"{name}/layer_{i}", 0.0) for i in range(loaded.config.model.num_layers))
        if (first := next((i for i, value in enumerate(layers) if not math.isfinite(value)), None)) is not None:
            problem = f"{loaded.source}: hidden states of layer {first} are not finite"
            raise NonFiniteError(problem, allowed="a model in which nothing overflows")
    if not math.isfinite(metrics["loss_nats"]):
        problem = f"{loaded.source}: the loss is {metrics['loss_nats']}"
        raise NonFiniteError(problem, allowed="a model whose logits are finite")


def _measure_task(
    loaded: LoadedModel, inputs: Inputs, task: BigramBackcopy, interventions: Interventions | None
) -> tuple[Metrics, dict[str, np.ndarray]]:
    config, params = loaded.config, loaded.params
    loss = validation_loss_nats(config, params, inputs, model=loaded.model, interventions=interventions)
    mesh, (observe, risks_of) = mesh_of(params), observing(task)
    batches = (2 * place(mesh, split_tokens(rows, config.model)[0]) for rows in _batches(config, inputs))
    statistics, risks = analysis.measure(loaded, batches, observe, interventions, output=risks_of)
    metrics = {"loss_nats": loss} | analysis.finalize(statistics, by_head=True) | analysis.finalize(risks)
    return metrics, analysis.finalize_arrays(statistics)


def _measure_text(
    loaded: LoadedModel, inputs: Inputs, interventions: Interventions | None, **options: bool
) -> tuple[Metrics, dict[str, np.ndarray], Any]:
    """Reads the text once for the loss and everything that is observed."""
    config, mesh = loaded.config, mesh_of(loaded.params)
    basis = shared_basis(config.seeded_optim, config.model.d_model)

    def batch(rows: np.ndarray) -> tuple[Any, ...]:
        ids = inputs.special_ids
        tokens, *special = place(mesh, rows, *([np.isin(rows, ids)] if ids else []))
        return tokens, basis, *special

    batches, observe = map(batch, _batches(config, inputs)), _observing_text(**options)
    observed, sums = analysis.measure(loaded, batches, observe, interventions, apply=_loss_of_rows, join=_join)
    loss = _mean(sums)
    metrics: Metrics = {"perplexity": perplexity(loss), "loss_nats": loss}
    if inputs.bits_per_nat_of_loss is not None:
        metrics["bits_per_byte"] = loss * inputs.bits_per_nat_of_loss
    statistics, *predictors, extremes = observed if len(observed) == 3 else (*observed, None)
    for part in (statistics, *predictors):
        metrics |= analysis.finalize(part)
    return metrics, analysis.finalize_arrays(statistics), extremes


def _loss_of_rows(model: Transformer, params: Any, rows: jax.Array, **options: Any) -> tuple[list[Any], Any]:
    total, count, observed = loss_sum_nats(model, params, rows, **options)
    return [(total, count)], observed


def _join(a: Any, b: Any) -> Any:
    """Joins what two batches gave: adds statistics, keeps the rows of extremes and the sums of the loss apart."""
    if isinstance(a, list):
        return a + b
    joins = (analysis.combine, analysis.combine, analysis.concatenate)
    return tuple(join(x, y) for join, x, y in zip(joins, a, b, strict=False))


def _require_fitting(loaded: LoadedModel, settings: Settings) -> None:
    for name, reason in settings_that_do_not_fit(loaded, settings).items():
        raise UserError(f"quantisation setting {name}: {reason}", allowed="the settings that fit this model")


def rounded_perplexities(
    loaded: LoadedModel,
    inputs: Inputs,
    settings: Settings,
    *,
    quantize_head: bool = False,
    on_progress: Say = lambda what: None,
) -> Metrics:
    """Measures the perplexity at each of `settings`; arguments and names are as for `evaluate`.

    Raises UserError for a setting that does not fit the model, before anything is computed.
    """
    _require_fitting(loaded, settings)
    heads = {"": False, "_with_head": True} if quantize_head else {"": False}
    model = functools.partial(quant.rounded_model, loaded.config.model)
    models = {name + suffix: model(setting, "" if head else quant.ALL_BUT_HEAD, linear_head=head)
              for name, setting in settings.items() for suffix, head in heads.items()}  # fmt: skip
    return _perplexities(loaded, inputs, models, on_progress)


def rotated_perplexities(
    loaded: LoadedModel, inputs: Inputs, settings: Settings, on_progress: Say = lambda what: None
) -> Metrics:
    """Measures `perplexity_<setting>_rotated` at each of `settings` after `quant.rotate_after_training`.

    Raises UserError for a model that cannot be rotated.
    """
    params, config, wrap = quant.rotate_after_training(loaded.params, loaded.config.model)
    models = {f"{name}_rotated": quant.rounded_model(config, setting) for name, setting in settings.items()}
    models = {name: model.clone(linear=wrap(model.linear)) for name, model in models.items()}
    return _perplexities(loaded._replace(params=params), inputs, models, on_progress)


def _perplexities(loaded: LoadedModel, inputs: Inputs, models: Mapping[str, Transformer], on_progress: Say) -> Metrics:
    metrics = {}
    for name, model in models.items():
        loss = validation_loss_nats(loaded.config, loaded.params, inputs, model=model)
        metrics[f"perplexity_{name}"] = perplexity(loss)
        on_progress(name)
    return metrics


def knock_out(loaded: LoadedModel, inputs: Inputs, rows: int) -> dict[str, np.ndarray]:
    """Computes the change of the loss in nats on the first rows if a part writes nothing to the residual stream.

    `knocked_out_head` is [L, N], `knocked_out_attention` and `knocked_out_mlp` are [L].
    """
    L, N = loaded.config.model.num_layers, loaded.config.model.num_heads
    few = inputs._replace(evaluation=inputs.evaluation[:rows])
    # All have the same shapes, so that one compiled program serves them.
    whole = {"head": np.ones((L, N), np.float32), "attention": np.ones(L, np.float32), "mlp": np.ones(L, np.float32)}

    def loss(scales: Mapping[str, np.ndarray]) -> float:
        scaled = Interventions(**{f"{part}_scale": jnp.asarray(scale) for part, scale in scales.items()})
        return validation_loss_nats(loaded.config, loaded.params, few, model=loaded.model, interventions=scaled)

    before, changes = loss(whole), {}
    for part, scale in whole.items():
        change = changes[f"knocked_out_{part}"] = np.zeros(scale.shape)
        for at in np.ndindex(scale.shape):
            without = scale.copy()
            without[at] = 0.0
            change[at] = loss(whole | {part: without}) - before
    return changes


def sliding_loss_nats(loaded: LoadedModel, tokens: np.ndarray, length: int, stride: int) -> float:
    """Computes the mean loss over all tokens of a text but the first, each with as much context as a window allows.

    Windows of `length` tokens begin every `stride` tokens; the first predicts all of its tokens but one, each later one
    those that the previous one did not. Published perplexities of long texts are computed this way; the guide of
    transformers gives later windows the weight of one token less. If `stride` equals `length`, the pieces of the text
    are independent, and their first tokens are not predicted. The model is causal, tokens are int32 [2 or more],
    `length` is at most the model's positions.
    """
    if not 1 <= stride <= length or length < 2 or len(tokens) < 2:
        problem = f"a text of {len(tokens)} tokens, stride={stride} and length={length}"
        raise UserError(problem, allowed="2 tokens or more, a length of 2 or more, a stride up to it")
    if loaded.config.model.relaxed_causal_tokens > 1:
        raise UserError("a sliding window over a model with relaxed_causal_tokens", allowed="a causal mask")
    starts = range(0, max(len(tokens) - length + stride, 1), stride)
    padded = np.concatenate([tokens, np.zeros(starts[-1] + length - len(tokens), np.int32)])
    size, total, count = loaded.config.eval.batch_size, 0.0, 0

    @jax.jit
    def losses(params: Any, rows: jax.Array) -> jax.Array:
        logits: Any = loaded.model.apply({"params": params}, rows)[0]
        return cross_entropy_nats(logits[:, :-1], rows[:, 1:])  # [rows, length - 1]

    for first in range(0, len(starts), size):
        few = list(starts[first : first + size])
        few += [few[-1]] * (size - len(few))  # for one shape
        nats = np.asarray(losses(loaded.params, np.stack([padded[at : at + length] for at in few])), np.float64)
        for at, row in dict(zip(few, nats, strict=True)).items():
            seen = max(length - stride, 1) if at else 1  # the previous window predicted the rest
            counted = row[seen - 1 : len(tokens) - at - 1]
            total, count = total + counted.sum(), count + len(counted)
    return total / count


def streamed_perplexities(
    loaded: LoadedModel, rows: np.ndarray, sinks: int = 4, grid: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Measures the second half of rows [B, T + 1], read token by token with a quarter of the row in view.

    Returns `window`, the tokens in view; `perplexity_window` with these alone, `perplexity_sinks` with the first
    `sinks` tokens in place of the oldest, and `perplexity_whole` with all; with a `grid` of (tokens in view, how many
    of them are the first) also `grid`, their perplexities on the same tokens. Raises UserError for rows that are too
    short.
    """
    T = rows.shape[1] - 1
    window = T // 4
    if window <= sinks:
        raise UserError(f"rows of {T} tokens are too short to stream", allowed=f"{8 * sinks} or more")
    tight = [(size, first) for size, first in grid if not first < size <= T]
    if tight:
        problem = ", ".join(f"{first} first tokens of {size} in view" for size, first in tight)
        raise UserError(problem, allowed=f"fewer than are in view, and up to {T} in view, as many as a row has")

    def streamed(size: int | None, first: int) -> float:
        losses = stream_loss_nats(loaded, rows, None if size is None else size - first, first)[:, 2 * window :]
        return perplexity(float(losses.mean()))

    metrics: dict[str, Any] = {"window": window}
    for name, size, first in (("window", window, 0), ("sinks", window, sinks), ("whole", None, 0)):
        metrics[f"perplexity_{name}"] = streamed(size, first)
    if grid:
        metrics["grid"] = [
            {"window": size, "sinks": first, "perplexity": streamed(size, first)} for size, first in grid
        ]
    return metrics


@functools.cache
def _observing_text(**options: bool) -> Callable[..., tuple[Any, ...]]:
    """Always returns the same function for these options, so that its programs are found again."""

    def observe(taps: analysis.Taps, basis: jax.Array | None, special: jax.Array | None = None) -> tuple[Any, ...]:
        special = None if special is None else special[:, : taps.residual.shape[1]]  # of a row, its inputs
        statistics = analysis.observe_language_model(taps, basis=basis, special=special, **options)
        if not options.get("by_head"):
            return (statistics,)
        return statistics, analysis.observe_predictors(taps), analysis.observe_extremes(taps)

    return observe


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
# Of the layers and, if the data are a task, of the output; then what is a metric already.
Probed = tuple[analysis.Statistics | dict[str, jax.Array], ...]


def _observe_probed(taps: analysis.Taps) -> analysis.Statistics:
    every = analysis.observe_language_model(taps)
    total, count = ({name: part[name] for name in PROBED} for part in (every.total, every.count))
    return every._replace(total=total, count=count, maximum={})


def make_probe(config: Config, inputs: Inputs, mesh: Mesh | None, folder: Path) -> Callable[[int, Any], Probed | None]:
    """Makes the measurement at the steps that `train.probe_every_steps` and `train.probe_steps` name.

    It reads rows spread evenly over the evaluation set; the folder is for the function `train.probe`. It maps (step,
    parameters after it; 0 is the start) to statistics, which stay on the device so that it does not wait for the host.
    """
    train, model = config.train, Transformer(config.model)
    shares = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    n, wanted = len(inputs.evaluation), -(-train.probe_sequences // shares) * shares
    wanted = wanted if wanted <= n else max(n // shares * shares, min(n, train.probe_sequences))
    rows = inputs.evaluation[[i * n // wanted for i in range(wanted)]]
    batch, observe, output = place(mesh, split_tokens(rows, config.model)[0]), _observe_probed, None
    if inputs.task is not None:
        batch, (observe, output) = 2 * batch, observing(inputs.task)
    more = noise = None
    if train.matmul_format:
        (tokens,) = place(mesh, rows)

        def loss(linear: Any, params: Any) -> jax.Array:
            total, count = loss_sum_nats(Transformer(config.model, linear=linear), params, tokens)
            return total / count

        noise = gradient_to_noise(loss, train)
    if train.probe:
        more = imported("train.probe", train.probe, "config", "rows", "folder")(config, rows, folder)

    def probe(step: int, params: Any) -> Probed | None:
        if not train.probes_at(step):
            return None
        if more is not None:
            more(step, params)
        statistics = analysis.measure(LoadedModel(model, params, config, None, Path()), [batch], observe, output=output)
        probed = (statistics,) if output is None else statistics
        return probed if noise is None else (*probed, {"gradient_to_noise": noise(params)})

    return probe


def probe_metrics(probed: Probed) -> dict[str, float]:
    """Returns finite values by the names that `evaluate` gives them, over all layers and by layer."""
    parts = [part if isinstance(part, dict) else analysis.finalize(part) for part in probed]
    metrics = {name: float(value) for part in parts for name, value in part.items()}
    metrics["probe_sequences"] = metrics.pop("sequences")
    return finite(metrics)
