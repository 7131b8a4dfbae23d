"""Exact numerics: the trainer finds every log-prob that the engine recorded, bit for bit.

Sessions of two turns start at random moments and share prefixes. Prompts are computed in pieces, guesses are made, cuts
and penalties shape the distributions, and new weights arrive in the middle. Every token is computed again under the
version that it names, in packed batches of other sizes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import ConfigError
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.adapters import trained
from rollmill.models.config import Adapter, ModelConfig, with_adapter
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.kernels.exact import fixes_order
from rollmill.models.shaping import Shape
from rollmill.models.triton import has_triton
from rollmill.training.batching import PackedSequence, SampledFacts, pack
from rollmill.training.single import SINGLE
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update
from tests.chat.test_streaming import KINDS
from tests.inference.world import Whole, generate, until
from tests.kernels import cuda

pytestmark = pytest.mark.skipif(has_triton(torch.device("cpu")), reason="exact products are BLAS's, not Triton's")
DENSE = ModelConfig(
    vocab_size=300, layers=2, width=80, heads=6, kv_heads=2, head_dim=24, mlp_width=200, max_context=256, qk_norm=True
)
MIXTURE = DENSE.model_copy(update={"experts": 8, "experts_per_token": 3, "expert_width": 48, "shared_experts": 1})
LATENT = ModelConfig(
    vocab_size=300,
    layers=2,
    width=64,
    heads=4,
    kv_heads=4,
    head_dim=24,
    mlp_width=96,
    dense_layers=1,
    experts=8,
    experts_per_token=2,
    expert_width=40,
    gate="sigmoid",
    gate_bias=True,
    max_context=256,
    latent={"q_rank": 24, "kv_rank": 32, "plain_dim": 16, "rope_dim": 8, "value_dim": 12},
)
TURNED = DENSE.model_copy(update={"rotated_dim": DENSE.head_dim // 2, "unrotated_layers": (1,)})  # GLM, SmolLM3
ADAPTED = with_adapter(MIXTURE.model_copy(update={"dense_layers": 1}), Adapter(rank=8))
ENGINE = EngineConfig(
    max_batch=12, block_size=8, cache_tokens=2048, prefill_chunk=24, draft_tokens=4, stream_seconds=0, recompute_kv=True
)
SESSIONS, VERSIONS = 18, 3


every_model = pytest.mark.parametrize(
    ("model", "form"),
    [
        pytest.param(DENSE, "bf16", id="dense"),
        pytest.param(MIXTURE, "bf16", id="mixture"),
        pytest.param(LATENT, "bf16", id="latent"),
        pytest.param(DENSE, "fp8", id="dense-fp8"),
        pytest.param(MIXTURE, "fp8", id="mixture-fp8"),
        pytest.param(MIXTURE, "nvfp4", id="mixture-nvfp4"),
        pytest.param(ADAPTED, "bf16", id="adapted"),
        pytest.param(ADAPTED, "fp8", id="adapted-fp8"),
    ],
)


FORMS = [
    pytest.param(DENSE, "bf16", id="dense"),
    pytest.param(MIXTURE, "bf16", id="mixture"),
    pytest.param(LATENT, "bf16", id="latent"),
    pytest.param(DENSE, "fp8", id="dense-fp8"),
    pytest.param(MIXTURE, "fp8", id="mixture-fp8"),
    pytest.param(MIXTURE, "nvfp4", id="mixture-nvfp4"),
    pytest.param(ADAPTED, "bf16", id="adapted"),
    pytest.param(ADAPTED, "fp8", id="adapted-fp8"),
]


def make_update(model: ModelConfig, number: int, form: str) -> Update:
    decoder = Decoder(model)
    decoder.initialise(number)
    for name, parameter in trained(decoder).items():
        if name.endswith("_adapter.b"):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1
    tensors = to_host(decoder.state_dict(), form)
    policy = PolicyRef("main", number, form, root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


def sampling_of(number: int) -> dict[str, Any]:
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.7, "logit_bias": ((5, 20.0), (6, 20.0))},  # it repeats itself, so that guesses are right
        {"top_p": 0.9, "temperature": 1.3},
        {"top_k": 20, "min_p": 0.01, "presence_penalty": 0.5},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": ((5, 1.0),)},
    ]
    return ways[number % len(ways)]


@dataclass
class Turn:
    request: GenerateRequest
    whole: Whole

    def sequences(self) -> Iterator[tuple[PolicyRef, PackedSequence]]:
        """The tokens of each version, each with its whole context."""
        context = np.array(self.request.tokens + self.whole.tokens, np.int64)
        start, names = len(self.request.tokens), np.array([policy.number for policy in self.whole.policies])
        for number in np.unique(names):
            places = np.flatnonzero(names == number)
            rows = start + places - 1
            facts = self._facts(context, places)
            sequence = PackedSequence(context[: rows[-1] + 1], rows, context[rows + 1], facts=facts)
            yield self.whole.policies[places[0]], sequence

    def _facts(self, context: np.ndarray, places: np.ndarray) -> SampledFacts:
        sampling, start, count = self.request.sampling, len(self.request.tokens), len(places)
        shapes = np.full(count, None, object)
        if sampling.cuts or sampling.changes_logits:
            for index, place in enumerate(places):
                kept = self.whole.kept[place] if self.whole.kept else b""
                shapes[index] = Shape(sampling, context[: start + place].astype(np.int32), start, kept)
        return SampledFacts(
            logprobs=np.array(self.whole.logprobs, np.float32)[places],
            temperatures=np.full(count, sampling.temperature, np.float32),
            advantages=np.zeros(count, np.float32),
            staleness=np.zeros(count, np.int64),
            trajectory=np.zeros(count, np.int64),
            shapes=shapes,
        )


async def converse(engine: EmbeddedEngine, number: int, model: ModelConfig) -> list[Turn]:
    random = np.random.default_rng(number)
    shared = np.random.default_rng(1000 + number // 4).integers(0, model.vocab_size, 37).tolist()
    tokens = shared + random.integers(0, model.vocab_size, int(random.integers(1, 30))).tolist()
    await asyncio.sleep(0.005 * number)
    turns = []
    for _ in range(2):
        sampling = Sampling(**{"max_tokens": int(random.integers(8, 44)), "seed": number, **sampling_of(number)})
        asked = GenerateRequest(f"s{number}", list(tokens), sampling)
        turns.append(Turn(asked, await generate(engine, asked)))
        tokens = [*tokens, *turns[-1].whole.tokens, *random.integers(0, model.vocab_size, 7).tolist()]
    return turns


async def sample(
    model: ModelConfig,
    updates: list[Update],
    config: EngineConfig = ENGINE,
    *,
    exact: bool = True,
    sessions: int = SESSIONS,
    device: Device = "cpu",
) -> list[Turn]:
    form = updates[0].policy.form
    async with EmbeddedEngine(model, config, form=form, exact=exact, device=device) as engine:
        await engine.apply(updates[0])
        tasks = [asyncio.create_task(converse(engine, number, model)) for number in range(sessions)]
        for number, update in enumerate(updates[1:], 1):
            enough = number * sessions * 40 // len(updates)
            await until(lambda enough=enough: engine.metrics()["sampled_tokens_total"] >= enough)  # type: ignore[misc]
            await engine.apply(update)
        turns = [turn for task in tasks for turn in await task]
        turns += await converse(engine, 20, model)  # alone, so that guesses are made
        metrics = engine.metrics()
    assert metrics["prefix_hit_tokens_total"] > 0
    assert metrics["draft_tokens_right_total"] > 0
    return turns


def recomputed(
    model: ModelConfig,
    updates: list[Update],
    turns: list[Turn],
    exact: bool = True,
    *,
    device: Device = "cpu",
    tokens: int = 900,
) -> tuple[int, int]:
    """(differing log-probs, log-probs): the trainer's against the engine's. `tokens`: per micro-batch."""
    decoder = decoder_on(torch.device(device), model, updates[0].policy.form)
    decoder.recompute_mlp = True
    if exact:
        decoder.compute_exactly()
    differing = total = 0
    for update in updates:
        load_host(decoder, update.tensors)
        found = [each for turn in turns for policy, each in turn.sequences() if policy == update.policy]
        for part in pack(found, tokens):
            assert part.facts is not None
            logprobs_M = SINGLE.passes.recompute(decoder, part, None).logprobs_M.detach().cpu().numpy()
            differing += int((logprobs_M.view(np.int32) != part.facts.logprobs.view(np.int32)).sum())
            total += len(logprobs_M)
    return differing, total


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of the trainer; the engine has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("model", "form"), [*FORMS, pytest.param(TURNED, "bf16", id="turned")])
async def test_no_bit_differs(model: ModelConfig, form: str, two_threads: None) -> None:
    updates = [make_update(model, number, form) for number in range(VERSIONS)]
    turns = await sample(model, updates)
    assert {policy.number for turn in turns for policy in turn.whole.policies} == set(range(VERSIONS))
    differing, total = recomputed(model, updates, turns)
    assert differing == 0 and total == sum(len(turn.whole.tokens) for turn in turns) > 800


async def test_no_bit_differs_under_a_grammar(tmp_path: Path) -> None:
    """The trainer finds the tokens that were allowed in the record."""
    tokenizer = Tokenizer(KINDS["byte-level"](SPECIAL_TOKENS))
    tokenizer.save(tmp_path / "tokenizer.json")
    model = MIXTURE.model_copy(update={"vocab_size": tokenizer.vocab_size})
    update = make_update(model, 0, "bf16")
    turns: list[Turn] = []
    async with EmbeddedEngine(model, ENGINE, exact=True, tokenizer=tmp_path / "tokenizer.json") as engine:
        await engine.apply(update)
        for number in range(6):
            asked = Sampling(max_tokens=24, seed=number, grammar="start: /[a-f]+[0-9]+/", stop_tokens=(0,))
            asked = replace(asked, top_p=0.8) if number % 2 else replace(asked, temperature=1.5)
            request = GenerateRequest(f"g{number}", tokenizer.encode(f"word {number}"), asked)
            turns.append(Turn(request, await generate(engine, request)))
    assert all(re.match("[a-f]+[0-9]*", tokenizer.decode(turn.whole.tokens)) for turn in turns)
    differing, total = recomputed(model, [update], turns)
    assert differing == 0 and total > 60


async def test_without_it_most_bits_differ() -> None:
    """The comparison can fail."""
    updates = [make_update(MIXTURE, 0, "bf16")]
    turns = await sample(MIXTURE, updates, exact=False)
    differing, total = recomputed(MIXTURE, updates, turns, exact=False)
    assert differing > total // 2


@pytest.mark.slow
async def test_tokens_do_not_depend_on_what_else_is_decoded() -> None:
    updates = [make_update(MIXTURE, 0, "bf16")]
    crowded = await sample(MIXTURE, updates, sessions=8)
    alone = ENGINE.model_copy(update={"max_batch": 1, "prefill_chunk": 7, "block_size": 16})
    for turn, other in zip(crowded, await sample(MIXTURE, updates, alone, sessions=8), strict=True):
        assert turn.whole.tokens == other.whole.tokens and turn.whole.logprobs == other.whole.logprobs


@cuda
@pytest.mark.parametrize(("model", "form"), FORMS)
async def test_no_bit_differs_on_hopper(model: ModelConfig, form: str) -> None:
    """Large micro-batches take other kernels than small ones."""
    updates = [make_update(model, number, form) for number in range(VERSIONS)]
    turns = await sample(model, updates, sessions=4 * SESSIONS, device="cuda")
    for tokens in (300, 8192):
        differing, total = recomputed(model, updates, turns, device="cuda", tokens=tokens)
        assert differing == 0 and total == sum(len(turn.whole.tokens) for turn in turns) > 800


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_are_refused(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: what torch would say of another one is made up."""
    monkeypatch.setattr("rollmill.models.kernels.exact.has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not fixes_order(torch.device("cuda"))
    monkeypatch.setattr("rollmill.models.decoder.fixes_order", lambda device: False)
    with pytest.raises(ConfigError, match="not a Hopper"):
        Decoder(DENSE).compute_exactly()
