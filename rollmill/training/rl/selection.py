"""What a step trains on of its groups. Decided once, written to the step's record, never decided again.

graded, its group has signal, some token may be trained on              trained, with its advantage
graded, nothing to learn from: all rewards are equal, no hint, …        no_signal
graded, every token is over the staleness bound                         stale: no group of the run, by its deadline
graded, no token may be trained on, or it does not fit the model        dropped, with the reason
failed, not graded, quarantined or deleted                              dropped; its group is still usable
graded, but the newest rewards of its group are of several gradings     dropped

A group of which nothing is trained on does not fill a place in a step: it is closed, and another group is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rollmill.errors import StorageError, TrajectoryError
from rollmill.models.config import ModelConfig
from rollmill.training.batching import ABANDONED, STALE, UNSAID, PackedSequence, TokenRule, check_fits, segment_sequence
from rollmill.training.config import RLConfig
from rollmill.training.rl.baseline import Baseline
from rollmill.training.rl.credit import credit_of
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import LedgerState, Segment, TrajectoryState

GradedEntries = dict[str, tuple[int, float, float]]  # trajectory id → (reward id, reward, advantage)
Exclusions = dict[str, tuple[LedgerState, str]]
Contents = Mapping[str, Sequence[Segment] | str]  # trajectory id → its segments, or why they cannot be used


def weigh_groups(
    members: Mapping[str, Sequence[TrajectoryRow]],
    baseline: Baseline,
    has_other_signal: Callable[[Sequence[TrajectoryRow]], bool],
) -> tuple[GradedEntries, Exclusions]:
    """Advantages of the graded trajectories, group by group. A group whose rewards say nothing is excluded, unless it
    has something else to learn from: then its advantages are 0."""
    graded: GradedEntries = {}
    excluded: Exclusions = {}
    for rows in members.values():
        usable = [row for row in rows if row.state == TrajectoryState.graded]
        excluded.update({row.id: (LedgerState.dropped, _why_not_graded(row)) for row in rows if row not in usable})
        if len({row.grading for row in usable}) > 1:  # no comparison: another grading may have another scale
            why = "not all graded trajectories of its group were graded again; `rollmill rewards replay` does it"
            excluded.update({row.id: (LedgerState.dropped, why) for row in usable})
            continue
        if not usable:
            continue
        rewards_G = np.array([row.reward for row in usable], np.float64)
        advantages_G = baseline.advantages(usable[0].family or "", rewards_G)
        if isinstance(advantages_G, str):
            if not has_other_signal(usable):
                excluded.update({row.id: (LedgerState.no_signal, advantages_G) for row in usable})
                continue
            advantages_G = np.zeros(len(usable))
        for row, advantage in zip(usable, advantages_G.tolist(), strict=True):
            assert row.reward_id is not None and row.reward is not None, "graded means there is a reward"
            graded[row.id] = (row.reward_id, row.reward, advantage)
    return graded, excluded


def _why_not_graded(row: TrajectoryRow) -> str:
    return f"{row.state}: {row.reason}" if row.reason else f"{row.state}, not graded"


def read_segments(trajectories: TrajectoryStore, ids: Sequence[str], model: ModelConfig) -> Contents:
    """Payloads from the store. One that is missing, damaged or of another model becomes a reason, not an error."""
    try:
        loaded = {trajectory.id: trajectory.segments for trajectory in trajectories.load_many(ids)}
        for segments in loaded.values():
            check_fits(segments, model)
        return loaded
    except (TrajectoryError, StorageError) as error:
        if len(ids) == 1:
            return {ids[0]: error.message}
        return {id: content for each in ids for id, content in read_segments(trajectories, [each], model).items()}


def segment_sequences(
    segments: Sequence[Segment],
    advantage: float,
    rule: TokenRule,
    config: RLConfig,
    trajectory: int = 0,
    by_turn: Sequence[np.ndarray] | None = None,
) -> tuple[list[PackedSequence | None], Counter[str]]:
    """The sequence of each segment, None if it has nothing to train on; and the sampled tokens that are left out,
    counted by reason. `by_turn`: advantages of the tokens of each segment, in place of `advantage`."""
    masked: Counter[str] = Counter()
    own: list[np.ndarray | None] = [None] * len(segments) if by_turn is None else list(by_turn)
    if by_turn is not None and config.credit == "answers":
        credits, uncredited = [(each != 0).astype(np.float32) for each in by_turn], UNSAID
    else:
        credits, uncredited = credit_of(segments, config.credit, config.credit_decay), ABANDONED
    found = [
        segment_sequence(segment, advantage, rule, masked, trajectory, credit_T, own_T, uncredited)
        for segment, credit_T, own_T in zip(segments, credits, own, strict=True)
    ]
    return found, masked


def exclude_unusable(
    graded: GradedEntries,
    contents: Contents,
    rule: TokenRule,
    config: RLConfig,
    by_answer: Mapping[str, Sequence[np.ndarray]],
) -> Exclusions:
    """The graded trajectories that have no token to train on. `by_answer`: advantages of the tokens, if each answer has
    its own."""
    excluded: Exclusions = {}
    for id in graded:
        content = contents[id]
        if isinstance(content, str):
            excluded[id] = (LedgerState.dropped, content)
            continue
        sequences, masked = segment_sequences(content, 0.0, rule, config, by_turn=by_answer.get(id))
        if not any(sequences):
            excluded[id] = _nothing_left(masked, rule)
    return excluded


def _nothing_left(masked: Counter[str], rule: TokenRule) -> tuple[LedgerState, str]:
    if masked[STALE]:
        return LedgerState.stale, f"every token was sampled more than {rule.max_staleness} versions before {rule.base}"
    reasons = ", ".join(reason for reason, count in masked.most_common() if count)
    return LedgerState.dropped, f"no token to train on: {reasons or 'none was sampled'}"


def comparable(members: Sequence[Sequence[TrajectoryRow]], *, by_family: bool) -> dict[str, int]:
    """trajectory id → an index that it shares with those it is compared with: of its group, or of its family."""
    families = {name: index for index, name in enumerate({row.family: None for rows in members for row in rows})}
    return {row.id: families[row.family] if by_family else index for index, rows in enumerate(members) for row in rows}
