"""The default number of tokens per micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from rollmill.models.attention import packed_positions
from rollmill.models.config import LatentAttention, ModelConfig
from rollmill.models.device import decoder_on
from rollmill.models.kernels.attention.varlen import VarlenAttention
from rollmill.models.kernels.call import call
from rollmill.models.packed_attention import packed_attention
from rollmill.training.config import TrainingConfig
from rollmill.training.memory_estimate import fitted, fitting_tokens, kept_bytes, recomputes_mlp
from tests.kernels import DEVICE, INTERPRETED, cuda

GIB = 1 << 30
LAYERS = 2 if INTERPRETED else 3  # the interpreter takes milliseconds per token and layer
DENSE = ModelConfig(
    vocab_size=512,
    layers=LAYERS,
    width=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    mlp_width=2048,
    experts=0,
    max_context=4096,
)
MODELS = {
    "dense": DENSE,
    "mixture": DENSE.model_copy(
        update={"experts": 16, "experts_per_token": 4, "expert_width": 256, "shared_experts": 1, "dense_layers": 1}
    ),
    "latent": DENSE.model_copy(
        update={
            "kv_heads": 8,
            "latent": LatentAttention(q_rank=128, kv_rank=64, plain_dim=32, rope_dim=32, value_dim=32),
        }
    ),
}
# a mixture also keeps a little that does not grow with the tokens
TOKENS = {"dense": 8, "mixture": 24, "latent": 8} if INTERPRETED else dict.fromkeys(MODELS, 64)
LARGE = ModelConfig(
    vocab_size=128256, layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, mlp_width=28672, experts=0
)


def test_a_configured_size_stays_and_a_cpu_has_its_default():
    cpu = torch.device("cpu")
    given = TrainingConfig(tokens_per_microbatch=77)
    assert fitted(given, DENSE, cpu).tokens_per_microbatch == 77
    assert fitted(TrainingConfig(), DENSE, cpu).tokens_per_pass == 8192
    assert fitted(TrainingConfig(ranks=2), DENSE, cpu).tokens_per_pass == 16384


def test_a_gpu_uses_half_of_its_memory():
    assert fitting_tokens(TrainingConfig(), DENSE, 80 * GIB) == 32768
    remade = TrainingConfig(ranks=64, recompute_mlp=True)
    little = [fitting_tokens(remade, LARGE, size * GIB) for size in (40, 80, 140)]
    assert little == sorted(little) and little[0] == 1024 and 2048 < little[-1] < 32768
    assert all(each % 1024 == 0 for each in little)
    kept = TrainingConfig(ranks=64, recompute_mlp=False)
    assert fitting_tokens(kept, LARGE, 140 * GIB) < little[-1], "memory that is kept leaves room for fewer"


def test_mlps_are_kept_where_they_fit():
    assert not recomputes_mlp(TrainingConfig(), DENSE, 80 * GIB)
    assert recomputes_mlp(TrainingConfig(), DENSE, 5 * GIB // 2), "8192 tokens with their MLPs do not fit"
    assert recomputes_mlp(TrainingConfig(recompute_mlp=True), DENSE, 80 * GIB), "a setting counts"
    many = TrainingConfig(ranks=64, tokens_per_microbatch=1 << 20)
    assert recomputes_mlp(many, DENSE, 80 * GIB), "as many tokens as the setting says"
    assert fitted(TrainingConfig(), DENSE, torch.device("cpu")).recompute_mlp is False


variants = pytest.mark.parametrize(
    ("form", "recompute_mlp"),
    [("bf16", False), ("bf16", True), ("fp8", False), ("fp8", True), ("nvfp4", True)],
    ids=["kept", "remade", "fp8 kept", "fp8 remade", "nvfp4 remade"],
)


@cuda
@variants
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [[2048] * 4, [3000, 2048, 1000, 2144]], ids=["even", "ragged"])
def test_memory_per_token_is_as_estimated(name: str, lengths: list[int], form: str, recompute_mlp: bool):
    config, device = MODELS[name], torch.device("cuda")
    model = decoder_on(device, config, form)
    model.initialise(0)
    model.recompute_mlp = recompute_mlp

    def held() -> int:
        tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        attend = packed_attention(lengths, device, torch.bfloat16)
        positions = packed_positions(lengths).to(device)
        before = torch.cuda.memory_allocated()
        output = model(tokens, positions, attend)
        found = torch.cuda.memory_allocated() - before
        del output
        return found

    held()  # kernels and workspaces of the first call do not count
    assert held() / sum(lengths) == pytest.approx(kept_bytes(config, recompute_mlp), rel=0.3)


class Attended(Function):
    """Keeps what latent attention on CUDA keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        v_NKD = pad(v_NKD, (0, q_NHD.shape[2] - v_NKD.shape[2]))
        out = torch.zeros_like(q_NHD).contiguous()
        ctx.save_for_backward(q_NHD, k_NKD, v_NKD, out)
        return out


@pytest.mark.slow
@pytest.mark.kernels
@variants
@pytest.mark.parametrize("name", MODELS)
def test_saved_tensors_per_token_are_as_estimated(name: str, form: str, recompute_mlp: bool):
    """The same, by the storages saved for the backward pass."""
    config, count = MODELS[name], TOKENS[name]
    model = decoder_on(torch.device(DEVICE), config, form).to(torch.bfloat16)
    model.initialise(0)
    model.recompute_mlp = recompute_mlp
    tokens = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    positions = torch.arange(count, device=DEVICE)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers(), tokens, positions)}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def latent(layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        return call(Attended, q_NHD, k_NKD, v_NKD)[..., : v_NKD.shape[2]].flatten(1)

    attend = VarlenAttention([count], DEVICE) if config.latent is None else latent
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens, positions, attend)
    kept = sum(each.untyped_storage().nbytes() for place, each in saved.items() if place not in own)
    assert output.hidden.requires_grad
    assert kept / count == pytest.approx(kept_bytes(config, recompute_mlp), rel=0.3)
