"""Events: one JSON line each, one file per process, under `<run>/events/`. Reports and progress displays read them.

Every event has `at` (seconds since the epoch), `process` and `kind`; events of trainer and dispatcher also have the
`stage` they work for. `EVENTS` lists the kinds and their other fields.
The timeline of who worked when is drawn from the `busy` events alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_MOST_TEXT = 20_000  # characters of one text in an event
_MOST_DEPTH = 16
_RENAMED = {"midtrain_step": "document_step"}  # kinds as older runs wrote them
_file: BinaryIO | None = None
_process = "main"
_labels: dict[str, str] = {}


def open_events(directory: Path, process: str) -> None:
    """Send this process's events to `directory/process.jsonl`; before that call they go nowhere."""
    global _file, _process
    directory.mkdir(parents=True, exist_ok=True)
    if _file is not None:
        _file.close()
    path = directory / f"{process}.jsonl"
    # unbuffered and in append mode: an event is one write, so threads do not interleave and a crash loses nothing
    _file = path.open("ab", buffering=0)
    _process = process
    if not _ends_a_line(path):
        _file.write(b"\n")  # a crash cut the last line short; do not let it swallow the next one


def label_events(**labels: str) -> None:
    """Add these fields to every later event of this process."""
    _labels.update(labels)


def emit(kind: str, /, **fields: Any) -> None:
    """Write one event. It never raises: events are for people, and losing one must not stop work."""
    if _file is None:
        return
    event: dict[str, Any] = {"at": time.time(), "process": _process, "kind": kind, **_labels}
    try:
        line = json.dumps({**event, **_plain(fields), **event}, allow_nan=False)
    except Exception as error:  # a field that breaks when it is looked at
        line = json.dumps({**event, "unwritable": type(error).__name__})
    with contextlib.suppress(OSError):  # a full disk: the stores report it, and must stop
        _file.write(line.encode() + b"\n")


@contextlib.contextmanager
def busy(what: str, **fields: Any) -> Iterator[None]:
    """Mark a stretch of work for the timeline."""
    start = time.time()
    try:
        yield
    finally:
        emit("busy", what=what, start=start, end=time.time(), **fields)


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events of a run in time order. A line cut short by a crash is left out."""
    return EventTail(directory).poll()


class EventTail:
    """Follows the event files of a run as they grow: `poll()` returns what is new since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def poll(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                if offset > os.fstat(file.fileno()).st_size:
                    offset = 0  # the file was replaced: a run of the same name started over
                file.seek(offset)
                data = file.read()
            complete = data.rfind(b"\n") + 1
            self._offsets[path] = offset + complete
            events.extend(_parse(data[:complete].split(b"\n")))
        return sorted(events, key=lambda event: event["at"])


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        # a line cut short is not JSON, or not even UTF-8
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("at"), int | float) and "kind" in event:
                yield {**event, "kind": _RENAMED.get(str(event["kind"]), event["kind"])}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value that JSON can hold. Fields may come from a model or a task, so anything may be in them.

    Numbers that are not finite become None; long text is cut; other objects become their text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else _text(f"an integer of {value.bit_length()} bits")
    if isinstance(value, str):
        return _text(value)
    if depth < _MOST_DEPTH and isinstance(value, Mapping):
        return {_text(str(key)): _plain(each, depth + 1) for key, each in value.items()}
    if depth < _MOST_DEPTH and isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy or torch
        return _plain(value.item(), depth + 1) if depth < _MOST_DEPTH else None
    return _text(str(value))


def _text(text: str) -> str:
    """Bounded text without lone surrogates: those cannot be printed."""
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]}… ({len(text)} characters)"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class Event(NamedTuple):
    meaning: str
    fields: Mapping[str, str]  # name → meaning


def _event(meaning: str, **fields: str) -> Event:
    return Event(meaning, fields)


def _distance(name: str, between: str) -> dict[str, str]:
    """The five figures of a distance between two policies, see training/diagnostics.py."""
    return {
        f"{name}_k1": f"{between}: mean of the log ratio",
        f"{name}_k3": f"{between}: estimate of the KL divergence",
        f"{name}_p99": f"{between}: 99th percentile of the log ratio's size",
        f"{name}_max": f"{between}: largest log ratio",
        f"{name}_outside": f"{between}: share of tokens whose ratio is below 1/2 or above 2",
    }


_UPDATE = {
    "grad_norm": "norm of the gradient before clipping",
    "lr": "learning rate of this step",
    "applied": "false if the step changed nothing, because its gradient was not finite or there was none",
}
_EXPERTS = {
    "expert_load_max": "largest load of an expert over the mean load",
    "expert_load_by_layer": "the same per layer",
    "experts_dead": "share of experts that got no token",
}

