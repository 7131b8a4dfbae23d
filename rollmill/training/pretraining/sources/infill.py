"""Fill in the middle: a text is cut at two places and rearranged, so that the model learns to write what is missing.

prefix middle suffix    ─►    <prefix> prefix <suffix> suffix <middle> middle        (PSM order)
"""

from __future__ import annotations

import hashlib
import random

from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError
from rollmill.training.pretraining.source import SourceContext

# the tokens before prefix, suffix and middle, as families of models name them
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


class Infill:
    def __init__(self, context: SourceContext, rate: float) -> None:
        self._encode, self._seed, self._rate = context.tokenizer.encode, context.seed, rate
        self._marks = _marks(context.tokenizer)

    def chosen(self, number: int, epoch: int) -> bool:
        """Whether this document is rearranged in this epoch."""
        return self._draw(number, epoch).random() < self._rate

    def rearranged(self, text: str, number: int, epoch: int) -> list[int]:
        draw = self._draw(number, epoch)
        draw.random()  # was for `chosen`
        first, second = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        pieces = (text[:first], text[second:], text[first:second])
        return [
            token for mark, piece in zip(self._marks, pieces, strict=True) for token in (mark, *self._encode(piece))
        ]

    def _draw(self, number: int, epoch: int) -> random.Random:
        key = hashlib.blake2b(f"infill {self._seed} {number} {epoch}".encode(), digest_size=8).digest()
        return random.Random(int.from_bytes(key))


def _marks(tokenizer: Tokenizer) -> list[int]:
    for names in NAMES:
        found = [token for name in names if (token := tokenizer.find_token(name)) is not None]
        if len(found) == len(names):
            return found
    wanted = " or ".join(", ".join(names) for names in NAMES)
    raise ConfigError(
        f"fill_in_middle needs tokens that the tokenizer does not have: {wanted}",
        hint="use a model made for code, or set fill_in_middle = 0",
    )
