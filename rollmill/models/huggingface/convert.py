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
from rollmill.models.huggingface.config import Layout, read_layout, text_config
from rollmill.models.huggingface.files import CONFIG, Files, open_files
from rollmill.models.huggingface.layouts import OUTER, named_views
from rollmill.weights.files.safetensors import Entry, StoredTensor

DTYPES: Mapping[str, torch.dtype] = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_QUANTISED = "F8_E4M3"
_SCALES = "_scale_inv"  # FP8 blocks are multiplied by these
# INT4 of compressed-tensors: eight codes in an int32, one scale for `group_size` columns, rows and columns
_INT4 = ("_packed", "_scale", "_shape")


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
    _check_size(files, layout)
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
    """config.json for the saved files: the text model, not quantised, with their dtype, and without unused layers."""
    saved = {key: value for key, value in text_config(tree).items() if key != "quantization_config"}
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
    """A copy of a tensor in memory. Block-wise FP8 is converted to FP32, INT4 to the dtype of its scales."""
    if name not in files.tensors:
        return _from_int4(files, name)
    stored = files.tensors[name]
    if stored.dtype != _QUANTISED:
        return _tensor(stored, DTYPES[stored.dtype])
    blocks = _quantisation(files)["weight_block_size"]
    scales = _tensor(files.tensors[name + _SCALES], torch.float32)
    for dimension, (block, size) in enumerate(zip(blocks, stored.shape, strict=True)):
        scales = scales.repeat_interleave(block, dimension).narrow(dimension, 0, size)
    return _tensor(stored, torch.float8_e4m3fn).float().mul_(scales)


def _from_int4(files: Files, name: str) -> Tensor:
    packed, scale = (files.tensors[name + suffix] for suffix in _INT4[:2])
    rows = packed.shape[0]
    bytes_RB = torch.from_numpy(packed.data.copy()).view(torch.uint8).view(rows, -1)  # lower half first
    codes_RC = torch.stack((bytes_RB & 15, bytes_RB >> 4), -1).flatten(1)
    scales_RG = _tensor(scale, DTYPES[scale.dtype]).float()
    columns = scales_RG.shape[1] * _group_size(files)
    groups_RGC = codes_RC[:, :columns].float().sub_(8).unflatten(1, (scales_RG.shape[1], -1))
    return groups_RGC.mul_(scales_RG.unsqueeze(-1)).flatten(1).to(DTYPES[scale.dtype])  # as its owners compute


def _quantisation(files: Files) -> dict[str, Any]:
    how = text_config(files.config).get("quantization_config")
    return how if isinstance(how, dict) else {}


def _group_size(files: Files) -> int:
    """Columns that share a scale, if the checkpoint is INT4 as we read it; else 0."""
    groups = _quantisation(files).get("config_groups")
    kinds = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else []
    if len(kinds) != 1 or not isinstance(kinds[0], dict) or _quantisation(files).get("format") != "pack-quantized":
        return 0
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    size = kinds[0].get("group_size")
    return size if type(size) is int and size > 0 and {key: kinds[0].get(key) for key in known} == known else 0


def _tensor(stored: StoredTensor, dtype: torch.dtype) -> Tensor:
    # copied: torch needs writable memory even to read, and the file is mapped read-only
    return torch.from_numpy(stored.data.copy()).view(dtype).view(stored.shape)


def _widest(files: Files, names: Iterable[str]) -> torch.dtype:
    """The widest dtype of the parameters. The gate's bias does not count: it is always FP32."""
    used = [name for name in names if not name.endswith("e_score_correction_bias")]
    parameters = [(files.tensors.get(name) or files.tensors[f"{name}_scale"]).dtype for name in used]
    present = {DTYPES[dtype] for dtype in parameters if dtype != _QUANTISED}
    if len(present) == 1:
        return present.pop()
    return torch.float32 if present else torch.bfloat16  # no narrower type holds both bf16 and fp16


