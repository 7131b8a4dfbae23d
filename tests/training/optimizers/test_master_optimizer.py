import math

import pytest
import torch
from torch import nn

from rollmill.errors import TrainingError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import device_digest
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.learning_rate import learning_rate
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from tests.kernels import DEVICE, devices, without_kernels

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.norm = nn.Parameter(torch.randn(3, generator=generator))


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_updates_are_those_of_torch_adamw():
    ours, theirs = Tiny(), Tiny()
    optimizer = MasterOptimizer(ours, CONFIG, "fp32")
    reference = torch.optim.AdamW(
        [{"params": [theirs.matrix], "weight_decay": 0.1}, {"params": [theirs.norm], "weight_decay": 0.0}],
        lr=1e-2,
        betas=CONFIG.betas,
        eps=CONFIG.eps,
    )
    for seed in range(5):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        assert optimizer.update(1e-2).applied
        reference.step()
    torch.testing.assert_close(ours.matrix, theirs.matrix)
    torch.testing.assert_close(ours.norm, theirs.norm)


def test_model_holds_served_values_and_small_updates_add_up_in_the_master():
    model = Tiny()
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    before = model.matrix.detach().clone()
    assert torch.equal(before, before.to(torch.bfloat16).float())
    for _ in range(40):  # each moves a weight by about 1e-5, far less than bf16 resolves
        model.matrix.grad = torch.ones(4, 3)
        model.norm.grad = torch.ones(3)
        optimizer.update(1e-5)
    assert torch.equal(model.matrix, model.matrix.to(torch.bfloat16).float())
    for _ in range(400):
        model.matrix.grad = torch.ones(4, 3)
        optimizer.update(1e-5)
    assert not torch.equal(model.matrix, before)


def test_long_gradients_are_scaled_down():
    model = Tiny()
    optimizer = MasterOptimizer(model, OptimizerConfig(max_grad_norm=0.5), "fp32")
    model.matrix.grad, model.norm.grad = torch.full((4, 3), 10.0), torch.zeros(3)
    gradient = model.matrix.grad
    assert optimizer.update(1e-3).grad_norm == pytest.approx(10 * math.sqrt(12))
    assert gradient.norm().item() == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float):
    model = Tiny()
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    set_gradients(model, 0)
    model.matrix.grad[0, 0] = bad  # type: ignore[index]
    update = optimizer.update(1e-2)
    assert not update.applied and update.figures()["grad_norm"] is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())
    assert model.matrix.grad is None


def test_no_gradient_at_all_is_not_a_step_by_momentum():
    model = Tiny()
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    set_gradients(model, 0)
    optimizer.update(1e-2)
    before = model.matrix.detach().clone()
    assert not optimizer.update(1e-2).applied
    assert torch.equal(model.matrix, before)


def test_saved_state_continues_bit_for_bit():
    straight, resumed = Tiny(), Tiny()
    first = MasterOptimizer(straight, CONFIG, "bf16")
    for seed in range(3):
        set_gradients(straight, seed)
        first.update(1e-2)
    second = MasterOptimizer(resumed, CONFIG, "bf16")
    second.load(first.state())
    for model, optimizer in ((straight, first), (resumed, second)):
        set_gradients(model, 9)
        optimizer.update(1e-2)
    assert torch.equal(straight.matrix, resumed.matrix) and torch.equal(straight.norm, resumed.norm)


def test_state_of_another_model_is_refused():
    optimizer = MasterOptimizer(Tiny(), CONFIG, "bf16")
    state = optimizer.state()
    with pytest.raises(TrainingError, match=r"another model: master\.matrix"):
        optimizer.load({**state, "master.matrix": torch.zeros(2, 2)})
    with pytest.raises(TrainingError, match=r"another model: master\.extra"):
        optimizer.load({**state, "master.extra": torch.zeros(2)})


