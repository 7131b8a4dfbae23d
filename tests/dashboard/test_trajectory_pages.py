"""Trajectories to search and read: pages by key, filters, and contents that want to be more than text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.dashboard import queries
from rollmill.dashboard.queries import find_page, run_keys
from rollmill.dashboard.run_source import Source
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.query import Cursor, TrajectoryQuery
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade
from tests.dashboard.conftest import Open
from tests.dashboard.test_report import HOSTILE
from tests.dashboard.test_run_overview import assert_tame
from tests.trajectories import build

CALL = {"name": HOSTILE, "arguments": f'{{"path": "{"../" * 9}", "{HOSTILE[:20]}": "\\u202e"}}'}
MESSAGES = [
    {"role": "user", "content": f"Fix clamp {HOSTILE}"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "name": HOSTILE, "content": f"\x1b[2J\u202e{HOSTILE}"},
    {"role": f"x onclick=alert(4) {HOSTILE}", "content": [{"type": "text", "text": HOSTILE}, HOSTILE]},
    {"role": "assistant", "content": "Done."},
]
STRANGE = 't "><script>alert(5)</script>&id=2'


def stores(run: RunDirectory) -> tuple[TrajectoryStore, Objects]:
    objects = Objects.open(run.home_store)
    return TrajectoryStore(open_database(run.database_url), objects), objects


@pytest.fixture
def filled(run: RunDirectory) -> RunDirectory:
    """Three of one group, with hostile contents: solved, failed, running; one of an evaluation; one of another run."""
    store, objects = stores(run)
    Tokenizer(train_tokenizer(["Fix clamp <script>"], 300, SPECIAL_TOKENS)).save(run.tokenizer)
    stage, provenance = f"{run.id}/rl", {"split": "train", "family": HOSTILE}
    store.create(stage, "group", HOSTILE, [STRANGE, "failed", "running"], provenance)
    solved = build.trajectory(STRANGE, segments=[build.segment()], messages=MESSAGES, task_id=HOSTILE)
    objects.create("trajectories/0", encode_trajectory(solved))
    store.finish(STRANGE, "trajectories/0", None, **seal_facts(solved))
    store.grade(STRANGE, Grade(1.0, {HOSTILE: 0.75}, {"output": HOSTILE, HOSTILE: [HOSTILE]}, HOSTILE))
    store.add_feedback(STRANGE, HOSTILE, 1.0, {"by": HOSTILE})
    store.fail("failed", f"machine: {HOSTILE}")
    store.create(f"{run.id}/eval-after", "", "heldout/1", ["eval-1"], {"split": "heldout"})
    store.create("another/rl", "", "secret", ["foreign"], {})
    for id, of in (("asked", run.id), ("foreign-asked", "another"), ("nobodys", None)):
        forged = {"session": f'"run":"{run.id}"'} if of != run.id else {}
        whose = {"key": "production", **({"run": of} if of else {}), **forged}
        store.create("production", "", "", [id], whose, traffic="production")
        asked = build.trajectory(id, segments=[build.segment()], messages=[{"role": "user", "content": f"Ask {id}"}])
        objects.create(f"trajectories/{id}", encode_trajectory(asked))
        store.finish(id, f"trajectories/{id}", None, **seal_facts(asked))
        store.add_feedback(id, "accepted", 1.0, {})
    return run


async def test_hostile_contents_stay_text(filled: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(filled.path))
    for path in (
        "/trajectories",
        f"/trajectory?id={quote(STRANGE)}",
        "/trajectory?id=failed",
        "/trajectory?id=running",
    ):
        reply = await client.get(path)
        text = await reply.text()
        assert reply.status == 200 and "alert(1)" in text and "<script>alert" not in text, path
        assert "\u202e" not in text and "\x1b" not in text
        assert_tame(text)
    for name in ("search", "run", "state", "reward", "version", "after", "split"):
        reply = await client.get("/trajectories", params={name: HOSTILE})
        assert reply.status in (200, 400), name
        assert_tame(await reply.text())
    reply = await client.get("/trajectory", params={"id": HOSTILE})
    assert reply.status == 404
    assert_tame(await reply.text())


async def test_one_is_read_with_its_tokens_versions_and_rewards(filled: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(filled.path))
    text = await (await client.get("/trajectory", params={"id": STRANGE})).text()
    assert text.count('class="token policy') == 6 and "log-prob" in text and "rl v3 bf16" in text
    assert 'class="switched"' in text and "rl@3–4" in text and "Reward 1" in text and "Evidence" in text
    assert "Feedback" in text and "aria-current" in text and "trajectory?id=failed" in text
    failed = await (await client.get("/trajectory", params={"id": "failed"})).text()
    assert "nothing of it can be read" in failed
    assert (await client.get("/trajectory", params={"id": "foreign"})).status == 404
    assert (await client.get("/trajectory")).status == 404


async def test_the_page_of_a_run_has_its_own_conversations_with_users(filled: RunDirectory, visit: Open) -> None:
    stores(filled)[0].create("production", "", "", ["open"], {"key": "k", "run": filled.id}, traffic="production")
    client = await visit(Source.of_run(filled.path))
    text = await (await client.get("/trajectory", params={"id": "asked"})).text()
    assert "Ask asked" in text and "accepted" in text
    for other in ("foreign-asked", "nobodys"):
        assert (await client.get("/trajectory", params={"id": other})).status == 404
    page = await (await client.get("/")).text()
    (row,) = re.findall(r"<tr><td><code>rl@4</code></td>(.*?)</tr>", page)
    assert "accepted 1" in row and row.count("<td>1</td>") == 3  # one conversation, one context, one report
    (row,) = re.findall(r"<tr><td><code>still open</code></td>(.*?)</tr>", page)
    assert row == "<td>–</td><td>1</td><td>–</td><td>0</td>"
    everything = await visit(Source.of_database(filled.database_url, str(filled.home_store), None, None))
    assert (await everything.get("/trajectory", params={"id": "nobodys"})).status == 200


FILTERS: list[tuple[dict[str, str], set[str]]] = [
    ({}, {STRANGE, "failed", "running", "eval-1", "asked"}),
    ({"run": "production"}, {"asked"}),
    ({"state": "failed"}, {"failed"}),
    ({"solved": "yes"}, {STRANGE}),
    ({"solved": "no"}, set()),
    ({"split": "heldout"}, {"eval-1"}),
    ({"reward": "0.5.."}, {STRANGE}),
    ({"reward": "..0.5"}, set()),
    ({"version": "4"}, {STRANGE, "asked"}),
    ({"version": "5.."}, set()),
    ({"search": "MACHINE:"}, {"failed"}),
    ({"search": "100%_"}, set()),
    ({"run": "another/rl"}, set()),
]


async def test_filters(filled: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(filled.path))
    for filters, ids in FILTERS:
        text = await (await client.get("/trajectories", params=filters)).text()
        found = re.findall(r'href="/trajectory\?id=[^"]*" title="([^"]*)"', text)
        assert {html.unescape(id) for id in found} == ids, filters
        assert bool(ids) or "No trajectory matches." in text


async def test_a_filter_that_cannot_be_read_is_explained(filled: RunDirectory, visit: Open) -> None:
    client = await visit(Source.of_run(filled.path))
    for filters in ({"reward": "much"}, {"state": "happy"}, {"after": "nan,x"}, {"after": "soon"}):
        reply = await client.get("/trajectories", params=filters)
        assert reply.status == 400 and next(iter(filters)) in await reply.text()


async def test_a_database_alone(filled: RunDirectory, visit: Open) -> None:
    everything = Source.of_database(filled.database_url, str(filled.home_store), None, None)
    client = await visit(everything)
    text = await (await client.get("/")).text()
    assert "another/rl" in text and f"{filled.id}/rl" in text
    assert "secret" in await (await client.get("/trajectories", params={"run": "another/rl"})).text()
    read = await (await client.get("/trajectory", params={"id": STRANGE})).text()
    assert "Fix clamp" in read and 'class="token' not in read  # no tokenizer
    without = await visit(Source.of_database(filled.database_url, None, filled.id, None))
    read = await (await without.get("/trajectory", params={"id": STRANGE})).text()
    assert "--objects" in read or "object store" in read
    assert (await without.get("/trajectory", params={"id": "foreign"})).status == 404


def test_pages_by_key_meet_every_trajectory_once(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many were created in one moment, and where the window ends before a page is full."""
    monkeypatch.setattr(queries, "PAGE", 3)
    monkeypatch.setattr(queries, "WINDOW", 5)
    store, _ = stores(run)
    expected = set()
    for batch in range(6):
        for stage in ("rl", "eval-after"):
            ids = [f"{stage}-{batch}-{member}" for member in range(4)]  # one moment each
            store.create(f"{run.id}/{stage}", "", f"task-{batch}", ids, {})
            expected |= set(ids)
    engine = Source.of_run(run.path).database
    keys = run_keys(engine, run.id)
    assert keys == [f"{run.id}/eval-after", f"{run.id}/rl"]

    def walk(contains: str = "") -> list[str]:
        seen: list[str] = []
        after: Cursor | None = None
        for _ in range(100):
            page = find_page(engine, TrajectoryQuery(after=after), keys, contains)
            assert len(page.rows) <= 3
            seen += [row.id for row in page.rows]
            after = page.next
            if after is None:
                return seen
        raise AssertionError("it does not end")

    seen = walk()
    assert len(seen) == len(expected) and set(seen) == expected
    assert set(walk("task-0")) == {id for id in expected if "-0-" in id}  # the oldest: windows without a match between


async def test_a_run_without_rollouts_yet(tmp_path: Path, visit: Open) -> None:
    from rollmill.config import load_config
    from rollmill.demo import CONFIG
    from rollmill.runs.run import RunConfig

    run = RunDirectory.create(tmp_path, load_config(RunConfig, CONFIG, ['name="new"']))
    client = await visit(Source.of_run(run.path))
    assert "Stage midtrain: step 0" in await (await client.get("/")).text()
    assert "There are none yet" in await (await client.get("/trajectories")).text()
    assert not (run.path / "mill.db").exists()
    assert (await client.get("/trajectory?id=x")).status == 404
