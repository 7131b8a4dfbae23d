"""Products of quantised forms: their inputs, their gradients, and that a model learns with them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, linear

from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import LatentAttention, ModelConfig
from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels import forms, rows
from rollmill.models.kernels.forms import FORMS, seen
from rollmill.models.kernels.quantised import fp8, nvfp4
from rollmill.models.moe import Replay
from rollmill.models.packed_attention import packed_attention
from tests.kernels import DEVICE, INTERPRETED, without_kernels
from tests.models.reference import TINY, make_decoder
from tests.models.test_quantize import blocks, draw

each_form = pytest.mark.parametrize("form", FORMS)
LENGTHS = [20, 9]
LATENT = TINY.model_copy(
    update={
        "latent": LatentAttention(q_rank=12, kv_rank=16, plain_dim=8, rope_dim=4, value_dim=8),
        "head_dim": 12,
        "kv_heads": 4,
        "shared_experts": 1,
        "dense_layers": 1,
    }
)
QWEN = TINY.model_copy(update={"qkv_bias": True, "output_bias": True, "qk_norm": True, "experts": 0})
SMALL = ModelConfig(
    vocab_size=512, layers=4, width=512, heads=8, kv_heads=4, head_dim=64, mlp_width=1024, dense_layers=2,
    experts=8, experts_per_token=2, expert_width=128, max_context=1024,
)  # fmt: skip
SMALL_LENGTHS = [300, 212]
MOST_ROWS = 6 if INTERPRETED else None
if INTERPRETED:  # which takes milliseconds per row
    SMALL = SMALL.model_copy(
        update={"layers": 2, "dense_layers": 1, "width": 64, "head_dim": 16, "mlp_width": 160, "expert_width": 48}
    )
    SMALL_LENGTHS = [7, 4]


def served(config: ModelConfig, form: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    source = make_decoder(config)
    with without_kernels():
        round_to_form_(source.named_parameters(), form)
    model = Decoder(config, dtype, form)
    model.load_state_dict(source.state_dict())
    return model.to(device)


def run(
    model: Decoder, lengths: list[int], replay: Replay | None = None, seed: int = 5
) -> tuple[Tensor, DecoderOutput]:
    """Returns tokens and the model's output for them."""
    tokens = torch.randint(model.config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(model.embedding.device)
    attend = packed_attention(lengths, tokens.device, model.embedding.dtype)
    return tokens, model(tokens, packed_positions(lengths).to(tokens.device), attend, replay)


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp32"])
def test_plain_forms_do_not_quantise_their_inputs(form: str) -> None:
    x, weight, bias = draw(7, 40), draw(24, 40, seed=1), draw(24)
    assert seen(x, form) is x
    assert torch.equal(forms.linear(x, weight, bias, form), linear(x, weight, bias))


@each_form
def test_a_product_sees_quantised_inputs_and_its_gradient_does_not(form: str) -> None:
    x, weight, bias = draw(7, 40).requires_grad_(), draw(24, 40, seed=1).requires_grad_(), draw(24).requires_grad_()
    out = forms.linear(x, weight, bias, form)
    assert torch.equal(out, linear(seen(x.detach(), form), weight, bias))
    assert not torch.equal(out, linear(x, weight, bias))
    grad = draw(7, 24, seed=2)
    ours = torch.autograd.grad(out, (x, weight, bias), grad)
    theirs = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), grad)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-6)


@each_form
def test_experts_see_quantised_rows_and_their_gradient_does_not(form: str) -> None:
    x, weight, counts = draw(9, 24).requires_grad_(), draw(4, 24, 16, seed=1).requires_grad_(), [3, 0, 5, 1]
    out = rows.grouped_linear(x, weight, counts, form)
    assert torch.equal(out, rows.grouped_linear(seen(x.detach(), form), weight.detach(), counts))
    grad = draw(9, 16, seed=2)
    ours = torch.autograd.grad(out, (x, weight), grad)
    theirs = torch.autograd.grad(rows.grouped_linear(x, weight, counts), (x, weight), grad)
    assert all(torch.equal(mine, plain) for mine, plain in zip(ours, theirs, strict=True))


