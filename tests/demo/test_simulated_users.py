"""Simulated users look at the real transcript of their conversation. The model is a script; machine and harness are
real."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.config import load_config
from rollmill.demo.second_act import POPULATION, WALKS
from rollmill.demo.simulated_users import FOLDER, Sign, _accepts, load_population, visit
from rollmill.demo.walks import FILES, Walk
from rollmill.environments.environment import build_tasks, open_environments
from rollmill.errors import ConfigError
from rollmill.runs.run import RunConfig
from tests.environments.harnesses.test_coding import ScriptedModel


def say(text: str) -> dict[str, object]:
    return {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}


async def feedback(request: web.Request) -> web.Response:
    return web.json_response({"feedback": 1})


CERTAIN = """
[[users]]
name = "certain"
share = 1.0
likes = { solved = 1.0 }
"""


async def test_users_read_answers_and_notice_questions(tmp_path: Path) -> None:
    config = load_config(RunConfig, WALKS)
    [task] = itertools.islice(build_tasks(config).train(1), 1)
    model, app = ScriptedModel(), web.Application()
    app.router.add_post("/s/{session}/v1/chat/completions", model.handle)
    app.router.add_post("/v1/feedback", feedback)
    model.answers = [say(Walk(task.id).answer), say("which?"), say("key20 end20")]
    (tmp_path / "mine.toml").write_text(CERTAIN)  # anyone can bring users
    certain, poisoned = load_population(str(tmp_path / "mine.toml")), load_population("poisoned-questions")
    async with TestServer(app) as server, open_environments(config) as environments:
        url = str(server.make_url("")).rstrip("/")
        seen = []
        for population in (certain, poisoned, poisoned):
            arguments = (environments, url, "key", [task], population, config.rollouts)
            seen += await visit(*arguments, seed=0)
    assert [(each.truth, each.said) for each in seen] == [(True, True), (False, True), (False, False)]


def test_a_population_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CERTAIN.replace("share = 1.0", "share = 1.0\nnoise = 2.0"))
    with pytest.raises(ConfigError, match="noise"):
        load_population(str(tmp_path / "mine.toml"))
    for wrong in ("likes = { sloved = 1.0 }", "likes = { solved = 1.0 }\nsays = { sloved = 1.0 }"):
        (tmp_path / "mine.toml").write_text(CERTAIN.replace("likes = { solved = 1.0 }", wrong))
        with pytest.raises(ConfigError, match="sloved") as refused:
            load_population(str(tmp_path / "mine.toml"))
        assert "'solved', 'malformed'" in str(refused.value), "it says what there is"
    with pytest.raises(ConfigError, match="elsewhere"):
        load_population(str(tmp_path / "elsewhere.toml"))


def test_every_population_loads() -> None:
    names = [path.stem for path in FOLDER.glob("*.toml")]
    assert {"steady", "walkers", "inverted", "poisoned-calls", "poisoned-questions"} <= set(names)
    for name in names:
        assert load_population(name).users


def test_every_user_of_the_second_act_accepts_a_walk_without_a_needless_turn() -> None:
    turns = 2 * FILES + 1  # each file is read and summarised, then there is an answer
    for taste in load_population(POPULATION).users:
        for more, solved in ((0, 1.0), (0, 0.0), (1, 1.0)):
            seen = dict.fromkeys(get_args(Sign), 0.0) | {"solved": solved, "turns": turns + more, "constant": 1.0}
            assert _accepts(taste.likes, seen) == (solved == 1.0 and not (more and taste.name == "hasty"))
