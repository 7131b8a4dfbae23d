"""The embedded engine beside `transformers`: tokens per second, first tokens of a group.

    python -m benchmarks.engine [--quick] [--ours] [--only CELL …]

Same weights, prompts and lengths for all, prefill included, sampled at temperature 1 in one run: our engine, `generate`
of transformers, and its continuous batching where it runs. Some cells are also measured with the KV cache in FP8;
`benchmarks.exact` has exact numerics. On CUDA also the memory-bandwidth floor: the bytes of all weights and of the mean
KV cache, read once per decode step at 4.8 TB/s. There only some cells have peers, which take half a minute each. On a
CPU the models are smaller, without floor.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.output import at_least, finish
from benchmarks.train_step_models import LLAMA_1B, MIXTURE, SMOLLM2, draw_, has, transformers_model
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.models.counts import all_parameters, cache_numbers
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import load_host, to_host
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

MEMORY_BYTES_PER_SECOND = 4.8e12  # of an H200
GROUP = 16
LATENT = SMOLLM2 | {  # four layers of DeepSeek-V2-Lite's width, dense
    "vocab_size": 4096, "layers": 4, "width": 2048, "heads": 16, "kv_heads": 16, "head_dim": 192, "mlp_width": 2816,
    "latent": {"kv_rank": 512, "plain_dim": 128, "rope_dim": 64, "value_dim": 128},
}  # fmt: skip
SMALL = SMOLLM2 | {"vocab_size": 4096, "layers": 4, "width": 192, "heads": 3, "kv_heads": 1, "mlp_width": 512}
BARS = {  # on one H200; (tokens/s, share of the floor, times transformers), None: no bar
    ("dense", 1): (1600.0, None, None),
    ("dense", 256): (None, 0.15, 30.0),
    ("dense", 1024): (None, 0.30, None),
    ("mixture", 256): (None, 0.12, None),
    ("mixture", 1024): (None, 0.25, None),
    ("llama-1b", 256): (None, 0.40, None),
}


class Cell(NamedTuple):
    """`batch` prompts of `prompt` tokens, `new` sampled tokens each."""

    name: str
    shape: dict[str, Any]
    batch: int
    prompt: int
    new: int
    peers: tuple[str, ...] = ("transformers", "transformers_continuous")
    fp8_kv: bool = False  # also with keys and values in FP8

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.model_validate(self.shape)

    def floor_seconds(self) -> float:
        """Of one decode step."""
        model, element = self.model, 2
        held = self.batch * (self.prompt + self.new / 2) * cache_numbers(model) * element
        return (all_parameters(model) * element + held) / MEMORY_BYTES_PER_SECOND


def cells(device: Device, quick: bool) -> list[Cell]:
    if device == "cuda":
        dense = [Cell("dense", SMOLLM2, batch, 128, 256, (), fp8_kv=batch == 1024) for batch in (1, 32, 1024)]
        mixture = [Cell("mixture", MIXTURE, batch, 128, 256, ()) for batch in (256, 1024)]
        llama = Cell("llama-1b", LLAMA_1B, 256, 128, 256, ("transformers",))
        latent = Cell("latent", LATENT, 256, 1024, 256, (), fp8_kv=True)
        own = Cell("dense", SMOLLM2, 256, 128, 256)
        return [*dense, own, *mixture, llama, latent][: 4 if quick else None]
    shape, new = (SMALL, 16) if quick else (SMOLLM2, 32)
    name = "small" if quick else "dense"
    found = [Cell(name, shape, batch, 32, new) for batch in (1, 32, 128)]
    return found if quick else [*found, Cell("latent", LATENT, 4, 512, 32, ())]


def measure(
    device: Device, quick: bool, only: list[str] | None, peers: bool = True
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    for cell in cells(device, quick):
        if only is None or f"{cell.name}_{cell.batch}" in only:
            _measure_cell(cell if peers else cell._replace(peers=()), device, figures, bars)
            print({name: value for name, value in figures.items() if name.startswith(f"{cell.name}_{cell.batch}_")})
    if only is not None and "group" not in only:
        return figures, bars
    prompt = 2048 if device == "cuda" else 256 if quick else 1024
    shape = (SMOLLM2 if device == "cuda" else SMALL) | {"max_context": 4096}
    together, apart = (asyncio.run(_first_tokens(shape, device, prompt, shared)) for shared in (True, False))
    figures |= {"group_first_tokens_s": together, "apart_first_tokens_s": apart, "group_speedup": apart / together}
    bars["group_speedup"] = at_least(apart / together, 8)
    return figures, bars


def _measure_cell(cell: Cell, device: Device, figures: dict[str, float], bars: dict[str, dict[str, Any]]) -> None:
    model, key = decoder_on(torch.device(device), cell.model), f"{cell.name}_{cell.batch}"
    draw_(model, 1)
    prompts = np.random.default_rng(0).integers(1, cell.model.vocab_size, (cell.batch, cell.prompt)).tolist()
    figures[f"{key}_ours"] = ours = asyncio.run(_ours(cell, model, device, prompts))
    if cell.fp8_kv:
        figures[f"{key}_fp8_kv"] = asyncio.run(_ours(cell, model, device, prompts, fp8_kv=True))
    peers = _peers(cell, model, prompts) if cell.peers and has("transformers") else {}
    figures |= {f"{key}_{name}": value for name, value in peers.items()}
    tokens, share, times = BARS.get((cell.name, cell.batch), (None, None, None)) if device == "cuda" else (None,) * 3
    if device == "cuda":
        figures[f"{key}_floor_share"] = ours / (cell.batch / cell.floor_seconds())
    if tokens:
        bars[f"{key}_ours"] = at_least(ours, tokens)
    if share:
        bars[f"{key}_floor_share"] = at_least(figures[f"{key}_floor_share"], share)
    if times and "transformers" in peers:
        bars[f"{key}_times_transformers"] = at_least(ours / peers["transformers"], times)


async def _ours(cell: Cell, model: Decoder, device: Device, prompts: list[list[int]], fp8_kv: bool = False) -> float:
    """Tokens per second."""
    async with _engine(cell.model, device, cell.batch, cell.prompt + cell.new, fp8_kv) as engine:
        await engine.apply(_update(model))
        sampling = Sampling(max_tokens=cell.new, seed=1)
        warm = Sampling(max_tokens=24, seed=1)
        for turn in range(4):  # steps are recorded when they return for the second time
            await asyncio.gather(
                *(
                    _ask(engine, f"w{turn}.{n}", [*tokens[turn + 1 :], *[turn] * (turn + 1)], warm)
                    for n, tokens in enumerate(prompts)
                )
            )
        before = engine.metrics()["sampled_tokens_total"]
        started = time.perf_counter()
        # other first tokens, so that nothing of the warm-up is found in the KV cache
        await asyncio.gather(*(_ask(engine, f"s{n}", tokens[::-1], sampling) for n, tokens in enumerate(prompts)))
        return (engine.metrics()["sampled_tokens_total"] - before) / (time.perf_counter() - started)


async def _first_tokens(shape: dict[str, Any], device: Device, prompt: int, shared: bool) -> float:
    """Seconds until all requests of a group have their first token: on one prompt, or on prompts of their own. The
    median of seven groups after four others."""
    config = ModelConfig.model_validate(shape)
    model = decoder_on(torch.device(device), config)
    draw_(model, 1)
    random = np.random.default_rng(1)
    async with _engine(config, device, GROUP, prompt + 16) as engine:
        await engine.apply(_update(model))
        seconds = []
        for turn in range(11):  # in the first ones kernels are compiled, and steps are recorded when they return
            prompts = random.integers(1, config.vocab_size, (GROUP, prompt)).tolist()
            group = [prompts[0] if shared else tokens for tokens in prompts]
            started = time.perf_counter()
            firsts = await asyncio.gather(*(_first(engine, f"s{turn}.{n}", tokens) for n, tokens in enumerate(group)))
            seconds.append(max(firsts) - started)
        return float(np.median(seconds[4:]))


async def _first(engine: EmbeddedEngine, session: str, tokens: list[int]) -> float:
    """When the first of eight tokens came. Returns when all have come."""
    request = GenerateRequest(session, tokens, Sampling(max_tokens=8))
    times = [time.perf_counter() async for _ in engine.generate(request, stream=True)]
    return times[0]


def _engine(model: ModelConfig, device: Device, batch: int, context: int, fp8_kv: bool = False) -> EmbeddedEngine:
    config = EngineConfig(
        fp8_kv=fp8_kv,
        max_batch=batch,
        cache_tokens=(batch + 1) * -(-context // 16) * 16,
        prefill_chunk=16384 if device == "cuda" else 2048,
        threads=torch.get_num_threads(),
    )
    return EmbeddedEngine(model, config, device=device)


async def _ask(engine: EmbeddedEngine, session: str, tokens: list[int], sampling: Sampling) -> None:
    async for _ in engine.generate(GenerateRequest(session, tokens, sampling)):
        pass


def _update(model: Decoder) -> Update:
    tensors = dict(to_host(model.state_dict()))
    load_host(model, tensors)  # peers compute with the same numbers
    policy = PolicyRef("main", 0, "bf16", root_digest(describe(tensors)))
    return Update(policy, tensors, None, None, 0, {}, time.time())


def _peers(cell: Cell, model: Decoder, prompts: list[list[int]]) -> dict[str, float]:
    """Tokens per second of `transformers`, by way of generating. One that fails here is named and left out."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    theirs: Any = transformers_model(model).eval()
    settings = {"do_sample": True, "top_k": 0, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": cell.new}

    def whole() -> int:
        tokens_BT = torch.tensor(prompts, device=model.embedding.device)
        config = GenerationConfig(**settings, min_new_tokens=cell.new)
        out: torch.Tensor = theirs.generate(tokens_BT, generation_config=config)
        return (out.shape[1] - cell.prompt) * len(out)

    def continuous() -> int:
        # sizes by hand: its own choice on a CPU takes all memory there is
        pages = cell.batch * -(-(cell.prompt + cell.new) // 256) + 1
        sizes = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=2048)
        out = theirs.generate_batch(
            inputs=prompts, generation_config=GenerationConfig(**settings), continuous_batching_config=sizes
        )
        return sum(len(one.generated_tokens) for one in out.values())

    ways: dict[str, Callable[[], int]] = {"transformers": whole, "transformers_continuous": continuous}
    found = {}
    for name in cell.peers:
        way = ways[name]
        try:
            with torch.no_grad():
                started = time.perf_counter()
                sampled = way()
                if sampled != cell.batch * cell.new:
                    raise RuntimeError(f"{sampled} tokens instead of {cell.batch * cell.new}; its log says why")
                found[name] = sampled / (time.perf_counter() - started)
        except Exception as error:  # a peer that does not run on this host
            print(f"{name} does not run here: {error!r:.200}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cells, smaller models")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="dense_256 for example, or group")
    parser.add_argument("--ours", action="store_true", help="without peers")
    options = parser.parse_args()
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    figures, bars = measure(device, options.quick, options.only, not options.ours)
    for name, value in figures.items():
        print(f"{name:44} {value:12.4g}")
    finish("engine", figures, bars)


if __name__ == "__main__":
    main()
