"""Hermes: ChatML with `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen-type models use.

    <|im_start|>user⏎Fix add.<|im_end|>⏎<|im_start|>assistant⏎<tool_call>⏎{"name": "read", …}⏎</tool_call><|im_end|>⏎
    <|im_start|>user⏎<tool_response>⏎def add…⏎</tool_response><|im_end|>⏎<|im_start|>assistant⏎Fixed.<|im_end|>

The results of parallel calls share one user block. Marks such as <tool_call> are single tokens where the vocabulary has
them and plain text where not; text from users and tools is always spelled out (see chat.tokenizer).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rollmill.chat.call_families.hermes import HermesCalls
from rollmill.chat.call_family import write_call
from rollmill.chat.call_stream import call_stream
from rollmill.chat.format import (
    ChatFormat,
    ContentStream,
    DocumentMarks,
    Message,
    Tool,
    assistant_message,
    message_calls,
)
from rollmill.chat.spelling import Spelling
from rollmill.chat.tokenizer import Tokenizer

_CALLS = HermesCalls()
_PROMPT = "<|im_start|>assistant\n"
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
        self._spelling = Spelling(tokenizer)
        self._tools_in_prompt = tools_in_prompt
        tokenizer.token_id("<|im_start|>")
        end_of_text = tokenizer.find_token("<|endoftext|>")
        self._end = tokenizer.token_id("<|im_end|>")
        self.stop_tokens = (self._end,) if end_of_text is None else (self._end, end_of_text)
        self.document = DocumentMarks(None, self.stop_tokens[-1])

    def call_grammar(self, tools: Sequence[Tool], *, single: bool = False) -> str:
        return _CALLS.grammar(tools, self._tokenizer, single)

    def render_start(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        given = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        system = self._system(given or "", tools if self._tools_in_prompt else ())
        return self._encode(system + self._written(messages if given is None else messages[1:]) + _PROMPT)

    def render_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        answer_closed: bool,
        history: Sequence[Message] = (),
        answer: Sequence[int] = (),
    ) -> list[int]:
        return self._encode(("\n" if answer_closed else "<|im_end|>\n") + self._written(messages) + _PROMPT)

    def render_answer(self, message: Message, tools: Sequence[Tool], *, history: Sequence[Message] = ()) -> list[int]:
        return self._encode(self._answer(message) + "<|im_end|>")

    def parse(self, tokens: Sequence[int], tools: Sequence[Tool]) -> Message:
        end = len(tokens) - 1 if tokens and tokens[-1] in self.stop_tokens else len(tokens)
        text = self._tokenizer.decode(tokens[:end])
        content, calls = _CALLS.parse(text, tools)
        return assistant_message(content if content.strip() or not calls else None, calls)

    def content_stream(self, stops: Sequence[str] = ()) -> ContentStream:
        closings = ("<|im_end|>", "<|endoftext|>")
        calls = call_stream(_CALLS, closings)
        return ContentStream(
            self._tokenizer, ends=("<tool_call>", *closings, *stops), drop_blank=True, read_calls=calls
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_marked(self._spelling.marked(text), after=self._end)

    def _text(self, text: str) -> str:
        """Text of users and tools: it spells no special token, whatever it says."""
        return str(self._spelling.breaking(text))

    def _system(self, system: str, tools: Sequence[Tool]) -> str:
        if not system and not tools:
            return ""
        told = self._text(system)
        if tools:
            signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            told += ("\n\n" if system else "") + _TOOLS.format(signatures=self._text(signatures))
        return f"<|im_start|>system\n{told}<|im_end|>\n"

    def _written(self, messages: Sequence[Message]) -> str:
        return "".join(map(self._block, _blocks(messages)))

    def _block(self, block: Sequence[Message]) -> str:
        role = block[0]["role"]
        if role == "tool":
            results = [f"<tool_response>\n{self._text(each['content'])}\n</tool_response>" for each in block]
            return f"<|im_start|>user\n{chr(10).join(results)}<|im_end|>\n"
        written = self._answer(block[0]) if role == "assistant" else self._text(block[0]["content"])
        return f"<|im_start|>{role}\n{written}<|im_end|>\n"

    def _answer(self, message: Message) -> str:
        content = message.get("content") or ""
        calls = [f"<tool_call>\n{self._text(write_call(*call))}\n</tool_call>" for call in message_calls(message)]
        separator = "\n" if calls and content and not content.endswith("\n") else ""
        return self._text(content) + separator + "\n".join(calls)


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
