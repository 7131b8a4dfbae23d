"""A trajectory as a conversation to read: turns, tool calls, results, and which weights sampled which token.

All text here was written by a model, a tool or a task.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.render import cut, render
from rollmill.dashboard.scales import minus, number, percent
from rollmill.types import CUT, PolicyRef, Segment, Span, Trajectory

Decode = Callable[[Sequence[int]], str]
MAX_TEXT, MAX_TURNS, MAX_TOKENS = 6000, 200, 4000
ROLES = {"system": "System", "user": "Task", "assistant": "Model", "tool": "Tool", "context": "Prompt"}
CAUSES = {
    "start": "the first",
    "summary": "begins with a summary of the one before",
    "edit": "an earlier message was changed",
    "sub_agent": "a sub-agent",
    "retry": "an answer was asked for again",
    "fork": "a branch",
}


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the model: tokens[start:end] of its segment."""

    segment: Segment
    spans: Sequence[Span]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def end(self) -> int:
        return self.spans[-1].end

    def policies(self) -> list[PolicyRef | None]:
        known = self.segment.policies
        indices = self.segment.policy[self.start : self.end].tolist()
        return [known[index] if 0 <= index < len(known) else None for index in indices]


@dataclass(frozen=True)
class ShownToken:
    text: str
    tip: str
    style: str
    switched: tuple[str, str] | None  # the version that samples from here on, and what it replaced


@dataclass(frozen=True)
class ShownTurn:
    """One entry of the page: a turn, or with `kind` context or note a line between turns."""

    kind: str
    who: str
    note: str = ""
    text: str = ""
    calls: Sequence[tuple[str, Sequence[tuple[str, str]], str]] = ()  # name, arguments, or else what is no JSON object
    tokens: Sequence[ShownToken] | None = None
    more_tokens: int = 0


def readings(trajectories: Mapping[str, Trajectory], decode: Decode | None) -> Markup:
    """Whole trajectories to read, under their titles; empty if there are none."""
    shown = [conversation(title, trajectory, decode) for title, trajectory in trajectories.items()]
    return render("conversation", "readings", shown, decode is not None)


def conversation(title: str, trajectory: Trajectory, decode: Decode | None = None) -> Markup:
    """One trajectory to read. With `decode` (token ids to text) each answer also shows its exact tokens."""
    answers = [SampledTurn(segment, spans) for segment in trajectory.segments for spans in segment.answers()]
    versions = sorted({(ref.line, ref.number) for answer in answers for ref in answer.policies() if ref})
    page = _Conversation(
        trajectory, answers, {version: f"policy{index % 6}" for index, version in enumerate(versions)}, decode
    )
    forgotten = len(trajectory.segments) > 1 and page.spoken != len(answers)  # messages are of the last context
    turns = page.contexts(decode) if forgotten and decode is not None else page.turns()
    rewards = [(reward, _pairs(reward.evidence, 1500)) for _, reward in trajectory.rewards]
    return render(
        "conversation", "conversation", title, trajectory, _facts(trajectory, answers), page.styles, turns, rewards
    )


def _facts(trajectory: Trajectory, answers: Sequence[SampledTurn]) -> list[str]:
    sampled = sum(answer.end - answer.start for answer in answers)
    tokens = sum(len(segment.tokens) for segment in trajectory.segments)
    known = trajectory.provenance
    facts = [
        trajectory.task_id,
        *(f"{key} {known[key]}" for key in ("family", "split", "mode") if key in known),
        f"{number(tokens)} tokens, {number(sampled)} sampled",
    ]
    if len(trajectory.segments) > 1:
        causes = Counter(segment.cause for segment in trajectory.segments[1:])
        listed = ", ".join(f"{count} by {cause}" for cause, count in causes.items())
        facts.append(f"{len(trajectory.segments)} contexts ({listed})")
    return [cut(fact, 120) for fact in facts if fact]


