"""Demonstrations have the tokens of real sessions, and are wrong as often and in the way that is intended."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from rollmill.chat.format import ChatFormat, Message, message_calls
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.demo.coding_tools import OK, TOOLS_BY_NAME, apply_edit, render_read, render_run, tool_schemas
from rollmill.demo.demonstrations import (
    DemonstrationStream,
    Habits,
    demonstrate,
    misread,
    plain_code,
    render_transcript,
    teacher_solve_rate,
)
from rollmill.demo.functions import NUMBERS, OPERATORS, Function, Step
from rollmill.demo.micro_repos import MAIN, TEST, MicroRepos, Repository, repositories
from rollmill.demo.tokenizer import session_texts
from rollmill.environments.harnesses.tools import parse_arguments


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(session_texts(1000), 512, SPECIAL_TOKENS))


@pytest.fixture(scope="module")
def format(tokenizer: Tokenizer) -> CompactFormat:
    return CompactFormat(tokenizer)


@pytest.fixture(scope="module")
def sessions() -> list[tuple[Repository, list[Message], Function]]:
    generator = random.Random(0)
    return [
        (repository, *demonstrate(repository, generator, Habits()))
        for repository in islice(repositories("train", 1), 600)
    ]


def answer(repository: Repository, directory: Path, message: Message) -> str:
    """The harness's answer to a tool call, from real files and a real test run."""
    [(name, arguments)] = message_calls(message)
    values = parse_arguments(name, arguments, TOOLS_BY_NAME)
    if name == "read":
        return render_read((directory / values["path"]).read_text())
    if name == "edit":
        path = directory / values["path"]
        path.write_text(apply_edit(path.read_text(), values["line"], values["text"]))
        return OK
    assert name == "run"
    process = subprocess.run([sys.executable, "-B", TEST], cwd=directory, capture_output=True, check=False)
    return render_run(process.returncode, process.stdout + process.stderr)


@pytest.fixture(scope="module", params=["compact", "hermes", "hermes, tools learnt"])
def any_format(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> ChatFormat:
    if request.param == "compact":
        return format_of(tokenizer)
    chatml = Tokenizer(train_tokenizer(session_texts(200), 512, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    return format_of(chatml, tools_in_prompt=request.param == "hermes")


def test_a_real_session_gives_the_same_tokens(
    sessions: list[tuple[Repository, list[Message], Function]], any_format: ChatFormat, tmp_path: Path
) -> None:
    """Each call is parsed, executed on real files and rendered, turn by turn, as gateway and harness do."""
    format, tools = any_format, tool_schemas()
    longest = sorted(sessions, key=lambda session: -len(session[1]))[:2]
    shapes = [
        next(session for session in sessions if session[0].blueprint.shape == name) for name in ("fix", "write", "test")
    ]
    for number, (repository, messages, _) in enumerate(longest + shapes):
        directory = tmp_path / str(number)
        directory.mkdir()
        for path, data in repository.task.files.items():
            (directory / path).write_bytes(data)
        tokens = format.render_start(repository.task.messages, tools)
        for index in range(1, len(messages), 2):
            sampled = format.render_answer(messages[index], tools)
            tokens += sampled
            parsed = format.parse(sampled, tools)
            if message_calls(parsed)[0][0] != "done":
                result = {"role": "tool", "tool_call_id": "any", "content": answer(repository, directory, parsed)}
                tokens += format.render_turn([result], tools, answer_closed=True)
        assert render_transcript(messages, format)[0] == tokens


def test_exactly_the_agents_tokens_are_learnt(
    sessions: list[tuple[Repository, list[Message], Function]], any_format: ChatFormat
) -> None:
    for _, messages, _ in sessions[:50]:
        tokens, learnt, _ = render_transcript(messages, any_format)
        answers = [token for message in messages[1::2] for token in any_format.render_answer(message, tool_schemas())]
        assert [token for token, flag in zip(tokens, learnt, strict=True) if flag] == answers


def test_documents_depend_on_seed_and_index_alone(format: CompactFormat, tokenizer: Tokenizer) -> None:
    stream = [DemonstrationStream(format, tokenizer, 5).read(number) for number in range(40)]
    assert [DemonstrationStream(format, tokenizer, 5).read(number) for number in range(25, 40)] == stream[25:]
    assert [DemonstrationStream(format, tokenizer, 6).read(number) for number in range(40)] != stream
    assert all(len(document.tokens) == len(document.learnt) and any(document.learnt) for document in stream)


def test_sessions_take_every_possible_course(
    sessions: list[tuple[Repository, list[Message], Function]],
) -> None:
    courses = set()
    for _, messages, _ in sessions:
        calls = [message_calls(message)[0][0] for message in messages[1::2]]
        passed = messages[-2]["content"] == OK
        courses.add((calls.count("edit"), calls[-2] == "run", passed))
    assert (1, True, True) in courses  # right, or wrong without notice
    assert (1, True, False) in courses  # failed and given up
    assert (1, False, True) in courses  # not tested
    assert (2, True, True) in courses  # failed, tried again, passed
    assert (2, True, False) in courses


def test_the_teacher_is_wrong_as_often_as_its_habits_say() -> None:
    generator = random.Random(1)
    habits = Habits()
    for operator in OPERATORS.values():
        function = Function((Step(operator, 20),))
        written = [misread(function, generator, habits).steps[0] for _ in range(2000)]
        right = sum(step.operator is operator for step in written) / 2000
        wrong = [step.operator.name for step in written if step.operator is not operator]
        assert right == pytest.approx(
            habits.right_when_weak if operator.name in habits.weak else habits.right_otherwise, abs=0.04
        )
        assert wrong.count(operator.confusable) / len(wrong) > 0.7
        assert sum(step.number == 20 for step in written) / 2000 == pytest.approx(habits.right_number, abs=0.02)


@pytest.mark.parametrize("split", ["heldout", "fresh", "heldout_family"])
def test_the_teacher_solves_less_than_half_of_held_out_tasks(split: str) -> None:
    tasks = MicroRepos().heldout(split, 128)
    rate = teacher_solve_rate(tasks, Habits())
    assert 0.25 < rate < 0.5
    assert teacher_solve_rate(tasks, Habits()) == rate
    flawless = Habits(weak=(), right_otherwise=1.0, right_number=1.0)
    assert teacher_solve_rate(tasks, flawless, attempts=2) == 1.0


def test_nothing_held_out_is_demonstrated(sessions: list[tuple[Repository, list[Message], Function]]) -> None:
    for repository, messages, _ in sessions:
        assert repository.task.split == "train"
        assert not any(step.heldout for step in repository.function.steps)
        assert json.dumps(messages).count(repository.function.words) >= 1


def test_sessions_are_short_and_numbers_are_one_token(
    sessions: list[tuple[Repository, list[Message], Function]], format: CompactFormat, tokenizer: Tokenizer
) -> None:
    rendered = [render_transcript(messages, format) for _, messages, _ in sessions]
    assert sum(len(document.tokens) for document in rendered) / len(rendered) < 70
    assert sum(sum(document.learnt) for document in rendered) / len(rendered) < 30
    assert all(len(tokenizer.encode(str(number))) == 1 for number in NUMBERS)
    for operator in OPERATORS.values():
        assert len(tokenizer.encode(f" {operator.symbol}")) == 1


def test_plain_code_has_no_words() -> None:
    function = Function((Step(OPERATORS["subtract"], 8), Step(OPERATORS["and"], 28)))
    assert plain_code(function) == "def f(x):\n    return (x - 8) & 28\n"
    assert MAIN not in plain_code(function)
