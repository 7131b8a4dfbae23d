"""The files of a checkpoint directory. Tensors are mapped, not read, and everything a file claims is checked first.

    config.json                            the architecture, see `config`
    model.safetensors                      all tensors, or
    model-00001-of-00002.safetensors …     in several files, with
    model.safetensors.index.json           which tensor is in which
    tokenizer.json, …                      everything else is kept as it is

Pickled weights (.bin, .pt) are not read, because loading them runs code from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from rollmill.errors import WeightsError
from rollmill.strict import FreeJson, parse_json
from rollmill.weights.files.checkpoint_directory import read_bytes, read_weights
from rollmill.weights.files.companions import LARGEST_BYTES
from rollmill.weights.files.safetensors import StoredTensor

CONFIG = "config.json"
_LARGEST_JSON = 16 << 20  # bytes; the list of what is not quantised may take a megabyte
_JSON_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, FreeJson])
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


class Files(NamedTuple):
    directory: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    shards: list[Path]


def open_files(directory: Path) -> Files:
    """Raises WeightsError for a directory that is not a whole checkpoint."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="`rollmill model get` makes one")
    config = read_json(directory / CONFIG)
    return Files(directory, config, *read_weights(directory))


def read_json(path: Path) -> dict[str, Any]:
    """Raises WeightsError for anything but a JSON object of finite numbers."""
    try:
        return parse_json(read_bytes(path, _LARGEST_JSON), _JSON_OBJECT)
    except FileNotFoundError:
        raise WeightsError(
            f"{path.parent} has no {path.name}", hint="a checkpoint directory as transformers saves it has one"
        ) from None
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}", hint="copy or download it again") from None


def companions(directory: Path) -> list[Path]:
    """The files of a checkpoint besides its weights: configurations, tokenizer, licence."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="give the directory the model was loaded from")
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_SUFFIXES)
        and path.stat().st_size <= LARGEST_BYTES  # a larger file holds weights
    )
