"""Published chat templates, each with a small tokenizer that has the special tokens of its family."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from rollmill.chat.format import Message, Tool
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
EDGES = {  # bos and eos; the others have no bos, and <|im_end|>
    "deepseek-r1": DEEPSEEK,
    "deepseek-v3.1": DEEPSEEK,
    "gemma2": ("<bos>", "<end_of_turn>"),
    "granite3.3": ("<|end_of_text|>", "<|end_of_text|>"),
    "hermes3": ("<|begin_of_text|>", "<|im_end|>"),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral-nemo": ("<s>", "</s>"),
    "command-r7b": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "glm4.5": ("", "<|user|>"),
    "gpt-oss": ("<|startoftext|>", "<|return|>"),
}
VARIABLES = {"deepseek-r1": {"enable_thinking": True}}
_SPECIAL = re.compile(
    r"<\|[a-zA-Z_]+\|>|<｜[^｜]+｜>|</?think>|</?tool_call>|</?tool_response>|</?arg_(?:key|value)>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>"
)
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }
    for name, properties in {
        "read": {"path": "string"},
        "edit": {"path": "string", "line": "integer", "parts": "array"},
    }.items()
]


class Published(NamedTuple):
    name: str
    source: str
    bos: str
    eos: str
    raw: tokenizers.Tokenizer
    tokenizer: Tokenizer
    format: TemplateFormat

    def expected(self, messages: list[Message], tools: list[Tool]) -> list[int]:
        """The prompt as transformers writes it, tokenised with all its special tokens."""
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast(
            tokenizer_object=self.raw, chat_template=self.source, bos_token=self.bos or None, eos_token=self.eos
        )
        write: Any = theirs.apply_chat_template
        text = write(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **VARIABLES.get(self.name, {})
        )
        return list(self.raw.encode(text, add_special_tokens=False).ids)


@functools.cache
def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@functools.cache
def tokenizer_of(name: str) -> tuple[str, str, tokenizers.Tokenizer]:
    bos, eos = EDGES.get(name, ("", "<|im_end|>"))
    special = tuple(dict.fromkeys([token for token in (bos, eos) if token] + _SPECIAL.findall(source_of(name))))
    texts = ["def add(a, b):\n    return a + b\n", json.dumps(TOOLS), "user assistant system tool\n"]
    return bos, eos, train_tokenizer(texts, 256 + len(special) + 60, special)


@functools.cache
def published(name: str) -> Published:
    bos, eos, raw = tokenizer_of(name)
    tokenizer = Tokenizer(raw)
    variables = {"bos_token": bos, "eos_token": eos, **VARIABLES.get(name, {})}
    format = TemplateFormat(tokenizer, source_of(name), variables, stop_tokens=[tokenizer.token_id(eos)])
    return Published(name, source_of(name), bos, eos, raw, tokenizer, format)


def as_sent(messages: list[Message], *, kimi: bool = False, empty: str | None = "") -> list[Message]:
    """Messages as transformers' documentation wants them: arguments as objects, results with the id of their call."""
    sent, waiting, count = [], [], 0
    for message in messages:
        clean: Message = {key: message[key] for key in ("role", "content", "reasoning_content") if key in message}
        calls: list[Message] = []
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            identity = f"functions.{name}:{len(calls)}" if kimi else f"call{count:05d}"
            function = {"name": name, "arguments": json.loads(arguments)}
            calls.append({"id": identity, "type": "function", "function": function})
            waiting.append((name, identity))
            count += 1
        if calls:
            clean |= {"tool_calls": calls, "content": message["content"] or empty}
        if message["role"] == "tool":
            clean["name"], clean["tool_call_id"] = waiting.pop(0)
        sent.append(clean)
    return sent
