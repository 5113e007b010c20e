"""Everything that is measured of one model: statistics, quantisation, domains, interventions, the sweep over heads."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from orthojax import analysis, quant
from orthojax.config import ModelConfig
from orthojax.errors import UserError
from orthojax.experiments.analyzing import interventions as changes_of
from orthojax.experiments.analyzing import observing
from orthojax.experiments.analyzing.domains import domain_metrics
from orthojax.experiments.analyzing.stages import Kept, Part, spans
from orthojax.experiments.analyzing.texts import Text
from orthojax.experiments.measures import example_maps
from orthojax.model import Interventions, LoadedModel, Transformer, linear, mesh_of
from orthojax.ops.cross_entropy import perplexity
from orthojax.train.evaluation import place_batch
from orthojax.train.mesh import AXES, in_mesh

Arrays = dict[str, np.ndarray]
_WITH_HEAD = "_with_head"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is measured.

    Attributes:
      batch: Rows that pass through the model at once, at least; dynamic quantisation scales are those of a batch. See
        `rows_at_once`.
      threshold: Mean weight on the first token above which a head counts as a sink.
      settings: Quantisation settings by name.
      quantize_head: Also measure every setting with the output head quantised.
      interventions: As `interventions.KINDS` and `dormant_heads` describe them.
      sweep_rows: Rows of the text, and of each domain, on which every head in turn is zeroed; 0 for no sweep.
      dynamics: Whether the models are checkpoints of one run, called by their steps, and compared as such.
    """

    batch: int = 8
    threshold: float = 0.3
    settings: tuple[str, ...] = tuple(quant.SETTINGS)
    quantize_head: bool = False
    interventions: tuple[str, ...] = ()
    sweep_rows: int = 0
    dynamics: bool = False


class Measured(NamedTuple):
    """What was measured of one model.

    Attributes:
      metrics: By name, and by `name/layer_i`.
      arrays: By layer and head, channel or position; of domains `domain/NAME/...`; of the sweep `sweep/TEXT` [L, N,
        rows], the change of the loss of each row when a head is zeroed; maps of one window.
      changed: Intervention -> the metrics under it.
      notes: What could not be measured, and why.
    """

    metrics: dict[str, float]
    arrays: Arrays
    changed: dict[str, dict[str, float]]
    notes: list[str]


