"""Supervised fine-tuning: next-token cross-entropy on the assistant's tokens of conversations.

[[stages]]
kind = "sft"
steps = 200

[[stages.sources]]
kind = "conversations"
path = "chats/*.jsonl"
"""

from __future__ import annotations

from rollmill.training.stages.midtrain import Midtrain


class Sft(Midtrain):
    """The same objective as mid-training: its sources say which tokens are learnt."""
