"""A run with published versions of a tiny model, as if it had been trained."""

from __future__ import annotations

from pathlib import Path

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.runs.run import RunDirectory
from tests.inference.test_follower import Line
from tests.runs.checkpoints import chat_tokenizer
from tests.runs.conftest import make_config

TINY = ("layers=1", "width=16", "heads=2", "kv_heads=1", "head_dim=8", "mlp_width=16", "expert_width=8")


def published_run(root: Path, versions: int, *overrides: str) -> RunDirectory:
    small = (*(f"model.{setting}" for setting in TINY), "rollouts.max_answer_tokens=8", "harness.max_turns=2")
    run = RunDirectory.create(root, make_config("device=cpu", 'engines=[{region="home"}]', *small, *overrides))
    chat_tokenizer(SPECIAL_TOKENS).save(run.tokenizer)
    line = Line(run.home_store, run.config.model, "rl")
    for _ in range(versions):
        line.publish()
    return run
