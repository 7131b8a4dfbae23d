"""The overview: the report's figures as they grow, and what only a live page knows."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from pathlib import Path

import pytest
import sqlalchemy as sa

from rollmill.dashboard import overview
from rollmill.dashboard.chapters import chapters
from rollmill.dashboard.costs import costs_chapter
from rollmill.dashboard.figures import RunEvents, figures
from rollmill.dashboard.overview import Live
from rollmill.dashboard.queries import StepCost, read_queue
from rollmill.dashboard.report import write_report
from rollmill.dashboard.report_run import loans_of
from rollmill.dashboard.run_source import Source
from rollmill.dashboard.scales import GAP
from rollmill.errors import StorageError
from rollmill.gateway.access.keys import KeyRing, KeyStore
from rollmill.runs.cycle_journal import Journal
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database, reading, writing
from rollmill.storage.objects import Objects
from rollmill.storage.tables import keys as key_table
from rollmill.telemetry import read_events
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Version
from tests.dashboard.conftest import Open
from tests.dashboard.test_report import HOSTILE, Page
from tests.trajectories.build import start_group
from tests.trajectories.test_ledger import record, settle, start
from tests.weights.build import publish_line


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESH_S", "SHARE", "SLOW_S"):
        monkeypatch.setattr(overview, name, 0.0)


def emit(run: RunDirectory, kind: str, process: str = "trainer", **fields: object) -> None:
    with (run.events / f"{process}.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.time(), "process": process, "kind": kind, **fields}) + "\n")


def assert_tame(text: str) -> None:
    """No script and no style but those of the dashboard's own files, nothing from elsewhere."""
    for name, attributes in Page(text).tags:
        assert name not in ("style", "iframe", "object", "embed", "img", "base")
        assert name != "script" or str(attributes.get("src")).startswith("/static/")
        assert not any(key.startswith("on") or key == "style" for key in attributes), (name, attributes)
        for key in ("href", "src", "action"):
            assert not attributes.get(key) or re.match(r"[/.#]", str(attributes[key])), attributes


async def test_it_shows_what_the_report_shows(run: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(run.path))
    reply = await client.get("/")
    text = await reply.text()
    events = RunEvents.of(read_events(run.events))
    for name, chapter in chapters(events, figures(events, name="demo", seed=0)).items():
        assert chapter and chapter in text, name
    assert "+44.9 points" in text and "Rollmill run · stopped" in text and "rollmill train --resume" in text
    assert_tame(text)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for name in set(re.findall(r"/static/[\w.]+", text)):
        assert (await client.get(name)).status == 200
    assert (await client.get("/static/..%2fapp.py")).status == 404
    assert (await client.post("/")).status == 405


async def test_it_grows_with_the_run_and_is_not_sent_twice(run: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(run.path))
    first = await client.get("/live")
    etag = first.headers["ETag"]
    assert (await client.get("/live", headers={"If-None-Match": etag})).status == 304
    emit(run, "step", step=33, stage="rl", reward_mean=0.5, solve_rate=0.5, tokens=1)
    emit(run, "warning", text=HOSTILE)
    second = await client.get("/live", headers={"If-None-Match": etag})
    text = await second.text()
    assert second.status == 200 and second.headers["ETag"] != etag
    assert "<dd>33<small>" in text and "alert(1)" in text and "<script" not in text
    assert_tame(text)


async def test_processes_and_their_restarts(run: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(run.path))
    with exclusive(run.path, "supervisor"), exclusive(run.path, "engine-away"):
        text = await (await client.get("/")).text()
    assert "Rollmill run · training" in text
    row = next(row for row in text.split("<tr>") if "<td>engine-away</td><td><span" in row)
    assert "running" in row and str(os.getpid()) in row and '<b class="bad">1</b>' in row and "data-since=" in row
    assert "processes runs now" in await (await client.get("/")).text()


def test_queues_are_counted_in_the_ledger(run: RunDirectory) -> None:
    pace = Pace(groups_per_step=2, group_size=2, max_staleness=1, steps=8)
    key = run.stage_key(run.config.stage("rl"))
    ledger = Ledger(open_database(run.database_url), key)
    for number in range(3):
        ids = [f"{number}-{member}" for member in range(2)]
        start_group(ledger, f"g{number}", "task", 2, pace=pace, ids=ids)
    found = read_queue(Source.of_run(run.path).database, key, pace)
    assert found.groups == {"running": 3} and found.most_open == 4 and found.ledger == {"admitted": 6}
    assert found.due == 0 and found.committed == 0  # they may wait until step 2
    strict = Pace(groups_per_step=2, group_size=2, max_staleness=0, steps=8)
    assert read_queue(Source.of_run(run.path).database, key, strict).due == 3
    assert "3 of" in Live(Source.of_run(run.path)).snapshot().body


