"""Checkpoints of an episode: its conversation and the files of its machine, kept between two turns.

    harness: a turn is over ─► snapshot of the machine, as bytes ─► one object, checkpoints/TRAJECTORY, replaced whole

If the machine's host dies, the rollout goes on in a machine of another host. If the dispatcher dies, the next one goes
on with the same trajectory. The session of the gateway stays open meanwhile. It has all tokens that were sampled; those
after the checkpoint become an abandoned branch of the trajectory, and the policy does not learn from them.

An episode that has no checkpoint begins again, as a fresh attempt: its machine's state cannot leave its host, its
harness cannot go on in the middle, or it was interrupted before its first one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from typing import Any

import zstandard
from pydantic import BaseModel, ConfigDict

from rollmill.environments.task import Task
from rollmill.environments.task_machine import create_machine, make_links
from rollmill.errors import HarnessError, MachineError, ObjectMissing, RollmillError
from rollmill.machines.lasting import LastingMachine
from rollmill.machines.machine import Machine, Snapshot, release
from rollmill.rollouts.clock import Clock
from rollmill.rollouts.rollout_context import RolloutContext
from rollmill.storage.objects import Objects

log = logging.getLogger(__name__)
_LENGTH = struct.Struct("!Q")
_LARGEST = 1 << 30  # bytes of an unpacked state


class Checkpoint(BaseModel):
    model_config = ConfigDict(frozen=True)

    image: str  # of the machine, with its digest
    min_version: int  # of the session
    seconds: float  # the episode's own, so far
    harness: dict[str, Any]  # as the harness gave it
    machine: bytes  # its state


class EpisodeProgress:
    """What the harness tells how far it has come."""

    def __init__(
        self, context: RolloutContext, trajectory: str, machine: Machine, clock: Clock, min_version: int
    ) -> None:
        self.state: dict[str, Any] | None = None
        self._context, self._trajectory = context, trajectory
        self._machine, self._clock, self._min_version = machine, clock, min_version
        self._last = time.monotonic()
        self._possible = machine.capabilities.snapshot != "none"

    async def reached(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint if the last one is old enough. If that fails, the episode goes on without."""
        every_s = self._context.checkpoint_s
        if every_s is None or not self._possible or time.monotonic() - self._last < every_s:
            return
        try:
            with self._clock.held():
                self._possible = await self._keep(state)
        except (OSError, RollmillError, ValueError, TypeError) as error:  # also a state that is no JSON
            log.warning("%s has no new checkpoint: %s", self._trajectory, error)
        self._last = time.monotonic()

    async def _keep(self, state: dict[str, Any]) -> bool:
        host, snapshot = self._context.machines, await self._machine.snapshot()
        try:
            exported = await host.export(snapshot)
        finally:
            await release(host, snapshot)
        if exported is None or not isinstance(exported.state, bytes):
            return False
        seconds = await self._clock.seconds()
        found = Checkpoint(
            image=self._machine.image,
            min_version=self._min_version,
            seconds=seconds,
            harness=state,
            machine=exported.state,
        )
        storing = asyncio.ensure_future(asyncio.to_thread(_store, self._context.objects, self._trajectory, found))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:  # the thread goes on: it must not store after `forget` has deleted
            await asyncio.wait([storing])
            storing.exception()
            raise
        return True


def are_kept(context: RolloutContext) -> bool:
    """Whether the episodes of this run have checkpoints: its settings and its harness say so."""
    return context.checkpoint_s is not None and context.harness.resumable


async def find(context: RolloutContext, trajectory: str) -> Checkpoint | None:
    """The last checkpoint of an episode; None if there is none that can be used."""
    if not are_kept(context):
        return None
    try:
        return await asyncio.to_thread(_load, context.objects, trajectory)
    except ObjectMissing:
        return None
    except HarnessError as error:
        log.warning("%s begins again: %s", trajectory, error)
        return None


async def forget(context: RolloutContext, trajectory: str) -> None:
    if context.checkpoint_s is not None:
        try:
            await asyncio.to_thread(context.objects.delete, _key(trajectory))
        except RollmillError:
            log.warning("the checkpoint of %s was not deleted", trajectory, exc_info=True)


async def start_machine(context: RolloutContext, task: Task, found: Checkpoint | None) -> Machine:
    """A machine at the start of the task, or as it was at the checkpoint."""
    if found is None:
        return await create_machine(context.machines, task)
    machine = await context.machines.create(task.image, snapshot=Snapshot(found.image, found.machine))
    try:
        if machine.image != found.image:
            raise MachineError(f"the episode began on {found.image}, and this host has {machine.image}")
        await make_links(machine, task.links)  # a snapshot of files has no links
    except BaseException:
        await machine.close()
        raise
    return LastingMachine(machine) if task.processes else machine


def _store(objects: Objects, trajectory: str, found: Checkpoint) -> None:
    # ASCII: names that the agent gave its files may not be Unicode, and then have lone surrogates
    facts = json.dumps(found.model_dump(exclude={"machine"})).encode("ascii")
    objects.put(_key(trajectory), _LENGTH.pack(len(facts)) + facts + zstandard.compress(found.machine, 1))


def _load(objects: Objects, trajectory: str) -> Checkpoint:
    data = objects.get(_key(trajectory))
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        state = zstandard.ZstdDecompressor().decompress(data[end:], max_output_size=_LARGEST)
        return Checkpoint.model_validate({**json.loads(data[_LENGTH.size : end]), "machine": state})
    except (struct.error, ValueError, TypeError, RecursionError, zstandard.ZstdError) as error:
        raise HarnessError(f"its checkpoint is damaged: {error}") from None


def _key(trajectory: str) -> str:
    return f"checkpoints/{trajectory}"
