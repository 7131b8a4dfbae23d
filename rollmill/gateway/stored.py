"""Stored responses of OpenAI's responses format: what `previous_response_id` continues and GET /v1/responses/ID shows.

They live in memory, with the open session they belong to. After the session has ended, or the gateway has restarted,
an id is unknown, and a client sends its items again. What the model sampled is in the record in any case.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from rollmill.chat.format import Message
from rollmill.errors import GatewayError

_MOST = 10_000


@dataclass(frozen=True)
class Stored:
    trajectory: str
    messages: list[Message]  # the conversation with the answer, without instructions
    body: dict[str, Any]


class StoredResponses:
    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def add(self, id: str, stored: Stored) -> None:
        self._stored[id] = stored
        if len(self._stored) > _MOST:
            self._stored.popitem(last=False)

    def get(self, id: str) -> Stored:
        stored = self._stored.get(id)
        if stored is None:
            raise no_such_response()
        return stored


def no_such_response() -> GatewayError:
    return GatewayError(
        "there is no stored response of this id",
        status=404,
        hint="responses are kept while their session is open; send the items again",
        code="previous_response_not_found",
    )
