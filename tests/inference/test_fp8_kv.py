"""Keys and values in FP8: pages take a byte per number, and log-probs are a little off."""

from __future__ import annotations

import pytest
import torch

from rollmill.errors import EngineError
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.engine import EmbeddedEngine
from tests.inference.world import ENGINE, PROMPT, TINY, engine_at, generate, make_update, request

FP8 = ENGINE.model_copy(update={"fp8_kv": True})


def test_a_page_takes_a_byte_per_number_and_ends_at_448() -> None:
    cache = KVCache(TINY, 3, 4, torch.float32, fp8=True)
    assert cache.keys.element_size() == cache.values.element_size() == 1
    rows = cache.rows_of(torch.tensor([1, 1]), torch.tensor([0, 1]))
    k = torch.tensor([1.0, -3.3, 500.0, -1e6]).repeat(2, TINY.kv_heads, TINY.head_dim // 4)
    cache.write(0, rows, k, 2 * k)
    cache.copy([(1, 2)])
    for page in (1, 2):
        keys, values = cache.read(0, cache.pages_of(torch.tensor([[page]])))
        assert keys.dtype == torch.float32
        first = keys.view(TINY.kv_heads, 4, TINY.head_dim)[:, :2, :4]
        assert first[0, 0].tolist() == [1.0, -3.25, 448.0, -448.0] and torch.equal(first[0, 1], first[1, 0])
        assert values.view(TINY.kv_heads, 4, -1)[0, 0, :4].tolist() == [2.0, -6.5, 448.0, -448.0]
    cache.clear([2])
    assert not cache.read(0, cache.pages_of(torch.tensor([[2]])))[0].any()


async def test_log_probs_are_near_those_of_unrounded_keys_and_values() -> None:
    wanted = request(PROMPT, seed=1, max_tokens=40)
    async with engine_at(make_update(0)) as plain, engine_at(make_update(0), FP8) as rounded:
        usual = await generate(plain, wanted)
        ours = await generate(rounded, wanted)
        await generate(rounded, request(PROMPT + ours.tokens, session="other", seed=1, max_tokens=1))
        found = rounded.metrics()["prefix_hit_tokens_total"]
    same = next((at for at, pair in enumerate(zip(usual.tokens, ours.tokens, strict=True)) if len(set(pair)) > 1), 40)
    assert same > 0, "the first token has the same context"
    differences = [abs(a - b) for a, b in zip(usual.logprobs[:same], ours.logprobs[:same], strict=True)]
    assert 0 < max(differences) < 0.5
    assert found >= len(PROMPT), "pages are found by content as usual"


def test_exact_numerics_refuse_it() -> None:
    with pytest.raises(EngineError, match="fp8_kv"):
        EmbeddedEngine(TINY, FP8, exact=True)
