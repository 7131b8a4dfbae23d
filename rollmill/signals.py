"""What users did with an answer, reported to the gateway: the client for products. It needs nothing but Python.

    signals = Signals("http://127.0.0.1:8000", key)
    answer = client.chat.completions.create(…).model_dump()
    signals.accepted(answer)
    signals.edited(answer, survived=0.8)

A signal is about one answer: the field `rollmill` of an answer names it, so tokens and weights that it is about are
known exactly. The name of a session will do too. Signals may come days later. Each has an id, so that a signal that is
sent again after a lost reply counts once.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any

from rollmill.backoff import Backoff
from rollmill.errors import GatewayError

# kind → (least value, greatest value, what the value means)
KINDS: Mapping[str, tuple[float, float, str]] = {
    "accepted": (0.0, 1.0, "1: the user took the answer; 0: the user dismissed it"),
    "edited": (0.0, 1.0, "the share of the answer that survived the user's edits"),
    "reverted": (0.0, 1.0, "1: the user undid the change"),
    "retried": (0.0, 1.0, "1: the user asked again for the same thing"),
    "sentiment": (-1.0, 1.0, "how satisfied the user's next message sounds"),
    "thumbs": (-1.0, 1.0, "1: thumb up; -1: thumb down"),
    "latency": (0.0, 86400.0, "seconds that the user waited"),
    "task": (0.0, 0.0, "no value: `label` says what kind of task it was"),
    "kept": (0.0, 0.0, "no value: `label` names the change that the user kept, as two commits: BASE..COMMIT"),
}
KEPT = re.compile(r"(?P<base>[0-9a-f]{40})\.\.(?P<commit>[0-9a-f]{40})")  # the label of `kept`
_ATTEMPTS = 3
_RETRIED = (429, 500, 502, 503, 504)
About = str | Mapping[str, Any]  # the name of a session, an answer, or the field `rollmill` of an answer


class Signals:
    """Reports signals to the gateway at `url`. `key` is an API key with the scope feedback that asked for the answer.
    Safe to use from several threads."""

    def __init__(self, url: str, key: str, *, timeout_s: float = 5.0) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/feedback"
        self._key = key
        self._timeout_s = timeout_s

    def accepted(self, about: About, accepted: bool = True) -> None:
        self.send(about, "accepted", float(accepted))

    def edited(self, about: About, survived: float) -> None:
        """`survived`: the share of the answer, from 0 to 1, that is left after the user's edits."""
        self.send(about, "edited", survived)

    def reverted(self, about: About) -> None:
        self.send(about, "reverted", 1.0)

    def retried(self, about: About) -> None:
        self.send(about, "retried", 1.0)

    def sentiment(self, about: About, value: float) -> None:
        """`value`: from -1 (dissatisfied) to 1."""
        self.send(about, "sentiment", value)

    def thumbs(self, about: About, up: bool) -> None:
        self.send(about, "thumbs", 1.0 if up else -1.0)

    def latency(self, about: About, seconds: float) -> None:
        self.send(about, "latency", seconds)

    def task(self, about: About, kind: str) -> None:
        """What kind of task it was, such as `edit` or `question`: rewards are compared within a kind."""
        self.send(about, "task", None, label=kind)

    def kept(self, about: About, base: str, commit: str) -> None:
        """The user kept the change of a repository from commit `base`, which the agent began with, to `commit`. Both
        are full names. `rollmill tasks make --from-sessions` makes a task of it."""
        self.send(about, "kept", None, label=f"{base}..{commit}")

    def send(
        self, about: About, kind: str, value: float | None, *, label: str | None = None, id: str | None = None
    ) -> int | None:
        """Returns the number of the feedback; None if it waits for the first answer of its session. GatewayError if
        the gateway refuses it, or after three attempts."""
        body: dict[str, Any] = {**_named(about), "kind": kind, "id": id or uuid.uuid4().hex}
        body |= {} if value is None else {"value": checked(kind, value)}
        body |= {} if label is None else {"label": label}
        backoff = Backoff(0.4, 2.0)
        while True:
            try:
                return self._post(body)
            except GatewayError as error:
                pause = backoff.failed()
                if backoff.failures == _ATTEMPTS or error.status not in _RETRIED:
                    raise
            time.sleep(pause)

    def _post(self, body: dict[str, Any]) -> int | None:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:  # noqa: S310
                number = json.loads(response.read())["feedback"]
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(2000).decode(errors="replace")
            raise GatewayError(f"{self._url} answered {error.code}: {said}", status=error.code) from None
        except OSError as error:
            raise GatewayError(f"{self._url} cannot be reached: {error}", status=503) from None
        return None if number is None else int(number)


def _named(about: About) -> dict[str, str]:
    """The answer that is meant, or the session."""
    if isinstance(about, str):
        return {"session": about}
    record = about.get("rollmill", about)
    answers = record.get("answers") if isinstance(record, Mapping) else None
    if isinstance(answers, list) and answers:
        return {"answer": str(answers[0])}
    raise ValueError("what the signal is about has no field `rollmill`: give a whole answer, or the name of a session")


def checked(kind: str, value: float) -> float:
    """The value of a signal. ValueError if no signal of this kind can have it."""
    low, high, meaning = KINDS.get(kind, (-1e6, 1e6, ""))
    if not low <= value <= high:
        raise ValueError(f"{kind} is {value}, not between {low:g} and {high:g}: {meaning}")
    return float(value)
