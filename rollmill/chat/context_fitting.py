"""Fits messages to what a template can write. What it can write is found by trying it, once, when a model is loaded.

Templates differ: arguments of calls are an object or a text, an answer without text has "" or none, and many know no
tools at all. What a template has no place for is written into the text of messages, in the marks of the call family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rollmill.chat.call_family import CallFamily, read_json, to_json
from rollmill.chat.format import Message, Thinking, Tool, message_calls
from rollmill.chat.spelling import Spelling

_TOOLS = """# Tools

You may call one or more functions to assist with the user query. These are their signatures:

{signatures}

Call a function in this form:

{example}"""


@dataclass(frozen=True)
class Abilities:
    """What a template writes by itself."""

    arguments: Literal["object", "text"] = "object"  # what it takes the arguments of a call for
    empty: str | None = ""  # the content of an answer that is only calls
    system: bool = True
    calls: bool = True
    results: bool = True
    tools: bool = True
    needs_list: bool = False  # it fails if there are no tools at all; an empty list is given
    reasoning: Literal["field", "text", "none"] = "field"  # in a field of its own, in the content, or dropped


def describe_tools(signatures: str, family: CallFamily) -> str:
    """What a system message says about tools that the template has no place for."""
    example = family.write([("function-name", to_json({"argument": "value"}))])
    return _TOOLS.format(signatures=signatures, example=example)


def written_result(content: str) -> str:
    """The result of a tool in the text of a user message."""
    return f"<tool_response>\n{content}\n</tool_response>"


class SampledIds(NamedTuple):
    """The ids that the model gave to the calls of the answer at `place`. Other calls get ids by their number."""

    place: int
    ids: tuple[str, ...]


@dataclass(frozen=True)
class Fitting:
    can: Abilities
    spelling: Spelling
    family: CallFamily
    thinking: Thinking | None

    def fit(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampled: SampledIds | None = None
    ) -> tuple[list[Message], list[Tool]]:
        """What the template is given. Text of messages is broken, see `Spelling`; marks written here are not."""
        fitted: list[Message] = []
        waiting: list[tuple[str, str, str]] = []  # calls without result: the client's id, our id, name
        count = 0
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                given = sampled.ids if sampled is not None and sampled.place == place else ()
                waiting = self._waiting(message, count, given)
                count += len(waiting)
                fitted.append(self._answer(message, [identity for _, identity, _ in waiting]))
            elif message["role"] == "tool":
                self._add_result(fitted, message, waiting)
            else:
                fitted.append({"role": message["role"], "content": self._text(message["content"])})
        broken = self.spelling.breaking(list(tools))
        if broken and not self.can.tools:
            self._add_system(fitted, describe_tools("\n".join(map(to_json, broken)), self.family))
            broken = []
        if fitted and fitted[0]["role"] == "system" and not self.can.system:
            self._move_system(fitted)
        return fitted, broken

    def _text(self, text: str | None) -> str:
        return str(self.spelling.breaking(text or ""))

    def _waiting(self, message: Message, count: int, sampled: Sequence[str]) -> list[tuple[str, str, str]]:
        waiting, calls = [], message.get("tool_calls") or ()
        for number, call in enumerate(calls, count):
            name = self._text(call["function"]["name"])
            # Mistral accepts only ids of nine letters and digits; Kimi's ids have this form
            identity = f"functions.{name}:{number - count}" if self.family.name == "kimi" else f"call{number:05d}"
            if len(sampled) == len(calls):
                identity = sampled[number - count]
            waiting.append((str(call.get("id") or ""), identity, name))
        return waiting

    def _answer(self, message: Message, identities: Sequence[str]) -> Message:
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        if self.thinking is not None and not reasoning:  # some clients send both in one text
            reasoning, content = self.thinking._replace(opened=False).split(content)
        content, reasoning = self._text(content), self._text(reasoning)
        calls = [(self._text(name), arguments) for name, arguments in message_calls(message)]
        if calls and reasoning and content and self.family.name == "harmony":  # its template takes one of them
            reasoning, content = f"{reasoning}\n{content}", ""
        fitted: Message = {"role": "assistant"}
        if reasoning and self.can.reasoning == "field":
            fitted |= {"thinking": reasoning, "reasoning_content": reasoning}
        elif reasoning and self.can.reasoning == "text" and self.thinking is not None:
            content = f"{self.thinking.start}\n{reasoning}\n{self.thinking.end}\n\n{content}"
        if calls and self.can.calls:
            fitted["tool_calls"] = [
                {
                    "id": identity,
                    "type": "function",
                    "function": {"name": name, "arguments": self._arguments(arguments)},
                }
                for identity, (name, arguments) in zip(identities, calls, strict=True)
            ]
        elif calls:
            written = self.family.write([(name, self._text(arguments)) for name, arguments in calls])
            content = f"{content}\n{written}" if content else written
        return fitted | {"content": content if content or not calls else self.can.empty}

    def _arguments(self, text: str) -> Any:
        if self.can.arguments == "object":
            try:
                value = read_json(text)
            except ValueError:
                value = None
            # a malformed call must have some object here; its recorded tokens are kept
            return self.spelling.breaking(value if isinstance(value, dict) else {"arguments": text})
        return self._text(text)

    def _add_result(self, fitted: list[Message], message: Message, waiting: list[tuple[str, str, str]]) -> None:
        place = next((at for at, call in enumerate(waiting) if call[0] and call[0] == message.get("tool_call_id")), 0)
        _, identity, name = waiting.pop(place) if waiting else ("", "call00000", "unknown")
        content = self._text(message["content"])
        if self.can.results:
            fitted.append({"role": "tool", "content": content, "name": name, "tool_call_id": identity})
            return
        content = written_result(content)
        if fitted and fitted[-1].get("results"):
            fitted[-1]["content"] += f"\n{content}"
        else:
            fitted.append({"role": "user", "content": content, "results": True})

    def _add_system(self, fitted: list[Message], text: str) -> None:
        if fitted and fitted[0]["role"] == "system":
            fitted[0]["content"] = f"{fitted[0]['content']}\n\n{text}" if fitted[0]["content"] else text
        else:
            fitted.insert(0, {"role": "system", "content": text})

    def _move_system(self, fitted: list[Message]) -> None:
        """Put the system message in front of the first user message."""
        system = fitted.pop(0)["content"]
        if fitted and fitted[0]["role"] == "user":
            fitted[0]["content"] = f"{system}\n\n{fitted[0]['content']}" if system else fitted[0]["content"]
        else:
            fitted.insert(0, {"role": "user", "content": system})
