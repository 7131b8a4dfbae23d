"""What `rollmill rollout` and `rollmill eval --model` find out about a gateway before the first episode."""

from __future__ import annotations

import pytest

from rollmill.errors import ConfigError
from rollmill.rollouts.agent_endpoint import Endpoint, EndpointProxy
from tests.gateway.conftest import Answers, Mill
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn


async def check(endpoint: Endpoint) -> str:
    """What is wrong with the endpoint, in words; empty if nothing is."""
    async with EndpointProxy(endpoint) as proxy:
        try:
            await proxy.check()
        except ConfigError as error:
            return str(error)
    return ""


async def test_the_key_the_model_and_the_url_are_checked_and_nothing_is_recorded(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text("hello")])
    door = await mill.gateway(await mill.engine(engine))
    url = f"{door.url}/v1"
    assert await check(Endpoint(url, LIVE, "rollmill")) == "" and await check(Endpoint(url + "/", LIVE)) == ""
    asked = len(engine.requests)
    told = await check(Endpoint(url, "", "rollmill"))
    assert f"{url} wants a key: 401" in told and "set OPENAI_API_KEY" in told
    assert f"{url} refuses the key: 401" in await check(Endpoint(url, "wrong", "rollmill"))
    told = await check(Endpoint(url, LIVE, "gpt"))
    assert f"{url} has no model 'gpt'" in told and "--model-name NAME, one of rollmill" in told
    for wrong in (door.url, f"{door.url}/", f"{url}/chat/completions"):
        told = await check(Endpoint(wrong, LIVE, "rollmill"))
        assert f"{wrong} answered 404" in told and f"did you mean {url}?" in told
    assert len(engine.requests) == asked == 2
    assert door.trajectories.list() == []
    assert not any(path.stat().st_size for path in (mill.directory / "gateway").rglob("*.log"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "http://", "nonsense"])
async def test_what_is_no_url_is_told(url: str) -> None:
    told = await check(Endpoint(url))
    assert f"{url!r} is no URL of an endpoint" in told and "for example http://" in told
