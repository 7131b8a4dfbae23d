"""New weights while the engine decodes: the pause, and the time until the first token of the new version.

    python -m benchmarks.swap [--quick]

A process of its own exports and publishes versions to a store in a directory, as a trainer does, and a follower brings
them to an engine that is decoding, on the same device. For comparison the same engine gets each version as a whole (a
full reload) instead of as patches. The update is SYNTHETIC: 1.2 % of the elements change by one unit in the last place.
Without CUDA the model is small.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import at_most, finish
from benchmarks.train_step_models import SMOLLM2, draw_
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.inference.follower import EngineFollower
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.storage.objects import Objects
from rollmill.training.config import TrainingConfig
from rollmill.training.publishing.exporter import Exporter
from rollmill.training.single import SINGLE
from rollmill.types import Sampling, Version
from rollmill.weights.reading.line_follower import LineFollower, Update
from rollmill.weights.reading.weight_store import WeightStore

DENSITY, BATCH = 0.012, 16
SMALL = SMOLLM2 | {"vocab_size": 8192, "layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "mlp_width": 704}


class Recording:
    """A source that remembers what it gave, and gives it whole instead of as patches if `whole`."""

    def __init__(self, source: LineFollower) -> None:
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


def train(directory: Path, config: ModelConfig, device: Device, orders: Connection) -> None:
    """A trainer that makes the version it is asked for, and answers with seconds: when the step had ended, when its
    weights were exported (the next step may begin), and when they were published."""
    with torch.device(device):
        model = Decoder(config, torch.bfloat16)
    draw_(model, 1)
    store = WeightStore(Objects.open(directory))
    publisher = Exporter(SINGLE, model, store, "main", ["bf16"], TrainingConfig(snapshot_every=1000))
    while (number := orders.recv()) is not None:
        _change(model, number)
        if device == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter()
        exported = publisher.export(model)
        moved = time.perf_counter()
        publisher.publish(number, exported, Version("main", number - 1) if number else None, {})
        orders.send((ended, moved, time.perf_counter()))


@contextmanager
def child(target: Callable[..., None], *arguments: object, stop: object) -> Iterator[Connection]:
    """A process that gets the other end of the connection as its last argument, and ends when it is sent `stop`."""
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()  # if the process ends, so does `recv`
    try:
        yield orders
    finally:
        with suppress(OSError):  # it may have died
            orders.send(stop)
        process.join(10)
        process.kill()


async def measure(device: Device, quick: bool) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    model = ModelConfig.model_validate(SMALL if device == "cpu" else SMOLLM2)
    versions = 4 if quick else 12
    with tempfile.TemporaryDirectory() as directory, child(train, Path(directory), model, device, stop=None) as orders:
        _ordered(orders, 0)
        config = EngineConfig(max_batch=BATCH, cache_tokens=BATCH * model.max_context, poll_seconds=0.01)
        source = Recording(LineFollower(WeightStore(Objects.open(Path(directory))), "main"))
        async with EmbeddedEngine(model, config, device=device) as engine:
            follower = asyncio.create_task(EngineFollower(engine, source, config.poll_seconds).run())
            load = [asyncio.create_task(decode_always(engine, number)) for number in range(BATCH - 1)]
            try:
                figures: dict[str, float] = {}
                number = 1
                for whole in (False, True):
                    source.whole, ways = whole, []
                    for _ in range(versions):
                        ways.append(await _swap(engine, orders, number))
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


def _ordered(orders: Connection, number: int) -> tuple[float, float, float]:
    orders.send(number)
    times: tuple[float, float, float] = orders.recv()
    return times


async def _swap(engine: EmbeddedEngine, orders: Connection, number: int) -> tuple[float, ...]:
    """Seconds: the pause; exporting; publishing; from the step's end, and from publishing, to the version's first
    token."""
    before = engine.histograms["pause_seconds"].sum
    waiting = asyncio.create_task(_first_token_at(engine, number))
    ended, exported, published = await asyncio.to_thread(_ordered, orders, number)
    first = await waiting
    pause = engine.histograms["pause_seconds"].sum - before
    return pause, exported - ended, published - exported, first - ended, first - published


async def _first_token_at(engine: EmbeddedEngine, number: int) -> float:
    """A request that waits for the version: when its first token came."""
    request = GenerateRequest(f"v{number}", [1, 2, 3], Sampling(max_tokens=1), "production", min_version=number)
    async for _ in engine.generate(request):
        pass
    return time.perf_counter()


async def decode_always(engine: EmbeddedEngine, number: int) -> None:
    for turn in range(1_000_000):
        request = GenerateRequest(f"load {number}", [number + 1, turn % 100 + 1, 3], Sampling(max_tokens=200))
        async for _ in engine.generate(request):
            pass


def _figures(name: str, ways: list[tuple[float, ...]]) -> dict[str, float]:
    pause, export, publish, ended, published = (statistics.median(column) for column in zip(*ways, strict=True))
    return {
        f"{name}_pause_ms": pause * 1e3,
        f"{name}_pause_ms_most": max(way[0] for way in ways) * 1e3,
        f"{name}_export_s": export,
        f"{name}_publish_s": publish,
        f"{name}_first_token_s": ended,
        f"{name}_first_token_s_most": max(way[3] for way in ways),
        f"{name}_first_token_after_publishing_s": published,
    }


@torch.no_grad()
def _change(model: Decoder, number: int) -> None:
    generator = torch.Generator(model.embedding.device).manual_seed(number)
    for parameter in model.parameters():
        bits = parameter.view(-1).view(torch.int16)
        count = max(1, int(bits.numel() * DENSITY))
        places = torch.randint(bits.numel(), (count,), generator=generator, device=bits.device)
        bits[places] = bits[places] ^ 1


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
