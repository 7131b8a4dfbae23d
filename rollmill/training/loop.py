"""The one step loop, the same for every objective:

    next batch ─► forward/backward ─► update ─► publish version ─► checkpoint every k ─► commit

There is no separate path for a restart: it loads the newest checkpoint and asks for the next batch. Steps that were
recorded come back as they were, run again, and meet their own versions in the weight store, where the digests must
agree. Effects of step n in their order, and what a kill −9 right after each leaves behind:

    effect                      left behind                            repaired by the next start
    record of n in the ledger   groups leased to a step without        step n is found recorded and is run; its
                                a version                              trajectories are never offered to another step
    update (memory only)        the same                               the same
    objects of version n        bytes no manifest names                publishing n again writes the same ones
    manifest of version n       published, not committed               n is run again from the checkpoint, its digest
                                                                       is equal, and it is committed
    state of checkpoint n       a state no description names           overwritten by the next checkpoint n
    checkpoint n                everything but the commit              committed when the checkpoint is loaded
    commit of n in the ledger   nothing                                —

Version 0 of a line follows the same order: checkpoint 0, then its version. Where digests do not agree (other hardware,
another thread count, a payload that had to be deleted) nothing published is overwritten: a new line starts from the
checkpoint, names the versions it abandons in the metadata of its first one, and the steps run again there.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic

import torch

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host import load_host, to_host
from rollmill.storage.objects import Objects
from rollmill.training.checkpoint import Checkpoint, Checkpoints
from rollmill.training.config import FORM, TrainingConfig
from rollmill.training.lineage import next_line, trace_lineage
from rollmill.training.objective import Batch, Objective, StepOutcome
from rollmill.training.optimizer import MasterOptimizer, Update, learning_rate
from rollmill.types import Version
from rollmill.weights.manifest import Manifest, describe, root_digest
from rollmill.weights.publisher import Publisher
from rollmill.weights.store import WeightStore, newest_line


class Trainer(Generic[Batch]):
    """Trains one line. Wants a process of its own: it sets torch's threads and determinism for the whole process."""

    def __init__(
        self,
        config: TrainingConfig,
        model_config: ModelConfig,
        objective: Objective[Batch],
        weights: WeightStore,
        checkpoints: Objects,
        line: str,
        parent: Version | None = None,
        *,
        steps: int,
        seed: int,
    ) -> None:
        """`parent`: start from this published version of another line; without it, from random weights of the seed.

        `steps`: of the whole run; the learning rate is scheduled over them. The objects hold the checkpoints.
        """
        torch.set_num_threads(config.threads)
        # the same switch as use_deterministic_algorithms(True), which first imports the compiler for a second or two
        torch.set_deterministic_debug_mode("error")
        self._config = config
        self._objective = objective
        self._weights = weights
        self._checkpoints = Checkpoints(checkpoints, config.keep_checkpoints)
        self._family = line
        self._parent = parent
        self._steps = steps
        self._seed = seed
        self._model = Decoder(model_config)
        self._stop = threading.Event()
        self._bad_steps = 0
        self._saved = -1  # step of the newest checkpoint; −1 before the start
        self.step = 0
        self.line = line

    def stop(self) -> None:
        """Finish the step under way, write a checkpoint, return from `run`. Safe to call from a signal handler."""
        self._stop.set()

    def run(self, until: int) -> Version:
        """Train up to step `until`; the newest version of the line. SIGTERM does what `stop` does."""
        with _on_sigterm(self.stop):
            if self._saved < 0:
                self._start()
            while self.step < until and not self._stop.is_set():
                batch = self._objective.next_batch(self.step + 1, self._lineage, self._stop.is_set)
                if batch is None:
                    break
                self._run_step(batch)
            if self.step == until and self.step not in self._published:
                self._publish()
            if self._saved != self.step:
                self._save()
        return Version(self.line, max(self._published.values()))

    def _run_step(self, batch: Batch) -> None:
        start = time.time()
        with telemetry.busy("step"):
            figures = self._objective.backward(self._model, batch)
            update = self._optimizer.update(learning_rate(self._config.optimizer, self.step + 1, self._steps))
        self.step += 1
        self._bad_steps = 0 if math.isfinite(update.grad_norm) else self._bad_steps + 1
        manifest = None
        if self._objective.publishes(self.step) or self.step in self._published:
            manifest = self._publish({} if update.applied else {"unchanged": _why_unchanged(update)})
            if manifest is None:
                self._fork(f"step {self.step}, run again, gave other weights than it was published with")
                return
        if self.step % self._config.checkpoint_every == 0:
            self._save()
        if manifest is not None:
            self._objective.commit(self.step, manifest.version, manifest.digest)
        self._objective.report(batch, StepOutcome(self.step, self._steps, update, time.time() - start, figures))
        self._check_numbers(update)

    def _check_numbers(self, update: Update) -> None:
        if self._bad_steps == 0:
            return
        telemetry.emit("warning", step=self.step, text=f"step {self.step} changed nothing: {_why_unchanged(update)}")
        if self._bad_steps >= self._config.max_bad_steps:
            raise TrainingError(
                f"the gradients of the last {self._bad_steps} steps, up to step {self.step}, were not finite",
                hint="lower the learning rate; drift and ess of the steps before tell whether the policy ran away",
            )

    def _publish(self, metadata: dict[str, Any] | None = None) -> Manifest | None:
        """The weights of this step as a version. None: the step was published before, with other weights."""
        start = time.time()
        with telemetry.busy("publish"):
            tensors = to_host(self._model.state_dict(), FORM)
            known = self._published.get(self.step)
            if known is not None:
                manifest = self._weights.manifest(Version(self.line, known), FORM)
                return manifest if manifest.digest == root_digest(describe(tensors)) else None
            last = self._publisher.last
            number, parent = (last.number + 1, None) if last else self._beginning
            manifest = self._publisher.publish(number, tensors, parent, {"step": self.step, **(metadata or {})})
        self._published[self.step] = number
        telemetry.emit(
            "publish",
            line=self.line,
            version=number,
            step=self.step,
            encoding=manifest.kind,
            bytes=manifest.bytes,
            delta_bytes=manifest.delta.bytes if manifest.delta else None,
            full_bytes=manifest.full_bytes,
            density=manifest.density,
            seconds=time.time() - start,
            digest=manifest.digest,
        )
        return manifest

    def _save(self) -> None:
        with telemetry.busy("checkpoint"):
            tensors = {**self._optimizer.state(), "rng": torch.get_rng_state()}
            self._checkpoints.save(Checkpoint(self.line, self.step, self._bad_steps, tensors))
        self._saved = self.step

    # where a run begins, and begins again

    def _start(self) -> None:
        self._take_line(newest_line(self._weights, self._family), number=0, parent=self._parent)
        checkpoint = self._checkpoints.newest(self.line)
        if checkpoint is None:
            self._initialise()
        else:
            self._resume(checkpoint)
        self._lineage = trace_lineage(self._weights, self.line)

    def _take_line(self, line: str, number: int, parent: Version | None) -> None:
        """Publish on `line` from now on; if it has no version yet, it begins with `number`, a child of `parent`."""
        self.line = line
        self._beginning = (number, parent)
        self._publisher = Publisher(
            self._weights, line, FORM, self._config.snapshot_every, goal=self._config.delta_goal
        )
        self._publisher.resume()
        self._published: dict[int, int] = {}  # step → version number, for the steps a restart may come across

    def _initialise(self) -> None:
        if self._publisher.last is not None:
            raise TrainingError(
                f"line {self.line!r} has versions up to {self._publisher.last.number} but no checkpoint to go on from",
                hint="restore checkpoints/, or start another line with a version of this one as its parent",
            )
        if self._parent is None:
            self._model.initialise(self._seed)
        else:
            load_host(self._model, self._weights.load(self._parent, FORM))
        torch.manual_seed(self._seed)
        self._optimizer = MasterOptimizer(self._model, self._config.optimizer, FORM)
        self._save()
        self._publish()

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._load(checkpoint)
        self._published = _published_since(self._weights, self.line, self.step)
        if self._published and self.step not in self._published:
            return  # mid-training: this step was not one to publish
        manifest = self._publish()
        if manifest is None:
            self._fork(f"the checkpoint of step {self.step} holds other weights than were published")
        elif self.step > 0:
            self._objective.commit(self.step, manifest.version, manifest.digest)

    def _load(self, checkpoint: Checkpoint) -> None:
        self._optimizer = MasterOptimizer(self._model, self._config.optimizer, FORM)
        tensors = dict(checkpoint.tensors)
        torch.set_rng_state(tensors.pop("rng"))
        self._optimizer.load(tensors)
        self.step = self._saved = checkpoint.step
        self._bad_steps = checkpoint.bad_steps

    def _fork(self, why: str) -> None:
        """Go on from the newest checkpoint in a new line: what is published stays as it is and is abandoned."""
        checkpoint = self._checkpoints.newest(self.line)
        assert checkpoint is not None, "a line begins with a checkpoint"
        parent = Version(self.line, max(n for step, n in self._published.items() if step <= checkpoint.step))
        keeps_parent = checkpoint.step < self.step
        abandoned = [n for n in self._weights.numbers(self.line, FORM) if n > parent.number - (not keeps_parent)]
        names = [str(Version(self.line, number)) for number in abandoned]
        self._load(checkpoint)
        self._take_line(next_line(self._weights, self._family), parent.number, parent)
        self._save()
        manifest = self._publish({"abandons": names, "reason": why})
        assert manifest is not None, "a new line has nothing to differ from"
        if self.step > 0:
            self._objective.commit(self.step, manifest.version, manifest.digest)
        self._lineage = trace_lineage(self._weights, self.line)
        telemetry.emit("new_line", line=self.line, parent=str(parent), step=self.step, abandons=names, reason=why)


def _published_since(weights: WeightStore, line: str, step: int) -> dict[int, int]:
    """step → version number, from the newest version that `step` includes to the head of the line."""
    found: dict[int, int] = {}
    for number in reversed(weights.numbers(line, FORM)):
        published = weights.manifest(Version(line, number), FORM).step
        found[number if published is None else published] = number
        if min(found) <= step:
            return found
    if found:  # a line begins with the version of its first checkpoint
        raise TrainingError(
            f"the newest checkpoint of line {line!r} is of step {step}, and its versions up to step {min(found) - 1} "
            "were collected: steps that are run again could not be compared",
            hint="collect with more versions kept than lie between two checkpoints; start another line from the head",
        )
    return found


def _why_unchanged(update: Update) -> str:
    return "there was nothing to learn from" if math.isfinite(update.grad_norm) else "its gradient was not finite"


@contextlib.contextmanager
def _on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us in another one calls stop() itself
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
