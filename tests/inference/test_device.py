"""The engine's kernels compared with torch; on CUDA, bits that do not depend on the batch, and weight updates."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.outputs import BurstRunner, StepRunner
from rollmill.inference.embedded.runner import Runner
from rollmill.inference.embedded.sampler import sample
from rollmill.inference.embedded.scheduler import DRAFTED_POSITIONS, DRAFTING_BATCH, Scheduler, Work
from rollmill.models.config import LatentAttention, ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import device_digest, round_to_form_
from tests.inference.test_switch import changed
from tests.inference.world import PROMPT, TINY, Whole, engine_at, generate, make_update, request, until, use_device
from tests.kernels import DEVICE, INTERPRETED, cuda, hopper, without_kernels

# The interpreter takes milliseconds per token: all sizes are a quarter, those of tiles too. In bf16 no token of these
# prompts has experts so nearly alike that rounding chooses others.
BLOCKS, BLOCK_SIZE = 80, 4 if INTERPRETED else 16
CHUNK, PROMPTS = (7, [19, 9, 1, 4, 2]) if INTERPRETED else (30, [100, 37, 1, 16, 17])
LATENT = LatentAttention(kv_rank=16, plain_dim=16, rope_dim=8, value_dim=16)
SHAPES = {
    "grouped": TINY,
    "odd": TINY.model_copy(update={"heads": 6, "kv_heads": 2, "head_dim": 24}),
    "smollm2": TINY.model_copy(update={"heads": 9, "kv_heads": 3, "head_dim": 64, "experts": 0}),
    "normed": TINY.model_copy(update={"head_dim": 32, "qk_norm": True}),
    "latent": TINY.model_copy(update={"heads": 4, "kv_heads": 4, "head_dim": 24, "latent": LATENT}),
}
CASES = [(shape, torch.bfloat16) for shape in SHAPES]
if INTERPRETED:  # FP32 rounds less, but experts take long in the interpreter
    CASES = [("odd", torch.bfloat16), *((shape, torch.float32) for shape in SHAPES)]


@pytest.fixture
def engine_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device("cuda", monkeypatch)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, form: str = "bf16") -> Decoder:
    model = Decoder(config, dtype, form).to(DEVICE)
    model.initialise(1)
    round_to_form_(model.named_parameters(), form)
    return model


def make_generations(lengths: Sequence[int]) -> list[Generation]:
    random = np.random.default_rng(0)
    pages = random.permutation(BLOCKS).tolist()
    generations = []
    for number, length in enumerate(lengths):
        tokens = random.integers(0, TINY.vocab_size, length).tolist()
        one = Generation(number, request(tokens), False, 256, lambda chunk: None, 0)
        one.blocks = [pages.pop() for _ in range(length // BLOCK_SIZE + 2)]
        generations.append(one)
    return generations


class Steps:
    """Steps of one runner, and the last position's logits by (generation, position)."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.logits: dict[tuple[int, int], torch.Tensor] = {}

    def run(self, work: Sequence[Work]) -> None:
        output = self._runner.run(work)
        rows = iter(output.logits.cpu().clone())  # waits, as sampling does before the next step's plan is written
        for item in output.work:
            if item.completes:
                self.logits[item.generation.number, item.start + item.count] = next(rows)

    def decode(self, generations: Sequence[Generation], times: int) -> None:
        for _ in range(times):
            for one in generations:
                one.tokens.append((one.tokens[-1] * 7 + 1) % TINY.vocab_size)
            self.run([Work(one, len(one.tokens) - 1, 1) for one in generations])


def cache_of(model: Decoder, *, fp8: bool = False) -> KVCache:
    return KVCache(model.config, BLOCKS, BLOCK_SIZE, model.embedding.dtype, model.embedding.device, fp8=fp8)


def runner_of(model: Decoder, *, fp8: bool = False) -> Any:
    from rollmill.inference.embedded.device_runner import DeviceRunner  # needs triton

    return DeviceRunner(model, cache_of(model, fp8=fp8), 256)


