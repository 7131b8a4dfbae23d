"""Products report what users did with an answer: the Python client, and the JavaScript one if Node is there."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from rollmill.errors import GatewayError
from rollmill.signals import KINDS, Signals
from tests.gateway.conftest import LIVE, USER, Answers, Mill
from tests.gateway.stand_in import StandIn

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "learn-from-your-users.md"
SNIPPET = Path(__file__).parents[2] / "examples" / "signals.js"
EXPECTED = [
    ("accepted", 1.0),
    ("edited", 0.8),
    ("reverted", 1.0),
    ("retried", 1.0),
    ("sentiment", -0.5),
    ("thumbs", -1.0),
    ("latency", 2.5),
    ("task", None),
]


def report(signals: Signals, about: object) -> None:
    signals.accepted(about)  # type: ignore[arg-type]
    signals.edited(about, survived=0.8)  # type: ignore[arg-type]
    signals.reverted(about)  # type: ignore[arg-type]
    signals.retried(about)  # type: ignore[arg-type]
    signals.sentiment(about, -0.5)  # type: ignore[arg-type]
    signals.thumbs(about, up=False)  # type: ignore[arg-type]
    signals.latency(about, 2.5)  # type: ignore[arg-type]
    signals.task(about, "fix")  # type: ignore[arg-type]


async def test_signals_are_tied_to_the_exact_answer(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    answer = await door.say(LIVE, [USER])
    record = answer["rollmill"]
    for url in (door.url, f"{door.url}/v1/"):
        await asyncio.to_thread(report, Signals(url, LIVE), answer)
    rows = door.trajectories.feedback(record["trajectory"])
    assert [(row.kind, row.value) for row in rows] == 2 * EXPECTED and {row.kind for row in rows} == KINDS.keys()
    assert {row.data["answer"] for row in rows} == set(record["answers"])
    assert rows[7].data["label"] == "fix"
    signals = Signals(door.url, LIVE)
    numbers = [await asyncio.to_thread(signals.send, record, "accepted", 1.0, id="once") for _ in range(2)]
    assert numbers[0] == numbers[1] and numbers[0] is not None


async def test_a_signal_that_makes_no_sense_is_refused(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    answer = await door.say(LIVE, [USER])
    signals = Signals(door.url, LIVE)
    with pytest.raises(ValueError, match=r"edited is 1.5, not between 0 and 1: the share"):
        signals.edited(answer, survived=1.5)
    with pytest.raises(ValueError, match="no field `rollmill`"):
        signals.accepted({"choices": []})
    with pytest.raises(GatewayError, match="401"):
        await asyncio.to_thread(Signals(door.url, "wrong").accepted, answer)
    assert door.trajectories.feedback(answer["rollmill"]["trajectory"]) == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_the_line_with_curl_of_the_guide(mill: Mill, answers: Answers) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    record = (await door.say(LIVE, [USER]))["rollmill"]
    (line,) = re.findall(r"^\$ (curl .*)$", GUIDE.read_text(), re.M)
    assert "http://127.0.0.1:8000/" in line and '"…"' in line
    line = line.replace("http://127.0.0.1:8000", door.url).replace("…", record["answers"][0])
    curl = await asyncio.create_subprocess_exec(
        "bash", "-c", line, env={"PATH": os.environ["PATH"], "KEY": LIVE}, stdout=asyncio.subprocess.PIPE
    )
    told = json.loads((await curl.communicate())[0])
    (row,) = door.trajectories.feedback(record["trajectory"])
    assert told == {"trajectory": record["trajectory"], "feedback": row.id}
    assert (row.kind, row.value, row.data["answer"]) == ("accepted", 1.0, record["answers"][0])


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
async def test_the_javascript_client_reports_the_same(mill: Mill, answers: Answers, tmp_path: Path) -> None:
    door = await mill.gateway(await mill.engine(StandIn([answers.text("one")])))
    answer = await door.say(LIVE, [USER])
    (tmp_path / "signals.mjs").write_text(SNIPPET.read_text())
    (tmp_path / "main.mjs").write_text(
        'import { Signals } from "./signals.mjs";\n'
        f"const answer = {json.dumps(answer)};\nconst signals = new Signals({door.url + '/v1'!r}, {LIVE!r});\n"
        "await signals.accepted(answer);\nawait signals.edited(answer, 0.8);\nawait signals.reverted(answer);\n"
        "await signals.retried(answer);\nawait signals.sentiment(answer, -0.5);\nawait signals.thumbs(answer, false);\n"
        "await signals.latency(answer, 2.5);\nawait signals.task(answer, 'fix');\n"
        "await signals.accepted('nobody-knows-it').then((number) => console.log(number));\n"
        "await new Signals(signals.url.replace('/v1/feedback', ''), 'wrong').accepted(answer)"
        ".catch((error) => console.log(error.message));\n"
    )
    node = await asyncio.create_subprocess_exec("node", str(tmp_path / "main.mjs"), stdout=asyncio.subprocess.PIPE)
    out = (await node.communicate())[0].decode().splitlines()
    assert node.returncode == 0 and out[0] == "null" and "answered 401" in out[1]
    rows = door.trajectories.feedback(answer["rollmill"]["trajectory"])
    assert [(row.kind, row.value) for row in rows] == EXPECTED
