"""Measures any model as both papers do: orthojax analyze --model=smollm2.

--model takes a pretrained model (a folder of config.json and safetensors, a .gguf file, a name in the local Hugging
Face cache, smollm2) and runs of orthojax train; several, with or without names, are compared:
--model=base=PATH,tuned=PATH. --model=NAME@step1000,step2000 measures revisions, folders or checkpoints of one model as
a series over its steps, and --checkpoints every one that a run kept.
Attention to the first token, outliers, norms, entropy and quantisation are measured on --text, by layer and head. Two
texts need no files: topics (Python's documentation, the default) and stdlib (its sources); held_out is the run's own
evaluation set, always used for a run on Bigram-Backcopy.
Predictions are compared with those rounded to 8 and 4 bits. For formats that fail, scales for each token, a float first
token, a rotation and layers in float are tried; three sentences say what was found. --quick skips most of this.
--knock_out=8 removes every head, attention and MLP in turn, on 8 rows of the text; other interventions are arrays in
Python, see orthojax.Interventions and orthojax.train.evaluate_by_head.
Writes report.html, report.md, figures/ and results.json under --workdir, a card of each model as card.json or
NAME.card.json, which --card=FILE,FILE shows beside another model, and the arrays by head as arrays/NAME.npz. Each
finished part is kept under stages/: after an interruption the same command resumes. --save=residual,attention,values
writes the activations of all rows to activations/NAME.safetensors, for other tools.
"""

import glob
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from orthojax.commands import cli
from orthojax.commands.evaluate import define_settings, fitting, named_settings
from orthojax.errors import UserError, printable
from orthojax.files import require_file
from orthojax.places import find_place, steps_in

FLAGS = flags.FLAGS
_LENGTH = 256  # tokens of a row, if the model was trained on more


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_cache_dir()
    cli.define_compile_cache()
    flags.DEFINE_multi_string("model", [], "PATH or NAME=PATH, or several separated by commas.")
    flags.DEFINE_bool("checkpoints", False, "Measure every checkpoint that the run kept.")
    flags.DEFINE_list("text", ["topics"], "Text and .jsonl files, folders or patterns; or topics, stdlib, held_out.")
    flags.DEFINE_string("token_ids", "", "A .npy file of token ids [rows, length + 1] or [tokens], instead of --text.")
    flags.DEFINE_string("tokenizer", "", "File of the tokenizer, if the model's own is not known.")
    flags.DEFINE_integer("rows", None, "Rows of the text; 16 by default, 4 with --quick; 0 for all.", lower_bound=0)
    flags.DEFINE_integer(
        "length", 0, "Tokens per row; 0 for the length at which the model was trained, at most 256.", lower_bound=0
    )
    flags.DEFINE_integer(
        "stride", 0, "Also measure perplexity on all of --text in windows of --length, this many apart.", lower_bound=0
    )
    flags.DEFINE_list("windows", [], "Also read rows token by token with this many in view: 64,128, say.")
    flags.DEFINE_list("sinks", None, "How many of --windows are the first tokens of the row: 0,4 by default.")
    flags.DEFINE_integer("batch", 8, "Rows per batch; dynamic quantisation scales are taken per batch.", lower_bound=1)
    flags.DEFINE_bool("packed", False, "Let rows cross the ends of documents, with an end-of-text token after each.")
    flags.DEFINE_bool("bos", None, "Start rows with the tokenizer's BOS token; by default as the model was trained.")
    define_settings("those of a card")
    flags.DEFINE_bool("quick", False, "Few rows, int8_coarse and w4a4 only, no rotation, no streaming.")
    flags.DEFINE_string("attention_of", "", "A short text whose attention weights are drawn, for --heads.")
    flags.DEFINE_list("heads", ["0.0"], "Heads of --attention_of as LAYER.HEAD: 0.3,1.2.")
    flags.DEFINE_list("card", [], "Card files, or patterns of them, of other models to compare with.")
    flags.DEFINE_list("save", [], "Activations to write: residual, attention, values.")
    flags.DEFINE_integer("knock_out", 0, "Rows on which every part is removed in turn; 0 for none.", lower_bound=0)
    flags.DEFINE_string("workdir", "", "Folder of results and reports; runs/analyze/NAMES by default.")


