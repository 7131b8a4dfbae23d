"""Checks before a run begins, also for `rollmill train --dry-run`: all that can be known without training."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.chat.format import ChatFormat
from rollmill.chat.formats.choice import format_beside
from rollmill.chat.tokenizer import Tokenizer
from rollmill.environments.environment import build_sampler, build_tasks, each_environment
from rollmill.environments.harness import Harness
from rollmill.environments.task import TaskSet
from rollmill.errors import ConfigError
from rollmill.kinds import KindSection, build
from rollmill.rollouts.config import check_reward_times
from rollmill.runs.import_checkpoint import TOKENIZER, check_checkpoint
from rollmill.runs.opening import open_run
from rollmill.runs.prepare import check_tokenizer
from rollmill.runs.run import RunConfig
from rollmill.runs.start import check_start
from rollmill.storage.storage_probe import check_database, check_store
from rollmill.training.stage import RolloutSettings

_PROMPTS = 32  # training tasks whose prompts are measured


def check_here(config: RunConfig, *, dry_run: bool = False) -> list[str]:
    """Check what a configuration asks of this machine: the device, the checkpoint, the run it starts from, the
    tokenizer, the tasks, what its parts need; and that they agree. Loads no weights. With `dry_run`, the database is
    not asked. Returns warnings: what is allowed but hardly meant."""
    check_stores(config, dry_run=dry_run)
    if config.device == "cuda":  # the others are always there, and importing torch takes seconds
        from rollmill.models.device import choose_device

        choose_device(config.device)
    build(config.cluster).check(config)
    if config.checkpoint is not None:
        check_checkpoint(config)
    if config.start is not None:
        check_start(config)
    check_tokenizer(config)
    for each in each_environment(config):
        check_reward_times(each.rewards, each.grading_timeout_s or config.rollouts.grading_timeout_s)
    check_parts(config)
    return check_prompts(config, check_tasks(config)) if each_environment(config) else []


def check_stores(config: RunConfig, *, dry_run: bool = False) -> None:
    """Check that this machine can use the store and the database, if they are not files of it."""
    if config.store is not None:
        check_store(config.store)
    if config.database is not None and not config.database.startswith("sqlite") and not dry_run:
        check_database(config.database)


def check_parts(config: RunConfig) -> None:
    """Let each part check what it needs here: a key in the environment, a package.
    Not for a cluster: its hosts have environments of their own."""
    if build(config.cluster).elsewhere:
        return
    playing: list[KindSection] = []
    for each in each_environment(config):
        build(each.machine)  # those behind a URL want their key
        playing += [each.harness, *each.rewards]
    for section in (*playing, *config.sinks):
        build(section).preflight()
    for backend in config.gateway.backends:
        if backend.key_variable and backend.key_variable not in os.environ:
            raise ConfigError(
                f"gateway.backends: the environment variable {backend.key_variable} is not set",
                hint=f"set it to the API key of {backend.url} where the run is started",
            )


def check_tasks(config: RunConfig) -> TaskSet:
    """Construct the task set: its files are read, every split that evaluations use must have a task, and the sampler
    must be able to choose from it."""
    tasks = build_tasks(config)
    if any(isinstance(stage, RolloutSettings) and stage.steps for stage in config.stages):
        build_sampler(config.sampler, config).check(tasks)
    if config.evals.every and config.evals.engines == "own" and build(config.cluster).elsewhere:
        raise ConfigError(
            'evals.engines is "own", but the supervisor of [cluster] has no place for an engine of its own',
            hint='set evals.engines = "run"',
        )
    for cell in config.evals.cells(tasks):
        cell.chosen(tasks)
    return tasks


def check_prompts(config: RunConfig, tasks: TaskSet) -> list[str]:
    """Measure the first prompts of some training tasks. ConfigError if none fits into the context of a stage."""
    format = _chat_format(config)
    stages = [stage for stage in config.stages if isinstance(stage, RolloutSettings) and stage.steps]
    if format is None or not stages:
        return []
    lengths = [len(format.render_start(*opening)) for opening in _openings(config, tasks)]
    room = min(config.model_of(stage.name).max_context for stage in stages)
    told = f"the prompts of tasks have {min(lengths)} to {max(lengths)} tokens before the first answer"
    hint = "set model.max_context to more, or make the prompts shorter (`tools_in_prompt`, harness.system_prompt)"
    if min(lengths) >= room:
        raise ConfigError(f"{told}, but the context has only {room} (max_context): no task can be solved", hint=hint)
    answer, given = config.rollouts.max_answer_tokens, "max_answer_tokens" in config.rollouts.model_fields_set
    if max(lengths) + (answer if given else min(answer, room // 4)) > room:
        what = f"an answer of rollouts.max_answer_tokens ({answer})" if given else "an answer of a quarter of it"
        left = f"{what} does not fit behind each of them"
        return [f"{told}, and the context has {room} (max_context): {left}\nhint: {hint}"]
    return []


def _openings(config: RunConfig, tasks: TaskSet) -> Iterator[tuple[list[Any], list[Any]]]:
    """The first messages and the tools of some tasks."""
    harnesses: dict[str, Harness] = {each.name: build(each.harness) for each in each_environment(config)}
    return (harnesses[task.environment].opening(task) for task in itertools.islice(tasks.train(config.seed), _PROMPTS))


def _chat_format(config: RunConfig) -> ChatFormat | None:
    """None if the tokenizer is made by a function, which may take long."""
    if config.checkpoint is not None:
        path = Path(config.checkpoint) / TOKENIZER
    elif config.start is not None:
        path = open_run(Path(config.start.run)).tokenizer
    else:
        path = Path(config.tokenizer or "")
    if path.suffix != ".json" or not path.is_file():
        return None
    return format_beside(path, Tokenizer.load(path), config.chat, tools_in_prompt=config.tools_in_prompt)
