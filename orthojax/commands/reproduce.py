"""Reproduces one experiment: orthojax reproduce --experiment=quick --scale=tiny --seeds=0,1,2.

Without flags it runs the main job: two small language models on real text, vanilla and cured, for which two CPU cores
are enough. Writes results.json, report.md, report.html and figures/ under the workdir; a second call resumes and skips
what is done. --list shows all experiments, each with the scale and seeds of its published results. --report rewrites
the report of a results.json, for the experiment that the file names unless --experiment names another.
"""

import os
import sys
import time
from pathlib import Path

from absl import flags

from orthojax.commands import cli
from orthojax.errors import UserError, nearest, printable
from orthojax.places import find_place

FLAGS = flags.FLAGS
SCALES = ("tiny", "deep", "overnight", "small", "paper")


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_cache_dir()
    cli.define_compile_cache()
    what = "Which experiment, by default quick; --list shows them. One of your own as module:STUDY."
    flags.DEFINE_string("experiment", None, what)
    flags.DEFINE_bool("list", False, "List all experiments with their scales, then exit.")
    flags.DEFINE_string(
        "scale",
        None,
        "tiny, deep, overnight: two CPU cores; small: one GPU; paper: the paper's own sizes. By default that of the "
        "published results, which --list shows.",
    )
    flags.DEFINE_string("seeds", None, "Seeds, separated by commas; by default those of the experiment.")
    flags.DEFINE_string("workdir", None, "Folder of the study; runs/EXPERIMENT-SCALE by default.")
    flags.DEFINE_string(
        "runs_dir", "runs/models", "Folder of trained runs, shared by experiments: none is trained twice."
    )
    flags.DEFINE_list("model", [], "Existing models to measure as well: PATH or NAME=PATH.")
    flags.DEFINE_integer(
        "jobs",
        None,
        "Maximum number of concurrent runs; by default one per GPU, or per CPU core as far as memory allows. With more "
        "jobs than GPUs, several share one.",
        1,
    )
    flags.DEFINE_string("only", None, "Train and measure only this variant, and write no report.")
    flags.DEFINE_list(
        "report", None, "Folders with a results.json: write a report with the rows of all of them under --workdir."
    )


def _seeds() -> tuple[int, ...] | None:
    if FLAGS.seeds is None:
        return None
    try:
        seeds = tuple(int(seed) for seed in FLAGS.seeds.split(","))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or max(seeds) >= 2**32 or len(set(seeds)) < len(seeds):
        raise UserError(
            f"--seeds={FLAGS.seeds!r}", allowed="different integers, 0 to 2**32 - 1, separated by commas: 0,1,2"
        )
    return seeds


def _report_folders() -> list[Path]:
    """Returns the folders of --report, [] without it; raises UserError if flags of a new run are given."""
    folders = FLAGS.report or []
    if FLAGS.report is not None and not all([folders, *folders]):
        raise UserError(f"--report={','.join(folders)} names no folder", allowed="--report=FOLDER[,...]")
    if folders and (FLAGS.model or FLAGS.only is not None):
        raise UserError("--report measures nothing anew", allowed="no --model and no --only beside it")
    return [Path(folder) for folder in folders]


def _command(name: str, workdir: Path, scale: str) -> list[str]:
    """Returns the command line that starts one run in another process."""
    given = [f"--{of}={FLAGS[of].value}" for of in ("runs_dir", "cache_dir")]
    given += [f"--experiment={name}", f"--workdir={workdir}", f"--scale={scale}"]
    given += [f"--model={','.join(FLAGS.model)}"] if FLAGS.model else []
    given += [f"--compile_cache={FLAGS.compile_cache}"] if FLAGS.compile_cache is not None else []
    start = f"from orthojax import commands; commands.cli.stop_without({os.getpid()}); commands.main()"
    return [sys.executable, "-c", start, "reproduce", *given]


def main(_: list[str]) -> None:
    started = time.monotonic()
    if FLAGS.scale is not None and FLAGS.scale not in SCALES:
        raise UserError(f"unknown scale {FLAGS.scale!r}", allowed=" | ".join(SCALES), hint=nearest(FLAGS.scale, SCALES))
    given, folders = _seeds(), _report_folders()
    models = {name: find_place(path) for name, path in cli.named_paths(FLAGS.model).items()}

    from orthojax.experiments.catalog import ALL, find
    from orthojax.experiments.running import run_study
    from orthojax.experiments.stored import read_results_file
    from orthojax.experiments.study import Given, make_report, read_results
    from orthojax.report.page import print_summary, write_report
    from orthojax.train import find_model, keep_compiled_programs

    if FLAGS.list:
        for study in ALL:
            needs = "; needs --model=NAME=PATH" if study.needs_a_model else ""
            print(f"{', '.join((study.name, *study.also))} [{' '.join(study.scales)}]: {study.title}{needs}")
            for scale, published in study.published.items():
                print(f"    published: --scale={scale} {published}")
        return
    stored = [read_results_file(folder / "results.json")["experiment"] for folder in folders[:1]]
    study = find(next(iter(stored), "quick") if FLAGS.experiment is None else FLAGS.experiment)
    results = read_results(study, *folders) if folders else None
    if results and (FLAGS.scale not in (None, results.scale) or set(given or results.seeds) != set(results.seeds)):
        allowed = f"--scale={results.scale} --seeds={','.join(map(str, results.seeds))}, or neither"
        raise UserError("--report has results of another scale or other seeds", allowed=allowed)
    scale = results.scale if results else FLAGS.scale or next(iter(study.published), study.scales[0])
    workdir = Path(FLAGS.workdir or f"runs/{study.name}-{scale}")
    if results is None:
        keep_compiled_programs(FLAGS.compile_cache)
        seeds = study.seeds if given is None else given
        if FLAGS.only is None:
            about = f"scale {scale}, seeds {', '.join(map(str, seeds))}, workdir {workdir}"
            print(printable(f"{study.name}: {study.title}\n{about}"))
            for of, published in study.published.items():
                print(f"published: --scale={of} {published}" + ("" if of == scale else "; another scale than this"))
        found = {name: find_model(path) for name, path in models.items()}
        results = run_study(
            study,
            scale,
            seeds,
            workdir,
            runs_dir=Path(FLAGS.runs_dir),
            cache_dir=Path(FLAGS.cache_dir),
            given={name: Given(config, checkpoint) for name, (checkpoint, config) in found.items()},
            jobs=FLAGS.jobs,
            command=_command(study.experiment, workdir, scale),
            only=FLAGS.only,
        )
        if FLAGS.only is not None:
            return
    report = make_report(results)
    write_report(report, workdir)
    several = study.runs and len(results.seeds) == 1 and not folders
    seeds = ",".join(str(results.seeds[0] + i) for i in range(3)) if several else ""
    more = f"orthojax reproduce --experiment={study.experiment} --scale={scale} --seeds={seeds}" if several else ""
    print_summary(report, f"{workdir}/report.html", seconds=time.monotonic() - started, next_command=more)
