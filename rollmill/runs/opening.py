"""A run that is named by the URL of its objects, s3://BUCKET/PREFIX/ID: from any host that reaches the store.

    cluster/run.json   id and configuration of the run, the host and the directory where it began. No secret.

On the host where it began this is its directory. On another host it is a directory in the user's cache, which may be
lost: it has secrets of its own, which are used if the run is resumed from there. Commands that need the index of a run
can only be given where it is, if it is SQLite.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from rollmill.config import validate_config
from rollmill.errors import ConfigError, StorageError
from rollmill.runs.configuration.settings import RunConfig
from rollmill.runs.run import SECRETS, RunDirectory
from rollmill.runs.saved import FORMAT, KEY, reading_description, url_of

PASSWORD = re.compile(r"(//[^/:@]*):[^@/]*@")  # in the URL of a database
CACHE = "~/.cache/rollmill/runs"


def describe_run(run: RunDirectory) -> None:
    """Write into its store what a run is. Does nothing if its store is a directory of the run."""
    if run.config.store is None:
        return
    config = run.config.model_dump(mode="json")
    if config["database"] is not None:
        config["database"] = PASSWORD.sub(r"\1@", config["database"])
    about = {
        "format": FORMAT,
        "id": run.id,
        "config": config,
        "host": socket.gethostname(),
        "path": str(run.path.absolute()),
    }
    run.objects().put(KEY, json.dumps(about).encode())


def open_run(path: Path) -> RunDirectory:
    """The run of a directory, or of the URL of its objects."""
    url = url_of(path)
    return RunDirectory.open(path) if url is None else open_by_url(url)


def open_by_url(url: str) -> RunDirectory:
    """Raises ConfigError if no run is described there."""
    with reading_description(url) as about:
        config = validate_config(RunConfig, about["config"], url)
        id, host, began = str(about["id"]), about["host"], Path(about["path"])
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,80}", id):
        raise ConfigError(f"{url}/{KEY} is damaged: its id is {id!r}")
    if host == socket.gethostname() and _holds(began, id):
        return RunDirectory.open(began)
    return _in_cache(config, id)


def open_with_index(path: Path) -> RunDirectory:
    """A run for a command that reads or writes its index. Raises ConfigError if that is on another host."""
    run = open_run(path)
    need_index(run)
    return run


def need_index(run: RunDirectory) -> None:
    """Raises ConfigError if the index of the run is a file of another host. A new one would be empty beside the run's
    checkpoints, and its groups would be played again."""
    database = run.config.database
    cached = run.path.resolve().parent == Path(CACHE).expanduser().resolve()
    if not cached or not (database or "sqlite").startswith("sqlite"):
        return
    if database is not None and Path(database.partition(":///")[2].partition("?")[0]).is_file():
        return  # on a disk that both hosts have
    try:
        about = json.loads(run.objects().get(KEY))
        host, path = str(about["host"]), str(about["path"])
    except (StorageError, ValueError, LookupError, TypeError):
        host, path = "the host where it began", "RUN"
    raise ConfigError(
        f"the index of {run.home_store} is an SQLite database on another host, which this command needs",
        hint=f"give the command on {host}, where {path} is the run. A run that begins with a PostgreSQL `database` can "
        f"be used from any host. If {host} is lost, `rollmill train RUN.toml --from {run.home_store} VERSION` starts a "
        "new run from a version",
    )


def _in_cache(config: RunConfig, id: str) -> RunDirectory:
    path = Path(CACHE).expanduser() / id
    if not _holds(path, id):
        run = RunDirectory(path, config, id, {}, {name: secrets.token_urlsafe(24) for name in SECRETS})
        run.write_new()
        return run
    run = RunDirectory.open(path)
    return run if run.config == config else run.rewrite(config)


def _holds(path: Path, id: str) -> bool:
    try:
        saved: dict[str, Any] = json.loads((path / "run.json").read_text())
        return saved.get("id") == id
    except (OSError, ValueError, AttributeError):
        return False
