"""Deltas on the device: difference, streams, apply and audit on CUDA, compared with plain torch.

    python -m benchmarks.weights_device [--quick]

The weights and their update are SYNTHETIC: normally distributed bfloat16 numbers in the shapes of a Llama. 1.2 % of the
elements change, 89 % of these by ±1 unit in the last place. GB/s are of model bytes: all bytes of the new version, not
only the changed ones. Without a CUDA device a small version runs on the CPU, without bars.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.output import at_least, at_most, finish
from rollmill.models.updates import delta
from rollmill.weights.format.chunk_audit import audit_host
from rollmill.weights.format.codings import encode_as
from rollmill.weights.format.tensors import CHUNK_ELEMENTS, HostTensor, chunk_ranges
from rollmill.weights.reading.patches import Patch

DENSITY, ONE_ULP = 0.012, 0.89
Model = dict[str, Tensor]


class Measured(NamedTuple):
    """Seconds."""

    median: float
    least: float
    most: float


def measure(quick: bool) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The figures, and the bars if there is a device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mebibytes = 2048 if device.type == "cuda" else 8 if quick else 64
    base = _weights(mebibytes << 19, device)
    new = {name: _updated(tensor) for name, tensor in base.items()}
    size = sum(tensor.nbytes for tensor in new.values())
    repeats = 5 if quick else 20
    figures: dict[str, float] = {
        "model_bytes": size,
        "tensors": len(new),
        "density": sum(int((base[name] != new[name]).sum()) for name in new) / (size // 2),
    }
    _encode(base, new, repeats, figures)
    _apply(base, new, repeats, figures)
    _otherwise(base, new, repeats, figures)
    if device.type == "cpu":
        return figures, {}
    return figures, {
        "diff_streams_gb_s": at_least(figures["diff_streams_gb_s"], 500),
        "apply_gb_s": at_least(figures["apply_gb_s"], 1000),
        "pause_ms": at_most(figures["pause_ms"], 10),
    }


def _encode(base: Model, new: Model, repeats: int, figures: dict[str, float]) -> None:
    size = sum(tensor.nbytes for tensor in new.values())
    pairs = [
        (base[name].view(-1)[a:b], new[name].view(-1)[a:b]) for name in new for a, b in chunk_ranges(new[name].shape)
    ]
    groups = _grouped(pairs)
    differences = delta.Differences(groups)
    _rate("diff_streams", size, _timed(differences.streams, repeats), figures)
    _rate("encode", size, _timed(differences.encode, max(repeats // 2, 3)), figures)
    payloads = differences.encode()
    figures["encoded_ratio"] = size / sum(len(encoded.payload) for encoded in payloads if encoded)
    for which in (0, len(groups) // 2, -1):  # check the bytes before timing them
        old_bits, new_bits = (np.concatenate([_bits(pair[side]) for pair in groups[which]]) for side in (0, 1))
        encoded = payloads[which]
        assert encoded is not None
        assert encoded.payload == encode_as("sparse", old_bits, new_bits, 2)


def _apply(base: Model, new: Model, repeats: int, figures: dict[str, float]) -> None:
    size = sum(tensor.nbytes for tensor in new.values())
    host = {name: HostTensor("bf16", tuple(t.shape), _bits(t).view(np.uint8)) for name, t in new.items()}
    audits = {name: audit_host(tensor.data, 2) for name, tensor in host.items()}
    patches = {name: _patches(base[name].view(-1), new[name].view(-1)) for name in new}
    parameters = {name: tensor.clone() for name, tensor in base.items()}
    preparing, pauses = [], []
    for _ in range(repeats):  # as in an engine: every update is prepared and applied once
        for name, parameter in parameters.items():
            parameter.copy_(base[name])
        started = time.perf_counter()
        prepared = delta.prepare(parameters, patches, host, audits)
        preparing.append(time.perf_counter() - started)
        _synchronize()
        started = time.perf_counter()
        assert prepared.apply() == audits
        pauses.append(time.perf_counter() - started)
        assert all(torch.equal(parameters[name].view(torch.int16), new[name].view(torch.int16)) for name in new)
    figures["prepare_seconds"] = statistics.median(preparing)
    figures |= {"pause_ms": statistics.median(pauses) * 1e3, "pause_ms_most": max(pauses) * 1e3}
    _rate("apply", size, _timed(delta.prepare(parameters, patches, host).apply, repeats), figures)
    _rate("audit", size, _timed(delta.prepare(parameters, {}, host, audits).apply, repeats), figures)


def _otherwise(base: Model, new: Model, repeats: int, figures: dict[str, float]) -> None:
    """The same with torch alone."""
    size = sum(tensor.nbytes for tensor in new.values())
    cuda = next(iter(new.values())).is_cuda
    host = [tensor.cpu().pin_memory() if cuda else tensor.clone() for tensor in new.values()]
    targets = [torch.empty_like(tensor) for tensor in new.values()]

    def copy() -> None:
        for target, source in zip(targets, host, strict=True):
            target.copy_(source, non_blocking=True)

    def nonzero() -> None:
        for name in new:
            torch.nonzero(base[name].view(-1) != new[name].view(-1))

    full = _timed(copy, max(repeats // 4, 3))
    figures["full_copy_ms"] = full.median * 1e3
    _rate("full_copy", size, full, figures)
    _rate("torch_nonzero", size, _timed(nonzero, max(repeats // 4, 3)), figures)


def _weights(elements: int, device: torch.device) -> Model:
    """Layers of a Llama with about this many elements."""
    width = 2048 if elements >= 1 << 27 else 256
    inner, vocabulary = width * 11 // 4, 16 * width
    layer = {
        "attention_norm": (width,),
        "q": (width, width),
        "k": (width // 4, width),
        "v": (width // 4, width),
        "o": (width, width),
        "mlp_norm": (width,),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }
    in_layer = sum(int(np.prod(shape)) for shape in layer.values())
    layers = max(1, round((elements - 2 * vocabulary * width) / in_layer))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width), "head": (vocabulary, width)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    torch.manual_seed(0)
    return {
        name: (torch.randn(shape, device=device, dtype=torch.float32) * 0.02).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def _updated(tensor: Tensor) -> Tensor:
    chance = torch.rand(tensor.shape, device=tensor.device)
    # of the changed elements, the share ONE_ULP moves by one and the others by two to five, in a random direction
    steps = torch.where(chance < DENSITY * ONE_ULP, 1, (chance * 1e7).to(torch.int16) % 4 + 2)
    steps = torch.where(torch.rand_like(chance) < 0.5, -steps, steps) * (chance < DENSITY)
    return (tensor.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)


def _grouped(pairs: list[delta.Pair]) -> list[list[delta.Pair]]:
    """Chunks grouped as payloads cover them: small ones together."""
    groups: list[list[delta.Pair]] = [[]]
    filled = 0
    for pair in pairs:
        if filled and filled + pair[0].numel() > CHUNK_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(pair)
        filled += pair[0].numel()
    return groups


def _patches(base: Tensor, new: Tensor) -> list[Patch]:
    patches = []
    for a, b in chunk_ranges(new.shape):
        indices, values = delta.changes(base[a:b], new[a:b])
        patches.append(Patch(a, indices.cpu().numpy().view(np.uint32), _bits(values)))
    return patches


def _bits(tensor: Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.int16).cpu().numpy().view(np.uint16)


def _timed(call: Callable[[], object], repeats: int) -> Measured:
    """Times the call with everything it started on the device. The first two calls are not counted."""
    seconds = []
    for _ in range(repeats + 2):
        _synchronize()
        started = time.perf_counter()
        call()
        _synchronize()
        seconds.append(time.perf_counter() - started)
    seconds = seconds[2:]
    return Measured(statistics.median(seconds), min(seconds), max(seconds))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rate(key: str, size: int, measured: Measured, figures: dict[str, float]) -> None:
    figures[f"{key}_gb_s"] = size / 1e9 / measured.median
    figures[f"{key}_gb_s_least"] = size / 1e9 / measured.most
    figures[f"{key}_gb_s_most"] = size / 1e9 / measured.least


def print_table(figures: dict[str, float]) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(
        f"{device}: {figures['model_bytes'] / 2**20:.0f} MiB of bfloat16 in {figures['tensors']:.0f} tensors, ", end=""
    )
    print(f"synthetic update of {figures['density']:.2%}, payloads {figures['encoded_ratio']:.0f}x smaller\n")
    print(f"{'GB/s of model bytes':<44}{'median':>10}{'least':>10}{'most':>10}")
    for key, what in (
        ("diff_streams", "difference and streams"),
        ("torch_nonzero", "  torch: != and nonzero, indices only"),
        ("encode", "payloads on the host, compressed"),
        ("apply", "apply changes that are on the device"),
        ("full_copy", "  torch: copy all weights from the host"),
        ("audit", "audit"),
    ):
        row = (figures[f"{key}_gb_s{which}"] for which in ("", "_least", "_most"))
        print(f"{what:<44}" + "".join(f"{value:>10.1f}" for value in row))
    print(f"\npause, apply and audit: {figures['pause_ms']:.2f} ms (at most {figures['pause_ms_most']:.2f}); ", end="")
    print(f"prepared in {figures['prepare_seconds']:.3f} s; copying all weights: {figures['full_copy_ms']:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and a smaller model on a CPU")
    figures, bars = measure(parser.parse_args().quick)
    print_table(figures)
    finish("weights_device", {key: round(value, 4) for key, value in figures.items()}, bars)


if __name__ == "__main__":
    main()
