"""HTML and SVG, escaped by construction: only `tag` makes Markup, and every plain string it is given is escaped.

Models and tools wrote most of the text in a report. It cannot become markup, because every string enters the page
through this module.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"br", "hr", "img", "input", "meta", "link"})
# Control characters cannot be shown. Lone surrogates cannot be written. Bidirectional overrides would change the order
# in which the text around them is shown.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))))


def tag(name: str, *children: str | Iterable[str], **attributes: str | float | bool | None) -> Markup:
    """`tag("rect", class_="bar", stroke_width=2)`: a trailing underscore is dropped, others become dashes.

    An attribute that is None or False is left out; True stands alone.
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(*children)}</{name}>")


def join(*children: str | Iterable[str]) -> Markup:
    parts: list[str] = []
    for child in children:
        parts.extend([child] if isinstance(child, str) else child)
    return Markup("".join(escape(part) for part in parts))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
