"""A gateway: all clients reach the engines through it. A run may have several, see gateway/replicas.py."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import sys

from aiohttp import web

from rollmill.chat.formats.choice import format_beside
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.access.keys import KeyStore
from rollmill.gateway.app import make_app
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.garbage_policy import collect_little
from rollmill.gateway.gateway_parts import GatewayInputs
from rollmill.gateway.recording.workers_log import move_sessions
from rollmill.gateway.replicas import Gateways
from rollmill.gateway.routing.fleet import Fleet
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.gateway.workers import Workers
from rollmill.launch.gateway_workers import BACKLOG, run_workers
from rollmill.runs.prepare import need_tokenizer
from rollmill.runs.run import CANARY, RunDirectory
from rollmill.runs.shared.addresses import announce_gateway, gateway_finders
from rollmill.runs.trust import server_tls, trusting
from rollmill.tls import server_context
from rollmill.trajectories.trajectory_store import TrajectoryStore

_OPEN_FILES = 1 << 16  # a stream takes two: its client and its engine
_SWITCH_S = 0.0005  # how long a thread that can go on waits for a busy one; Python's own value is 5 ms
_MOST_WORKERS, _CORES_PER_WORKER = 8, 4  # if the configuration does not say how many


def main(run: RunDirectory, number: str = "1") -> None:
    """`number`: of this gateway, from 1."""
    role = run.config.gateways[int(number) - 1]
    run, tokenizer = announce_gateway(run, role), Tokenizer.load(need_tokenizer(run))
    config, directory = run.config.gateway, run.path / role
    several = None
    if config.replicas > 1:
        several = Gateways(int(number) - 1, gateway_finders(run), run.secrets["admin_token"], trusting(run))
    format = format_beside(run.tokenizer, tokenizer, run.config.chat.kept, tools_in_prompt=run.config.tools_in_prompt)

    def build(workers: Workers) -> web.Application:
        objects, database = run.objects(), run.database()
        given = GatewayInputs(
            config,
            format,
            tokenizer,
            TrajectoryStore(database, objects),
            objects,
            directory,
            run.secrets["admin_token"],
            engines=[backend.endpoint() for backend in config.backends],
            production_key=run.secrets["production_key"],
            rollout_key=run.secrets["rollout_key"],
            keys=KeyStore(database, run.id),
            splits=SplitStore(database, run.id) if any(role.endswith(CANARY) for role in run.ports) else None,
            fleet=Fleet(database, run.fleet, run.secrets["engine_token"]),
            run=run.id,
        )
        app = make_app(given, workers)
        prepare_process()
        return app

    tls = tls_context(config) if run.tls_of_serve else server_tls(run)
    count = config.workers or (default_workers() if run.path.name.startswith("serve-") else 1)
    if count > 1:
        with _listen(run, role) as listening:
            run_workers(build, listening, directory, count, keepalive_s=config.idle_s, tls=tls, gateways=several)
        return
    move_sessions(directory, 1)
    web.run_app(
        build(Workers(gateways=several)),
        host=run.host,
        port=run.ports[role],
        backlog=BACKLOG,
        reuse_port=run.service_of is not None,  # `held_port` holds that of the first one for this process
        access_log=None,
        print=None,
        shutdown_timeout=1.0,
        keepalive_timeout=config.idle_s,
        handler_cancellation=False,  # the answer to a client that disconnects is still recorded
        ssl_context=tls,
    )


def default_workers() -> int:
    """One worker per four cores: engines and clients need most of them."""
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // _CORES_PER_WORKER))


def _listen(run: RunDirectory, role: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(run.host, run.ports[role], type=socket.SOCK_STREAM)[0]
    reuse = run.service_of is not None  # `held_port` holds it for this process
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=reuse)


def prepare_process() -> None:
    """Allows thousands of connections, keeps collections of garbage short, and lets the thread of the session log run
    soon: answers wait for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    collect_little()
    sys.setswitchinterval(_SWITCH_S)


def tls_context(config: GatewayConfig) -> ssl.SSLContext:
    """The context of `tls_cert` and `tls_key`. Raises ConfigError if they cannot be used."""
    return server_context(str(config.tls_cert), config.tls_key, "gateway.tls_cert")
