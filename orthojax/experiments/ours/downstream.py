"""Small tasks beside perplexity, for the four variants: endings of texts, copying by distance, closing brackets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orthojax.config import Config
from orthojax.experiments.claims import C, Claim, O, S, V
from orthojax.experiments.experiment import Experiment, Variant
from orthojax.experiments.from_attention import models
from orthojax.experiments.measures import Measure, Measured
from orthojax.experiments.ours import depth
from orthojax.experiments.results import Quantity, Result, Results
from orthojax.experiments.tables import MetricTable, PairedTable
from orthojax.model import LoadedModel, Transformer
from orthojax.ops import cross_entropy_nats
from orthojax.train import Inputs

ENDINGS, DISTANCES, RANDOM_ROWS = 4, (4, 8, 16, 32), 256
BRACKETS = (")", "]", "}")


def with_endings(rows: np.ndarray) -> np.ndarray:
    """Every row with its own last quarter, then with those of the next rows, int32 [R, ENDINGS, T + 1].

    >>> with_endings(np.arange(40).reshape(5, 8))[4, :, 5:]
    array([[37, 38, 39],
           [37,  6,  7],
           [37, 14, 15],
           [37, 22, 23]])
    """
    at = rows.shape[1] - rows.shape[1] // 4
    chosen = (np.arange(len(rows))[:, None] + np.arange(ENDINGS)) % len(rows)
    return np.concatenate([np.repeat(rows[:, None, :at], ENDINGS, axis=1), rows[chosen, at:]], axis=2)


def with_copies(distance: int, length: int, ids: Sequence[int], first: int | None, seed: int) -> np.ndarray:
    """Rows of random tokens, in which each token stands again `distance` later, int32 [RANDOM_ROWS, length].

    Args:
      distance: Of the copy.
      length: Tokens of a row.
      ids: Of which tokens are drawn, without replacement, so that each says what follows.
      first: A token before them all, BOS; None for none.
      seed: Of the tokens.
    """
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(ids, distance, replace=False) for _ in range(RANDOM_ROWS)])
    rows = np.tile(drawn, (1, length // distance + 1)).astype(np.int32)
    return (rows if first is None else np.insert(rows, 0, first, axis=1))[:, :length]


def bracket_ids(decode: Callable[[list[int]], str], vocab_size: int) -> list[list[int]]:
    """The tokens that are one closing bracket, with or without spaces, of each of `BRACKETS`."""
    words = [decode([i]).strip() for i in range(vocab_size)]
    return [[i for i, word in enumerate(words) if word == bracket] for bracket in BRACKETS]


@functools.partial(jax.jit, static_argnums=0)
def _predict(model: Transformer, params: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of rows [B, T + 1]: log p of the targets and whether they are the most probable token, [B, T]; logits."""
    logits = model.apply({"params": params}, rows[:, :-1])[0]
    targets = rows[:, 1:]
    return -cross_entropy_nats(logits, targets), jnp.argmax(logits, axis=-1) == targets, logits


def _on_all(loaded: LoadedModel, rows: np.ndarray, of: Callable[..., Any]) -> np.ndarray:
    """`of(log p, hits, logits)` of all rows, in batches."""
    size = loaded.config.eval.batch_size
    batches = (jnp.asarray(rows[i : i + size]) for i in range(0, len(rows), size))
    parts = (_predict(loaded.model, loaded.params, batch) for batch in batches)
    return np.concatenate([np.asarray(of(*part)) for part in parts])


def _brackets(loaded: LoadedModel, rows: np.ndarray) -> dict[str, float]:
    assert loaded.tokenizer is not None
    groups = bracket_ids(loaded.tokenizer.decode, loaded.config.model.vocab_size)
    kind = np.full(loaded.config.model.vocab_size, -1)
    for i, ids in enumerate(groups):
        kind[ids] = i
    truth = kind[rows[:, 1:]]
    asked = truth >= 0
    if not asked.any():
        return {}
    best = _on_all(loaded, rows, lambda log_p, hits, logits: jnp.stack(
        [jnp.max(logits[..., jnp.asarray(ids, int)], axis=-1, initial=-jnp.inf) for ids in groups], axis=-1
    ).argmax(-1))  # fmt: skip
    return {
        "bracket_accuracy": float((best == truth)[asked].mean()),
        "bracket_majority": float(np.bincount(truth[asked]).max() / asked.sum()),
    }


