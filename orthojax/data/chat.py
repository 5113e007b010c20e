"""Chat templates of published models: messages as the text that a model was trained on."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orthojax.data import chat_process
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

    Raises UserError if there is none.
    """
    if path.suffix == ".gguf":
        metadata = open_gguf(path).metadata
        template, words = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens") or []
        ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")]
        names: list[Any] = [words[i] if isinstance(i, int) and i < len(words) else "" for i in ids]
    else:
        config = path / "tokenizer_config.json"
        declared = read_json(config, "file of a model") if config.is_file() else {}
        template, names = declared.get("chat_template"), [declared.get("bos_token"), declared.get("eos_token")]
        if (path / "chat_template.jinja").is_file():
            try:
                template = (path / "chat_template.jinja").read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path / 'chat_template.jinja'} is not UTF-8: {error}") from None
    if isinstance(template, list):  # of {"name", "template"}
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise UserError(f"{path} has no chat template", allowed="a model that was trained to chat, or plain --prompt")
    bos, eos = (str(token.get("content", "")) if isinstance(token, dict) else str(token or "") for token in names)
    return ChatTemplate(template, bos, eos)


def render_chat(template: ChatTemplate, messages: Sequence[Mapping[str, str]], *, seconds: int = 10) -> str:
    """Renders messages, {"role", "content"}, and the start of the answer, as transformers' `apply_chat_template` does.

    `Tokenizer.encode_special` turns the text into ids. The template runs in another process, for at most `seconds`.
    Raises UserError if the template refuses the messages, is not a template, or takes too long or too much.
    """
    with needing("a chat template", "reports"):
        import jinja2  # noqa: F401  # which the process imports
    given = {"bos_token": template.bos_token, "eos_token": template.eos_token, "tools": None, "documents": None}
    given |= {"messages": list(messages), "add_generation_prompt": True}
    request = json.dumps({"source": template.source, "given": given, "seconds": seconds})
    program = [sys.executable, "-I", chat_process.__file__]
    try:
        done = subprocess.run(program, input=request, capture_output=True, text=True, timeout=2 * seconds)
        answer = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # stopped by its limits, without an answer
        answer = {"error": f"it takes over {seconds} seconds or {chat_process.BYTES >> 30} GiB"}
    if "error" in answer:
        raise UserError(f"the chat template refuses: {answer['error']}")
    try:
        answer["text"].encode()
    except UnicodeEncodeError as error:  # half of a character
        raise UserError(f"the chat template gives text that is not Unicode: {error}") from None
    return answer["text"]
