"""A run: one configuration tree and one directory.

runs/NAME/
  run.json         the resolved configuration, ports and keys of this run (mode 0600)
  store/           the home object store: weights, trajectories, submissions, checkpoints
  regions/R/store/ the store of another region R; it reaches the home store over HTTP only
  mill.db          the index (SQLite), unless `database` names a PostgreSQL
  events/ logs/    telemetry and output, one file per process
  gateway/         the gateway's local log of open sessions; gateway-2/ … if there are several
  stages/NAME/     what a stage keeps on this machine, such as an index of its documents
  services/NAME/   what `serve` and `eval` run beside it: own ports (service.json), session log, events, logs, locks
  tokenizer.json   the vocabulary of its model; beside it the files that say how the model chats
  report.html      written at the end, with report.json
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmill import telemetry
from rollmill.config import validate_config
from rollmill.errors import ConfigError
from rollmill.kinds import KindSection, code_of
from rollmill.runs.configuration.settings import CANARY, RunConfig
from rollmill.runs.free_ports import free_ports
from rollmill.runs.saved import FORMAT, SERVICE, read_saved, reading
from rollmill.storage.objects import Objects, store_of_run
from rollmill.training.stage import StageSection
from rollmill.weights.reading.weight_store import WeightStore

if TYPE_CHECKING:
    import sqlalchemy as sa

    from rollmill.trajectories.ledger import Ledger
    from rollmill.trajectories.trajectory_store import TrajectoryStore

SECRETS = (
    "admin_token",  # administers the gateway, and session keys derive from it
    "store_token",  # reads the home store over HTTP
    "engine_token",  # every request to an engine but its health and metrics
    "production_key",  # the API key of production traffic
    "rollout_key",  # opens, shows, seals and deletes rollout sessions at the gateway
)


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    config: RunConfig
    id: str  # globally unique: keys ledger, groups, trajectories and evaluations, also in a database that runs share
    ports: dict[str, int]
    secrets: Mapping[str, str] = field(repr=False)  # SECRETS by name; a role process has only those that it uses
    host: str = "127.0.0.1"  # the address that the gateway listens on
    service_of: Path | None = None  # of a service: the directory of the run whose stores it reads

    @classmethod
    def create(cls, root: Path, config: RunConfig) -> RunDirectory:
        path = root / config.name
        roles = [*config.gateways, "store", *(spec.role for spec in config.engine_specs)]
        ports = dict(zip(roles, free_ports(len(roles)), strict=True))
        id = f"{config.name}-{secrets.token_hex(4)}"
        run = cls(path, config, id, ports, {name: secrets.token_urlsafe(24) for name in SECRETS})
        run.write_new()
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run of a directory. opening.py also opens one by the URL of its objects."""
        with reading(path):
            if (path / SERVICE).exists():
                return cls._open_service(path)
            saved = read_saved(path)
            config = validate_config(RunConfig, saved["config"], str(path / "run.json"))
            return cls(path, config, saved["id"], saved["ports"], {name: saved[name] for name in SECRETS})

    @classmethod
    def _open_service(cls, path: Path) -> RunDirectory:
        return cls.open(path.parent.parent).service(path.name)

    def service(self, name: str) -> RunDirectory:
        """A service of this run."""
        path = self.path / "services" / name
        saved = json.loads((path / SERVICE).read_text())
        return replace(self, path=path, ports=saved["ports"], host=saved["host"], service_of=self.path)

    def make_service(self, name: str, host: str, port: int, *, canary: bool = False) -> RunDirectory:
        """The directory of a service of this run, with its gateway at `host` and `port`. The caller holds its lock.
        With `canary`, it has one engine more."""
        path = self.path / "services" / name
        path.mkdir(parents=True, exist_ok=True)
        others = self.config.gateways[1:]
        engines = [spec.role for spec in self.config.engine_specs]
        engines += [f"engine-{self.config.regions[0]}{CANARY}"] if canary else []
        ports = {"gateway": port, **dict(zip(engines, free_ports(len(engines)), strict=True))}
        ports |= dict(zip(others, free_ports(len(others), host), strict=True))
        (path / SERVICE).write_text(json.dumps({"host": host, "ports": ports}))
        return replace(self, path=path, ports=ports, host=host, service_of=self.path)

    def write_new(self) -> None:
        """Write run.json, which must not exist yet. It appears whole or not at all, and only its owner can read it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self._draft()
            try:
                os.link(draft, self.path / "run.json")
            finally:
                os.unlink(draft)
        except FileExistsError:
            raise ConfigError(
                f"{self.path} already holds a run",
                hint=f"`rollmill train --resume {self.path}` continues it; another `name` starts a new one",
            ) from None
        except OSError as error:
            raise self._unwritable(error) from None

    def rewrite(self, config: RunConfig) -> RunDirectory:
        """The run with another configuration, in its run.json too. The caller holds the run's lock."""
        run = replace(self, config=config)
        try:
            os.replace(run._draft(), self.path / "run.json")
        except OSError as error:
            raise self._unwritable(error) from None
        return run

    def _unwritable(self, error: OSError) -> ConfigError:
        problem = f"{self.path} cannot be written: {error.strerror}"
        return ConfigError(problem, hint="check owner and mode of the directory above")

    def _draft(self) -> str:
        """Write what run.json will hold to a file beside it, which only its owner can read. Returns the file's name."""
        body = {
            "format": FORMAT,
            "id": self.id,
            "config": self.config.model_dump(mode="json"),
            "ports": self.ports,
            "code": self.code(),
            **self.secrets,
        }
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=".run.json-", delete=False) as draft:  # mode 0600
            json.dump(body, draft, indent=1)
            draft.flush()
            os.fsync(draft.fileno())
        return draft.name

    def code(self) -> dict[str, Any]:
        """The code that fills the sections with a kind: class, version, digest."""
        config = self.config
        played: dict[str, KindSection | None] = {"sampler": config.sampler}
        own: list[tuple[str, Any]] = [(f"environments.{each.name}.", each) for each in config.environments]
        for prefix, each in own or [("", config)]:
            played |= {f"{prefix}{part}": getattr(each, part) for part in ("tasks", "machine", "harness")}
            played |= {f"{prefix}rewards.{number}": section for number, section in enumerate(each.rewards)}
        stages: dict[str, KindSection] = {f"stages.{stage.name}": stage for stage in config.stages}
        for stage in config.stages:
            for number, source in enumerate(getattr(stage, "sources", ())):
                stages[f"stages.{stage.name}.sources.{number}"] = source
        engines = {f"engines.{number}": section for number, section in enumerate(config.engines)}
        sections = {**played, **stages, **engines}
        return {name: code_of(section) for name, section in sections.items() if section is not None}

    def changed_code(self) -> list[str]:
        """Sections whose code is no longer what the run began with."""
        kept = json.loads((self.path / "run.json").read_text())["code"]
        return [name for name, code in self.code().items() if name in kept and kept[name] != code]

    def stage_key(self, stage: StageSection) -> str:
        """What keys the ledger, groups and trajectories of a stage."""
        return f"{self.id}/{stage.name}"

    @property
    def session_logs(self) -> list[Path]:
        """The directories in which its gateways keep open sessions, if they are on this host."""
        return [self.path / role for role in self.config.gateways]

    @property
    def fleet(self) -> str:
        """What keys the registrations of its engines: the run, or the service."""
        return self.id if self.service_of is None else f"{self.id}/{self.path.name}"

    def url(self, role: str) -> str:
        gateway = role.partition("-")[0] == "gateway"
        anywhere = not gateway or self.host in ("0.0.0.0", "::")  # noqa: S104
        host = "127.0.0.1" if anywhere else self.host
        scheme = "https" if self.config.tls is not None or (gateway and self.tls_of_serve) else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.ports[role]}"

    @property
    def tls_of_serve(self) -> bool:
        """Whether its gateway answers with `gateway.tls_cert`: that of `rollmill serve`."""
        return self.path.name.startswith("serve-") and self.config.gateway.tls_cert is not None

    @property
    def data(self) -> Path:
        """The directory with stores, database and tokenizer: its own, or that of the run a service belongs to."""
        return self.service_of or self.path

    def store_path(self, region: str) -> Path:
        home = region == self.config.regions[0]
        return self.data / "store" if home else self.data / "regions" / region / "store"

    @property
    def home_store(self) -> Path | str:
        """The store that holds the truth: a directory of the run, or its part of `store`."""
        if self.config.store is not None:
            return store_of_run(self.config.store, self.id)
        return self.store_path(self.config.regions[0])

    def existing_home(self) -> Objects | None:
        """The home store, for reading; None if it is a directory that was not made yet."""
        home = self.home_store
        return None if isinstance(home, Path) and not home.is_dir() else Objects.open(home)

    def objects(self) -> Objects:
        """The home store, opened; a directory is made if it is not there."""
        return Objects.open(self.home_store)

    def weights(self) -> WeightStore:
        return WeightStore(self.objects())

    def database(self) -> sa.Engine:
        from rollmill.storage.database import open_database  # not every role has a database

        return open_database(self.database_url)

    def trajectories(self) -> TrajectoryStore:
        from rollmill.trajectories.trajectory_store import TrajectoryStore

        return TrajectoryStore(self.database(), self.objects())

    def ledger(self, stage: StageSection) -> Ledger:
        from rollmill.trajectories.ledger import Ledger

        return Ledger(self.database(), self.stage_key(stage))

    @property
    def tokenizer(self) -> Path:
        return self.data / "tokenizer.json"

    @property
    def database_url(self) -> str:
        return self.config.database or f"sqlite:///{self.data / 'mill.db'}"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of a run for display and report. A phase that fails has no end."""
    telemetry.emit("phase", phase=name, state="start")
    yield
    telemetry.emit("phase", phase=name, state="end")