def spread_over_devices(loaded: LoadedModel) -> LoadedModel:
    """The model with its parameters on all devices, so that the rows of a batch are divided between them."""
    devices = jax.devices()
    if len(devices) == 1:
        return loaded
    mesh = jax.make_mesh((len(devices), 1, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    return loaded._replace(params=jax.device_put(loaded.params, NamedSharding(mesh, PartitionSpec())))


def work(text: Text, domains: Sequence[Text], asked: Asked, heads: int) -> float:
    """How much there is to do, in rows that pass through the model."""
    settings = len(asked.settings) * (1 + asked.quantize_head)
    changed = sum(1 + changes_of.RANDOM_DRAWS * spec.startswith(changes_of.DORMANT) for spec in asked.interventions)
    swept = sum(min(asked.sweep_rows, len(of.rows)) for of in (text, *domains)) * heads
    return len(text.rows) * (1 + settings + changed) + 1 + sum(len(of.rows) for of in domains) + swept


def measure_model(loaded: LoadedModel, text: Text, domains: Sequence[Text], asked: Asked, kept: Kept) -> Measured:
    """Measures a model, or reads what an earlier call measured.

    Args:
      loaded: From `orthojax.load`, on one device or from `spread_over_devices`.
      text: What all metrics are of.
      domains: Texts whose windows are compared.
      asked: What is measured.
      kept: Where it is kept.

    Raises:
      UserError: For interventions that the model does not have.
    """
    config, notes = loaded.model.config, []
    batch, specs = rows_at_once(asked, loaded.params), interventions_of(asked, config)  # a wrong one costs no work
    run = _Runner(loaded, text, batch, kept)
    sums = run.statistics("statistics", text, None)
    metrics = observing.metrics_of(sums, asked.threshold, text.bits_per_nat_of_loss)
    arrays = observing.arrays_of(sums)
    arrays |= kept.get(Part("maps", [text.sha256], 1.0, lambda _: _maps(loaded, text.rows[0])))
    for name, value in run.quantized(asked, notes).items():
        metrics[f"perplexity_{name}"] = value
    windows = {of.name: run.windows(of) for of in domains}
    swept = {}
    if asked.sweep_rows:
        losses = {text.name: sums["loss_nats"]} | {name: seen["loss_nats"] for name, seen in windows.items()}
        swept = {of.name: run.sweep(of, losses[of.name], asked.sweep_rows) for of in (text, *domains)}
        arrays |= {f"sweep/{name}": change for name, change in swept.items()}
    if windows:
        found, shown = domain_metrics(windows, swept)
        metrics, arrays = metrics | found, arrays | shown
    changed = {}
    for spec, changes in specs.items():
        several = {spec: changes}
        if changes is None:
            mass = arrays["first_attention_mass"]
            several = changes_of.dormant_heads(spec, mass, asked.threshold)
            if not several:
                notes.append(f"{spec}: no head has so much weight on the first token; the most is {mass.max():.3g}")
        for name, heads in several.items():
            given = changes_of.build(heads or [], config, text.rows.shape[1] - 1, arrays)
            seen = run.statistics(name, text, given, key=[repr(heads)])
            changed[name] = observing.metrics_of(seen, asked.threshold, text.bits_per_nat_of_loss)
    return Measured(metrics, arrays, changed, notes)


def interventions_of(asked: Asked, config: ModelConfig) -> dict[str, list[changes_of.Change] | None]:
    """The changes of every intervention that is asked for; None where they depend on what is measured.

    Raises:
      UserError: For one that a model of this config does not have.
    """
    return {spec: _changes(spec, config) for spec in asked.interventions}


def _changes(spec: str, config: ModelConfig) -> list[changes_of.Change] | None:
    if spec.partition(":")[0] == changes_of.DORMANT:
        changes_of.dormant_heads(spec, np.ones((1, 1)), 0.0)  # whether the number is one
        return None
    return changes_of.parse(spec, config)


def rows_at_once(asked: Asked, params: Any) -> int:
    """Rows of a batch: as many as are asked for, rounded up to a number that the devices of the parameters divide."""
    mesh = mesh_of(params)
    size = 1 if mesh is None else mesh.size
    return -(-asked.batch // size) * size


def _maps(loaded: LoadedModel, row: np.ndarray) -> Arrays:
    return {name: array.astype(np.float32) for name, array in example_maps(loaded, np.asarray(row)).items()}


class _Runner:
    """Passes rows through one model."""

    def __init__(self, loaded: LoadedModel, text: Text, batch: int, kept: Kept):
        self._loaded, self._text, self._batch, self._kept = loaded, text, batch, kept
        self._mesh = mesh_of(loaded.params)
        self._losses = observing.row_losses(loaded.model.config.relaxed_causal_tokens)

    def _batches(self, rows: np.ndarray, start: int, stop: int) -> Iterator[tuple[Any, Any]]:
        for first in range(start, stop, self._batch):
            of = np.asarray(rows[first : min(first + self._batch, stop)])
            inputs, targets = place_batch(self._mesh, of[:, :-1], of[:, 1:])
            yield inputs, targets

    def _pass(
        self,
        name: str,
        text: Text,
        observe: Callable[..., Any],
        read: Callable[[Any], Arrays],
        *,
        model: Transformer | None = None,
        given: Interventions | None = None,
        key: Sequence[Any] = (),
    ) -> Arrays:
        """What is observed on all rows, with `loss_nats` [rows], added up over parts that are kept."""
        loaded = self._loaded if model is None else self._loaded._replace(model=model)
        total: Arrays | None = None

        def measure(start: int, stop: int, count: Callable[[float], None]) -> Arrays:
            sums: Arrays | None = None
            for batch in self._batches(text.rows, start, stop):
                seen = analysis.measure(loaded, [batch], observe, given, output=self._losses)
                observed, losses = jax.device_get(seen)
                sums = observing.add(sums, read(observed) | {"loss_nats": np.asarray(losses, np.float64)})
                count(len(losses))
            assert sums is not None
            return sums

        parts = list(spans(len(text.rows), self._batch))
        for i, (start, stop) in enumerate(parts):
            of_part = f"{name} {i + 1} of {len(parts)}" if len(parts) > 1 else name
            depends = [text.sha256, self._batch, start, stop, *key]
            measure_part = functools.partial(measure, start, stop)
            total = observing.add(total, self._kept.get(Part(of_part, depends, stop - start, measure_part)))
        assert total is not None
        return total

    def statistics(self, name: str, text: Text, given: Interventions | None, key: Sequence[Any] = ()) -> Arrays:
        """The sums of `observing.observe`, without or with interventions."""
        return self._pass(name, text, observing.observe, observing.as_sums, given=given, key=key)

    def quantized(self, asked: Asked, notes: list[str]) -> dict[str, float]:
        """The perplexity under each quantisation setting; says in `notes` which ones do not fit the model."""
        found: dict[str, float] = {}
        if asked.settings and self._loaded.model.linear is not linear:
            notes.append("The model runs on integers: no quantisation setting is simulated.")
            return found
        for name in asked.settings:
            setting = quant.setting_named(name)
            for suffix in ("", _WITH_HEAD) if asked.quantize_head else ("",):
                function = quant.quantized_linear(setting, "" if suffix else quant.ALL_BUT_HEAD)
                model = Transformer(self._loaded.model.config, linear=function, linear_head=bool(suffix))
                try:
                    key = [repr(setting)]
                    seen = self._pass(name + suffix, self._text, observing.observe_nothing, dict, model=model, key=key)
                except UserError as error:  # a group that does not divide the width
                    notes.append(f"{name}{suffix} is left out: {str(error).splitlines()[0]}.")
                    continue
                found[name + suffix] = perplexity(float(np.mean(seen["loss_nats"])))
        return found

    def windows(self, text: Text) -> Arrays:
        """`observing.observe_windows` of every window of a domain, with its loss."""
        read: Callable[[Any], Arrays] = lambda seen: {name: np.asarray(x, np.float32) for name, x in seen.items()}  # noqa: E731
        return self._pass(f"domain {text.name}", text, observing.observe_windows, read)

    def sweep(self, text: Text, losses: np.ndarray, rows: int) -> np.ndarray:
        """By how much the loss of each row changes when a head is zeroed, [L, N, rows]; one program for all heads."""
        config = self._loaded.model.config
        L, N, rows = config.num_layers, config.num_heads, min(rows, len(text.rows))

        def measure(layer: int, count: Callable[[float], None]) -> Arrays:
            scales = np.ones((N, L, N), np.float32)
            scales[np.arange(N), layer, np.arange(N)] = 0.0
            found = []
            with in_mesh(self._mesh):
                for batch in self._batches(text.rows, 0, rows):
                    new = _sweep(self._loaded.model, self._losses, self._loaded.params, scales, *batch)
                    found.append(np.asarray(jax.device_get(new), np.float64))
                    count(found[-1].size)
            return {"loss_nats": np.concatenate(found, axis=1)}

        layers = []
        for layer in range(L):
            part = functools.partial(measure, layer)
            key = [text.sha256, rows, self._batch]
            name = f"zeroing heads on {text.name}, layer {layer}"
            layers.append(self._kept.get(Part(name, key, float(N * rows), part))["loss_nats"])
        return np.asarray(np.stack(layers) - losses[:rows], np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sweep(
    model: Transformer,
    losses_of: Callable[[jax.Array, jax.Array], jax.Array],
    params: Any,
    scales: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """Losses [heads, B] with one head's scales [L, N] after the other."""

    def one(scale: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens, interventions=Interventions(head_scale=scale))[0]
        return losses_of(logits, targets)

    losses = jax.lax.map(one, jnp.asarray(scales))
    if jax.sharding.get_abstract_mesh().empty:
        return losses
    return jax.lax.with_sharding_constraint(losses, PartitionSpec())


def metric_changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Metrics under an intervention with `loss_change_nats`, how much it costs."""
    return {**after, "loss_change_nats": after["loss_nats"] - before["loss_nats"]}
