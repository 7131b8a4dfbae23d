"""The part of a configuration that describes an environment, for commands that need no model.

`rollmill tasks`, `rollout` and `eval --model` read it alone, so a checkpoint that is not there yet stops none of them.
The other sections are not validated; a section that does not exist is still an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import create_model

from rollmill.config import Config, load_config
from rollmill.environments.environment import SeveralSections, each_environment, find_parts
from rollmill.evals.suite import EvalConfig
from rollmill.rollouts.config import RolloutConfig, check_reward_times
from rollmill.runs.opening import open_run
from rollmill.runs.run import RunConfig

_USED = (
    "name",
    "seed",
    "modules",
    "tasks",
    "harness",
    "machine",
    "pool",
    "rewards",
    "environments",
    "rollouts",
    "evals",
)


class Settings(SeveralSections, Protocol):
    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def rollouts(self) -> RolloutConfig: ...
    @property
    def evals(self) -> EvalConfig: ...


def read_settings(path: Path) -> Settings:
    """The environment of a TOML file or of a run directory."""
    if path.is_dir():
        return open_run(path).config

    class Environment(Config):
        @classmethod
        def derive(cls, tree: Any) -> Any:
            unused = RunConfig.model_fields.keys() - set(_USED)
            return find_parts({name: value for name, value in tree.items() if name not in unused})

    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in RunConfig.model_fields.items() if name in _USED
    }
    settings = cast("Settings", load_config(create_model("Environment", __base__=Environment, **fields), path))
    for each in each_environment(settings):
        check_reward_times(each.rewards, each.grading_timeout_s or settings.rollouts.grading_timeout_s)
    return settings
