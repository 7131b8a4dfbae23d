"""Deltas that are coded where the weights are. On the CPU the reference does what the kernels do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import to_host
from rollmill.storage.objects import Objects
from rollmill.training import single as whole
from rollmill.training.config import TrainingConfig
from rollmill.training.publishing.device_delta import codes_on_device
from rollmill.training.publishing.exporter import Exporter
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing import encoder
from tests.kernels import DEVICE
from tests.models.reference import TINY, make_decoder
from tests.weights.build import same


@torch.no_grad()
def moved(model: Decoder, seed: int, share: float) -> None:
    """A synthetic step: some weights change by one unit in the last place, others by more."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        bits = parameter.view(-1).view(torch.int16)
        where = torch.rand(bits.shape, generator=generator) < share
        change = torch.randint(1, 4, bits.shape, generator=generator, dtype=torch.int16)
        bits.copy_((bits.cpu() ^ torch.where(where, change, 0).to(torch.int16)).to(bits.device))


@pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.kernels, id="kernels")])
def test_versions_come_back_bit_for_bit(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_decoder(TINY)
    model = Decoder(TINY, torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.to(device)
    monkeypatch.setattr(whole, "codes_on_device", lambda state, form: True)
    by_host: list[Any] = []
    plain = encoder.encode_difference
    monkeypatch.setattr(encoder, "encode_difference", lambda *given: by_host.append(given) or plain(*given))
    store = WeightStore(Objects.open(tmp_path))
    publisher = Exporter(whole.SINGLE, model, store, "main", ["bf16"], TrainingConfig(snapshot_every=100))
    expected = []
    # nothing changes; few elements change; so many that the host chooses the coding
    for number, share in enumerate((0.0, 0.01, 0.0, 0.02, 0.9, 0.01)):
        moved(model, number, share)
        exported = publisher.export(model)
        assert (exported["bf16"].payloads is not None) == (number > 0)
        before = len(by_host)
        moved(model, 100 + number, 0.01)  # the next step begins before the version is written
        publisher.publish(number, exported, None, {})
        assert (len(by_host) > before) == (share == 0.9), number
        expected.append(exported["bf16"].held)
    for number, tensors in enumerate(expected):
        assert same(store.load(Version("main", number)), tensors)

    # another publisher takes over: its base is not the one on the device
    other = Exporter(whole.SINGLE, model, store, "main", ["bf16"], TrainingConfig())
    other.resume()
    assert other.export(model)["bf16"].payloads is None
    # an export that is not published is no base
    publisher.export(model)
    assert publisher.export(model)["bf16"].payloads is None


@pytest.mark.parametrize("method", ["__init__", "make"])
def test_without_room_on_the_device_the_host_codes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = Decoder(TINY, torch.bfloat16)
    model.load_state_dict(make_decoder(TINY).state_dict())
    monkeypatch.setattr(whole, "codes_on_device", lambda state, form: True)
    monkeypatch.setattr(whole.DeviceDelta, method, full)
    store = WeightStore(Objects.open(tmp_path))
    publisher = Exporter(whole.SINGLE, model, store, "main", ["bf16"], TrainingConfig(snapshot_every=100))
    for number in range(3):
        moved(model, number, 0.01)
        exported = publisher.export(model)
        assert exported["bf16"].payloads is None
        publisher.publish(number, exported, None, {})
        assert same(store.load(Version("main", number)), exported["bf16"].held)
    making = publisher._chains["bf16"][0]
    assert isinstance(making, whole.HostBytes) and making._delta is None, "its copy is given back"


def test_only_weights_of_the_form_on_a_gpu_are_coded_there() -> None:
    state = Decoder(TINY, torch.bfloat16).state_dict()
    assert not codes_on_device(state, "bf16")
    if torch.cuda.is_available():
        there = {name: tensor.cuda() for name, tensor in state.items()}
        assert codes_on_device(there, "bf16") and not codes_on_device(there, "fp8")
        assert not codes_on_device({name: tensor.float() for name, tensor in there.items()}, "bf16")


def test_a_base_that_is_kept_is_not_copied(tmp_path: Path) -> None:
    model = make_decoder(TINY)
    publisher = Exporter(whole.SINGLE, model, WeightStore(Objects.open(tmp_path)), "main", ["bf16"], TrainingConfig())
    exported = publisher.export(model)
    publisher.publish(0, exported, None, {})
    base = publisher._chains["bf16"][1]._base
    memory = [each.data for each in exported["bf16"].held.values()]
    assert base and all(any(np.shares_memory(chunk, each) for each in memory) for chunk in base.values())
    assert same(exported["bf16"].held, to_host(model.state_dict()))
