"""Which pages of the KV cache are in use, and what the others still hold. No tensors here.

    take ──► in use (one reference per request) ──give──► idle: contents kept, least recently used first
      ▲                       ▲                             │
      └──────── evict ────────┼─────────────────────────────┤
                              └── hold: found by content ───┘     a page without useful contents is free

A page is found by content: its key is a hash chain over the policy and all tokens up to its end. So who finds a page
finds keys and values that exactly this policy computed for exactly these tokens. Many requests may hold a full page;
it is not written again. A page that is not full is copied by whoever finds it.

A session also finds the pages of its last turn, whatever policy wrote them: its next turn goes on with them. Other
sessions never take keys and values of an older policy.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from rollmill.types import PolicyRef


@functools.lru_cache(16)
def root_key(policy: PolicyRef) -> bytes:
    """The parent key of a context's first page."""
    return blake2b(repr(policy).encode(), digest_size=16).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """A cryptographic hash: no client can make a context that finds the pages of another one."""
    return key_of_bytes(parent, token_bytes(tokens))


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Four bytes per token."""
    return array("i", tokens).tobytes()


def key_of_bytes(parent: bytes, tokens: bytes) -> bytes:
    """`page_key` for tokens that are bytes already: a long prompt is converted once."""
    return blake2b(parent + tokens, digest_size=16).digest()


@dataclass
class KeptContext:
    """What a finished turn leaves to the next turn of its session. `stamps` tell whether pages still hold it."""

    tokens: list[int]
    blocks: list[int]
    stamps: np.ndarray
    oldest: PolicyRef | None  # the oldest weights that wrote keys or values here


class Pages:
    def __init__(self, count: int, block_size: int) -> None:
        self.size, self.block_size = count, block_size
        self._free = list(range(count))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = np.zeros(count, np.int32)
        self._stamps = np.zeros(count, np.int64)  # changes when a page gets other contents
        self._keys: list[list[bytes]] = [[] for _ in range(count)]  # of each page: one per length that was named
        self._index: dict[bytes, int] = {}
        # of pages that are not full: key → (key of the page before, length), and for that key how many have a length
        self._parts: dict[bytes, tuple[bytes, int]] = {}
        self._lengths: dict[bytes, Counter[int]] = {}
        self._sessions: OrderedDict[str, KeptContext] = OrderedDict()
        self._condemned: set[int] = set()
        self.unclean: list[int] = []  # condemned pages without a reference: zero them, then call `cleaned`

    @property
    def available(self) -> int:
        """Pages that no request holds."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that no request holds, and whose contents can be found."""
        return len(self._idle)

    def take(self, count: int) -> list[int]:
        """Pages for new contents. Evicts idle pages, least recently used first."""
        assert count <= self.available, "room is made before pages are taken"
        if not count:
            return []
        free = self._free
        pages = [free.pop() if free else self._evict() for _ in range(count)]
        index = np.array(pages)
        self._references[index] = 1
        self._stamps[index] += 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """`pages` are different pages."""
        if not pages:
            return
        index = np.array(pages)
        self._references[index] = counts = self._references[index] + 1
        for page in index[counts == 1].tolist():
            del self._idle[page]

    def give(self, pages: Sequence[int], *, keep: bool = False) -> None:
        """Gives references to different pages back. A page without a reference becomes idle if it can be found by
        content, or with `keep`. The last of `pages` is evicted first: the start of a context serves more requests than
        its end."""
        if not pages:
            return
        last_first = np.array(pages)[::-1]
        self._references[last_first] = counts = self._references[last_first] - 1
        left = last_first[counts == 0].tolist()
        if keep and not self._condemned:
            self._idle.update(dict.fromkeys(left))
            return
        for page in left:
            if page in self._condemned:
                self.unclean.append(page)
            elif keep or self._keys[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def in_use(self, page: int) -> bool:
        return bool(self._references[page] > 0)

    def is_shared(self, page: int) -> bool:
        return bool(self._references[page] > 1)

    def find(self, key: bytes) -> int | None:
        return self._index.get(key)

    def find_first(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of `keys`, up to the first one that is not found."""
        get, pages = self._index.get, []
        for key in keys:
            if (page := get(key)) is None:
                break
            pages.append(page)
        return pages

    def name(self, page: int, key: bytes, part: tuple[bytes, int] | None = None) -> None:
        """From now on, `find(key)` returns the page. Of two pages with equal contents the first keeps its name. `part`
        is the key of the page before and the length, for a page that is not full."""
        if key not in self._index and page not in self._condemned:
            self._index[key] = page
            self._keys[page].append(key)
            if part is not None:
                self._parts[key] = part
                self._lengths.setdefault(part[0], Counter())[part[1]] += 1

    def part_lengths(self, parent: bytes) -> list[int]:
        """The lengths of the pages after `parent` that are not full, longest first."""
        return sorted(self._lengths.get(parent, ()), reverse=True)

    def keep(self, session: str, tokens: list[int], blocks: list[int], oldest: PolicyRef | None) -> None:
        """Remembers the context of a session's finished turn. Its pages may be evicted at any time."""
        self._sessions[session] = KeptContext(tokens, blocks, self._stamps[blocks], oldest)
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.size:
            self._sessions.popitem(last=False)

    def claim(self, session: str, tokens: list[int]) -> KeptContext | None:
        """Forgets the session's last context, and returns what is left of it if `tokens` extends it exactly."""
        context = self._sessions.pop(session, None)
        if context is None or len(context.tokens) >= len(tokens) or tokens[: len(context.tokens)] != context.tokens:
            return None
        valid = 0
        for block, same in zip(context.blocks, self._stamps[context.blocks] == context.stamps, strict=True):
            if not same or block in self._condemned:
                break
            valid += 1
        if not valid:
            return None
        tokens = context.tokens[: valid * self.block_size]
        return KeptContext(tokens, context.blocks[:valid], context.stamps[:valid], context.oldest)

    def forget_sessions(self) -> None:
        """From now on, only pages of the same policy are found."""
        self._sessions.clear()

    def condemn(self, pages: Sequence[int]) -> None:
        """Their contents are bad (NaN): they are not found any more, and they are zeroed before they are used again."""
        self._condemned.update(pages)
        for page in pages:
            self._unname(page)

    def cleaned(self) -> None:
        self._free += self.unclean
        self._condemned.difference_update(self.unclean)
        self.unclean = []

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._unname(page)
        return page

    def _unname(self, page: int) -> None:
        for key in self._keys[page]:
            del self._index[key]
            if key in self._parts:
                parent, length = self._parts.pop(key)
                self._lengths[parent][length] -= 1
                self._lengths[parent] += Counter()  # without zeros
                if not self._lengths[parent]:
                    del self._lengths[parent]
        self._keys[page] = []


class PageRoutes:
    """The expert routes of the positions in each page, so that a request that finds a page can report them.

    One byte (or two) per position, layer and chosen expert, on the host: 480 bytes per position for 60 layers of 8.
    """

    def __init__(self, pages: int, block_size: int) -> None:
        self._shape = (pages, block_size)
        self._rows: np.ndarray | None = None  # of a dense model nothing is stored

    def write(self, pages_N: np.ndarray, offsets_N: np.ndarray, routes: np.ndarray) -> None:
        if self._rows is None:  # zeros: memory is used only for pages that are written
            self._rows = np.zeros((*self._shape, *routes.shape[1:]), routes.dtype)
        self._rows[pages_N, offsets_N] = routes

    def read(self, blocks: Sequence[int], count: int) -> np.ndarray | None:
        """The routes of the first `count` positions in `blocks`."""
        if self._rows is None:
            return None
        rows = self._rows[list(blocks)]
        return rows.reshape(-1, *rows.shape[2:])[:count]

    def copy(self, source: int, target: int) -> None:
        if self._rows is not None:
            self._rows[target] = self._rows[source]
