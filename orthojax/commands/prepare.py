"""Turns text into token files: orthojax prepare --input=a.txt,b.jsonl --tokenizer=bpe:2048 --output=DIR.

Text comes from --input, or from a prepared TensorFlow Datasets folder, TFRecord or ArrayRecord, without TensorFlow:
--tfds_dir=DATA_DIR --dataset=c4/en:3.0.1 --split=train. The output folder gets tokenizer.json and, for each split, a
.bin with its JSON sidecar; train with --config.data.kind=tokens --config.data.paths=DIR/train.bin,DIR/validation.bin.

After an interruption, run the same command again: complete files are kept. --shards=N makes N files of each split, in
as many processes as there are cores; train with the pattern --config.data.paths=DIR/train-*.bin,DIR/validation-*.bin.
Machines that share the folder divide the work by --share=0/4, --share=1/4, ...
"""

import dataclasses
import os
import re
from pathlib import Path

from absl import flags

from orthojax.commands import cli
from orthojax.errors import UserError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string(
        "input",
        None,
        "Text and jsonl files, also with .gz, folders or patterns, separated by commas; with the extra `datasets` also "
        ".parquet, .arrow, .zst, .bz2, .xz and addresses such as hf://datasets/NAME/data/train-*.parquet, which are "
        "streamed; or 'embedded' (the default): Python's standard library.",
    )
    flags.DEFINE_string("tfds_dir", "", "Folder of TensorFlow Datasets.")
    flags.DEFINE_string("dataset", "", "NAME[/CONFIG][:VERSION] in --tfds_dir, such as c4/en:3.0.1.")
    flags.DEFINE_string("text_feature", "text", "Feature of the data set that holds the text.")
    flags.DEFINE_string(
        "split",
        "train,validation",
        "Splits or slices (train[:1%]) of the data set; for text: train, validation (a tenth, held out) or all.",
    )
    flags.DEFINE_string("name", "", "Name of the token file; by default the name of its one split.")
    flags.DEFINE_string(
        "tokenizer",
        "bytes",
        "bytes | bpe:N | the path of a tokenizer; it must match a tokenizer already in the output folder.",
    )
    flags.DEFINE_string("output", None, "Folder of the token files.")
    flags.DEFINE_integer("shards", 1, "Token files of each split, at most one for each input file.", lower_bound=1)
    flags.DEFINE_string("share", "0/1", "I/N: only the I-th of every N token files, from 0, on one of N machines.")
    flags.DEFINE_integer(
        "workers", None, "Processes, each with a token file at a time; by default one for each core.", lower_bound=1
    )


def _share() -> tuple[int, int]:
    given = re.fullmatch(r"(\d{1,6})/(\d{1,6})", FLAGS.share)
    i, n = map(int, given.groups()) if given else (0, 0)
    if not i < n <= FLAGS.shards:
        problem = f"--share={FLAGS.share} with --shards={FLAGS.shards}"
        raise UserError(problem, allowed="I/N with I from 0 to N - 1, and N at most --shards")
    return i, n


def main(_: list[str]) -> None:
    splits = [split.strip() for split in FLAGS.split.split(",") if split.strip()]
    if not FLAGS.output:
        raise UserError("--output is missing", allowed="--output=DIR")
    if FLAGS.input is not None and FLAGS.tfds_dir:
        raise UserError("--input and --tfds_dir are both given", allowed="one of them")
    if bool(FLAGS.dataset) != bool(FLAGS.tfds_dir):
        raise UserError("one of --tfds_dir and --dataset alone", allowed="--tfds_dir=DATA_DIR --dataset=NAME")
    if not splits or (FLAGS.name and len(splits) > 1):
        raise UserError(
            f"--split={FLAGS.split} names {len(splits)} splits", allowed="at least one; exactly one with --name"
        )
    share = _share()

    from orthojax.data import prepare, text_parts, tfds_parts
    from orthojax.data.tokenizers import tokenizer_identity

    output = Path(FLAGS.output)
    tokenizer_identity(FLAGS.tokenizer)  # refuses a wrong one before any text is read
    if FLAGS.tfds_dir:
        parts = tfds_parts(Path(FLAGS.tfds_dir), FLAGS.dataset, splits, FLAGS.text_feature)
    else:
        paths = None if FLAGS.input in (None, "embedded") else [path for path in FLAGS.input.split(",") if path]
        parts = text_parts(paths, splits)
    parts = [dataclasses.replace(part, name=FLAGS.name or part.name) for part in parts]
    source = parts[0].source
    count = f"{len(source.files)} file{'s' * (len(source.files) != 1)}"
    # Many files are read in many processes, also for their sha256.
    print(f"{source.description}: {count}" + (f", sha256 {source.sha256}" if FLAGS.shards == 1 else ""), flush=True)
    workers = FLAGS.workers or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(1))
    options = {"shards": FLAGS.shards, "share": share, "workers": workers, "progress": cli.tokenizing_progress()}
    made = prepare(output, parts, FLAGS.tokenizer, **options)
    if FLAGS.shards > 1:
        print(f"{output}: {len(made)} token files, {sum(file.info.n_tokens for file in made)} tokens")
        return
    for file in made:
        info = file.info
        print(f"{file.path}: {info.n_tokens} tokens, {info.n_documents} documents, {info.n_bytes} bytes of text")
        print(f"  {info.dtype}, tokenizer {info.tokenizer} {info.tokenizer_sha256}, data {info.data_sha256}")
