"""The long episode of `benchmarks.long_episode`, smaller: 40,000 tokens in a window of 1024. The model is a script.
The baselines of `benchmarks.summaries`: what their teacher shows is what their harnesses make."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.long_episode import figures_of, play
from benchmarks.summaries import ARMS, BASELINES, QUICK, settings
from benchmarks.summary_baselines import (
    KEPT_CALLS,
    LAST_NOTE,
    BaselineStream,
    NotedContexts,
    TruncatedContexts,
    demonstrate_note,
    demonstrate_truncation,
    reachable,
)
from rollmill.chat.formats.compact import CompactFormat
from rollmill.config import validate_config
from rollmill.demo.walk_demonstrations import RESUME, read_file, start_of, walk_tokenizer
from rollmill.demo.walks import FILES, Walk
from rollmill.environments.harnesses.summary import Contexts, SummaryConfig
from rollmill.errors import MachineError
from rollmill.runs.run import RunConfig


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


@pytest.mark.parametrize(
    ("kind", "demonstrate", "files"),
    [(NotedContexts, demonstrate_note, LAST_NOTE), (TruncatedContexts, demonstrate_truncation, KEPT_CALLS)],
)
def test_a_baseline_has_its_own_demonstrations(kind: type[Contexts], demonstrate, files: int) -> None:  # type: ignore[no-untyped-def]
    """The teacher sees what the harness makes, and answers with the key wherever it is still there."""
    found = 0
    for number in range(40):
        walk, contexts = Walk(f"train/{number}"), kind(SummaryConfig(resume=RESUME), start_of("", 0), 1, 14)
        for read, line in enumerate(walk.files, 1):
            for message in read_file(read, line):
                contexts.add(message)
            contexts._ask()
            *seen, answer = demonstrate(walk, read)
            assert seen == contexts.messages
            if read < FILES:
                assert answer == read_file(read + 1, walk.files[read])[0]
        text = " ".join(message["content"] or "" for message in contexts.messages)
        assert reachable(walk, files) == ("key" in text) == (answer["content"] == walk.answer)
        found += reachable(walk, files)
    assert 0 < found < 40


@pytest.mark.slow
def test_the_arms_of_summaries_differ_in_one_setting() -> None:
    trees = {arm: settings(arm, 0, QUICK) for arm in ARMS}
    for arm, tree in trees.items():
        validate_config(RunConfig, tree, arm)
    for arm in BASELINES:
        trees[arm]["harness"].pop("kind")
    trees["short"]["rewards"].pop()
    trees["control"]["stages"][1] = trees["short"]["stages"][1] = trees["learned"]["stages"][1]
    assert all(tree == {**trees["learned"], "name": arm} for arm, tree in trees.items())
    tokens = [BaselineStream(CompactFormat(walk_tokenizer(384)), 0).read(number).tokens for number in range(50)]
    assert max(map(len, tokens)) <= trees["base"]["model"]["max_context"]
