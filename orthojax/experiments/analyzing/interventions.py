"""Interventions as the command line names them: zero_head:11.3, active_head:11.3+zero_mlp:2, dormant_heads:0.9."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from orthojax.config import ModelConfig
from orthojax.errors import UserError, nearest
from orthojax.model import Interventions, attention_pattern

DORMANT = "dormant_heads"
RANDOM_DRAWS = 3  # of as many heads, to compare with
_HIDDEN = -1e9  # a logit that no normalizer gives weight

# Kind -> what it is of.
KINDS = {
    "zero_head": "LAYER.HEAD",
    "first_head": "LAYER.HEAD",
    "active_head": "LAYER.HEAD",
    "zero_attention": "LAYER",
    "zero_mlp": "LAYER",
    "zero_first_value": "LAYER",
    "mean_attention": "LAYER",
    "mean_mlp": "LAYER",
}
ALLOWED = f"{', '.join(f'{kind}:{of}' for kind, of in KINDS.items())} (* for all), joined by +; {DORMANT}[:MASS]"


@dataclasses.dataclass(frozen=True)
class Change:
    """One intervention.

    Attributes:
      kind: Of `KINDS`.
      layer: Which, None for all.
      head: Which, None for all.
    """

    kind: str
    layer: int | None
    head: int | None = None


def parse(text: str, config: ModelConfig) -> list[Change]:
    """The changes that a text joins by +.

    Raises:
      UserError: For an unknown kind, or a layer or head that the model does not have.
    """
    changes = []
    for part in text.split("+"):
        kind, _, where = part.partition(":")
        if kind not in KINDS:
            hint = nearest(kind, [*KINDS, DORMANT])
            raise UserError(f"unknown intervention {part!r} in {text!r}", allowed=ALLOWED, hint=hint)
        form = r"(\d+|\*)" + (r"\.(\d+|\*)" if KINDS[kind] == "LAYER.HEAD" else "")
        if not (match := re.fullmatch(form, where)):
            raise UserError(f"{part!r} does not say where", allowed=f"{kind}:{KINDS[kind]}, each a number or *")
        places = [None if group == "*" else int(group) for group in match.groups()]
        for place, what, size in zip(places, ("layer", "head"), (config.num_layers, config.num_heads), strict=False):
            if place is not None and place >= size:
                raise UserError(f"{part!r}: the model has no {what} {place}", allowed=f"0 to {size - 1}")
        changes.append(Change(kind, *places))
    return changes


def build(
    changes: Sequence[Change], config: ModelConfig, length: int, means: Mapping[str, np.ndarray]
) -> Interventions:
    """The interventions that several changes are together.

    Definitions: `zero_head` removes what a head writes; `first_head` moves all its weight to the first token;
    `active_head` hides key 0 from it, so that its weights are normalised over the other keys (query 0, which sees no
    other, keeps it where the normalizer is softmax); `zero_attention` and `zero_mlp` remove what a part of a layer
    adds; `zero_first_value` removes the values of the first token in a layer; `mean_attention` and `mean_mlp` put the
    mean over positions and sequences in the place of what a part adds.

    Args:
      changes: Of one model.
      config: Of it.
      length: T.
      means: `mean_attention_output` and `mean_mlp_output`, [L, D].
    """
    L, N, K = config.num_layers, config.num_heads, config.kv_heads
    arrays: dict[str, np.ndarray] = {}
    every = slice(None)

    def start(name: str, shape: tuple[int, ...], value: float) -> np.ndarray:
        return arrays.setdefault(name, np.full(shape, value, np.float32))

    for change in changes:
        layer = every if change.layer is None else change.layer
        head = every if change.head is None else change.head
        if change.kind == "zero_head":
            start("head_scale", (L, N), 1.0)[layer, head] = 0.0
        elif change.kind == "first_head":
            arrays["forced_weights"] = np.asarray(attention_pattern("first", length))
            start("forced_share", (L, N), 0.0)[layer, head] = 1.0
        elif change.kind == "active_head":
            start("attention_bias", (L, 1, N, 1, length), 0.0)[layer, :, head, :, 0] = _HIDDEN
        elif change.kind in ("zero_attention", "zero_mlp"):
            start(f"{change.kind.removeprefix('zero_')}_scale", (L,), 1.0)[layer] = 0.0
        elif change.kind == "zero_first_value":
            start("first_value_scale", (L, K), 1.0)[layer] = 0.0
        else:
            part = change.kind.removeprefix("mean_") + "_output"
            arrays[part] = np.asarray(means[f"mean_{part}"], np.float32)[:, None, None]
            start(f"{part}_share", (L,), 0.0)[layer] = 1.0
    return Interventions(**arrays)  # pyright: ignore[reportArgumentType]


def dormant_heads(text: str, mass: np.ndarray, threshold: float) -> dict[str, list[Change]]:
    """All heads whose mean weight on the first token exceeds a number, zeroed together, and as many random ones.

    Args:
      text: `dormant_heads`, or `dormant_heads:0.9` with the number.
      mass: Mean weight on the first token, [L, N].
      threshold: The number where the text has none.

    Returns:
      Changes by name: the dormant heads, and three draws of as many among all heads, with the count of dormant ones
      among them; nothing where no head is dormant.

    Raises:
      UserError: Where the number is none, or other changes are joined to it.
    """
    number = text.partition(":")[2] or f"{threshold:g}"
    try:
        least = float(number)
    except ValueError:
        problem = f"{text!r} is joined with +" if "+" in text else f"{text!r} has no number"
        raise UserError(problem, allowed=f"{DORMANT}:0.9 alone") from None
    places = np.argwhere(mass > least)
    if not len(places):
        return {}
    found = {f"{DORMANT}:{number} ({len(places)} heads)": places}
    every = np.argwhere(np.ones_like(mass, bool))
    for seed in range(RANDOM_DRAWS):
        drawn = np.random.default_rng(seed).choice(len(every), len(places), replace=False)
        dormant = int((mass[tuple(every[drawn].T)] > least).sum())
        found[f"{len(places)} random heads, draw {seed}, {dormant} dormant"] = every[np.sort(drawn)]
    return {name: [Change("zero_head", int(l), int(h)) for l, h in heads] for name, heads in found.items()}
