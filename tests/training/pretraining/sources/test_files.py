"""Text and JSONL: what is read, what is skipped and counted, how long documents are cut."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollmill import telemetry
from rollmill.chat.format import DocumentMarks
from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import LocalPath
from rollmill.errors import ConfigError, TrainingError
from rollmill.training.pretraining.mixture import Mixture, Part, choose, windows
from rollmill.training.pretraining.source import SourceContext
from rollmill.training.pretraining.sources.files import parts
from rollmill.training.pretraining.sources.jsonl import Jsonl, JsonlSettings
from rollmill.training.pretraining.sources.text import Text, TextDocuments, TextFileSettings
from tests.training.pretraining.sources.conftest import CODE

Context = Callable[..., SourceContext]
LONG = "".join(CODE[:40]) + "é→" * 300  # no line ends in its last part


def text(path: Path, **settings: object) -> Text:
    return Text(TextFileSettings(path=LocalPath(path), **settings))  # type: ignore[arg-type]


def jsonl(path: Path, **settings: object) -> Jsonl:
    return Jsonl(JsonlSettings(path=LocalPath(path), **settings))  # type: ignore[arg-type]


def spelled(documents: TextDocuments, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(documents.read(number, 0).tokens) for number in range(documents.count)]


def test_each_file_is_a_document_and_others_are_counted(tmp_path: Path, context: Context, compact: Tokenizer) -> None:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "a.py").write_text("def f(a):\n")
    (folder / "deep" / "b.txt").write_bytes("\ufeffreturn b".encode())
    (folder / ".git" / "hidden").write_text("hidden")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\0\0\xff")
    (folder / "nul.bin").write_bytes(b"abc\0def")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "large.txt").write_text("x" * 3000)
    (folder / "blank.txt").write_text(" \n")
    documents = text(folder, max_bytes=2000).documents(context())
    assert spelled(documents, compact) == ["def f(a):\n<end>", "return b<end>"], "no byte order mark, an end"
    assert all(documents.read(0, 0).learnt)
    assert documents.skipped == {"binary": 2, "not utf-8": 1, "too large": 1, "empty": 1}


def test_a_path_may_be_a_file_or_a_glob(tmp_path: Path, context: Context) -> None:
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / name).write_text(name)
    assert text(tmp_path / "*.py").documents(context()).count == 2
    with pytest.raises(ConfigError, match=r"no file matches '.*/\*\.rs'"):
        text(tmp_path / "*.rs").documents(context())


def test_other_encodings(tmp_path: Path, context: Context, compact: Tokenizer) -> None:
    (tmp_path / "a.txt").write_bytes(LONG.encode("utf-16"))
    documents = text(tmp_path / "a.txt", encoding="UTF-16").documents(context())
    assert documents.count > 5 and spelled(documents, compact)[0].startswith("def f0(a, b):")
    with pytest.raises(ValueError, match="there is no encoding 'utf-99'"):
        text(tmp_path, encoding="utf-99")


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_parts_of_a_long_text_teach_every_token_once(
    kind: str, tmp_path: Path, context: Context, compact: Tokenizer
) -> None:
    (tmp_path / "a.text").write_text(LONG)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": LONG}) + "\n" + json.dumps({"text": "short"}) + "\n")
    source = text(tmp_path / "a.text") if kind == "text" else jsonl(tmp_path / "a.jsonl")
    documents = source.documents(context())
    long = [documents.read(number, 0) for number in range(documents.count - (kind == "jsonl"))]
    assert len(long) > 5 and all(document.notes == ["part of a long document"] for document in long)
    learnt = [t for document in long for t, flag in zip(document.tokens, document.learnt, strict=True) if flag]
    assert compact.decode(learnt) == f"{LONG}<end>"
    for before, after in itertools.pairwise(long):
        assert after.learnt[:4] == [False] * 4 and all(after.learnt[4:])
        assert list(after.tokens[:4]) == list(before.tokens[-4:]) or "é" in compact.decode(after.tokens[:4])
    for document in long:  # a part with many short tokens is cut again, by tokens
        assert all(len(part.tokens) <= 64 for part in windows(document, 64, 4))


def test_text_is_cut_at_ends_of_lines_and_never_inside_a_character() -> None:
    data = ("one\ntwo three\n" + "→" * 50).encode()
    cut = list(parts(data, 16))
    assert data[slice(*cut[0])] == b"one\ntwo three\n"
    assert b"".join(data[start:stop] for start, stop in cut) == data
    assert all(data[start:stop].decode() and stop - start <= 16 for start, stop in cut)


def test_a_broken_line_is_named_and_the_rest_loads(tmp_path: Path, context: Context, compact: Tokenizer) -> None:
    lines = [json.dumps({"text": f"return {number}"}) for number in range(2000)]
    lines[1233] = lines[1233][:-3]
    lines[1234] = '{"body": "x", "title": 3}'
    lines[1235] = "[1]"
    lines[1236] = '{"text": "half \\ud800 pair"}'
    lines[1237] = '{"text": "  "}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    documents = jsonl(tmp_path / "*.jsonl").documents(context())
    assert documents.skipped == {"broken line": 4, "empty": 1}
    assert documents.count + documents.skipped.total() == 2000
    assert spelled(documents, compact)[-1] == "return 1999<end>"
    assert documents.problems[0].startswith(f"{tmp_path}/a.jsonl:1234: broken line: not valid JSON")
    assert documents.problems[1].endswith(":1235: broken line: the field 'text' is not text; its fields: body, title")
    telemetry.open_events(tmp_path / "events", "test")
    Mixture([Part("corpus", documents)], 0).report()
    warning, source = telemetry.read_events(tmp_path / "events")
    assert "source 'corpus': records are not used: 4 broken line, 1 empty; the first: " in warning["text"]
    assert source["skipped"] == documents.skipped and source["problems"] == documents.problems


def test_a_source_that_has_nothing_says_why(tmp_path: Path, context: Context) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\x1f\x8b compressed \n\x00\n")
    documents = jsonl(tmp_path / "a.jsonl").documents(context())
    with pytest.raises(
        TrainingError, match=r"0 were found.*: records are not used: 2 broken line; the first: .*jsonl:1"
    ):
        Mixture([Part("corpus", documents)], 0)


def test_an_index_is_kept_and_changed_files_are_refused(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(10)))
    jsonl(file).documents(context())
    with monkeypatch.context() as patch:
        patch.setattr(Jsonl, "_text", None)  # would fail if it were scanned again
        assert jsonl(file).documents(context()).count == 10
    os.utime(file, (1, 1))
    assert jsonl(file).documents(context()).count == 10, "a copy with the same content is as good"
    file.write_text(file.read_text().replace("text 7", "text 8"))
    with pytest.raises(TrainingError, match="have changed since the stage began"):
        jsonl(file).documents(context())


def test_a_file_that_is_gone_is_an_error_with_a_hint(tmp_path: Path, context: Context) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text")
    documents = text(file).documents(context())
    file.write_text("some")
    with pytest.raises(TrainingError, match="shorter than when the stage began"):
        documents.read(0, 0)
    file.unlink()
    with pytest.raises(TrainingError, match="cannot be read"):
        documents.read(0, 0)


def test_all_parts_of_a_duplicate_are_left_out(tmp_path: Path, context: Context) -> None:
    (tmp_path / "a.txt").write_text(LONG)
    (tmp_path / "b.txt").write_text(LONG)
    (tmp_path / "c.txt").write_text("short")
    documents = text(tmp_path / "*.txt").documents(context())
    (chosen,) = Mixture([Part("text", documents)], 0).chosen
    alone = (documents.count - 1) // 2
    assert chosen.duplicates == alone and chosen.training is not None and len(chosen.training) == alone + 1
    sizes = {len(choose([Part("text", documents, heldout=share / 20)])[0].heldout) for share in range(20)}
    assert sizes <= {0, 1, alone, alone + 1} and len(sizes) > 1, "parts of a document are held out together"


def test_fill_in_the_middle(tmp_path: Path, context: Context, hermes: Tokenizer) -> None:
    whole = "def f0(a, b):\n    return a + 1\n"
    (tmp_path / "a.txt").write_text(whole)
    documents = text(tmp_path / "a.txt", fill_in_middle=0.5).documents(context(hermes))
    seen, plain = set(), 0
    for epoch in range(40):
        document = documents.read(0, epoch)
        assert document == documents.read(0, epoch) and all(document.learnt)
        spelt = hermes.decode(document.tokens)
        if not document.notes:
            plain += spelt == f"{whole}<|endoftext|>"
            continue
        prefix, _, rest = spelt.removeprefix("<|fim_prefix|>").partition("<|fim_suffix|>")
        suffix, _, middle = rest.removesuffix("<|endoftext|>").partition("<|fim_middle|>")
        assert prefix + middle + suffix == whole
        assert document.tokens[0] == hermes.token_id("<|fim_prefix|>")
        seen.add((prefix, middle))
    assert 10 <= plain <= 30 and len(seen) > 5


def test_fill_in_the_middle_needs_its_tokens(tmp_path: Path, context: Context) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"does not have: <\|fim_prefix\|>, <\|fim_suffix\|>, <\|fim_middle\|>"):
        text(tmp_path / "a.txt", fill_in_middle=0.5).documents(context())


def test_a_text_too_long_to_fill_in_is_counted(tmp_path: Path, context: Context, hermes: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("é→" * 30)
    documents = text(tmp_path / "a.txt", fill_in_middle=1.0).documents(context(hermes))
    assert documents.read(0, 0).notes[-1] == "too long to fill in its middle"


def test_documents_begin_and_end_as_the_checkpoint_or_the_source_says(
    tmp_path: Path, context: Context, compact: Tokenizer
) -> None:
    (tmp_path / "a.text").write_text("def f(a):\n" + LONG)
    usual = context()
    usual.format.document = DocumentMarks(compact.token_id("<text>"), compact.token_id("<end>"))
    named = replace(usual, begin_token="", end_token="<arg>", directory=tmp_path / "named")
    for each, first, last in ((usual, "<text>", "<end>"), (named, "", "<arg>")):
        documents = text(tmp_path / "a.text").documents(each)
        read = [documents.read(number, 0) for number in range(documents.count)]
        assert len(read) > 5
        whole = [t for document in read for t, flag in zip(document.tokens, document.learnt, strict=True) if flag]
        assert compact.decode(whole) == f"def f(a):\n{LONG}{last}", "nothing is to predict what begins a text"
        assert compact.decode(read[0].tokens).startswith(f"{first}def f(a):")
        assert all(compact.token_id("<text>") not in document.tokens for document in read[1:])
    with pytest.raises(ConfigError, match="names the token '<nothing>'"):
        text(tmp_path / "a.text").documents(replace(usual, end_token="<nothing>", directory=tmp_path / "unknown"))
