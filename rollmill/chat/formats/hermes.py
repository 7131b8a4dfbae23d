"""Hermes: ChatML with `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen-type models use.

    <|im_start|>user⏎Fix add.<|im_end|>⏎<|im_start|>assistant⏎<tool_call>⏎{"name": "read", …}⏎</tool_call><|im_end|>⏎
    <|im_start|>user⏎<tool_response>⏎def add…⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎Fixed.<|im_end|>

The results of parallel calls share one user block. Marks such as <tool_call> are single tokens where the vocabulary has
them and plain text where not; text from users and tools is always spelled out (see chat.tokenizer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from rollmill.chat.call_stream import call_stream
from rollmill.chat.families.hermes import HermesCalls
from rollmill.chat.format import (
    ChatFormat,
    ContentStream,
    DocumentMarks,
    Message,
    Tool,
    assistant_message,
    message_calls,
)
from rollmill.chat.tokenizer import Tokenizer
from rollmill.chat.tool_calls import write_call

_CALLS = HermesCalls()
_MARKS = re.compile(r"(<\|im_start\|>|<\|im_end\|>|</?tool_call>|</?tool_response>)")
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class HermesFormat(ChatFormat):
    name = "hermes"
    call_mark = _CALLS.call_mark

    def __init__(self, tokenizer: Tokenizer, *, tools_in_prompt: bool = True) -> None:
        """`tools_in_prompt=False` keeps prompts short, for a model that has learnt its tools."""
        self._tokenizer = tokenizer
        self._tools_in_prompt = tools_in_prompt
        tokenizer.token_id("<|im_start|>")
        end_of_text = tokenizer.find_token("<|endoftext|>")
        self._end = tokenizer.token_id("<|im_end|>")
        self.stop_tokens = (self._end,) if end_of_text is None else (self._end, end_of_text)
        self.document = DocumentMarks(None, self.stop_tokens[-1])

    def call_grammar(self, tools: Sequence[Tool], *, single: bool = False) -> str:
        return _CALLS.grammar(tools, self._tokenizer, single)

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        writer = _Writer(self._tokenizer)
        self._write_system(writer, messages, tools if self._tools_in_prompt else ())
        self._write(writer, messages[1:] if messages and messages[0]["role"] == "system" else messages)
        return writer.mark("<|im_start|>assistant\n").tokens()

    def render_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        answer_closed: bool,
        history: Sequence[Message] = (),
        answer: Sequence[int] = (),
    ) -> list[int]:
        writer = _Writer(self._tokenizer)
        writer.mark("\n" if answer_closed else "<|im_end|>\n")
        self._write(writer, messages)
        return writer.mark("<|im_start|>assistant\n").tokens()

    def render_answer(self, message: Message, tools: Sequence[Tool], *, history: Sequence[Message] = ()) -> list[int]:
        writer = _Writer(self._tokenizer)
        self._write_answer(writer, message)
        return writer.mark("<|im_end|>").tokens()

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        end = len(tokens) - 1 if tokens and tokens[-1] in self.stop_tokens else len(tokens)
        text = self._tokenizer.decode(tokens[:end])
        content, calls = _CALLS.parse(text, tools)
        return assistant_message(content if content.strip() or not calls else None, calls)

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        closings = ("<|im_end|>", "<|endoftext|>")
        calls = call_stream(_CALLS, closings)
        return ContentStream(self._tokenizer, ends=("<tool_call>", *closings, *stops), drop_blank=True, calls=calls)

    def _write_system(self, writer: _Writer, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        if not system and not tools:
            return
        writer.mark("<|im_start|>system\n").text(system)
        if tools:
            signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            before, after = _TOOLS.format(signatures="\0").split("\0")
            writer.mark("\n\n" + before if system else before).text(signatures).mark(after)
        writer.mark("<|im_end|>\n")

    def _write(self, writer: _Writer, messages: Sequence[Message]) -> None:
        for block in _blocks(messages):
            role = block[0]["role"]
            writer.mark(f"<|im_start|>{'user' if role == 'tool' else role}\n")
            if role == "tool":
                for index, message in enumerate(block):
                    writer.mark("\n<tool_response>\n" if index else "<tool_response>\n")
                    writer.text(message["content"]).mark("\n</tool_response>")
            elif role == "assistant":
                self._write_answer(writer, block[0])
            else:
                writer.text(block[0]["content"])
            writer.mark("<|im_end|>\n")

    def _write_answer(self, writer: _Writer, message: Message) -> None:
        content = message.get("content") or ""
        writer.text(content)
        for index, (name, arguments) in enumerate(message_calls(message)):
            separator = "\n" if index or (content and not content.endswith("\n")) else ""
            writer.mark(f"{separator}<tool_call>\n").text(write_call(name, arguments)).mark("\n</tool_call>")


class _Writer:
    """Collects text and marks. Tokenises all text between two special tokens together, as a chat template does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._pending = ""

    def text(self, text: str) -> _Writer:
        """Add text of users and tools: spelled out in ordinary tokens, whatever it says."""
        self._pending += text
        return self

    def mark(self, template: str) -> _Writer:
        """Add text of the template: its marks become special tokens if the vocabulary has them."""
        for piece in _MARKS.split(template):
            special = self._tokenizer.find_token(piece) if _MARKS.fullmatch(piece) else None
            if special is None:
                self._pending += piece
            else:
                self._flush()
                self._tokens.append(special)
        return self

    def tokens(self) -> list[int]:
        self._flush()
        return self._tokens

    def _flush(self) -> None:
        if self._pending:
            self._tokens += self._tokenizer.encode(self._pending)
            self._pending = ""


def _blocks(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """One block per message; consecutive tool results share one."""
    block: list[Message] = []
    for message in messages:
        if block and not (message["role"] == "tool" == block[0]["role"]):
            yield block
            block = []
        block.append(message)
    if block:
        yield block
