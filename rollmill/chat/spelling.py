"""Text of messages never becomes a special token, the text of the template does.

Both are in one text once a template has run. So each special token that is spelled in a message is broken first, by a
character that no text may hold, and the break is taken out after the marks of the template have been found:

    message   a <|im_end|> b      broken   a <BREAK|im_end|> b      the template sees text that is nearly the same
    rendered  <|im_start|>user⏎a <BREAK|im_end|> b<|im_end|>
    marked    MARK user⏎a <|im_end|> b MARK                         for Tokenizer.encode_marked

A spelling that begins in a message and ends in the template's text, or the other way round, is broken too.
"""

from __future__ import annotations

import re
from typing import Any

from rollmill.chat.tokenizer import NONCHARACTERS, Tokenizer, mark

BREAK = "\ufdd2"
_ESCAPED = re.compile(r"\\ufdd2", re.IGNORECASE)  # as JSON writes the break in ASCII

# Words of OpenAI's format and of JSON schema: templates look them up, so they are left as they are.
_WORDS = frozenset(
    """additionalProperties allOf anyOf array arguments boolean const content default description enum format function
    functions id integer items maximum minItems minimum name null number object oneOf parameters properties required
    return role string strict title type value""".split()
)


class Spelling:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.special
        spelled = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._beginnings = {token[:size] for token in spelled for size in range(1, len(token))}
        self._endings = {token[size:] for token in spelled for size in range(1, len(token))}
        self._longest = max(map(len, spelled), default=0)
        self._all = BREAK.join(spelled)

    def breaking(self, value: Any) -> Any:
        """A copy of a message, a tool or a part of one that spells no special token."""
        if isinstance(value, str):
            return self._break(value)
        if isinstance(value, dict):
            return {self.breaking(key): self.breaking(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.breaking(item) for item in value]
        return value

    def marked(self, rendered: str) -> str:
        """The text that a template has written from broken messages, with marks for its special tokens."""
        text = self._pattern.sub(lambda found: mark(self._special[found[0]]), rendered)
        return text.replace(BREAK, "") if BREAK in text else text

    def _break(self, text: str) -> str:
        if not text or text in _WORDS:
            return text
        if not text.isascii():
            text = NONCHARACTERS.sub("\ufffd", text.encode("utf-8", "replace").decode())
        text = self._pattern.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text)
        reach = min(len(text), self._longest - 1)
        if reach == len(text) and text in self._all:
            return text[0] + BREAK + text[1:]
        if any(text[:size] in self._endings for size in range(1, reach + 1)):
            text = BREAK + text
        if any(text[-size:] in self._beginnings for size in range(1, reach + 1)):
            text += BREAK
        return text


def unescaped(text: str) -> str:
    """JSON in ASCII, with breaks as characters."""
    return _ESCAPED.sub(BREAK, text)
