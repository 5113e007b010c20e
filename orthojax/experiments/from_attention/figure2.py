"""Figure 2: the first ten tokens see each other. Which of them takes over the attention, and does it differ by seed?

Rows do not begin with a BOS here, at any scale: it would be the same token at position 0 of every sequence, privileged
by what it is, where the question is what the mask privileges. The paper's GPT-2 has none either.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from orthojax import analysis
from orthojax.config import replace
from orthojax.experiments import drawing
from orthojax.experiments.claims import Claim
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention import relaxed_mask
from orthojax.experiments.from_attention.models import SCALES, base_run
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.page import Picture, Table
from orthojax.experiments.pictures import draw_attention
from orthojax.experiments.results import NotMeasured, Result, Results, metric
from orthojax.experiments.tables import MetricTable
from orthojax.formatting import number
from orthojax.model import LoadedModel, parameter_count
from orthojax.train import Inputs

KEYS = 10  # the paper's
RELAXED, PLAIN = "relaxed", "causal"
_SEQUENCES = 1024  # of the evaluation set, at most
_AT_ONCE = 32  # sequences, of which the logits are held
_SHOWN_KEYS = 24
_FACTOR = 2.0  # one token dominates where it has so many times what equal logits give, and what the other nine have
_LEVEL = 0.05
_MOST_SEEDS = 5  # in a picture


def variants(scale: str) -> tuple[Variant, ...]:
    """Softmax and Adam with the relaxed mask, and the same with a plain one."""
    base = replace(base_run(scale), {"data.bos": False})
    return (
        Variant(RELAXED, f"first {KEYS} tokens see each other", replace(base, {"model.relaxed_causal_tokens": KEYS})),
        Variant(PLAIN, "causal mask", base),
    )


def _observe(taps: analysis.Taps, targets: jax.Array) -> dict[str, jax.Array]:
    """Of one layer: sums over sequences of mass and fraction [N, k] and of the map [T, k']; mass by sequence [B, k]."""
    weights = taps.attention_weights
    mass = relaxed_mask.attention_mass_by_key(weights, KEYS, KEYS)
    return {
        "mass": mass.sum(0),
        "fraction": relaxed_mask.attention_fraction_by_key(weights, KEYS, KEYS).sum(0),
        "map": weights[..., :_SHOWN_KEYS].mean(1).sum(0),
        "by_sequence": mass.mean(1),
    }


def _loss_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats, over the positions whose targets the relaxed mask does not show; of both models."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses[:, KEYS - 1 :])


def _join(a: Any, b: Any) -> Any:
    """Two batches' sums are added, what is by sequence is joined."""
    if not isinstance(a, dict):
        return a + b
    return {key: np.concatenate([a[key], b[key]], axis=1) if key == "by_sequence" else a[key] + b[key] for key in a}


def _measure(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    """The metrics of the first keys, from their mean weight for queries >= k, and means as arrays."""
    rows = inputs.evaluation[:_SEQUENCES]
    batches = [(rows[i : i + _AT_ONCE, :-1], rows[i : i + _AT_ONCE, 1:]) for i in range(0, len(rows), _AT_ONCE)]
    observed, loss = jax.device_get(analysis.measure(loaded, batches, _observe, output=_loss_sum, join=_join))
    on_progress("first keys")
    by_head, fraction, shown = (observed[key] / len(rows) for key in ("mass", "fraction", "map"))  # [layers, ...]
    by_sequence, mass = observed["by_sequence"].mean(0), by_head.mean((0, 1))
    loss_nats = float(loss) / (len(rows) * (rows.shape[1] - KEYS))
    winner = int(np.argmax(mass))
    metrics = {
        "perplexity_after_first_keys": float(np.exp(loss_nats)),
        "winner": float(winner),
        "winner_mass": float(mass[winner]),
        "winner_fraction": float(fraction.mean((0, 1))[winner]),
        "others_mass": float(np.delete(mass, winner).mean()),
        "winner_of_heads": float(np.mean(by_head.argmax(-1) == winner)),
        "winner_of_sequences": float(np.mean(by_sequence.argmax(-1) == winner)),
        # In whatever position: high where each sequence has a winner of its own.
        "largest_mass_of_sequence": float(by_sequence.max(-1).mean()),
    }
    arrays = {"mass": mass, "mass_by_head": by_head, "fraction_by_head": fraction, "map": shown.mean(0)}
    return Measured(metrics, arrays | {"mass_by_sequence": by_sequence})


def _equal(result: Result) -> float:
    """The mass of a key where all logits are equal."""
    return relaxed_mask.equal_logits_mass(result.config.data.sequence_length, KEYS)


def _winners(result: Result) -> dict[int, int]:
    """Seed -> the key that wins."""
    if not (found := result.by_seed("winner")):
        raise NotMeasured("winner")
    return {seed: round(value) for seed, value in found.items()}


def _dominates(result: Result) -> bool:
    """Whether the winner dominates in every seed; where nobody does, the largest of ten masses is noise."""
    _winners(result)
    both = zip(result.values("winner_mass"), result.values("others_mass"), strict=True)
    return all(mass > _FACTOR * max(_equal(result), others) for mass, others in both)


def _both_dominate(*of: Result) -> bool:
    return all(map(_dominates, of))


def _p_value(relaxed: Result) -> float:
    """Of the exact multinomial test that each key wins equally often."""
    return relaxed_mask.uniformity_p_value(np.bincount(list(_winners(relaxed).values()), minlength=KEYS).tolist())


def _winners_text(*of: Result) -> str:
    return "winner by seed " + " → ".join(str(list(_winners(result).values())) for result in of)


_SEEN = "testable where one token dominates under either mask, in every seed"
CLAIMS = (
    Claim(f"One of the first {KEYS} tokens still dominates (section 3.2, Figure 2).", (RELAXED, PLAIN),
          (metric("winner_mass", "mass of the winner"), metric("others_mass", "of another of the ten")),
          lambda r, p: _dominates(r), f"over {_FACTOR:g} times what equal logits give and what the other nine have, in "
          "every seed; testable where a token dominates so under a causal mask", lambda r, p: _dominates(p),
          detail=lambda r, p: f"with equal logits {number(_equal(r))}"),
    Claim("It is the mask that privileges the first token.", (RELAXED, PLAIN), (),
          lambda r, p: set(_winners(p).values()) == {0} and set(_winners(r).values()) != {0},
          f"key 0 wins in every seed under a causal mask, and not in every seed where {KEYS} tokens see each other; "
          f"{_SEEN}", _both_dominate, detail=_winners_text),
    Claim(f"Which of the {KEYS} it is, is uniformly distributed ('this happens with uniform distribution').",
          (RELAXED, PLAIN),
          (metric("winner_of_heads", "heads that it wins"), metric("winner_of_sequences", "sequences")),
          lambda r, p: _p_value(r) >= _LEVEL, f"p at least {_LEVEL}; {_SEEN}, and where so many seeds with one winner "
          "would refute it, which never confirms it",
          lambda r, p: _both_dominate(r, p) and KEYS ** (1 - len(_winners(r))) < _LEVEL,
          detail=lambda r, p: f"{_winners_text(r)}, exact multinomial test of uniformity p = {_p_value(r):.3g}"),
)  # fmt: skip


def _key_tables(results: Results) -> list[Table]:
    """Mass of each key in each seed, and where each key has the largest."""
    rows, wins = [], []
    for result in results.finished:
        stored = {seed: result.arrays("first_keys", seed) for seed in result.folders}
        for seed, arrays in stored.items():
            mass = arrays["mass"]
            relative = f"{mass.argmax()} ({mass.max() / _equal(result):.1f} x equal logits)"
            rows.append([f"{result.label}, seed {seed}", relative, *(number(float(value)) for value in mass)])
        for label, key in (("heads", "mass_by_head"), ("sequences", "mass_by_sequence")):
            winners = np.concatenate([arrays[key].argmax(-1).ravel() for arrays in stored.values()])
            shares = np.bincount(winners, minlength=KEYS) / len(winners)
            wins.append([f"{result.label}: {label}", *(f"{share:.0%}" for share in shares)])
    positions = [f"key {key}" for key in range(KEYS)]
    return [
        Table(
            f"Mean attention weight on each of the first {KEYS} keys, queries >= {KEYS}, all heads and layers (equal "
            f"logits: {number(_equal(results.first))})", ["", "winner", *positions], rows),
        Table("Where each key has the largest weight: share of heads, and of sequences, all seeds", ["", *positions],
              wins),
    ]  # fmt: skip


def _pictures(results: Results) -> list[Picture]:
    relaxed = results[RELAXED]
    seeds = list(relaxed.folders)[:_MOST_SEEDS]
    stored = {f"seed {seed}": relaxed.arrays("first_keys", seed) for seed in seeds}
    one = {f"seed {seed}": relaxed.arrays("maps", seed)["attention"][0][:, :_SHOWN_KEYS] for seed in seeds}
    mean = draw_attention({label: arrays["map"] for label, arrays in stored.items()})
    masses = {label: arrays["mass"] for label, arrays in stored.items()}
    bars = drawing.bars([str(key) for key in range(KEYS)], masses, y_label=f"attention mass, queries >= {KEYS}",
                        references={"equal logits": [_equal(relaxed)] * KEYS})  # fmt: skip
    words = f"first {_SHOWN_KEYS} keys, mean over heads and layers; the first {KEYS} tokens see each other"
    return [
        Picture("relaxed_attention_one", f"Attention on one held-out sequence, {words}.", draw_attention(one), "png"),
        Picture("relaxed_attention_mean", f"Attention, mean over held-out sequences, {words}.", mean, "png"),
        Picture("relaxed_mass_by_key", f"Mean weight on each of the first {KEYS} keys, by seed.", bars),
    ]


def _about(results: Results) -> list[str]:
    config = results.first.config
    return [
        f"Softmax attention and Adam, {parameter_count(config.model):,} parameters, {config.train.steps} steps of "
        f"{config.train.batch_size} x {config.data.sequence_length} tokens. The first {KEYS} tokens see each other; "
        f"targets that this shows ({KEYS - 1} positions) enter neither the loss nor the perplexity, and the same "
        "positions are left out of the other model's perplexity here.",
        "Rows do not begin with a BOS, unlike those of most other experiments at this scale: it would be the same "
        "token at position 0 of every sequence, privileged by what it is and not by the mask. The paper's GPT-2 has "
        "none either.",
    ]


EXPERIMENT = Experiment(
    name="figure2",
    title="Figure 2: the first ten tokens see each other; which of them dominates attention",
    variants=variants,
    scales=SCALES,
    seeds=(0, 1, 2, 3, 4),
    about=_about,
    tables=(
        MetricTable(
            "Dominance and perplexity",
            (
                metric("perplexity_after_first_keys", f"perplexity, positions >= {KEYS - 1}"),
                metric("winner_mass", "attention mass of the winner"),
                metric("others_mass", "of another of the ten, mean"),
                metric("winner_fraction", "winner gets most attention, fraction"),
                metric("winner_of_heads", "heads that it wins"),
                metric("winner_of_sequences", "sequences that it wins"),
                metric("largest_mass_of_sequence", "mass of the largest in each sequence"),
            ),
            transposed=True,
        ),
        _key_tables,
    ),
    claims=CLAIMS,
    pictures=(_pictures,),
    measures=(Measure("first_keys", _measure),),
)
