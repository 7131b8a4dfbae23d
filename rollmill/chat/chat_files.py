"""The files of a Hugging Face checkpoint that say how its model chats.

tokenizer_config.json   bos and eos; the template, or several with names
chat_template.jinja     the template, where it is a file of its own
generation_config.json  further tokens that end an answer
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError
from rollmill.strict import describe_problem

TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_FILES = (TOKENIZER_CONFIG, TEMPLATE, GENERATION_CONFIG)
_LARGEST_FILE = 16 << 20
_NAMES = ("tool_use", "default")  # of several templates, the first of these

_File = TypeVar("_File", bound=BaseModel)


class _Token(BaseModel):
    content: str


class _Named(BaseModel):
    name: str
    template: str


class _TokenizerConfig(BaseModel):
    chat_template: str | list[_Named] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    add_bos_token: bool | None = None


class _GenerationConfig(BaseModel):
    eos_token_id: int | list[int] | None = None


class ChatFiles(NamedTuple):
    """`variables`: what the template knows, such as bos_token."""

    template: str | None
    variables: dict[str, Any]
    stop_tokens: list[int]
    begin: int | None  # bos_token
    begins_documents: bool | None  # whether texts begin with it; None: the files do not say


def read_chat_files(files: Mapping[str, bytes], tokenizer: Tokenizer) -> ChatFiles:
    """ConfigError if one of the files is malformed."""
    config = _parsed(files, TOKENIZER_CONFIG, _TokenizerConfig)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: _content(getattr(config, name)) for name in names}
    stops = [] if not found["eos_token"] else [tokenizer.find_token(found["eos_token"])]
    listed = _parsed(files, GENERATION_CONFIG, _GenerationConfig).eos_token_id
    stops += listed if isinstance(listed, list) else [listed]
    variables = {name: token for name, token in found.items() if token is not None}
    known = [token for token in stops if token is not None and 0 <= token < tokenizer.vocab_size]
    begin = tokenizer.find_token(found["bos_token"]) if found["bos_token"] else None
    return ChatFiles(_template(files, config), variables, list(dict.fromkeys(known)), begin, config.add_bos_token)


def chat_files(directory: Path) -> dict[str, bytes]:
    """The files that are there. Those that are too large are no such files."""
    paths = (directory / name for name in CHAT_FILES)
    return {path.name: path.read_bytes() for path in paths if path.is_file() and path.stat().st_size <= _LARGEST_FILE}


def _template(files: Mapping[str, bytes], config: _TokenizerConfig) -> str | None:
    if TEMPLATE in files:
        try:
            return files[TEMPLATE].decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{TEMPLATE} is not UTF-8", hint="download or copy it again") from None
    if not isinstance(config.chat_template, list):
        return config.chat_template
    named = {each.name: each.template for each in config.chat_template}
    return next((named[name] for name in _NAMES if name in named), next(iter(named.values()), None))


def _parsed(files: Mapping[str, bytes], name: str, kind: type[_File]) -> _File:
    try:
        return kind.model_validate_json(files.get(name, b"{}"))
    except ValidationError as error:
        raise ConfigError(f"{name}: {describe_problem(error)}", hint="download or copy the checkpoint again") from None


def _content(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token