def _ask(loaded: LoadedModel, inputs: Inputs, on_progress: Callable[[str], None]) -> Measured:
    rows, T = inputs.evaluation, inputs.evaluation.shape[1] - 1
    offered = with_endings(rows)
    ending = rows.shape[1] // 4
    scores = _on_all(loaded, offered.reshape(-1, T + 1), lambda log_p, hits, logits: log_p[:, -ending:].sum(-1))
    found = {"cloze_accuracy": float((scores.reshape(-1, ENDINGS).argmax(1) == 0).mean())}
    on_progress("endings")
    first = int(rows[0, 0]) if loaded.config.data.bos else None
    ids = [i for i in range(loaded.config.model.vocab_size) if i != first]
    for distance in (d for d in DISTANCES if 2 * d <= T):
        copies = with_copies(distance, T + 1, ids, first, seed=0)
        hits = _on_all(loaded, copies, lambda log_p, hits, logits: hits)
        start = distance + (first is not None)  # the first query that stands on a copy
        found[f"induction_accuracy_{distance}"] = float(hits[:, start:].mean())
    on_progress("copies")
    if loaded.tokenizer is not None:
        found |= _brackets(loaded, rows)
    on_progress("brackets")
    return Measured(found, {})


def _stages(config: Config) -> int:
    return 3


ASKED = Measure("downstream", _ask, _stages)


def _share(name: str, label: str) -> Quantity:
    return Quantity(label, lambda of: of[name], "{:.1%}".format)


_TASKS = (
    _share("cloze_accuracy", f"true ending of {ENDINGS}"),
    *(_share(f"induction_accuracy_{d}", f"copies at distance {d}") for d in DISTANCES),
    _share("bracket_accuracy", "which bracket closes"),
)
_LOST = 0.02


def _loses_none(vanilla: Result, other: Result) -> bool:
    return all(other.mean(task) >= vanilla.mean(task) - _LOST for task in _TASKS)


CLAIMS = tuple(
    Claim(f"{words} none of these abilities.", (V, method), _TASKS, _loses_none,
          f"no accuracy more than {_LOST:.0%} of all answers below vanilla's, in the mean over seeds")
    for method, words in ((S, "Softmax-1 costs"), (O, "OrthoAdam costs"), (C, "Both together cost"))
)  # fmt: skip


def _variants(scale: str) -> tuple[Variant, ...]:
    """At scale tiny the models of `depth`: the stand-ins of the tables have no heads that copy."""
    return depth.EXPERIMENT.variants_at(scale) if scale == "tiny" else models.grid(scale, ("gpt2_130m",))


def _groups(results: Results) -> dict[str, dict[str, str]]:
    if results.scale == "tiny":
        return {"": {method: method for method in models.METHOD_LABELS}}
    return models.by_model(results)


def _about(results: Results) -> list[str]:
    majority = [result.bracket_majority for result in results if "bracket_majority" in result]
    frequent = f"; always the most frequent gives {majority[0]:.1%}" if majority else ""
    return [
        f"Endings: the last quarter of a held-out row or those of the next {ENDINGS - 1} rows, by their probability; "
        "chance is a quarter. Copies: random tokens that all come again, each predicted from the one before it. "
        f"Brackets: where a closing bracket follows, which one has the largest logit{frequent}."
    ]


EXPERIMENT = Experiment(
    name="downstream",
    title="Small tasks beside perplexity for the four variants: endings, copies by distance, closing brackets",
    variants=_variants,
    scales=models.SCALES,
    groups=_groups,
    seeds=(0, 1, 2),
    about=_about,
    measures=(ASKED,),
    tables=(
        MetricTable("Accuracy", ("perplexity", *_TASKS), transposed=True),
        PairedTable("Difference from softmax + Adam, paired by seed", V, differences=_TASKS),
    ),
    claims=CLAIMS,
)