@each_form
@pytest.mark.parametrize("config", [TINY, LATENT, QWEN], ids=["mixture", "latent", "biases"])
def test_every_matrix_of_a_model_is_quantised_and_no_token_sees_another(
    form: str, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served(config, form), Decoder(config)
    plain.load_state_dict(model.state_dict())
    multiplied: set[int] = set()

    def watch(kernel: Any) -> Any:
        def call(*given: Any) -> Tensor:
            if any(isinstance(each, str) and each == form for each in given):
                multiplied.update(id(each) for each in given if isinstance(each, Parameter))
            return kernel(*given)

        return call

    monkeypatch.setattr(forms, "call", watch(forms.call))
    monkeypatch.setattr(rows, "call", watch(rows.call))
    with torch.no_grad():
        together, exact = run(model, LENGTHS)[1].hidden, run(plain, LENGTHS)[1].hidden
        tokens, _ = run(model, LENGTHS)
        for number, part in enumerate(tokens.split(LENGTHS)):
            length = LENGTHS[number]
            alone = model(part, packed_positions([length]), PackedAttention([length])).hidden
            torch.testing.assert_close(alone, together.split(LENGTHS)[number], rtol=1e-5, atol=1e-5)
    matrices = {
        name for name, p in model.named_parameters() if p.dim() > 1 and "layers." in name and "router" not in name
    }
    biases = {name for name, p in model.named_parameters() if p.dim() == 1}
    assert {name for name, p in model.named_parameters() if id(p) in multiplied} - biases == matrices
    error = float((together - exact).norm() / exact.norm())
    assert 0 < error < (0.2 if form == "fp8" else 0.6)


@each_form
def test_a_model_learns_in_this_form(form: str) -> None:
    """FP32 master weights, served values of the form, straight-through gradients; next tokens of a fixed text."""
    torch.set_num_threads(1)
    config = TINY.model_copy(update={"dense_layers": 1})
    model = served(config, form)
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    adam = torch.optim.AdamW(masters, lr=1e-2)
    text = torch.tensor([(7 * i * i + 3 * i) % 31 for i in range(60)])
    losses = []
    for _ in range(60):
        out = model(text[:-1], packed_positions([59]), PackedAttention([59]))
        loss = cross_entropy(model.logits(out.hidden), text[1:])
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        adam.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        round_to_form_(model.named_parameters(), form)
    assert losses[-1] < 0.5 * losses[0], losses[::10]


# --- kernels


@pytest.mark.kernels
@each_form
def test_one_pass_gives_the_bits_of_the_plain_rules(form: str) -> None:
    rounded = fp8.rounded_tokens if form == "fp8" else nvfp4.rounded_tokens
    cases = [(what, x if x.dim() == 2 else x.flatten(0, 1)) for what, x in blocks(form)]
    cases += [("wide", draw(33, 1536)), ("narrow", draw(5, 8)), ("one", draw(1, 576))]
    for what, x in cases:
        x = x[:MOST_ROWS]
        for dtype in (torch.float32, torch.bfloat16):
            there = rounded(x.to(DEVICE, dtype)).cpu()
            with without_kernels():
                here = rounded(x.to(dtype))
            assert torch.equal(here, there) and torch.equal(here.signbit(), there.signbit()), what
    x = draw(3, 64)
    x[1, 5], x[2, 7] = math.nan, math.inf
    out = rounded(x.to(DEVICE)).cpu()
    assert out[0].isfinite().all() and out[1, 5].isnan() and not out[2, 7].isfinite()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
)
@pytest.mark.parametrize("shape", [(2048, 256, 512), (2051, 640, 512), (4096, 4096, 4096)], ids=str)
def test_fp8_products_of_the_hardware_agree_with_the_emulated_ones(shape: tuple[int, int, int]) -> None:
    tokens, out, inputs = shape
    x = (draw(tokens, inputs) * torch.exp2(draw(tokens, 1, seed=3) * 4)).cuda().bfloat16()
    weight = draw(out, inputs, seed=1).cuda().bfloat16()
    round_to_form_([("layers.0.output", weight)], "fp8")
    assert fp8.multiplies(x, weight)
    exact = fp8.rounded_tokens(x).double() @ weight.double().t()
    size = exact.abs().amax(1, keepdim=True)
    hardware = ((fp8.product(x, weight).double() - exact).abs() / size).max()
    emulated = ((linear(fp8.rounded_tokens(x), weight).double() - exact).abs() / size).max()
    print(f"{shape}: error of the largest in its row: hardware {hardware:.2e}, emulated {emulated:.2e}")
    assert emulated < 2**-8 and hardware < 2**-7


