"""New weights while generations run: every token names the weights that sampled it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollmill.errors import EngineError, WeightsError
from rollmill.inference.engine import EngineUnavailable
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.models.host_tensors import device_digest, to_host
from rollmill.models.updates import patch_preparation as prepare_module
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.line_follower import Patch, Update
from tests.inference.world import (
    PROMPT,
    engine_at,
    generate,
    make_model,
    make_update,
    put_together,
    request,
    tolerance,
    until,
    use_device,
)
from tests.inference.world import trainer_logprobs as logprobs_of


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return use_device(request.param, monkeypatch)


on_cpu = pytest.mark.parametrize("device", ["cpu"], indirect=True)


class Remembering:
    """Attention over all keys and values so far, computed by any weights."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        if layer in self._seen:
            keys, values = self._seen[layer]
            k_NKD, v_NKD = torch.cat((keys, k_NKD)), torch.cat((values, v_NKD))
        self._seen[layer] = k_NKD, v_NKD
        new, total = q_NHD.shape[0], k_NKD.shape[0]
        positions = torch.arange(total, device=q_NHD.device)
        visible = positions <= positions[total - new :].unsqueeze(1)
        q, k, v = (x.transpose(0, 1) for x in (q_NHD, k_NKD, v_NKD))
        group = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        return scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1).reshape(new, -1)


@torch.no_grad()
def mixed_logprobs(old: Decoder, new: Decoder, tokens: list[int], switch: int, start: int) -> list[float]:
    """Log-probs of tokens[start:], where positions before `switch` were computed with the old weights."""
    attend, everything = Remembering(), torch.tensor(tokens, device=old.embedding.device)
    parts = []
    for model, piece in ((old, slice(0, switch)), (new, slice(switch, len(tokens)))):
        positions = torch.arange(len(tokens), device=everything.device)[piece]
        parts.append(model.logits(model(everything[piece], positions, attend).hidden).log_softmax(-1))
    table = torch.cat(parts)
    return [float(table[position - 1, tokens[position]]) for position in range(start, len(tokens))]


async def test_a_switch_in_the_middle_of_an_answer(device: Device) -> None:
    old, new = make_update(1), make_update(2)
    async with engine_at(old) as engine:
        chunks = []
        async for chunk in engine.generate(request(max_tokens=200), stream=True):
            chunks.append(chunk)
            if len(chunks) == 4:
                applied = await engine.apply(new)
        session = await generate(engine, request(PROMPT + put_together(chunks).tokens + [1]))
    got = put_together(chunks)
    assert applied.running == 1 and applied.pause_seconds > 0
    assert got.last.finish == "length" and len(got.tokens) == 200, "nothing was dropped"
    assert set(got.policies) == {old.policy, new.policy}
    switch = got.policies.index(new.policy)
    assert switch > 0 and set(got.policies[switch:]) == {new.policy}, "old weights are never used again"
    tokens = PROMPT + got.tokens
    # before the switch: exactly the old weights
    expected = logprobs_of(make_model(old), tokens[: len(PROMPT) + switch], got.routes)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(got.logprobs[:switch], expected, atol=tolerance())
    # after it: the new weights, with keys and values that the old ones wrote. The input of the first token they sampled
    # is the first position they computed
    computed = len(PROMPT) + switch - 1
    mixed = mixed_logprobs(make_model(old), make_model(new), tokens, computed, computed + 1)
    far = np.abs(np.subtract(got.logprobs[switch:], mixed)) > tolerance()
    assert far.mean() <= (0.0 if device == "cpu" else 0.03), (
        "nothing is replayed: in bf16 a router may choose otherwise"
    )
    purely_new = logprobs_of(make_model(new), tokens)[computed:]
    assert np.abs(purely_new.numpy() - got.logprobs[switch:]).max() > 5 * tolerance(), "the old keys matter"
    assert got.last.oldest_kv_policy == old.policy
    assert session.last.oldest_kv_policy == old.policy and session.last.cached_tokens > 0


async def test_a_request_after_the_switch_is_all_new() -> None:
    async with engine_at(make_update(1)) as engine:
        await generate(engine, request(session="old"))
        await engine.apply(make_update(2))
        got = await generate(engine, request(session="new"))
    assert {policy.number for policy in got.policies} == {2}
    assert got.last.oldest_kv_policy == make_update(2).policy


