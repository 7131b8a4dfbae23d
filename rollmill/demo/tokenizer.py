"""The demo's tokenizer, trained on generated sessions: numbers and operators are one token each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from rollmill.chat.format import message_calls
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.demo.demonstrations import Habits, demonstrate, plain_code
from rollmill.demo.micro_repos import draw_repository

SESSIONS = 2000


def demo_tokenizer(vocab_size: int) -> Tokenizer:
    return Tokenizer(train_tokenizer(session_texts(SESSIONS), vocab_size, SPECIAL_TOKENS))


def session_texts(sessions: int) -> Iterator[str]:
    """Every text of `sessions` generated sessions, in the pieces that a chat format passes to `encode`."""
    for index in range(sessions):
        generator = random.Random(f"tokenizer {index}")
        repository = draw_repository("train", generator)
        messages, _ = demonstrate(repository, generator, Habits())
        yield plain_code(repository.function)
        for message in messages:
            if message["content"]:
                yield message["content"]
            for name, arguments in message_calls(message):
                yield name
                yield from map(str, json.loads(arguments).values())
