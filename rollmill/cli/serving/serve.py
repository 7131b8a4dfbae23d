"""`rollmill serve`: an OpenAI-compatible endpoint on the weights of a run or of a checkpoint directory."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.target import VersionOption, checkpoint_run, find_target, is_checkpoint
from rollmill.errors import ConfigError
from rollmill.runs.free_ports import held_port

if TYPE_CHECKING:
    from rich.console import Console

    from rollmill.launch.launchers.local import LocalLauncher
    from rollmill.launch.services import Target
    from rollmill.runs.run import RunDirectory

PORT = 8000
KEY = "api-key"  # a file of the run directory


def serve(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="a run directory, or a Hugging Face checkpoint directory", show_default=False
        ),
    ],
    version: VersionOption = None,
    host: Annotated[
        str, typer.Option(help="address to listen on; 0.0.0.0: every address of this machine")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port to listen on", show_default=f"{PORT}, or a free one")
    ] = None,
    canary: Annotated[
        bool, typer.Option("--canary", help="also serve the channel candidate, for the canaries of `rollmill cycle`")
    ] = False,
    root: Annotated[Path, typer.Option(help="where the run of a checkpoint directory is kept")] = Path("runs"),
) -> None:
    """Serve a model: production traffic through a gateway, every conversation recorded.

    Works beside a run that is training. Without --version it follows the newest version of the run's line. Given a
    channel, it follows the channel: `rollmill weights rollback RUN live` reaches users within seconds. For example:

        rollmill serve runs/demo
        rollmill serve runs/demo --version live --port 8080
        rollmill serve runs/demo --version live --canary
        rollmill serve models/smollm2-135m
    """
    from rich.console import Console

    from rollmill.launch.services import serving, wait_until_ready
    from rollmill.runs.opening import open_with_index

    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        with held_port(host, port, PORT) as held:
            console.print(f"loading {directory}", style="dim")
            with console.status("loading"):
                if is_checkpoint(directory):
                    run = checkpoint_run(root, directory)
                    version = version or f"{run.config.checkpoint_line}@0"
                else:
                    run = open_with_index(directory)
                target = find_target(run, version)
                _check_canary(canary, target)
            with serving(run, target, host=host, port=held, canary=canary) as (service, cluster):
                with console.status("loading"):
                    wait_until_ready(service, cluster, lambda waits_for: console.print(waits_for, style="dim"))
                console.print(f"serving {target} of {directory}")
                console.print(_how_to(service))
                _watch(service, cluster, console)
    except KeyboardInterrupt:
        console.print("stopped")


def _check_canary(canary: bool, target: Target) -> None:
    if canary and (target.kind, target.name) != ("channel", "live"):
        raise ConfigError(f"--canary goes with the channel live, not with {target}", hint="--version live")


def _how_to(service: RunDirectory) -> str:
    """What a client needs. The key is in a file that only its owner can read, never on the screen."""
    key = service.data / KEY
    key.touch(mode=0o600)
    key.write_text(service.secrets["production_key"] + "\n")
    url, *others = (f"{service.url(role)}/v1" for role in service.config.gateways)
    body = '{"model": "rollmill", "messages": [{"role": "user", "content": "Hello"}]}'
    return f"""
  URL      {", ".join([url, *others])}
  model    rollmill
  API key  in {key}
  logs     {service.logs}

Try it:
  curl {url}/chat/completions -H "Authorization: Bearer $(cat {shlex.quote(str(key))})" -d '{body}'

Ctrl-C stops it."""


def _watch(service: RunDirectory, cluster: LocalLauncher, console: Console) -> None:
    """Keep the processes alive and say when the served version changes, until Ctrl-C."""
    from rollmill.launch.services import served_versions

    before = served_versions(service)
    while True:
        cluster.watch()
        time.sleep(1.0)
        now = served_versions(service)
        if now and now != before:
            console.print(f"now serving {', '.join(now)}")
            before = now
