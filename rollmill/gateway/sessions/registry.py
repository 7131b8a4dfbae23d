"""All open sessions. A request finds its session by its key; in production by the name it sends, under its key.

A production request without a name continues a conversation only if its history, up to an answer of the model, is that
of exactly one conversation of its key and user. Otherwise it starts a new one: two users with the same opening do not
share a trajectory. If clients send a `prompt_cache_key`, conversations with other keys are not looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollmill.chat.format import Message
from rollmill.gateway.access.keys import SESSION_KEY
from rollmill.gateway.sessions.segments import OpenSegment, Turn
from rollmill.gateway.sessions.sessions import Session, SessionFacts, check_id
from rollmill.gateway.sessions.stored import StoredResponses
from rollmill.gateway.wire.body import to_bytes
from rollmill.trajectories.table_rows import consent_of

LIVE = "live-"  # the ids of production sessions that no one opened: requests began them
_MOST_HISTORIES = 200_000  # digests of conversations, about 40 MB; the oldest are forgotten
_PRODUCTION = "production"  # id of the run's own production key


class Registry:
    """Session keys derive from the admin token: opening a session twice gives the same key, even after a crash, and no
    secret is stored."""

    def __init__(
        self,
        admin_token: str,
        *,
        fresh: Callable[[str], str] = lambda prefix: prefix + uuid.uuid4().hex,
        run: str | None = None,
    ) -> None:
        """`fresh` makes a new id with a prefix. `run`: the id of the run whose production this is."""
        self._of_run = {"run": run} if run is not None else {}
        self.fresh = fresh
        self._secret = admin_token.encode()
        self._sessions: dict[str, Session] = {}
        self.responses = StoredResponses(self._sessions)
        self.opened: Callable[[Session], None] = lambda session: None  # is called with each new session
        self._named: dict[tuple[str, ...], str] = {}  # key, consent, user, the client's name -> trajectory
        self._alike: dict[tuple[str, str], list[tuple[str, ...]]] = {}  # key, name -> those of the above, latest last
        # digest of an unnamed conversation up to an answer -> trajectory; None if there are several. Ended ones count:
        # the user who continues may be theirs
        self._histories: OrderedDict[bytes, str | None] = OrderedDict()
        self.ambiguous = 0  # requests whose history was that of several conversations

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def add(self, facts: SessionFacts) -> Session:
        check_id(facts.trajectory)
        session = self._sessions[facts.trajectory] = Session(facts)
        if facts.traffic == "production" and "session" in facts.provenance:
            name = _name(facts)
            if name not in self._named:
                self._alike.setdefault((name[0], name[-1]), []).append(name)
            self._named[name] = facts.trajectory
        self.opened(session)
        return session

    def get(self, trajectory: str) -> Session | None:
        return self._sessions.get(trajectory)

    def named(self, name: str, key_id: str) -> Session | None:
        """The open session to which a client with this key gave the name."""
        alike = self._alike.get((key_id, name))
        return self._sessions.get(self._named[alike[-1]]) if alike else None

    def remove(self, session: Session) -> None:
        trajectory, name = session.facts.trajectory, _name(session.facts)
        if self._sessions.get(trajectory) is session:
            del self._sessions[trajectory]
            self.responses.forget(trajectory)
        if self._named.get(name) == trajectory:
            del self._named[name]
            alike = self._alike[name[0], name[-1]]
            alike.remove(name)
            if not alike:
                del self._alike[name[0], name[-1]]

    def key(self, trajectory: str) -> str:
        proof = hmac.new(self._secret, f"session {trajectory}".encode(), hashlib.sha256).hexdigest()[:40]
        return f"{SESSION_KEY}{trajectory}-{proof}"

    def by_key(self, key: str) -> Session | None:
        """The open session of a key. A key becomes invalid when its session is sealed or given up."""
        session = self._sessions.get(session_in(key) or "")
        return session if session is not None and self.is_key(key) else None

    def is_key(self, key: str) -> bool:
        """Whether it is the key of a session, open or not."""
        trajectory = session_in(key)
        if trajectory is None:
            return False
        return hmac.compare_digest(self.key(trajectory).encode(errors="replace"), key.encode(errors="replace"))

    def production(
        self,
        name: str | None,
        user: str,
        messages: Sequence[Message],
        *,
        key_id: str,
        consent: str = "store",
        cache_key: str = "",
    ) -> Session:
        """The conversation that the client names, or the only one that these messages continue, or a new one."""
        provenance = self._provenance(key_id, user, consent)
        if name is not None:
            provenance["session"] = check_id(name)
            trajectory: str | None = self._named.get((*_owner(provenance), name), name)
        else:
            trajectory = self._continued(_owner(provenance), messages, cache_key)
        session = self._live(trajectory, provenance)
        session.cache_key = session.cache_key or cache_key
        return session

    def _continued(self, owner: tuple[str, ...], messages: Sequence[Message], cache_key: str) -> str | None:
        for digest in reversed(list(_digests(owner, messages))):
            known = [each for each in (_keyed(digest, cache_key), digest) if each in self._histories]
            if not known:
                continue
            trajectory = self._histories[known[0]]
            session = self._sessions.get(trajectory or "")
            if known[0] == digest and cache_key and session is not None and session.cache_key:
                continue  # of another cache key
            self.ambiguous += trajectory is None
            return trajectory
        return None

    def owns(self, session: Session, *, key_id: str, user: str, consent: str) -> bool:
        """Whether a request of this key, user and consent may continue the conversation."""
        return _owner(session.facts.provenance) == _owner(self._provenance(key_id, user, consent))

    def _provenance(self, key_id: str, user: str, consent: str) -> dict[str, Any]:
        of_user = {"user": pseudonym(self._secret, user)} if user else {}
        return {"key": key_id, **self._of_run, **of_user, "consent": consent}

    def successor(self, session: Session) -> Session:
        """The session in which a production conversation continues after its own has ended."""
        return self._live(self._named.get(_name(session.facts)), session.facts.provenance)

    def is_open(self, session: Session) -> bool:
        """Whether the session accepts turns: it is neither sealed nor given up."""
        return not session.closed and self._sessions.get(session.facts.trajectory) is session

    def _live(self, trajectory: str | None, provenance: dict[str, Any]) -> Session:
        session = self._sessions.get(trajectory) if trajectory is not None else None
        mine = session is not None and _owner(session.facts.provenance) == _owner(provenance)
        production = session is not None and session.facts.traffic == "production"
        if session is not None and mine and production and self.is_open(session) and not session.ending:
            session.used_at = time.time()  # no longer idle, so it is not sealed now
            return session
        return self.add(SessionFacts(self.fresh(LIVE), "production", run="production", provenance=provenance))

    def append(self, session: Session, turn: Turn) -> OpenSegment:
        """Adds a recorded turn to its session. From now on an unnamed conversation can be found by it."""
        segment = session.append(turn)
        turn.answer.routes = []  # the log has them: see recording/expert_routes.py
        facts = session.facts
        unnamed = facts.traffic == "production" and "session" not in facts.provenance
        if unnamed and self.is_open(session):
            plain = _extended_digest(_owner(facts.provenance), segment)
            for digest in {plain, _keyed(plain, session.cache_key)}:
                known = self._histories.setdefault(digest, facts.trajectory)
                self._histories[digest] = facts.trajectory if known == facts.trajectory else None
            while len(self._histories) > _MOST_HISTORIES:
                self._histories.popitem(last=False)
        return segment


def session_in(key: str) -> str | None:
    """The session that a key says it belongs to; None if it is no key of a session."""
    return key.removeprefix(SESSION_KEY).rpartition("-")[0] or None if key.startswith(SESSION_KEY) else None


def key_id_of(provenance: Mapping[str, Any]) -> str:
    """The id of the key that owns a production session."""
    return str(provenance.get("key", _PRODUCTION))


def _owner(provenance: Mapping[str, Any]) -> tuple[str, str, str]:
    """Key, consent and user of a conversation. A request in which one of them is another continues another one: what a
    user said can be found, and is kept as they agreed."""
    return key_id_of(provenance), consent_of(provenance), str(provenance.get("user", ""))


def _name(facts: SessionFacts) -> tuple[str, ...]:
    return (*_owner(facts.provenance), str(facts.provenance.get("session")))


def pseudonym(secret: bytes, user: str) -> str:
    """A pseudonym of the user: the same user always has the same one. The name is not stored, and who does not have the
    secret cannot try names."""
    return hmac.new(secret, b"user " + user.encode(errors="replace"), hashlib.sha256).hexdigest()[:32]


def _digests(owner: tuple[str, ...], messages: Sequence[Message]) -> Iterator[bytes]:
    """One digest per answer, of the conversation up to it. Clients re-format answers, see `same_message`."""
    running = _start_digest(owner)
    for message in messages:
        running.update(_digestible(message))
        if message["role"] == "assistant":
            yield running.digest()


def _extended_digest(owner: tuple[str, ...], segment: OpenSegment) -> bytes:
    """The last of `_digests` of a segment. Reads only the messages that are new since the last call."""
    count, running = segment.digested or (0, _start_digest(owner))
    for message in segment.messages[count:]:
        running.update(_digestible(message))
    segment.digested = len(segment.messages), running
    return running.digest()


def _keyed(digest: bytes, cache_key: str) -> bytes:
    """The digest of a conversation whose client sends this cache key."""
    return (
        hashlib.blake2b(digest + cache_key.encode(errors="replace"), digest_size=16).digest() if cache_key else digest
    )


def _start_digest(owner: tuple[str, ...]) -> hashlib.blake2b:
    return hashlib.blake2b(json.dumps(owner).encode(), digest_size=16)


def _digestible(message: Message) -> bytes:
    content = message["content"] or ""
    if message["role"] != "assistant":
        return to_bytes([message["role"], content])
    calls = [_canonical(call["function"]) for call in message.get("tool_calls") or ()]
    return to_bytes(["assistant", content.strip(), calls])


def _canonical(function: dict[str, str]) -> list[str]:
    try:
        return [function["name"], json.dumps(json.loads(function["arguments"]), sort_keys=True)]
    except (ValueError, RecursionError):
        return [function["name"], function["arguments"]]
