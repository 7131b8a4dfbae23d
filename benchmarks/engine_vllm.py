"""The embedded engine beside vLLM's build for CPUs, on the same cores: tokens per second.

    python -m benchmarks.engine_vllm [--repeats N] [--new TOKENS] [--limit SECONDS] [--python PATH]

SmolLM2-135M's shape with random weights, 32 prompts of 128 tokens, sampled at temperature 1, prefill included. Ours
computes in FP32; vLLM in float32 and in bfloat16, one process each in .venv-vllm (scripts/setup-vllm). One side runs at
a time, with all cores; half of our turns come before vLLM's and half after. Every side has generated once before it is
timed. Medians are compared; `…_cpu` is tokens per second of processor time, which depends less on what else runs.

vLLM runs as its documentation for CPUs recommends, where two cores leave the choice: compiled (its default; compiled
code is kept for the next run), torch's OpenMP library preloaded, all cores for products and none kept for a scheduler
(`nobind`), scheduler and worker in one process, no prefix cache to keep, no log-probs, no seeds per request. Ours
returns log-probs.

On cores without instructions for bfloat16, that type is not compiled: vLLM's warm-up of compiled code computes as many
tokens as all prompts have, and did not end in four minutes. (Without compilation it ends there with an instruction that
an Arm Neoverse N1 does not have; then there is no rate.) A vLLM process is stopped when one of its turns, or its
warm-up, which is a small part of a turn, takes `--patience` times as long as the slowest turn of the sides before it,
or when it has not ended after `--limit` seconds. Its rate is then less than what is printed: all tokens of the turn
over the seconds that it was given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import engine
from benchmarks.output import at_least, finish
from benchmarks.train_step_peers import transformers_model
from benchmarks.train_step_shapes import SMOLLM2, draw_
from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_on
from rollmill.types import Sampling

BATCH, PROMPT = 32, 128
WARM = 8  # prompt tokens of the warm-up, and half as many new ones
_THEIRS = """
import json, os, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    prompts, new, repeats = json.load(open(sys.argv[1])), int(sys.argv[3]), int(sys.argv[4])
    model = LLM(os.path.dirname(sys.argv[1]), dtype=sys.argv[2], skip_tokenizer_init=True, max_model_len=1024,
                max_num_seqs=len(prompts), enable_prefix_caching=False, enforce_eager=sys.argv[6] == "eager")
    def generate(prompts, new):
        settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        out = model.generate(asked, settings, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in out)
    warm = int(sys.argv[5])
    print("BEGIN", time.time(), flush=True)
    generate([tokens[:warm] for tokens in prompts], warm // 2)
    for _ in range(repeats):
        print("BEGIN", time.time(), flush=True)
        started, used = time.perf_counter(), time.process_time()
        tokens = generate(prompts, new)
        print("RATE", tokens / (time.perf_counter() - started), tokens / (time.process_time() - used), flush=True)
"""


class Rate(NamedTuple):
    tokens_s: float
    tokens_cpu_s: float | None  # None: it was stopped, and its rate is less than `tokens_s`


async def ours(cell: engine.Cell, model: Decoder, prompts: list[list[int]], turns: int) -> list[Rate]:
    rates = []
    async with engine._engine(cell.model, "cpu", cell.batch, cell.prompt + cell.new) as own:
        await own.apply(engine._update(model))

        async def generate(name: str, prompts: list[list[int]], new: int) -> None:
            sampling = Sampling(max_tokens=new, seed=1)
            await asyncio.gather(*(engine._ask(own, f"{name}.{n}", one, sampling) for n, one in enumerate(prompts)))

        await generate("warm", [tokens[:WARM] for tokens in prompts], WARM // 2)
        for turn in range(turns):
            # another first token, so that nothing of earlier turns is found in the KV cache
            asked = [[turn + 1, *tokens[1:]] for tokens in prompts]
            before, began, used = own.metrics()["sampled_tokens_total"], time.perf_counter(), time.process_time()
            await generate(str(turn), asked, cell.new)
            tokens = own.metrics()["sampled_tokens_total"] - before
            rates.append(Rate(tokens / (time.perf_counter() - began), tokens / (time.process_time() - used)))
    return rates


def has_bf16() -> bool:
    """Whether the cores have instructions for bfloat16."""
    return "bf16" in Path("/proc/cpuinfo").read_text()


def environment(python: Path) -> dict[str, str]:
    """Of a vLLM process. It has all cores for its products."""
    own = {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    libraries = sorted(python.parent.parent.glob("lib/python3*/site-packages/torch*/**/libgomp*.so*"))
    return os.environ | own | ({"LD_PRELOAD": str(libraries[0].absolute())} if libraries else {})


def theirs(
    python: Path, directory: Path, dtype: str, new: int, turns: int, limit: float, most_seconds: float
) -> list[Rate]:
    """Of a fresh vLLM process. It is stopped after `limit` seconds, or when one turn takes more than `most_seconds`."""
    command = [str(python), "-c", _THEIRS, str(directory / "prompts.json"), dtype, str(new), str(turns), str(WARM)]
    command.append("eager" if dtype == "bfloat16" and not has_bf16() else "compiled")
    said, errors = directory / "said.txt", directory / "errors.txt"
    with said.open("wb") as out, errors.open("wb") as problems:
        process = subprocess.Popen(
            command, env=environment(python), stdout=out, stderr=problems, start_new_session=True
        )
    started, stopped, begun = time.time(), False, 0.0
    while process.poll() is None and not stopped:
        time.sleep(0.2)
        lines = [line.split() for line in said.read_text(errors="replace").splitlines()]
        begun = float(lines[-1][1]) if lines and lines[-1][:1] == ["BEGIN"] else 0.0
        stopped = time.time() - started > limit or (begun > 0 and time.time() - begun > most_seconds)
    given = time.time() - begun
    if stopped:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
    lines = [line.split() for line in said.read_text(errors="replace").splitlines()]
    rates = [Rate(float(line[1]), float(line[2])) for line in lines if line[:1] == ["RATE"]]
    if stopped and begun and len(rates) < turns:
        rates.append(Rate(BATCH * new / given, None))
    if not rates and process.returncode == -signal.SIGILL:
        print(f"{dtype} does not run: vLLM ended with an instruction that these cores do not have", flush=True)
        return []
    if not rates or (len(rates) < turns and not stopped):  # one that ended by itself broke: that is no rate
        told = errors.read_text(errors="replace")[-1500:]
        raise SystemExit(f"engine_vllm: vLLM with {dtype} ended with {process.returncode} and no rate: {told}")
    return rates


def told(side: str, rates: list[Rate]) -> list[Rate]:
    for one in rates:
        used = f"{one.tokens_cpu_s:.1f} per CPU second" if one.tokens_cpu_s else "less than that: stopped"
        print(f"{side} {one.tokens_s:.1f}, {used}", flush=True)
    return rates


def measure(options: argparse.Namespace) -> dict[str, list[Rate]]:
    cell = engine.Cell("dense", SMOLLM2, BATCH, PROMPT, options.new)
    model = decoder_on(torch.device("cpu"), cell.model)
    draw_(model, 1)
    prompts = np.random.default_rng(0).integers(1, cell.model.vocab_size, (BATCH, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        peer: Any = transformers_model(model)
        peer.save_pretrained(directory)
        del peer
        (directory / "prompts.json").write_text(json.dumps(prompts))
        half = options.repeats // 2
        rates = {"ours": told("ours", asyncio.run(ours(cell, model, prompts, options.repeats - half)))}
        for dtype in ("float32", "bfloat16"):
            slowest = min(one.tokens_s for each in rates.values() for one in each)
            most = options.patience * BATCH * options.new / slowest
            rates[dtype] = told(
                dtype, theirs(options.python, directory, dtype, options.new, max(half, 1), options.limit, most)
            )
        if half:
            rates["ours"] += told("ours", asyncio.run(ours(cell, model, prompts, half)))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="turns of ours; vLLM has half as many in each type")
    parser.add_argument("--new", type=int, default=64, help="sampled tokens per prompt")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one vLLM process, its start included")
    parser.add_argument("--patience", type=float, default=4.0, help="see above")
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="of vLLM's environment")
    options = parser.parse_args()
    if not options.python.exists():
        raise SystemExit(f"engine_vllm: there is no {options.python}; scripts/setup-vllm makes it")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    figures: dict[str, float] = {}
    rates = {side: own for side, own in measure(options).items() if own}
    for side, own in rates.items():
        whole, used = [each.tokens_s for each in own], [each.tokens_cpu_s for each in own if each.tokens_cpu_s]
        figures |= {f"{side}_tokens_s": statistics.median(whole), f"{side}_min": min(whole), f"{side}_max": max(whole)}
        figures |= {f"{side}_cpu": statistics.median(used)} if used else {}
    ratio = figures["ours_tokens_s"] / max(figures[f"{side}_tokens_s"] for side in rates if side != "ours")
    for key, value in figures.items():
        print(f"{key:24} {value:10.1f}")
    finish("engine_vllm", figures | {"times_vllm": ratio}, {"times_vllm": at_least(ratio, 2)})


if __name__ == "__main__":
    main()
