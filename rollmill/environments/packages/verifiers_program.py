"""Runs an environment of verifiers, by its own `Env`. Run by program.py.

The order is {"env": the [env] table}. The requests:

    {"tasks": N}                                                     the first N tasks of its dataset
    {"data", "base_url", "api_key", "model", "sampling"}             play one task with the model at this URL
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

_TASKS = 1 << 24  # bytes of all tasks
_INFO = 64 << 10  # bytes of what an episode says about itself


@contextlib.asynccontextmanager
async def opened(order: dict[str, Any]) -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[Any]]]:
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(order["env"]))
    async with env.serving():

        async def answer(request: dict[str, Any]) -> Any:
            return tasks(env, request["tasks"]) if "tasks" in request else await play(env, request)

        yield answer


def tasks(env: Any, count: int) -> list[dict[str, Any]]:
    found, total = [], 0
    for task in env.taskset.take(count):
        data = task.data.model_dump(mode="json")
        name = task.data.id or str(task.data.idx)
        found.append({"id": name, "messages": opening(task.data), "data": data})
        total += len(json.dumps(data))
        if total > _TASKS:
            raise ValueError(f"its first {len(found)} tasks have {total} bytes: take fewer, by `tasks`")
    return found


def opening(data: Any) -> list[Any]:
    """The first messages, as far as the dataset has them: an environment may add some."""
    from verifiers.v1.dialects.chat import message_to_wire

    prompt = data.prompt or []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
    return [*([{"role": "system", "content": data.system_prompt}] if data.system_prompt else []), *messages]


async def play(env: Any, request: dict[str, Any]) -> dict[str, Any]:
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.types import SamplingConfig

    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(request["data"]), env.config.taskset.task)
    variable = f"ROLLMILL_API_KEY_{request['id']}"  # verifiers withholds such a name from the programs that it starts
    os.environ[variable] = request["api_key"]
    try:
        client = EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
        context = ModelContext(client=client, model=request["model"], sampling=SamplingConfig(**request["sampling"]))
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, context)
    finally:
        del os.environ[variable]
    for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
        if not episode.ok:
            raise RuntimeError(f"{error.type}: {error.message}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        raise RuntimeError(f"{len(trained)} of its agents are trainable, and only environments with one can be played")
    return describe(trained[0])


def describe(trace: Any) -> dict[str, Any]:
    for name, reward in trace.rewards.items():
        if not math.isfinite(reward.value):
            raise ValueError(f"its reward {name!r} is {reward.score} with weight {reward.weight}")
    info = json.dumps(trace.info, default=str)
    return {
        "rewards": {name: [reward.score, reward.weight] for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
        "truncated": trace.is_truncated,
        "timeout": trace.is_timeout,
        "trace": trace.id,
        "info": json.loads(info, parse_constant=str) if len(info) <= _INFO else {"left_out": f"{len(info)} bytes"},
    }
