"""What a group may learn from although its rewards say nothing: all are equal, or there is nothing to compare with.

hints            a reward names a turn that can be written with a hint (training/rl/hints.py): most useful where all
failed process rewards  with `credit = "turns"`, turns earned something, and the advantages of turns differ
KL               subtracted from the reward, it differs between trajectories

Advantages of rewards are looked at first (training/rl/baseline.py): they need no payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollmill.chat.format import ChatFormat
from rollmill.models.config import ModelConfig
from rollmill.training.batching import TokenRule
from rollmill.training.config import ALONE, RLConfig
from rollmill.training.rl.hints import HintedTurns, hints_of
from rollmill.training.rl.selection import read_segments, segment_sequences
from rollmill.training.rl.turn_credit import group_token_advantages
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import TURN, Grade, Segment


class OtherSignal:
    def __init__(
        self, config: RLConfig, trajectories: TrajectoryStore, model: ModelConfig, format: ChatFormat | None
    ) -> None:
        """`format` writes hints."""
        self._config, self._trajectories, self._model = config, trajectories, model
        self._format = format if config.hint_factor else None

    def hints(self) -> HintedTurns | None:
        """The collector of a step's hints. None: hints are off."""
        return None if self._format is None else HintedTurns(self._format, self._model.max_context)

    def in_group(self, rows: Sequence[TrajectoryRow], rule: TokenRule) -> bool:
        """`rows`: the graded trajectories of a group."""
        config = self._config
        compares = len(rows) > 1 or config.baseline in ALONE
        if config.kl_factor and config.kl_form == "k1_reward" and compares:
            return True
        by_turn = config.credit == "turns" and len(rows) > 1
        if not by_turn and self._format is None:
            return False
        grades = self.grades({row.id: row.reward_id for row in rows if row.reward_id is not None})
        by_turn = by_turn and any(name.startswith(TURN) for grade in grades.values() for name in grade.parts)
        if not by_turn and not any(hints_of(grade) for grade in grades.values()):
            return False
        contents = read_segments(self._trajectories, list(grades), self._model)
        known = [(each, grades[id]) for id, each in contents.items() if not isinstance(each, str)]
        return (by_turn and self._turns_differ(known)) or any(self._can_hint(*each, rule) for each in known)

    def grades(self, pinned: Mapping[str, int]) -> dict[str, Grade]:
        """The rewards with these ids, by trajectory."""
        found = self._trajectories.rewards(list(pinned))
        return {id: dict(found[id])[reward_id] for id, reward_id in pinned.items()}

    def _turns_differ(self, known: Sequence[tuple[Sequence[Segment], Grade]]) -> bool:
        advantages = group_token_advantages(known) if len(known) > 1 else []
        return any(bool((abs(tokens) > 1e-9).any()) for segments in advantages for tokens in segments)

    def _can_hint(self, segments: Sequence[Segment], grade: Grade, rule: TokenRule) -> bool:
        hints = self.hints()
        if hints is None or not hints_of(grade):
            return False
        hints.mark(segments, segment_sequences(segments, 0.0, rule, self._config)[0], grade)
        return bool(hints.sequences)
