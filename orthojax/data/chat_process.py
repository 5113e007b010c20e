"""Renders one chat template in a process of its own, with limits: it reads a request from standard input, as JSON.

A template is a program of whoever made the model. Jinja's sandbox keeps it from the machine, not from endless loops.
This file imports nothing of orthojax; `chat.render_chat` starts it.
"""

import contextlib
import datetime
import json
import sys
from typing import Any, NoReturn

BYTES, CHARACTERS = 2**30, 2**20


def render(source: str, given: dict[str, Any]) -> str:
    """Returns the text of a template, as transformers' `apply_chat_template` does."""
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
    text, length = [], 0
    for part in environment.from_string(source).generate(**given):
        text.append(part)
        if (length := length + len(part)) > CHARACTERS:
            raise ValueError(f"more than {CHARACTERS:,} characters")
    return "".join(text)


def main() -> None:
    """Writes {"text": ...} or {"error": ...}."""
    request = json.load(sys.stdin)
    seconds = request.pop("seconds")
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        answer = {"text": render(**request)}
    except Exception as error:  # of the template, which may compute anything
        answer = {"error": str(error)[:200] or type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
