"""Evaluates a checkpoint: orthojax evaluate --checkpoint=runs/mine.

Measures perplexity, outliers, attention and the five default quantisation settings on the held-out files of the
checkpoint's own data, with the model that it was trained as, and writes evaluation.json, which also has every layer.
--settings=w4a8,w4a4_group64 (or all) adds quantisation settings.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from orthojax.commands import cli
from orthojax.config import Config
from orthojax.errors import UserError, printable
from orthojax.files import finite

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_cache_dir()
    cli.define_compile_cache()
    flags.DEFINE_string("checkpoint", None, "A run's workdir, its checkpoints folder, or one step's folder.")
    flags.DEFINE_string("workdir", None, "Where evaluation.json goes; beside the checkpoints if not given.")
    flags.DEFINE_list(
        "settings", [], "Further quantisation settings to simulate, besides the five defaults; 'all' for every one."
    )
    flags.DEFINE_bool("quantize_head", False, "Simulate every setting with the output head quantised as well.")
    flags.DEFINE_bool(
        "post_attention", False, "Also measure hidden states after attention: post_attention_kurtosis_first."
    )


def _fitting(loaded: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    from orthojax.train import settings_that_do_not_fit

    unfit = settings_that_do_not_fit(loaded, settings)
    for name, reason in unfit.items():
        print(printable(f"{name} is left out: {reason}"))
    return {name: setting for name, setting in settings.items() if name not in unfit}


def overview(metrics: Mapping[str, float], config: Config) -> list[str]:
    """Returns the lines that show metrics of `orthojax.train.evaluate`, in groups, without those of single layers.

    Each has the name in evaluation.json, the number, its level of chance, and its definition in the catalogue.

    Args:
      metrics: Of a model.
      config: Of its run.
    """
    from orthojax import analysis
    from orthojax.formatting import align

    given, groups = analysis.conditions(config), {}
    for name, value in metrics.items():
        if "/" in name or name == "sequences":
            continue
        found = analysis.define(name)
        row = [
            f"  {name}",
            f"{value:.6g}",
            analysis.compared_with(name, metrics, given),
            found.definition if found else "",
        ]
        groups.setdefault(found.group if found else "others", []).append(row)
    aligned = iter(align([row for rows in groups.values() for row in rows]))
    lines = [f"{metrics['sequences']:.0f} held-out sequences of {config.data.sequence_length} tokens"]
    for title, rows in groups.items():
        lines += ["", title, *(next(aligned) for _ in rows)]
    return lines


def main(_: list[str]) -> None:
    if not FLAGS.checkpoint:
        raise UserError("--checkpoint is missing", allowed="--checkpoint=DIR")

    from orthojax import quant
    from orthojax.files import make_folder, write_text
    from orthojax.progress import Progress, tokenizing_progress
    from orthojax.train import (
        evaluate,
        evaluation_stages,
        find_checkpoint,
        keep_compiled_programs,
        load,
        open_inputs,
        read_config,
        require_same_data,
    )

    names = list(quant.MORE_SETTINGS) if FLAGS.settings == ["all"] else FLAGS.settings
    settings = quant.SETTINGS | {name: quant.setting_named(name) for name in names}
    step_folder = find_checkpoint(Path(FLAGS.checkpoint))
    config = read_config(step_folder)
    if config.data.kind == "bigram_backcopy" and (FLAGS.settings or FLAGS.quantize_head or FLAGS.post_attention):
        problem = "--settings, --quantize_head and --post_attention are for language models"
        raise UserError(problem, allowed="none of them")
    keep_compiled_programs(FLAGS.compile_cache)
    beside = step_folder.parent.parent if step_folder.parent.name == "checkpoints" else step_folder.parent
    workdir = Path(FLAGS.workdir) if FLAGS.workdir else beside
    make_folder(workdir, "workdir", files=["evaluation.json"])  # before the work, so that a wrong path costs nothing
    inputs = open_inputs(config, Path(FLAGS.cache_dir), progress=tokenizing_progress())
    require_same_data(step_folder, inputs.provenance)
    loaded = load(step_folder)
    if FLAGS.settings == ["all"]:
        settings = _fitting(loaded, settings)
    stages = evaluation_stages(config, settings, quantize_head=FLAGS.quantize_head)
    with Progress(stages, every_seconds=0.0) as progress:
        metrics = evaluate(
            loaded,
            inputs,
            settings=settings,
            quantize_head=FLAGS.quantize_head,
            post_attention=FLAGS.post_attention,
            on_progress=functools.partial(progress.advance, 1),
        )
    result = {"checkpoint": str(step_folder), "data": inputs.provenance, "metrics": finite(metrics)}
    print("\n".join(overview(metrics, config)), flush=True)  # before it is written: a full disk must not lose it
    write_text(workdir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    print(printable(f"\nwritten: {workdir / 'evaluation.json'}"))
