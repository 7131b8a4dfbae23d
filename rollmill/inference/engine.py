"""The Engine serves tokens for one version at a time. Tokens in, tokens out; the gateway handles text.

The same contract over HTTP (`inference/server.py`) and in process (`inference/embedded`):

    POST /generate   GenerateRequest as JSON → newline-delimited JSON, one GenerateChunk per line, the last has `finish`
    GET  /health     {"engine", "region", "policy": {line, number, form, digest}, "running", "waiting", "paused",
                     "draining"}, and
                     "problem": why it is not at the newest weights, "lent": the line it is lent to,
                     "loan": how far that is, see `rollmill.inference.lent_engine`,
                     "serves": {"kind": line, channel or version, "name", "context": its longest context},
                     "capabilities": what its kind can do, see Capabilities
    GET  /metrics    counters as Prometheus text
    POST /pause, /resume
    POST /drain      finish what runs and waits, take nothing new (503) until /resume
    POST /hint       {"version": n}: look for new weights now
    POST /lend       {"line", "seconds", "notice_s"}: serve another line, keeping the own weights in memory
    POST /recall     serve the own line again

An engine started with a token answers 401 to every request without `Authorization: Bearer TOKEN`, except for /health
and /metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import Base64UrlBytes, Field

from rollmill.errors import EngineError
from rollmill.histogram import Histogram
from rollmill.trajectories.facts import STRICT, Int31, Natural, Routes
from rollmill.types import FinishReason, PolicyRef, Sampling, TrafficClass

if TYPE_CHECKING:
    from rollmill.inference.config import EngineConfig
    from rollmill.models.config import ModelConfig
    from rollmill.models.device import Device
    from rollmill.weights.reading.line_follower import Update

MOST_TOP_LOGPROBS = 20  # as OpenAI allows

# What `Engine.metrics` and `histograms` return, and what its process says about loans: name → meaning. Names that end
# in _total are counters, in _seconds histograms; the others are gauges.
METRICS = {
    "steps_total": "decode steps",
    "computed_tokens_total": "tokens computed, prompts included",
    "sampled_tokens_total": "tokens sampled",
    "draft_tokens_total": "tokens guessed from repeated text (`draft_tokens`)",
    "draft_tokens_right_total": "guessed tokens that were sampled",
    "applied_total": "switches of weights",
    "finished_stop_total": "answers that ended by themselves",
    "finished_length_total": "answers that reached their limit",
    "finished_abort_total": "answers whose client went away",
    "preemptions_total": "running requests sent back to wait, for production or for room in the KV cache",
    "running": "requests being decoded",
    "waiting": "requests waiting",
    "cache_blocks": "pages of the KV cache",
    "cache_blocks_free": "pages of the KV cache that no request holds",
    "cache_blocks_idle": "pages that no request holds, with contents that later requests may use",
    "prefix_hits_total": "requests that found a part of their context in the KV cache",
    "prefix_hit_tokens_total": "tokens of these parts",
    "version": "number of the version being served, -1 before the first",
    "paused": "1 while decoding is paused, else 0",
    "draining": "1 while no new request is taken, else 0",
    "refused_total": "requests refused because too many waited",
    "tokens_per_second": "tokens sampled per second in the last second with work, 0 without work",
    "first_token_seconds": "from the request to its first token",
    "between_tokens_seconds": "between two decode steps, once per sampled token",
    "pause_seconds": "a switch of weights without decoding",
    "lent": "1 while production lends the engine to training, else 0",
    "loans_total": "times that it was lent and served training's weights",
    "return_seconds": "from the recall of a lent engine to its own weights",
}


class EngineUnavailable(EngineError):
    """This engine cannot serve any request now. Another engine may."""


class EngineBusy(EngineUnavailable):
    """Too many requests are waiting. The engine may accept this one after `retry_seconds`."""

    def __init__(self, waiting: int, retry_seconds: int = 1) -> None:
        super().__init__(
            f"{waiting} requests wait already", hint="try again later, or raise the engine's `max_waiting`"
        )
        self.retry_seconds = retry_seconds


@dataclass
class GenerateRequest:
    """`tokens` is the whole context. The engine reuses the KV cache of the session's last turn if `tokens` extends it
    exactly, and of any request under the same policy as far as both begin alike.

    The random number for each token follows from `sampling.seed` and the token's position in the context alone. So the
    same request gives the same tokens, whatever else is in the batch, as far as logits do not depend on the batch; and
    another engine goes on with an interrupted generation as the first would have. Without a seed the engine draws one.
    """

    session: str
    tokens: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    traffic: TrafficClass = "rollout"
    min_version: Natural = 0  # wait until the served version number is at least this: how staleness 0 is kept
    line: str = ""  # the line whose versions are meant; an engine that serves another one refuses. "": any line
    answered: Natural = 0  # this many tokens at the end of `tokens` belong to the answer: where its grammar goes on
    # how many of the most likely tokens are returned for each sampled one
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0


@dataclass
class GenerateChunk:
    """Freshly sampled tokens. Indices in `policy` point into `policies` of the same chunk."""

    __pydantic_config__ = STRICT  # engine_wire.py reads and writes it

    tokens: list[Int31]
    logprobs: list[float]
    policy: list[Natural]
    policies: list[PolicyRef]
    # Expert routes of the positions since the previous chunk (of the prompt and sampled ones), computed or found in the
    # KV cache. Those of the session's last turn are not repeated. Row i is position routes_start + i. None for a dense
    # model.
    routes_start: Natural = 0
    routes: Routes | None = None
    finish: FinishReason | None = None
    # The tokens that could be drawn, one set per token (trajectories/allowed_tokens.py). Empty if none were excluded
    kept: list[Base64UrlBytes] = field(default_factory=list)
    # set on the last chunk
    oldest_kv_policy: PolicyRef | None = None
    cached_tokens: Natural = 0
    missing: str = ""  # what is not known about these tokens; they are then not trained on
    # (token, log-prob) of the most likely tokens, one list per sampled token; [] if the request did not ask
    top_logprobs: list[list[tuple[Int31, float]]] = field(default_factory=list)
    timing: Mapping[str, float] = field(default_factory=dict)


def check_request(request: GenerateRequest, vocab_size: int, known: list[int] | None = None) -> bool:
    """Raises EngineError for a context or a bias that is not of this vocabulary. `known` is a context that was checked:
    the prompt of a group is looked at once. Returns whether this one is `known`."""
    if not request.tokens:
        raise EngineError("a request needs at least one token of context")
    same = request.tokens == known
    if not same and (min(request.tokens) < 0 or max(request.tokens) >= vocab_size):
        raise EngineError(
            f"token ids must be from 0 to {vocab_size - 1}",
            hint="was the context made with another model's tokenizer?",
        )
    if any(token >= vocab_size for token, _ in request.sampling.logit_bias):
        raise EngineError(f"logit_bias: token ids must be from 0 to {vocab_size - 1}")
    return same


@dataclass(frozen=True)
class WeightSwitch:
    """How a switch of weights went: the seconds without a token, and the number of running requests."""

    pause_seconds: float
    running: int


@dataclass(frozen=True)
class Capabilities:
    """Optional abilities of a kind of engine, beyond the contract that all engines meet (tests/inference/contract)."""

    kind: str
    routes: bool  # expert routes of a mixture are reported
    grammars: bool  # requests may have a grammar
    seeds_by_position: bool  # another engine goes on with an interrupted generation as this one would have
    keeps_cache: bool  # new weights go on with the keys and values of older ones; otherwise these are computed again


class Engine(ABC):
    """What the gateway and the follower need of an engine. `rollmill.inference.embedded` and `rollmill.inference.vllm`
    implement it."""

    capabilities: Capabilities
    ended: Future[None]  # done when the engine has stopped for good, with the error that stopped it

    @abstractmethod
    def generate(self, request: GenerateRequest, *, stream: bool = False) -> AsyncGenerator[GenerateChunk, None]:
        """Yields chunks as tokens come if `stream`, else one at the end. Closing the generator frees the request's
        pages."""

    @abstractmethod
    async def apply(self, update: Update) -> WeightSwitch:
        """Switches to new weights between two decode steps, without dropping requests.

        If it fails or is interrupted, applying this or another update gives the right weights: an engine that is not at
        `update.base` copies everything.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Once this returns, no token is computed. Requests are kept."""

    @abstractmethod
    async def drain(self) -> None:
        """Finish what runs and waits, and take nothing new."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on decoding, and take requests again."""

    @abstractmethod
    def health(self) -> dict[str, Any]: ...

    @abstractmethod
    def metrics(self) -> dict[str, float]: ...

    @property
    def histograms(self) -> Mapping[str, Histogram]:
        """By their names in /metrics."""
        return {}


@dataclass(frozen=True)
class EngineContext:
    """What an engine gets from its run."""

    name: str  # engine-home, engine-home-2 …
    region: str
    model: ModelConfig
    settings: EngineConfig  # [engine] of the run
    device: Device  # the GPUs of this engine are those that CUDA_VISIBLE_DEVICES names
    form: str
    exact: bool  # numerics = "exact" of the run
    tokenizer: Path | None


class EngineKind(Protocol):
    """What `[[engines]] kind = …` names. Constructed with its settings; its module imports no torch."""

    def open(self, context: EngineContext) -> AbstractAsyncContextManager[Engine]:
        """Starts the engine, without weights; its end stops it. The process around it serves it over HTTP, and a
        follower applies the weights. Called once per process."""
        ...