@pytest.mark.kernels
@each_form
def test_kernels_agree_with_the_plain_model(form: str) -> None:
    """A small model with mixtures. Routes are replayed, as recorded (small unsigned integers in host memory), so that
    near-ties do not matter. If bf16 rounds a sum differently, the next quantiser may round a whole step differently. So
    the tolerance is the precision of the form; random weights are the worst case."""
    host = served(SMALL, form)
    device = served(SMALL, form, torch.bfloat16, DEVICE)
    with torch.no_grad():
        with without_kernels():
            tokens, live = run(host, SMALL_LENGTHS)
        assert live.routes is not None
        valid = torch.ones(len(tokens), dtype=torch.bool)
        for kind in (torch.uint8, torch.uint16):
            _, there = run(device, SMALL_LENGTHS, Replay(live.routes.to(kind), valid))
            assert torch.equal(there.routes.cpu(), live.routes)
        logps = [
            model.logits(out.hidden).log_softmax(-1).cpu().gather(1, tokens.cpu().roll(-1)[:, None])
            for model, out in ((host, live), (device, there))
        ]
    delta = logps[1] - logps[0]
    k3 = float((delta.exp() - 1 - delta).mean())
    print(f"{form}: k3 {k3:.2e}, largest |Δ log-prob| {float(delta.abs().max()):.3f}")
    assert k3 < {"fp8": 0.02, "nvfp4": 0.15}[form]


def learn(model: Decoder, replay: Replay) -> None:
    tokens, out = run(model, SMALL_LENGTHS, replay)
    cross_entropy(model.logits(out.hidden[:-1]), tokens[1:]).backward()


@pytest.mark.kernels
@each_form
def test_gradients_through_kernels_equal_those_of_the_plain_model(form: str) -> None:
    host, device = served(SMALL, form), served(SMALL, form, torch.bfloat16, DEVICE)
    with without_kernels():
        routes = run(host, SMALL_LENGTHS)[1].routes
        assert routes is not None
        replay = Replay(routes.to(torch.uint8), torch.ones(sum(SMALL_LENGTHS), dtype=torch.bool))
        learn(host, replay)
    learn(device, replay)
    for (name, mine), theirs in zip(device.named_parameters(), host.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        cosine = torch.cosine_similarity(mine.grad.float().cpu().flatten(), theirs.grad.flatten(), dim=0)
        assert cosine > {"fp8": 0.9, "nvfp4": 0.7}[form], (name, float(cosine))


def through_experts(form: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Returns a layer's output for some tokens, and the gradients."""
    layer, tokens = served(SMALL, form, dtype, device).layers[-1].mlp, sum(SMALL_LENGTHS)
    x = draw(tokens, SMALL.width).bfloat16().to(device, dtype).requires_grad_()
    routes = torch.zeros(tokens, SMALL.moe_layers, 2, dtype=torch.uint8)
    routes[:, -1, 0] = torch.arange(tokens) % SMALL.experts
    routes[:, -1, 1] = (torch.arange(tokens) * 3 + 1) % SMALL.experts
    skip = draw(tokens, SMALL.width, seed=8).bfloat16().to(device, dtype).requires_grad_()
    out, _ = layer(x, skip, Replay(routes, torch.ones(tokens, dtype=torch.bool)).to(torch.device(device)))
    out.backward(draw(tokens, SMALL.width, seed=9).to(device, dtype))
    return [out, x.grad, skip.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.kernels
@each_form
def test_experts_through_kernels_equal_the_plain_ones(form: str) -> None:
    """One layer, forward and all gradients, so that rounding errors do not accumulate."""
    with without_kernels():
        plain_ones = through_experts(form, "cpu", torch.float32)
    for here, there in zip(plain_ones, through_experts(form, DEVICE, torch.bfloat16), strict=True):
        cosine = torch.cosine_similarity(here.flatten(), there.float().cpu().flatten(), dim=0)
        assert cosine > 0.995, (here.shape, float(cosine))


@pytest.mark.parametrize("rows", [1, 7, 8, 32, 128, 129])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_without_gradients_is_that_with_gradients(
    rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an Arm CPU few rows are multiplied in another way if no gradient is asked for."""
    monkeypatch.setattr(forms, "FEW_ROWS", range(8, 129))
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(count, 48, generator=generator) for count in (rows, 40))
    bias_O = torch.randn(40, generator=generator) if bias else None
    with torch.no_grad():
        found = forms.linear(x, weight, bias_O)
    assert found.is_contiguous()
    torch.testing.assert_close(found, forms.linear(x, weight, bias_O))
