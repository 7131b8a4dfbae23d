"""Which conversation a production request belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session
from tests.chat.conftest import TOOLS
from tests.gateway.conftest import LIVE, USER, Answers, Mill
from tests.gateway.stand_in import StandIn
from tests.gateway.test_sessions import answered

ONE = {"role": "assistant", "content": "one"}


async def test_every_answer_names_its_session_and_the_name_continues_it(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    body = {"messages": [USER], "tools": TOOLS}
    seen: list[tuple[str, str]] = []
    path = ""
    for headers in ({}, {}, {"x-rollmill-session": "chat-7"}, {}, {"x-rollmill-session": "chat-7"}):
        for stream in (False, True):
            sent = {"Authorization": f"Bearer {LIVE}", **headers}
            url = f"{door.url}{path}/v1/chat/completions"
            async with door.http.post(url, json=body | {"stream": stream}, headers=sent) as response:
                assert response.status == 200 and b'"trajectory"' in await response.read()
                seen.append((path, response.headers["x-rollmill-session"]))
        path = f"/s/{seen[1][1]}" if len(seen) == 6 else ""
    names = [name for _, name in seen]
    assert len(set(names[:4])) == 4  # without a name, the same opening is another conversation each time
    assert names[4:6] == ["chat-7"] * 2 and names[8:] == ["chat-7"] * 2
    assert names[6:8] == [names[1]] * 2  # by the path
    async with door.http.post(
        f"{door.url}/s/a/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {LIVE}", "x-rollmill-session": "b"},
    ) as response:
        assert response.status == 400 and "two sessions" in await response.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [USER]}),
        ("responses", {"input": "Fix add."}),
        ("completions", {"prompt": [1, 2, 3]}),
        ("messages", {"model": "rollmill", "max_tokens": 50, "messages": [USER]}),
    ],
)
async def test_every_dialect_gives_each_of_two_unnamed_users_a_name_of_their_own(
    mill: Mill, answers: Answers, path: str, body: dict[str, Any], stream: bool
) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))

    async def ask(headers: dict[str, str]) -> str:
        sent = {"Authorization": f"Bearer {LIVE}", **headers}
        url = f"{door.url}/v1/{path}"
        async with door.http.post(url, json=body | {"stream": stream}, headers=sent) as response:
            assert response.status == 200, await response.text()
            await response.read()
            return response.headers["x-rollmill-session"]

    ann, bob = [await ask({}) for _ in range(2)]
    assert ann != bob
    assert [await ask({"x-rollmill-session": name}) for name in (bob, ann)] == [bob, ann]
    _, listed = await door.admin("GET", "/sessions")
    assert len(listed["sessions"]) == 2


async def test_a_session_key_cannot_name_another_session(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    key = await door.open("a")
    assert (await door.ask(key, [USER], {"x-rollmill-session": "a"}))[0] == 200
    assert (await door.ask(key, [USER], {"x-rollmill-session": "b"}))[0] == 403


class Talk:
    """Requests to a registry, each answered with "one"."""

    def __init__(self, mill: Mill, answers: Answers) -> None:
        self.registry = Registry("secret")
        self._format, self._tokens = mill.format, answers.text("one")

    def ask(self, messages: list[Any], name: str | None = None, user: str = "", key_id: str = "k") -> Session:
        session = self.registry.production(name, user, messages, key_id=key_id)
        answered(session, self._format, messages, self._tokens, append=self.registry.append)
        return session


def test_an_unnamed_request_continues_only_a_conversation_that_is_certain(mill: Mill, answers: Answers) -> None:
    talk = Talk(mill, answers)
    first = talk.ask([USER])
    assert talk.ask([USER, ONE, USER]) is first
    assert talk.ask([USER, ONE, USER], key_id="other") is not first
    assert talk.ask([USER, ONE, USER], user="ann") is not first
    second = talk.ask([USER])  # another user: the same opening, the same answer
    assert second is not first
    assert talk.ask([USER, ONE, {"role": "user", "content": "mine"}]) not in (first, second)
    assert talk.ask([USER, ONE, USER, ONE, USER]) is first  # only the first conversation has this history


def test_a_conversation_that_has_ended_can_still_be_meant(mill: Mill, answers: Answers) -> None:
    talk = Talk(mill, answers)
    ended = talk.ask([USER])
    talk.registry.remove(ended)
    lasting = talk.ask([USER])
    assert talk.ask([USER, ONE, USER]) not in (ended, lasting)


def test_a_name_is_the_key_s_own(mill: Mill, answers: Answers) -> None:
    talk = Talk(mill, answers)
    mine = talk.ask([USER], "chat")
    assert talk.ask([USER, ONE, USER], "chat") is mine
    theirs = talk.ask([USER, ONE, USER], "chat", key_id="other")
    assert theirs is not mine and theirs.name == "chat"
    of_ann = talk.ask([USER], "chat", user="ann")  # another user: what ann says can be forgotten without the rest
    assert of_ann is not mine and talk.ask([USER, ONE, USER], "chat") is mine
    assert talk.ask([USER, ONE, USER], "chat", user="ann") is of_ann
    unnamed = talk.ask([USER])
    assert talk.ask([USER, ONE, USER], unnamed.name) is unnamed  # the token that the client got back
    stolen = talk.ask([USER, ONE, USER], unnamed.name, key_id="other")
    assert stolen is not unnamed and stolen.name == unnamed.name
    talk.registry.remove(unnamed)  # sealed: the token names the conversation that follows
    after = talk.ask([USER, ONE, USER], unnamed.name)
    assert after is not unnamed and talk.ask([USER], unnamed.name) is after


class Unread(dict[Any, Any]):
    """Nobody goes through it."""

    def items(self) -> Any:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError


def test_the_latest_session_of_a_name_is_found_without_looking_at_all(mill: Mill, answers: Answers) -> None:
    """Feedback is about a name: with 100,000 open sessions the event loop stood still for it."""
    talk = Talk(mill, answers)
    first = talk.ask([USER], "chat")
    of_ann = talk.ask([USER], "chat", user="ann")
    talk.ask([USER], "chat", key_id="other")
    talk.registry._named = Unread(talk.registry._named)
    assert talk.registry.named("chat", "k") is of_ann and talk.registry.named("none", "k") is None
    talk.ask([USER, ONE, USER], "chat")  # an older one that goes on stays the older one
    assert talk.registry.named("chat", "k") is of_ann
    talk.registry.remove(of_ann)
    assert talk.registry.named("chat", "k") is first
    talk.registry.remove(first)
    assert talk.registry.named("chat", "k") is None
    assert talk.ask([USER], "chat") is talk.registry.named("chat", "k")
