"""Rollmill: train your own agent model inside your own product.

What a package of your own needs is here: `from rollmill import Task, TaskSet, Reward`. docs/reference/python.md
describes each. It is imported when it is first used, so `import rollmill` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollmill.chat.tokenizer import Tokenizer as Tokenizer
    from rollmill.config import Config as Config
    from rollmill.config import LocalPath as LocalPath
    from rollmill.environments.episode import Episode as Episode
    from rollmill.environments.harness import Harness as Harness
    from rollmill.environments.harness import HarnessResult as HarnessResult
    from rollmill.environments.reward import Reward as Reward
    from rollmill.environments.reward import TimedConfig as TimedConfig
    from rollmill.environments.sampler import Draw as Draw
    from rollmill.environments.sampler import Sampler as Sampler
    from rollmill.environments.sampler import TaskResults as TaskResults
    from rollmill.environments.task import Task as Task
    from rollmill.environments.task import TaskSet as TaskSet
    from rollmill.environments.task import WholeDiff as WholeDiff
    from rollmill.environments.tasks.listed import ListedTasks as ListedTasks
    from rollmill.errors import ConfigError as ConfigError
    from rollmill.errors import HarnessError as HarnessError
    from rollmill.errors import MachineError as MachineError
    from rollmill.errors import RewardError as RewardError
    from rollmill.errors import RewardUnavailable as RewardUnavailable
    from rollmill.errors import RollmillError as RollmillError
    from rollmill.errors import TaskError as TaskError
    from rollmill.inference.engine import Engine as Engine
    from rollmill.inference.engine import EngineContext as EngineContext
    from rollmill.inference.engine import EngineKind as EngineKind
    from rollmill.machines.machine import Capabilities as Capabilities
    from rollmill.machines.machine import ExecResult as ExecResult
    from rollmill.machines.machine import Machine as Machine
    from rollmill.machines.machine import MachineHost as MachineHost
    from rollmill.machines.machine import Process as Process
    from rollmill.machines.machine import ProcessState as ProcessState
    from rollmill.machines.machine import Snapshot as Snapshot
    from rollmill.runs.sink import Sink as Sink
    from rollmill.training.pretraining.source import Document as Document
    from rollmill.training.pretraining.source import Documents as Documents
    from rollmill.training.pretraining.source import Source as Source
    from rollmill.training.pretraining.source import SourceContext as SourceContext
    from rollmill.training.stage import RolloutSettings as RolloutSettings
    from rollmill.training.stage import Stage as Stage
    from rollmill.training.stage import StageContext as StageContext
    from rollmill.types import Grade as Grade
    from rollmill.types import Sampling as Sampling

# name → module
PUBLIC = {
    "Config": "rollmill.config",
    "LocalPath": "rollmill.config",
    "Task": "rollmill.environments.task",
    "TaskSet": "rollmill.environments.task",
    "WholeDiff": "rollmill.environments.task",
    "ListedTasks": "rollmill.environments.tasks.listed",
    "Episode": "rollmill.environments.episode",
    "Reward": "rollmill.environments.reward",
    "TimedConfig": "rollmill.environments.reward",
    "Grade": "rollmill.types",
    "Harness": "rollmill.environments.harness",
    "HarnessResult": "rollmill.environments.harness",
    "Sampling": "rollmill.types",
    "Sampler": "rollmill.environments.sampler",
    "Draw": "rollmill.environments.sampler",
    "TaskResults": "rollmill.environments.sampler",
    "Machine": "rollmill.machines.machine",
    "MachineHost": "rollmill.machines.machine",
    "ExecResult": "rollmill.machines.machine",
    "Process": "rollmill.machines.machine",
    "ProcessState": "rollmill.machines.machine",
    "Snapshot": "rollmill.machines.machine",
    "Capabilities": "rollmill.machines.machine",
    "Sink": "rollmill.runs.sink",
    "Source": "rollmill.training.pretraining.source",
    "SourceContext": "rollmill.training.pretraining.source",
    "Documents": "rollmill.training.pretraining.source",
    "Document": "rollmill.training.pretraining.source",
    "Tokenizer": "rollmill.chat.tokenizer",
    "Stage": "rollmill.training.stage",
    "StageContext": "rollmill.training.stage",
    "RolloutSettings": "rollmill.training.stage",
    "EngineKind": "rollmill.inference.engine",
    "EngineContext": "rollmill.inference.engine",
    "Engine": "rollmill.inference.engine",
    "RollmillError": "rollmill.errors",
    "TaskError": "rollmill.errors",
    "HarnessError": "rollmill.errors",
    "MachineError": "rollmill.errors",
    "RewardError": "rollmill.errors",
    "RewardUnavailable": "rollmill.errors",
    "ConfigError": "rollmill.errors",
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'rollmill' has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *PUBLIC]
