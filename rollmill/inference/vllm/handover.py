"""New weights on their way to the vLLM server: one safetensors file, under our tensor names (`plugin` reads it).

It is written beside decoding, into the directory that engine and server share, and lives as long as the load. It is
never forced to disk, so it normally stays in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollmill.errors import WeightsError
from rollmill.types import PolicyRef
from rollmill.weights.files.safetensors import host_entries, write_entries
from rollmill.weights.format.manifest import Layout, describe, layout_of, root_digest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.line_follower import Update

FORM = "bf16"  # the only form that is served: vLLM's own quantised layouts are not ours
NAME = "weights.safetensors"


class Handover:
    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._layout: Layout | None = None  # of the first version

    @contextlib.asynccontextmanager
    async def written(self, update: Update) -> AsyncIterator[Path]:
        """The file of an update whose bytes have been checked. Raises WeightsError if it cannot be handed over.
        The server knows nothing of it then."""
        try:
            await asyncio.to_thread(self._write, update.policy, update.tensors)
            yield self._path
        finally:
            self._path.unlink(missing_ok=True)

    def _write(self, policy: PolicyRef, tensors: Tensors) -> None:
        what = f"{policy.line}@{policy.number}"
        if policy.form != FORM:
            raise WeightsError(f"{what}: a vLLM engine serves {FORM}, not {policy.form}", hint=f'set form = "{FORM}"')
        layout = layout_of(tensors)
        if self._layout is not None and layout != self._layout:
            raise WeightsError(f"{what}: these are the weights of another model", hint="the served version stays")
        if root_digest(describe(tensors)) != policy.digest:
            raise WeightsError(
                f"{what}: the bytes that arrived do not have digest {policy.digest}",
                hint="the previous version is served meanwhile; `rollmill weights verify` checks what is stored",
            )
        try:
            with self._path.open("wb") as file:
                write_entries(file, host_entries(tensors))
        except OSError as error:
            raise WeightsError(
                f"{what}: {self._path} cannot be written: {error.strerror}",
                hint="is the disk full? TMPDIR names another one; the previous version is served meanwhile",
            ) from None
        self._layout = layout
