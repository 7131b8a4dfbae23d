"""The guide to an agent that exists already, executed as a newcomer would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

from tests.cli.test_init import shell
from tests.runs.checkpoints import make_chat_checkpoint
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "train-an-existing-agent.md"


@pytest.mark.slow
def test_the_guide_to_an_existing_agent_works_word_by_word(tmp_path: Path) -> None:
    make_chat_checkpoint(tmp_path / "models" / "smollm2-135m")  # small, and already there
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4
    script = "\n".join(blocks).replace("rollmill model get smollm2-135m\n", "").replace("8000", str(unused_port()))
    printed = shell(f"trap 'rollmill stop runs/served-* > stopped.txt' EXIT\n{script}", tmp_path)
    assert "model    rollmill" in printed
    assert "OpenAI: 5 messages" in printed and "Anthropic:" in printed
    assert len(re.findall(r"live-[0-9a-f]{32}", printed)) == 2, printed
