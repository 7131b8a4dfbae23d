"""Trajectories as files for others: OpenAI's JSONL to read and fine-tune with, Parquet with the exact tokens.

openai     one line per trajectory: messages, tools, metadata (ids, reward, task …)
parquet    one row per segment: tokens, sampled, logprobs, policy, policies, spans (with their sampling), kept (the
           tokens that could be drawn, see allowed_tokens.py; null if none were excluded), and the same facts
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rollmill.errors import ConfigError, StorageError, TrajectoryError
from rollmill.storage.parquet import pyarrow_parquet
from rollmill.trajectories.allowed_tokens import split_kept
from rollmill.trajectories.facts import to_plain
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory

Format = Literal["openai", "parquet"]
TOOLS = "tools"  # key in the provenance of a payload: the tools that the model was offered
_UNREADABLE = "payload cannot be read"
_ROWS = 256  # of a row group in Parquet

LoadedRow = tuple[TrajectoryRow, Trajectory]


def export_trajectories(
    store: TrajectoryStore,
    rows: Iterable[TrajectoryRow],
    format: Format,
    target: Path,
    *,
    split: str | None = None,
    everything: bool = False,
    limit: int | None = None,
) -> tuple[int, Counter[str]]:
    """Write a file that does not exist yet. Returns how many trajectories it has, and those left out, by reason.

    What others train on should not spoil their measurements: held-out tasks and evaluations are left out unless `split`
    asks for them, and conversations whose users did not agree to training always. `everything`: nothing of this."""
    if target.exists():
        raise ConfigError(f"{target} exists already", hint="name another file, or remove it")
    left_out: Counter[str] = Counter()
    found = itertools.islice(_load(store, rows if everything else _fit(rows, split, left_out), left_out), limit)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        count = _write_openai(draft, found) if format == "openai" else _write_parquet(draft, found)
        os.replace(draft, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}", hint="name another file") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return count, left_out


def _fit(rows: Iterable[TrajectoryRow], split: str | None, left_out: Counter[str]) -> Iterator[TrajectoryRow]:
    for row in rows:
        if row.unfit is None or (row.may_train and split is not None):
            yield row
        else:
            left_out[row.unfit] += 1


def _load(store: TrajectoryStore, rows: Iterable[TrajectoryRow], left_out: Counter[str]) -> Iterator[LoadedRow]:
    for row in rows:
        if row.payload_key is None or row.state in ("quarantined", "deleted"):
            left_out[row.state] += 1
            continue
        try:
            yield row, store.load(row.id)
        except (TrajectoryError, StorageError):
            left_out[_UNREADABLE] += 1


def facts_of(row: TrajectoryRow, trajectory: Trajectory) -> dict[str, Any]:
    rewards = [
        {"id": number, "value": reward.value, "parts": dict(reward.parts), "grader": reward.grader}
        for number, reward in trajectory.rewards
    ]
    names = ("run", "split", "family", "state", "traffic", "line", "oldest_version", "newest_version", "reward")
    ids = {"trajectory": row.id, "group": row.group_id, "task": row.task_id}
    return {**ids, **{name: getattr(row, name) for name in names}, "rewards": rewards}


def openai_line(row: TrajectoryRow, trajectory: Trajectory) -> dict[str, Any]:
    """The conversation in the form that OpenAI's fine-tuning reads. Calls get ids that no other call has."""
    line: dict[str, Any] = {"messages": _with_ids(trajectory.messages)}
    if tools := trajectory.provenance.get(TOOLS):
        line["tools"] = tools
    return {**line, "metadata": facts_of(row, trajectory)}


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results name the call they answer: they follow their calls in order."""
    found, waiting, count = [], [], 0
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            waiting = [f"call_{count + number}" for number in range(len(calls))]
            count += len(calls)
            message["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, waiting, strict=True)]
        elif message.get("role") == "tool" and waiting:
            message["tool_call_id"] = waiting.pop(0)
        found.append(message)
    return found


def _write_openai(target: Path, found: Iterator[LoadedRow]) -> int:
    count = 0
    with target.open("w", encoding="utf-8") as out:
        for row, trajectory in found:
            out.write(json.dumps(openai_line(row, trajectory), ensure_ascii=False) + "\n")
            count += 1
    return count


def _write_parquet(target: Path, found: Iterator[LoadedRow]) -> int:
    pyarrow, parquet = pyarrow_parquet()
    schema = _schema(pyarrow)
    count = 0
    rows: list[dict[str, Any]] = []
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for row, trajectory in found:
            rows += _segment_rows(row, trajectory)
            count += 1
            if len(rows) >= _ROWS:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows = []
        writer.write_table(pyarrow.Table.from_pylist(rows, schema))
    return count


def _segment_rows(row: TrajectoryRow, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    facts = facts_of(row, trajectory)
    shared = {
        **{name: value for name, value in facts.items() if name != "rewards"},
        "rewards": json.dumps(facts["rewards"]),
        "messages": json.dumps(trajectory.messages),
        "tools": json.dumps(trajectory.provenance.get(TOOLS) or []),
    }
    for segment in trajectory.segments:
        yield {
            **shared,
            "segment": segment.id,
            "cause": segment.cause,
            "parent": segment.parent[0] if segment.parent else None,
            "shared_tokens": segment.parent[1] if segment.parent else 0,
            "tokens": segment.tokens,
            "sampled": segment.sampled,
            "logprobs": segment.logprobs,
            "policy": segment.policy,
            "policies": [asdict(policy) for policy in segment.policies],
            "spans": json.dumps(segment.spans, default=to_plain),
            "kept": None
            if segment.kept is None or segment.kept_sizes is None
            else split_kept(segment.kept_sizes, segment.kept),
        }


def _schema(pyarrow: Any) -> Any:
    text, number = pyarrow.string(), pyarrow.int32()
    policy = pyarrow.struct([("line", text), ("number", number), ("form", text), ("digest", text)])
    columns = dict.fromkeys(("trajectory", "group", "task", "run", "split", "family", "state", "traffic"), text)
    columns |= {"line": text, "oldest_version": number, "newest_version": number, "reward": pyarrow.float64()}
    columns |= {"rewards": text, "messages": text, "tools": text}  # JSON
    columns |= {"segment": text, "cause": text, "parent": text, "shared_tokens": number}
    columns |= {"tokens": pyarrow.list_(number), "sampled": pyarrow.list_(pyarrow.bool_())}
    columns |= {"logprobs": pyarrow.list_(pyarrow.float32()), "policy": pyarrow.list_(pyarrow.int16())}
    columns |= {"policies": pyarrow.list_(policy), "spans": text, "kept": pyarrow.list_(pyarrow.binary())}
    return pyarrow.schema(list(columns.items()))
