"""TemplateFormat: the chat template of a checkpoint is the format.

A template writes whole conversations, but recorded tokens must stay. So the conversation is written twice, and only the
text that is new is tokenised:

    before   user 1 + generation prompt                              P P P P
    sampled  before + the answer's own text                          P P P P A A A
    whole    user 1, answer, user 2 + generation prompt              P P P P A A A T T T     begins with `sampled`

If the answer's text differs from what the template writes only in its form (blanks, the layout of JSON), the template's
version of the answer stands in for it. If the template writes anything before the new messages differently, it
rewrites the history: HistoryRewritten.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rollmill.chat.call_families.choice import family_of
from rollmill.chat.call_family import CallFamily
from rollmill.chat.call_stream import call_stream
from rollmill.chat.context_fitting import SampledIds
from rollmill.chat.format import (
    ChatFormat,
    ContentStream,
    DocumentMarks,
    HistoryRewritten,
    Message,
    Tool,
    assistant_message,
    message_calls,
)
from rollmill.chat.prompt_writer import Writer, find_abilities
from rollmill.chat.sandbox import ChatTemplate, TemplateFailed
from rollmill.chat.spelling import Spelling
from rollmill.chat.tokenizer import CLOSE, NONCHARACTERS, Tokenizer, mark
from rollmill.errors import ConfigError, GatewayError

_MOST_RECENT = 64  # conversations
_STAND_IN: Sequence[Message] = ({"role": "user", "content": "Hello."},)


class TemplateFormat(ChatFormat):
    name = "template"

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        variables: Mapping[str, Any],
        *,
        stop_tokens: Sequence[int] = (),
        family: CallFamily | None = None,
        tools_in_prompt: bool = True,
    ) -> None:
        """`stop_tokens`: those that the checkpoint names; the one that the template closes answers with is added.
        ConfigError if the template cannot be used, with the reason."""
        self._tokenizer = tokenizer
        self._tools_in_prompt = tools_in_prompt
        self._dated = "strftime_now" in source
        self._recent: dict[Hashable, str] = {}  # the least recently used first
        self.family = family or family_of(source, tokenizer)
        try:
            writer = Writer(ChatTemplate(source), variables, Spelling(tokenizer), self.family)
            self.writer, self._closing = find_abilities(writer, tokenizer, stop_tokens)
        except TemplateFailed as error:
            raise ConfigError(
                f"the chat template cannot be used: {error}", hint="name another one: chat.template = FILE.jinja"
            ) from None
        ends = self.family.closing_tokens(tokenizer)
        self.stop_tokens = tuple(dict.fromkeys([self._closing, *stop_tokens, *ends]))
        self.document = DocumentMarks(None, self.stop_tokens[-1])
        self.call_mark, self.single_call = self.family.call_mark, self.family.single_call
        self.text_marks = self.family.text_marks(tokenizer)
        self.reasons_first = self.writer.thinking is not None and self.writer.thinking.opened

    def call_grammar(self, tools: Sequence[Tool], *, single: bool = False) -> str:
        return self.family.grammar(tools, self._tokenizer, single)

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        with _refusals():
            return self._tokenizer.encode_marked(self._write(messages, tools, datetime.now()))

    def render_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        answer_closed: bool,
        history: Sequence[Message] = (),
        answer: Sequence[int] = (),
    ) -> list[int]:
        assert history, "a template writes the whole conversation"
        now = datetime.now()
        with _refusals():
            ids = tuple(self.family.ids(self._tokenizer.decode(answer)))
            sampled = SampledIds(len(history) - 1, ids) if ids else None
            whole = self._write([*history, *messages], tools, now, sampled)
            before = self._write(history[:-1], tools, now)
            rest = self._after_sampled(whole, before, answer, closed=answer_closed)
            if rest is None:
                rest = self._after_written(whole, before, history, tools, now, sampled)
                rest = rest if answer_closed else mark(self._closing) + rest
        last = answer[-1] if answer and answer[-1] in self._tokenizer.special_ids else self._closing
        return self._tokenizer.encode_marked(rest, after=last)

    def render_answer(self, message: Message, tools: Sequence[Tool], *, history: Sequence[Message] = ()) -> list[int]:
        with _refusals():
            for context in (history or _STAND_IN, _STAND_IN):  # the template may rewrite this history
                written = self._answer(context, message, tools, datetime.now())
                if written is not None:
                    break
            else:
                written = self._with_reasoning(_STAND_IN, message, tools)
            return self._encode_behind(self._write(context, tools, datetime.now()), written)

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        end = len(tokens) - 1 if tokens and tokens[-1] in self.stop_tokens else len(tokens)
        text, reasoning = self._tokenizer.decode(tokens[:end]), ""
        if self.writer.thinking is not None:
            reasoning, text = self.writer.thinking.split(text)
        content, calls = self.family.parse(text, tools)
        return assistant_message((content.rstrip() or None) if calls else content, calls, reasoning)

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        closing = [self._tokenizer.decode([token]) for token in self.stop_tokens]
        return ContentStream(
            self._tokenizer,
            ends=(*self.family.ends, *closing, *stops),
            drop_blank=True,
            hold_blank=True,
            silent=self.family.silent,
            thinking=self.writer.thinking,
            frames=self.family.frames,
            read_calls=call_stream(self.family, closing),
        )

    def _write(
        self, messages: Sequence[Message], tools: Sequence[Tool], now: datetime, sampled: SampledIds | None = None
    ) -> str:
        """The conversation with its generation prompt. The history before an answer was written in the turn before."""
        tools = tools if self._tools_in_prompt else ()
        if self._dated:
            return self.writer.write(messages, tools, now, sampled=sampled)
        key = (tuple(map(_key, messages)), json.dumps(tools), sampled)
        text = self._recent.pop(key, None)
        text = self.writer.write(messages, tools, now, sampled=sampled) if text is None else text
        self._recent[key] = text
        while len(self._recent) > _MOST_RECENT:
            self._recent.pop(next(iter(self._recent)), None)
        return text

    def _after_sampled(self, whole: str, before: str, answer: Sequence[int], *, closed: bool) -> str | None:
        """What follows the answer as it was sampled; None if the template writes that answer differently."""
        sampled = before + self._tokenizer.decode_marked(answer)
        if not answer or not whole.startswith(sampled):
            return None
        rest = whole[len(sampled) :]
        # an answer that was cut off may also begin a longer text, such as a call that the template completes
        return rest if closed or rest.startswith(tuple(map(mark, self.stop_tokens))) else None

    def _after_written(
        self,
        whole: str,
        before: str,
        history: Sequence[Message],
        tools: Sequence[Tool],
        now: datetime,
        sampled: SampledIds | None,
    ) -> str:
        """What follows the answer as the template writes it."""
        written = self._answer(history[:-1], history[-1], tools, now, sampled)
        if written is None or not whole.startswith(before + written) or not _holds(written, history[-1]):
            raise HistoryRewritten
        return whole[len(before) + len(written) :]

    def _answer(
        self,
        history: Sequence[Message],
        message: Message,
        tools: Sequence[Tool],
        now: datetime,
        sampled: SampledIds | None = None,
    ) -> str | None:
        """What the template writes for an answer, up to its closing token."""
        before = self._write(history, tools, now)
        tools = tools if self._tools_in_prompt else ()
        written = self.writer.write_answer(history, message, tools, now, sampled, before)
        return None if written is None else self._closed(written, message)

    def _encode_behind(self, prompt: str, written: str) -> list[int]:
        """Tokens of an answer behind its prompt. A tokenizer may put a blank before text that follows a special token,
        so the last text of the prompt is tokenised with it."""
        last = prompt[prompt.rfind(CLOSE) + 1 :]
        before = self._tokenizer.encode_marked(last, after=self._closing)
        both = self._tokenizer.encode_marked(last + written, after=self._closing)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode_marked(written, after=self._closing)  # the tokenizer would merge the two

    def _closed(self, written: str, message: Message) -> str:
        """The text up to its first closing token, which is added if it is missing."""
        found = [(written.find(mark(token)), token) for token in self.stop_tokens if mark(token) in written]
        own = self.family.closing_tokens(self._tokenizer) if message_calls(message) else []
        at, token = min(found, default=(len(written), next(iter(own), self._closing)))
        return written[:at] + mark(token)

    def _with_reasoning(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> str:
        """An answer behind a generation prompt that begins the reasoning, for a template that keeps no reasoning."""
        tools = tools if self._tools_in_prompt else ()
        written = self.writer.write_without_reasoning(history, message, tools, datetime.now())
        if written is None:
            raise TemplateFailed("it does not write this answer behind its own generation prompt")
        thinking = self.writer.thinking
        if thinking is not None and thinking.opened:
            reasoning = NONCHARACTERS.sub("\ufffd", message.get("reasoning_content") or "")
            written = f"{reasoning}\n{self.writer.spelling.marked(thinking.end)}\n\n{written}"
        return self._closed(written, message)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (TemplateFailed, RecursionError) as error:
        raise GatewayError(
            f"the model's chat template refuses these messages: {error}", hint="change their order or their form"
        ) from None


def _key(message: Message) -> Hashable:
    """What a template may read of a message. Strings of recorded messages keep their hash."""
    calls = tuple((call.get("id"), *call["function"].values()) for call in message.get("tool_calls") or ())
    text = (message["role"], message.get("content"), message.get("reasoning_content"))
    return (*text, message.get("tool_call_id"), calls)


def _holds(written: str, message: Message) -> bool:
    """Whether the template has written all parts of an answer."""
    parts = [message.get("content"), message.get("reasoning_content"), *(name for name, _ in message_calls(message))]
    return all(NONCHARACTERS.sub("\ufffd", part or "").strip() in written for part in parts)