def test_what_a_solved_attempt_costs() -> None:
    """Step 2 solved nothing, and its tokens and seconds count. Waiting, evaluations and other steps do not."""
    steps = {1: StepCost(4, 2, 100), 2: StepCost(4, 0, 60), 3: StepCost(4, 2, 40)}
    worked = [
        ("engine-home", "decode", 11, 15),
        ("engine-away", "decode", 21, 27),
        ("engine-home", "decode", 31, 33),
        ("trainer", "step", 16, 20),
        ("trainer", "wait", 20, 29),
        ("dispatcher", "rollouts", 10, 40),
        ("engine-home", "decode", 1, 9),  # before the stage began
        ("engine-home", "decode", 41, 49),  # step 4: what came of it is not read yet
        ("engine-home", "decode", 60, 69),  # after the last step
    ]
    busy = [{"process": process, "what": what, "start": start, "end": end} for process, what, start, end in worked]
    text = costs_chapter(steps, {0: 10.0, 1: 20.0, 2: 30.0, 3: 40.0, 4: 50.0}, busy)
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>", text))
    assert tiles == {
        "Solved": "4",
        "Tokens per solved attempt": "50",
        "Lately": "20",
        "Engine time": f"3{GAP}s",
        "Trainer time": f"1{GAP}s",
    }
    assert not costs_chapter({1: StepCost(4, 0, 100)}, {1: 20.0}, busy), "nothing was solved"


def test_costs_are_read_from_the_committed_steps(run: RunDirectory) -> None:
    engine, key = open_database(run.database_url), run.stage_key(run.config.stage("rl"))
    store, ledger = TrajectoryStore(engine, Objects.open(run.home_store)), Ledger(engine, key)
    for number in (1, 2):
        assert start(ledger, f"g{number}")
        settle(store, ledger, f"g{number}")  # two attempts of 2 tokens, and one of them is solved
        ledger.write_step(record(ledger, number, f"g{number}"))
        ledger.commit_step(number, Version("rl", number), "digest")
    body = Live(Source.of_run(run.path)).snapshot().body
    assert "<dt>Solved</dt><dd>2<small>of 4 attempts" in body
    assert "<dt>Tokens per solved attempt</dt><dd>4<small>" in body and "<dt>Engine time</dt>" in body


def test_versions_and_channels(run: RunDirectory, tmp_path: Path) -> None:
    from rollmill.weights.reading.channels import Channels

    assert isinstance(run.home_store, Path)
    publish_line(run.home_store, 3)
    objects = Objects.open(run.home_store)
    channels = Channels(objects)
    for number in (0, 2, 1):
        channels.move("live", Version("rl", number))
    body = Live(Source.of_run(run.path)).snapshot().body
    row = next(row for row in body.split("<tr>") if "<b>live</b>" in row)
    assert row.index("rl@1") < row.index("3 moves") and row.index("3: ") < row.index("2: ")
    assert "engine-away" in body and "demo@32" in body  # what the engines served last


def test_the_cycle_says_where_it_is_and_why(run: RunDirectory) -> None:
    journal = Journal(open_database(run.database_url), run.id)
    assert "The cycle" not in Live(Source.of_run(run.path)).snapshot().body
    first = journal.move(journal.begin({}, "it begins"), "distilling", "enough conversations")
    journal.move(first, "held", f"too few with signal {HOSTILE}")
    journal.begin({}, "12 of 40 conversations")
    body = Live(Source.of_run(run.path)).snapshot().body
    assert body.index("Cycle 2: ") < body.index("12 of 40 conversations") < body.index("Cycle 1: ")
    assert "too few with signal" in body and "enough conversations" in body
    assert_tame(body)


