"""Chat templates of published models: messages as the text that a model was trained on."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from orthojax.data.published import open_gguf
from orthojax.errors import UserError, needing
from orthojax.files import read_json


class ChatTemplate(NamedTuple):
    """A Jinja template, and the names of the tokens that it may use."""

    source: str
    bos_token: str
    eos_token: str


def chat_template(path: Path) -> ChatTemplate:
    """Returns the chat template that the files of a published model declare, or of several the one named default.

    Raises:
      UserError: If there is none.
    """
    if path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
        found, words = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens") or []
        ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")]
        names: list[Any] = [words[i] if isinstance(i, int) and i < len(words) else "" for i in ids]
    else:
        config = path / "tokenizer_config.json"
        declared = read_json(config, "file of a model") if config.is_file() else {}
        found, names = declared.get("chat_template"), [declared.get("bos_token"), declared.get("eos_token")]
        if (path / "chat_template.jinja").is_file():
            found = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(found, list):  # of {"name", "template"}
        named = {of.get("name"): of.get("template") for of in found if isinstance(of, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise UserError(f"{path} has no chat template", allowed="a model that was trained to chat, or plain --prompt")
    bos, eos = (str(of.get("content", "")) if isinstance(of, dict) else str(of or "") for of in names)
    return ChatTemplate(found, bos, eos)


def render_chat(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders messages, {"role", "content"}, and the start of the answer, as transformers' `apply_chat_template` does.

    `Tokenizer.encode_special` turns the text into ids.

    Raises:
      UserError: If the template refuses the messages, or is not a template.
    """
    with needing("a chat template", "reports"):
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Lets {% generation %} ... {% endgeneration %} stand for what is between them."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    given = {"bos_token": template.bos_token, "eos_token": template.eos_token, "tools": None, "documents": None}
    try:
        made = environment.from_string(template.source)
        return made.render(messages=list(messages), add_generation_prompt=True, **given)
    except Exception as error:  # of the template, which may compute anything
        raise UserError(f"the chat template refuses: {str(error)[:200]}") from None