def _check_quantisation(files: Files) -> None:
    how = text_config(files.config).get("quantization_config")
    if how is None or _group_size(files):
        return
    blocks = how.get("weight_block_size") if isinstance(how, dict) else None
    blockwise = isinstance(blocks, list) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks)
    if not isinstance(how, dict) or how.get("quant_method") != "fp8" or not blockwise:
        method = how.get("quant_method") if isinstance(how, dict) else how
        raise WeightsError(
            f"{files.directory} is quantised ({method!r}); what can be read is block-wise fp8, and compressed-tensors' "
            "symmetric INT4 in groups (pack-quantized)",
            hint="take the unquantised checkpoint of the same model",
        )


def _check_size(files: Files, layout: Layout) -> None:
    """Compares config.json with the files, before anything is built with its numbers."""
    model = layout.model
    last = f"{layout.prefix}model.layers.{model.layers - 1}.input_layernorm.weight"
    if last not in files.tensors:
        raise _wrong(files, f"config.json says {model.layers} layers, but there is no {last}")
    if model.moe_layers * model.experts > len(files.tensors):
        experts = f"{model.experts} experts in {model.moe_layers} layers"
        raise _wrong(files, f"config.json says {experts}, but there are {len(files.tensors)} tensors in all")


def _check_tensors(files: Files, layout: Layout, expected: Mapping[str, tuple[int, ...]]) -> None:
    int4 = {name for name in expected if f"{name}_packed" in files.tensors and name not in files.tensors}
    missing = sorted(expected.keys() - files.tensors.keys() - int4)
    if missing:
        raise _wrong(files, f"{len(missing)} tensors are missing, such as {missing[0]}")
    for name in int4:
        _check_int4(files, name, expected[name])
    for name, shape in expected.items():
        if name in int4:
            continue
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
    blocks = _quantisation(files).get("weight_block_size")
    if scales is None or blocks is None:
        raise _wrong(files, f"{name} is fp8, but its scales ({name}{_SCALES}) or quantization_config are missing")
    expected = tuple(-(-size // block) for size, block in zip(stored.shape, blocks, strict=False))
    if len(stored.shape) != 2 or scales.shape != expected or scales.dtype != "F32":
        raise _wrong(
            files, f"{name}{_SCALES} is {scales.dtype} {list(scales.shape)}, but F32 {list(expected)} by {name}"
        )


def _check_int4(files: Files, name: str, shape: tuple[int, ...]) -> None:
    group = _group_size(files)
    if not group or len(shape) != 2 or shape[1] % group:
        raise _wrong(files, f"{name} is packed, but quantization_config has no group size that fits {list(shape)}")
    sizes = (("I32",), (shape[0], -(-shape[1] // 8))), (tuple(DTYPES), (shape[0], shape[1] // group))
    for suffix, (dtypes, expected) in zip(_INT4, sizes, strict=False):
        stored = files.tensors.get(name + suffix)
        if stored is None or stored.dtype not in dtypes or stored.shape != expected:
            found = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise _wrong(files, f"{name}{suffix} is {found}, but {dtypes[0]} {list(expected)} by config.json")


def _may_ignore(name: str, files: Files, layout: Layout) -> bool:
    """Whether a tensor is not needed: scales of a weight, constants, unused layers, a head equal to a tied
    embedding."""
    if name.endswith(_SCALES):
        return files.tensors.get(name.removesuffix(_SCALES), files.tensors[name]).dtype == _QUANTISED
    if name.endswith(_INT4) and f"{name.rpartition('_')[0]}_packed" in files.tensors:
        return True
    if name.endswith("rotary_emb.inv_freq") or not name.startswith(layout.prefix):
        return True
    if name == layout.prefix + OUTER["head"]:
        embedding = files.tensors[layout.prefix + OUTER["embedding"]]
        return files.tensors[name].shape == embedding.shape and bool((files.tensors[name].data == embedding.data).all())
    first, layers = layout.model.layers, f"{layout.prefix}model.layers."
    return any(name.startswith(f"{layers}{first + more}.") for more in range(layout.unused_layers))


def _wrong(files: Files, what: str) -> WeightsError:
    return WeightsError(
        f"{files.directory} is not what its config.json describes: {what}",
        hint="config.json and weights must be of the same checkpoint; download or copy it again",
    )
