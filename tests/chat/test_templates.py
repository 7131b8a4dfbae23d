"""Rendering with published templates is what transformers renders, turn by turn, with recorded tokens kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest

from rollmill.chat.format import Message, Tool, assistant_message
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.chat.sandbox import ChatTemplate
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError, GatewayError
from rollmill.gateway.sessions.sessions import Plan, Session, SessionFacts
from rollmill.gateway.wire.answer import Answer
from rollmill.types import PolicyRef
from tests.chat.published import EDGES, TOOLS, VARIABLES, Published, as_sent, published, source_of
from tests.chat.test_streaming import KINDS

READ = ("read", '{"path": "add.py"}')
EDIT = ("edit", '{"path": "add.py", "line": 2, "parts": ["a", "b"]}')
USER = {"role": "user", "content": "Fix add."}
MORE = {"role": "user", "content": "Now double."}
CHAT = [USER, assistant_message("It adds.", []), MORE, assistant_message("It doubles.", []), USER]
AGENT = [
    USER,
    assistant_message(None, [READ]),
    {"role": "tool", "content": "def add(a, b):"},
    assistant_message(None, [EDIT]),
    {"role": "tool", "content": "done"},
    assistant_message("Fixed.", []),
    MORE,
    assistant_message("Doubled.", []),
    USER,
]
SYSTEM = {"role": "system", "content": "Be brief."}


def thinking(messages: list[Message]) -> list[Message]:
    return [{**each, "reasoning_content": "Hm."} if each["role"] == "assistant" else each for each in messages]


@contextlib.contextmanager
def tokenised() -> Iterator[list[int]]:
    """The tokens that leave tokenizers meanwhile."""
    made: list[int] = []

    def counted(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def call(self: Tokenizer, text: str, **options: Any) -> list[int]:
            ids = encode(self, text, **options)
            made.extend(ids)
            return ids

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode", "encode_marked"):
            patch.setattr(Tokenizer, name, counted(getattr(Tokenizer, name)))
        yield made


def play(session: Session, messages: list[Message], tools: list[Tool], format: TemplateFormat) -> list[Plan]:
    """Each assistant message is sampled as the template writes it. The client sends no reasoning back. What continues a
    segment is tokenised once, and nothing else."""
    plans, sent = [], []
    for message in [*messages, None]:
        if message is not None and message["role"] != "assistant":
            sent.append(message)
            continue
        with tokenised() as made:
            plan = session.plan(sent, tools, format)
        plans.append(plan)
        if not plan.opens:
            new = len(plan.tokens) - session.segments[plan.segment].length
            again = len(made) - new
            assert (again, made) == (0, plan.prompt), f"{again} tokens were tokenised again"
        if message is None:
            return plans
        tokens = format.render_answer(message, tools, history=plan_history(session, plan))
        assert tokens[-1] in format.stop_tokens
        parsed = format.parse(tokens, tools)
        policy = PolicyRef("rl", 1, "bf16", "00")
        answer = Answer(tokens, [-1.0] * len(tokens), [0] * len(tokens), [policy], [], [], "stop", True, parsed)
        session.append(session.place(plan, answer))
        sent.append({key: value for key, value in message.items() if key != "reasoning_content"})
    raise AssertionError


def plan_history(session: Session, plan: Plan) -> list[Message]:
    base = session.segments.get(plan.parent[0] if plan.parent else plan.segment)
    return (base.messages[: plan.inherited] if base else []) + plan.messages


def check(case: Published, messages: list[Message], tools: list[Tool], **convention: Any) -> list[str]:
    """The cause of each turn's segment ("" for a turn that continues it)."""
    session = Session(SessionFacts("t", "rollout"))
    causes: list[str] = []
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for plan, place in zip(play(session, messages, tools, case.format), [*places, len(messages)], strict=True):
        assert list(plan.tokens) == case.expected(as_sent(messages[:place], **convention), tools), f"turn at {place}"
        causes.append(plan.cause if plan.opens else "")
        if not plan.opens:
            assert len(plan.prompt) < len(plan.tokens) and plan.inherited > 0
    return causes


KEPT = ["start", "", "", "", ""]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-coder", "glm4.5", "llama3.1", "kimi-k2"])
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["", "system"])
def test_agents_keep_all_tokens(name: str, system: list[Message]) -> None:
    assert check(published(name), [*system, *AGENT], TOOLS, kimi=name == "kimi-k2") == KEPT


def test_an_agent_of_deepseek_keeps_all_tokens() -> None:
    """Its template does not write tools, so there are none here."""
    assert check(published("deepseek-v3.1"), AGENT, []) == KEPT


