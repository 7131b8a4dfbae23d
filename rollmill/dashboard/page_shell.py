"""The frame of every page: title, styles, scripts, navigation."""

from __future__ import annotations

from rollmill import __version__
from rollmill.runs.report.markup import Markup, tag

PLACES = {"overview": ("/", "Overview"), "trajectories": ("/trajectories", "Trajectories")}


def page(name: str, place: str, content: Markup, *, live: bool = False) -> str:
    """One page. `place` is the entry of the navigation that it belongs to. A `live` page asks for news by itself."""
    scripts = ["static/report.js", *(["static/dashboard.js"] if live or place else [])]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", f"{name} · Rollmill"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        [tag("link", rel="stylesheet", href=f"/static/{style}.css") for style in ("report", "dashboard")],
        [tag("script", src=f"/{script}", defer=True) for script in scripts],
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        _bar(name, place, live),
        content,
        tag("footer", f"Rollmill {__version__} · read-only", class_="foot"),
        tag("div", id="tip", role="status", hidden=True),
        data_live=live,
    )
    return "<!doctype html>" + tag("html", head, body, lang="en")


def _bar(name: str, place: str, live: bool) -> Markup:
    links = [
        tag("a", words, href=href, aria_current="page" if key == place else None)
        for key, (href, words) in PLACES.items()
    ]
    status = tag("span", tag("i", class_="mood"), tag("span", "up to date"), id="pulse", role="status") if live else ""
    return tag("nav", tag("b", name), links if place else "", status, class_="bar", aria_label="Pages")
