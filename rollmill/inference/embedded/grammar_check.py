"""Compiles a grammar in a child process first. Schemas come from clients, llguidance does not bound what one costs (two
hundred patterns in `allOf` take minutes), and a thread cannot be stopped.

Checks run one at a time, each within SECONDS of processor time. A verdict is kept, so a grammar that is sent again is
not compiled again here. The child ends when its request is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from rollmill.errors import EngineError

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
import json, resource, sys
seconds, size, limits, sys.path = json.loads(sys.argv[1])
import llguidance
print("ready", flush=True)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
llguidance.LLMatcher.validate_grammar(sys.stdin.read(), limits=llguidance.LLParserLimits(**limits))
"""


class GrammarCheck:
    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)
        self._affordable: dict[bytes, bool] = {}  # by digest

    async def __call__(self, grammar: str) -> None:
        """Raises EngineError for a grammar that costs too much. One that is wrong passes: compiling it says why."""
        if len(grammar) > LARGEST:
            raise _refused(grammar, f"it has {len(grammar):,} characters, more than {LARGEST:,}")
        key = hashlib.sha256(grammar.encode(errors="replace")).digest()
        if key not in self._affordable:
            async with self._turn:
                if key not in self._affordable:
                    self._affordable[key] = await _compiles(grammar)
                    if len(self._affordable) > _REMEMBERED:
                        del self._affordable[next(iter(self._affordable))]
        if not self._affordable[key]:
            raise _refused(grammar, f"compiling it takes more than {SECONDS} s of processor time or {BYTES >> 30} GiB")


async def _compiles(grammar: str) -> bool:
    limits = json.dumps([SECONDS, BYTES, LIMITS, sys.path])
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", _CHILD, limits),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await child.communicate(grammar.encode(errors="replace"))
        if not said:
            raise EngineError(
                f"grammar: the process that checks it could not start (exit code {child.returncode})",
                hint="see that `python -c 'import llguidance'` works on this host, and that it has memory left",
            )
        return child.returncode == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


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
