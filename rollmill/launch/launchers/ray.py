"""A run on a Ray cluster: Ray decides where each process runs, and starts it again elsewhere when its node is lost.

    `rollmill train`  ──►  supervisor  ──►  actor per process  ──►  role process, forked by the fork server of its node
                           actor                                    logs and events ──► the run's store

Actors are detached: the command may leave. The supervisor is what the command is on one host: it drives the stages, and
restarts role processes that exit. An actor whose node is lost comes back on another node without its process, and the
supervisor starts the process there; while the supervisor itself is away, the processes go on. Roles meet in the run's
stores, so they need no directory of another host. What a node keeps is a cache, or a log that may be lost.

Here is what a command asks of the cluster; ray_roles.py is the supervisor's side; supervisor.py and node_process.py
run on the nodes.
"""

from __future__ import annotations

import subprocess
import sys

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError, RollmillError
from rollmill.launch.launchers.ray_cluster import (
    actor_options,
    check_room,
    cluster_address,
    connect,
    leave,
    node_address,
)
from rollmill.launch.launchers.ray_roles import PLACE_S, RayLauncher
from rollmill.launch.launchers.supervisor import Supervisor
from rollmill.launch.role_inputs import hand_to
from rollmill.runs.opening import PASSWORD, describe_run
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.runs.shared.outbox import bring
from rollmill.runs.shared.presence import Presence
from rollmill.runs.trust import check_tls


class RayConfig(Config):
    address: str = Field(
        "auto",
        description="Address of the Ray cluster, HOST:PORT. `auto`: the one that this host is a node of. The command "
        "must be given on a node.",
    )
    scratch: str = Field(
        "~/.cache/rollmill/nodes",
        description="Directory on every node for caches, logs and the gateway's log of open sessions. It may be lost.",
    )
    labels: dict[str, dict[str, str]] = Field(
        {},
        description='Labels that the nodes of a role must have, by role: `{trainer = {accelerator = "h200"}}`. Roles '
        "are trainer, gateway, dispatcher and engine-REGION.",
    )


class Ray:
    """`[cluster] kind = "ray"`: processes on the nodes of a Ray cluster. Needs `store` and a PostgreSQL `database`; all
    nodes have the same rollmill, and files that the configuration names at the same paths. Roles listen on their node's
    address. If nodes have the label `region`, the engines of a region are on its nodes, and everything else is on those
    of the first region."""

    elsewhere = True

    def __init__(self, config: RayConfig) -> None:
        self.config = config

    def check(self, config: RunConfig) -> None:
        if config.store is None or config.database is None or config.database.startswith("sqlite"):
            missing = "store" if config.store is None else "database"
            raise ConfigError(
                f'[cluster] kind = "ray" needs a {missing} that all nodes reach',
                hint='store = "s3://BUCKET/PREFIX" and database = "postgresql+psycopg://…"',
            )
        if PASSWORD.search(config.database):
            raise ConfigError(
                "the URL of the database has a password, and a run on Ray keeps its configuration in the store",
                hint="leave it out of the URL, and put it into ~/.pgpass on the nodes",
            )
        check_tls(config)  # the command is given on a node, and the files are at these paths on every one
        check_room(connect(self.config.address), config)

    def open(self, run: RunDirectory) -> RayLauncher:
        return RayLauncher(run, connect(self.config.address), self.config.scratch, self.config.labels)

    def submit(self, run: RunDirectory) -> None:
        from rollmill.runs.prepare import is_prepared

        ray, presence = connect(self.config.address), Presence(run.objects())
        if presence.where() is not None:
            return
        describe_run(run)
        if not is_prepared(run):  # checkpoint and tokenizer are files of this host
            role = [sys.executable, "-P", "-m", "rollmill.launch.role", "trainer", str(run.path.absolute())]
            if subprocess.run(role, check=False).returncode != 0:
                raise RollmillError(f"{run.path} was not started: see above")
        presence.forget_stop()
        actor = ray.remote(Supervisor).options(**actor_options(run, "supervisor"), num_cpus=0, get_if_exists=True)
        try:
            made = actor.remote(hand_to(run, "supervisor"), self.config.scratch, node_address, cluster_address, leave)
            ray.get(made.ready.remote(), timeout=PLACE_S)
        except ray.exceptions.RayError as error:
            raise RollmillError(f"{run.path} was not started: {str(error).strip()[-600:]}") from None

    def collect(self, run: RunDirectory) -> str | None:
        objects = run.objects()
        where = Presence(objects).where()
        bring(objects, run.path)  # after it: a supervisor sends the last lines before it leaves
        return where

    def halt(self, run: RunDirectory) -> None:
        Presence(run.objects()).ask_to_stop()
