from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.training.pretraining.source import SourceContext

CODE = [f"def f{i % 7}(a, b):\n    return a + {i}\n\nassert f{i % 7}({i}, 2) == {i + 2}\n" for i in range(100)]
HERMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture(scope="session")
def compact() -> Tokenizer:
    return Tokenizer(train_tokenizer(CODE, 400, SPECIAL_TOKENS))


@pytest.fixture(scope="session")
def hermes() -> Tokenizer:
    return Tokenizer(train_tokenizer(CODE, 400, HERMES))


@pytest.fixture
def context(compact: Tokenizer, tmp_path: Path) -> Callable[..., SourceContext]:
    def make(tokenizer: Tokenizer = compact, max_context: int = 64, overlap: int = 4) -> SourceContext:
        return SourceContext(tokenizer, format_of(tokenizer), max_context, overlap, 7, tmp_path / "index")

    return make
