"""The pages in a real browser: light and dark, growing, without a word from the security policy."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from rollmill.dashboard import overview
from rollmill.dashboard.run_source import Source
from rollmill.runs.run import RunDirectory
from tests.dashboard.browser import browsing
from tests.dashboard.conftest import Open
from tests.dashboard.test_report import HOSTILE
from tests.dashboard.test_run_overview import emit
from tests.dashboard.test_trajectory_pages import STRANGE, filled  # noqa: F401

PAPER = "getComputedStyle(document.body).backgroundColor"
STEPS = "document.querySelector('.tiles dd').firstChild.textContent"


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_pages_in_a_browser(
    filled: RunDirectory,  # noqa: F811
    visit: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FRESH_S", "SHARE", "SLOW_S"):
        monkeypatch.setattr(overview, name, 0.0)
    client = await visit(Source.of_run(filled.path))
    async with browsing(tmp_path / "profile") as tab:
        papers = []
        for dark in (False, True):
            await tab.open(str(client.make_url("/")), dark=dark)
            assert await tab.value(STEPS) == "32"
            papers.append(await tab.value(PAPER))
            await tab.picture(tmp_path / f"{dark}.png")
            assert (tmp_path / f"{dark}.png").stat().st_size > 20_000
        assert papers == ["rgb(252, 251, 248)", "rgb(19, 21, 25)"]
        # it grows without being loaded again, what was opened stays open, and hostile text stays text
        await tab.value("window.mark = 1; document.querySelector('#part-figures details').open = true")
        emit(filled, "step", step=33, stage="rl", reward_mean=0.5, solve_rate=0.5)
        emit(filled, "warning", text=HOSTILE)
        await tab.until(f"{STEPS} === '33'")
        assert await tab.value("window.mark === 1 && document.querySelector('#part-figures details').open")
        await tab.until("document.querySelector('#part-incidents').textContent.includes('alert(1)')")
        # a phone: nothing is wider than the screen
        for path in ("/", "/trajectories", f"/trajectory?id={quote(STRANGE)}"):
            await tab.open(str(client.make_url("/")) + path[1:], width=390)
            assert await tab.value("document.documentElement.scrollWidth") <= 390, path
        assert await tab.value("document.querySelectorAll('.token').length") == 6
        assert await tab.value("document.querySelectorAll('main script, main img').length") == 0
        assert await tab.value("document.querySelector('time').textContent.endsWith('ago')")
        assert tab.complaints == []
