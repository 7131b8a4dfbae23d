from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from tests.models.reference import TINY, make_decoder, reference_logits

VARIANTS = {
    "mixture": {},
    "dense": {"experts": 0},
    "one dense layer, shared experts": {"dense_layers": 1, "shared_experts": 2},
    "sigmoid gate, tied embeddings": {"gate": "sigmoid", "tie_embeddings": True},
    "one kv head": {"kv_heads": 1},
    "no groups, one expert a token": {"kv_heads": 4, "experts_per_token": 1},
}
LENGTHS = [7, 1, 20, 5, 19, 6]  # several buckets, and a sequence of a single token


def _variant(name: str) -> Decoder:
    return make_decoder(TINY.model_copy(update=VARIANTS[name]))


def _tokens(lengths: list[int]) -> torch.Tensor:
    return torch.randint(TINY.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))


def _packed_logits(model: Decoder, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return model.logits(model(tokens, packed_positions(lengths), PackedAttention(lengths)).hidden)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_sequences_give_the_same_as_each_alone(name: str) -> None:
    model, tokens = _variant(name), _tokens(LENGTHS)
    expected = torch.cat([reference_logits(model, sequence) for sequence in tokens.split(LENGTHS)])
    torch.testing.assert_close(_packed_logits(model, tokens, LENGTHS), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_those_of_the_plain_formula(name: str) -> None:
    model, tokens = _variant(name), _tokens(LENGTHS)
    weights = torch.randn(len(tokens), TINY.vocab_size, generator=torch.Generator().manual_seed(2))
    (_packed_logits(model, tokens, LENGTHS) * weights).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = torch.cat([reference_logits(model, sequence) for sequence in tokens.split(LENGTHS)])
    (expected * weights).sum().backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(found[name] / scale, parameter.grad / scale, atol=2e-5, rtol=0, msg=name)


def test_the_same_step_gives_the_same_bits() -> None:
    model, tokens = make_decoder(), _tokens(LENGTHS)
    runs = []
    for _ in range(3):
        model.zero_grad()
        _packed_logits(model, tokens, LENGTHS).logsumexp(-1).sum().backward()
        runs.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_token_sees_nothing_after_it_and_no_other_sequence() -> None:
    model, tokens = make_decoder(), _tokens([6, 6])
    before = _packed_logits(model, tokens, [6, 6])
    changed = tokens.clone()
    changed[3] = (changed[3] + 1) % TINY.vocab_size
    after = _packed_logits(model, changed, [6, 6])
    same = (before == after).all(-1)
    assert same.tolist() == [True] * 3 + [False] * 3 + [True] * 6


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_logits_are_never_rounded_to_bf16() -> None:
    model = make_decoder().to(torch.bfloat16)
    tokens = _tokens([9])
    output = model(tokens, packed_positions([9]), PackedAttention([9]))
    logits = model.logits(output.hidden)
    assert output.hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert (logits.bfloat16().float() != logits).any()
    assert all(routing.scores.dtype == torch.float32 for routing in output.routings)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, again, other = Decoder(TINY), Decoder(TINY), Decoder(TINY)
    first.initialise(1), again.initialise(1), other.initialise(2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)


def test_the_default_model_has_the_size_the_demo_is_made_for() -> None:
    parameters = sum(parameter.numel() for parameter in Decoder(ModelConfig(vocab_size=132)).parameters())
    assert 0.9e6 < parameters < 1e6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 3}, "multiple of kv_heads"),
        ({"head_dim": 7}, "must be even"),
        ({"experts_per_token": 9}, "exceeds experts"),
    ],
)
def test_a_shape_that_contradicts_itself_is_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig(**{**TINY.model_dump(), **change})
