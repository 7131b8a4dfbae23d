"""Figures as TensorBoard reads them: `tensorboard --logdir runs`. Writes the file format itself, without a package.

A file is a sequence of records: length (8 bytes, little endian), its masked CRC-32C (4), the data, and its CRC-32C (4).
The data is a protocol buffer, tensorflow.Event:

    1 wall_time double     2 step int64     3 file_version string     5 summary { 1 value { 1 tag string  2 float } }
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rollmill.runs.sink import Scalar

FOLDER = "tensorboard"  # in the run's directory
_VERSION = "brain.Event:2"


class TensorBoard:
    def __init__(self) -> None:
        self._file: BinaryIO | None = None

    def open(self, directory: Path, name: str) -> None:
        folder = directory / FOLDER
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):  # all of it is written again
            old.unlink()
        self._file = (folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}").open("wb")
        self._file.write(record(_double(1, time.time()) + _bytes(3, _VERSION.encode())))
        self._file.flush()

    def write(self, scalars: Sequence[Scalar]) -> None:
        assert self._file is not None
        self._file.write(b"".join(record(encode(scalar)) for scalar in scalars))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def encode(scalar: Scalar) -> bytes:
    """A tensorflow.Event with one value."""
    value = _bytes(1, scalar.tag.encode()) + b"\x15" + struct.pack("<f", _bounded(scalar.value))  # field 2, 4 bytes
    step = b"\x10" + _varint(scalar.step & (1 << 64) - 1)  # field 2, varint
    return _double(1, scalar.at) + step + _bytes(5, _bytes(1, value))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _bounded(value: float) -> float:
    """As a float of 4 bytes: what does not fit becomes infinite."""
    largest = 3.4028234663852886e38
    return value if abs(value) <= largest or value != value else float("inf" if value > 0 else "-inf")


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_entry(byte) for byte in range(256)]
