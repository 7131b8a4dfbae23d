"""Real out-of-memory errors: on the CPU with a limit on the process, on CUDA with part of the device's memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.errors import StorageError, TrainingError
from rollmill.models.config import ModelConfig
from rollmill.models.device import Device
from rollmill.storage.objects import Objects
from rollmill.training.config import MidtrainConfig, TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.memory_errors import explain_out_of_memory
from rollmill.training.pretraining.document_objective import MidtrainObjective
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.training.streams import generated

MODEL = ModelConfig(
    vocab_size=512, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp_width=4096, experts=0, max_context=65_536
)
LENGTH = 16_384


def document(index: int) -> tuple[list[int], list[bool]]:
    """The documents of the third step are long."""
    length = LENGTH if index >= 4 else 64
    tokens = np.random.default_rng((0, index)).integers(0, MODEL.vocab_size, length)
    return tokens.tolist(), [True] * length


def make_trainer(path: Path, device: Device, **dials: int) -> Trainer:
    training = TrainingConfig(tokens_per_microbatch=2 * LENGTH, checkpoint_every=1, deterministic=False, **dials)
    objective = MidtrainObjective(
        MidtrainConfig(documents_per_step=2, publish_every=1),
        generated(document),
        max_context=MODEL.max_context,
        tokens_per_microbatch=training.tokens_per_microbatch,
    )
    objects = Objects.open(path / "store")
    return Trainer(training, MODEL, objective, WeightStore(objects), objects, "main", steps=9, seed=0, device=device)


LIMITED = """
import pathlib, resource, sys
from tests.training.test_memory_errors import make_trainer
trainer = make_trainer(pathlib.Path(sys.argv[1]), "cpu")
trainer.run(1)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + (256 << 20),) * 2)
trainer.run(9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_on_the_cpu_the_error_says_what_was_tried_and_nothing_is_lost(tmp_path: Path):
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 1
    text = found.stderr[found.stderr.rindex("TrainingError") :]
    assert f"step 3 ran out of memory: its micro-batch has {2 * LENGTH - 2} tokens in 2 sequences" in text
    assert (
        "GiB were in use, the machine has" in text and "this process may use" in text and "more were asked for" in text
    )
    first, second = text.index(f"tokens_per_microbatch (it is {2 * LENGTH})"), text.index("recompute_every = 1")
    assert first < second < text.index("max_context")
    weights = WeightStore(Objects.open(tmp_path / "store"))
    assert weights.numbers("main")[:2] == [0, 1]  # version 2 is written while step 3 takes the memory
    make_trainer(tmp_path, "cpu").run(2)
    assert (weights.lines(), weights.numbers("main")) == (["main"], [0, 1, 2]), "the run can continue"


def test_a_version_that_was_written_while_the_next_step_failed_is_not_published_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(tmp_path, "cpu")
    trainer.run(1)

    def run_out(*given: object) -> None:
        raise TrainingError("step 3 ran out of memory")

    steps = iter([trainer._objective.backward, run_out])
    monkeypatch.setattr(trainer._objective, "backward", lambda *given: next(steps)(*given))
    with pytest.raises(TrainingError, match="step 3 ran out of memory"):
        trainer.run(9)
    assert trainer.run(2) == Version("main", 2)
    assert WeightStore(Objects.open(tmp_path / "store")).numbers("main") == [0, 1, 2]


def test_the_error_of_a_step_does_not_hide_that_the_step_before_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = make_trainer(tmp_path, "cpu")
    events: list[tuple[str, dict[str, Any]]] = []
    trainer.run(1)
    monkeypatch.setattr(telemetry, "emit", lambda kind, **fields: events.append((kind, fields)))

    def fail(*given: object) -> None:
        raise StorageError("the disk is full")

    def run_out(*given: object) -> None:
        while not trainer._writing.failed():
            time.sleep(0.01)
        raise TrainingError("step 3 ran out of memory")

    monkeypatch.setattr(trainer._exporter, "publish", fail)
    backward = trainer._objective.backward
    steps = iter([backward, run_out])
    monkeypatch.setattr(trainer._objective, "backward", lambda *given: next(steps)(*given))
    with pytest.raises(TrainingError, match="step 3 ran out of memory"):
        trainer.run(9)
    warnings = [fields["text"] for kind, fields in events if kind == "warning"]
    assert warnings == ["step 2 was not written: storage: the disk is full"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_error_says_what_was_tried_and_nothing_is_lost(tmp_path: Path):
    trainer = make_trainer(tmp_path, "cuda")
    trainer.run(1)
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (100 << 20)) / total)
    try:
        with pytest.raises(
            TrainingError, match=f"step 3 ran out of memory: its micro-batch has {2 * LENGTH - 2}"
        ) as found:
            trainer.run(9)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "the device has" in found.value.message and "of which others hold" in found.value.message
    assert "more were asked for" in found.value.message
    assert (found.value.hint or "").startswith("lower training.tokens_per_microbatch")
    del found, trainer
    assert make_trainer(tmp_path, "cuda").run(4) == Version("main", 4), "with more memory the same step is made"


@pytest.mark.parametrize(
    ("device", "dials", "first"),
    [
        ("cpu", {}, "set training.recompute_every = 1 (it is 0)"),
        ("cpu", {"recompute_every": 1}, "shorten"),
        ("cuda", {"recompute_mlp": False}, "set training.recompute_mlp = true"),
        ("cuda", {}, "set training.recompute_every = 1 (it is 0)"),
        ("cuda", {"recompute_every": 1}, "shorten"),
    ],
)
def test_a_setting_that_would_not_help_is_not_named(tmp_path: Path, device: Device, dials: dict[str, int], first: str):
    """Smaller micro-batches do not cut a single sequence, and layers cannot be recomputed twice."""
    trainer = make_trainer(tmp_path, "cpu")
    batch = trainer._objective.next_batch(3, 0.0, None, lambda: False)  # type: ignore[arg-type]
    assert batch is not None
    trainer._objective.fill(batch)  # type: ignore[attr-defined]
    (part,) = batch.microbatches
    alone = type(part)(part.tokens_N[:9], part.positions_N[:9], [9], part.rows_M, part.targets_M, None, None, None)
    with (
        pytest.raises(TrainingError) as found,
        explain_out_of_memory("it", torch.device(device), TrainingConfig(**dials), [alone]),
    ):
        raise MemoryError
    assert (found.value.hint or "").startswith(first)


def test_other_errors_pass():
    with (
        pytest.raises(RuntimeError, match="shapes"),
        explain_out_of_memory("it", torch.device("cpu"), TrainingConfig()),
    ):
        raise RuntimeError("shapes do not fit")


def test_a_model_that_does_not_fit_says_so(tmp_path: Path):
    huge = ModelConfig(vocab_size=1 << 20, width=1 << 26, heads=1, kv_heads=1, head_dim=16, layers=1, experts=0)
    objects = Objects.open(tmp_path / "store")
    with pytest.raises(TrainingError, match="the model ran out of memory; at the peak") as found:
        Trainer(
            TrainingConfig(),
            huge,
            None,
            WeightStore(objects),
            objects,
            "main",
            steps=1,
            seed=0,  # type: ignore[arg-type]
        )
    assert "16 bytes per parameter" in (found.value.hint or "")
