"""Features of real models' layouts: trainer and engine compute the same, forwards and backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.runner import Runner
from rollmill.inference.embedded.scheduler import Work
from rollmill.inference.engine import GenerateRequest
from rollmill.models.attention import packed_positions
from rollmill.models.config import LatentAttention, ModelConfig
from rollmill.models.counts import cache_numbers
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.layouts import named_views
from rollmill.models.packed_attention import packed_attention
from rollmill.types import Sampling
from tests.models.checkpoints import LAYOUTS, load_checkpoint, make_checkpoint, our_logits, tokens_of
from tests.models.reference import TINY, make_decoder

LATENT = LatentAttention(q_rank=14, kv_rank=10, plain_dim=6, rope_dim=4, value_dim=5)
GATE = {"gate": "sigmoid", "gate_bias": True, "experts": 6, "gate_groups": 3, "gate_groups_kept": 2, "gate_scale": 1.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True, "output_bias": True},
    "q/k norms": {"qk_norm": True},
    "partly rotated": {"qk_norm": True, "rotated_dim": 4, "layers": 3, "unrotated_layers": (1,)},
    "latent": {"latent": LATENT, "head_dim": 10, "kv_heads": 4, **GATE},
    "latent, full queries": {"latent": LATENT.model_copy(update={"q_rank": None}), "head_dim": 10, "kv_heads": 4},
    "dense in between": {"layers": 3, "dense_also": (1,), "gate_normalised": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_engines_pages_give_the_same_as_the_trainer(name: str) -> None:
    """A prompt in two pieces, then token by token, beside another sequence."""
    model = make_decoder(ModelConfig(**{**TINY.model_dump(), **VARIANTS[name]}))
    tokens = torch.randint(TINY.vocab_size, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = our_logits(model, torch.tensor(tokens)).detach()  # an engine computes with latents from here on
    runner = Runner(model, KVCache(model.config, blocks=32, block_size=4))
    generations = [_generation(tokens, [7, 3, 9, 1, 30, 12]), _generation(tokens[:5], [2, 4])]
    runner.run([Work(generations[0], 0, 9), Work(generations[1], 0, 5)])
    runner.run([Work(generations[0], 9, 8)])
    for position in range(17, 24):
        generations[0].tokens = tokens[: position + 1]
        output = runner.run([Work(generations[0], position, 1)])
        torch.testing.assert_close(output.logits[0], expected[position], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_with_exact_numerics_a_trainer_computes_with_latents_too(form: str) -> None:
    """Its gradients are those of expanded keys and values."""
    config = ModelConfig(**{**TINY.model_dump(), **VARIANTS["latent"]})
    tokens = torch.randint(TINY.vocab_size, (24,), generator=torch.Generator().manual_seed(3))
    lengths, grad = [15, 9], torch.randn(24, config.width, generator=torch.Generator().manual_seed(4))
    found = []
    for exact in (False, True):
        model = Decoder(config, form=form)
        model.initialise(0)
        round_to_form_(model.named_parameters(), form)
        if exact:
            model.compute_exactly()
        attend = packed_attention(lengths, "cpu", torch.float32, exact)
        output = model(tokens, packed_positions(lengths), attend)
        output.hidden.backward(grad)
        found.append({"output": output.hidden.detach(), **{name: each.grad for name, each in model.named_parameters()}})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, atol=1e-4, rtol=1e-3, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_an_engine_keeps_one_latent_for_all_heads() -> None:
    config = ModelConfig(**{**TINY.model_dump(), **VARIANTS["latent"]})
    cache = KVCache(config, blocks=32, block_size=4)
    assert cache.keys.shape == (config.layers, 33 * 4, LATENT.kv_rank + LATENT.rope_dim)
    assert cache.values.data_ptr() == cache.keys.data_ptr(), "a part of it is their value"
    assert cache.keys.numel() == 33 * 4 * cache_numbers(config), "`rollmill plan` counts the same"


def _generation(tokens: list[int], blocks: list[int]) -> Generation:
    request = GenerateRequest("s", list(tokens), Sampling(max_tokens=1))
    generation = Generation(0, request, False, 64, lambda chunk: None, 0)
    generation.blocks = blocks
    return generation


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_checkpoint(name, tmp_path)
    _, ours = load_checkpoint(tmp_path)
    tokens = tokens_of()
    weights = torch.randn(len(tokens), 61, generator=torch.Generator().manual_seed(2))
    (theirs(tokens.unsqueeze(0)).logits[0] * weights).sum().backward()
    (our_logits(ours, tokens) * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    layout = read_layout(theirs.config.to_dict())
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    compared = 0
    for each in named_views(layout, gradients):
        gradient = expected.get(each.name)
        if gradient is None:  # experts, which have other names in memory
            assert "experts" in each.name or "block_sparse_moe" in each.name, each.name
            continue
        gradient = gradient if each.order is None else gradient[each.order]
        scale = gradient.abs().max()
        assert scale > 0 or "k_proj.bias" in each.name  # softmax ignores what is added to all keys
        torch.testing.assert_close(each.view / scale, gradient / scale, atol=5e-5, rtol=0, msg=each.name)
        compared += 1
    assert compared >= 5 * ours.config.layers


def test_experts_come_from_the_best_groups_only() -> None:
    """By hand: groups {0, 1}, {2, 3}, {4, 5}. The best two groups have the highest sums of their two best experts."""
    config = ModelConfig(**{**TINY.model_dump(), **GATE, "experts_per_token": 2})
    router = make_decoder(config).layers[0].mlp.router
    router.bias.zero_()
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.55, 0.5]])  # sums 0.9, 1.1, 1.05: the single best expert is out
    assert router._choose(scores.logit())[1].tolist() == [[2, 4]]
    router.bias[5] = 0.3  # enough to be chosen, together with its group
    assert router._choose(scores.logit())[1].tolist() == [[5, 2]]


def test_the_bias_affects_the_choice_but_not_the_weights() -> None:
    config = ModelConfig(**{**TINY.model_dump(), "gate": "sigmoid", "gate_bias": True, "gate_scale": 2.0})
    router = make_decoder(config).layers[0].mlp.router
    x = torch.randn(50, TINY.width, generator=torch.Generator().manual_seed(0))
    router.bias[3] = 10.0
    routing, weights = router(x, None)
    assert (routing.chosen[:, 0] == 3).all(), "first in order, by its bias"
    chosen = routing.scores.gather(1, routing.chosen)
    torch.testing.assert_close(weights, 2.0 * chosen / chosen.sum(-1, keepdim=True))
    assert (weights[:, 0] < weights[:, 1]).any()
    assert not any(name.endswith("router.bias") for name, _ in make_decoder(config).named_parameters())
    assert "layers.0.mlp.router.bias" in make_decoder(config).state_dict()


def test_models_keep_their_names_and_shapes() -> None:
    """Published versions and checkpoints are read by these names."""
    state = Decoder(TINY).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items() if not name.startswith("layers.1.")} == {
        "embedding": (37, 24),
        "norm": (24,),
        "head": (37, 24),
        "layers.0.attention_norm": (24,),
        "layers.0.qkv": (64, 24),
        "layers.0.output": (24, 32),
        "layers.0.mlp_norm": (24,),
        "layers.0.mlp.router.weight": (5, 24),
        "layers.0.mlp.gate_up": (5, 24, 24),
        "layers.0.mlp.down": (5, 12, 24),
    }


def test_biases_start_at_zero_and_norms_at_one() -> None:
    model = Decoder(TINY.model_copy(update={"qkv_bias": True, "output_bias": True, "qk_norm": True}))
    model.initialise(0)
    layer = model.layers[0]
    assert not layer.qkv_bias.any() and not layer.output_bias.any()
    assert (layer.q_norm == 1).all() and (layer.k_norm == 1).all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"latent": LATENT, "kv_heads": 4}, "plain_dim"),
        ({"latent": LATENT, "head_dim": 10}, "kv_heads must be 4"),
        ({"latent": LATENT, "head_dim": 10, "kv_heads": 4, "qk_norm": True}, "neither"),
        ({"gate_groups": 2}, "equal groups"),
        ({"experts": 6, "gate_groups": 3, "experts_per_token": 3}, "too few"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5, "original_context": 8}}, "greater than or equal to 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "does not match any of the expected tags"),
    ],
)
def test_an_inconsistent_shape_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelConfig(**{**TINY.model_dump(), **change})
