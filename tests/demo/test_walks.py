"""Walks: tasks follow from their ids. Demonstrations are what the harness and the window of walks.toml make of them."""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

import rollmill.demo
from rollmill.chat.formats.compact import CompactFormat
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.chat.tokenizer import Tokenizer
from rollmill.demo.coding_tools import tool_schemas
from rollmill.demo.walk_demonstrations import (
    REQUEST,
    RESUME,
    WalkHabits,
    WalkStream,
    demonstrate_walk,
    walk_solve_rate,
    walk_tokenizer,
)
from rollmill.demo.walks import FILES, KeyAndEnd, Walk, Walks
from rollmill.environments.episode import Episode
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.summary import derived_threshold
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost

CONFIG = tomllib.loads((Path(rollmill.demo.__file__).parent / "walks.toml").read_text())
WINDOW, ANSWER = CONFIG["model"]["max_context"], CONFIG["rollouts"]["max_answer_tokens"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return walk_tokenizer(CONFIG["model"]["vocab_size"])


def test_tasks_follow_from_their_ids() -> None:
    tasks = Walks()
    for task in [*islice(tasks.train(0), 50), *tasks.heldout("heldout", 50)]:
        assert tasks.get(task.id) == task and len(task.files) == FILES
        kinds = Counter(data.decode().rstrip("0123456789\n") for data in task.files.values())
        assert kinds == {"dust": FILES - 2, "key": 1, "end": 1}
        key, end = str(task.grading["answer"]).split()
        assert f"{end}\n".encode() == task.files[str(FILES)] and f"{key}\n".encode() in task.files.values()
    for wrong in ("train", "fresh/1", "train/x", "train/²"):
        with pytest.raises(TaskError):
            tasks.get(wrong)


def test_one_file_fits_the_window_and_two_do_not(tokenizer: Tokenizer) -> None:
    """The harness asks for a summary after each file, as the demonstrations have it."""
    assert (CONFIG["harness"]["summaries"]["request"], CONFIG["harness"]["summaries"]["resume"]) == (REQUEST, RESUME)
    at = derived_threshold(WINDOW, ANSWER, CONFIG["harness"]["max_tool_output"])
    assert at is not None
    format, longest = CompactFormat(tokenizer), 0
    for number in range(20):
        contexts = demonstrate_walk(Walk(f"train/{number}"), random.Random(number), WalkHabits())
        assert len(contexts) == FILES + 1 >= 10
        for messages in contexts[:-1]:
            rendered = render_conversation(messages, tool_schemas(), format)
            read, summary = rendered.ends
            assert read + len(messages[2]["content"]) // 3 >= at and summary <= WINDOW
            longest = max(longest, summary)
    assert longest + 9 > WINDOW, "another call and its result do not fit"


def test_the_teacher_is_wrong_as_often_as_intended(tokenizer: Tokenizer) -> None:
    walks = [Walk(f"heldout/{number}") for number in range(100)]
    assert 0.15 < walk_solve_rate(walks, WalkHabits(), 16) < 0.3
    assert walk_solve_rate(walks, WalkHabits(keeps=1.0), 1) == 1.0
    stream = WalkStream(CompactFormat(tokenizer), seed=0)
    documents = [stream.read(number) for number in range(100)]
    assert documents == [stream.read(number) for number in range(100)]
    assert all(0 < sum(document.learnt) < len(document.tokens) <= WINDOW for document in documents)


@pytest.mark.parametrize(
    ("given", "stop", "value"),
    [("right", "answer", 1.0), ("right", "max_turns", 0.0), ("key99 end99", "answer", 0.0), (None, "answer", 0.0)],
)
async def test_only_the_right_last_answer_is_rewarded(given: str | None, stop: str, value: float) -> None:
    task = Walk("heldout/3").task
    said = str(task.grading["answer"]) if given == "right" else given
    messages = [{"role": "assistant", "content": "key20"}, {"role": "assistant", "content": said}]
    result = HarnessResult(stop, 3, 1)  # type: ignore[arg-type]
    episode = Episode(task, {}, NamespaceHost(), messages=messages, result=result)
    assert (await KeyAndEnd().grade(episode)).value == value


def test_words_that_do_not_mislead_are_about_as_long_and_name_no_number(tokenizer: Tokenizer) -> None:
    walk = Walk("train/1")
    found = {
        misleads: [
            context[-1]["content"]
            for context in demonstrate_walk(walk, random.Random(0), WalkHabits(wordy=1.0, misleads=misleads))
        ]
        for misleads in (True, False)
    }
    for number, (misleading, idle) in enumerate(zip(found[True][:-2], found[False][:-2], strict=True)):
        assert misleading.endswith(f"said {walk.files[number]}") and idle.endswith("said it")
        assert misleading.partition(" and ")[0] == idle.partition(" and ")[0], "the same faults"
        assert len(tokenizer.encode(misleading)) - len(tokenizer.encode(idle)) == 1
    assert found[True][-1] == found[False][-1]
