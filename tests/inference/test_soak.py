"""A short version of `python -m benchmarks.soak`."""

from __future__ import annotations

import logging

import pytest

from benchmarks.soak import soak


@pytest.mark.slow
async def test_random_load_loses_no_page_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "aiohttp.server"):
        figures, wrong = await soak(20.0, seed=5)
    assert wrong == []
    assert figures["soak_lost"] == figures["soak_lost_pages"] == figures["soak_left_requests"] == 0
    assert figures["soak_left_promises"] == 0
    assert figures["soak_answers"] > 0 and figures["soak_left"] > 0 and figures["soak_preemptions"] > 0
    assert not caplog.records, "a client that leaves is not an error"
