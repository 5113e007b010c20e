"""What quantisation does to a real model: settings, tensors, layers, and the channels that break it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax import quant
from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Case, Experiment
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.pretrained.smollm2 import ABOUT, model, perplexity, rows
from orthojax.experiments.results import Quantity, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import number
from orthojax.model import Transformer, unstack_layers
from orthojax.model import linear as float_linear
from orthojax.quant import QuantizationSetting
from orthojax.timing import interleaved_seconds, spread

ROWS, LENGTH, REPEATS = 8, 256, 5
KINDS = {
    "attention/query": "queries", "attention/key": "keys", "attention/value": "values",
    "attention/output": "attention output", "mlp/gate": "MLP gate", "mlp/input": "MLP input",
    "mlp/output": "MLP output",
}  # fmt: skip
KEPT = (0, 1, 2, 4, 8, 16, 32, 64)
MORE = ("w8a8_group64", "w4a8", "w4a8_group64", "w4a4_group64")
STORED = ("int8_fine_per_token", "w4a8", "w4a8_group64", "int4_zeropoint")
_DAMAGE = {"int8_moderate": quant.INT8_MODERATE, "int8_coarse": quant.INT8_COARSE}


def _case(name: str, label: str, found: float) -> Case:
    return Case(name, {"label": label}, {"perplexity": found})


def _quantized(setting: QuantizationSetting, include: str = quant.ALL_BUT_HEAD) -> float:
    loaded = model()
    linear = quant.quantized_linear(setting, include)
    of = Transformer(loaded.config.model, linear=linear)
    return perplexity(of.apply, loaded.params, rows(ROWS, LENGTH), ROWS)


def _float(seed: int) -> list[Case]:
    loaded = model()
    narrow = Transformer(dataclasses.replace(loaded.config.model, dtype="bfloat16"))
    tokens = rows(ROWS, LENGTH)
    return [
        _case("float32", "float32", perplexity(loaded.model.apply, loaded.params, tokens, ROWS)),
        _case("bfloat16", "bfloat16 products", perplexity(narrow.apply, loaded.params, tokens, ROWS)),
    ]


def _setting(name: str, seed: int) -> list[Case]:
    return [_case(name, name, _quantized(quant.setting_named(name)))]


def _kind(kind: str, seed: int) -> list[Case]:
    """One kind of kernel alone, and all others."""
    name, found = kind.replace("/", "_"), []
    for setting_name, setting in _DAMAGE.items():
        alone = _quantized(setting, f"{kind}$")
        rest = _quantized(setting, f"^(?!.*{kind}$)(?!(.*/)?head(/|$))")
        found.append(Case(f"{setting_name}_{name}", {"label": f"{setting_name}, {KINDS[kind]}"},
                          {"perplexity": alone, "perplexity_of_others": rest}))  # fmt: skip
    return found


def _layer(layer: int, seed: int) -> list[Case]:
    loaded = model()
    config = dataclasses.replace(loaded.config.model, scan_layers=False)
    linear = quant.quantized_linear(quant.INT8_COARSE, f"^layers_{layer}/")
    found = perplexity(
        Transformer(config, linear=linear).apply, unstack_layers(loaded.params), rows(ROWS, LENGTH), ROWS
    )
    return [_case(f"layer_{layer}", f"layer {layer + 1}", found)]


def _kept(setting_name: str, seed: int) -> list[Case]:
    setting = _DAMAGE[setting_name]
    return [
        _case(f"{setting_name}_kept_{k}", f"{setting_name}, {k} in float",
              _quantized(dataclasses.replace(setting, float_features=k)))
        for k in KEPT
    ]  # fmt: skip


def _channels(seed: int) -> list[Case]:
    """The largest feature of the inputs and of the outputs of every product, over all rows and positions."""
    loaded = model()
    config = dataclasses.replace(loaded.config.model, scan_layers=False)

    def peaks(params: Any, tokens: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        found = {}

        def watched(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, path: str) -> jax.Array:
            y = float_linear(x, kernel, bias, path)
            found[path] = tuple(jnp.max(jnp.abs(of), axis=(0, 1)) for of in (x, y))
            return y

        Transformer(config, linear=watched).apply({"params": params}, tokens)
        return found

    with jax.enable_x64(False):
        seen = jax.jit(peaks)(unstack_layers(loaded.params), jnp.asarray(rows(ROWS, LENGTH)[:, :-1]))
    cases = []
    for path, sides in seen.items():
        layer, kind = path.removeprefix("layers_").split("/", 1)
        metrics = {}
        for side, of in zip(("input", "output"), map(np.asarray, sides), strict=True):
            metrics |= {f"{side}_feature": float(of.argmax()), f"{side}_peak": float(of.max()),
                        f"{side}_ratio": float(of.max() / np.median(of))}  # fmt: skip
        kind = kind.removesuffix("/kernel")
        label = {"label": f"layer {int(layer) + 1}, {KINDS[kind]}"}
        cases.append(Case(f"channels_{layer}_{kind.replace('/', '_')}", label, metrics))
    return cases


def _stored(seed: int) -> list[Case]:
    """Bytes, perplexity and tokens a second of a forward pass, in floats and from checkpoints of integers."""
    loaded, tokens = model(), rows(ROWS, LENGTH)
    narrow = Transformer(dataclasses.replace(loaded.config.model, dtype="bfloat16"))
    with jax.enable_x64(False):
        halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params)
        forms = {"float32": (loaded.model, loaded.params), "bfloat16": (narrow, halves)}
        on_disk = {}
        for name in STORED:
            setting = quant.setting_named(name)
            params = quant.integer_params(loaded.params, setting, quant.KERNELS_BUT_HEAD)
            on_disk[name] = {"checkpoint_megabytes": sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6}
            forms[name] = Transformer(loaded.config.model, linear=quant.integer_linear(setting)), params
        inputs = jnp.asarray(tokens[:, :-1])
        passes = {}
        for name, (of, params) in forms.items():
            step = jax.jit(lambda params, inputs, of=of: of.apply({"params": params}, inputs, head=False)[0])
            passes[name] = functools.partial(step, params, inputs)
        seconds = interleaved_seconds(passes, REPEATS)
    found = []
    for name, (of, params) in forms.items():
        ratios = np.array(seconds["float32"]) / np.array(seconds[name])
        metrics = on_disk.get(name, {}) | {
            "perplexity": perplexity(of.apply, params, tokens, ROWS),
            "megabytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6,
            "tokens_per_second": inputs.size / spread(seconds[name]).median,
            "speed": spread(ratios.tolist()).median,
            "speed_low": spread(ratios.tolist()).lower,
            "speed_high": spread(ratios.tolist()).upper,
        }
        found.append(Case(f"stored_{name}", {"label": name}, metrics))
    return found


def _parts() -> dict[str, Callable[[int], list[Case]]]:
    parts: dict[str, Callable[[int], list[Case]]] = {"float": _float, "stored": _stored, "channels": _channels}
    parts |= {f"setting-{name}": functools.partial(_setting, name) for name in (*quant.SETTINGS, *MORE)}
    parts |= {f"kept-{name}": functools.partial(_kept, name) for name in _DAMAGE}
    parts |= {f"kind-{kind.replace('/', '-')}": functools.partial(_kind, kind) for kind in KINDS}
    return parts | {f"layer-{i}": functools.partial(_layer, i) for i in range(30)}


_PPL = metric("perplexity")
_OTHERS = metric("perplexity_of_others", "with all others rounded instead")
_FLOAT = "float32"

CLAIMS = (
    Claim("Coarse int8 destroys the model.", ("int8_coarse", _FLOAT), (_PPL,),
          lambda of, float32: of.perplexity > 2 * float32.perplexity, "more than twice the perplexity of float32"),
    Claim("With a scale for each channel int8 costs nothing.", ("int8_fine", _FLOAT), (_PPL,),
          lambda of, float32: of.perplexity < 1.02 * float32.perplexity, "at most 2% of the perplexity"),
    Claim("A few channels do the damage of one scale for a tensor of activations.", {
              "moderate": ("int8_moderate_kept_4", "int8_moderate", _FLOAT),
              "coarse": ("int8_coarse_kept_4", "int8_coarse", _FLOAT)}, (_PPL,),
          lambda kept, all, float32: kept.perplexity - float32.perplexity < 0.1 * (all.perplexity - float32.perplexity),
          "four features of each product in float leave less than a tenth of the added perplexity"),
)  # fmt: skip


def _change(results: Results, perplexities: Sequence[float]) -> np.ndarray:
    """From float32's, in percent, [1, n]."""
    return 100 * (np.array([perplexities]) / results[_FLOAT].perplexity - 1)


