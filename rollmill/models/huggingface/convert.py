"""Checkpoints of Hugging Face's layouts into our decoder, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.huggingface.config import Layout, read_layout
from rollmill.models.huggingface.files import (
    CONFIG,
    Files,
    companions,
    open_files,
    read_json,
)
from rollmill.models.huggingface.layouts import OUTER, NamedView, named_views
from rollmill.weights.files.directory import SHARD_BYTES, encode_json, write_directory
from rollmill.weights.files.safetensors import Entry, Stored

DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_QUANTISED = "F8_E4M3"
_SCALES = "_scale_inv"  # FP8 blocks are multiplied by these


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory whose names, shapes and dtypes have been checked; no weight has been read yet."""

    files: Files
    layout: Layout
    names: tuple[str, ...]  # of the tensors that are used
    dtype: torch.dtype  # the widest of them
    parameters: int
    active_parameters: int  # of these, how many one token meets


def open_checkpoint(directory: Path) -> HuggingFaceModel:
    """Check everything that can be known without reading weights."""
    files = open_files(directory)
    layout = read_layout(files.config, str(directory / CONFIG))
    _check_quantisation(files)
    _check_size(files, layout.model)
    expected = {each.name: tuple(each.view.shape) for each in named_views(layout, empty_state(layout.model))}
    _check_tensors(files, layout, expected)
    return HuggingFaceModel(files, layout, tuple(expected), _widest(files, expected), *parameter_counts(layout.model))


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """All of a model's parameters, and those one token meets: not the experts it is not sent to."""
    total = sum(tensor.numel() for tensor in empty_state(config).values())
    expert = 3 * config.width * config.expert_width
    return total, total - config.moe_layers * (config.experts - config.experts_per_token) * expert


