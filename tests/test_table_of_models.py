"""The table of models of docs/claims.md, and the first of the README, are what the committed results say."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from committed import RESULTS, committed, folder_of

from orthojax.experiments.catalog import find
from orthojax.experiments.results import Result, pairs, penalty
from orthojax.experiments.tables import change_text
from orthojax.formatting import mean_and_range

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CLAIMS = (ROOT / "docs" / "claims.md").read_text()
HEAD = "| layers x width, tokens of a row, steps; experiment | axes, seeds |"


class Pair(NamedTuple):
    """A vanilla and a cured variant of an experiment, and what the table calls them."""

    label: str
    experiment: str
    vanilla: str
    cured: str
    scale: str = "tiny"


PAIRS = (
    Pair("12 x 512, 256, 6,000", "long_pair", "vanilla", "cured", "small"),
    Pair("4 x 128, 64, 2,000", "ordinary_text", "vanilla", "cured"),
    Pair("6 x 128, 128, 10,000", "remaining_outliers", "vanilla", "residual"),
    Pair("the same", "remaining_outliers", "vanilla", "cured"),
    Pair("8 x 256, 256, no `<s>`, 4,000", "long_pair", "vanilla", "cured"),
    Pair("repeated: 4 x 128, 64, 2,000", "repeated_passages", "vanilla_64_bos", "cured_64_bos"),
    Pair("repeated: 4 x 128, 64, 6,000", "repeated_longer", "vanilla_64_bos_6000", "residual_64_bos_6000"),
    Pair("the same", "repeated_longer", "vanilla_64_bos_6000", "cured_64_bos_6000"),
    Pair("repeated: 4 x 128, 64, no `<s>`, 6,000", "repeated_settings", "vanilla_64_6000", "cured_64_6000"),
    Pair("repeated: 4 x 128, 256, 2,000", "repeated_settings", "vanilla_256_bos_2000", "cured_256_bos_2000"),
    Pair("repeated: 4 x 256, 64, 2,000", "damage", "vanilla_256", "cured_256"),
    Pair("repeated: 8 x 256, 256, 12,000", "long_pair", "vanilla", "cured", "overnight"),
    Pair("repeated: 6 x 128, 128, 2,000", "depth", "vanilla", "cured"),
    *(
        Pair(f"repeated: {kind}6 x {width}, 128, 2,000", "table2", f"{model}_vanilla", f"{model}_cured", "deep")
        for kind, width, model in (
            ("", 96, "gpt2_60m"),
            ("", 128, "gpt2_130m"),
            ("", 160, "gpt2_350m"),
            ("", 192, "gpt2_1_4b"),
            ("Llama, ", 128, "llama2_130m"),
        )
    ),
)


def row_of(pair: Pair) -> str:
    """The row, from results.json: vanilla above, cured below."""
    results = committed(find(pair.experiment), pair.scale)
    both = vanilla, cured = results[pair.vanilla], results[pair.cured]
    change = str(change_text(pairs(cured, vanilla, "perplexity")))
    axes = {"residual": "d_model", "output": "output"}[cured.config.optim.rotation.axes]
    folder = folder_of(find(pair.experiment), pair.scale).relative_to(RESULTS)
    name = pair.experiment if pair.scale == "tiny" else f"{pair.experiment} --scale={pair.scale}"
    fractions = [[100 * value for value in of.values("first_attention_fraction")] for of in both]
    cells = [
        f"{pair.label}<br>[`{name}`](../results/{folder}/report.md)",
        f"{axes}<br>{len(cured.seeds)}",
        "<br>".join(mean_and_range(of.values("kurtosis_first"), "{:.1f}".format) for of in both),
        "<br>".join(mean_and_range(values, "{:.1f}".format) for values in fractions),
        re.sub(r"% \(95% CI (.*), \d seeds\)", r"<br>(\1)", change).rstrip("%"),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_results_say():
    table = CLAIMS.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    assert table == list(map(row_of, PAIRS))


@pytest.mark.parametrize("i", range(len(PAIRS)), ids=[f"{pair.experiment}-{pair.cured}" for pair in PAIRS])
def test_label_says_what_was_trained(i):
    pair, label = PAIRS[i], PAIRS[i].label
    config = committed(find(pair.experiment), pair.scale)[pair.vanilla].config
    if label == "the same":
        above = PAIRS[i - 1]
        assert (above.experiment, above.vanilla) == (pair.experiment, pair.vanilla)
        label = above.label
    assert label.startswith("repeated: ") == bool(config.data.repeated_share)
    assert f"{config.model.num_layers} x {config.model.d_model}, {config.data.sequence_length}, " in label
    assert label.endswith(f", {config.train.steps:,}")
    assert ("no `<s>`" in label) != config.data.bos


def _shown(of: Result) -> list[str]:
    """The five rows of the README's first table for one variant."""
    kurtosis = of.values("kurtosis_first")
    fraction, mass = ([100 * x for x in of.values(f"first_attention_{name}")] for name in ("fraction", "mass"))
    lost = [100 * x for x in of.values(penalty("perplexity_int8_coarse"))]
    show = [
        (kurtosis, "{:.0f}" if max(kurtosis) > 10 else "{:.1f}", ""),
        (fraction, "{:.1f}", "%"),
        (mass, "{:.1f}", "%"),
        (of.values("perplexity"), "{:.2f}" if max(of.values("perplexity")) < 10 else "{:.1f}", ""),
        (lost, "{:.2f}", "%"),
    ]
    cells = []
    for values, form, unit in show:
        mean, _, spread = mean_and_range(values, form.format).partition(" (")
        cells.append(f"{mean}{unit}{f' ({spread}' if spread else ''}")
    return cells


def test_the_first_table_of_the_readme_is_what_the_results_say():
    large, small = committed(find("long_pair"), "small"), committed(find("repeated_longer"))
    columns = [large["vanilla"], large["cured"], small["vanilla_64_bos_6000"], small["residual_64_bos_6000"]]
    table = README.partition("| 46M parameters, two seeds: vanilla")[2].partition("\n\n")[0].splitlines()[2:]
    found = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table]
    assert found == [list(row) for row in zip(*map(_shown, columns), strict=True)]
