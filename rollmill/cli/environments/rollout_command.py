"""`rollmill rollout`: play one episode against any OpenAI-compatible endpoint, and look at it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.environments.task import Task
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.cli.environment_settings import Settings
    from rollmill.rollouts.agent_endpoint import Endpoint, Played

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="URL", help="an OpenAI-compatible endpoint, up to and with /v1")
]
SERVED_MODEL = "rollmill"  # the name that every endpoint of `rollmill serve` knows
ModelNameOption = Annotated[str, typer.Option("--model-name", help="the model to ask for there")]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="OPENAI_API_KEY", show_default=False, help="the endpoint's key; better as OPENAI_API_KEY"
    ),
]


def rollout(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="a RUN.toml, or a run directory", show_default=False)],
    model: ModelOption = None,
    task: Annotated[str | None, typer.Option("--task", metavar="ID", help="the task; default: the first one")] = None,
    model_name: ModelNameOption = SERVED_MODEL,
    key: KeyOption = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="sampling temperature")] = 1.0,
    full: Annotated[bool, typer.Option("--full", help="print long messages whole")] = False,
) -> None:
    """Play one episode, and print its transcript, reward and evidence. This is how to debug an environment.

    The tasks, the machine, the agent and the rewards are those of the configuration; nothing is stored or trained on.
    Any OpenAI-compatible endpoint will do; `rollmill serve RUN` makes one of a run and names the file of its key. For
    example:

        rollmill rollout run.toml --model http://127.0.0.1:8000/v1 --task fix/add-8/17
    """
    import asyncio

    from rollmill.cli.environment_settings import read_settings
    from rollmill.rollouts.agent_endpoint import Endpoint

    settings = read_settings(source)
    if model is None:
        raise ConfigError("--model is missing", hint="--model URL; `rollmill serve RUN` prints the URL of a run")
    played = asyncio.run(_play(settings, Endpoint(model, key or "", model_name), task, temperature))
    _print(played, 1e9 if full else 2000, settings.rollouts.max_answer_tokens)
    if played.reward is None:
        raise typer.Exit(1)


async def _play(config: Settings, endpoint: Endpoint, task_id: str | None, temperature: float) -> Played:
    from rollmill.environments.environment import build_tasks, open_environments
    from rollmill.rollouts.agent_endpoint import EndpointProxy, play
    from rollmill.types import Sampling

    tasks = build_tasks(config)
    task: Task = next(tasks.train(config.seed)) if task_id is None else tasks.get(task_id)
    sampling = Sampling(temperature=temperature, max_tokens=config.rollouts.max_answer_tokens)
    async with EndpointProxy(endpoint) as proxy:
        await proxy.check()
        async with open_environments(config) as environments:
            return await play(environments, proxy, task, sampling, config.rollouts)


def _print(played: Played, longest: float, answer_tokens: int) -> None:
    from rich.console import Console

    from rollmill.cli.experience.transcripts import print_grades, print_messages, safe

    console = Console(highlight=False)
    episode = played.episode
    console.print(safe(f"task {episode.task.id}", "bold"))
    print_messages(console, episode.messages, longest)
    result = episode.result
    ended = f"ended: {result.stop} after {result.turns} turns, {result.tool_calls} tool calls" if result else "no end"
    bad = f" ({result.bad_tool_calls} malformed)" if result and result.bad_tool_calls else ""
    console.print(safe(f"\n{ended}{bad} · {episode.tokens} tokens · {episode.seconds:.1f} s", "dim"))
    if result and result.stop == "length":
        limit = f"an answer reached rollouts.max_answer_tokens ({answer_tokens})"
        console.print(safe(f"cut off: {limit}, or the context of the model was full", "dim"), soft_wrap=True)
    if result and result.note:
        console.print(safe(result.note, "dim"), soft_wrap=True)
    for path, data in episode.submission.items():
        console.print(safe(f"\nhanded in: {path}", "bold"))
        console.print(safe(data.decode("utf-8", "replace")[: int(min(longest, 1 << 20))]), soft_wrap=True)
    if played.reward is not None:
        print_grades(console, [(1, played.reward)], [], longest)
    else:
        console.print(safe(f"\nno reward: {played.reason}", "red"))
