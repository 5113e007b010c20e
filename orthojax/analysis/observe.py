"""From the intermediates of one block to the metrics of a model.

`measure` is the one loop that applies a model with an observe function, which reduces one layer's taps to `Statistics`
inside the layer scan, so that only scalars leave a layer. Statistics are sums and counts: `combine` adds those of two
batches, `finalize` divides. However sequences are split into batches, the result is that of one batch of all sequences.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from orthojax.analysis import activations, attention, backcopy
from orthojax.analysis.catalogue import HIDDEN_STATES, define
from orthojax.model import Interventions, LoadedModel, Taps, mesh_of

if TYPE_CHECKING:
    from orthojax.model import Transformer

_MAX_LOGIT = "max_attention_logit"  # the largest over heads and layers
_MAXIMUM_OVER_LAYERS = ("sink_attention", "sink_attention_rest", _MAX_LOGIT)  # each layer's value may be a mean
_OSP_BEFORE = "osp_kurtosis_before"  # of what a layer reads, which for layer 0 are the embeddings
_BY_CHANNEL = "max_abs_by_channel"  # no mean over heads
_NO_METRICS = (_BY_CHANNEL, _OSP_BEFORE)


class Statistics(NamedTuple):
    """Sums and counts over batches; every leaf has the same leading axis [num_layers], or none if there are no layers.

    Attributes:
      sequences: Number of sequences, int32.
      total: Metric -> sum of the terms that it is the mean of; may have one more axis (heads), floating.
      count: Metric -> number of terms in that sum, int32; the same names as `total`.
      maximum: Metric -> largest value so far, floating.
      attends: True for a layer with attention, and if there are no layers.
    """

    sequences: jax.Array
    total: dict[str, jax.Array]
    count: dict[str, jax.Array]
    maximum: dict[str, jax.Array]
    attends: ArrayLike = True


def observe_language_model(
    taps: Taps,
    *,
    post_attention: bool = False,
    basis: ArrayLike | None = None,
    by_head: bool = False,
    special: ArrayLike | None = None,
) -> Statistics:
    """Reduces one layer of a language model to its outlier and attention statistics.

    Args:
      taps: What the block shows.
      post_attention: Also take the statistics of the residual stream after attention, named `post_attention_...`.
      basis: An orthogonal matrix Q [D, D]; also take the statistics of Q x for every hidden state x, `rotated_...`.
      by_head: Keep the axis of heads for `finalize_arrays`, and also take null mass, entropy and `sink_logit_gap` (of
        all queries from the third on), and `max_abs_by_channel` [D], the largest |x| of each channel.
      special: Positions of separators and other special tokens, bool [B, T]: statistics of hidden states exclude them
        from `_rest` and report them as `_special`.

    Returns:
      Means over sequences as sums, and maxima over sequences.

    Raises:
      ValueError: For a basis of another shape.
    """
    D = taps.residual.shape[-1]
    if basis is not None and jnp.shape(basis) != (D, D):
        raise ValueError(f"the basis has shape {jnp.shape(basis)}; allowed: {(D, D)}")
    hidden_states = {"": taps.residual} | ({"post_attention_": taps.post_attention} if post_attention else {})
    if basis is not None:
        hidden_states["rotated_"] = taps.residual @ jnp.asarray(basis, taps.residual.dtype).T
    means, maximum, sums = {}, {}, {}
    rest = {} if special is None else {"where": ~jnp.asarray(special)}
    for prefix, hidden in hidden_states.items():
        for name in HIDDEN_STATES:
            kind = maximum if name.endswith("_maximum") else means
            kind[prefix + name] = getattr(activations, name)(hidden, **(rest if "_rest" in name else {}))
        if special is not None:
            massive = activations.special_sums(hidden, special)
            sums |= {prefix + name: pair for name, pair in massive.items()}
    means["first_attention_fraction"] = attention.first_attention_fraction(taps.attention_weights)
    # By head, because the sink rate is a count of heads over the whole evaluation set.
    means["first_attention_mass"] = attention.first_attention_mass_by_head(taps.attention_weights)
    means["value_norm_first"] = activations.value_norm_first(taps.value_norms)
    means["value_norm_rest"] = activations.value_norm_rest(taps.value_norms)
    if by_head:
        means |= _heads(taps)
        sums["sink_logit_gap"] = backcopy.sink_logit_gap_sum(
            taps.attention_logits, jnp.zeros(taps.residual.shape[:2], bool), visible=taps.visible
        )
        maximum[_MAX_LOGIT] = attention.max_attention_logit_by_head(taps.attention_logits, taps.visible)
        maximum[_BY_CHANNEL] = jnp.max(jnp.abs(taps.residual.astype(jnp.float32)), axis=(0, 1))
    return _statistics(taps.residual.shape[0], means, sums, maximum, jnp.any(taps.visible))


def _heads(taps: Taps) -> dict[str, jax.Array]:
    weights = taps.attention_weights
    fraction = jax.vmap(lambda head: attention.first_attention_fraction(head[:, None]), in_axes=1)
    return {
        "first_attention_fraction": fraction(weights),
        "null_mass": attention.null_mass_by_head(weights),
        "attention_entropy_nats": attention.attention_entropy_by_head(weights),
        "value_norm_first": activations.value_norm_first(taps.value_norms, by_head=True),
        "value_norm_rest": activations.value_norm_rest(taps.value_norms, by_head=True),
    }


def observe_predictors(taps: Taps) -> Statistics:
    """Reduces one layer to published predictors of the damage of rounding, under their published names.

    They are `osp_kurtosis`, `max_over_median` of what the layer reads, `gu_sink_rate` and `gu_sink_rate_any`. The mean
    over layers of `osp_kurtosis` includes the embeddings, which the first layer reads, as one more layer.
    """
    means = {
        "osp_kurtosis": activations.osp_kurtosis(taps.residual),
        _OSP_BEFORE: activations.osp_kurtosis(taps.residual_before),
        "max_over_median": activations.max_over_median(taps.residual_before),
        "gu_sink_rate": attention.gu_sink_rate(taps.attention_weights, visible=taps.visible),
        "gu_sink_rate_any": attention.gu_sink_rate(taps.attention_weights, any_key=True, visible=taps.visible),
    }
    return _statistics(taps.residual.shape[0], means, {}, {}, jnp.any(taps.visible))


def observe_backcopy(
    is_trigger: ArrayLike, bos_count: int = 1, *, tokens: ArrayLike | None = None, vocab_size: int = 0
) -> Callable[[Taps], Statistics]:
    """Returns an observe function for Bigram-Backcopy.

    It gives sink attention and logits at non-triggers, null mass and entropy of attention, value and residual norms,
    and the activity of heads; all by head except for the residual stream.

    Args:
      is_trigger: The mask of tokens that are triggers, bool [B, T], of the batch that the model will see.
      bos_count: BOS tokens at the start; their attention is summed, and norms of <s> are means over them.
      tokens: int [B, T] of that batch; if given, logits are also compared by token, see `logit_summary`.
      vocab_size: The number of ids of these tokens.
    """
    is_trigger, first = jnp.asarray(is_trigger), max(1, bos_count)

    def observe(taps: Taps) -> Statistics:
        logits, weights = taps.attention_logits, taps.attention_weights
        activity = attention.head_activity(taps.head_norms, taps.residual_before)[..., bos_count:]
        domain = is_trigger[:, bos_count:].astype(int)  # BOS is in none
        means = {
            "null_mass": attention.null_mass_by_head(weights),
            "attention_entropy_nats": attention.attention_entropy_by_head(weights),
            "value_norm_first": activations.value_norm_first(taps.value_norms, first, by_head=True),
            "value_norm_rest": activations.value_norm_rest(taps.value_norms, first, by_head=True),
            "residual_norm_first": activations.residual_norm_first(taps.residual, first),
            "residual_norm_rest": activations.residual_norm_rest(taps.residual, first),
        }
        sums = {
            "sink_attention": backcopy.sink_attention_sum(weights, is_trigger, bos_count),
            "sink_attention_rest": backcopy.sink_attention_sum(weights, is_trigger, bos_count, own_rows=False),
            "sink_logit_gap": backcopy.sink_logit_gap_sum(logits, is_trigger, bos_count, taps.visible),
            "activity": (attention.activity_histogram(activity, domain, 2), jnp.ones((), jnp.int32)),
        }
        if tokens is not None:
            sums |= backcopy.logit_sums(logits, tokens, is_trigger, vocab_size, bos_count, taps.visible)
        return _statistics(taps.residual.shape[0], means, sums, {}, jnp.any(taps.visible))

    return observe


def observe_backcopy_risks(log_probs: ArrayLike, oracle_probs: ArrayLike, is_trigger: ArrayLike) -> Statistics:
    """Reduces predictions to the risks of Bigram-Backcopy, as statistics without layers; see `backcopy_risk_nats`."""
    sums = backcopy.risk_sums(log_probs, oracle_probs, is_trigger)
    return _statistics(jnp.shape(is_trigger)[0], {}, sums, {}, jnp.bool_(True))


def _statistics(
    batch: int,
    means: dict[str, jax.Array],
    sums: dict[str, backcopy.SumAndCount],
    maximum: dict[str, jax.Array],
    attends: jax.Array,
) -> Statistics:
    sequences = jnp.asarray(batch, jnp.int32)
    sums = {name: (mean * batch, sequences) for name, mean in means.items()} | sums
    total, count = ({name: pair[i] for name, pair in sums.items()} for i in (0, 1))
    return Statistics(sequences, total, count, maximum, attends)


def combine(a: Statistics, b: Statistics) -> Statistics:
    """Adds the statistics of two batches, inside or outside jit."""
    sequences, total, count = jax.tree.map(jnp.add, a[:3], b[:3])
    return Statistics(sequences, total, count, jax.tree.map(jnp.maximum, a.maximum, b.maximum), a.attends)


def finalize(statistics: Statistics, *, by_head: bool = False) -> dict[str, float]:
    """Returns the metrics by name, computed on the host in float64.

    A key without `/layer_i` is the mean over layers; metrics of attention are nan in layers without attention, which
    their means skip. `sink_attention`, `sink_attention_rest` and keys that end in `_maximum` are maxima over layers.
    The catalogue defines what is derived here, such as `sink_rate` and `value_drain`.

    Args:
      statistics: Statistics of all batches, leaves stacked over layers (or without layers).
      by_head: Also return `name/layer_i/head_j` for everything measured by head, if there are several.

    Returns:
      `name` and, if there are layers, `name/layer_0` ...; `sequences` is the number of sequences behind them.
    """
    statistics = jax.tree.map(np.asarray, jax.device_get(statistics))
    attends = np.broadcast_to(np.asarray(statistics.attends, bool), statistics.sequences.shape)
    metrics = {"sequences": float(np.ravel(statistics.sequences)[0])}
    means = _means(statistics)
    for name, mean in means.items():
        if name in _NO_METRICS:
            continue
        has = np.ones_like(attends) if _of_hidden_states(name) else attends
        over_heads = np.max if name == _MAX_LOGIT else np.mean
        layers = over_heads(mean, axis=tuple(range(statistics.sequences.ndim, mean.ndim)))
        reduce = np.max if name in _MAXIMUM_OVER_LAYERS or name.endswith("_maximum") else np.mean
        metrics[name] = float(reduce(layers[has])) if has.any() else math.nan
        if name == "osp_kurtosis":
            metrics[name] = float(np.mean([np.ravel(means[_OSP_BEFORE])[0], *np.ravel(layers)]))
        if layers.ndim == 1:
            metrics |= {f"{name}/layer_{layer}": float(value) for layer, value in enumerate(layers)}
        if by_head and mean.ndim == 2 and mean.shape[1] > 1:
            places = np.ndenumerate(mean)
            metrics |= {f"{name}/layer_{layer}/head_{head}": float(value) for (layer, head), value in places}
    return metrics


def finalize_arrays(statistics: Statistics) -> dict[str, np.ndarray]:
    """Returns the metrics with one more axis than layers, float64: [L, N] by head, `max_abs_by_channel` [L, D]."""
    statistics = jax.tree.map(np.asarray, jax.device_get(statistics))
    return {name: mean for name, mean in _means(statistics).items() if mean.ndim == 2}


def _of_hidden_states(name: str) -> bool:
    definition = define(name)
    return definition is not None and definition.group == "hidden states"


def _means(statistics: Statistics) -> dict[str, np.ndarray]:
    """Returns totals over counts and maxima by name, float64 [L, ...]; nan if a layer without attention has none."""
    means = {}
    for name, total in statistics.total.items():
        count = statistics.count[name]
        with np.errstate(invalid="ignore", divide="ignore"):
            means[name] = total.astype(np.float64) / count.reshape(count.shape + (1,) * (total.ndim - count.ndim))
    if "first_attention_mass" in means:
        mass = means["first_attention_mass"]
        means["sink_rate"] = np.where(np.isnan(mass).any(-1), np.nan, np.mean(mass > attention.SINK, axis=-1))
    if "activity" in means:
        means |= _of_backcopy(means)
    means |= {name: value.astype(np.float64) for name, value in statistics.maximum.items()}
    attends = np.broadcast_to(np.asarray(statistics.attends, bool), statistics.sequences.shape)
    for name, mean in means.items():
        if name not in _NO_METRICS and not _of_hidden_states(name):
            means[name] = np.where(attends.reshape(attends.shape + (1,) * (mean.ndim - attends.ndim)), mean, np.nan)
    return means


def _of_backcopy(means: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Derives metrics from the means of `observe_backcopy`; removes those that are not metrics."""
    elsewhere, at_triggers = np.moveaxis(attention.active_shares(means.pop("activity")), -2, 0)
    new = {"active_at_triggers": at_triggers, "active_elsewhere": elsewhere}
    with np.errstate(invalid="ignore", divide="ignore"):
        new["value_drain"] = means["value_norm_first"] / means["value_norm_rest"]
        new["residual_peak_ratio"] = means["residual_norm_first"] / means["residual_norm_rest"]
    new["residual_peak"] = means["residual_norm_first"] - means["residual_norm_rest"]
    if "gap_of_token" in means:
        new |= backcopy.logit_summary(means)
        for name in backcopy.ONLY_SUMS:
            del means[name]
    return new


