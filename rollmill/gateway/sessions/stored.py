"""Stored responses of OpenAI's responses format: what `previous_response_id` continues and GET /v1/responses/ID shows.

They live as long as the open session they belong to: in memory, and in its log, from which a restarted gateway reads
them again. The log has the response without the conversation, which the turns have. After the session has ended, an id
is unknown, and a client sends its items again. What the model sampled is in the record in any case.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Container
from typing import Any

from rollmill.errors import GatewayError
from rollmill.gateway.wire.dialect import Stored

_MOST_BYTES = 256 << 20  # of all responses; the oldest are forgotten


class StoredResponses:
    """`sessions` contains the ids of the open sessions."""

    def __init__(self, sessions: Container[str]) -> None:
        self._sessions = sessions
        # id -> trajectory, JSON of the conversation, JSON of the response
        self._stored: OrderedDict[str, tuple[str, bytes, bytes]] = OrderedDict()
        self._ids: dict[str, str] = {}  # the end of an id, which the ids of its items contain -> the id
        self._of_session: dict[str, set[str]] = {}
        self.bytes = 0

    def add(self, stored: Stored) -> None:
        if stored.trajectory not in self._sessions:
            return
        id = str(stored.body["id"])
        if id in self._stored:
            self._drop(id)
        messages, body = json.dumps(stored.messages).encode(), json.dumps(stored.body).encode()
        self._stored[id] = stored.trajectory, messages, body
        self._ids[_end(id)] = id
        self._of_session.setdefault(stored.trajectory, set()).add(id)
        self.bytes += len(messages) + len(body)
        while self.bytes > _MOST_BYTES:
            self._drop(next(iter(self._stored)))

    def get(self, id: str) -> Stored:
        if id not in self._stored:
            raise no_such_response()
        trajectory, messages, body = self._stored[id]
        return Stored(trajectory, json.loads(messages), json.loads(body))

    def with_item(self, item: str) -> tuple[str, dict[str, Any]]:
        """The trajectory and the body of the response that has an item of this id."""
        id = self._ids.get(item.partition("_")[2].partition("_")[0])
        if id is None:
            raise no_such_item(item)
        trajectory, _, body = self._stored[id]
        return trajectory, json.loads(body)

    def forget(self, trajectory: str) -> None:
        """The session has ended."""
        for id in list(self._of_session.get(trajectory, ())):
            self._drop(id)

    def _drop(self, id: str) -> None:
        trajectory, messages, body = self._stored.pop(id)
        self._ids.pop(_end(id), None)
        self.bytes -= len(messages) + len(body)
        self._of_session[trajectory].discard(id)
        if not self._of_session[trajectory]:
            del self._of_session[trajectory]


def _end(id: str) -> str:
    return id.rpartition("_")[2]


def no_such_item(item: str) -> GatewayError:
    return GatewayError(
        f"there is no stored item {item[:80]!r}",
        status=404,
        hint="items are kept while their session is open; with store = false clients send them whole",
    )


def no_such_response() -> GatewayError:
    return GatewayError(
        "there is no stored response of this id",
        status=404,
        hint="responses are kept while their session is open; send the items again",
        code="previous_response_not_found",
    )
