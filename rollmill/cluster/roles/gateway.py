"""The gateway: all clients reach the engines through it."""

from __future__ import annotations

import gc
import resource
import ssl

from aiohttp import web

from rollmill.chat.formats.choice import format_beside
from rollmill.chat.tokenizer import Tokenizer
from rollmill.cluster.run import CANARY, RunDirectory
from rollmill.errors import ConfigError
from rollmill.gateway.app import make_app
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.fleet import Fleet
from rollmill.gateway.keys import KeyStore
from rollmill.gateway.splits import SplitStore
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.store import TrajectoryStore

# Connections that may wait to be accepted. A full queue drops them, and clients try again only after a second.
BACKLOG = 2048
_OPEN_FILES = 1 << 16  # a stream takes two: its client and its engine


def main(run: RunDirectory) -> None:
    tokenizer = Tokenizer.load(run.tokenizer)
    objects = Objects.open(run.home_store)
    database = open_database(run.database_url)
    app = make_app(
        run.config.gateway,
        format_beside(run.tokenizer, tokenizer, run.config.chat.kept, tools_in_prompt=run.config.tools_in_prompt),
        tokenizer,
        [backend.endpoint() for backend in run.config.gateway.backends],
        TrajectoryStore(database, objects),
        objects,
        run.path / "gateway",
        run.secrets["admin_token"],
        run.secrets["production_key"],
        run.secrets["rollout_key"],
        KeyStore(database, run.id),
        SplitStore(database, run.id) if any(role.endswith(CANARY) for role in run.ports) else None,
        Fleet(database, run.fleet, run.secrets["engine_token"]),
    )
    prepare_process()
    web.run_app(
        app,
        host=run.host,
        port=run.ports["gateway"],
        backlog=BACKLOG,
        reuse_port=run.service_of is not None,  # `held_port` holds it for this process
        access_log=None,
        print=None,
        shutdown_timeout=1.0,
        keepalive_timeout=run.config.gateway.idle_s,
        ssl_context=tls_context(run.config.gateway) if run.tls else None,
    )


def prepare_process() -> None:
    """Allows thousands of connections, and keeps the garbage collector away from what lives as long as the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    gc.collect()
    gc.freeze()


def tls_context(config: GatewayConfig) -> ssl.SSLContext:
    """The context of `tls_cert` and `tls_key`. Raises ConfigError if they cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(str(config.tls_cert), config.tls_key)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"gateway.tls_cert {config.tls_cert} cannot be used: {error}",
            hint="both files in PEM format, without password",
        ) from None
    return context
