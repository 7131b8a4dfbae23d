"""New versions over long-distance links: when three regions serve them, compared with sending the whole weights.

    python -m benchmarks.weights_wan [--quick] [--versions 5]

This process is the trainer and publishes into a directory, the home store. Another process serves it over HTTP. Each of
three regions is a process with a store, a mirror and a follower, behind a link of its own (benchmarks.relay). A copy of
the weights, into which updates are written, simulates an engine; at the end its digest is compared. The time of a
version runs from the trainer's call of publish until the last region has written it into its engine. Weights and
updates are synthetic, drawn by the law that was recorded at lr 1e-6 .

The whole transfer: the same bytes in one object, written by the trainer, read by every region in parallel ranges over
the same links, verified, and copied into the engine. The first version, a compressed snapshot, is reported too.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from rich.console import Console
from rich.table import Table

from benchmarks.output import at_least, finish
from benchmarks.relay import RelayProcess
from benchmarks.weights_codec import FOLDER, REFERENCE, Recording, exponents, flat, ordered
from rollmill.storage.objects import Objects
from rollmill.storage.parallel import read_ranges
from rollmill.weights.format.codings import Changes, scatter
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.line_follower import LineFollower, Update
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.regions.mirror import Mirror
from rollmill.weights.writing.publisher import Publisher

LINE = "main"
RAW = "raw/weights"
REGIONS = ("americas", "europe", "asia")
MBIT, RTT_MS = 200.0, 120.0  # of each link
SOONER = 30.0  # the bar, for 1 GiB
_WAIT_SECONDS = 600.0
_STAGES = ("publish", "notice", "mirror", "fetch", "decode", "apply")


# --- a region


class Engine:
    """The weights that an engine would compute with, separate from the follower's image."""

    def __init__(self) -> None:
        self.tensors: dict[str, HostTensor] = {}

    def apply(self, update: Update) -> None:
        if update.patches is None:
            self.copy({name: tensor.data for name, tensor in update.tensors.items()}, update.tensors)
            return
        for name, patches in update.patches.items():
            if patches is None:
                np.copyto(self.tensors[name].data, update.tensors[name].data)
                continue
            tensor = self.tensors[name]
            for patch in patches:
                scatter(tensor.data[patch.start * tensor.width :], Changes(patch.indices, patch.values), tensor.width)

    def copy(self, data: dict[str, np.ndarray], layout: dict[str, HostTensor]) -> None:
        for name, array in data.items():
            if name not in self.tensors:
                tensor = layout[name]
                self.tensors[name] = HostTensor(tensor.dtype, tensor.shape, np.empty(array.size, np.uint8))
            np.copyto(self.tensors[name].data, array)

    def digest(self) -> str:
        return root_digest(describe(self.tensors))


def serve_region(source: str, folder: Path, versions: int) -> None:
    """Follows the home's line. Prints a line of JSON per version, then answers commands on standard input."""
    mirror = Mirror(Objects.open(source), Objects.open(folder))
    follower, engine = LineFollower(mirror.target, LINE, mirror=mirror), Engine()
    _say(ready=True)
    last: Update | None = None
    for _ in range(versions):
        while True:
            looked = time.time()
            if (arrived := follower.poll()) is not None:
                break
            follower.wait(20.0 if last and not follower.problem else 0.1)
        began = time.perf_counter()
        engine.apply(arrived)
        seconds = {**arrived.seconds, "apply": time.perf_counter() - began, "notice": looked - arrived.created_at}
        _say(version=arrived.policy.number, at=time.time(), seconds=seconds, problem=follower.problem)
        last = arrived
    assert last is not None
    _say(digest=engine.digest(), expected=last.policy.digest)
    sys.stdin.readline()  # the whole weights have been written
    _say(digest=fetch_whole(mirror.source.objects, engine, last), at=time.time())


def fetch_whole(objects: Objects, engine: Engine, last: Update) -> str:
    """Reads all weights from one object, in the order of names, verifies and copies them. Returns their digest."""
    size = objects.head(RAW)
    assert size is not None
    piece = 16 << 20
    ranges = [(RAW, start, min(piece, size - start)) for start in range(0, size, piece)]
    whole, position, hasher = np.empty(size, np.uint8), 0, blake3()
    for data in read_ranges(objects, ranges):
        hasher.update(data)
        whole[position : position + len(data)] = np.frombuffer(data, np.uint8)
        position += len(data)
    digest, offset, parts = hasher.hexdigest(), 0, {}
    for name in sorted(engine.tensors):
        parts[name] = whole[offset : offset + engine.tensors[name].data.size]
        offset += parts[name].size
    engine.copy(parts, last.tensors)
    return digest