def test_learning_rate_schedule():
    linear = OptimizerConfig(lr=1.0, warmup_steps=2, decay="linear", final_fraction=0.2)
    assert [learning_rate(linear, step, 6) for step in (1, 2, 4, 6, 9)] == pytest.approx([0.5, 1.0, 0.6, 0.2, 0.2])
    cosine = linear.model_copy(update={"decay": "cosine"})
    assert [learning_rate(cosine, step, 6) for step in (2, 4, 6)] == pytest.approx([1.0, 0.6, 0.2])
    assert learning_rate(cosine, 3, 6) > learning_rate(linear, 3, 6)
    constant = OptimizerConfig(lr=1.0, warmup_steps=0, decay="constant")
    assert [learning_rate(constant, step, 6) for step in (1, 6)] == [1.0, 1.0]


def test_accumulated_gradients_are_summed_in_fp32():
    model = Tiny().to(torch.bfloat16)
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    parts = [1.0, *[2.0**-9] * 64]  # each too small to change a bf16 sum of about 1
    for value in parts:
        model.matrix.grad = torch.full((4, 3), value, dtype=torch.bfloat16)
        optimizer.accumulate()
        assert model.matrix.grad is None
    assert optimizer.update(1e-3).grad_norm == pytest.approx(sum(parts) * math.sqrt(12))


@devices
@pytest.mark.parametrize("parts", [1, 2])
def test_a_parameter_without_a_gradient_moves_by_its_momentum(device: str, parts: int):
    model = Tiny().to(device, torch.bfloat16)
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    for held in (("matrix", "norm"), ("matrix",)):
        before = optimizer.state()["master.norm"].clone()
        for part in range(parts):
            for name in held:
                parameter = model.get_parameter(name)
                parameter.grad = torch.ones_like(parameter)
            if part + 1 < parts:
                optimizer.accumulate()
        assert optimizer.update(1e-2).applied
        assert bool((optimizer.state()["master.norm"] < before).all())


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("longest", [1e9, 0.5])
def test_one_launch_does_what_the_host_does(dtype: torch.dtype, longest: float):
    class Wide(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.randn(77, 131, generator=torch.Generator().manual_seed(5)))

    config = CONFIG.model_copy(update={"max_grad_norm": longest})
    host, device = Wide(), Wide().to(DEVICE, dtype)
    host.load_state_dict(device.state_dict())
    with without_kernels():
        first = MasterOptimizer(host, config, "bf16")
    second = MasterOptimizer(device, config, "bf16")
    assert second._rules[0].checks_norm and not first._rules[0].checks_norm
    for seed in range(4):
        set_gradients(host, seed)
        for name, parameter in host.named_parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to(dtype).float()
            device.get_parameter(name).grad = parameter.grad.to(DEVICE, dtype)
        ours, theirs = second.update(1e-2), first.update(1e-2)
        assert ours.applied and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    for name, tensor in first.state().items():
        torch.testing.assert_close(second.state()[name].cpu(), tensor, rtol=2e-5, atol=1e-6)
    for name, parameter in device.named_parameters():  # the served copy is the master, rounded
        master = second.state()[f"master.{name}"]
        assert torch.equal(parameter.float(), master.to(torch.bfloat16).float())


@pytest.mark.kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_on_the_device_a_gradient_that_is_not_finite_changes_nothing(bad: float):
    model = Tiny().to(DEVICE)
    optimizer = MasterOptimizer(model, CONFIG, "bf16")
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.matrix.grad[0, 0] = bad  # type: ignore[index]
    assert not optimizer.update(1e-2).applied
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state().items())


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_codes_come_from_the_masters_whatever_the_models_type(form: str):
    """A trainer on a GPU computes in bf16, one on the CPU in FP32: the same masters give the same version."""
    config = ModelConfig(vocab_size=96, width=64, head_dim=16, expert_width=32, max_context=32)
    wide, narrow = Decoder(config, torch.float32, form), Decoder(config, torch.bfloat16, form)
    wide.initialise(0)
    narrow.initialise(1)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.mul_(1 + 1e-3)  # less than bf16 resolves
    first = MasterOptimizer(wide, CONFIG, form)
    second = MasterOptimizer(narrow, CONFIG, form)
    second.load(first.state())
    assert device_digest(wide, form) == device_digest(narrow, form)
    assert all(torch.equal(each.float(), narrow.get_parameter(name).float()) for name, each in wide.named_parameters())