@pytest.mark.parametrize(
    "name", ["gemma2", "glm4.5", "granite3.3", "smollm3", "phi-4", "qwen2.5", "llama3.1", "deepseek-v3.1"]
)
def test_chats_keep_all_tokens(name: str) -> None:
    assert check(published(name), CHAT, []) == ["start", "", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gemma2", "mistral-nemo"])
def test_chats_keep_all_tokens_with_any_kind_of_tokenizer(name: str, kind: str) -> None:
    """SentencePiece puts blanks before text, at the start or behind every special token."""
    bos, eos = EDGES[name]
    raw = KINDS[kind]((bos, eos, *{"gemma2": ["<start_of_turn>"], "mistral-nemo": ["[INST]", "[/INST]"]}[name]))
    tokenizer = Tokenizer(raw)
    format = TemplateFormat(tokenizer, source_of(name), {"bos_token": bos, "eos_token": eos})
    assert check(Published(name, source_of(name), bos, eos, raw, tokenizer, format), CHAT, []) == ["start", "", ""]


def test_qwen3_drops_reasoning_when_the_user_speaks() -> None:
    assert check(published("qwen3"), thinking(AGENT), TOOLS) == ["start", "", "", "template", "template"]


def test_smollm3_keeps_reasoning_in_the_text() -> None:
    case = published("smollm3")
    texts = [
        {"role": "assistant", "content": f"<think>\nHm.\n</think>\n\n{message['content']}"}
        if message["role"] == "assistant"
        else message
        for message in CHAT
    ]
    session = Session(SessionFacts("t", "rollout"))
    plans = play(session, thinking(CHAT), [], case.format)
    assert [plan.cause if plan.opens else "" for plan in plans] == ["start", "", ""]
    assert list(plans[-1].tokens) == case.expected(texts, [])


def test_deepseek_r1_drops_all_reasoning() -> None:
    case = published("deepseek-r1")
    assert case.format.writer.thinking is not None and case.format.writer.thinking.opened
    assert check(case, thinking(CHAT), []) == ["start", "template", "template"]
    # its prompts open the reasoning only behind user messages, and it drops the mark behind tool results
    assert not case.format.writer.thinking.always
    first = [thinking(AGENT)[place] if place == 1 else message for place, message in enumerate(AGENT)]
    assert "edit" not in check(case, first, [], empty=None)


def test_mistral_moves_the_tools_to_the_last_user_message() -> None:
    assert check(published("mistral-nemo"), AGENT, TOOLS) == ["start", "", "", "template", "template"]


def test_hermes3_changes_a_line_break_when_messages_follow() -> None:
    assert check(published("hermes3"), AGENT, TOOLS) == ["start", "", "template", "template", ""]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["", "system"])
@pytest.mark.parametrize("think", [list, thinking])
def test_harmony_closes_a_final_answer_differently_when_messages_follow(think: Any, system: list[Message]) -> None:
    """Calls keep all tokens, their analysis too. Behind a final answer the template drops what was thought before."""
    case = published("gpt-oss")
    assert check(case, [*system, *think(AGENT)], TOOLS) == ["start", "", "", "template", "template"]
    assert check(case, [*system, *think(CHAT)], []) == ["start", "template", "template"]
    # models name the function behind the channel; the template's layout does not replace what was sampled
    marks = [case.tokenizer.token_id(f"<|{mark}|>") for mark in ("channel", "message", "call")]
    written = [case.tokenizer.encode(text) for text in ("commentary to=functions.read json", '{"path":"add.py"}')]
    tokens = [marks[0], *written[0], marks[1], *written[1], marks[2]]
    history = [USER, case.format.parse(tokens, TOOLS)]
    assert history[1]["tool_calls"][0]["function"] == {"name": "read", "arguments": '{"path":"add.py"}'}
    turn = case.format.render_turn(AGENT[2:3], TOOLS, answer_closed=True, history=history, answer=tokens)
    assert case.tokenizer.decode(turn).startswith(
        "<|start|>functions.read to=assistant<|channel|>commentary<|message|>"
    )
    both = [USER, assistant_message("I look.", [READ], "Hm."), AGENT[2]]
    assert "Hm.\nI look." in case.tokenizer.decode(case.format.render_start(both, TOOLS))


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["", "system"])
def test_cohere_writes_empty_thinking_only_in_its_prompt(system: list[Message]) -> None:
    case = published("command-r7b")
    assert check(case, [*system, *AGENT], TOOLS) == ["start", "", "", "template", "template"]
    assert check(case, [*system, *CHAT], []) == ["start", "template", "template"]
    assert set(check(case, [*system, *thinking(AGENT)], TOOLS)) == {"start", "template"}


