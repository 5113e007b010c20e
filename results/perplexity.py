"""What the cure costs in perplexity over all committed pairs: python results/perplexity.py.

Settings with learned or no positions in which every model has begun to copy, or has nothing to copy, with the d_model
axes rotated; seeds of one setting are taken together. Random effects over settings: the effect of a setting is normal
around the mean (DerSimonian and Laird, with one variance within all settings). Equivalence: two one-sided tests at 1%.
"""

import json
from pathlib import Path

import numpy as np
from scipy import stats

RESULTS = Path(__file__).parent
# Setting -> (folder, vanilla, cured) of its pairs.
SETTINGS = {
    "main job": [("quick", "vanilla", "cured")],
    "1M, ordinary text": [("ordinary_text", "vanilla", "cured")],
    "1M, repeated passages, 2,000 steps": [("repeated_passages", "vanilla_64_bos", "cured_64_bos")],
    "1M, repeated passages, 6,000 steps": [
        ("repeated_longer", "vanilla_64_bos_6000", "d_model_64_bos_6000"),
        ("damage", "vanilla_longer", "cured_longer"),
    ],
    "six layers, 500 steps": [("parity", "vanilla_500", "d_model_500")],
    "six layers, 2,000 steps": [("parity", "vanilla_2000", "d_model_2000")],
    "six layers, 10,000 steps": [("remaining_outliers", "vanilla", "d_model")],
    "eight layers": [("overnight/long_pair", "vanilla", "cured")],
    "46M": [("small/long_pair", "vanilla", "cured")],
}


def changes(folder: str, vanilla: str, cured: str) -> list[float]:
    """Returns ln(cured / vanilla) of the perplexity of every seed that both have."""
    rows = json.loads((RESULTS / folder / "results.json").read_text())["rows"]
    of = {(row["variant"], row["seed"]): row["metrics"]["perplexity"] for row in rows if "perplexity" in row["metrics"]}
    seeds = [seed for variant, seed in of if variant == vanilla and (cured, seed) in of]
    return [float(np.log(of[cured, seed] / of[vanilla, seed])) for seed in seeds]


def random_effects(groups: list[list[float]]) -> tuple[float, float]:
    """Returns the mean over settings and its standard error."""
    n, means = np.array([len(of) for of in groups]), np.array([np.mean(of) for of in groups])
    within = sum(((np.array(of) - np.mean(of)) ** 2).sum() for of in groups) / (n.sum() - len(n))
    weights = n / within
    mean = (weights * means).sum() / weights.sum()
    excess = (weights * (means - mean) ** 2).sum() - (len(n) - 1)
    between = max(0.0, excess / (weights.sum() - (weights**2).sum() / weights.sum()))
    weights = 1 / (within / n + between)
    return float((weights * means).sum() / weights.sum()), float(weights.sum() ** -0.5)


if __name__ == "__main__":
    found = {name: [x for pair in pairs for x in changes(*pair)] for name, pairs in SETTINGS.items()}
    for name, of in found.items():
        mean, low, high = np.expm1([np.mean(of), min(of), max(of)])
        print(f"{name:36} {len(of)} seeds  {mean:+.2%} ({low:+.1%} to {high:+.1%})")
    mean, error = random_effects(list(found.values()))
    p = max(stats.norm.sf((mean + np.log(1.01)) / error), stats.norm.sf((np.log(1.01) - mean) / error))
    mean, low, high = np.expm1([mean, mean - 1.96 * error, mean + 1.96 * error])
    all_seeds = sum(map(len, found.values()))
    print(f"{len(found)} settings, {all_seeds} seeds: {mean:+.2%} ({low:+.2%} to {high:+.2%}); within 1%: p = {p:.2g}")
