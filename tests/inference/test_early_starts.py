"""On Hopper, kernels of small decode steps start before the one before them is complete: that must not change a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_on
from tests.inference.world import request
from tests.kernels import INTERPRETED, cuda, hopper

SMOLLM2 = ModelConfig(
    vocab_size=49152, layers=30, width=576, heads=9, kv_heads=3, head_dim=64, mlp_width=1536, max_context=2048
)
PAGE, PAGES, PROMPT, STEPS, ROUNDS = 16, 96, 100, 16, 12


def make_model() -> Decoder:
    model = decoder_on(torch.device("cuda"), SMOLLM2)
    random = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05, generator=random)
    return model


def change_weights(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(1, 0))


def make_generations(rows: int) -> list[Generation]:
    random = np.random.default_rng(rows)
    pages = random.permutation(PAGES).tolist()
    made = []
    for number in range(rows):
        tokens = random.integers(0, SMOLLM2.vocab_size, PROMPT + 50 * number).tolist()
        one = Generation(
            number,
            request(tokens, seed=number, max_tokens=3 * STEPS),
            False,
            SMOLLM2.max_context,
            lambda chunk: None,
            0,
        )
        one.blocks = [pages.pop() for _ in range((len(tokens) + 2 * STEPS) // PAGE + 1)]
        made.append(one)
    return made


def sampled(rows: int) -> tuple[list[bytes], torch.Tensor]:
    """What each of two bursts per round sampled, the weights changed before every burst; and the keys and values."""
    from rollmill.inference.embedded.device_runner import DeviceRunner  # needs triton

    model = make_model()
    cache = KVCache(model.config, PAGES, PAGE, torch.bfloat16, "cuda")
    runner, found = DeviceRunner(model, cache, 512), []
    generations = make_generations(rows)
    for one in generations:
        runner.run([Work(one, 0, len(one.tokens))])
    for _ in range(ROUNDS):
        for starts in ([len(one.tokens) - 1 for one in generations], None):
            change_weights(model)
            burst = runner.launch(generations, starts, STEPS)()
            found.append(burst.tokens_KB.tobytes() + burst.logprobs_KB.tobytes())
    given = PAGES * PAGE * cache.kv_heads  # without the spare page, which several padding rows write
    return found, torch.stack((cache.keys[:, :given], cache.values[:, :given]))


@cuda
@hopper
@pytest.mark.skipif(INTERPRETED, reason="kernels do not overlap in the interpreter")
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_bursts_have_the_bits_of_usual_starts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.models.kernels import small_batch_triton

    assert small_batch_triton.starts_early(torch.device("cuda"))
    early, early_cache = sampled(rows)
    monkeypatch.setattr(small_batch_triton, "EARLY_STARTS", False)
    usual, usual_cache = sampled(rows)
    again, again_cache = sampled(rows)
    assert usual == again and torch.equal(usual_cache, again_cache), "usual starts differ among themselves"
    assert len(set(usual)) == len(usual) == 2 * ROUNDS
    others = [number for number, (one, other) in enumerate(zip(early, usual, strict=True)) if one != other]
    assert others == [], f"{len(others)} of {len(usual)} bursts differ"
    assert torch.equal(early_cache, usual_cache)
