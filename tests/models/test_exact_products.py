"""Exact products on the CPU: a row has the same bits in every batch and with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollmill.models.kernels.exact import Block, Calls, blocks, product
from rollmill.models.triton import has_triton

pytestmark = pytest.mark.skipif(has_triton(torch.device("cpu")), reason="exact products are BLAS's, not Triton's")
SIZES = (16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 80, 96, 112, 128, 256, 512)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("across", [True, False], ids=["transposed", "plain"])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 160), (1024, 1024), (2048, 576), (64, 5000)])
def test_a_row_has_the_same_bits_in_any_batch(inputs: int, outputs: int, across: bool, threads: None) -> None:
    generator = torch.Generator().manual_seed(7)
    x, weight = torch.randn(530, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator).t()
    weight = weight if across else weight.contiguous()
    torch.set_num_threads(1)
    expected = product(x, weight)
    torch.testing.assert_close(expected, x @ weight, atol=1e-3, rtol=1e-4)
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (1, 3, 15, 16, 37, 100, 530):
            assert torch.equal(product(x[-rows:], weight), expected[-rows:]), (count, rows)


def test_few_rows_are_multiplied_by_one_thread_if_several_need_many_rows() -> None:
    calls = Calls(SIZES, (512,), 2)
    assert list(blocks(4, calls)) == [Block(0, 16, 1)]
    assert list(blocks(37, calls)) == [Block(0, 40, 1)]
    assert list(blocks(400, calls)) == [Block(0, 512, 2)]
    assert list(blocks(700, calls)) == [Block(0, 512, 2), Block(512, 128, 1), Block(640, 60, 1)]
    assert list(blocks(37, Calls(SIZES, SIZES, 2))) == [Block(0, 40, 2)]
    assert list(blocks(2, Calls((1,), (), 1))) == [Block(0, 1, 1), Block(1, 1, 1)]
