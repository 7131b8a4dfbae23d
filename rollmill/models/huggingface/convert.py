"""Checks Hugging Face checkpoints and loads their tensors into our decoder."""

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
from rollmill.models.huggingface.files import CONFIG, Files, open_files
from rollmill.models.huggingface.layouts import OUTER, named_views
from rollmill.weights.files.safetensors import Entry, StoredTensor

DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_QUANTISED = "F8_E4M3"
_SCALES = "_scale_inv"  # FP8 blocks are multiplied by these


@dataclass(frozen=True)
class HuggingFaceModel:
    """A directory whose names, shapes and dtypes have been checked. No weight has been read yet."""

    files: Files
    layout: Layout
    names: tuple[str, ...]  # the tensors that are used
    dtype: torch.dtype  # the widest of them
    parameters: int
    active_parameters: int  # the parameters that one token uses


def open_checkpoint(directory: Path) -> HuggingFaceModel:
    """Checks everything that can be checked without reading weights."""
    files = open_files(directory)
    layout = read_layout(files.config, str(directory / CONFIG))
    _check_quantisation(files)
    _check_size(files, layout.model)
    expected = {each.name: tuple(each.view.shape) for each in named_views(layout, empty_state(layout.model))}
    _check_tensors(files, layout, expected)
    return HuggingFaceModel(files, layout, tuple(expected), _widest(files, expected), *parameter_counts(layout.model))


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """The number of all parameters, and of those that one token uses: without the experts it is not sent to."""
    total = sum(tensor.numel() for tensor in empty_state(config).values())
    expert = 3 * config.width * config.expert_width
    return total, total - config.moe_layers * (config.experts - config.experts_per_token) * expert


def empty_state(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a decoder on the meta device, without memory."""
    with torch.device("meta"):
        return Decoder(config.model_copy(update={"max_context": 1})).state_dict()


@torch.no_grad()
def load_tensors(state: Mapping[str, Tensor], checkpoint: HuggingFaceModel) -> None:
    """Loads one tensor at a time, so memory holds `state` and one tensor of the file."""
    for each in named_views(checkpoint.layout, state):
        tensor = read_tensor(checkpoint.files, each.name)
        each.view.copy_(tensor if each.order is None else tensor.index_select(0, each.order))


def saved_config(tree: Mapping[str, Any], dtype: torch.dtype, layout: Layout) -> dict[str, Any]:
    """config.json for the saved files: not quantised, with their dtype, and without unused layers."""
    saved = {key: value for key, value in tree.items() if key != "quantization_config"}
    name = str(dtype).removeprefix("torch.")
    if saved.get("dtype", saved.get("torch_dtype")) != name:
        saved["dtype" if "dtype" in saved else "torch_dtype"] = name
    if layout.unused_layers:
        saved["num_nextn_predict_layers"] = 0
    return saved


def tensor_entry(name: str, dtype: torch.dtype, shape: Sequence[int], produce: Callable[[], Tensor]) -> Entry:
    """A tensor to write, rounded to `dtype`. It is produced only while it is written."""

    def parts() -> list[memoryview]:
        return [produce().to("cpu", dtype).contiguous().view(-1).view(torch.uint8).numpy().data]

    return Entry(name, _NAMES[dtype], tuple(shape), math.prod(shape) * dtype.itemsize, dtype.itemsize, parts)


def read_tensor(files: Files, name: str) -> Tensor:
    """A copy of a tensor in memory. Block-wise FP8 is converted to FP32."""
    stored = files.tensors[name]
    if stored.dtype != _QUANTISED:
        return _tensor(stored, DTYPES[stored.dtype])
    blocks = files.config["quantization_config"]["weight_block_size"]
    scales = _tensor(files.tensors[name + _SCALES], torch.float32)
    for dimension, (block, size) in enumerate(zip(blocks, stored.shape, strict=True)):
        scales = scales.repeat_interleave(block, dimension).narrow(dimension, 0, size)
    return _tensor(stored, torch.float8_e4m3fn).float().mul_(scales)


def _tensor(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    # copied: torch needs writable memory even to read, and the file is mapped read-only
    return torch.from_numpy(stored.data.copy()).view(dtype).view(stored.shape)


def _widest(files: Files, names: Iterable[str]) -> torch.dtype:
    """The widest dtype of the parameters. The gate's bias does not count: it is always FP32."""
    parameters = [files.tensors[name].dtype for name in names if not name.endswith("e_score_correction_bias")]
    present = {DTYPES[dtype] for dtype in parameters if dtype != _QUANTISED}
    if len(present) == 1:
        return present.pop()
    return torch.float32 if present else torch.bfloat16  # no narrower type holds both bf16 and fp16


def _check_quantisation(files: Files) -> None:
    how = files.config.get("quantization_config")
    if how is None:
        return
    blocks = how.get("weight_block_size") if isinstance(how, dict) else None
    blockwise = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not blockwise:
        method = how.get("quant_method") if isinstance(how, dict) else how
        raise WeightsError(
            f"{files.directory} is quantised ({method!r}); only block-wise fp8 can be read",
            hint="take the unquantised checkpoint of the same model",
        )


def _check_size(files: Files, model: ModelConfig) -> None:
    """Compares config.json with the files, before anything is built with its numbers."""
    last = f"model.layers.{model.layers - 1}.input_layernorm.weight"
    if last not in files.tensors:
        raise _wrong(files, f"config.json says {model.layers} layers, but there is no {last}")
    if model.moe_layers * model.experts > len(files.tensors):
        experts = f"{model.experts} experts in {model.moe_layers} layers"
        raise _wrong(files, f"config.json says {experts}, but there are {len(files.tensors)} tensors in all")


def _check_tensors(files: Files, layout: Layout, expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - files.tensors.keys())
    if missing:
        raise _wrong(files, f"{len(missing)} tensors are missing, such as {missing[0]}")
    for name, shape in expected.items():
        stored = files.tensors[name]
        if stored.shape != shape:
            raise _wrong(files, f"{name} has shape {list(stored.shape)}, but {list(shape)} by config.json")
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
        raise _wrong(files, f"{name} is fp8, but its scales ({name}{_SCALES}) or quantization_config are missing")
    expected = tuple(-(-size // block) for size, block in zip(stored.shape, blocks, strict=False))
    if len(stored.shape) != 2 or scales.shape != expected or scales.dtype != "F32":
        raise _wrong(
            files, f"{name}{_SCALES} is {scales.dtype} {list(scales.shape)}, but F32 {list(expected)} by {name}"
        )


def _may_ignore(name: str, files: Files, layout: Layout) -> bool:
    """Whether a tensor is not needed: scales of a weight, constants, unused layers, a head equal to a tied
    embedding."""
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
