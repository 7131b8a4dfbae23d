"""Streamed text is the text of the whole answer, for every kind of tokenizer."""

from __future__ import annotations

import json
import re
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


_MARKS = ("<tool_call>", "</tool_call>", "<|im_end|>")
_calls = st.lists(
    st.one_of(
        st.sampled_from(
            [*_MARKS, "\n", " ", '{"name": "run", "arguments": ', '{"name":"a","parameters":', "}", '"id": 1']
        ),
        st.sampled_from(
            ['{"a": ', '"x', '"', "\\", "\\u00e9", "é😀", "[1, ", "]", "{", "}}", ", ", '{"a":"<|im_end|>b"}']
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        ).map(lambda value: json.dumps({"name": "run", "arguments": {"a": value}}, indent=1)),
    ),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=300)
@given(before=st.sampled_from(["", "\n", "Look: ", "a <|im_end|> b"]), text=_calls, size=st.integers(1, 7))
def test_streamed_arguments_begin_the_arguments_of_the_whole_answer(
    hermes_tokenizer: Tokenizer, before: str, text: str, size: int
) -> None:
    format = format_of(hermes_tokenizer)
    tokens: list[int] = []
    for piece in re.split("(</?tool_call>)", f"{before}<tool_call>\n{text}"):
        special = hermes_tokenizer.find_token(piece)
        tokens += [special] if special is not None else hermes_tokenizer.encode(piece)
    calls = format.parse(tokens, TOOLS)["tool_calls"]
    answer, told = format.content_stream(), dict[int, tuple[str, str]]()
    for at in range(0, len(tokens), size):
        answer.push(tokens[at : at + size])
        for number, name, more, done in answer.calls:
            assert told.get(number, (name, ""))[0] == name
            told[number] = name, told.get(number, ("", ""))[1] + more
            assert not done or told[number][1] == calls[number]["function"]["arguments"]
    assert list(told) == list(range(len(told)))
    for number, (name, arguments) in told.items():
        whole = calls[number]["function"]
        assert whole["name"] == name and whole["arguments"].startswith(arguments)


def test_arguments_are_streamed_as_they_come(hermes_tokenizer: Tokenizer) -> None:
    """All but what may still end the call. They are told as the model wrote them, not as Python would write them."""
    format, given = format_of(hermes_tokenizer), '{"path":"a.py", "text" : "x = \\u00e9\\n}"}'
    start, end = map(hermes_tokenizer.token_id, ("<tool_call>", "</tool_call>"))
    head, tail = '{"name": "edit", "arguments": ', "}"
    tokens = [start, *hermes_tokenizer.encode(f"{head}{given}{tail}\n"), end]
    (call,) = format.parse(tokens, TOOLS)["tool_calls"]
    assert call["function"] == {"name": "edit", "arguments": given}
    answer, shown = format.content_stream(), ""
    for count, token in enumerate(tokens, 1):
        answer.push([token])
        shown += "".join(piece.text for piece in answer.calls)
        so_far = hermes_tokenizer.decode(tokens[:count]).partition(head)[2][: len(given)]
        assert so_far.startswith(shown) and not so_far[len(shown) :].strip().strip("\ufffd")
    assert shown == given
