import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels
from tests.weights.build import publish_line


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    publish_line(tmp_path, 3)
    return Objects.open(tmp_path)


def test_a_channel_moves_and_keeps_its_history(objects: Objects) -> None:
    channels, other = Channels(objects), Channels(objects)
    assert (channels.get("live"), channels.history("live"), channels.names()) == (None, [], [])
    assert channels.move("live", Version("rl", 0), expect=0) == 1
    assert other.get("live") == Version("rl", 0)
    assert channels.move("live", Version("rl", 2), expect=1) == 2
    assert other.move("live", Version("rl", 1)) == 3
    assert channels.get("live") == other.get("live") == Version("rl", 1)
    assert [(entry.number, entry.version.number) for entry in channels.history("live")] == [(1, 0), (2, 2), (3, 1)]
    assert channels.names() == ["live"]


def test_a_late_move_is_refused(objects: Objects) -> None:
    channels = Channels(objects)
    channels.move("live", Version("rl", 0), expect=0)
    for expect in (0, 2):
        with pytest.raises(WeightsError, match=f"expected at entry {expect} and is at entry 1"):
            channels.move("live", Version("rl", 1), expect=expect)
    assert channels.get("live") == Version("rl", 0)


def test_a_channel_points_only_at_what_exists(objects: Objects) -> None:
    for version in (Version("rl", 9), Version("nothing", 0)):
        with pytest.raises(WeightsError, match="no such version"):
            Channels(objects).move("live", version)


def test_rollback_goes_to_the_version_before(objects: Objects) -> None:
    channels = Channels(objects)
    with pytest.raises(WeightsError, match="no version before") as caught:
        channels.rollback("live")
    assert caught.value.hint
    channels.move("live", Version("rl", 0))
    with pytest.raises(WeightsError, match="no version before rl@0"):
        channels.rollback("live")
    channels.move("live", Version("rl", 1))
    channels.move("live", Version("rl", 2))
    channels.move("live", Version("rl", 2))
    entry = channels.rollback("live")
    assert (entry.number, entry.version) == (5, Version("rl", 1))
    assert channels.entry("live") == entry
    # further back, and never to a version that was rolled back from
    assert channels.rollback("live").version == Version("rl", 0)
    assert len(channels.history("live")) == 6
    assert channels.before("live") is None


def test_a_long_history_is_not_read_whole_to_find_the_version_before(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every collection needs it, and a channel may move with every version."""
    channels = Channels(objects)
    for number in range(100):
        channels.move("live", Version("rl", number % 2))
    read: list[str] = []
    get = objects.get
    monkeypatch.setattr(objects, "get", lambda key: read.append(key) or get(key))
    before = channels.before("live")
    assert before is not None and before.version == Version("rl", 0)
    assert 0 < len(read) <= 64


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b'{"line": "rl", "number": -1, "at": 1.0}', b'{"line": "../x", "number": 1, "at": 1.0}',
        b'{"line": "rl", "number": 1, "at": 1e999}', b'{"line": "rl", "number": 1, "at": 1e300}',
        b'{"line": "rl", "number": 1' + b"0" * 400 + b', "at": 1.0}', b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_damaged_entries_are_errors(objects: Objects, data: bytes) -> None:
    objects.create("channels/live/0000000001.json", data)
    with pytest.raises(WeightsError):
        Channels(objects).get("live")


RACE = """
import sys
from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import Channels
channels = Channels(Objects.open(sys.argv[1]))
sys.stdin.readline()
won = 0
while (entry := channels.entry("live")) is None or entry.number < 40:
    number = entry.number if entry else 0
    try:
        assert channels.move("live", Version("rl", int(sys.argv[2])), expect=number) == number + 1
        won += 1
    except WeightsError as error:
        assert "expected at entry" in error.message, error
print(won)
"""


def test_compare_and_swap_between_processes(objects: Objects, tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in range(3)
    ]  # fmt: skip
    won = [int(racer.communicate("\n")[0]) for racer in racers]
    entries = Channels(objects).history("live")
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    assert [sum(entry.version.number == name for entry in entries) for name in range(3)] == won
