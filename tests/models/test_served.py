"""Checkpoint → served bytes → checkpoint: only what bf16 cannot hold is lost."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host
from rollmill.models.huggingface.convert import open_checkpoint, read_tensor
from rollmill.models.huggingface.served import checkpoint_tensors, served_companions, served_tensors
from rollmill.weights.format.tensors import HostTensor
from tests.models.checkpoints import LAYOUTS, make_checkpoint, our_logits, their_logits, tokens_of
from tests.processes import SERVER


def tensor_of(host: HostTensor) -> Tensor:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[host.dtype]
    return torch.from_numpy(host.data.copy()).view(dtype).view(host.shape)


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path, torch.bfloat16)
    checkpoint = open_checkpoint(tmp_path)
    with served_tensors(checkpoint) as served, checkpoint_tensors(checkpoint.layout, served) as back:
        assert back.keys() == set(checkpoint.names)
        for tensor, host in back.items():
            # never rounded by us, although transformers rounds it with everything else on request
            assert host.dtype == ("fp32" if tensor.endswith("e_score_correction_bias") else "bf16")
            assert torch.equal(tensor_of(host).float(), read_tensor(checkpoint.files, tensor).float()), tensor


@torch.no_grad()
def test_a_wider_checkpoint_is_rounded_and_this_is_reported(tmp_path: Path) -> None:
    theirs = make_checkpoint("llama", tmp_path, torch.float32)
    checkpoint = open_checkpoint(tmp_path)
    ours = Decoder(checkpoint.layout.model)
    with served_tensors(checkpoint) as tensors:
        assert {tensor.dtype for tensor in tensors.values()} == {"bf16"}
        load_host(ours, tensors)
    config = json.loads(served_companions(checkpoint)["config.json"])
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert config.keys() == checkpoint.files.config.keys()
    for parameter in theirs.parameters():
        parameter.copy_(parameter.bfloat16())
    torch.testing.assert_close(our_logits(ours, tokens_of()), their_logits(theirs, tokens_of()), atol=1e-4, rtol=1e-4)


def test_companions_are_kept_verbatim(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, torch.bfloat16)
    (tmp_path / "tokenizer.json").write_text('{"any": "thing"}')
    (tmp_path / "notes.txt").write_text("not of the model")
    kept = served_companions(open_checkpoint(tmp_path))
    assert kept["config.json"] == (tmp_path / "config.json").read_bytes()
    assert kept["tokenizer.json"] == b'{"any": "thing"}' and "notes.txt" not in kept


def _there_and_back_in_little_memory(directory: Path, room: int) -> None:
    checkpoint = open_checkpoint(directory)
    torch.set_num_threads(1)  # further threads would need stacks
    resource.setrlimit(resource.RLIMIT_DATA, (_own_memory() + room,) * 2)
    with served_tensors(checkpoint) as served, checkpoint_tensors(checkpoint.layout, served) as back:
        assert sum(tensor.data.size for tensor in back.values()) > 2 * room


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text().split("\n")
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


@pytest.mark.slow
def test_memory_never_holds_the_whole_model(tmp_path: Path) -> None:
    make_checkpoint("qwen3 moe", tmp_path, torch.bfloat16, hidden_size=256, moe_intermediate_size=512, vocab_size=9000)
    work = SERVER.Process(target=_there_and_back_in_little_memory, args=(tmp_path, 10 << 20))
    work.start()
    work.join()
    assert work.exitcode == 0
