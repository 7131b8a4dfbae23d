"""A run: one configuration tree and one directory.

runs/NAME/
  run.json         the resolved configuration, ports and keys of this run (mode 0600)
  store/           the home object store: weights, trajectories, submissions, checkpoints
  regions/R/store/ the store of another region R; it reaches the home store over HTTP only
  mill.db          the index (SQLite), unless `database` names a PostgreSQL
  events/ logs/    telemetry and output, one file per process
  gateway/         the gateway's local log of open sessions
  stages/NAME/     what a stage keeps on this machine, such as an index of its documents
  services/NAME/   what `serve` and `eval` run beside it: own ports (service.json), session log, events, logs, locks
  tokenizer.json   the vocabulary of its model; beside it the files that say how the model chats
  report.html      written at the end, with report.json
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rollmill import telemetry
from rollmill.chat.config import ChatConfig
from rollmill.cluster.paths import with_absolute_paths
from rollmill.cluster.ports import free_ports
from rollmill.cluster.shape import model_of_checkpoint, shortened
from rollmill.cluster.upgrade import bring_up_to_date, refuse_moved
from rollmill.config import Config, validate_config
from rollmill.environments.environment import find_parts
from rollmill.environments.sections import HarnessSection, MachineSection, RewardSection, SamplerSection, TasksSection
from rollmill.errors import ConfigError
from rollmill.evals.gate import GateConfig
from rollmill.evals.suite import EvalConfig
from rollmill.gateway.config import GatewayConfig
from rollmill.inference.config import EngineConfig
from rollmill.kinds import KindSection, code_of
from rollmill.models.config import ModelConfig, with_context
from rollmill.realtime.config import CycleConfig
from rollmill.rollouts.config import RolloutConfig
from rollmill.storage.objects import Objects, store_of_run
from rollmill.training.stage import NAME, RolloutSettings, StageSection
from rollmill.types import Version

HOME = "home"
SECRETS = (
    "admin_token",  # administers the gateway, and session keys derive from it
    "store_token",  # reads the home store over HTTP
    "engine_token",  # every request to an engine but its health and metrics
    "production_key",  # the API key of production traffic
    "rollout_key",  # opens, shows, seals and deletes rollout sessions at the gateway
)
SERVICE = "service.json"
CANARY = ".canary"  # ends the role of a second engine in a region
CYCLE = "cycle-"  # begins the names of the lines that real-time RL trains


class Start(Config):
    """A version of another run. `rollmill train --from RUN VERSION` fills it in."""

    run: str = Field(description="Directory of the other run. It is read once, when this run begins.")
    id: str = Field(description="Id of the other run, which names the line that its version is imported as.")
    version: str = Field(pattern=r"^[^@]+@\d+$", description="The version to start from, as `line@number`.")
    form: str = Field("bf16", description="Number format in which the other run published the version.")

    @property
    def parsed(self) -> Version:
        line, _, number = self.version.rpartition("@")
        return Version(line, int(number))


class RunConfig(Config):
    """Settings that several parts share. The settings of one part are in its section."""

    name: str = Field(
        pattern=NAME, description="The run's name and its directory under runs/: lower-case letters, digits, - and _."
    )
    seed: int = Field(
        0, description="Everything random follows from it. Change it to repeat an experiment with other draws."
    )
    regions: tuple[Annotated[str, Field(pattern=NAME)], ...] = Field(
        (HOME,), min_length=1, description="Names of regions, one engine each. The trainer is in the first one."
    )
    tools_in_prompt: bool = Field(
        True,
        description="Prompts define the tools, if the model's chat format can. Turn it off when mid-training has "
        "taught them: prompts become shorter.",
    )
    chat: ChatConfig = Field(ChatConfig(), description="The chat format of the model.")
    checkpoint: str | None = Field(
        None,
        description="A Hugging Face checkpoint directory to start from; [model] is then read from it. Not set: "
        "random weights, which need a `tokenizer` and a first stage that is not RL.",
    )
    start: Start | None = Field(
        None,
        description="A version of another run to start from instead of a checkpoint; [model] is then read from that "
        "run. `rollmill train --from` sets it.",
    )
    trained_context: int | None = Field(
        None,
        gt=0,
        description="Tokens of context that the checkpoint was made for. Read from the checkpoint. A stage that needs "
        "more stretches the rotary embedding.",
    )
    tokenizer: str | None = Field(
        None,
        description="The tokenizer of a model that starts from random weights: a tokenizer.json, or "
        "`package.module:function`, which is called with vocab_size and returns a rollmill.Tokenizer.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models compute. `auto` is the GPU if there is one, else the CPU."
    )
    form: Literal["bf16", "fp8", "nvfp4"] = Field(
        "bf16",
        description="Number format that versions are published and served in. The trainer computes with the values of "
        "this format; fp8 and nvfp4 halve and quarter the served bytes.",
    )
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="`exact`: engines and trainer sum in one fixed order, so the trainer finds the recorded log-probs "
        "bit for bit, and a token does not depend on what else is decoded. On CPUs of one kind; `fast` reports the "
        "difference of each step.",
    )
    modules: str | None = Field(
        None,
        description="Directory with modules of your own, for kinds such as `tickets:Tickets`, and with the files that "
        "[tasks] names. Not set: the directory of the configuration file.",
    )
    database: str | None = Field(
        None,
        description="SQLAlchemy URL of the index. Not set: SQLite in the run directory. Keep passwords out of it.",
    )
    store: str | None = Field(
        None,
        pattern=r"^(s3|gs|az)://[^/?#]+(/[^?#]*)?$",
        description="Object store of weights, trajectories and results: s3://BUCKET/PREFIX, gs:// or az://. Runs may "
        "share it. Credentials come from the environment. Not set: a directory in the run directory.",
    )
    model: ModelConfig = Field(
        description="The model's shape. With `checkpoint` or `start`, leave it out or only set max_context, to make it "
        "shorter."
    )
    stages: tuple[StageSection, ...] = Field(
        (),
        description="What is trained, one stage after the other. Each stage trains a line of its own, from the last "
        "version of the stage before. None: the run only serves and evaluates its checkpoint.",
    )
    rollouts: RolloutConfig = Field(RolloutConfig(), description="How rollouts are run.")
    tasks: TasksSection | None = Field(
        None, description="Where tasks come from. Needed by RL and by evaluations; serving needs none."
    )
    sampler: SamplerSection = Field(
        default={}, validate_default=True, description="Which task comes next, chosen by the results so far."
    )
    harness: HarnessSection = Field(
        default={}, validate_default=True, description="The agent that works on a task: its loop and its tools."
    )
    machine: MachineSection = Field(
        default={}, validate_default=True, description="The machine that each rollout gets, and its limits."
    )
    rewards: tuple[RewardSection, ...] = Field(
        default=({"kind": "calls"},),
        validate_default=True,
        min_length=1,
        description="What an episode is worth: the sum of weight · value. The first one decides whether it is solved.",
    )
    engine: EngineConfig = Field(EngineConfig(), description="The embedded engine that serves the model.")
    gateway: GatewayConfig = Field(GatewayConfig(), description="The gateway before the engines.")
    evals: EvalConfig = Field(EvalConfig(), description="What is measured before, between and after stages.")
    cycle: CycleConfig = Field(CycleConfig(), description="Learning from live users.")
    gate: GateConfig | None = Field(
        None, description="Bounds that a version must keep to become `live`. Not set: any version may."
    )

    @classmethod
    def derive(cls, tree: Any) -> Any:
        """Fill in [model] from the checkpoint or the other run. run.json has all of [model]: then neither is read."""
        if not isinstance(tree, dict):
            return tree
        refuse_moved(tree)
        tree = with_absolute_paths(find_parts(tree))
        given, start = tree.get("model", {}), tree.get("start")
        if not isinstance(given, dict) or "vocab_size" in given:
            return tree
        if isinstance(tree.get("checkpoint"), str):
            directory = Path(tree["checkpoint"]).expanduser().absolute()
            tree = {**tree, "checkpoint": str(directory)}
            return {**tree, **shortened(model_of_checkpoint(directory), given, f"the checkpoint {directory}")}
        if isinstance(start, dict) and isinstance(start.get("run"), str):
            line = str(start.get("version")).rpartition("@")[0]
            model = RunDirectory.open(Path(start["run"])).config.model_of(line)
            return {**tree, **shortened(model.model_dump(mode="json"), given, f"the run {start['run']}")}
        return tree

    @model_validator(mode="after")
    def _regions_are_distinct(self) -> RunConfig:
        if len(set(self.regions)) != len(self.regions):
            raise ValueError(f"regions must be distinct, got {list(self.regions)}")
        return self

    @model_validator(mode="after")
    def _has_a_beginning(self) -> RunConfig:
        if self.checkpoint is not None and self.start is not None:
            raise ValueError("a run starts from a checkpoint or from a version of another run, not from both")
        if self.checkpoint is not None or self.start is not None:
            return self
        if not self.stages or isinstance(self.stages[0], RolloutSettings):
            raise ValueError("a run without a checkpoint needs a stage before RL: random weights solve no task")
        if self.tokenizer is None:
            raise ValueError("a run without a checkpoint needs a `tokenizer`")
        return self

    @model_validator(mode="after")
    def _stages_have_names(self) -> RunConfig:
        names = [stage.name for stage in self.stages]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two stages are called {twice!r}: give each its own `name`")
        strange = [name for name in names if name.startswith("eval-") or name == self.checkpoint_line]
        if strange:
            raise ValueError(f"a stage cannot be called {strange[0]!r}: the run uses that name itself")
        return self

    @model_validator(mode="after")
    def _rl_has_tasks(self) -> RunConfig:
        for stage in self.stages:
            if self.tasks is None and (stage.evaluate or (isinstance(stage, RolloutSettings) and stage.steps)):
                raise ValueError(f"there is no [tasks], but stage {stage.name!r} needs tasks")
        return self

    @model_validator(mode="after")
    def _can_be_exported(self) -> RunConfig:
        if self.checkpoint is None and self.start is None:
            from rollmill.models.huggingface.describe import describe_model

            try:
                describe_model(self.model)
            except ConfigError as error:
                raise ValueError(f"{error.message}; {error.hint}") from None
        return self

    @model_validator(mode="after")
    def _context_can_change(self) -> RunConfig:
        for stage in self.stages:
            self.model_of(stage.name)
        return self

    @model_validator(mode="after")
    def _ranks_fit_the_model(self) -> RunConfig:
        for stage in self.stages:
            stage.training.check_model(self.model.experts)
            if self.numerics == "exact" and stage.training.context_parallel > 1:
                raise ValueError("numerics = 'exact' needs whole sequences: set context_parallel to 1, or use 'fast'")
        return self

    @property
    def checkpoint_line(self) -> str:
        """The line of the imported weights: of the checkpoint, or of the other run that this run starts from."""
        if self.start is None:
            return f"{self.stages[-1].name if self.stages else 'main'}-checkpoint"
        return f"{self.start.id}-{self.start.parsed.line}"[-100:]

    @property
    def line(self) -> str:
        """The line that is meant when none is named: that of the last stage."""
        return self.stages[-1].name if self.stages else self.checkpoint_line

    def stage(self, name: str) -> StageSection:
        return next(stage for stage in self.stages if stage.name == name)

    def before(self, stage: StageSection) -> StageSection | None:
        """The stage before this one; None before the first."""
        index = self.stages.index(stage)
        return self.stages[index - 1] if index else None

    def model_of(self, line: str) -> ModelConfig:
        """The model that a line has: stages may change its context. A line of no stage is that of imported weights."""
        context = self.model.max_context
        for stage in self.stages:
            context = stage.max_context or context
            if line == stage.name or line.startswith(f"{stage.name}."):  # rl.2: the line goes on on other hardware
                return with_context(self.model, context, self.trained_context or self.model.max_context)
        if line.startswith(CYCLE):  # real-time RL goes on from the last stage
            return with_context(self.model, context, self.trained_context or self.model.max_context)
        return self.model

    def seed_of(self, stage: StageSection) -> int:
        """The run's seed. A second stage of one kind gets another: it should not see the same data again."""
        index = [each.name for each in self.stages if each.kind == stage.kind].index(stage.name)
        if index == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {stage.kind} {index}".encode()).digest()[:4])


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
        roles = ["gateway", "store", *(f"engine-{region}" for region in config.regions)]
        ports = dict(zip(roles, free_ports(len(roles)), strict=True))
        id = f"{config.name}-{secrets.token_hex(4)}"
        run = cls(path, config, id, ports, {name: secrets.token_urlsafe(24) for name in SECRETS})
        run._create()
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        file = path / "run.json"
        try:
            if (path / SERVICE).exists():
                return cls._open_service(path)
            saved = json.loads(file.read_text())
            config = validate_config(RunConfig, bring_up_to_date(saved["config"]), str(file))
            id = saved.get("id", config.name)  # runs made before there were ids are keyed by their name
            return cls(path, config, id, saved["ports"], {name: _secret(saved, name) for name in SECRETS})
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"{path} holds no run (no run.json)", hint="`rollmill runs` lists the runs there are"
            ) from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} is damaged: {error!r}", hint="restore it, or start a run of another name"
            ) from None

    @classmethod
    def _open_service(cls, path: Path) -> RunDirectory:
        run, saved = cls.open(path.parent.parent), json.loads((path / SERVICE).read_text())
        return replace(run, path=path, ports=saved["ports"], host=saved["host"], service_of=run.path)

    def make_service(self, name: str, host: str, port: int, *, canary: bool = False) -> RunDirectory:
        """The directory of a service of this run, with its gateway at `host` and `port`. The caller holds its lock.
        With `canary`, it has one engine more."""
        path = self.path / "services" / name
        path.mkdir(parents=True, exist_ok=True)
        engines = [f"engine-{region}" for region in self.config.regions]
        engines += [f"engine-{self.config.regions[0]}{CANARY}"] if canary else []
        ports = {"gateway": port, **dict(zip(engines, free_ports(len(engines)), strict=True))}
        (path / SERVICE).write_text(json.dumps({"host": host, "ports": ports}))
        return replace(self, path=path, ports=ports, host=host, service_of=self.path)

    def _create(self) -> None:
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
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def rewrite(self, config: RunConfig) -> RunDirectory:
        """The run with another configuration, in its run.json too. The caller holds the run's lock."""
        run = replace(self, config=config)
        try:
            os.replace(run._draft(), self.path / "run.json")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None
        return run

    def _draft(self) -> str:
        """Write what run.json will hold to a file beside it, which only its owner can read. Returns the file's name."""
        body = {
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
        rewards = {f"rewards.{number}": section for number, section in enumerate(config.rewards)}
        stages: dict[str, KindSection] = {f"stages.{stage.name}": stage for stage in config.stages}
        for stage in config.stages:
            for number, source in enumerate(getattr(stage, "sources", ())):
                stages[f"stages.{stage.name}.sources.{number}"] = source
        alone = {"tasks": config.tasks, "sampler": config.sampler, "machine": config.machine, "harness": config.harness}
        sections = {**alone, **rewards, **stages}
        return {name: code_of(section) for name, section in sections.items() if section is not None}

    def changed_code(self) -> list[str]:
        """Sections whose code is no longer what the run began with."""
        kept = json.loads((self.path / "run.json").read_text()).get("code", {})
        return [name for name, code in self.code().items() if name in kept and kept[name] != code]

    def stage_key(self, stage: StageSection) -> str:
        """What keys the ledger, groups and trajectories of a stage. `main` is the stage of runs that began before there
        were stages: they are keyed by the id of the run."""
        return self.id if stage.name == "main" else f"{self.id}/{stage.name}"

    def url(self, role: str) -> str:
        anywhere = role != "gateway" or self.host in ("0.0.0.0", "::")  # noqa: S104
        host = "127.0.0.1" if anywhere else self.host
        scheme = "https" if role == "gateway" and self.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.ports[role]}"

    @property
    def tls(self) -> bool:
        """Whether its gateway answers HTTPS: those of `rollmill serve`. Others are reached from this host only."""
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


def engine_region(role: str) -> str:
    """The region of an engine, from the name of its role."""
    return role.removeprefix("engine-").removesuffix(CANARY)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a phase of a run for display and report. A phase that fails has no end."""
    telemetry.emit("phase", phase=name, state="start")
    yield
    telemetry.emit("phase", phase=name, state="end")


def _secret(saved: dict[str, Any], name: str) -> str:
    """A run.json of an older release lacks some tokens: every process derives the same ones from `admin_token`."""
    if name in ("store_token", "engine_token", "rollout_key") and name not in saved:
        return hmac.new(str(saved["admin_token"]).encode(), name.encode(), "sha256").hexdigest()
    secret: str = saved[name]
    return secret
