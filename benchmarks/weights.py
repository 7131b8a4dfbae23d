"""Weight deltas on recorded steps of RL, compared with the alternatives; then the store end to end.

    python -m benchmarks.weights [--quick] [--recording FOLDER] [--no-wan]

Sizes, speeds on one core, and limits of this machine are measured in one run on the same recorded versions (made by
`benchmarks.record_deltas` if there are none). Then publishing and following end to end, the memory of each role in its
own process, three regions across slow links (`benchmarks.weights_wan`), and with a GPU its kernels. `--quick` uses
smaller recordings and models: it shows that everything runs, and leaves out the bars for large models.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from benchmarks import weights_codec as codec
from benchmarks import weights_memory, weights_wan
from benchmarks.output import at_least, at_most, finish
from benchmarks.recordings import FOLDER, REFERENCE, Recording, Version
from benchmarks.weights_codec import PULSE, XOR, Race, Spread, faster
from rollmill.storage.objects import Objects
from rollmill.weights.format.codings import Goal
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.line_follower import Follower
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher

CONSOLE = Console(width=160)
_MIB = 1 << 20
Figures = dict[str, float]
Bars = dict[str, dict[str, Any]]


class Scale(NamedTuple):
    """The amount of work."""

    timed_bytes: int  # at the reference learning rate; at the others each recording once
    repeats: int
    end_to_end_bytes: int
    memory_mebibytes: int
    wan_mebibytes: int
    wan_versions: int


FULL = Scale(400 << 20, 7, 512 << 20, 512, 1024, 5)
QUICK = Scale(64 << 20, 3, 64 << 20, 64, 64, 2)


# --- sizes and speeds


def measure_sizes(recording: Recording) -> dict[tuple[str, str], dict[str, float]]:
    """Returns sizes by model and learning rate, and prints the table of ratios."""
    table = Table(title="times smaller than the whole weights")
    measured, rows = {}, {}
    for model in recording.models:
        for rate in recording.rates(model):
            pairs = codec.chunks(*recording.step(model, rate))
            sizes = measured[model, rate] = codec.sizes(pairs)
            picks = codec.picks(pairs)
            changed = sum(np.count_nonzero(old != new) for old, new in pairs) / sum(new.size for _, new in pairs)
            rows[model, rate] = [f"{100 * changed:.2f}", *(_ratio(sizes, name) for name in sizes if name != "full")]
            for place, goal in ((1, "fast"), (2, "small")):
                rows[model, rate][place] += f" {picks[goal]}"
    for column in ("model", "lr", "changed %", *(name for name in sizes if name != "full")):
        table.add_column(column, overflow="fold")
    for (model, rate), cells in rows.items():
        table.add_row(model, rate, *cells)
    CONSOLE.print(table)
    return measured


def _ratio(sizes: dict[str, float], name: str) -> str:
    ratio = sizes["full"] / sizes[name]
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def size_figures(measured: dict[tuple[str, str], dict[str, float]]) -> tuple[Figures, Bars]:
    """The figures of the worse model."""
    reference = [sizes for (_, rate), sizes in measured.items() if rate == REFERENCE]
    figures = {
        "fast_over_xor": min(sizes[XOR] / sizes["fast"] for sizes in reference),
        "fast_over_gaps_absolute": min(sizes[PULSE] / sizes["fast"] for sizes in reference),
        "small_over_xor": min(sizes[XOR] / sizes["small"] for sizes in reference),
        "small_over_independent_bound": min(sizes["independent bound"] / sizes["small"] for sizes in reference),
        "fast_ratio": min(sizes["full"] / sizes["fast"] for sizes in reference),
        "small_ratio": min(sizes["full"] / sizes["small"] for sizes in reference),
    }
    at_any_rate = min(sizes[XOR] / sizes["small"] for sizes in measured.values())
    bars = {
        "fast_over_xor": at_least(figures["fast_over_xor"], 2.1),
        "fast_over_gaps_absolute": at_least(figures["fast_over_gaps_absolute"], 2.2),
        "small_over_xor": at_least(figures["small_over_xor"], 2.8),
        "small_over_independent_bound": at_least(figures["small_over_independent_bound"], 1.0),
    }
    return figures | {"small_over_xor_any_rate": at_any_rate}, bars


def measure_speeds(recording: Recording, scale: Scale) -> dict[str, Race]:
    """Returns speeds at the reference learning rate by model, and prints the table for all learning rates."""
    table = Table(title="encode, and below it decode, GB/s of model bytes on one core: median (least–most)")
    table.add_column("lr")
    reference: dict[str, Race] = {}
    for model in recording.models:
        for rate in recording.rates(model):
            before, after = recording.step(model, rate)
            if rate == REFERENCE:
                pairs = codec.timed_chunks(before, after, scale.timed_bytes)
            else:
                pairs = codec.chunks(before, after)
            race = codec.race(pairs, scale.repeats if rate == REFERENCE else 3)
            if rate == REFERENCE:
                reference[model] = race
            if len(table.columns) == 1:
                for name in race.encoding:
                    table.add_column(name, overflow="fold")
            table.add_row(f"{model} {rate}", *(f"{race.encode(name)}\n{race.decode(name)}" for name in race.encoding))
    CONSOLE.print(table)
    for model, race in reference.items():
        scans = ", ".join(f"{name} {Spread.of(race.size, taken)}" for name, taken in race.scans.items())
        print(f"compare scan beside {model} {REFERENCE}: {scans} GB/s")
    return reference


def speed_figures(recording: Recording, scale: Scale) -> tuple[Figures, Bars]:
    """The figures of the worse model. Speeds are compared within the same turn."""
    races = list(measure_speeds(recording, scale).values())
    figures = {
        "encode_gb_s": min(race.encode("fast").median for race in races),
        "decode_gb_s": min(race.decode("fast").median for race in races),
        "small_encode_gb_s": min(race.encode("small").median for race in races),
        "small_decode_gb_s": min(race.decode("small").median for race in races),
        "compare_scan_gb_s": max(Spread.of(race.size, race.scans[race.best_scan]).median for race in races),
    }
    encode = min(faster(race.encoding["fast"], race.encoding[XOR]) for race in races)
    decode = min(faster(race.decoding["fast"], race.decoding[XOR]) for race in races)
    of_scan = min(faster(race.encoding["fast"], race.scans[race.best_scan]) for race in races)
    bars = {
        "encode_over_xor": at_least(encode, 2.0),
        "decode_over_xor": at_least(decode, 3.0),
        "encode_over_scan": at_least(of_scan, 0.40),
    }
    return figures, bars


def verify_figures(recording: Recording, scale: Scale) -> tuple[Figures, Bars]:
    """The hash alone; and on the same memory chunk table and root digest, as the store computes them."""
    pairs = codec.timed_chunks(*recording.step(recording.models[0], REFERENCE), scale.timed_bytes)
    arrays = [new for _, new in pairs]
    size = sum(array.nbytes for array in arrays)
    tensors = {str(index): HostTensor("bf16", (a.size,), a.view(np.uint8)) for index, a in enumerate(arrays)}
    taken = codec.take_turns(
        {
            "hash": lambda: [xxhash.xxh3_128_hexdigest(array.data) for array in arrays],
            "verify": lambda: root_digest(describe(tensors)),
        },
        scale.repeats,
    )
    rates = {name: Spread.of(size, seconds) for name, seconds in taken.items()}
    print(f"hash (xxh3-128): {rates['hash']} GB/s, verify: {rates['verify']} GB/s")
    ratio = faster(taken["verify"], taken["hash"])
    figures = {f"{name}_gb_s": rate.median for name, rate in rates.items()}
    return figures, {"verify_over_hash": at_least(ratio, 0.80)}


# --- the store


def end_to_end(recording: Recording, scale: Scale) -> Figures:
    """Publish and follow the recorded versions of the mixture of experts, as copies under several names."""
    model = recording.models[-1]
    versions = recording.versions(model, REFERENCE)
    size = sum(bits.nbytes for bits in versions[0].values())
    copies = max(1, round(scale.end_to_end_bytes / size))
    figures: Figures = {}
    table = Table(title=f"publish and follow, {copies * size / 1e6:.0f} MB, all threads")
    for column in ("goal", "publish GB/s", "follow GB/s", "MB", "smaller, ×"):
        table.add_column(column)
    goals: tuple[Goal, ...] = ("fast", "small", "overwrite")
    for goal in goals:
        published, followed, sent = _publish_and_follow(versions, copies, goal)
        total = copies * size
        figures[f"publish_{goal}_gb_s"], figures[f"follow_{goal}_gb_s"] = (
            total / 1e9 / published,
            total / 1e9 / followed,
        )
        rates = (f"{total / 1e9 / published:.2f}", f"{total / 1e9 / followed:.2f}")
        table.add_row(goal, *rates, f"{sent / 1e6:.2f}", f"{total / sent:.1f}")
    CONSOLE.print(table)
    return figures


def _publish_and_follow(versions: list[Version], copies: int, goal: Goal) -> tuple[float, float, float]:
    """Returns the median seconds to publish and to follow a delta, and its mean bytes."""
    published, followed, sizes = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(WeightStore(Objects.open(folder)), "main", snapshot_every=1000, goal=goal)
        follower = Follower(WeightStore(Objects.open(folder)), "main")
        for number, version in enumerate(versions):
            tensors = {
                f"{copy}.{name}": HostTensor("bf16", bits.shape, bits.reshape(-1).view(np.uint8).copy())
                for copy in range(copies)
                for name, bits in version.items()
            }
            began = time.perf_counter()
            manifest = publisher.publish(number, tensors)
            done = time.perf_counter()
            update = follower.poll()
            seen = time.perf_counter()
            assert update is not None and update.policy == manifest.policy, follower.problem
            if number:
                published.append(done - began)
                followed.append(seen - done)
                sizes.append(manifest.bytes)
    return float(np.median(published)), float(np.median(followed)), float(np.mean(sizes))


def memory_figures(recording: Recording, scale: Scale) -> tuple[Figures, Bars]:
    with tempfile.TemporaryDirectory() as folder:
        rises = weights_memory.measure(scale.memory_mebibytes, recording, Path(folder))
    model = rises["model"]
    table = Table(title=f"memory with weights of {model / _MIB:.0f} MiB, beyond what the process used before")
    for column in ("role", "peak rise, MiB", "whole copies", "beside them, MiB"):
        table.add_column(column)
    beside = {}
    for role, copies in (("publisher", 1), ("follower", 1), ("lent", 2)):
        beside[role] = (rises[role] - copies * model) / _MIB
        table.add_row(role, f"{rises[role] / _MIB:.0f}", str(copies), f"{beside[role]:.0f}")
    CONSOLE.print(table)
    figures = {f"{role}_beside_copies_mib": value for role, value in beside.items()}
    bars = {
        "publisher_beside_copy_mib": at_most(beside["publisher"], weights_memory.ALLOWANCE / _MIB),
        "follower_beside_image_mib": at_most(beside["follower"], 512),
        "lent_beside_images_mib": at_most(beside["lent"], 512),
    }
    return figures, bars


def wan_figures(recording: Recording, scale: Scale, quick: bool) -> tuple[Figures, Bars]:
    result = weights_wan.measure(scale.wan_mebibytes, recording, scale.wan_versions)
    weights_wan.report(result)
    figures = {
        "wan_sooner": result.sooner,
        "wan_delta_seconds": float(np.median(result.seconds)),
        "wan_delta_seconds_most": max(result.seconds),
        "wan_whole_seconds": result.whole_seconds,
        "wan_snapshot_seconds": result.snapshot_seconds,
    }
    return figures, {} if quick else {"wan_sooner": at_least(result.sooner, weights_wan.SOONER)}


def device_figures(quick: bool) -> tuple[Figures, Bars]:
    """With a GPU only: its kernels, measured by benchmarks.weights_device."""
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("benchmarks.weights_device") is None:
        print("device: no GPU here, not measured")
        return {}, {}
    from benchmarks import weights_device

    figures, bars = weights_device.measure(quick)
    return {f"device_{name}": value for name, value in figures.items()}, bars


def show_bars(bars: Bars) -> None:
    table = Table(title="bars")
    for column in ("", "value", "bar", "holds"):
        table.add_column(column)
    for name, bar in bars.items():
        limit = f"≥ {bar['at_least']:g}" if "at_least" in bar else f"≤ {bar['at_most']:g}"
        table.add_row(name, f"{bar['value']:.2f}", limit, "yes" if bar["holds"] else "NO")
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models, under a minute")
    parser.add_argument("--recording", type=Path, help="a folder made by benchmarks.record_deltas")
    parser.add_argument("--no-wan", action="store_true", help="leave out the slowest part")
    given = parser.parse_args()
    scale = QUICK if given.quick else FULL
    recording = Recording(given.recording or FOLDER / ("quick" if given.quick else "full"))
    if not (recording.folder / "recording.json").exists():
        command = [sys.executable, "-m", "benchmarks.record_deltas", "--out", str(recording.folder)]
        subprocess.run([*command, *(["--quick"] if given.quick else [])], check=True)
    figures, bars = size_figures(measure_sizes(recording))
    parts: list[Callable[[], tuple[Figures, Bars]]] = [
        lambda: speed_figures(recording, scale),
        lambda: verify_figures(recording, scale),
        lambda: (end_to_end(recording, scale), {}),
        lambda: memory_figures(recording, scale),
    ]
    if not given.no_wan:
        parts.append(lambda: wan_figures(recording, scale, given.quick))
    parts.append(lambda: device_figures(given.quick))
    for part in parts:
        more_figures, more_bars = part()
        figures, bars = figures | more_figures, bars | more_bars
    show_bars(bars)
    finish("weights", figures, bars)


if __name__ == "__main__":
    main()
