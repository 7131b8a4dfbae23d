"""New weights while the engine decodes: the pause, and the time until the first token of the new version.

    python -m benchmarks.swap [--quick]

A trainer's versions are published to a store in a directory as deltas, and a follower brings them to an engine that is
decoding. For comparison the same engine gets each version as a whole (a full reload) instead of as patches. The update
is SYNTHETIC: 1.2 % of the elements change by one unit in the last place. Without CUDA the model is small.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import at_most, finish
from benchmarks.train_step_shapes import SMOLLM2
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.inference.follower import EngineFollower
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.models.host import to_host
from rollmill.storage.objects import Objects
from rollmill.types import Sampling, Version
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.follower import Follower, Update
from rollmill.weights.reading.store import WeightStore
from rollmill.weights.writing.publisher import Publisher

DENSITY, BATCH = 0.012, 16
SMALL = SMOLLM2 | {"vocab_size": 8192, "layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 704}
Tensors = Mapping[str, HostTensor]


class Recording:
    """A source that remembers what it gave, and gives it whole instead of as patches if `whole`."""

    def __init__(self, source: Follower) -> None:
        self._source, self.whole = source, False
        self.problem: str | None = None

    def poll(self) -> Update | None:
        return self._given(self._source.poll())

    def again(self) -> Update | None:
        return self._given(self._source.again())

    def _given(self, update: Update | None) -> Update | None:
        return replace(update, patches=None, base=None) if update is not None and self.whole else update

    def hint(self) -> None:
        self._source.hint()

    def wait(self, seconds: float) -> None:
        self._source.wait(seconds)

    def close(self) -> None:
        self._source.close()


async def measure(device: Device, quick: bool) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    model = ModelConfig.model_validate(SMALL if device == "cpu" else SMOLLM2)
    versions = 4 if quick else 12
    with tempfile.TemporaryDirectory() as directory:
        store = WeightStore(Objects.open(Path(directory)))
        publisher = Publisher(store, "main", snapshot_every=1000)
        tensors = _first(model)
        publisher.publish(0, tensors, None)
        config = EngineConfig(max_batch=BATCH, cache_tokens=BATCH * model.max_context, poll_seconds=0.01)
        source = Recording(Follower(store, "main"))
        async with EmbeddedEngine(model, config, device=device) as engine:
            follower = asyncio.create_task(EngineFollower(engine, source, config.poll_seconds).run())
            load = [asyncio.create_task(_decode_always(engine, number)) for number in range(BATCH - 1)]
            try:
                figures: dict[str, float] = {"model_bytes": sum(each.data.nbytes for each in tensors.values())}
                number = 1
                for whole in (False, True):
                    source.whole, ways = whole, []
                    for _ in range(versions):
                        tensors = _changed(tensors, number)
                        ways.append(await _swap(engine, publisher, number, tensors))
                        number += 1
                    figures |= _figures("reload" if whole else "delta", ways[1:])  # the first warms up
            finally:
                for task in (follower, *load):
                    task.cancel()
                await asyncio.gather(follower, *load, return_exceptions=True)
    bars = {"delta_first_token_s": at_most(figures["delta_first_token_s"], 0.5)}
    if device == "cuda":
        bars["delta_pause_ms"] = at_most(figures["delta_pause_ms"], 5)
    return figures, bars


async def _swap(engine: EmbeddedEngine, publisher: Publisher, number: int, tensors: Tensors) -> tuple[float, ...]:
    """Seconds: the pause; publishing; from its begin, and from its end, to the first token of the version."""
    before = engine.histograms["pause_seconds"].sum
    begun = time.perf_counter()
    waiting = asyncio.create_task(_first_token_at(engine, number))
    await asyncio.to_thread(publisher.publish, number, tensors, Version("main", number - 1))
    published = time.perf_counter()
    first = await waiting
    return engine.histograms["pause_seconds"].sum - before, published - begun, first - begun, first - published


async def _first_token_at(engine: EmbeddedEngine, number: int) -> float:
    """A request that waits for the version: when its first token came."""
    request = GenerateRequest(f"v{number}", [1, 2, 3], Sampling(max_tokens=1), "production", min_version=number)
    async for _ in engine.generate(request):
        pass
    return time.perf_counter()


async def _decode_always(engine: EmbeddedEngine, number: int) -> None:
    for turn in range(1_000_000):
        request = GenerateRequest(f"load {number}", [number + 1, turn % 100 + 1, 3], Sampling(max_tokens=200))
        async for _ in engine.generate(request):
            pass


def _figures(name: str, ways: list[tuple[float, ...]]) -> dict[str, float]:
    pause, publish, begun, published = (statistics.median(column) for column in zip(*ways, strict=True))
    return {
        f"{name}_pause_ms": pause * 1e3,
        f"{name}_pause_ms_most": max(way[0] for way in ways) * 1e3,
        f"{name}_publish_s": publish,
        f"{name}_first_token_s": begun,
        f"{name}_first_token_after_publishing_s": published,
    }


def _first(model: ModelConfig) -> Tensors:
    decoder = Decoder(model)
    decoder.initialise(1)
    return to_host(decoder.state_dict())


def _changed(tensors: Tensors, number: int) -> Tensors:
    random = np.random.default_rng(number)
    changed = {}
    for name, tensor in tensors.items():
        bits = tensor.data.copy().view(np.uint16)
        bits[random.integers(0, bits.size, max(1, int(bits.size * DENSITY)))] ^= 1
        changed[name] = HostTensor(tensor.dtype, tensor.shape, bits.view(np.uint8))
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer versions")
    quick = parser.parse_args().quick
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    figures, bars = asyncio.run(measure(device, quick))
    for name, value in figures.items():
        print(f"{name:44} {value:12.4g}")
    finish("swap", figures, bars)


if __name__ == "__main__":
    main()
