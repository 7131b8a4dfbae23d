"""Distillation from hints: the gradient is that of a KL divergence, and the teacher is the model with the hint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rollmill.chat.format import ChatFormat
from rollmill.chat.formats.template import TemplateFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.models.attention import PackedAttention
from rollmill.models.decoder import Decoder
from rollmill.training.config import RLConfig
from rollmill.training.lineage import Lineage
from rollmill.training.packed_pass import target_logprobs
from rollmill.training.rl.hints import hinted, hints_of
from rollmill.training.rl.policy_loss import PolicyTokens, policy_loss
from rollmill.training.rl.rl_objective import RLObjective
from rollmill.trajectories.staleness import Pace
from rollmill.types import Grade, Segment
from tests.training.world import MODEL, PACE, World, make_segment

PROMPT, USER = 1, 2  # tokens
LINEAGE = Lineage("main", {"main": 0})


class TinyFormat:
    """Writes a message as its role and one token per letter. Only what hints use."""

    name, stop_tokens = "tiny", (0,)

    def render_start(self, messages: Sequence[dict[str, Any]], tools: object) -> list[int]:
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
    assert hints_of(Grade(0.0, evidence={"hints": [hint]})) == {1: "abc"}
    assert hints_of(Grade(0.0, evidence={"tests": {"hints": [hint, {"turn": 0, "text": "x" * 9999}]}})) == {
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
    assert all(hints_of(Grade(0.0, evidence={"hints": each, "other": each})) == {} for each in strange)


def test_a_hint_stands_before_the_generation_prompt() -> None:
    format: Any = TinyFormat()
    assert hinted(format, [5, 6, PROMPT], "de") == [5, 6, USER, 10, 11, PROMPT]
    assert hinted(format, [5, 6], "de") is None, "no generation prompt is there"


class BrokenFormat(TinyFormat):
    def render_start(self, messages: Sequence[dict[str, Any]], tools: object) -> list[int]:
        assert len(messages) == 1, "a template that refuses two messages of the user"
        return super().render_start(messages, tools)


class TemplateLike(TinyFormat):
    """Ends messages with a token and opens each by a header, as the templates of checkpoints do."""

    def render_start(self, messages: Sequence[dict[str, Any]], tools: object) -> list[int]:
        said = [[9, USER, *(ord(letter) - 90 for letter in each["content"]), 0] for each in messages]
        return [*(token for each in said for token in each), 9, PROMPT]


def test_a_hint_is_a_message_of_its_own_in_a_template() -> None:
    format: Any = TemplateLike()
    assert hinted(format, [5, 6, 0, 9, PROMPT], "de") == [5, 6, 0, 9, USER, 10, 11, 0, 9, PROMPT]
    assert hinted(format, [5, 6, 0], "de") is None
    broken: Any = BrokenFormat()
    assert hinted(broken, [5, 6, PROMPT], "de") is None, "whatever a template raises, the hint is left out"


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_hints_are_written_by_templates_of_checkpoints(name: str) -> None:
    """Also after a tool's result, and with what a later turn of the same conversation holds."""
    format = template_format(name)
    start = format.render_start([{"role": "user", "content": "fix it"}], [])
    told = hinted(format, start, "look at tests/")
    wanted = [{"role": "user", "content": "fix it"}, {"role": "user", "content": "look at tests/"}]
    assert told == format.render_start(wanted, [])
    messages = [*wanted[:1], {"role": "assistant", "content": "done"}, {"role": "user", "content": "no"}]
    assert hinted(format, format.render_start(messages, []), "look at tests/") == format.render_start(
        [*messages, wanted[1]], []
    )


def hint_of(turn: int) -> Grade:
    return Grade(0.0, evidence={"hints": [{"turn": turn, "text": "def"}]})


def test_groups_that_failed_as_a_whole_learn_from_their_hints(tmp_path: Path) -> None:
    """Only hints that can be written are signal: the first group's is of a turn that is not there."""
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=3)
    for name, turn in (("none", 7), ("hinted", 1)):
        ids = world.add_group(name, [two_turns(0), two_turns(1)], [0.0, 0.0])
        world.trajectories.grade(ids[0], hint_of(turn))
    objective: Any = objective_with(world, TinyFormat(), pace)
    batch = objective.next_batch(1, 1e-3, LINEAGE, lambda: False)
    assert batch.record.groups == ("hinted",) and batch.closed == ("none",)
    assert [advantage for _, _, advantage in batch.record.trajectories.values()] == [0.0, 0.0]
    got, _ = gradient(objective, batch)
    assert np.abs(got).max() > 1e-4


def test_a_hint_that_cannot_be_written_never_stops_a_recorded_step(tmp_path: Path) -> None:
    world, pace = World(tmp_path), Pace(1, 2, max_staleness=3)
    ids = world.add_group("g", [two_turns(0), two_turns(1)], [1.0, 0.0])
    world.trajectories.grade(ids[1], hint_of(1))
    for _ in range(2):  # the second one finds the step recorded
        batch = objective_with(world, BrokenFormat(), pace).next_batch(1, 1e-3, LINEAGE, lambda: False)
        assert batch is not None and batch.hints_refused == 1 and not batch.hinted


def objective_with(world: World, format: Any, pace: Pace, factor: float = 1.0) -> RLObjective:
    config = RLConfig(hint_factor=factor, router_replay=False, loss="policy_gradient")
    given = (world.ledger, world.trajectories, world.weights)
    return RLObjective(config, *given, pace=pace, model_config=world.model, tokens_per_microbatch=48, format=format)


def template_format(name: str) -> ChatFormat:
    header, end = ("<|im_start|>{}\n", "<|im_end|>\n") if name == "chatml" else ("<|h|>{}<|/h|>\n\n", "<|eot_id|>")
    opened = "{{ '" + header.replace("\n", "\\n").replace("{}", "' + {} + '") + "' }}"
    source = (
        "{% for m in messages %}"
        + opened.replace("{}", "m['role']")
        + "{{ m['content'] + '"
        + end.replace("\n", "\\n")
        + "' }}{% endfor %}{% if add_generation_prompt %}"
        + opened.replace("{}", "'assistant'")
        + "{% endif %}"
    )
    specials = ["<|im_start|>", "<|im_end|>", "<|h|>", "<|/h|>", "<|eot_id|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, special=True) for each in specials])
    return TemplateFormat(Tokenizer(made), source, {})


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
        world.trajectories.grade(id, Grade(0.0, evidence={"hints": [{"turn": 1, "text": "def"}]}))
    world.trajectories.grade("g-1-1", Grade(0.0, evidence={"hints": [{"turn": 0, "text": "z" * 60}]}))  # too long
    objective: Any = objective_with(world, format, PACE, 0.5)
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