def series(given: str) -> dict[str, str]:
    """Returns step -> path, in the order of steps, of `NAME@STEP,STEP` or of the checkpoints that a run kept.

    A step is a folder in NAME, a checkpoint of the run NAME, or a revision in the local Hugging Face cache; of its
    name, such as step1000, the first number counts. Raises UserError for fewer than two.
    """
    name, _, steps = given.partition("@")
    if not steps:
        for folder in (Path(name) / "checkpoints", Path(name)):
            if len(found := steps_in(folder)) > 1:
                return {str(step): str(folder / str(step)) for step in found}
        raise UserError(f"--checkpoints: fewer than two in {name}", allowed="the workdir of a run with several")
    paths = {}
    for step in steps.split(","):
        number = re.search(r"\d+", step)
        if number is None or str(int(number[0])) in paths:
            raise UserError(f"--model={given}: {step!r}", allowed="NAME@STEP,STEP with another number in each")
        folders = [Path(name) / step, Path(name) / "checkpoints" / str(int(number[0]))]
        paths[str(int(number[0]))] = str(next((folder for folder in folders if folder.is_dir()), f"{name}@{step}"))
    return dict(sorted(paths.items(), key=lambda item: int(item[0])))


def _checked_config(path: str) -> Any:
    """Returns the config of a model; refuses, before any work, a --length that it does not support."""
    from orthojax.train import find_model

    _, config = find_model(path)
    if config.model.position == "learned" and FLAGS.length > config.model.max_length:
        problem = f"--length={FLAGS.length} is longer than the positions of the model {path}"
        raise UserError(problem, allowed=f"1 to {config.model.max_length}")
    if FLAGS.length > config.model.max_length:
        words = f"{path}: --length={FLAGS.length} is longer than the {config.model.max_length} tokens of its training"
        print(printable(words), file=sys.stderr)
    length = FLAGS.length or min(_LENGTH, config.data.sequence_length)
    if FLAGS.stride > length:
        raise UserError(f"--stride={FLAGS.stride} with rows of {length} tokens", allowed=f"1 to {length}")
    return config


def _open(loaded: Any) -> tuple[Any, Any]:
    """Returns the model with the batch and length of this evaluation, and the rows that it reads."""
    from orthojax.cards.measures import prepared
    from orthojax.cards.text import read_rows, read_token_ids
    from orthojax.train import open_inputs

    data = loaded.config.data
    if data.kind == "bigram_backcopy" or FLAGS.text == ["held_out"]:
        loaded = prepared(loaded, data.sequence_length, FLAGS.batch)
        return loaded, open_inputs(loaded.config, Path(FLAGS.cache_dir))
    length = FLAGS.length or min(_LENGTH, data.sequence_length)
    rows = (4 if FLAGS.quick else 16) if FLAGS.rows is None else FLAGS.rows
    if FLAGS.token_ids:
        inputs = read_token_ids(Path(FLAGS.token_ids), loaded.tokenizer, rows=rows, length=length)
    else:
        tokenizer, bos = _tokenizer(loaded)
        inputs = read_rows(FLAGS.text, tokenizer, rows=rows, length=length, bos=bos, packed=FLAGS.packed)
    return prepared(loaded, length, FLAGS.batch), inputs


def _heads() -> list[tuple[int, int]]:
    """Returns the (layer, head) of `--heads`."""
    found = [re.fullmatch(r"(\d+)\.(\d+)", given) for given in FLAGS.heads]
    if not all(found):
        raise UserError(f"--heads={','.join(FLAGS.heads)}", allowed="LAYER.HEAD, as in 0.3,1.2")
    return [(int(match[1]), int(match[2])) for match in found if match]


