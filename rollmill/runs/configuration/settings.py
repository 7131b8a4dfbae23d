"""The configuration of a run: one tree, which composes the settings of every part."""

from __future__ import annotations

import collections
import functools
import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rollmill.chat.config import ChatConfig
from rollmill.config import NAME, Config, validate_config
from rollmill.environments.environment import PARTS, each_environment, find_parts
from rollmill.environments.part_sections import (
    EnvironmentSections,
    HarnessSection,
    RewardSection,
    SamplerSection,
    TasksSection,
)
from rollmill.errors import ConfigError
from rollmill.evals.gate_config import GateConfig
from rollmill.evals.suite import EvalConfig
from rollmill.feedback.config import CycleConfig
from rollmill.gateway.config import GatewayConfig, LendingConfig
from rollmill.inference.config import EXACT_KV, EngineConfig
from rollmill.inference.engine_sections import EngineSpec, EnginesSection, engine_specs
from rollmill.kinds import KindSection, Slot
from rollmill.machines.machine import MachineSection
from rollmill.machines.pool import PoolConfig
from rollmill.models.config import ModelConfig, with_adapter, with_context
from rollmill.models.counts import all_parameters
from rollmill.rollouts.config import DispatcherConfig, RolloutConfig
from rollmill.runs.configuration.autoscale_rule import BalanceConfig
from rollmill.runs.configuration.derived import model_of_checkpoint, shortened, with_absolute_paths
from rollmill.runs.configuration.moved import refuse_moved
from rollmill.runs.saved import saved_config
from rollmill.runs.sink import SinkSection
from rollmill.training.config import ADAPTER_LR, lr_by_size
from rollmill.training.stage import RolloutSettings, StageSection
from rollmill.types import Version

CANARY = ".canary"  # ends the role of a second engine in a region
CYCLE = "cycle-"  # begins the names of the lines that real-time RL trains


def numbered(role: str, count: int) -> list[str]:
    """The names of `count` processes of one role. The first has the name of the role."""
    return [role, *(f"{role}-{number}" for number in range(2, count + 1))]


class ClusterSection(KindSection):
    _slot: ClassVar[Slot] = Slot(
        "cluster",
        "rollmill.launch.launcher:Cluster",
        {"local": "rollmill.launch.launchers.local:Local", "ray": "rollmill.launch.launchers.ray:Ray"},
        "rollmill.clusters",
        default="local",
    )


class Start(Config):
    """A version of another run. `rollmill train --from RUN VERSION` fills it in."""

    run: str = Field(description="Directory of the other run, or URL of its objects. Read once, when this run begins.")
    id: str = Field(description="Id of the other run, which names the line that its version is imported as.")
    version: str = Field(pattern=r"^[^@]+@\d+$", description="The version to start from, as `line@number`.")
    form: str = Field("bf16", description="Number format in which the other run published the version.")

    @property
    def parsed(self) -> Version:
        line, _, number = self.version.rpartition("@")
        return Version(line, int(number))


class TlsConfig(Config):
    """TLS between the processes of a run: gateways, engines and the store answer HTTPS only. The files are at these
    paths on every host."""

    cert: str = Field(description="Certificate chain of this host, as PEM. It names the addresses of the host.")
    key: str = Field(description="Private key of `cert`, as PEM, without password.")
    ca: str = Field(description="CA that the processes trust beside those of the system, as PEM.")


