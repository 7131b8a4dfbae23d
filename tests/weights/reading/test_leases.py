import os
import time
from pathlib import Path

import pytest

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.weights.reading.leases import LONGEST_SECONDS, Leases


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(Objects.open(tmp_path), "rl")


def age(path: Path, holder: str, seconds: float) -> None:
    """Advances the store's clock."""
    lease = path / f"weights/rl/bf16/leases/{holder}.json"
    then = lease.stat().st_mtime - seconds
    os.utime(lease, (then, then))


def standing(leases: Leases) -> dict[str, int]:
    return {lease.holder: lease.number for lease in leases.held()}


def test_a_lease_is_held_renewed_and_released(tmp_path: Path, leases: Leases) -> None:
    assert leases.held() == []
    leases.hold("engine-1", 4, 60, engine="http://127.0.0.1:8000", region="eu")
    leases.hold("engine-2", 7, 60)
    first, second = leases.held()
    assert (first.holder, first.number, first.seconds, second.number) == ("engine-1", 4, 60, 7)
    assert first.about == {"engine": "http://127.0.0.1:8000", "region": "eu"}
    assert 59 <= first.left <= 62
    leases.hold("engine-1", 5, 60)
    assert standing(leases) == {"engine-1": 5, "engine-2": 7}
    leases.release("engine-2")
    leases.release("engine-2")
    assert standing(leases) == {"engine-1": 5}
    assert standing(Leases(Objects.open(tmp_path), "rl", "fp8")) == {}


def test_a_lease_ends_by_the_clock_of_the_store(
    tmp_path: Path, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clocks of writers and readers show."""
    for skew in (-1e7, 1e7):
        real = time.time
        monkeypatch.setattr(time, "time", lambda skew=skew, real=real: real() + skew)
        leases.hold("engine", 1, 60)
        monkeypatch.setattr(time, "time", real)
        assert standing(leases) == {"engine": 1}
        age(tmp_path, "engine", 55)
        assert standing(leases) == {"engine": 1}
        monkeypatch.setattr(time, "time", lambda skew=skew, real=real: real() - skew)
        assert standing(leases) == {"engine": 1}
        age(tmp_path, "engine", 10)
        assert standing(leases) == {}
        monkeypatch.setattr(time, "time", real)
    leases.hold("engine", 1, 60)
    assert standing(leases) == {"engine": 1}


def test_leases_are_not_trusted(tmp_path: Path, leases: Leases) -> None:
    leases.hold("good", 3, 60)
    for place, data in enumerate(
        [b"", b"[]", b"{}", b'{"number": -1, "seconds": 5}', b'{"number": 1.5, "seconds": 5}', b'{"number": 1}',
         b'{"number": 1, "seconds": "x"}', b'{"number": 1, "seconds": NaN}', b'{"number": true, "seconds": 5}',
         b'{"number": 1, "seconds": ' + b"9" * 400 + b"}", b'{"number": 1, "seconds": 1e999}',
         b'{"number": 1, "seconds": 5, "engine": 1e999}', b"[" * 100_000, b'{"number": 1, "seconds": 0}']
    ):  # fmt: skip
        Objects.open(tmp_path).put(f"weights/rl/bf16/leases/bad-{place}.json", data)
    Objects.open(tmp_path).put("weights/rl/bf16/leases/forever.json", b'{"number": 1, "seconds": 1e30}')
    assert standing(leases) == {"good": 3, "forever": 1}
    age(tmp_path, "forever", LONGEST_SECONDS + 5)
    assert standing(leases) == {"good": 3}


@pytest.mark.parametrize(("number", "seconds"), [(-1, 5), (1, 0), (1, -3), (1, 1e9), (1, float("nan"))])
def test_invalid_leases_are_refused(leases: Leases, number: int, seconds: float) -> None:
    with pytest.raises(WeightsError, match="a lease on version"):
        leases.hold("engine", number, seconds)
    with pytest.raises(WeightsError, match="cannot name"):
        leases.hold("../engine", 1, 5)
