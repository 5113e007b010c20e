"""Reproduces one experiment: orthojax reproduce --experiment=quick --scale=tiny --seeds=0,1,2.

Without flags it runs the main job: two small language models on real text, vanilla and cured, in a few minutes on two
CPU cores. Writes results.json, report.md, report.html and figures/ under the workdir, and of an experiment with `views`
training.html, which steps through training; a second call resumes and skips what is done. --list shows all experiments,
how much of each is done, and what the rest takes here. --render writes a report again from a results.json, or one
report from several.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from orthojax.commands import cli
from orthojax.errors import UserError, nearest, printable
from orthojax.files import make_folder, write_text

FLAGS = flags.FLAGS
RESUMES = True  # the same command resumes an interrupted one
EXTRAS = "train,reports"


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_cache_dir()
    cli.define_compile_cache()
    flags.DEFINE_string("experiment", "quick", "Which experiment; --list shows them.")
    flags.DEFINE_bool("list", False, "List all experiments, what is done and how long the rest takes here, then exit.")
    flags.DEFINE_string(
        "scale", "tiny", "tiny, deep, overnight: two CPU cores; small: one GPU; paper: the paper's own sizes."
    )
    flags.DEFINE_string("seeds", None, "Seeds, separated by commas; 0 for most experiments where not given.")
    flags.DEFINE_string("workdir", None, "Folder of the study; runs/EXPERIMENT-SCALE where not given.")
    flags.DEFINE_string(
        "runs_dir", "runs/models", "Folder of trained runs, shared by experiments: none is trained twice."
    )
    flags.DEFINE_list("model", [], "Existing models to measure as well: NAME=CHECKPOINT[,NAME=CHECKPOINT].")
    flags.DEFINE_integer(
        "jobs",
        None,
        "Most runs at once; by default one per GPU, or per CPU core as far as memory allows. With more jobs than GPUs, "
        "several share one.",
        1,
    )
    flags.DEFINE_list(
        "render", [], "A results.json or its folder: only writes its report again, beside it or under --workdir. "
        "Several, separated by commas: joins runs that were trained separately; needs --workdir."
    )  # fmt: skip


def _seeds() -> tuple[int, ...] | None:
    """Those of --seeds; None where not given."""
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


def _models() -> dict[str, Path]:
    """Name -> checkpoint, of --model."""
    pairs = [text.partition("=") for text in FLAGS.model]
    models = {name.strip(): Path(path) for name, _, path in pairs if name.strip() and path}
    if len(models) < len(pairs):
        raise UserError(
            f"--model={','.join(FLAGS.model)}", allowed="different names: NAME=CHECKPOINT[,NAME=CHECKPOINT]"
        )
    return models


def _sources() -> list[Path]:
    """The results.json of each part of --render.

    Raises:
      UserError: Where a part is empty or there twice; for several without a place for what they become.
    """
    given = f"--render={','.join(FLAGS.render)}"
    if not all(FLAGS.render) or not FLAGS.render:
        raise UserError(given, allowed="a results.json or its folder, or several: A,B")
    paths = [Path(source) / "results.json" if Path(source).is_dir() else Path(source) for source in FLAGS.render]
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(paths):
        raise UserError(f"{given} has a results.json twice", allowed="each once")
    if len(paths) > 1:
        if FLAGS.workdir is None:
            raise UserError(f"{given} without --workdir", allowed="--workdir=DIR, the folder of the joined results")
        there = Path(FLAGS.workdir) / "results.json"
        if there.exists() and there.resolve() not in resolved:
            raise UserError(f"{there} is there already", allowed="another --workdir, or that of a part")
    return paths


def _render(paths: Sequence[Path]) -> None:
    """--render."""
    from orthojax.experiments.catalog import find
    from orthojax.experiments.joining import join
    from orthojax.experiments.page import print_report
    from orthojax.experiments.rerender import read_raw, rerender

    parts = {path: read_raw(path) for path in paths}
    source, workdir = paths[0], Path(FLAGS.workdir or paths[0].parent)
    raw, joins = parts[source], len(parts) > 1
    experiment = find(FLAGS.experiment if FLAGS["experiment"].present else raw["experiment"])
    if joins:
        raw = join(parts, workdir)
        experiment.variants_at(raw["scale"])  # refuses a scale that it does not have, before anything is written
    make_folder(workdir, "workdir", files=("results.json", "report.md", "report.html"))
    if joins:
        source = workdir / "results.json"
        write_text(source, json.dumps(raw, indent=2, allow_nan=False) + "\n")
    print_report(rerender(experiment, raw, source, workdir))
    print(f"\nwritten: {workdir}/report.md, report.html{', results.json' if joins else ''}")


def main(_: list[str]) -> None:
    scales = ("tiny", "deep", "overnight", "small", "paper")
    if FLAGS.scale not in scales:
        raise UserError(f"unknown scale {FLAGS.scale!r}", allowed=" | ".join(scales), hint=nearest(FLAGS.scale, scales))
    if FLAGS["render"].present:
        _render(_sources())
        return
    given, models = _seeds(), _models()

    from orthojax.experiments.catalog import ALL, find, listing
    from orthojax.experiments.page import make_report, print_report, write_report
    from orthojax.experiments.places import device_count, places
    from orthojax.experiments.study import given_model, run_experiment
    from orthojax.train import keep_compiled_programs

    keep_compiled_programs(FLAGS.compile_cache)
    if FLAGS.list:
        where = places(FLAGS.jobs)
        print(listing(ALL, FLAGS.scale, given, Path(FLAGS.runs_dir), device_count(where)))
        return
    experiment = find(FLAGS.experiment)
    seeds = experiment.seeds if given is None else given
    workdir = Path(FLAGS.workdir or f"runs/{experiment.name}-{FLAGS.scale}")
    trained = experiment.variants_at(FLAGS.scale)
    existing = [*experiment.installed(), *(given_model(name, path) for name, path in models.items())]
    counts = [f"{len(trained)} variants"] if trained else []
    counts += [f"existing: {', '.join(variant.name for variant in existing)}"] if existing else []
    counts += [f"seeds {', '.join(map(str, seeds))}"] if trained or experiment.compute else []
    runs = len(trained) * len(seeds) + len(existing)
    where = places(FLAGS.jobs and min(FLAGS.jobs, max(runs, 1)))  # those on one GPU share its memory
    print(f"{experiment.name}: {experiment.title}")
    print(printable(f"workdir {workdir}: {'; '.join(counts) or 'no models'}"), flush=True)
    results = run_experiment(
        experiment,
        FLAGS.scale,
        seeds,
        workdir,
        runs_dir=Path(FLAGS.runs_dir),
        cache_dir=Path(FLAGS.cache_dir),
        models=existing,
        where=where,
        setup=functools.partial(keep_compiled_programs, FLAGS.compile_cache),
    )
    report = make_report(results)
    write_report(report, workdir)
    print_report(report)
    more = ", training.html" if report.views else ""
    print(printable(f"\nwritten: {workdir}/report.html, report.md, results.json, figures/{more}"))
