"""The events of a run and of its services as they grow, kept in bounded memory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

from rollmill.dashboard.figures import Event, RunEvents
from rollmill.dashboard.loans import LOANS
from rollmill.runs.run import RunDirectory
from rollmill.runs.status import service_paths
from rollmill.telemetry import EventTail

# A run of days writes these without end; of each, the newest are kept. All other kinds are rare.
MOST = {"busy": 20_000, "engine": 20_000, "rollout": 200_000, "eval_progress": 1000, "closed": 20_000, "arrive": 20_000}
_OF_ROLLOUT = ("at", "process", "kind", "trajectory", "split", "state", "turns", "tool_calls", "bad_tool_calls")
_OF_ENVIRONMENT = ("environment", "group", "reward", "solved")
_KEPT = {
    "rollout": frozenset((*_OF_ROLLOUT, *_OF_ENVIRONMENT, "tokens", "seconds"))
}  # the fields that figures are made of
_OF_SERVICES = ("apply", "engine", "restart", *LOANS)


class Watch:
    """Read-only: `poll` returns whether anything is new."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._own = EventTail(run.events)
        self._services: dict[str, EventTail] = {}
        self._kept: defaultdict[str, deque[Event]] = defaultdict(deque)
        self._of_services: defaultdict[str, deque[Event]] = defaultdict(lambda: deque(maxlen=MOST["engine"]))
        self.forgotten = 0  # events that are no longer kept

    def poll(self) -> bool:
        fresh = self._own.poll()
        for event in fresh:
            self._keep(event)
        changed = bool(fresh)
        for path in service_paths(self._run):
            tail = self._services.setdefault(path.name, EventTail(path / "events"))
            for event in tail.poll():
                if event["kind"] in _OF_SERVICES:
                    changed = True
                    self._of_services[event["kind"]].append(_with_service(event, path.name))
        return changed

    def _keep(self, event: Mapping[str, Any]) -> None:
        kind = str(event["kind"])
        wanted = _KEPT.get(kind)
        kept = self._kept[kind]
        kept.append(event if wanted is None else {key: value for key, value in event.items() if key in wanted})
        if len(kept) > MOST.get(kind, len(kept)):
            kept.popleft()
            self.forgotten += 1

    def events(self) -> RunEvents:
        """The events of the run itself, as the report reads them."""
        everything = (event for kept in self._kept.values() for event in kept)
        return RunEvents.of(sorted(everything, key=lambda event: event["at"]))

    def all(self, *kinds: str) -> Iterator[Event]:
        """Those of the run and of its services; their engines and targets are named SERVICE/NAME."""
        for kind in kinds:
            yield from self._kept[kind]
            yield from self._of_services[kind]


def _with_service(event: Mapping[str, Any], service: str) -> Event:
    """An engine of a service calls itself SERVICE-NAME; here it is SERVICE/NAME, as its process."""
    names = (key for key in ("engine", "target") if key in event)
    return {**event, **{key: f"{service}/{str(event[key]).removeprefix(f'{service}-')}" for key in names}}
