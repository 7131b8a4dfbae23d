"""The thread that runs the model. No other thread touches what it owns; others send it commands.

    event loop                                  decode loop, between any two steps
    add / abort a request ─┐                    1  take every command there is (wait for one when idle)
    apply new weights      ├─► inbox ─────────► 2  schedule a step, run it, sample; on CUDA several at once (`bursts`)
    pause, resume          ┘                    3  send fresh tokens: one call for all of them
            chunks ◄────────────────────────────

While prompts fill whole steps on CUDA, the next step is scheduled and launched before the last one is recorded: the
device does not wait for the host.

Weights change between two steps, never inside one, and no request is dropped for it. A generation goes on with the
keys and values that older weights wrote, and says so (`oldest_kv_policy`); with `recompute_kv` it computes its context
again. A new request of another session finds only keys and values of the served weights (`prefixes`).
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from rollmill.errors import EngineError
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.activity import GAP_SECONDS, Activity
from rollmill.inference.embedded.bursts import Bursts
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.drafts import count_right
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.loading import make_loader
from rollmill.inference.embedded.outputs import BurstRunner
from rollmill.inference.embedded.runner import make_runner
from rollmill.inference.embedded.sampler import begin_sample, most_likely
from rollmill.inference.embedded.scheduler import Scheduler, Work
from rollmill.inference.engine import EngineBusy, EngineUnavailable, GenerateChunk, WeightSwitch
from rollmill.inference.garbage_collection import collect_as_usual, collect_rarely
from rollmill.models.config import ModelConfig
from rollmill.models.device import decoder_on
from rollmill.types import FinishReason, PolicyRef, same_line
from rollmill.weights.reading.line_follower import Update

T = TypeVar("T")
_Row = tuple[int, float, bytes, list[tuple[int, float]]]  # a token, its log-prob, what was kept, the most likely ones
Outbox = list[tuple[Generation, GenerateChunk | Exception]]


class _Command(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]
    recorded: bool


class Preparation(NamedTuple):
    """An update that is prepared for the pause: its patches, or all its tensors."""

    patched: bool
    prepared: Any


class DecodeLoop:
    """Computes nothing until the first `apply`. Calls `send` in its own thread."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        activity: Activity,
        send: Callable[[Outbox], None],
        *,
        device: torch.device,
        form: str,
        exact: bool = False,
    ) -> None:
        on_cuda = device.type != "cpu"
        self.scheduler = Scheduler(config, config.draft_tokens, prompts_first=on_cuda, long_guesses=on_cuda)
        self.policy: PolicyRef | None = None
        self.paused = self.draining = False
        self.ended: Future[None] = Future()  # holds the error that stopped the decode loop, if one did
        self.ended.set_running_or_notify_cancel()
        self._config, self._activity, self._send = config, activity, send
        self._model = decoder_on(device, model, form)
        if exact:
            self._model.compute_exactly()
        self._loader = make_loader(self._model)
        dtype = self._model.embedding.dtype
        self._cache = KVCache(model, self.scheduler.pages.size, config.block_size, dtype, device, fp8=config.fp8_kv)
        self._runner = make_runner(self._model, self._cache, min(model.max_context, config.cache_tokens))
        self._bursts: Bursts | None = None
        if isinstance(self._runner, BurstRunner):
            self._bursts = Bursts(self._runner, self.scheduler, config.stream_seconds)
        self._closing = self._warm = False
        self._lock = threading.Lock()  # held to end the loop and to post, so that no command is left in the inbox
        self._inbox: queue.SimpleQueue[_Command | list[Generation]] = queue.SimpleQueue()  # generations are to be added
        self._ahead: Callable[[], None] | None = None  # waits for a step of prompts and records its tokens
        self._outbox: Outbox = []
        self.thread = threading.Thread(target=self._work, name="engine-decode", daemon=True)

    def post(self, command: Callable[[], T], *, recorded: bool = True) -> Future[T]:
        """Run `command` in the decode loop's thread, between two steps. With `recorded` it finds every token that was
        computed recorded."""
        future: Future[T] = Future()
        self._put(_Command(future, command, recorded))
        return future

    def post_requests(self, generations: list[Generation]) -> None:
        """Adds requests without waiting for the decode loop: if one is refused, its error goes to the request."""
        self._put(generations)

    def _put(self, item: _Command | list[Generation]) -> None:
        with self._lock:
            if self.ended.done():
                raise EngineUnavailable("the engine has stopped", hint="start it again; its log tells why it stopped")
            self._inbox.put(item)

    def prepare(self, update: Update) -> Preparation:
        """Does the part of an update that can run beside decoding, in any thread. Raises if the update is not for this
        model. Otherwise `apply` must follow, and the update's tensors must not change until it has run."""
        patched = update.patches is not None and self.policy is not None and self.policy == update.base
        return Preparation(patched, self._loader.prepare(update, patched))

    # -- commands, run through `post`

    def add(self, generation: Generation) -> None:
        if self.draining:
            raise EngineUnavailable("the engine takes no new requests: it drains", hint="ask another engine")
        waiting = self.scheduler.waiting_like(generation)
        if waiting >= self._config.max_waiting:
            self._activity.counters["refused_total"] += 1
            raise EngineBusy(waiting)
        self.scheduler.add(generation)
        self._refuse_other_line(generation)

    def _enter(self, generation: Generation) -> None:
        try:
            self.add(generation)
        except Exception as error:
            self._outbox.append((generation, error))

    def abort(self, generation: Generation) -> None:
        if self.scheduler.holds(generation):  # it may have finished before the client left
            self.scheduler.finish(generation, "abort")
            self._activity.finished("abort")

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self.draining = self.draining and paused  # resuming takes requests again

    def drain(self) -> None:
        self.draining = True

    def close(self) -> None:
        self._closing = True

    def apply(self, update: Update, ready: Preparation) -> WeightSwitch:
        """Nothing is computed meanwhile. If it fails, parameters may be of no version, and nothing is served until the
        next."""
        started, policy = time.monotonic(), update.policy
        try:
            self._load(update, ready)
        except BaseException:
            self.policy = None
            raise
        self.policy = policy
        if self._config.recompute_kv:
            self.scheduler.forget_keys_and_values()
        seconds = time.monotonic() - started
        self._activity.applied(seconds)
        if isinstance(self._runner, BurstRunner) and not self._warm:
            guessed = self.scheduler.guessed_positions
            self._runner.warm_up(self._config.max_batch, self._config.prefill_chunk, guessed)
            self._warm = True
            collect_rarely()
        for generation in self.scheduler.everyone():
            self._refuse_other_line(generation)
        return WeightSwitch(seconds, len(self.scheduler.running))

    def _refuse_other_line(self, generation: Generation) -> None:
        """A request never mixes lines: one that names another line than the served one goes on at another engine."""
        wanted = generation.request.line
        if self.policy is not None and wanted and not same_line(wanted, self.policy.line):
            self.scheduler.finish(generation, "abort")
            self._activity.finished("abort")
            served = EngineUnavailable(f"the engine serves line {self.policy.line}, not {wanted}")
            self._outbox.append((generation, served))

    def _load(self, update: Update, ready: Preparation) -> None:
        if ready.patched and self.policy != update.base:  # other weights were applied since it was prepared
            ready = Preparation(False, self._loader.prepare(update, False))
        self._loader.load(update, ready.patched, ready.prepared)

    # -- the loop

    def _work(self) -> None:
        torch.set_num_threads(self._config.threads)
        failure: Exception | None = None
        try:
            idle = True
            while not self._closing:
                self._take_commands(wait=idle)
                self._flush()
                idle = not self._step()
                self._flush()
        except Exception as error:
            failure = error
        self._end(failure)

    def _end(self, failure: Exception | None) -> None:
        """Answers all waiting requests and commands, so that none of them waits forever."""
        self._activity.rest()
        if self._warm:
            collect_as_usual()
        why = EngineUnavailable("the engine is shutting down" if failure is None else f"the engine broke: {failure!r}")
        with self._lock:
            self.ended.set_exception(failure) if failure else self.ended.set_result(None)
        while not self._inbox.empty():
            left = self._inbox.get()
            if isinstance(left, list):
                self._outbox += [(generation, why) for generation in left]
            elif left.future.set_running_or_notify_cancel():  # otherwise the sender has gone
                left.future.set_exception(why)
        self._outbox += [(generation, why) for generation in self.scheduler.everyone()]
        self._flush()

    def _take_commands(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            taken = self._next_command()
            wait = False
            if isinstance(taken, list):
                for generation in taken:
                    self._enter(generation)
                continue
            future, command, recorded = taken
            try:
                if recorded:
                    self._record_all()
            except Exception:
                self._inbox.put(taken)  # `_end` answers its sender
                raise
            if not future.set_running_or_notify_cancel():
                continue  # the sender has gone
            try:
                future.set_result(command())
            except Exception as error:  # the sender handles it; the decode loop goes on
                future.set_exception(error)

    def _next_command(self) -> _Command | list[Generation]:
        try:
            return self._inbox.get(timeout=GAP_SECONDS)
        except queue.Empty:
            self._activity.rest()
            return self._inbox.get()

    def _step(self) -> bool:
        """Runs one step. False if there is nothing to compute."""
        policy = self.policy
        if self._bursts is not None and self._bursts.flying:
            self._land(self._bursts, go_on=self._inbox.empty() and self.scheduler.nobody_can_join)
            return True
        if self.paused or policy is None:
            return False
        self._clean_pages()
        work = self.scheduler.schedule(policy)
        self._copy_pages()
        if self._ahead is not None and not (work and all(item.count != 1 for item in work)):
            self._record_all()  # whoever has its first token now joins the others
            return True
        if not work:
            return False
        if self._bursts is not None and self._bursts.start(work, policy):
            return True
        record = self._launch(work, policy)
        self._record_all()
        self._ahead = record
        if self._bursts is None or not self.scheduler.filled or any(item.drafts for item in work):
            self._record_all()  # how far a context with guesses is computed is not known before
        return True

    def _record_all(self) -> None:
        """Waits for what the device computes, and records it."""
        if self._bursts is not None and self._bursts.flying:
            self._land(self._bursts, go_on=False)
        if self._ahead is not None:
            record, self._ahead = self._ahead, None
            record()

    def _launch(self, work: list[Work], policy: PolicyRef) -> Callable[[], None]:
        """Starts a step. The result waits for its tokens and records them; for the scheduler its positions are computed
        from now on, because the device runs everything in order."""
        started = time.time()
        output = self._runner.run(work)
        complete = [item for item in output.work if item.completes]
        draws = [draw for item in complete for draw in item.draws]
        wait = begin_sample(output.logits, draws)
        counts = [item.generation.request.top_logprobs for item in complete for _ in range(1 + len(item.drafts))]
        best, routes = most_likely(output.logits, draws, counts), output.host_routes()
        guessed = len(draws) > len(complete)
        if not guessed:
            self.scheduler.advance(output.work, routes, policy)

        def record() -> None:
            rows: list[_Row] = list(zip(*wait(), best, strict=True))
            if guessed:
                rows, wrong = self._accept(complete, rows, policy)
                self.scheduler.advance(output.work, routes, policy, wrong)
            self._record(zip([item.generation for item in complete], rows, strict=True), policy)
            computed = sum(item.count for item in work)
            self._activity.step(started, len(complete), computed, len(self.scheduler.running), self.scheduler.waiting)

        return record

    def _land(self, bursts: Bursts, *, go_on: bool) -> None:
        """Records the burst on its way. With `go_on` the next one is launched before."""
        policy, started = bursts.policy, time.time()
        sampled = list(bursts.land(go_on))
        now, total = time.monotonic(), sum(len(one.tokens) for one in sampled)
        found = [one.routes for one in sampled if one.routes is not None]
        if found:
            spans = [(one.generation, one.generation.computed, len(one.tokens)) for one in sampled]
            self.scheduler.store_routes(spans, np.concatenate(found))
        for generation, tokens, logprobs, routes in sampled:
            if not math.isfinite(logprobs[-1]):
                self._fail_not_finite(generation, policy)
                continue
            if generation.first_token_at is None:
                self._activity.first_token(now - generation.arrived_at)
            finish = generation.extend(tokens, logprobs, policy, routes)
            self.scheduler.publish(generation, policy)
            self._send_fresh(generation, finish, now)
        running, waiting = len(self.scheduler.running), self.scheduler.waiting
        self._activity.step(started, total, total, running, waiting, steps=bursts.steps)

    def _accept(self, complete: list[Work], rows: list[_Row], policy: PolicyRef) -> tuple[list[_Row], dict[int, int]]:
        """Samples the guesses that are right. Returns the row of each work that comes after them, and how many guesses
        of each generation were wrong."""
        left, last, wrong = iter(rows), [], {}
        for item in complete:
            generation, own = item.generation, list(itertools.islice(left, 1 + len(item.drafts)))
            finite = list(itertools.takewhile(lambda row: math.isfinite(row[1]), own))
            drawn, stops = [row[0] for row in finite], generation.request.sampling.stop_tokens
            right = count_right(drawn, item.drafts[: len(finite)], stops)
            for row in own[:right]:
                generation.sample(row[0], row[1], policy, *row[2:])
            last.append(own[right])
            if item.drafts:
                wrong[generation.number] = len(item.drafts) - right
                generation.drafts.learn(len(item.drafts), right, self._config.draft_tokens)
                self._activity.drafted(len(item.drafts), right)
        return last, wrong

    def _clean_pages(self) -> None:
        pages = self.scheduler.pages
        if pages.unclean:
            self._cache.clear(pages.unclean)
            pages.cleaned()

    def _copy_pages(self) -> None:
        prefixes = self.scheduler.prefixes
        if prefixes.copies:
            self._cache.copy(prefixes.copies)
            prefixes.copies = []

    def _record(self, drawn: Iterable[tuple[Generation, _Row]], policy: PolicyRef) -> None:
        now = time.monotonic()
        for generation, (token, logprob, kept, best) in drawn:
            if not math.isfinite(logprob):
                self._fail_not_finite(generation, policy)
                continue
            if generation.first_token_at is None:
                self._activity.first_token(now - generation.arrived_at)
            self._send_fresh(generation, generation.sample(token, logprob, policy, kept, best), now)

    def _send_fresh(self, generation: Generation, finish: FinishReason | None, now: float) -> None:
        if finish is not None:
            self._finish(generation, finish)
        elif generation.stream and now - generation.sent_at >= self._config.stream_seconds:
            self._outbox.append((generation, generation.chunk()))

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self._outbox.append((generation, generation.chunk(reason)))
        self.scheduler.finish(generation, reason)
        self._activity.finished(reason)

    def _fail_not_finite(self, generation: Generation, policy: PolicyRef) -> None:
        error = EngineError(f"{policy.line}@{policy.number} gives logits that are not finite")
        # a NaN left in a page would reach the next owner through masked positions
        self.scheduler.pages.condemn(generation.blocks)
        self.scheduler.finish(generation, "abort")
        self._outbox.append((generation, error))

    def _flush(self) -> None:
        if self._outbox:
            self._send(self._outbox)
            self._outbox = []
