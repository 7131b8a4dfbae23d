"""The embedded engine beside vLLM's build for CPUs, on the same cores: tokens per second.

    python -m benchmarks.engine_vllm [--repeats N] [--new TOKENS] [--limit SECONDS]

SmolLM2-135M's shape with random weights, 32 prompts of 128 tokens, sampled at temperature 1, prefill included. Ours
computes in FP32; vLLM in float32 and in bfloat16, each in a process of its own in .venv-vllm (scripts/setup-vllm).
The sides take turns, and each has generated once before it is timed. Medians are compared; `…_cpu` is tokens per second
of processor time, which depends less on what else runs on the cores. A vLLM process that has not
ended after `--limit` seconds is stopped (bfloat16 on cores without such instructions may take very long): then its rate
is less than what is printed, all tokens over the seconds that it was given to generate them.
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
PYTHON = Path(".venv-vllm/bin/python")
_THEIRS = """
import glob, json, os, sys, time
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
from vllm import LLM, SamplingParams
def cpu():  # of this process and its workers, which are one session
    total = 0
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = open(path).read().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == os.getpid())
    return total / os.sysconf("SC_CLK_TCK")
if __name__ == "__main__":
    prompts, new = json.load(open(sys.argv[1])), int(sys.argv[3])
    model = LLM(os.path.dirname(sys.argv[1]), dtype=sys.argv[2], skip_tokenizer_init=True, max_model_len=1024,
                max_num_seqs=len(prompts), enable_prefix_caching=False)
    settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, seed=1, detokenize=False)
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    print("READY", time.time(), flush=True)
    model.generate(asked, settings, use_tqdm=False)
    print("READY", time.time(), flush=True)
    started, used = time.perf_counter(), cpu()
    out = model.generate(asked, settings, use_tqdm=False)
    seconds, used = time.perf_counter() - started, cpu() - used
    tokens = sum(len(one.outputs[0].token_ids) for one in out)
    print("RATE", tokens / seconds, tokens / used, flush=True)
"""


class Rate(NamedTuple):
    tokens_s: float
    tokens_cpu_s: float | None  # None: it was stopped, and its rate is less than `tokens_s`


async def ours(cell: engine.Cell, model: Decoder, prompts: list[list[int]]) -> Rate:
    async with engine._engine(cell.model, "cpu", cell.batch, cell.prompt + cell.new) as own:
        await own.apply(engine._update(model))
        sampling = Sampling(max_tokens=cell.new, seed=1)
        for turn in range(2):
            # other first tokens, so that nothing of the first turn is found in the KV cache
            asked = [tokens[:: 1 - 2 * turn] for tokens in prompts]
            before, began, used = own.metrics()["sampled_tokens_total"], time.perf_counter(), time.process_time()
            await asyncio.gather(*(engine._ask(own, f"{turn}.{n}", one, sampling) for n, one in enumerate(asked)))
            tokens = own.metrics()["sampled_tokens_total"] - before
        return Rate(tokens / (time.perf_counter() - began), tokens / (time.process_time() - used))


def theirs(directory: Path, dtype: str, new: int, limit: float) -> Rate:
    """Of a fresh vLLM process."""
    command = [str(PYTHON), "-c", _THEIRS, str(directory / "prompts.json"), dtype, str(new)]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    said, errors = directory / "said.txt", directory / "errors.txt"
    with said.open("wb") as out, errors.open("wb") as problems:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=problems, start_new_session=True)
    stopped = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        stopped = True
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
    lines = [line.split() for line in said.read_text(errors="replace").splitlines()]
    if rates := [line[1:] for line in lines if line[:1] == ["RATE"]]:
        return Rate(*map(float, rates[0]))
    ready = [line[1] for line in lines if line[:1] == ["READY"]]
    if stopped and ready:  # one that ended by itself broke: that is no rate
        return Rate(BATCH * new / (time.time() - float(ready[-1])), None)
    told = errors.read_text(errors="replace")[-800:]
    raise SystemExit(f"engine_vllm: vLLM with {dtype} ended with {process.returncode} and no rate: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--new", type=int, default=64, help="sampled tokens per prompt")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one vLLM process, its start included")
    options = parser.parse_args()
    if not PYTHON.exists():
        raise SystemExit("engine_vllm: there is no .venv-vllm here; scripts/setup-vllm makes it")
    cell = engine.Cell("dense", SMOLLM2, BATCH, PROMPT, options.new)
    model = decoder_on(torch.device("cpu"), cell.model)
    draw_(model, 1)
    prompts = np.random.default_rng(0).integers(1, cell.model.vocab_size, (BATCH, PROMPT)).tolist()
    rates: dict[str, list[Rate]] = {"ours": [], "float32": [], "bfloat16": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        peer: Any = transformers_model(model)
        peer.save_pretrained(directory)
        del peer
        (directory / "prompts.json").write_text(json.dumps(prompts))
        for turn in range(options.repeats):
            for side, own in rates.items():
                if side == "ours":
                    own.append(asyncio.run(ours(cell, model, prompts)))
                else:
                    own.append(theirs(directory, side, options.new, options.limit))
                told = f"{own[-1].tokens_cpu_s:.1f} per CPU second" if own[-1].tokens_cpu_s else "less than that"
                print(f"turn {turn + 1}: {side} {own[-1].tokens_s:.1f}, {told}", flush=True)
    figures: dict[str, float] = {}
    for side, own in rates.items():
        whole, used = [each.tokens_s for each in own], [each.tokens_cpu_s for each in own if each.tokens_cpu_s]
        figures |= {f"{side}_tokens_s": statistics.median(whole), f"{side}_min": min(whole), f"{side}_max": max(whole)}
        figures |= {f"{side}_cpu": statistics.median(used)} if used else {}
    ratio = figures["ours_tokens_s"] / max(figures["float32_tokens_s"], figures["bfloat16_tokens_s"])
    for key, value in figures.items():
        print(f"{key:24} {value:10.1f}")
    finish("engine_vllm", figures | {"times_vllm": ratio}, {"times_vllm": at_least(ratio, 2)})


if __name__ == "__main__":
    main()
