"""Finds the chat format of a model from the special tokens of its tokenizer."""

from __future__ import annotations

from rollmill.chat.format import ChatFormat
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.formats.hermes import HermesFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError

CHATML = ("<|im_start|>", "<|im_end|>")


def format_of(tokenizer: Tokenizer, *, tools_in_prompt: bool = True) -> ChatFormat:
    """`tools_in_prompt`: whether a prompt begins with the tool definitions, in formats that have a place for them.
    ConfigError if the tokenizer has the tokens of no format."""
    if _has(tokenizer, CHATML):
        return HermesFormat(tokenizer, tools_in_prompt=tools_in_prompt)
    if _has(tokenizer, SPECIAL_TOKENS):
        return CompactFormat(tokenizer)
    raise ConfigError(
        "the tokenizer has the special tokens of no chat format that is known",
        hint=f"a chat or instruct model with {' and '.join(CHATML)} (ChatML)",
    )


def _has(tokenizer: Tokenizer, tokens: tuple[str, ...]) -> bool:
    return all(tokenizer.find_token(token) is not None for token in tokens)
