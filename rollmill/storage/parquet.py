"""Parquet files as JSONL: a line per row, a field per column. What is null in a row is not in its line."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from rollmill.errors import ConfigError

PARQUET = ".parquet"
_ROWS = 256  # in memory at once


def pyarrow_parquet() -> tuple[Any, Any]:
    """pyarrow, and its module for Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed", hint="pip install 'rollmill[parquet]', or use JSONL"
        ) from None
    return pyarrow, pyarrow.parquet


def json_lines(path: str) -> Iterator[bytes]:
    """Raises ValueError for a file that is not whole."""
    _, parquet = pyarrow_parquet()
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield json.dumps(_present(row), ensure_ascii=False, default=_plain).encode("utf-8", "replace") + b"\n"


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(inner) for name, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def _plain(value: Any) -> str:
    """Bytes in base64; times and decimals as text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
