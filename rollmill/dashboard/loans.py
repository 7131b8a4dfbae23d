"""Engines of production that work for training: which, since when, for which line, why, and how fast they came back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rollmill.dashboard.figures import Event, finite
from rollmill.dashboard.render import render

LOANS = ("lend", "returned")  # the kinds of events
MOST_SHOWN = 30  # newest loans


@dataclass(frozen=True)
class LoanRecord:
    engine: str
    line: str
    since: float  # seconds since the epoch
    until: float | None  # None: it is lent now; NaN: no event says when it ended
    why: str
    why_returned: str = ""
    return_s: float | None = None  # from when it was needed; None: it returned by itself, or has not returned
    limit_s: float | None = None  # what is declared for that
    late: bool = False


def read_loans(events: Iterable[Event], running: Mapping[str, float]) -> list[LoanRecord]:
    """The newest first. `running`: engine → since when its process runs, in seconds since the epoch. A loan of an
    engine that does not run, or was started again, is over."""
    found: list[LoanRecord] = []
    open_: dict[str, Event] = {}

    def end(name: str, at: float, returned: Event) -> None:
        lend = open_.pop(name, None)
        began = at - finite(returned.get("lent_s"), 0.0) if lend is None else finite(lend["at"], 0.0)
        seconds, limit = finite(returned.get("seconds")), finite(returned.get("limit_s"))
        found.append(
            LoanRecord(
                engine=name,
                line=str((lend or returned).get("line")),
                since=began,
                until=at,
                why=str((lend or {}).get("reason") or "–"),
                why_returned=str(returned.get("reason") or "–"),
                return_s=seconds if seconds == seconds else None,
                limit_s=limit if limit == limit else None,
                late=returned.get("late") is True,
            )
        )

    for event in sorted(events, key=lambda event: event["at"]):
        name, at = str(event.get("engine")), finite(event["at"], 0.0)
        if event["kind"] == "returned":
            end(name, at, event)
        elif event["kind"] == "lend":
            if name in open_:  # its process, or that of the lender, was lost
                end(name, at, {"reason": "not known"})
            open_[name] = event
    for name, lend in list(open_.items()):
        since = finite(lend["at"], 0.0)
        if since < running.get(name, math.inf):
            end(name, math.nan, {"reason": "its process ended"})
        else:
            found.append(LoanRecord(name, str(lend.get("line")), since, None, str(lend.get("reason") or "–")))
    return sorted(found, key=lambda loan: (loan.until is None, loan.since), reverse=True)


def loan_figures(loans: Sequence[LoanRecord]) -> dict[str, Any] | None:
    """What `report.json` says about them; None if no engine was lent."""
    if not loans:
        return None
    returns = [loan.return_s for loan in loans if loan.return_s is not None]
    limits = [loan.limit_s for loan in loans if loan.limit_s is not None]
    return {
        "loans": len(loans),
        "open": sum(loan.until is None for loan in loans),
        "lent_seconds": sum(loan.until - loan.since for loan in loans if loan.until and not math.isnan(loan.until)),
        "returns": len(returns),
        "return_seconds": {"mean": sum(returns) / len(returns) if returns else None, "max": max(returns, default=None)},
        "limit_seconds": limits[0] if limits else None,
        "late": sum(loan.late for loan in loans),
    }


def loans_chapter(loans: Sequence[LoanRecord]) -> Markup:
    """The newest loans in a table, and all of them in a sentence; empty if no engine was lent."""
    return render("loans", "chapter", loans[:MOST_SHOWN], loan_figures(loans), MOST_SHOWN)