def _streamed() -> list[tuple[int, int]]:
    """Returns (tokens in view, how many of them are the first) of `--windows` and `--sinks`."""
    sinks = ["0", "4"] if FLAGS.sinks is None else FLAGS.sinks
    for flag, given in (("windows", FLAGS.windows), ("sinks", sinks)):
        if not all(number.isdecimal() for number in given):
            raise UserError(f"--{flag}={','.join(given)}", allowed="whole numbers, separated by commas")
    pairs = [(int(window), int(first)) for window in FLAGS.windows for first in sinks]
    if (FLAGS.sinks is not None and not pairs) or any(first >= window for window, first in pairs):
        given = f"--windows={','.join(FLAGS.windows)} --sinks={','.join(sinks)}"
        raise UserError(given, allowed="both, every window larger than every number of sinks")
    return pairs


def _tokenizer(loaded: Any) -> tuple[Any, bool]:
    """Returns the tokenizer that reads text for a model, and whether texts begin with BOS."""
    from orthojax.data import load_tokenizer
    from orthojax.train import require_tokenizer

    tokenizer = load_tokenizer(FLAGS.tokenizer) if FLAGS.tokenizer else require_tokenizer(loaded)
    return tokenizer, loaded.config.data.bos if FLAGS.bos is None else FLAGS.bos


def _attention(name: str, loaded: Any) -> list[Any]:
    """Returns the picture of `--attention_of`, if it is given."""
    import numpy as np

    from orthojax.cards.measures import token_text
    from orthojax.cards.page import attention_picture

    if not FLAGS.attention_of:
        return []
    tokenizer, bos = _tokenizer(loaded)
    ids = [tokenizer.bos_id] * bos + tokenizer.encode_batch([FLAGS.attention_of])[0].tolist()
    words = [repr(token_text(tokenizer, token))[1:-1] for token in ids]
    return [attention_picture(loaded, name, np.array(ids, np.int32), _heads(), words)]


def _measure(name: str, path: str, workdir: Path, settings: Any) -> tuple[Any, dict[str, Any], list[Any]]:
    """Returns what was measured of a model, the provenance of its text, and pictures."""
    from tqdm import tqdm

    from orthojax import __version__, cards
    from orthojax.cards.text import read_text
    from orthojax.files import identity, make_folder
    from orthojax.train import load
    from orthojax.train.step import split_tokens

    loaded, inputs = _open(load(path))
    pictures = _attention(name, loaded)  # first, since it may be refused
    if FLAGS.save:
        from orthojax.cards.activations import save_activations

        make_folder(workdir / "activations", "folder of activations")
        tokens = split_tokens(inputs.evaluation, loaded.config.model)[0]
        save_activations(loaded, tokens, FLAGS.save, workdir / "activations" / f"{name}.safetensors")
    settings = {} if inputs.task is not None else fitting(loaded, settings)
    options: Any = {"quick": FLAGS.quick or inputs.task is not None, "quantize_head": FLAGS.quantize_head}
    if FLAGS.stride:
        tokenizer, bos = _tokenizer(loaded)
        options["sliding"] = read_text(FLAGS.text, tokenizer, bos=bos), FLAGS.stride
    options["streamed"] = _streamed()
    plan = cards.plan(loaded, inputs, settings, knock_out_rows=FLAGS.knock_out, **options)
    folder = workdir / "stages" / name
    make_folder(folder, "folder of stages")
    with tqdm(desc=f"{name}: {next(iter(plan))}", total=len(plan)) as bar:

        def done(stage: str) -> None:
            bar.set_description(f"{name}: {[*plan, 'done'][list(plan).index(stage) + 1]}", refresh=False)
            bar.update()

        subject = [__version__, identity(loaded.source, workdir), inputs.provenance, FLAGS.batch]
        measured = cards.measure(loaded, settings, plan, cards.Stages(folder, subject, done))
    return measured, inputs.provenance, pictures


