"""What every report needs from a finished study: numbers with their spread, tables, curves, and how it was made."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from orthojax.experiments.reporting import drawing
from orthojax.experiments.reporting.criteria import GAUSSIAN
from orthojax.experiments.reporting.page import Claim, Picture, Report, Table
from orthojax.experiments.study.study import Study
from orthojax.experiments.study.variant import Variant
from orthojax.formatting import mean_and_range
from orthojax.train import read_metrics

METRICS = {
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "kurtosis_first": "kurtosis, first token (Gaussian: 3)",
    "kurtosis_rest": "kurtosis, other tokens",
    "kurtosis_pooled": "kurtosis, all tokens",
    "max_abs_first": "max |activation|, first token",
    "max_abs_rest": "max |activation|, other tokens",
    "max_abs_first_maximum": "the same over the whole set, first token",
    "max_abs_rest_maximum": "the same over the whole set, other tokens",
    "norm_ratio_first": "max / l2 norm, first token",
    "norm_ratio_rest": "max / l2 norm, other tokens",
    "first_attention_mass": "attention mass on the first token",
    "first_attention_fraction": "first token gets most attention, fraction",
    "sink_rate": "heads with a mean > 0.3 on the first token, fraction",
    "value_norm_first": "value norm, first token",
    "value_norm_rest": "value norm, other tokens",
    "residual_norm_first": "residual norm, first token",
    "residual_norm_rest": "residual norm, other tokens",
    "perplexity_int8_fine": "perplexity, int8 fine",
    "perplexity_int8_fine_per_token": "perplexity, int8 fine, per-token form",
    "perplexity_int8_moderate": "perplexity, int8 moderate",
    "perplexity_int8_coarse": "perplexity, int8 coarse",
    "perplexity_int4_zeropoint": "perplexity, int4 zeropoint",
}
QUANTIZATION = {
    "perplexity": "float32",
    "perplexity_int8_fine": "int8 fine",
    "perplexity_int8_moderate": "int8 moderate",
    "perplexity_int8_coarse": "int8 coarse",
    "perplexity_int4_zeropoint": "int4 zeropoint",
}

Curves = dict[str, tuple[list[float], np.ndarray]]  # label -> (x [n], y [seeds, n])


def metric_table(
    study: Study,
    caption: str,
    variants: Sequence[Variant],
    metrics: Mapping[str, str],
    *,
    rows: Literal["metrics", "variants"] = "metrics",
) -> Table:
    """A table of `spread`s.

    Args:
      study: Where the values are.
      caption: Of the table.
      variants: Which variants.
      metrics: Metric -> its label.
      rows: What has a row of its own; the other has columns.
    """
    cells = {(v.name, key): mean_and_range(study.values(v.name, key)) for v in variants for key in metrics}
    if rows == "variants":
        body = [[v.label, *(cells[v.name, key] for key in metrics)] for v in variants]
        return Table(caption, ["", *metrics.values()], body)
    body = [[label, *(cells[v.name, key] for v in variants)] for key, label in metrics.items()]
    return Table(caption, ["", *(v.label for v in variants)], body)


def finished_seeds(study: Study, variant: Variant) -> list[int]:
    """The seeds of the runs that did not fail; of a given model the one that it was trained with."""
    return list(study.by_seed(variant.name, "loss_nats"))


def finished(study: Study, variants: Sequence[Variant]) -> list[Variant]:
    """The variants of which at least one seed did not fail."""
    return [variant for variant in variants if finished_seeds(study, variant)]


def training_curves(study: Study, variants: Sequence[Variant], key: str) -> Curves:
    """One entry of metrics.jsonl by step, at the steps that all seeds have; of the variants and seeds that finished."""
    curves: Curves = {}
    for variant in finished(study, variants):
        seeds = finished_seeds(study, variant)
        runs = [read_metrics(study.run_dir(variant.name, seed) / "metrics.jsonl") for seed in seeds]
        points = [{line["step"]: line[key] for line in run if key in line} for run in runs]
        steps = sorted(set.intersection(*(set(point) for point in points)))
        curves[variant.label] = (steps, np.array([[point[step] for step in steps] for point in points]))
    return curves


def layer_curves(study: Study, variants: Sequence[Variant], metric: str, *, normalized: bool = False) -> Curves:
    """One metric after each layer, of the variants that finished.

    Args:
      study: Where the values are.
      variants: Which variants.
      metric: Without `/layer_i`.
      normalized: The x of layer m of L, counted from 0, is m / (L - 1) and 0 for a single layer; otherwise m + 1.
    """
    values = {variant.label: study.by_layer(variant.name, metric) for variant in variants}
    return {
        label: ([m / max(y.shape[1] - 1, 1) if normalized else m + 1 for m in range(y.shape[1])], y)
        for label, y in values.items()
        if y.size
    }


def penalties(study: Study, variant: str, metric: str) -> list[float]:
    """By which fraction a quantised perplexity is above the float one, for each seed."""
    pairs = zip(study.values(variant, metric), study.values(variant, "perplexity"), strict=True)
    return [quantized / plain - 1 for quantized, plain in pairs]


def perplexity_and_kurtosis(study: Study, groups: Mapping[str, Sequence[tuple[Variant, float]]]) -> Picture:
    """Every variant as a point; groups have (variant, kurtosis)."""
    points = {
        label: [
            (study.mean(v.name, "perplexity"), kurtosis, v.label.removesuffix(", rotated")) for v, kurtosis in group
        ]
        for label, group in groups.items()
    }
    figure = drawing.scatter(
        points, x_label="perplexity", y_label="kurtosis, larger of first token and others", y_scale="log",
        reference=(GAUSSIAN, "Gaussian"),
    )  # fmt: skip
    return Picture("perplexity_and_kurtosis", "Perplexity and kurtosis.", figure)


def study_report(
    study: Study,
    title: str,
    summary: Sequence[str],
    *,
    claims: Sequence[Claim],
    tables: Sequence[Table],
    pictures: Sequence[Picture] = (),
    extra_notes: Sequence[str] = (),
) -> Report:
    """A report of models: what is special to it, framed by what all have: seeds, text, failures, how it was made.

    Args:
      study: What is reported.
      title: Of the page.
      summary: Paragraphs; seeds, text and what failed follow.
      claims: What held and what did not.
      tables: In their order.
      pictures: In their order.
      extra_notes: On how it was made, after what every report has.
    """
    return Report(
        title=title,
        summary=[*summary, f"{_seeds_sentence(study)}{_corpus_sentence(study)}", *study.failures()],
        claims=claims,
        tables=tables,
        pictures=pictures,
        notes=[*_notes(study), *extra_notes],
        links=_links(study),
    )


def _seeds_sentence(study: Study) -> str:
    """Which seeds, and what one seed is worth; nothing where all models are given ones."""
    if all(variant.checkpoint for variant in study.variants):
        return ""
    anecdote = " One seed is an anecdote: run with --seeds=0,1,2 for a spread." if len(study.seeds) == 1 else ""
    return f"Seeds: {', '.join(map(str, study.seeds))}.{anecdote} "


def _corpus_sentence(study: Study) -> str:
    """What the texts are and what they are not."""
    data = study.results["provenance"]["data"]
    if study.variants[0].config.data.kind != "embedded":
        return f"The text is {_sources(data)}. Evaluation uses held-out rows."
    given = any(v.checkpoint for v in study.variants)
    others = f" Given models may have other text: {_sources(data[1:])}." if given and data[1:] else ""
    files = f"{data[0]['file_count']} files, " if data else ""
    return (
        f"The text is Python's own standard library ({files}real text on every machine); evaluation uses held-out "
        f"files. It is not C4: numbers compare with each other, not with the paper's.{others}"
    )


def _sources(data: Sequence[Mapping[str, Any]]) -> str:
    return "; and ".join(dict.fromkeys(entry["source"] for entry in data)) or "unknown, as no run began"


def _corpus_note(entry: Mapping[str, Any]) -> str:
    """What was read, exactly; `entry` is what `Inputs.provenance` was."""
    if "tokenizer" not in entry:
        return entry["source"]
    return (
        f"corpus sha256 {entry['source_sha256']}, tokenizer {entry['tokenizer']}, "
        f"{entry['train']['n_tokens']:,} training tokens"
    )


def _notes(study: Study) -> list[str]:
    """The command, the machine, the data, the time and the evaluation."""
    provenance, config = study.results["provenance"], study.variants[0].config
    models = ",".join(f"{v.name}={os.path.relpath(v.checkpoint)}" for v in study.variants if v.checkpoint)
    return [
        f"python launch/reproduce.py --experiment={study.experiment.name} --scale={study.scale} "
        f"--seeds={','.join(map(str, study.seeds))}" + (f" --model={models}" if models else ""),
        f"{provenance['date']}, {provenance['device']}, "
        + ", ".join(f"{name} {number}" for name, number in provenance["versions"].items()),
        *map(_corpus_note, provenance["data"]),
        f"{provenance['training_seconds'] / 60:.1f} minutes of training, summed over {len(study.results['rows'])} runs "
        "(several run at once)",
        f"evaluated on {config.eval.sequences} sequences; dynamic quantisation scales over batches of "
        f"{config.eval.batch_size}; quantised are linear layers only",
        *_seeds_together(study),
    ]


def _seeds_together(study: Study) -> list[str]:
    """Which runs shared a compiled call, and what they share then."""
    rows = [row for row in study.results["rows"] if "trained_with" in row]
    if not rows:
        return []
    return [
        f"{len(rows)} runs were trained with other seeds of their variant in one compiled call, which changes nothing "
        f"but rounding; rotations are the same for all seeds (optim.rotation.seed), as they are for seeds trained alone"
    ]


def _links(study: Study) -> list[tuple[str, str]]:
    """The raw results and the config of every run."""
    configs = [
        (f"{row['variant']}, seed {row['seed']}: config", f"{row['run']}/config.json")
        for row in study.results["rows"]
        if (study.workdir / row["run"] / "config.json").exists()  # not of a model that was only measured
    ]
    return [("results.json", "results.json"), ("report.md", "report.md"), *configs]
