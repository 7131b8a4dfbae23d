"""Consent and redaction: what is private is neither shown to the model nor written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.config import validate_config
from rollmill.errors import ConfigError
from rollmill.gateway.access.keys import KeyStore
from rollmill.gateway.access.redaction import Patterns, PatternSettings
from rollmill.gateway.config import GatewayConfig
from tests.gateway.conftest import LIVE, QUICK, USER, Answers, Mill, until
from tests.gateway.stand_in import StandIn


def written(mill: Mill) -> bytes:
    """Everything on disk: log, store and database. The access log has no contents, but it names sessions."""
    files = [path for path in sorted(mill.directory.rglob("*")) if path.is_file() and path.name != "access.jsonl"]
    return b"".join(path.read_bytes() for path in files)


async def test_without_consent_nothing_is_written(
    mill: Mill, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.gateway.recording.sealing._SWEEP_S", 0.02)
    config = QUICK.model_copy(update={"seal_idle_s": 0.2})
    engine = StandIn([answers.text("one"), answers.text("two"), answers.text("three")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    messages: list[Any] = [{"role": "user", "content": "my private words"}]
    none = {"x-rollmill-consent": "none"}
    first = (await door.say(LIVE, messages, headers=none))["rollmill"]["trajectory"]
    messages.append(USER)
    second = (await door.say(LIVE, messages, headers=none))["rollmill"]["trajectory"]
    assert second == first  # its tokens are kept in memory: nothing is tokenised again
    assert engine.requests[1]["tokens"][: len(engine.requests[0]["tokens"])] == engine.requests[0]["tokens"]
    assert (await door.admin("POST", "/v1/feedback", {"session": first, "value": 1.0}, token=LIVE))[0] == 410
    other = (await door.say(LIVE, [*messages, USER]))["rollmill"]["trajectory"]
    assert other != first  # a request with another consent is another session
    await until(lambda: _nothing_open(door))
    assert first.encode() not in written(mill)
    assert [row.id for row in door.trajectories.list()] == [other]


async def _nothing_open(door: Any) -> bool:
    return await door.sessions() == 0


async def test_consent_is_that_of_the_request_or_its_key_or_the_settings(mill: Mill, answers: Answers) -> None:
    keys = KeyStore(mill.database(), "run")
    _, key = keys.create(["production"], consent="store")
    config = QUICK.model_copy(update={"consent": "none"})
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])), config=config)
    said = {"": LIVE, "store": key, "train": LIVE}
    found = {}
    for consent, secret in said.items():
        headers = {"x-rollmill-consent": consent} if consent == "train" else {}
        found[consent] = (await door.say(secret, [USER], headers=headers))["rollmill"]["trajectory"]
    assert (await door.admin("POST", f"/sessions/{found['']}/seal", {}))[0] == 410
    assert (await door.seal(found["store"])).provenance["consent"] == "store"
    assert (await door.seal(found["train"])).provenance["consent"] == "train"
    assert (await door.ask(LIVE, [USER], {"x-rollmill-consent": "maybe"}))[0] == 400


async def test_nobody_has_agreed_to_training_who_said_nothing(mill: Mill, answers: Answers) -> None:
    """Nor a session that an admin opened."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    said = (await door.say(LIVE, [USER]))["rollmill"]["trajectory"]
    key = await door.open("a", traffic="production")
    await door.say(key, [USER])
    for trajectory in (said, "a"):
        await door.seal(trajectory)
        row = door.trajectories.get(trajectory)
        assert row.traffic == "production" and not row.may_train


async def test_no_answer_tells_what_others_have_sent(mill: Mill, answers: Answers) -> None:
    """The engine has cached a token of every prompt; only that of a turn before is told."""
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))

    async def cached(key: str, messages: list[Any]) -> tuple[int, dict[str, Any]]:
        said = await door.say(key, messages)
        return said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"][0]["message"]

    first, said = await cached(LIVE, [USER])
    assert (first, (await cached(LIVE, [USER, said, USER]))[0]) == (0, 1)
    assert (await cached(await door.open("a"), [USER]))[0] == 1, "rollouts belong to the run"


