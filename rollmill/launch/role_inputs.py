"""What a role process is handed: configuration, addresses, directories, and only the secrets that its role uses.

The supervisor reads run.json, role processes do not. So code of a user that runs in a role, such as a reward or an
agent's harness, is never given a secret of another role. All roles of one machine run under one user: that code could
still read run.json as this user. docs/security.md says what holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmill.config import validate_config
from rollmill.runs.run import SECRETS, RunConfig, RunDirectory

USES = {
    "trainer": {"database"},
    "dispatcher": {"database", "rollout_key"},
    "evaluator": {"database", "rollout_key"},
    "gateway": {"database", "admin_token", "engine_token", "production_key", "rollout_key"},
    "engine": {"engine_token"},
    "mirroring engine": {"engine_token", "store_token"},
    "store": {"store_token"},
    "supervisor": {"database", *SECRETS},  # of a run whose supervisor is not the command itself
}


def hand_to(run: RunDirectory, role: str) -> dict[str, Any]:
    """What `role` (`trainer`, `engine-home` …) is handed, as JSON."""
    kind, _, name = role.partition("-")
    away = kind == "engine" and run.config.engine_spec(name).region != run.config.regions[0]
    mirrors = away and run.service_of is None
    uses = USES[f"mirroring {kind}" if mirrors else kind]
    config = run.config.model_dump(mode="json")
    return {
        "path": str(run.path),
        "config": config if "database" in uses else {**config, "database": None},
        "id": run.id,
        "ports": run.ports,
        "secrets": {name: secret for name, secret in run.secrets.items() if name in uses},
        "host": run.host,
        "service_of": str(run.service_of) if run.service_of else None,
    }


def take(handed: dict[str, Any]) -> RunDirectory:
    """The run as a role knows it."""
    return RunDirectory(
        Path(handed["path"]),
        validate_config(RunConfig, handed["config"], f"the configuration of {handed['path']}"),
        handed["id"],
        handed["ports"],
        handed["secrets"],
        handed["host"],
        Path(handed["service_of"]) if handed["service_of"] else None,
    )
