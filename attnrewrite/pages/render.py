"""Self-contained HTML pages from the templates beside this file: text is escaped, a missing name is an error."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from attnrewrite.errors import InputError


def check_pages() -> None:
    """Raise InputError where pages cannot be made here."""
    if find_spec("jinja2") is None:
        raise InputError("an HTML page needs jinja2: pip install 'attnrewrite[report]'")


def render(template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any) -> str:
    """The page that `template` makes of `values`. Raises InputError where jinja2 is not installed."""
    check_pages()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    jinja = Environment(
        loader=PackageLoader("attnrewrite.pages", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters.update(filters or {})
    return jinja.get_template(template).render(**values)
