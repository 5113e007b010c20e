"""Chat templates of published models: messages as the text that a model was trained on."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from orthojax.data.published import open_gguf
from orthojax.data.tokenizers import Tokenizer
from orthojax.errors import UserError, needing
from orthojax.files import read_json


def chat_template(path: Path) -> str:
    """Returns the Jinja template that the files of a published model declare, of several the one called default.

    Raises:
      UserError: If there is none.
    """
    if path.suffix == ".gguf":
        found = open_gguf(path).metadata.get("tokenizer.chat_template")
    elif (path / "chat_template.jinja").is_file():
        found = (path / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        config = path / "tokenizer_config.json"
        found = read_json(config, "file of a model").get("chat_template") if config.is_file() else None
    if isinstance(found, list):  # of {"name", "template"}
        named = {of.get("name"): of.get("template") for of in found if isinstance(of, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(f"{path} has no chat template", allowed="a model that was trained to chat, or plain --prompt")
    return found


def render_chat(template: str, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> str:
    """Renders messages, {"role", "content"}, and what begins the answer, as transformers' `apply_chat_template` does.

    `Tokenizer.encode_special` turns the text into ids.

    Raises:
      UserError: If the template refuses the messages, or is none.
    """
    with needing("a chat template", "reports"):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    given: dict[str, Any] = {"bos_token": names.get(tokenizer.bos_id, ""), "eos_token": names.get(tokenizer.eos_id, "")}
    try:
        return environment.from_string(template).render(messages=list(messages), add_generation_prompt=True, **given)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses: {str(error)[:200]}") from None
