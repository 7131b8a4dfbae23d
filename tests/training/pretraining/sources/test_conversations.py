"""Conversations: only the assistant's tokens are learnt, bad lines are named, long ones are cut and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import LocalPath
from rollmill.training.pretraining.mixture import Part, choose
from rollmill.training.pretraining.source import Document, SourceContext
from rollmill.training.pretraining.sources.conversations import (
    ConversationDocuments,
    Conversations,
    ConversationSettings,
)
from tests.chat.published import published

Context = Callable[..., SourceContext]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Fix f."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "def f(a):"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]
# written by hand; what is learnt stands between ⟦ and ⟧
COMPACT = "<system>Be brief.<user>Fix f.<agent>⟦read<arg>a.py<end>⟧<tool>def f(a):<agent>⟦<text>Done.<end>⟧"
HERMES = (
    "<|im_start|>system\nBe brief.{tools}<|im_end|>\n<|im_start|>user\nFix f.<|im_end|>\n<|im_start|>assistant\n"
    '⟦<tool_call>\n{{"name": "read", "arguments": {{"path": "a.py"}}}}\n</tool_call><|im_end|>⟧\n'
    "<|im_start|>user\n<tool_response>\ndef f(a):\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦Done.<|im_end|>⟧"
)


def opened(context: SourceContext, path: Path, *lines: Any) -> ConversationDocuments:
    written = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(written) + "\n")
    return Conversations(ConversationSettings(path=LocalPath(path))).documents(context)


def marked(document: Document, tokenizer: Tokenizer) -> str:
    """The text, with marks around what is learnt."""
    found, before = "", False
    for token, learnt in zip(document.tokens, document.learnt, strict=True):
        found += ("⟦" if learnt else "⟧") * (learnt != before) + tokenizer.decode([token])
        before = learnt
    return found + "⟧" * before


def test_the_assistants_tokens_are_learnt_compact(context: Context, compact: Tokenizer, tmp_path: Path) -> None:
    documents = opened(context(), tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS, "metadata": {"id": 1}})
    assert marked(documents.read(0, 0), compact) == COMPACT


def test_the_assistants_tokens_are_learnt_hermes(context: Context, hermes: Tokenizer, tmp_path: Path) -> None:
    with_tools = opened(context(hermes, 4096), tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS})
    found = marked(with_tools.read(0, 0), hermes)
    head, _, tail = found.partition("\n\n# Tools")
    assert json.dumps(TOOLS[0]) in tail, "tools are in the prompt"
    assert head + tail[tail.index("</tool_call><|im_end|>") + len("</tool_call>") :] == HERMES.format(tools="")


def test_an_answer_of_weight_0_is_context_only(context: Context, compact: Tokenizer, tmp_path: Path) -> None:
    messages = [*MESSAGES[:2], {**MESSAGES[2], "weight": 0}, MESSAGES[3], {**MESSAGES[4], "weight": 1}]
    documents = opened(context(), tmp_path / "a.jsonl", {"messages": messages, "tools": TOOLS})
    assert marked(documents.read(0, 0), compact) == COMPACT.replace("⟦", "", 1).replace("⟧", "", 1)


def test_malformed_conversations_are_named_and_the_rest_loads(context: Context, tmp_path: Path) -> None:
    good = {"messages": MESSAGES}
    bad = {
        '{"messages": [': "the line is not JSON",
        '{"text": "x"}': "messages must hold 1 to",
        '{"messages": [{"role": "robot", "content": "x"}]}': 'messages[0].role is "robot"; one of system',
        '{"messages": [{"role": "user"}]}': "messages[0].content is missing",
        '{"messages": [{"role": "user", "content": "x"}]}': "no answer to learn from; add a message",
        '{"messages": [{"role": "assistant", "content": "x", "weight": 2}]}': "messages[0].weight is 2",
        '{"messages": [{"role": "user", "content": "x", "weight": 1}]}': "messages[0].weight is 1",
        '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}': "function.name and function.arguments",
        '{"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}': '[0] is "image_url", not text',
        '{"messages": [7]}': "messages[0] must be an object",
        '{"messages": ' + "[" * 100_000: "the line is not JSON",
    }
    documents = opened(context(), tmp_path / "a.jsonl", good, *bad)
    assert documents.count == 1 and documents.skipped == {"malformed conversation": len(bad)}
    for number, (problem, detail) in enumerate(zip(documents.problems, bad.values(), strict=True), 2):
        assert problem.startswith(f"{tmp_path}/a.jsonl:{number}: malformed conversation: ") and detail in problem


def test_a_long_conversation_is_cut_after_an_answer(context: Context, compact: Tokenizer, tmp_path: Path) -> None:
    whole = opened(context(), tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS}).read(0, 0)
    first_end = list(whole.tokens).index(compact.token_id("<end>")) + 1
    for longest in (len(whole.tokens) - 1, first_end):
        documents = opened(context(max_context=longest), tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS})
        cut = documents.read(0, 0)
        assert cut.tokens == whole.tokens[:first_end] and cut.notes == ["conversation cut"]
    none = opened(context(max_context=first_end - 1), tmp_path / "a.jsonl", {"messages": MESSAGES, "tools": TOOLS})
    assert none.read(0, 0) == ([], [], ["conversation left out: no answer fits into the context"])


def test_equal_conversations_are_found_whatever_their_spelling(context: Context, tmp_path: Path) -> None:
    line = json.dumps({"messages": MESSAGES, "tools": TOOLS}, indent=None, separators=(",", ":"))
    documents = opened(context(), tmp_path / "a.jsonl", line, {"tools": TOOLS, "messages": MESSAGES, "id": 3})
    (chosen,) = choose([Part("conversations", documents)])
    assert chosen.duplicates == 1


def test_tokens_are_those_of_a_session(context: Context, hermes: Tokenizer, tmp_path: Path) -> None:
    """A conversation has the tokens that the gateway would make if the model gave these answers."""
    format = format_of(hermes)
    document = opened(context(hermes, 4096), tmp_path / "a.jsonl", {"messages": MESSAGES[2:5], "tools": TOOLS}).read(
        0, 0
    )
    rendered = format.render_start(MESSAGES[2:5], TOOLS)
    ending = len(format.render_turn([], TOOLS, answer_closed=True))
    assert list(document.tokens) == rendered[: len(rendered) - ending]


def test_the_checkpoints_template_writes_the_conversation(tmp_path: Path) -> None:
    def read(name: str, *messages: Any) -> tuple[str, list[str]]:
        case = published(name)
        context = SourceContext(case.tokenizer, case.format, 512, 4, 7, tmp_path / f"index-{name}")
        document = opened(context, tmp_path / f"{name}.jsonl", {"messages": messages}).read(0, 0)
        return marked(document, case.tokenizer), list(document.notes)

    text, notes = read("qwen2.5", *MESSAGES)
    assert text == HERMES.format(tools="") and not notes
    user, other = {"role": "user", "content": "Fix f."}, {"role": "user", "content": "Thanks."}
    answer = {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."}
    text, notes = read("qwen3", user, answer, other, answer)
    assert text.count("⟦") == 1 and text.endswith("⟦<think>\nHm.\n</think>\n\nDone.<|im_end|>⟧")
    assert notes == ["answers not learnt: the chat template rewrites them"]
    assert read("gemma2", user, other, answer) == ("", ["conversation left out: the chat template refuses it"])
