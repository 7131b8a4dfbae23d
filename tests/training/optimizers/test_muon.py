import pytest
import torch

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.optimizers.muon import Part, matrix_parts, muon_step, orthogonalise

CONFIG = OptimizerConfig(kind="muon", lr=1e-2, weight_decay=0.1)


def mixture() -> Decoder:
    model = Decoder(ModelConfig(vocab_size=32, layers=2, width=16, head_dim=8, expert_width=8, dense_layers=1))
    model.initialise(0)
    return model


def set_gradients(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 8, 16)])
def test_singular_values_become_about_one_and_directions_stay(shape: tuple[int, ...]):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalise(matrix)
    inner = torch.diagonal(left.mT @ found @ right.mT, dim1=-2, dim2=-1)  # uᵀ·x·v of the same directions
    large = values > 0.05 * values.amax(-1, keepdim=True)
    assert inner[large].min() > 0.6 and inner[large].max() < 1.3
    torch.testing.assert_close(left @ torch.diag_embed(inner) @ right, found, atol=1e-4, rtol=0)


def test_a_step_by_hand():
    """For a diagonal matrix U and V are the identity: every entry moves by nearly lr · 0.2 · √2, whatever its size."""
    master, mean = torch.zeros(2, 2), torch.zeros(2, 2)
    gradient = torch.diag(torch.tensor([4.0, 1.0]))
    muon_step(master, mean, gradient, [Part(0, 0, 2)], lr=0.1, momentum=0.5, decay=0.0)
    torch.testing.assert_close(mean, gradient / 2)
    moved = -master.diagonal() / (0.1 * 0.2 * 2**0.5)
    assert moved.min() > 0.65 and moved.max() < 1.25
    assert master[0, 1] == master[1, 0] == 0


def test_experts_and_fused_parts_are_separate_matrices():
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 6, 8, generator=generator)
    stack[1] *= 100  # one expert; it must not affect the others, and neither half the other half
    stack[..., :4] *= 100
    parts = [Part(2, 0, 4), Part(2, 4, 4)]
    together = torch.zeros_like(stack)
    muon_step(together, torch.zeros_like(stack), stack, parts, lr=1.0, momentum=0.9, decay=0.0)
    for expert in range(3):
        for half in (slice(0, 4), slice(4, 8)):
            alone = torch.zeros(6, 4)
            piece = stack[expert, :, half].contiguous()
            muon_step(alone, torch.zeros(6, 4), piece, [Part(0, 0, 6)], lr=1.0, momentum=0.9, decay=0.0)
            torch.testing.assert_close(together[expert, :, half], alone, rtol=1e-3, atol=1e-4)


def test_which_parameters_it_moves():
    parts = matrix_parts(mixture())
    assert parts.keys() == {
        *(f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "output", "mlp.gate_up", "mlp.down"))
    }
    assert parts["layers.0.qkv"] == [Part(0, 0, 32), Part(0, 32, 16), Part(0, 48, 16)]
    assert parts["layers.0.mlp.gate_up"] == [Part(0, 0, 256), Part(0, 256, 256)]
    assert parts["layers.1.mlp.gate_up"] == [Part(2, 0, 8), Part(2, 8, 8)]


def test_the_rest_is_adamw():
    muon, adamw = mixture(), mixture()
    first = MasterOptimizer(muon, CONFIG, "fp32")
    second = MasterOptimizer(adamw, OptimizerConfig(lr=1e-2, weight_decay=0.1), "fp32")
    for seed in range(3):
        for model, optimizer in ((muon, first), (adamw, second)):
            set_gradients(model, seed)
            assert optimizer.update(1e-2).applied
    moved = matrix_parts(muon).keys()
    for name, parameter in muon.named_parameters():
        assert torch.equal(parameter, adamw.get_parameter(name)) == (name not in moved), name


def test_saved_state_continues_bit_for_bit():
    straight, resumed = mixture(), mixture()
    first = MasterOptimizer(straight, CONFIG, "bf16")
    set_gradients(straight, 0)
    first.update(1e-2)
    assert "square.layers.0.qkv" not in first.state() and "mean.layers.0.qkv" in first.state()
    second = MasterOptimizer(resumed, CONFIG, "bf16")
    second.load(first.state())
    for model, optimizer in ((straight, first), (resumed, second)):
        set_gradients(model, 9)
        optimizer.update(1e-2)
    assert all(torch.equal(parameter, resumed.get_parameter(name)) for name, parameter in straight.named_parameters())


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = mixture()
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    set_gradients(model, 0)
    model.layers[0].output.grad[0, 0] = torch.nan  # type: ignore[index, union-attr]
    assert not optimizer.update(1e-2).applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
