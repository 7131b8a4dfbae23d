from __future__ import annotations

import numpy as np
import pytest
import torch

from rollmill.errors import TrajectoryError
from rollmill.inference.embedded.sampler import Draw, _sample, log_distribution, sample, uniform
from rollmill.trajectories.allowed_tokens import decode_kept, encode_kept, holds
from rollmill.types import Sampling
from tests.kernels import DEVICE

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
CONTEXT = [5, 0, 1, 1, 3]  # the answer begins at its third token
LARGE = 49152  # tokens in a real vocabulary


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


def _many(sampling: Sampling, draws: int = 20000) -> tuple[np.ndarray, np.ndarray]:
    drawn = sample(LOGITS.expand(draws, -1), [Draw(sampling, seed, 11, CONTEXT, 2) for seed in range(draws)])
    return np.array(drawn.tokens), np.array(drawn.logprobs)


def _distribution(sampling: Sampling, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    return log_distribution(logits.unsqueeze(0), [Draw(sampling, 0, 0, CONTEXT, 2)])[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=3),
        Sampling(top_p=0.8),
        Sampling(temperature=1.5, top_k=5, top_p=0.6),
        Sampling(temperature=1.5, min_p=0.2),
        Sampling(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias=((4, 2.0),)),
    ],
    ids=str,
)
def test_token_frequencies_match_their_logprobs(sampling: Sampling) -> None:
    tokens, logprobs = _many(sampling)
    exact = _distribution(sampling).exp().numpy()
    assert exact.sum() == pytest.approx(1)
    np.testing.assert_allclose(np.exp(logprobs), exact[tokens], rtol=1e-6)
    counts = np.bincount(tokens, minlength=len(exact))
    assert (counts[exact == 0] == 0).all()
    deviation = np.sqrt(exact * (1 - exact) / len(tokens))
    assert (np.abs(counts / len(tokens) - exact) <= 5 * deviation).all()


def test_top_k_and_top_p_keep_the_right_tokens() -> None:
    def kept(sampling: Sampling) -> list[int]:
        return _distribution(sampling).isfinite().nonzero().flatten().tolist()

    probabilities = LOGITS.softmax(-1)
    assert kept(Sampling(top_k=2)) == [0, 1]
    assert kept(Sampling(top_p=float(probabilities[0]) + 1e-4)) == [0, 1], "the smallest set that reaches p"
    assert kept(Sampling(top_p=float(probabilities[0]) - 1e-4)) == [0]
    assert kept(Sampling(top_p=1e-9)) == [0], "the most likely token always stays"
    assert kept(Sampling(top_k=3, top_p=0.999)) == [0, 1, 2]
    assert kept(Sampling()) == [0, 1, 2, 3, 4, 5]
    assert kept(Sampling(min_p=float(probabilities[1] / probabilities[0]) - 1e-4)) == [0, 1]
    assert kept(Sampling(min_p=1.0)) == [0]


def _reference(logits: np.ndarray, sampling: Sampling) -> set[int]:
    """The kept tokens, one cut after the other, in double precision."""
    left = np.argsort(-logits, kind="stable")
    probability = np.exp((logits / sampling.temperature).astype(np.float64))
    left = left[probability[left] >= sampling.min_p * probability[left[0]]]
    left = left[: sampling.top_k or None]
    share = probability[left] / probability[left].sum()
    return set(left[np.cumsum(share) - share < sampling.top_p].tolist())


@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat: all tokens are sorted", "peaked"])
def test_cuts_of_a_large_vocabulary_are_those_of_the_reference(spread: float, device: str) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(spread * random.standard_normal((12, 5000)).astype(np.float32))
    samplings = [
        Sampling(
            temperature=float(random.uniform(0.5, 1.5)),
            top_p=float(random.choice([1.0, 0.3, 0.9])),
            top_k=int(random.choice([0, 3, 700])),
            min_p=float(random.choice([0.0, 0.01, 0.2])),
        )
        for _ in range(12)
    ]
    drawn = sample(logits.to(device), [Draw(one, 0, 0) for one in samplings])
    for row, sampling in enumerate(samplings):
        expected = _reference(logits[row].numpy(), sampling)
        if not sampling.cuts:
            assert drawn.kept[row] == b""
            continue
        found = np.flatnonzero(np.unpackbits(decode_kept(drawn.kept[row], 5000), bitorder="little"))
        assert len(expected ^ set(found.tolist())) <= 2, "FP32 may round a token over the edge"
        assert drawn.tokens[row] in found
        scaled = logits[row, found].double() / sampling.temperature
        exact = logits[row, drawn.tokens[row]].double() / sampling.temperature - scaled.logsumexp(0)
        assert drawn.logprobs[row] == pytest.approx(float(exact), abs=1e-4)


def test_penalties_are_those_of_their_definition() -> None:
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias=((2, -1.5),))
    # 0, 1, 3, 5 are in the context; 1 is twice in the answer and 3 once
    expected = torch.tensor([1.0, 0.5 - 0.5 - 2 * 0.25, 0.5 - 1.5, 0.0 - 0.5 - 0.25, -1.0, -6.0])
    torch.testing.assert_close(_distribution(sampling), expected.log_softmax(-1))


def test_plain_rows_keep_their_bits_beside_others() -> None:
    logits = torch.randn((3, 500), generator=torch.Generator().manual_seed(0))
    plain = Draw(Sampling(temperature=0.7), 3, 9)
    other = Draw(Sampling(top_p=0.5, presence_penalty=1.0), 3, 9, [1, 2], 1)
    together, alone = sample(logits, [other, plain, other]), sample(logits[1:2], [plain])
    assert (together.tokens[1], together.logprobs[1], together.kept[1]) == (alone.tokens[0], alone.logprobs[0], b"")


