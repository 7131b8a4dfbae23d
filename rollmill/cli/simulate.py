"""`rollmill simulate burst`: what a fleet of hosts would do, simulated. Nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rollmill.environments.burst import MeasuredStarts

app = typer.Typer(help="Simulate a fleet that is not here. Every figure is labelled so.", no_args_is_help=True)
_COMPOSER_STARTS_PER_S = 500  # per cluster, as Composer 2's authors report


@app.command("burst")
def burst(
    machines: Annotated[int, typer.Option(min=1, help="machines that are asked for at once")] = 100_000,
    hosts: Annotated[int, typer.Option(min=1, help="hosts of the cluster")] = 500,
    cores: Annotated[int, typer.Option(min=1, help="cores of a host")] = 64,
    capacity: Annotated[int, typer.Option(min=1, help="machines that a host holds")] = 256,
    kind: Annotated[str, typer.Option(help="kind of machine in the measurements: namespace or qemu")] = "namespace",
    images: Annotated[int, typer.Option(min=1, help="images that the machines start from, in equal shares")] = 20,
    failing: Annotated[float, typer.Option(min=0, max=0.9, help="share of starts that fail and are repeated")] = 0.001,
    lost_hosts: Annotated[int, typer.Option(min=0, help="hosts that die during the burst")] = 5,
    latencies: Annotated[
        Path, typer.Option(help="measured starts, written by `python -m benchmarks.record_machine_starts`")
    ] = Path("benchmarks/machine_starts.json"),
    seed: Annotated[int, typer.Option(help="of everything that is drawn")] = 0,
) -> None:
    """Simulate a burst of machines over many hosts, with the real placement code.

    For example:

        rollmill simulate burst
        rollmill simulate burst --kind qemu --hosts 1000 --lost-hosts 20

    The hosts are simulated. How long a start takes is drawn from measured starts. That a host with more cores starts as
    many more machines is assumed. It prints how long it takes until all run, how busy the hosts are, and what failed.
    """
    from rollmill.environments.burst import Burst, Simulation
    from rollmill.errors import ConfigError

    measured = _read(latencies, kind)
    if (hosts - lost_hosts) * capacity < machines:
        raise ConfigError(
            f"{hosts} hosts with room for {capacity} each, {lost_hosts} of them lost, cannot hold {machines} machines",
            hint="--hosts or --capacity must be larger",
        )
    asked = Burst(
        machines=machines,
        hosts=hosts,
        cores=cores,
        capacity=capacity,
        images=images,
        failing=failing,
        lost_hosts=lost_hosts,
        seed=seed,
    )
    found = Simulation(asked, measured).run()
    complete = "all running" if found.running == machines else f"only {found.running} running"
    typer.echo(
        f"SIMULATION: {machines} {kind} machines on {hosts} hosts of {cores} cores; starts measured, hosts not real"
    )
    typer.echo(f"{complete} after {found.seconds:.1f} s (p50 {found.wait(0.5):.1f} s, p99 {found.wait(0.99):.1f} s)")
    per_core = found.starts_per_s / (hosts * cores)
    typer.echo(
        f"{found.starts_per_s:.0f} starts/s in the cluster, {per_core:.2f} per core; most in one second "
        f"{max(found.by_second, default=0)}; Composer 2 reports {_COMPOSER_STARTS_PER_S} starts/s per cluster"
    )
    typer.echo(
        f"utilisation of the places for starts {found.utilisation:.0%}; "
        f"{found.templates} templates made; {found.failed} failed, "
        f"{found.lost} lost with their host, all repeated"
    )
    typer.echo(
        f"real: {found.decision_us:.1f} µs of placement code per start, {1e6 / found.decision_us:.0f} per second"
    )


def _read(path: Path, kind: str) -> MeasuredStarts:
    from pydantic import ValidationError

    from rollmill.environments.burst import Recording
    from rollmill.errors import ConfigError

    remedy = "in a clone of the repository, `python -m benchmarks.record_machine_starts` measures this host"
    try:
        recording = Recording.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} has no measured starts: {error}", hint=remedy) from None
    if kind not in recording.kinds:
        raise ConfigError(f"{path} has no starts of {kind!r} machines", hint=f"it has: {', '.join(recording.kinds)}")
    return recording.kinds[kind]
