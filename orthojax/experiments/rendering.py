"""HTML pages from the templates of this package."""

from typing import Any

import jinja2


def render_page(template: str, **values: Any) -> str:
    """A page in which every value is escaped.

    Args:
      template: File name in `templates/`.
      values: What it shows; one that it needs and does not get raises `jinja2.UndefinedError`.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orthojax.experiments", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)
