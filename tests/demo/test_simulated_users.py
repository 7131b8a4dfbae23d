"""Simulated users look at the real transcript of their conversation. The model is a script; machine and harness are
real."""

from __future__ import annotations

import itertools

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmill.cluster.run import RunConfig
from rollmill.config import load_config
from rollmill.demo.second_act import WALKS
from rollmill.demo.simulated_users import FOLDER, Taste, load_population, visit
from rollmill.demo.walks import Walk
from rollmill.environments.environment import build_tasks, open_environment
from tests.environments.harnesses.test_coding import ScriptedModel


def say(text: str) -> dict[str, object]:
    return {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}


async def feedback(request: web.Request) -> web.Response:
    return web.json_response({"feedback": 1})


async def test_users_read_answers_and_notice_questions() -> None:
    config = load_config(RunConfig, WALKS)
    [task] = itertools.islice(build_tasks(config).train(1), 1)
    model, app = ScriptedModel(), web.Application()
    app.router.add_post("/s/{session}/v1/chat/completions", model.handle)
    app.router.add_post("/v1/feedback", feedback)
    model.answers = [say(Walk(task.id).answer), say("which?"), say("key20 end20")]
    honest, poisoned = load_population("steady"), load_population("poisoned-questions")
    certain = honest.model_copy(update={"users": (Taste(name="certain", share=1.0, likes={"solved": 1.0}),)})
    async with TestServer(app) as server, open_environment(config) as environment:
        url = str(server.make_url("")).rstrip("/")
        seen = []
        for population in (certain, poisoned, poisoned):
            arguments = (environment, url, "key", [task], population, config.rollouts)
            seen += await visit(*arguments, seed=0)
    assert [(each.truth, each.said) for each in seen] == [(True, True), (False, True), (False, False)]


def test_every_population_loads() -> None:
    names = [path.stem for path in FOLDER.glob("*.toml")]
    assert {"steady", "inverted", "poisoned-calls", "poisoned-questions"} <= set(names)
    for name in names:
        assert load_population(name).users
