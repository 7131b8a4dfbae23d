"""TLS of a run: what its servers show, and what its processes and commands trust; and a question to one of them."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request

from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.tls import client_context, server_context


def check_tls(config: RunConfig) -> None:
    """Raises ConfigError if a file of [tls] cannot be used on this host."""
    if config.tls is not None:
        server_context(config.tls.cert, config.tls.key)
        client_context(config.tls.ca)


def server_tls(run: RunDirectory) -> ssl.SSLContext | None:
    """What the servers of a run show on this host. None: they answer plain HTTP."""
    tls = run.config.tls
    return server_context(tls.cert, tls.key) if tls is not None else None


def trusting(run: RunDirectory) -> ssl.SSLContext | None:
    """What a client of the run's gateways trusts. The certificate of `rollmill serve` is trusted itself, whatever host
    it names: it is made for clients elsewhere. None: gateways answer plain HTTP."""
    if run.tls_of_serve:
        context = ssl.create_default_context(cafile=run.config.gateway.tls_cert)
        context.check_hostname = False
        return context
    return client_context(run.config.tls.ca) if run.config.tls is not None else None


def ask(run: RunDirectory, url: str, timeout_s: float, most_bytes: int = 1 << 24) -> tuple[int, bytes]:
    """Status and body of what a server of the run answers, for callers without an event loop. Raises OSError if it
    does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s, context=trusting(run)) as response:  # noqa: S310
            return response.status, response.read(most_bytes)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(most_bytes)
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from None
