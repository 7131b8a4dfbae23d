from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rollmill.errors import ConfigError, WeightsError
from rollmill.models.upcycle import Upcycle, upcycle
from tests.later import Later
from tests.models.checkpoints import load_checkpoint, make_checkpoint, our_logits, their_logits, tokens_of

transformers = Later("transformers")


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("name", "every", "architecture"), [("llama", 1, "Mixtral"), ("qwen3", 1, "Qwen3Moe"), ("qwen3", 2, "Qwen3Moe")]
)
def test_a_mixture_starts_equal_to_the_dense_model(
    name: str, every: int, architecture: str, noise: float, tmp_path: Path
) -> None:
    dense = make_checkpoint(name, tmp_path / "dense")
    checkpoint = upcycle(tmp_path / "dense", tmp_path / "moe", Upcycle(4, 2, every, noise))
    assert checkpoint.layout.architecture == f"{architecture}ForCausalLM"
    config, model = load_checkpoint(tmp_path / "moe")
    assert [config.is_mixture(layer) for layer in range(3)] == [(layer + 1) % every == 0 for layer in range(3)]
    expected = their_logits(dense, tokens_of())
    torch.testing.assert_close(our_logits(model, tokens_of()), expected, atol=2e-5, rtol=1e-4)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    torch.testing.assert_close(their_logits(theirs, tokens_of()), expected, atol=2e-5, rtol=1e-4)
    first, second = model.layers[1].mlp.gate_up[:2]
    assert torch.equal(first, second) == (noise == 0)


def test_noise_is_exact_in_bf16(tmp_path: Path) -> None:
    """Each expert alone computes the same as the dense layer, bit for bit."""
    make_checkpoint("llama", tmp_path / "dense", torch.bfloat16)
    upcycle(tmp_path / "dense", tmp_path / "moe", Upcycle(4, 2, noise=1.0))
    _, dense = load_checkpoint(tmp_path / "dense")
    _, model = load_checkpoint(tmp_path / "moe")
    gate_up, down = dense.layers[0].mlp.gate_up.t(), dense.layers[0].mlp.down.t()
    for expert in range(4):
        scaled = model.layers[0].mlp.gate_up[expert], model.layers[0].mlp.down[expert]
        ratio = scaled[0][:, 48:].float() / gate_up[:, 48:].float()
        assert set(ratio.unique().tolist()) == {0.5, 2.0}
        assert torch.equal(scaled[1].float() * ratio[0].unsqueeze(1), down.float())
        assert torch.equal(scaled[0][:, :48], gate_up[:, :48])


def test_the_seed_decides_and_the_tokenizer_is_copied(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "dense")
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        upcycle(tmp_path / "dense", tmp_path / name, Upcycle(4, 2, noise=0.5, seed=seed))
    first, again, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "again", "other")
    )
    assert first == again and first["model.safetensors"] != other["model.safetensors"]
    assert first["tokenizer.json"] == b"{}"
    assert json.loads(first["config.json"])["model_type"] == "qwen3_moe"


def test_models_that_cannot_be_upcycled_exactly_are_refused(tmp_path: Path) -> None:
    for name in ("qwen2", "llama, biases", "qwen3 moe", "llama"):
        make_checkpoint(name, tmp_path / name)
    with pytest.raises(WeightsError, match="attention that no mixture layout has"):
        upcycle(tmp_path / "qwen2", tmp_path / "x", Upcycle(4, 2))
    with pytest.raises(WeightsError, match="attention that no mixture layout has"):
        upcycle(tmp_path / "llama, biases", tmp_path / "x", Upcycle(4, 2))
    with pytest.raises(WeightsError, match="mixture of experts already"):
        upcycle(tmp_path / "qwen3 moe", tmp_path / "x", Upcycle(4, 2))
    with pytest.raises(ConfigError, match="experts in every layer"):
        upcycle(tmp_path / "llama", tmp_path / "x", Upcycle(4, 2, every=2))
    for wrong in ((4, 1), (2, 3)):
        with pytest.raises(ConfigError, match="cannot start equal"):
            Upcycle(*wrong)
    assert not (tmp_path / "x").exists()
