"""A store that a run names is tried before the run begins."""

from __future__ import annotations

import pytest

from rollmill.errors import ConfigError
from rollmill.storage import storage_probe as probe
from rollmill.storage.objects import Objects
from tests.storage.serving import new_bucket, s3_environment, s3_server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(name, value)


def test_a_store_that_works_is_left_as_it_was() -> None:
    bucket = new_bucket()
    probe.check_store(bucket)
    assert Objects.open(bucket).list("") == []


def test_a_bucket_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="store = 's3://no-such-bucket/runs' cannot be used") as refused:
        probe.check_store("s3://no-such-bucket/runs")
    assert "AWS_ACCESS_KEY_ID" in (refused.value.hint or "")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.2)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="cannot be used"):
        probe.check_store("s3://bucket/runs")
