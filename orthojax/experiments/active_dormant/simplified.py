r"""The simplified models of Active-Dormant Attention Heads (arXiv 2410.13835) in training: one layer, and three.

Attention is written with only the parameters that matter on Bigram-Backcopy. Token v is the one-hot
:math:`e_v`, its value :math:`\xi_v e_v`, the value of <s> a vector :math:`\beta`. A query of token v has one free
logit: :math:`\alpha_v` on <s> if v is not a trigger, :math:`\lambda_v` on the token before it if v is one; all
other visible keys have the logit 0. With :math:`n_i` the sum of :math:`\xi_{x_j} e_{x_j}` over :math:`1 \le j \le i`,

.. math::
  o_i = \frac{e^{\alpha_v} \beta + n_i}{e^{\alpha_v} + i} \text{ (no trigger)}, \qquad
  o_i = \frac{\beta + n_i + (e^{\lambda_v} - 1) \xi_{x_{i-1}} e_{x_{i-1}}}{e^{\lambda_v} + i} \text{ (trigger)}

and the logits are :math:`o_i + W_2^T \mathrm{relu}(W_1^T e_v)`: nothing is added from the residual stream or
normalised. Legend: B batch, T positions, V vocabulary, H hidden units. Parameters are dicts of arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.analysis.backcopy import backcopy_risk_nats, bigram_excess_risk_nats
from orthojax.data import BigramBackcopy
from orthojax.experiments.active_dormant.measures import half_step, line
from orthojax.experiments.active_dormant.runs import letters
from orthojax.experiments.claims import Claim, Metric, shares
from orthojax.experiments.study import Row, Study
from orthojax.ops.statistics import kurtosis
from orthojax.optim import Rotation, orthoadam
from orthojax.report.pictures import ByStep
from orthojax.report.tables import Columns

HIDDEN = 128

Params = dict[str, Any]
# Logits [B, T, V], weight on <s> of the middle layer [B, T], and the residual stream of <s> after each layer, [V] each.
Applied = tuple[jax.Array, jax.Array, Sequence[jax.Array]]


def init(key: jax.Array, vocab_size: int) -> Params:
    """Draws parameters of the one-layer model: logits and values N(0, 1), matrices uniform by fan-in, as published.

    Returns `sink_logit`, `previous_logit`, `value` and `bos_value` [V], `bos_output` [V, V], `mlp_in` [V, H] and
    `mlp_out` [H, V]. The value of <s> is `bos_value @ bos_output`.
    """
    keys = iter(jax.random.split(key, 7))
    names = ("sink_logit", "previous_logit", "value", "bos_value")
    params = {name: jax.random.normal(next(keys), (vocab_size,), jnp.float32) for name in names}
    shapes = {"bos_output": (vocab_size, vocab_size), "mlp_in": (vocab_size, HIDDEN), "mlp_out": (HIDDEN, vocab_size)}
    return params | {name: _uniform(next(keys), shape) for name, shape in shapes.items()}


def _uniform(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    limit = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -limit, limit)


def bos_value(params: Params) -> jax.Array:
    """Computes the value of <s> after the output projection, beta [V]."""
    return params["bos_value"] @ params["bos_output"]


def attend(params: Params, tokens: jax.Array, trigger: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the simplified attention: (output [B, T, V], weight on <s> [B, T]).

    `tokens` are int [B, T], <s> first, and `trigger`, bool [V], says which ids are triggers.
    """
    value, beta = params["value"], bos_value(params)
    length = tokens.shape[1]
    one_hot = jax.nn.one_hot(tokens, len(value), dtype=value.dtype)
    counts = jnp.einsum("ts,bsv->btv", jnp.tri(length, dtype=value.dtype), one_hot.at[:, 0].set(0.0))
    is_trigger = trigger[tokens]
    own = jnp.where(is_trigger, params["previous_logit"][tokens], params["sink_logit"][tokens])
    own = own.at[:, 0].set(0.0)  # <s> sees only itself, whatever its logit
    top = jnp.maximum(own, 0.0)  # all weights are multiplied by exp(-top), so that none overflows
    free, other = jnp.exp(own - top), jnp.exp(-top)
    on_bos = jnp.where(is_trigger, other, free)
    more_on_previous = jnp.where(is_trigger, free - other, 0.0)
    total = on_bos + other * jnp.arange(length)[None] + more_on_previous
    on_previous = more_on_previous * value[jnp.roll(tokens, 1, axis=1)]
    output = on_bos[..., None] * beta[None, None] + other[..., None] * counts * value[None, None]
    output += on_previous[..., None] * jnp.roll(one_hot, 1, axis=1)
    return output / total[..., None], on_bos / total


