"""Admits trajectories that exist already to an RL stage of a run: of another run, or of production.

A token's staleness is bounded only if the weights that sampled it belong to the stage's own lineage. Another run may
use the same name for other weights, so a name counts only in its own run:

    token of this run                    its name, if that line is the stage's or an ancestor
    token of any run                     its digest, if a version of the stage's line or of an ancestor has it
    token of the run it started from     its name, up to the version that this run started from

A payload of another run is copied into this run's store. In the copy, versions have the names of this run. A user's
conversation is never copied to where `rollmill trajectories forget` would not find it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollmill.environments.environment import build_tasks, each_environment
from rollmill.errors import ConfigError, StorageError, TrajectoryError
from rollmill.runs.run import RunDirectory
from rollmill.storage.objects import Objects
from rollmill.training.config import ALONE, FORM
from rollmill.training.lineage import Lineage, trace_lineage
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.trajectories.admission import Experience, Member, Verdict, copied_row, oldest_position, renamed
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.table_rows import EVALUATION, TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import PolicyRef, TrajectoryState, Version
from rollmill.weights.reading.weight_store import WeightStore, newest_line

POLL_S = 0.05
_UNSETTLED = (TrajectoryState.running, TrajectoryState.finished)


def admit_trajectories(
    run: RunDirectory,
    stage_name: str | None,
    rows: Iterable[TrajectoryRow],
    source: RunDirectory | None = None,
    *,
    wait_s: float = 0.0,
    dry_run: bool = False,
) -> list[Verdict]:
    """Admit the groups of `rows`, whole, to the ledger of a stage. `source`: the run that has them; None: this one.

    Groups are admitted in the order of their deadlines. While there is no room, it waits for `wait_s` seconds.
    """
    admission = _Admission.open(run, _find_stage(run, stage_name), source or run)
    found: list[Experience] = []
    verdicts: list[Verdict] = []
    for group_id, members in admission.groups(rows):
        ids = [row.id for row in members]
        try:
            found.append(admission.experience(group_id, members))
        except (TrajectoryError, StorageError) as error:  # one payload that cannot be read stops no other group
            verdicts.append(Verdict(group_id, ids, "refused", error.message))
    found.sort(key=lambda group: group.oldest)
    if dry_run:
        return [*admission.ledger.admit(found, pace=admission.pace, dry_run=True), *verdicts]
    return [*admission.enter(found, wait_s), *verdicts]


@dataclass(frozen=True)
class _Admission:
    source: TrajectoryStore
    objects: Objects  # of the admitting run
    ledger: Ledger
    pace: Pace
    names: _Names
    copies: bool  # the trajectories are of another run: their payloads are copied
    apart: bool  # the source has another database or another store
    alone: bool  # a group may be one trajectory
    heldout: frozenset[str]  # tasks that the admitting run evaluates on

    @classmethod
    def open(cls, run: RunDirectory, stage: StageSection, source: RunDirectory) -> _Admission:
        assert isinstance(stage, RolloutSettings)
        weights = run.weights()
        ledger = run.ledger(stage)
        return cls(
            source=source.trajectories(),
            objects=weights.objects,
            ledger=ledger,
            pace=stage.pace(stage.steps),
            names=_Names.of(run, stage, source, weights),
            copies=source.id != run.id,
            apart=(source.database_url, source.home_store) != (run.database_url, run.home_store),
            alone=getattr(stage, "baseline", None) in ALONE,
            heldout=_heldout(run),
        )

    def groups(self, rows: Iterable[TrajectoryRow]) -> list[tuple[str, list[TrajectoryRow]]]:
        """Each group with all its trajectories. A conversation that has no group is one."""
        found: dict[tuple[str, str], list[TrajectoryRow]] = {}
        for row in rows:
            key = row.run, row.group_id or row.id
            if key not in found:
                found[key] = self.source.list(run=row.run, group_id=row.group_id) if row.group_id else [row]
        return [(group, sorted(members, key=lambda row: row.id)) for (_, group), members in found.items()]

    def experience(self, group_id: str, rows: Sequence[TrajectoryRow]) -> Experience:
        """TrajectoryError if the group cannot be admitted, whatever room there is."""
        graded = [row for row in rows if row.state == TrajectoryState.graded]
        self._check(rows, graded)
        members, oldest = [], []
        for row in graded:
            trajectory = self.source.load(row.id)
            position = oldest_position(trajectory, self.names.position)
            if isinstance(position, str):
                raise TrajectoryError(position)
            oldest.append(position)
            reward = next(reward for id, reward in trajectory.rewards if id == row.reward_id)
            members.append(Member(row.id, copied_row(row, renamed(trajectory, self.names)), reward))
        return Experience(group_id, graded[0].task_id, graded[0].run, members, min(oldest))

    def _check(self, rows: Sequence[TrajectoryRow], graded: Sequence[TrajectoryRow]) -> None:
        unsettled = next((row for row in rows if row.state in _UNSETTLED), None)
        if unsettled is not None or not graded:
            raise TrajectoryError(f"{(unsettled or rows[0]).state}, not graded")
        for row in graded:
            if EVALUATION in row.run:
                raise TrajectoryError("of an evaluation: training on it would spoil the measurement")
            if not row.may_train:
                raise TrajectoryError("its user did not agree to training")
            if self.apart and "user" in row.provenance:
                raise TrajectoryError(
                    "of a production user, who could not be forgotten in a copy: "
                    "admit it to a stage of the run that recorded it"
                )
            if row.split not in (None, "train") or row.task_id in self.heldout:
                raise TrajectoryError("of a held-out task")
        if len({row.grading for row in graded}) > 1:
            raise TrajectoryError("graded by several gradings; `rollmill rewards replay` gives its group one")
        if len(graded) == 1 and not self.alone:
            raise TrajectoryError('alone in its group: that needs `baseline = "population"` in the stage')

    def enter(self, groups: Sequence[Experience], wait_s: float) -> list[Verdict]:
        verdicts: dict[str, Verdict] = {}
        until = time.monotonic() + wait_s
        pending = list(groups)
        while pending:
            expected = self.ledger.admit(pending, pace=self.pace, dry_run=True)
            verdicts |= {each.group_id: each for each in expected}
            entering = [group for group in pending if verdicts[group.group_id].decision in ("admitted", "stale")]
            for group in entering if self.copies else ():
                if verdicts[group.group_id].decision == "admitted":
                    self._copy(group)
            # the dispatcher may have taken the room meanwhile
            verdicts |= {each.group_id: each for each in self.ledger.admit(entering, pace=self.pace)}
            pending = [group for group in pending if verdicts[group.group_id].decision == "no_room"]
            if time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        return list(verdicts.values())

    def _copy(self, group: Experience) -> None:
        for member in group.members:
            trajectory = renamed(self.source.load(member.id), self.names)
            self.objects.put(str(member.row["payload_key"]), encode_trajectory(trajectory))


@dataclass(frozen=True)
class _Names:
    """What the admitting run calls the weights that sampled a token of the source."""

    lineage: Lineage
    same_run: bool
    by_digest: dict[tuple[str, str], Version]  # (form, digest) → version
    start: Version | None  # of the source, if the run started from it
    started_as: str

    @classmethod
    def of(cls, run: RunDirectory, stage: StageSection, source: RunDirectory, weights: WeightStore) -> _Names:
        line = newest_line(weights, stage.name)
        if weights.head(line, run.config.form) is None:
            raise ConfigError(
                f"stage {stage.name!r} of {run.path} has no version yet", hint="admit after the stage has begun"
            )
        lineage = trace_lineage(weights, line, run.config.form)
        by_digest = {}
        for each in lineage.offsets:  # from the stage's line to its ancestors: those names win
            for form in {*run.config.forms, FORM} & set(weights.forms(each)):
                for number in weights.numbers(each, form):
                    digest = weights.manifest(Version(each, number), form).digest
                    by_digest[form, digest] = Version(each, number)
        start = run.config.start if run.config.start is not None and run.config.start.id == source.id else None
        same_run, started_as = source.id == run.id, run.config.checkpoint_line
        return cls(lineage, same_run, by_digest, start.parsed if start else None, started_as)

    def __call__(self, policy: PolicyRef) -> Version | None:
        if self.same_run:
            return Version(policy.line, policy.number) if policy.line in self.lineage.offsets else None
        known = self.by_digest.get((policy.form, policy.digest))
        if known is not None:
            return known
        if self.start is None or policy.line != self.start.line or policy.number > self.start.number:
            return None
        return Version(self.started_as, policy.number)

    def position(self, policy: PolicyRef) -> int | None:
        version = self(policy)
        return None if version is None else self.lineage.position(version.line, version.number)


def _find_stage(run: RunDirectory, name: str | None) -> StageSection:
    """The stage of that name, or the only one that learns from rollouts."""
    stages = {stage.name: stage for stage in run.config.stages if isinstance(stage, RolloutSettings)}
    if name is None and len(stages) == 1:
        return next(iter(stages.values()))
    if name not in stages:
        what = f"no stage {name!r} that learns from rollouts" if name else f"{len(stages)} stages that do"
        raise ConfigError(f"{run.path} has {what}", hint=f"--stage names one of: {', '.join(stages) or 'none'}")
    return stages[name]


def _heldout(run: RunDirectory) -> frozenset[str]:
    if not each_environment(run.config):
        return frozenset()
    tasks, suite = build_tasks(run.config), run.config.evals
    return frozenset(task.id for cell in suite.cells(tasks) for task in cell.held(tasks))
