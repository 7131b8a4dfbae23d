"""Compiles a grammar in a child process first. Schemas come from clients, llguidance does not bound what one costs (two
hundred patterns in `allOf` take minutes), and a thread cannot be stopped.

Checks take turns of TURN seconds, each within SECONDS of processor time: a cheap grammar does not wait for the costly
ones before it. Children run at low priority, beside requests without a grammar. Requests with the same grammar share
its check, which ends when none of them waits any more. A verdict is kept, so a grammar that is sent again is not
compiled again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmill.errors import EngineError
from rollmill.inference.engine import EngineUnavailable

MOST_CHECKS = 8  # at a time; further grammars are refused until one is decided
TURN = 0.25  # seconds
SECONDS, BYTES = 2, 1 << 30  # processor time and memory of a compilation
LARGEST = 256 << 10  # characters of a grammar
# What a mask may cost while tokens are sampled, in the units of llguidance: tens of milliseconds
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
_REMEMBERED = 1024
# It has the module path of this process: `-I` alone would not see packages on PYTHONPATH. What it says first tells a
# child that could not start from a grammar that costs too much.
_CHILD = """
import json, os, resource, sys
os.nice(5)
seconds, size, limits, sys.path = json.loads(sys.argv[1])
import llguidance
print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
llguidance.LLMatcher.validate_grammar(sys.stdin.read(), limits=llguidance.LLParserLimits(**limits))
"""


@dataclass
class _Check:
    verdict: asyncio.Task[bool]
    waiting: int = 0  # requests


class GrammarCheck:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # first come, first served
        self._checks: dict[bytes, _Check] = {}  # by digest of the grammar
        self._affordable: dict[bytes, bool] = {}  # by digest

    async def __call__(self, grammar: str) -> None:
        """Raises EngineError for a grammar that costs too much. One that is wrong passes: compiling it says why."""
        if len(grammar) > LARGEST:
            raise _refused(grammar, f"it has {len(grammar):,} characters, more than {LARGEST:,}")
        key = hashlib.sha256(grammar.encode(errors="replace")).digest()
        affordable = self._affordable.get(key)
        if affordable is None:
            affordable = await self._decide(key, grammar)
        if not affordable:
            raise _refused(grammar, f"compiling it takes more than {SECONDS} s of processor time or {BYTES >> 30} GiB")

    async def _decide(self, key: bytes, grammar: str) -> bool:
        if key not in self._checks:
            if len(self._checks) >= MOST_CHECKS:
                raise EngineUnavailable(f"{MOST_CHECKS} grammars are being checked", hint="try again in some seconds")
            self._checks[key] = _Check(asyncio.create_task(_compiles(grammar, self._turn)))
        check = self._checks[key]
        check.waiting += 1
        try:
            affordable = self._affordable[key] = await asyncio.shield(check.verdict)
        finally:
            check.waiting -= 1
            if check.verdict.done() or not check.waiting:
                if self._checks.get(key) is check:
                    del self._checks[key]
                check.verdict.cancel()
                await asyncio.gather(check.verdict, return_exceptions=True)
        if len(self._affordable) > _REMEMBERED:
            del self._affordable[next(iter(self._affordable))]
        return affordable


async def _compiles(grammar: str, turn: asyncio.Lock) -> bool:
    """Whether a child compiles the grammar within its limits. It runs only while it has the turn."""
    limits = json.dumps([SECONDS, BYTES, LIMITS, sys.path])
    child: asyncio.subprocess.Process | None = None
    try:
        while True:
            async with turn:
                if child is None:
                    child = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", "-c", _CHILD, limits),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.DEVNULL,
                    )
                    printed = asyncio.create_task(child.communicate(grammar.encode(errors="replace")))
                else:
                    _signal(child, signal.SIGCONT)
                if (await asyncio.wait([printed], timeout=TURN))[0]:
                    break
                _signal(child, signal.SIGSTOP)
        ready, _ = await printed
        if not ready:
            raise EngineError(
                f"grammar: the process that checks it could not start (exit code {child.returncode})",
                hint="see that `python -c 'import llguidance'` works on this host, and that it has memory left",
            )
        return child.returncode == 0
    finally:
        if child is not None and child.returncode is None:
            _signal(child, signal.SIGKILL)
            await child.wait()


def _signal(child: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        child.send_signal(number)


def _refused(grammar: str, why: str) -> EngineError:
    parts = ", ".join(_heavy_parts(grammar))
    about = f" (most of it is in {parts})" if parts else ""
    return EngineError(
        f"the grammar is refused: {why}{about}",
        hint="use fewer or simpler patterns, repetitions and alternatives in the JSON schema",
    )


def _heavy_parts(grammar: str) -> Iterator[str]:
    """For each JSON schema in the grammar, the path down to where no child has most of the text."""
    for line in grammar.splitlines():
        _, found, text = line.partition("%json ")
        if not found:
            continue
        part, path = json.JSONDecoder().raw_decode(text)[0], "#"
        while isinstance(part, dict | list) and part:
            children: list[tuple[Any, Any]] = list(part.items() if isinstance(part, dict) else enumerate(part))
            key, largest = max(children, key=lambda child: len(json.dumps(child[1])))
            if len(json.dumps(largest)) * 2 < len(json.dumps(part)) and len(children) > 3:
                break
            part, path = largest, f"{path}/{key}"
        yield path