def device_steps(model: Decoder, *, graphs: bool = True, joined: bool = True, fp8: bool = False) -> Steps:
    runner = runner_of(model, fp8=fp8)
    assert runner.graphs == model.embedding.is_cuda
    runner.graphs &= graphs
    runner.joined = joined
    return Steps(runner)


def in_chunks(steps: Steps) -> Steps:
    """Prompts in chunks, then single tokens; on CUDA recorded steps among them."""
    generations = make_generations(PROMPTS)
    steps.run([Work(item, 0, min(CHUNK, len(item.tokens))) for item in generations])
    steps.run([Work(item, CHUNK, len(item.tokens) - CHUNK) for item in generations if len(item.tokens) > CHUNK])
    steps.decode(generations, 1 if INTERPRETED else 5)
    steps.decode(generations[1:4], 1 if INTERPRETED else 5)
    return steps


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        from rollmill.inference.embedded.kernels import paged_triton
        from rollmill.models.kernels.attention import fixed_order_triton

        monkeypatch.setattr(fixed_order_triton, "KEYS", 16)
        monkeypatch.setattr(paged_triton, "ROWS", 16)


def largest_difference(steps: Steps, reference: Steps) -> float:
    assert steps.logits.keys() == reference.logits.keys() and len(steps.logits) > (10 if INTERPRETED else 40)
    return max(float((steps.logits[key] - reference.logits[key]).abs().max()) for key in steps.logits)


