"""Writes a model for other libraries: orthojax export --model=runs/mine --to=exported.

--model is a run, a checkpoint, a folder of config.json and safetensors, or a .gguf file. --to gets config.json,
safetensors, the tokenizer, and as its card a README.md with the numbers of the run's evaluation.json. A model that a
family of transformers computes is written as that family, also in other words: softmax-1 is a learned sink of 0. Any
other gets modeling_orthojax.py, which AutoModelForCausalLM runs with trust_remote_code=True; --code writes that for
every model, as for a transformers that is older than the family.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags

from orthojax import __version__
from orthojax.commands.evaluate import home_of, overview
from orthojax.config import to_json
from orthojax.errors import UserError, printable
from orthojax.files import read_with_digest, write_text
from orthojax.places import find_place, is_pretrained

FLAGS = flags.FLAGS
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [orthojax]
---

# {name}

{about}

```python
import transformers

{lines}
```

`orthojax.load("{name}")` reads it as well. {words}

## Measured

{numbers}

## How it was made

Written by orthojax {version} with `{command}`. The config of its run, or what is known of it:

```json
{config}
```
"""


def define_flags() -> None:
    """Defines the flags of this command."""
    flags.DEFINE_string("model", None, "The model: a run, a checkpoint, or a pretrained model.")
    flags.DEFINE_alias("checkpoint", "model")
    flags.DEFINE_string("to", None, "Folder to write, new or empty.")
    flags.DEFINE_bool("code", False, "Write modeling_orthojax.py even if a family of transformers holds the model.")


def main(_: list[str]) -> None:
    for name in ("model", "to"):
        if not FLAGS[name].value:
            raise UserError(f"--{name} is missing", allowed="--model=PATH --to=DIR")
    find_place(FLAGS.model)

    from tqdm import tqdm

    from orthojax import load
    from orthojax.pretrained import write_folder
    from orthojax.pretrained.export import as_family, family_of, field_without_code
    from orthojax.pretrained.folders import require_empty

    folder = Path(FLAGS.to)
    require_empty(folder)  # before any work
    loaded = load(FLAGS.model)
    config, params = loaded.config.model, loaded.params
    if not FLAGS.code:
        config, params = as_family(config, params)
    if (FLAGS.code or family_of(config) is None) and (field := field_without_code(config)):
        problem = f"modeling_orthojax.py has no {field}" + (
            "" if FLAGS.code else ", and no family of transformers either"
        )
        hint = "orthojax.pretrained.write_folder writes it all the same, for orthojax.load"
        raise UserError(problem, allowed="a model without it", hint=hint)
    options = {"bos": loaded.config.data.bos, "code": FLAGS.code}
    with tqdm(unit=" tensors") as bar:
        kind = write_folder(folder, config, params, loaded.tokenizer, **options, on_tensor=lambda _: bar.update())
    write_text(folder / "README.md", _card(loaded, folder, kind))
    print(printable(f"written: {folder}, {_form(kind)}"))
    print(printable(_words(loaded)))


def _form(kind: str) -> str:
    """Says as what a model was written."""
    from orthojax.pretrained import FAMILIES

    return f"{FAMILIES[kind].architecture} of transformers" if kind in FAMILIES else "with its modeling_orthojax.py"


def _card(loaded: Any, folder: Path, kind: str) -> str:
    """Returns the README.md of an exported model."""
    from orthojax.model import parameter_count

    c, name = loaded.config.model, folder.absolute().name
    about = f"{parameter_count(c):,} parameters: {c.num_layers} layers of width {c.d_model} with {c.num_heads} heads; "
    about += f"normalizer {c.normalizer}, norm {c.norm}, position {c.position}; {_form(kind)}."
    classes = {"model": "AutoModelForCausalLM"} | ({"tokenizer": "AutoTokenizer"} if _is_read(loaded.tokenizer) else {})
    options = f'"{name}", trust_remote_code=True' if kind == "orthojax" else f'"{name}"'
    return _CARD.format(
        name=name,
        about=about,
        lines="\n".join(f"{word} = transformers.{of}.from_pretrained({options})" for word, of in classes.items()),
        words=_words(loaded),
        numbers=_numbers(loaded),
        version=__version__,
        command=" ".join(["orthojax export", *sys.argv[1:]]),
        config=to_json(loaded.config),
    )


def _is_read(tokenizer: Any) -> bool:
    """Returns whether transformers reads a tokenizer's file."""
    from orthojax.data.tokenizers import HuggingFaceTokenizer

    return isinstance(tokenizer, HuggingFaceTokenizer)


def _words(loaded: Any) -> str:
    """Says what turns text into token ids."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        return "There is no tokenizer, since that of the model is not known: it takes token ids."
    if not _is_read(tokenizer):
        return f"Its tokenizer.json ({tokenizer.spec}) is of a kind that orthojax reads and transformers does not."
    return (
        f"Its texts {'begin' if loaded.config.data.bos else 'do not begin'} with the BOS token, id {tokenizer.bos_id}."
    )


def _numbers(loaded: Any) -> str:
    """Returns the numbers of the run's evaluation.json as a block, or what makes them."""
    path = home_of(loaded.source) / "evaluation.json"
    if not is_pretrained(loaded.source) and path.is_file():
        found = read_with_digest(path, "evaluation")
        if Path(found["checkpoint"]).name == loaded.source.name:
            return "\n".join(["```", *overview(found["metrics"], loaded.config), "```"])
        print(printable(f"{path} is left out: it is of {found['checkpoint']}"), file=sys.stderr)
    return "Nothing yet: `orthojax evaluate` before `orthojax export` puts its numbers here."
