"""What lies in a checkpoint directory. Tensors are mapped, not read; everything a file claims is checked first.

    config.json                            the architecture, see `config`
    model.safetensors                      all tensors, or
    model-00001-of-00002.safetensors …     in several files, with
    model.safetensors.index.json           which tensor is in which
    tokenizer.json, …                      everything else is kept as it is

Pickled weights (.bin, .pt) are not read: they run whatever their author put into them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollmill.errors import WeightsError
from rollmill.weights.files.safetensors import Entry, Stored, read_file, write_entries

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")
LARGEST_COMPANION = 1 << 28  # tokenizers reach some tens of MB; what is larger is weights by another name


class Files(NamedTuple):
    directory: Path
    config: dict[str, Any]
    tensors: Mapping[str, Stored]
    shards: list[Path]


def open_files(directory: Path) -> Files:
    """WeightsError for a directory that is not a whole checkpoint."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="`rollmill model get` makes one")
    config = read_json(directory / CONFIG)
    if (directory / INDEX).exists():
        tensors, shards = _sharded(directory)
    elif (directory / SINGLE).exists():
        tensors, shards = read_file(directory / SINGLE), [directory / SINGLE]
    else:
        raise _no_weights(directory)
    return Files(directory, config, tensors, shards)


def read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WeightsError(
            f"{path.parent} has no {path.name}", hint="a checkpoint directory as transformers saves it has one"
        ) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON: {error}", hint="copy or download it again") from None
    if not isinstance(tree, dict):
        raise WeightsError(f"{path} is not a JSON object", hint="copy or download it again")
    return tree


def encode_json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()


def _sharded(directory: Path) -> tuple[dict[str, Stored], list[Path]]:
    index = directory / INDEX
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise WeightsError(f"{index} has no weight_map of names and files", hint="copy or download it again")
    names = sorted(set(placed.values()))
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise WeightsError(
            f"{index} names {outside[0]!r}, which is no safetensors file beside it",
            hint="an index may only name files of its own directory",
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise WeightsError(
            f"{directory} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}",
            hint="download or copy them again",
        )
    tensors: dict[str, Stored] = {}
    for name in names:
        for tensor, stored in read_file(directory / name).items():
            if placed.get(tensor) != name:
                raise WeightsError(f"{directory / name} holds {tensor!r}, which {INDEX} places elsewhere or nowhere")
            tensors[tensor] = stored
    absent = sorted(placed.keys() - tensors.keys())
    if absent:
        raise WeightsError(
            f"{directory / placed[absent[0]]} does not hold {absent[0]!r}, which {INDEX} places there",
            hint="index and shards are of different checkpoints: download or copy them again",
        )
    return tensors, [directory / name for name in names]


def _no_weights(directory: Path) -> WeightsError:
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return WeightsError(
            f"{directory} has pickled weights only ({pickled[0]}), which can run code when they are read",
            hint="convert them where you trust them: transformers' save_pretrained writes safetensors",
        )
    return WeightsError(
        f"{directory} has neither {SINGLE} nor {INDEX}", hint="give a directory as transformers' save_pretrained makes"
    )


def companions(directory: Path) -> list[Path]:
    """What belongs to a checkpoint beside its weights: configurations, tokenizer, licence."""
    if not directory.is_dir():
        raise WeightsError(f"{directory} is not a directory", hint="give the directory the model was loaded from")
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_SUFFIXES)
        and path.stat().st_size <= LARGEST_COMPANION
    )


def write_checkpoint(directory: Path, entries: Sequence[Entry], files: Mapping[str, bytes], shard_bytes: int) -> None:
    """All of a checkpoint, the same bytes each time. The directory appears whole or not at all."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise WeightsError(f"{directory} is already there", hint="give another place, or remove it first")
    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        for name, content in files.items():
            (draft / name).write_bytes(content)
        _write_weights(draft, _shards(entries, shard_bytes))
        os.replace(draft, directory)
    except OSError as error:
        raise WeightsError(f"{directory} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _shards(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    room = limit
    for entry in entries:
        if shards[-1] and entry.size > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.size
    return shards


def _write_weights(directory: Path, shards: Sequence[Sequence[Entry]]) -> None:
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0])
        return
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard)
        placed.update((entry.name, name) for entry in shard)
    total = sum(entry.size for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (directory / INDEX).write_bytes(encode_json(index))


def _write_file(path: Path, entries: Sequence[Entry]) -> None:
    """One tensor after another: what is written costs the memory of one tensor."""
    with path.open("wb") as file:
        write_entries(file, entries)
