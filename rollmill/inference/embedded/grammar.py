"""Answers that follow a grammar: before each draw, tokens that the grammar does not allow get probability zero.

The masks are computed by llguidance on the CPU, from the grammar's text and the tokens of the answer so far. So a mask
can be computed again from the record: it depends on `Sampling.grammar` and on the tokens alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
import torch
from torch import Tensor

from rollmill.errors import EngineError
from rollmill.inference.embedded.grammar_check import LIMITS, GrammarCheck

_COMPILED = 32  # grammars kept


class Grammars:
    """Starts grammars for one tokenizer. `vocab_size` is that of the model, whose head may be wider."""

    def __init__(self, tokenizer: Path, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._by_end: dict[int, llguidance.LLTokenizer] = {}
        self._compiled: dict[tuple[int, str], llguidance.LLMatcher] = {}
        self._lock = threading.Lock()  # requests start in threads
        self.check = GrammarCheck()

    def start(self, grammar: str, end: int, sampled: Sequence[int]) -> GrammarState:
        """The state after the tokens `sampled`. `end` is the token that ends an answer. Raises EngineError. A grammar
        that a client sent has to pass `check` first."""
        compiled = self._compiled.get((end, grammar)) or self._compile(grammar, end)
        with self._lock:
            self._compiled[end, grammar] = compiled
            if len(self._compiled) > _COMPILED:
                del self._compiled[next(iter(self._compiled))]
            state = GrammarState(compiled.deep_copy(), self._vocab_size, end)
        for token in sampled:
            state.accept(token)
        return state

    def _compile(self, grammar: str, end: int) -> llguidance.LLMatcher:
        if end not in self._by_end:
            text = self._tokenizer.read_text(encoding="utf-8")
            self._by_end[end] = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=end)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._by_end[end], grammar, log_level=0, limits=limits)
        problem = matcher.get_error()
        if problem:
            raise EngineError(f"the grammar cannot be used: {problem[:300]}")
        return matcher


class GrammarState:
    """How far an answer has got in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end: int) -> None:
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._bits = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def allowed(self) -> np.ndarray:
        """bool [vocab]. If the grammar cannot go on, the answer ends."""
        if not self._matcher.is_error() and not self._matcher.is_stopped():
            llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
            allowed = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)
            if allowed.any():
                return allowed
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[self._end] = True
        return allowed

    def accept(self, token: int) -> None:
        if token != self._end and not self._matcher.is_stopped():
            self._matcher.consume_token(token)


def apply_masks(logits_MV: Tensor, states: Sequence[GrammarState | None]) -> Tensor:
    """Logits with -inf for tokens that are not allowed. Rows without a grammar keep their bits."""
    rows = [row for row, state in enumerate(states) if state is not None]
    if not rows:
        return logits_MV
    allowed_RV = np.stack([state.allowed() for state in states if state is not None])
    masked_MV = logits_MV.clone()
    masked_MV[rows] = logits_MV[rows].masked_fill(~torch.from_numpy(allowed_RV).to(logits_MV.device), -torch.inf)
    return masked_MV
