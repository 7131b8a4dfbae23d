"""Engines that serve a quantised form: parameters are dequantised, and every token names the digest of the bytes."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmill.errors import WeightsError
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import device_digest, load_host, to_host
from rollmill.types import PolicyRef
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update
from tests.inference.world import ENGINE, PROMPT, TINY, generate, request, tolerance, trainer_logprobs, use_device


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return use_device(request.param, monkeypatch)


def make_update(number: int, form: str) -> Update:
    model = Decoder(TINY)
    model.initialise(number)
    tensors = to_host(model.state_dict(), form)
    policy = PolicyRef("main", number, form, root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
async def test_tokens_are_sampled_from_the_form_and_name_it(form: str, device: Device) -> None:
    first, second = make_update(1, form), make_update(2, form)
    patched = replace(second, base=first.policy, patches={name: [] for name in second.tensors})
    async with EmbeddedEngine(TINY, ENGINE, device=device, form=form) as engine:
        for update in (first, patched):
            await engine.apply(update)
            got = await generate(engine, request(session=str(update.policy.number), max_tokens=40))
            assert set(got.policies) == {update.policy}
            assert device_digest(engine._decoding._model, form) == update.policy.digest
            model = decoder_on(torch.device(device), TINY, form)
            load_host(model, update.tensors)
            expected = trainer_logprobs(model, PROMPT + got.tokens, got.routes)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(got.logprobs, expected, atol=tolerance() if device == "cpu" else 0.2)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
async def test_a_changed_tensor_that_patches_leave_out_is_loaded(form: str, device: Device) -> None:
    first, second = make_update(1, form), make_update(2, form)
    patches = {name: [] for name in second.tensors if not name.startswith("layers.0.qkv")}
    async with EmbeddedEngine(TINY, ENGINE, device=device, form=form) as engine:
        await engine.apply(first)
        await engine.apply(replace(second, base=first.policy, patches=patches))
        assert device_digest(engine._decoding._model, form) == second.policy.digest


async def test_a_damaged_version_leaves_the_served_one_in_place(device: Device) -> None:
    good, bad = make_update(1, "fp8"), make_update(2, "fp8")
    bad.tensors["layers.0.qkv"].data[7] ^= 1
    async with EmbeddedEngine(TINY, ENGINE, device=device, form="fp8") as engine:
        await engine.apply(good)
        with pytest.raises(WeightsError, match="do not have digest"):
            await engine.apply(bad)
        assert set((await generate(engine, request())).policies) == {good.policy}


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
async def test_a_damaged_parameter_is_repaired_by_the_next_version(form: str, device: Device) -> None:
    first = make_update(1, form)
    tensors = {**first.tensors, "norm": make_update(2, form).tensors["norm"]}
    tensors["norm"].data[:2] ^= 1
    policy = PolicyRef("main", 2, form, root_digest(describe(tensors)))
    second = Update(policy, tensors, {"norm": []}, first.policy, 0, {}, time.time())
    async with EmbeddedEngine(TINY, ENGINE, device=device, form=form) as engine:
        await engine.apply(first)
        model = engine._decoding._model
        with torch.no_grad():
            model.layers[0].output[3, 5] += 1.0
        await engine.apply(second)
        assert device_digest(model, form) == policy.digest
        assert set((await generate(engine, request())).policies) == {policy}
