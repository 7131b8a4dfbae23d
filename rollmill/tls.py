"""TLS between the processes of a run, on several hosts.

A server has the certificate of its host. A client trusts the CA of the run beside those of the system, and checks that
a certificate names the host it asked for. Which CA that is, is a fact of the process: `trust` is called once, at its
start.
"""

from __future__ import annotations

import ssl

from rollmill.errors import ConfigError

_context: ssl.SSLContext | None = None


def trust(ca: str) -> None:
    """HTTPS clients of this process trust this CA from now on."""
    global _context
    _context = client_context(ca)


def own_context() -> ssl.SSLContext | None:
    """For HTTPS clients of this process; None if `trust` was not called: then they trust the CAs of the system."""
    return _context


def client_context(ca: str) -> ssl.SSLContext:
    """Trusts `ca` and the CAs of the system. Raises ConfigError if the file cannot be used."""
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.ca {ca} cannot be used: {error}", hint="a file in PEM format") from None
    return context


def server_context(cert: str, key: str | None, setting: str = "tls.cert") -> ssl.SSLContext:
    """Answers with the certificate chain `cert`. Raises ConfigError, with the name of the setting, if it cannot."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting} {cert} cannot be used: {error}", hint="both files in PEM format, without password"
        ) from None
    return context


def _no_password() -> str:
    """OpenSSL would ask for it at the terminal."""
    return ""
