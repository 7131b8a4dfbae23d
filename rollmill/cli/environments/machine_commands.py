"""`rollmill machines setup | doctor | fidelity | shell | serve`: kinds of machines, their looks, a look into one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.doctor import probe_machines
from rollmill.errors import ConfigError
from rollmill.machines.namespace.emulation import other
from rollmill.machines.qemu.setup import set_up
from rollmill.runs.free_ports import held_port

if TYPE_CHECKING:
    from aiohttp import web

app = typer.Typer()


@app.command("setup")
def setup(
    architecture: Annotated[
        str | None, typer.Option(help="of the guests: x86_64 or aarch64", show_default="this host's")
    ] = None,
) -> None:
    """Get what virtual machines need: QEMU and a Linux kernel, from Debian packages.

    For example:

        rollmill machines setup
        rollmill machines setup --architecture x86_64

    QEMU is installed with apt-get, which needs root. Without root, this prints the command to run. The kernel is only
    unpacked into your cache directory. What is already there stays as it is.
    """
    set_up(typer.echo, architecture)
    typer.echo("`rollmill machines doctor` tries it")


@app.command("doctor")
def doctor() -> None:
    """Try every kind of machine: start, run a command, snapshot, restore.

    For example:

        rollmill machines doctor

    The exit code is 1 if no kind works.
    """
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from rollmill.machines.probe import try_emulation

    table = Table("", "kind", "kernel", "snapshot keeps", "slowdown", "start", "restore")
    reasons = []  # below the table: a sentence is hard to read in a narrow column
    tried = probe_machines()
    for kind, found in tried.items():
        if isinstance(found, str):
            table.add_row("[yellow]no[/]", kind)
            reasons.append(f"{kind}: no. {found.removeprefix('machine: ')}")
            continue
        able = found.capabilities
        times = (f"{found.start_s * 1000:.0f} ms", f"{found.restore_s * 1000:.0f} ms")
        kept = "memory and files" if able.snapshot == "full" else able.snapshot
        table.add_row("[green]ok[/]", kind, able.kernel, kept, f"{able.slowdown:.1f}", *times)
        if found.why_no_kvm is not None:
            reasons.append(f"{kind}: without KVM, so processors are emulated. {found.why_no_kvm}")
    Console().print(table)
    for reason in reasons:
        typer.echo(reason)
    why = asyncio.run(try_emulation(other()))
    typer.echo(f"programs for {other()} in namespace machines: {'yes, emulated' if why is None else f'no. {why}'}")
    if all(isinstance(found, str) for found in tried.values()):
        raise typer.Exit(1)


@app.command("fidelity")
def fidelity(
    kind: Annotated[str, typer.Option(help="kind of machine: namespace or qemu")] = "namespace",
    image: Annotated[str, typer.Option(help="image of the machine")] = "host-python",
    reference: Annotated[
        Path | None,
        typer.Option(
            help="what the probe printed on a computer of yours; not set: a Debian server", show_default=False
        ),
    ] = None,
    print_probe: Annotated[bool, typer.Option("--print-probe", help="print the program of the probe and exit")] = False,
) -> None:
    """Score, item by item, how much a machine differs from an ordinary computer.

    For example:

        rollmill machines fidelity
        rollmill machines fidelity --print-probe > probe.py
        rollmill machines fidelity --image shop --reference laptop.json

    A probe runs in a machine and is compared with a reference: 0 means that it cannot tell them apart. Models that
    notice an artificial environment behave differently in it. The score is kept with a built image. The default
    reference is written by hand; `python probe.py > laptop.json` records one.
    """
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from rollmill.cli.environments.machine_shell import machine_of
    from rollmill.machines import fidelity as measure
    from rollmill.machines.images.build import keep_fidelity

    if print_probe:
        print(measure.probe_source(), end="")
        return
    expected = None if reference is None else measure.read_reference(reference)

    async def probed() -> dict[str, dict[str, bool | str]]:
        async with machine_of(image, kind) as machine:
            return await measure.look(machine)

    looked = asyncio.run(probed())
    found = measure.compare(looked, expected or measure.ordinary(looked))
    table = Table("item", "distance", "what differs")
    for item, (distance, differences) in found.items.items():
        table.add_row(item, f"{distance:.2f}", ", ".join(map(str, differences)))
    Console(highlight=False, markup=False).print(table)
    typer.echo(f"{kind} machine of {image}: distance {found.distance:.2f}")
    keep_fidelity(image, kind, found.distance)


@app.command("shell")
def shell(
    image: Annotated[str, typer.Argument(help="image of the machine")] = "host-python",
    kind: Annotated[str, typer.Option(help="kind of machine: namespace or qemu")] = "namespace",
    run: Annotated[
        Path | None, typer.Option(help="a run directory: then look into one of its episodes", show_default=False)
    ] = None,
    episode: Annotated[str | None, typer.Option(help="id of its trajectory", show_default=False)] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="run this and exit, without a terminal", show_default=False)
    ] = None,
) -> None:
    """Look into a machine: of an image, or as a finished episode left its work.

    For example:

        rollmill machines shell
        rollmill machines shell shop -c pytest
        rollmill machines shell --run runs/demo --episode TRAJECTORY

    The machine of an episode is made as graders get it: the files of the task, and what the episode handed in over
    them. The machine ends with the shell, and nothing of it is kept.
    """
    import asyncio

    from rollmill.cli.environments import machine_shell

    if (run is None) != (episode is None):
        raise ConfigError("--run and --episode go together", hint="`rollmill trajectories list RUN` shows ids")
    if command is None and not sys.stdin.isatty():
        raise ConfigError("this is no terminal", hint='-c "COMMAND" runs a command without one')

    async def look() -> int:
        opened = machine_shell.machine_of(image, kind)
        if run is not None and episode is not None:
            opened = machine_shell.machine_of_episode(run, episode)
        async with opened as machine:
            return await (
                machine_shell.attach(machine) if command is None else machine_shell.run_command(machine, command)
            )

    raise typer.Exit(asyncio.run(look()))


@app.command("serve")
def serve(
    host: Annotated[str, typer.Option(help="address to listen on; beyond loopback use TLS")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8900,
    kind: Annotated[str, typer.Option(help="kind of machine: namespace or qemu")] = "namespace",
    capacity: Annotated[int, typer.Option(min=1, help="machines at once; more are refused with Retry-After")] = 64,
    starts: Annotated[int, typer.Option(min=1, help="machines that are started at once")] = 8,
    image_store: Annotated[
        str | None, typer.Option(help="store of images; those that are not here are fetched", show_default=False)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate, as PEM: then HTTPS", show_default=False)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its private key", show_default=False)] = None,
    connect: Annotated[
        str | None,
        typer.Option(help="URL of a run's `machine.listen`: connect to it, and listen on nothing", show_default=False),
    ] = None,
) -> None:
    """Offer the machines of this host behind a URL, to dispatchers on other hosts and to E2B's SDKs.

    For example:

        export ROLLMILL_MACHINES_KEY=$(openssl rand -hex 24)
        rollmill machines serve --host 10.0.0.7 --tls-cert host.pem --tls-key host.key

    Every request needs the key, which is read from the environment variable ROLLMILL_MACHINES_KEY. A run uses the hosts
    with [machine] kind = "remote" and hosts = ["https://10.0.0.7:8900"]. E2B's SDKs use them with E2B_API_URL and
    E2B_SANDBOX_URL set to the URL, and E2B_API_KEY set to the key. Images are those of this host. A host
    that cannot be reached connects outwards with --connect to the URL of a run that has `listen` in [machine].
    """
    import asyncio

    from aiohttp import web

    from rollmill.config import validate_config
    from rollmill.kinds import build
    from rollmill.machines.machine import MachineSection
    from rollmill.machines.remote.app import make_app, serve_outwards
    from rollmill.machines.remote.service import Service
    from rollmill.tls import server_context

    key = os.environ.get("ROLLMILL_MACHINES_KEY", "")
    if len(key) < 16:
        raise ConfigError(
            "the environment variable ROLLMILL_MACHINES_KEY must hold a key of at least 16 characters",
            hint="export ROLLMILL_MACHINES_KEY=$(openssl rand -hex 24)",
        )
    tls = None
    if tls_cert is not None:
        tls = server_context(str(tls_cert), str(tls_key) if tls_key else None, "--tls-cert")

    section = validate_config(MachineSection, {"kind": kind, "image_store": image_store}, "--kind")

    async def application() -> web.Application:
        machines = build(section)
        return make_app(Service(machines, key, capacity=capacity, starts=starts))

    if connect is not None:
        print(f"up to {capacity} {kind} machines for {connect}. Ctrl-C stops it.", flush=True)
        return asyncio.run(serve_outwards(application, connect, key))
    with held_port(host, port):
        url = f"http{'s' if tls else ''}://{host}:{port}"
        print(f"up to {capacity} {kind} machines at {url}. Ctrl-C stops it.", flush=True)
        # `held_port` holds the port for this process
        web.run_app(application(), host=host, port=port, reuse_port=True, ssl_context=tls, access_log=None, print=None)
