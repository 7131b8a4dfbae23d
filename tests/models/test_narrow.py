"""Products of one to four rows with what is joined to them, compared with torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from tests.kernels import DEVICE

CASES = [(1, 70, 12), (3, 2100, 20), (4, 64, 1030)]  # rows, inputs, outputs: also more columns than are read at once


@pytest.mark.kernels
@pytest.mark.parametrize(("rows", "inputs", "outputs"), CASES)
def test_products_agree_with_torch(rows: int, inputs: int, outputs: int) -> None:
    from rollmill.models.kernels.small_batch_triton import multiply

    random = torch.Generator().manual_seed(0)
    x, weight, gate_up, norm, bias, skip = (
        torch.randn(shape, generator=random).to(DEVICE)
        for shape in ((rows, inputs), (outputs, inputs), (2 * outputs, inputs), (inputs,), (outputs,), (rows, outputs))
    )
    normal = rms_norm(x, (inputs,), norm, 1e-5)
    close = {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(
        multiply(x, weight, norm_I=norm, eps=1e-5, bias_O=bias), normal @ weight.t() + bias, **close
    )
    torch.testing.assert_close(multiply(x, weight, skip_BO=skip), x @ weight.t() + skip, **close)
    gate, up = (normal @ gate_up.t()).split(outputs, 1)
    torch.testing.assert_close(
        multiply(x, gate_up, norm_I=norm, eps=1e-5, gated=True), silu(gate) * up, rtol=1e-4, atol=1e-2
    )
