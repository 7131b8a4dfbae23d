from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Told
from tests.cli.test_train import refused
from tests.models.checkpoints import make_checkpoint


def test_a_checkpoint_is_got_shown_and_upcycled(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path / "dense")
    told = rollmill("model", "get", tmp_path / "dense", "--to", tmp_path / "mine")
    assert told.code == 0 and "Qwen3ForCausalLM" in told.out
    told = rollmill("model", "upcycle", tmp_path / "mine", tmp_path / "moe", "--experts", 4, "--per-token", 2)
    assert told.code == 0 and "Qwen3MoeForCausalLM" in told.out
    told = rollmill("model", "show", tmp_path / "moe")
    for fact in ("4 of width 48 in 3 layers, 2 per token", "q/k norms", "F32 100.0%", "no tokenizer.json"):
        assert fact in told.out, fact


def test_latent_attention_is_shown(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    make_checkpoint("deepseek", tmp_path)
    told = rollmill("model", "show", tmp_path)
    assert "latent, 4 heads, rank 16" in told.out and "2 shared, sigmoid gate" in told.out


def test_paths_that_are_no_checkpoint_are_refused(rollmill: Callable[..., Told], tmp_path: Path) -> None:
    assert refused(rollmill("model", "show", tmp_path), "has no config.json", "transformers saves it")
    assert refused(rollmill("model", "show", tmp_path / "nowhere"), "is not a directory", "rollmill model get")
    assert refused(rollmill("model", "get", "unheard-of"), "no known model", "smollm2-135m")
    make_checkpoint("qwen2", tmp_path / "qwen2")
    assert refused(rollmill("model", "upcycle", tmp_path / "qwen2", tmp_path / "x"), "no mixture layout has", "Qwen3")
    assert rollmill("model", "upcycle", tmp_path / "qwen2", tmp_path / "x", "--per-token", 1).code == 2
