from __future__ import annotations

import pytest

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer

CODE = [f"def f{i % 7}(a, b):\n    return a + {i}\n\nassert f{i % 7}({i}, 2) == {i + 2}\n" for i in range(100)] * 2
HERMES_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in {
        "read": {"path": {"type": "string"}},
        "edit": {"path": {"type": "string"}, "line": {"type": "integer"}, "text": {"type": "string"}},
        "run": {},
    }.items()
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(CODE, 512, SPECIAL_TOKENS))


@pytest.fixture(scope="session")
def hermes_tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(CODE, 512, HERMES_TOKENS))
