"""Which tokens are whose, and attention over slices of sequences."""

import numpy as np
import pytest
import torch

from rollmill.models.attention import PackedAttention
from rollmill.training.parallel.context_parallel import SliceAttention
from rollmill.training.parallel.token_split import SequenceSlice, split

LENGTHS = [13, 9, 8, 5, 3, 1]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize(("data", "context"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (8, 1)])
def test_each_token_and_target_once(data: int, context: int) -> None:
    rows_M = np.array([0, 5, 12, 13, 20, 33, 38])
    cut = split(LENGTHS, rows_M, data, context)
    assert len(cut.slices) == len(cut.tokens) == len(cut.rows) == data * context
    assert sorted(np.concatenate(cut.tokens)) == list(range(sum(LENGTHS)))
    assert sorted(np.concatenate(cut.rows)) == list(range(len(rows_M)))
    for tokens, rows in zip(cut.tokens, cut.rows, strict=True):
        assert set(rows_M[rows]) <= set(tokens)
    for group in range(data):
        firsts = {each.first for own in cut.slices[group * context : (group + 1) * context] for each in own}
        others = {each.first for rank, own in enumerate(cut.slices) if rank // context != group for each in own}
        assert not firsts & others, "a sequence is of one data group"


def test_a_long_sequence_is_cut_so_that_all_have_as_much_to_do() -> None:
    cut = split([800], np.array([7]), 1, 4)
    assert cut.slices[1] == [SequenceSlice(0, 100, 200), SequenceSlice(0, 600, 700)]
    keys = [sum(stop * (stop + 1) - start * (start + 1) for _, start, stop in own) // 2 for own in cut.slices]
    assert max(keys) < 1.01 * min(keys)
    assert [len(rows) for rows in cut.rows] == [1, 0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 2, 16), (2, 2, 8)])
def test_attention_in_slices_is_attention(heads: int, kv_heads: int, value_dim: int, device: str) -> None:
    """All ranks' slices one after the other, with all keys at hand, give what the whole gives, gradients too."""
    tokens, place = sum(LENGTHS), torch.device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(3)
    shapes = ((tokens, heads, 16), (tokens, kv_heads, 16), (tokens, kv_heads, value_dim))
    q, k, v = (torch.randn(shape, generator=generator).to(place, dtype).requires_grad_() for shape in shapes)
    slope = torch.randn(tokens, heads * value_dim, generator=generator).to(place, dtype)

    def gradients(out: torch.Tensor) -> list[torch.Tensor]:
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), slope)]

    expected = gradients(PackedAttention(LENGTHS, place)(0, q, k, v))
    cut = split(LENGTHS, np.array([0]), 2, 2)
    slices = [each for own in cut.slices for each in own]
    attend = SliceAttention([stop - start for _, start, stop in slices], [each.stop for each in slices], place)
    keys = torch.cat([torch.arange(each.first, each.first + each.stop) for each in slices]).to(place)
    order = torch.from_numpy(np.concatenate(cut.tokens)).to(place)
    out = attend(q[order], k[keys], v[keys])
    found = gradients(torch.empty_like(out).index_copy(0, order, out))
    for ours, theirs in zip(found, expected, strict=True):
        tolerance = 2e-5 if device == "cpu" else 3e-2
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
