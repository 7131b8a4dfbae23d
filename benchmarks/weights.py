"""Weight deltas on recorded steps of RL, compared with the alternatives; then over long-distance links.

    python -m benchmarks.weights [--quick] [--recording FOLDER] [--no-wan]

Sizes and speeds on one core are measured in one run on the same recorded versions (made by
`benchmarks.weights_recordings` if there are none), then three regions across slow links (`benchmarks.weights_wan`).
`--quick` uses smaller recordings and models: it shows that everything runs, and leaves out the bars for large models.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import weights_codec as codec
from benchmarks import weights_wan
from benchmarks.output import at_least, finish
from benchmarks.weights_codec import FOLDER, PULSE, REFERENCE, XOR, Race, Recording, Spread, faster

CONSOLE = Console(width=160)
_MIB = 1 << 20
Figures = dict[str, float]
Bars = dict[str, dict[str, Any]]


class Scale(NamedTuple):
    """The amount of work."""

    timed_bytes: int  # at the reference learning rate; at the others each recording once
    repeats: int
    wan_mebibytes: int
    wan_versions: int


FULL = Scale(400 << 20, 7, 1024, 5)
QUICK = Scale(64 << 20, 3, 64, 2)


# --- sizes and speeds


def measure_sizes(recording: Recording) -> dict[tuple[str, str], dict[str, float]]:
    """Returns sizes by model and learning rate, and prints the table of ratios."""
    table = Table(title="times smaller than the whole weights")
    measured, rows = {}, {}
    for model in recording.steps:
        for rate in recording.steps[model]:
            pairs = codec.chunks(*recording.step(model, rate))
            sizes = measured[model, rate] = codec.sizes(pairs)
            changed = sum(np.count_nonzero(old != new) for old, new in pairs) / sum(new.size for _, new in pairs)
            rows[model, rate] = [f"{100 * changed:.2f}", *(_ratio(sizes, name) for name in sizes if name != "full")]
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
    for model in recording.steps:
        for rate in recording.steps[model]:
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
        print(f"compare scan beside {model} {REFERENCE}: {Spread.of(race.size, race.scanning)} GB/s")
    return reference


def speed_figures(recording: Recording, scale: Scale) -> tuple[Figures, Bars]:
    """The figures of the worse model. Speeds are compared within the same turn."""
    races = list(measure_speeds(recording, scale).values())
    figures = {
        "encode_gb_s": min(race.encode("fast").median for race in races),
        "decode_gb_s": min(race.decode("fast").median for race in races),
        "small_encode_gb_s": min(race.encode("small").median for race in races),
        "small_decode_gb_s": min(race.decode("small").median for race in races),
        "compare_scan_gb_s": max(Spread.of(race.size, race.scanning).median for race in races),
    }
    encode = min(faster(race.encoding["fast"], race.encoding[XOR]) for race in races)
    decode = min(faster(race.decoding["fast"], race.decoding[XOR]) for race in races)
    of_scan = min(faster(race.encoding["fast"], race.scanning) for race in races)
    bars = {
        "encode_over_xor": at_least(encode, 2.0),
        "decode_over_xor": at_least(decode, 3.0),
        "encode_over_scan": at_least(of_scan, 0.40),
    }
    return figures, bars


# --- the store


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models, under a minute")
    parser.add_argument("--recording", type=Path, help="a folder made by benchmarks.weights_recordings")
    parser.add_argument("--no-wan", action="store_true", help="leave out the slowest part")
    given = parser.parse_args()
    scale = QUICK if given.quick else FULL
    recording = Recording(given.recording or FOLDER / ("quick" if given.quick else "full"))
    if not (recording.folder / "recording.json").exists():
        command = [sys.executable, "-m", "benchmarks.weights_recordings", "--out", str(recording.folder)]
        subprocess.run([*command, *(["--quick"] if given.quick else [])], check=True)
    figures, bars = size_figures(measure_sizes(recording))
    parts: list[Callable[[], tuple[Figures, Bars]]] = [
        lambda: speed_figures(recording, scale),
    ]
    if not given.no_wan:
        parts.append(lambda: wan_figures(recording, scale, given.quick))
    for part in parts:
        more_figures, more_bars = part()
        figures, bars = figures | more_figures, bars | more_bars
    finish("weights", figures, bars)


if __name__ == "__main__":
    main()
