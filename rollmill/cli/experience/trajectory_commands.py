"""`rollmill trajectories list | show | export | admit | quarantine | forget`: what agents did, how it was graded."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.experience.filters import (
    LengthRange,
    RewardRange,
    Solved,
    Sort,
    Split,
    State,
    Task,
    VersionRange,
    check_split,
    one_state,
    query_of,
)
from rollmill.errors import ConfigError, GatewayError, StorageError, TrajectoryError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rollmill.chat.tokenizer import Tokenizer
    from rollmill.runs.run import RunDirectory
    from rollmill.trajectories.admission import Verdict
    from rollmill.trajectories.query import TrajectoryQuery
    from rollmill.trajectories.table_rows import TrajectoryRow
    from rollmill.trajectories.trajectory_store import TrajectoryStore
    from rollmill.types import Trajectory

app = typer.Typer()

RunDir = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="a run directory; default: the newest one under runs/")
]
Database = Annotated[str | None, typer.Option(help="read this database instead: sqlite:///… or postgresql://…")]
Store = Annotated[str | None, typer.Option("--objects", help="object store of that database: directory or URL")]

_COLUMNS = ("id", "state", "reward", "task", "split", "tokens", "sampled by", "age", "reason")
_SPARE = ("sampled by", "split", "tokens", "age", "task")  # left out of a narrow terminal, in this order
_UNBOUNDED = 1 << 20
_DECISIONS = {"admitted": "admitted", "stale": "stale", "no_room": "no room", "refused": "refused"}
_LONGEST = 4000  # characters of one message, unless --full


@app.command("list")
def list_trajectories(
    run_dir: RunDir = None,
    state: State = None,
    solved: Solved = False,
    failed: Annotated[bool, typer.Option("--failed", help="the same as --state failed")] = False,
    reward: RewardRange = None,
    length: LengthRange = None,
    task: Task = None,
    version: VersionRange = None,
    split: Split = None,
    sort: Sort = "newest",
    limit: Annotated[int, typer.Option(min=1, help="list at most this many")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line, with every field")] = False,
    database: Database = None,
) -> None:
    """List trajectories, newest first; also those that still run. Tokens are sampled/all.

    For example:

        rollmill trajectories list runs/demo
        rollmill trajectories list runs/demo --failed
        rollmill trajectories list runs/demo --solved --split heldout --sort length
    """
    from rich.console import Console

    query = query_of(one_state(state, failed), solved, reward, length, task, version, split, sort, limit + 1)
    _, store = _open(run_dir, database, "memory://")  # the index alone: no payload is read
    check_split(store, split)
    rows = store.find(query)
    if as_json:
        for row in rows[:limit]:
            print(json.dumps(asdict(row)))
        return
    console = Console()
    _print_table(console, rows[:limit])
    if len(rows) > limit:
        console.print(f"and more: --limit {limit * 4} shows them", style="dim")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    out: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write; it must not exist")],
    format: Annotated[
        str, typer.Option(help="openai: JSONL with messages and tools; parquet: exact tokens")
    ] = "openai",
    state: State = None,
    solved: Solved = False,
    reward: RewardRange = None,
    length: LengthRange = None,
    task: Task = None,
    version: VersionRange = None,
    split: Split = None,
    sort: Sort = "oldest",
    everything: Annotated[
        bool,
        typer.Option(
            "--everything", help="also held-out tasks, evaluations and users without consent: to read, not to train on"
        ),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="export at most this many")] = None,
) -> None:
    """Write trajectories to a file. The openai form can be read by a stage: kind = "conversations".

    Held-out tasks and evaluations are left out, unless --split asks for them: who trains on them measures nothing any
    more. So are conversations whose users did not agree to training, quarantined and deleted ones. Parquet has one row
    per segment, with tokens, which of them were sampled, their log-probs and the weights that sampled them.

    For example:

        rollmill trajectories export runs/demo solved.jsonl --solved
        rollmill trajectories export runs/demo tokens.parquet --format parquet --reward 0.5..
    """
    from rollmill.trajectories.export import export_trajectories

    if format not in ("openai", "parquet"):
        raise ConfigError(f"--format {format!r} is unknown", hint="openai or parquet")
    query = query_of(one_state(state, False), solved, reward, length, task, version, split, sort, None)
    _, store = _open(run_dir, None, None)
    check_split(store, split)
    count, left_out = export_trajectories(
        store,
        store.find(query),
        format,  # type: ignore[arg-type]
        out,
        split=split,
        everything=everything,
        limit=limit,
    )
    reasons = "".join(f"; left out: {number} {reason}" for reason, number in left_out.items())
    print(f"{out}: {count} trajectories{reasons}")


@app.command()
def admit(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)],
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="trajectories; default: all that match")] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="the run that has them: its rollouts and its production traffic; default: RUN"),
    ] = None,
    stage: Annotated[str | None, typer.Option(help="an RL stage; default: the only one")] = None,
    solved: Solved = False,
    reward: RewardRange = None,
    length: LengthRange = None,
    task: Task = None,
    version: VersionRange = None,
    split: Split = None,
    limit: Annotated[int | None, typer.Option(min=1, help="look at no more than this many, the newest first")] = None,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait while there is no room")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would be admitted")] = False,
) -> None:
    """Let a run train on trajectories that exist already: of another run, or of production.

    They must be graded, and sampled by weights of the stage's own lineage: its line, the line that it continues, or
    equal weights of another run. The oldest token decides which step is the last that can train on a group; after
    that step, the group is recorded as stale. Groups are admitted whole and count as open groups. While the run is
    busy there may be no room: --wait. Evaluations and held-out tasks are refused. Payloads of another run are copied
    into the store of this one: a trajectory that is deleted there must be deleted here too.

    For example:

        rollmill trajectories admit runs/second --from runs/first --dry-run
        rollmill trajectories admit runs/second --from runs/first --version rl@30.. --wait 60
        rollmill trajectories admit runs/served live-1f0c…
    """
    from rollmill.runs.admit_experience import admit_trajectories
    from rollmill.runs.opening import open_with_index

    if not ids and source is None:
        raise ConfigError("which trajectories?", hint="give their ids, or --from and the run that has them")
    query = query_of("graded", solved, reward, length, task, version, split, "newest", limit)
    run, (other, store) = open_with_index(run_dir), _open(source or run_dir, None, None)
    assert other is not None
    rows = [store.get(id) for id in ids] if ids else experience_of(store, query, other.id)
    _print_verdicts(admit_trajectories(run, stage, rows, other, wait_s=wait, dry_run=dry_run), dry_run)


@app.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="a trajectory id, or a prefix of it that is unique")],
    run_dir: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="a run directory; default: the runs under runs/, the newest first"),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="the exact tokens instead, coloured by probability")] = False,
    full: Annotated[bool, typer.Option("--full", help="do not cut long messages")] = False,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json for --tokens; default: the run's")] = None,
    database: Database = None,
    objects: Store = None,
) -> None:
    """Print one trajectory to read: its conversation, which weights sampled each answer, its rewards.

    For example:

        rollmill trajectories show ID runs/demo
        rollmill trajectories show ID runs/demo --tokens
    """
    from rich.console import Console

    from rollmill.cli.experience import transcripts as transcript

    if (Path(id) / "run.json").exists():
        raise ConfigError(
            f"{id} is a run, not the id of a trajectory",
            hint=f"`rollmill trajectories list {id}` lists the ids; the id comes before the run",
        )
    run, store, row = _find(id, run_dir, database, objects)
    longest = math.inf if full else _LONGEST
    console = Console(highlight=False)
    group = store.list(run=row.run, group_id=row.group_id) if row.group_id else []
    trajectory, problem = None, ""
    try:
        trajectory = _load(run, store, row)
    except (TrajectoryError, StorageError) as error:  # the index is still worth reading
        problem = f"\nits payload cannot be read: {error}"
    if trajectory is not None and "image" in trajectory.provenance:  # the index has its name alone, without the digest
        row = replace(row, provenance={**row.provenance, "image": trajectory.provenance["image"]})
    transcript.print_facts(console, row, sorted(group, key=lambda member: member.id), store.entries(row.id))
    if problem:
        console.print(transcript.safe(problem, "red"))
    elif trajectory is not None and tokens:
        transcript.print_tokens(console, trajectory, _load_tokenizer(tokenizer or (run.tokenizer if run else None)))
    elif trajectory is not None:
        transcript.print_conversation(console, trajectory, longest)
    transcript.print_grades(console, store.rewards([row.id])[row.id], store.feedback(row.id), longest)


@app.command()
def quarantine(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)],
    ids: Annotated[list[str], typer.Argument(metavar="ID", help="ids, or prefixes of them", show_default=False)],
    reason: Annotated[str, typer.Option(help="why, for those who read it later", show_default=False)] = "",
    release: Annotated[bool, typer.Option("--release", help="end the quarantine: the reward it had counts")] = False,
) -> None:
    """Take trajectories out of training, for a reward that was not deserved. They are kept, counted and shown.

    No later step, admission or export takes them, and their groups are compared without them. What a step has trained
    on stays learnt. For example:

        rollmill trajectories quarantine runs/demo ID --reason "it deleted the failing test"
        rollmill trajectories quarantine runs/demo ID --release
    """
    if release == bool(reason.strip()):
        raise ConfigError("--reason, or --release", hint='--reason "it deleted the failing test"')
    for prefix in ids:
        _, store, row = _find(prefix, run_dir, None, None)
        if row.state == "finished":
            raise TrajectoryError(f"{row.id} is being graded, which ends a quarantine", hint="ask again afterwards")
        if release:
            store.release(row.id)
        else:
            store.quarantine(row.id, reason)
        steps = [f"step {entry.step} of {entry.run}" for entry in store.entries(row.id) if entry.state == "trained"]
        learnt = f"; {', '.join(steps)} has learnt from it" if steps and not release else ""
        typer.echo(f"{row.id}: {'released' if release else 'quarantined'}{learnt}")


@app.command()
def forget(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run directories", show_default=False)],
    user: Annotated[str, typer.Option(help="the name that production requests gave as `user`", show_default=False)],
) -> None:
    """Delete what was recorded of a production user: payloads, open sessions, feedback.

    The index keeps the rows, marked `deleted`. Name every run that served the user: each has its own pseudonym of them.
    Runs that only trained have no copies: they admit no conversation of a user. For example:

        rollmill trajectories forget runs/demo --user ann
        rollmill trajectories forget runs/* --user ann
    """
    kept = [id for run_dir in run_dirs for id in _forget_in(run_dir, user, named=len(run_dirs) > 1)]
    if kept:
        raise typer.Exit(1)


def _forget_in(run_dir: Path, user: str, *, named: bool) -> list[str]:
    """Forget a user in one run, say what was done, and return the trajectories that are kept for now."""
    import asyncio

    from rollmill.gateway.sessions.registry import pseudonym
    from rollmill.runs.opening import open_run

    run = open_run(run_dir)
    if named and run.config.database is None and not (run.path / "mill.db").exists():
        typer.echo(f"{run_dir}: nothing was recorded")
        return []
    _, store = _open(run_dir, None, None)
    places = [run, *(open_run(path) for path in sorted((run.path / "services").glob("*")))]
    ended = sum(asyncio.run(_forget_open(place, user)) for place in places)
    deleted, kept = store.delete_user(pseudonym(run.secrets["admin_token"].encode(), user))
    where = f"{run_dir}: " if named else ""
    typer.echo(f"{where}{ended} open sessions ended, {len(deleted)} trajectories deleted")
    for id, reason in kept.items():
        typer.echo(f"{where}{id} is kept: {reason}", err=True)
    return list(kept)


async def _forget_open(run: RunDirectory, user: str) -> int:
    """End the open sessions of a user at one gateway: the running one is asked, else its log is rewritten."""
    from rollmill.gateway.recording.forgetting import forget_in_log
    from rollmill.rollouts.gateway_client import GatewayClient
    from rollmill.tls import trust
    from rollmill.trajectories.trajectory_store import TrajectoryStore

    logs = [log for log in run.session_logs if log.exists()]
    if not logs:
        return 0
    objects = run.objects()
    store = TrajectoryStore(run.database(), objects)
    try:
        return sum([await forget_in_log(log, run.secrets["admin_token"], user, store, objects) for log in logs])
    except GatewayError:  # they run, and ask each other
        if run.config.tls is not None:
            trust(run.config.tls.ca)
        async with GatewayClient(run.url("gateway"), run.secrets["admin_token"], patience_s=10.0) as gateway:
            return int((await gateway.forget(user))["open"])


def _open(
    run_dir: Path | None, database: str | None, objects: str | None
) -> tuple[RunDirectory | None, TrajectoryStore]:
    """The store to read, and the run if there is one."""
    from rollmill.runs.opening import open_with_index
    from rollmill.storage.database import open_database
    from rollmill.storage.objects import Objects
    from rollmill.trajectories.trajectory_store import TrajectoryStore

    if database is not None:
        if objects is None or run_dir is not None:
            raise ConfigError("--database needs --objects and no run directory", hint="or give a run directory alone")
        file = Path(database.removeprefix("sqlite:///"))
        if database.startswith("sqlite:///") and not file.exists():
            raise ConfigError(f"{file} does not exist", hint="a relative path has three slashes, an absolute one four")
        return None, TrajectoryStore(open_database(database), Objects.open(objects))
    run = open_with_index(run_dir or _runs()[0])
    if run.config.database is None and not (run.path / "mill.db").exists():
        raise ConfigError(f"{run.path} has no trajectories yet", hint="they appear when its first rollouts start")
    return run, TrajectoryStore(run.database(), Objects.open(objects or run.home_store))


def _runs() -> list[Path]:
    """The runs under runs/, the newest first."""
    found = sorted(Path("runs").glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not found:
        raise ConfigError("there is no run under runs/", hint="name a run directory, or --database and --objects")
    return [file.parent for file in found]


def _find(
    prefix: str, run_dir: Path | None, database: str | None, objects: str | None
) -> tuple[RunDirectory | None, TrajectoryStore, TrajectoryRow]:
    """The one trajectory whose id begins with `prefix`, in the named run or in the newest that has one."""
    places = [run_dir] if run_dir is not None or database is not None else _runs()
    for place in places:
        try:
            run, store = _open(place, database, objects)
        except ConfigError:
            if len(places) == 1:
                raise
            continue  # a run without trajectories; the id may be another one's
        rows = sorted(store.list(id_prefix=prefix), key=lambda row: row.id)
        if len(rows) > 1 and rows[0].id != prefix:
            some = ", ".join(row.id for row in rows[:4])
            raise TrajectoryError(
                f"{len(rows)} trajectories begin with {prefix!r}: {some}, …", hint="give more of the id"
            )
        if rows:
            return run, store, rows[0]
    where = f" in {places[0]}" if len(places) == 1 and run_dir is not None else ""
    raise TrajectoryError(
        f"no trajectory begins with {prefix!r}{where}", hint="`rollmill trajectories list` shows them"
    )


def _load(run: RunDirectory | None, store: TrajectoryStore, row: TrajectoryRow) -> Trajectory | None:
    """The payload; of a session that is still open what the gateway's log has of it; None if there is nothing."""
    from rollmill.gateway.recording.replaying import read_open_session

    if row.state == "deleted":
        return None
    if row.payload_key is not None:
        return store.load(row.id)
    logs = run.session_logs if run is not None else []
    return next((found for log in logs if (found := read_open_session(log, row.id)) is not None), None)


def _load_tokenizer(path: Path | None) -> Tokenizer:
    from rollmill.chat.tokenizer import Tokenizer

    if path is None or not path.exists():
        raise ConfigError("--tokens needs the model's tokenizer", hint="name it: --tokenizer PATH/tokenizer.json")
    return Tokenizer.load(path)


def _print_table(console: Console, rows: list[TrajectoryRow]) -> None:
    """In a terminal, columns that do not fit are left out and the reason is cut. Ids are never cut: they may wrap."""
    from rich.console import Console
    from rich.measure import Measurement

    def width(table: Table) -> int:
        return Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum

    if not rows:
        return console.print("no trajectories match")
    names, room = list(_COLUMNS), _UNBOUNDED
    if console.is_terminal:
        for name in _SPARE:
            if width(_table(rows, names, 20)) <= console.width:
                break
            names.remove(name)
        room = max(8, console.width - width(_table(rows, names, 1)) + len("reason"))  # its heading is that wide
    table = _table(rows, names, room)
    Console(width=max(console.width, width(table))).print(table)


def _table(rows: list[TrajectoryRow], names: list[str], longest_reason: int) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in ("reward", "tokens", "age") else "left", no_wrap=True)
    for row in rows:
        cells = dict(zip(_COLUMNS, _cells(row), strict=True))
        cells["reason"].truncate(longest_reason, overflow="ellipsis")
        table.add_row(*(cells[name] for name in names))
    return table


def _cells(row: TrajectoryRow) -> Iterator[Text]:
    from rollmill.cli.experience.transcripts import STATES, duration, reward_text, safe, versions

    yield safe(row.id, "bold")
    yield safe(row.state, STATES[row.state])
    yield reward_text(row.reward)
    yield safe(row.task_id)
    yield safe(row.split or "")
    yield safe("" if row.tokens is None else f"{row.sampled_tokens}/{row.tokens}")
    yield safe(versions(row), "dim")
    yield safe(duration(time.time() - row.created_at), "dim")
    yield safe(" ".join((row.reason or "").split()))


def experience_of(store: TrajectoryStore, query: TrajectoryQuery, run_id: str) -> list[TrajectoryRow]:
    """The rollouts of a run and its production traffic, as far as the query asks for them. Runs may share a database:
    a conversation that names another run, or none, is not taken."""
    from rollmill.feedback.collect import PRODUCTION

    rows = store.find(replace(query, of_run=run_id))
    production = store.find(replace(query, run=PRODUCTION, limit=None))
    rows += [row for row in production if row.provenance.get("run") == run_id]
    return rows[: query.limit]


def _print_verdicts(verdicts: Sequence[Verdict], dry_run: bool) -> None:
    """One line per decision and reason; every trajectory is in one of them."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    groups: Counter[tuple[str, str]] = Counter()
    trajectories: Counter[tuple[str, str]] = Counter()
    for each in verdicts:
        groups[each.decision, each.reason] += 1
        trajectories[each.decision, each.reason] += len(each.ids)
    for decision, word in _DECISIONS.items():
        for key, count in sorted(groups.items()):
            if key[0] == decision:
                console.print(f"{word}: {count} groups, {trajectories[key]} trajectories: {key[1]}")
    total = sum(1 for each in verdicts if each.decision == "admitted")
    verb = "would be admitted" if dry_run else "admitted"
    console.print(f"{total} of {len(verdicts)} groups {verb}" if verdicts else "no graded trajectory matches")
