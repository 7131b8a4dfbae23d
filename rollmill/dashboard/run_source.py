"""What a dashboard shows: a run's directory, or a database with its object store. Everything is opened read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import sqlalchemy as sa

from rollmill.chat.tokenizer import Tokenizer
from rollmill.dashboard.conversation import Decode
from rollmill.errors import ConfigError, StorageError
from rollmill.feedback.collect import PRODUCTION
from rollmill.gateway.recording.replaying import read_open_session
from rollmill.runs.opening import open_run
from rollmill.runs.run import RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.table_rows import TrajectoryRow
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Trajectory, TrajectoryState


@dataclass(frozen=True)
class Source:
    """`run` is None for a database alone. `only` is the id of the one run that is shown; None: every run there is."""

    name: str
    only: str | None
    run: RunDirectory | None = None
    database_url: str | None = None
    store: Path | str | None = None
    tokenizer: Path | None = None

    @classmethod
    def of_run(cls, path: Path) -> Source:
        run = open_run(path)
        return cls(run.config.name, run.id, run, run.database_url, run.home_store, run.tokenizer)

    @classmethod
    def of_database(cls, url: str, objects: str | None, only: str | None, tokenizer: Path | None) -> Source:
        if objects is not None and "://" not in objects and not Path(objects).is_dir():
            raise ConfigError(f"there is no directory {objects}", hint="--objects takes a directory or a URL")
        source = cls(only or "all runs", only, None, url, objects, tokenizer)
        source.database  # noqa: B018  # a wrong URL is reported at once
        return source

    @property
    def exists(self) -> bool:
        """Whether there is a database. A run has none before its first rollouts."""
        if self.run is None or self.run.config.database is not None:
            return True
        return (self.run.data / "mill.db").exists()

    @cached_property
    def database(self) -> sa.Engine:
        assert self.database_url is not None
        return open_database(self.database_url, read_only=True)

    @property
    def objects(self) -> Objects | None:
        """The store of weights and payloads; None if it was not named, or is not there yet."""
        if self.store is None or (isinstance(self.store, Path) and not self.store.is_dir()):
            return None
        return self._objects

    @cached_property
    def _objects(self) -> Objects:
        assert self.store is not None
        return Objects.open(self.store)

    @property
    def decode(self) -> Decode | None:
        """Token ids to text; None without a tokenizer."""
        if self.tokenizer is None or not self.tokenizer.exists():
            return None
        return self._tokenizer.decode

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return Tokenizer.load(self.tokenizer)

    def trajectories(self) -> TrajectoryStore:
        """Payloads can be read only with an object store."""
        return TrajectoryStore(self.database, self.objects or Objects.open("memory://"))

    def shows(self, row: TrajectoryRow) -> bool:
        if row.run == PRODUCTION and self.only is not None:
            return row.provenance.get("run") == self.only  # runs may share a database
        return self.only is None or row.run == self.only or row.run.startswith(f"{self.only}/")

    def load(self, row: TrajectoryRow) -> Trajectory | None:
        """The payload; of a rollout that still runs what the gateway's log has of it; None if there is nothing."""
        if row.state == TrajectoryState.deleted:
            return None
        if row.payload_key is not None:
            if self.objects is None:
                raise StorageError("payloads are in an object store", hint="name it: --objects DIRECTORY or URL")
            return self.trajectories().load(row.id)
        # what users say in open sessions may be kept from storage: only rollouts are shown before they end
        if self.run is None or row.traffic != "rollout":
            return None
        services = [path / role for path in self.run.path.glob("services/*") for role in self.run.config.gateways]
        logs: Sequence[Path] = (*self.run.session_logs, *sorted(services))
        return next((found for log in logs if (found := read_open_session(log, row.id)) is not None), None)