class RunConfig(Config):
    """Settings that several parts share. The settings of one part are in its section."""

    name: str = Field(
        pattern=NAME, description="The run's name and its directory under runs/: lower-case letters, digits, - and _."
    )
    seed: int = Field(
        0, description="Everything random follows from it. Change it to repeat an experiment with other draws."
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
        "this format; fp8 and nvfp4 halve and quarter the served bytes. A table of [[engines]] may have another one.",
    )
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="`exact`: engines and trainer sum in one fixed order, so the trainer finds the recorded log-probs "
        "bit for bit, and a token does not depend on what else is decoded. On CPUs of one kind, or on Hopper GPUs; "
        "`fast` reports the difference of each step.",
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
    tls: TlsConfig | None = Field(
        None,
        description="Encrypts what the processes of the run say to each other, for runs on several hosts. Not set: "
        "plain HTTP, which on one host stays on loopback.",
    )
    cluster: ClusterSection = Field(
        default={}, validate_default=True, description="Where the processes of the run live."
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
    dispatcher: DispatcherConfig = Field(DispatcherConfig(), description="How many dispatchers run them.")
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
    pool: PoolConfig = Field(PoolConfig(), description="How many machines there may be, and which are started ahead.")
    rewards: tuple[RewardSection, ...] = Field(
        default=({"kind": "calls"},),
        validate_default=True,
        min_length=1,
        description="What an episode is worth: the sum of weight · value. The first one decides whether it is solved.",
    )
    environments: EnvironmentSections = Field(
        (),
        description="Several environments in one run, instead of the [tasks], [harness], [machine], [pool] and "
        "[[rewards]] of a single one.",
    )
    engines: tuple[EnginesSection, ...] = Field(
        default=({"kind": "embedded"},),
        validate_default=True,
        min_length=1,
        description="The engines: what they are, how many, in which region, on which devices.",
    )
    engine: EngineConfig = Field(EngineConfig(), description="Settings of every embedded engine.")
    balance: BalanceConfig = Field(
        BalanceConfig(), description="How many engines there are for the trainer: advice, or done by itself."
    )
    gateway: GatewayConfig = Field(GatewayConfig(), description="The gateway before the engines.")
    lending: LendingConfig | None = Field(
        None,
        description="When `rollmill serve` lends engines of production to the training of this run. Not set: never.",
    )
    evals: EvalConfig = Field(EvalConfig(), description="What is measured before, between and after stages.")
    sinks: tuple[SinkSection, ...] = Field(
        (), description="Tools that get the figures of the run as they grow, beside its events and its report."
    )
    cycle: CycleConfig = Field(CycleConfig(), description="Learning from live users.")
    gate: GateConfig | None = Field(
        None, description="Bounds that a version must keep to become `live`. Not set: any version may."
    )

    @classmethod
    def derive(cls, tree: Any) -> Any:
        """Fill in what follows from other settings: [model] from the checkpoint or the other run. run.json has all of
        [model]: then neither is read."""
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
            model = validate_config(cls, saved_config(Path(start["run"])), start["run"]).model_of(line)
            model = with_adapter(model, None)  # what it adds goes into the weights
            return {**tree, **shortened(model.model_dump(mode="json"), given, f"the run {start['run']}")}
        return tree

    def left_out(self) -> Collection[str]:
        return PARTS if self.environments else ()

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name not in self.left_out()}

    @model_validator(mode="after")
    def _learning_rates_fit_the_checkpoint(self) -> RunConfig:
        if self.checkpoint is not None or self.start is not None:
            self.__dict__["stages"] = tuple(map(self._with_lr, self.stages))
        return self

    def _with_lr(self, stage: StageSection) -> StageSection:
        optimizer = stage.training.optimizer
        if "lr" in optimizer.model_fields_set:
            return stage
        lr = lr_by_size(all_parameters(self.model), rollouts=isinstance(stage, RolloutSettings))
        lr *= 1 if stage.training.adapter is None else ADAPTER_LR
        training = stage.training.model_copy(update={"optimizer": optimizer.model_copy(update={"lr": lr})})
        return stage.model_copy(update={"training": training})

    @model_validator(mode="after")
    def _engines_can_be_told_apart(self) -> RunConfig:
        names = collections.Counter(spec.name for spec in self.engine_specs)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"two engines are called {twice!r}: a region cannot have the name of another one's engine")
        adapted = next((stage.name for stage in self.stages if stage.training.adapter is not None), None)
        if adapted is not None and any(table.kind == "vllm" for table in self.engines):
            raise ValueError(
                f"stage {adapted!r} trains an adapter, and vLLM engines serve none yet: leave `kind` out in [[engines]]"
            )
        if self.device == "cpu" and any(table.gpus for table in self.engines):
            raise ValueError("a table of [[engines]] has `gpus`, but `device` is 'cpu'")
        if self.numerics == "exact" and self.form not in map(self.form_of, self.engine_specs):
            raise ValueError(
                f"numerics = 'exact' holds for engines of the run's form, and none serves {self.form!r}: set `form` of "
                "the run to theirs, or leave it out in a table of [[engines]]"
            )
        return self

    @model_validator(mode="after")
    def _dispatchers_do_not_share_a_port(self) -> RunConfig:
        machines = [each.machine for each in each_environment(self)]
        if self.dispatcher.replicas > 1 and any(getattr(each, "listen", None) is not None for each in machines):
            raise ValueError("machine.listen is the port of one dispatcher: set dispatcher.replicas to 1")
        if self.evals.every and getattr(self.machine, "listen", None) is not None:
            raise ValueError("machine.listen is the port of the dispatcher: leave evals.every out, or machine.listen")
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
            if not each_environment(self) and (stage.evaluate or (isinstance(stage, RolloutSettings) and stage.steps)):
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

    @model_validator(mode="after")
    def _keys_and_values_are_exact(self) -> RunConfig:
        if self.numerics == "exact" and self.engine.fp8_kv:
            raise ValueError(f"{EXACT_KV}: turn one of them off")
        return self

    @functools.cached_property
    def engine_specs(self) -> list[EngineSpec]:
        """Every engine of the run."""
        return engine_specs(self.engines)

    @functools.cached_property
    def _engines_by_name(self) -> dict[str, EngineSpec]:
        return {spec.name: spec for spec in self.engine_specs}

    def form_of(self, engine: EngineSpec) -> str:
        """The form that an engine serves."""
        return engine.section.form or self.form

    @property
    def forms(self) -> list[str]:
        """The forms that versions are published in: the trainer's own, then the others that engines serve."""
        return list(dict.fromkeys([self.form, *map(self.form_of, self.engine_specs)]))

    @property
    def gateways(self) -> list[str]:
        """The roles of its gateways: `gateway`, `gateway-2` …"""
        return numbered("gateway", self.gateway.replicas)

    @property
    def dispatchers(self) -> list[str]:
        """The roles of its dispatchers: `dispatcher`, `dispatcher-2` …"""
        return numbered("dispatcher", self.dispatcher.replicas)

    @property
    def regions(self) -> list[str]:
        """The regions that have engines. The trainer is in the first one."""
        return list(dict.fromkeys(table.region for table in self.engines))

    def engine_spec(self, name: str) -> EngineSpec:
        """The engine of this name. A canary is as the engine beside it."""
        return replace(self._engines_by_name[name.removesuffix(CANARY)], name=name)

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
        """The model that a line has: stages may change its context, or train an adapter. A line of no stage is that of
        imported weights."""
        context, adapter = self.model.max_context, None
        for stage in self.stages:
            context, adapter = stage.max_context or context, stage.training.adapter
            if line == stage.name or line.startswith(f"{stage.name}."):  # rl.2: the line goes on on other hardware
                break
        else:
            if not line.startswith(CYCLE):  # real-time RL goes on from the last stage
                return self.model
        model = with_context(self.model, context, self.trained_context or self.model.max_context)
        return with_adapter(model, adapter)

    def seed_of(self, stage: StageSection) -> int:
        """The run's seed. A second stage of one kind gets another: it should not see the same data again."""
        index = [each.name for each in self.stages if each.kind == stage.kind].index(stage.name)
        if index == 0:
            return self.seed
        return int.from_bytes(hashlib.sha256(f"{self.seed} {stage.kind} {index}".encode()).digest()[:4])