async def test_requests_are_redacted_before_the_model_sees_them(mill: Mill, answers: Answers) -> None:
    secret, mail = "sk-abcdefghijklmnop1234", "ann@example.org"
    invented = answers.text("write to bob@example.org")
    redaction = {"remove": ["email", "secret"], "patterns": {"ticket": "T-[0-9]+"}}
    config = GatewayConfig.model_validate({**QUICK.model_dump(), "redaction": redaction})
    engine = StandIn([invented, answers.text("two")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    messages: list[Any] = [{"role": "user", "content": f"{mail} has {secret} in T-12"}]
    trajectory = (await door.say(LIVE, messages, user="ann"))["rollmill"]["trajectory"]
    assert messages[1]["content"] == "write to bob@example.org"  # sampled: it stays
    messages.append({"role": "user", "content": f"again {mail}"})
    assert (await door.say(LIVE, messages, user="ann"))["rollmill"]["trajectory"] == trajectory
    forged = [USER, {"role": "assistant", "content": f"call {mail}"}, USER]
    await door.say(LIVE, forged, user="ann")
    for request in engine.requests:
        assert mail not in mill.tokenizer.decode(request["tokens"])
    (segment,) = (await door.seal(trajectory)).segments
    assert "[email] has [secret] in [ticket]" in mill.tokenizer.decode(segment.tokens.tolist())
    for private in (mail, secret, "T-12", "ann@"):
        assert private.encode() not in written(mill)


async def test_tools_and_schemas_are_redacted(mill: Mill, answers: Answers) -> None:
    mail = "ann@example.org"
    config = GatewayConfig.model_validate({**QUICK.model_dump(), "redaction": {"remove": ["email"]}})
    engine = StandIn([answers.text("one")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    to = {"type": "string", "description": f"not {mail}", "enum": [mail, "bob"], "default": mail}
    parameters = {"type": "object", "properties": {"to": to, "default": {"anyOf": [to]}}}
    function = {"name": "send", "description": f"writes for {mail}", "parameters": parameters}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": to}}
    tools = [{"type": "function", "function": function}]
    said = await door.say(LIVE, [USER], tools=tools)
    await door.say(LIVE, [USER], tools=[], response_format=form)
    assert len(engine.requests) == 2 and mail not in json.dumps(engine.requests)
    (shown,) = (await door.seal(said["rollmill"]["trajectory"])).provenance["tools"]
    redacted = shown["function"]["parameters"]["properties"]
    assert redacted["to"] == {**to, "description": "not [email]", "enum": ["[email]", "bob"], "default": "[email]"}
    assert redacted["default"]["anyOf"] == [redacted["to"]]
    assert mail.encode() not in written(mill)


async def test_a_production_session_with_its_own_key_is_private_too(mill: Mill, answers: Answers) -> None:
    mail = "ann@example.org"
    config = GatewayConfig.model_validate({**QUICK.model_dump(), "redaction": {"remove": ["email"]}})
    engine = StandIn([answers.text("one")])
    door = await mill.gateway(await mill.engine(engine), config=config)
    key = await door.open("a", traffic="production", provenance={"consent": "store"})
    await door.say(key, [{"role": "user", "content": f"I am {mail}"}])
    assert mail not in mill.tokenizer.decode(engine.requests[0]["tokens"])
    assert (await door.ask(key, [USER], {"x-rollmill-consent": "none"}))[0] == 400
    assert (await door.admin("POST", "/v1/completions", {"prompt": [1, 2]}, token=key))[0] == 400
    assert len((await door.seal("a")).segments) == 1
    assert mail.encode() not in written(mill)


def test_patterns_find_what_they_name_and_nothing_else() -> None:
    remove = ("email", "phone", "card", "ip", "secret")
    redact = Patterns(PatternSettings(remove=remove)).redact  # type: ignore[arg-type]
    assert redact("a.b+c@mail.example.com!") == "[email]!"
    assert redact("call +49 30 1234 5678 now") == "call [phone] now"
    assert redact("4111 1111 1111 1111") == "[card]"
    assert redact("at 10.0.0.255.") in ("at [ip].", "at 10.0.0.255.")
    assert redact("AKIAABCDEFGHIJKLMNOP") == "[secret]"
    plain = json.dumps({"version": "3.11", "lines": [12, 345], "python": "x = a @ b"})
    assert redact(plain) == plain


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        validate_config(GatewayConfig, {"redaction": {"patterns": {"x": "("}}}, "test")
