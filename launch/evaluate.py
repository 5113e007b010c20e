"""Evaluates a checkpoint: python launch/evaluate.py --checkpoint=runs/mine.

Measures perplexity, outliers, attention and every quantisation setting on the held-out files of the checkpoint's own
data, with the model that it was trained as, and writes evaluation.json.
"""

import json
from pathlib import Path

from absl import flags

from orthojax import cli
from orthojax.errors import UserError

cli.define_cache_dir()
cli.define_compile_cache()
flags.DEFINE_string("checkpoint", None, "A run's workdir, its checkpoints folder, or one step's folder.")
flags.DEFINE_string("workdir", None, "Where evaluation.json goes; beside the checkpoints where not given.")
FLAGS = flags.FLAGS


def main(_: list[str]) -> None:
    if not FLAGS.checkpoint:
        raise UserError("--checkpoint is missing", allowed="--checkpoint=DIR")

    from orthojax.progress import Progress, tokenizing_progress
    from orthojax.train import (
        evaluate,
        evaluation_stages,
        find_checkpoint,
        keep_compiled_programs,
        make_folder,
        open_inputs,
        read_config,
        read_params,
        require_same_data,
        write_text,
    )

    step_folder = find_checkpoint(Path(FLAGS.checkpoint))
    keep_compiled_programs(FLAGS.compile_cache)
    workdir = Path(FLAGS.workdir) if FLAGS.workdir else step_folder.parent.parent
    make_folder(workdir, "workdir")  # before the work, so that a wrong path costs nothing
    config = read_config(step_folder)
    inputs = open_inputs(config, Path(FLAGS.cache_dir), progress=tokenizing_progress())
    require_same_data(step_folder, inputs.provenance)
    params = read_params(step_folder)
    with Progress(evaluation_stages(config), every_seconds=0.0) as progress:
        metrics = evaluate(config, params, inputs, on_progress=lambda part: progress.advance(1, part))
    result = {"checkpoint": str(step_folder), "data": inputs.provenance, "metrics": metrics}
    write_text(workdir / "evaluation.json", json.dumps(result, indent=2) + "\n")
    for name, value in metrics.items():
        if "/" not in name:
            print(f"{name:34} {value:.6g}")
    print(f"written: {workdir / 'evaluation.json'}")


if __name__ == "__main__":
    cli.run(main)