def apply(params: Params, tokens: jax.Array, trigger: jax.Array) -> Applied:
    """Computes the one-layer model, which has no residual streams."""
    output, bos_weight = attend(params, tokens, trigger)
    by_token = jax.nn.relu(params["mlp_in"]) @ params["mlp_out"]  # [V, V]; the MLP sees only the token
    return output + by_token[tokens], bos_weight, ()


def init_three_layers(key: jax.Array, vocab_size: int) -> Params:
    """Draws parameters of the three-layer model.

    Returns `below` and `above`: `value` and `output` [V, V], `mlp_in` [V, H], `mlp_out` [H, V]; `copy`: those of
    `init`; `readout` [V, V]; `direction` [V], N(0, 1) / V, which is not trained.
    """
    below, above, copy, readout, direction = jax.random.split(key, 5)
    square = vocab_size, vocab_size
    shapes = {"value": square, "output": square, "mlp_in": (vocab_size, HIDDEN), "mlp_out": (HIDDEN, vocab_size)}

    def minimal(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        return {name: _uniform(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    return {
        "below": minimal(below),
        "copy": init(copy, vocab_size),
        "above": minimal(above),
        "readout": _uniform(readout, square),
        "direction": jax.random.normal(direction, (vocab_size,), jnp.float32) / vocab_size,
    }


def layer_norm(x: jax.Array) -> jax.Array:
    """Computes LayerNorm of one vector without gain and bias."""
    centred = x - jnp.mean(x)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred)) + 1e-5)


def minimal_layer(params: Params, residual: jax.Array) -> jax.Array:
    r"""Computes a layer at <s>, which sees only itself: :math:`r + a + MLP(LN(r + a))` with :math:`a = W LN(r)`."""
    residual = residual + layer_norm(residual) @ params["value"] @ params["output"]
    return residual + jax.nn.relu(layer_norm(residual) @ params["mlp_in"]) @ params["mlp_out"]


def apply_three_layers(params: Params, tokens: jax.Array, trigger: jax.Array) -> Applied:
    r"""Computes the three-layer model: a minimal layer, the layer of the one-layer model, a minimal layer.

    Every logit on <s> is :math:`\alpha_v \langle LN(h), d \rangle` with h the residual stream of <s> after the first
    layer and d the fixed `direction`; so the first layer serves attention only by turning h towards d. The token after
    <s> is predicted from the residual stream after the third layer, by a linear read-out after LayerNorm; all other
    positions as in the one-layer model.
    """
    copy, bos = params["copy"], tokens[0, 0]
    after_first = minimal_layer(params["below"], jax.nn.one_hot(bos, len(trigger), dtype=copy["value"].dtype))
    key = layer_norm(after_first) @ jax.lax.stop_gradient(params["direction"])
    logits, bos_weight, _ = apply(copy | {"sink_logit": copy["sink_logit"] * key}, tokens, trigger)
    after_second = after_first + logits[0, 0]
    after_third = minimal_layer(params["above"], after_second)
    logits = logits.at[:, 0].set(layer_norm(after_third) @ params["readout"])
    return logits, bos_weight, (after_first, after_second, after_third)


# As published, except that steps have fewer and shorter sequences.
_COPY_RATE, _OUTER_RATE, _SGD_RATE, _B1, _B2, _WEIGHT_DECAY = 0.03, 3e-4, 0.03, 0.9, 0.99, 1e-4
_BATCH, _LENGTH, _EVALUATED, _CHUNK, _DRAWN = 64, 64, 128, 10, 100

Apply = Callable[[Params, jax.Array, jax.Array], Applied]


