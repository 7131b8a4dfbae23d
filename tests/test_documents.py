"""Documents: one width, links that lead somewhere, an index that reaches every page, and the site made of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.documents import WIDTH, prose, wrap
from tests.test_repo import DOCUMENTS, ROOT

INDEX = ROOT / "docs" / "index.md"
WRITTEN_BY_PROGRAMS = ROOT / "docs" / "reference"
LOGS = ROOT / "docs" / "log"  # records: they stay as they were written
WRAPPED = [path for path in DOCUMENTS if not path.is_relative_to(WRITTEN_BY_PROGRAMS) and not path.is_relative_to(LOGS)]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.S | re.M)


def anchors(document: Path) -> set[str]:
    """The anchors of its headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("document", WRAPPED, ids=name)
def test_prose_is_wrapped_at_one_width(document: Path) -> None:
    """Tables, code and headings may be longer, and a line without a place to break."""
    for is_prose, lines in prose(document.read_text(encoding="utf-8")):
        long = [line for line in lines if is_prose and len(line) > WIDTH]
        breakable = [line for line in long if len(wrap(line).splitlines()) > 1]
        assert not breakable, f"python -m tests.documents {name(document)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_a_heading_that_exists(document: Path) -> None:
    """That their files exist is checked in test_repo.py."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text(encoding="utf-8"))):
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if "://" not in link and anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(document)} links to {link}"


def test_the_index_lists_every_page() -> None:
    listed = {(INDEX.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", INDEX.read_text())}
    pages = {path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs") and LOGS not in path.parents}
    assert pages - {INDEX} <= listed, "a page that docs/index.md does not list is not found"
    log = (LOGS / "README.md").read_text()
    assert all(path.name in log for path in LOGS.glob("2*.md")), "docs/log/README.md lists every log"


def test_wrapping_changes_no_word() -> None:
    text = (
        "# A long heading\n\nSome `code with  spaces` and more\nwords.\n\n"
        "- item one\n  goes on\n\n    code  stays\n\n| a | b |\n"
    )
    assert wrap(text) == text.replace("more\nwords", "more words").replace("one\n  goes", "one goes")
    long = "word `a b` - " * 40
    assert wrap(long).split() == long.split() and max(map(len, wrap(long).splitlines())) <= WIDTH
    assert "`a\n" not in wrap(long) and "\n- " not in wrap(long)


@pytest.mark.slow
def test_the_site_is_built_without_a_broken_link() -> None:
    if not shutil.which("mkdocs", path=str(ROOT / ".venv" / "bin")):
        pytest.skip("MkDocs is not installed; pip install -e '.[docs]'")
    done = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "build/docs/site/docs/guides/your-first-task.html").read_text()
    assert "Choosing a machine" in page, "the navigation is on every page"
    assert not re.search(r"(src|href)=\"https?://(?!127|localhost)[^\"]*\.(js|css|woff2?)\"", page), (
        "nothing from elsewhere"
    )