def empty_state(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a decoder, without memory for what they hold."""
    with torch.device("meta"):
        return Decoder(config.model_copy(update={"max_context": 1})).state_dict()


def load_checkpoint(
    directory: Path, dtype: torch.dtype | None = None, max_context: int | None = None
) -> tuple[ModelConfig, Decoder]:
    """The model in `dtype`, or as it is stored. `max_context` shortens the table of angles, if that is less."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.layout.model
    if max_context is not None:
        config = config.model_copy(update={"max_context": min(max_context, config.max_context)})
    model = Decoder(config, dtype or checkpoint.dtype)
    load_tensors(model.state_dict(), checkpoint)
    return config, model


@torch.no_grad()
def load_tensors(state: Mapping[str, Tensor], checkpoint: HuggingFaceModel) -> None:
    """One tensor at a time: beside `state`, memory holds one tensor of the file."""
    for each in named_views(checkpoint.layout, state):
        tensor = read_tensor(checkpoint.files, each.name)
        each.view.copy_(tensor if each.order is None else tensor.index_select(0, each.order))


def save_checkpoint(
    model: Decoder, directory: Path, like: Path, config: dict[str, Any] | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `model` as a checkpoint directory. config.json, tokenizer and all else come from the directory `like`,
    verbatim; a `config` given replaces config.json."""
    tree = read_json(like / CONFIG) if config is None else config
    kept = {path.name: path.read_bytes() for path in companions(like)}
    layout = read_layout(tree, str(like / CONFIG))
    if layout.model.model_copy(update={"max_context": model.config.max_context}) != model.config:
        raise WeightsError(
            f"the model is not of the shape that {like / CONFIG} describes",
            hint="save it beside the config.json it was loaded with",
        )
    saved = saved_config(tree, model.embedding.dtype, layout)
    if config is not None or saved != tree:
        kept[CONFIG] = encode_json(saved)
    entries = [_entry(each) for each in named_views(layout, model.state_dict())]
    write_directory(directory, entries, kept, shard_bytes=shard_bytes)


def saved_config(tree: Mapping[str, Any], dtype: torch.dtype, layout: Layout) -> dict[str, Any]:
    """config.json, without what the saved files no longer are: quantised, of another dtype, with unused layers."""
    saved = {key: value for key, value in tree.items() if key != "quantization_config"}
    name = str(dtype).removeprefix("torch.")
    if saved.get("dtype", saved.get("torch_dtype")) != name:
        saved["dtype" if "dtype" in saved else "torch_dtype"] = name
    if layout.unused_layers:
        saved["num_nextn_predict_layers"] = 0
    return saved


def tensor_entry(name: str, dtype: torch.dtype, shape: Sequence[int], produce: Callable[[], Tensor]) -> Entry:
    """A tensor to be written, rounded to `dtype`, that exists only while it is being written."""

    def parts() -> list[memoryview]:
        return [produce().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().data]

    return Entry(name, _NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize, dtype.itemsize, parts)


def _entry(each: NamedView) -> Entry:
    view = each.view.detach()

    def produce() -> Tensor:
        return view if each.order is None else view.index_select(0, each.order.argsort())

    return tensor_entry(each.name, view.dtype, view.shape, produce)


def read_tensor(files: Files, name: str) -> Tensor:
    """A copy in memory; block-wise FP8 comes back as the FP32 numbers it stands for."""
    stored = files.tensors[name]
    if stored.dtype != _QUANTISED:
        return _tensor(stored, DTYPES[stored.dtype])
    blocks = files.config["quantization_config"]["weight_block_size"]
    scales = _tensor(files.tensors[name + _SCALES], torch.float32)
    for dimension, (block, size) in enumerate(zip(blocks, stored.shape, strict=True)):
        scales = scales.repeat_interleave(block, dimension).narrow(dimension, 0, size)
    return _tensor(stored, torch.float8_e4m3fn).float().mul_(scales)


def _tensor(stored: Stored, dtype: torch.dtype) -> Tensor:
    # copied: torch wants writable memory even to read from it, and the file is mapped read-only
    return torch.from_numpy(stored.data.copy()).view(dtype).view(stored.shape)


def _widest(files: Files, names: Iterable[str]) -> torch.dtype:
    """Of the parameters; the gate's bias is FP32 whatever they are."""
    parameters = [files.tensors[name].dtype for name in names if not name.endswith("e_score_correction_bias")]
    present = {DTYPES[dtype] for dtype in parameters if dtype != _QUANTISED}
    if len(present) == 1:
        return present.pop()
    return torch.float32 if present else torch.bfloat16  # bf16 and fp16 together fit into nothing narrower


def _check_quantisation(files: Files) -> None:
    how = files.config.get("quantization_config")
    if how is None:
        return
    blocks = how.get("weight_block_size") if isinstance(how, dict) else None
    blockwise = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not blockwise:
        method = how.get("quant_method") if isinstance(how, dict) else how
        raise WeightsError(
            f"{files.directory} is quantised ({method!r}); only block-wise fp8 can be turned back into numbers",
            hint="take the unquantised checkpoint of the same model",
        )


def _check_size(files: Files, model: ModelConfig) -> None:
    """Before anything is built by the numbers of config.json, the files must bear them out roughly."""
    last = f"model.layers.{model.layers - 1}.input_layernorm.weight"
    if last not in files.tensors:
        raise _wrong(files, f"config.json says {model.layers} layers, and there is no {last}")
    if model.moe_layers * model.experts > len(files.tensors):
        experts = f"{model.experts} experts in {model.moe_layers} layers"
        raise _wrong(files, f"config.json says {experts}, and there are {len(files.tensors)} tensors in all")


def _check_tensors(files: Files, layout: Layout, expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - files.tensors.keys())
    if missing:
        raise _wrong(files, f"{len(missing)} tensors are missing, such as {missing[0]}")
    for name, shape in expected.items():
        stored = files.tensors[name]
        if stored.shape != shape:
            raise _wrong(files, f"{name} is {list(stored.shape)}, and {list(shape)} by config.json")
        if stored.dtype == _QUANTISED:
            _check_scales(files, name)
        elif stored.dtype not in DTYPES:
            raise _wrong(files, f"{name} is {stored.dtype}, not one of {', '.join(DTYPES)}")
    extra = [name for name in sorted(files.tensors.keys() - expected.keys()) if not _may_ignore(name, files, layout)]
    if extra:
        raise _wrong(files, f"{len(extra)} tensors have no place in {layout.architecture}, such as {extra[0]}")


def _check_scales(files: Files, name: str) -> None:
    scales, stored = files.tensors.get(name + _SCALES), files.tensors[name]
    blocks = (files.config.get("quantization_config") or {}).get("weight_block_size")
    if scales is None or blocks is None:
        raise _wrong(files, f"{name} is fp8, and its scales ({name}{_SCALES}) or quantization_config are missing")
    expected = tuple(-(-size // block) for size, block in zip(stored.shape, blocks, strict=False))
    if len(stored.shape) != 2 or scales.shape != expected or scales.dtype != "F32":
        raise _wrong(
            files, f"{name}{_SCALES} is {scales.dtype} {list(scales.shape)}, and F32 {list(expected)} by {name}"
        )


def _may_ignore(name: str, files: Files, layout: Layout) -> bool:
    """Scales beside their weight, constants, layers that are not used, and a head that repeats a tied embedding."""
    if name.endswith(_SCALES):
        return files.tensors.get(name.removesuffix(_SCALES), files.tensors[name]).dtype == _QUANTISED
    if name.endswith("rotary_emb.inv_freq"):
        return True
    if name == OUTER["head"]:
        embedding = files.tensors[OUTER["embedding"]]
        return files.tensors[name].shape == embedding.shape and bool((files.tensors[name].data == embedding.data).all())
    first = layout.model.layers
    return any(name.startswith(f"model.layers.{first + more}.") for more in range(layout.unused_layers))


def _wrong(files: Files, what: str) -> WeightsError:
    return WeightsError(
        f"{files.directory} is not what its config.json describes: {what}",
        hint="config.json and weights must be of the same checkpoint; download or copy it again",
    )
