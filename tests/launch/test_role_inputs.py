"""What role processes are handed of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmill.launch.role_inputs import hand_to, take
from rollmill.runs.run import RunDirectory
from tests.runs.conftest import make_config

DATABASE = "postgresql://mill:password@localhost/mill"


@pytest.mark.parametrize(
    ("role", "uses"),
    [
        ("trainer", {"database"}),
        ("dispatcher", {"database", "rollout_key"}),
        ("evaluator", {"database", "rollout_key"}),
        ("gateway", {"database", "admin_token", "engine_token", "production_key", "rollout_key"}),
        ("engine-home", {"engine_token"}),
        ("engine-away", {"engine_token", "store_token"}),  # it copies from the home store over HTTP
        ("engine-away-2", {"engine_token", "store_token"}),
        ("store", {"store_token"}),
    ],
)
def test_a_role_is_handed_only_the_secrets_that_it_uses(tmp_path: Path, role: str, uses: set[str]) -> None:
    run = RunDirectory.create(
        tmp_path, make_config("engines=[{region='home'},{region='away',count=2}]", f"database={DATABASE}")
    )
    handed = json.dumps(hand_to(run, role))
    secrets = {**run.secrets, "database": DATABASE}
    assert {name for name, secret in secrets.items() if secret in handed} == uses
    taken = take(json.loads(handed))
    assert (taken.id, taken.ports, taken.path) == (run.id, run.ports, run.path)
    assert taken.config.model_copy(update={"database": DATABASE}) == run.config
    assert not any(secret in repr(taken) for secret in run.secrets.values())


def test_a_role_of_a_service_reads_the_stores_of_its_run(run: RunDirectory) -> None:
    service = run.make_service("serve-1", "0.0.0.0", 8000)
    assert take(hand_to(service, "gateway")) == RunDirectory(
        service.path,
        run.config,
        run.id,
        service.ports,
        {name: run.secrets[name] for name in ("admin_token", "engine_token", "production_key", "rollout_key")},
        "0.0.0.0",
        run.path,
    )
