"""TLS of a run's own gateway, as the processes of the run see it."""

from __future__ import annotations

import ssl

from rollmill.cluster.run import RunDirectory


def trusting(run: RunDirectory) -> ssl.SSLContext | None:
    """Trusts the certificate of this gateway, whatever host it names. None: it answers plain HTTP."""
    if not run.tls:
        return None
    context = ssl.create_default_context(cafile=run.config.gateway.tls_cert)
    context.check_hostname = False
    return context
