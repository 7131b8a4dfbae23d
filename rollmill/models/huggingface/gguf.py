"""Converts a GGUF file (llama.cpp) of a Llama-type model to a Hugging Face checkpoint directory.

GGUF differs in three ways. Tensors may be quantised: they are dequantised exactly, then rounded to `dtype`. The rows of
q and k are stored for rotation in pairs (0, 1), (2, 3) …, in Hugging Face for pairs (i, i + D/2). The tokenizer is
metadata.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rollmill.errors import RollmillError, WeightsError
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.convert import DTYPES, open_checkpoint, tensor_entry
from rollmill.models.huggingface.files import CONFIG
from rollmill.models.huggingface.layouts import halves_order
from rollmill.weights.files.checkpoint_directory import encode_json, write_directory
from rollmill.weights.files.safetensors import Entry

NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # the type of control tokens
_PRE_TOKENIZERS = ("smollm",)
# Reads of one header: numbers, texts and their lengths. 260,000 tokens with their merges, types and scores need about
# 2 million, and each takes some 300 bytes of memory.
_MOST_READS = 3 << 20


class Conversion(NamedTuple):
    stored: dict[str, int]  # number of parameters by stored type: {"Q4_1": …}
    dtype: str


def convert_gguf(path: Path, directory: Path, dtype: str = "BF16") -> Conversion:
    """Writes `directory`, whole and checked, or not at all. `dtype` is a name of safetensors."""
    tensors, fields = _open(path)
    config = _config(fields, tensors, dtype)
    read_layout(config, str(path))  # checked before its numbers are used
    files = {CONFIG: config, **_tokenizer_files(fields)}
    entries = [_entry(fields, tensor, dtype) for tensor in tensors]
    encoded = {name: text.encode() if isinstance(text, str) else encode_json(text) for name, text in files.items()}
    write_directory(directory, entries, encoded)
    try:
        open_checkpoint(directory)
    except RollmillError:
        shutil.rmtree(directory)
        raise
    stored: Counter[str] = Counter()
    for tensor in tensors:
        stored[tensor.tensor_type.name] += int(tensor.n_elements)
    return Conversion(dict(stored.most_common()), dtype)


def _open(path: Path) -> tuple[list[Any], _Fields]:
    try:
        reader = _reader(path)
        return reader.tensors, _Fields(path, {name: field.contents() for name, field in reader.fields.items()})
    except ImportError:
        raise WeightsError("reading GGUF needs the package gguf", hint="`pip install 'rollmill[gguf]'`") from None
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist") from None
    except (ValueError, LookupError, TypeError, OSError, ArithmeticError, MemoryError, RecursionError) as error:
        raise WeightsError(f"{path} is not a whole GGUF file: {error}", hint="copy or download it again") from None


def _reader(path: Path) -> Any:
    import gguf

    class BoundedReader(gguf.GGUFReader):
        """All it reads goes through `_get`. Without bounds, an array that claims 2^40 elements fills the memory."""

        data: Any
        _reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.data = cast(Any, np.asarray(self.data))  # to slice the subclass memmap takes ten times as long
            self._reads += 1
            if self._reads > _MOST_READS:
                raise ValueError(f"its header has more than {_MOST_READS} parts")
            if offset + int(count) * np.dtype(dtype).itemsize > self.data.size:
                raise ValueError("it is cut, or claims more than it holds")
            return super()._get(offset, dtype, count, override_order)

    return BoundedReader(path)


class _Fields:
    """Typed access to the metadata of a file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise WeightsError(f"{self.path}: {key} is {value!r}, not {kind.__name__}", hint="is it a language model?")
        return value


