from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmill.errors import WeightsError
from rollmill.models import host_tensors as host
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import HostFacts, device_digest, load_host, round_to_form_, to_host
from rollmill.models.updates.device_audit import audit
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.tensors import HostTensor
from tests.kernels import cuda
from tests.models.reference import TINY, make_decoder


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp32"])
def test_loading_and_exporting_again_gives_the_same_bytes(form: str) -> None:
    tensors = to_host(make_decoder().state_dict(), form)
    engine = Decoder(TINY)
    load_host(engine, tensors)
    again = to_host(engine.state_dict(), form)
    assert tensors.keys() == again.keys()
    assert all(np.array_equal(tensors[name].data, again[name].data) for name in tensors)
    assert device_digest(engine, form) == root_digest(describe(tensors))


@cuda
@pytest.mark.parametrize("form", ["bf16", "fp32", "fp8", "nvfp4"])
def test_copies_from_a_gpu_are_the_same_bytes_and_stay_so(form: str) -> None:
    """The pages of freed copies are used again; those of live copies are not."""
    model = make_decoder().to("cuda")
    expected = [to_host({name: t.cpu() for name, t in model.state_dict().items()}, form)]
    found = [to_host(model.state_dict(), form)]
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        expected.append(to_host({name: t.cpu() for name, t in model.state_dict().items()}, form))
        to_host(model.state_dict(), form)  # freed at once
        found.append(to_host(model.state_dict(), form))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[name].data, theirs[name].data) for name in theirs)


def test_trainer_and_engine_hold_the_same_values_once_rounded() -> None:
    trainer, engine = make_decoder(), Decoder(TINY)
    round_to_form_(trainer.parameters())
    load_host(engine, to_host(trainer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters(), engine.parameters(), strict=True))


def test_only_changed_tensors_are_copied() -> None:
    model = make_decoder()
    digest = device_digest(model)
    tensors = to_host(make_decoder(seed=1).state_dict())
    load_host(model, tensors, {"norm"})
    assert np.array_equal(to_host(model.state_dict())["norm"].data, tensors["norm"].data)
    assert not np.array_equal(to_host(model.state_dict())["embedding"].data, tensors["embedding"].data)
    assert device_digest(model) != digest


def test_the_audit_sees_one_bit() -> None:
    model = make_decoder()
    round_to_form_(model.parameters())
    digest = device_digest(model)
    with torch.no_grad():
        model.layers[1].qkv[3, 5] *= 1 + 2**-7
    assert device_digest(model) != digest


def test_weights_of_another_model_touch_nothing() -> None:
    model = make_decoder()
    before = device_digest(model)
    tensors = to_host(make_decoder(seed=1).state_dict())
    missing = {name: tensor for name, tensor in tensors.items() if name != "norm"}
    other_shape = {**tensors, "norm": HostTensor("bf16", (12,), np.zeros(24, np.uint8))}
    for wrong in (missing, other_shape, {**tensors, "extra": tensors["norm"]}):
        with pytest.raises(WeightsError, match="another model"):
            load_host(model, wrong)
    assert device_digest(model) == before


def test_read_only_bytes_can_be_loaded(recwarn: pytest.WarningsRecorder) -> None:
    tensors = to_host(make_decoder().state_dict())
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    load_host(Decoder(TINY), tensors)
    assert not recwarn.list


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(WeightsError, match="fp3"):
        to_host(make_decoder().state_dict(), "fp3")


def test_the_bias_of_the_router_is_never_rounded() -> None:
    model = Decoder(TINY.model_copy(update={"gate": "sigmoid", "gate_bias": True, "experts": 4}))
    model.initialise(0)
    biases = {name: bias.normal_() for name, bias in model.named_buffers() if name.endswith(".router.bias")}
    assert biases
    other = Decoder(model.config)
    load_host(other, to_host(model.state_dict(), "bf16"))
    for name, bias in biases.items():
        assert torch.equal(other.state_dict()[name], bias), name
    assert device_digest(other) == device_digest(model)


def test_host_facts_match_a_device_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_decoder()
    tensors = to_host(model.state_dict())
    facts = HostFacts.of(tensors)
    assert facts.digest == root_digest(describe(tensors))
    round_to_form_(model.parameters())
    assert facts.audits == {name: audit(tensor, torch.bfloat16) for name, tensor in model.state_dict().items()}
    bits = tensors["norm"].data.copy()
    bits[3] ^= 1
    following = {**tensors, "norm": HostTensor("bf16", tensors["norm"].shape, bits)}
    after = facts.after({"norm": following["norm"]}, ["norm"])
    assert after == HostFacts.of(following)
    assert after.digest != facts.digest
    monkeypatch.setattr(host, "_THREADED_BYTES", 0)  # in threads, and large tensors in parts
    monkeypatch.setattr(host, "_PIECE", 100)
    assert HostFacts.of(tensors) == facts


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_quantised_bytes_come_back_as_they_were(form: str) -> None:
    trainer, engine = make_decoder(), Decoder(TINY, torch.float32, form)
    round_to_form_(trainer.named_parameters(), form)
    tensors = to_host(trainer.state_dict(), form)
    load_host(engine, tensors)
    assert all(torch.equal(a, b) for a, b in zip(trainer.parameters(), engine.parameters(), strict=True))
    assert device_digest(engine, form) == root_digest(describe(tensors))
