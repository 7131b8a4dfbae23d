"""The long episode of `benchmarks.long_episode`, smaller: 40,000 tokens in a window of 1024. The model is a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_episode import figures_of, play
from rollmill.errors import MachineError


async def test_a_long_episode_in_a_short_window(tmp_path: Path) -> None:
    try:
        played = await play(tmp_path, 40_000, 1024)
    except MachineError as error:
        if error.message.startswith("cannot enter namespaces"):
            pytest.skip(str(error))
        raise
    figures = figures_of(played)
    assert played.result.stop == "done" and figures["tokens"] >= 40_000
    assert figures["contexts"] == played.engine.summaries + 1 >= 40
    assert figures["longest_sequence"] < figures["longest_context"] <= 1024
    assert figures["trained_tokens"] == figures["sampled_tokens"] and figures["masked_tokens"] == 0
    causes = [segment.cause for segment in played.trajectory.segments]
    assert causes == ["start", *["summary"] * played.engine.summaries]
