"""The one step loop, the same for every objective:

    next batch ─► forward/backward ─► update ─► publish version ─► checkpoint every k ─► commit
                                             └─► next batch ─► forward/backward ─► update ─► …

What a step made is copied, and a thread writes it while the next step runs. Steps are written one after the other: a
step's write begins when the step before is committed. Steps that run again, and those of several ranks, are written
at once.

A restart has no separate path: it loads the newest checkpoint and asks for the next batch. Recorded steps come back
unchanged and run again; their digests must agree with the versions they published. The effects of step n in order, and
what a kill −9 right after each leaves behind:

    effect                      left behind                            repaired by the next start
    record of n in the ledger   groups leased to a step without        step n is found recorded and is run; no other
    (n − 1 may be uncommitted)  a version                              step ever gets its trajectories
    update (memory only)        the same                               the same
    objects of version n        bytes that no manifest names           publishing n again writes the same ones
    manifest of version n       published, not committed               n runs again from the checkpoint, its digest is
                                                                       equal, and it is committed
    n in the other forms        published in some of the forms         published in the others when the line is taken
                                                                       over (exporter.py)
    state of checkpoint n       a state that no description names      overwritten by the next checkpoint n
    checkpoint n                everything but the commit              committed when the checkpoint is loaded
    commit of n in the ledger   nothing                                —

Version 0 of a line follows the same order: checkpoint 0, then its version. If digests do not agree (other hardware,
another thread count, a deleted payload), nothing published is overwritten. A new line starts from the checkpoint, the
metadata of its first version names the abandoned versions, and the steps run again there.

With several ranks every rank runs this loop. The first asks for batches, keeps the ledger and writes events; the others
receive its decisions. If a rank dies, the step is lost: all start again, from what the table lists as left behind.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.adapters import adds_anything
from rollmill.models.config import ModelConfig
from rollmill.models.device import Device, choose_device
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch
from rollmill.training.config import FORM, TrainingConfig
from rollmill.training.lineage import form_before_import, next_line, published_since, trace_lineage
from rollmill.training.memory_errors import explain_out_of_memory
from rollmill.training.objective import Batch, Objective, StepOutcome
from rollmill.training.optimizers.learning_rate import learning_rate
from rollmill.training.optimizers.master_optimizer import MasterOptimizer, Update, goes_on, inherited
from rollmill.training.parallelism import Parallelism
from rollmill.training.published_weights import load_frozen, load_published
from rollmill.training.publishing.background import Background
from rollmill.training.publishing.exporter import Exporter, Exports
from rollmill.training.reproducible import fix_bits, on_sigterm
from rollmill.training.single import SINGLE
from rollmill.training.state import copies_of
from rollmill.training.training_checkpoint import BUFFER, Checkpoint, Checkpoints
from rollmill.training.update_guard import Move, TokenSample, measure_move, within_bounds
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.reading.leases import LONGEST_SECONDS, HeldLeases
from rollmill.weights.reading.weight_store import WeightStore, newest_line

_MOST_COPIED = 8 << 30  # bytes; a larger state is not copied: the next step waits until it is written


class _Publication(NamedTuple):
    """A step whose version is published and committed."""

    step: int
    manifest: Manifest
    exports: Exports
    saved: bool  # its checkpoint is written


class Trainer(Generic[Batch]):
    """Trains one line. Needs a process of its own: it sets torch's threads and determinism for the whole process."""

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
        form: str = FORM,
        other_forms: Sequence[str] = (),
        exact: bool = False,
        device: Device = "cpu",
        parallel: Parallelism = SINGLE,
    ) -> None:
        """`parent`: the version of another line to start from: from the FP32 masters in its checkpoint, or without one
        from its published values. None: random weights of the seed.
        `checkpoints`: the store that holds them. `steps`: of the whole run; the learning rate is scheduled over them.
        `form`: the form that versions are published in and computed with. `other_forms`: others that they are published
        in too (exporter.py). `exact`: forward passes give a token the engine's bits (models.kernels.exact).
        """
        self._device = choose_device(device)
        torch.set_num_threads(config.threads)
        fix_bits(config.deterministic)
        self._config = config
        self._objective = objective
        self._weights = weights
        self._family = line
        self._parent = parent
        self._steps = steps
        self._seed = seed
        self._form, self._forms = form, (form, *other_forms)
        self._parallel, self._ranks = parallel, parallel.ranks
        self._leases = HeldLeases(weights.objects, form, "trainer", LONGEST_SECONDS)
        with self._explained("the model"):
            self._model = parallel.models.make_model(model_config, form, self._device)
        self._model.recompute_every = config.recompute_every
        self._model.recompute_mlp = bool(config.recompute_mlp)
        if exact:
            self._model.compute_exactly()
        self._checkpoints = Checkpoints(checkpoints, config.keep_checkpoints, parallel)
        self._stop = threading.Event()
        self._writing: Background[_Publication] = Background("publish")
        self._bad_steps = 0
        self._saved = -1  # step of the newest checkpoint; −1 before the start
        self.step = 0
        self.line = line

    def stop(self) -> None:
        """Finish the current step, write a checkpoint, return from `run`. Safe to call from a signal handler."""
        self._stop.set()

    def run(self, until: int) -> Version:
        """Train up to step `until`; returns the newest version of the line. SIGTERM does what `stop` does."""
        with on_sigterm(self.stop):
            if self._saved < 0:
                with self._explained("the model with its optimizer"):
                    self._start()
            try:
                self._run_steps(until)
            except Exception:
                self._warn_unwritten()
                raise
            self._settle()
            if self.step == until and self.step not in self._published:
                self._publish()
            if self._saved != self.step:
                self._save()
            if self.step >= until and self._ranks.first:
                self._leases.release(self.line)  # no step runs again: `weights gc` may collect at once
        return Version(self.line, max(self._published.values()))

    def _run_steps(self, until: int) -> None:
        failed = True
        parts: Sequence[MicroBatch] = ()  # of the last step
        try:
            while self.step < until and not any(self._ranks.gather(self._stop.is_set())):
                with self._explained_between(parts):
                    batch = self._next_batch()
                if batch is None:
                    break
                parts = batch.microbatches
                with self._explained(f"step {self.step + 1}", parts):
                    self._run_step(batch)
            failed = False
        finally:
            with self._explained_between(parts):
                self._objective.finish(failed=failed)

    def _explained_between(self, parts: Sequence[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """As `_explained`, for work that the last step put off, such as measuring. `parts`: its micro-batches."""
        return self._explained(f"after step {self.step}, the trainer", parts)

    def _next_batch(self) -> Batch | None:
        if self._objective.needs_commits:
            self._settle()
        lr = learning_rate(self._config.optimizer, self.step + 1, self._steps)
        return self._ranks.from_first_slowly(
            lambda: self._objective.next_batch(self.step + 1, lr, self._lineage, self._is_stopping)
        )

    def _is_stopping(self) -> bool:
        return self._stop.is_set() or self._writing.failed()  # without a commit no group starts: a wait would not end

    def _run_step(self, batch: Batch) -> None:
        start = time.time()
        with telemetry.busy("step"):
            before = self._sampled(batch)
            figures = self._objective.backward(self._model, batch, self._optimizer.accumulate, self._parallel)
            update = self._optimizer.update(batch.lr, revocable=before is not None)
            if before is not None and update.applied:
                update = self._guarded(batch, before, update)
        self._settle()  # wait until the step before is written
        self.step += 1
        self._bad_steps = 0 if math.isfinite(update.grad_norm) and update.kept == 1 else self._bad_steps + 1
        again = self.step in self._published
        metadata = {} if update.applied else {"unchanged": update.why_unchanged}
        if not self._write(metadata, save=self.step % self._config.checkpoint_every == 0):
            self._fork(f"step {self.step}, run again, gave other weights than it was published with")
            return
        self._objective.report(batch, StepOutcome(self.step, self._steps, update, time.time() - start, figures))
        self._check_numbers(update, again)

    def _sampled(self, batch: Batch) -> TokenSample | None:
        measures, passes = self._objective.most_drift > 0, self._parallel.passes
        return self._objective.sampled(self._model, batch, passes) if measures else None

    def _guarded(self, batch: Batch, before: TokenSample, update: Update) -> Update:
        """Take an update that moves the policy too far back, by halves. Collective."""

        def move() -> Move:
            after = self._sampled(batch)
            assert after is not None
            return self._ranks.from_first(measure_move(before, after))  # all ranks must decide alike

        kept, why = within_bounds(self._optimizer, update.lr, move, self._objective.most_drift)
        if why is not None and self._ranks.first:
            text = f"the update of step {self.step + 1} goes too far: {why}. {kept:.0%} of it is kept; "
            rate = f"the learning rate, {update.lr:.2g}, is most likely too large"
            telemetry.emit("warning", step=self.step + 1, text=text + rate)
        return replace(update, kept=kept)

    def _write(self, metadata: dict[str, Any], save: bool) -> bool:
        """Publish, save and commit this step. Returns False if it was published before with other weights."""
        again = self.step in self._published
        if not again and not self._objective.publishes(self.step):
            if save:
                self._save()
        elif again or self._ranks.size > 1:
            manifest = self._publish(metadata)
            if manifest is None:
                return False
            if save:
                self._save()
            self._commit(manifest)
        else:
            self._write_later(metadata, save)
        return True

    def _write_later(self, metadata: dict[str, Any], save: bool) -> None:
        """Copy what the step made; a thread writes it. A kill leaves what it would leave if it was written at once."""
        step, exports = self.step, self._exporter.export(self._model)
        size = sum(tensor.nbytes for tensor in self._state().tensors.values())
        copied = self._state(copied=True) if save and size <= _MOST_COPIED else None

        def write() -> _Publication:
            manifest = self._publish_new(step, exports, metadata)
            if copied is not None:
                with telemetry.busy("checkpoint"):
                    self._checkpoints.save(copied)
            if copied is not None or not save:
                self._objective.commit(step, manifest.version, manifest.digest)
            return _Publication(step, manifest, exports, copied is not None)

        self._writing.start(write)
        if save and copied is None:
            written = self._settle()
            assert written is not None
            self._save()
            self._commit(written.manifest)

    def _settle(self) -> _Publication | None:
        """Wait until the step before is written, if a thread writes it. Raises what went wrong."""
        written = self._writing.wait()
        if written is not None:
            self._remember(written.step, written.manifest, written.exports)
            if written.saved:
                self._saved = written.step
                self._hold_versions()
        return written

    def _warn_unwritten(self) -> None:
        """A step has failed. Its error must not hide that the step before it could not be written."""
        try:
            self._settle()
        except Exception as error:
            telemetry.emit("warning", step=self.step, text=f"step {self.step} was not written: {error}")

    def _commit(self, manifest: Manifest) -> None:
        if self._ranks.first:
            self._objective.commit(self.step, manifest.version, manifest.digest)

    def _check_numbers(self, update: Update, again: bool) -> None:
        """`again`: the step was published before. It does not stop the run a second time: then no restart could go on
        with other settings."""
        if self._bad_steps == 0:
            return
        finite = math.isfinite(update.grad_norm)
        if not finite:
            telemetry.emit("warning", step=self.step, text=f"step {self.step} changed nothing: {update.why_unchanged}")
        if self._bad_steps >= self._config.max_bad_steps and not again:
            self._settle()
            what = "updates went too far and were taken back in part" if finite else "gradients were not finite"
            raise TrainingError(
                f"in the last {self._bad_steps} steps, up to step {self.step}, {what}",
                hint=f"set a lower learning rate than {update.lr:.2g} (training.optimizer.lr) and go on with --resume; "
                "drift and ess of the steps before show whether the policy ran away",
            )

    def _publish(self, metadata: dict[str, Any] | None = None) -> Manifest | None:
        """Publish the weights of this step as a version. None if the step was published before with other weights."""
        exports = self._exporter.export(self._model)
        known = self._published.get(self.step)
        if known is None:
            manifest = self._publish_new(self.step, exports, metadata or {})
        else:
            manifest = self._weights.manifest(Version(self.line, known), self._form)
            if not self._exporter.matches(manifest, exports):
                return None
        self._remember(self.step, manifest, exports)
        return manifest

    def _publish_new(self, step: int, exports: Exports, metadata: dict[str, Any]) -> Manifest:
        start, last = time.time(), self._exporter.last
        with telemetry.busy("publish"):
            number, parent = (last.number + 1, None) if last else self._beginning
            manifest = self._exporter.publish(number, exports, parent, {"step": step, **metadata})
        telemetry.emit(
            "publish",
            line=self.line,
            version=number,
            step=step,
            encoding=manifest.kind,
            bytes=manifest.bytes,
            delta_bytes=manifest.delta.bytes if manifest.delta else None,
            full_bytes=manifest.full_bytes,
            density=manifest.density,
            seconds=time.time() - start,
            digest=manifest.digest,
        )
        return manifest

    def _remember(self, step: int, manifest: Manifest, exports: Exports) -> None:
        if self._published.get(step) is None:
            self._published[step] = manifest.number
            self._leases.renew()
        self._objective.remember(manifest.digest, self._exporter.held(exports))

    def _save(self) -> None:
        with telemetry.busy("checkpoint"):
            self._checkpoints.save(self._state())
        self._saved = self.step
        self._hold_versions()

    def _state(self, *, copied: bool = False) -> Checkpoint:
        buffers = {f"{BUFFER}{name}": buffer for name, buffer in self._buffers().items()}
        tensors = {**self._optimizer.state(), **buffers, "rng": torch.get_rng_state()}
        return Checkpoint(self.line, self.step, self._bad_steps, copies_of(tensors) if copied else tensors)

    def _hold_versions(self) -> None:
        """Steps after a checkpoint may run again, and are then compared with their versions. So these are held until
        the run has finished; after a crash, for a day."""
        if self._ranks.first and self._published:
            oldest = min(self._checkpoints.steps(self.line))
            held = max((number for step, number in self._published.items() if step <= oldest), default=0)
            self._leases.renew([Version(self.line, held)])

    def _buffers(self) -> dict[str, Tensor]:
        """Tensors of a version that are not parameters, such as a gate's bias. No optimizer keeps them."""
        parameters = dict(self._model.named_parameters())
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in parameters}

    def _explained(self, what: str, parts: Sequence[MicroBatch] = ()) -> contextlib.AbstractContextManager[None]:
        """If memory runs out inside, the error says what `what` needed and which settings help."""
        return explain_out_of_memory(what, self._device, self._config, parts)

    # start and restart

    def _start(self) -> None:
        line = self._ranks.from_first(newest_line(self._weights, self._family))
        self._take_line(line, number=0, parent=self._parent)
        checkpoint = self._checkpoints.newest(self.line)
        if checkpoint is None:
            self._initialise()
        else:
            self._resume(checkpoint)
        self._lineage = trace_lineage(self._weights, self.line, self._form)

    def _take_line(self, line: str, number: int, parent: Version | None) -> None:
        """Publish on `line` from now on; if it has no version yet, it begins with `number`, a child of `parent`."""
        self.line = line
        self._beginning = (number, parent)
        self._exporter = Exporter(self._parallel, self._model, self._weights, line, self._forms, self._config)
        self._exporter.resume()
        self._published: dict[int, int] = {}  # step → version number, of the steps that may run again

    def _initialise(self) -> None:
        if self._exporter.last is not None:
            raise TrainingError(
                f"line {self.line!r} has versions up to {self._exporter.last.number} but no checkpoint to go on from",
                hint="restore checkpoints/, or start another line whose parent is a version of this one",
            )
        if self._parent is None:
            self._parallel.models.initialise(self._model, self._seed)
            self._optimizer = self._make_optimizer()
        elif not self._inherit(self._parent):
            self._start_from_version(self._parent)
        torch.manual_seed(self._seed)
        self._save()
        self._publish()

    def _inherit(self, parent: Version) -> bool:
        """Start from the masters in the parent's checkpoint. False if it has none that rounds to what was published."""
        if not self._ranks.from_first(self._weights.exists(parent, self._form)):
            return False  # an imported checkpoint
        manifest = self._weights.manifest(parent, self._form)
        checkpoint = self._checkpoints.at(parent.line, parent.number if manifest.step is None else manifest.step)
        if checkpoint is None or not goes_on(self._model, *checkpoint.parts()):
            return False
        state, buffers = checkpoint.parts()
        self._load_frozen()
        self._load_buffers(buffers)
        self._optimizer = self._make_optimizer(inherited(self._model, self._config.optimizer, state))
        if self._exporter.matches(manifest, self._exporter.export(self._model)):
            return True
        text = f"the checkpoint of {parent} holds other weights than were published: its masters are not used"
        if self._ranks.first:
            telemetry.emit("warning", text=text)
        return False

    def _start_from_version(self, parent: Version) -> None:
        """Start from published values, each moved inside its quantum, or small updates would change nothing. What an
        imported checkpoint has more precision of than the form that is served now stays as it is."""
        form = load_published(self._parallel, self._model, self._weights, parent, self._form)
        if not adds_anything(self._model):
            self._model.begin_adapters(self._seed)
        self._optimizer = self._make_optimizer()
        coded = self._form in (form, form_before_import(self._weights, parent, form))
        self._optimizer.dither(zlib.crc32(f"{self._seed} {self.line} {parent}".encode()), coded)

    def _load_frozen(self) -> None:
        known = self._exporter.last.version if self._exporter.last else self._parent
        load_frozen(self._parallel, self._model, self._weights, known, self._form, self._seed)

    def _resume(self, checkpoint: Checkpoint) -> None:
        self._load(checkpoint)
        published = published_since(self._weights, self.line, self._form, self.step)
        self._published = self._ranks.from_first(published)
        if self._published and self.step not in self._published:
            return  # mid-training: this step was not one to publish
        manifest = self._publish()
        if manifest is None:
            self._fork(f"the checkpoint of step {self.step} holds other weights than were published")
        elif self.step > 0:
            self._commit(manifest)

    def _load(self, checkpoint: Checkpoint) -> None:
        state, buffers = checkpoint.parts()
        torch.set_rng_state(checkpoint.tensors["rng"])
        self._load_frozen()
        self._load_buffers(buffers)
        self._optimizer = self._make_optimizer(state)
        self.step = self._saved = checkpoint.step
        self._bad_steps = checkpoint.bad_steps

    def _make_optimizer(self, state: Mapping[str, Tensor] | None = None) -> MasterOptimizer:
        return MasterOptimizer(self._model, self._config.optimizer, self._form, state, self._parallel.rows)

    def _load_buffers(self, saved: Mapping[str, Tensor]) -> None:
        own = self._buffers()
        if own.keys() != saved.keys():
            raise TrainingError(
                f"the checkpoint is of another model: it has the buffers {sorted(saved)}, the model {sorted(own)}",
                hint="use the [model] it was made with, or give this model another line",
            )
        for name, buffer in own.items():
            buffer.copy_(saved[name])

    def _fork(self, why: str) -> None:
        """Continue from the newest checkpoint in a new line. Published versions stay and are abandoned."""
        checkpoint = self._checkpoints.newest(self.line)
        assert checkpoint is not None, "a line begins with a checkpoint"
        parent = Version(self.line, max(n for step, n in self._published.items() if step <= checkpoint.step))
        first = parent.number + (checkpoint.step < self.step)  # of those that are abandoned
        names = [str(Version(self.line, n)) for n in self._weights.numbers(self.line, self._form) if n >= first]
        self._load(checkpoint)
        line = self._ranks.from_first(next_line(self._weights, self._family))
        self._take_line(line, parent.number, parent)
        self._save()
        if self._ranks.first:
            self._leases.release(parent.line)
        manifest = self._publish({"abandons": names, "reason": why})
        assert manifest is not None, "a new line has nothing to differ from"
        if self.step > 0:
            self._commit(manifest)
        self._lineage = trace_lineage(self._weights, self.line, self._form)
        telemetry.emit("new_line", line=self.line, parent=str(parent), step=self.step, abandons=names, reason=why)