def _config(fields: _Fields, tensors: Any, dtype: str) -> dict[str, Any]:
    if fields.get("general.architecture", str) != "llama":
        raise WeightsError(
            f"{fields.path} is of architecture {fields.get('general.architecture', str)!r}",
            hint="only GGUF files of Llama-type models are converted; take the safetensors checkpoint of this one",
        )
    heads, width = fields.get("llama.attention.head_count", int), fields.get("llama.embedding_length", int)
    # stored as FP32; written as the short decimal it stands for
    eps = float(f"{fields.get('llama.attention.layer_norm_rms_epsilon', float):.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", list)),
        "hidden_size": width,
        "intermediate_size": fields.get("llama.feed_forward_length", int),
        "num_hidden_layers": fields.get("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", int, heads),
        "head_dim": fields.get("llama.rope.dimension_count", int, width // max(heads, 1)),
        "hidden_act": "silu",
        "max_position_embeddings": fields.get("llama.context_length", int),
        "rms_norm_eps": eps,
        "rope_theta": fields.get("llama.rope.freq_base", float, 10000.0),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in tensors),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _entry(fields: _Fields, tensor: Any, dtype: str) -> Entry:
    name, order = _name(fields, tensor.name)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if order is not None and shape[0] != order.numel():
        raise WeightsError(f"{fields.path}: {tensor.name} has {shape[0]} rows, but {order.numel()} by its heads")

    def produce() -> torch.Tensor:
        values = _numbers(fields.path, tensor).view(shape)
        return values if order is None else values.index_select(0, order)

    return tensor_entry(name, DTYPES[dtype], shape, produce)


def _name(fields: _Fields, name: str) -> tuple[str, torch.Tensor | None]:
    """Returns the tensor's Hugging Face name, and for q and k the order of its rows there."""
    if name in NAMES:
        return NAMES[name], None
    _, number, part, *rest = [*name.split("."), "", "", ""][:4]
    if not name.startswith("blk.") or part not in LAYER_NAMES or rest != ["weight"]:
        raise WeightsError(
            f"{fields.path} has a tensor {name!r}, which has no place in a Llama-type checkpoint",
            hint="take the safetensors checkpoint of this model",
        )
    order = None
    if part in ("attn_q", "attn_k"):
        heads = fields.get("llama.attention.head_count", int)
        count = heads if part == "attn_q" else fields.get("llama.attention.head_count_kv", int, heads)
        width = fields.get("llama.embedding_length", int)
        order = halves_order(count, 0, fields.get("llama.rope.dimension_count", int, width // max(heads, 1)))
    return f"model.layers.{number}.{LAYER_NAMES[part]}.weight", order


def _numbers(path: Path, tensor: Any) -> torch.Tensor:
    """The tensor as FP32, dequantised exactly."""
    from gguf.quants import dequantize

    try:
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=True))
    except NotImplementedError:
        raise WeightsError(
            f"{path}: {tensor.name} is {tensor.tensor_type.name}, which the package gguf cannot dequantise",
            hint="install a newer gguf package, or take a file in another quantisation",
        ) from None


def _tokenizer_files(fields: _Fields) -> dict[str, Any]:
    """tokenizer.json and the files that transformers needs beside it."""
    model, pre = fields.get("tokenizer.ggml.model", str), fields.get("tokenizer.ggml.pre", str, "default")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise WeightsError(
            f"{fields.path} has a tokenizer {model!r} with pre-tokenizer {pre!r}, which cannot be rebuilt",
            hint=f"known is gpt2 with {', '.join(_PRE_TOKENIZERS)}; take the safetensors checkpoint of this model",
        )
    tokens, types = fields.get("tokenizer.ggml.tokens", list), fields.get("tokenizer.ggml.token_type", list)
    if len(tokens) != len(types) or not all(isinstance(token, str) for token in tokens):
        raise WeightsError(f"{fields.path} has {len(tokens)} tokens and {len(types)} types of tokens")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: fields.get(f"tokenizer.ggml.{name}_token_id", int) for short, name in names.items()}
    if not all(0 <= number < len(tokens) for number in ids.values()):
        raise WeightsError(f"{fields.path} names special tokens {ids} of only {len(tokens)}")
    return {
        "tokenizer.json": _build_tokenizer(fields, tokens, special),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields.get("llama.context_length", int),
            **{f"{short}_token": tokens[number] for short, number in ids.items()},
            "additional_special_tokens": special,
            "chat_template": fields.get("tokenizer.chat_template", str),
        },
        "generation_config.json": {f"{short}_token_id": ids[short] for short in ("bos", "eos", "pad")},
    }


def _build_tokenizer(fields: _Fields, tokens: list[str], special: list[str]) -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pairs = (str(merge).partition(" ") for merge in fields.get("tokenizer.ggml.merges", list))
    merges = [(left, right) for left, _, right in pairs]
    try:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(f"{fields.path}: its merges do not fit its vocabulary: {error}") from None
    # "smollm" means: every digit alone, then words as GPT-2 splits them, in bytes
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return str(tokenizer.to_str(pretty=True))
