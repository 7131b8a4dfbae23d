"""`rollmill dashboard`: a live page about a run or a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import ConfigError
from rollmill.runs.free_ports import held_port

if TYPE_CHECKING:
    import ssl

    from rollmill.dashboard.run_source import Source
    from rollmill.gateway.access.keys import KeyRing

PORT = 8800


def dashboard(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|STORE",
            help="a run directory; or a database, sqlite:///PATH or postgresql://…",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="address to listen on; beyond loopback every visitor needs a key")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="port to listen on", show_default=f"{PORT}, or a free one")
    ] = None,
    objects: Annotated[
        str | None, typer.Option(help="with a database: its object store, directory or URL, to read conversations")
    ] = None,
    run: Annotated[str | None, typer.Option(help="with a database: show only the run with this id")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="with a database: tokenizer.json of the model, to show exact tokens")
    ] = None,
) -> None:
    """Show a run, or a store, as a live page: figures, processes, queues, costs, versions, trajectories.

    It only reads, and works beside a run that trains, after it, and on a database alone. Nothing is computed while
    nobody looks. On loopback it needs no key. With another --host every visitor needs a key with the scope read, which
    a browser asks for as a password. HTTPS is used if the run's [gateway] has tls_cert. For example:

        rollmill dashboard runs/demo
        rollmill keys create runs/demo --name team --scope read
        rollmill dashboard runs/demo --host 0.0.0.0 --port 8800
        rollmill dashboard postgresql://reader@db/rollmill --objects s3://mill/runs
    """
    from aiohttp import web

    from rollmill.dashboard.app import is_loopback, make_app

    source = _source(target, objects, run, tokenizer)
    open_to_all = not is_loopback(host)
    keys = _keys(source, host) if open_to_all else None
    tls = _tls(source) if open_to_all else None
    with held_port(host, port, PORT) as held:
        where = f"[{host}]" if ":" in host else host
        print(f"{source.name}: http{'s' if tls else ''}://{where}:{held}/", flush=True)
        if open_to_all:
            print(_key_words(source, tls is not None), flush=True)
        print("Ctrl-C stops it.", flush=True)
        web.run_app(
            make_app(source, keys),
            host=host,
            port=held,
            reuse_port=True,  # `held_port` holds it for this process
            ssl_context=tls,
            access_log=None,
            print=None,
            shutdown_timeout=1.0,
        )


def _source(target: str, objects: str | None, run: str | None, tokenizer: Path | None) -> Source:
    from rollmill.dashboard.run_source import Source

    if "://" in target:
        return Source.of_database(target, objects, run, tokenizer)
    for option, value in (("--objects", objects), ("--run", run), ("--tokenizer", tokenizer)):
        if value is not None:
            raise ConfigError(
                f"{option} is for a database, but {target} is a run directory", hint=f"leave {option} out"
            )
    return Source.of_run(Path(target))


def _keys(source: Source, host: str) -> KeyRing:
    """The keys of the run that is shown. They are read from its database."""
    from rollmill.gateway.access.keys import KeyRing, KeyStore

    if source.only is None:
        raise ConfigError(
            f"beyond loopback (--host {host}) visitors need a key, and keys belong to a run",
            hint="--run ID shows one run to those who have a key of it",
        )
    if not source.exists:
        raise ConfigError(
            f"run {source.name!r} has no database yet, so nobody can have a key",
            hint="`rollmill keys create RUN --scope read` makes one",
        )
    admin = source.run.secrets["admin_token"] if source.run is not None else None
    return KeyRing(KeyStore(source.database, source.only), {"admin": admin})


def _tls(source: Source) -> ssl.SSLContext | None:
    from rollmill.launch.roles.gateway import tls_context

    if source.run is None or source.run.config.gateway.tls_cert is None:
        return None
    return tls_context(source.run.config.gateway)


def _key_words(source: Source, tls: bool) -> str:
    made = f"rollmill keys create {source.run.path if source.run else 'RUN'} --scope read"
    words = [f"Every visitor needs a key with the scope read: `{made}`."]
    words += ["A browser asks for it: any user name, the key as the password."]
    words += [] if tls else ["Keys travel unencrypted: put a TLS proxy in front, or set gateway.tls_cert."]
    return "\n".join(words)
