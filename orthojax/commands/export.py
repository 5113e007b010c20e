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
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
```

`orthojax.load("{name}")` reads it as well. {tokenizer}

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
    from orthojax.pretrained.folders import new_folder

    folder = Path(FLAGS.to)
    new_folder(folder)  # before any work
    loaded = load(FLAGS.model)
    config, params = loaded.config.model, loaded.params
    if not FLAGS.code:
        config, params = as_family(config, params)
    if (FLAGS.code or family_of(config) is None) and (field := field_without_code(config)):
        problem = f"no family of transformers holds this model, and modeling_orthojax.py has no {field}"
        hint = "orthojax.pretrained.write_folder writes it all the same, for orthojax.load"
        raise UserError(problem, allowed="a model without it", hint=hint)
    options = {"bos": loaded.config.data.bos, "code": FLAGS.code}
    with tqdm(unit=" tensors") as bar:
        kind = write_folder(folder, config, params, loaded.tokenizer, **options, on_tensor=lambda _: bar.update())
    write_text(folder / "README.md", _card(loaded, folder, kind))
    with_code = kind == "orthojax"
    print(printable(f"written: {folder}, {'with modeling_orthojax.py' if with_code else f'a {kind} of transformers'}"))
    print(printable(_tokenizer(loaded)))


def _card(loaded: Any, folder: Path, kind: str) -> str:
    """Returns the README.md of an exported model."""
    from orthojax.model import parameter_count
    from orthojax.pretrained import FAMILIES

    c = loaded.config.model
    about = f"{parameter_count(c):,} parameters: {c.num_layers} layers of width {c.d_model} with {c.num_heads} heads; "
    about += f"normalizer {c.normalizer}, norm {c.norm}, position {c.position}. "
    if kind in FAMILIES:
        about += f"Written as `{FAMILIES[kind].architecture}` of transformers, which gives equal logits."
    else:
        about += "No family of transformers computes it, so its code is beside it: modeling_orthojax.py."
    return _CARD.format(
        name=folder.absolute().name,
        about=about,
        trust="" if kind in FAMILIES else ", trust_remote_code=True",
        tokenizer=_tokenizer(loaded),
        numbers=_numbers(loaded),
        version=__version__,
        command=" ".join(["orthojax export", *sys.argv[1:]]),
        config=to_json(loaded.config),
    )


def _tokenizer(loaded: Any) -> str:
    """Says what came with the model to turn text into token ids."""
    from orthojax.data.tokenizers import HuggingFaceTokenizer

    if loaded.tokenizer is None:
        return "It has no tokenizer: that of the model is not known, so it takes token ids."
    if not isinstance(loaded.tokenizer, HuggingFaceTokenizer):
        return (
            f"Its tokenizer.json ({loaded.tokenizer.spec}) is of a kind that orthojax reads and transformers does not."
        )
    begins = "begin" if loaded.config.data.bos else "do not begin"
    return f"Its texts {begins} with the BOS token, id {loaded.tokenizer.bos_id}."


def _numbers(loaded: Any) -> str:
    """Returns the numbers of the run's evaluation.json as a block, or which command makes them."""
    path, found = home_of(loaded.source) / "evaluation.json", None
    if not is_pretrained(loaded.source) and path.is_file():
        found = read_with_digest(path, "evaluation")
        if Path(found["checkpoint"]).name != loaded.source.name:
            print(printable(f"{path} is left out: it is of {found['checkpoint']}"), file=sys.stderr)
            found = None
    if found is None:
        return (
            "Nothing: `orthojax evaluate` writes evaluation.json beside the checkpoints of a run, for the next export."
        )
    return "\n".join(["```", *overview(found["metrics"], loaded.config), "```"])