@pytest.mark.kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_the_kernels_agree_with_torch(shape: str, dtype: torch.dtype) -> None:
    model = model_of(SHAPES[shape], dtype)
    with without_kernels():
        reference = in_chunks(Steps(Runner(model, cache_of(model))))
    worst = largest_difference(in_chunks(device_steps(model)), reference)
    print(f"{shape}: largest difference of logits {worst:.1e}")
    assert worst < (0.15 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_the_kernels_keep_keys_and_values_in_fp8_as_torch_does(shape: str, dtype: torch.dtype) -> None:
    model = model_of(SHAPES[shape], dtype)
    with without_kernels():
        plain = in_chunks(Steps(Runner(model, cache_of(model))))
        reference = in_chunks(Steps(Runner(model, cache_of(model, fp8=True))))
    steps = in_chunks(device_steps(model, fp8=True))
    rounding, worst = largest_difference(reference, plain), largest_difference(steps, reference)
    print(f"{shape}: FP8 changes logits by {rounding:.1e}; kernels differ by {worst:.1e}")
    assert rounding > 1e-2 and worst < (0.15 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.kernels
def test_the_tiles_that_attend_to_the_most_keys_begin_first() -> None:
    from rollmill.inference.embedded.kernels.paged_triton import tile_positions
    from rollmill.inference.embedded.plans import make_plan

    cache = cache_of(model_of(SHAPES["smollm2"]))
    short, long = make_generations([30, 100])
    plan = make_plan(cache, [Work(short, 0, 30), Work(long, 50, 50)])
    size, tiles = tile_positions(cache.group), plan.tiles_T4.tolist()
    assert [start for _, _, start, _ in tiles] == sorted((start for _, _, start, _ in tiles), reverse=True)
    expected = [(at, min(size, 30 - at), at, 0) for at in range(0, 30, size)]
    expected += [(30 + at, min(size, 50 - at), 50 + at, 1) for at in range(0, 50, size)]
    assert sorted(map(tuple, tiles)) == sorted(expected)


@pytest.mark.kernels
def test_steps_with_guesses_have_few_shapes_and_these_are_warm() -> None:
    from rollmill.inference.embedded.outputs import sampled_rows
    from rollmill.inference.embedded.plans import MOST_ROWS, drafted_shapes, shape_of

    assert DRAFTED_POSITIONS <= MOST_ROWS and len(drafted_shapes(4 * 9)) == 4 and len(drafted_shapes(128)) == 7
    for draft_tokens, batch in itertools.product((1, 8, 64), range(1, DRAFTING_BATCH + 1)):
        scheduler = Scheduler(EngineConfig(max_batch=batch), draft_tokens)
        warm = drafted_shapes(scheduler.guessed_positions)
        most = min(draft_tokens, DRAFTED_POSITIONS // batch - 1)
        for counts in itertools.product({0, 1, most // 2, most}, repeat=batch):
            generations = make_generations([5] * batch)
            work = [Work(one, 4, 1 + count, (0,) * count) for one, count in zip(generations, counts, strict=True)]
            if any(counts):
                shape = shape_of(work, 1000)
                assert shape in warm and len(sampled_rows(work)) <= shape.rows and batch <= shape.sequences


@pytest.mark.kernels
@pytest.mark.usefixtures("small_tiles")
def test_guessed_positions_have_the_logits_of_single_steps() -> None:
    """One sequence has guesses, another has none. On CUDA the step is recorded meanwhile."""
    model = model_of(SHAPES["smollm2"], torch.float32 if INTERPRETED else torch.bfloat16)
    single, guessing, following = device_steps(model, joined=False), runner_of(model), (3, 1, 2)
    for turn in range(1 if INTERPRETED else 4):
        first, second = make_generations([9 + turn, 5])
        for one in (single._runner, guessing):
            one.run([Work(item, 0, len(item.tokens)) for item in (first, second)])
        work = [Work(first, len(first.tokens) - 1, 4, following), Work(second, 4, 1)]
        guessed = guessing.run(work).logits.cpu()
        expected = []
        for token in (*following, 0):
            one = single._runner.run([Work(first, len(first.tokens) - 1, 1), Work(second, 4, 1)]).logits.cpu()
            expected.append(one[0])
            first.tokens.append(token)
        torch.testing.assert_close(
            guessed, torch.stack([*expected, one[1]]), atol=1e-4 if INTERPRETED else 0.05, rtol=0
        )


@cuda
@pytest.mark.parametrize(
    ("shape", "form"),
    [("grouped", "bf16"), ("smollm2", "bf16"), ("latent", "bf16"), ("grouped", "fp8"), ("smollm2", "nvfp4")],
)
def test_a_row_has_the_same_bits_in_any_batch(shape: str, form: str) -> None:
    """Alone, with others, recorded or not, and with a sampled context or the same as a prompt."""
    model = model_of(SHAPES[shape], form=form)
    together, eager, alone, prompt = (
        device_steps(model, graphs=graphs, joined=False) for graphs in (True, False, True, True)
    )
    for one in (together, eager):
        generations = make_generations([100, 37, 1, 16, 17, 64])
        one.run([Work(item, 0, len(item.tokens)) for item in generations])
        one.decode(generations, 6)
    for index in range(6):
        single = make_generations([100, 37, 1, 16, 17, 64])[index]
        alone.run([Work(single, 0, len(single.tokens))])
        alone.decode([single], 6)
        prompt.run([Work(single, 0, len(single.tokens))])
    for key, logits in together.logits.items():
        assert torch.equal(logits, eager.logits[key]), key
        assert torch.equal(logits, alone.logits[key]), key
    for key, logits in prompt.logits.items():
        assert torch.equal(logits, together.logits[key]), key


@hopper
@pytest.mark.kernels
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", ["smollm2", "normed"])
def test_the_pass_of_decode_steps_has_the_bits_of_any_other_with_exact_numerics(shape: str) -> None:
    from rollmill.inference.embedded.decode_pass import fits  # needs triton

    model = model_of(SHAPES[shape] if not INTERPRETED else SHAPES[shape].model_copy(update={"experts": 0}))
    model.compute_exactly()
    assert fits(model), "else both would be the same pass"
    joined, apart = (in_chunks(device_steps(model, joined=joined)) for joined in (True, False))
    assert largest_difference(joined, apart) == 0


@pytest.mark.usefixtures("engine_on_cuda")
async def test_a_chain_of_versions_arrives_while_decoding() -> None:
    update = make_update(0)
    async with engine_at(update) as engine:

        def ask(n: int) -> asyncio.Task[Whole]:
            return asyncio.create_task(generate(engine, request(session=f"s{n}", seed=n, max_tokens=200)))

        tasks = [ask(n) for n in range(8)]
        digests = {update.policy.digest}
        for number in range(1, 9):
            tasks.append(ask(7 + number))  # a fast device may be through with the others
            sampled = engine.metrics()["sampled_tokens_total"]
            await until(lambda sampled=sampled: engine.metrics()["sampled_tokens_total"] > sampled + 20)  # type: ignore[misc]
            update, _ = changed(update, number)
            await engine.apply(update)
            assert device_digest(engine._decoding._model) == update.policy.digest
            digests.add(update.policy.digest)
        got = [await task for task in tasks]
    for one in got:
        numbers = [policy.number for policy in one.policies]
        assert len(numbers) == 200 and numbers == sorted(numbers)
        assert {policy.digest for policy in one.policies} <= digests
    assert len({policy.number for one in got for policy in one.policies}) > 4


@pytest.mark.usefixtures("engine_on_cuda")
async def test_the_next_update_detects_damaged_memory() -> None:
    """Even in a tensor that the update does not change."""
    first = make_update(1)
    second, patches = changed(first, 2)
    assert "embedding" not in patches
    async with engine_at(first) as engine:
        with torch.no_grad():
            engine._decoding._model.embedding[3, 4] += 1
        await engine.apply(second)
        assert device_digest(engine._decoding._model) == second.policy.digest
        assert (await generate(engine, request(PROMPT))).policies[0] == second.policy


@pytest.mark.kernels
@pytest.mark.parametrize("shape", ["grouped"] if INTERPRETED else ["grouped", "smollm2"])
def test_a_burst_on_the_device_samples_what_single_steps_sample(shape: str) -> None:
    """Three steps, then two more that go on from there. One row has left meanwhile; another has reached its limit."""
    model = model_of(SHAPES[shape], torch.float32 if INTERPRETED else torch.bfloat16)
    runner = runner_of(model)
    assert isinstance(runner, BurstRunner)  # the decode loop asks this
    generations, expected = make_generations([5, 9, 3]), {}
    for one in generations:
        runner.run([Work(one, 0, len(one.tokens))])
    copies = [(one, list(one.tokens)) for one in generations]
    generations[1].limit = len(generations[1].tokens) + 3
    for _ in range(5):
        output = runner.run([Work(one, len(one.tokens) - 1, 1) for one in generations])
        drawn, routes = sample(output.logits, [item.draw for item in output.work]), output.host_routes()
        for row, one in enumerate(generations):
            key = (row, len(one.tokens))
            expected[key] = drawn.tokens[row], drawn.logprobs[row], None if routes is None else routes[row].tolist()
            one.tokens.append(drawn.tokens[row])
    for one, tokens in copies:
        one.tokens = tokens
    starts = [len(one.tokens) - 1 for one in generations]
    first = runner.launch(generations, starts, 3)()
    checked = 0
    for begin, burst, live in (
        (0, first, (0, 1, 2)),
        (3, runner.launch([generations[0], None, generations[2]], None, 2)(), (0, 2)),
    ):
        for step, row in itertools.product(range(len(burst.tokens_KB)), live):
            token, logprob, routes = expected[row, starts[row] + 1 + begin + step]
            assert burst.tokens_KB[step, row] == token
            assert abs(burst.logprobs_KB[step, row] - logprob) < 1e-4
            assert burst.routes is None or burst.routes[step, row].tolist() == routes
            checked += 1
    assert checked == 13
