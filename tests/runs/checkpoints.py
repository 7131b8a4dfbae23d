"""A tiny checkpoint that a run can start from: Llama's layout, random weights, and a ChatML tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.demo.tokenizer import session_texts
from tests.models.checkpoints import make_checkpoint

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 300
# stages of a run that is made from settings alone; later settings address them by name
RL = 'stages=[{kind="rl", steps=1}]'
_DEMO = '[{kind="rollmill.demo.demonstrations:Demonstrations"}]'
MIDTRAIN_AND_RL = f'stages=[{{kind="midtrain", steps=1, sources={_DEMO}}}, {{kind="rl", steps=1}}]'
TASKS = "tasks.kind=rollmill.demo.micro_repos:MicroRepos"  # RL needs tasks: a setting of every run with steps


def chat_tokenizer(special: tuple[str, ...] = CHATML, size: int = VOCABULARY) -> Tokenizer:
    return Tokenizer(train_tokenizer(session_texts(200), size, special))


def make_chat_checkpoint(directory: Path, **change: Any) -> Any:
    """The model of `transformers`, saved in bf16 beside the tokenizer."""
    settings = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 512, **change}
    model = make_checkpoint("llama", directory, torch.bfloat16, **settings)
    chat_tokenizer().save(directory / "tokenizer.json")
    return model
