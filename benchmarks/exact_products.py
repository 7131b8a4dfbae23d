"""Exact products and attention on Hopper beside the fast ones, by shape and tile: microseconds, and bits that differ.

    python -m benchmarks.exact_products [--quick]

    product    torch's product of bf16 matrices, and the exact one with every tile; `*` marks the tile that is chosen
    attention  the trainer's (packed rows) and the engine's (pages, one new token per sequence), fast and exact

The bits of every tile are compared with those of the first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.output import at_most, finish

LAYERS = {  # (inputs, outputs) of the products of a layer, and of the head
    "smollm2": [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)],
    "llama_1b": [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)],
    "llama_8b": [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)],
}
ROWS = (1, 32, 256, 1024, 16384)


class Heads(NamedTuple):
    query: int
    key: int
    dim: int


HEADS = {"smollm2": Heads(9, 3, 64), "llama_1b": Heads(32, 8, 64), "llama_8b": Heads(32, 8, 128)}


def microseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=3, rep=12, return_mode="median")) * 1e3


def products(figures: dict[str, float], rows: tuple[int, ...]) -> int:
    from rollmill.models.kernels.exact_triton import TILES, fits, product, tile_of

    differing = 0
    for model, shapes in LAYERS.items():
        for inputs, outputs in shapes:
            weight = torch.randn(outputs, inputs, device="cuda").bfloat16()
            for count in rows:
                if count * outputs > 1 << 29:  # the head of a whole micro-batch is computed in chunks
                    continue
                x = torch.randn(count, inputs, device="cuda").bfloat16()
                expected = product(x, weight.t(), dtype=torch.float32, tile=TILES[1])
                chosen = tile_of(count, outputs, x)
                fast = microseconds(lambda: x @ weight.t())  # noqa: B023
                row = [f"{model} {inputs:>5} → {outputs:>5}, {count:>5} rows: torch {fast:8.1f}"]
                for tile in TILES:
                    if fits(tile, expected):
                        found = product(x, weight.t(), dtype=torch.float32, tile=tile)
                        differing += int((found != expected).sum())
                    differing += int((product(x, weight.t(), tile=tile) != expected.bfloat16()).sum())
                    taken = microseconds(lambda: product(x, weight.t(), tile=tile))  # noqa: B023
                    mark = "*" if tile is chosen else " "
                    row.append(f"{tile['ROWS']}x{tile['COLUMNS']} {taken:8.1f}{mark}")
                    if tile is chosen:
                        figures[f"{model}_{inputs}_{outputs}_{count}_slowdown"] = taken / fast
                print("  ".join(row), flush=True)
    return differing


def experts() -> int:
    """Elements of torch's grouped product that differ from the exact product of the same rows."""
    from rollmill.models.kernels.exact_triton import product

    differing = 0
    for inputs, outputs in ((1024, 1024), (512, 1024), (2048, 1536), (768, 2048)):
        weights = torch.randn(32, inputs, outputs, device="cuda").bfloat16()
        for counts in ([1] * 32, [8] * 32, [37] * 32, [0] * 31 + [999], [*range(31), 4000]):
            rows = torch.randn(sum(counts), inputs, device="cuda").bfloat16()
            ends = torch.tensor(counts).cumsum(0).int().cuda()
            grouped = torch._grouped_mm(rows, weights, offs=ends)
            single = [product(part, one) for part, one in zip(rows.split(counts), weights, strict=True)]
            differing += int((grouped != torch.cat(single)).sum())
    return differing


def attention(figures: dict[str, float]) -> int:
    from rollmill.models.kernels.attention.ordered_triton import attend_packed, attend_pages, shape_of
    from rollmill.models.kernels.attention.packed_triton import Tiles, attention_forward

    differing, page, sequences, length = 0, 16, 256, 512
    for model, (heads, kv_heads, dim) in HEADS.items():
        rows = torch.randn(8192, heads + 2 * kv_heads, dim, device="cuda").bfloat16()
        q, k, v = rows.split((heads, kv_heads, kv_heads), 1)
        tiles = Tiles([2048] * 4, "cuda")
        fast, exact = (microseconds(lambda: run(q, k, v, tiles)) for run in (attention_forward, attend_packed))  # noqa: B023
        print(f"{model} packed 4 x 2048: fast {fast:.1f}, exact {exact:.1f}")
        figures[f"{model}_packed_slowdown"] = exact / fast
        pages = sequences * length // page
        cache = torch.randn(2, pages * kv_heads * page, dim, device="cuda").bfloat16()
        table = torch.randperm(pages, device="cuda").int().view(sequences, -1)
        query = torch.randn(sequences, heads, dim, device="cuda").bfloat16()
        one = torch.tensor([(n, 1, length - 1, n) for n in range(sequences)], dtype=torch.int32, device="cuda")
        taken = []
        for high in (16, 64):
            shape = shape_of(kv_heads, heads // kv_heads, dim, dim, high)
            taken.append(microseconds(lambda: attend_pages(query, *cache, one, table, page, shape)))  # noqa: B023
        floor = cache.numel() * 2 / 4.8e12 * 1e6
        print(f"{model} pages {sequences} x {length}: fast {taken[0]:.1f}, exact {taken[1]:.1f}, floor {floor:.1f}")
        figures[f"{model}_pages_slowdown"] = taken[1] / taken[0]
        differing += _against_packed(heads, kv_heads, dim)
    return differing


def _against_packed(heads: int, kv_heads: int, dim: int) -> int:
    """Elements of a decode step over pages that differ from the same position in packed rows."""
    from rollmill.models.kernels.attention.ordered_triton import attend_packed, attend_pages, shape_of
    from rollmill.models.kernels.attention.packed_triton import Tiles

    page, length = 16, 2000
    q, k, v = (torch.randn(length, each, dim, device="cuda").bfloat16() for each in (heads, kv_heads, kv_heads))
    packed, _ = attend_packed(q, k, v, Tiles([length], "cuda"))
    keys, values = (each.view(-1, page, kv_heads, dim).transpose(1, 2).reshape(-1, dim) for each in (k, v))
    table = torch.arange(length // page, device="cuda").int()[None].contiguous()
    tiles = torch.tensor([(at, 1, at, 0) for at in range(length)], dtype=torch.int32, device="cuda")
    shape = shape_of(kv_heads, heads // kv_heads, dim, dim, 64)
    return int((attend_pages(q, keys, values, tiles, table, page, shape) != packed.flatten(1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer numbers of rows")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("needs a Hopper GPU: on a CPU there is nothing to compare")
        return finish("exact_products", {}, {})
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    differing = products(figures, ROWS[1:4:2] if quick else ROWS)
    ratios = [math.log(value) for value in figures.values()]
    figures["product_slowdown"] = math.exp(sum(ratios) / len(ratios))
    bars = {"product_differing": at_most(differing, 0)}
    bars["attention_differing"] = at_most(attention(figures), 0)
    bars["experts_differing"] = at_most(experts(), 0)
    finish("exact_products", figures, bars)


if __name__ == "__main__":
    main()
