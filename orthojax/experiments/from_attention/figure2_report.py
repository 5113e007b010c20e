"""How `figure2` is told."""

from collections.abc import Sequence

import numpy as np

from orthojax.analysis import equal_logits_mass, uniformity_p_value
from orthojax.experiments.reporting import drawing, summaries
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table, verdict
from orthojax.experiments.reporting.summaries import metric_table
from orthojax.experiments.study.study import Study
from orthojax.formatting import mean_and_range, number
from orthojax.model import parameter_count

KEYS = 10  # the paper's
SHOWN_KEYS = 24
RELAXED, PLAIN = "relaxed", "causal"
_FACTOR = 2.0  # one token dominates where it has so many times what equal logits give, and what the other nine have
_LEVEL = 0.05
_MOST_SEEDS = 5  # in a picture
_METRICS = {
    "perplexity_after_first_keys": f"perplexity, positions >= {KEYS - 1}",
    "winner_mass": "attention mass of the winner",
    "others_mass": "of another of the ten, mean",
    "winner_fraction": "winner gets most attention, fraction",
    "winner_of_heads": "heads that it wins",
    "winner_of_sequences": "sequences that it wins",
    "largest_mass_of_sequence": "mass of the largest in each sequence",
}


def _equal(study: Study) -> float:
    """The mass of a key where all logits are equal."""
    return equal_logits_mass(study.variants[0].config.data.sequence_length, KEYS)


def _winners(study: Study, variant: str) -> dict[int, int]:
    return {seed: round(value) for seed, value in study.by_seed(variant, "winner").items()}


def _wins(winners: Sequence[int]) -> np.ndarray:
    return np.bincount(winners, minlength=KEYS)


def _dominates(study: Study, variant: str) -> list[bool]:
    """Of each seed, whether its winner dominates."""
    pairs = zip(study.values(variant, "winner_mass"), study.values(variant, "others_mass"), strict=True)
    return [mass > _FACTOR * max(_equal(study), others) for mass, others in pairs]


def what_seeds_can_tell(count: int) -> str:
    """How uneven the winners of so many seeds must be for uniformity to be refuted."""
    if KEYS ** (1 - count) >= _LEVEL:
        return f"{count} seed{'s' if count > 1 else ''} cannot refute a uniform distribution, whoever wins"

    def counts(wins: int) -> list[int]:
        return [wins, *(len(range(key, count - wins, KEYS - 1)) for key in range(KEYS - 1))]

    needed = next(wins for wins in range(2, count + 1) if uniformity_p_value(counts(wins)) < _LEVEL)
    return (
        f"{count} seeds refute a uniform distribution where one token wins {needed} of them and the others win equally "
        f"often, and cannot confirm it"
    )


def _tables(study: Study) -> list[Table]:
    rows = []
    for variant in study.variants:
        winners, masses = _winners(study, variant.name), study.by_seed(variant.name, "winner_mass")
        for seed in study.seeds:
            if seed not in winners:
                rows.append([f"{variant.label}, seed {seed}", "failed", *[""] * KEYS])
                continue
            mass = study.arrays(variant.name, seed, "first_keys")["mass"]
            told = f"{winners[seed]} ({masses[seed] / _equal(study):.1f} x equal logits)"
            rows.append([f"{variant.label}, seed {seed}", told, *(number(float(value)) for value in mass)])
    heads = []
    for variant in study.variants:
        seeds = list(_winners(study, variant.name))
        kept = [study.arrays(variant.name, seed, "first_keys") for seed in seeds]
        for label, key in (("heads", "mass_by_head"), ("sequences", "mass_by_sequence")):
            wins = [_wins(arrays[key].argmax(-1).ravel()) for arrays in kept]
            shares = np.sum(wins, axis=0) / max(np.sum(wins), 1)
            heads.append([f"{variant.label}: {label}", *(f"{share:.0%}" for share in shares)] if wins else [label])
    positions = [f"key {key}" for key in range(KEYS)]
    return [
        metric_table(study, "Dominance and perplexity", study.variants, _METRICS),
        Table(
            f"Mean attention weight on each of the first {KEYS} keys, queries >= {KEYS}, all heads and layers "
            f"(equal logits: {number(_equal(study))})",
            ["", "winner", *positions],
            rows,
        ),
        Table("Where each key has the largest weight: share of heads, and of sequences, all seeds", ["", *positions],
              [row for row in heads if len(row) > 1]),
    ]  # fmt: skip


