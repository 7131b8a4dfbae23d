"""The thread that runs the model. Everything it owns is touched by it alone; others send it commands.

    event loop                                  worker, between any two steps
    add / abort a request ─┐                    1  take every command there is (wait for one when idle)
    apply new weights      ├─► inbox ─────────► 2  schedule a step, run it, sample
    pause, resume          ┘                    3  send fresh tokens: one call for all of them
            chunks ◄────────────────────────────

So weights change between two steps and never inside one, and no request is dropped for it: answers go on with the keys
and values that older weights wrote, and say so (`oldest_kv_policy`).
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch

from rollmill.errors import EngineError, WeightsError
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.activity import GAP_SECONDS, Activity
from rollmill.inference.embedded.answer import Answer
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.runner import Runner, StepOutput
from rollmill.inference.embedded.sampler import Draw, sample
from rollmill.inference.embedded.scheduler import Scheduler
from rollmill.inference.engine import Applied, EngineUnavailable, GenerateChunk
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host import Auditor, check_layout, load_host
from rollmill.models.kernels.stage import Staged, stage
from rollmill.types import FinishReason, PolicyRef
from rollmill.weights.follower import Update

T = TypeVar("T")
Outbox = list[tuple[Answer, GenerateChunk | Exception]]


class Ready(NamedTuple):
    """An update prepared for the pause: its patches, or all of its tensors."""

    patched: bool
    staged: Staged


class Worker:
    """Computes nothing until the first `apply`. `send` is called from the worker's thread."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, activity: Activity, send: Callable[[Outbox], None]
    ) -> None:
        self.scheduler = Scheduler(config)
        self.policy: PolicyRef | None = None
        self.paused = False
        self.ended: Future[None] = Future()  # holds the error that stopped the worker, if one did
        self.ended.set_running_or_notify_cancel()
        self._config, self._activity, self._send = config, activity, send
        self._model = Decoder(model)
        self._parameters = self._model.state_dict()
        self._auditor = Auditor(self._parameters)
        self._cache = KVCache(model, self.scheduler.pool.size, config.block_size)
        self._runner = Runner(self._model, self._cache)
        self._closing = False
        self._lock = threading.Lock()  # between the last look into the inbox and those who put something there
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._outbox: Outbox = []
        self.thread = threading.Thread(target=self._work, name="engine-worker", daemon=True)

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` in the worker's thread, between two steps."""
        future: Future[T] = Future()
        with self._lock:
            if self.ended.done():
                raise EngineUnavailable("the engine has stopped", hint="start it again; its log tells why it stopped")
            self._inbox.put((future, command))
        return future

    def stage(self, update: Update) -> Ready:
        """What an update takes that can be done while decoding goes on, by any thread. Raises if it is not for this
        model; otherwise `apply` is to follow, and the update's tensors must stay as they are until it has."""
        check_layout(self._parameters, update.tensors)
        patched = update.patches is not None and self.policy is not None and self.policy == update.base
        return Ready(patched, stage(self._parameters, update.patches if patched else None, update.tensors))

    # -- commands: what `post` is given

    def add(self, answer: Answer) -> None:
        self.scheduler.add(answer)

    def abort(self, answer: Answer) -> None:
        if answer in self.scheduler.everyone():  # else it finished before its client's leaving was noticed
            self.scheduler.finish(answer, "abort")
            self._activity.finished("abort")

    def set_paused(self, paused: bool) -> None:
        self.paused = paused

    def close(self) -> None:
        self._closing = True

    def apply(self, update: Update, ready: Ready) -> Applied:
        """Nothing is computed meanwhile. Parameters that are no version, because this failed, serve nothing."""
        started, policy = time.monotonic(), update.policy
        try:
            self._load(update, ready)
        except BaseException:
            self.policy = None
            raise
        self.policy = policy
        self._activity.applied()
        return Applied(time.monotonic() - started, len(self.scheduler.running))

    def _load(self, update: Update, ready: Ready) -> None:
        """Write, then audit: the parameters, exported again, must have the digest that tokens will be labelled with."""
        policy = update.policy
        if ready.patched and self.policy != update.base:  # other weights were applied since it was staged
            ready = Ready(False, stage(self._parameters, None, update.tensors))
        ready.staged.apply()
        touched = update.patches if ready.patched else None
        if self._auditor.digest(policy.form, touched) != policy.digest:
            load_host(self._model, update.tensors)
            if self._auditor.digest(policy.form) != policy.digest:
                raise WeightsError(
                    f"{policy.line}@{policy.number}: the parameters do not have digest {policy.digest}",
                    hint="nothing is served until weights that match arrive; `rollmill weights verify` checks them",
                )

    # -- the loop

    def _work(self) -> None:
        torch.set_num_threads(self._config.threads)
        failure: Exception | None = None
        try:
            idle = True
            while not self._closing:
                self._take_commands(wait=idle)
                idle = not self._step()
                self._flush()
        except Exception as error:
            failure = error
        self._end(failure)

    def _end(self, failure: Exception | None) -> None:
        """Nobody may be left waiting: neither requests nor commands."""
        self._activity.rest()
        why = EngineUnavailable("the engine is shutting down" if failure is None else f"the engine broke: {failure!r}")
        with self._lock:
            self.ended.set_exception(failure) if failure else self.ended.set_result(None)
        while not self._inbox.empty():
            self._inbox.get()[0].set_exception(why)
        self._outbox += [(answer, why) for answer in self.scheduler.everyone()]
        self._flush()

    def _take_commands(self, wait: bool) -> None:
        while wait or not self._inbox.empty():
            future, command = self._next_command()
            wait = False
            if not future.set_running_or_notify_cancel():
                continue  # whoever sent it has gone
            try:
                future.set_result(command())
            except Exception as error:  # the sender's to handle: the worker goes on
                future.set_exception(error)

    def _next_command(self) -> tuple[Future[Any], Callable[[], Any]]:
        try:
            return self._inbox.get(timeout=GAP_SECONDS)
        except queue.Empty:
            self._activity.rest()
            return self._inbox.get()

    def _step(self) -> bool:
        """Compute once; False when there is nothing to compute."""
        policy = self.policy
        if self.paused or policy is None:
            return False
        work = self.scheduler.schedule(policy.number)
        if not work:
            return False
        started = time.time()
        output = self._runner.run(work)
        self._advance(output, policy)
        sampled = self._sample(output, policy)
        computed = sum(item.count for item in work)
        self._activity.step(started, sampled, computed, len(self.scheduler.running), self.scheduler.waiting)
        return True

    def _advance(self, output: StepOutput, policy: PolicyRef) -> None:
        start = 0
        for item in output.work:
            end = start + item.count
            item.answer.advance(item.count, None if output.routes is None else output.routes[start:end], policy)
            start = end

    def _sample(self, output: StepOutput, policy: PolicyRef) -> int:
        answers = [item.answer for item in output.work if not item.answer.missing]
        if not answers:
            return 0
        draws = [Draw(answer.request.sampling, answer.seed, len(answer.tokens)) for answer in answers]
        now = time.monotonic()
        for answer, token, logprob in zip(answers, *sample(output.logits, draws), strict=True):
            if not math.isfinite(logprob):
                self._fail(answer, EngineError(f"{policy.line}@{policy.number} gives logits that are not finite"))
                continue
            finish = answer.sample(token, logprob, policy)
            if finish is not None:
                self._finish(answer, finish)
            elif answer.stream and now - answer.sent_at >= self._config.stream_seconds:
                self._outbox.append((answer, answer.chunk()))
        return len(answers)

    def _finish(self, answer: Answer, reason: FinishReason) -> None:
        self._outbox.append((answer, answer.chunk(reason)))
        self.scheduler.finish(answer, reason)
        self._activity.finished(reason)

    def _fail(self, answer: Answer, error: EngineError) -> None:
        self._cache.clear(answer.blocks)  # a NaN left in a page would reach its next owner through masked positions
        self.scheduler.finish(answer, "abort")
        self._outbox.append((answer, error))

    def _flush(self) -> None:
        if self._outbox:
            self._send(self._outbox)
            self._outbox = []
