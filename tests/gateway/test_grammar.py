"""JSON output and forced calls: the engine samples under a mask, and the record says which grammar made it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.chat.call_families.choice import FAMILIES
from rollmill.chat.config import FamilyName
from rollmill.chat.format import ChatFormat, assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import EngineError
from rollmill.gateway.config import EngineEndpoint
from rollmill.gateway.wire.answer_grammars import grammar_of
from rollmill.gateway.wire.dialect import ModelRequest
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.embedded.grammar import Grammars, apply_masks
from rollmill.inference.embedded.grammar_check import MOST_CHECKS, GrammarCheck
from rollmill.inference.engine import EngineUnavailable
from rollmill.inference.server import make_app, serving
from rollmill.trajectories.allowed_tokens import decode_kept, split_kept
from rollmill.types import Sampling
from tests.chat.conftest import HERMES_TOKENS, TOOLS
from tests.chat.published import TOOLS as TEMPLATE_TOOLS
from tests.chat.published import published
from tests.chat.test_streaming import KINDS
from tests.gateway.conftest import USER, Answers, Mill
from tests.gateway.stand_in import StandIn
from tests.gateway.test_real_engine import assert_trainable
from tests.inference.world import DEVICE, ENGINE, TINY, make_update

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["done", "colour"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}


def follows(tokens: list[int], grammar: str, tokenizer: Tokenizer, path: Path, end: int) -> bool:
    """Whether the mask allows each token after the ones before it."""
    tokenizer.save(path)
    state = Grammars(path, tokenizer.vocab_size).start(grammar, end, [])
    for token in tokens:
        if not state.allowed()[token]:
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize("special", [SPECIAL_TOKENS, HERMES_TOKENS], ids=["compact", "hermes"])
def test_a_grammar_allows_what_its_format_writes_and_nothing_else(special: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = Tokenizer(KINDS["byte-level"](special))
    format: ChatFormat = format_of(tokenizer)
    sampling, path, end = Sampling(), tmp_path / "tokenizer.json", format.stop_tokens[0]

    def allows(content: str | None, calls: list[tuple[str, str]], **wish: Any) -> bool:
        grammar = grammar_of(ModelRequest([], tools=TOOLS if calls else [], sampling=sampling, **wish), format)
        assert grammar is not None
        tokens = format.render_answer(assistant_message(content, calls), TOOLS)
        return follows(tokens, grammar, tokenizer, path, end)

    assert allows('{"done": true, "colour": "red"}', [], schema=SCHEMA)
    assert not allows('{"done": true, "colour": "blue"}', [], schema=SCHEMA)
    assert not allows("Sure!", [], schema=SCHEMA)
    read = ("read", '{"path": "add.py"}')
    assert allows(None, [read], forced=("read",))
    assert allows(None, [read, ("run", "{}")], forced=("read", "run"))
    assert not allows(None, [("run", "{}")], forced=("read",))
    assert not allows("I read it.", [read], forced=("read",))
    assert allows(None, [read], schema=SCHEMA)  # with tools a call is an answer too


FORCED = "qwen2.5 qwen3-coder llama3.1 mistral-nemo granite3.3 deepseek-v3.1 kimi-k2 phi-4 gpt-oss command-r7b"


@pytest.mark.parametrize("name", FORCED.split())
def test_a_forced_call_is_what_the_published_template_writes(name: str, tmp_path: Path) -> None:
    """The mask allows the call as the template writes it, and no answer in text."""
    case = published(name)
    end, path = case.format.stop_tokens[0], tmp_path / "tokenizer.json"

    def allows(content: str | None, calls: list[tuple[str, str]], **wish: Any) -> bool:
        grammar = grammar_of(ModelRequest([], tools=TEMPLATE_TOOLS, sampling=Sampling(), **wish), case.format)
        assert grammar is not None
        tokens = case.format.render_answer(assistant_message(content, calls), TEMPLATE_TOOLS)
        return follows(tokens, grammar, case.tokenizer, path, end)

    read, edit = ("read", '{"path": "add.py"}'), ("edit", '{"path": "add.py", "line": 2, "parts": ["a"]}')
    assert allows(None, [read], forced=("read",))
    assert allows(None, [edit], forced=("read", "edit"), one_call=True)
    assert not allows("I read it.", [], forced=("read",))
    assert not allows(None, [edit], forced=("read",))
    assert allows('{"done": true, "colour": "red"}', [], schema=SCHEMA) and not allows("Sure.", [], schema=SCHEMA)
    if name not in ("llama3.1", "gpt-oss"):  # their templates write one call
        assert allows(None, [read, edit], forced=("read", "edit"))
        assert not allows(None, [read, edit], forced=("read", "edit"), one_call=True)


@pytest.mark.parametrize(
    "family", ["hermes", "qwen-coder", "glm", "mistral", "deepseek", "deepseek-v3", "kimi", "llama3", "json"]
)
def test_a_forced_call_can_be_written_in_text(family: FamilyName, tmp_path: Path) -> None:
    """The template has no place for calls and the vocabulary no marks, so calls are text."""
    case = published("phi-4")
    format = TemplateFormat(case.tokenizer, case.source, {}, family=FAMILIES[family])
    read = ("read", '{"path": "add.py"}')
    tokens = format.render_answer(assistant_message(None, [read]), TEMPLATE_TOOLS)
    wish = ModelRequest([], tools=TEMPLATE_TOOLS, sampling=Sampling(), forced=("read",), one_call=True)
    grammar = grammar_of(wish, format)
    assert grammar is not None
    assert follows(tokens, grammar, case.tokenizer, tmp_path / "t.json", format.stop_tokens[0])


def test_a_forced_call_of_qwen_coder_has_values_in_plain_text(tmp_path: Path) -> None:
    """Any text up to its closing tag, JSON where the schema wants it, one of the choices, both spellings of truth."""
    case = published("qwen3-coder")
    properties = {
        "text": {"type": "string"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "deep": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}},
    }
    schema = {"type": "object", "properties": properties, "required": ["text"], "$defs": {"size": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("write", "look")]
    tools.append({"type": "function", "function": {"name": "stop"}})
    wish = ModelRequest([], tools=tools, sampling=Sampling(), forced=("write", "stop"))
    grammar = grammar_of(wish, case.format)
    assert grammar is not None

    def allows(name: str, **values: str) -> bool:
        written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        start, end = (case.tokenizer.token_id(mark) for mark in ("<tool_call>", "</tool_call>"))
        inner = case.tokenizer.encode(f"\n<function={name}>\n{written}</function>\n")
        tokens = [start, *inner, end, case.format.stop_tokens[0]]
        return follows(tokens, grammar, case.tokenizer, tmp_path / "t.json", case.format.stop_tokens[0])

    assert allows("write", text="def f():\n\n    return '<b>'\n") and allows("stop")
    assert allows("write", text="", mode="slow", deep="True", sizes="[1, 2]")
    assert allows("write", text="x", deep="false")
    assert not allows("look", text="x") and not allows("write") and not allows("write", text="x", mode="loud")
    assert not allows("write", text="x", sizes='["a"]') and not allows("write", text="x", other="y")
    odd = {"type": 3, "properties": {"a": {"type": 7}, "b": 1, "c": {"enum": []}}, "required": 5}
    tools[0]["function"]["parameters"] = odd
    assert grammar_of(wish, case.format) is not None


@pytest.mark.parametrize("breaks", ["\n", ""])
def test_a_forced_call_of_glm_is_what_its_family_writes(breaks: str, tmp_path: Path) -> None:
    """With the marks as special tokens, up to the mark that a result begins with."""
    case = published("glm4.5")
    wish = ModelRequest([], tools=TEMPLATE_TOOLS, sampling=Sampling(), forced=("edit",))
    grammar = grammar_of(wish, case.format)
    assert grammar is not None

    def allows(name: str, *pairs: tuple[str, str]) -> bool:
        written = (f"<arg_key>{key}</arg_key>{breaks}<arg_value>{value}</arg_value>{breaks}" for key, value in pairs)
        text = f"<tool_call>{name}{breaks}{''.join(written)}</tool_call><|observation|>"
        tokens = case.raw.encode(text, add_special_tokens=False).ids
        return follows(tokens, grammar, case.tokenizer, tmp_path / "t.json", case.format.stop_tokens[0])

    path, line, parts = ("path", "a <b>\n\n"), ("line", "3"), ("parts", '["x"]')
    assert allows("edit", path, line, parts)
    assert not allows("read", ("path", "a")) and not allows("edit", path, parts)
    assert not allows("edit", path, ("line", "x"), parts)


def test_rows_without_a_grammar_keep_their_bits(tmp_path: Path) -> None:
    tokenizer = Tokenizer(KINDS["byte-level"](SPECIAL_TOKENS))
    tokenizer.save(tmp_path / "t.json")
    grammars = Grammars(tmp_path / "t.json", tokenizer.vocab_size + 5)
    logits_MV = torch.randn(2, tokenizer.vocab_size + 5)
    before_MV = logits_MV.clone()
    masked_MV = apply_masks(logits_MV, [None, grammars.start('start: "a"', 0, [])])
    assert torch.equal(masked_MV[0], before_MV[0]) and torch.equal(logits_MV, before_MV)
    (only,) = torch.nonzero(masked_MV[1].isfinite()).flatten().tolist()
    assert tokenizer.decode([only]) == "a"
    with pytest.raises(EngineError, match="grammar cannot be used"):
        grammars.start("start: nonsense", 0, [])


async def test_a_random_model_answers_in_json_and_calls_the_tool_it_must(mill: Mill, tmp_path: Path) -> None:
    config = TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
    mill.tokenizer.save(tmp_path / "tokenizer.json")
    mill.plan("a", "b")
    engine = EmbeddedEngine(config, ENGINE, device=DEVICE, tokenizer=tmp_path / "tokenizer.json")
    async with engine, serving(make_app(engine), "127.0.0.1", 0) as runner:
        await engine.apply(make_update(1, config))
        host, port = runner.addresses[0][:2]
        async with mill.running(EngineEndpoint(f"http://{host}:{port}", "home")) as door:
            key = await door.open("a")
            _, free = await door.ask(key, [USER], tools=[], max_tokens=40, seed=3)
            status, reply = await door.ask(key, [USER], tools=[], response_format=FORMAT, max_tokens=40, seed=3)
            assert status == 200, reply
            answer = json.loads(reply["choices"][0]["message"]["content"])
            assert set(answer) == {"done", "colour"} and reply["choices"][0]["finish_reason"] == "stop"
            assert free["choices"][0]["message"]["content"] != reply["choices"][0]["message"]["content"]
            forced = {"type": "function", "function": {"name": "read"}}
            _, called = await door.ask(await door.open("b"), [USER], tool_choice=forced, max_tokens=12, seed=3)
            assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "read"
            _, second = (await door.seal("a")).segments
    (span,) = second.spans
    grammar = span.sampling.grammar
    assert grammar is not None and '"colour"' in grammar
    # the mask follows from the record alone: a token that was the only one allowed has log-prob 0
    state = Grammars(tmp_path / "tokenizer.json", config.vocab_size).start(grammar, span.sampling.stop_tokens[0], [])
    tokens, logprobs = second.tokens[span.start : span.end], second.logprobs[span.start : span.end]
    assert second.kept_sizes is not None and second.kept is not None
    sets = split_kept(second.kept_sizes, second.kept)[span.start : span.end]
    for token, logprob, kept in zip(tokens.tolist(), logprobs.tolist(), sets, strict=True):
        allowed = state.allowed()
        assert allowed[token] and (logprob == 0.0) == (np.count_nonzero(allowed) == 1)
        assert np.array_equal(decode_kept(kept, config.vocab_size), np.packbits(allowed, bitorder="little"))
        state.accept(token)
    assert_trainable(second, make_update(1, config), config)


async def test_each_dialect_asks_for_the_same_grammar(mill: Mill, answers: Answers) -> None:
    engine = StandIn([answers.text('{"done": true, "colour": "red"}')])
    door = await mill.gateway(await mill.engine(engine))
    mill.plan("a")
    key = await door.open("a")
    schema = {"type": "json_schema", "schema": SCHEMA}
    bodies = {
        "chat/completions": {"messages": [USER], "response_format": FORMAT},
        "responses": {"input": "x", "text": {"format": {**schema, "name": "state"}}},
        "messages": {"messages": [USER], "max_tokens": 50, "output_config": {"format": schema}},
    }
    for path, body in bodies.items():
        headers = {"Authorization": f"Bearer {key}"}
        async with door.http.post(f"{door.url}/v1/{path}", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
    one, two, three = (request["sampling"]["grammar"] for request in engine.requests)
    assert one == two == three and '"colour"' in one
    tools = [{"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]
    body = {"messages": [USER], "max_tokens": 9, "tools": tools, "tool_choice": {"type": "tool", "name": "read"}}
    async with door.http.post(f"{door.url}/v1/messages", json=body, headers=headers) as response:
        assert response.status == 200
    assert engine.requests[-1]["sampling"]["grammar"].startswith("start: calls")
    for choice in ({"type": "function", "function": {"name": "fly"}}, 7, {"type": "function", "function": 3}):
        assert (await door.ask(key, [USER], tool_choice=choice))[0] == 400
    assert (await door.ask(key, [USER], response_format={"type": "xml"}))[0] == 400


BOMB = {"allOf": [{"type": "string", "pattern": f"^.*{i}.*$"} for i in range(200)]}


async def test_a_grammar_that_costs_too_much_is_refused_by_name_and_others_are_answered(
    mill: Mill, tmp_path: Path
) -> None:
    config = TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
    mill.tokenizer.save(tmp_path / "tokenizer.json")
    mill.plan("a", "b")
    engine = EmbeddedEngine(config, ENGINE, device=DEVICE, tokenizer=tmp_path / "tokenizer.json")
    async with engine, serving(make_app(engine), "127.0.0.1", 0) as runner:
        await engine.apply(make_update(1, config))
        host, port = runner.addresses[0][:2]
        async with mill.running(EngineEndpoint(f"http://{host}:{port}", "home")) as door:
            key, other = await door.open("a"), await door.open("b")
            bomb = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": BOMB}}
            asked = [
                asyncio.create_task(door.ask(key, [USER], tools=[], response_format=bomb, max_tokens=4))
                for _ in range(3)
            ]
            status, _ = await door.ask(other, [USER], tools=[], max_tokens=4)
            assert status == 200 and not all(task.done() for task in asked)
            for status, reply in await asyncio.gather(*asked):
                assert status == 400 and "most of it is in #/allOf" in reply["error"]["message"], reply
            status, _ = await door.ask(key, [USER], tools=[], response_format=FORMAT, max_tokens=40, seed=3)
            assert status == 200


def children_of_this_process() -> list[int]:
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "llguidance" in line]


async def test_a_grammar_may_not_be_longer_than_its_bound() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(12000)}}
    with pytest.raises(EngineError, match=r"characters, more than 262,144 .most of it is in #/properties"):
        await GrammarCheck()(f"start: body\nbody: %json {json.dumps(schema)}\n")


async def test_a_check_that_cannot_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", ["/nowhere"])  # as packages on PYTHONPATH that a child does not see
        with pytest.raises(EngineError, match="could not start"):
            await check('start: "a"')
    await check('start: "a"')


def bomb(number: int) -> str:
    return f"start: body\nbody: %json {json.dumps({**BOMB, 'title': str(number)})}\n"


async def wait_for(children: int) -> list[int]:
    async with asyncio.timeout(60):
        while len(found := await asyncio.to_thread(children_of_this_process)) != children:
            pass
    return found


async def test_a_check_ends_when_no_request_waits_for_it() -> None:
    check = GrammarCheck()
    first, second = (asyncio.create_task(check(bomb(0))) for _ in range(2))
    children = await wait_for(1)
    async with asyncio.timeout(60):
        while await asyncio.to_thread(os.getpriority, os.PRIO_PROCESS, children[0]) < 5:  # its first statement
            pass
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert children_of_this_process() == children, "the second request waits for the same check"
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not children_of_this_process()
    await check('start: "a"')


async def test_a_cheap_grammar_does_not_wait_for_costly_ones_and_their_number_is_bounded() -> None:
    check = GrammarCheck()
    costly = [asyncio.create_task(check(bomb(number))) for number in range(MOST_CHECKS - 1)]
    await wait_for(1)
    cheap = asyncio.create_task(check('start: "a"'))
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="8 grammars are being checked"):
        await check(bomb(MOST_CHECKS))
    await cheap
    assert not any(task.done() for task in costly), "it was decided before those that came first"
    for task in costly:
        task.cancel()
    await asyncio.wait(costly)
    assert not children_of_this_process()


async def test_a_client_that_leaves_ends_its_check_and_a_plain_request_does_not_wait_for_it(
    mill: Mill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmill.inference.embedded.grammar_check.SECONDS", 30)
    config = TINY.model_copy(update={"vocab_size": mill.tokenizer.vocab_size})
    mill.tokenizer.save(tmp_path / "tokenizer.json")
    mill.plan("a")
    engine = EmbeddedEngine(config, ENGINE, device=DEVICE, tokenizer=tmp_path / "tokenizer.json")
    async with engine, serving(make_app(engine), "127.0.0.1", 0) as runner:
        await engine.apply(make_update(1, config))
        host, port = runner.addresses[0][:2]
        async with mill.running(EngineEndpoint(f"http://{host}:{port}", "home")) as door:
            key = await door.open("a")
            costly = {"type": "json_schema", "json_schema": {"name": "bomb", "schema": BOMB}}
            leaving = [
                asyncio.create_task(
                    door.ask(key, [USER], tools=[], response_format=costly, max_tokens=4, stream=stream)
                )
                for stream in (False, True)
            ]
            await wait_for(1)
            for task in leaving:
                task.cancel()
            await asyncio.wait(leaving)
            status, _ = await door.ask(key, [USER], tools=[], max_tokens=4)  # the same messages, without a grammar
            assert status == 200
            await wait_for(0)
            assert engine._grammars is not None and not engine._grammars.check._affordable, "no verdict was waited for"
