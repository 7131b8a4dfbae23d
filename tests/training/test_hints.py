"""Distillation from hints: the gradient is that of a KL divergence, and the teacher is the model with the hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollmill.models.attention import PackedAttention
from rollmill.models.decoder import Decoder
from rollmill.training.config import RLConfig
from rollmill.training.hints import hinted, hints_of
from rollmill.training.lineage import Lineage
from rollmill.training.loss import PolicyTokens, policy_loss, target_logprobs
from rollmill.types import Reward, Segment
from tests.training.world import MODEL, World, make_segment

PROMPT, USER = 1, 2  # tokens
LINEAGE = Lineage("main", {"main": 0})


class TinyFormat:
    """Writes a message as its role and one token per letter. Only what hints use."""

    name, stop_tokens = "tiny", (0,)

    def render_turn(self, messages: Sequence[dict[str, Any]], tools: object, *, answer_closed: bool) -> list[int]:
        said = [token for message in messages for token in (USER, *(ord(letter) - 90 for letter in message["content"]))]
        return [*said, PROMPT]


def test_the_expected_gradient_is_that_of_the_kl_divergence() -> None:
    """Enumerates the vocabulary: the student's own tokens, as often as it samples them."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=random, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, generator=random, dtype=torch.float64), 0)
    student = torch.log_softmax(logits, 0)
    (truth,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    fixed = student.detach()
    tokens = PolicyTokens(student, fixed, fixed.exp() * (teacher - fixed))  # weighted by how often each is sampled
    (found,) = torch.autograd.grad(policy_loss(tokens, RLConfig(loss="policy_gradient"), 1.0).loss, logits)
    torch.testing.assert_close(found, truth)


def test_hints_are_read_from_evidence_of_any_shape() -> None:
    hint = {"turn": 1, "text": "abc"}
    assert hints_of(Reward(0.0, evidence={"hints": [hint]})) == {1: "abc"}
    assert hints_of(Reward(0.0, evidence={"tests": {"hints": [hint, {"turn": 0, "text": "x" * 9999}]}})) == {
        1: "abc",
        0: "x" * 4000,
    }
    strange: list[Any] = [
        None,
        3,
        "x",
        [None],
        [{"turn": True, "text": "a"}],
        [{"turn": 0, "text": 3}],
        [{"text": "a"}],
    ]
    assert all(hints_of(Reward(0.0, evidence={"hints": each, "other": each})) == {} for each in strange)


def test_a_hint_stands_before_the_generation_prompt() -> None:
    format: Any = TinyFormat()
    assert hinted(format, [5, 6, PROMPT], "de") == [5, 6, USER, 10, 11, PROMPT]
    assert hinted(format, [5, 6], "de") is None, "no generation prompt is there"


def two_turns(seed: int) -> Segment:
    made = make_segment([0, 0, 0, 1, 1, 0, 0, 1, 1, 1], seed=seed, routes=False)
    made.tokens[[2, 6]] = PROMPT
    spans = [replace(span, started_at=float(number)) for number, span in enumerate(made.spans)]
    return replace(made, spans=spans)


def logprobs(model: Decoder, tokens: Sequence[int], places: range) -> np.ndarray:
    inputs = torch.tensor(tokens[:-1])
    with torch.no_grad():
        output = model(inputs, torch.arange(len(inputs)), PackedAttention([len(inputs)]))
        found, _ = target_logprobs(model.logits(output.hidden), torch.tensor(tokens[1:]))
    return found.numpy()[places.start - 1 : places.stop - 1]


def gradient(objective: Any, batch: Any) -> tuple[np.ndarray, dict[str, Any]]:
    model = Decoder(MODEL)
    model.initialise(0)
    figures = objective.backward(model, batch)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy(), figures


def test_a_step_with_hints_is_a_step_with_other_advantages(tmp_path: Path) -> None:
    """The second turn of two trajectories has a hint. Teacher and student are computed by hand, one by one."""
    world, format = World(tmp_path), TinyFormat()
    segments = [two_turns(seed) for seed in range(3)]
    ids = world.add_group("g-0", segments, [1.0, 0.0, 0.0])
    world.add_group("g-1", [two_turns(seed) for seed in range(3, 6)], [1.0, 0.0, 0.0])
    for id in ids[1:]:
        world.trajectories.grade(id, Reward(0.0, evidence={"hints": [{"turn": 1, "text": "def"}]}))
    world.trajectories.grade("g-1-1", Reward(0.0, evidence={"hints": [{"turn": 0, "text": "z" * 60}]}))  # too long
    config = RLConfig(hint_factor=0.5, router_replay=False, loss="policy_gradient")
    objective: Any = world.objective(config)
    objective._format = format
    batch = objective.next_batch(1, 1e-3, LINEAGE, lambda: False)
    assert sum(len(part.targets_M) for part in batch.hinted) == 6 and batch.hints_refused == 1
    got, _ = gradient(objective, batch)
    model = Decoder(MODEL)
    model.initialise(0)
    more: dict[tuple[int, int], float] = {}  # (trajectory, token) → what its advantage gets
    for number, id in enumerate(batch.record.trajectories):
        if id not in ids[1:]:
            continue
        tokens = segments[ids.index(id)].tokens.tolist()
        context = [*tokens[:6], USER, 10, 11, 12, PROMPT]
        teacher = logprobs(model, [*context, *tokens[7:]], range(len(context), len(context) + 3))
        student = logprobs(model, tokens, range(7, 10))
        more |= {(number, 7 + place): 0.5 * float(teacher[place] - student[place]) for place in range(3)}
    parts = []
    for part in batch.microbatches:
        starts = np.cumsum([0, *part.lengths])
        rows = part.rows_M.numpy()
        places = rows - starts[np.searchsorted(starts, rows, side="right") - 1] + 1
        extra = [more.get((int(t), int(p)), 0.0) for t, p in zip(part.facts.trajectory, places, strict=True)]
        advantages = part.facts.advantages + np.array(extra, np.float32)
        parts.append(replace(part, facts=replace(part.facts, advantages=advantages, hint=None)))
    assert len(more) == 6
    wanted, _ = gradient(objective, replace(batch, microbatches=parts, hinted=[]))
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    plain, _ = gradient(objective, replace(batch, hinted=[]))
    assert np.abs(plain - wanted).max() > 1e-3
