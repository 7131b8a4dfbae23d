"""Engines of production that work for training: which, since when, for which line, why, and how fast they came back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.runs.report.figures import Event, finite
from rollmill.runs.report.markup import Markup, tag
from rollmill.runs.report.scales import duration, number
from rollmill.runs.report.sections import section

LOANS = ("lend", "returned")  # the events that tell it
MOST_SHOWN = 30  # newest loans


@dataclass(frozen=True)
class LoanRecord:
    engine: str
    line: str
    since: float  # seconds since the epoch
    until: float | None  # None: it is lent now; NaN: nobody saw when it ended
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
    for name, lend in [*open_.items()]:
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
    rows = [tag("tr", [tag("td", cell) for cell in _row(loan)]) for loan in loans[:MOST_SHOWN]]
    if not rows:
        return Markup("")
    heads = ("Engine", "Lent to", "Since", "For", "Back in", "Why it was lent, and why it came back")
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    listed = tag("table", header, tag("tbody", rows), class_="words loans")
    more = f"The newest {MOST_SHOWN} of {number(len(loans))} loans." if len(loans) > MOST_SHOWN else ""
    return section(
        "Engines lent to training",
        "Production lends engines while it needs few of them, and has them back within a declared time.",
        tag("p", _words(loans), class_="about"),
        tag("div", listed, class_="scroll"),
        tag("p", more, class_="about") if more else "",
    )


def _words(loans: Sequence[LoanRecord]) -> str:
    told = loan_figures(loans)
    assert told is not None
    now = f"{number(told['open'])} lent now. " if told["open"] else "None is lent now. "
    before = f"{number(told['loans'])} loans since its service started"
    if not told["returns"]:
        return f"{now}{before}."
    slowest, limit = told["return_seconds"]["max"], told["limit_seconds"]
    declared = f" of the {duration(limit)} declared" if limit is not None else ""
    late = f"{number(told['late'])} late" if told["late"] else "none late"
    return f"{now}{before}, {number(told['returns'])} recalled: slowest return {duration(slowest)}{declared}, {late}."


def _row(loan: LoanRecord) -> list[str]:
    at = time.gmtime(loan.since)
    since = tag("time", time.strftime("%Y-%m-%d %H:%M:%S UTC", at), data_since=f"{loan.since:.0f}")
    lasted: str = tag("b", "lent now", class_="good")
    if loan.until is not None:
        lasted = "not known" if math.isnan(loan.until) else duration(loan.until - loan.since)
    back = "–" if loan.return_s is None else duration(loan.return_s)
    return [
        loan.engine,
        tag("code", loan.line),
        since,
        lasted,
        tag("b", f"{back}, late", class_="bad") if loan.late else back,
        tag("span", loan.why[:300], f" → {loan.why_returned[:300]}" if loan.until is not None else ""),
    ]
