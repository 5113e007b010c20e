"""Turns text into token files: python launch/prepare_data.py --input=a.txt,b.jsonl --tokenizer=bpe:2048 --output=DIR.

Writes train.bin, validation.bin (each with a JSON sidecar) and tokenizer.json under the output folder; train on them
with --config.data.kind=tokens --config.data.paths=DIR/train.bin,DIR/validation.bin.
"""

from pathlib import Path

from absl import flags

from orthojax import cli
from orthojax.errors import UserError

flags.DEFINE_string(
    "input", "embedded", "Text or jsonl files, separated by commas, or 'embedded': Python's own library."
)
flags.DEFINE_string("tokenizer", "bytes", "bytes | bpe:N | the path of a tokenizer.json.")
flags.DEFINE_string("output", None, "Folder of the token files; it must not exist yet.")
FLAGS = flags.FLAGS


def main(_: list[str]) -> None:
    if not FLAGS.output:
        raise UserError("--output is missing", allowed="--output=DIR")

    from orthojax.data.corpus import embedded_corpus, text_corpus
    from orthojax.data.datasets import build_dataset, open_pair
    from orthojax.progress import tokenizing_progress

    output = Path(FLAGS.output)
    if output.exists():
        raise UserError(f"{output} already exists", allowed="a folder that does not exist yet")
    corpus = (
        embedded_corpus()
        if FLAGS.input == "embedded"
        else text_corpus([path for path in FLAGS.input.split(",") if path])
    )
    print(f"{corpus.description}: {corpus.file_count} files, sha256 {corpus.sha256}")
    build_dataset(output, corpus, FLAGS.tokenizer, tokenizing_progress())
    dataset = open_pair(output / "train.bin", output / "validation.bin")
    for name, value in dataset.provenance.items():
        print(f"  {name}: {value!r}")
    print(f"written: {output}/train.bin, {output}/validation.bin, {output}/tokenizer.json")


if __name__ == "__main__":
    cli.run(main)