def measure(
    loaded: LoadedModel,
    batches: Iterable[Any],
    observe: Callable[..., Any],
    interventions: Interventions | Callable[..., Interventions] | None = None,
    *,
    output: Callable[..., Any] | None = None,
    apply: Callable[..., tuple[Any, Any]] | None = None,
    join: Callable[[Any, Any], Any] = combine,
) -> Any:
    """Applies a model to batches, observes its layers and joins the observations.

    There is one compiled program for each model, set of functions, batch shape and set of interventions, whatever their
    values: pass functions of a module, or keep those that you make, so that a later call finds the program. Taps
    that they do not read are not computed. On a mesh, results are replicated.

    Args:
      loaded: The model; its parameters may lie on a mesh.
      batches: At least one; each is tokens int [B, T] (inputs without targets) or a tuple (tokens, *extra), already on
        the devices if there is a mesh.
      observe: `(taps, *extra)` -> pytree, called in every layer; its leaves come back as [L, ...].
      interventions: Changes to the forward pass, or `(tokens, *extra)` -> changes, called for each batch outside the
        compiled program.
      output: `(logits, *extra)` -> pytree, with logits float32 [B, T, V]. Without it the head is left out.
      apply: `(model, params, tokens, observe=..., interventions=...)` -> (output, observed), in place of the model's
        logits and of `output`: such as a loss, with the targets in `tokens`.
      join: Two batches' results -> one; applied to the observations and to the output separately. `combine` adds
        `Statistics`, `concatenate` keeps every sequence.

    Returns:
      What was observed; with `output` or `apply` the pair (observed, output).

    Raises:
      ValueError: Without batches; for batches that are no integers, or interventions whose shapes do not fit.
      TypeError: For arguments of another type.
    """
    if not callable(observe) or isinstance(batches, str | bytes) or not isinstance(batches, Iterable):
        problem = f"batches of type {type(batches).__name__}, observe of type {type(observe).__name__}"
        raise TypeError(f"{problem}; allowed: an iterable, and a function")
    mesh, total = mesh_of(loaded.params), None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        for batch in batches:
            tokens, *extra = batch if isinstance(batch, tuple) else (batch,)
            if not jnp.issubdtype(getattr(tokens, "dtype", None) or object, jnp.integer):
                problem = f"a batch of {getattr(tokens, 'dtype', type(tokens).__name__)}"
                raise ValueError(f"{problem}; allowed: tokens, integers [B, T], or (tokens, *extra)")
            given = interventions(tokens, *extra) if callable(interventions) else interventions
            if not isinstance(given, Interventions | None):
                raise TypeError(f"interventions: {type(given).__name__}; allowed: orthojax.Interventions, or None")
            new = _apply(loaded.model, observe, output, apply, loaded.params, given, tokens, *extra)
            total = new if total is None else tuple(join(a, b) for a, b in zip(total, new, strict=True))
    if total is None:
        raise ValueError("no batches to measure")
    return total[0] if output is apply is None else total


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _apply(
    model: "Transformer",
    observe: Callable[..., Any],
    output: Callable[..., Any] | None,
    apply: Callable[..., tuple[Any, Any]] | None,
    params: Any,
    interventions: Interventions | None,
    tokens: Any,
    *extra,
) -> tuple[Any, ...]:
    options: Any = {} if interventions is None else {"interventions": interventions}  # other models need not have them
    options["observe"] = lambda taps: observe(taps, *extra)
    if apply is not None:
        made, observed = apply(model, params, tokens, **options)
    else:
        made, observed = cast(Any, model.apply({"params": params}, tokens, head=output is not None, **options))
        made = made if output is None else output(made, *extra)
    both = (observed,) if output is apply is None else (observed, made)
    if jax.sharding.get_abstract_mesh().empty:
        return both
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), both)


def concatenate(a: Any, b: Any) -> Any:
    """Joins pytrees of arrays [L, B, ...] and [L, B', ...] to one of NumPy arrays [L, B + B', ...], on the host."""
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *jax.device_get((a, b)))