# Every kind of event with its fields; a test compares this with every call of `emit`.
EVENTS: Mapping[str, Event] = {
    "phase": _event(
        "A phase of the run begins or ends.",
        phase="its name",
        state="start or end",
    ),
    "busy": _event(
        "A stretch of work, for the timeline.",
        what="step, publish, checkpoint, wait, measure, decode, apply or rollouts",
        start="seconds since the epoch",
        end="seconds since the epoch",
        running="rollouts in progress, for rollouts",
    ),
    "step": _event(
        "An RL step is done.",
        step="its number, from 1",
        steps="how many the run has",
        version="the version it published",
        loss="the loss",
        tokens="tokens in its forward passes",
        trained_tokens="sampled tokens it trained on",
        groups="groups it trained on",
        groups_missing="groups it ran short of: too many had no signal, and replacements ran out",
        groups_closed="groups closed while it looked for its own, because there was nothing to learn from them",
        trajectories="trajectories it trained on",
        reward_mean="mean reward of the graded trajectories of its groups and of the closed ones",
        solve_rate="share of them that count as solved",
        masked="tokens left out, by reason",
        masked_stale="tokens left out as too stale",
        hinted_tokens="tokens of turns with a hint, which a teacher saw",
        hints_refused="hints that could not be written into a context",
        excluded="trajectories left out, by ledger state",
        wait_seconds="seconds it waited for groups; the mismatch of the step before is measured meanwhile",
        due_seconds="the part of that wait in which enough groups were ready, but older ones were due",
        seconds="seconds it took, without publishing: its version is written while the next step runs",
        staleness_mean="mean staleness of its tokens, in versions",
        staleness_max="largest staleness of a token",
        staleness_counts="tokens by staleness",
        staleness_queue="mean staleness gathered after the trajectory's last token",
        staleness_flight="mean staleness gathered while the trajectory was sampled",
        ess="effective sample size as a share of its tokens",
        mask_fraction="share of tokens masked",
        mask_fraction_positive="the same among tokens with positive advantage",
        mask_fraction_negative="the same among tokens with negative advantage",
        clip_fraction="share of tokens whose ratio or weight was bounded",
        clip_fraction_positive="the same among tokens with positive advantage",
        clip_fraction_negative="the same among tokens with negative advantage",
        veto_share="share of tokens in sequences dropped as a whole",
        entropy="mean entropy of the policy per token",
        kl_entropy="drift_k3 over entropy",
        mismatch_tokens="tokens measured for the mismatch",
        mismatch_left_out="tokens that could not be measured, by reason",
        router_flip_rate="share of tokens whose live experts differ from the recorded ones",
        router_flip_rate_by_layer="the same per layer",
        router_zero_overlap="share of tokens with no live expert among the recorded ones",
        router_zero_overlap_by_layer="the same per layer",
        router_replaced="share of recorded experts that were implausible and replaced",
        router_live_rows="share of tokens without recorded experts",
        router_fit="how well the record fits when moved by a token or a layer, where it does not fit as it is",
        **_distance("drift", "version trained from against the policy that sampled"),
        **_distance("mismatch", "trainer against engine on the same weights"),
        **_distance("reference", "reference against the trained policy, in runs with a reference"),
        **_EXPERTS,
        **_UPDATE,
    ),
    "due": _event(
        "A step has enough ready groups, and waits for older ones that it must not overtake any more.",
        step="its number",
        groups="the groups it waits for",
    ),
    "closed": _event(
        "A group was closed, because there is nothing to learn from it. Another one is started in its place.",
        group="the group",
        step="the step that looked for groups",
        reasons="why, by trajectory: reason → how many",
    ),
    "stall": _event(
        "The grading of an episode waits for a judge that is down, or has stopped waiting.",
        trajectory="its trajectory",
        waiting="episodes that wait now",
        reason="what the judge's problem is; null once it does not wait any more",
    ),
    "document_step": _event(
        "A step of a stage that reads documents (mid-training, SFT) is done. `stage` says which.",
        step="its number, from 1",
        steps="how many the stage has",
        loss="mean loss per target token",
        tokens="tokens in its forward passes",
        targets="tokens it learnt from",
        documents="documents by source",
        notes="documents that were cut, left out or rearranged, by reason",
        read_wait_seconds="seconds it waited for its documents; they are read while the step before trains",
        tokens_per_s="tokens per second",
        **_EXPERTS,
        **_UPDATE,
    ),
    "heldout_loss": _event(
        "The loss on documents of a source that are never trained on.",
        step="after this step; 0 is before the first",
        source="name of the source",
        documents="documents it is measured on",
        targets="tokens it is measured on",
        loss="mean loss per target token",
    ),
    "source": _event(
        "A stage opened a source of documents.",
        source="name of the source",
        documents="documents found, the parts of long ones counted apart; null if endless",
        training="documents to train on; null if endless",
        heldout="documents that are held out",
        duplicates="documents left out because an earlier one has the same content",
        skipped="records that cannot be used, by reason",
        problems="the first of them in words, with file and line",
    ),
    "warning": _event(
        "Something is probably wrong; the text says what and what to try.",
        text="the warning",
        step="the step it is about, if any",
    ),
    "publish": _event(
        "The trainer published a version.",
        line="its line",
        version="its number",
        step="the step that made it",
        encoding="snapshot or delta",
        bytes="bytes written",
        delta_bytes="bytes of its delta, if it has one",
        full_bytes="bytes of all its tensors",
        density="share of elements that changed",
        seconds="seconds it took",
        digest="its root digest",
    ),
    "new_line": _event(
        "A restarted trainer got other bits than before and goes on in a new line.",
        line="the new line",
        parent="the version it starts from",
        step="the step of that version",
        abandons="versions that nothing goes on from",
        reason="why",
    ),
    "import": _event(
        "A checkpoint was imported.",
        version="the version made of it",
        parameters="how many",
        active_parameters="how many a token passes through",
        stored_as="number format of the checkpoint",
        bytes="bytes written",
        full_bytes="bytes of all its tensors",
        digest="its root digest",
    ),
    "start": _event(
        "A version of another run was imported, for this run to start from.",
        version="the version made of it",
        run="id of the other run",
        origin="the version in the other run",
        form="its number format there",
        bytes="bytes written",
        digest="root digest of the import",
    ),
    "engine": _event(
        "What an engine did, about once a second while it works.",
        engine="its name",
        region="its region",
        tokens_per_s="sampled tokens per second",
        running="requests being decoded",
        waiting="requests waiting",
    ),
    "apply": _event(
        "An engine switched to a version.",
        engine="its name",
        region="its region",
        line="the version's line",
        version="its number",
        digest="its root digest",
        bytes="bytes fetched",
        fetch_seconds="seconds to fetch and check them",
        pause_seconds="seconds in which nothing was decoded",
        running="requests in progress that went on with the new weights",
        since_publish_seconds="seconds since the version was published",
    ),
    "arrive": _event(
        "A version arrived in the store of a region.",
        region="the region",
        line="the version's line",
        version="its number",
        bytes="bytes copied",
        seconds="seconds it took",
        since_publish_seconds="seconds since the version was published",
    ),
    "anchor": _event(
        "A region made a snapshot out of the deltas it has.",
        region="the region",
        line="the version's line",
        version="its number",
        seconds="seconds it took",
    ),
    "rollout": _event(
        "A rollout ended.",
        trajectory="its trajectory",
        group="its group",
        task="its task",
        family="the task's family",
        split="the task's split",
        state="graded or failed",
        reward="its reward, if graded",
        turns="answers of the model",
        tool_calls="tool calls",
        bad_tool_calls="tool calls that could not be understood",
        tokens="tokens recorded",
        seconds="seconds it took",
        reason="why it failed",
    ),
    "resumed": _event(
        "An episode goes on from its last checkpoint.",
        trajectory="its trajectory",
        task="its task",
        reason="what interrupted it",
    ),
    "eval": _event(
        "One part of an evaluation is done.",
        label="which evaluation, such as before or after",
        split="the tasks' split",
        mode="sampled or greedy",
        version="the version evaluated",
        solved="attempts that solved their task",
        attempts="attempts graded",
        failed="attempts that the infrastructure lost; not counted as attempts",
        rate="solved over attempts",
        low="lower end of the rate's 95 % interval",
        high="upper end of it",
        seconds="seconds it took",
        by_task="for each task, whether each attempt solved it",
        example_solved="a trajectory that solved its task",
        example_unsolved="a trajectory that did not",
        conduct="for each task, what each attempt cost and how it behaved",
    ),
    "eval_progress": _event(
        "How far an evaluation is: at its start, then at most twice per second, and at its end.",
        label="which evaluation, such as before or after",
        done="attempts that ended",
        total="attempts of all its parts",
        seconds_left="seconds left at the pace so far; null before the first attempt ended",
    ),
    "scale": _event(
        "The run has another number of engines from now on: somebody asked for it.",
        engines="how many",
        before="how many it had",
    ),
    "lend": _event(
        "An engine of production is lent to training.",
        engine="its name",
        line="the line that it will serve",
        busy="requests that all engines of production had, this one included",
        engines="engines of production, lent ones included",
        reason="why, in words",
    ),
    "returned": _event(
        "An engine that was lent serves production again.",
        engine="its name",
        line="the line that it was lent to",
        lent_s="seconds since it was lent; null if this process did not lend it",
        seconds="seconds since it was needed; null if it returned by itself",
        limit_s="lending.return_s",
        late="whether `seconds` is more than that",
        reason="why it was recalled, in words",
    ),
    "balance": _event(
        "How many engines would keep trainer and engines busy. Said when that changes, with the reason.",
        before="how many engines the home region has",
        engines="how many it should have",
        waits="share of the time that the trainer waited for groups",
        idle="share of the time that engines had no request",
        filled="share of the places in the batches of busy engines that were used",
        reason="why, in words",
        done='whether the run has as many from now on: `balance.scale = "auto"`',
    ),
    "takeover": _event(
        "A dispatcher plays the groups of another one that has no lease any more.",
        dispatcher="the one that plays them now",
        groups="how many",
    ),
    "restart": _event(
        "The supervisor started a dead process again.",
        target="its role",
        exit_code="what it died with",
        restarts="how often it was restarted so far",
    ),
}
