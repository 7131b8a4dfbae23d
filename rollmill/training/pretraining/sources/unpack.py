"""Compressed files of a source, `.gz`, `.zst` and `.parquet`. They are unpacked once, beside the index, to be read in
any order: Parquet as JSONL.

They are read in small pieces, so memory does not grow with them. The disk must hold the unpacked files as long as the
run goes on.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from rollmill.errors import TrainingError
from rollmill.storage.parquet import PARQUET, json_lines

_PIECE = 1 << 20  # bytes of gzip's output
_ZSTD_PIECE = 1 << 12  # bytes of input: one of zstd's blocks makes at most 128 KiB of four bytes


class DamagedFile(Exception):
    """The file cannot be unpacked."""


def is_packed(path: str) -> bool:
    return path.lower().endswith((".gz", ".zst", PARQUET))


def unpack(path: str, target: Path) -> None:
    """Unpack a file. Damaged if it is cut short or no such file."""
    lower = path.lower()
    pieces = _gzip(path) if lower.endswith(".gz") else json_lines(path) if lower.endswith(PARQUET) else _zstd(path)
    try:
        out = target.open("wb", buffering=0)
    except OSError as error:
        raise _no_room(path, target, error) from None
    with out:
        for piece in _sound(pieces):
            try:
                out.write(piece)
            except OSError as error:
                raise _no_room(path, target, error) from None


def _sound(pieces: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from pieces
    except (OSError, EOFError, ValueError, zlib.error, zstandard.ZstdError) as error:  # ValueError: no Parquet
        raise DamagedFile(getattr(error, "strerror", None) or str(error)) from None


def _gzip(path: str) -> Iterator[bytes]:
    with gzip.open(path) as file:
        while piece := file.read(_PIECE):
            yield piece


def _zstd(path: str) -> Iterator[bytes]:
    """A file may have several frames."""
    decompressor = zstandard.ZstdDecompressor()
    frame = None
    with open(path, "rb") as file:
        while data := file.read(_ZSTD_PIECE):
            while data:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a frame")


def _no_room(path: str, target: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path} cannot be unpacked into {target.parent}: {error.strerror}",
        hint=f"unpacked files stay there as long as the run: make room; {os.path.getsize(path)} bytes are compressed",
    )
