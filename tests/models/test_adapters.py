"""Adapters: what they add, their gradients, and how versions with and without them are loaded and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.adapters import SCALE, is_adapter, trained
from rollmill.models.attention import packed_positions
from rollmill.models.config import Adapter, ModelConfig, with_adapter
from rollmill.models.counts import adapter_parameters
from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.device import choose_device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.files import CONFIG, read_json
from rollmill.models.huggingface.peft import adapter_files
from rollmill.models.merging import adapter_of, merged
from rollmill.models.moe import Replay
from rollmill.models.packed_attention import packed_attention
from tests.kernels import devices
from tests.models.checkpoints import load_checkpoint, make_checkpoint, our_logits, their_logits, tokens_of

ADAPTER = Adapter(rank=8, alpha=24.0)
DENSE = ModelConfig(
    vocab_size=300, layers=3, width=64, heads=4, kv_heads=2, head_dim=32, mlp_width=96, experts=0, qk_norm=True
)
MODELS = {
    "dense": DENSE,
    "biases": DENSE.model_copy(update={"qkv_bias": True, "output_bias": True, "qk_norm": False}),
    "mixture": DENSE.model_copy(
        update={"experts": 8, "experts_per_token": 3, "expert_width": 48, "shared_experts": 1, "dense_layers": 1}
    ),
}


def begun(model: ModelConfig, adapter: Adapter = ADAPTER, device: str = "cpu") -> Decoder:
    """A model whose adapters add something."""
    decoder = decoder_on(choose_device(device), with_adapter(model, adapter))  # type: ignore[arg-type]
    decoder.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("_adapter.b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif parameter.dim() == 1:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter))
    return decoder


def merged_twin(model: Decoder, dtype: torch.dtype | None = None) -> Decoder:
    """The model without adapters, whose weights hold what they add. Not rounded."""
    device = model.embedding.device
    with device:
        twin = Decoder(with_adapter(model.config, None), dtype or model.embedding.dtype)
    state = model.state_dict()
    for name, parameter in twin.state_dict().items():
        values = state[name].float()
        if f"{name}_adapter.a" in state:
            a, b = (state[f"{name}_adapter.{part}"].float() for part in "ab")
            values = values + ADAPTER.scale * (a @ b if a.dim() == 3 else b @ a)
        parameter.copy_(values)
    return twin


def passed(model: Decoder, routes: Tensor | None = None, lengths: tuple[int, ...] = (19, 33, 8)) -> DecoderOutput:
    """Three sequences. `routes`: the experts to take, because other rounding would choose others here and there."""
    device = model.embedding.device
    tokens = torch.randint(300, (sum(lengths),), generator=torch.Generator().manual_seed(1)).to(device)
    attend = packed_attention(lengths, device=device, dtype=model.embedding.dtype)
    replay = None if routes is None else Replay(routes, torch.ones(len(tokens), dtype=torch.bool, device=device))
    return model(tokens, packed_positions(lengths).to(device), attend, replay)


@devices
@pytest.mark.parametrize("name", MODELS)
def test_an_adapted_model_computes_what_the_merged_one_does(name: str, device: str) -> None:
    model = begun(MODELS[name], device=device)
    plain = decoder_on(model.embedding.device, MODELS[name])
    plain.load_state_dict({key: value for key, value in model.state_dict().items() if key in plain.state_dict()})
    with torch.no_grad():
        output = passed(model)
        found, routes = output.hidden.float(), output.routes
        expected, without = (passed(each, routes).hidden.float() for each in (merged_twin(model), plain))
    close = 1e-5 if device == "cpu" else 0.03  # of bf16, over three layers
    assert (found - expected).norm() < close * expected.norm() < 0.1 * (without - expected).norm()


@devices
@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_that_the_merged_weights_give(name: str, recompute: int, device: str) -> None:
    """With W' = W + s·B·A: dA = s·Bᵀ·dW' and dB = s·dW'·Aᵀ."""
    model = begun(MODELS[name], device=device)
    model.recompute_every = recompute
    twin = merged_twin(model, torch.float32 if device == "cpu" else None)
    routes = None
    for each in (model, twin):
        weights, output = torch.linspace(-1, 1, 64, device=each.embedding.device), passed(each, routes)
        routes = output.routes
        (output.hidden.float().tanh() * weights).sum().backward()
    whole, state = dict(twin.named_parameters()), model.state_dict()
    frozen = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert (
        frozen == [key for key in frozen if not is_adapter(key)] and len(trained(model)) == len(state) - len(frozen) - 1
    )
    for key, parameter in trained(model).items():
        matrix, _, part = key.rpartition("_adapter.")
        grad, other = whole[matrix].grad, state[f"{matrix}_adapter.{'b' if part == 'a' else 'a'}"].float()
        assert grad is not None and parameter.grad is not None, key
        if parameter.dim() == 3:  # experts are [in, out]
            expected = grad.float() @ other.mT if part == "a" else other.mT @ grad.float()
        else:
            expected = other.t() @ grad.float() if part == "a" else grad.float() @ other.t()
        difference = parameter.grad.float() - ADAPTER.scale * expected
        assert difference.norm() <= (1e-4 if device == "cpu" else 0.08) * (ADAPTER.scale * expected).norm(), key


