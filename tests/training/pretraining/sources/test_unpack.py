"""Compressed files: read like plain ones; a damaged one is counted, and a full disk is an error."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from rollmill.config import LocalPath
from rollmill.errors import StorageError, TrainingError
from rollmill.training.pretraining.source import Document, SourceContext
from rollmill.training.pretraining.sources.conversations import Conversations, ConversationSettings
from rollmill.training.pretraining.sources.jsonl import Jsonl, JsonlSettings
from rollmill.training.pretraining.sources.text import Text, TextFileSettings
from rollmill.training.pretraining.sources.unpack import unpack
from tests.hub import Hub, running_hub

Context = Callable[..., SourceContext]
TEXTS = [f"def f{number}(a):\n" * (1 + 20 * (number == 3)) for number in range(9)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def pack(data: bytes, suffix: str) -> bytes:
    """In two pieces: gzip has members, zstd has frames."""
    compress = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    return compress(data[:50]) + compress(data[50:])


def jsonl(path: Path) -> Jsonl:
    return Jsonl(JsonlSettings(path=LocalPath(path)))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_jsonl_gives_the_documents_of_the_plain_file(suffix: str, tmp_path: Path, context: Context) -> None:
    (tmp_path / "plain.jsonl").write_bytes(LINES)
    plain = jsonl(tmp_path / "plain.jsonl").documents(context())
    expected = [plain.read(number, 0) for number in range(plain.count)]
    folder = tmp_path / "packed"
    folder.mkdir()
    packed = folder / f"a.jsonl.{suffix}"
    packed.write_bytes(pack(LINES + b"broken\n", suffix))
    own = SourceContext(**{**vars(context()), "directory": tmp_path / "other"})
    for _ in range(2):  # the second time from the index that is kept
        documents = jsonl(folder).documents(own)
        assert [documents.read(number, 0) for number in range(documents.count)] == expected
        assert documents.problems == [f"{packed}:10: broken line: {documents.problems[0].partition('line: ')[2]}"]
    packed.write_bytes(gzip.compress(LINES) if suffix == "gz" else pack(LINES.replace(b"f1", b"f9"), suffix))
    if suffix == "gz":
        assert jsonl(folder).documents(own).count == len(expected), "the same documents, compressed otherwise"
    else:
        with pytest.raises(TrainingError, match="have changed since the stage began"):
            jsonl(folder).documents(own)


def test_text_and_conversations_may_be_compressed_too(tmp_path: Path, context: Context) -> None:
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(b"def f(a):\n"))
    documents = Text(TextFileSettings(path=LocalPath(tmp_path / "*.gz"))).documents(context())
    assert context().tokenizer.decode(documents.read(0, 0).tokens) == "def f(a):\n<end>"
    line = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (tmp_path / "b.jsonl.ZST").write_bytes(pack(line, "zst"))
    own = SourceContext(**{**vars(context()), "directory": tmp_path / "other"})
    assert Conversations(ConversationSettings(path=LocalPath(tmp_path / "b.*"))).documents(own).count == 1


def test_parquet_gives_the_documents_of_jsonl(
    tmp_path: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, and from a dataset of a small hub on loopback (tests/hub.py); what is loaded is used without it."""
    import pyarrow
    import pyarrow.parquet

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answers = [{"content": "b"}, {"content": None, "tool_calls": [call]}]
    rows = [
        {
            "text": text,
            "n": None,
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", **answers[n % 2]}],
        }
        for n, text in enumerate(TEXTS)
    ]
    (tmp_path / "rows.jsonl").write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4)

    def read(path: str, make: Callable[[LocalPath], Jsonl | Conversations], place: str) -> list[Document]:
        own = SourceContext(**{**vars(context()), "directory": tmp_path / place})
        documents = make(LocalPath(path)).documents(own)
        assert not documents.problems
        return [documents.read(number, 0) for number in range(documents.count)]

    for kind, make in {
        "text": lambda path: Jsonl(JsonlSettings(path=path)),
        "chats": lambda path: Conversations(ConversationSettings(path=path)),
    }.items():
        expected = read(str(tmp_path / "rows.jsonl"), make, f"{kind}1")
        assert read(str(tmp_path / "rows.parquet"), make, f"{kind}2") == expected and len(expected) >= len(TEXTS)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    documents = jsonl(tmp_path / "cut.parquet").documents(context())
    assert documents.skipped == {"cannot be unpacked": 1}

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub(Hub({"datasets/acme/texts": {"data/a.parquet": (tmp_path / "rows.parquet").read_bytes()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        path = f"hf://datasets/acme/texts@{hub.commit('datasets/acme/texts')}/data/*.parquet"
        assert read(path, make, "hub") == expected
        with pytest.raises(StorageError, match=r"acme/texts has no file 'b\.parquet'"):
            read("hf://datasets/acme/texts/b.parquet", make, "none")
        with pytest.raises(StorageError, match="has no dataset acme/none"):
            read("hf://datasets/acme/none", make, "none")
    assert read(path, make, "hub") == expected


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_damaged_file_is_counted_whole_and_the_rest_loads(suffix: str, tmp_path: Path, context: Context) -> None:
    whole = pack(LINES, suffix)
    (tmp_path / f"cut.jsonl.{suffix}").write_bytes(whole[:-5])
    (tmp_path / f"other.jsonl.{suffix}").write_bytes(LINES)
    (tmp_path / f"good.jsonl.{suffix}").write_bytes(whole)
    documents = jsonl(tmp_path / "*.jsonl.*").documents(context())
    assert documents.skipped == {"cannot be unpacked": 2} and documents.count > len(TEXTS)
    assert all(f"jsonl.{suffix}: cannot be unpacked: " in problem for problem in documents.problems)


def test_a_full_disk_stops_the_stage_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(pack(LINES, "gz"))
    with pytest.raises(TrainingError, match="cannot be unpacked into /dev: No space left on device") as caught:
        unpack(str(tmp_path / "a.gz"), Path("/dev/full"))
    assert caught.value.hint is not None and "make room" in caught.value.hint
