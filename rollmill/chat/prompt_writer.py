"""Writes conversations with a template, and finds out what that template can write.

The text has marks for the special tokens of the template, see `Spelling`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from rollmill.chat.call_family import CallFamily
from rollmill.chat.context_fitting import Abilities, Fitting, SampledIds
from rollmill.chat.format import Message, Thinking, Tool, assistant_message
from rollmill.chat.sandbox import ChatTemplate, TemplateFailed
from rollmill.chat.spelling import Spelling
from rollmill.chat.tokenizer import Tokenizer

THINKING = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
)
_ANALYSIS = Thinking("<|channel|>analysis<|message|>", "<|end|>")

_SYSTEM: Message = {"role": "system", "content": "Probe 0."}
_USER: Message = {"role": "user", "content": "Probe 1."}
_RESULT: Message = {"role": "tool", "content": "Probe 2."}
_TEXT = "Probe 3."
_REASONING = "Probe 4."
_ARGUMENTS = '{"probe_key": "probe value"}'
_CALL = assistant_message(None, [("probe_call", _ARGUMENTS)])
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "probe_call",
        "description": "Probe 5.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Probe 6."}},
            "required": ["probe_key"],
        },
    },
}


@dataclass(frozen=True)
class Writer:
    """`variables`: what the template knows besides messages and tools, such as bos_token."""

    template: ChatTemplate
    variables: Mapping[str, Any]
    spelling: Spelling
    family: CallFamily
    abilities: Abilities = field(default_factory=Abilities)
    thinking: Thinking | None = None

    def write(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        now: datetime,
        *,
        prompt: bool = True,
        sampled: SampledIds | None = None,
    ) -> str:
        """The conversation; `prompt`: with the generation prompt behind it. Raises TemplateFailed."""
        fitting = Fitting(self.abilities, self.spelling, self.family, self.thinking)
        try:
            fitted, described = fitting.fit(messages, tools, sampled)
        except RecursionError:
            raise TemplateFailed("the messages are nested too deeply") from None
        none: list[Tool] | None = [] if self.abilities.needs_list else None
        given = {"messages": fitted, "tools": described or none, "documents": None, "add_generation_prompt": prompt}
        return self.spelling.marked(self.template.render({**self.variables, **given}, now))

    def write_answer(
        self,
        history: Sequence[Message],
        message: Message,
        tools: Sequence[Tool],
        now: datetime,
        sampled: SampledIds | None = None,
        before: str | None = None,
    ) -> str | None:
        """What the template writes behind the generation prompt for an answer. None if it writes the history, or the
        generation prompt itself, differently when the answer is there. `before`: the history, if it is written."""
        before = self.write(history, tools, now) if before is None else before
        after = self.write([*history, message], tools, now, prompt=False, sampled=sampled)
        return after[len(before) :] if after.startswith(before) else None

    def write_without_reasoning(
        self, history: Sequence[Message], message: Message, tools: Sequence[Tool], now: datetime
    ) -> str | None:
        """As `write_answer`, for a generation prompt that begins the reasoning and a template that keeps none: what
        stands in the place of the reasoning."""
        if self.thinking is None:
            return None
        before, begins, _ = self.write(history, tools, now).rpartition(self.spelling.marked(self.thinking.start))
        after = self.write([*history, message], tools, now, prompt=False)
        return after[len(before) :] if begins and after.startswith(before) else None


def find_abilities(writer: Writer, tokenizer: Tokenizer, stops: Sequence[int]) -> tuple[Writer, int]:
    """The writer with the abilities of its template, and the special token that ends an answer. TemplateFailed says why
    a template cannot be used."""
    now = datetime.now()
    writer = _with_prompt(writer, now)
    prompt = writer.write([_USER], [], now)
    if str(_USER["content"]) not in prompt:
        raise TemplateFailed("it does not write the text of a user message")
    writer = replace(writer, thinking=_find_thinking(writer, tokenizer, prompt))
    closing = _find_closing(writer, tokenizer)
    writer = _with(writer, system=_SYSTEM["content"] in _tried(writer, [_SYSTEM, _USER], []))
    writer = _with(writer, tools="probe_call" in _tried(writer, [_USER], [_TOOL]))
    writer = _with_calls(writer, tokenizer, {closing, *stops, *writer.family.closing_tokens(tokenizer)})
    after = _tried(writer, [_USER, _CALL, _RESULT], [_TOOL])
    writer = _with(writer, results=_RESULT["content"] in after)
    if writer.thinking is not None and writer.thinking.opened:
        opened = _opens(writer.thinking, after, tokenizer) or not writer.abilities.results
        writer = replace(writer, thinking=writer.thinking._replace(always=opened))
    return _with_reasoning(writer), closing


def _with(writer: Writer, **abilities: Any) -> Writer:
    return replace(writer, abilities=replace(writer.abilities, **abilities))


def _with_prompt(writer: Writer, now: datetime) -> Writer:
    """The writer that can write a prompt without tools."""
    try:
        writer.write([_USER], [], now)
        return writer
    except TemplateFailed as error:
        listed = _with(writer, needs_list=True)
        if not _tried(listed, [_USER], []):
            raise error from None
        return listed


def _find_thinking(writer: Writer, tokenizer: Tokenizer, prompt: str) -> Thinking | None:
    if _ANALYSIS.start in writer.template.source:  # the end mark alone is one of other models too
        return _ANALYSIS
    for each in THINKING:
        if each.end in writer.template.source or each.end in tokenizer.special:
            return each._replace(opened=_opens(each, prompt, tokenizer))
    return None


def _opens(thinking: Thinking, prompt: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.decode(tokenizer.encode_marked(prompt)).rstrip().endswith(thinking.start)


def _find_closing(writer: Writer, tokenizer: Tokenizer) -> int:
    """The special token behind the text of an answer: the one that closes it, or begins the next message."""
    answer = assistant_message(_TEXT, [])
    tokens = _answer_tokens(writer, answer, [], tokenizer)
    alone, whole = (_tried(writer, [_USER, answer, *more], [], prompt=False) for more in ([], [_USER]))
    if whole.startswith(alone):
        tokens += tokenizer.encode_marked(whole[len(alone) :])[:1]
    inside = [mark for mark in writer.family.frame_ends if mark in tokenizer.special]
    ends = tokenizer.special_ids - {tokenizer.special[mark] for mark in inside}
    special = [at for at, token in enumerate(tokens) if token in ends]
    if not special:
        raise TemplateFailed("it closes an answer with no special token, so a model could not end one")
    for at in special:
        text = tokenizer.decode(tokens[:at])
        if writer.thinking is not None:
            text = writer.thinking._replace(opened=False).split(text)[1]
        if writer.family.parse(text, [])[0].strip() == _TEXT:
            return tokens[at]
    raise TemplateFailed(f"it writes an answer in a layout that is not known: {tokenizer.decode(tokens)!r}")


def _answer_tokens(writer: Writer, message: Message, tools: Sequence[Tool], tokenizer: Tokenizer) -> list[int]:
    now = datetime.now()
    written = writer.write_answer([_USER], message, tools, now)
    if written is None:
        written = writer.write_without_reasoning([_USER], message, tools, now)
    if written is None:
        raise TemplateFailed("it does not write an answer behind its own generation prompt")
    return tokenizer.encode_marked(written, after=min(tokenizer.special_ids, default=None))


def _with_calls(writer: Writer, tokenizer: Tokenizer, stops: Collection[int]) -> Writer:
    """The first way to pass a call to the template that gives back the same call when parsed."""
    tools = [_TOOL] if writer.abilities.tools else []
    prompt = tokenizer.decode(tokenizer.encode_marked(writer.write([_USER], [], datetime.now()))).strip()
    for can in _call_variants(writer.abilities):
        trial = replace(writer, abilities=can)
        try:
            tokens = _answer_tokens(trial, _CALL, tools, tokenizer)
        except TemplateFailed:
            continue
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
        _, calls = writer.family.parse(tokenizer.decode(tokens[:end]), [_TOOL])
        right = [(name, _compact(arguments)) for name, arguments in calls] == [("probe_call", _compact(_ARGUMENTS))]
        rest = tokenizer.decode([token for token in tokens[end:] if token not in stops]).strip()
        if right and prompt.endswith(rest):  # a template may write its generation prompt behind everything
            return trial
    return _with(writer, calls=False)


def _compact(text: str) -> str:
    return "".join(text.split())


def _call_variants(can: Abilities) -> Iterator[Abilities]:
    yield replace(can, arguments="object", empty="")
    yield replace(can, arguments="object", empty=None)
    yield replace(can, arguments="text", empty="")
    yield replace(can, arguments="text", empty=None)


def _with_reasoning(writer: Writer) -> Writer:
    if writer.family.frames:  # reasoning has no place inside the frame of the text
        call = {**_CALL, "reasoning_content": _REASONING}
        return _with(writer, reasoning="field" if _REASONING in _tried(writer, [_USER, call], [_TOOL]) else "none")
    message = assistant_message(_TEXT, [], _REASONING)
    for way in ("field", "text"):
        trial = _with(writer, reasoning=way)
        written = _tried(trial, [_USER, message], [], prompt=False)
        if _REASONING in written and _TEXT in written:
            return trial
    return _with(writer, reasoning="none")


def _tried(writer: Writer, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool = True) -> str:
    """What the template writes; nothing if it refuses."""
    try:
        return writer.write(messages, tools, datetime.now(), prompt=prompt)
    except TemplateFailed:
        return ""
