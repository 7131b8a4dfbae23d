"""Tokenizer: text ↔ token ids. One rule is added: text never becomes a special token.

Special tokens carry the structure of a conversation (who speaks, where an answer ends). A user, a file or a tool result
that contains the characters "<end>" must not be able to end a turn, so `encode` spells them out in ordinary tokens and
only `token_id` and `encode_marked` give the special one.

Added tokens that are only blanks (Gemma has some for line breaks) carry no structure: they are ordinary tokens here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from rollmill.errors import ConfigError

# One or two digits are a piece of their own, so that 0–99 can be one token everywhere. A line break and the indentation
# behind it are one piece. Words and punctuation include the blank before them.
_PIECES = r"\p{N}{1,2}|\n[ ]*| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s"

# A mark names a special token in text: `OPEN`, its id, `CLOSE`. Unicode reserves these characters for internal use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")

_LONG = 256  # characters of a text
_LONGEST_CHARACTER = 64  # in tokens; an emoji with all its modifiers has fewer


class Tokenizer:
    """Wraps a Hugging Face `tokenizer.json`; byte-level ones give every text back exactly."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._full = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if not _is_blank(token.content)}
        self.special_ids = frozenset(self.special.values())
        self._ordinary = _without_special_tokens(tokenizer)
        self._marking: tokenizers.Tokenizer | None = None
        self._marked_ids: dict[int, int] = {}
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        # SentencePiece spells unknown characters in tokens of one byte each
        bytes_ = (self.find_token(f"<0x{byte:02X}>") for byte in range(256))
        self._byte_ids = frozenset(token for token in bytes_ if token is not None)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"cannot read tokenizer {path}: {error}", hint="it must be a tokenizer.json file"
            ) from None

    def save(self, path: Path) -> None:
        self._full.save(str(path))

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both give every text the same tokens."""
        return bool(self._full.to_str() == other._full.to_str())

    def encode(self, text: str) -> list[int]:
        """Encode into ordinary tokens only, whatever the text spells."""
        return _encode(self._ordinary, _storable(text))

    def encode_marked(self, text: str, *, after: int | None = None) -> list[int]:
        """Encode text in which marks stand for special tokens. `after`: the special token in front of the text; a
        tokenizer may treat the beginning of a text in its own way."""
        if self._marking is None:  # only chat templates need it
            self._marking = _with_marks(self._full)
            got = ((self._marking.token_to_id(mark(number)), number) for number in self.special_ids)
            self._marked_ids = {id: number for id, number in got if id is not None}
        lead = "" if after is None else mark(after)
        text = lead + text.encode("utf-8", "replace").decode()
        ids = _encode(self._marking, text)
        return [self._marked_ids.get(id, id) for id in ids[1 if lead else 0 :]]

    def decode_marked(self, ids: Sequence[int]) -> str:
        """The reverse of `encode_marked`: special tokens become marks."""
        parts: list[str] = []
        run: list[int] = []
        for id in [*ids, None]:
            if id is not None and id not in self.special_ids:
                run.append(id)
                continue
            if run:
                parts.append(NONCHARACTERS.sub("\ufffd", self.decode(run)))
                run = []
            if id is not None:
                parts.append(mark(id))
        return "".join(parts)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts. If they are long, several cores share them, and other threads run meanwhile."""
        if len(texts) == 1 or sum(map(len, texts)) < _LONG:
            return [self.encode(text) for text in texts]
        return _encode_batch(self._ordinary, [_storable(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Decode. Special tokens appear as they are spelled, bytes that are not UTF-8 as U+FFFD."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def may_change(self, ids: Sequence[int], text: str) -> bool:
        """Whether further tokens could still change `text`, the text of `ids`: its last character may not be complete.

        SentencePiece decodes consecutive single-byte tokens together: one wrong byte spoils all their characters.
        """
        return text.endswith("\ufffd") or (bool(ids) and ids[-1] in self._byte_ids)

    def token_id(self, token: str) -> int:
        found = self.find_token(token)
        if found is None:
            raise ConfigError(
                f"the tokenizer has no token {token!r}", hint="choose the chat format this model was made for"
            )
        return found

    def find_token(self, token: str) -> int | None:
        found: int | None = self._full.token_to_id(token)
        return found


class TextStream:
    """Decodes tokens as they arrive. The text returned so far is always a prefix of the text of all tokens.

    A token's text depends on its neighbours: SentencePiece drops the blank before the first word only, and a character
    may take several tokens. So new tokens are decoded together with the tokens before them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last tokens whose text was returned
        self._held: list[int] = []
        self._next_try = 1  # decode when this many tokens are held

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the text that can no longer change."""
        self._held.extend(tokens)
        if len(self._held) < self._next_try:
            return ""
        before = self._tokenizer.decode(self._shown) if self._shown else ""
        text = self._tokenizer.decode(self._shown + self._held)
        if self._tokenizer.may_change(self._held, text) or not text.startswith(before):
            # do not decode many tokens again with each new one
            self._next_try = 2 * len(self._held) if len(self._held) >= _LONGEST_CHARACTER else 1
            return ""
        self._shown, self._held, self._next_try = self._held or self._shown, [], 1
        return text[len(before) :]


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Byte-level BPE learnt from `texts`; the special tokens get the ids 0, 1, 2, …. Same input, same tokenizer."""
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small", hint=f"256 bytes and the special tokens need at least {smallest}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def mark(special: int) -> str:
    """Stands for a special token in text that `encode_marked` reads."""
    return f"{OPEN}{special}{CLOSE}"


def _encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """A long text goes as a batch of one: that is faster, and other threads run meanwhile."""
    if len(text) >= _LONG:
        return _encode_batch(tokenizer, [text])[0]
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids
    except BaseException as error:
        raise _refused(error) from None


def _encode_batch(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    try:
        return [found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    except BaseException as error:
        raise _refused(error) from None


def _refused(error: BaseException) -> BaseException:
    """A pattern that takes too long makes the library panic, which is no Exception: nothing else would catch it."""
    if type(error).__name__ != "PanicException":
        return error
    return ConfigError(f"the tokenizer cannot split a text: {error}", hint="take the checkpoint from its publisher")


def _is_blank(token: str) -> bool:
    return not token.replace("▁", " ").strip()


def _storable(text: str) -> str:
    """JSON can hold half a surrogate pair, UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _without_special_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that cannot produce any special token, neither by matching its text nor from the vocabulary."""
    tree = json.loads(tokenizer.to_str())
    names = {added["content"] for added in tree["added_tokens"] if not _is_blank(added["content"])}
    tree["added_tokens"] = [added for added in tree["added_tokens"] if added["content"] not in names]
    tree["post_processor"] = None
    vocabulary = tree["model"].get("vocab")
    if isinstance(vocabulary, dict):
        tree["model"]["vocab"] = {token: number for token, number in vocabulary.items() if token not in names}
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def _with_marks(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that finds special tokens by their marks only. All other rules stay, such as the blanks that a special
    token takes in."""
    tree = json.loads(tokenizer.to_str())
    names = {}
    for added in tree["added_tokens"]:
        if not _is_blank(added["content"]):
            names[added["content"]] = mark(added["id"])
            added["content"], added["normalized"] = mark(added["id"]), False
    tree["post_processor"] = None
    vocabulary = tree["model"].get("vocab")
    if isinstance(vocabulary, dict):
        tree["model"]["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: pairs of token and score
        tree["model"]["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocabulary]
    return tokenizers.Tokenizer.from_str(json.dumps(tree))