async def test_many_switches_under_load_drop_nothing() -> None:
    updates = [make_update(number) for number in range(6)]
    models = {update.policy.number: make_model(update) for update in updates}
    async with engine_at(updates[0]) as engine:
        tasks = [
            asyncio.create_task(generate(engine, request(session=f"s{n}", seed=n, max_tokens=150))) for n in range(6)
        ]

        def enough(sampled: float) -> bool:
            return engine.metrics()["sampled_tokens_total"] >= sampled or all(task.done() for task in tasks)

        for update in updates[1:]:
            sampled = engine.metrics()["sampled_tokens_total"]
            await until(partial(enough, sampled + 30))
            await engine.apply(update)
        got = [await task for task in tasks]
    for one in got:
        assert len(one.tokens) == 150
        numbers = [policy.number for policy in one.policies]
        assert numbers == sorted(numbers) and len(set(numbers)) > 1
        first = numbers.count(numbers[0])
        expected = logprobs_of(models[numbers[0]], PROMPT + one.tokens[:first], one.routes)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(one.logprobs[:first], expected, atol=tolerance())


def changed(update: Update, number: int, share: float = 0.1) -> tuple[Update, dict[str, list[Patch] | None]]:
    """The next version and the patches to it: some elements of most tensors, and the whole norm."""
    random = np.random.default_rng(number)
    tensors: dict[str, HostTensor] = {}
    patches: dict[str, list[Patch] | None] = {}
    for name, tensor in update.tensors.items():
        bits = tensor.data.copy().view(np.uint16)
        if name == "norm":
            bits += 1
            patches[name] = None
        elif name != "embedding":  # not changed, and not in the patches
            indices = np.flatnonzero(random.random(bits.size) < share).astype(np.uint32)
            bits[indices] ^= 1
            half = len(indices) // 2  # two patches: the second overwrites values of the first
            wrong = Patch(0, indices[:half], bits[indices[:half]] ^ 7)
            patches[name] = [wrong, Patch(0, indices[:half], bits[indices[:half]]), _shifted(indices[half:], bits)]
        tensors[name] = HostTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
    policy = replace(update.policy, number=number, digest=root_digest(describe(tensors)))
    return Update(policy, tensors, patches, update.policy, 0, {}, 0.0), patches


def _shifted(indices: np.ndarray, bits: np.ndarray) -> Patch:
    start = int(indices[0]) if indices.size else 0
    return Patch(start, (indices - np.uint32(start)).astype(np.uint32), bits[indices])


def unread(update: Update) -> Update:
    """The same update with wrong tensors outside the patches: reading more than the patches gives wrong weights."""
    assert update.patches is not None
    tensors = {
        name: tensor if update.patches.get(name, ()) is None else replace(tensor, data=np.zeros_like(tensor.data))
        for name, tensor in update.tensors.items()
    }
    return replace(update, tensors=tensors)


@on_cpu  # on a device the host bytes are read, for the digest and the audits
async def test_only_patches_are_written() -> None:
    first = make_update(1)
    second, _ = changed(first, 2)
    third, _ = changed(second, 3)
    async with engine_at(first) as engine:
        for update in (second, third):
            await engine.apply(unread(update))
            assert engine.health()["policy"]["digest"] == update.policy.digest
            assert device_digest(engine._decoding._model) == update.policy.digest, (
                "touched tensors are audited completely"
            )
        got = await generate(engine, request())
    expected = logprobs_of(make_model(third), PROMPT + got.tokens)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(got.logprobs, expected, atol=tolerance())


async def test_applying_twice_or_from_another_version_gives_the_right_bytes() -> None:
    first = make_update(1)
    second, _ = changed(first, 2)
    async with engine_at(first) as engine:
        for update in (second, second, replace(second, base=make_update(5).policy), make_update(7), second):
            await engine.apply(update)
            assert device_digest(engine._decoding._model) == update.policy.digest
    async with engine_at(None) as engine:  # without any version
        await engine.apply(second)
        assert device_digest(engine._decoding._model) == second.policy.digest


async def test_patches_that_do_not_lead_to_the_version_are_replaced_by_a_copy() -> None:
    first = make_update(1)
    second, patches = changed(first, 2)
    less = {name: listed for name, listed in patches.items() if name != "layers.0.qkv"}
    assert len(less) < len(patches)
    async with engine_at(first) as engine:
        await engine.apply(replace(second, patches=less))
        assert device_digest(engine._decoding._model) == second.policy.digest