@pytest.mark.parametrize("targets", [("attention",), ("mlp",), ("experts",)])
def test_other_matrices_stay_as_they_are(targets: tuple[str, ...]) -> None:
    model = begun(MODELS["mixture"], Adapter(rank=8, alpha=24.0, targets=targets))
    passed(model).hidden.sum().backward()
    kinds = {"attention": {"qkv", "output"}, "mlp": {"mlp.gate_up", "mlp.down"}, "experts": {"mlp.gate_up", "mlp.down"}}
    names = {name.split(".", 2)[2].rpartition("_adapter.")[0] for name in trained(model)}
    assert names == kinds[targets[0]]
    layers = {int(name.split(".")[1]) for name in trained(model)}
    assert layers == {"attention": {0, 1, 2}, "mlp": {0}, "experts": {1, 2}}[targets[0]]


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_a_fresh_adapter_changes_nothing_and_a_version_without_one_is_loaded(form: str) -> None:
    model = begun(MODELS["mixture"])
    plain = Decoder(MODELS["mixture"], form=form)
    plain.initialise(5)
    tensors = to_host(plain.state_dict(), form)
    load_host(plain, tensors)
    model.form = form
    load_host(model, tensors)
    assert all(not each.any() for name, each in trained(model).items()), "what another version had adds nothing"
    model.begin_adapters(1)
    again = to_host(model.state_dict(), form)
    assert {name: again[name].data.tobytes() for name in tensors} == {
        name: each.data.tobytes() for name, each in tensors.items()
    }
    if form == "bf16":
        with torch.no_grad():
            assert torch.equal(passed(model).hidden, passed(plain).hidden)
    assert {each.dtype for name, each in again.items() if is_adapter(name)} == {"bf16"}
    assert again[SCALE].dtype == "fp32" and adapter_of(again)[0] == 3.0


def test_another_adapter_is_merged_into_the_weights() -> None:
    model = begun(MODELS["mixture"])
    tensors = to_host(model.state_dict())
    for other in (None, Adapter(rank=16), Adapter(rank=8, alpha=8.0)):
        into = Decoder(with_adapter(MODELS["mixture"], other))
        into.initialise(0)
        load_host(into, tensors)
        weights = {name: each for name, each in into.state_dict().items() if not is_adapter(name) and name != SCALE}
        assert {name: each.data.tobytes() for name, each in to_host(weights).items()} == {
            name: each.data.tobytes() for name, each in merged(tensors).items()
        }
        assert not any(bool(each.any()) for name, each in into.named_parameters() if is_adapter(name))
    with pytest.raises(WeightsError, match="no adapter can be merged"):
        load_host(Decoder(MODELS["mixture"], form="fp8"), to_host(model.state_dict(), "fp8"))


