"""What rounding costs a model in each format, and what was measured to help."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from orthojax import quant
from orthojax.errors import UserError
from orthojax.files import finite
from orthojax.model import LoadedModel, Transformer, mesh_of
from orthojax.train import Inputs
from orthojax.train.mesh import in_mesh
from orthojax.train.step import split_tokens

FAILS = 0.05  # nats: a format fails that moves predictions by more, in KL divergence; what helps is tried for these
_KEPT_STATES, _LARGEST_LOSS = 2**28, 700.0  # bytes; nats, whose exponential is a number
_TRIED_ROWS, _TRIED_LAYERS = 2, 8
_Numbers = dict[str, Any]


def mean_and_error(name: str, by_row: np.ndarray, suffix: str = "") -> dict[str, float]:
    """Returns the mean over rows, and its standard error as NAME_se if there are two rows or more."""
    error = {f"{name}{suffix}_se": float(np.std(by_row, ddof=1) / math.sqrt(len(by_row)))} if len(by_row) > 1 else {}
    return {f"{name}{suffix}": float(np.mean(by_row))} | error


def fails(entry: Mapping[str, Any]) -> bool | None:
    """Returns whether a format of `Rounding.of_format` fails; None if it is not known."""
    if (kl := entry.get("kl_nats", entry.get("lost"))) is not None:  # cards of 0.1.0 have the loss alone
        return kl > FAILS
    return True if "overflows" in entry.get("left_out", "") else None


class Rounding:
    """The rows of an evaluation, on which rounded models are compared with the float one."""

    def __init__(self, loaded: LoadedModel, inputs: Inputs):
        """Reads the batches of the evaluation of a model, see `orthojax.cards.measures.prepared`."""
        self._model, self._params, rows = loaded.model, loaded.params, inputs.evaluation
        size = loaded.config.eval.batch_size
        starts = range(0, len(rows), size)
        self._config = loaded.config.model
        self._batches = [split_tokens(rows[start : start + size], self._config) for start in starts]
        at_once = self._batches[0][0].size * self._config.d_model * 4 * len(starts)
        self._states = functools.lru_cache(None if at_once <= _KEPT_STATES else 0)(self._computed_states)
        self._apply = jax.jit(lambda params, tokens: loaded.model.apply({"params": params}, tokens, head=False)[0])

    def _computed_states(self, batch: int) -> Any:
        return self._apply(self._params, self._batches[batch][0]) if self._model.head_kernel(self._params) else None

    def compare(self, other: Transformer, params: Any = None) -> quant.Divergence:
        """Compares a model, with parameters of its own or those of the float one, with that on all rows."""
        params = self._params if params is None else params
        with in_mesh(mesh_of(self._params)):
            parts = [
                quant.divergence(self._model, self._params, other, params, *batch, self._states(i))
                for i, batch in enumerate(self._batches)
            ]
        return quant.Divergence(*(np.concatenate(of).astype(float) for of in zip(*parts, strict=True)))

    def numbers(self, other: Transformer, params: Any = None, suffix: str = "") -> _Numbers:
        """Returns what a model loses to the float one, and why a number is missing."""
        return _numbers(self.compare(other, params), suffix)

    def of_format(self, setting: quant.QuantizationSetting, *, quick: bool, quantize_head: bool) -> _Numbers:
        """Returns what a format costs, and if that is not little, with which changes it costs less."""
        rounded = functools.partial(quant.rounded_model, self._config)
        plain = self.compare(rounded(setting))
        found = _numbers(plain)
        if quantize_head:
            found |= self.numbers(rounded(setting, "", linear_head=True), suffix="_with_head")
        failed = found.get("kl_nats", math.inf) > FAILS
        if setting.inputs == "tensor" and (failed or not quick):  # what a sink does to the scale of all tokens
            found |= self._first_in_float(setting, plain)
            by_token = dataclasses.replace(setting, inputs="token", outputs=setting.outputs and "token")
            per_token = self.compare(rounded(by_token))
            found |= _numbers(per_token, "_per_token") | self._first_in_float(by_token, per_token, "_per_token")
        elif failed:
            found |= self._first_in_float(setting, plain)
        return found if quick or not failed else found | {"float_layers": self._rescued(setting)}

    def _first_in_float(self, setting: quant.QuantizationSetting, plain: quant.Divergence, of: str = "") -> _Numbers:
        """Returns what a format costs with the first token in float, and how much of the loss that takes away."""
        first = self.compare(quant.rounded_model(self._config, setting, float_tokens=1))
        found = {} if of else _numbers(first, "_float_first")
        if np.isfinite(plain.loss_nats + first.loss_nats).all():
            found |= mean_and_error("d_sink_nats", plain.loss_nats - first.loss_nats, of)
        return found

    def rotated(self, setting: quant.QuantizationSetting) -> _Numbers:
        """Returns what a format costs after a rotation."""
        try:
            params, config, wrap = quant.rotate_after_training(self._params, self._config)
        except UserError as error:
            return {"left_out": f"a rotation: {error}".partition("\n")[0]}
        model = quant.rounded_model(config, setting)
        return self.numbers(model.clone(linear=wrap(model.linear)), params, "_rotated")

    def cached(self, bits: int, float_tokens: int) -> _Numbers:
        """Returns what keys and values of few bits cost."""
        return self.numbers(quant.rounded_cache(self._model, bits, float_tokens))

    def _rescued(self, setting: quant.QuantizationSetting) -> list[_Numbers]:
        """Returns what a format costs with one, two and three linear layers in float, found on a few rows."""
        tokens, targets, counted = self._batches[0]
        few = tokens[:_TRIED_ROWS], targets[:_TRIED_ROWS], counted[:_TRIED_ROWS]
        model = quant.rounded_model(self._config, setting)
        model = model.clone(linear=quant.switching(model.linear))
        candidates = quant.linear_layers(self._params)
        if len(candidates) > _TRIED_LAYERS:
            error = quant.rounding_error(self._model, self._params, setting, few[0])
            noise = {name: -of.added_by_token for name, of in error.linear.items()}
            known = [name for name in candidates if not math.isnan(noise.get(name, math.nan))]
            candidates = sorted(known, key=noise.__getitem__)[-_TRIED_LAYERS:]

        def score(chosen: list[str]) -> float:
            params = quant.switched_params(self._params, chosen)
            with in_mesh(mesh_of(self._params)):
                return float(quant.divergence(self._model, self._params, model, params, *few).kl_nats.mean())

        layers = quant.rescue(candidates, score)
        return [
            {"layers": layers[:count]} | self.numbers(model, quant.switched_params(self._params, layers[:count]))
            for count in range(1, len(layers) + 1)
        ]


def _numbers(of: quant.Divergence, suffix: str = "") -> _Numbers:
    """Returns the numbers of a format: nan or an overflow is no number."""
    loss = float(np.mean(of.loss_nats))
    if not loss < _LARGEST_LOSS:
        return {"left_out": "the perplexity overflows" + suffix.replace("_", " with ", 1).replace("_", " ")}
    added = of.loss_nats - of.float_loss_nats
    found = {"perplexity": math.exp(loss), "lost": math.expm1(float(np.mean(added)))}
    for name, by_row in {"loss_added_nats": added, "kl_nats": of.kl_nats, "agreement": of.agreement}.items():
        found |= mean_and_error(name, by_row, suffix)
    return finite(found | {f"{name}{suffix}": found.pop(name) for name in ("perplexity", "lost")})