@dataclass(frozen=True)
class _Conversation:
    trajectory: Trajectory
    answers: Sequence[SampledTurn]
    styles: Mapping[tuple[str, int], str]  # (line, version) -> class of its colour
    decode: Decode | None

    @property
    def spoken(self) -> int:
        return sum(message.get("role") == "assistant" for message in self.trajectory.messages)

    def turns(self) -> list[ShownTurn]:
        """The n-th answer belongs to the n-th assistant message. If their numbers differ, tokens are shown apart."""
        messages = self.trajectory.messages[:MAX_TURNS]
        paired = self.spoken == len(self.answers)
        waiting = iter(self.answers if paired else ())
        turns = []
        for message in messages:
            turns.append(self._turn(message, next(waiting, None) if message.get("role") == "assistant" else None))
        if len(self.trajectory.messages) > len(messages):
            turns.append(ShownTurn("note", f"{len(self.trajectory.messages) - len(messages)} more turns are left out."))
        if not paired:
            turns += [self._turn({"role": "assistant"}, answer) for answer in self.answers[:MAX_TURNS]]
        return turns

    def contexts(self, decode: Decode) -> list[ShownTurn]:
        """Several contexts, each as the model saw it: the text of its prompts from the tokens, and its answers. The
        part that a context shares with the one before is shown once."""
        segments = self.trajectory.segments
        turns: list[ShownTurn] = []
        for index, segment in enumerate(segments):
            if len(turns) > MAX_TURNS:
                turns.append(ShownTurn("note", f"{len(segments) - index} more contexts are left out."))
                break
            about = CAUSES.get(segment.cause, segment.cause)
            turns.append(ShownTurn("context", f"Context {index + 1} of {len(segments)}", about))
            reached = segment.parent[1] if segment.parent else 0
            own = [answer for answer in self.answers if answer.segment is segment]
            for answer in own[:MAX_TURNS]:
                text = decode(segment.tokens[reached : answer.start].tolist()) if answer.start > reached else ""
                turns += [self._turn({"role": "context", "content": text}, None)] if text else []
                turns.append(self._turn({"role": "assistant"}, answer))
                reached = answer.end
            if len(own) > MAX_TURNS:
                turns.append(ShownTurn("note", f"{len(own) - MAX_TURNS} more turns are left out."))
        return turns

    def _turn(self, message: Mapping[str, Any], answer: SampledTurn | None) -> ShownTurn:
        role, calls = str(message.get("role", "")), message.get("tool_calls")
        note = _answer_note(answer) if answer is not None else str(message.get("name") or "")
        tokens = self._tokens(answer, self.decode) if answer is not None and self.decode is not None else None
        return ShownTurn(
            f"turn {role if role in ROLES else 'other'}",
            ROLES.get(role, role),
            note=cut(note, 200),
            text=_text(message.get("content")),
            calls=[_call(call) for call in (calls if isinstance(calls, list) else [])],
            tokens=tokens,
            more_tokens=max(0, answer.end - answer.start - MAX_TOKENS) if answer is not None else 0,
        )

    def _tokens(self, answer: SampledTurn, decode: Decode) -> list[ShownToken]:
        """The exact tokens, underlined by the version that sampled them; a mark stands where the weights changed."""
        ids = answer.segment.tokens[answer.start : answer.end].tolist()
        logprobs = answer.segment.logprobs[answer.start : answer.end].tolist()
        shown: list[ShownToken] = []
        before: PolicyRef | None = None
        for token, logprob, policy in list(zip(ids, logprobs, answer.policies(), strict=True))[:MAX_TOKENS]:
            switched = None
            if policy and before and policy != before:
                change = f"{before.line} v{before.number} → {policy.line} v{policy.number}"
                switched = f"v{policy.number}", f"weights changed in mid-answer\n{change}"
            before = policy or before
            shown.append(self._token(decode([token]), token, logprob, policy, switched))
        return shown

    def _token(
        self, text: str, token: int, logprob: float, policy: PolicyRef | None, switched: tuple[str, str] | None
    ) -> ShownToken:
        tip, style, heat = [f"token {token}"], "token", 0
        if math.isfinite(logprob):
            odds = percent(math.exp(min(logprob, 0.0)), 1)
            tip.append(f"probability {odds}, log-prob {logprob:.3f}".replace("-0.000", "0"))
            heat = max(0, min(10, round(-2.5 * logprob)))  # 10: from about one chance in fifty
        if policy:
            tip.append(f"{policy.line} v{policy.number} {policy.form} {policy.digest[:8]}")
            style += f" {self.styles[policy.line, policy.number]}"
        style += f" heat{heat}" if heat else ""  # a class, because the dashboard forbids style attributes
        return ShownToken(cut(text, 80).replace("\n", "⏎") or "␣", "\n".join(tip), style, switched)


def _text(content: Any) -> str:
    """Text of a message; OpenAI also allows a list of typed parts."""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else cut(str(content), MAX_TEXT)


def _call(call: Any) -> tuple[str, list[tuple[str, str]], str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", [], cut(str(call), MAX_TEXT)
    name, arguments = cut(str(function.get("name", "")), 80), str(function.get("arguments", ""))
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return name, _pairs(parsed, MAX_TEXT), ""
    return name, [], cut(arguments, MAX_TEXT)  # what the model wrote, though it is no JSON object


def _pairs(values: Mapping[Any, Any], limit: int) -> list[tuple[str, str]]:
    pairs = []
    for key, value in values.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except RecursionError:
            text = "a value too deep to show"
        pairs.append((cut(str(key), 80), cut(text, limit)))
    return pairs


def _answer_note(answer: SampledTurn) -> str:
    logprobs = [value for value in answer.segment.logprobs[answer.start : answer.end].tolist() if math.isfinite(value)]
    parts = [f"{answer.end - answer.start} tokens"]
    if logprobs:
        parts.append("mean log-prob " + minus(f"{sum(logprobs) / len(logprobs):.2f}"))
    parts.append(" → ".join(dict.fromkeys(span.engine for span in answer.spans)))
    if answer.spans[-1].finish != "stop":
        parts.append({"length": CUT, "abort": "aborted"}[answer.spans[-1].finish])
    return " · ".join(parts)
