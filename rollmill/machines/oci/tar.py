"""Reads tar archives that nobody has checked: small, strict, and bounded in everything.

Python's tarfile is none of these: it reads a header of any size whole, and its versions up to 3.13.5 can be kept busy
for days by one (CVE-2024-6232) or for ever (CVE-2025-8194). This reader takes what `tar`, `tarfile` and builders of
images write: ustar, GNU's long names, and of pax headers the path, the link, the size, the owner and the time.
Whatever contradicts itself is an ArchiveError. Nothing is written anywhere, and names are given as they are: the caller
decides where they lead.

    for entry in (tar := Tar(stream, most_bytes=…, most_entries=…)):
        tar.read() or tar.copy_to(file)     the content of this entry
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Literal, NamedTuple

_BLOCK = 512
_MOST_HEADER = 1 << 16  # bytes of a long name or of a pax header
_MOST_HEADERS = 8  # before one entry
_CHUNK = 1 << 20
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK, _SPARSE = b"x", b"g", b"L", b"K", b"S"
_OF_ONE = ("path", "linkpath", "size")  # never of all files at once
_PAX_KEYS = (*_OF_ONE, "uid", "gid", "mtime")

Kind = Literal["file", "directory", "link", "hard link", "other"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "link",
    b"5": "directory",
}
_WITHOUT_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, directories, pipes


class ArchiveError(ValueError):
    """The archive is damaged, or larger than its reader allows."""


class Entry(NamedTuple):
    name: str  # bytes that are no UTF-8 are surrogate escapes
    kind: Kind
    size: int  # bytes of content that follow
    mode: int
    target: str  # of a link
    user: int = 0
    group: int = 0
    time: int = 0  # of its last change, in seconds
    sparse: bool = False  # its content is not what follows, but pieces of it


class Tar:
    """The entries of an archive, once. Content that is not read before the next entry is skipped."""

    def __init__(self, stream: IO[bytes], *, most_bytes: int, most_entries: int, needs_end: bool = True) -> None:
        """`most_bytes`: of all contents together, those that are skipped too. `needs_end`: an archive that just stops
        is damaged; some builders of images leave out the end, and the padding before it."""
        self._stream = stream
        self._room, self._most = most_bytes, most_bytes
        self._most_entries = most_entries
        self._needs_end = needs_end
        self._left, self._padding = 0, 0  # bytes of the current content, and behind it up to the next block

    def __iter__(self) -> Iterator[Entry]:
        for count in range(self._most_entries + 1):
            entry = self._next()
            if entry is None:
                return
            if count == self._most_entries:
                raise ArchiveError(f"the archive has more than {self._most_entries} entries")
            yield entry

    def read(self) -> bytes:
        """The content of the current entry, or what is left of it."""
        return b"".join(self._chunks())

    def copy_to(self, file: IO[bytes]) -> None:
        for chunk in self._chunks():
            file.write(chunk)

    def _chunks(self) -> Iterator[bytes]:
        while self._left:
            chunk = self._stream.read(min(self._left, _CHUNK))
            if not chunk:
                raise ArchiveError("the archive ends in the middle of a file")
            self._left -= len(chunk)
            yield chunk

    def _next(self) -> Entry | None:
        """The next entry; None at the end. Long names and pax headers come before the header that they belong to."""
        facts: dict[str, bytes] = {}
        for _ in range(_MOST_HEADERS):
            for _ in self._chunks():
                pass
            block = self._block()
            if block is None:
                return None
            kind, size = block[156:157], _number(block[124:136], "size")
            if kind in (_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
                facts |= _facts(kind, self._header(size))
                continue
            return self._entry(block, kind, size, facts)
        raise ArchiveError("too many headers stand before one entry")

    def _entry(self, block: bytes, kind: bytes, size: int, facts: dict[str, bytes]) -> Entry:
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
            name = prefix + b"/" + name
        name, target = facts.get("path", name), facts.get("linkpath", block[157:257].partition(b"\0")[0])
        if "size" in facts:
            size = _decimal(facts["size"])
        if kind == _SPARSE:
            self._skip_sparse_map(block[482])
        what: Kind = "other" if "sparse" in facts else _KINDS.get(kind, "other")
        if kind in (b"0", b"\0") and name.endswith(b"/"):  # as archives of before 1988 mark directories
            what = "directory"
        if kind in _WITHOUT_CONTENT:
            size = 0
        self._begin(size)
        mode = _number(block[100:108], "mode") & 0o7777
        user, group = (
            _decimal(facts[key]) if key in facts else _number(block[at : at + 8], key)
            for key, at in (("uid", 108), ("gid", 116))
        )
        time = _seconds(facts["mtime"]) if "mtime" in facts else _number(block[136:148], "time")
        sparse = kind == _SPARSE or "sparse" in facts
        return Entry(_text(name), what, size, mode, _text(target), user, group, time, sparse)

    def _begin(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise ArchiveError(f"the files have more than {self._most} bytes")
        self._left, self._padding = size, -size % _BLOCK

    def _header(self, size: int) -> bytes:
        if size > _MOST_HEADER:
            raise ArchiveError(f"a header has {size} bytes")
        self._left, self._padding = size, -size % _BLOCK
        return self.read()

    def _skip_sparse_map(self, more: int) -> None:
        for _ in range(_MOST_HEADERS):
            if not more:
                return
            block = self._exactly(_BLOCK)
            if len(block) < _BLOCK:
                break
            more = block[504]
        raise ArchiveError("a sparse file has too many pieces")

    def _block(self) -> bytes | None:
        """The next header; None at the end of the archive."""
        self._exactly(self._padding)
        self._padding = 0
        block = self._exactly(_BLOCK)
        if not block and self._needs_end:
            raise ArchiveError("the archive has no end")
        if not any(block):
            return None
        if len(block) < _BLOCK:
            raise ArchiveError("the archive ends in the middle of a header")
        if _number(block[148:156], "checksum") != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise ArchiveError("a header is damaged")
        return block

    def _exactly(self, size: int) -> bytes:
        """`size` bytes, or fewer at the end."""
        parts = []
        while size and (part := self._stream.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _number(field: bytes, what: str) -> int:
    """An octal number, or one in base 256 as GNU's tar writes large ones. None is negative."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    if what == "time" and field[0] == 0xFF:  # before 1970
        return 0
    text = field.partition(b"\0")[0].strip(b" ")
    if text.strip(b"01234567"):
        raise ArchiveError(f"a header is damaged: its {what} is {field!r}")
    return int(text or b"0", 8)


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise ArchiveError(f"a pax header is damaged: {text[:40]!r} is no number")
    return int(text)