def serve_home(folder: Path) -> None:
    from aiohttp import web

    from rollmill.storage.object_server import object_app

    app = object_app(Objects.open(folder))
    web.run_app(app, host="127.0.0.1", port=0, print=lambda text: _say(text=text))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# --- the measurement


class Child:
    """A process of this module that writes lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights_wan", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def next(self) -> dict[str, Any]:
        line = self._lines.get(timeout=_WAIT_SECONDS)
        if line is None:
            raise RuntimeError("a process of the benchmark ended early")
        return line

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Measured:
    bytes: int  # of the weights
    whole_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    snapshot_bytes: int = 0
    seconds: list[float] = field(default_factory=list)  # per delta, until the last region serves it
    delta_bytes: list[int] = field(default_factory=list)
    density: list[float] = field(default_factory=list)
    # of the last region
    stages: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in _STAGES})

    @property
    def sooner(self) -> float:
        return self.whole_seconds / float(np.median(self.seconds))


def measure(mebibytes: int, recording: Recording, versions: int = 5) -> Measured:
    law = Law.of(recording)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "home").mkdir()
        home = Child("--home", str(folder / "home"))
        stack.callback(home.close)
        port = int(home.next()["text"].split("127.0.0.1:")[1].split()[0].rstrip("/ ="))
        regions = []
        for name in REGIONS:
            relay = stack.enter_context(RelayProcess(("127.0.0.1", port), MBIT, RTT_MS))
            url = f"http://127.0.0.1:{relay.port}"
            region = Child("--region", str(folder / name), "--source", url, "--versions", str(versions + 1))
            stack.callback(region.close)
            regions.append(region)
        for region in regions:
            region.next()
        return _run(regions, Objects.open(folder / "home"), mebibytes, law, versions)


def _run(regions: list[Child], objects: Objects, mebibytes: int, law: Law, versions: int) -> Measured:
    tensors = draw_weights(mebibytes)
    result = Measured(sum(tensor.data.nbytes for tensor in tensors.values()))
    publisher = Publisher(WeightStore(objects), LINE, snapshot_every=1000)
    for number in range(versions + 1):
        if number:
            result.density.append(update(tensors, law, seed=number))
        called = time.time()
        manifest = publisher.publish(number, tensors)
        answers = [region.next() for region in regions]
        assert all(answer["version"] == number for answer in answers), answers
        served = max(answer["at"] for answer in answers)
        slowest = max(answers, key=lambda answer: answer["at"])["seconds"] | {"publish": manifest.created_at - called}
        if number == 0:
            result.snapshot_seconds, result.snapshot_bytes = served - called, manifest.bytes
            continue
        result.seconds.append(served - called)
        result.delta_bytes.append(manifest.bytes)
        for stage in _STAGES:
            result.stages[stage].append(slowest[stage])
    for answer in [region.next() for region in regions]:
        if answer["digest"] != answer["expected"]:
            raise RuntimeError(f"an engine does not hold the weights it serves: {answer}")
    result.whole_seconds = _send_whole(regions, objects, tensors)
    return result


def _send_whole(regions: list[Child], objects: Objects, tensors: dict[str, HostTensor]) -> float:
    called = time.time()
    data = b"".join([tensors[name].data.data for name in sorted(tensors)])
    objects.put(RAW, data)
    digest = blake3(data).hexdigest()
    for region in regions:
        region.tell("whole")
    answers = [region.next() for region in regions]
    if any(answer["digest"] != digest for answer in answers):
        raise RuntimeError("the whole transfer arrived with other bytes")
    return max(answer["at"] for answer in answers) - called


def report(result: Measured) -> None:
    size = result.bytes / (1 << 20)
    title = f"{size:.0f} MiB, {len(REGIONS)} regions, {MBIT:.0f} Mbit/s and {RTT_MS:.0f} ms each: all serve it after"
    table = Table(title=title)
    for column in ("what", "MB over each link", "seconds", "least–most", "sooner"):
        table.add_column(column)
    whole = result.whole_seconds
    table.add_row("whole weights", f"{result.bytes / 1e6:.1f}", f"{whole:.2f}", "", "1")
    snapshot = (f"{result.snapshot_bytes / 1e6:.1f}", f"{result.snapshot_seconds:.2f}", "")
    table.add_row("snapshot", *snapshot, f"{whole / result.snapshot_seconds:.1f}")
    spread = f"{min(result.seconds):.2f}–{max(result.seconds):.2f}"
    delta = (f"{np.mean(result.delta_bytes) / 1e6:.2f}", f"{np.median(result.seconds):.2f}", spread)
    table.add_row(f"delta ({100 * np.mean(result.density):.2f} % changed)", *delta, f"{result.sooner:.1f}")
    Console().print(table)
    print("of a delta: " + ", ".join(f"{name} {np.median(values):.2f} s" for name, values in result.stages.items()))


DEVIATION = 0.02  # of the recorded models at their start
RESIDUAL = 12**-0.5  # a factor for matrices that add to the residual stream
_BLOCK = 1 << 20  # elements drawn at a time
_SIZES = {  # MiB: width, layers
    64: (512, 9),
    256: (1024, 9),
    512: (1024, 21),
    1024: (2048, 9),
}


@dataclass(frozen=True)
class Law:
    """By exponent of the old element: the probability to change, and some of the recorded moves."""

    chances: np.ndarray  # float32 [256]
    moves: np.ndarray  # int16 [256, 4096], in units in the last place

    @classmethod
    def of(cls, recording: Recording, model: str = "dense", rate: str = REFERENCE) -> Law:
        before, after = recording.step(model, rate)
        old, new = flat(before), flat(after)
        changed = np.flatnonzero(old != new)
        exponent, moved = exponents(old[changed]), ordered(new[changed]) - ordered(old[changed])
        total = np.bincount(exponents(old), minlength=256)
        chances = (np.bincount(exponent, minlength=256) / np.maximum(total, 1)).astype(np.float32)
        random = np.random.default_rng(0)
        moves = np.ones((256, 4096), np.int16)
        for value in np.unique(exponent):
            moves[value] = random.choice(np.clip(moved[exponent == value], -32000, 32000), 4096)
        return cls(chances, moves)


def shapes(mebibytes: int) -> dict[str, tuple[int, ...]]:
    width, layers = _SIZES[mebibytes]
    inner = width * 11 // 4
    result: dict[str, tuple[int, ...]] = {"embedding": (16 * width, width), "head": (16 * width, width)}
    result["norm"] = (width,)
    for layer in range(layers):
        result |= {
            f"layers.{layer}.attention_norm": (width,),
            f"layers.{layer}.mlp_norm": (width,),
            f"layers.{layer}.qkv": (width * 3 // 2, width),
            f"layers.{layer}.output": (width, width),
            f"layers.{layer}.mlp.gate_up": (2 * inner, width),
            f"layers.{layer}.mlp.down": (width, inner),
        }
    return result


def draw_weights(mebibytes: int, seed: int = 0) -> dict[str, HostTensor]:
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(mebibytes).items():
        bits = np.empty(int(np.prod(shape)), np.uint16)
        deviation = DEVIATION * (RESIDUAL if name.endswith(("output", "down")) else 1.0)
        for start in range(0, bits.size, _BLOCK):
            part = bits[start : start + _BLOCK]
            values = random.standard_normal(part.size, dtype=np.float32) * np.float32(deviation)
            part[:] = (values if len(shape) > 1 else values + 1).view(np.uint32) >> 16
        tensors[name] = HostTensor("bf16", shape, bits.view(np.uint8))
    return tensors


def update(tensors: dict[str, HostTensor], law: Law, seed: int) -> float:
    """One step in place. Returns the share of changed elements."""
    random = np.random.default_rng(seed)
    changed = total = 0
    for tensor in tensors.values():
        bits = tensor.data.view(np.uint16)
        for start in range(0, bits.size, _BLOCK):
            part = bits[start : start + _BLOCK]
            chance = law.chances[(part >> np.uint16(7)) & np.uint16(0xFF)]
            where = np.flatnonzero(random.random(part.size, dtype=np.float32) < chance)
            old = part[where]
            moves = law.moves[exponents(old), random.integers(0, law.moves.shape[1], where.size)]
            part[where] = unordered(ordered(old) + moves)
            changed += where.size
            total += part.size
    return changed / total


def unordered(integers: np.ndarray) -> np.ndarray:
    """The inverse of `recordings.ordered`."""
    return np.where(integers < 0, (-integers - 1) | 0x8000, integers).astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a model of 64 MiB instead of 1 GiB")
    parser.add_argument("--versions", type=int, default=5, help="deltas to measure")
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--region", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.home:
        serve_home(given.home)
    elif given.region:
        serve_region(given.source, given.region, given.versions)
    else:
        recording = Recording(given.recording or FOLDER / ("quick" if given.quick else "full"))
        result = measure(64 if given.quick else 1024, recording, given.versions)
        report(result)
        bars = {} if given.quick else {"wan_sooner": at_least(result.sooner, SOONER)}  # a bar for 1 GiB
        finish("weights_wan", {"wan_sooner": result.sooner}, bars)


if __name__ == "__main__":
    main()
