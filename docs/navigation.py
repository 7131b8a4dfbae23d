"""The navigation of the site, read from docs/index.md: a heading is a section, an item of a list is a page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Called by MkDocs before it builds."""
    sections: dict[str, list[dict[str, str]]] = {}
    title = ""
    for line in (Path(config["docs_dir"]) / "docs" / "index.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif item := re.fullmatch(r"- \[(.+)\]\((.+)\)", line):
            sections.setdefault(title, []).append({item[1]: posixpath.normpath(f"docs/{item[2]}")})
    config["nav"] = [{title: pages} for title, pages in sections.items()]
    return config
