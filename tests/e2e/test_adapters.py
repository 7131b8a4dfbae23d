"""The guide to one GPU, executed as a newcomer would: RL trains an adapter beside weights that stay as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollmill.models.adapters import is_adapter
from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from rollmill.types import Version
from rollmill.weights.files.checkpoint_directory import read_weights
from rollmill.weights.reading.weight_store import WeightStore
from tests.cli.test_init import LESS, shell
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "one-gpu.md"


@pytest.mark.slow
def test_the_guide_trains_an_adapter(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    train = "rollmill train run.toml stages.rl.training.adapter.rank=8"
    shell(block.replace(train, f"{train}{LESS} 'numerics=\"exact\"'", 1), tmp_path)
    run = RunDirectory.open(tmp_path / "mine" / "runs" / "my-run")
    store, events = WeightStore(run.objects()), read_events(run.events)
    manifest, first = store.manifest(Version("rl", 1)), store.manifest(Version("rl", 0))
    changed = {new.name for new, old in zip(manifest.tensors, first.tensors, strict=True) if new.chunks != old.chunks}
    assert changed and all(map(is_adapter, changed))
    adapter = sum(each.bytes for each in manifest.tensors if is_adapter(each.name))
    assert manifest.delta is not None and manifest.delta.bytes <= 1.1 * adapter < 0.2 * manifest.full_bytes
    assert first.parent == Version("sft", max(store.numbers("sft", "bf16")))
    sampled = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in sampled] == [1]
    merged = read_weights(tmp_path / "mine" / "merged").tensors
    assert "model.layers.0.self_attn.q_proj.weight" in merged and not any("adapter" in name for name in merged)
