from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.errors import ConfigError
from tests.chat.conftest import CODE


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.lists(st.sampled_from([*SPECIAL_TOKENS, " ", "\n", "x"])).map("".join))
def test_text_comes_back_exactly_and_never_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.special_ids & set(ids)
    for other in ("x", "x" * 300):  # short texts are encoded one by one, long ones together
        assert tokenizer.encode_many([text, other]) == [ids, tokenizer.encode(other)]


def test_special_tokens_are_single_tokens_at_the_front_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.decode([tokenizer.token_id("<end>")]) == "<end>"


def test_frequent_numbers_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert {len(tokenizer.encode(str(number))) for number in range(100)} == {1}


def test_training_is_deterministic() -> None:
    first, second = (train_tokenizer(CODE, 400, SPECIAL_TOKENS).to_str() for _ in range(2))
    assert first == second


def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.encode(CODE[3]) == tokenizer.encode(CODE[3])
    assert loaded.vocab_size == tokenizer.vocab_size


def test_half_a_surrogate_pair_from_somebodys_json_is_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_other_threads_run_while_many_texts_are_encoded(tokenizer: Tokenizer) -> None:
    """Documents are read ahead in a thread: it must not hold up the step."""
    began = threading.Event()

    def encode() -> None:
        began.set()
        tokenizer.encode_many(["".join(CODE) * 60])

    thread = threading.Thread(target=encode)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # the thread gives the lock away only if it releases it by itself
    try:
        thread.start()
        began.wait()
        ran_beside = thread.is_alive()
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert ran_beside


def test_errors_say_what_to_do(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hint"):
        tokenizer.token_id("<nonsense>")
    with pytest.raises(ConfigError, match="at least"):
        train_tokenizer(CODE, 100, SPECIAL_TOKENS)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        Tokenizer.load(tmp_path / "broken.json")


def test_a_pattern_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    """The library panics, with an exception that is no Exception. A text of words takes no such way."""
    tree = json.loads(train_tokenizer(["a b"], 300, ["<end>"]).to_str())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tree["pre_tokenizer"] = split
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("bab")) == "bab"
    for text in ("a" * 40 + "b", "a" * 400 + "b"):
        with pytest.raises(ConfigError, match="cannot split a text"):
            tokenizer.encode(text)
        with pytest.raises(ConfigError, match="cannot split a text"):
            tokenizer.encode_many([text, "x" * 300])
