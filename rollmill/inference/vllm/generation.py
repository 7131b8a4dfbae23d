"""One request to a vLLM engine: what the server is asked, and the facts about its tokens that are not sent yet."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollmill.inference.engine import GenerateChunk
from rollmill.inference.open_request import OpenRequest
from rollmill.trajectories.allowed_tokens import encode_kept
from rollmill.types import FinishReason, PolicyRef, Sampling

MOST_LOGPROBS = 20  # the server tells the log-probs of at most this many tokens beside the sampled one
UNKNOWN_CUT = "vLLM does not tell which tokens a cut kept"
UNKNOWN_PENALTY = "penalties counted only a part of the answer"
_SEEDS = 2**63
_STRIDE = 0x9E3779B97F4A7C15  # odd: legs that begin at other positions have other seeds


class TokenSample(NamedTuple):
    """One token as the server tells it."""

    token: int
    logprob: float
    best: list[tuple[int, float]]  # the most likely tokens, under the distribution that was sampled from


@dataclass(eq=False)
class Generation(OpenRequest):
    vocab_size: int
    _oldest: PolicyRef | None = None
    _fresh: list[tuple[TokenSample, PolicyRef, bytes]] = field(default_factory=list)
    _missing: str = ""

    @property
    def answered(self) -> int:
        """Tokens of the answer that are in the context already."""
        return len(self.tokens) - len(self.request.tokens) + self.request.answered

    @property
    def top_count(self) -> int:
        """How many of the most likely tokens the server is asked for. Top-k needs all that it keeps."""
        sampling = self.request.sampling
        top_k = sampling.top_k if sampling.cuts and sampling.top_k <= MOST_LOGPROBS else 0
        return max(self.request.top_logprobs, top_k)

    def parameters(self) -> dict[str, Any]:
        """vLLM's sampling parameters for the rest of the answer."""
        sampling = self.request.sampling
        parameters: dict[str, Any] = {
            "max_tokens": self.limit - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_tokens),
            "ignore_eos": True,  # the request names its stop tokens
            "detokenize": False,
            "logprobs": self.top_count + 1 if self.top_count else 0,  # the sampled token takes one of the places
        }
        if sampling.logit_bias:
            parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.seed is not None:
            parameters["seed"] = (sampling.seed + _STRIDE * self.answered) % _SEEDS
        return parameters

    def start(self) -> None:
        """A leg begins."""
        super().start()
        sampling = self.request.sampling
        if self.answered and (sampling.presence_penalty or sampling.frequency_penalty):
            self._missing = UNKNOWN_PENALTY  # for the server these tokens belong to the prompt

    def add(self, sampled: TokenSample, policy: PolicyRef) -> None:
        self.tokens.append(sampled.token)
        self._oldest = self._oldest or policy
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        kept = b""
        if self.request.sampling.cuts:
            kept = kept_tokens(self.request.sampling, sampled, self.vocab_size)
            if not kept:
                self._missing = UNKNOWN_CUT
        self._fresh.append((sampled, policy, kept))

    def chunk(self, finish: FinishReason | None = None) -> GenerateChunk:
        """A chunk with everything not sent yet."""
        policies = list(dict.fromkeys(policy for _, policy, _ in self._fresh))
        chunk = GenerateChunk(
            tokens=[sampled.token for sampled, _, _ in self._fresh],
            logprobs=[sampled.logprob for sampled, _, _ in self._fresh],
            policy=[policies.index(policy) for _, policy, _ in self._fresh],
            policies=policies,
            kept=[kept for *_, kept in self._fresh] if self.request.sampling.cuts and not self._missing else [],
            missing=self._missing,
            finish=finish,
        )
        if self.request.top_logprobs:
            chunk.top_logprobs = [sampled.best[: self.request.top_logprobs] for sampled, _, _ in self._fresh]
        if finish is not None:
            chunk.oldest_kv_policy, chunk.cached_tokens = self._oldest, self.cached_tokens
            chunk.timing = self._timing()
        self._fresh = []
        self.sent_at = time.monotonic()
        return chunk


def kept_tokens(sampling: Sampling, sampled: TokenSample, vocab_size: int) -> bytes:
    """The set of tokens that could be drawn (trajectories/allowed_tokens.py); b"" if the server does not tell all of
    them."""
    if not 0 < sampling.top_k <= MOST_LOGPROBS:
        return b""
    likely = dict(sampled.best) | {sampled.token: sampled.logprob}
    ids = [token for token, logprob in likely.items() if logprob > -1000]  # excluded ones have -inf
    if abs(sum(math.exp(likely[token]) for token in ids) - 1) > 1e-3:
        return b""
    bits = np.zeros(-(-vocab_size // 8) * 8, np.uint8)
    bits[ids] = 1
    return encode_kept(np.packbits(bits, bitorder="little"))
