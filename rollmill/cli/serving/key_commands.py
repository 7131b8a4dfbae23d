"""`rollmill keys create | list | revoke`: API keys of a run's gateway."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rollmill.gateway.access.keys import Key, KeyStore

app = typer.Typer()

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", show_default=False)]


@app.command()
def create(
    run_dir: RunDir,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="production, rollout, feedback, read, engine or admin; may be repeated", show_default="production"
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="a name for people")] = "",
    days: Annotated[float | None, typer.Option(min=0, help="days until the key expires", show_default="never")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="limit of requests")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="limit of tokens, prompts included")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="tokens the key may use in all")] = None,
    consent: Annotated[
        str | None,
        typer.Option(help="none, store or train: consent of its conversations, unless a request says otherwise"),
    ] = None,
) -> None:
    """Make a key and print its secret, once.

    The database keeps only a hash of it. A running gateway accepts the key at once. For example:

        rollmill keys create runs/demo --name website --scope production --scope feedback
        rollmill keys create runs/demo --name trial --days 30 --requests-per-minute 60 --budget 1000000
    """
    key, secret = _store(run_dir).create(
        scope or ["production"],
        name=name,
        expires_at=None if days is None else time.time() + days * 86400,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        budget_tokens=budget,
        consent=consent,
    )
    typer.echo(f"key {key.id} ({', '.join(sorted(key.scopes))}); its secret is shown only now:", err=True)
    typer.echo(secret)


@app.command("list")
def list_keys(run_dir: RunDir) -> None:
    """List the keys of a run, without their secrets. The keys in run.json are not listed.

    For example:

        rollmill keys list runs/demo
    """
    from rich.console import Console
    from rich.table import Table

    keys = _store(run_dir).list()
    if not keys:
        typer.echo(f"no key yet; `rollmill keys create {run_dir}` makes one")
        return
    columns: dict[str, list[Any]] = {
        "id": [key.id for key in keys],
        "name": [key.name for key in keys],
        "scopes": [" ".join(sorted(key.scopes)) for key in keys],
        "state": [_state(key) for key in keys],
        "req/min": [key.requests_per_minute for key in keys],
        "tok/min": [key.tokens_per_minute for key in keys],
        "used": [key.used_tokens for key in keys],
        "budget": [key.budget_tokens for key in keys],
        "consent": [key.consent for key in keys],
    }
    # a column that no key uses has no place, so that the others fit a screen
    used = {name: cells for name, cells in columns.items() if any(cell not in (None, "") for cell in cells)}
    table = Table(box=None, pad_edge=False)
    for name in used:
        wraps = name in ("name", "scopes")
        table.add_column(name, overflow="fold", no_wrap=not wraps, min_width=10 if wraps else None)
    for row in zip(*used.values(), strict=True):
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(highlight=False, markup=False).print(table)


@app.command()
def revoke(
    run_dir: RunDir,
    id: Annotated[str, typer.Argument(metavar="ID", help="the id of the key, see `list`", show_default=False)],
) -> None:
    """Revoke a key. Running gateways refuse it within seconds.

    For example:

        rollmill keys revoke runs/demo 8f3a61c2
    """
    key = _store(run_dir).revoke(id)
    typer.echo(f"revoked {key.id} {key.name}".rstrip())


def _store(run_dir: Path) -> KeyStore:
    from rollmill.gateway.access.keys import KeyStore
    from rollmill.runs.opening import open_with_index

    run = open_with_index(run_dir)
    return KeyStore(run.database(), run.id)


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.expires_at is None:
        return "valid"
    days = (key.expires_at - time.time()) / 86400
    return f"{days:.0f} d left" if days > 0 else "expired"