def test_loans_say_which_engine_since_when_for_what_and_why(run: RunDirectory) -> None:
    """Also in the report. A loan whose engine died, or was started again, is over."""
    service = run.path / "services" / "serve-1"
    (service / "events").mkdir(parents=True)

    def tell(kind: str, number: int, **fields: object) -> None:
        event = {"at": time.time(), "process": "supervisor", "kind": kind, "engine": f"serve-1-engine-{number}"}
        with (service / "events" / "supervisor.jsonl").open("a") as file:
            file.write(json.dumps({**event, **fields}) + "\n")

    with exclusive(service, "engine-1"), exclusive(service, "engine-2"):
        for number in (1, 2, 3):
            tell("apply", number, line="rl", version=7)
            tell("lend", number, line="rl", reason=f"quiet {HOSTILE}")
        told = {"line": "rl", "lent_s": 60.0, "limit_s": 10.0}
        tell("returned", 1, **told, seconds=12.5, late=True, reason="production rose")
        tell("returned", 4, **told, seconds=None, late=False, reason="nobody prolonged the loan")
        body = Live(Source.of_run(run.path)).snapshot().body
        report = write_report(run.path, loans=loans_of(run)).read_text()
        figures = json.loads((run.path / "report.json").read_text())["loans"]
    assert_tame(body)
    assert "serve-1/engine-2<small> lent to rl</small>" in body, "an engine of a service, by the name of its process"
    for text, prefix in ((body, "serve-1/"), (report, "serve-1-")):
        assert "1 lent now. 4 loans since its service started, 1 recalled" in text
        assert f"slowest return 12.5{GAP}s of the 10" in text and "declared, 1 late." in text
        rows = {
            n: next(row for row in text.split("<tr>") if f"<td>{prefix}engine-{n}</td>" in row) for n in range(1, 5)
        }
        assert "late</b>" in rows[1] and "production rose" in rows[1] and "quiet" in rows[1]
        assert "lent now" in rows[2] and "its process ended" in rows[3]
        assert "<td>not known</td>" in rows[3], "nobody saw when it ended"
        assert "nobody prolonged" in rows[4] and "<td>60" in rows[4]
    assert figures["loans"] == 4 and figures["open"] == 1 and figures["late"] == 1 and figures["limit_seconds"] == 10.0
    assert figures["return_seconds"] == {"mean": 12.5, "max": 12.5} and 60 <= figures["lent_seconds"] < 1e6


async def test_only_this_machine_may_ask_without_a_key(run: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(run.path))
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::ffff", ""):
        assert (await client.get("/", headers={"Host": host})).status in (400, 421), host
    for host in ("localhost:8800", "127.0.0.1", "[::1]:8800"):
        assert (await client.get("/live", headers={"Host": host})).status == 200, host


async def test_beyond_loopback_it_needs_a_key_with_the_scope_read(run: RunDirectory, visit: Open) -> None:
    store = KeyStore(open_database(run.database_url), run.id)
    (reader, secret), (_, other) = store.create(["read"]), store.create(["production"])
    source = Source.of_run(run.path)
    ring = KeyRing(KeyStore(source.database, run.id), {}, cache_s=0.0)
    client = await visit(source, ring)

    async def ask(authorization: str | None, path: str = "/live") -> int:
        headers = {"Authorization": authorization} if authorization else {}
        return (await client.get(path, headers={"Host": "mill.example", **headers})).status

    refused = await client.get("/", headers={"Host": "mill.example"})
    assert refused.status == 401 and refused.headers["WWW-Authenticate"].startswith("Basic")
    assert "Reward" not in await refused.text()
    as_password = base64.b64encode(f"ann:{secret}".encode()).decode()
    assert [await ask(f"Bearer {secret}"), await ask(f"Basic {as_password}")] == [200, 200]
    assert await ask(f"Bearer {other}") == 403
    for wrong in ("Bearer ", "Bearer rmk-00000000-x", "Basic %%%", "Basic /w==", "Digest x", f"Bearer {secret}x"):
        assert await ask(wrong) == 401, wrong
    assert await ask(None, "/static/dashboard.js") == 401
    store.revoke(reader.id)
    assert await ask(f"Bearer {secret}") == 401


def test_the_database_refuses_every_write_of_a_dashboard(run: RunDirectory, tmp_path: Path) -> None:
    engine = Source.of_run(run.path).database
    with pytest.raises(StorageError, match=r"read-?only"):
        writing(engine, lambda connection: connection.execute(key_table.delete()))
    with reading(engine) as connection, pytest.raises(sa.exc.DBAPIError):
        connection.execute(key_table.delete())
    missing = tmp_path / "missing.db"
    with pytest.raises(StorageError, match="there is no database"):
        Source.of_database(f"sqlite:///{missing}", None, None, None)
    assert not missing.exists()


async def test_a_store_that_does_not_answer_is_said_on_the_page(tmp_path: Path, visit: Open) -> None:
    (tmp_path / "mill.db").write_bytes(b"garbage" * 1000)
    client = await visit(Source("broken", None, database_url=f"sqlite:///{tmp_path}/mill.db"))
    reply = await client.get("/")
    text = await reply.text()
    assert reply.status == 503 and "file is not a database" in text and "names a file" in text
    assert_tame(text)
