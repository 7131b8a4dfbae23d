"""Masters of values that were rounded: they round to the same values, and small updates are not lost."""

import pytest
import torch

from rollmill.models.dither import dithered
from rollmill.models.host_tensors import round_into

NAME = "layers.0.mlp.down"


def rounded(values: torch.Tensor, form: str) -> torch.Tensor:
    found = torch.empty_like(values)
    round_into([(NAME, values, found)], form)
    return found


def served(form: str, shape: tuple[int, ...] = (200, 130)) -> torch.Tensor:
    """With zeros of both signs, powers of two, a block of tiny values and one without any."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    flat = values.view(-1)
    flat[::17], flat[5::17], flat[::19] = 0.0, -0.0, 2.0**-6
    values[..., 16:32] *= 1e-4
    values[..., :16] = 0.0
    return rounded(values, form)


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("shape", [(200, 130), (3, 48, 40), (300,)])
def test_moved_values_round_to_the_same_bits(form: str, shape: tuple[int, ...]) -> None:
    values = served(form, shape)
    moved = dithered(NAME, values, form, 3)
    assert torch.equal(rounded(moved, form).view(torch.int32), values.view(torch.int32))
    assert (moved[..., 32:] != values[..., 32:]).float().mean() > 0.8
    assert torch.equal(moved, dithered(NAME, values, form, 3)) and not torch.equal(
        moved, dithered(NAME, values, form, 4)
    )


@pytest.mark.parametrize(
    ("form", "update"), [("bf16", 4e-6), ("fp8", 1e-4), ("fp8", 3e-6), ("nvfp4", 2e-4), ("nvfp4", 3e-6)]
)
def test_an_update_far_below_the_quantum_moves_what_is_served_as_much_on_average(form: str, update: float) -> None:
    """3e-6 is what one cycle of a 7B model may move a weight by."""
    values = rounded(torch.randn((1024, 1024), generator=torch.Generator().manual_seed(1)) * 0.02, form)
    for change in (update, -update):
        lost = (rounded(values + change, form) - values).mean() / change
        moved = (rounded(dithered(NAME, values, form, 3) + change, form) - values).mean() / change
        assert lost < 0.3 and moved == pytest.approx(1.0, abs=0.2)


def test_a_shard_draws_what_the_whole_draws() -> None:
    values = served("bf16")
    whole, rows = dithered(NAME, values, "bf16", 3), dithered(NAME, values[70:90], "bf16", 3, 70 * 130)
    assert torch.equal(rows, whole[70:90])


def test_values_without_a_quantum_stay() -> None:
    values = torch.randn(8, 8)
    assert dithered(NAME, values, "fp32", 3) is values