def _seconds(text: bytes) -> int:
    """Of a time with a fraction, which is left out; 0 if it is before 1970."""
    whole = text.partition(b".")[0]
    return 0 if whole.startswith(b"-") else _decimal(whole)


def _facts(kind: bytes, data: bytes) -> dict[str, bytes]:
    """What a header says about the entry that follows it."""
    if kind in (_LONG_NAME, _LONG_LINK):
        return {"path" if kind == _LONG_NAME else "linkpath": data.rstrip(b"\0")}
    facts = _pax(data)
    if kind != _GLOBAL:
        return facts
    if not facts.keys().isdisjoint((*_OF_ONE, "sparse")):
        raise ArchiveError("a pax header names all files at once")
    return {}


def _pax(data: bytes) -> dict[str, bytes]:
    """What a pax header says of path, link and size; "sparse" for a file with holes. It has lines LENGTH KEY=VALUE."""
    facts: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        if data[at] == 0:  # some writers fill the block within the size
            break
        digits, space, _ = data[at : at + 8].partition(b" ")
        length = _decimal(digits) if space else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) < length or not equals or record[-1:] != b"\n":
            raise ArchiveError("a pax header is damaged")
        if key.startswith(b"GNU.sparse."):
            facts["sparse"] = value
        elif (name := key.decode("ascii", "replace")) in _PAX_KEYS:
            facts[name] = value
        at += length
    return facts


def _text(name: bytes) -> str:
    if b"\0" in name:
        raise ArchiveError("a name has a zero byte")
    return name.decode("utf-8", "surrogateescape")


def write_entry(target: Path, path: str, mode: int, tar: Tar) -> None:
    """Write the content of the current entry of an archive."""
    place = target / path
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("xb") as file:  # a second entry of the same name is refused by the operating system
        tar.copy_to(file)
    place.chmod(0o755 if mode & 0o100 else 0o644)


def safe_path(name: str) -> str | None:
    """A relative path that stays inside, without its leading dot; None if there is none."""
    path = PurePosixPath(name)
    parts = [part for part in path.parts if part != "."]
    if path.is_absolute() or ".." in parts or "\0" in name or not parts or len(name) > 1024:
        return None
    return "/".join(parts)