@pytest.mark.parametrize("count", [1, 48, 49, 3000, 5000])
def test_kept_tokens_survive_their_encoding(count: int) -> None:
    bits = np.zeros(5000, np.bool_)
    bits[np.random.default_rng(count).permutation(5000)[:count]] = True
    packed = np.packbits(bits, bitorder="little")
    data = encode_kept(packed)
    assert np.array_equal(decode_kept(data, 5000), packed) and len(data) < 5000 / 8 + 20
    token = int(np.flatnonzero(bits)[-1])
    assert holds(packed, token)
    for wrong, size in (
        (data[:-1], 5000),
        (data, token),
        (b"\3" + data[1:], 5000),
        (b"\2" + bytes(30), 5000),
        (b"", 9),
    ):
        with pytest.raises(TrajectoryError, match="kept tokens"):
            decode_kept(wrong, size)


def test_greedy_takes_the_likeliest_and_records_the_plain_logprob() -> None:
    draws = [Draw(Sampling(temperature=0.0), 1, 1), Draw(Sampling(temperature=0.01), 1, 1)]
    tokens, logprobs, _ = sample(LOGITS.expand(2, -1), draws)
    assert tokens == [0, 0]
    assert logprobs[0] == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    draws = [Draw(Sampling(), seed, position) for seed in range(20) for position in range(20)]
    together = sample(LOGITS.expand(len(draws), -1), draws)[0]
    alone = [sample(LOGITS.unsqueeze(0), [draw])[0][0] for draw in draws]
    assert together == alone
    assert len(set(together)) > 3


def test_uniform_numbers_are_uniform_and_independent() -> None:
    rows = uniform(list(range(5000)), [3] * 5000)
    columns = uniform([3] * 5000, list(range(5000)))
    for numbers in (rows, columns, uniform([2**64 - 1] * 100, list(range(100)))):
        assert ((numbers >= 0) & (numbers < 1)).all()
    for numbers in (rows, columns):
        histogram = np.histogram(numbers, 10, (0, 1))[0]
        assert ((histogram > 380) & (histogram < 620)).all()
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_logits_that_are_not_finite_give_such_a_logprob() -> None:
    tokens, logprobs, _ = sample(torch.full((1, 6), torch.nan), [Draw(Sampling(), 1, 1)])
    assert 0 <= tokens[0] < 6 and not np.isfinite(logprobs[0])


# -- a large vocabulary, searched in two levels


def test_two_levels_draw_the_same_as_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn((64, LARGE), generator=torch.Generator().manual_seed(0)).to(device)
    draws = [Draw(Sampling(temperature=0.5 + seed / 64), seed, 5) for seed in range(64)]
    drawn = sample(logits, draws)
    monkeypatch.setattr("rollmill.inference.embedded.sampler._ONE_LEVEL", LARGE)
    assert sample(logits, draws) == drawn
    assert len(set(drawn.tokens)) > 32


@pytest.mark.parametrize("size", [LARGE, 5000], ids=["whole chunks", "a chunk cut short"])
def test_tokens_of_probability_zero_are_never_drawn(size: int, device: str) -> None:
    """Six tokens, at the ends of chunks and of the vocabulary, have the right frequency; no other token is drawn."""
    places = torch.tensor([0, 511, 512, 1024, size - 2, size - 1])
    row = torch.full((size,), -torch.inf).index_copy_(0, places, LOGITS).to(device)
    tokens = sample(row.expand(2000, -1), [Draw(Sampling(), seed, 3) for seed in range(2000)])[0]
    counts = np.array([tokens.count(place) for place in places.tolist()])
    assert counts.sum() == 2000
    exact = LOGITS.softmax(-1).numpy()
    assert (np.abs(counts / 2000 - exact) <= 5 * np.sqrt(exact * (1 - exact) / 2000)).all()


def test_large_and_not_finite(device: str) -> None:
    tokens, logprobs, _ = sample(torch.full((1, LARGE), torch.nan, device=device), [Draw(Sampling(), 1, 1)])
    assert 0 <= tokens[0] < LARGE and not np.isfinite(logprobs[0])


@pytest.mark.kernels
@pytest.mark.parametrize("size", [300, LARGE])
def test_the_kernel_draws_the_same(size: int) -> None:
    """It sums in another order, but so exactly that none of these draws is near enough to a limit."""
    logits = 3 * torch.randn((32, size), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    temperatures = [(1.0, 0.0, 0.7, 1.3)[row % 4] for row in range(32)]
    draws = [
        Draw(Sampling(temperature=temperature), 2**64 - 1 - row * 2**58, 5)
        for row, temperature in enumerate(temperatures)
    ]
    draws[9] = Draw(Sampling(top_k=3), 9, 5)
    drawn, expected = sample(logits, draws), _sample(logits, draws)
    assert drawn.tokens == expected.tokens and drawn.kept == expected.kept
    assert drawn.logprobs == expected.logprobs, "with the bits of the trainer's kernel"


@pytest.mark.kernels
def test_random_numbers_on_the_device_have_the_bits_of_the_host() -> None:
    """Tokens of equal probability 1/4096: the drawn one is the number's first twelve bits."""
    seeds = [*np.random.default_rng(0).integers(0, 2**64, 60, dtype=np.uint64).tolist(), 0, 1, 2**63, 2**64 - 1]
    for position in (1, 2**20):
        draws = [Draw(Sampling(), seed, position) for seed in seeds]
        tokens = sample(torch.zeros((len(seeds), 4096), device=DEVICE), draws).tokens
        assert tokens == (uniform(seeds, [position] * len(seeds)) * 4096).astype(int).tolist()
