"""Turns figures into HTML and SVG: calls macros of `templates/`, which escape whatever they print.

Models and tools wrote most of the text on a page. It cannot become markup: the templates hold all the markup there is,
and a string from elsewhere is escaped where a template prints it.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup

from rollmill import __version__
from rollmill.dashboard import scales

# Control characters cannot be shown. Lone surrogates cannot be written. Bidirectional overrides would change the order
# in which the text around them is shown.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def render(template: str, macro: str, *arguments: Any, **named: Any) -> Markup:
    """Call a macro of a template."""
    text = getattr(_environment().get_template(f"{template}.html").module, macro)(*arguments, **named)
    return Markup(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n")))  # noqa: S704  # templates made it


def static(name: str) -> Markup:
    """A style sheet, script or picture of `static/`."""
    text = (resources.files(__package__) / "static" / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704  # a file of this package


def cut(text: str, limit: int) -> str:
    """Long text keeps its beginning and end, because errors tend to stand last."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n… {scales.number(len(text) - head - tail)} characters left out …\n{text[-tail:]}"


class _Layout(Extension):
    """Line breaks beside a tag are the layout of a template, not text of the page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        return re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", source)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rollmill.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=[_Layout, "jinja2.ext.do"],
        finalize=lambda value: f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value,
    )
    names = ("number", "percent", "duration", "size", "moment", "clock_time", "signed")
    environment.filters |= {name: getattr(scales, name) for name in names} | {"cut": cut}
    environment.globals |= {"GAP": scales.GAP, "VERSION": __version__}
    return environment
