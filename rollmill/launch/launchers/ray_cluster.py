"""A Ray cluster as a run sees it: how to connect to it, what it has room for, and where an actor of it is.

Ray is imported here only, and only when it is used.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from rollmill.backoff import Backoff
from rollmill.errors import ConfigError
from rollmill.launch.launchers.node_process import NODE

if TYPE_CHECKING:  # an actor imports this module, and a new engine waits for it
    from rollmill.runs.run import RunConfig, RunDirectory

NAMESPACE = "rollmill"
REGION = "region"  # label of Ray nodes
CONNECT_S = 5.0
HEAD_S = 600.0  # for a lost head to come back
PROBE_S = 120.0  # to connect as a driver


def connect(address: str) -> Any:
    """The module `ray`, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise ConfigError('[cluster] kind = "ray" needs Ray', hint="pip install 'rollmill[ray]'") from None
    if ray.is_initialized():
        return ray
    hint = "`ray start --head` makes a cluster of this host, `ray start --address=HOST:PORT` lets it join one"
    named = {"_node_ip_address": os.environ[NODE]} if NODE in os.environ else {}
    try:
        if named:  # the supervisor of a run: the head may be lost just now, and comes back
            address = os.environ.get("RAY_ADDRESS", address)
            _reach(address, HEAD_S)
        else:
            _reach(address, 0.0)
            _probe(address)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **named)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray would end the process at once
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[cluster] address = {address!r} cannot be used: {error}", hint=hint) from None
    return ray


def _reach(address: str, patience_s: float) -> None:
    """Raises OSError if nobody listens there for `patience_s`: Ray itself would abort the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    backoff = Backoff(0.2, 2.0, patience=patience_s)
    while True:
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
            return
        except OSError:
            if (pause := backoff.failed()) >= backoff.left():
                raise
        time.sleep(pause)


def _probe(address: str) -> None:
    """Connect in another process first: on a host that is no node of the cluster, Ray aborts the process."""
    script = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False)"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", script, address], capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer after {PROBE_S:.0f} s") from None
    if done.returncode < 0:
        raise ConnectionError("this host is no node of that cluster")
    if done.returncode > 0:
        raise ConnectionError(done.stderr.decode(errors="replace").strip().splitlines()[-1][-300:])


def check_room(ray: Any, config: RunConfig) -> None:
    """Raises ConfigError if the cluster lacks GPUs or a region."""
    resources, specs = ray.cluster_resources(), config.engine_specs
    ranks = max((stage.training.ranks for stage in config.stages), default=0)
    needed = ranks + sum(engine_gpus(spec.section.gpus) for spec in specs)
    demanded = config.device == "cuda" or any(spec.section.gpus for spec in specs)
    if (resources.get("GPU") or demanded) and config.device != "cpu" and needed > resources.get("GPU", 0):
        raise ConfigError(
            f"the run needs {needed} GPUs ({ranks} for the trainer), but the cluster has {resources.get('GPU', 0):.0f}",
            hint="add nodes, or lower `ranks` of the stages or `count` or `gpus` of [[engines]]",
        )
    found = regions_of(ray)
    missing = [region for region in config.regions if found and region not in found]
    if missing:
        raise ConfigError(
            f"no Ray node has the label {REGION}={missing[0]}",
            hint=f"nodes have {', '.join(sorted(found))}; `ray start --labels {REGION}={missing[0]}` adds one",
        )


def engine_gpus(gpus: int | None) -> int:
    return 1 if gpus is None else gpus


def regions_of(ray: Any) -> set[str]:
    """The regions that living nodes are labelled with."""
    return {node["Labels"][REGION] for node in ray.nodes() if node["Alive"] and REGION in node["Labels"]}


def actor_options(run: RunDirectory, name: str) -> dict[str, Any]:
    """Of an actor that Ray keeps alive whoever leaves."""
    return {"name": f"{run.id}/{name}", "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}


def node_address() -> str:
    """Of the node that this actor is on."""
    import ray

    return str(ray.util.get_node_ip_address())


def cluster_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def leave() -> None:
    """End this actor. Ray does not restart it."""
    import ray

    ray.kill(ray.get_runtime_context().current_actor)
