"""The quantiser: codes match a plain reference, quantising again gives the same bytes, values are exact in bf16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.forms import FORMS, is_quantised
from rollmill.models.kernels.quantised import fp8, nvfp4
from rollmill.models.quantize import (
    dequantise,
    dequantise_into,
    dequantised,
    quantise,
    quantise_state,
)
from rollmill.storage.objects import Objects
from rollmill.weights import HostTensor, LineFollower, Publisher, WeightStore
from rollmill.weights.format.manifest import describe, root_digest
from tests.kernels import DEVICE, INTERPRETED, cuda, devices, without_kernels
from tests.models.reference import TINY, make_decoder

NAME = "layers.0.mlp.down"
forms = pytest.mark.parametrize("form", FORMS)
BIASED = TINY.model_copy(update={"gate": "sigmoid", "gate_bias": True, "shared_experts": 1, "dense_layers": 1})


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def blocks(form: str) -> Iterator[tuple[str, Tensor]]:
    """Matrices with values at the limits of every range."""
    # the NVFP4 kernel has a program per row (of an expert: per column), and the interpreter runs one after the other
    few = 20 if INTERPRETED and form == "nvfp4" else None
    yield "random", draw(130, 300)[:few]
    yield "spread over magnitudes", (draw(32, 256) * torch.exp2(draw(32, 256, seed=1) * 12))[:few]
    yield "zero", torch.zeros(12, 140)
    yield "negative zero", -torch.zeros(16, 32)
    yield "subnormal", draw(16, 64, scale=1e-42)
    yield "smallest", draw(16, 160, scale=2.0**-75)
    yield "huge", draw(16, 128, scale=2.0**123)
    yield "experts", (draw(5, 12, 36) * torch.exp2(torch.arange(5.0) * 9 - 20)[:, None, None])[..., :few]
    yield "experts of several blocks", draw(2, 136, 260)[..., :few]
    for largest in (224.0, 231.999, 232.0, 232.001, 240.0, 447.0, 448.0, 463.999, 464.0, 464.001, 480.0):
        for power in (0, -9, 30):
            edge = draw(4, 32, scale=0.1).clamp(-1, 1)
            edge[3, 5] = -largest
            yield f"edge {largest} · 2^{power}", edge * 2.0**power
    every = torch.arange(256, dtype=torch.uint8).view(fp8.CODES).float()
    yield "every e4m3 number", every[every.isfinite()].view(1, -1)
    yield "between the e2m1 numbers", torch.tensor([[*nvfp4.BOUNDS, *nvfp4.VALUES, 6.0]]).repeat(3, 2) * 1.75


def parts_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.cpu().contiguous().view(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and torch.equal(bits(a[n]), bits(b[n])) for n in a)


@devices
@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_again_gives_the_same_bytes_and_bf16_holds_them(form: str, device: str, dtype: torch.dtype) -> None:
    for what, values in blocks(form):
        values = values.to(device, dtype)
        parts = quantise(NAME, values, form)
        served = dequantise(NAME, parts)
        assert torch.equal(served, served.bfloat16().float()), what
        assert parts_equal(quantise(NAME, served, form), parts), what
        assert parts_equal(quantise(NAME, served.bfloat16(), form), parts), what
        rounded = values.clone()
        round_to_form_([(NAME, rounded)], form)
        assert torch.equal(rounded.float(), served), what
        assert torch.equal(rounded.signbit(), served.signbit()), what


@pytest.mark.kernels
@forms
def test_kernels_give_the_bytes_of_the_plain_rules(form: str) -> None:
    for what, values in blocks(form):
        for dtype in (torch.float32, torch.bfloat16):
            there = quantise(NAME, values.to(DEVICE, dtype), form)
            with without_kernels():
                here = quantise(NAME, values.to(dtype), form)
            assert parts_equal(here, there), what
    state = make_decoder(BIASED).state_dict()
    there = quantise_state({name: tensor.to(DEVICE) for name, tensor in state.items()}, form)
    with without_kernels():
        here = quantise_state(state, form)
    assert root_digest(describe(here)) == root_digest(describe(there))


def test_fp8_by_hand() -> None:
    scales = fp8.scale_of(torch.tensor([448.0, 464.0, 464.01, 232.0, 232.01, 1.0, 0.0, 1e-45]))
    assert scales.tolist() == [1.0, 1.0, 2.0, 0.5, 1.0, 2.0**-8, 2.0**-60, 2.0**-60]
    assert torch.equal(scales * fp8.inverse(scales), torch.ones(8))
    x = torch.zeros(129, 130)
    x[0, 0], x[128, 129], x[5, 7], x[5, 8] = 448.0, -3.0, 17.0, 2.0**-10
    codes, scales = fp8.quantise(x, 128)
    assert scales.shape == (2, 2) and scales[0, 0] == 1.0 and scales[1, 1] == 2.0**-7
    values = codes.float()
    assert (values[0, 0], values[128, 129]) == (448.0, -384.0)
    assert (values[5, 7], values[5, 8]) == (16.0, 0.0), "17 and 2^-10 lie half-way: to the even code"


def test_nvfp4_by_hand() -> None:
    power = nvfp4.power_of(torch.tensor(6.0))
    assert power == 2.0**-8, "1 · 2^8 = 256 is the scale of a block whose largest number is 6"
    row = torch.zeros(2, 18)
    row[0, :9] = torch.tensor([6.0, -6.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0])
    row[0, 16], row[1, 0] = 3.0, 1e-9
    data, scales = nvfp4.quantise(row, power)
    codes = nvfp4.unpacked(data)
    assert scales.shape == (2, 2) and scales[0].float().tolist() == [256.0, 128.0]
    assert codes[0, :9].tolist() == [7, 15, 0, 2, 2, 12, 4, 6, 6], "ties go to the even code"
    assert codes[0, 16] == 7 and codes[1].tolist() == [0] * 18
    assert scales[1, 0].float() == nvfp4.SMALLEST_SCALE
    assert data[0, 0] == 0xF7, "the first of two in the low half"
    assert nvfp4.dequantise(data, scales, power)[0, :4].tolist() == [6.0, -6.0, 0.0, 1.0]


def test_codes_are_the_nearest_ones() -> None:
    """In plain Python, one number at a time."""
    values = draw(4, 64) * torch.exp2(draw(4, 64, seed=2) * 3)
    power = nvfp4.power_of(values.abs().max())
    data, scales = nvfp4.quantise(values, power)
    codes = nvfp4.unpacked(data)
    for row in range(4):
        for place in range(64):
            factor = float(scales[row, place // 16].float()) * float(power)
            magnitude = abs(float(values[row, place])) / factor
            distance = [abs(value - magnitude) for value in nvfp4.VALUES]
            assert math.isclose(distance[int(codes[row, place]) & 7], min(distance))
            assert (int(codes[row, place]) >> 3) == (float(values[row, place]) < 0)
    blocks = values.view(4, 4, 16).abs().amax(-1)
    wanted = (blocks / 6 / power).clamp(min=nvfp4.SMALLEST_SCALE).to(torch.float8_e4m3fn)
    assert torch.equal(wanted.float(), scales.float())


@forms
def test_errors_are_as_small_as_the_form_allows(form: str) -> None:
    values = draw(256, 512)
    served = dequantise(NAME, quantise(NAME, values, form))
    error = ((served - values).norm() / values.norm()).item()
    assert error < {"fp8": 0.03, "nvfp4": 0.1}[form]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@forms
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3e38])
def test_a_tensor_that_is_not_finite_is_refused_by_name(form: str, wrong: float, device: str) -> None:
    model = make_decoder().to(device)
    state = model.state_dict()
    state["layers.1.mlp.gate_up"][1, 2, 3] = wrong
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.gate_up has no codes"):
        quantise_state(state, form)
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.gate_up has no codes"):
        round_to_form_(model.named_parameters(), form)


def test_odd_inputs_are_refused_by_nvfp4() -> None:
    with pytest.raises(WeightsError, match="odd number of inputs"):
        quantise(NAME, torch.zeros(4, 7), "nvfp4")
    assert quantise(NAME, torch.zeros(4, 7), "fp8")[NAME].shape == (4, 7)


@forms
def test_tokens_are_quantised_each_by_itself(form: str) -> None:
    rounded = fp8.rounded_tokens if form == "fp8" else nvfp4.rounded_tokens
    x = draw(9, 200) * torch.exp2(torch.arange(9.0) * 5 - 20)[:, None]
    together = rounded(x)
    for token in range(9):
        assert torch.equal(rounded(x[token : token + 1])[0], together[token])
    assert torch.equal(rounded(together), together)
    x[4, 3] = math.nan
    broken = rounded(x)
    assert broken[4, 3].isnan() and torch.equal(broken[:4], together[:4]), "a NaN is passed on, to its token only"
    x[4, 3] = math.inf
    assert not rounded(x)[4, 3].isfinite()


# --- a whole model


@forms
def test_names_shapes_and_unquantised_tensors(form: str) -> None:
    model = make_decoder(BIASED)
    tensors = quantise_state(model.state_dict(), form)
    for name in ("embedding", "head", "norm", "layers.1.mlp.router.weight", "layers.0.attention_norm"):
        assert tensors[name].dtype == "bf16" and f"{name}.scale" not in tensors
    assert tensors["layers.1.mlp.router.bias"].dtype == "fp32"
    for name in ("layers.0.qkv", "layers.0.output", "layers.0.mlp.gate_up", "layers.1.mlp.down"):
        assert tensors[name].dtype == ("fp8_e4m3" if form == "fp8" else "fp4x2"), name
    experts, width, inner = TINY.experts, TINY.width, TINY.expert_width
    gate_up = {part: tensors[f"layers.1.mlp.gate_up{part}"] for part in ("", ".scale")}
    if form == "fp8":
        assert gate_up[""].shape == (experts, width, 2 * inner) and gate_up[".scale"].shape == (experts, 1, 1)
        return
    assert gate_up[""].shape == (experts, 2 * inner, width // 2) and gate_up[".scale"].shape == (experts, 2 * inner, 2)
    assert tensors["layers.1.mlp.gate_up.scale2"].shape == (experts,) and tensors["layers.0.qkv.scale2"].shape == ()


@devices
@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_holds_the_values_of_the_trainer_and_exports_the_same_bytes(
    form: str, device: str, dtype: torch.dtype
) -> None:
    with without_kernels():
        trainer = make_decoder(BIASED)
        round_to_form_(trainer.named_parameters(), form)
        tensors = quantise_state(trainer.state_dict(), form)
    engine = Decoder(BIASED, dtype, form).to(device)
    dequantise_into(engine.state_dict(), tensors)
    for (name, ours), theirs in zip(trainer.named_parameters(), engine.parameters(), strict=True):
        assert torch.equal(ours, theirs.float().cpu()), name
    assert root_digest(describe(quantise_state(engine.state_dict(), form))) == root_digest(describe(tensors))
    again = Decoder(BIASED)
    exact = dequantised(tensors)
    for name, tensor in again.state_dict().items():
        served = torch.from_numpy(exact[name].data.copy())
        served = served.view(torch.float32 if name.endswith("router.bias") else torch.bfloat16).view(tensor.shape)
        assert torch.equal(served.float(), trainer.state_dict()[name]), name


@forms
def test_only_what_changed_is_written(form: str) -> None:
    model, other = make_decoder(), make_decoder(seed=1)
    for decoder in (model, other):
        round_to_form_(decoder.named_parameters(), form)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = quantise_state(other.state_dict(), form)
    dequantise_into(model.state_dict(), tensors, ["layers.0.qkv.scale", "norm"])
    for name, tensor in model.state_dict().items():
        expected = other.state_dict()[name] if name in ("layers.0.qkv", "norm") else before[name]
        assert torch.equal(tensor, expected), name


@forms
def test_weights_of_another_model_touch_nothing(form: str) -> None:
    model = make_decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = quantise_state(make_decoder(seed=1).state_dict(), form)
    other = quantise_state(make_decoder(TINY.model_copy(update={"expert_width": 16})).state_dict(), form)
    missing = {name: tensor for name, tensor in tensors.items() if name != "layers.0.qkv.scale"}
    extra = {**tensors, "surplus": tensors["norm"]}
    for wrong in (other, missing, extra, {**tensors, "norm": HostTensor("fp32", (6,), np.zeros(24, np.uint8))}):
        with pytest.raises(WeightsError, match="another model"):
            dequantise_into(model.state_dict(), wrong)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@forms
def test_a_version_is_exported_as_the_numbers_it_stands_for(form: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from typer.testing import CliRunner

    from rollmill.cli.main import app

    model = make_decoder(BIASED)
    round_to_form_(model.named_parameters(), form)
    tensors = quantise_state(model.state_dict(), form)
    Publisher(WeightStore(Objects.open(tmp_path / "store")), "rl", form).publish(0, tensors)
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["weights", "export", str(tmp_path / "store"), "rl@0", str(out)])
    assert told.exit_code == 0, told.output
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert exported[name].dtype == (torch.float32 if name.endswith("router.bias") else torch.bfloat16)
        assert torch.equal(exported[name].float(), tensor), name
    again = Decoder(BIASED, torch.bfloat16)
    again.load_state_dict(exported)
    assert root_digest(describe(quantise_state(again.state_dict(), form))) == root_digest(describe(tensors))


def test_forms() -> None:
    assert [form for form in ("bf16", "fp16", "fp32", *FORMS, "fp3") if is_quantised(form)] == ["fp8", "nvfp4"]


@forms
@pytest.mark.parametrize("goal", ["fast", "small"])
def test_versions_are_published_and_followed_bit_for_bit(form: str, goal: str, tmp_path: Path) -> None:
    model = make_decoder(BIASED)
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    store = WeightStore(Objects.open(tmp_path))
    publisher = Publisher(store, "rl", form, snapshot_every=4, goal=goal)
    follower = LineFollower(WeightStore(Objects.open(tmp_path)), "rl", form)
    engine = Decoder(BIASED, torch.bfloat16, form)
    kinds = set()
    for number in range(6):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                masters[name] += draw(*parameter.shape, seed=number, scale=0.01)
                parameter.copy_(masters[name])
        round_to_form_(model.named_parameters(), form)
        manifest = publisher.publish(number, quantise_state(model.state_dict(), form))
        update = follower.poll()
        assert update is not None and update.policy == manifest.policy, follower.problem
        dequantise_into(engine.state_dict(), update.tensors, update.patches)
        assert root_digest(describe(quantise_state(engine.state_dict(), form))) == manifest.digest
        assert all(torch.equal(a, b.float()) for a, b in zip(model.parameters(), engine.parameters(), strict=True))
        kinds.add((manifest.snapshot is not None, manifest.delta is not None, update.patches is not None))
    assert {(True, False, False), (False, True, True)} <= kinds, "a snapshot, then deltas that say what changed"