def _kept_curves(results: Results) -> list[Picture]:
    curves = {}
    for name in _DAMAGE:
        of = [results[f"{name}_kept_{k}"].perplexity for k in KEPT]
        curves[name] = (KEPT[1:], _change(results, of[1:]))
    figure = drawing.lines(curves, x_label="input, and as many output, features of each product in float",
                           y_label="change of perplexity, %", x_scale="log", y_scale="log")  # fmt: skip
    counts = ", ".join(map(str, KEPT[1:]))
    none = " and ".join(f"{_change(results, [results[f'{n}_kept_0'].perplexity]).item():+,.0f}% ({n})" for n in _DAMAGE)
    layers = {"int8_coarse": _change(results, [results[f"layer_{i}"].perplexity for i in range(30)])}
    bars = drawing.bars([str(i + 1) for i in range(30)], layers, y_label="change of perplexity, %")
    words = f"What rounding does to perplexity with the {counts} largest features in float; with none, {none}."
    return [
        Picture("kept", words, figure),
        Picture("layers", "What rounding one layer alone does to perplexity, int8_coarse.", bars),
    ]


def _largest_features(results: Results) -> list[Table]:
    """The products whose largest feature stands out most: what one scale for all has to cover; none of older rows."""
    found = [of for of in results if of.name.startswith("channels_")]
    if not found:
        return []
    table, shown = [], 12
    for side in ("input", "output"):
        ranked = sorted(found, key=lambda of, side=side: -of[f"{side}_ratio"])
        for of in ranked[:shown]:
            peak, ratio = number(of[f"{side}_peak"]), number(of[f"{side}_ratio"])
            table.append([side, of.label, f"{of[f'{side}_feature']:.0f}", peak, ratio])
    columns = ["side", "product", "largest feature", "its largest |x|", "over the median feature's"]
    return [Table(f"Of {len(found)} products the {shown} whose largest feature stands out most", columns, table)]