def main(_: list[str]) -> None:
    if not FLAGS.model:
        raise UserError("--model is missing", allowed="--model=PATH, or --model=NAME=PATH,NAME=PATH")
    in_series = FLAGS.checkpoints or re.fullmatch(r"[^=,]+@[^=,/]+(,[^=,/]+)+", FLAGS.model[0]) is not None
    if in_series and len(FLAGS.model) > 1:
        problem = f"--model={FLAGS.model[0]}, a series, and --model={FLAGS.model[1]}"
        raise UserError(problem, allowed="one series, or several models")
    models = series(FLAGS.model[0]) if in_series else cli.named_paths(FLAGS.model)
    _heads()  # refused before any work
    _streamed()
    for path in models.values():
        find_place(path)
    if FLAGS.stride and (FLAGS.token_ids or FLAGS.text == ["held_out"]):
        raise UserError("--stride with --token_ids or --text=held_out", allowed="files of text, topics or stdlib")
    if FLAGS.token_ids:
        require_file(Path(FLAGS.token_ids), "file of token ids")

    from orthojax.cards import read_cards
    from orthojax.cards.activations import require_kinds
    from orthojax.cards.measures import default_settings
    from orthojax.files import folder_of_one
    from orthojax.train import keep_compiled_programs

    require_kinds(FLAGS.save)
    settings = named_settings() if FLAGS.settings else default_settings(FLAGS.quick)
    files = [file for pattern in FLAGS.card for file in sorted(glob.glob(pattern)) or [pattern]]
    others = [card for file in files for card in read_cards(Path(file))]
    configs = [_checked_config(path) for path in models.values()]
    if in_series and len({config.model for config in configs}) > 1:
        problem = f"the models in {FLAGS.model[0]} differ: {', '.join(models)}"
        raise UserError(problem, allowed="checkpoints of one run")
    named = f"{Path(FLAGS.model[0].partition('@')[0]).name}_checkpoints"
    workdir = Path(FLAGS.workdir or f"runs/analyze/{named if in_series else '-'.join(models)[:100]}")
    keep_compiled_programs(FLAGS.compile_cache)
    with folder_of_one(workdir, "workdir"):
        _analyze(models, workdir, settings, others, in_series=in_series)


def _analyze(
    models: Mapping[str, str], workdir: Path, settings: Any, others: Sequence[Any], *, in_series: bool
) -> None:
    """Measures models, name -> path, and writes their cards, arrays and page."""
    import numpy as np

    from orthojax import cards
    from orthojax.cards.page import report
    from orthojax.files import make_folder, write_atomically, write_with_digest
    from orthojax.machine import environment
    from orthojax.report.page import print_report, write_report

    make_folder(workdir / "arrays", "folder of arrays")
    command = " ".join(["orthojax", "analyze", *map(shlex.quote, sys.argv[1:])])
    started = time.monotonic()
    measured, data, drawn, made, machine = {}, [], {}, [], environment()
    for name, path in models.items():  # one model in memory at a time
        measured[name], text, drawn[name] = _measure(name, path, workdir, settings)
        data.append({"name": name, **text})
        made.append(cards.make_card(name, path, measured[name], machine | {"command": command, "text": text}))
        write_with_digest(workdir / ("card.json" if len(models) == 1 else f"{name}.card.json"), made[-1])
        arrays = {key: value.astype(np.float32) for key, value in measured[name].arrays.items()}
        write_atomically(workdir / "arrays" / f"{name}.npz", lambda file, of=arrays: np.savez_compressed(file, **of))
    seconds = round(time.monotonic() - started, 1)
    provenance = machine | {"seeds": [0], "data": data, "wall_seconds": seconds}
    rows = [
        {"variant": name, "seed": 0, "overrides": {"model": path}, "metrics": measured[name].metrics,
         "findings": [finding.says for finding in cards.findings(card)]}
        for (name, path), card in zip(models.items(), made, strict=True)
    ]  # fmt: skip
    content = {"experiment": "analyze", "scale": "given", "provenance": provenance, "rows": rows}
    write_with_digest(workdir / "results.json", content)
    notes = [command, f"{provenance['date']}, {provenance['device']}, {seconds} seconds; arrays in arrays/"]
    steps = list(map(int, models)) if in_series else ()
    page = report(measured, made, notes, steps=steps, drawn=drawn, others=others)
    write_report(page, workdir)
    print_report(page._replace(tables=page.tables[:1]))
    written = "card.json" if len(made) == 1 else "results.json"
    print(printable(f"written: {workdir / written} and {workdir / 'report.html'}"))
