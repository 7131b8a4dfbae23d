"""Finds the chat format of a model: its template, or a format that the special tokens of its tokenizer name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollmill.chat.call_families.choice import FAMILIES
from rollmill.chat.chat_files import TEMPLATE, ChatFiles, chat_files, read_chat_files
from rollmill.chat.config import ChatConfig
from rollmill.chat.format import ChatFormat, DocumentMarks
from rollmill.chat.formats.compact import SPECIAL_TOKENS, CompactFormat
from rollmill.chat.formats.hermes import HermesFormat
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError, GatewayError

CHATML = ("<|im_start|>", "<|im_end|>")
# how families of models call the end of a text
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<EOS_TOKEN>")


def format_of(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes] | None = None,
    config: ChatConfig | None = None,
    *,
    tools_in_prompt: bool = True,
) -> ChatFormat:
    """`files`: the checkpoint's files beside its tokenizer, see `read_chat_files`. `tools_in_prompt`: whether a prompt
    begins with the tool definitions. ConfigError says why a model has no chat format."""
    config = config or ChatConfig()
    files = {**(files or {}), **({TEMPLATE: _read(config.template)} if config.template else {})}
    found = read_chat_files(files, tokenizer)
    format = _format(tokenizer, found, config, tools_in_prompt)
    format.document = _document_marks(format, tokenizer, found)
    return format


def _format(tokenizer: Tokenizer, found: ChatFiles, config: ChatConfig, tools_in_prompt: bool) -> ChatFormat:
    if found.template is not None:
        return TemplateFormat(
            tokenizer,
            found.template,
            {**found.variables, **config.variables},
            stop_tokens=found.stop_tokens,
            family=FAMILIES[config.calls] if config.calls else None,
            tools_in_prompt=tools_in_prompt,
        )
    if _has(tokenizer, CHATML):
        return HermesFormat(tokenizer, tools_in_prompt=tools_in_prompt)
    if _has(tokenizer, SPECIAL_TOKENS):
        return CompactFormat(tokenizer)
    raise ConfigError(
        "the model has no chat template, and its tokenizer has the special tokens of no chat format that is known",
        hint="take its chat or instruct variant, or name the template: chat.template = FILE.jinja",
    )


def format_beside(
    path: Path, tokenizer: Tokenizer, config: ChatConfig | None = None, *, tools_in_prompt: bool = True
) -> ChatFormat:
    """The format of the checkpoint whose tokenizer.json is at `path`."""
    return format_of(tokenizer, chat_files(path.parent), config, tools_in_prompt=tools_in_prompt)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"chat.template: cannot read {path}: {error.strerror}") from None


def _has(tokenizer: Tokenizer, tokens: tuple[str, ...]) -> bool:
    return all(tokenizer.find_token(token) is not None for token in tokens)


def _document_marks(format: ChatFormat, tokenizer: Tokenizer, found: ChatFiles) -> DocumentMarks:
    """Which tokens begin and end a document of plain text. An instruct model lists several tokens that end an answer,
    such as the end of a turn: only the end of a text ends a document. That is a known name that the checkpoint lists,
    or that its vocabulary has; else the checkpoint's eos."""
    known = [token for name in _ENDS if (token := tokenizer.find_token(name)) in tokenizer.special_ids]
    listed = [token for token in found.stop_tokens if token in known]
    end = [*listed, *known, *found.stop_tokens, format.stop_tokens[-1]][0]
    unsaid = found.begins_documents is None and found.begin is not None
    begins = (found.begin != end and not _marks_turns(found.begin, format)) if unsaid else found.begins_documents
    return DocumentMarks(found.begin if begins else None, end)


def _marks_turns(token: int | None, format: ChatFormat) -> bool:
    """Whether the token begins each message: some checkpoints name that one as their bos_token."""
    if token is None:
        return False
    try:
        return list(format.render_start([{"role": "user", "content": "Hello."}], [])).count(token) > 1
    except GatewayError:
        return False
