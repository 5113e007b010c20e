"""Measures any model as both papers do: orthojax analyze --model=smollm2.

--model takes what others trained (a folder of config.json and safetensors, a .gguf file, a name in the local Hugging
Face cache, smollm2) and runs of orthojax train; several, with or without names, are compared:
--model=base=PATH,tuned=PATH.
Attention to the first token, outliers, norms, entropy and quantisation are measured on --text, by layer and head;
--domains=code=FILES,prose=FILES,science=FILES also says on which kind of text each head is active. Two texts are there
without files: topics (Python's documentation, the default) and stdlib (its sources).
--intervene=zero_head:11.3 measures the model under an intervention; repeated, under each in turn. Others: first_head,
active_head, zero_attention:2, zero_mlp:2, zero_first_value:2, mean_attention:2, mean_mlp:2; * stands for every layer or
head, + joins several; dormant_heads:0.9 zeroes all heads whose mean weight on the first token is above 0.9 and, apart
from that, as many random heads, in three draws. --sweep_heads=8 zeroes every head in turn, on 8 rows of the text and
of each domain.
--dynamics takes the checkpoints of one run, --model=runs/mine for all that it kept or --model=1000=PATH,2000=PATH by
their steps, and plots everything against steps.
Writes results.json and report.html, which compares the models, and a folder for each model with its own page and its
arrays. Stopped and started again, it resumes; asked for more, it measures only what is missing.
"""

from pathlib import Path

from absl import flags

from orthojax.commands import cli
from orthojax.errors import UserError, printable

FLAGS = flags.FLAGS
RESUMES = True  # the same command resumes an interrupted one
EXTRAS = "train,reports"


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_compile_cache()
    flags.DEFINE_multi_string("model", [], "PATH or NAME=PATH, or several with commas between.")
    flags.DEFINE_list("text", ["topics"], "Text and .jsonl files, folders or patterns; or topics, or stdlib.")
    flags.DEFINE_list("domains", [], "NAME=FILES of each, as code=src/,more.py,prose=*.txt; FILES as of --text.")
    flags.DEFINE_string(
        "token_ids", "", "A .npy file of token ids [rows, length + 1] or [tokens] in the place of --text."
    )
    flags.DEFINE_string("tokenizer", "", "File of the tokenizer, where the model's own is not known.")
    flags.DEFINE_integer("rows", 64, "Rows of the text; 0 for all.", lower_bound=0)
    flags.DEFINE_integer("windows", 100, "Windows of each domain; 0 for all.", lower_bound=0)
    flags.DEFINE_integer(
        "length", 0, "Tokens of a row; 0 for the length at which the model was trained, 256 at most.", lower_bound=0
    )
    flags.DEFINE_integer("batch", 8, "Rows at once; dynamic quantisation scales are those of a batch.", lower_bound=1)
    flags.DEFINE_bool("bos", None, "Start rows with the tokenizer's BOS token; as the model was trained if not given.")
    flags.DEFINE_float("threshold", 0.3, "Mean weight on the first token above which a head is a sink.", 0.0, 1.0)
    flags.DEFINE_list(
        "settings", None, "Quantisation settings; all for every one, none for none. Default: the paper's."
    )
    flags.DEFINE_bool("quantize_head", False, "Simulate every setting with the output head quantised as well.")
    flags.DEFINE_multi_string("intervene", [], "An intervention, see above.")
    flags.DEFINE_integer("sweep_heads", 0, "Zero every head in turn on that many rows; 0 for no sweep.", lower_bound=0)
    flags.DEFINE_bool("dynamics", False, "The models are checkpoints of one run, in the order of their steps.")
    flags.DEFINE_string("workdir", "runs/analyze", "Where results and pages go.")


def main(_: list[str]) -> None:
    if not FLAGS.model:
        raise UserError("--model is missing", allowed="--model=PATH, or --model=NAME=PATH,NAME=PATH")

    from orthojax import quant
    from orthojax.experiments.analyzing import Asked, Given, analyze, headlines
    from orthojax.experiments.analyzing.dynamics import checkpoint_series
    from orthojax.experiments.analyzing.naming import named_files, named_models
    from orthojax.experiments.headlines import line
    from orthojax.train import keep_compiled_programs

    settings = list(quant.SETTINGS) if FLAGS.settings is None else FLAGS.settings
    if settings in (["all"], ["none"]):
        settings = [*quant.SETTINGS, *quant.MORE_SETTINGS] if settings == ["all"] else []
    for name in settings:
        quant.setting_named(name)
    given = Given(
        text=tuple(FLAGS.text),
        domains=named_files(FLAGS.domains),
        token_ids=FLAGS.token_ids,
        tokenizer=FLAGS.tokenizer,
        rows=FLAGS.rows,
        windows=FLAGS.windows,
        length=FLAGS.length,
        bos=FLAGS.bos,
    )
    asked = Asked(
        batch=FLAGS.batch,
        threshold=FLAGS.threshold,
        settings=tuple(settings),
        quantize_head=FLAGS.quantize_head,
        interventions=tuple(FLAGS.intervene),
        sweep_rows=FLAGS.sweep_heads,
        dynamics=FLAGS.dynamics,
    )
    models = checkpoint_series(FLAGS.model) if FLAGS.dynamics else named_models(FLAGS.model)
    keep_compiled_programs(FLAGS.compile_cache)
    workdir = Path(FLAGS.workdir)
    analyzed = analyze(models, given, asked, workdir)
    for name, (loaded, measured, _texts) in analyzed.runs.items():
        for headline in headlines(name, loaded, measured.metrics):
            print(printable(line(headline)))
    print(printable(f"written: {workdir / 'results.json'} and {workdir / 'report.html'}"))
