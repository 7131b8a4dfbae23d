"""Streamed text is the text of the whole answer, for every kind of tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from rollmill.chat.format import ChatFormat, assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import TextStream, Tokenizer, train_tokenizer
from tests.chat.conftest import CODE, HERMES_TOKENS, TOOLS

_TEXTS = [*CODE, "The file has been fixed. All tests pass now, as they should.", "Grüße, 你好 世界! naïve café"] * 3
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece(special: tuple[str, ...], *, prefix: str) -> tokenizers.Tokenizer:
    """Metaspace: blanks are part of the word behind them. `prefix`: whether the first word gets one too."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prefix)]  # as converted T5 and Gemma models have it
    )
    return trained(tokenizer, special)


def llama(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """The layout of Llama 2 and Mistral: the normalizer writes the blanks, the decoder strips the first."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return trained(tokenizer, special)


def trained(tokenizer: tokenizers.Tokenizer, special: tuple[str, ...]) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*special, "<unk>", *_BYTES], max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator([text.replace("你好", "") for text in _TEXTS], trainer=trainer)  # 你好 takes bytes
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] not in _BYTES]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


KINDS: dict[str, Callable[[tuple[str, ...]], tokenizers.Tokenizer]] = {
    "byte-level": lambda special: train_tokenizer(_TEXTS, 700, special),
    "metaspace, prefix": lambda special: sentencepiece(special, prefix="always"),
    "metaspace, first": lambda special: sentencepiece(special, prefix="first"),
    "metaspace, no prefix": lambda special: sentencepiece(special, prefix="never"),
    "llama": llama,
}


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param](HERMES_TOKENS))


@pytest.fixture(scope="module", params=[SPECIAL_TOKENS, HERMES_TOKENS], ids=["compact", "hermes"])
def format_tokens(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def speaking(request: pytest.FixtureRequest, format_tokens: tuple[str, ...]) -> tuple[Tokenizer, ChatFormat]:
    tokenizer = Tokenizer(KINDS[request.param](format_tokens))
    return tokenizer, format_of(tokenizer)


texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["The", " tests", " ", "  ", "\n", "你好", "😀", "é", "\ufffd", "<", "a"])).map("".join),
)


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What a TextStream shows when the tokens come in chunks of these sizes."""
    shown, decoder, at = [], TextStream(tokenizer), 0
    for size in [*sizes, *[1] * len(ids)]:
        shown.append(decoder.push(ids[at : at + size]))
        at += size
    return shown


@settings(deadline=None)
@given(text=texts, sizes=st.lists(st.integers(0, 5), max_size=10))
def test_what_is_shown_begins_the_text_of_all(any_tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = any_tokenizer.encode(text)
    whole = any_tokenizer.decode(ids)
    shown = "".join(stream(any_tokenizer, ids, sizes))
    assert whole.startswith(shown)
    assert shown == whole or any_tokenizer.may_change(ids, whole)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), sizes=st.lists(st.integers(0, 5), max_size=10))
def test_any_tokens_a_model_may_sample(any_tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size - 1), max_size=30))
    whole = any_tokenizer.decode(ids)
    shown = "".join(stream(any_tokenizer, ids, sizes))
    assert whole.startswith(shown)
    assert shown == whole or any_tokenizer.may_change(ids, whole)


def test_tokens_that_are_no_text_do_not_hold_back_what_follows(any_tokenizer: Tokenizer) -> None:
    half = any_tokenizer.encode("😀")[:-1] * 100
    ids = half + any_tokenizer.encode(" and then words, " * 40)
    assert "".join(stream(any_tokenizer, ids, [])) == any_tokenizer.decode(ids)


@settings(deadline=None)
@given(text=texts, with_call=st.booleans())
def test_a_streamed_answer_is_the_parsed_answer(
    speaking: tuple[Tokenizer, ChatFormat], text: str, with_call: bool
) -> None:
    _, format = speaking
    tokens = format.render_answer(assistant_message(text, [("run", "{}")] if with_call else []), TOOLS)
    content = format.parse(tokens, TOOLS)["content"] or ""
    answer = format.content_stream()
    shown = "".join(answer.push([token]) for token in tokens)
    assert content.startswith(shown)
    assert shown == content or not content.strip() or "<" in text


def test_blanks_between_words_are_not_lost(speaking: tuple[Tokenizer, ChatFormat]) -> None:
    _, format = speaking
    tokens = format.render_answer(assistant_message("All tests pass now, as they should.", []), TOOLS)
    answer = format.content_stream()
    assert "".join(answer.push([token]) for token in tokens) == "All tests pass now, as they should."


def test_blanks_before_a_call_are_no_content(hermes_tokenizer: Tokenizer) -> None:
    """Models write a line break before a call. It is no content of the message, so it is not streamed either."""
    format = format_of(hermes_tokenizer)
    tokens = hermes_tokenizer.encode(" \n") + format.render_answer(assistant_message(None, [("run", "{}")]), TOOLS)
    assert format.parse(tokens, TOOLS)["content"] is None
    answer = format.content_stream()
    assert [answer.push([token]) for token in tokens] == [""] * len(tokens)