def _claims(study: Study) -> list[Claim]:
    winners, plain = _winners(study, RELAXED), _winners(study, PLAIN)
    dominates, reference = _dominates(study, RELAXED), _dominates(study, PLAIN)
    counts = _wins(list(winners.values()))
    p_value = uniformity_p_value(counts.tolist())
    told = ", ".join(f"seed {seed}: key {key}" for seed, key in winners.items())
    mass = mean_and_range(study.values(RELAXED, "winner_mass"))
    others = mean_and_range(study.values(RELAXED, "others_mass"))
    visible = all(reference)
    won = visible and all(dominates)  # where nobody dominates, the largest of ten masses is noise
    heads, sequences = (study.mean(RELAXED, f"winner_of_{of}") for of in ("heads", "sequences"))
    return [
        Claim(
            verdict(all(dominates), visible=visible),
            f"One of the first {KEYS} tokens still dominates (section 3.2, Figure 2). Its mass {mass}, of another of "
            f"the ten {others}, with equal logits {number(_equal(study))} (criterion: over {_FACTOR:g} times both, in "
            f"every seed: {sum(dominates)} of {len(dominates)}; visible where a token dominates so under a causal "
            f"mask: {sum(reference)} of {len(reference)} seeds, mass "
            f"{mean_and_range(study.values(PLAIN, 'winner_mass'))}).",
        ),
        Claim(
            verdict(set(plain.values()) == {0} and set(winners.values()) != {0}, visible=won),
            f"It is the mask that privileges the first token. Under a causal mask key 0 wins in "
            f"{sum(key == 0 for key in plain.values())} of {len(plain)} seeds, where {KEYS} tokens see each other in "
            f"{counts[0]} of {len(winners)} (criterion: in all, and not in all; visible where one token dominates "
            f"under either mask).",
        ),
        Claim(
            verdict(p_value >= _LEVEL, visible=won and KEYS ** (1 - len(winners)) < _LEVEL),
            f"Which of the {KEYS} it is, is uniformly distributed ('this happens with uniform distribution'). Winners: "
            f"{told}; exact multinomial test of uniformity p = {p_value:.3g} (criterion: at least {_LEVEL}; visible as "
            f"before, with seeds enough). "
            f"{what_seeds_can_tell(len(winners))}. Within a seed the winner is a matter of position where it wins in "
            f"most heads ({heads:.0%}) and sequences ({sequences:.0%}).",
        ),
    ]


def _pictures(study: Study) -> list[Picture]:
    seeds = study.seeds[:_MOST_SEEDS]
    kept = {seed: study.arrays(RELAXED, seed, "first_keys") for seed in seeds}
    one = {seed: study.arrays(RELAXED, seed, "maps")["attention"][0][:, :SHOWN_KEYS] for seed in seeds}
    labels = {"x_label": "key position", "y_label": "query position", "value_label": "attention weight", "log": True}
    mean = drawing.maps({f"seed {seed}": arrays["map"] for seed, arrays in kept.items()}, **labels)
    single = drawing.maps({f"seed {seed}": panel for seed, panel in one.items()}, **labels)
    bars = drawing.bars(
        [str(key) for key in range(KEYS)],
        {f"seed {seed}": arrays["mass"][None] for seed, arrays in kept.items()},
        y_label=f"attention mass, queries >= {KEYS}",
    )
    about = f"first {SHOWN_KEYS} keys, mean over heads and layers; the first {KEYS} tokens see each other"
    return [
        Picture("relaxed_attention_one", f"Attention on one held-out sequence, {about}.", single, "png"),
        Picture("relaxed_attention_mean", f"Attention, mean over held-out sequences, {about}.", mean, "png"),
        Picture("relaxed_mass_by_key", f"Mean weight on each of the first {KEYS} keys, by seed.", bars),
    ]


def report(study: Study) -> Report:
    """Who wins in which seed, and whether that looks uniform."""
    config = study.variants[0].config
    finished = not study.failures()
    return summaries.study_report(
        study,
        "A causal mask relaxed for the first ten tokens",
        [
            f"Softmax attention and Adam, {parameter_count(config.model):,} parameters, {config.train.steps} steps of "
            f"{config.train.batch_size} x {config.data.sequence_length} tokens. The first {KEYS} tokens see each "
            f"other; targets that this shows ({KEYS - 1} positions) enter neither the loss nor the perplexity, and the "
            f"same positions are left out of the other model's perplexity here.",
            "Rows do not begin with a BOS, unlike those of most other experiments at this scale: it would be the same "
            "token at position 0 of every sequence, privileged by what it is and not by the mask. The paper's GPT-2 "
            "has none either.",
        ],
        claims=_claims(study) if finished else [],
        tables=_tables(study),
        pictures=_pictures(study) if finished else [],
    )