def _named(stem: str) -> Callable[..., bool]:
    return lambda result: result.name.startswith(stem)


_ALONE = {name.replace("/", "_") for name in KINDS}
_TIMES = [metric("megabytes", "MB of parameters"), metric("checkpoint_megabytes", "MB of the checkpoint"),
          metric("tokens_per_second", "tokens a second, forward"), metric("speed", "times float32"),
          metric("speed_low", "first quartile"),
          metric("speed_high", "third quartile")]  # fmt: skip
_ADDED = Quantity("perplexity, this kind alone rounded", lambda of: of.perplexity)

EXPERIMENT = Experiment(
    name="smollm2_quantised",
    title="SmolLM2 under quantisation: settings, tensors, layers and channels; bytes and speed on integers",
    compute=_parts(),
    settings={"rows": ROWS, "length": LENGTH, "kept": KEPT, "stored": STORED, "repeats": REPEATS},
    seconds_per_seed=2400.0,
    about=lambda results: [
        ABOUT,
        f"Perplexity on {ROWS} rows of {LENGTH} tokens, in one batch, over which dynamic scales are; the output head "
        "stays float. Rounded kernels lie on a grid of 4 bits already. One measurement: nothing is drawn.",
    ],
    tables=(
        MetricTable("Settings", [_PPL], keep=lambda of: of.name in {*quant.SETTINGS, *MORE, _FLOAT, "bfloat16"},
                    change_from=_FLOAT),
        MetricTable("Kernels of one kind", [_ADDED, _OTHERS],
                    keep=lambda of: any(of.name.endswith(f"_{name}") for name in _ALONE)),
        MetricTable("With the largest features of each product in float", [_PPL], keep=lambda of: "_kept_" in of.name,
                    change_from=_FLOAT),
        _largest_features,
        MetricTable("One layer alone, int8_coarse", [_PPL], keep=_named("layer_"), change_from=_FLOAT),
        MetricTable("From checkpoints of integers", [_PPL, *_TIMES], keep=_named("stored_")),
    ),
    claims=CLAIMS,
    pictures=(_kept_curves,),
)  # fmt: skip