@pytest.mark.parametrize(
    ("change", "targets", "why"),
    [
        ({}, ("experts",), "the model has no experts"),
        ({"experts": 4, "dense_layers": 0}, ("mlp",), "the model has no mlp"),
        (
            {
                "latent": {"kv_rank": 8, "plain_dim": 16, "rope_dim": 16, "value_dim": 8},
                "kv_heads": 4,
                "qk_norm": False,
            },
            ("mlp", "attention"),
            "latent attention has no adapters",
        ),
    ],
)
def test_what_a_model_does_not_have_cannot_be_adapted(change: dict[str, Any], targets: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_adapter(ModelConfig.model_validate(DENSE.model_dump() | change), Adapter(targets=targets))


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_that_is_not_whole_is_named(name: str) -> None:
    tensors = to_host(begun(MODELS[name]).state_dict())
    for lost in (SCALE, "layers.0.qkv_adapter.b", "layers.0.qkv"):
        with pytest.raises(WeightsError, match=f"not whole: there is no {lost}"):
            merged({each: tensors[each] for each in tensors if each != lost})


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_counted(name: str) -> None:
    for targets in (("attention", "mlp", "experts"), ("mlp",), ("experts", "attention")):
        model = with_adapter(MODELS[name], Adapter(rank=16, targets=targets))
        assert adapter_parameters(model) == sum(each.numel() for each in trained(Decoder(model)).values())
    assert adapter_parameters(MODELS[name]) == 0


def test_the_same_base_with_and_without_adapters() -> None:
    plain, adapted = Decoder(DENSE), Decoder(with_adapter(DENSE, ADAPTER))
    plain.initialise(7)
    adapted.initialise(7)
    assert all(torch.equal(each, adapted.state_dict()[name]) for name, each in plain.state_dict().items())


@pytest.mark.parametrize("name", ["llama", "smollm3", "qwen2", "qwen3", "glm, biases"])
def test_peft_computes_the_same_with_the_adapter_alone(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    theirs = make_checkpoint(name, tmp_path / "base")
    config, base = load_checkpoint(tmp_path / "base", torch.float32)
    # PEFT changes the names of gate and up for a GLM, so for it there is attention alone
    adapter = ADAPTER.model_copy(update={"targets": ("attention",)}) if name.startswith("glm") else ADAPTER
    model = Decoder(with_adapter(config, adapter))
    model.initialise(0)
    model.load_state_dict({**model.state_dict(), **base.state_dict()})
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.copy_((torch.randn(parameter.shape) * 0.2).bfloat16().float())
    files = adapter_files(read_layout(read_json(tmp_path / "base" / CONFIG)), to_host(model.state_dict()))
    (tmp_path / "adapter").mkdir()
    for file, data in files.items():
        (tmp_path / "adapter" / file).write_bytes(data)
    before = their_logits(theirs, tokens_of())
    with_it = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    expected = their_logits(with_it, tokens_of())
    assert (expected - before).abs().max() > 0.5, "the adapter must matter"
    torch.testing.assert_close(our_logits(model, tokens_of()), expected, atol=5e-5, rtol=1e-4)


def test_adapters_of_experts_have_no_files_for_peft(tmp_path: Path) -> None:
    make_checkpoint("qwen3 moe", tmp_path)
    config, _ = load_checkpoint(tmp_path)
    layout = read_layout(read_json(tmp_path / CONFIG))
    with pytest.raises(WeightsError, match="PEFT has no names for layers"):
        adapter_files(layout, to_host(begun(config).state_dict()))
    attention = begun(config, Adapter(rank=8, targets=("attention",)))
    assert b"q_proj" in adapter_files(layout, to_host(attention.state_dict()))["adapter_config.json"]


def test_a_version_without_an_adapter_has_no_files_for_peft(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    _, model = load_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="no adapter"):
        adapter_files(read_layout(read_json(tmp_path / CONFIG)), to_host(model.state_dict()))