@on_cpu
@pytest.mark.parametrize("place", range(6))
async def test_an_interrupted_apply_is_repeated(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into the parameters fails in the middle of the pause."""
    first = make_update(1)
    second, _ = changed(first, 2)
    write, left = prepare_module.TorchChange.write, [place]

    def failing(change: prepare_module.TorchChange) -> None:
        for one in change._writes:
            left[0] -= 1
            if left[0] == -1:
                raise WeightsError("cut")
            one()

    async with engine_at(first) as engine:
        task = asyncio.create_task(generate(engine, request(max_tokens=200)))
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 5)
        monkeypatch.setattr(prepare_module.TorchChange, "write", failing)
        with pytest.raises(WeightsError, match="cut"):
            await engine.apply(second)
        assert engine.health()["policy"] is None, "half of it is neither version"
        monkeypatch.setattr(prepare_module.TorchChange, "write", write)
        await engine.apply(second)
        assert device_digest(engine._decoding._model) == second.policy.digest
        got = await task
    assert len(got.tokens) == 200 and set(got.policies) == {first.policy, second.policy}, "nothing was dropped"


@on_cpu
@pytest.mark.parametrize("place", ["add_whole", "write"])
async def test_a_full_device_refuses_an_update_and_accepts_it_later(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While decoding, or in the pause."""
    first, second = make_update(1), make_update(2)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1 GiB.")

    async with engine_at(first) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module.TorchChange, place, full)
            with pytest.raises(WeightsError, match=r"main@2 was not loaded: .*Tried to allocate 2\.00 GiB\n"):
                await engine.apply(second)
        if place == "add_whole":  # before anything was written
            assert set((await generate(engine, request(session="old"))).policies) == {first.policy}
        else:
            assert engine.health()["policy"] is None
        await engine.apply(second)
        assert set((await generate(engine, request())).policies) == {second.policy}


async def test_bytes_that_do_not_match_are_never_served(device: Device) -> None:
    good, bad = make_update(1), make_update(2)
    flipped = bad.tensors["embedding"].data.copy()
    flipped[10] ^= 1
    bad.tensors["embedding"] = HostTensor("bf16", bad.tensors["embedding"].shape, flipped)
    async with engine_at(good) as engine:
        with pytest.raises(WeightsError, match="do not have digest"):
            await engine.apply(bad)
        if device == "cuda":  # detected before anything was written
            assert {policy.number for policy in (await generate(engine, request(session="old"))).policies} == {1}
        else:
            assert engine.health()["policy"] is None, "its parameters are neither version: it serves nothing"
        task = asyncio.create_task(generate(engine, replace(request(), min_version=2)))
        await until(lambda: engine.metrics()["waiting"] == 1)
        await engine.apply(make_update(2))
        assert {policy.number for policy in (await task).policies} == {2}


async def test_weights_of_another_model_leave_the_served_ones_in_place() -> None:
    good, other = make_update(1), make_update(2)
    del other.tensors["norm"]
    async with engine_at(good) as engine:
        with pytest.raises(WeightsError, match="another model"):
            await engine.apply(other)
        assert {policy.number for policy in (await generate(engine, request())).policies} == {1}


async def test_weights_that_are_not_finite_fail_requests_until_the_next_version() -> None:
    good = make_update(1)
    model = make_model(good)
    with torch.no_grad():
        model.layers[0].qkv.fill_(torch.nan)
    tensors = to_host(model.state_dict())
    broken = replace(
        good, policy=replace(good.policy, number=2, digest=root_digest(describe(tensors))), tensors=tensors
    )
    async with engine_at(good) as engine:
        expected = await generate(engine, request())
        await engine.apply(broken)
        for n in range(4):
            with pytest.raises(EngineError, match="not finite"):
                await generate(engine, request([1] * 60, f"s{n}"))
        await engine.apply(replace(good, policy=replace(good.policy, number=3)))
        got = await asyncio.gather(*(generate(engine, request(session=f"t{n}")) for n in range(4)))
    assert [one.tokens for one in got] == [expected.tokens] * 4


async def test_a_request_that_names_a_line_is_not_served_by_another_one() -> None:
    first, other = make_update(1), make_update(2)
    other = replace(other, policy=replace(other.policy, line="other"))
    async with engine_at(first) as engine:
        waits = asyncio.create_task(generate(engine, replace(request(), line=first.policy.line, min_version=9)))
        await until(lambda: engine.metrics()["waiting"] == 1)
        await engine.apply(other)
        with pytest.raises(EngineUnavailable, match="serves line other"):
            await waits
        with pytest.raises(EngineUnavailable, match="serves line other"):
            await generate(engine, replace(request(), line=first.policy.line))
        assert set((await generate(engine, replace(request(), line="other"))).policies) == {other.policy}
        assert engine.metrics()["waiting"] == engine.metrics()["running"] == 0