def test_cohere_keeps_all_tokens_if_the_model_may_think(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIABLES, "command-r7b", {"enable_thinking": True})
    case = published.__wrapped__("command-r7b")
    assert check(case, thinking(AGENT), TOOLS) == KEPT
    assert check(case, CHAT, []) == ["start", "", ""]
    several = [USER, assistant_message(None, [READ, EDIT], "Hm."), AGENT[2], AGENT[4], assistant_message("Done.", [])]
    assert check(case, several, TOOLS) == ["start", "", ""]


def test_a_template_with_a_layout_that_is_not_known_is_refused() -> None:
    source = source_of("qwen2.5").replace("message.content + '<|im_end|>'", "message.content|upper + '<|im_end|>'")
    assert source != source_of("qwen2.5")
    with pytest.raises(ConfigError, match=r"layout that is not known|text of a user message"):
        TemplateFormat(published("qwen2.5").tokenizer, source, {})


def test_an_answer_in_another_layout_keeps_its_tokens() -> None:
    """Models write JSON with their own blanks; the template's layout does not replace it."""
    case = published("qwen2.5")
    sampled = '<tool_call>\n{"name":"read",  "arguments":{"path":"add.py"}}\n</tool_call>'
    tokens = [*case.tokenizer.encode(sampled), case.tokenizer.token_id("<|im_end|>")]
    history = [USER, case.format.parse(tokens, TOOLS)]
    turn = case.format.render_turn(AGENT[2:3], TOOLS, answer_closed=True, history=history, answer=tokens)
    assert case.tokenizer.decode(turn).startswith("\n<|im_start|>user\n<tool_response>\ndef add")


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "kimi-k2", "mistral-nemo", "deepseek-v3.1", "qwen3-coder"])
def test_an_answer_that_was_cut_off_is_closed(name: str) -> None:
    case = published(name)
    tools = TOOLS if case.format.writer.abilities.tools else []
    whole = case.format.render_answer(assistant_message(None, [READ]), tools)
    for tokens in (
        whole[:-1],
        whole[: len(whole) // 2],
        case.format.render_answer(assistant_message("It a", []), [])[:-1],
    ):
        history = [USER, case.format.parse(tokens, tools)]
        new = AGENT[2:3] if history[-1].get("tool_calls") else []
        turn = case.format.render_turn(new, tools, answer_closed=False, history=history, answer=tokens)
        assert turn[0] in case.format.stop_tokens
        assert "ments" not in case.tokenizer.decode(turn)  # the template does not complete the call


def test_a_template_that_takes_arguments_as_text() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments + \'\' }}}</tool_call>'
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = published("qwen2.5").tokenizer
    format = TemplateFormat(tokenizer, source, {})
    assert format.writer.abilities.arguments == "text" and not format.writer.abilities.tools
    answer = assistant_message(None, [READ])
    assert format.parse(format.render_answer(answer, TOOLS), TOOLS) == answer
    assert "Probe" not in tokenizer.decode(format.render_start([USER], TOOLS))
    assert '"name": "read"' in tokenizer.decode(format.render_start([USER], TOOLS))


def test_what_a_template_refuses_is_told_to_the_client() -> None:
    with pytest.raises(GatewayError, match="refuses these messages: Conversation roles must alternate"):
        published("gemma2").format.render_start([USER, MORE], [])


def test_a_model_without_system_role_gets_it_with_the_first_question() -> None:
    case = published("gemma2")
    text = case.tokenizer.decode(case.format.render_start([SYSTEM, USER], []))
    assert text == "<bos><start_of_turn>user\nBe brief.\n\nFix add.<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize("name", ["gemma2", "phi-4", "granite3.3", "smollm3"])
def test_agents_of_models_whose_template_knows_no_calls(name: str) -> None:
    case = published(name)
    plans = play(Session(SessionFacts("t", "rollout")), AGENT, TOOLS, case.format)
    assert [plan.cause if plan.opens else "" for plan in plans] == KEPT
    text = case.tokenizer.decode(list(plans[-1].tokens))
    assert '"name": "read"' in text and "def add(a, b):" in text and "Now double." in text


def test_a_conversation_with_reasoning_learns_what_is_sampled_last() -> None:
    case = published("qwen3")
    rendered = render_conversation(thinking(AGENT)[:-1], TOOLS, case.format)
    learnt = case.tokenizer.decode([token for token, yes in zip(rendered.tokens, rendered.learnt, strict=True) if yes])
    assert learnt == "<think>\nHm.\n</think>\n\nDoubled.<|im_end|>" and rendered.rewritten == 3
    kept = render_conversation(thinking(AGENT)[:6], TOOLS, case.format)
    assert kept.rewritten == 0 and len(kept.ends) == 3


def written_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages of each rendering from now on."""
    counts: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, variables: Mapping[str, Any], now: datetime) -> str:
        counts.append(len(variables["messages"]))
        return render(self, variables, now)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return counts


def test_answers_behind_the_context_are_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    format = published("qwen2.5").format
    messages = [part for n in range(20) for part in (USER, assistant_message(f"Answer {n}.", []))]
    whole = render_conversation(messages, TOOLS, format)
    longest = whole.ends[2] + 1
    counts = written_by(monkeypatch)
    format._recent.clear()
    short = render_conversation(messages, TOOLS, format, longest=longest)
    assert short.cut(longest) == whole.cut(longest)
    assert sorted(counts)[-2:] == [8, 39]  # up to the fourth answer, and up to the last prompt


def test_the_prompt_before_an_answer_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    format = published("qwen2.5").format
    counts = written_by(monkeypatch)
    format._recent.clear()
    format.render_answer(assistant_message("Once.", []), [], history=[SYSTEM, USER])
    assert counts == [2, 3]


def test_a_conversation_that_fits_without_its_reasoning_is_whole() -> None:
    format = published("qwen3").format
    messages = [USER, assistant_message("Yes.", [], "Hm. " * 200), MORE, assistant_message("No.", [])]
    whole = render_conversation(messages, [], format)
    assert render_conversation(messages, [], format, longest=len(whole.tokens)) == whole
    assert len(render_conversation(messages[:2], [], format).tokens) > len(whole.tokens)


@pytest.mark.parametrize("name", ["mistral-nemo", "kimi-k2"])
def test_results_refer_to_the_ids_that_the_model_gave(name: str) -> None:
    case = published(name)
    tokens = case.format.render_answer(assistant_message(None, [READ]), TOOLS, history=[USER])
    own = {"call00000": "aB3dE6gH9", "functions.read:0": "functions.read:7"}
    text = case.tokenizer.decode(tokens[:-1])
    for given, other in own.items():
        text = text.replace(given, other)
    marks = "|".join(map(re.escape, case.tokenizer.special))
    pieces = [piece for piece in re.split(f"({marks})", text) if piece]
    special = case.tokenizer.special
    answer = [id for piece in pieces for id in ([special[piece]] if piece in special else case.tokenizer.encode(piece))]
    answer.append(tokens[-1])
    history = [USER, case.format.parse(answer, TOOLS)]
    turn = case.format.render_turn(AGENT[2:3], TOOLS, answer_closed=True, history=history, answer=answer)
    assert own["call00000" if name == "mistral-nemo" else "functions.read:0"] in case.tokenizer.decode(turn)


@pytest.mark.parametrize(
    ("name", "dates"),
    [("granite3.3", ("November 17, 2026", "November 18, 2026")), ("gpt-oss", ("2026-11-17", "2026-11-18"))],
)
def test_midnight_begins_no_segment(name: str, dates: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A date is that of the request which began the conversation: the model has read it, and its tokens are kept."""
    case, tools = published(name), TOOLS if name == "gpt-oss" else []
    answer = assistant_message(None, [READ]) if tools else CHAT[1]
    more: list[Message] = [{"role": "tool", "content": "def add(a, b):"} if tools else MORE]

    class Clock(datetime):
        read = datetime(2026, 11, 17, 23, 59)

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return Clock.read

    monkeypatch.setattr("rollmill.chat.formats.template.datetime", Clock)
    session = Session(SessionFacts("t", "rollout"))

    def written(messages: list[Message]) -> tuple[Plan, list[bool]]:
        plan = session.plan(messages, tools, case.format)
        text = case.tokenizer.decode(list(plan.tokens))
        return plan, [date in text for date in dates]

    plan, found = written([USER])
    assert (plan.cause, found) == ("start", [True, False])
    tokens = case.format.render_answer(answer, tools, history=[USER])
    first = Answer(tokens, [-1.0] * len(tokens), [0] * len(tokens), [], [], [], "stop", True, answer)
    session.append(session.place(plan, first))
    Clock.read = datetime(2026, 11, 18, 0, 1)
    plan, found = written([USER, answer, *more])
    assert (plan.opens, found) == (False, [True, False])
    plan, found = written([MORE])  # another beginning is written anew
    assert (plan.cause, found) == ("edit", [False, True])
