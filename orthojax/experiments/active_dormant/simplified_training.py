"""Training of the simplified models on Bigram-Backcopy, with measurements on the way."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax.analysis.backcopy import backcopy_risk_nats, bigram_excess_risk_nats
from orthojax.data.bigram_backcopy import BigramBackcopy
from orthojax.experiments.active_dormant import simplified
from orthojax.ops.statistics import kurtosis
from orthojax.optim import Rotation, orthoadam

# As published, but for steps of fewer and shorter sequences.
COPY_RATE, OUTER_RATE, SGD_RATE, B1, B2, WEIGHT_DECAY = 0.03, 3e-4, 0.03, 0.9, 0.99, 1e-4
BATCH, LENGTH, EVALUATED, CHUNK, DRAWN = 64, 64, 128, 10, 100

Params = simplified.Params
Apply = Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, simplified.Attended, Sequence[jax.Array]]]


def sequences(task: BigramBackcopy, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Yields int32 [CHUNK, BATCH, LENGTH + 1] for every `CHUNK` steps."""
    for block in range(-(-steps // DRAWN)):
        drawn = np.asarray(task.batch(block, DRAWN * BATCH, LENGTH, seed))
        yield from drawn.reshape(DRAWN // CHUNK, CHUNK, BATCH, LENGTH + 1)


def one_layer(params: Params, tokens: jax.Array, trigger: jax.Array) -> Any:
    """Applies the one-layer model, in the form of `apply_three_layers`."""
    return *simplified.apply(params, tokens, trigger), ()


def adamw(rate: float) -> optax.GradientTransformation:
    """Returns AdamW with the published betas and decay."""
    return optax.adamw(rate, B1, B2, weight_decay=WEIGHT_DECAY)


def outer_optimizer(name: str, seed: int) -> optax.GradientTransformation:
    """Returns AdamW of `COPY_RATE` for the middle one of three layers, the named one for all others."""
    outer = {
        "adam": adamw(OUTER_RATE),
        "orthoadam": orthoadam(OUTER_RATE, B1, B2, weight_decay=WEIGHT_DECAY, rotation=Rotation("haar", seed=seed)),
        "sgd": optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(SGD_RATE, momentum=0.9)),
    }[name]
    labels = lambda params: {key: "copy" if key == "copy" else "outer" for key in params}  # noqa: E731
    return optax.multi_transform({"copy": adamw(COPY_RATE), "outer": outer}, labels)


class Probe(NamedTuple):
    """Constants of the measurements: held-out inputs, the true laws, which ids are triggers."""

    tokens: jax.Array
    oracle: jax.Array
    trigger: jax.Array

    @classmethod
    def of_task(cls, task: BigramBackcopy, seed: int) -> "Probe":
        """Draws sequences of another seed than those of training."""
        tokens = np.asarray(task.batch(0, EVALUATED, LENGTH, seed))[:, :-1]
        trigger = task.is_trigger(np.arange(task.vocab_size))
        return cls(jnp.asarray(tokens), jnp.asarray(task.oracle(tokens), jnp.float32), jnp.asarray(trigger))


def measure(apply: Apply, params: Params, probe: Probe) -> dict[str, jax.Array]:
    """Measures risks in nats, weight on <s> and its logits at non-triggers, values, residual norms of <s>.

    The weight counts the row of <s>, as published; logits are those of a query at each non-trigger after <s>, with
    their standard deviation over positions; a value's norm is that without its mean, which shifts all logits alike.
    """
    logits, attended, residuals = apply(params, probe.tokens, probe.trigger)
    layer, log_probs, is_trigger = params.get("copy", params), jax.nn.log_softmax(logits), probe.trigger[probe.tokens]
    dormant, counted = ~is_trigger, (~is_trigger).at[:, 0].set(False)
    factor = 1.0
    if residuals:
        factor = simplified.layer_norm(residuals[0]) @ params["direction"]
    on_bos = factor * layer["sink_logit"][probe.tokens]
    beta, xi = simplified.bos_value(layer), jnp.abs(layer["value"][probe.tokens])
    found = {
        "backcopy_risk": backcopy_risk_nats(log_probs, probe.oracle, is_trigger),
        "bigram_excess_risk": bigram_excess_risk_nats(log_probs, probe.oracle, is_trigger),
        "sink_attention": jnp.mean(attended.bos_weight, where=dormant),
        "sink_logit": jnp.mean(on_bos, where=counted),
        "sink_logit_spread": jnp.std(on_bos, where=counted),
        "value_norm_bos": jnp.linalg.norm(beta - jnp.mean(beta)),
        "value_norm_rest": jnp.mean(xi, where=counted),
        "value_norm_triggers": jnp.mean(xi, where=is_trigger),
    }
    for number, residual in enumerate(residuals, start=1):
        found[f"residual_norm_{number}"] = jnp.linalg.norm(residual)
    if residuals:
        found["largest_share"] = jnp.max(residuals[0] ** 2) / jnp.sum(residuals[0] ** 2)
        found |= {"kurtosis": kurtosis(residuals[0]), "key_cosine": factor / jnp.linalg.norm(params["direction"])}
        found["key_cosine"] /= jnp.sqrt(len(residuals[0]))
    return found


def train(
    apply: Apply,
    params: Params,
    optimizer: optax.GradientTransformation,
    task: BigramBackcopy,
    steps: int,
    shown: Sequence[int],
    seed: int,
) -> dict[int, dict[str, float]]:
    """Minimises the mean cross-entropy of fresh sequences.

    Args:
      apply: The model.
      params: Its start.
      optimizer: Any.
      task: The task that sequences are drawn from.
      steps: How many, a multiple of `CHUNK`.
      shown: Steps after which to measure, multiples of `CHUNK`.
      seed: Of the sequences.

    Returns:
      Step -> the results of `measure`.
    """
    probe = Probe.of_task(task, seed + 1_000_000)

    def loss(params: Params, drawn: jax.Array) -> jax.Array:
        logits = apply(params, drawn[:, :-1], probe.trigger)[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, drawn[:, 1:]).mean()

    def step(carry: Any, drawn: jax.Array) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, drawn), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry, drawn: jax.lax.scan(step, carry, drawn)[0])
    look = jax.jit(lambda params: measure(apply, params, probe))
    carry, found = (params, optimizer.init(params)), {}
    for done, drawn in zip(range(0, steps + 1, CHUNK), [*sequences(task, steps, seed), None], strict=False):
        if done in shown:
            found[done] = {name: float(value) for name, value in look(carry[0]).items()}
        if drawn is not None:
            carry = run(carry, jnp.asarray(drawn))
    return found