def sequences(task: BigramBackcopy, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yields int32 [_CHUNK, _BATCH, _LENGTH + 1] for every `_CHUNK` steps."""
    for block in range(-(-steps // _DRAWN)):
        drawn = np.asarray(task.batch(block, _DRAWN * _BATCH, _LENGTH, seed))
        yield from drawn.reshape(_DRAWN // _CHUNK, _CHUNK, _BATCH, _LENGTH + 1)


def adamw(rate: float = _COPY_RATE) -> optax.GradientTransformation:
    """Returns AdamW with the published betas and decay."""
    return optax.adamw(rate, _B1, _B2, weight_decay=_WEIGHT_DECAY)


def outer_optimizer(name: str, seed: int) -> optax.GradientTransformation:
    """Returns AdamW at `_COPY_RATE` for the middle one of three layers, and the named optimizer for all others."""
    outer = {
        "adam": adamw(_OUTER_RATE),
        "orthoadam": orthoadam(
            _OUTER_RATE, _B1, _B2, weight_decay=_WEIGHT_DECAY, rotation=Rotation("haar", "output", seed)
        ),
        "sgd": optax.chain(optax.add_decayed_weights(_WEIGHT_DECAY), optax.sgd(_SGD_RATE, momentum=0.9)),
    }[name]
    labels = lambda params: {key: "copy" if key == "copy" else "outer" for key in params}  # noqa: E731
    return optax.multi_transform({"copy": adamw(), "outer": outer}, labels)


def training_metrics(
    apply: Apply, params: Params, tokens: jax.Array, oracle: jax.Array, trigger: jax.Array
) -> dict[str, jax.Array]:
    """Measures risks in nats, weight on <s> and its logits at non-triggers, values, residual norms of <s>.

    The weight includes the row of <s>, as published; logits are for a query at each non-trigger after <s>, with their
    standard deviation over positions; a value's norm excludes its mean, which shifts all logits alike.
    """
    logits, bos_weight, residuals = apply(params, tokens, trigger)
    layer, log_probs, is_trigger = params.get("copy", params), jax.nn.log_softmax(logits), trigger[tokens]
    counted = (~is_trigger).at[:, 0].set(False)
    factor = layer_norm(residuals[0]) @ params["direction"] if residuals else 1.0
    on_bos = factor * layer["sink_logit"][tokens]
    beta, xi = bos_value(layer), jnp.abs(layer["value"][tokens])
    found = {
        "backcopy_risk": backcopy_risk_nats(log_probs, oracle, is_trigger),
        "bigram_excess_risk": bigram_excess_risk_nats(log_probs, oracle, is_trigger),
        "sink_attention": jnp.mean(bos_weight, where=~is_trigger),
        "sink_logit": jnp.mean(on_bos, where=counted),
        "sink_logit_spread": jnp.std(on_bos, where=counted),
        "value_norm_bos": jnp.linalg.norm(beta - jnp.mean(beta)),
        "value_norm_rest": jnp.mean(xi, where=counted),
        "value_norm_triggers": jnp.mean(xi, where=is_trigger),
    }
    found |= {f"residual_norm_{i}": jnp.linalg.norm(residual) for i, residual in enumerate(residuals, start=1)}
    if residuals:
        first, key_norm = residuals[0], jnp.linalg.norm(params["direction"])
        found["largest_share"] = jnp.max(first**2) / jnp.sum(first**2)
        found |= {"kurtosis": kurtosis(first), "key_cosine": factor / key_norm / jnp.sqrt(len(first))}
    return found


def train(
    apply: Apply,
    params: Params,
    optimizer: optax.GradientTransformation,
    task: BigramBackcopy,
    shown: Sequence[int],
    seed: int,
) -> dict[int, dict[str, float]]:
    """Minimises the mean cross-entropy of fresh sequences of a task, and returns step -> the results of `measure`.

    The steps `shown` are multiples of 10, ascending; the last one ends the training.
    """
    held_out = np.asarray(task.batch(0, _EVALUATED, _LENGTH, seed + 1_000_000))[:, :-1]
    oracle, trigger = jnp.asarray(task.oracle(held_out), jnp.float32), task.is_trigger(np.arange(task.vocab_size))

    def loss(params: Params, drawn: jax.Array) -> jax.Array:
        logits = apply(params, drawn[:, :-1], trigger)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, drawn[:, 1:]).mean()

    def step(carry: Any, drawn: jax.Array) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, drawn), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry, drawn: jax.lax.scan(step, carry, drawn)[0])
    look = jax.jit(lambda params: training_metrics(apply, params, jnp.asarray(held_out), oracle, trigger))
    carry, found, steps = (params, optimizer.init(params)), {}, shown[-1]
    for done, drawn in zip(range(0, steps + 1, _CHUNK), [*sequences(task, steps, seed), None], strict=False):
        if done in shown:
            found[done] = {name: float(value) for name, value in look(carry[0]).items()}
        if drawn is not None:
            carry = run(carry, jnp.asarray(drawn))
    return found


_STEPS = 5000  # as in the published script; its notebook has 10,000
_SHOWN = (
    *(0, 10, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250, 300, 400, 500, 600, 800, 1000, 1200, 1500, 2000, 2500),
    *(3000, 3500, 4000, 4500, _STEPS),
)
_ORDERED = ("backcopy_risk", "bigram_excess_risk", "sink_attention", "sink_logit")


def _curves(found: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    return {f"{name}/step_{step}": of[name] for name in names for step, of in found.items()}


def _one_layer(seed: int) -> list[Row]:
    task = letters()
    found = train(apply, init(jax.random.key(seed), task.vocab_size), adamw(), task, _SHOWN, seed)
    metrics = found[_STEPS] | _curves(found, (*_ORDERED, "value_norm_bos"))
    for name in _ORDERED:
        metrics[f"{name}_half_step"] = half_step(list(found), [of[name] for of in found.values()])
    late = {step: of["sink_logit"] for step, of in found.items() if step >= 200}
    metrics["log_r"], metrics["log_slope"] = line(np.log(list(late)), list(late.values()))
    return [Row("one_layer", metrics)]


def _three_layers(seed: int) -> Iterator[Row]:
    task = letters()
    for name in ("adam", "sgd", "orthoadam"):
        params = init_three_layers(jax.random.key(seed), task.vocab_size)
        found = train(apply_three_layers, params, outer_optimizer(name, seed), task, _SHOWN, seed)
        norms = {step: of["residual_norm_1"] for step, of in found.items()}
        late = {step: norm for step, norm in norms.items() if step >= 1000}
        linear_r, slope = line(list(late), list(late.values()))
        shape = {"growth": norms[_STEPS] / norms[0], "linear_r": linear_r, "slope_per_1000": 1000 * slope}
        yield Row(name, found[_STEPS] | _curves(found, ("residual_norm_1",)) | shape)


_COPY, _BIGRAM = Metric("backcopy_risk"), Metric("bigram_excess_risk")
_SINK, _LOGIT, _SPREAD = Metric("sink_attention"), Metric("sink_logit"), Metric("sink_logit_spread")
_COPY_HALF, _BIGRAM_HALF, _SINK_HALF, _ = _HALVES = [Metric(f"{name}_half_step") for name in _ORDERED]
_VALUE_RATIO = Metric("value norm, <s> over others", lambda of: of["value_norm_bos"] / of["value_norm_rest"])
_LOG_R, _LOG_SLOPE = Metric("log_r"), Metric("log_slope")
_ONE = "one_layer"

SIMPLIFIED_MODEL = Study(
    name="simplified_model",
    title="The simplified one-layer model in training",
    rows=_one_layer,
    note="The reparametrised model of the paper, with an MLP of 128 hidden units. Letters and spaces of the "
    f"text, three triggers, {_STEPS:,} steps of {_BATCH} x {_LENGTH} tokens (published: 512 x 256), AdamW as "
    "published. The bigram excess is against the true law after <s>. A value's norm is that without its mean.",
    # After 10,000 steps, one seed, with 67 characters and 256 positions.
    paper={_ONE: {"backcopy_risk": 2.13e-7, "value_norm_bos": 0.3, "value_norm_triggers": 2.5}},
    columns=[_COPY, _BIGRAM, _SINK, _LOGIT, _SPREAD, "value_norm_bos value_norm_triggers value_norm_rest", _LOG_SLOPE,
             _LOG_R],
    tables=[Columns("Order of events: first step at half of the total change", _HALVES)],
    claims=[
        Claim("It learns both halves of the task.", ((_COPY[_ONE] < 1e-3) & (_BIGRAM[_ONE] < 0.02)).in_every_seed()),
        Claim("The bigram is learned first.", (_BIGRAM_HALF[_ONE] < _COPY_HALF[_ONE]).in_every_seed()),
        Claim("A sink forms: non-triggers attend to <s>.", (_SINK[_ONE] > 0.7).in_every_seed()),
        Claim("It forms after backcopy is learned.", (_COPY_HALF[_ONE] <= _SINK_HALF[_ONE]).in_every_seed()),
        Claim("The value of <s> is drained.", (_VALUE_RATIO[_ONE] < 0.2).in_every_seed()),
        Claim("Its logits grow straight in ln t, from step 200 on.", (_LOG_R[_ONE] > 0.97).in_every_seed()),
        Claim("The slope is not the 1/2 of gradient flow: Adam is faster.", (_LOG_SLOPE[_ONE] > 1).in_every_seed()),
        Claim("The logits of different positions concentrate.", _SPREAD[_ONE] < 0.35 * _LOGIT[_ONE]),
    ],
    pictures=[
        ByStep("backcopy_risk bigram_excess_risk", y_scale="log", x_scale="log", name="risks"),
        ByStep("sink_attention sink_logit value_norm_bos", x_scale="log", name="sink_and_drain"),
    ],
)  # fmt: skip

_GROWTH, _LINEAR, _SLOPE = Metric("growth"), Metric("linear_r"), Metric("slope_per_1000")
(_SHARE,) = shares("largest_share")
# Of either sign, since its factor in every logit, alpha, may have either.
_TURNED = Metric("|cosine| of <s> with its key", lambda of: abs(of["key_cosine"]))

SIMPLIFIED_THREE_LAYERS = Study(
    name="simplified_three_layers",
    title="The simplified three-layer model and the residual norm of <s> under three optimizers",
    rows=_three_layers,
    note="The middle layer is the simplified one-layer model and has AdamW; the layer below, the layer above and the "
    f"read-out have AdamW or OrthoAdam (Haar matrices, others in each seed) with rate {_OUTER_RATE:g}, or SGD with "
    f"momentum 0.9 and rate {_SGD_RATE:g}. Only <s> has a residual stream that is more than its embedding, of norm 1. "
    "The largest share is that of a coordinate, of 28, in the squared norm after the first layer.",
    columns=[_COPY, _BIGRAM, _SINK, _LOGIT, "value_norm_bos", _TURNED],
    tables=[Columns("The residual stream of <s>", ["residual_norm_1 residual_norm_2 residual_norm_3", _GROWTH, _SLOPE,
                                                   _LINEAR, _SHARE, "kurtosis"])],
    claims=[
        Claim("Under Adam the residual norm of <s> after the first layer grows linearly, from step 1,000 on.",
              ((_GROWTH["adam"] > 3) & (_LINEAR["adam"] > 0.97)).in_every_seed()),
        Claim("Under SGD it does not grow, while the sink stays.",
              ((_GROWTH["sgd"] < 1.5) & (_SINK["sgd"] > 0.5)).in_every_seed()),
        Claim("(Ours, predicted) OrthoAdam keeps the growth.",
              (_SLOPE["orthoadam"] >= 0.5 * _SLOPE["adam"]) & (_GROWTH["orthoadam"] > 3), _GROWTH["adam"] > 3),
        Claim("(Ours, predicted) OrthoAdam removes its channel.", _SHARE["orthoadam"] < 0.5 * _SHARE["adam"],
              _SHARE["adam"] > 0.4),
        Claim("The first layer turns <s> towards the key, whichever optimizer.", (_TURNED["*"] > 0.8).in_every_seed()),
    ],
    pictures=[
        ByStep("residual_norm_1", y_scale="log", name="residual_norm"),
    ],
)  # fmt: skip
