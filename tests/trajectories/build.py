"""Small, valid trajectories to start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollmill.trajectories.allowed_tokens import join_kept
from rollmill.trajectories.ledger import Ledger, NewGroup
from rollmill.trajectories.staleness import Pace
from rollmill.types import Cause, PolicyRef, Sampling, Segment, Span, Trajectory

POLICIES = [PolicyRef("rl", 3, "bf16", "a" * 64), PolicyRef("rl", 4, "bf16", "b" * 64)]


def segment(
    id: str = "s0",
    length: int = 12,
    answers: tuple[tuple[int, int], ...] = ((4, 7), (9, 12)),
    *,
    routes: str | None = "uint8",
    parent: tuple[Segment, int] | None = None,
    cause: Cause = "start",
    seed: int = 0,
) -> Segment:
    """The two turns of the worked example in `types.py`: the weights change in the middle of the first answer."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 300, length).astype(np.int32)
    if parent is not None:
        tokens[: parent[1]] = parent[0].tokens[: parent[1]]
    sampled = np.zeros(length, np.bool_)
    spans = []
    for start, end in answers:
        sampled[start:end] = True
        sampling = Sampling(temperature=0.8, top_p=0.95, stop_tokens=(1, 2), seed=2**40)
        spans.append(Span(start, end, sampling, "stop", "engine-0", "home", "rollout", 1700000000.125, 1700000001.1, 0))
    switched = np.cumsum(sampled) > 2
    # of each answer but its last token, the tokens that could be drawn: the token alone
    cut = sampled & np.append(sampled[1:], False)
    kept = join_kept(
        [b"\1" + token.astype("<u4").tobytes() if known else b"" for token, known in zip(tokens, cut, strict=True)]
    )
    return Segment(
        id=id,
        tokens=tokens,
        sampled=sampled,
        logprobs=np.where(sampled, -random.random(length), np.nan).astype(np.float32),
        policy=np.where(sampled, switched, -1).astype(np.int16),
        policies=list(POLICIES),
        spans=spans,
        routes=random.integers(0, 200, (length, 2, 2)).astype(routes) if routes else None,
        routes_valid=random.integers(0, 2, length).astype(np.bool_) if routes else None,
        parent=(parent[0].id, parent[1]) if parent else None,
        cause=cause,
        kept_sizes=kept["kept_sizes"],
        kept=kept["kept"],
    )


def trajectory(id: str = "t0", **fields: object) -> Trajectory:
    """Three segments: a start, a summary that keeps five tokens of it, and a sub-agent of a dense model."""
    first = segment()
    second = segment("s1", 9, ((6, 9),), routes="uint16", parent=(first, 5), cause="summary", seed=1)
    third = segment("s2", 4, ((2, 4),), routes=None, parent=(second, 0), cause="sub_agent", seed=2)
    made = Trajectory(
        id,
        [first, second, third],
        task_id="bug/7",
        group_id="g0",
        messages=[{"role": "user", "content": "Fix the bug — «über»\x00"}, {"role": "assistant", "content": "Done."}],
        provenance={"split": "train", "family": "bug", "nested": {"list": [1, 2.5, None, True]}},
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def start_group(
    ledger: Ledger,
    id: str,
    task_id: str,
    size: int,
    *,
    pace: Pace,
    ids: Sequence[str],
    provenance: Mapping[str, Any] | None = None,
    committed: int | None = None,
    holder: str | None = None,
) -> int | None:
    """Admit a group of this name. Returns the version committed at that moment, None if there is no room."""
    assert len(ids) == size
    group = NewGroup(id, task_id, ids, provenance or {})
    started = ledger.start_group(lambda index: group, pace=pace, committed=committed, holder=holder)
    return None if started is None else started[1]
