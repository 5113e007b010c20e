"""Evaluates a checkpoint: orthojax evaluate --checkpoint=runs/mine.

Measures perplexity, outliers, attention and the five default quantisation settings on the held-out files of the
checkpoint's own data, with the model config it was trained with, and writes evaluation.json, which also has every
layer.
--settings=w4a8,w4a4_group64 (or all) adds quantisation settings.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from orthojax.commands import cli
from orthojax.config import Config
from orthojax.errors import UserError, printable
from orthojax.files import finite
from orthojax.places import find_checkpoint
from orthojax.stores import as_path

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_cache_dir()
    cli.define_compile_cache()
    flags.DEFINE_string("checkpoint", None, "A run's workdir, its checkpoints folder, or one step's folder.")
    flags.DEFINE_alias("model", "checkpoint")
    flags.DEFINE_string("workdir", None, "Folder of evaluation.json; beside the checkpoints by default.")
    define_settings()
    flags.DEFINE_bool("json", False, "Print the JSON object of evaluation.json instead of the tables.")
    flags.DEFINE_bool(
        "post_attention", False, "Also measure hidden states after attention: post_attention_kurtosis_first."
    )


def define_settings(default: str = "the five default ones") -> None:
    """Defines `--settings`, which `named_settings` reads, and `--quantize_head`."""
    what = "Quantisation settings to simulate besides the five default ones; all for every one, none for none at all."
    what += f" If not given, {default}."
    flags.DEFINE_list("settings", [], what)
    flags.DEFINE_bool("quantize_head", False, "Also quantise the output head in every setting.")


def named_settings() -> dict[str, Any]:
    """Returns the quantisation settings of `--settings` by name."""
    from orthojax import quant

    if FLAGS.settings == ["none"]:
        return {}
    more = quant.MORE_SETTINGS if FLAGS.settings == ["all"] else FLAGS.settings
    return quant.SETTINGS | {name: quant.setting_named(name) for name in more}


def fitting(loaded: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that fit a model, and prints those that do not."""
    from orthojax.train import settings_that_do_not_fit

    unfit = settings_that_do_not_fit(loaded, settings)
    for name, reason in unfit.items():
        print(printable(f"{loaded.source}: {name} is left out: {reason}"), file=sys.stderr)
    return {name: setting for name, setting in settings.items() if name not in unfit}


def overview(metrics: Mapping[str, float], config: Config) -> list[str]:
    """Returns the lines that show metrics of `orthojax.train.evaluate`, in groups, without those of single layers.

    Each has the name in evaluation.json, the number, its level of chance, and its definition in the catalogue.
    """
    from orthojax import analysis
    from orthojax.formatting import align

    given, groups = analysis.conditions(config), {}
    for name, value in metrics.items():
        if "/" not in name and name != "sequences":
            found, beside = analysis.define(name), analysis.compared_with(name, metrics, given)
            row = [f"  {name}", analysis.show(name, value), beside, found.definition if found else ""]
            groups.setdefault(found.group if found else "others", []).append(row)
    aligned = iter(align([row for rows in groups.values() for row in rows]))
    lines = [f"{metrics['sequences']:.0f} held-out sequences of {config.data.sequence_length} tokens"]
    for title, rows in groups.items():
        lines += ["", title, *(next(aligned) for _ in rows)]
    return lines


def home_of(step_folder: Path) -> Path:
    """Returns the folder beside a run's checkpoints, where evaluation.json is."""
    return step_folder.parent.parent if step_folder.parent.name == "checkpoints" else step_folder.parent


def main(_: list[str]) -> None:
    if not FLAGS.checkpoint:
        raise UserError("--checkpoint is missing", allowed="--checkpoint=DIR")
    step_folder = find_checkpoint(as_path(FLAGS.checkpoint, "checkpoint"))

    from tqdm import tqdm

    from orthojax import train
    from orthojax.files import make_folder, write_with_digest

    settings, config = named_settings(), train.read_config(step_folder)
    if config.data.kind == "bigram_backcopy" and (FLAGS.settings or FLAGS.quantize_head or FLAGS.post_attention):
        problem = "--settings, --quantize_head and --post_attention are for language models"
        raise UserError(problem, allowed="none of them")
    train.keep_compiled_programs(FLAGS.compile_cache)
    workdir = as_path(FLAGS.workdir, "workdir") if FLAGS.workdir else home_of(step_folder)
    make_folder(workdir, "workdir", files=["evaluation.json"])  # before any work, so that a wrong path costs nothing
    inputs = train.open_inputs(config, Path(FLAGS.cache_dir), progress=cli.tokenizing_progress())
    train.require_same_data(step_folder, inputs.provenance)
    loaded = train.load(step_folder)
    settings = fitting(loaded, settings)
    stages = 1 if inputs.task else 1 + (1 + FLAGS.quantize_head) * len(settings)
    options = {"quantize_head": FLAGS.quantize_head, "post_attention": FLAGS.post_attention}
    with tqdm(total=stages) as bar:
        metrics = train.evaluate(loaded, inputs, settings=settings, **options, on_progress=lambda _: bar.update())
    for name in metrics.keys() - finite(metrics).keys():
        if name.startswith("perplexity_"):
            print(f"{name} is left out: the rounded model overflows", file=sys.stderr)
    result = {"checkpoint": str(step_folder), "data": inputs.provenance, "metrics": finite(metrics)}
    # Before it is written, so that a full disk does not lose it.
    print(json.dumps(result) if FLAGS.json else "\n".join(overview(metrics, config)), flush=True)
    write_with_digest(workdir / "evaluation.json", result)
    if not FLAGS.json:
        print(printable(f"\nwritten: {workdir / 'evaluation.json'}"))
